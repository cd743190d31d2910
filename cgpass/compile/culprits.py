"""Failed captures: which operators are to blame, and compiling the function again with these outside of graphs.

Note [A failed capture]
    The operators are found by running the partition once more, one after the other. They are known of the function's
    code from then on, and Dynamo is told to compile it again in its next call: what turned out while capturing goes the
    same way as what was known before, `unsafe_ops` among it. The call at hand runs without a graph, and so do backwards that are
    due. A function that holds collectives is not compiled again, since all ranks must keep the same partitions: the
    partition runs without a graph.
"""

import contextlib
import logging
import textwrap
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from cgpass import telemetry, torch_private
from cgpass.compile.facts import values
from cgpass.compile.facts.capturability import PROVEN, why_not_capturable
from cgpass.compile.facts.inputs import input_infos
from cgpass.compile.facts.lines import spans
from cgpass.errors import CaptureError
from cgpass.runtime.driver import GraphDriver, is_capture_error
from cgpass.runtime.failures import random_state_kept
from cgpass.runtime.writes import copied
from cgpass.telemetry.reason import OTHER_FIXES, Reason
from cgpass.telemetry.summaries import PartitionSummary

log = logging.getLogger(__name__)

_Why = tuple[str, str]
"""Code and detail of a `Reason`."""


@dataclass
class _Known:
    """All that is known of one code."""

    operators: dict[str, _Why] = field(default_factory=dict)
    replaced: list[int] = field(default_factory=list)
    """Functions that were to be compiled again and were not yet, as telemetry numbers them."""


_known: weakref.WeakKeyDictionary[types.CodeType, _Known] = weakref.WeakKeyDictionary()


def forget_all() -> None:
    """Forget which operators failed; for when torch forgets what it compiled."""
    _known.clear()


class FailedOperators:
    """Operators of one function that failed to be captured. See Note [A failed capture]."""

    def __init__(self, function: int) -> None:
        self._function = function
        code = torch_private.compiled_code()
        self._code = None if code is None else weakref.ref(code)  # whose caches keep all this alive
        trace_id = torch_private.current_trace_id()
        self._compile_id = None if trace_id is None else trace_id.compile_id
        known = _Known() if code is None else _known.get(code, _Known())
        self._operators = dict(known.operators)
        self._communicates = False
        self.told = bool(known.replaced)
        """True if the user was told of these: this compilation takes the place of one where they failed."""
        while known.replaced:
            telemetry.remove_function(known.replaced.pop())

    def mark(self, gm: fx.GraphModule) -> None:
        """Mark those that failed as `PROVEN` in a graph of the function that is to be partitioned."""
        self._communicates |= any(map(values.is_collective, gm.graph.nodes))
        for node in gm.graph.nodes if self._operators else ():
            if node.op == "call_function" and (found := self._operators.get(_name(node))):
                node.meta[PROVEN] = found

    def add(self, node: fx.Node) -> bool:
        """Add the operator of a node that is marked, and have the function compiled again; returns whether it will be."""
        code = None if self._code is None else self._code()
        if code is None or self._compile_id is None or self._communicates:
            return False
        known = _known.setdefault(code, _Known())
        if self._function not in known.replaced:  # else another operator of it failed before
            if not torch_private.compile_again(code, self._compile_id):
                return False
            known.replaced.append(self._function)
        known.operators[_name(node)] = node.meta[PROVEN]
        return True


def _name(node: fx.Node) -> str:
    return str(values.called(node)[0])


@dataclass(frozen=True, kw_only=True)
class FailedCapture:
    """Answers `PartitionRunner` about a failed capture of one partition. See `failures.OnFailure`."""

    gm: fx.GraphModule
    graph: telemetry.Graph
    name: str
    """The partition's in the graph."""
    operators: FailedOperators
    driver: GraphDriver | None
    """None if other processes take part, so that no search can run it."""
    what: str
    refuses: bool
    as_traced: Callable[[list[Any]], list[Any]]

    def __call__(self, args: list[Any], error: Exception) -> tuple[str, bool]:
        """See `OnFailure`."""
        culprit, is_clean = None, False
        if self.driver is not None:
            with contextlib.suppress(torch.OutOfMemoryError):
                culprit, is_clean = find_culprit(self.gm, self.as_traced(list(args)), self.driver)
        if culprit is not None:
            reason = why_not_capturable(culprit, torch.device("meta"))
            assert reason is not None
            why = str(reason)
        elif is_clean and not is_capture_error(error):
            raise error  # it comes from neither the partition nor the capture
        else:
            why = first_line(error)
            reason = Reason("capture", "", why, OTHER_FIXES["capture"], spans(self.gm))
        if self.refuses:
            detail = f'on_skip="raise" refuses its calls: {reason.detail}'
            reason = replace(reason, detail=detail)
        self._note(captured=False, reasons=(reason,))
        if culprit is None:
            return why, False
        if self.refuses:
            raise CaptureError(
                f'{self.what} can\'t be captured as a whole, and on_skip="raise" refuses its calls; with "warn" all but '
                f"this would be captured: {why}"
            ) from error
        return why, self.operators.add(culprit)

    def forget(self) -> None:
        """See `OnFailure`."""
        self._note(captured=True)

    def _note(self, *, captured: bool, reasons: tuple[Reason, ...] = ()) -> None:
        part = PartitionSummary(self.name, captured, values.num_ops(self.gm), reasons)
        self.graph.replace(part)


def find_culprit(
    gm: fx.GraphModule, args: Sequence[Any], driver: GraphDriver
) -> tuple[fx.Node | None, bool]:
    """Run a partition operator by operator: once without a graph, then in a capture, to see at which it fails.

    What the partition writes is copied first, and generators are where they were. Returns the operator, marked as
    `PROVEN`, and whether nothing is wrong with the partition, since everything ran as it should.
    """
    written = [i for i, info in enumerate(input_infos(gm)) if info.mutated]
    with torch.inference_mode(False), torch.no_grad(), random_state_kept(driver.device, args):
        follower = _Following(gm)

        def run(inputs: list[Any]) -> Sequence[Any]:
            return follower.run(*inputs, enable_io_processing=False)

        try:
            run(copied(args, written))
        except Exception as error:
            log.debug("running a partition by its operators failed: %s", error)
            return None, False
        try:
            graph, outputs = driver.record(run, copied(args, written), opaque=False)
        except Exception as error:
            node = follower.at
            if (
                isinstance(error, torch.OutOfMemoryError)
                or node is None
                or node.op != "call_function"
            ):
                return None, False
            node.meta[PROVEN] = "failed_capture", f"capturing it failed ({first_line(error)})"
            return node, False
        del outputs
        graph.reset()
        return None, True


def first_line(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    said = f": {textwrap.shorten(lines[0], 200)}" if lines else ""
    return f"{type(error).__name__}{said}"


class _Following(fx.Interpreter):
    """Knows which node runs."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self.at: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.at = n
        return super().run_node(n)
