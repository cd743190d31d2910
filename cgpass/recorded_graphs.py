"""`recordings`, `dump_graph`: the CUDA graphs that there are, and what one consists of."""

import weakref
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path

from cgpass.errors import CaptureError, InputError
from cgpass.runtime.owner import live_recordings
from cgpass.runtime.recording import Recording


@dataclass(frozen=True)
class RecordedGraph:
    """One recording, as `recordings` lists it. Does not keep it alive."""

    partition: str
    """The partition's name, its graph's direction, and where its function begins."""
    device: str
    cause: str
    """Why it was made, in a word; see `explain`."""
    detail: str
    """The same as a sentence."""
    copied_bytes: int
    """Bytes that each replay copies."""
    _recording: weakref.ref[Recording] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.partition}: {self.detail}"


def recordings() -> tuple[RecordedGraph, ...]:
    """The recordings of this process that calls may replay, those of one function one after the other, oldest first."""
    return tuple(
        RecordedGraph(
            recording.label,
            str(device),
            recording.note.cause if recording.note else "by hand",
            recording.note.detail if recording.note else "",
            recording.copied_bytes,
            weakref.ref(recording),
        )
        for device, recording in live_recordings()
    )


def dump_graph(recording: RecordedGraph, path: str | PathLike[str]) -> dict[str, int]:
    """Write down what a recording consists of.

        for recording in cgpass.recordings():
            print(recording)
        cgpass.dump_graph(cgpass.recordings()[0], "graph.dot")

    CUDA forgets that when a graph can be launched, unless the function was compiled with `keep_graphs="on"`. What is
    recorded on CPU (`driver="simulated"`) is a list of operators, each after the last.

    Args:
        recording: Of `recordings`.
        path: `*.json` (nodes with type and name, edges, counts by type) or `*.dot` (Graphviz).

    Returns:
        How many nodes there are of each type.

    Raises:
        InputError: `recording` is none, or `path` ends otherwise.
        CaptureError: The recording was freed, or nobody kept what it consists of.
        DriverUnavailableError: The package cuda-bindings, which torch brings on Linux, is not there.
    """
    if not isinstance(recording, RecordedGraph):
        raise InputError(
            "cgpass.dump_graph: recording must be one of cgpass.recordings(), got "
            f"{type(recording).__name__}"
        )
    target = Path(fspath(path))
    if target.suffix not in (".json", ".dot"):
        raise InputError(f"cgpass.dump_graph: path must end with .json or .dot, got {str(path)!r}")
    live = recording._recording()
    if live is None or live.closed:
        raise CaptureError(f"cgpass.dump_graph: the recording is gone ({recording})")
    topology = live.topology()
    about = {
        "partition": recording.partition,
        "device": recording.device,
        "cause": recording.cause,
        "detail": recording.detail,
        "copied_bytes": recording.copied_bytes,
    }
    text = topology.as_json(about) if target.suffix == ".json" else topology.as_dot(str(recording))
    target.write_text(text, encoding="utf-8")
    return topology.counts()
