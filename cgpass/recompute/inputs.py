"""The arguments of a checkpoint, kept until its backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


class _Keep(torch.autograd.Function):
    """A node that is there for its saved tensors only: hooks around a checkpoint see them, versions are checked."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(anchor)


def anchor() -> torch.Tensor:
    """An empty tensor that requires grad: with it among its inputs a function always gets a node."""
    return torch.empty(0, device="cpu", requires_grad=True)


class Arguments:
    """Arguments and keyword arguments, their tensors apart, however deeply nested."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Args: args, kwargs: of a call; only `split` and what it returns hold their tensors."""
        self._leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._places = [i for i, v in enumerate(self._leaves) if isinstance(v, torch.Tensor)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors, until `split`."""
        return [self._leaves[i] for i in self._places]

    def split(self) -> list[torch.Tensor]:
        """Take the tensors out."""
        tensors = self.tensors
        for i in self._places:
            self._leaves[i] = None
        return tensors

    def call(self, fn: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> Any:
        """Call `fn` with `tensors` in their places."""
        leaves = list(self._leaves)
        for i, tensor in zip(self._places, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        del leaves, tensors
        return fn(*args, **kwargs)


class KeptTensors:
    """Tensors kept as autograd keeps what it saves.

    **Lifetime:** holds the tensors until it dies, or whatever the saved-tensor hooks around it made of them.
    Reading one that was changed in place since raises autograd's own error.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        """Args: tensors: of any dtype, on any devices."""
        with torch.enable_grad():
            # the output and not its grad_fn: that, a Python object, doesn't keep the node of the graph alive
            self._output: Any = _Keep.apply(anchor(), *tensors)

    @property
    def node(self) -> Any:
        """What they are saved on."""
        return self._output.grad_fn

    def get(self) -> tuple[torch.Tensor, ...]:
        """The tensors, with the graph they came with."""
        return self.node.saved_tensors


def devices_of(tensors: list[torch.Tensor]) -> tuple[torch.device, ...]:
    """Where a computation with `tensors` may draw random numbers, the CPU apart: their devices, and CUDA's current."""
    found = dict.fromkeys(t.device for t in tensors if t.device.type not in ("cpu", "meta"))
    if torch.cuda.is_initialized():
        found[torch.device("cuda", torch.cuda.current_device())] = None
    return tuple(found)
