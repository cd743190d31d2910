"""Optimizers and gradient scalers: what their steps read, and why a graph can't hold one."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers whose fused kernels take the learning rate as a tensor."""
_OF_OPTIMIZERS: Final = ("step", "zero_grad", "grad_scale", "found_inf")
_WRAPPERS: Final = ("torch.optim.", "torch.amp.", "torch.utils._contextlib", "torch._compile")
"""Modules of methods of optimizers and scalers, and of what torch wraps them in."""
_SCALING: Final = ("scale", "step", "unscale_", "update")
_OF_SCALERS: Final = ("_scale", "_growth_tracker", "_enabled", *_SCALING)


def parts_of_optimizers(optimizers: Sequence[torch.optim.Optimizer], scaler: Any) -> list[Any]:
    """Methods and states of optimizers and of a scaler."""
    found: list[Any] = []
    for each in optimizers:
        cls = type(each)
        found += (cls, cls.step, cls.zero_grad, each.state)
        found += map(vars(each).get, _OF_OPTIMIZERS)
    if scaler is not None:
        cls = type(scaler)
        found += (cls, cls.scale, cls.step, cls.unscale_, cls.update)
        found += map(vars(scaler).get, _OF_SCALERS)
    return found


def why_not_recordable(optimizers: Sequence[torch.optim.Optimizer], scaler: Any) -> str | None:
    """Say why no graph can hold the steps of optimizers, and what to do; None if one can.

    Source: torch/optim/*.py, torch/amp/grad_scaler.py, 2.11 to 2.15.
    """
    for each in optimizers:
        for group in each.param_groups:
            if (why := _why_not_recordable(each, group)) is not None:
                return why
    if scaler is None:
        return None
    if type(scaler).__module__ not in ("torch.amp.grad_scaler", "torch.cuda.amp.grad_scaler"):
        return f"{type(scaler).__name__} is not one of torch's own scalers"
    if not scaler.is_enabled() or not all(_is_torchs(getattr(scaler, n)) for n in _SCALING):
        return "the scaler is disabled, or one of its methods was replaced"
    for each in optimizers:
        if not getattr(each, "_step_supports_amp_scaling", False):
            name = type(each).__name__
            return f"the scaler asks the device whether {name} may step; make it with fused=True"
    return None


def _why_not_recordable(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str | None:
    cls = type(optimizer)
    name = cls.__name__
    if getattr(torch.optim, name, None) is not cls:
        return f"{name} is not one of torch.optim's own optimizers"
    if "capturable" not in group and not isinstance(optimizer, _FUSED):
        return f"{name} can't be captured; use AdamW(fused=True) or SGD(fused=True)"
    if not (_is_torchs(optimizer.step) and _is_torchs(optimizer.zero_grad)):
        return f"step or zero_grad of {name} was replaced"
    if not (group.get("fused") or group.get("capturable")):
        fix = "fused" if "fused" in group else "capturable"
        return f"no graph can hold step() of this {name}; make it with {fix}=True"
    if group.get("differentiable") or (group.get("fused") and group.get("foreach")):
        return f"{name} has flags that fused=True excludes: foreach or differentiable"
    return None


def _is_torchs(method: Any) -> bool:
    """Tell if a method is torch's, with all that is around it: profilers and schedulers put something there, too."""
    while method is not None:
        if not getattr(method, "__globals__", {}).get("__name__", "").startswith(_WRAPPERS):
            return False
        method = getattr(method, "__wrapped__", None)
    return True


def step_hooks(optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """Name the hooks that run with the steps of optimizers, if any do.

    Source: torch/optim/optimizer.py `register_optimizer_step_pre_hook`, 2.11 to 2.15.
    """
    for each in optimizers:
        if each._optimizer_step_pre_hooks or each._optimizer_step_post_hooks:
            return f"{type(each).__name__} has hooks on step(); remove them"
    module = sys.modules["torch.optim.optimizer"]
    if module._global_optimizer_pre_hooks or module._global_optimizer_post_hooks:
        return "hooks are registered on every optimizer's step(); remove them"
    return None


def host_reads(scaler: Any) -> dict[str, Any]:
    """Return what chooses kernels, beside their inputs, and not all of which Dynamo guards, and a scaler's numbers.

    Source: torch/csrc/Module.cpp, 2.11 to 2.15; the older `allow_tf32` raise where a user set the newer names.
    """
    native, precision = torch._C, torch._C._get_fp32_precision_getter
    found = {
        "cudnn.enabled": native._get_cudnn_enabled(),
        "cudnn.benchmark": native._get_cudnn_benchmark(),
        "cudnn.deterministic": native._get_cudnn_deterministic(),
        "cudnn.conv.fp32_precision": precision("cuda", "conv"),
        "cudnn.rnn.fp32_precision": precision("cuda", "rnn"),
        "cuda.matmul.fp32_precision": precision("cuda", "matmul"),
        "cuda.matmul.allow_fp16_accumulation": native._get_cublas_allow_fp16_accumulation(),
        "cuda.preferred_blas_library": native._get_blas_preferred_backend(),
        "deterministic algorithms": native._get_deterministic_algorithms(),
        "default dtype": torch.get_default_dtype(),
    }
    if scaler is not None:
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            found[f"the scaler's {name}"] = getattr(scaler, f"get_{name}")()
    return found


def steps_of_scaler(scaler: Any) -> dict[Any, Any]:
    """A scaler's notes of steps that are under way, by optimizer, live; empty between two steps.

    Source: torch/amp/grad_scaler.py, 2.11 to 2.15.
    """
    return scaler._per_optimizer_states


def scale_of(scaler: Any) -> torch.Tensor:
    """A scaler's factor, on the device, which `get_scale()` would wait for. Source: as above."""
    return scaler._scale
