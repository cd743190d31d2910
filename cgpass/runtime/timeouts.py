"""Timeouts of collectives, told as what they are: which one, on whose line, and what to do."""

import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cgpass.errors import CollectiveTimeoutError
from cgpass.runtime.capturing import is_any_capture_running
from cgpass.runtime.driver import BoxedCallable

_TIMED_OUT = re.compile(r"\btim(ed[ -]?out|e[ -]?out)\b", re.IGNORECASE)
_COMMUNICATES = re.compile(r"gloo|nccl|ucc|collective|watchdog|store|barrier", re.IGNORECASE)
_CALL = re.compile(r"(?:_c10d_functional(?:_autograd)?|_dtensor)\.(\w+)")
_NAMED = 4
"""Collectives that a message names where it is not known which one it was."""
_ADVICE = (
    "Another process did not come to it, or came later than the process group allows. Have all processes call the "
    "function with the same shapes and options, equally often; where one of them only takes long (it compiles, it "
    "loads), give the group a longer timeout: init_process_group(timeout=...), new_group(timeout=...)."
)


@dataclass(frozen=True)
class CollectiveCall:
    """A call in a partition that communicates."""

    node: str
    """Its name in the graph, and in the code that is made of it."""
    op: str
    """What is called: "all_reduce"."""
    waits_for: str
    """What is waited for, if it is a wait; else empty."""
    line: str | None
    """The user's."""

    def __str__(self) -> str:
        """For messages."""
        name = f"{self.op} (of {self.waits_for})" if self.waits_for else self.op
        return f"{name} at {self.line}" if self.line else name


def is_timeout(error: BaseException) -> bool:
    """Whether an error says that a collective took too long.

    NCCL's watchdog raises none of these: it ends the process, with a message of its own.

    Source: texts of gloo's transports, of `DistBackendError` and `DistStoreError`, torch 2.11 to 2.15.
    """
    text = f"{type(error).__name__}: {error}"
    known = isinstance(error, RuntimeError) and bool(_TIMED_OUT.search(text))
    return known and bool(_COMMUNICATES.search(text))


def timeouts_told(fn: BoxedCallable, name: str, calls: Sequence[CollectiveCall]) -> BoxedCallable:
    """`fn`, whose timeouts say what came too late.

    Args:
        fn: What a partition runs.
        name: Of the partition.
        calls: What communicates in it, in order.
    """

    def run(args: list[Any]) -> Sequence[Any]:
        try:
            return fn(args)
        except RuntimeError as error:
            if isinstance(error, CollectiveTimeoutError) or not is_timeout(error):
                raise
            when = "was captured" if is_any_capture_running() else "ran without a graph, to warm up"
            found = " or ".join(map(str, _to_blame(error, calls)))
            raise CollectiveTimeoutError(
                f"{name}: a collective timed out while the partition {when}: {found}: {error}. {_ADVICE}"
            ) from error

    return run


def _to_blame(error: BaseException, calls: Sequence[CollectiveCall]) -> Sequence[CollectiveCall]:
    """The call whose line an error came from, or those of the operator on that line, or the first ones."""
    frames, line = error.__traceback__, ""
    while frames is not None:
        code = linecache.getline(frames.tb_frame.f_code.co_filename, frames.tb_lineno)
        line = code if _CALL.search(code) else line
        frames = frames.tb_next
    by_name = [call for call in calls if re.match(rf"\s*{re.escape(call.node)}\b", line)]
    ops = set(_CALL.findall(line))
    by_op = [call for call in calls if call.op in ops or f"{call.op}_" in ops]
    return (by_name or by_op or calls)[:_NAMED]
