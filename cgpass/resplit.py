"""Capturing the rest of a partition whose capture failed: what `PartitionRunner` asks for then."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cgpass import _torch, telemetry
from cgpass.compile import Boxed
from cgpass.culprits import Finding, find_culprits, first_line
from cgpass.errors import CaptureError, StagingError
from cgpass.graph import values
from cgpass.graph.capturability import PROVEN, op_name
from cgpass.graph.lines import spans, user_line
from cgpass.graph.partition_tag import get_tag
from cgpass.graph.size_check import SizeCheck
from cgpass.options import Options
from cgpass.passes import cut_passes
from cgpass.passes.base import PassContext, run_passes
from cgpass.reason import OTHER_FIXES, Reason, many
from cgpass.runtime.driver import GraphDriver
from cgpass.runtime.failures import Outcome
from cgpass.runtime.syncs import is_capture_error
from cgpass.summaries import PartitionSummary

log = logging.getLogger(__name__)

_VETTED = frozenset({"aten", "prims", "inductor_prims", "rngprims"})
"""Namespaces whose operators were all looked at: the rules of `why_not_capturable` know which of them wait."""


def has_unvetted_ops(gm: fx.GraphModule) -> bool:
    """Whether a graph calls operators of which only running them tells whether they wait for the device."""
    called = (values.called(node)[0] for node in gm.graph.nodes)
    return any(
        isinstance(op, torch._ops.OpOverload) and op.namespace not in _VETTED for op in called
    )


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph, on the same attributes: compiling changes a graph."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    graph.output_node().meta.update(gm.graph.output_node().meta)
    return _torch.lazy_graph_module(gm, graph)


@dataclass(frozen=True)
class Place:
    """Where a partition stands in what telemetry knows."""

    graph: int
    """The graph's number, as `telemetry.add_graph` gave it."""
    name: str
    """The partition's name among all of the graph, `captured_0` or `captured_0.captured_2`."""
    num_ops: int

    def runs_plainly(self, why: str, reasons: Sequence[Reason]) -> None:
        """Note that the partition is not captured after all.

        Args:
            why: In a line.
            reasons: One for each operator to blame, or one for all of it.
        """
        part = PartitionSummary(
            self.name, False, self.num_ops, (why,), skipped=True, why=tuple(reasons)
        )
        telemetry.replace_partition(self.graph, self.name, (part,))

    def is_tried_again(self) -> None:
        """Note that the partition may be captured, whatever came of it before."""
        part = PartitionSummary(self.name, True, self.num_ops)
        telemetry.replace_partition(self.graph, self.name, (part,))


def _whole(gm: fx.GraphModule, error: Exception) -> Reason:
    """Why a partition is not captured where nothing tells which operator is to blame, and where that is."""
    code = "capture"
    if isinstance(error, torch.OutOfMemoryError):
        code = "out_of_memory"
    elif isinstance(error, StagingError):
        code = "no_placeholder"
    return Reason(code, "", first_line(error), OTHER_FIXES[code], spans(gm))


class GiveUp:
    """For a partition that is not split again: it runs plainly."""

    checks_warm_ups = False

    def __init__(
        self, gm: fx.GraphModule, place: Place, driver: Callable[[], GraphDriver] | None
    ) -> None:
        """Keep what tells who is to blame.

        Args:
            gm: The partition as it was before it was compiled.
            place: Of the partition.
            driver: Gives what records it; None if it may not run once more than it is called.
        """
        self._gm = gm
        self._place = place
        self._driver = driver
        self._failed = False

    def __call__(self, args: list[Any], error: Exception | None) -> Outcome:
        """See `Resplit`."""
        if error is not None:
            none_to_blame = isinstance(error, torch.OutOfMemoryError | StagingError)
            if self._failed or none_to_blame or is_capture_error(error):
                self._place.runs_plainly(first_line(error), self._reasons(args, error))
        self._failed = True  # the runner tries once more after an error that is not a capture's
        return Outcome()

    def _reasons(self, args: list[Any], error: Exception) -> list[Reason]:
        finding = Finding()
        if self._driver is not None and is_capture_error(error):
            with contextlib.suppress(torch.OutOfMemoryError):
                finding = find_culprits(self._gm, args, self._driver(), trial=True)
        return [
            Reason("capture", op_name(node), detail, OTHER_FIXES["capture"], user_line(node))
            for node, (_, detail) in finding.culprits.items()
        ] or [_whole(self._gm, error)]

    def forget(self) -> None:
        """See `Resplit`."""
        self._failed = False
        self._place.is_tried_again()


class Resplitter:
    """Splits one partition around what can't be captured, once."""

    def __init__(
        self,
        gm: fx.GraphModule,
        place: Place,
        options: Options,
        context: PassContext,
        driver: Callable[[], GraphDriver],
        rebuild: Callable[[fx.GraphModule], tuple[Boxed, SizeCheck | None]],
        as_traced: Callable[[list[Any]], Sequence[Any]] = list,
    ) -> None:
        """Keep what a split needs.

        Args:
            gm: The partition as it was before it was compiled; copied before it is changed.
            place: Of the partition.
            options: The user's.
            context: That its passes ran with.
            driver: Gives what records it.
            rebuild: Compiles a tagged copy of `gm` and joins it to a callable with its convention; says which sizes
                it is for, None for all.
            as_traced: Gives inputs as `gm` was traced with.
        """
        self.checks_warm_ups = has_unvetted_ops(gm)
        self._gm = gm
        self._place = place
        self._options = options
        self._context = context
        self._driver = driver
        self._rebuild = rebuild
        self._as_traced = as_traced

    def __call__(self, args: list[Any], error: Exception | None) -> Outcome:
        """See `Resplit`."""
        if isinstance(error, torch.OutOfMemoryError | StagingError):
            self._is_not_captured(first_line(error), [_whole(self._gm, error)])
            return Outcome()
        gm = copy_of(self._gm)
        try:
            inputs = list(self._as_traced(list(args)))
            finding = find_culprits(gm, inputs, self._driver(), trial=error is not None)
        except torch.OutOfMemoryError:
            finding = Finding(clean=False)
        if not finding.culprits:
            if error is None:
                return Outcome()  # a first call's initialisation, no more
            if finding.clean and not is_capture_error(error):
                raise error  # it comes from neither the partition nor the capture
            if is_capture_error(error):
                self._is_not_captured(first_line(error), [_whole(self._gm, error)])
            return Outcome()
        for node, found in finding.culprits.items():
            node.meta[PROVEN] = found
        return self._split(gm, error)

    def forget(self) -> None:
        """See `Resplit`."""
        self._place.is_tried_again()

    def _is_not_captured(self, why: str, reasons: Sequence[Reason]) -> None:
        refused = self._options.on_skip == "raise"
        why = f'on_skip="raise" refuses its calls: {why}' if refused else why
        self._place.runs_plainly(why, reasons)

    def _split(self, gm: fx.GraphModule, error: Exception | None) -> Outcome:
        result = run_passes(cut_passes(self._options), gm, self._context)
        gm = result.gm
        reasons = [note for note in result.notes if isinstance(note, Reason)]
        proven = [r for r in reasons if r.code in ("syncs", "failed_capture")]
        why = "; ".join(dict.fromkeys(map(str, proven)))
        tags = {tag for tag in map(get_tag, gm.graph.nodes) if tag is not None}
        captured = sum(tag.captured for tag in tags)
        what = f"{self._context.direction} {self._place.name} can't be captured as a whole"
        becomes = f"{captured} captured and {many(len(tags) - captured, 'eager partition')}"
        if self._options.on_skip == "raise":
            self._is_not_captured(why, proven)
            raise CaptureError(
                f'{what}, and on_skip="raise" refuses its calls; with "warn" it would run as {becomes}: {why}'
            ) from error
        if not captured:
            self._place.runs_plainly(why, proven)
            return Outcome(why=why)
        try:
            replacement, covers = self._rebuild(gm)
        except Exception:
            log.info("compiling the parts of %s failed", self._place.name, exc_info=True)
            self._place.runs_plainly(why, proven)
            return Outcome(why=why)
        level = logging.WARNING if self._options.on_skip == "warn" else logging.INFO
        log.log(level, "%s; from now on it runs as %s: %s", what, becomes, why)
        return Outcome(replacement, covers=covers)
