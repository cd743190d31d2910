"""`Differentiated`: a callable as two functions, its forward and the backward of that, with explicit saved tensors.

Note [A backward with explicit saved tensors]
    A forward that ran under autograd leaves a graph whose nodes have saved tensors. They are taken out: each gets hooks
    that replace it by a number. What is left is a backward as AOTAutograd makes one, a function of saved tensors and
    gradients. It may run any number of times, also for saved tensors of other runs of the same forward: those that a
    replay of the forward computes.

    Parameters and buffers are given to the callable as stand-ins that lie where the module's own do, and only while it
    runs. So the graph knows no leaf of the user's: no hook of a parameter runs inside of a recording, no `.grad`
    changes, and the node that adds to `.grad` stays on the user's stream. Warm-ups run on copies and change nothing. A
    stand-in that is saved as such stays in the graph: code finds attributes on it (`weight.main_grad`), which hooks of
    saved tensors would lose. For that reason hooks are registered afterwards, and not by `saved_tensors_hooks`.

    Some nodes don't tell what they saved (autograd functions in C++), and Python code may keep tensors as it likes
    (`ctx.x = x`, weight gradients that are computed later). So a recording serves one call until its backward is done,
    and copies arguments to memory of its own. What is kept of the pool besides results and saved tensors is found by who
    owns memory there after a capture (`beside`): such a recording has a pool of its own.
"""

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from cgpass import torch_private
from cgpass.graphed.binding import like_leaf
from cgpass.graphed.modules import ACCUMULATED, Statics
from cgpass.recompute.checkpointed import Checkpoint
from cgpass.runtime.changes import Mode
from cgpass.runtime.inputs import check_tensor, layout_of
from cgpass.runtime.writes import has_place

if TYPE_CHECKING:
    from cgpass.graphed.callables import GraphedFunction

_SAYS_SO = "grad_added_to_main_grad"
_REENTRANT = "CheckpointFunctionBackward"
"""Nodes of torch's checkpoints that are no hooks of saved tensors."""


class Differentiated:
    """One run of a callable under autograd, and its backward as a function."""

    def __init__(self, d: "GraphedFunction", flags: tuple[bool, ...], *, warms_up: bool) -> None:
        """Describe a run. See Note [A backward with explicit saved tensors]."""
        self._d, self._flags, self._warms_up = d, flags, warms_up
        self._statics = d.statics  # modules may have others by the time of a pending backward
        self._num_inputs = len(d.binding.samples)
        self.leaves: list[torch.Tensor] = []
        """Tensors that may get a gradient: arguments, then stand-ins for parameters and buffers."""
        self._saved: list[torch.Tensor | None] = []
        self._left: list[float] = []
        self._uses: list[float] = []
        """The number of uses of each saved tensor, infinite for code in Python."""
        self._edges: list[Any] = []
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Of autograd functions in the graph, and as the forward left them: a backward may let go of what it read."""
        self.result: Any = None
        """Results of the callable, until `separate`."""
        self.with_grad: list[int] = []
        """Results that have a gradient."""
        self.given_back: list[int] = []
        """Results that are an argument, a parameter or a buffer themselves."""
        self.read: set[int] = set()
        """Of `leaves`, parameters and buffers that the graph saved as they are."""
        self._reached: set[int] = set()
        self.wanted: tuple[int, ...] = ()
        """Of `leaves`, those that the graph leads to, in order."""
        self.added, self.added_later = _Added(), _Added()
        """Members to whose `main_grad` the backward adds, and those to whose it is added later."""
        self.beside: set[int] = set()
        """Blocks of the pool that are kept otherwise than as results and saved tensors."""
        self.recomputes_once = False
        """True if a checkpoint inside is selective: the recording did what it allows once."""

    # ---- forward

    def forward(self, args: Sequence[torch.Tensor]) -> list[Any]:
        """Run the callable on inputs, then members, which lie where they are told; returns its result's tensors without a history."""
        d, binding, end = self._d, self._d.binding, self._num_inputs
        # with counters of their own: what an autograd function in C++ saved is not checked against copies of later calls
        places = [t.clone() if self._warms_up else t.data for t in args[:end]]
        places += [t.new_empty(0) for t in args[end:]]
        distinct = self._statics.distinct()
        self.leaves = list(map(like_leaf, [*binding.samples, *distinct], places))
        numbers = _positions(distinct)
        self._stand_in_of = [numbers[id(tensor)] for tensor in self._statics.now()]
        """For each name of a member, the number of its stand-in."""
        versions = [t._version for t in self.leaves]
        given, kwargs = binding.call(self.leaves[:end], self._flags)
        self._first_node = torch_private.next_number()
        with (
            torch_private.autocast_cache_off(),
            self._placed(args[end:]),
            torch.set_grad_enabled(d.with_grad),
        ):
            self.result = d.ungraphed(*given, **kwargs)
            tensors = filter(torch.is_tensor, pytree.tree_leaves(self.result))
            outputs = list({id(t): t for t in tensors}.values())
            for out in outputs:
                check_tensor(f"{d.name}: a result", out, out.device)
            results = [out.detach() for out in outputs]
            edge = torch.autograd.graph.get_gradient_edge
            # while stand-ins have their sizes: one may be a result
            edges = [edge(out) if d.with_grad and _has_history(out) else None for out in outputs]
            self._refuse_own_gradients("when it runs")
        known = _positions(self.leaves)
        self.given_back = [i for i, out in enumerate(outputs) if id(out) in known]
        self.with_grad = [i for i, each in enumerate(edges) if each is not None]
        self._edges = [edges[i] for i in self.with_grad]
        for i, leaf in enumerate(self.leaves[:end]):
            if self._warms_up and _loses_data(leaf, places[i]):
                raise d.refusal(f"gives {binding.names[i]} new data. Write in place (copy_)")
        written = [i for i, leaf in enumerate(self.leaves) if leaf._version != versions[i]]
        for i in written:
            if i < end and self.leaves[i].requires_grad:
                raise d.refusal(
                    f"writes {binding.names[i]} in place, and it or the value requires grad. Write to a copy"
                )
        torch.autograd.graph.increment_version([args[i] for i in written])
        return results

    # ---- the graph

    def separate(self) -> list[torch.Tensor]:
        """Take the saved tensors out of the graph and return them, the same one once; forget the result."""
        numbers, end = _positions(self.leaves), self._num_inputs
        found = []
        for node, each in self._saved_tensors():
            tensor: Any = None if each is None else torch_private.saved_tensor(each)
            if numbers.get(id(tensor), -1) >= end:
                self.read.add(numbers[id(tensor)])
            elif self._can_be_taken(tensor):
                uses = math.inf if isinstance(node, torch.autograd.function.FunctionCtx) else 1
                found.append((each, uses))
        tensor = node = each = self.result = None
        slots: dict[Any, int] = {}
        saved: list[torch.Tensor] = []
        unpack = weakref.WeakMethod(self._unpack)  # the graph is held by this, and does not hold it
        with torch.no_grad(), torch_private.without_modes():  # which would see numbers as such
            while found:
                each, uses = found.pop(0)
                pack = functools.partial(_pack, self._uses, uses, slots, saved)
                each.register_hooks(pack, lambda slot: unpack()(slot))  # pyrefly: ignore
        each, taken = None, saved.copy()
        saved.clear()  # the graph holds what packs
        self.wanted = tuple(sorted(self._reached))
        return taken

    def _can_be_taken(self, tensor: Any) -> bool:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or _is_memoryless(tensor):
            return False
        return tensor.device == self._d.binding.device

    def _saved_tensors(self) -> Iterator[tuple[Any, Any]]:
        """Nodes with what they saved, also to recompute from."""
        known = _positions(self.leaves)
        seen: set[Any] = {None}
        open_ = [edge.node for edge in self._edges]
        while open_:
            node = open_.pop()
            if node in seen:
                continue
            seen.add(node)
            self._check_node(node, known)
            if isinstance(node, torch.autograd.function.FunctionCtx):
                self._attributes.append((vars(node), dict(vars(node))))
            open_ += [following for following, _ in node.next_functions]
            yield node, None
            for each, checkpoint in self._saved_on(node):
                if checkpoint is None:
                    yield node, each
                else:
                    open_.append(checkpoint.keeper)

    def _check_node(self, node: Any, known: dict[int, int]) -> None:
        """Note a leaf; refuse what is of another graph, before that is changed. The run may make an empty leaf."""
        d, variable = self._d, getattr(node, "variable", None)
        if torch_private.number_of(node) < self._first_node:
            raise d.refusal(
                f"uses a result of {node.name()} that requires grad and was made outside of it. Pass it as an argument, or "
                "detach it"
            )
        if id(variable) in known:
            self._reached.add(known[id(variable)])
        elif variable is not None and variable.numel() and self._statics.unchanged():
            raise d.refusal(
                f"uses a tensor of shape {list(variable.shape)} that requires grad and is neither an argument nor read as "
                "an attribute of its modules. Name the module that has it, as in make_graphed_callables(fn, "
                "sample_args, modules=(model,)), and read it there; if it is made inside, pass it as an argument"
            )

    def _saved_on(self, node: Any) -> Iterator[tuple[Any, Checkpoint | None]]:
        """Yield what a node saved, or the checkpoint that recomputes it."""
        saved = list(torch_private.saved_on(node))
        hooks = [torch_private.unpack_hook(each) for each in saved]
        if not any(hooks):
            torch_private.check_versions(node)
        modules = {getattr(hook, "__module__", None) for hook in hooks}
        if "torch.utils.checkpoint" in modules or node.name() == _REENTRANT:
            raise self._d.refusal(
                "uses torch.utils.checkpoint, which can't recompute in a graph. Use cgpass.checkpoint instead"
            )
        for each, hook in zip(saved, hooks, strict=True):
            checkpoint = getattr(hook, "__self__", None)
            if isinstance(checkpoint, Checkpoint):
                self.recomputes_once |= checkpoint.is_selective
                yield each, checkpoint
            elif hook is None:
                yield each, None

    def _unpack(self, slot: Any) -> torch.Tensor:
        """The saved tensor that a number stands for."""
        if isinstance(slot, torch.Tensor):
            return slot
        tensor = self._saved[slot]
        assert tensor is not None
        self._left[slot] -= 1
        if not self._left[slot]:  # its memory is for what follows
            self._saved[slot] = None
        return tensor

    # ---- backward

    def backward(
        self,
        saved: list[Any],
        grads: list[Any],
        members: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        """Gradients of `wanted`, or None, as outside of `torch.autocast`, each in memory of its own.

        The lists are emptied.
        """
        for attributes, values in self._attributes:
            attributes.update(values)
        self._saved, self._left = list(saved), list(self._uses)
        storages = [t.untyped_storage() for t in saved if has_place(t)]
        ends = [(each.data_ptr(), torch_private.WeakStorage(each)) for each in storages]
        others = [t.untyped_storage() for t in (*grads, *members) if has_place(t)]
        taken = self.beside.union(each.data_ptr() for each in others)
        given = list(grads)
        del storages, others
        saved.clear()
        grads.clear()
        if not self.wanted:
            return []
        try:
            with (
                torch_private.autocast_cache_off(),
                self._placed(members),
                self.added.noted(self.leaves[self._num_inputs :]),
                self._no_autocast(),
                # Else autograd runs it in its thread for the device, where the backward of another thread's call may
                # wait for the owner, which this thread has.
                torch.autograd.set_multithreading_enabled(False),
            ):
                found = torch.autograd.grad(
                    self._edges,
                    [self.leaves[i] for i in self.wanted],
                    given,
                    retain_graph=True,
                    allow_unused=True,
                )
        finally:
            self._saved = []
        self._refuse_own_gradients("in its backward")
        layouts = {grad.layout for grad in found if grad is not None} - {torch.strided}
        if layouts:
            raise self._d.refusal(f"has gradients of layout {layouts.pop()}. Make them dense")
        # a gradient may lie where a saved tensor was that is gone
        return _apart(found, taken.union(at for at, each in ends if not each.expired()))

    def _refuse_own_gradients(self, when: str) -> None:
        """Refuse what adds to `.grad` by itself, as by `torch.autograd.backward` inside."""
        end, names = self._num_inputs, dict(enumerate(self._d.binding.names))
        names |= {end + n: k for n, k in zip(self._stand_in_of, self._statics.names, strict=True)}
        for n, leaf in enumerate(self.leaves):
            if leaf.grad is not None:
                raise self._d.refusal(
                    f"adds to {names[n]}.grad {when}, and a replay would not. Return the gradient, as "
                    "torch.autograd.grad gives it"
                )

    def _placed(self, members: Sequence[torch.Tensor]) -> "_Placed":
        stand_ins = self.leaves[self._num_inputs :]
        held = [stand_ins[n] for n in self._stand_in_of]
        checks = self._warms_up
        return _Placed(self._statics, self._d.refusal, held, stand_ins, members, checks)

    def _no_autocast(self) -> torch.autocast:
        return torch.autocast(self._d.binding.device.type, enabled=False)

    def weight_grads(self, members: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """For each member the gradient that the backward left out, as `backward_dw` makes it, or None."""
        make = self._d.makes_weight_grads
        assert make is not None
        stand_ins = self.leaves[self._num_inputs :]
        with (
            torch_private.autocast_cache_off(),
            self._placed(members),
            self.added_later.noted(stand_ins),
            self._no_autocast(),
        ):
            make()
            found = [None if t.grad is None else t.grad.clone() for t in stand_ins]
            for stand_in in stand_ins:
                stand_in.grad = None
        return found


class _Added:
    """Members whose `grad_added_to_main_grad` is set: fused backwards say so that they leave no gradient to add."""

    def __init__(self) -> None:
        self._numbers: set[int] = set()

    @contextlib.contextmanager
    def noted(self, stand_ins: Sequence[torch.Tensor]) -> Iterator[None]:
        """Note for which stand-ins a block says so."""
        for each in stand_ins:
            if _SAYS_SO in vars(each):
                setattr(each, _SAYS_SO, False)
        yield
        found = [n for n, each in enumerate(stand_ins) if getattr(each, _SAYS_SO, False)]
        self._numbers.update(found)

    def say_of(self, members: Sequence[torch.Tensor]) -> None:
        """Say so of a call's members."""
        for n in self._numbers:
            setattr(members[n], _SAYS_SO, True)


class _Placed(Mode):
    """Have the stand-ins of a run lie on memory, and the modules have them, for a block that rebinds none of them."""

    def __init__(
        self,
        statics: Statics,
        refusal: Callable[[str], Exception],
        held: Sequence[torch.Tensor],
        stand_ins: Sequence[torch.Tensor],
        places: Sequence[torch.Tensor],
        checks: bool,
    ) -> None:
        """Refuse new values that a replay would lose, if it `checks`: that reads them on the host."""
        super().__init__()
        self._statics, self._refusal, self._held, self._checks = statics, refusal, held, checks
        self._stand_ins, self._places = stand_ins, places
        self._before = statics.held()

    def begin(self) -> None:
        for stand_in, place in zip(self._stand_ins, self._places, strict=True):
            stand_in.data = place.detach()
            if ACCUMULATED in vars(place):  # another one by now
                setattr(stand_in, ACCUMULATED, getattr(place, ACCUMULATED))
        self._statics.put(self._held)

    def undo(self) -> None:
        self._statics.put(self._before)
        for stand_in in self._stand_ins:
            stand_in.data = stand_in.new_empty(0)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        now = self._statics.held() if kind is None else self._held
        lost = set[int]()
        if kind is None and self._checks:
            stand_ins = zip(self._stand_ins, self._places, strict=True)
            lost = {id(each) for each, place in stand_ins if _loses_data(each, place)}
        super().__exit__(kind, *error)
        each = zip(self._statics.names, now, self._held, strict=True)
        names = [name for name, tensor, held in each if tensor is not held or id(held) in lost]
        if names:
            raise self._refusal(
                f"assigns a new tensor to {', '.join(names)} when it runs, and a replay would not. Write in place, as in "
                "self.buffer.copy_(value) or self.buffer.add_(1)"
            )


def _positions(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Positions of tensors by their `id`."""
    return {id(tensor): i for i, tensor in enumerate(tensors)}


def _pack(
    all_uses: list[float],
    uses: float,
    slots: dict[Any, int],
    saved: list[torch.Tensor],
    tensor: Any,
) -> Any:
    """Take a tensor that a graph saved; returns its number, the same for the same tensor."""
    if not isinstance(tensor, torch.Tensor):  # a number that was an operand
        dtype = torch.float64 if type(tensor) is float else None
        return torch.tensor(tensor, dtype=dtype, device="cpu")  # whatever the default device is
    storage = tensor.untyped_storage()._cdata
    slot = slots.setdefault((storage, tensor.storage_offset(), *layout_of(tensor)), len(slots))
    if slot < len(all_uses):
        all_uses[slot] += uses
        return slot
    kept = tensor.detach()
    saved.append(kept if tensor.numel() else torch.empty_like(kept))
    all_uses.append(uses)
    return slot


def _has_history(tensor: torch.Tensor) -> bool:
    """Tell whether gradients go anywhere: not from a view of a leaf under no_grad, though it says that it requires grad."""
    return tensor.requires_grad and not (tensor._is_view() and tensor.grad_fn is None)


def _is_memoryless(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided or torch_private.is_zero_tensor(tensor)


def _loses_data(tensor: torch.Tensor, place: torch.Tensor) -> bool:
    """Tell whether a stand-in was given other values by new memory: cuDNN's RNNs move weights, which is none."""
    if not tensor.numel() or tensor.untyped_storage()._cdata == place.untyped_storage()._cdata:
        return False
    return tensor.shape != place.shape or not torch.equal(tensor, place)


def _apart(grads: Iterable[torch.Tensor | None], taken: set[int]) -> list[torch.Tensor | None]:
    """Gradients in memory of their own, each: they are their receiver's, who may add to them in place."""
    found: list[torch.Tensor | None] = []
    for grad in grads:
        if grad is None or _is_memoryless(grad):
            found.append(grad)
            continue
        address = grad.untyped_storage().data_ptr()
        found.append(grad.detach().clone() if address in taken else grad.detach())
        taken.add(address)
    return found
