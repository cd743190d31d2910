"""Texts in torch's structured trace: `TORCH_TRACE=directory`, read by tlparse.

While nothing is traced, all of this is one look at a list.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from cgpass import torch_private
from cgpass.telemetry.summaries import RecordingNote


@dataclass(frozen=True)
class Source:
    """The origin of what is compiled, for messages and traces."""

    place: str | None = None
    """The line where the function begins, `model.py:41 in forward`."""
    trace_id: Any = None
    """What torch's trace lists its compilation under."""

    def of(self, name: str) -> str:
        """`name`, with where it is from if that is known."""
        return name if self.place is None else f"{name} of {self.place}"

    def graph(self, direction: str) -> str:
        """One of the function's graphs, `the forward graph of model.py:41 in forward`."""
        return self.of(f"the {direction} graph")


NOWHERE: Final = Source()


is_on = torch_private.is_traced


def add_text(
    name: str, make: Callable[[], str], trace_id: object = None, kind: str = "string"
) -> None:
    """Add a text, listed under `trace_id` if no compilation runs now."""
    if is_on():
        with torch_private.traced_under(torch_private.current_trace_id() or trace_id):
            torch_private.trace_artifact(f"cgpass_{name}", kind, make)


def add_json(name: str, make: Callable[[], Any], trace_id: object = None) -> None:
    """Add what `make` returns, as JSON. See `add_text`."""
    add_text(name, lambda: json.dumps(make(), indent=1), trace_id, "json")


def add_recording(partition: str, number: int, note: RecordingNote, source: Source) -> None:
    """Add the partition's recording that was just made: its cause and durations."""
    told = {"partition": partition, "function": source.place, "recording": number}
    name = f"{partition.replace(' ', '_')}_recording_{number}"
    add_json(name, lambda: told | dataclasses.asdict(note), source.trace_id)
