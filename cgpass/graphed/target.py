"""`Target`: one callable that is recorded."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from cgpass.errors import GraphedArgumentError
from cgpass.graphed.statics import HOOKS, Statics, named

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")
"""Classes whose hooks reduce or gather around the module."""


class Target:
    """A module or function to be recorded, with the modules that it uses."""

    def __init__(
        self, fn: Callable[..., Any], modules: Sequence[torch.nn.Module], index: int | None
    ) -> None:
        """Check that it can be.

        Raises:
            GraphedArgumentError: It has hooks, or it is or has a wrapper such as DistributedDataParallel.
        """
        if not callable(fn):
            raise GraphedArgumentError(
                f"make_graphed_callables: callable {index or 0} is a {type(fn).__name__}; give a module, a function or a tuple of them."
            )
        self.module = fn if isinstance(fn, torch.nn.Module) else None
        own = type(fn).__name__ if self.module is not None else _name_of(fn)
        self.name = own if index is None else f"callable {index} ({own})"
        self.fn = getattr(fn, "ungraphed", fn) if self.module is None else fn
        self.modules = list(modules)
        owner = self.module or getattr(fn, "__self__", None)
        if isinstance(owner, torch.nn.Module) and owner not in self.modules:
            self.modules.insert(0, owner)
        for path, inner in named(self.modules):
            kinds = {base.__name__ for base in type(inner).__mro__ if "torch." in base.__module__}
            kind = type(inner).__name__ + f" at {path!r}" * bool(path)
            if kinds.intersection(_WRAPPERS):
                raise self._refusal(
                    f"has a wrapped module, a {kind}, whose hooks no replay runs. Record the module inside, then wrap"
                )
            if isinstance(inner, LazyModuleMixin):  # of another class from its first call on
                raise self._refusal(
                    f"has a lazy module that has not run yet, a {kind}: call it once"
                )
        for kind in HOOKS:
            if self.module is not None and getattr(self.module, kind):
                raise self._refusal(
                    f"has hooks ({kind.strip('_')}), which a replay would not run. Register them on what "
                    "make_graphed_callables returns, or use capture_time_hooks"
                )

    def _refusal(self, why: str) -> GraphedArgumentError:
        return GraphedArgumentError(f"make_graphed_callables: {self.name} {why}.")

    def statics(self, device: torch.device, *, moded: bool) -> Statics:
        """Return what it reads besides its arguments, on a device; with the mode of the module itself, or without."""
        is_module = self.module is not None
        around = self.module
        if around is None and getattr(self.fn, "__name__", "") == "forward":
            around = getattr(self.fn, "__self__", None)
        return Statics(
            self.modules,
            device,
            self.name,
            moded=moded or not is_module,
            required=is_module,
            around=around,
        )

    @property
    def backward_dw(self) -> Callable[[], Any] | None:
        """Return what computes the gradients that the backward leaves out, if there is such a thing."""
        needed = getattr(self.fn, "need_backward_dw", None)
        if needed is not None and not (needed() if callable(needed) else needed):
            return None
        found = getattr(self.fn, "backward_dw", None)
        return found if callable(found) else None

    def plain(self, *, patch: bool) -> Callable[..., Any]:
        """Return what runs the callable without a graph, whatever becomes of its `forward`."""
        if self.module is None:
            return self.fn
        forward: Any = getattr(self.module.forward, "ungraphed", self.module.forward)
        compiled = vars(self.module).get("_compiled_call_impl")
        is_graphed = hasattr(vars(self.module).get("forward"), "ungraphed")
        return forward if patch or compiled is None or is_graphed else compiled


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", type(fn).__name__).replace("<locals>.", "")
