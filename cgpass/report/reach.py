"""Modules that a function reads by name, itself or through what it names."""

import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from cgpass.report.containers import CONTAINERS, contents
from cgpass.report.names import assigned, content

_LIBRARIES = {"torch", "cgpass", "numpy", *sys.stdlib_module_names} - {"__main__"}
"""Code of these is not looked into: it runs modules that it is given, and no others."""
_OPAQUE = (str, bytes, int, float, complex, torch.Tensor, types.CodeType)
_CODE = (
    torch.nn.Module,
    type,
    types.FunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
)
"""What attributes are not looked at of here: those of modules are elsewhere."""
_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
"""Instructions that name an attribute."""

Names = frozenset[str]
"""Of globals and attributes that some function reads."""


def modules_behind(fn: Callable[..., Any], *, into_forwards: bool = False) -> list[torch.nn.Module]:
    """Modules that a callable is, is a method of, or reads by name.

    Args:
        fn: The callable.
        into_forwards: Whether to look for what the `forward` of such modules reads, besides their submodules.

    Names are looked up in closures, defaults, globals and attributes (of `self`, of objects and of Python modules that
    are named themselves), in functions, methods, properties and callable objects that are named, too, and in what
    lists, tuples, deques, sets and dictionaries hold. No code of theirs is run for it. Of what each of
    these holds, at any depth, numbers and strings are skipped, and but for modules and tensors only so many things are
    looked at (`containers.LIMIT`).
    """
    reach = _Reach(into_forwards=into_forwards)
    reach.follow(fn)
    return reach.found


def values_behind(fn: Callable[..., Any]) -> list[Any]:
    """Everything that `modules_behind` looks at on its way, into forwards, too."""
    reach = _Reach(into_forwards=True)
    reach.follow(fn)
    return reach.seen


def all_behind(
    fn: Callable[..., Any],
) -> tuple[list[torch.nn.Module], list[tuple[str, Any]]]:
    """Modules as of `modules_behind`, into forwards, and what can be filled on the way to them.

    Args:
        fn: The callable.

    Returns:
        The modules; lists, dictionaries, sets and deques that the callable or a hook of a module behind it reads by
        name, attributes of objects that it does, and a `Name` for each that it assigns, with what to call each.
    """
    reach = _Reach(into_forwards=True)
    reach.follow(fn)
    modules = list(reach.found)
    for module in [inner for found in modules for inner in found.modules()]:
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            reach.follow(hook)
    code = getattr(fn, "__code__", None)
    cells = zip(getattr(code, "co_freevars", ()), getattr(fn, "__closure__", ()) or (), strict=True)
    own = {id(content(cell)): name for name, cell in cells}
    found = [(value, held) for value in reach.seen if (held := _held(value)) is not None]
    described = [(_description(value, held, own.get(id(value))), held) for value, held in found]
    users = [each for each in reach.seen if _is_users_code(each)]
    return modules, [*described, *((name.what, name) for name in assigned(users))]


def _is_users_code(value: Any) -> bool:
    """Whether a value is a function, a method or a class, and of no library."""
    function = value.__func__ if isinstance(value, types.MethodType) else value
    if isinstance(function, types.FunctionType):
        return not is_library(function.__globals__.get("__name__"))
    return isinstance(function, type) and not is_library(function.__module__)


def _held(value: Any) -> Any:
    """A value that can be filled, or its attributes; None if there are none."""
    if isinstance(value, list | dict | set | deque):
        return value
    owner = value.__self__ if isinstance(value, types.MethodType) else value
    return None if isinstance(owner, _CODE) else _own(owner) or None


def _description(value: Any, held: Any, name: str | None) -> str:
    kind = type(value.__self__ if isinstance(value, types.MethodType) else value).__name__
    what = f"a {kind} that it reaches" if name is None else f"the {kind} {name!r}"
    return what if held is value else f"an attribute of {what}"


class _Reach:
    """One search."""

    def __init__(self, *, into_forwards: bool) -> None:
        self._into_forwards = into_forwards
        self.found: list[torch.nn.Module] = []
        self._found: set[int] = set()
        self._open: list[tuple[Any, Names]] = []
        self._keys: set[tuple[Any, ...]] = set()
        self._contents: dict[int, list[Any]] = {}
        """Of containers that were seen."""
        self.seen: list[Any] = []
        """In this order; as long as it is held, no identity is another's."""

    def follow(self, fn: Any) -> None:
        """Look at a callable, and at all that it leads to."""
        self._open.append((fn, frozenset()))
        while self._open:
            value, names = self._open.pop()
            if not self._is_new(value, names):
                continue
            if isinstance(value, torch.nn.Module) and id(value) not in self._found:
                self._found.add(id(value))
                self.found.append(value)
                if self._into_forwards:
                    self._open += [(forward, frozenset()) for forward in _forwards(value)]
            if isinstance(value, CONTAINERS):
                self._open += [(part, names) for part in reversed(self._contents_of(value))]
            else:
                self._open += reversed(list(_parts(value, names)))

    def _contents_of(self, container: Any) -> list[Any]:
        found = self._contents.get(id(container))
        if found is None:
            found = self._contents[id(container)] = contents(container)[0]
        return found

    def _is_new(self, value: Any, names: Names) -> bool:
        if value is None or isinstance(value, _OPAQUE):
            return False
        key: tuple[Any, ...] = (id(value), names)
        if isinstance(value, types.MethodType):
            key = (id(value.__func__), id(value.__self__))
        elif isinstance(value, types.FunctionType):
            key = (id(value),)
        if key in self._keys:
            return False
        self._keys.add(key)
        self.seen.append(value)
        return True


def _forwards(module: torch.nn.Module) -> Iterator[types.MethodType]:
    """Those of a module and its submodules; TorchScript's have none in Python."""
    for inner in module.modules():
        forward = getattr(type(inner), "forward", None)
        if forward is not None:
            yield types.MethodType(forward, inner)


def _parts(value: Any, names: Names) -> Iterator[tuple[Any, Names]]:
    """What to look at next, and names that are read from it."""
    if isinstance(value, functools.partial):
        parts: Iterable[Any] = (value.func, *value.args, *value.keywords.values())
        if isinstance(value.func, types.FunctionType):
            names |= _read_on_the_way(value.func)
    elif isinstance(value, types.MethodType):
        yield from _read_by(value.__func__, value.__self__)
        return
    elif isinstance(value, types.FunctionType):
        yield from _read_by(value, None)
        return
    elif isinstance(value, torch.nn.Module):
        parts = _attributes(value, names)
    elif isinstance(value, type):
        parts = () if is_library(value.__module__) else defined(value, None, names)
    else:
        read = [part for part in _attributes(value, names) if part is not None]
        parts = read or _called(value)  # who reads from an object does not call it
    yield from ((part, names) for part in parts)


def _read_by(function: Any, owner: Any) -> Iterator[tuple[Any, Names]]:
    """What a function reads by name, or as `self`."""
    names: Names = frozenset()
    if isinstance(function, types.FunctionType):
        known = function.__globals__
        named, names = _names(function), _read_on_the_way(function)
        if isinstance(owner, torch.nn.Module | type | None):
            yield owner, names
        else:  # which is not called for that
            yield from ((part, names) for part in _attributes(owner, names))
        for cell in function.__closure__ or ():
            yield content(cell), names
        yield function.__defaults__, names
        yield function.__kwdefaults__, names
        yield from ((known[name], names) for name in sorted(named[0]) if name in known)
        yield function.__dict__.get("__wrapped__"), names
    else:
        yield owner, names
        yield function, names


def is_library(name: Any) -> bool:
    """Whether code in a Python module of this name is not looked into."""
    return isinstance(name, str) and name.partition(".")[0] in _LIBRARIES


def _names(function: types.FunctionType) -> tuple[Names, Names]:
    """Names of globals, and of attributes, that a function reads; none of a library's."""
    named: set[str] = set()
    read: set[str] = set()
    if not is_library(function.__globals__.get("__name__")):
        add_names(function.__code__, named, read)
    return frozenset(named), frozenset(read)


def _read_on_the_way(function: types.FunctionType) -> Names:
    """Names of attributes that a function reads, or that helpers do to which it may hand its objects."""
    open_, seen, found = [function], {id(function)}, set[str]()
    while open_:
        each = open_.pop()
        named, read = _names(each)
        found |= read
        cells = map(content, each.__closure__ or ())
        helpers = (*(each.__globals__.get(name) for name in named), *cells)
        new = [h for h in helpers if isinstance(h, types.FunctionType) and id(h) not in seen]
        seen.update(map(id, new))
        open_ += new
    return frozenset(found)


def add_names(code: types.CodeType, named: set[str], read: set[str]) -> None:
    """Names of globals, and of attributes, in a function and in those that are written in it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            named.add(str(instruction.argval))
        elif instruction.opname in _READS:
            read.add(str(instruction.argval))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            add_names(constant, named, read)


def _attributes(value: Any, names: Names) -> Iterator[Any]:
    """Those of an object that have one of some names."""
    if isinstance(value, types.ModuleType) and is_library(value.__name__):
        return
    own = _own(value)
    yield from (own[name] for name in sorted(names) if name in own)
    yield from defined(type(value), value, names - own.keys())


def defined(kind: type, owner: Any, names: Names) -> Iterator[Any]:
    """What a class and those that it derives from, which `super` finds, define under some names."""
    for base in kind.__mro__:
        yield from (
            _bound(vars(base)[name], name, kind, owner)
            for name in sorted(names & vars(base).keys())
        )


def _called(value: Any) -> Iterator[Any]:
    """What runs when an object is called."""
    if isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
        yield value.__self__
    yield _own(value).get("__wrapped__")
    call = _of_class(value, "__call__")
    if isinstance(call, types.MethodType):
        yield call
    if any("ungraphed" in vars(kind) for kind in type(value).__mro__):
        yield value.ungraphed


def _own(value: Any) -> dict[str, Any]:
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else {}


def _of_class(value: Any, name: str) -> Any:
    """What is found on an object's class, as it is on the object."""
    return next(defined(type(value), value, frozenset({name})), None)


def _bound(found: Any, name: str, kind: type, owner: Any) -> Any:
    """What is found on a class, as it is on an object of it, or on the class if that is None."""
    if isinstance(found, types.MemberDescriptorType):  # of __slots__
        return getattr(owner, name, None)
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, functools.cached_property):
        found = found.func
    elif isinstance(found, classmethod):
        return types.MethodType(found.__func__, kind)
    elif isinstance(found, staticmethod):
        return found.__func__
    if owner is None or not isinstance(found, types.FunctionType):
        return found
    return types.MethodType(found, owner)
