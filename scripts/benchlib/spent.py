"""What compiling a function spends its time on, where other processes left what they compiled.

Source: torch/_inductor/codecache.py `FxGraphCache`, 2.11 to 2.15.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

READING = "reading the graphs"
PASSES = "passes over them"
KEYS = "Inductor's key of each"
LOADING = "loading their code"
WHAT = (READING, PASSES, KEYS, LOADING)


@contextlib.contextmanager
def watched() -> Iterator[dict[str, float]]:
    """Seconds by what they were spent on, filled meanwhile; none of these calls another one of them.

    Plain `torch.compile` does the last of these alone.
    """
    # Here, since importing the compiler is a part of the first step, or of `torch.compile`.
    from torch._inductor.codecache import FxGraphCache  # noqa: PLC0415

    from cgpass import torch_private  # noqa: PLC0415
    from cgpass.compile.passes import base  # noqa: PLC0415

    found = dict.fromkeys(WHAT, 0.0)

    def noted(what: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                found[what] += time.perf_counter() - start

        return call

    with contextlib.ExitStack() as stack:
        for what, owner, name in (
            (READING, torch_private, "unpickled"),
            (PASSES, base, "_run_one"),
            (KEYS, FxGraphCache, "prepare_key"),
            (LOADING, FxGraphCache, "load_with_key"),
        ):
            fn = noted(what, getattr(owner, name))
            stack.enter_context(
                mock.patch.object(owner, name, staticmethod(fn) if owner is FxGraphCache else fn)
            )
        yield found
