"""The functions of `_native.cpp`, which says what each does, and the node of autograd's graph.

They are there once `native.wait()` returned True, and until then nothing calls them: see Note [Where there is no native
code]. Callers write `fast.aliases(...)` and never import the functions themselves.

Note [A node of our own]
    AOTAutograd makes one `autograd.Function` per compiled function, and `Function.apply` gets every parameter as an
    argument: with 400 parameters it takes about half a millisecond on the host, before the GPU has anything to do, and
    as much again to save tensors and to read them. The compiled node gets a list, makes an edge per input that requires
    grad and saves what is to be saved. It is a node like those of torch's own operators: hooks on tensors, on
    parameters and on their accumulation, hooks on saved tensors, `retain_graph`, `autograd.grad` of some inputs and the
    check that nothing saved was written all work as for those.
"""

import operator
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

import torch

from cgpass import torch_private

ViewSpec = tuple[int, torch.Tensor, int]
"""Position of an input, what a view of it is laid out as, bytes from the input's first element to the view's."""
Watch = tuple[tuple[torch.UntypedStorage, ...], bytes]
"""Storages, and three 64-bit integers for each: StorageImpl, address and number of users that it should have."""
NOTHING: Final[tuple[list[Any], bytes]] = [], b""
"""What `contents` compares with where there is no earlier result."""

is_loaded = False
"""True if the functions are there."""


def __getattr__(name: str) -> Any:
    raise AttributeError(f"there is no native code that could have {name}")


def taker(positions: tuple[int, ...]) -> Callable[[Sequence[Any]], list[Any]]:
    """A function that makes a list of the values at `positions`: without native code, too."""
    first, end = (positions[0], positions[0] + len(positions)) if positions else (0, 0)
    if positions == tuple(range(first, end)):
        return lambda values: list(values[first:end])
    if len(positions) < 2:
        return lambda values: [values[i] for i in positions]
    take = operator.itemgetter(*positions)
    return lambda values: list(take(values))


def fill_in(module: ModuleType) -> None:
    """Have the functions of the compiled module from now on."""
    known = globals()
    known.update((name, value) for name, value in vars(module).items() if not name.startswith("_"))
    _register_node(module.attach)
    known["is_loaded"] = True


def _register_node(attach: Callable[..., None]) -> None:
    """Have torch know the node for one of its own: `isinstance(out.grad_fn, torch.autograd.graph.Node)`."""
    with torch_private.without_modes(), torch.inference_mode(False), torch.enable_grad():
        out = [torch.empty(0, device="cpu")]
        leaf = torch.empty(0, device="cpu", requires_grad=True)
        attach(None, None, [leaf], (0,), out, (0,), [], [], "Node")
    torch.autograd.graph.Node.register(type(out[0].grad_fn))
