"""Reasons why something runs outside of CUDA graphs, for messages, summaries and reports."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

CHOSEN: Final = frozenset({"too_small", "no_work", "lifted", "cpu_number", "effect_token"})
"""Codes of what nobody wants captured: it is not worth it, or nothing of it runs on the device."""

_NO_WORK: Final = CHOSEN - {"too_small"} | {"host_only"}

OTHER_FIXES: Final = {
    "too_small": "leave it: it launches little work; or lower min_partition_ops to the number of its operators",
    "no_work": "leave it: nothing is lost",
    "capture": "in compiled code name the operator that fails in unsafe_ops; move it out of a CUDAGraphWrapper",
    "out_of_memory": "free memory, or lower max_recordings; after cgpass.reset() the next calls try again",
    "raised": "see the error",
    "shares_memory": "pass tensors that share no memory: clone() one of them",
    "max_recordings": "pad inputs to a few sizes, drop results, or raise max_recordings",
    "max_pending_calls": "call it under torch.no_grad() if you need no backward, detach results that you keep, or "
    "raise max_pending_calls",
    "not_in_the_pool": "see why the partition that makes it ran without a graph",
    "transform": "call it outside of transforms (torch.func, vmap, batched gradients)",
    "no_native_code": "install g++ or clang++, or set CXX to a compiler; python -m cgpass build shows its output",
    "outer_capture": "leave it: your own graph captures it",
    "passing": "leave it, unless it keeps happening: a capture failed once",
    "new_tensor": "write into it in place (copy_; compute with a clone if the backward needs it), unless modules share the code",
    "new_shape": "pad inputs to a few sizes; use few values of a number, or pass a 0-dim device tensor if only arithmetic "
    "reads it",
    "graph_break": "follow torch's hint in the report; TORCH_LOGS=graph_breaks shows more",
    "recompiled": "keep dtypes, sizes, requires_grad, objects, Python values and modes (autocast, no_grad) the same in "
    "every call; a few of each are fine",
    "recompile_limit": "keep the value fixed or out of the function, or make it a tensor if only arithmetic reads it (a "
    "counter: a buffer written in place); for a few more values or modules raise "
    "torch._dynamo.config.recompile_limit; TORCH_LOGS=recompiles names each cause",
}
"""Remedies, by code, where no rule about an operator is the reason."""
KEEP_GRADIENTS: Final = (
    "keep gradients in place with zero_grad(set_to_none=False): backwards add to them"
)
_SIZE: Final = re.compile(r"^(.+)\.size\((\d+)\)$")
"""The size of a dimension, by the name of the input."""
FEW_SIZES: Final = "use few sizes: pad the batch, or drop the last one (drop_last=True)"


def many(count: float, noun: str) -> str:
    """`1 graph`, `2 graphs`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclass(frozen=True)
class Reason:
    """A reason for running something outside of any CUDA graph. The same from the compiler to a saved report."""

    code: str
    """Stable name of the rule."""
    op: str
    """The operator that the node calls; empty if no single one is to blame."""
    detail: str
    """The cause: what about it can't be captured."""
    fix: str
    """The remedy."""
    line: str | None = None
    """The user's line, `model.py:41 in forward: code`."""
    rest: str | None = None
    """The code that `torch.compile` left to eager for it: a function, or `the rest of forward from model.py:40 on`."""
    count: int = 1
    """Operators that a report says it of."""
    is_earlier: bool = False
    """True if it was noted before the report that tells of it; nobody knows whether its calls met it."""

    @property
    def is_chosen(self) -> bool:
        """True if it runs outside of graphs because cgpass chose so, not because it can't be captured."""
        return self.code in CHOSEN

    def __str__(self) -> str:
        """One line for messages and reports."""
        place = f" at {self.line}" if self.line else ""
        about = f"{self.op}{place}: " if self.op or place else ""
        if self.rest:
            because = f", because of {self.line}" if self.line else ""
            about = f"left to eager: {self.rest}{because}: "
        more = f" (and {self.count - 1} more)" if self.count > 1 else ""
        return f"{about.lstrip()}{self.detail} [{self.code}]; {self.fix}{more}"


def at_work(num_ops: int, why: Sequence[Reason]) -> int:
    """Count the operators that have work for the device, of some that run without a graph for these reasons."""
    idle = [each for each in why if each.code in _NO_WORK]
    if why and all(each.is_chosen for each in idle) and len(idle) == len(why):
        return 0  # what computes sizes is named by none
    return num_ops - sum(each.count for each in idle)


_FEW: Final = 4
"""Warm-ups without a recording after them that any partition may have."""
_MANY: Final = 0.2
"""Share of calls from which on such warm-ups are worth a word."""


def excused(counts: Mapping[str, int]) -> int:
    """Warm-ups that are no calls without a graph: all, unless calls go on warming up what is never recorded."""
    idle = counts["warmups"] - counts["recordings"]
    goes_on = idle > max(_FEW, _MANY * counts["calls"])
    return counts["recordings" if goes_on else "warmups"]


Noted = tuple[Counter[str], Counter[tuple[str, str, str | None]]]


class CallReasons:
    """Reasons for calls of a captured partition without a graph, and news of calls that only warmed up.

    Holds text alone, for reports that outlive the partition.
    """

    def __init__(self) -> None:
        self._details: dict[str, tuple[str, str | None]] = {}
        self._counts: Counter[str] = Counter()
        self._changed: Counter[tuple[str, str, str | None]] = Counter()

    def note(self, code: str, cause: str, line: str | None) -> None:
        """Note a call without a graph, its cause and the user's line, of which the last are told."""
        self._details[code] = cause, line
        self._counts[code] += 1

    def note_changed(self, code: str, inputs: Iterable[tuple[str, str | None]]) -> None:
        """Note inputs, by name and line, that were new ("new_tensor", "new_shape") in a call that can't be replayed."""
        self._changed.update((code, *each) for each in inputs)

    def noted(self) -> Noted:
        """Copy what was noted so far, for `told` of what comes after."""
        return self._counts.copy(), self._changed.copy()

    def told(self, counts: Mapping[str, int], since: Noted | None = None) -> tuple[Reason, ...]:
        """Return everything noted since as reasons; `counts` are what the partition's counters grew by."""
        before, changed_before = since or (Counter(), Counter())
        calls, details = counts["calls"], dict(self._details)
        without = self._counts - before
        if (left := counts["plain_calls"] - without.total()) > 0:
            without["passing"] = left
            details["passing"] = "they could not be recorded just then", None
        found = []
        for code, n in without.items():
            detail, line = details[code]
            detail = f"{n} of {many(calls, 'call')} ran without a graph: {detail}"
            found.append(Reason(code, "", detail, OTHER_FIXES[code], line))
        ended = counts["plain_calls"] + counts["warmups"] + counts["replays"]
        if (raised := calls - ended) > 0:
            detail = f"{raised} of {many(calls, 'call')} did not end: they raised an error, or are still running"
            found.append(Reason("raised", "", detail, OTHER_FIXES["raised"]))
        if excused(counts) == counts["warmups"]:
            return tuple(found)
        idle, changed = counts["warmups"] - counts["recordings"], self._changed - changed_before
        often = [each for each in changed.items() if 2 * each[1] > idle] or changed.most_common(1)
        return (*found, *(_new(*key, n, calls) for key, n in often))


def _new(code: str, name: str, line: str | None, count: int, calls: int) -> Reason:
    often = f"in {count} of {many(calls, 'call')}"
    detail = f"{NEW[code]} {often}: each such call warms up, or is recorded"
    fix = OTHER_FIXES[code]
    if code == "new_tensor" and name.endswith(".grad"):
        fix = KEEP_GRADIENTS
    elif code == "new_shape" and (size := _SIZE.match(name)):
        is_batch = size[2] == "0" and not name.startswith("___stack")
        fix = FEW_SIZES if is_batch else f"pad dimension {size[2]} of {size[1]} to a few sizes"
    return Reason(code, name, detail, fix, line)


NEW: Final = {"new_tensor": "is a new tensor", "new_shape": "has another value or layout"}
"""Codes of what is new in calls that warm up, and what they say of an input."""
