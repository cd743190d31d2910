"""Custom operators whose autograd formula reads data on the host: the formula runs as an operator of its own.

AOTAutograd traces a custom operator's Python formula into the joint graph. One that reads data (`offsets.tolist()`)
fails there, and Dynamo would break the graph. So formulas are watched while a function is compiled: if one fails,
`cgpass::formula` is traced in its place. It gets what the formula found in autograd's context and runs it on real
tensors, between captured partitions, and so does the operator itself, which may read data as well.
"""

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from cgpass import torch_private
from cgpass.compile.facts.capturability import note_untraceable

log = logging.getLogger(__name__)


class _Here(threading.local):
    calls: "list[_Call] | None" = None
    """Those that were traced in what this thread compiles; None while it compiles nothing."""


_here = _Here()


@dataclass(frozen=True)
class _Call:
    """One traced call of a formula: all that is no tensor and no symbol."""

    formula: Callable[..., Any]
    leaves: tuple[Any, ...]
    """Values of the context; for a tensor or symbol its type."""
    spec: TreeSpec
    needs: tuple[bool, ...]
    made: tuple[tuple[int, torch.dtype, torch.device], ...]
    """Number of dimensions, dtype and device of each gradient."""


_calls: weakref.WeakValueDictionary[int, _Call] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@contextmanager
def watched(gm: fx.GraphModule, calls: list[Any]) -> Iterator[None]:
    """Have formulas of custom operators in Dynamo's graph that can't be traced run as operators inside of the block.

    What compiled graphs need of these is added to `calls`, which they must keep alive.
    """
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            torch_private.wrap_formula(node.target, _watching)
    with torch_private.replaced(_here, "calls", calls):
        yield


def _watching(
    op: torch._ops.OpOverload, setup: Callable[..., Any] | None, formula: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The formula of an operator, and what sets its context up, as they run while functions are compiled or not."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], **given: Any) -> None:
        if setup is not None:
            setup(ctx=ctx, inputs=inputs, **given)
        if _here.calls is not None:
            ctx._cgpass_inputs = [
                (tuple(value.shape), value.dtype, value.device)
                if isinstance(value, torch.Tensor)
                else None
                for value in inputs
            ]

    def backward(ctx: Any, *grads: Any) -> Any:
        if _here.calls is None:
            return formula(ctx, *grads)
        try:
            with torch_private.no_data_dependence():
                return formula(ctx, *grads)
        except Exception as error:  # whatever it is, AOTAutograd would meet it
            log.info("the autograd formula of %s can't be traced: %r", op, error)
        note_untraceable(op)
        return _called(op, formula, ctx, grads, _here.calls)

    return setup_context, backward


def _called(
    op: torch._ops.OpOverload,
    formula: Callable[..., Any],
    ctx: Any,
    grads: Sequence[Any],
    calls: list[_Call],
) -> tuple[torch.Tensor | None, ...]:
    """The gradients, by a call of `cgpass::formula`."""
    known = dict(vars(ctx))
    inputs = known.pop("_cgpass_inputs")
    needs = tuple(ctx.needs_input_grad)
    wanted = [found for found, need in zip(inputs, needs, strict=False) if need]
    leaves, spec = tree_flatten({**known, "saved_tensors": tuple(ctx.saved_tensors)})
    kinds = (torch.Tensor, torch.SymInt)
    kept = tuple(next((kind for kind in kinds if isinstance(leaf, kind)), leaf) for leaf in leaves)
    numbers = [leaf for leaf in leaves if isinstance(leaf, torch.SymInt)]
    for shape, _, _ in wanted:
        numbers += shape
    number = next(_numbers)
    made = tuple((len(shape), dtype, device) for shape, dtype, device in wanted)
    calls.append(_Call(formula, kept, spec, needs, made))
    _calls[number] = calls[-1]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    found = iter(torch.ops.cgpass.formula(str(op), number, tensors, list(grads), numbers))
    return tuple(next(found) if need else None for need in needs)


def _empty(call: int, numbers: Sequence[int]) -> list[torch.Tensor]:
    """Memory for each gradient, whose sizes come last of the numbers."""
    made = _calls[call].made
    at, found = len(numbers) - sum(rank for rank, _, _ in made), []
    for rank, dtype, device in made:
        found.append(torch.empty(numbers[at : at + rank], dtype=dtype, device=device))
        at += rank
    return found


@torch.library.custom_op(
    "cgpass::formula",
    mutates_args=(),
    schema="(str op, int call, Tensor[] tensors, Tensor?[] grads, SymInt[] numbers) -> Tensor[]",
    tags=(torch.Tag.cudagraph_unsafe,),
)
def _formula(
    op: str,
    call: int,
    tensors: list[torch.Tensor],
    grads: list[torch.Tensor | None],
    numbers: list[int],
) -> list[torch.Tensor]:
    """Gradients for the inputs that need one, zeros where the formula returns None; they alias neither inputs nor each other."""
    known = _calls[call]
    given = {torch.Tensor: iter(tensors), torch.SymInt: iter(numbers)}
    leaves = [
        next(given[leaf]) if isinstance(leaf, type) and leaf in given else leaf
        for leaf in known.leaves
    ]
    ctx = SimpleNamespace(**tree_unflatten(leaves, known.spec), needs_input_grad=known.needs)
    with torch_private.autograd_keys_on(), torch.no_grad():
        result = known.formula(ctx, *grads)
        found = result if isinstance(result, tuple) else (result,)
        wanted = list(itertools.compress(found, known.needs))
        taken = {_storage(t) for t in filter(torch.is_tensor, (*tensors, *grads))}
        return [
            _own(grad, plain, taken)
            for grad, plain in zip(wanted, _empty(call, numbers), strict=True)
        ]


@_formula.register_fake
def _(op: str, call: int, tensors: Any, grads: Any, numbers: Sequence[int]) -> list[torch.Tensor]:
    del op, tensors, grads
    return _empty(call, numbers)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _own(grad: torch.Tensor | None, plain: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """A gradient laid out as its fake, in memory that is not among the `taken` storages."""
    if grad is None:
        return plain.zero_()
    if grad.shape != plain.shape:
        grad = grad.sum_to_size(plain.shape)
    fits = grad.dtype == plain.dtype and grad.stride() == plain.stride()
    if not fits or _storage(grad) in taken:
        grad = plain.copy_(grad)
    taken.add(_storage(grad))
    return grad
