"""What an autograd graph says of itself: the leaves that it reaches, checkpoints in it, and its gradients."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from cgpass import torch_private
from cgpass.graphed.values import no_autocast
from cgpass.recompute.gradients import gradients
from cgpass.recompute.nonreentrant import Checkpoint

_REENTRANT = ("CheckpointFunctionBackward", "_ReentrantBackward")
"""Nodes whose backward needs a pass that accumulates everywhere: torch's and our own."""


class GraphFacts:
    """Facts about the graph behind some outputs."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        """Walk it; computes and changes nothing.

        Args:
            outputs: Where it begins.
        """
        self.leaves: list[torch.Tensor] = []
        """What would get a `.grad`."""
        self.is_reentrant = False
        """Whether a checkpoint with `use_reentrant=True` lies in it."""
        self.saved: list[torch.Tensor] = []
        """What it saved, or checkpoints in it keep to recompute from, and autograd checks the versions of."""
        seen: set[Any] = set()
        open_: list[Any] = [out.grad_fn for out in outputs]
        self.leaves += [out for out in outputs if out.grad_fn is None]
        while open_:
            node = open_.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None:
                self.leaves.append(variable)
            self._note_saved(torch_private.saved_on(node), seen)
            self.is_reentrant |= node.name() in _REENTRANT
            open_.extend(following for following, _ in node.next_functions)

    def _note_saved(self, saved: Iterable[Any], seen: set[Any]) -> None:
        open_ = list(saved)
        while open_:
            each = open_.pop()
            hook = torch_private.unpack_hook(each)
            tensor = torch_private.saved_tensor(each)
            if tensor is not None:
                self.saved.append(tensor)
            if hook is not None and id(hook) not in seen:
                seen.add(id(hook))
                open_ += _kept_to_recompute(hook)


def _kept_to_recompute(hook: Any) -> list[Any]:
    """What a checkpoint without reentrancy keeps of its arguments, if a hook is one of its."""
    checkpoint = getattr(hook, "__self__", None)
    if isinstance(checkpoint, Checkpoint):
        return list(torch_private.saved_on(checkpoint.keeper))
    return torch_private.kept_by_checkpoint(hook)


def take_gradients(
    outputs: Sequence[torch.Tensor],
    grad_outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    reentrant: bool,
    retain_graph: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of `inputs`, None for what the outputs don't depend on; no `.grad` changes and no hook of a leaf runs.

    They are those of a backward outside of `torch.autocast`.

    Args:
        outputs: Whose gradients are given.
        grad_outputs: One for each of `outputs`.
        inputs: Leaves.
        reentrant: As `GraphFacts.is_reentrant`.
        retain_graph: As for `torch.autograd.backward`.
    """
    if not inputs:
        return ()
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_autocast(outputs))
        for tensor in inputs:  # they run when the gradient reaches the leaf, in every backward
            stack.enter_context(_hooks_put_aside(tensor))
        if not reentrant:
            return torch.autograd.grad(
                list(outputs),
                list(inputs),
                list(grad_outputs),
                retain_graph=retain_graph,
                allow_unused=True,
            )
        return gradients(outputs, grad_outputs, inputs, retain_graph=retain_graph)


@contextlib.contextmanager
def _hooks_put_aside(tensor: torch.Tensor) -> Iterator[None]:
    """Have a leaf without hooks for a block."""
    dicts: list[dict[Any, Any]] = [
        hooks
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
        if (hooks := getattr(tensor, name, None))
    ]
    kept = [dict(hooks) for hooks in dicts]
    for hooks in dicts:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(dicts, kept, strict=True):
            hooks.update(before)


def outputs_read_by_graph(outputs: Sequence[Any]) -> list[int]:
    """Positions of outputs whose memory a backward reads, told by who holds it besides `outputs`.

    Args:
        outputs: What a function returned; nobody else but its graph holds them.
    """
    holders: dict[int, set[int]] = {}
    tensors = [(i, out) for i, out in enumerate(outputs) if isinstance(out, torch.Tensor)]
    for _, tensor in tensors:
        among = holders.setdefault(_storage_of(tensor), set())
        base = tensor
        while base is not None:
            among.add(id(base))
            base = base._base
    alone = torch.empty(1)
    spare = torch_private.storage_use_count(_storage_of(alone)) - 1
    return [
        i
        for i, tensor in tensors
        if tensor.grad_fn is not None
        and torch_private.storage_use_count(_storage_of(tensor))
        > len(holders[_storage_of(tensor)]) + spare
    ]


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
