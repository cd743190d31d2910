"""Calls of what is explained: with new copies of their inputs, and with their backward."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cgpass import _torch
from cgpass.report.state import State, has_storage, leaves_behind, tensors_of
from cgpass.runtime.placeholders import bytes_of


class Calls:
    """Calls a function again and again, as a training loop or a server would: with other tensors in every call."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        state: State,
        *,
        training: bool,
    ) -> None:
        """Keep what a call needs.

        Args:
            fn: What to call.
            args: Given by position.
            kwargs: Given by name.
            state: Of what the function reaches; keeps gradients that are found on the way.
            training: Whether to run the backward, too.
        """
        self._fn = fn
        self._leaves, self._spec = pytree.tree_flatten((args, dict(kwargs)))
        self._state = state
        self._training = training
        self._last: list[Any] = []
        self._copied = [i for i, leaf in enumerate(self._leaves) if _is_data(leaf, state)]
        self.devices = {self._leaves[i].device for i in self._copied}
        """Of the inputs that are copied."""
        state.keep(tensors_of([a for i, a in enumerate(self._leaves) if i not in self._copied]))

    def __call__(self) -> None:
        """Make one call, and drop what came of it."""
        inputs = self._inputs()
        args, kwargs = pytree.tree_unflatten(inputs, self._spec)
        try:
            if self._training:
                with torch.enable_grad():
                    self._backward(self._fn(*args, **kwargs))
            else:
                with torch.no_grad():
                    self._fn(*args, **kwargs)
        finally:
            self._state.drop_gradients()
        self._last = inputs  # so that those of the next call lie elsewhere

    def _inputs(self) -> list[Any]:
        inputs = list(self._leaves)
        storages: dict[int, torch.UntypedStorage] = {}
        for i in self._copied:
            inputs[i] = _copy(inputs[i], storages)
        return inputs

    def _backward(self, result: Any) -> None:
        outputs = differentiated(result)
        if not outputs:
            return
        self._state.put_gradients_aside(leaves_behind(outputs))
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def _is_data(leaf: Any, state: State) -> bool:
    """Whether an argument is a tensor that changes from call to call, not a parameter or a cache."""
    if type(leaf) is not torch.Tensor or not has_storage(leaf) or state.holds(leaf):
        return False
    return not hasattr(leaf, "_dynamo_static_input_type")  # what mark_static_address leaves


def _copy(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """A leaf laid out as a tensor, on a copy of its storage, which other inputs may share."""
    source = tensor.untyped_storage()
    if source._cdata not in storages:
        with torch.no_grad():
            storages[source._cdata] = bytes_of(source).clone().untyped_storage()
    copy = _torch.on_storage(storages[source._cdata], tensor.detach())
    return copy.requires_grad_(tensor.requires_grad)


def differentiated(result: Any) -> list[torch.Tensor]:
    """What a backward begins with: the loss of a model's output, else whatever requires grad."""
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return [loss]
    leaves = pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
