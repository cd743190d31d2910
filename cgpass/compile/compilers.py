"""Makes a partition callable: by Inductor, or as the aten operators it consists of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from cgpass import torch_private
from cgpass.compile.facts.inputs import seed_positions
from cgpass.compile.facts.values import graph_outputs
from cgpass.compile.layouts import Boxed, keep_contiguous, outputs_as_traced
from cgpass.compile.passes.base import Direction
from cgpass.runtime.rng import read_on_the_host


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """How partitions of one graph become callables."""

    compiler: Literal["inductor", "eager"]
    direction: Direction
    parameters: frozenset[int] = frozenset()
    """Inputs of a forward that are parameters, outputs of a backward that are their gradients."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `compile_fx_inner` for the whole graph."""

    @property
    def opaque(self) -> bool:
        """Tell if captured partitions run kernels that are no aten calls."""
        return self.compiler == "inductor"

    def whole(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Compile a graph that is one partition exactly as `torch.compile` would."""
        if self.compiler == "eager":
            return self.eager(gm)
        seeds = seed_positions(gm)
        if self.direction == "backward":
            keep_contiguous(gm, self.parameters)
        return read_on_the_host(
            torch_private.inductor_inner(gm, example_inputs, **self.settings), seeds
        )

    def captured(self, gm: fx.GraphModule, static: Sequence[int]) -> Boxed:
        """Compile a captured partition that returns a tuple; `static` are inputs whose address stays.

        Every output keeps the strides its fake tensor has, since other partitions were traced with them.
        """
        if self.compiler == "eager":
            return self.eager(gm)
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

    def eager(self, gm: fx.GraphModule) -> Boxed:
        """A partition that no graph can hold: generated Python over its operators."""
        return read_on_the_host(torch_private.boxed_graph_module(gm), seed_positions(gm))


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph, on the same attributes: compiling changes a graph."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    graph.output_node().meta.update(gm.graph.output_node().meta)
    return torch_private.lazy_graph_module(gm, graph)


def output_strides(gm: fx.GraphModule) -> list[tuple[Any, ...] | None]:
    """Strides of a graph's outputs, None for what is no tensor."""
    strides: list[tuple[Any, ...] | None] = []
    for value in graph_outputs(gm):
        fake = value.meta.get("val") if isinstance(value, fx.Node) else None
        strides.append(tuple(fake.stride()) if isinstance(fake, torch.Tensor) else None)
    return strides
