"""Why something runs outside of CUDA graphs: what messages, summaries and reports say of it."""

from dataclasses import dataclass
from typing import Final

CHOSEN: Final = frozenset({"too_small", "no_work", "lifted", "effect_token", "not_worth_it"})
"""Codes of what nobody wants captured: it is not worth it, or nothing of it runs on the device."""

OTHER_FIXES: Final = {
    "too_small": "leave it: its own launches cost little; or set min_partition_ops to as many operators as it holds",
    "no_work": "leave it: nothing is lost",
    "not_worth_it": 'capture_policy="always" captures it',
    "capture": "name the operator that is to blame in unsafe_ops to have the rest captured",
    "out_of_memory": "free memory, or keep fewer recordings (max_recordings, max_static_sets); after cgpass.reset() the next "
    "calls try again",
    "no_placeholder": "pass the input as a dense tensor",
    "graph_break": "do what torch hints at, in the report's words; TORCH_LOGS=graph_breaks shows more",
    "recompile_limit": "keep what changes from call to call the same, or make it a tensor; TORCH_LOGS=recompiles "
    "names every cause",
}
"""What a user can do, by code, where no rule about an operator is the reason."""


def many(count: float, noun: str) -> str:
    """`1 graph`, `2 graphs`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclass(frozen=True)
class Reason:
    """Why a node runs outside of any CUDA graph."""

    code: str
    """Stable name of the rule, a key of `graph.op_tables.FIXES` or of `OTHER_FIXES`; "capture" where the capture of a
    whole partition failed, which is not split."""
    op: str
    """What the node calls; empty if no single operator is to blame."""
    detail: str
    """What about it can't be captured."""
    fix: str
    """What the user can do about it."""
    line: str | None = None
    """The user's line, `model.py:41 in forward: code`."""

    @property
    def is_chosen(self) -> bool:
        """Whether it runs outside of graphs because cgpass chose so, not because it can't be captured."""
        return self.code in CHOSEN

    @property
    def ending(self) -> str:
        """Of a graph break, that a function ends there."""
        place = f" at {self.line}" if self.line else ""
        return f"ends at a graph break{place}: {self.detail}"

    def __str__(self) -> str:
        """One line for messages and reports."""
        place = f" at {self.line}" if self.line else ""
        return f"{self.op}{place}: {self.detail} [{self.code}]; {self.fix}"
