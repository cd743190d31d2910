"""What a function that is called reaches: modules, tensors, what it names, what of it is compiled."""

import contextlib
import functools
import inspect
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from cgpass import torch_private
from cgpass.backend import cgpass
from cgpass.report.reach import is_library, modules_behind, values_behind

_NOT_LOOKED_INTO: Final = (
    *(torch.nn.Module, torch.Tensor, torch.optim.Optimizer),
    *(type, types.ModuleType, types.FunctionType, torch.utils.data.Dataset),
)
"""Modules and optimizers are kept as such; data is not what a call changes."""
_ATOMS: Final = (bool, int, float, complex, str, bytes, type(None))
_SEQUENCES: Final = (list, tuple, set, frozenset, deque)
_MOST_VALUES: Final = 20_000
"""That are looked at of what one attribute holds."""


class Called:
    """A function with the arguments that it is called with, and what both reach."""

    def __init__(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Look at nothing yet.

        Args:
            fn: What is called.
            args: Given by position.
            kwargs: Given by name.
        """
        self.fn = fn
        self.arguments = [*args, *kwargs.values()]
        # The arguments' attributes that count are those whose names the function's own code reads.
        self._all: Any = (fn, functools.partial(_code_of(fn), *args, **kwargs))

    @functools.cached_property
    def values(self) -> list[Any]:
        """Everything that is looked at on the way."""
        return values_behind(self._all)

    @functools.cached_property
    def modules(self) -> list[torch.nn.Module]:
        """Modules that the function is, is given or reaches by name, with all that they contain."""
        found: dict[int, torch.nn.Module] = {}
        for module in modules_behind(self._all, into_forwards=True):
            found.update((id(each), each) for each in module.modules())
        return list(found.values())

    @functools.cached_property
    def given(self) -> list[Any]:
        """Objects that are called or given, whatever their class, but modules, tensors, optimizers, functions."""
        given = [self.fn, getattr(self.fn, "__self__", None), *pytree.tree_leaves(self.arguments)]
        return [each for each in given if not is_a(each, _NOT_LOOKED_INTO)]

    @functools.cached_property
    def objects(self) -> list[Any]:
        """What is called, given, or looked at on the way, and has attributes: no modules and no library's."""
        return [each for each in (*self.given, *self.values) if is_object(each)]

    @functools.cached_property
    def held(self) -> list[Any]:
        """What objects that are called or given have in attributes of their own, whoever reads them by which name."""
        own = [getattr(each, "__dict__", None) for each in self.given]
        return pytree.tree_leaves([list(each.values()) for each in own if type(each) is dict])


def _code_of(fn: Any) -> Callable[..., Any]:
    """The function that runs when something is called, not bound to anything."""
    fn = inspect.unwrap(getattr(fn, "_orig_mod", fn))
    if isinstance(fn, torch.nn.Module):
        fn = fn.forward
    elif not isinstance(fn, types.FunctionType | types.MethodType | functools.partial):
        fn = getattr(type(fn), "__call__", fn)  # noqa: B004  as it is, not whether
    return inspect.unwrap(getattr(fn, "__func__", fn))


def values_in(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """A value, and what it holds at any depth: containers, objects of users' classes, tensors that wrap others.

    Args:
        value: Any; none of its code runs.
        seen: Identities of what was looked into before, and is not again.
    """
    open_, seen = [value], set[int]() if seen is None else seen
    for _ in range(_MOST_VALUES):
        if not open_:
            return
        each = open_.pop()
        yield each
        kind = type(each)  # what a proxy says of its class is another's
        if kind in _ATOMS or id(each) in seen:
            continue
        seen.add(id(each))
        if issubclass(kind, dict):
            open_ += [*dict.keys(each), *dict.values(each)]
        elif base := next((base for base in _SEQUENCES if issubclass(kind, base)), None):
            open_ += base.__iter__(each)
        elif issubclass(kind, torch.Tensor) and hasattr(kind, "__tensor_flatten__"):
            names, _ = each.__tensor_flatten__()
            open_ += [getattr(each, inner) for inner in names]
        elif is_object(each):
            open_ += own_attributes(each).values()


def is_a(value: Any, kinds: Any) -> bool:
    """Whether a value's own type is one of these; a proxy may say, or compute, that its class is another."""
    return issubclass(type(value), kinds)


def own_dict(value: Any) -> dict[str, Any] | None:
    """Where an object has its attributes; none of its code runs for it."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return own if type(own) is dict else None


def own_attributes(value: Any) -> dict[str, Any]:
    """What an object has itself; none of its code runs for it."""
    found = dict(own_dict(value) or {})
    for slot in slots_of(value):
        with contextlib.suppress(AttributeError):  # it is empty
            found[slot.__name__] = slot.__get__(value)
    return found


def slots_of(value: Any) -> list[Any]:
    """What `__slots__` of an object's class became."""
    known = (each for kind in type(value).__mro__ for each in vars(kind).values())
    return [each for each in known if isinstance(each, types.MemberDescriptorType)]


def is_object(value: Any) -> bool:
    """Whether something is of a user's own class, and may hold what calls change."""
    is_code = is_a(value, (*_NOT_LOOKED_INTO, types.MethodType))
    return not (is_code or is_library(type(value).__module__))


def tensors_of(values: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested containers; of subclasses that wrap tensors, those, too."""
    for leaf in pytree.tree_leaves(values):
        if is_a(leaf, torch.Tensor):
            yield leaf
            if hasattr(leaf, "__tensor_flatten__"):
                names, _ = leaf.__tensor_flatten__()
                yield from tensors_of([getattr(leaf, name) for name in names])


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether there is memory to keep the contents of."""
    wraps = hasattr(tensor, "__tensor_flatten__")
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    return not wraps and is_plain and tensor.device.type != "meta"


def memory_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Tensors that have the memory of one: itself, or those that a sparse one consists of; none where nobody can read it."""
    if has_storage(tensor):
        return [tensor]
    if tensor.device.type == "meta" or hasattr(tensor, "__tensor_flatten__"):
        return []
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def lie_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensors are the same part of the same memory; both have some."""
    same_place = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    same_part = a.storage_offset() == b.storage_offset() and a.stride() == b.stride()
    return bool(same_place and same_part and a.size() == b.size())


def bytes_covered(tensor: torch.Tensor) -> tuple[int, int]:
    """Where in its storage a tensor begins, and where it ends."""
    if not tensor.numel():
        return 0, 0
    sizes = zip(tensor.size(), tensor.stride(), strict=True)
    first = tensor.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in sizes)
    width = tensor.element_size()
    return int(first * width), int((last + 1) * width)


def read_by_name(fn: Any) -> list[Mapping[str, Any]]:
    """What a function reads from closures and from globals, by name."""
    fn = inspect.unwrap(fn)
    fn = getattr(fn, "__func__", fn)
    if not inspect.isfunction(fn):
        return []
    known, code = fn.__globals__, fn.__code__
    cells = dict(zip(code.co_freevars, fn.__closure__ or (), strict=True))
    around = {name: cell.cell_contents for name, cell in cells.items() if _is_filled(cell)}
    return [around, {name: known[name] for name in code.co_names if name in known}]


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def reaches_compiled(called: Called) -> bool:
    """Whether a callable, or something that it is given or reaches, was given to `torch.compile`, or is not to be.

    Further away than what the callable is given or names itself, only what this backend compiles counts: some library's
    own helper is no reason to leave the callable as it is.
    """
    fn = called.fn
    named = [value for values in read_by_name(fn) for value in values.values()]
    named += pytree.tree_leaves(called.arguments)
    functions = [value for value in named if isinstance(value, types.FunctionType)]
    if torch_private.is_disabled(fn):  # torch.compile would find what it wraps
        return True
    if any(map(torch_private.is_compiled, [fn, *functions, *called.modules])):
        return True
    return any(torch_private.is_compiled_by(value, cgpass) for value in called.values)


def leaves_behind(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that a backward of these accumulates gradients in."""
    seen: set[Any] = set()
    found: list[torch.Tensor] = []
    open_: list[Any] = [tensor.grad_fn for tensor in outputs]
    while open_:
        node = open_.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            found.append(variable)
        open_ += [parent for parent, _ in node.next_functions]
    return found
