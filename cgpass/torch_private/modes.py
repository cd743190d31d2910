"""Modes that see or change the operators that a thread calls: fake tensors', too, transforms, autograd, autocast."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import is_fake as is_fake
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes

from cgpass.torch_private.compiling import replaced


def see_to_calls(types: Iterable[type]) -> bool:
    """Tell if some of the types are those of tensors that see to calls themselves, as tensors around others do.

    A mode that lets them finds calls of the tensors inside, in memory: of a DTensor's shard, and the wait for the result
    of a collective that is used for the first time.
    """
    default = torch.Tensor.__torch_dispatch__
    return any(getattr(each, "__torch_dispatch__", default) != default for each in types)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Have operators run for real, whatever traces or watches them here, and record no gradients."""
    clear = temporarily_clear_interpreter_stack if in_functorch() else contextlib.nullcontext
    keys = torch._C._ForceDispatchKeyGuard(*_KEYS_OF_A_THREAD)
    with clear(), keys, _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield


def _dispatch_keys() -> tuple[Any, Any]:
    keys = torch._C
    return keys._dispatch_tls_local_include_set(), keys._dispatch_tls_local_exclude_set()


with concurrent.futures.ThreadPoolExecutor(1) as _threads:
    _KEYS_OF_A_THREAD = _threads.submit(_dispatch_keys).result()
"""Dispatch keys that a thread starts with: the importing thread may have others. Fake tensors' kernels run with the
meta device's (torch/_subclasses/fake_tensor.py `in_kernel_invocation_manager`, 2.11 to 2.15)."""


def uses_compiled_autograd() -> bool:
    """Tell if compiled autograd is on here and now, or will be for what is compiled."""
    config: Any = sys.modules.get("torch._dynamo.config")  # else nobody turned it on
    return config is not None and (config.compiled_autograd or compiled_autograd_is_on())


@contextlib.contextmanager
def autograd_keys_on() -> Iterator[None]:
    """Let autograd record again inside an operator's implementation, which runs below it.

    Source: `c10::autograd_dispatch_keyset`, what `AutoDispatchBelowAutograd` excludes, 2.11 to 2.15.
    """
    keys = torch._C.DispatchKey
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor):
        exclude = exclude.remove(key)
    include = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        yield


def is_exporting() -> bool:
    """Tell if `torch.export` traces. For Dynamo, `torch.compiler.is_exporting()` is always true in torch 2.11."""
    return torch.compiler._is_exporting_flag


def mode_stacks() -> tuple[int, int]:
    """Count the modes of operators and of functions that this thread is in."""
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()


def leave_modes_above(stacks: tuple[int, int]) -> None:
    """Leave modes that were entered after `mode_stacks` told this, and not left.

    Source: torch/utils/_python_dispatch.py `_pop_mode`, torch/overrides.py `_pop_mode`, 2.11 to 2.15.
    """
    dispatch, function = stacks
    while num_dispatch_modes() > dispatch:
        torch._C._pop_torch_dispatch_stack(None)
    while torch._C._len_torch_function_stack() > function:
        torch._C._pop_torch_function_stack()


num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The number of dispatch modes that see the operators that this thread calls."""


is_jit_traced: Callable[[], bool] = torch._C._is_tracing
"""True if `torch.jit.trace`, or an export to ONNX by it, traces what this thread runs. Half of the cost of
`torch.jit.is_tracing`.

Source: torch/csrc/jit/python/python_tracer.cpp, 2.11 to 2.15.
"""


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""`torch.set_grad_enabled` as a function, at a tenth of the cost of the context manager."""


in_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""True if a transform of `torch.func` is running: vmap, grad, jvp and what is made of them."""


def in_forward_ad() -> bool:
    """Tell if a level of forward-mode AD is open."""
    return torch.autograd.forward_ad._current_level >= 0


def no_parametrize_cache() -> contextlib.AbstractContextManager[None]:
    """A block in which weights are computed whenever they are read, though `torch.nn.utils.parametrize.cached()` is on.

    Source: torch/nn/utils/parametrize.py, `_cache_enabled`, 2.11 to 2.15.
    """
    return replaced(parametrize, "_cache_enabled", 0)


def has_default_saved_tensors_hooks() -> bool:
    """Tell if the user packs saved tensors by hooks of his own."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def autograd_is_plain() -> bool:
    """Tell if autograd records operators as it does by default: no mode, anomaly detection or the like.

    Of transforms `fast.in_transform` tells.
    """
    return (
        torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not torch.is_anomaly_enabled()
        and not num_dispatch_modes()
        and not in_forward_ad()
        and not compiled_autograd_is_on()
    )


def compiled_autograd_is_on() -> bool:
    """Tell if backwards are traced here."""
    module: Any = sys.modules.get("torch._dynamo.compiled_autograd")  # else nobody turned it on
    return module is not None and module.compiled_autograd_enabled


def has_function_modes() -> bool:
    """Tell if modes see the functions of torch that are called here; a default device is none of them.

    Source: torch/overrides.py `_get_current_function_mode_stack`, torch/utils/_device.py, 2.11 to 2.15.
    """
    if not torch._C._len_torch_function_stack():
        return False
    from torch.utils._device import DeviceContext

    others = DeviceContext, WatchesForTwice
    return not all(isinstance(mode, others) for mode in _get_current_function_mode_stack())


class WatchesForTwice(TorchFunctionMode):
    """Notes if gradients are taken that can be differentiated again, but for code that Dynamo is to leave out.

    Source: torch/autograd/__init__.py `grad`, torch/_dynamo/eval_frame.py `DisableContext`, 2.11 to 2.15.
    """

    found = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function."""
        if kwargs and kwargs.get("create_graph"):
            frame, disabled = sys._getframe(), torch._dynamo.eval_frame.__file__
            while frame is not None and frame.f_code.co_filename != disabled:
                frame = frame.f_back
            self.found = self.found or frame is None
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def autocast_cache_off() -> Iterator[None]:
    """Have autocast cast weights inside rather than take what was cast before: a graph would not make that again.

    It stays off where what runs enters autocast itself: that sets what it was when the context was made, by decoration
    say. Source: torch/amp/autocast_mode.py `autocast.__enter__`, 2.11 to 2.15.
    """
    _have_autocast_ask()
    enabled, was_off = torch.is_autocast_cache_enabled(), _autocast_cache.is_off
    torch.set_autocast_cache_enabled(False)
    _autocast_cache.is_off = True
    try:
        yield
    finally:
        _autocast_cache.is_off = was_off
        torch.set_autocast_cache_enabled(enabled)


autocast_off: Callable[[], contextlib.AbstractContextManager[Any]] = torch._C._DisableAutocast
"""A block in which autocast casts nothing, on any device: a tenth of the cost of `torch.autocast(enabled=False)`."""


class _AutocastCache(threading.local):
    is_off = False


_autocast_cache = _AutocastCache()


@functools.cache
def _have_autocast_ask() -> None:
    """Have nobody turn the cache on in a thread that is inside."""
    set_enabled = torch.set_autocast_cache_enabled

    @functools.wraps(set_enabled)
    def call(enabled: bool) -> None:
        set_enabled(enabled and not _autocast_cache.is_off)

    torch.set_autocast_cache_enabled = call


no_fake_mode: Callable[[], contextlib.AbstractContextManager[Any]] = unset_fake_temporarily
"""A block that computes with real tensors, though a graph is being traced."""


def mode_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """The fake mode of a fake tensor, to make another one like it; nothing for a real one."""
    mode = getattr(tensor, "fake_mode", None)
    return contextlib.nullcontext() if mode is None else mode


def no_data_dependence() -> contextlib.AbstractContextManager[None]:
    """Have what is traced inside raise if it reads data or makes a size that depends on data.

    Source: torch/fx/experimental/symbolic_shapes.py `ShapeEnvSettings`, 2.11 to 2.15.
    """
    context = TracingContext.try_get()
    env: Any = None if context is None or context.fake_mode is None else context.fake_mode.shape_env
    if env is None:
        return contextlib.nullcontext()
    settings = dataclasses.replace(
        env.settings, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False
    )
    return replaced(env, "settings", settings)
