"""Texts and events in torch's structured trace: `TORCH_TRACE=directory`, read by tlparse.

While nothing is traced, all of this is one look at a list.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from cgpass import torch_private
from cgpass.telemetry.summaries import RecordingNote


@dataclass(frozen=True)
class Source:
    """Where what is compiled comes from, for messages and traces."""

    place: str | None = None
    """Where the function begins, `model.py:41 in forward`."""
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


def add_text(name: str, make: Callable[[], str], trace_id: object = None) -> None:
    """Add a text, listed under `trace_id` if no compilation runs now."""
    _add(name, "string", make, trace_id)


def add_json(name: str, make: Callable[[], Any], trace_id: object = None) -> None:
    """Add what `make` returns, as JSON. See `add_text`."""
    _add(name, "json", lambda: json.dumps(make(), indent=1), trace_id)


def _add(name: str, encoding: str, make: Callable[[], str], trace_id: object) -> None:
    if is_on():
        with torch_private.traced_under(torch_private.current_trace_id() or trace_id):
            torch_private.trace_artifact(f"cgpass_{name}", encoding, make)


def event(name: str) -> contextlib.AbstractContextManager[Any]:
    """A block that is shown on the trace's timeline."""
    return torch_private.traced_event(f"cgpass.{name}") if is_on() else contextlib.nullcontext()


def add_recording(partition: str, number: int, note: RecordingNote, source: Source) -> None:
    """Add the partition's recording that was just made: its cause and durations as JSON, and on the timeline."""
    if not is_on():
        return
    about = {"partition": partition, "function": source.place, "recording": number}
    told = {**about, **dataclasses.asdict(note)}
    name = f"{partition.replace(' ', '_')}_recording_{number}"
    add_json(name, lambda: told, source.trace_id)
    end = time.time_ns()
    start = end - int((note.record_ms or 0) * 1e6)
    inner = []
    if note.instantiate_ms is not None:  # nearly the last thing that recording does
        inner = [("cgpass.instantiate", (end - int(note.instantiate_ms * 1e6), end))]
    shown = {**about, "cause": note.cause, "detail": note.detail}
    with torch_private.traced_under(torch_private.current_trace_id() or source.trace_id):
        torch_private.trace_past_event(f"cgpass.record {partition}", (start, end), shown, inner)
