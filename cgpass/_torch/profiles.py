"""Profiles, and kernels' annotations in them."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

profiler_state: Any = torch.autograd.profiler
"""Has `_is_profiler_enabled`: whether `torch.profiler` records now, in whatever thread. Reading it takes 15 ns, the
function `torch.autograd._profiler_enabled` 70 ns, and a range that nobody records 340 ns.

Source: torch/autograd/profiler.py `_set_is_profiler_enabled`, 2.11 to 2.15.
"""


def profiler_range(name: str) -> contextlib.AbstractContextManager[Any]:
    """A block that is a range of this name in a profile. It calls no operator, so no dispatch mode sees it.

    Source: torch/csrc/autograd/profiler_python.cpp, `_RecordFunctionFast`, 2.11 to 2.15.
    """
    return torch._C._profiler._RecordFunctionFast(name)


def can_annotate_kernels() -> bool:
    """Whether this torch lists, by profilers' ids, what the kernels of a CUDA graph belong to; 2.15 does.

    Source: torch/cuda/graph_annotations.py. What 2.13 has in its place is on for the whole process.
    """
    return importlib.util.find_spec("torch.cuda.graph_annotations") is not None


@contextlib.contextmanager
def annotating_kernels(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """A block in which `graph` is captured and notes what its kernels belong to.

    Does what `torch.cuda.graph(..., enable_annotations=True)` does, which also waits for the device and empties caches.

    Source: torch/cuda/graphs.py `graph.__enter__`, `__exit__`, and torch/cuda/_graph_annotations.py, 2.15.
    """
    from torch.cuda import _graph_annotations as notes

    hooks = (
        graph.register_capture_start_hook(notes.maybe_stamp_capture_root),
        graph.register_capture_end_hook(lambda graph: notes.resolve_pending_annotations()),
    )
    notes._set_annotations_enabled(True)
    try:
        yield
    except BaseException:
        notes.discard_capture_annotations(graph)
        raise
    finally:
        notes._set_annotations_enabled(False)
        for hook in hooks:
            hook.remove()


def belonging_to(what: dict[str, str], fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, whose kernels are said to belong to something where a graph notes that.

    Args:
        what: "name" and all else that profiles are to show.
        fn: What launches them. Such functions may call others: inner ones add to what outer ones say.
    """
    from torch.cuda.graph_annotations import mark_kernels

    def marked(*args: Any, **kwargs: Any) -> Any:
        with mark_kernels(what, backward=False):
            return fn(*args, **kwargs)

    return marked
