"""CUDA graphs, their pools and streams."""

import contextlib
import ctypes
from typing import Any

import torch

from cgpass.torch_private.modes import without_modes


def clear_cublas_workspaces() -> None:
    """Free cuBLAS' persistent workspaces, so that none is left pinned in a graph's pool.

    Source: torch/_inductor/cudagraph_trees.py `clear_cublass_cache`, 2.11.
    """
    torch._C._cuda_clearCublasWorkspaces()


def make_library_handles(device: torch.device) -> None:
    """Make the handles of cuBLAS and cuDNN that the current thread will use.

    Each thread has its own, made when it first needs one: inside a capture that fails
    (`CUBLAS_STATUS_NOT_INITIALIZED`, torch 2.11).

    Source: aten/src/ATen/cuda/detail/DeviceThreadHandles.h, 2.11.
    """
    torch.cuda.current_blas_handle()
    if torch.backends.cudnn.is_available():
        with without_modes():
            one = torch.ones(1, 1, 1, 1, device=device)
            torch.nn.functional.conv2d(one, one)


def abandon_failed_capture(device: int, pool: tuple[int, int]) -> None:
    """Take the allocator out of capture routing after `capture_end` raised.

    torch 2.11's `CUDAGraph::capture_end` raises before it stops routing allocations to the pool; later versions
    clean up in `reset`, where these calls find nothing to do and say so by raising.
    """
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def begin_allocating_to_pool(device: int, pool: tuple[int, int]) -> None:
    """Have this thread's allocations come from a pool, which counts one more user.

    Source: torch/_inductor/cudagraph_trees.py `_use_cuda_memory_pool_manager`, 2.11 to 2.15.
    """
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)


def end_allocating_to_pool(device: int, pool: tuple[int, int]) -> None:
    """Undo `begin_allocating_to_pool`; the pool keeps its user until `release_pool`."""
    torch._C._cuda_endAllocateToPool(device, pool)


def release_pool(device: int, pool: tuple[int, int]) -> None:
    """Take back one user of a pool."""
    torch._C._cuda_releasePool(device, pool)


def pool_segments(pool: tuple[int, int]) -> list[dict[str, Any]]:
    """Return the allocator's segments of a pool, from its own records: `torch.cuda.memory_snapshot`'s segments."""
    return torch.cuda.memory_snapshot(_held_once_more(pool), include_traces=False)


def uses_expandable_segments() -> bool | None:
    """Tell if CUDA's allocator makes expandable segments; None if it has not been started, or does not say.

    Source: torch/csrc/cuda/Module.cpp, `THCPModule_memorySnapshot`, 2.11 to 2.15.
    """
    if not torch.cuda.is_initialized():
        return None
    of_no_pool = _held_once_more((0, 2**40))
    found: Any = torch._C._cuda_memorySnapshot((*of_no_pool, False))
    return found.get("allocator_settings", {}).get("expandable_segments")


def _held_once_more(pool: tuple[int, int]) -> tuple[int, int]:
    """Return a pool to ask the allocator about, with a reference for torch 2.11 to drop.

    That drops one too many to each number and to `include_traces`: past 256 pools numbers that are in use were freed,
    and before Python 3.12 `False` in the end. Later versions leave it: some bytes for each question.
    """
    first, second = pool
    for each in (first, second, False):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    return first, second


def current_raw_stream(device: int) -> int:
    """The current stream's handle as an integer, without building a `torch.cuda.Stream`."""
    return torch._C._cuda_getCurrentRawStream(device)


def is_capturing() -> bool:
    """Tell if the current stream is being captured by anybody."""
    return torch._C._cuda_isCurrentStreamCapturing()
