"""Calls of what is explained: with new copies of their inputs, and with their backward."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from cgpass import torch_private
from cgpass.report.reached import bytes_covered, has_storage, leaves_behind, tensors_of
from cgpass.report.state import State
from cgpass.runtime.inputs import bytes_of

_ALIGNMENT: Final = 64
"""Bytes; copies lie as far from a multiple of it as what they copy."""

_GRAPH_IS_GONE: Final = "Trying to backward through the graph a second time"
"""What autograd says of results of a function that ran their backward itself."""


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
        self._next: list[Any] | None = None
        self._keeps_gradients: bool | None = None
        """Whether those that a call leaves behind stay, as in a loop that zeroes them in place; None if not known yet."""
        self._copied = [i for i, leaf in enumerate(self._leaves) if _is_data(leaf, state)]
        self.devices = {self._leaves[i].device for i in self._copied}
        """Of the inputs that are copied."""
        state.keep(tensors_of([a for i, a in enumerate(self._leaves) if i not in self._copied]))

    def prepare(self) -> None:
        """Do what a call needs that is no part of it: copies of its inputs, and counters that are where they were."""
        self._state.rewind()
        self._next = self._inputs()

    def __call__(self) -> None:
        """Make one call, and drop what came of it; `prepare` comes before each, by itself if not called."""
        if self._next is None:
            self.prepare()
        inputs, self._next = self._next, None
        assert inputs is not None
        args, kwargs = pytree.tree_unflatten(inputs, self._spec)
        try:
            if self._training:
                with torch.enable_grad():
                    self._backward(self._fn(*args, **kwargs), inputs)
            else:
                with torch.no_grad():
                    self._fn(*args, **kwargs)
        finally:
            if self._keeps_gradients is None:
                self._keeps_gradients = self._state.gradients_are_zero()
            if not self._keeps_gradients:
                self._state.drop_gradients()
        self._last = inputs  # so that those of the next call lie elsewhere

    def _inputs(self) -> list[Any]:
        """The arguments with copies of data: one for each tensor, sharing memory as the originals do."""
        inputs = list(self._leaves)
        data = {id(inputs[i]): inputs[i] for i in self._copied}
        copies = dict(zip(data, _copies(list(data.values())), strict=True))
        for i in self._copied:
            inputs[i] = copies[id(inputs[i])]
        return inputs

    def _backward(self, result: Any, inputs: Sequence[Any]) -> None:
        outputs = differentiated(result)
        if not outputs:
            return
        mine = {id(inputs[i]) for i in self._copied}  # gone after the call, with their gradients
        behind = leaves_behind(outputs)
        leaves = [leaf for leaf in behind if id(leaf) not in mine]
        of_mine = any(leaf.grad is not None for leaf in behind if id(leaf) in mine)
        if of_mine or self._state.have_gradients(leaves):  # the function ran a backward itself
            return
        self._state.put_gradients_aside(leaves)
        self._keeps_gradients = False  # the function's own backward would have left some
        try:
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        except RuntimeError as error:
            if _GRAPH_IS_GONE not in str(error):
                raise


def _is_data(leaf: Any, state: State) -> bool:
    """Whether an argument is a tensor that changes from call to call, not a parameter or a cache."""
    if type(leaf) is not torch.Tensor or not has_storage(leaf) or state.holds(leaf):
        return False
    return not hasattr(leaf, "_dynamo_static_input_type")  # what mark_static_address leaves


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Leaves laid out as tensors, on copies of what they cover of their storages, with marks for Dynamo."""
    covered: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        key, (start, end) = tensor.untyped_storage()._cdata, bytes_covered(tensor)
        start -= start % _ALIGNMENT
        before = covered.get(key, (start, end))
        covered[key] = min(start, before[0]), max(end, before[1])
    storages: dict[int, torch.UntypedStorage] = {}
    copies = []
    for tensor in tensors:
        source = tensor.untyped_storage()
        start, end = covered[source._cdata]
        if source._cdata not in storages:
            with torch.no_grad():
                part = bytes_of(source)[start:end]
                storages[source._cdata] = part.clone().untyped_storage()
        offset = tensor.storage_offset() - start // tensor.element_size()
        copy = torch_private.on_storage(storages[source._cdata], tensor.detach(), offset=offset)
        copy.requires_grad_(tensor.requires_grad)
        vars(copy).update(vars(tensor))  # mark_dynamic and its like leave attributes
        copies.append(copy)
    return copies


def differentiated(result: Any) -> list[torch.Tensor]:
    """What a backward begins with: the loss of a model's output, else whatever requires grad."""
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return [loss]
    found = []
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(
            leaf, type
        ):  # one that pytree does not know
            names = [each.name for each in dataclasses.fields(leaf)]
            found += differentiated([getattr(leaf, name, None) for name in names])
    return found
