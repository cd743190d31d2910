"""Finding out, outside of any capture, whether work waits for the device: the sync check.

On CUDA it is torch's own check, which is one setting for the whole process and is therefore only turned on where no
other thread of the user could meet it. On CPU it stands in for CUDA's: reading a tensor's data on the host counts as
waiting.

Source: `torch.cuda.set_sync_debug_mode`; c10/cuda/CUDAFunctions.cpp `warn_or_error_on_sync`, 2.11 to 2.15.
"""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from cgpass import torch_private

_HOST_READS = (torch.Tag.data_dependent_output, torch.Tag.cudagraph_unsafe)
_HOST_METHODS = (
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.cpu,
)
_SYNC = "called a synchronizing"
_HARMLESS_THREADS = ("cgpass.", "torch._inductor.")


def reads_on_host(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator hands a tensor's data to the host."""
    tags = getattr(func, "tags", ())
    if any(tag in tags for tag in _HOST_READS) or str(func) == "aten.item.default":
        return True
    if torch.Tag.dynamic_output_shape not in tags:
        return False
    if func.overloadpacket is not torch.ops.aten.index:
        return True
    indices = (leaf for leaf in pytree.tree_leaves(args[1]) if isinstance(leaf, torch.Tensor))
    return any(index.dtype in (torch.bool, torch.uint8) for index in indices)


def refuse(message: str) -> Callable[[Any], None]:
    """What to do about an operator: raise, with its name."""

    def raise_it(func: Any) -> None:
        raise RuntimeError(f"{message}: {func}")

    return raise_it


class HostMethods(TorchFunctionMode):
    """Notices methods that give the host a tensor's data, and call no operator where that lies there already."""

    def __init__(self, on_read: Callable[[Any], None]) -> None:
        super().__init__()
        self._on_read = on_read

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _HOST_METHODS:
            self._on_read(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class HostReads(torch_private.TorchDispatchMode):
    """Notices where a tensor's data is read on the host, inside custom operators too."""

    supports_higher_order_operators = True

    def __init__(self, on_read: Callable[[Any], None]) -> None:
        super().__init__()
        self._on_read = on_read
        self._methods = HostMethods(on_read)

    def __enter__(self) -> Self:
        self._methods.__enter__()
        super().__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._methods.__exit__(exc_type, exc_val, exc_tb)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if reads_on_host(func, args):
            self._on_read(func)
        return call_watched(func, args, kwargs or {}, self)


def call_watched(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mode: torch_private.TorchDispatchMode,
) -> Any:
    """Call `func` so that `mode` sees what the implementation of a custom operator on CPU calls."""
    implementation = torch_private.cpu_implementation(func)
    if implementation is None:
        return func(*args, **kwargs)
    with mode:
        return implementation(*args, **kwargs)


@contextlib.contextmanager
def syncs_noted(device: torch.device) -> Iterator[list[str]]:
    """Note what inside waits for the device, and let it. Yields a list that is complete at the end."""
    found: list[str] = []
    if device.type != "cuda":
        with HostReads(lambda func: found.append(str(func))):
            yield found
    elif _other_threads():
        yield found
    else:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                _set_sync_debug_mode(before)
        for warning in caught:
            if _SYNC in str(warning.message):
                found.append(str(warning.message).partition(" (Triggered")[0])
            else:
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )


def is_capture_error(error: BaseException) -> bool:
    """Whether only torch or CUDA raise `error`, because a capture does not allow what was done."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return any(word in text for word in ("captur", "CUDA", "CUBLAS", "CUSOLVER", "CUDNN", "cuDNN"))


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode(mode)


def _other_threads() -> bool:
    """Whether a thread of the user may run beside this one.

    In a backward, which autograd runs in a thread of its own, one other thread waits for this one.
    """
    current = threading.current_thread()
    others = [t for t in threading.enumerate() if t is not current and not _is_harmless(t)]
    waits = isinstance(current, threading._DummyThread)
    return len(others) > (1 if waits else 0)


def _is_harmless(thread: threading.Thread) -> bool:
    """Whether a thread is ours, Inductor's or one of autograd's: none of them touches a device on its own."""
    if isinstance(thread, threading._DummyThread):
        return True
    target = getattr(thread, "_target", None)
    module = getattr(target, "__module__", None) or type(thread).__module__
    return module.startswith(_HARMLESS_THREADS)
