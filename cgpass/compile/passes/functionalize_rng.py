"""`FunctionalizeRng`: random operators that are recomputed get a generator state each as an input."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from cgpass import torch_private
from cgpass.compile.facts.rng_pairs import PAIR, POSITIONS
from cgpass.compile.facts.values import bodies, graph_outputs
from cgpass.compile.passes.base import Pass, PassContext, PassResult
from cgpass.errors import PostconditionError


@dataclass(frozen=True)
class RngPairs:
    """Describes how a graph with pairs is called. See Note [Pairs of random operators]."""

    devices: tuple[torch.device, ...]
    """Where each pair draws."""
    positions_at: int
    """Where the positions stood among a forward graph's outputs or a backward graph's inputs."""


@dataclass(frozen=True)
class FunctionalizeRng(Pass):
    """Rewrites each operator of a pair to `graphsafe_run_with_rng_state` on a state of its own.

    The states are inputs after all others, `fwd_rng_state_<i>` in a forward and `bwd_rng_state_<i>` in a backward
    graph. One state per operator: a backward meets the operators in another order.

    Source: pytorch PR 146878.
    """

    name: ClassVar[str] = "functionalize_rng"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        """See `Pass.run`; the notes are one `RngPairs`, or none where no operator has a pair."""
        marks = [n for n in gm.graph.nodes if POSITIONS in n.meta]
        if not marks:
            return PassResult(gm, False)
        (mark,) = marks
        positions_at = _take_out(gm, mark)
        devices = mark.meta[POSITIONS]
        prefix = "bwd" if ctx.direction == "backward" else "fwd"
        states: list[fx.Node] = []
        last = gm.graph.find_nodes(op="placeholder")[-1]
        for number, device in enumerate(devices):
            with gm.graph.inserting_after(last):
                last = gm.graph.placeholder(f"{prefix}_rng_state_{number}")
            value = torch.Generator()  # any will do where the device isn't there
            if device.type == "cuda" and torch.cuda.is_available():
                value = torch_private.default_generator(device).clone_state()
            last.meta["val"] = value
            states.append(last)
        for node in [n for n in gm.graph.nodes if PAIR in n.meta]:
            _rewrite(gm, node, states[node.meta[PAIR]])
        return PassResult(gm, True, (RngPairs(devices, positions_at),))

    def ensures(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        """No mark is left, in nested graphs neither, so that a second run changes nothing."""
        del ctx
        left = list(_marked(gm))
        if left:
            raise PostconditionError(f"random operators without a state of their own: {left}")


def _marked(gm: fx.GraphModule) -> Iterator[str]:
    """Names of marked nodes, with those of the nodes whose nested graphs they are in."""
    for node in gm.graph.nodes:
        if PAIR in node.meta or POSITIONS in node.meta:
            yield node.name
        for body in bodies(node):
            yield from (f"{node.name}.{name}" for name in _marked(body))


def _take_out(gm: fx.GraphModule, mark: fx.Node) -> int:
    """Remove what stands for the positions; returns where it stood."""
    if mark.op == "placeholder":
        position = gm.graph.find_nodes(op="placeholder").index(mark)
    else:
        outputs = list(graph_outputs(gm))
        position = outputs.index(mark)
        del outputs[position]
        output = gm.graph.output_node()
        output.args = (tuple(outputs),)
    gm.graph.erase_node(mark)
    return position


def _rewrite(gm: fx.GraphModule, node: fx.Node, state: fx.Node) -> None:
    args: tuple[Any, ...] = (node.target, *node.args)
    with gm.graph.inserting_before(node):
        drawn = gm.graph.call_function(
            torch_private.run_with_rng_state(), args, {**node.kwargs, "rng_state": state}
        )
    drawn.meta = {key: value for key, value in node.meta.items() if key != PAIR}
    node.replace_all_uses_with(drawn)
    gm.graph.erase_node(node)
