"""The modules that `make_graphed_callables` returns, whose `forward` is graphed."""

import re
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from cgpass.graphed.callables import GraphedFunction

_HOOKS = re.compile("_(forward|backward)_.*hooks.*")
"""Dictionaries of a module's hooks around its calls."""


class GraphedForward:
    """A module's `forward`: graphed in the mode that it was recorded in, its own in the other one."""

    def __init__(self, module: torch.nn.Module, graphed: GraphedFunction) -> None:
        self.__self__ = module
        """The module, as a method has it."""
        self._mode = getattr(module, "training", None)  # None for what `torch.jit.freeze` made
        self._graphed = graphed
        self._own: Any = vars(module).get("forward")
        """The `forward` that the module itself had; None for its class's."""
        self.ungraphed: Any = module.forward
        """The function that runs the module without a graph."""
        self._before: dict[str, Any] = {}
        """Attributes of the module that others took the place of."""

    @property
    def __code__(self) -> Any:
        """Return where it is defined, which `torch.export` asks of every `forward`."""
        return type(self).__call__.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if self._mode is not None and self.__self__.training is not self._mode:
            self._graphed.count_plain_call()
            return self.ungraphed(*args, **kwargs)
        return self._graphed(*args, **kwargs)

    def patch(self, module: torch.nn.Module) -> None:
        """Take the place of its `forward`, and give it what a graphed module has besides."""
        graphed, kind = self._graphed, type(module)
        added: dict[str, Any] = {"forward": self, "graphed": graphed, "__reduce_ex__": self._reduce}
        if hasattr(kind, "__deepcopy__"):
            added["__deepcopy__"] = self._deepcopy
        for name in ("reset", "close"):
            if not hasattr(kind, name):
                added[name] = getattr(graphed, name)
        if graphed.splits_backward:
            added["backward_dw"] = graphed.backward_dw
        self._before = {name: vars(module).get(name) for name in added}
        vars(module).update(added)

    def undo(self, attributes: dict[str, Any]) -> None:
        """Undo `patch` in a dictionary of the module's attributes, but for what others put in its place."""
        for name, value in self._before.items():
            found = attributes.get(name)
            holder = getattr(found, "__self__", None)
            if any(each is self or each is self._graphed for each in (found, holder)):
                del attributes[name]
                if value is not None:
                    attributes[name] = value

    def _alone(self) -> torch.nn.Module:
        """The module without graphs, for copies and pickles."""
        plain = object.__new__(type(self.__self__))
        vars(plain).update(vars(self.__self__))
        self.undo(vars(plain))
        return plain

    def __reduce__(self) -> Any:
        """Copies and pickles, of what was put around it (accelerate's hooks), are of the copied module's own."""
        return _forward_of, (self.__self__, self._own)

    def _reduce(self, protocol: Any) -> Any:
        return self._alone().__reduce_ex__(protocol)

    def _deepcopy(self, memo: Any) -> Any:
        alone: Any = self._alone()
        return alone.__deepcopy__(memo)


def _forward_of(module: Any, own: Any) -> Callable[..., Any]:
    return types.MethodType(type(module).forward, module) if own is None else own


def with_forward(module: torch.nn.Module, graphed: GraphedFunction, *, patch: bool) -> Any:
    """A module whose `forward` is graphed, and recorded as if it were not: `module` itself, or a shallow copy.

    The copy shares parameters, buffers and submodules, and has hooks of its own.
    """
    original = module
    if not patch:
        module = object.__new__(type(module))
        module.__dict__.update(original.__dict__)
        hooks = filter(_HOOKS.fullmatch, list(module.__dict__))
        module.__dict__.update((name, OrderedDict()) for name in hooks)
    earlier = module.__dict__.get("forward")
    if isinstance(earlier, GraphedForward):
        earlier.undo(module.__dict__)
        earlier = module.__dict__.get("forward")
    if isinstance(earlier, types.MethodType) and earlier.__self__ is original:
        module.__dict__["forward"] = types.MethodType(earlier.__func__, module)
    is_compiled = module.__dict__.get("_compiled_call_impl") is not None
    if not patch and is_compiled:  # what it runs is recorded
        del module.__dict__["_compiled_call_impl"]
    forward = GraphedForward(module, graphed)
    if not is_compiled:
        graphed.run_with(forward.ungraphed)
    forward.patch(module)
    return module
