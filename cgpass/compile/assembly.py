"""Make a graph one callable: compile its partitions and join them, or run all of it without CUDA graphs and say so."""

import contextlib
import copy
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from cgpass import telemetry, torch_private
from cgpass.compile.culprits import FailedCapture, FailedOperators
from cgpass.compile.facts.input_info import InputKind
from cgpass.compile.facts.inputs import input_infos, seed_positions
from cgpass.compile.facts.partition_tag import PartitionTag
from cgpass.compile.facts.target import Target, devices
from cgpass.compile.facts.values import (
    graph_outputs,
    is_collective,
    is_inductor_random,
    known_strides,
    num_ops,
)
from cgpass.compile.layouts import Boxed, inputs_as_traced, keep_contiguous, outputs_as_traced
from cgpass.compile.passes.base import Direction, Pass
from cgpass.compile.passes.lift_cpu_scalars import LiftCpuScalars
from cgpass.compile.passes.outline import Part, outline
from cgpass.compile.passes.partition import Partition
from cgpass.compile.plan import build_plan, outputs_made, whole_plan
from cgpass.errors import CaptureError
from cgpass.options import Options
from cgpass.runtime.collectives import may_be_captured
from cgpass.runtime.executor import Executor, Plan
from cgpass.runtime.owner import Owner
from cgpass.runtime.partition import PartitionRunner
from cgpass.runtime.rng import read_on_the_host
from cgpass.telemetry import progress
from cgpass.telemetry.reason import OTHER_FIXES, Reason
from cgpass.telemetry.summaries import GraphSummary, PartitionSummary, Source

log = logging.getLogger(__name__)

_OFF: Final = 'driver="none" turns them off'
"""The words of a summary for graphs that nobody wants captured."""


def passes_for(gm: fx.GraphModule, options: Options, target: Target) -> tuple[Pass, ...]:
    """Return the passes that a forward, backward or inference graph goes through, which leave it tagged."""
    communicates = target.records and any(map(is_collective, gm.graph.nodes))
    return (
        # First, since what it moves to the device needs no boundary.
        LiftCpuScalars(aten_kernels=options.compiler == "eager"),
        Partition(
            unsafe_ops=frozenset(options.unsafe_ops),
            min_partition_ops=options.min_partition_ops,
            collectives=not communicates or may_be_captured(target.device),
        ),
    )


@dataclass(kw_only=True)
class GraphBuilder:
    """Makes one graph of a function callable."""

    options: Options
    owner: Callable[[torch.device], Owner]
    """Gives the owner of the function's recordings on a device."""
    failed: FailedOperators
    source: Source
    """Of the user's function."""
    function: int
    """The function's number in what telemetry knows."""
    graph_break: Reason | None
    """Dynamo's reason to end it there, if the user's function goes on."""
    direction: Direction
    target: Target
    settings: Mapping[str, Any]
    """Arguments of `compile_fx_inner` for the whole graph."""
    parameters: frozenset[int]
    """Inputs of a forward that are parameters, outputs of a backward that are their gradients."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The user's names of inputs, by placeholder name."""
    visible: frozenset[int] = frozenset()
    """Positions of outputs that the user gets."""
    kinds: Mapping[str, InputKind] = field(default_factory=dict)
    """See `value_kinds`."""

    def plainly(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        reasons: Sequence[Reason] = (),
        skip: str | None = None,
    ) -> Boxed:
        """Compile a graph of which nothing is captured as `torch.compile` would, and say why.

        One that is too small to be worth it is no skip. `skip` is a reason that no operator has.

        Raises:
            CaptureError: The user wants no graph to run without a CUDA graph.
        """
        found = tuple(each for each in reasons if not each.is_chosen)
        is_skip = bool(skip or found)
        found = found or tuple(reasons)
        if is_skip:
            why = skip or "; ".join(dict.fromkeys(map(str, found)))
        elif not found:
            why = f"it has no operators on tensors; {OTHER_FIXES['no_work']}"
        elif all(reason.code in ("no_work", "effect_token") for reason in found):
            why = "it launches no work on the device"
        else:
            why = (
                "fewer of its operators do work on the device (views don't count) than "
                f"min_partition_ops={self.options.min_partition_ops}"
            )
        driver = self.options.driver
        known, causes = (_OFF, ()) if driver == "none" else (why, found)
        count = num_ops(gm) if is_skip or found else 0  # what computes sizes is no work
        graph = self._add_graph(skip=known, num_ops=count, why=causes)
        on_cuda = any(d.type == "cuda" for d in devices(gm))
        if is_skip and (driver in ("cuda", "simulated") or (driver == "auto" and on_cuda)):
            telemetry.registry.compiled.skips += 1
            text = f"{self._named()} runs without CUDA graphs: {why}"
            self._tell(text, anew=not found or any(map(self._is_new, found)))
        return _counted(graph, self._compile(gm, example_inputs))

    def report(self, reasons: Sequence[Reason]) -> None:
        """One message for everything in the graph that can't be captured.

        Raises:
            CaptureError: The user wants nothing to run without a graph.
        """
        reasons = [each for each in reasons if not each.is_chosen and self._is_new(each)]
        if reasons:
            listed = "\n  ".join(dict.fromkeys(map(str, reasons)))
            self._tell(f"parts of {self._named()} run without CUDA graphs:\n  {listed}")

    def _named(self) -> str:
        return self.source.of(f"the {self.direction} graph")

    def _is_new(self, reason: Reason) -> bool:
        """Tell if the user was not told of what can't be captured when that failed."""
        told = self.failed.told and reason.code == "failed_capture"
        return self.options.on_skip == "raise" or not told

    def _tell(self, message: str, *, anew: bool = True) -> None:
        if self.options.on_skip == "raise":
            raise CaptureError(message)
        level = logging.WARNING if anew and self.options.on_skip == "warn" else logging.INFO
        log.log(level, "%s", message)

    def whole(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], otherwise: Sequence[int] = ()
    ) -> Boxed:
        """A graph that is one captured partition; it was traced with other inputs than come `otherwise`."""
        summaries = (PartitionSummary("captured_0", captured=True, num_ops=num_ops(gm)),)
        graph = self._add_partitions(summaries)
        num_inputs, made = len(gm.graph.find_nodes(op="placeholder")), outputs_made(gm)
        with self._told():
            run = self._captured(
                "captured_0",
                gm,
                graph,
                lambda _: self._compile(gm, example_inputs),
                otherwise,
            )
        if not self.target.records:
            return _counted(graph, run)
        plan = whole_plan(num_inputs, len(made), run, "captured_0", self.visible, made)
        return self._executor(plan, summaries, graph)

    def partitioned(
        self,
        gm: fx.GraphModule,
        reasons: Sequence[tuple[PartitionTag, Reason]],
        otherwise: Sequence[int] = (),
    ) -> Boxed:
        """A graph with the tags of several partitions; it was traced with other inputs than come `otherwise`."""
        as_traced = inputs_as_traced(gm, otherwise)
        if self.direction == "forward":
            strides = [known_strides(each) for each in graph_outputs(gm)]
            torch_private.report_output_strides(strides)
        parts = outline(gm)
        title = f"graph_{self.direction}_outlined"
        torch_private.trace(title, lambda: "\n".join(map(str, parts)))
        summaries = tuple(
            PartitionSummary(
                part.name,
                part.tag.captured,
                num_ops(part.gm),
                tuple(reason for tag, reason in reasons if tag == part.tag),
            )
            for part in parts
        )
        graph = self._add_partitions(summaries)
        runs: dict[str, Any] = {}
        for number, part in enumerate(parts, 1):
            with self._told(f", partition {number} of {len(parts)}"):
                runs[part.name] = self._part(part, graph)
        plan = build_plan(gm, parts, runs, self.visible)
        boxed = self._executor(plan, summaries, graph)
        if not otherwise:
            return boxed
        return torch_private.mark_boxed(lambda args: boxed(as_traced(args)))

    def _executor(
        self, plan: Plan, parts: Sequence[PartitionSummary], graph: telemetry.Graph
    ) -> Executor:
        """A callable that telemetry and profiles know of."""
        names = [part.name for part in parts]
        in_profiles = {n: self.source.of(f"cgpass: {self.direction} {n}") for n in names}
        owner = self.owner(self.target.device) if self.target.records else None
        executor = Executor(plan, owner, in_profiles)
        graph.tally, graph.live = executor.tally, weakref.ref(executor)
        graph.parts = {
            step.name: telemetry.PartitionRun(step.run.stats, step.run.notes, step.run.reasons)
            for step in plan.steps
            if isinstance(step.run, PartitionRunner)
        }
        telemetry.tell(graph)
        return executor

    def _part(self, part: Part, graph: telemetry.Graph) -> Any:
        gm = part.gm
        if part.tag.captured:
            return self._captured(part.name, gm, graph, lambda known: self._compile_part(gm, known))
        if any(map(is_inductor_random, gm.graph.nodes)):  # draws as only Inductor's kernels do
            return self._compile_part(gm, ())
        return self._as_aten(gm)

    def _captured(
        self,
        name: str,
        gm: fx.GraphModule,
        graph: telemetry.Graph,
        compile_for: Callable[[list[int]], Boxed],
        otherwise: Sequence[int] = (),
    ) -> Any:
        """A captured partition, compiled for its static inputs: its runner, or what is compiled where nothing records."""
        infos = input_infos(gm, self.kinds, self.names)
        changes = self._opaque and self.target.records  # Inductor does the graph
        original = copy_of(gm) if changes else gm
        fn = compile_for([i for i, info in enumerate(infos) if info.kind is InputKind.STATIC])
        if not self.target.records:
            return fn
        named = f"{self.direction} {name}"
        communicates = any(map(is_collective, original.graph.nodes))
        owner = self.owner(self.target.device)
        on_failure = FailedCapture(
            gm=original,
            graph=graph,
            name=name,
            operators=self.failed,
            driver=None if communicates else owner.driver,
            what=self.source.of(named),
            refuses=self.options.on_skip == "raise",
            as_traced=inputs_as_traced(original, otherwise),
        )
        return PartitionRunner(
            fn,
            infos,
            owner,
            self.options,
            name=named,
            on_failure=on_failure,
            source=self.source,
            opaque=self._opaque,
            is_backward=self.direction == "backward",
            communicates=communicates,
        )

    @property
    def _opaque(self) -> bool:
        """Tell if captured partitions run kernels that are no aten calls."""
        return self.options.compiler == "inductor"

    def _compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Compile a graph that is one partition exactly as `torch.compile` would."""
        if not self._opaque:
            return self._as_aten(gm)
        seeds = seed_positions(gm)
        if self.direction == "backward":
            keep_contiguous(gm, self.parameters)
        fn = torch_private.inductor_inner(gm, example_inputs, **self.settings)
        return read_on_the_host(fn, seeds)

    def _compile_part(self, gm: fx.GraphModule, static: Sequence[int]) -> Boxed:
        """Compile a captured partition that returns a tuple; `static` are inputs whose address stays.

        Every output keeps the strides its fake tensor has, since other partitions were traced with them.
        """
        if not self._opaque:
            return self._as_aten(gm)
        seeds = seed_positions(gm)
        gm.graph.output_node().meta["user_visible_output_idxs"] = [
            i for i, value in enumerate(graph_outputs(gm)) if isinstance(value, fx.Node)
        ]
        inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        as_traced = outputs_as_traced(gm)
        with torch_private.own_tracing_context():
            fn = torch_private.inductor_inner(
                gm,
                inputs,
                static_input_idxs=tuple(static),
                is_backward=self.direction == "backward",
                is_inference=self.direction == "inference",
            )
        return read_on_the_host(as_traced(fn), seeds)

    def _as_aten(self, gm: fx.GraphModule) -> Boxed:
        """Generated Python over a graph's operators."""
        return read_on_the_host(torch_private.boxed_graph_module(gm), seed_positions(gm))

    def _add_graph(
        self, partitions: tuple[PartitionSummary, ...] = (), **about: Any
    ) -> telemetry.Graph:
        """Have telemetry and traces know of the graph."""
        summary = GraphSummary(
            self.direction,
            partitions,
            place=self.source.place,
            code=self.source.code,
            callers=self.source.callers,
            function=self.function,
            graph_break=self.graph_break,
            **about,
        )
        plan = f"{self.direction}_plan"
        torch_private.trace(plan, lambda: str(summary), self.source.trace_id)
        log.info("%s", str(summary).splitlines()[0])
        return telemetry.add_graph(summary)

    def _add_partitions(self, partitions: tuple[PartitionSummary, ...]) -> telemetry.Graph:
        if self.target.records:
            return self._add_graph(partitions, driver=self.target.driver)
        return self._add_graph(skip=_OFF, num_ops=sum(part.num_ops for part in partitions))

    def _told(self, which: str = "") -> contextlib.AbstractContextManager[None]:
        """A block that a line on the terminal tells of."""
        text = f"compiling {self.source.of(self.direction)}{which}"
        return progress.shown(text, self.options.progress)


def _counted(graph: telemetry.Graph, fn: Boxed) -> Boxed:
    """Wrap a compiled graph of which nothing is captured, so that its calls are counted."""
    tally = graph.tally

    def call(args: list[Any]) -> Any:
        tally.calls += 1
        return fn(args)

    telemetry.tell(graph)
    return torch_private.mark_boxed(call)


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph, on the same attributes: compiling changes a graph."""
    return torch_private.lazy_graph_module(gm, copy.deepcopy(gm.graph))
