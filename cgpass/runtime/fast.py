"""The functions of `_native.cpp`: what a call does for many tensors at once, and the node of autograd's graph.

They are there once `native.wait()` returned True, and until then nothing calls them: see Note [Where there is no native
code]. Callers write `fast.aliases(...)` and never import the functions themselves.

Note [A node of our own]
    AOTAutograd makes one `autograd.Function` per compiled function, and `Function.apply` gets every parameter as an
    argument: with 400 parameters it takes about half a millisecond on the host, before the GPU has anything to do, and
    as much again to save tensors and to read them. The compiled node gets a list, makes an edge per input that requires
    grad and saves what is to be saved. It is a node like those of torch's own operators: hooks on tensors, on
    parameters and on their accumulation, hooks on saved tensors, `retain_graph`, `autograd.grad` of some inputs and the
    check that nothing saved was written all work as for those.

Note [Who adds to leaves]
    Autograd's engine comes to each leaf in a task of its own, which takes 2 us on the host, on CUDA some 8. Where a leaf's
    `AccumulateGrad` has no hooks, and nothing but our node leads to it, that task would do nothing but call it; so the
    node does, at its own end. The engine must not come there as well: while it looks where to go next the edge is gone.
    Another thread could look then, too, so that holds for the one backward of a graph: the node refuses a second one,
    since what was saved is dropped, or `run` does.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from cgpass import torch_private

ViewSpec = tuple[int, tuple[int, ...], tuple[int, ...], int]
"""Position of an input, size and stride of a view of it, elements from the input's first to the view's."""
Watch = tuple[tuple[torch.UntypedStorage, ...], bytes]
"""Storages, and three 64-bit integers for each: StorageImpl, address and number of users that it should have."""

is_loaded = False
"""Whether the functions are there."""

# ---- what tensors are

static_key: Callable[[Sequence[Any], Sequence[int]], bytes]
"""`static_key(args, positions)`: addresses of tensors, as 64-bit integers."""

geometry: Callable[[Sequence[Any], Sequence[int]], bytes]
"""`geometry(values, positions)`: number of dimensions, sizes and strides of each tensor, -1 for what is none."""

layouts: Callable[[Sequence[torch.Tensor]], bytes]
"""`layouts(tensors)`: what a graph that reads tensors where they lie has in it, as 64-bit integers.

For each tensor: number of dimensions, address, position of the first that is the same object, `id` of its dtype,
whether it is conjugated or negated, sizes, strides.
"""

requiring_grad: Callable[[Sequence[torch.Tensor]], bytes]
"""`requiring_grad(tensors)`: which tensors require grad, a byte each."""

fits: Callable[[Sequence[Any], Sequence[torch.Tensor], bytes], bool]
"""`fits(values, likes, may_require_grad)`: whether values are dense tensors of the sizes, dtypes and devices of others.

A byte for each says whether it may require grad where gradients are recorded.
"""

in_transform: Callable[[], bool]
"""`in_transform()`: whether tensors may come without memory of their own: inside vmap, `torch.func.grad` and their like.

Batched gradients (`is_grads_batched=True`, `jacobian(vectorize=True)`) come from a vmap that is no functorch level.
"""

# ---- what containers hold

unchanged: Callable[
    [Sequence[Any], Sequence[str], Sequence[Any], Sequence[Any], bytes],
    bool,
]
"""`unchanged(mappings, keys, values, holders, sizes)`: whether each mapping has the same object for its key as before.

`...` stands for nothing. The sizes of other containers, the holders, are compared, too: 64-bit integers.
"""

members: Callable[[Sequence[Mapping[str, Any]], Sequence[str]], list[Any]]
"""`members(mappings, keys)`: what each mapping has for its key; a KeyError where one has nothing."""

are: Callable[[Sequence[Any], Sequence[int], Sequence[Any]], bool]
"""`are(values, positions, objects)`: whether the values at `positions` are these very objects."""

put: Callable[[list[Any], Sequence[int], Sequence[Any]], None]
"""`put(into, positions, values)`: assign one value to each position."""

# ---- who holds storages

any_held: Callable[[tuple[torch.UntypedStorage, ...], bytes], bool]
"""`any_held(*watch)`: whether some storage has another number of users than it should, or lies elsewhere. See `Watch`."""

held: Callable[[tuple[torch.UntypedStorage, ...], bytes], list[int]]
"""`held(*watch)`: which storages `any_held` asks for."""

any_held_among: Callable[[Sequence[tuple[int, Any, Any]], Mapping[int, tuple[int, ...]]], bool]
"""`any_held_among(entries, among)`: whether some storage of certain ones is held.

An entry is a number, and something with a `watch`; `among` has positions of storages by that number. Entries of other
numbers are left out.
"""

exclusive: Callable[[Sequence[Any], Sequence[int], Sequence[int]], bool]
"""`exclusive(args, positions, counts)`: whether nobody but the list `args` holds the tensors at `positions`, and their
storages have as many users as given."""

# ---- tensors and memory

stand_in: Callable[[int, int, torch.Tensor], torch.Tensor]
"""`stand_in(address, num_bytes, like)`: memory at an address on the device of `like`, as bytes that may be resized.

**Lifetime:** owns nothing; the caller keeps the memory alive.
"""

swap_storages: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
"""`swap_storages(first, second)`: exchange the memory under each pair, for everybody who holds their storages."""

aliases: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""`aliases(tensors)`: `data` of each. **Lifetime:** they hold the same storages, and have version counters of their own."""

views: Callable[[Sequence[Any], Sequence[ViewSpec]], list[torch.Tensor]]
"""`views(args, specs)`: parts of inputs' storages, aliases as `detach()` makes them."""

copies: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""`copies(tensors)`: copies in memory of their own, on the current stream; **lifetime:** the caller's.

The tensors are of one dtype and device, and none overlaps itself.
"""

# ---- autograd

attach: Callable[[Any, Any, Any, Any, Any, Any, Any, Any, Any, str, bool, bool], None]
"""`attach(run, rest, inputs, wanted, direct, outputs, differentiable, checked, unchecked, name, materialize, once)` puts
a node between tensors.

    run: `run(rest, saved, grads)` returns a list with a gradient, or None, for each of `inputs`; it gets two lists that
        it may empty: what was saved, and a gradient for each differentiable output. With None for both it raises:
        that is called where gradients that were taken under `create_graph=True` are differentiated.
    rest: What else the backward reads, for `run`.
    inputs: A list or tuple.
    wanted: Positions of the inputs that get gradients.
    direct: Positions of leaves that get gradients, too: the node adds them to `.grad` itself and has no edge to those
        that nothing is hooked on; where inputs are named (`autograd.grad`, `backward(inputs=...)`) it leaves them alone.
    outputs: A list. An output that is a view or requires grad already is replaced in it.
    differentiable: Positions of the outputs that get the node.
    checked: Tensors to be saved; that they were written in the meantime is an error, as for torch's own operators.
    unchecked: Tensors to be saved without that.
    name: What the node is called.
    materialize: Whether a gradient that nothing gave is zeros for `run`; else None.
    once: Whether `run` raises when it is called again. The node itself does so once saved tensors were dropped.
"""

first_watched: Callable[[Sequence[torch.Tensor]], int]
"""`first_watched(leaves)`: the first that has a gradient, or whose gradient somebody would notice being made; -1 for none."""


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
        out = [torch.empty(0)]
        leaf = torch.empty(0, requires_grad=True)
        attach(None, None, [leaf], (0,), (), out, (0,), [], [], "Node", True, False)
    torch.autograd.graph.Node.register(type(out[0].grad_fn))
