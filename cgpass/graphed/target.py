"""`Target`: one callable that is recorded, and the tensors that it reads besides its arguments."""

import operator
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgpass.errors import GraphedArgumentError, InputError
from cgpass.runtime import fast
from cgpass.runtime.signature import check_tensor


class Statics:
    """Parameters and buffers of a callable, looked up where its modules keep them.

    **Lifetime:** holds the modules' dictionaries, and the leaves that were found elsewhere.
    """

    def __init__(self, module: torch.nn.Module | None, device: torch.device, name: str) -> None:
        """Find them.

        Args:
            module: Whose they are; None for a function.
            device: Where they lie; tensors elsewhere are none that a graph could read.
            name: Of the callable, for messages.
        """
        self._callable = name
        self._dicts: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self.names: list[str] = []
        self._positions: tuple[int, ...] = ()
        self.num_parameters = 0
        found: set[int] = set()
        for kind in ("_parameters", "_buffers"):
            for path, inner in () if module is None else module.named_modules():
                for key, tensor in getattr(inner, kind).items():
                    if tensor is None or tensor.device != device or id(tensor) in found:
                        continue
                    found.add(id(tensor))
                    self._add(getattr(inner, kind), key, f"{path}.{key}".lstrip("."))
                    check_tensor(f"{name}: {self.names[-1]}", tensor, device)
            if kind == "_parameters":
                self.num_parameters = len(self.names)

    def _add(self, holder: dict[str, Any], key: str, name: str) -> None:
        self._dicts.append(holder)
        self._keys.append(key)
        self._positions += (len(self.names),)
        self.names.append(name)

    def add_leaf(self, leaf: torch.Tensor) -> None:
        """Note a tensor that gets a gradient though it is neither argument nor parameter."""
        number = sum(name.startswith("closure leaf") for name in self.names)
        self._add({"leaf": leaf}, "leaf", f"closure leaf {number} {list(leaf.shape)}")

    def now(self) -> list[torch.Tensor]:
        """The tensors as they are.

        Raises:
            InputError: One of them was taken out of its module.
        """
        try:
            return list(map(operator.getitem, self._dicts, self._keys))
        except KeyError as error:
            raise InputError(
                f"{self._callable}: parameter or buffer {error} was removed after it was recorded."
            ) from None

    def key_of(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """Where they lie.

        Raises:
            InputError: One of them is none any more.
        """
        try:
            return fast.static_key(tensors, self._positions)
        except TypeError:
            gone = [name for name, t in zip(self.names, tensors, strict=True) if t is None]
            raise InputError(
                f"{self._callable}: {', '.join(gone)} became None after it was recorded."
            ) from None

    def moved(self, old: bytes, new: bytes, limit: int = 5) -> str:
        """Names of those whose address differs between two keys, at most `limit` of them."""
        pairs = zip(self.names, array("q", old), array("q", new), strict=False)
        names = [name for name, before, after in pairs if before != after]
        more = f" and {len(names) - limit} more" if len(names) > limit else ""
        return ", ".join(names[:limit]) + more


class Target:
    """A module or function to be recorded."""

    def __init__(self, fn: Callable[..., Any], index: int | None) -> None:
        """Check that it can be.

        Args:
            fn: What the user gave.
            index: Its position among several; None for a single one.

        Raises:
            GraphedArgumentError: It has hooks, is wrapped, or its buffers require grad.
        """
        if not callable(fn):
            raise GraphedArgumentError(
                f"make_graphed_callables: callable {index or 0} is a {type(fn).__name__}; give a module or a function."
            )
        self.module = fn if isinstance(fn, torch.nn.Module) else None
        own = type(fn).__name__ if self.module is not None else _name_of(fn)
        self.name = own if index is None else f"callable {index} ({own})"
        self.fn = fn
        if self.module is not None:
            _check_module(self.name, self.module)

    @property
    def training(self) -> bool | None:
        """The module's mode; None for a function."""
        return None if self.module is None else self.module.training

    @property
    def backward_dw(self) -> Callable[[], Any] | None:
        """What computes the gradients that the backward leaves out, if there is such a thing."""
        needed = getattr(self.fn, "need_backward_dw", None)
        if needed is not None and not (needed() if callable(needed) else needed):
            return None
        found = getattr(self.fn, "backward_dw", None)
        return found if callable(found) else None

    def plain(self, *, weak: bool) -> Callable[..., Any]:
        """What runs the callable without a graph, whatever becomes of its `forward`.

        Args:
            weak: Whether the module is to keep what is returned alive, and so must not be held by it.
        """
        module = self.module
        if module is None or not weak:
            return self.fn if module is None else unpatched(module)
        return unpatched(module, weakref.ref(module))


def unpatched(
    module: torch.nn.Module, ref: "weakref.ref[torch.nn.Module] | None" = None
) -> Callable[..., Any]:
    """A module's `forward` as it is now; with `ref`, one that does not hold the module."""
    forward = module.forward
    if ref is None or getattr(forward, "__self__", None) is not module:
        return forward
    function = getattr(forward, "__func__")  # noqa: B009  in no stub

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(ref(), *args, **kwargs)

    return run


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", type(fn).__name__).replace("<locals>.", "")


def _check_module(name: str, module: torch.nn.Module) -> None:
    if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        raise GraphedArgumentError(
            f"make_graphed_callables: {name} is already wrapped, and its hooks would not run on a replay. Record the "
            "module inside, then wrap."
        )
    for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        if getattr(module, kind):
            raise GraphedArgumentError(
                f"make_graphed_callables: {name} has hooks ({kind.strip('_')}), which a replay would not run. Register "
                "them on what make_graphed_callables returns, or use capture_time_hooks."
            )
    for key, buffer in module.named_buffers():
        if buffer.requires_grad:
            raise GraphedArgumentError(
                f"make_graphed_callables: {name} has a buffer that requires grad, {key}. Make it a parameter."
            )
