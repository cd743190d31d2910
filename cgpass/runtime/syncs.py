"""Reading a tensor's data on the host, which stands in on the CPU for what waits for the device on CUDA."""

from collections.abc import Callable, Mapping, Sequence
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


def is_capture_error(error: BaseException) -> bool:
    """Whether only torch or CUDA raise `error`, because a capture does not allow what was done."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return any(word in text for word in ("captur", "CUDA", "CUBLAS", "CUSOLVER", "CUDNN", "cuDNN"))
