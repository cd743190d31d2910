"""Finding the operators because of which a partition can't be captured."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from cgpass.graph import values
from cgpass.runtime.driver import GraphDriver
from cgpass.runtime.failures import random_state_kept
from cgpass.runtime.syncs import is_sync_error, sync_check

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """What running a partition operator by operator showed."""

    culprits: Mapping[fx.Node, tuple[str, str]] = field(default_factory=dict)
    """Code and detail of a `Reason` for each operator found."""
    clean: bool = True
    """Whether everything ran as it should, so that nothing is wrong with the partition."""


def find_culprits(
    gm: fx.GraphModule, args: Sequence[Any], driver: GraphDriver, *, trial: bool
) -> Finding:
    """Run a partition operator by operator: under the sync check first, then once under a capture.

    Args:
        gm: The partition, with fake values in `meta["val"]`.
        args: Real inputs; what the partition writes is copied first.
        driver: Records the trial.
        trial: Whether to try a capture if the sync check finds nothing.

    Returns:
        Everything that waits for the device; else what failed in the trial, with all that call the same operator.
        Generators are where they were.
    """
    with torch.inference_mode(False), torch.no_grad(), random_state_kept(driver.device, args):
        inputs = _private(gm, args)
        checked = _Checked(gm, driver.device)
        try:
            checked.run(*inputs, enable_io_processing=False)
        except Exception as error:
            log.debug("running a partition by its operators failed: %s", error)
            return Finding(clean=False)
        if checked.found or not trial:
            return Finding(checked.found)
        return _by_trial(gm, _private(gm, args), driver)


def _private(gm: fx.GraphModule, args: Sequence[Any]) -> list[Any]:
    """Inputs, with copies of what the partition writes."""
    written = {key for n in gm.graph.nodes for w in values.mutated_inputs(n) for key in _keys(w)}
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [
        value.clone() if isinstance(value, torch.Tensor) and _keys(node) & written else value
        for node, value in zip(placeholders, args, strict=True)
    ]


def _keys(node: fx.Node) -> set[object]:
    return {node, *values.storage_keys(node)}


def first_line(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


class _Checked(fx.Interpreter):
    """Runs each operator under the sync check, and again for its value; what waits twice is found."""

    def __init__(self, gm: fx.GraphModule, device: torch.device) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self.found: dict[fx.Node, tuple[str, str]] = {}
        self._device = device

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or values.is_host_scalar(n):
            return super().run_node(n)
        # What the first call of an operator initialises can look like a wait: only the second counts.
        copies = [self._copies(n) for _ in range(2)]
        if self._waits(n, *copies[0]) is None:
            return super().run_node(n)
        value = super().run_node(n)
        if (error := self._waits(n, *copies[1])) is not None:
            self.found[n] = ("syncs", f"its implementation waits for the device ({error})")
        return value

    def _copies(self, n: fx.Node) -> tuple[Any, Any]:
        """Arguments of a call, with copies of what it writes."""
        written = set(values.mutated_inputs(n))

        def fetch(arg: fx.Node) -> Any:
            value = self.env[arg]
            return value.clone() if arg in written and isinstance(value, torch.Tensor) else value

        return fx.node.map_arg((n.args, n.kwargs), fetch)

    def _waits(self, n: fx.Node, args: Any, kwargs: Any) -> str | None:
        try:
            with sync_check(self._device):
                self.call_function(n.target, args, kwargs)
        except Exception as error:
            return first_line(error) if is_sync_error(error) else None
        return None


class _Following(fx.Interpreter):
    """Knows which node runs."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self.at: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.at = n
        return super().run_node(n)


def _same_operator(gm: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """Every node that calls the operator that `node` calls, wrapped or not."""
    op = values.called(node)[0]
    if not isinstance(op, torch._ops.OpOverload):
        return [node]
    return [other for other in gm.graph.nodes if values.called(other)[0] is op]


def _by_trial(gm: fx.GraphModule, inputs: list[Any], driver: GraphDriver) -> Finding:
    follower = _Following(gm)

    def run(args: list[Any]) -> Sequence[Any]:
        return follower.run(*args, enable_io_processing=False)

    try:
        graph, outputs = driver.record(run, inputs, opaque=False)
    except Exception as error:
        node = follower.at
        if isinstance(error, torch.OutOfMemoryError) or node is None or node.op != "call_function":
            return Finding(clean=False)
        found = ("failed_capture", f"capturing it failed ({first_line(error)})")
        return Finding(dict.fromkeys(_same_operator(gm, node), found))
    del outputs
    graph.reset()
    return Finding()
