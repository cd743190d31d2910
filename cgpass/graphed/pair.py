"""`Pair`: a recorded forward, and what was recorded of its backward.

Note [What a call of a pair does]
    A replay of the forward hands out results and saved tensors, and one node of autograd's graph keeps the latter, as
    for a compiled function. Its backward replays what was recorded for just this memory. It is recorded, or runs
    without a graph, where saved tensors were moved (by a rescue, by hooks that offload them), where parameters are others
    than in the forward, and where a replay would overwrite what somebody holds. So the numbers are right in any order
    of calls, and calls in the order of the recordings replay and nothing else.

    A forward that would overwrite what a pending one saved is recorded once more, in a pool of its own.

Note [Autograd's engine and captures]
    The engine runs nodes on the stream of their forward, which for a captured graph is the side stream, and in a thread
    of its own, whose launches the capture of that stream takes. Stand-ins are leaves of their own, so that no node of
    another stream is reached. A backward that is recorded late is a backward inside of a backward: the engine has its
    stream and the caller's wait for each other.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from cgpass import torch_private
from cgpass.compile.facts.input_info import InputInfo, InputKind
from cgpass.errors import CaptureError, GraphedBackwardError, StaticInputMovedError
from cgpass.graphed.differentiated import Differentiated
from cgpass.graphed.statics import Statics
from cgpass.graphed.warmup import Pass, blamed, no_autocast_cache, prepared
from cgpass.options import current_defaults
from cgpass.recompute.states import CheckpointStates
from cgpass.runtime import fast
from cgpass.runtime.changes import mend, open_modes
from cgpass.runtime.inputs import Layout, overlaps_itself
from cgpass.runtime.owner import Owner
from cgpass.runtime.recording import Recorder, Recording
from cgpass.runtime.writes import extent, has_place
from cgpass.telemetry import progress

_PLAINLY = "runs a backward without a graph: {}."


@contextlib.contextmanager
def in_place(statics: Statics) -> Iterator[None]:
    """A block in which hooks may move or free parameters and buffers, which then lie where the call has them."""
    tensors = statics.now()
    before = [(t, t.data, t.untyped_storage().nbytes(), t.data.clone()) for t in tensors]
    try:
        yield
    finally:
        for tensor, place, size, value in before:
            if place.untyped_storage().nbytes() < size:
                place.untyped_storage().resize_(size)
            if not torch.equal(place, value):
                place.copy_(value)
            tensor.data = place


class Call:
    """One forward of a pair, until its backward. Autograd's graph keeps it.

    It lets go of the pair once its backward is done: a result that is kept as an attribute of the module would keep all
    of it for ever, since Python's garbage collector does not see into the node.
    """

    __slots__ = ("__weakref__", "members", "name", "pair", "position")

    def __init__(self, pair: "Pair", members: list[torch.Tensor], position: Any) -> None:
        self.pair: Pair | None = pair
        self.name = pair.description.name
        self.members = members
        """Parameters and buffers of the forward, held as autograd would."""
        self.position = position

    def settle(self) -> None:
        """Nothing more is to come."""
        self.pair, self.members = None, []


class Pair:
    """Recordings of one forward and of its backward. See Note [What a call of a pair does]."""

    def __init__(self, d: Pass, owner: Owner, slot: int | None = None) -> None:
        """Args: slot: where it is recorded; in a pool of its own if None."""
        self.description = d
        self.closed = False
        self.states = CheckpointStates(owner.driver.device, d.options.rng_tracker)
        self._slot = slot
        self._owner = owner
        self._backwards: list[tuple[bytes, Recording]] = []
        self._weight_grads: Recording | None = None
        self._split_off: list[int] = []
        self._call: weakref.ref[Call] | None = None
        self._records = True
        """True if a backward that none of the recordings fits is recorded."""

    def record_forward(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Record the forward, after its hooks; returns parameters and buffers that it reads."""
        d, owner, num_inputs = self.description, self._owner, len(inputs)
        self._arguments = d.binding.call(list(inputs))
        d.hooks.run("pre_forward", d.hooked, *self._arguments)
        if self._slot is None:
            self._slot = owner.new_slot()
        self.statics, self.graph = d.statics, Differentiated(d)
        self._generators = list(self.states.generators)
        members, graph = d.statics.distinct(), self.graph
        results: Any = set()
        saved: Any = set()
        layouts: list[tuple[Any, ...]] = []

        def fn(given: list[Any]) -> list[Any]:
            values, own = given[:num_inputs], given[num_inputs:][: len(members)]
            given.clear()
            with no_autocast_cache(), self.states:
                outputs = graph.forward(values, own)
            d.note_result(graph.result)
            kept = graph.separate() if graph.with_grad else []
            results.update(range(len(outputs)))
            saved.update(range(len(outputs), len(outputs) + len(kept)))
            layouts[:] = map(_layout, outputs)
            return [*outputs, *kept]

        owner.begin_recording(self._slot)
        before = owner.driver.live_blocks(self._slot)
        kinds = [InputKind.COPIED] * num_inputs + [InputKind.STATIC] * len(members)
        args = [*inputs, *members, *self._generators]
        self.forward = forward = self._record(fn, args, kinds, "forward", uses=(results, saved))
        assert d.structure is not None
        self.structure, self._layouts = d.structure, layouts
        self.key, self._num_results = fast.layouts(d.statics.now()), len(results)
        self._sort(inputs, members, sorted(saved))
        kept = owner.driver.live_blocks(self._slot).keys() - before.keys()
        graph.keeps_memory = bool(kept.difference(forward.memory.addresses()))
        return members

    def _sort(self, inputs: Sequence[Any], members: Sequence[Any], saved: Sequence[int]) -> None:
        """Tell what calls have to do, by what was recorded."""
        d, forward, graph, num_inputs = self.description, self.forward, self.graph, len(inputs)
        self._written = [i for i in sorted(forward.written) if i < num_inputs]
        self._counted = [k for k in range(len(members)) if num_inputs + k in graph.written]
        self._given = [n for n in forward.aliases if n in graph.with_grad]
        self._strides = [(i, inputs[i].stride()) for i in forward.viewed if i < num_inputs]
        kinds = [InputKind.POOLED if n in forward.own else InputKind.STATIC for n in saved]
        self._num_saved = len(kinds)
        kinds += [InputKind.STATIC] * len(members) + [InputKind.COPIED] * len(graph.with_grad)
        self._layout = self._layout_of(kinds)
        leaves = graph.leaves
        used = graph.reached.union(i for i in d.used if leaves[i].requires_grad)
        self._wanted = tuple(sorted(used))
        self._edges = tuple(range(len(used)))
        self._take_wanted, self._take_read = fast.taker(self._wanted), fast.taker(tuple(graph.read))
        self._wanted_inputs = [i for i in self._wanted if i < num_inputs]
        self._wants_always = any(i >= num_inputs for i in self._wanted)
        self.take = fast.taker(self.statics.firsts())
        """Takes each parameter and buffer once."""

    def after_forward(self) -> None:
        """Run the hooks after the forward."""
        d, device = self.description, self._owner.driver.device
        results = [
            # of bytes: some dtypes have no zeros of their own
            torch.zeros(dtype.itemsize, dtype=torch.uint8, device=device)
            .view(dtype)[0]
            .expand(shape)
            for shape, _, dtype in self._layouts
        ]
        d.hooks.run("forward", d.hooked, *self._arguments, self.structure.build(results))
        del self._arguments

    def record_for_samples(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Record the forward; returns results, saved tensors and members of a call, which leaves all as it was."""
        samples = self.description.binding.samples
        members = self.record_forward(samples)
        args: list[Any] = [*samples, *members, *self._generators]
        kept = [(args[i].data, args[i].data.clone()) for i in sorted(self.forward.written)]
        outputs = self.forward.run(args)
        self._owner.note_handed_out(self.forward)
        for place, value in kept:
            place.copy_(value)
        self.after_forward()
        return outputs[: self._num_results], outputs[self._num_results :], members

    def record_backward(self, saved: list[Any], members: Sequence[Any]) -> list[torch.Tensor]:
        """Record the backward for saved tensors where they lie; returns tensors where its gradients will lie."""
        args = [*saved, *members, *map(self._gradient, self.graph.with_grad), *self._generators]
        saved.clear()
        return self._record_backward(args, self._slot).memory.aliases()

    def _record_backward(self, args: list[Any], slot: int | None) -> Recording:
        """Record the backward, with its hooks around; gradients are laid out as results are."""
        d = self.description
        d.hooks.run("pre_backward", d.hooked)
        self.states.begin_backward()
        key, first = self._layout.static_key(args), len(args) - len(self._generators)
        for i, n in enumerate(self.graph.with_grad, first - len(self.graph.with_grad)):
            args[i] = self._gradient(n).copy_(args[i])
        kinds = [info.kind for info in self._layout.infos[:first]]
        recording = self._record(self._run_graph, args, kinds, "backward", slot=slot)
        self._backwards.append((key, recording))
        if d.backward_dw is not None:
            self._record_weight_grads(d.backward_dw)
        d.hooks.run("backward", d.hooked)
        return recording

    def _gradient(self, result: int) -> torch.Tensor:
        """Zeros laid out as a gradient of a result."""
        shape, strides, dtype = self._layouts[result]
        device = self._owner.driver.device
        return torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()

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
        *,
        uses: tuple[Any, Any] = (None, frozenset()),
        slot: int | None = None,
    ) -> Recording:
        d, owner = self.description, self._owner
        slot = self._slot if slot is None else slot
        assert slot is not None
        layout, finds_writes = self._layout_of(kinds), what == "forward"
        recorder = Recorder(
            fn, layout, owner, opaque=False, finds_writes=finds_writes, stats=d.stats
        )
        label = f"recording {what} of {d.name}, graphed by hand"
        told = progress.shown(label, current_defaults().progress)
        with told, blamed(d.name, what), prepared(d, owner.driver.device):
            recording = recorder.record(args, slot, uses=uses)
        owner.add_recording(recording)
        d.stats.recordings += 1
        return recording

    def _layout_of(self, kinds: Sequence[InputKind]) -> Layout:
        """How inputs are treated: the generators come last."""
        kinds = [*kinds, *[InputKind.GENERATOR] * len(self._generators)]
        infos = [InputInfo(f"input {i}", kind) for i, kind in enumerate(kinds)]
        return Layout(infos, check_static=True, check_layout=False)

    def is_free(self) -> bool:
        """Tell whether no call needs what only the pool has."""
        if self.closed or not (self.graph.keeps_memory or self._weight_grads):
            return not self.closed
        call = None if self._call is None else self._call()
        return call is None or call.pair is None

    def why_not(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """Why a replay can't take these arguments."""
        names = self.description.binding.names
        for i, stride in self._strides:
            if tensors[i].stride() != stride:
                return f"{names[i]}, which results are views of, has another memory layout than the sample"
        for i in self._written:
            begin, end = extent(tensors[i])
            others = (*tensors, *self.statics.now())
            for k, (first, last) in enumerate(
                extent(t) if has_place(t) else (0, 0) for t in others
            ):
                if k != i and first < end and begin < last:
                    what = names[k] if k < len(names) else "a parameter or a buffer"
                    return f"{names[i]}, which it writes, shares memory with {what}"
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
        wants = self._wants_always or any(tensors[i].requires_grad for i in self._wanted_inputs)
        if not with_grad or not wants or not graph.with_grad:
            return results
        call = Call(self, members, position)
        self._call = weakref.ref(call)
        checked = [*saved, *self._take_read(members)]
        wanted = self._take_wanted([*tensors, *members])
        where = wanted, self._edges, results, graph.with_grad
        fast.attach(_run_backward, call, *where, checked, (), "GraphedBackward")
        for n in self._given:
            results[n] = _Given.apply(results[n])
        return results

    def backward(self, call: Call, saved: list[Any], grads: list[Any]) -> list[Any]:
        """Gradients for what a call wanted some for; the lists are emptied."""
        owner, members, ends = self._owner, call.members, bool(saved)
        with owner.lock:
            owner.driver.enter_call()
            args = [*saved[: self._num_saved], *members, *grads, *self._generators]
            saved.clear()
            grads.clear()
            found = self._replay_backward(args, call.position)
            if self._weight_grads is not None:
                self.description.due.append(call)
            elif ends and not torch_private.keeps_graph():
                call.settle()
        return list(found)

    def _run_graph(self, args: list[Any]) -> list[Any]:
        """The backward, without a recording or while it is recorded; empties the list."""
        num_grads = len(self.graph.with_grad)
        end = len(args) - num_grads - len(self._generators)
        saved, members, grads = args[: self._num_saved], args[self._num_saved : end], args[end:]
        grads = grads[:num_grads]
        args.clear()
        # backward_dw keeps them: placeholders are others' by then
        if self.description.backward_dw is not None:
            grads = [grad.clone() for grad in grads]
        with no_autocast_cache():
            return self.graph.backward(saved, grads, members, self._wanted)

    def _replay_backward(self, args: list[Any], position: Any) -> Sequence[Any]:
        d, owner = self.description, self._owner
        key = self._layout.static_key(args)
        recording = self._choose(args, key)
        if recording is None and not self.closed:
            records = self._records and d.records_backward
            if records and len(self._backwards) > d.options.max_rerecords:
                self._records = records = False
                d.tell(
                    _PLAINLY.format("it reads other memory than max_rerecords recordings of it do")
                )
            # no rescue moved what is read
            if records and key == self._layout.static_key(args):
                recording = self._record_in_call(args)
        if recording is None:
            d.stats.plain_calls += 1
            return self._run_graph(args)
        if (
            position is not None
        ):  # what a recording of a backward draws from is known once it is recorded
            self.states.rewind(position)
        outputs = recording.run(args)
        args.clear()
        d.stats.replays += 1
        d.stats.copied_bytes += recording.copied_bytes
        if d.options.own_grads:
            owner.note_handed_out(recording)
        return outputs

    def _record_in_call(self, args: list[Any]) -> Recording | None:
        d, owner = self.description, self._owner
        slot = owner.new_slot() if self._backwards else self._slot
        owner.driver.prepare_thread()
        try:
            with in_place(self.statics) if d.hooks else contextlib.nullcontext():
                return self._record_backward(args, slot)
        except BaseException as error:
            self.close()  # memory of the forward may have been handed over to what failed
            if not isinstance(error, CaptureError) or d.backward_dw is not None:
                raise
            d.records_backward = False
            d.tell(_PLAINLY.format(str(error).rstrip(".")))
            return None

    def _choose(self, args: list[Any], key: bytes) -> Recording | None:
        owner = self._owner
        for place, recording in self._backwards:
            if place == key and owner.is_safe(recording) and recording.may_replay(args):
                return recording
        for recording in [recording for place, recording in self._backwards if place == key]:
            if recording.may_replay(args) and owner.rescue(recording):
                same = self._layout.static_key(args) == key and not recording.closed
                return recording if same and recording.may_replay(args) else None
        return None

    def run_weight_grads(self, call: Call) -> None:
        """Make the weights' gradients of a backward that lacks them, and add them to their `.grad`."""
        owner, recording = self._owner, self._weight_grads
        if recording is None or self.closed:
            raise GraphedBackwardError(
                f"{call.name}: its graphs were freed between a backward and its backward_dw()."
            )
        with owner.lock, torch.no_grad():
            members = call.members
            if fast.layouts(members) != self._weight_key:
                raise StaticInputMovedError(
                    f"{call.name}: parameters moved between a backward and its backward_dw(). Keep them where they are."
                )
            owner.driver.enter_call()
            if not owner.is_safe(recording):
                owner.rescue(recording)
            outputs = recording.run([*members, *self._generators])
            self.description.stats.replays += 1
            if self.description.options.own_grads:
                owner.note_handed_out(recording)
            for k, grad in zip(self._split_off, outputs, strict=True):
                parameter = members[k]
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
            call.settle()

    def close(self) -> None:
        """Free the graphs; what is held stays its holders', and a backward that is due runs without a graph."""
        if self.closed:
            return
        self.closed = True
        due = self.description.due
        for call in [call for call in due if call.pair is self]:
            due.remove(call)
        for recording in (self.forward, *[r for _, r in self._backwards], self._weight_grads):
            if recording is not None:
                self._owner.close_recording(recording)
        self._backwards.clear()
        self._weight_grads = None


def _layout(output: torch.Tensor) -> tuple[Any, ...]:
    """Shape, strides of a gradient (the output's, unless elements of that share memory), dtype."""
    strides = output.stride()
    if overlaps_itself(output):
        strides = torch.empty(output.shape, device="meta").stride()
    return output.shape, strides, output.dtype


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
