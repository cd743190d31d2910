"""Process groups, their collectives, and what FSDP2 gathers."""

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


def has_process_groups() -> bool:
    """Tell if this process may communicate with others."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@functools.cache
def before_process_groups_end(hook: Callable[[], None], abort_hook: Callable[[], None]) -> None:
    """Have `hook` called before a process group shuts down, and when the interpreter ends; the other before one is aborted.

    torch (2.11 to 2.15) has no such hooks. `destroy_process_group` may have been imported from anywhere, so what it
    calls is replaced: `ProcessGroup.shutdown` and, for `_abort_process_group`, `ProcessGroup.abort`; once for all.
    """
    import atexit

    from torch.distributed import ProcessGroup

    def replace(name: str, before: Callable[[], None]) -> None:
        method = getattr(ProcessGroup, name)

        @functools.wraps(method)
        def wrapper(self: Any) -> None:
            before()
            method(self)

        setattr(ProcessGroup, name, wrapper)

    replace("shutdown", hook)
    replace("abort", abort_hook)
    atexit.register(hook)


_Allocating = Callable[[torch.device], contextlib.AbstractContextManager[None]]


def around_gathering(allocating: _Allocating, note: Callable[[torch.UntypedStorage], None]) -> None:
    """Have FSDP2 make memory for what it gathers in blocks of `allocating`, and call `note` with each storage.

    It empties the storages of gathered parameters after use, and enlarges them again before the next one. Nothing happens
    where it isn't loaded.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py and _fsdp_param_group.py, `alloc_storage`,
    `FSDPParam.init_all_gather_outputs`, 2.11 to 2.15.
    """
    package = "torch.distributed.fsdp._fully_shard"
    modules = [
        sys.modules.get(f"{package}.{name}") for name in ("_fsdp_param", "_fsdp_param_group")
    ]
    alloc: Any = getattr(modules[0], "alloc_storage", None)
    kind: Any = getattr(modules[0], "FSDPParam", None)
    init: Any = getattr(kind, "init_all_gather_outputs", None)

    def alloc_storage(tensor: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            alloc(tensor)
            return
        note(tensor.untyped_storage())
        _make(allocating, tensor.device, alloc, tensor)

    def init_all_gather_outputs(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.all_gather_outputs or torch.compiler.is_compiling():
            init(self, *args, **kwargs)
            return
        given = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.device))
        _make(allocating, next(given, None), init, self, *args, **kwargs)
        for tensor in self.all_gather_outputs:
            note(tensor.untyped_storage())

    for name, made, ours in (
        ("alloc_storage", alloc, alloc_storage),
        ("init_all_gather_outputs", init, init_all_gather_outputs),
    ):
        if made is None or hasattr(made, "_is_of_cgpass"):
            continue
        replacement: Any = functools.wraps(made)(ours)
        replacement._is_of_cgpass = True
        for place in (*modules, kind):
            if getattr(place, name, None) is made:
                setattr(place, name, replacement)


def _make(
    allocating: _Allocating,
    device: torch.device | None,
    make: Callable[..., None],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Call `make` in a block; if there is no memory, once more outside.

    In a pool the allocator does not look for what others have cached.

    Source: c10/cuda/CUDACachingAllocator.cpp `DeviceCachingAllocator::malloc`, 2.11 to 2.15; pytorch#159674.
    """
    if device is not None:
        with contextlib.suppress(torch.OutOfMemoryError):
            with allocating(device):
                make(*args, **kwargs)
            return
    make(*args, **kwargs)


def finished_work() -> Any:
    """Return a finished work object, as operators of `c10d` return it.

    Source: torch/csrc/distributed/c10d/init.cpp, `FakeWork` and `Work.boxed`, 2.11 to 2.15.
    """
    from torch._C import _distributed_c10d as c10d

    return getattr(c10d.Work, "boxed")(getattr(c10d, "FakeWork")())  # noqa: B009  in no stub
