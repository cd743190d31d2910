"""`Pair`: one forward and its backward, as they are warmed up, recorded and replayed.

Note [What a call of a pair does]
    A replay of the forward hands out results. What it saved, and whatever else Python or C++ code keeps for the backward,
    stays where it is: a pair serves one call until its backward is done, and no other replay overwrites memory of it until
    then. A call that finds no such pair records another one, in a pool of its own. Results that are held longer are moved
    before a replay overwrites them.

Note [Autograd's engine and captures]
    The engine runs nodes on the stream of their forward, which for a captured graph is the side stream, and in a thread
    of its own, whose launches the capture of that stream takes. Stand-ins are leaves of their own, so that no node of
    another stream is reached.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from cgpass import torch_private
from cgpass.compile.facts.input_info import InputInfo, InputKind
from cgpass.compile.facts.lines import raised_at
from cgpass.errors import CaptureError, CGPassError, GraphedBackwardError, StaticInputMovedError
from cgpass.graphed.binding import Structure, firsts
from cgpass.graphed.differentiated import Differentiated
from cgpass.options import current_defaults
from cgpass.recompute.states import CheckpointStates
from cgpass.runtime import fast
from cgpass.runtime.changes import mend, open_modes
from cgpass.runtime.driver import is_capture_error
from cgpass.runtime.inputs import Layout, overlaps_itself, shared_with_written
from cgpass.runtime.owner import Owner
from cgpass.runtime.recording import Recorder, Recording
from cgpass.telemetry import progress

if TYPE_CHECKING:
    from cgpass.graphed.callables import GraphedFunction

Key = tuple[bytes, bytes, tuple[bool, ...]]
"""Addresses of parameters and buffers, which of them require grad, and flags among the arguments."""
_LETS_GO: Final = "A first backward of it lets go of what it needs (a selective checkpoint, hooks of saved tensors)"
_OVERWRITES: Final = "its graph would overwrite what another backward needs"
Execute = Callable[[Callable[[list[Any]], list[Any]], list[Any], list[InputKind], str], list[Any]]
"""Warms a function up, or records it: with its arguments, their kinds and its name; returns what it returned."""


class Call:
    """One forward of a pair, until its backward. Autograd's graph keeps it.

    It lets go of the pair once its backward is done: a result that is kept as an attribute of the module would keep all
    of it for ever, since Python's garbage collector does not see into the node.
    """

    __slots__ = (
        "__weakref__",
        "ended",
        "has_run",
        "held",
        "is_plain",
        "members",
        "name",
        "pair",
        "position",
    )

    def __init__(self, pair: "Pair", members: list[torch.Tensor], position: Any) -> None:
        self.pair: Pair | None = pair
        self.name, self.position = pair.description.name, position
        self.members = members
        """Parameters and buffers of the forward, held as autograd would."""
        self.held = [*pair.forward.memory.watch[0]]
        """Storages of results and saved tensors."""
        self.ended = False
        """True once no further backward may come."""
        self.has_run = self.is_plain = False
        """True if its backward ran; if it ran without a graph."""

    def settle(self) -> None:
        """Nothing more is to come."""
        if self.pair is not None:
            self.pair.forward.memory.kept_for = None
        self.pair, self.members, self.held = None, [], []


class Pair:
    """Recordings of one forward and of its backward. See Note [What a call of a pair does]."""

    def __init__(
        self,
        d: "GraphedFunction",
        owner: Owner,
        flags: tuple[bool, ...],
        *,
        in_order: bool = False,
    ) -> None:
        self.description, self._owner, self.flags = d, owner, flags
        self._in_order = in_order
        """True if it may share the pool of the others, in whose order it is recorded."""
        self.closed = False
        self.graph: Differentiated
        self.structure: Any = None
        """The `Structure` of the last run's result."""
        self._states = CheckpointStates(owner.driver.device, d.options.rng_tracker)
        self._recordings: dict[str, Recording] = {}
        self._homes: dict[int, tuple[int, int]] = {}
        """Saved tensors of the forward's own memory: which of its tensors they are, and the block that they lie in."""
        self._splits = False
        """True if its backward leaves gradients of weights to `backward_dw`."""
        self._serves_once = False
        """True if its backward lets go of some: the recording of it may overwrite them, and none can run again."""

    # ---- warm-ups and recordings

    def warm_up(self, iterations: int) -> None:
        """Run forward and backward on copies, and note what they do."""
        d, owner, number = self.description, self._owner, 0

        def run(fn: Any, args: list[Any], kinds: list[InputKind], what: str) -> Any:
            return owner.warm_up(fn, args)

        while number < iterations:
            number += 1
            self._forward(run, _copies)
            self._backward(run, warms_up=True)
            del self.graph  # which holds arguments
            d.stats.warmups += 1
            if not d.statics.unchanged():  # by a first call
                d.find_statics()

    def record_forward(self) -> None:
        """Record the forward, and hold what it made as a call does, which leaves all as it was."""
        # where gradients of weights come later, in whatever order
        is_shared = self._in_order and self.description.makes_weight_grads is None
        self._pool_index = 0 if is_shared else self._owner.new_pool()
        self._forward(self._record_first, list)

    def record_backward(self) -> list[torch.Tensor]:
        """Record the backward, if there is one, for saved tensors where they lie; returns where its gradients will lie.

        Gradients are taken laid out as results are.
        """
        return self._backward(self._record)

    def _forward(self, execute: Execute, placed: Callable[[list[Any]], list[Any]]) -> None:
        """Run the forward on arguments and members, as they are `placed`."""
        d, warms_up = self.description, placed is _copies
        samples = placed(d.binding.samples)
        arguments = d.binding.call(samples, self.flags)
        d.run_hook("pre_forward", *arguments)
        members = placed(d.statics.distinct())
        end, num_results = len(samples) + len(members), 0

        def fn(given: list[Any]) -> list[Any]:
            nonlocal num_results
            graph = self.graph = Differentiated(d, self.flags, warms_up=warms_up)
            args = given[:end]
            given.clear()
            with self._states:
                outputs = graph.forward(args)
            structure = Structure(graph.result)
            why = None if self.structure is None else structure.misfit(self.structure)
            if why is not None:
                raise d.refusal(f"returns {why}")
            self.structure = structure
            num_results = len(outputs)
            return [*outputs, *graph.separate()]

        kinds = [InputKind.COPIED] * len(samples) + [InputKind.STATIC] * len(members)
        outputs = execute(fn, [*samples, *members], kinds, "forward")
        results, saved = outputs[:num_results], outputs[num_results:]
        self._held = results, saved, members
        self._end_saved = len(saved)
        self._end_members = len(saved) + len(members)
        if not warms_up:
            self._sort(len(results), saved, members)
            for i, view in zip(self._views, self._views_of(members), strict=True):
                saved[i] = view
        d.run_hook("forward", *arguments, self.structure.build(results))

    def _sort(self, first: int, saved: Sequence[Any], members: Sequence[torch.Tensor]) -> None:
        """Derive the work of each call from what was recorded, while parameters and buffers are where they were read."""
        forward, graph, inputs = self.forward, self.graph, self.description.binding.samples
        end = self._num_inputs = len(inputs)
        self._nothing = [None] * self._end_members
        """In place of what a backward reads where it lies."""
        statics = self.description.statics
        now = statics.now()
        self.key: Key = statics.layouts(now), fast.requiring_grad(now), self.flags
        self.take = fast.taker(tuple(sorted(set(firsts(now)))))
        """Takes each parameter and buffer once."""
        forward.hand_out(first)
        self._written = [i for i in sorted(forward.written) if i < end]
        self._written_at = {
            members[i - end].untyped_storage().data_ptr()
            for i in forward.written
            if end <= i < end + len(members)
        } | forward.written_outside
        """Where the parameters, buffers and other tensors of its own lie that it writes."""
        shown = {n: alias for n, alias in forward.views.items() if n < first}
        self._given = [(n, shown[n].index) for n in shown if n in graph.with_grad]
        number_of, tensors = forward.own, forward.memory.tensors
        made = {n: tensors[number_of[n]] for n in graph.with_grad if n in number_of}
        self._overlapping = [
            n for n in made if any(_overlap(made[n], made[k]) for k in made if k != n)
        ]
        """Results that share elements with another one."""
        self._cut_off = [n for n in shown if n not in graph.given_back]
        """Results that lie on an argument or a member, but are another tensor without its history."""
        seen = {a.index for a in shown.values() if a.index < end}.union(self._written)
        self._strides = [(i, inputs[i].stride()) for i in sorted(seen)]
        """Of arguments that are written or returned, or viewed by results; of others a copy may be, as by `contiguous()`."""
        blocks = forward.memory.blocks()
        own = {n: k for n, k in forward.own.items() if k in blocks}
        self._homes = {n - first: (k, blocks[k]) for n, k in own.items() if n >= first}
        self._views = {n - first: a for n, a in forward.views.items() if n >= first}
        """Saved tensors that are (views of) copies of arguments, parameters or buffers."""
        others = self._homes.keys() | self._views.keys()
        self._constants = [None if i in others else t for i, t in enumerate(saved)]
        with_saved = {block for _, block in self._homes.values()}
        shared = [n for n, k in own.items() if n < first and blocks[k] in with_saved]
        self._take_shared = fast.taker(tuple(shared))
        """Takes results that share memory with saved tensors, so may not be written until the backward."""
        self._edges = tuple(range(len(graph.wanted)))
        self._take_wanted = fast.taker(graph.wanted)
        read = graph.read.union(a.index for a in self._views.values() if a.index >= end)
        self._take_read = fast.taker(tuple(read))

    def _backward(self, execute: Execute, *, warms_up: bool = False) -> list[Any]:
        """Run the backward of the forward that was run, on gradients of zeros, if it has one."""
        d = self.description
        results, saved, members = self._held
        self._held = [], [], []
        grads = [torch.zeros_like(results[n]) for n in self.graph.with_grad]
        if not grads:
            return []
        d.run_hook("pre_backward")
        kinds = [
            InputKind.POOLED if i in self._homes else InputKind.STATIC for i in range(len(saved))
        ]
        kinds += [InputKind.STATIC] * len(members) + [InputKind.COPIED] * len(grads)
        args = [*saved, *members, *grads]
        saved.clear()
        grads.clear()
        self._backward_key = d.statics.layouts(members)  # by now hooks may have moved them
        with d.statics.accumulated_kept():
            found = execute(self._run_graph, args, kinds, "backward")
            if d.makes_weight_grads is not None:
                self._split_off(execute, members, warms_up=warms_up)
        d.run_hook("backward")
        return found

    def _split_off(self, execute: Execute, members: Sequence[Any], *, warms_up: bool) -> None:
        """Run what the backward left to `backward_dw`, if it left anything."""
        d, trained = self.description, self.description.trained()
        self._splits = any(trained) and (warms_up or self._splits)
        if not self._splits:
            return
        error, kinds = None, [InputKind.STATIC] * len(members)
        try:
            made = execute(self._make_weight_grads, list(members), kinds, "backward_dw")
            self._splits = d.always_leaves_some or any(grad is not None for grad in made)
        except Exception as raised:
            if not warms_up or (d.always_leaves_some and not d.has_frozen()):
                raise
            self._splits = False  # it has nothing to do, as where weights are frozen
            error = f"{type(raised).__name__}: {str(raised).partition(chr(10))[0]}"
        if not self._splits:
            d.leaves_nothing[trained] = error

    def _run_graph(self, args: list[Any]) -> list[Any]:
        """The backward, without a recording or while it is recorded; empties the list."""
        saved, members = args[: self._end_saved], args[self._end_saved : self._end_members]
        grads = args[self._end_members :][: len(self.graph.with_grad)]
        args.clear()
        return self.graph.backward(saved, grads, members)

    def _make_weight_grads(self, args: list[Any]) -> list[Any]:
        return self.graph.weight_grads(args[: self._end_members - self._end_saved])

    def _record_first(
        self, fn: Callable[[list[Any]], list[Any]], args: list[Any], kinds: Any, what: str
    ) -> list[Any]:
        """Record the forward; once more in a pool of its own if something keeps memory that does not tell.

        In the pool of others, older recordings write there, too, and nothing would move what is kept.
        """
        given = args.copy(), kinds.copy()
        outputs = self._record(fn, args, kinds, what)
        if self._pool_index == 0 and self.graph.beside:
            outputs.clear()
            self._owner.close_recording(self.forward)
            self.description.stats.recordings -= 1
            self._pool_index = self._owner.new_pool()
            outputs = self._record(fn, *given, what)
        return outputs

    def _record(
        self, fn: Callable[[list[Any]], list[Any]], args: list[Any], kinds: Any, what: str
    ) -> list[Any]:
        d, owner, pool_index = self.description, self._owner, self._pool_index
        if what == "forward":
            self._generators = self._states.generators
        args += self._generators
        kinds += [InputKind.OPAQUE] * len(self._generators)
        infos = [InputInfo(f"input {i}", kind) for i, kind in enumerate(kinds)]
        layout = Layout(infos, check_static=True, check_layout=False)
        owner.begin_recording(pool_index)
        before = owner.driver.live_blocks(pool_index)
        recorder = Recorder(
            fn, layout, owner, False, what == "forward", d.stats, shares_inputs=False
        )
        label = f"recording {what} of {d.name}, graphed by hand"
        with progress.shown(label, current_defaults().progress), _blamed(d.name, what):
            recording = recorder.record(args, pool_index)
        owner.add_recording(recording)
        self._recordings[what] = recording
        d.stats.recordings += 1
        if what == "backward":
            self._consumed = {0: tuple(sorted({self._homes[i][1] for i in recording.consumes}))}
            made = {*recording.memory.addresses()}  # where some that are kept may have lain
            lost = (self.graph.beside & before) - (owner.driver.live_blocks(pool_index) - made)
            self._serves_once = self.graph.recomputes_once or bool(lost)
        if what != "forward":
            return recording.memory.aliases()
        self.forward = recording
        kept = owner.driver.live_blocks(pool_index) - before
        self.graph.beside = kept - {*recording.memory.addresses()}
        written = [(args[i].data, args[i].data.clone()) for i in sorted(recording.written)]
        outputs = recording.run(args)
        owner.note_handed_out(recording)
        for place, value in written:
            place.copy_(value)
        return outputs

    # ---- calls

    def is_free(self) -> bool:
        """Tell whether a replay of the forward overwrites nothing that a pending backward needs; other results were moved."""
        return not (self.closed or self.forward.memory.is_kept()) and self._clears(self.forward)

    def _clears(self, recording: Recording) -> bool:
        """Tell whether a replay overwrites nothing that is held, once that was moved which may."""
        return self._owner.is_safe(recording) or self._owner.rescue(recording)

    def why_not(self, args: Sequence[torch.Tensor]) -> str | None:
        """Say why a replay can't take these arguments and members; None if it can."""
        if not (self._strides or self._written or self._written_at):
            return None
        names = self.description.binding.names
        if self._written_at or (self._written and self.forward.outside):
            for i, name in enumerate(names):
                at = args[i].untyped_storage().data_ptr() if args[i].numel() else None
                if at in self._written_at or (i in self._written and at in self.forward.outside):
                    return f"{name} shares memory with a tensor of its own, and one is written (pass a clone, or use that one)"
        for i, stride in self._strides:
            if args[i].stride() != stride or args[i].is_conj() or args[i].is_neg():
                return f"{names[i]}, which it writes or returns, has another memory layout than the sample"
        if self._written and shared_with_written(args, self._written):
            written = " or ".join(names[i] for i in self._written)
            return f"{written}, which it writes, shares memory with something else that it is given"
        return None

    def run(self, args: list[torch.Tensor]) -> list[torch.Tensor]:
        """Replay the forward of arguments and members, and have autograd know of its backward; returns the results' tensors."""
        graph, states, with_grad = self.graph, self._states, torch.is_grad_enabled()
        torch_private.set_grad_enabled(False)  # where it raises, the caller sets it again
        position = None if states.recorded is None else states.position()
        results = self._replay(self.forward, args)
        torch_private.set_grad_enabled(with_grad)
        for n in self._cut_off:
            results[n] = results[n].detach()
        wanted = self._take_wanted(args)
        if not with_grad or not graph.with_grad or not any(t.requires_grad for t in wanted):
            return results
        for n, _ in self._given:
            results[n] = results[n].detach()  # the call's own argument gets no history
        call = Call(self, args[self._num_inputs :], position)
        self.forward.memory.kept_for = weakref.ref(call)
        checked = [*self._take_shared(results), *self._take_read(args)]
        where = wanted, self._edges, results, graph.with_grad
        fast.attach(_run_backward, call, *where, checked, (), "GraphedBackward")
        for n, i in self._given:
            is_leaf = not args[i].requires_grad  # other than the sample's
            results[n] = results[n].detach() if is_leaf else _SharedResult.apply(results[n])
        for n in self._overlapping:
            results[n] = _SharedResult.apply(results[n])
        return results

    def _replay(self, recording: Recording, args: list[Any]) -> list[Any]:
        """Replay a recording that overwrites nothing that is held."""
        owner, stats = self._owner, self.description.stats
        outputs = recording.run(args)
        stats.replays += 1
        stats.copied_bytes += recording.copied_bytes
        owner.note_handed_out(recording)
        if owner.copies_results:
            stats.copied_bytes += fast.copy_out(outputs, recording.own_at)
        return outputs

    def backward(self, call: Call, grads: list[Any]) -> list[Any]:
        """Gradients for what a call wanted some for."""
        owner, d = self._owner, self.description
        call.ended = not torch_private.keeps_graph()
        with owner.lock:
            owner.enter_call(is_backward=True)
            why = self._why_plain(call)
            if call.has_run and self._serves_once:
                raise GraphedBackwardError(
                    f"{call.name}: a second backward through one forward. {_LETS_GO}: ask for gradients together."
                )
            call.has_run = True
            if self._splits and call in d.due and not (why and call.is_plain):
                # what that needs would be overwritten, or lies elsewhere
                raise GraphedBackwardError(
                    f"{call.name}: a second backward through one forward before the backward_dw() of the first. Call "
                    "backward_dw() between them."
                )
            call.is_plain = why is not None
            if why is None:
                self._let_go(call)
                if call.position is not None:
                    self._states.rewind(call.position)
                found = self._replay(self._recordings["backward"], [*self._nothing, *grads])
            else:
                if self._serves_once:
                    raise GraphedBackwardError(
                        f"{call.name}: {why} between a forward and its backward. {_LETS_GO}: run the backward before."
                    )
                d.tell(f"runs a backward without a graph: {why}.")
                d.count_plain(f"a backward, since {why}")
                args = [*self._saved_of(call), *call.members, *grads]
                grads.clear()
                found = self._run_graph(args)
                if why == _OVERWRITES:
                    self.close()  # the next call records one that has a pool of its own
            self.graph.added.say_of(call.members)
            if self._splits:
                d.due.append(call)
            elif call.ended:
                call.settle()
        return found

    def _why_plain(self, call: Call) -> str | None:
        """Say why a backward can't be replayed; None if it can, and what it reads lies in its place."""
        backward = self._recordings.get("backward")
        if backward is None:
            return "its graphs were freed"
        if self.description.statics.layouts(call.members) != self._backward_key:
            return "its parameters moved"
        if self._clears(backward) and self._put_back(call):
            return None
        return _OVERWRITES

    def _put_back(self, call: Call) -> bool:
        """Have all that a call holds lie where it was made, if an earlier backward overwrote it; returns whether it may."""
        forward, memory, held = self.forward, self.forward.memory, call.held
        if held == [*memory.watch[0]]:
            return True
        memory.kept_for = None
        if not self._clears(forward):
            return False
        self._owner.note_handed_out(forward)
        memory.kept_for = weakref.ref(call)
        now = enumerate(zip(held, memory.watch[0], strict=True))
        # who holds a result may have emptied it
        moved = [k for k, (mine, at) in now if mine != at and mine.nbytes() >= at.nbytes()]
        memory.fill(moved, [held[k] for k in moved])
        return True

    def _let_go(self, call: Call) -> None:
        """Have nobody hold what the backward overwrites."""
        if call.ended:
            call.held = []
        if fast.any_held_among(((0, self.forward.memory),), self._consumed):
            with self._owner.changing():
                self.forward.rescue(self.forward.memory.held(self._consumed[0]))

    def _saved_of(self, call: Call) -> list[Any]:
        """Return what a call saved, wherever it lies by now; the call lets go of it if no further backward may come."""
        held, tensors = call.held, self.forward.memory.tensors
        if call.ended:
            call.held = []
        saved: list[Any] = self._constants.copy()
        for i, (number, k) in self._homes.items():
            saved[i] = torch_private.on_storage(held[k], tensors[number])
        for i, view in zip(self._views, self._views_of(call.members), strict=True):
            saved[i] = view
        return saved

    def _views_of(self, members: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the saved tensors that are views of arguments' copies and of members."""
        copies = [self.forward.placeholders[i].tensor for i in range(self._num_inputs)]
        return fast.views([*copies, *members], [alias.view for alias in self._views.values()])

    def run_weight_grads(self, call: Call) -> None:
        """Make the weights' gradients of a backward that lacks them, and add them to their `.grad`."""
        owner, members = self._owner, call.members
        with owner.lock, torch.no_grad():
            owner.enter_call(is_backward=True)
            recording = self._recordings.get("backward_dw")
            if recording is None and not call.is_plain:
                raise GraphedBackwardError(
                    f"{call.name}: its graphs were freed between a backward and its backward_dw()."
                )
            statics = self.description.statics
            if not call.is_plain and statics.layouts(members) != self._backward_key:
                raise StaticInputMovedError(
                    f"{call.name}: parameters moved between a backward and its backward_dw(). Keep them where they are."
                )
            if recording is None or call.is_plain:
                outputs = self.graph.weight_grads(members)
            else:
                is_safe = self._clears(recording)
                assert is_safe  # it has a pool of its own, and lies on what its backward consumed
                outputs = self._replay(recording, members)
            for parameter, grad in zip(members, outputs, strict=True):
                if grad is not None:
                    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
            self.graph.added_later.say_of(members)
            if call.ended and call not in self.description.due:
                call.settle()

    def close(self) -> None:
        """Free the graphs; what is held stays its holders', and a backward that is due runs without a graph."""
        self.closed = True
        for recording in self._recordings.values():
            self._owner.close_recording(recording)
        self._recordings.clear()


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _run_backward(call: Call, saved: list[Any] | None, grads: list[Any] | None) -> list[Any]:
    """See `fast.attach`. A backward may be called in what Dynamo runs, and would be traced."""
    run = _backward if torch_private.frame_callback() is None else _untraced
    return run(call, saved, grads)


def _backward(call: Call, saved: list[Any] | None, grads: list[Any] | None) -> list[Any]:
    if saved is None or grads is None:
        raise GraphedBackwardError(
            f"{call.name}: gradients of its gradients are not recorded. Call the original callable where you need them."
        )
    if call.pair is None:
        raise GraphedBackwardError(
            f"{call.name}: a second backward through one forward. Ask for its gradients together, or with retain_graph=True."
        )
    saved.clear()
    try:
        if not torch.is_grad_enabled():
            return call.pair.backward(call, grads)
        with torch.no_grad():  # of create_graph=True
            return call.pair.backward(call, grads)
    except BaseException:
        mend(open_modes)  # at once: by the next call the user may have set random numbers
        raise


_untraced = torch_private.outside_dynamo(_backward)


class _SharedResult(torch.autograd.Function):
    """A result that shares memory with an argument or another one: autograd refuses to have it changed in place."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor) -> torch.Tensor:
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors share an element, or part of one."""
    storage, size = a.untyped_storage(), a.dtype.itemsize
    if storage._cdata != b.untyped_storage()._cdata:
        return False
    if b.dtype.itemsize != size or overlaps_itself(a):
        return True
    marks = torch.zeros(storage.nbytes() // size, dtype=torch.bool, device="cpu")
    marks.as_strided(a.size(), a.stride(), a.storage_offset()).fill_(True)
    return bool(marks.as_strided(b.size(), b.stride(), b.storage_offset()).any())


# ---- captures that fail


@contextlib.contextmanager
def _blamed(name: str, direction: str) -> Iterator[None]:
    """Have what a capture raises name the callable and the line: `CaptureError` for what torch or CUDA refuse."""
    try:
        yield
    except CGPassError:
        raise
    except Exception as error:
        draws = "not registered with the graph" in str(error)  # of a generator; the driver's words
        if not (draws or is_capture_error(error)):
            raise
        reason = str(error).strip().split("\n", 1)[0].rstrip(".")
        where = "" if (line := raised_at(error)) is None else f", at {line}"
        fix = "Move the code that waits for the device or needs the host out of the callable, "
        if draws:
            fix = "Give the RNGStatesTracker that has the generator as GraphedOptions(rng_tracker=...), draw outside, "
        raise CaptureError(
            f"make_graphed_callables: the {direction} of {name} can't be captured{where}: {reason}. {fix}"
            'or use torch.compile(backend="cgpass"), which captures around it.'
        ) from error
