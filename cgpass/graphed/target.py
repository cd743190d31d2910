"""`Target`: one callable that is recorded."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from cgpass.errors import GraphedArgumentError
from cgpass.graphed.following import Attributes
from cgpass.graphed.hidden import AttributeTensors
from cgpass.graphed.reach import all_behind, modules_behind
from cgpass.graphed.statics import Statics
from cgpass.graphed.wrappers import refuse_wrappers


class Target:
    """A module or function to be recorded."""

    def __init__(self, fn: Callable[..., Any], index: int | None) -> None:
        """Check that it can be.

        Args:
            fn: What the user gave.
            index: Its position among several; None for a single one.

        Raises:
            GraphedArgumentError: It has hooks, or its buffers require grad.
        """
        if not callable(fn):
            raise GraphedArgumentError(
                f"make_graphed_callables: callable {index or 0} is a {type(fn).__name__}; give a module, a function or a tuple of them."
            )
        self.module = fn if isinstance(fn, torch.nn.Module) else None
        own = type(fn).__name__ if self.module is not None else _name_of(fn)
        self.name = own if index is None else f"callable {index} ({own})"
        self.fn = getattr(fn, "ungraphed", fn) if self.module is None else fn
        self.modules = modules_behind(fn)
        """The module, or those that a function reads by name."""
        self._into_forwards, containers = all_behind(self.fn)
        self.attributes = AttributeTensors(
            self.name, self.modules, containers, partial(_containers_behind, self.fn)
        )
        if self.module is not None:
            _check_module(self.name, self.module)

    def statics(
        self, device: torch.device, others: Sequence[torch.nn.Module], *, weak: bool
    ) -> Statics:
        """What it reads besides its arguments, as far as it can be found.

        Args:
            device: Where that lies.
            others: Modules that it is called with.
            weak: Whether the module will hold what is returned, and must not be held by it.

        Raises:
            GraphedArgumentError: It is or reaches a wrapper such as DistributedDataParallel.
        """
        is_module = self.module is not None
        weak = weak and is_module
        modules = [*self.modules, *others]
        behind = self._into_forwards or modules_behind(self.fn, into_forwards=True)
        self._into_forwards = []  # another time they may be others
        refuse_wrappers(self.name, [*modules, *behind])
        around = self.module
        if around is None and getattr(self.fn, "__name__", "") == "forward":
            around = getattr(self.fn, "__self__", None)
        return Statics(
            modules,
            device,
            self.name,
            weak=weak,
            required=is_module and not others,
            around=around,
        )

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
        if module is None:
            return self.fn
        if weak:
            return unpatched(module, weakref.ref(module))
        compiled = vars(module).get("_compiled_call_impl")
        is_graphed = hasattr(vars(module).get("forward"), "ungraphed")
        return unpatched(module) if compiled is None or is_graphed else compiled


def unpatched(
    module: torch.nn.Module,
    ref: "weakref.ref[torch.nn.Module] | None" = None,
    attributes: Attributes | None = None,
) -> Callable[..., Any]:
    """A module's `forward` as it is now, without graphs.

    Args:
        module: Whose.
        ref: If given, what is returned does not hold the module but this.
        attributes: Of what the module is a copy of: the copy gets them when they change, a `forward` too, and the
            original's `forward` it is once the copy is gone.
    """
    forward = module.forward
    forward = getattr(forward, "ungraphed", forward)
    if ref is None:
        return forward
    if getattr(forward, "__self__", None) is not module:
        return forward if attributes is None else _in_mode_of(ref, forward, attributes)
    function = getattr(forward, "__func__")  # noqa: B009  in no stub
    original = None if attributes is None else attributes.original

    def run(*args: Any, **kwargs: Any) -> Any:
        now = ref()
        if attributes is not None and now is not None:
            attributes.follow(now)
            other = attributes.new_forward(now)
            if other is not None:
                return other(*args, **kwargs)
        return function(original if now is None else now, *args, **kwargs)

    return run


def _in_mode_of(
    ref: "weakref.ref[torch.nn.Module]", forward: Callable[..., Any], attributes: Attributes
) -> Callable[..., Any]:
    """A `forward` that may read what module it was made for, while that is in the mode of its copy."""
    original = attributes.original

    def run(*args: Any, **kwargs: Any) -> Any:
        copy, mode, now = ref(), mode_of(original), forward
        if copy is not None:
            attributes.follow(copy)
            now = attributes.new_forward(copy) or forward
        if copy is None or mode_of(copy) is mode:
            return now(*args, **kwargs)
        original.training = mode_of(copy)
        try:
            return now(*args, **kwargs)
        finally:
            original.training = mode

    return run


def mode_of(module: torch.nn.Module) -> Any:
    """Whether it is in training mode; None for what `torch.jit.freeze` made, which has none."""
    return getattr(module, "training", None)


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", type(fn).__name__).replace("<locals>.", "")


def _containers_behind(fn: Callable[..., Any]) -> list[tuple[str, Any]]:
    return all_behind(fn)[1]


def _check_module(name: str, module: torch.nn.Module) -> None:
    if isinstance(module, LazyModuleMixin):  # it is of another class from its first call on
        raise GraphedArgumentError(
            f"make_graphed_callables: {name} is a lazy module that has not run yet: call it once before."
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
