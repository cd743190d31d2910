"""Reports as plain data: what `explain` returns, and how it is kept in files."""

import contextlib
import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cgpass.errors import ReportError
from cgpass.report import page, table
from cgpass.report.decode import decoded

SCHEMA: Final = 1
"""Version of the dictionaries that `Report.to_dict` gives."""


@dataclass(frozen=True, kw_only=True)
class ReasonReport:
    """Why something runs without a CUDA graph."""

    code: str
    """Stable name of the rule."""
    op: str
    """The operator to blame; empty if it is not known."""
    detail: str
    fix: str
    """What to do about it."""
    line: str | None = None
    """The user's line, `model.py:41 in forward: code`."""
    count: int = 1
    """Operators that this is said of."""
    rest: str | None = None
    """Of a graph break that `torch.compile` can't go on behind: what of the function it left to eager."""


@dataclass(frozen=True, kw_only=True)
class CopiedInput:
    """An input that each replay copies."""

    name: str
    num_bytes: int
    """Per replay, back again included where the partition writes it."""
    line: str | None = None
    """The user's line that first reads it."""


@dataclass(frozen=True, kw_only=True)
class RecordingReport:
    """One recording, and why it was made."""

    cause: str
    """A word: "first", "shape", "moved", "other tensors", "memory", "held" or "anew"."""
    detail: str
    copied_bytes: int
    pool: int
    """Which of the function's pools it lies in; results that are held need more than one."""
    record_ms: float | None = None
    """Host time of capturing and instantiating it; None if it is simulated."""
    instantiate_ms: float | None = None
    """Host time of ending the capture, in which the graph is instantiated; None where nothing is."""
    warm_up_ms: float | None = None
    """Host time of the last warm-up call before it, None if there was none."""


@dataclass(frozen=True, kw_only=True)
class PartitionReport:
    """One partition of a graph."""

    name: str
    captured: bool
    num_ops: int
    """Operators of its graph, before any are fused."""
    kernels: int | None = None
    """Kernels that one call of what was explained launches for it; None where no profiler tells. What prepares a replay
    (copies of inputs, offsets of random numbers) is not among them."""
    kernels_in_graphs: int | None = None
    """Those among them that a CUDA graph launched."""
    calls: float | None = None
    """In a report of all that a process did: its calls but for warm-ups."""
    graphed: float | None = None
    """Share of its calls that CUDA graphs made, of those measured or of `calls`."""
    reasons: tuple[ReasonReport, ...] = ()
    """Why it is not captured, or why some of its calls ran without a graph."""
    copied_inputs: tuple[CopiedInput, ...] = ()
    """Of its newest recording, largest first."""
    static_inputs: int = 0
    """Parameters, buffers and marked inputs, read where they lie."""
    recordings: tuple[RecordingReport, ...] = ()
    """The newest, oldest first."""
    live_recordings: int = 0
    """Recordings that it has now."""
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    """Since it was compiled: calls, recordings, replays, plain calls, rescues and so on, as `cgpass.counters()`."""
    output_bytes: int | None = None
    """Memory of its recordings' outputs."""
    ms: float | None = None
    """Time in one call of what was explained; see `Report.ms`."""
    plain_ms: float | None = None
    """The same without CUDA graphs."""


@dataclass(frozen=True, kw_only=True)
class GraphReport:
    """A forward, backward or inference graph."""

    number: int
    direction: str
    calls: int
    """Since it was compiled."""
    calls_per_run: float | None = None
    """How often one call of what was explained runs it."""
    num_ops: int
    skip: str | None = None
    """Why the whole of it runs without CUDA graphs, if it does."""
    reasons: tuple[ReasonReport, ...] = ()
    """The same, by operator."""
    partitions: tuple[PartitionReport, ...] = ()
    ms: float | None = None
    plain_ms: float | None = None
    kernels: int | None = None
    """Of a graph that runs plainly; else its partitions have them."""

    @property
    def captured_ops(self) -> float:
        """Operators in captured partitions, each counted by the share of its calls that graphs made."""
        return sum(
            part.num_ops * (1 if part.graphed is None else part.graphed)
            for part in self.partitions
            if part.captured
        )

    @property
    def work(self) -> tuple[float, float]:
        """Operators that CUDA graphs ran, and all that ran, in one call of what was explained."""
        weight = 1 if self.calls_per_run is None else self.calls_per_run
        return weight * self.captured_ops, weight * self.num_ops

    @property
    def work_of_all_calls(self) -> tuple[float, float]:
        """The same in all calls after warm-ups, of a report of all that a process did."""
        if self.skip is not None:
            return 0, self.calls * self.num_ops
        ran = [(part.num_ops * (part.calls or 0), part) for part in self.partitions]
        done = sum(ops * (part.graphed or 0) for ops, part in ran if part.captured)
        return done, sum(ops for ops, _ in ran)


@dataclass(frozen=True, kw_only=True)
class FunctionReport:
    """What one call of the backend compiled: a forward and a backward graph, or an inference graph."""

    number: int
    place: str | None
    """Where it begins, `model.py:41 in forward`."""
    graphs: tuple[GraphReport, ...]
    graph_break: ReasonReport | None = None
    """Why it ends where it does, if `torch.compile` made several of the user's function."""
    driver: str | None = None
    """What records it: "cuda", "simulated", or None if nothing does."""
    pool_bytes: int | None = None
    """Memory that its pools take from the device; None where no device is asked for any."""


@dataclass(frozen=True, kw_only=True)
class EagerFunction:
    """A function, or what is left of it behind a graph break, that `torch.compile` gave back to eager."""

    reason: ReasonReport
    place: str | None = None
    """Where it begins, `model.py:41 in forward`, or `the rest of forward from model.py:41 on`; None if that is not
    known."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `explain` found. `print` shows it as text; `save` writes it as JSON or as a page."""

    cgpass: str
    torch: str
    device: str
    functions: tuple[FunctionReport, ...]
    left_to_eager: tuple[EagerFunction, ...] = ()
    """What `torch.compile` was to compile and gave up; nothing of it is in `functions`."""
    graph_breaks: tuple[ReasonReport, ...] = ()
    """Those at which no function ends: no operator of the user's function was before them."""
    settled: bool = True
    """Whether calls recorded nothing new in the end."""
    runs: int = 0
    """Calls that were measured with CUDA graphs, and as many without."""
    ms: float | None = None
    """Median time of one call with its backward, from start until the device is done. None, as all times, where graphs
    are simulated: they are no measure of speed."""
    plain_ms: float | None = None
    """The same with all partitions run without CUDA graphs."""
    native: str | None = None
    """Whether the C++ of calls is in use, and if not why; None if nothing was to be recorded."""
    gpu_share: float | None = None
    """Share of the call's GPU time that is spent inside CUDA graphs."""

    @property
    def graphs(self) -> tuple[GraphReport, ...]:
        """Those of all functions."""
        return tuple(graph for function in self.functions for graph in function.graphs)

    @property
    def all_graph_breaks(self) -> tuple[ReasonReport, ...]:
        """Those that functions end at, and others."""
        ends = (each.graph_break for each in self.functions)
        return *(each for each in ends if each is not None), *self.graph_breaks

    @property
    def partitions(self) -> tuple[PartitionReport, ...]:
        """Those of all graphs."""
        return tuple(part for graph in self.graphs for part in graph.partitions)

    @property
    def of_all_calls(self) -> bool:
        """Whether it is of all that a process did, without times."""
        return any(part.calls is not None for graph in self.graphs for part in graph.partitions)

    @property
    def counted(self) -> str:
        """What `work` counts: "kernels" where a profiler told of them, else "operators"."""
        parts = [part.kernels for graph in self.graphs for part in graph.partitions]
        found = parts + [graph.kernels for graph in self.graphs]
        return "kernels" if any(number is not None for number in found) else "operators"

    @property
    def work(self) -> tuple[float, int]:
        """How much of one call's work inside compiled functions CUDA graphs launch, and how much there is.

        In a report of all that a process did, it is the work of all calls after warm-ups. What runs between these functions, at graph breaks, is in neither.
        """
        if self.counted == "kernels":
            parts = [part for graph in self.graphs for part in graph.partitions]
            captured = sum(part.kernels_in_graphs or 0 for part in parts)
            plain = sum(graph.kernels or 0 for graph in self.graphs)
            return captured, plain + sum(part.kernels or 0 for part in parts)
        each = [g.work_of_all_calls if self.of_all_calls else g.work for g in self.graphs]
        done, work = (sum(amounts) for amounts in zip((0, 0), *each, strict=True))
        return round(done) if abs(done - round(done)) < 1e-6 else done, round(work)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, data: Any) -> "Report":
        """The report that `to_dict` was called on.

        Raises:
            ReportError: It is no report, or one of a version that this version of cgpass doesn't know.
        """
        if not isinstance(data, dict) or "schema" not in data:
            raise ReportError(
                "this is no report of cgpass: a dictionary with the key 'schema' was expected; save one with "
                "cgpass.explain(...).save('report.json')"
            )
        if data["schema"] != SCHEMA or isinstance(data["schema"], bool):
            raise ReportError(
                f"the report has schema {data['schema']!r}, this version of cgpass reads schema {SCHEMA}: read it with "
                f"the version that wrote it ({data.get('cgpass', 'unknown')}), or make it again"
            )
        return decoded(cls, {k: v for k, v in data.items() if k != "schema"}, "report")

    def to_json(self) -> str:
        """JSON text of `to_dict`."""
        return json.dumps(self.to_dict(), indent=2)

    def save(self, path: str | Path) -> None:
        """Write the report to a file.

        Args:
            path: Ends in .json for what `from_dict` reads, in .html for a page to look at, in .txt for the text.

        Raises:
            ReportError: Another ending, or the file can't be written; then it is as it was.
        """
        path = Path(path)
        check_ending(path)
        text, part = _WRITERS[path.suffix](self), path.with_suffix(f".{os.getpid()}.part")
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        except OSError as error:
            raise ReportError(f"{path} can't be written: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):
                part.unlink()

    def __str__(self) -> str:
        return table.text(self)


def check_ending(path: Path) -> None:
    """Refuse a file that a report can't be written to.

    Raises:
        ReportError: It ends in nothing that reports are saved as.
    """
    if path.suffix not in _WRITERS:
        endings = ", ".join(_WRITERS)
        raise ReportError(f"a report is saved as {endings}, got {str(path)!r}")


_WRITERS: Final = {".json": Report.to_json, ".html": page.html, ".txt": str}
