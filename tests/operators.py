"""Operators of users that tests of several rooms call: they double what they are given, or read it on the host."""

import torch
from torch._library.effects import EffectType

from cgpass.runtime.capturing import is_capturing_here


def is_recording(device):
    """Tell if a device is captured now."""
    if device.type == "cuda":
        return torch.cuda.is_current_stream_capturing()
    return is_capturing_here()


def doubling(name, *, in_captures=True, reads=False, **settings):
    """An operator that doubles; it fails in captures or reads on the host if asked to, and nobody is told before."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        if not in_captures and is_recording(x.device):
            raise RuntimeError("operation not permitted when stream is capturing")
        if reads:
            x.sum().item()
        return x * 2

    op = torch.library.custom_op(f"tests::{name}", fn, mutates_args=(), **settings)
    op.register_fake(torch.empty_like)
    return op


def with_effect(op):
    """Have torch keep an operator's calls in their order."""
    if hasattr(op, "register_effect"):
        op.register_effect(EffectType.ORDERED)
    else:
        torch.library._register_effectful_op(op._qualname, EffectType.ORDERED)


tagged = doubling("tagged", tags=(torch.Tag.cudagraph_unsafe,))
tagged.register_autograd(lambda ctx, grad: grad * 2)
waits = doubling("waits", reads=True)
