"""`Statics`: the tensors that a callable reads besides its arguments, and what its modules were like."""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from cgpass.errors import InputError
from cgpass.graphed.module_hooks import ModuleHooks
from cgpass.runtime import fast
from cgpass.runtime.inputs import check_tensor

_ACCUMULATED = "main_grad"
"""An attribute of parameters to which the backwards of Megatron and TransformerEngine add gradients."""


class MemberGoneError(InputError):
    """A parameter or buffer is None or was deleted."""


class Statics:
    """Parameters and buffers of a callable, looked up where its modules keep them.

    **Lifetime:** holds the submodules as they were, all modules' dictionaries, and the leaves that were found elsewhere.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        device: torch.device,
        name: str,
        *,
        weak: bool = False,
        required: bool = True,
        around: torch.nn.Module | None = None,
    ) -> None:
        """Find them.

        Args:
            modules: Whose they are.
            device: Where they lie; tensors elsewhere are none that a graph could read.
            name: Of the callable, for messages.
            weak: Whether the modules themselves must not be held; somebody else then looks at their `training`.
            required: Whether a parameter is expected to get a gradient.
            around: The module whose own hooks run around what is recorded.
        """
        self._callable = name
        self._dicts: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self.names: list[str] = []
        self.num_parameters = 0
        self.num_required = 0
        """Parameters that are expected to get a gradient: these many first ones."""
        self._modes = _Members()
        self._members = _Members()
        self._all = _Members()
        self._hooks = ModuleHooks()
        self._lazy: list[Any] = []
        """Parameters that the first call makes."""
        self._holders: list[Any] = []
        self._sizes = array("q")
        named = _named(modules)
        tops = {id(top) for top in modules}
        for path, inner in named.values():
            self._watch(inner, path, mode=not (weak and id(inner) in tops), around=around)
        self._outermost = [] if weak else _modes_of([m for path, m in named.values() if not path])
        for kind in ("_parameters", "_buffers"):
            for path, inner in named.values():
                holder = getattr(inner, kind)
                for key, full in self._readable(holder, path, device, required=required):
                    self._add(holder, key, full)
            if kind == "_parameters":
                self.num_parameters = len(self.names)
                self.num_required = self.num_parameters if required else 0
        self.note_hooks()

    def _readable(
        self, holder: dict[str, Any], path: str, device: torch.device, *, required: bool
    ) -> Iterator[tuple[str, str]]:
        """Keys and full names of tensors that a graph reads where they lie."""
        for key, tensor in holder.items():
            if tensor is None or tensor.device != device:
                continue
            if is_lazy(tensor):
                self._lazy.append(tensor)
                continue
            full = f"{path}.{key}".lstrip(".")
            try:
                check_tensor(f"{self._callable}: {full}", tensor, device)
            except InputError:
                if required:
                    raise
                continue  # perhaps it is not read at all
            yield key, full

    def _watch(
        self, module: torch.nn.Module, path: str, *, mode: bool, around: torch.nn.Module | None
    ) -> None:
        if mode and "training" in module.__dict__:
            for entries in (self._modes, self._all):
                entries.add(module.__dict__, "training", path or type(module).__name__)
        for holder in (module._modules, module._parameters, module._buffers):
            self._holders.append(holder)
            self._sizes.append(len(holder))
            for key, value in holder.items():
                if value is None or holder is module._modules:
                    for entries in (self._members, self._all):
                        entries.add(holder, key, f"{path}.{key}".lstrip("."))
                attributes = getattr(value, "__dict__", {})
                if holder is module._parameters and _ACCUMULATED in attributes:
                    for entries in (self._members, self._all):
                        entries.add(
                            attributes, _ACCUMULATED, f"{path}.{key}.{_ACCUMULATED}".lstrip(".")
                        )
        if module is not around:
            self._hooks.watch(module, path or type(module).__name__)

    def _add(self, holder: dict[str, Any], key: str, name: str) -> None:
        self._dicts.append(holder)
        self._keys.append(key)
        self.names.append(name)

    def add_leaf(self, leaf: torch.Tensor) -> None:
        """Note a tensor that gets a gradient though it is neither argument nor parameter."""
        number = sum(name.startswith("closure leaf") for name in self.names)
        self._add({"leaf": leaf}, "leaf", f"closure leaf {number} {list(leaf.shape)}")

    # ---- what the modules are like

    def unchanged(self) -> bool:
        """`has_its_modes()` and `has_its_members()`, at the cost of one."""
        return not self._lazy and fast.unchanged(*self._everything)

    def has_its_modes(self) -> bool:
        """Whether all modules are in the mode, training or eval, that they were found in."""
        return self._modes.unchanged()

    def other_modes(self) -> str | None:
        """Modules that are in another mode than they were; None where that is what `eval()` or `train()` does to all.

        Those without parameters, such as a loss, may well be forgotten then; others that were in eval mode stay there.
        """
        before = {mode for _, mode in self._outermost}
        now = [holder["training"] for holder, _ in self._outermost]
        changed = any(holder["training"] is not mode for holder, mode in self._outermost)
        if changed and len(set(now)) == 1 and (len(before) == 1 or not now[0]):
            return None
        return _listed(self._modes.changed())

    def has_its_members(self) -> bool:
        """Whether the modules have the submodules that they had, and parameters and buffers of the same names."""
        if self._lazy and not all(map(is_lazy, self._lazy)):
            return False
        return self._members.unchanged(self._holders, self._sizes.tobytes())

    def note_hooks(self) -> None:
        """Take the hooks that modules have now, and a `forward` of their own, for those that are recorded."""
        self._hooks.note()
        self._look_at_all()

    def _look_at_all(self) -> None:
        dicts, keys, values, holders, sizes = self._hooks.entries
        ours, sizes = self._all.with_others(dicts, keys, values), self._sizes.tobytes() + sizes
        self._everything = (*ours, [*self._holders, *holders], sizes)

    def other_hooks(self) -> str:
        """Modules that have other hooks than they had, or another `forward` of their own; empty if none has."""
        before = self._hooks.entries
        changed = self._hooks.changed()
        if self._hooks.entries is not before:
            self._look_at_all()
        return _listed(changed)

    def fits(self) -> bool:
        """Whether the modules have all of this, and nothing else."""
        if not self.has_its_members() or self.other_hooks():
            return False
        pairs = zip(self._dicts, self._keys, strict=True)
        return all(_entry(holder, key) is not None for holder, key in pairs)

    def other_members(self) -> str:
        """What was added, removed, or replaced by another module."""
        found = self._members.changed()
        pairs = zip(self._dicts, self._keys, self.names, strict=True)
        found += [name for holder, key, name in pairs if _entry(holder, key) is None]
        return ", ".join(found) or "some were added"

    # ---- tensors

    def now(self) -> list[torch.Tensor]:
        """The tensors as they are; one object that has several names is there as often.

        Raises:
            MemberGoneError: One of them was taken out of its module.
        """
        try:
            return fast.members(self._dicts, self._keys)
        except KeyError as error:
            raise MemberGoneError(
                f"{self._callable}: parameter or buffer {error} was removed after it was recorded."
            ) from None

    def put(self, position: int, tensor: torch.Tensor) -> None:
        """Have a tensor where its module keeps it."""
        self._dicts[position][self._keys[position]] = tensor

    def key_of(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """Where they lie and how they are laid out, and which of them are one.

        Raises:
            MemberGoneError: One of them is none any more.
        """
        try:
            return fast.layouts(tensors)
        except (TypeError, AttributeError):
            gone = [name for name, t in zip(self.names, tensors, strict=True) if t is None]
            raise MemberGoneError(
                f"{self._callable}: {', '.join(gone)} became None after it was recorded."
            ) from None

    def moved(self, old: bytes, new: bytes) -> str:
        """Names of those that differ between two keys."""
        pairs = zip(self.names, _read_layouts(old), _read_layouts(new), strict=False)
        return _listed([name for name, before, after in pairs if before != after])


class _Members:
    """Entries of dictionaries, compared by identity."""

    def __init__(self) -> None:
        self._dicts: list[Any] = []
        self._keys: list[str] = []
        self._values: list[Any] = []
        self._names: list[str] = []

    def add(self, holder: Any, key: str, name: str) -> None:
        self._dicts.append(holder)
        self._keys.append(key)
        self._values.append(_entry(holder, key, ...))
        self._names.append(name)

    def with_others(
        self, dicts: list[Any], keys: list[str], values: list[Any]
    ) -> tuple[list[Any], list[str], list[Any]]:
        """Dictionaries, keys and values: these and others."""
        return self._dicts + dicts, self._keys + keys, self._values + values

    def unchanged(self, holders: Sequence[Any] = (), sizes: bytes = b"") -> bool:
        return fast.unchanged(self._dicts, self._keys, self._values, holders, sizes)

    def changed(self) -> list[str]:
        entries = zip(self._dicts, self._keys, self._values, self._names, strict=True)
        return [
            name for holder, key, value, name in entries if _entry(holder, key, ...) is not value
        ]


def _entry(holder: Any, key: str, missing: Any = None) -> Any:
    """What a module's dictionary has for a key."""
    return holder[key] if key in holder else missing  # noqa: SIM401  TorchScript's have no `get`


def _named(modules: Sequence[torch.nn.Module]) -> dict[int, tuple[str, torch.nn.Module]]:
    """All modules in some, each once, with their paths: empty ones for those that are in no other one."""
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    for top in modules:
        for path, inner in top.named_modules():
            if not found.get(id(inner), ("", inner))[0]:
                found[id(inner)] = (path, inner)
    return found


def _modes_of(modules: Sequence[torch.nn.Module]) -> list[tuple[dict[str, Any], bool]]:
    """Where modules keep their modes, and these: of those with parameters or buffers, if there are such."""
    with_state = [m for m in modules if [*m.parameters(), *m.buffers()]]
    found = [vars(m) for m in with_state or modules]
    return [(holder, holder["training"]) for holder in found if "training" in holder]


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


def firsts(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Positions of the first one of each object."""
    positions: dict[int, int] = {}
    for i, tensor in enumerate(tensors):
        positions.setdefault(id(tensor), i)
    return list(positions.values())
