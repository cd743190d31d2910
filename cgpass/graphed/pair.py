"""`Pair`: a recorded forward, and what was recorded of its backward.

Note [What a call of a pair does]
    A replay of the forward hands out results and saved tensors, and one node of autograd's graph keeps the latter, as
    for a compiled function. Its backward reads them where the forward put them. What a replay would overwrite is moved
    before, saved tensors of pending calls too, and a backward whose saved tensors were moved (by that, or by hooks that
    offload them), or that others hold, has them copied back. So the numbers are right in any order of calls, and calls
    in the order of the recordings replay and nothing else.

Note [Autograd's engine and captures]
    The engine runs nodes on the stream of their forward, which for a captured graph is the side stream, and in a thread
    of its own, whose launches the capture of that stream takes. Stand-ins are leaves of their own, so that no node of
    another stream is reached.
"""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cgpass import torch_private
from cgpass.compile.facts.input_info import InputInfo, InputKind
from cgpass.errors import GraphedBackwardError, StaticInputMovedError
from cgpass.graphed.around import blamed, no_autocast_cache
from cgpass.graphed.differentiated import Differentiated
from cgpass.options import current_defaults
from cgpass.recompute.states import CheckpointStates
from cgpass.runtime import fast
from cgpass.runtime.changes import mend, open_modes
from cgpass.runtime.inputs import Layout, copy_all, overlaps_itself, shared_with_written
from cgpass.runtime.outputs import alias_of_input
from cgpass.runtime.owner import Owner
from cgpass.runtime.recording import Recorder, Recording
from cgpass.telemetry import progress

if TYPE_CHECKING:
    from cgpass.graphed.callables import GraphedFunction


class Call:
    """One forward of a pair, until its backward. Autograd's graph keeps it.

    It lets go of the pair once its backward is done: a result that is kept as an attribute of the module would keep all
    of it for ever, since Python's garbage collector does not see into the node.
    """

    __slots__ = ("__weakref__", "ended", "members", "name", "pair", "position")

    def __init__(self, pair: "Pair", members: list[torch.Tensor], position: Any) -> None:
        """Args: members: Parameters and buffers of the forward, held as autograd would."""
        self.pair: Pair | None = pair
        self.name, self.members, self.position = pair.description.name, members, position
        self.ended = False
        """True once no further backward may come."""

    def settle(self) -> None:
        """Nothing more is to come."""
        self.pair, self.members = None, []


class Pair:
    """Recordings of one forward and of its backward. See Note [What a call of a pair does]."""

    def __init__(self, d: "GraphedFunction", owner: Owner, slot: int | None = None) -> None:
        """Args: slot: where it is recorded; in a pool of its own if None."""
        self.description = d
        self.closed = False
        self.states = CheckpointStates(owner.driver.device, d.options.rng_tracker)
        self._slot = slot
        self._owner = owner
        self._recordings: list[Recording] = []
        self._backward: Recording | None = None
        self._weight_grads: Recording | None = None
        self._split_off: list[int] = []
        self._call: weakref.ref[Call] | None = None

    # ---- recording

    def record(self) -> None:
        """Record the forward and its backward, if it has one."""
        held = self.record_forward()
        if self.graph.with_grad:
            self.record_backward(*held)

    def record_forward(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Record the forward; returns results, saved tensors and members of a call, which leaves all as it was."""
        d, owner = self.description, self._owner
        samples = d.binding.samples
        arguments, num_inputs = d.binding.call(samples), len(samples)
        d.run_hook("pre_forward", *arguments)
        if self._slot is None:
            self._slot = owner.new_slot()
        self.statics, self.graph = d.statics, Differentiated(d)
        self._generators = list(self.states.generators)
        members, graph = d.statics.distinct(), self.graph

        def fn(given: list[Any]) -> list[Any]:
            values, own = given[:num_inputs], given[num_inputs:][: len(members)]
            given.clear()
            with no_autocast_cache(), self.states:
                outputs = graph.forward(values, own)
            d.note_result(graph.result)
            self._num_results = len(outputs)
            return [*outputs, *(graph.separate() if graph.with_grad else [])]

        owner.begin_recording(self._slot)
        before = owner.driver.live_blocks(self._slot)
        kinds = [InputKind.COPIED] * num_inputs + [InputKind.STATIC] * len(members)
        args: list[Any] = [*samples, *members, *self._generators]
        self.forward = forward = self._record(fn, args, kinds, "forward")
        assert d.structure is not None
        self.structure = d.structure
        kept = owner.driver.live_blocks(self._slot).keys() - before.keys()
        graph.keeps_memory = bool(kept.difference(forward.memory.addresses()))
        written = [(args[i].data, args[i].data.clone()) for i in sorted(forward.written)]
        outputs = forward.run(args)
        owner.note_handed_out(forward)
        for place, value in written:
            place.copy_(value)
        results, saved = outputs[: self._num_results], outputs[self._num_results :]
        self._sort(samples, members, saved)
        d.run_hook("forward", *arguments, self.structure.build(results))
        return results, saved, members

    def _sort(self, inputs: Sequence[Any], members: Sequence[Any], saved: Sequence[Any]) -> None:
        """Tell what calls have to do, by what was recorded."""
        forward, graph, num_inputs = self.forward, self.graph, len(inputs)
        first = self._num_results
        self.key, self._num_saved = fast.layouts(self.statics.now()), len(saved)
        self._written = [i for i in sorted(forward.written) if i < num_inputs]
        self._counted = [k for k in range(len(members)) if num_inputs + k in graph.written]
        self._given = [n for n in forward.aliases if n in graph.with_grad]
        self._strides = [(i, inputs[i].stride()) for i in forward.viewed if i < num_inputs]
        self._homes = [(n - first, k) for n, k in forward.own.items() if n >= first]
        """Saved tensors of the forward's own memory, and which of its tensors they are."""
        own = {i for i, _ in self._homes}
        places = {t.untyped_storage().data_ptr(): k for k, t in enumerate(members)}
        found = [(i, alias_of_input(t, members, places)) for i, t in enumerate(saved)]
        self._views = [(i, alias) for i, alias in found if alias is not None and i not in own]
        """Saved tensors that are views of parameters or buffers."""
        kinds = [InputKind.POOLED if i in own else InputKind.STATIC for i in range(len(saved))]
        kinds += [InputKind.STATIC] * len(members) + [InputKind.COPIED] * len(graph.with_grad)
        self._layout = self._layout_of(kinds)
        self._wanted = tuple(sorted(graph.reached))
        self._edges = tuple(range(len(self._wanted)))
        self._take_wanted, self._take_read = fast.taker(self._wanted), fast.taker(tuple(graph.read))
        self.take = fast.taker(self.statics.firsts())
        """Takes each parameter and buffer once."""

    def record_backward(
        self, results: Sequence[Any], saved: list[Any], members: Sequence[Any]
    ) -> list[torch.Tensor]:
        """Record the backward for saved tensors where they lie; returns tensors where its gradients will lie.

        Gradients are taken laid out as results are.
        """
        d = self.description
        d.run_hook("pre_backward")
        grads = [_gradient_of(results[n]) for n in self.graph.with_grad]
        args = [*saved, *members, *grads, *self._generators]
        saved.clear()
        self._key = self._layout.static_key(args)
        kinds = [info.kind for info in self._layout.infos[: len(args) - len(self._generators)]]
        self._backward = backward = self._record(self._run_graph, args, kinds, "backward")
        if d.makes_weight_grads is not None:
            self._record_weight_grads(d.makes_weight_grads)
        d.run_hook("backward")
        return backward.memory.aliases()

    def _record_weight_grads(self, make: Callable[[], Any]) -> None:
        members, graph = self.statics.distinct(), self.graph

        def fn(given: list[Any]) -> list[Any]:
            own = given[: len(members)]
            given.clear()
            with no_autocast_cache():
                found = graph.weight_grads(make, own)
            self._split_off = sorted(found)
            return [found[k].clone() for k in self._split_off]

        kinds = [InputKind.STATIC] * len(members)
        self._weight_grads = self._record(fn, members + self._generators, kinds, "backward_dw")
        self._weight_key = fast.layouts(members)

    def _record(
        self,
        fn: Callable[[list[Any]], list[Any]],
        args: list[Any],
        kinds: Sequence[InputKind],
        what: str,
    ) -> Recording:
        d, owner, slot = self.description, self._owner, self._slot
        assert slot is not None
        layout, finds_writes = self._layout_of(kinds), what == "forward"
        recorder = Recorder(
            fn, layout, owner, False, finds_writes, d.stats, shares_inputs=not d.keeps_inputs
        )
        label = f"recording {what} of {d.name}, graphed by hand"
        with progress.shown(label, current_defaults().progress), blamed(d.name, what):
            recording = recorder.record(args, slot, uses=(None, frozenset()))
        owner.add_recording(recording)
        self._recordings.append(recording)
        d.stats.recordings += 1
        return recording

    def _layout_of(self, kinds: Sequence[InputKind]) -> Layout:
        """How inputs are treated: the generators come last."""
        kinds = [*kinds, *[InputKind.GENERATOR] * len(self._generators)]
        infos = [InputInfo(f"input {i}", kind) for i, kind in enumerate(kinds)]
        return Layout(infos, check_static=True, check_layout=False)

    # ---- calls

    def is_free(self) -> bool:
        """Tell whether no call needs what only the pool has."""
        graph = self.graph
        if not (graph.keeps_inputs or graph.keeps_memory or self._weight_grads):
            return not self.closed
        call = None if self._call is None else self._call()
        return not self.closed and (call is None or call.pair is None)

    def why_not(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """Why a replay can't take these arguments."""
        names = self.description.binding.names
        for i, stride in self._strides:
            if tensors[i].stride() != stride:
                return f"{names[i]}, which results are views of, has another memory layout than the sample"
        if shared_with_written([*tensors, *self.statics.now()], self._written):
            written = " or ".join(names[i] for i in self._written)
            return f"{written}, which it writes, shares memory with something else that it is given"
        return None

    def run(self, tensors: list[torch.Tensor], members: list[torch.Tensor]) -> list[torch.Tensor]:
        """Replay the forward, and have autograd know of its backward; returns the results' tensors."""
        stats, graph, forward = self.description.stats, self.graph, self.forward
        with_grad = torch.is_grad_enabled()
        torch_private.set_grad_enabled(False)
        try:
            position = None if self.states.recorded is None else self.states.position()
            outputs = forward.run([*tensors, *members, *self._generators])
        finally:
            torch_private.set_grad_enabled(with_grad)
        stats.replays += 1
        stats.copied_bytes += forward.copied_bytes
        self._owner.note_handed_out(forward)
        for k in self._counted:
            torch.autograd.graph.increment_version(members[k])
        results, saved = outputs[: self._num_results], outputs[self._num_results :]
        if self._owner.several_threads:
            fast.copy_out(results, [n for n in forward.own if n < self._num_results])
        wanted = self._take_wanted([*tensors, *members])
        if not with_grad or not graph.with_grad or not any(t.requires_grad for t in wanted):
            return results
        call = Call(self, members, position)
        self._call = weakref.ref(call)
        checked = [*saved, *self._take_read(members)]
        where = wanted, self._edges, results, graph.with_grad
        fast.attach(_run_backward, call, *where, checked, (), "GraphedBackward")
        for n in self._given:
            results[n] = _Given.apply(results[n])
        return results

    def backward(self, call: Call, saved: list[Any], grads: list[Any]) -> list[Any]:
        """Gradients for what a call wanted some for; the lists are emptied."""
        owner, d, backward = self._owner, self.description, self._backward
        call.ended = bool(saved) and not torch_private.keeps_graph()
        with owner.lock:
            owner.driver.enter_call()
            args = [*saved[: self._num_saved], *call.members, *grads, *self._generators]
            saved.clear()
            grads.clear()
            is_due = False
            if backward is not None and self._is_in_place(args, backward):
                if call.position is not None:
                    self.states.rewind(call.position)
                found = self._replay(backward, args)
                is_due = self._weight_grads is not None
            else:
                if backward is not None:
                    d.tell("runs a backward without a graph: its parameters moved.")
                d.stats.plain_calls += 1
                found = self._run_graph(args)
            if is_due:
                d.due.append(call)
            elif call.ended:
                call.settle()
            if owner.several_threads:
                fast.copy_out(found, [i for i, grad in enumerate(found) if grad is not None])
        return found

    def _is_in_place(self, args: list[Any], backward: Recording) -> bool:
        """Tell whether a backward finds what it reads; saved tensors that lie elsewhere, or are held, are copied back."""
        owner, forward = self._owner, self.forward
        if self._may_replay(args, backward):
            return True
        if not owner.is_safe(forward):
            owner.rescue(forward)
        owner.note_handed_out(forward)
        places = forward.memory.aliases()
        for i, k in self._homes:
            _copy_to(places[k], args[i])
            args[i] = places[k]
        for i, alias in self._views:
            args[i] = alias.of(args[self._num_saved + alias.index])
        del places  # they count as holders
        return self._may_replay(args, backward)

    def _may_replay(self, args: list[Any], backward: Recording) -> bool:
        return self._layout.static_key(args) == self._key and backward.may_replay(args)

    def _replay(self, recording: Recording, args: list[Any]) -> list[Any]:
        owner, stats = self._owner, self.description.stats
        if not owner.is_safe(recording):
            owner.rescue(recording)
        outputs = recording.run(args)
        args.clear()
        stats.replays += 1
        stats.copied_bytes += recording.copied_bytes
        owner.note_handed_out(recording)
        return outputs

    def _run_graph(self, args: list[Any]) -> list[Any]:
        """The backward, without a recording or while it is recorded; empties the list."""
        num_grads = len(self.graph.with_grad)
        end = len(args) - num_grads - len(self._generators)
        saved, members, grads = args[: self._num_saved], args[self._num_saved : end], args[end:]
        grads = grads[:num_grads]
        args.clear()
        # backward_dw keeps them: placeholders are others' by then
        if self.description.makes_weight_grads is not None:
            grads = [grad.clone() for grad in grads]
        with no_autocast_cache():
            return self.graph.backward(saved, grads, members, self._wanted)

    def run_weight_grads(self, call: Call) -> None:
        """Make the weights' gradients of a backward that lacks them, and add them to their `.grad`."""
        owner, recording, members = self._owner, self._weight_grads, call.members
        if recording is None:
            raise GraphedBackwardError(
                f"{call.name}: its graphs were freed between a backward and its backward_dw()."
            )
        with owner.lock, torch.no_grad():
            if fast.layouts(members) != self._weight_key:
                raise StaticInputMovedError(
                    f"{call.name}: parameters moved between a backward and its backward_dw(). Keep them where they are."
                )
            owner.driver.enter_call()
            outputs = self._replay(recording, [*members, *self._generators])
            for k, grad in zip(self._split_off, outputs, strict=True):
                parameter = members[k]
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
            if call.ended and call not in self.description.due:
                call.settle()

    def close(self) -> None:
        """Free the graphs; what is held stays its holders', and a backward that is due runs without a graph."""
        if self.closed:
            return
        self.closed = True
        due = self.description.due
        for call in [call for call in due if call.pair is self]:
            due.remove(call)
        for recording in self._recordings:
            self._owner.close_recording(recording)
        self._backward = self._weight_grads = None


def _gradient_of(result: torch.Tensor) -> torch.Tensor:
    """Zeros laid out as a result, unless elements of that share memory."""
    strides = result.stride()
    if overlaps_itself(result):
        strides = torch.empty(result.shape, device="meta").stride()
    like = torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)
    return like.zero_()


def _copy_to(place: torch.Tensor, value: torch.Tensor) -> None:
    """Copy what may be expanded."""
    for dim, stride in enumerate(place.stride()):
        if stride == 0 and place.size(dim) > 1:
            place, value = place.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    copy_all([place], [value])


@torch_private.outside_dynamo
def _run_backward(call: Call, saved: list[Any] | None, grads: list[Any] | None) -> list[Any]:
    """See `fast.attach`. A backward may be called in what Dynamo runs, and would be traced."""
    if saved is None or grads is None:
        raise GraphedBackwardError(
            f"{call.name}: gradients of its gradients were asked for, and none are recorded. Call the original there."
        )
    pair = call.pair
    if pair is None:
        raise GraphedBackwardError(f"{call.name}: a second backward through one forward.")
    try:
        with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
            return pair.backward(call, saved, grads)  # with create_graph=True it is enabled
    except BaseException:
        mend(open_modes)  # at once: by the next call the user may have set random numbers
        raise


class _Given(torch.autograd.Function):
    """A result that is (a view of) an argument: autograd refuses to have it changed in place."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor) -> torch.Tensor:
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]
