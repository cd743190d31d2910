"""Structured traces (TORCH_TRACE) and profiles."""

import contextlib
import json
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch._guards import CompileContext, compile_context
from torch._logging import trace_structured
from torch._logging._internal import LazyTraceHandler


def is_traced() -> bool:
    """Tell if torch's structured trace goes to a file (`TORCH_TRACE`). Handlers of others (pytest's) do not count.

    Source: torch/_logging/_internal.py `trace_log`, `LazyTraceHandler`, 2.11 to 2.15.
    """
    handlers = logging.getLogger("torch.__trace").handlers
    return bool(handlers) and any(map(_writes_a_trace, handlers))


def _writes_a_trace(handler: logging.Handler) -> bool:
    return isinstance(handler, LazyTraceHandler) and bool(handler.root_dir or handler.stream)


current_trace_id: Callable[[], Any] = CompileContext.current_trace_id
"""Returns the id under which traces list the compilation that runs now, None outside of one."""


def trace(name: str, make: Callable[[], Any], trace_id: Any = None) -> None:
    """Add what `make` returns, a text or plain data, to the structured trace; while nothing is traced, look at a list.

    It is listed under the compilation that runs now, else under that of `trace_id`, which is over.

    Source: torch/_logging/_internal.py `trace_structured_artifact`; torch/_guards.py `CompileContext`, 2.11 to 2.15.
    """
    if not is_traced():
        return
    made = make()
    is_text = isinstance(made, str)
    text, kind = (made, "string") if is_text else (json.dumps(made, indent=1), "json")
    with contextlib.ExitStack() as stack:
        if trace_id is not None and current_trace_id() is None:
            context = CompileContext(trace_id.compile_id)
            context.attempt = trace_id.attempt
            stack.enter_context(compile_context(context))
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": f"cgpass_{name}", "encoding": kind},
            payload_fn=lambda: text,
            expect_trace_id=False,
        )


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
