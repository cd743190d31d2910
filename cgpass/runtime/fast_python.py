"""What a call does once per tensor, as functions of many tensors, in Python.

`fast` has the versions that are in use: see Note [Two versions of each function]. What is in `_fast.cpp`, too, is called
as `fast.aliases(...)`; the rest is imported from here.
"""

import operator
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cgpass import _torch
from cgpass.runtime.bits import copy_all
from cgpass.runtime.placeholders import bytes_of

_OF_A_COUNT = next(map(sys.getrefcount, [object()])) - 1
"""References that counting them with `map` adds."""

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Size and stride."""
ViewSpec = tuple[int, tuple[int, ...], tuple[int, ...], int]
"""Position of an input, size and stride of a view of it, elements from the input's first to the view's."""


def static_key(args: Sequence[Any], positions: Sequence[int]) -> bytes:
    """Addresses of the tensors at `positions` of `args`, as one value: `array("q")` reads them again."""
    return array("q", map(torch.Tensor.data_ptr, map(args.__getitem__, positions))).tobytes()


def geometry(values: Sequence[Any], positions: tuple[int, ...]) -> bytes:
    """Number of dimensions, sizes and strides of each tensor, -1 for what is none."""
    numbers = array("q")
    for i in positions:
        value = values[i]
        is_tensor = isinstance(value, torch.Tensor)
        numbers.extend((value.dim(), *value.size(), *value.stride()) if is_tensor else (-1,))
    return numbers.tobytes()


def versions(args: Sequence[Any], positions: Sequence[int]) -> bytes:
    """How often the tensors at `positions` of `args` were written, as one value; 0 for inference tensors."""
    tensors = map(args.__getitem__, positions)
    return array("q", [0 if t.is_inference() else t._version for t in tensors]).tobytes()


def layouts(tensors: Sequence[torch.Tensor]) -> bytes:
    """What a graph that reads tensors where they lie has in it, as one value, made of 64-bit integers.

    For each tensor: number of dimensions, address, position of the first that is the same object, `id` of its dtype,
    whether it is conjugated or negated, sizes, strides. `read_layouts` takes it apart.
    """
    firsts: dict[int, int] = {}
    out = array("q")
    for i, t in enumerate(tensors):
        first = firsts.setdefault(id(t), i)
        flags = t.is_conj() + 2 * t.is_neg()
        out.extend((t.dim(), t.data_ptr(), first, id(t.dtype), flags, *t.size(), *t.stride()))
    return out.tobytes()


def read_layouts(key: bytes) -> list[tuple[int, ...]]:
    """The integers of each tensor in what `layouts` returned."""
    numbers, found, start = array("q", key), [], 0
    while start < len(numbers):
        end = start + 5 + 2 * numbers[start]
        found.append(tuple(numbers[start:end]))
        start = end
    return found


def requiring_grad(tensors: Sequence[torch.Tensor]) -> bytes:
    """Which tensors require grad, a byte each."""
    return bytes([tensor.requires_grad for tensor in tensors])


def unchanged(
    mappings: Sequence[Mapping[str, Any]],
    keys: Sequence[str],
    values: Sequence[Any],
    holders: Sequence[Any],
    sizes: bytes,
) -> bool:
    """Whether mappings still have the same objects as before.

    Args:
        mappings: One for each of `keys`.
        keys: To be looked up.
        values: What was there; compared by identity. `...` for nothing.
        holders: Containers whose sizes are compared.
        sizes: What they were, as `array("q")` keeps them.
    """
    if not len(mappings) == len(keys) == len(values) or 8 * len(holders) != len(sizes):
        raise ValueError("as many values as keys expected")
    if list(map(len, holders)) != array("q", sizes).tolist():
        return False
    for each, key, value in zip(mappings, keys, values, strict=True):
        found = each[key] if key in each else ...  # noqa: SIM401  TorchScript's have no `get`
        if found is not value:
            return False
    return True


def members(mappings: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[Any]:
    """What each mapping has for its key.

    Raises:
        KeyError: One has nothing.
    """
    if len(mappings) != len(keys):
        raise ValueError("as many mappings as keys expected")
    return list(map(operator.getitem, mappings, keys))


def in_transform() -> bool:
    """Whether tensors may come without memory of their own: inside vmap, `torch.func.grad` and their like.

    Batched gradients (`is_grads_batched=True`, `jacobian(vectorize=True)`) come from a vmap that is no functorch level.
    """
    return _torch.in_vmap_or_functorch()


def count_users(storages: tuple[torch.UntypedStorage, ...]) -> tuple[int, ...]:
    """Numbers of references to storages: in C++, where their Python objects are one each, and to these objects."""
    counts = map(_torch.storage_use_count, [storage._cdata for storage in storages])
    references = map(sys.getrefcount, storages)
    return tuple(a + b - _OF_A_COUNT for a, b in zip(counts, references, strict=True))


def watched(storages: Sequence[torch.UntypedStorage], users: Sequence[int]) -> bytes:
    """What `any_held` compares, as one value: StorageImpl, address and number of users of each storage.

    Args:
        storages: As they lie now.
        users: As `count_users` counted them while nobody else held them.
    """
    numbers = array("q")
    for storage, count in zip(storages, users, strict=True):
        numbers.extend((storage._cdata, storage.data_ptr(), count))
    return numbers.tobytes()


def any_held(storages: tuple[torch.UntypedStorage, ...], key: bytes) -> bool:
    """Whether some storage has more users than it had, or lies elsewhere.

    Args:
        storages: Nobody but this tuple held them in Python when their users were counted.
        key: `watched` of them.
    """
    numbers = array("q", key)
    cdatas, addresses, users = numbers[::3], numbers[1::3], numbers[2::3]
    if len(storages) != len(users):
        raise ValueError("as many counts as storages expected")
    count = sum(map(_torch.storage_use_count, cdatas)) + sum(map(sys.getrefcount, storages))
    if count != sum(users) + _OF_A_COUNT * len(users):
        return True
    return array("q", map(torch.UntypedStorage.data_ptr, storages)) != addresses


def held(storages: tuple[torch.UntypedStorage, ...], key: bytes) -> list[int]:
    """Which storages `any_held` asks for."""
    if not any_held(storages, key):
        return []
    numbers = array("q", key)
    places = map(torch.UntypedStorage.data_ptr, storages)
    before = zip(numbers[2::3], numbers[1::3], strict=True)
    now = zip(count_users(storages), places, strict=True)
    return [k for k, (a, b) in enumerate(zip(before, now, strict=True)) if a != b]


def any_held_among(
    entries: Sequence[tuple[int, Any, Any]], among: Mapping[int, tuple[int, ...]]
) -> bool:
    """Whether some storage of certain ones is held.

    Args:
        entries: A number, and something with a `watch`: the arguments of `any_held`. What else there is, is of no matter.
        among: Positions of the storages that are asked for, by that number. Entries of other numbers are left out.
    """
    for number, memory, *_ in entries:
        if number in among:
            found = held(*memory.watch)
            if any(k in found for k in among[number]):
                return True
    return False


def stand_in(address: int, num_bytes: int, like: torch.Tensor) -> torch.Tensor:
    """Memory at an address on the device of `like`, as bytes.

    In C++ the storage can be resized: it then lies elsewhere. In Python there is no way to make such a one.

    **Lifetime:** owns nothing; the caller keeps the memory alive.
    """
    out = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
    swap_storages([out], [bytes_of(_torch.storage_at(address, num_bytes, like.device))])
    return out


def aliases(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`data` of each. **Lifetime:** they hold the same storages, and have version counters of their own."""
    return [tensor.data for tensor in tensors]


def exclusive(args: Sequence[Any], positions: Sequence[int], counts: Sequence[int]) -> bool:
    """Whether nobody but the list `args` holds the tensors at `positions`, and their storages have as many `users`.

    In Python a caller's own references can't be told apart: there somebody always does.
    """
    del args, counts
    return not positions


def swap_storages(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> None:
    """Exchange the memory under each pair of tensors, for everybody who holds their storages.

    Raises:
        RuntimeError: This torch can't; see `can_swap`.
    """
    if _torch.swap_data_ptr is None:
        raise RuntimeError("this torch can't exchange the memory of storages")
    for a, b in zip(first, second, strict=True):
        _torch.swap_data_ptr(a.untyped_storage(), b.untyped_storage())


def take_accumulators(leaves: Sequence[torch.Tensor]) -> list[Any]:
    """Have each leaf forget the node of autograd graphs that adds to its `.grad`, so that the next graph makes another.

    Graphs that exist keep theirs, which goes on working. In Python there is no way to: nothing is forgotten.

    Args:
        leaves: Those that require no grad are left alone.

    Returns:
        What `put_accumulators` takes. **Lifetime:** holds the nodes, and those hold the leaves.
    """
    return [None] * len(leaves)


def put_accumulators(leaves: Sequence[torch.Tensor], taken: Sequence[Any]) -> None:
    """Have each leaf know again the node that `take_accumulators` took; where it took none, what it knows now stays."""
    if len(leaves) != len(taken):
        raise ValueError("as many accumulators as tensors expected")


def views(args: Sequence[Any], specs: Sequence[ViewSpec]) -> list[torch.Tensor]:
    """Parts of inputs' storages, aliases as `detach()` makes them."""
    return [
        args[i].detach().as_strided(size, stride, args[i].storage_offset() + offset).detach()
        for i, size, stride, offset in specs
    ]


def copies(tensors: tuple[torch.Tensor, ...], layouts: Sequence[Layout]) -> list[torch.Tensor]:
    """Copies in memory of their own, on the current stream; **lifetime:** the caller's.

    Args:
        tensors: Of one dtype and device; none overlaps itself.
        layouts: Their sizes and strides: reading them off the tensors costs Python more than allocating (C++ does).
    """
    if not tensors:
        return []
    dtype = tensors[0].dtype
    allocate = _torch.strided_allocator(tensors[0].device)
    out = [allocate(size, stride, dtype) for size, stride in layouts]
    with torch.no_grad():
        copy_all(out, tensors)
    return out


def fits(values: Sequence[Any], likes: Sequence[torch.Tensor], may_require_grad: bytes) -> bool:
    """Whether values are dense tensors of the sizes, dtypes and devices of others.

    Args:
        values: Anything.
        likes: The others.
        may_require_grad: A byte for each: whether it may require grad where gradients are recorded.
    """
    if len(likes) != len(may_require_grad):
        raise ValueError("as many flags as tensors expected")
    if len(values) != len(likes):
        return False
    grad = torch.is_grad_enabled()
    return all(
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_nested
        and value.size() == like.size()
        and value.dtype is like.dtype
        and value.device == like.device
        and (flag or not grad or not value.requires_grad)
        for value, like, flag in zip(values, likes, may_require_grad, strict=True)
    )


def fill(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor], shared: bytes) -> int:
    """Give tensors the values of others, but for those that are the same memory laid out alike; on the current stream.

    Args:
        targets: Written one after the other, which counts as a change in place.
        values: One for each.
        shared: Addresses of storages; nothing is copied where a value that is to be copied lies in one.

    Returns:
        Bytes copied; -1 where nothing is.
    """
    if len(targets) != len(values):
        raise ValueError("as many values as targets expected")
    pairs = [
        (target, value.detach())
        for target, value in zip(targets, values, strict=True)
        if not _lies_as(value, target)
    ]
    addresses = array("q", shared)
    if addresses and any(v.untyped_storage().data_ptr() in addresses for _, v in pairs):
        return -1
    with torch.no_grad():
        for target, value in pairs:
            target.copy_(value)
    return sum(target.nbytes for target, _ in pairs)


def _lies_as(tensor: torch.Tensor, target: torch.Tensor) -> bool:
    return (
        tensor.data_ptr() == target.data_ptr()
        and tensor.stride() == target.stride()
        and tensor.is_conj() == target.is_conj()
        and tensor.is_neg() == target.is_neg()
    )


def put(into: list[Any], positions: Sequence[int], values: Sequence[Any]) -> None:
    """Assign one value to each position."""
    if len(positions) != len(values):
        raise ValueError("as many values as positions expected")
    for i, value in zip(positions, values, strict=True):
        into[i] = value


def taker(positions: tuple[int, ...]) -> Callable[[Sequence[Any]], list[Any]]:
    """A function that makes a list of the values at `positions`, in C where there are several."""
    if len(positions) < 2:
        return lambda values: [values[i] for i in positions]
    take = operator.itemgetter(*positions)
    return lambda values: list(take(values))
