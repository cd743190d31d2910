"""Fake tensors."""

import contextlib
from typing import Any

import torch


def is_fake(tensor: torch.Tensor) -> bool:
    """Tell if a tensor has no values, only metadata."""
    from torch._subclasses.fake_tensor import is_fake as torch_is_fake

    return torch_is_fake(tensor)


def no_fake_mode() -> contextlib.AbstractContextManager[Any]:
    """Compute with real tensors, though a graph is being traced."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def mode_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """The fake mode of a fake tensor, to make another one like it; nothing for a real one."""
    mode = getattr(tensor, "fake_mode", None)
    return contextlib.nullcontext() if mode is None else mode


def is_plain_fake(tensor: torch.Tensor) -> bool:
    """Tell if a tensor is fake itself, not a subclass or a transform's wrapper around a fake one."""
    from torch._subclasses.fake_tensor import FakeTensor

    return type(tensor) is FakeTensor


def sibling_fake_mode(tensor: torch.Tensor) -> Any:
    """A fake mode with the settings of a fake tensor's and symbols of its own: nothing done in it leaves a guard."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode: Any = mode_of(tensor)
    outer = mode.shape_env
    shape_env = None
    if outer is not None:
        shape_env = ShapeEnv(
            allow_scalar_outputs=outer.allow_scalar_outputs,
            allow_dynamic_output_shape_ops=outer.allow_dynamic_output_shape_ops,
        )
    return FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=mode.allow_non_fake_inputs)
