"""What `make_graphed_callables` returns for modules: modules whose `forward` is graphed."""

import functools
import types
import weakref
from collections import OrderedDict
from typing import Any

import torch

from cgpass.graphed.callables import GraphedFunction
from cgpass.graphed.following import Attributes, rebound
from cgpass.graphed.target import mode_of, unpatched

_HOOK_DICTS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


class _Forward:
    """A module's `forward`: graphed in the mode that it was recorded in, its own in the other one."""

    def __init__(
        self, module: torch.nn.Module, graphed: GraphedFunction, original: torch.nn.Module | None
    ) -> None:
        self._module = weakref.ref(module)
        self._mode = mode_of(module)
        self._graphed = graphed
        self._original = None if self._mode is None else original
        """What `module` is a copy of, if it has a mode."""
        self._original_mode = self._mode
        self._attributes = None if original is None else Attributes(original, module)
        self._plain = unpatched(module, self._module, self._attributes)
        self._before: dict[str, Any] = {}
        """Attributes of the module that others took the place of; None for none."""

    @property
    def ungraphed(self) -> Any:
        """What runs the module without a graph. No attribute: `functools.update_wrapper` would copy it."""
        return self._plain

    @property
    def beneath(self) -> Any:
        """The `forward` that the module itself had; `...` for its class's."""
        found = self._before.get("forward")
        return ... if found is None else found

    @property
    def __code__(self) -> Any:
        """Where it is defined, which `torch.export` asks of every `forward`."""
        return type(self).__call__.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, original = self._module(), self._original
        if module is None:
            return self._plain(*args, **kwargs)
        if original is not None and original.training is not self._original_mode:
            module.training = self._original_mode = original.training
        if self._mode is not None and module.training is not self._mode:
            self._graphed.count_plain_call()
            return self._plain(*args, **kwargs)
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
        if self._attributes is not None and "state_dict" not in vars(module):
            added["state_dict"] = self._state_dict
        self._before = {name: vars(module).get(name) for name in added}
        vars(module).update(added)

    def undo(self, attributes: dict[str, Any]) -> None:
        """Undo `patch` in a dictionary of the module's attributes, but for what others put in its place."""
        for name, value in self._before.items():
            if self._put(attributes.get(name)):
                del attributes[name]
                if value is not None:
                    attributes[name] = value

    def _put(self, value: Any) -> bool:
        """Whether `patch` put it there."""
        return any(each is self or each is self._graphed for each in (value, _holder(value)))

    def _alone(self) -> torch.nn.Module:
        """The module without graphs, for copies and pickles."""
        module: Any = self._module()
        if self._attributes is not None:
            self._attributes.follow(module)
        plain = object.__new__(type(module))
        vars(plain).update(vars(module))
        self.undo(vars(plain))
        return plain

    def _state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, which may read attributes (`get_extra_state`)."""
        module: Any = self._module()
        if self._attributes is not None:
            self._attributes.follow(module)
        return type(module).state_dict(module, *args, **kwargs)

    def __reduce__(self) -> Any:
        """Copies and pickles, of what was put around it (accelerate's hooks), are of the copied module's own."""
        return _own_forward, (self._module(), self._before.get("forward"))

    def _reduce(self, protocol: Any) -> Any:
        return self._alone().__reduce_ex__(protocol)

    def _deepcopy(self, memo: Any) -> Any:
        alone: Any = self._alone()
        return alone.__deepcopy__(memo)


def _holder(value: Any) -> Any:
    return getattr(value, "__self__", None)


def _own_forward(module: torch.nn.Module, own: Any) -> Any:
    return types.MethodType(type(module).forward, module) if own is None else own


def _rebind(module: torch.nn.Module, original: torch.nn.Module) -> None:
    """Have methods that were set on a module itself be those of its shallow copy there."""
    for name, value in vars(module).items():
        if isinstance(value, types.MethodType | functools.partial):
            vars(module)[name] = rebound(value, original, module)


def with_forward(module: torch.nn.Module, graphed: GraphedFunction, *, patch: bool) -> Any:
    """A module whose `forward` is graphed.

    Args:
        module: What was recorded. If it is graphed already, it is recorded and replaced as if it were not.
        graphed: Its recordings.
        patch: Whether to change `module` itself; else it is a shallow copy that shares parameters, buffers and
            submodules, and has hooks of its own; it changes its mode with the original, but not the other way round.
            Copies and pickles of what is returned know no graphs.
    """
    original = None if patch else module
    if not patch:
        module = object.__new__(type(module))
        module.__dict__.update(original.__dict__)
        for name in _HOOK_DICTS:
            if name in module.__dict__:
                module.__dict__[name] = OrderedDict()
    earlier = module.__dict__.get("forward")
    if isinstance(earlier, _Forward):
        earlier.undo(module.__dict__)
    if original is not None:
        _rebind(module, original)
    is_compiled = module.__dict__.get("_compiled_call_impl") is not None
    if not patch and is_compiled:  # what it runs is recorded
        del module.__dict__["_compiled_call_impl"]
    forward = _Forward(module, graphed, original)
    if not is_compiled:
        graphed.run_with(forward.ungraphed)
    forward.patch(module)
    return module
