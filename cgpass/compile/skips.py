"""Runs whole graphs without CUDA graphs, as `torch.compile` would, and says so of them and of parts."""

import logging
import weakref
from collections.abc import Sequence
from typing import Any, Final

from torch import fx

from cgpass import telemetry, torch_private
from cgpass.compile.compilers import Boxed, Compiler, Direction
from cgpass.compile.facts.ancestry import names_behind
from cgpass.compile.facts.target import devices
from cgpass.compile.facts.values import num_ops
from cgpass.compile.option_names import overloads
from cgpass.errors import CaptureError
from cgpass.options import Options
from cgpass.telemetry import CallStats, tracing
from cgpass.telemetry.reason import Reason
from cgpass.telemetry.summaries import GraphSummary

log = logging.getLogger(__name__)

OFF: Final = 'driver="none" turns them off'
"""The words of a summary for graphs that nobody wants captured."""


class Skips:
    """Of one function: compiles the graphs of which nothing is captured, and tells of what is not."""

    def __init__(
        self,
        options: Options,
        source: tracing.Source,
        function: int,
        graph_break: Reason | None,
        told: bool,
    ) -> None:
        self._told = told
        self._options = options
        self._source = source
        self._function = function
        self._graph_break = graph_break
        self._warned_of: set[str] = set()

    def run_plainly(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        compiler: Compiler,
        why: str,
        reasons: Sequence[Reason] = (),
    ) -> Boxed:
        """Compile a graph without partitions, as `torch.compile` would, and say why.

        Raises:
            CaptureError: The user wants no graph to run without a CUDA graph.
        """
        asked = self._options.driver != "auto" or any(d.type == "cuda" for d in devices(gm))
        is_skip = asked and self._options.driver != "none"
        anew = not reasons or any(map(self._is_new, reasons))
        return self._compiled(gm, example_inputs, compiler, why, reasons, is_skip, anew)

    def run_uncaptured(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        compiler: Compiler,
        reasons: Sequence[Reason],
    ) -> Boxed:
        """As `run_plainly`, for a graph of which nothing is captured; one too small to be worth it is no skip."""
        blockers = [reason for reason in reasons if not reason.is_chosen]
        if blockers or not reasons:
            why = "; ".join(dict.fromkeys(map(str, blockers))) or "it has no operators"
            return self.run_plainly(gm, example_inputs, compiler, why, blockers)
        why = (
            "fewer of its operators do work on the device (views don't count) than "
            f"min_partition_ops={self._options.min_partition_ops}"
        )
        if all(reason.code in ("no_work", "effect_token") for reason in reasons):
            why = "it launches no work on the device"
        return self._compiled(gm, example_inputs, compiler, why, reasons)

    def _compiled(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        compiler: Compiler,
        why: str,
        reasons: Sequence[Reason],
        is_skip: bool = False,
        anew: bool = True,
    ) -> Boxed:
        direction = compiler.direction
        skip, found, ops = why, tuple(reasons), num_ops(gm)
        if self._options.driver == "none":
            skip, found = OFF, ()
        summary = GraphSummary(
            direction, (), skip, ops, self._source.place, found, self._function, self._graph_break
        )
        told = {"runs_without_cuda_graphs": skip, "num_ops": ops, "reasons": list(map(str, found))}
        tracing.add_json(f"{direction}_plan", lambda: told)
        graph = telemetry.add_graph(summary)
        text = f"{self._source.graph(direction)} runs without CUDA graphs: {why}"
        if is_skip:
            telemetry.compile_stats.skips += 1
            self._tell(text, anew=anew)
        else:
            log.info("%s", text)
        return counted(graph, compiler.whole(gm, example_inputs))

    def report(self, reasons: Sequence[Reason], direction: Direction) -> None:
        """One message per graph for everything in it that can't be captured.

        Raises:
            CaptureError: The user wants nothing to run plainly.
        """
        reasons = [each for each in reasons if not each.is_chosen and self._is_new(each)]
        if reasons:
            listed = "\n  ".join(dict.fromkeys(map(str, reasons)))
            graph = self._source.graph(direction)
            self._tell(f"parts of {graph} run without CUDA graphs:\n  {listed}")

    def warn_of_replaced(self, gm: fx.GraphModule, direction: Direction) -> None:
        """Say which names in `unsafe_ops` may have had no effect: torch puts other operators in their place."""
        if direction == "backward" or self._options.on_skip == "silent":
            return
        gone = {
            name
            for name in self._options.unsafe_ops
            if name not in self._warned_of and torch_private.are_replaced(overloads(name))
        }
        if gone:
            for node in gm.graph.nodes:
                gone -= names_behind(node)
        for name in sorted(gone):
            self._warned_of.add(name)
            log.warning(
                "unsafe_ops names %s, of which no call is seen in the %s graph: torch traces it as the operators that it "
                "consists of. Where another operator calls it, name that one, or those that it consists of",
                name,
                direction,
            )

    def _is_new(self, reason: Reason) -> bool:
        """Tell if the user was not told of what can't be captured when that failed."""
        return self._options.on_skip == "raise" or not (
            self._told and reason.code == "failed_capture"
        )

    def _tell(self, message: str, *, anew: bool = True) -> None:
        if self._options.on_skip == "raise":
            raise CaptureError(message)
        level = logging.WARNING if anew and self._options.on_skip == "warn" else logging.INFO
        log.log(level, "%s", message)


def counted(graph: int, fn: Boxed) -> Boxed:
    """Wrap a compiled graph of which nothing is captured, so that its calls are counted."""
    tally = CallStats()

    def call(args: list[Any]) -> Any:
        tally.calls += 1
        return fn(args)

    telemetry.add_run(graph, telemetry.GraphRun(tally, {}, weakref.ref(call)))
    return torch_private.mark_boxed(call)
