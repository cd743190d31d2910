"""`Statics`: the tensors that a callable reads besides its arguments, and what its modules were like."""

import contextlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cgpass.errors import GraphedArgumentError, InputError
from cgpass.runtime import fast
from cgpass.runtime.inputs import check_tensor

_ACCUMULATED = "main_grad"
"""An attribute of parameters to which the backwards of Megatron and TransformerEngine add gradients."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class MemberGoneError(InputError):
    """A parameter or buffer is None or was deleted."""


class Statics:
    """Parameters and buffers of a callable, looked up where its modules keep them.

    What a recording depends on besides is compared by identity in each call: entries of the modules' dictionaries of
    three kinds, modes, members and hooks. **Lifetime:** holds the submodules as they were, and all modules' dictionaries.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        device: torch.device,
        name: str,
        *,
        moded: bool = True,
        required: bool = True,
        around: torch.nn.Module | None = None,
    ) -> None:
        """Find them on a device; tensors elsewhere are none that a graph could read.

        Hooks of the module `around` run around what is recorded. Unless `moded`, somebody else looks at the modes of the
        modules that were given.
        """
        self._callable = name
        self._dicts: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self.names: list[str] = []
        self.required = required
        """Whether each parameter is expected to get a gradient."""
        named = _named(modules)
        tops = set() if moded else {id(top) for top in modules}
        self._moded = [(path, vars(m)) for path, m in named if id(m) not in tops]
        self._containers = [
            (path, holder)
            for path, m in named
            for holder in (m._modules, m._parameters, m._buffers)
        ]
        self._hooked = [(path or type(m).__name__, vars(m)) for path, m in named if m is not around]
        for kind in ("_parameters", "_buffers"):
            for path, inner in named:
                holder = getattr(inner, kind)
                for key, tensor in holder.items():
                    full = f"{path}.{key}".lstrip(".")
                    if self._is_read(full, tensor, device):
                        self._dicts.append(holder)
                        self._keys.append(key)
                        self.names.append(full)
        self.note()

    def _is_read(self, name: str, tensor: torch.Tensor | None, device: torch.device) -> bool:
        """Whether a graph reads a tensor where it lies."""
        if tensor is None or tensor.device != device:
            return False
        try:
            check_tensor(f"{self._callable}: {name}", tensor, device)
        except InputError:
            if self.required:
                raise
            return False  # perhaps it is not read at all
        return True

    # ---- what the modules are like

    def note(self) -> None:
        """Take the modules for what they are now: modes, members and hooks."""
        modes, members, runs = _Entries(), _Entries(), _Entries()
        for path, attributes in self._moded:
            if "training" in attributes:
                modes.add(attributes, "training", path)
        for path, holder in self._containers:
            members.add_all(holder, path, _is_member)
            for key, value in holder.items():
                if _ACCUMULATED in getattr(value, "__dict__", {}):
                    full = f"{path}.{key}.{_ACCUMULATED}".lstrip(".")
                    members.add(vars(value), _ACCUMULATED, full)
        for path, attributes in self._hooked:
            runs.add(attributes, "forward", path)
            for kind in HOOKS:
                if kind in attributes:
                    runs.add_all(attributes[kind], path)
        self._modes, self._members, self._runs = modes, members, runs  # whole, whatever was raised
        self._all = modes + members + runs

    def unchanged(self) -> bool:
        """Whether modes, members and hooks are what they were."""
        return self._all.unchanged()

    def has_its_modes(self) -> bool:
        """Whether all modules are in the mode, training or eval, that they were found in."""
        return self._modes.unchanged()

    def has_its_members(self) -> bool:
        """Whether the modules have the submodules that they had, and parameters and buffers of the same names."""
        return self._members.unchanged()

    def other_hooks(self) -> str:
        """Submodules that have other hooks than they had, or another `forward` of their own; empty if none has."""
        if self._runs.unchanged():
            return ""
        found = [name for name, now in self._runs.changed() if not hasattr(now, "ungraphed")]
        if not found:  # a submodule was graphed by itself
            self.note()
        return _listed(found)

    def fits(self) -> bool:
        """Whether the modules have all of this, and nothing else."""
        return self.has_its_members() and not self.other_hooks() and not self._gone()

    def _gone(self) -> list[str]:
        entries = zip(self._dicts, self._keys, self.names, strict=True)
        return [name for holder, key, name in entries if _entry(holder, key, None) is None]

    def other_members(self) -> str:
        """What was added, removed, or replaced by another module."""
        changed = [name for name, _ in self._members.changed() if name]
        return _listed(list(dict.fromkeys(changed + self._gone())))

    # ---- tensors

    def now(self) -> list[torch.Tensor]:
        """The tensors as they are; one object that has several names is there as often."""
        try:
            return fast.members(self._dicts, self._keys)
        except KeyError as error:
            raise self._gone_error(str(error)) from None

    def firsts(self) -> tuple[int, ...]:
        """Positions of the tensors in `now()`, each once."""
        positions: dict[int, int] = {}
        for i, tensor in enumerate(self.now()):
            positions.setdefault(id(tensor), i)
        return tuple(positions.values())

    def distinct(self) -> list[torch.Tensor]:
        """The tensors as they are, each once."""
        now = self.now()
        return [now[i] for i in self.firsts()]

    def distinct_names(self) -> list[str]:
        """The first name of each of them."""
        return [self.names[i] for i in self.firsts()]

    @contextlib.contextmanager
    def replaced(self, others: Sequence[torch.Tensor]) -> Iterator[None]:
        """Have modules hold other tensors in place of `distinct()`, for a block that assigns none of them anew."""
        before = self.now()
        numbers = {id(tensor): k for k, tensor in enumerate(self.distinct())}
        new = [others[numbers[id(tensor)]] for tensor in before]
        self._put(new)
        try:
            yield
            now = self.now()
            names = [self.names[i] for i, tensor in enumerate(new) if now[i] is not tensor]
        finally:
            self._put(before)
        if names:
            raise GraphedArgumentError(
                f"make_graphed_callables: {self._callable} assigns {', '.join(names)} anew when it runs, which no replay "
                "would do. Have it write in place, as in self.buffer.copy_(value) or self.buffer.add_(1)."
            )

    def _put(self, tensors: Sequence[torch.Tensor]) -> None:
        for holder, key, tensor in zip(self._dicts, self._keys, tensors, strict=True):
            holder[key] = tensor

    def key_of(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """Where they lie and how they are laid out, and which of them are one."""
        try:
            return fast.layouts(tensors)
        except (TypeError, AttributeError):
            raise self._gone_error(", ".join(self._gone())) from None

    def _gone_error(self, names: str) -> MemberGoneError:
        return MemberGoneError(f"{self._callable}: {names} was removed after it was recorded.")

    def moved(self, old: bytes, new: bytes) -> str:
        """Names of those that differ between two keys."""
        pairs = zip(self.names, _read_layouts(old), _read_layouts(new), strict=False)
        return _listed([name for name, before, after in pairs if before != after])


class _Entries:
    """Entries of dictionaries, compared by identity, and sizes of dictionaries."""

    def __init__(self) -> None:
        self._dicts: list[Any] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._names: list[str] = []
        self._holders: list[Any] = []
        self._sizes = array("q")
        self._paths: list[str] = []

    def add(self, holder: Any, key: Any, name: str) -> None:
        """Compare one entry; there may be none."""
        self._dicts.append(holder)
        self._keys.append(key)
        self._values.append(_entry(holder, key, ...))
        self._names.append(name)

    def add_all(self, holder: Any, path: str, wanted: Any = None) -> None:
        """Compare the size of a dictionary, and entries of it: all, or those that are wanted."""
        self._holders.append(holder)
        self._sizes.append(len(holder))
        self._paths.append(path)
        for key, value in holder.items():
            if wanted is None:
                self.add(holder, key, path)
            elif wanted(value):
                self.add(holder, key, f"{path}.{key}".lstrip("."))

    def __add__(self, other: "_Entries") -> "_Entries":
        """All of both."""
        both = _Entries()
        for name, value in vars(self).items():
            setattr(both, name, value + vars(other)[name])
        return both

    def unchanged(self) -> bool:
        return fast.unchanged(
            self._dicts, self._keys, self._values, self._holders, self._sizes.tobytes()
        )

    def changed(self) -> list[tuple[str, Any]]:
        """Names of the entries that differ and what is there, and paths of dictionaries of another size."""
        entries = zip(self._dicts, self._keys, self._values, self._names, strict=True)
        pairs = [(name, value, _entry(holder, key, ...)) for holder, key, value, name in entries]
        sizes = zip(self._holders, self._sizes, self._paths, strict=True)
        found = [(name, now) for name, value, now in pairs if now is not value]
        return found + [(path, None) for holder, size, path in sizes if len(holder) != size]


def _is_member(value: Any) -> bool:
    """What is compared by identity: parameters and buffers may be replaced."""
    return value is None or isinstance(value, torch.nn.Module)


def _entry(holder: Any, key: Any, missing: Any) -> Any:
    """What a module's dictionary has for a key."""
    return holder[key] if key in holder else missing  # noqa: SIM401  TorchScript's have no `get`


def _named(modules: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    """All modules in some, each once, with their paths: empty ones for those that are in no other one."""
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    for top in modules:
        for path, inner in top.named_modules():
            if not found.get(id(inner), ("", inner))[0]:
                found[id(inner)] = (path, inner)
    return list(found.values())


def _read_layouts(key: bytes) -> list[tuple[int, ...]]:
    """The integers of each tensor in what `fast.layouts` returned."""
    numbers, found, start = array("q", key), [], 0
    while start < len(numbers):
        end = start + 5 + 2 * numbers[start]
        found.append(tuple(numbers[start:end]))
        start = end
    return found


def _listed(names: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
