"""`Statics`: the tensors that a callable reads besides its arguments, and what its modules were like."""

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from cgpass.errors import GraphedArgumentError, InputError
from cgpass.graphed.values import firsts
from cgpass.runtime import fast
from cgpass.runtime.inputs import check_tensor

_ACCUMULATED = "main_grad"
"""An attribute of parameters to which the backwards of Megatron and TransformerEngine add gradients."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Statics:
    """Parameters and buffers of a callable, looked up where its modules keep them.

    What a recording depends on besides is compared by identity in each call, as entries of the modules' dictionaries:
    modes, members and hooks. **Lifetime:** holds the submodules as they were, and all modules' dictionaries.
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
        """True if each parameter is expected to get a gradient."""
        found = named(modules)
        tops = set() if moded else {id(top) for top in modules}
        self._entries: list[tuple[Any, Any, Any, str]] = []
        """Dictionaries, keys, what was there, and what a message calls it."""
        self._sizes: list[tuple[Any, int, str]] = []
        for path, m in found:
            self._note(path, m, moded=id(m) not in tops, hooked=m is not around)
        holders, keys, values, _ = zip(*self._entries, strict=True) if self._entries else [()] * 4
        sizes = array("q", [size for _, size, _ in self._sizes]).tobytes()
        sized = [holder for holder, _, _ in self._sizes]
        self._compared = list(holders), list(keys), list(values), sized, sizes
        for kind in ("_parameters", "_buffers"):
            for path, inner in found:
                holder = getattr(inner, kind)
                for key, tensor in holder.items():
                    full = f"{path}.{key}".lstrip(".")
                    if self._is_read(full, tensor, device):
                        self._dicts.append(holder)
                        self._keys.append(key)
                        self.names.append(full)

    def _is_read(self, name: str, tensor: torch.Tensor | None, device: torch.device) -> bool:
        """Tell whether a graph reads a tensor where it lies."""
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

    def _note(self, path: str, module: torch.nn.Module, *, moded: bool, hooked: bool) -> None:
        """Take a module for what it is now: mode, members and hooks."""
        attributes, name = vars(module), path or type(module).__name__
        entries = [(attributes, "training", f"the mode of {name}")] if moded else []
        for holder in (module._modules, module._parameters, module._buffers):
            self._sizes.append((holder, len(holder), f"a member of {name}"))
            for key, value in holder.items():
                if value is None or isinstance(value, torch.nn.Module):  # tensors may be replaced
                    entries.append((holder, key, f"a member of {name}"))
                if _ACCUMULATED in getattr(value, "__dict__", {}):
                    entries.append((vars(value), _ACCUMULATED, f"{name}.{key}.{_ACCUMULATED}"))
        if hooked:
            entries.append((attributes, "forward", f"the forward of {name}"))
            for hooks in [attributes[kind] for kind in HOOKS if kind in attributes]:
                self._sizes.append((hooks, len(hooks), f"a hook of {name}"))
                entries += [(hooks, key, f"a hook of {name}") for key in hooks]
        self._entries += [(holder, key, _entry(holder, key), said) for holder, key, said in entries]

    def unchanged(self) -> bool:
        """Tell whether modes, members and hooks are what they were."""
        return fast.unchanged(*self._compared)

    def changes(self) -> str:
        """Return what is no longer as it was."""
        found = [said for holder, key, was, said in self._entries if _entry(holder, key) is not was]
        found += [said for holder, size, said in self._sizes if len(holder) != size]
        return ", ".join(dict.fromkeys(found))

    # ---- tensors

    def now(self) -> list[torch.Tensor]:
        """The tensors as they are; one object that has several names is there as often."""
        return fast.members(self._dicts, self._keys)

    def firsts(self) -> tuple[int, ...]:
        """Positions of the tensors in `now()`, each once."""
        return tuple(sorted(set(firsts(self.now()))))

    def distinct(self) -> list[torch.Tensor]:
        """The tensors as they are, each once."""
        now = self.now()
        return [now[i] for i in self.firsts()]

    def distinct_names(self) -> list[str]:
        """The first name of each of them."""
        return [self.names[i] for i in self.firsts()]

    def with_others(self, others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Others in place of `distinct()`, one for each name."""
        numbers = {id(tensor): k for k, tensor in enumerate(self.distinct())}
        return [others[numbers[id(tensor)]] for tensor in self.now()]

    def check_kept(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise if modules hold others than these, which were put."""
        now = self.now()
        names = [self.names[i] for i, tensor in enumerate(tensors) if now[i] is not tensor]
        if names:
            raise GraphedArgumentError(
                f"make_graphed_callables: {self._callable} assigns {', '.join(names)} anew when it runs, which no replay "
                "would do. Have it write in place, as in self.buffer.copy_(value) or self.buffer.add_(1)."
            )

    def put(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have modules hold tensors, one for each name."""
        for holder, key, tensor in zip(self._dicts, self._keys, tensors, strict=True):
            holder[key] = tensor


def _entry(holder: Any, key: Any) -> Any:
    """Return what a module's dictionary has for a key; `...` for none."""
    return holder[key] if key in holder else ...  # noqa: SIM401  TorchScript's have no `get`


def named(modules: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    """All modules in some, each once, with their paths: empty ones for those that are in no other one."""
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    for top in modules:
        for path, inner in top.named_modules():
            if not found.get(id(inner), ("", inner))[0]:
                found[id(inner)] = (path, inner)
    return list(found.values())
