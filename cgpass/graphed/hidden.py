"""Tensors where no replay would put its own: deep in results, and in attributes of modules."""

import contextlib
import logging
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from cgpass.errors import GraphedArgumentError
from cgpass.graphed.containers import CONTAINERS, LIMIT, contents, is_plain
from cgpass.graphed.names import Name
from cgpass.graphed.prehooks import read_by_forward, written_by_hooks

log = logging.getLogger(__name__)

_MAX_DEPTH = 8
_OPAQUE = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    torch.Tensor,
    torch.nn.Module,
    torch.Generator,
)
"""What is not looked into."""
_OF_FORWARD = (
    "it runs",
    (
        "What is there after a call may have the value of another one, and has no backward of its own: don't read it "
        "there, return it"
    ),
)
_OF_BACKWARD = (
    "its backward runs",
    (
        "What is there may have the value of another backward: don't hold it, or copy it into a buffer "
        "(self.norm.copy_(...)), which replays write"
    ),
)
"""What runs, and what to do about tensors that it leaves somewhere."""
_MACHINERY = ("_parameters", "_buffers", "_modules")
"""Attributes of modules that are looked at elsewhere."""


class HiddenTensors:
    """Tensors in objects that a callable returns and that are no pytree nodes.

    They are right only if every run returns the same tensors, as a cache does that is written in place.
    """

    def __init__(self) -> None:
        """No run yet."""
        self._before: list[weakref.ref[torch.Tensor]] | None = None

    def check(self, name: str, result: Any) -> None:
        """Look at the result of a run; what the run before returned is compared, and not held.

        Args:
            name: Of the callable.
            result: What it returned.

        Raises:
            GraphedArgumentError: It made tensors that a replay would not put into its result.
        """
        leaves = [x for x in pytree.tree_leaves(result) if not isinstance(x, _OPAQUE)]
        found = [
            (leaf, path, inner)
            for leaf in leaves
            for path, inner in _walk(leaf)
            if isinstance(inner, torch.Tensor)
        ]
        before, self._before = self._before, [weakref.ref(inner) for _, _, inner in found]
        if before is None:
            return
        known = {id(tensor) for ref in before if (tensor := ref()) is not None}
        for leaf, path, inner in found:
            if id(inner) not in known:
                raise _refusal(name, result, leaf, path)


def _refusal(name: str, result: Any, leaf: Any, path: str) -> GraphedArgumentError:
    kind = type(leaf).__name__
    start = next((p for p, inner in _walk(result) if inner is leaf), "")
    return GraphedArgumentError(
        f"make_graphed_callables: what {name} returns has a tensor at result{start}{path}, in a {kind}, which is no "
        "pytree node, so that no replay would put its own there. Return the tensors themselves, register the class, as "
        f"in torch.utils._pytree.register_dataclass({kind}), or leave it out, as with use_cache=False in transformers."
    )


def _walk(root: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, near things first, and how to get there: `.layers[0].keys`."""
    open_ = deque([("", root, 0)])
    seen: dict[int, Any] = {}
    left = LIMIT
    while open_ and left:
        path, value, depth = open_.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        yield path, value
        left -= not isinstance(value, torch.Tensor)
        if depth < _MAX_DEPTH and not isinstance(value, _OPAQUE):
            parts = islice(_parts(value), LIMIT)
            open_.extend((path + step, part, depth + 1) for step, part in parts)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", v) for key, v in value.items() if not is_plain(type(v)))
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{i}]", v) for i, v in enumerate(value) if not is_plain(type(v)))
    elif isinstance(value, AbstractSet):
        yield from (("{...}", v) for v in value if not is_plain(type(v)))
    for kind in type(value).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield f".{name}", getattr(value, name)
    yield from ((f".{key}", item) for key, item in getattr(value, "__dict__", {}).items())


Containers: TypeAlias = Sequence[tuple[str, Any]]
"""Lists, dictionaries and such, or `Name`s, with what to call each."""
_Attribute: TypeAlias = tuple[torch.nn.Module | None, str, str, list[torch.Tensor]]
"""Module and name (if it is a module's), what the user calls it, and the tensors in it."""


class AttributeTensors:
    """Tensors in plain attributes of modules, and in lists, dicts and such there or behind a function, if not too large.

    And those in arguments, which are looked at by others.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[torch.nn.Module],
        containers: Containers,
        find_containers: Callable[[], Containers],
    ) -> None:
        """Describe where they may be.

        Args:
            name: Of the callable.
            modules: Whose attributes, and their submodules', are looked at.
            containers: What else is, with what to call it.
            find_containers: Finds them anew.
        """
        self._name = name
        self._modules = modules
        self._containers: Containers | None = containers
        self._find_containers = find_containers
        self._warned: set[str] = set()

    @contextlib.contextmanager
    def watched(self, *, of_backward: bool = False) -> Iterator[None]:
        """A block that records; what it sets and leaves there is warned about, each attribute once.

        Args:
            of_backward: Whether it records a backward: hooks of tensors and `backward` of functions run in it.

        What hooks of a module compute for its `forward` before each run is silent: nobody else is meant to read that.
        """
        if self._containers is None:
            self._containers = self._find_containers()
        before = {id(t): weakref.ref(t) for *_, tensors in self._attributes() for t in tensors}
        yield
        run, advice = _OF_BACKWARD if of_backward else _OF_FORWARD
        now = list(self._attributes())
        computed = _computed_by_hooks(now)
        for _, _, where, tensors in now:
            refs = [(t, before.get(id(t))) for t in tensors if id(t) not in computed]
            if not all(ref is not None and ref() is tensor for tensor, ref in refs):
                self._warn(where, advice, run)

    def let_go(self) -> None:
        """Hold no containers until something is recorded again: hooks that read some may be taken away."""
        self._containers = None

    def note_arguments(self, names: Iterable[str]) -> None:
        """Warn about arguments' places where a run left tensors, each once.

        Args:
            names: What the user calls them.
        """
        for name in names:
            self._warn(name, "What a call gives it stays as it is: return the tensor")

    def _warn(self, where: str, advice: str, run: str = "it runs") -> None:
        if where not in self._warned:
            self._warned.add(where)
            text = "%s puts a tensor into %s when %s, which no replay does. %s."
            log.warning(text, self._name, where, run, advice)

    def _attributes(self) -> Iterator[_Attribute]:
        """All that may be of interest."""
        inner = {id(m): (path, top, m) for top in self._modules for path, m in top.named_modules()}
        seen: set[int] = set()
        for path, top, module in inner.values():
            for key, value in vars(module).items():
                if key not in _MACHINERY and id(value) not in seen:
                    where = f"{f'{path}.{key}'.lstrip('.')} of {type(top).__name__}"
                    yield module, key, where, _tensors_in(value, seen)
        for where, container in self._containers or ():
            if id(container) not in seen:
                value = container.value() if isinstance(container, Name) else container
                yield None, "", where, _tensors_in(value, seen)


def _computed_by_hooks(attributes: Sequence[_Attribute]) -> set[int]:
    """Identities of tensors that modules' hooks set for the modules' own `forward`."""
    hooked = {id(m): m for m, *_ in attributes if m is not None and m._forward_pre_hooks}
    written = {key: written_by_hooks(module) for key, module in hooked.items()}
    read = {key: read_by_forward(module) for key, module in hooked.items()}
    return _in_those(attributes, written) & _in_those(attributes, read)


def _in_those(attributes: Sequence[_Attribute], names: Mapping[int, set[str]]) -> set[int]:
    return {
        id(t) for m, key, _, tensors in attributes if key in names.get(id(m), ()) for t in tensors
    }


def _tensors_in(value: Any, seen: set[int]) -> list[torch.Tensor]:
    """The tensors in an attribute; none if there is too much to look at."""
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, CONTAINERS):
        return []
    found, is_all = contents(value, seen)
    return [t for t in pytree.tree_leaves(found) if isinstance(t, torch.Tensor)] if is_all else []
