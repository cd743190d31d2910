"""From what telemetry and living functions know to a `Report`."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cgpass import telemetry
from cgpass.options import Options
from cgpass.report.kernels import Launches
from cgpass.report.measure import Key, Times
from cgpass.report.model import (
    CopiedInput,
    EagerFunction,
    FunctionReport,
    GraphReport,
    PartitionReport,
    ReasonReport,
    RecordingReport,
    Report,
)
from cgpass.report.ran import Ran, calls_of_parts
from cgpass.runtime import native
from cgpass.runtime.executor import Executor
from cgpass.runtime.owner import Owner
from cgpass.runtime.partition import PartitionRunner
from cgpass.telemetry.reason import Reason
from cgpass.telemetry.summaries import GraphSummary, PartitionSummary
from cgpass.version import VERSION


@dataclass
class Measured:
    """What calls showed."""

    captured: Times = field(default_factory=Times)
    plain: Times = field(default_factory=Times)
    launches: Launches | None = None
    """Of one call on CUDA."""
    settled: bool = True
    runs: int = 0
    device: torch.device | None = None
    """Where it ran; that of the process by default."""


def called(times: Times) -> frozenset[int]:
    """Numbers of the graphs that calls ran."""
    return frozenset(number for number, _ in times.steps)


def collect(numbers: Collection[int] | None = None) -> tuple[FunctionReport, ...]:
    """What is known of functions that are compiled, without times.

    Args:
        numbers: Of the graphs to report; None for all that telemetry still lists.
    """
    functions: dict[Any, list[tuple[GraphReport, GraphSummary, Owner | None]]] = {}
    for number, (summary, runs) in telemetry.graph_runs().items():
        if numbers is not None and number not in numbers:
            continue
        executors = [live for run in runs if isinstance(live := run.live(), Executor)]
        owner = next((e.owner for e in executors if e.owner is not None), None)
        graph = _graph(number, summary, runs)
        key = ("graph", number) if summary.function is None else summary.function
        functions.setdefault(key, []).append((graph, summary, owner))
    return tuple(_function(members) for members in functions.values())


def _function(
    members: Sequence[tuple[GraphReport, GraphSummary, Owner | None]],
) -> FunctionReport:
    owner = next((owner for *_, owner in members if owner is not None), None)
    first = members[0][1]
    return FunctionReport(
        number=first.function if first.function is not None else -1,
        place=first.place,
        graphs=tuple(graph for graph, *_ in members),
        graph_break=next(iter(reasons([first.graph_break])), None) if first.graph_break else None,
        driver=next((each.driver for _, each, _ in members if each.driver is not None), None),
        pool_bytes=None if owner is None else owner.driver.pool_bytes(),
    )


def _graph(
    number: int,
    summary: GraphSummary,
    runs: Sequence[telemetry.GraphRun],
) -> GraphReport:
    runners = {
        step.name: step.run
        for run in runs
        if isinstance(live := run.live(), Executor)
        for step in live.plan.steps
        if isinstance(step.run, PartitionRunner)
    }
    known = {name: part for run in runs for name, part in run.parts.items()}
    return GraphReport(
        number=number,
        direction=summary.direction,
        calls=sum(run.tally.calls for run in runs),
        num_ops=summary.num_ops or sum(part.num_ops for part in summary.partitions),
        skip=summary.skip,
        reasons=reasons(summary.why),
        partitions=tuple(
            _partition(part, known.get(part.name), runners.get(part.name))
            for part in summary.partitions
        ),
    )


def _with_calls(graph: GraphReport, ran: Mapping[str, Ran]) -> GraphReport:
    """Add how often each partition ran since it was compiled, and how often of that in graphs."""
    parts = tuple(
        dataclasses.replace(
            part,
            calls=float(each.calls),
            graphed=each.replays / each.calls if each.calls and part.captured else 0.0,
        )
        if (each := ran.get(part.name)) is not None
        else part
        for part in graph.partitions
    )
    return dataclasses.replace(graph, partitions=parts)


def _partition(
    part: PartitionSummary,
    run: telemetry.PartitionRun | None,
    runner: PartitionRunner | None,
) -> PartitionReport:
    report = PartitionReport(
        name=part.name, captured=part.captured, num_ops=part.num_ops, reasons=reasons(part.why)
    )
    if run is not None:
        report = dataclasses.replace(
            report,
            counts=dataclasses.asdict(run.stats),
            recordings=tuple(RecordingReport(**dataclasses.asdict(note)) for note in run.notes),
        )
        if part.captured:
            report = dataclasses.replace(report, reasons=reasons(run.reasons))
    return report if runner is None else _with_inputs(report, runner)


def _with_inputs(report: PartitionReport, runner: PartitionRunner) -> PartitionReport:
    """Add what is known as long as the partition lives."""
    infos, recordings = runner.layout.infos, runner.table.all()
    report = dataclasses.replace(
        report,
        static_inputs=len(runner.layout.parameters),
        live_recordings=len(recordings),
    )
    if not recordings:
        return report
    newest = max(recordings, key=lambda recording: recording.birth)
    copied = [
        CopiedInput(name=infos[i].name, num_bytes=num_bytes, line=infos[i].line)
        for i, num_bytes in newest.copied_inputs.items()
    ]
    return dataclasses.replace(
        report,
        copied_inputs=tuple(sorted(copied, key=lambda each: -each.num_bytes)),
        output_bytes=sum(recording.memory.num_bytes() for recording in recordings),
    )


def reasons(found: Iterable[Reason]) -> tuple[ReasonReport, ...]:
    """Each once, with how often it was found; what was chosen once for each operator, wherever it is."""
    counts: dict[Any, int] = {}
    first: dict[Any, Reason] = {}
    for reason in found:
        key = (reason.code, reason.detail, reason.op) if reason.is_chosen else reason
        counts[key] = counts.get(key, 0) + 1
        first.setdefault(key, reason)
    ordered = sorted(first.items(), key=lambda item: item[1].is_chosen)  # what matters comes first
    return tuple(
        ReasonReport(
            code=reason.code,
            op=reason.op,
            detail=reason.detail,
            fix=reason.fix,
            line=reason.line,
            count=counts[key],
            rest=reason.rest,
        )
        for key, reason in ordered
    )


# ---- with times


def with_times(functions: Sequence[FunctionReport], measured: Measured) -> Report:
    """A report of functions and of what calls of them showed."""
    found = tuple(
        dataclasses.replace(
            function, graphs=tuple(_graph_with_times(graph, measured) for graph in function.graphs)
        )
        for function in functions
    )
    breaks = [each.graph_break for each in found]
    rests = dict.fromkeys(each for each in breaks if each is not None and each.rest is not None)
    report = Report(
        cgpass=VERSION,
        torch=torch.__version__,
        device=_device_name(found, measured.device),
        functions=found,
        left_to_eager=tuple(EagerFunction(reason=each, place=each.rest) for each in rests),
        settled=measured.settled,
        runs=measured.runs,
        native=native.loader.status,
        ms=measured.captured.ms,
        plain_ms=measured.plain.ms,
        gpu_share=None if measured.launches is None else measured.launches.gpu_share,
    )
    return _without_times(report) if _is_simulated(found) else report


def _without_times(report: Any) -> Any:
    """The same without what simulated graphs can't tell."""
    if isinstance(report, tuple):
        return tuple(map(_without_times, report))
    if not dataclasses.is_dataclass(report) or isinstance(report, type):
        return report
    changes = {
        each.name: None if _is_time(each.name) else _without_times(getattr(report, each.name))
        for each in dataclasses.fields(report)
    }
    return dataclasses.replace(report, **changes)


def _is_time(name: str) -> bool:
    return name == "ms" or name.endswith("_ms")


def _is_simulated(functions: Sequence[FunctionReport]) -> bool:
    """Whether graphs are simulated, or would be where nothing was recorded."""
    drivers = {function.driver for function in functions} - {None}
    return "simulated" in (drivers or {Options.parse(None).driver})


def snapshot() -> Report:
    """A report of all that this process compiled and telemetry still lists, without times."""
    functions = collect()
    ran = {number: calls_of_parts(*found) for number, found in telemetry.graph_runs().items()}
    counted = [
        dataclasses.replace(
            function,
            graphs=tuple(
                _with_calls(graph, ran.get(graph.number, {})) for graph in function.graphs
            ),
        )
        for function in functions
    ]
    return with_times(counted, Measured())


def _device_name(functions: Sequence[FunctionReport], device: torch.device | None) -> str:
    if _is_simulated(functions):
        return "cpu (simulated graphs: right in what they do, no measure of speed)"
    if device is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return torch.cuda.get_device_name(device) if device and device.type == "cuda" else "cpu"


def _graph_with_times(graph: GraphReport, measured: Measured) -> GraphReport:
    keys = [(graph.number, part.name) for part in graph.partitions]
    if graph.skip is not None:
        keys = [key for key in measured.captured.steps if key[0] == graph.number]
    steps = [measured.captured.steps[key] for key in keys if key in measured.captured.steps]
    parts = tuple(_part_with_times(graph.number, part, measured) for part in graph.partitions)
    kernels = None
    if measured.launches is not None and graph.skip is not None:
        kernels = sum(measured.launches.kernels.get(key, 0) for key in keys)
    return dataclasses.replace(
        graph,
        calls_per_run=max(steps, default=None),
        ms=_sum(measured.captured.parts, keys),
        plain_ms=_sum(measured.plain.parts, keys),
        partitions=parts,
        kernels=kernels,
    )


def _part_with_times(number: int, part: PartitionReport, measured: Measured) -> PartitionReport:
    key: Key = (number, part.name)
    launches = measured.launches
    return dataclasses.replace(
        part,
        graphed=measured.captured.graphed.get(key, part.graphed),
        ms=measured.captured.parts.get(key),
        plain_ms=measured.plain.parts.get(key),
        kernels=None if launches is None else launches.kernels.get(key, 0),
        kernels_in_graphs=None if launches is None else launches.in_graphs.get(key, 0),
    )


def _sum(times: Mapping[Key, float], keys: Iterable[Key]) -> float | None:
    known = [times[key] for key in keys if key in times]
    return sum(known) if known else None
