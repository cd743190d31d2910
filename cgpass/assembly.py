"""From a graph with partition tags to one callable: compiles each partition and joins them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cgpass import _torch, telemetry
from cgpass.compile import Boxed, Compiler, output_strides
from cgpass.graph.capturability import why_not_capturable
from cgpass.graph.inputs import input_infos
from cgpass.graph.origins import Origins
from cgpass.graph.partition_tag import get_tag
from cgpass.graph.target import Target
from cgpass.graph.values import graph_outputs
from cgpass.inputs import InputInfo, InputKind
from cgpass.options import Options
from cgpass.passes import outline_passes
from cgpass.passes.base import PassContext, run_passes
from cgpass.plan import build_plan, whole_plan
from cgpass.runtime.executor import Executor
from cgpass.runtime.owner import Owner
from cgpass.runtime.runner import PartitionRunner, RunnerSettings


@dataclass(frozen=True)
class GraphBuilder:
    """Joins the partitions of one graph."""

    options: Options
    owner: Callable[[torch.device], Owner]
    """Gives the owner of the function's recordings on a device."""
    names: Mapping[str, str]
    """What the user calls each input, by placeholder name."""
    visible: frozenset[int]
    """Positions of outputs that the user gets."""
    direction: str
    compiler: Compiler
    origins: Origins
    target: Target

    def whole(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """A graph that is one captured partition."""
        infos = self._infos(gm)
        num_inputs = len(infos)
        num_outputs = len(graph_outputs(gm))
        self._summarise({"captured_0": gm}, {})
        fn = self.compiler.whole(gm, example_inputs)
        if not self.target.records:
            return fn
        run = self._runner("captured_0", fn, infos)
        plan = whole_plan(num_inputs, num_outputs, run, "captured_0", self.visible)
        return _boxed(Executor(plan, run.owner))

    def partitioned(self, gm: fx.GraphModule, context: PassContext) -> Boxed:
        """A graph of several partitions."""
        if self.direction == "forward":
            _torch.report_output_strides(output_strides(gm))
        outlined = run_passes(outline_passes(), gm, context).gm
        parts = {
            name: module
            for name, module in outlined.named_children()
            if isinstance(module, fx.GraphModule)
        }
        self._summarise(parts, _reasons_by_part(gm, self.options.unsafe_ops, context.device))
        runs = {name: self._compile_part(name, module) for name, module in parts.items()}
        plan = build_plan(outlined, runs, self.visible)
        owner = self.owner(self.target.device) if self.target.records else None
        return _boxed(Executor(plan, owner))

    def _compile_part(self, name: str, gm: fx.GraphModule) -> Any:
        if not name.startswith("captured"):
            return self.compiler.eager(gm)
        infos = self._infos(gm)
        static = [i for i, info in enumerate(infos) if info.kind is InputKind.STATIC]
        fn = self.compiler.captured(gm, static)
        return self._runner(name, fn, infos) if self.target.records else fn

    def _infos(self, gm: fx.GraphModule) -> tuple[InputInfo, ...]:
        placeholders = gm.graph.find_nodes(op="placeholder")
        kinds = [self.origins.kind_of(node) for node in placeholders]
        return input_infos(
            gm,
            static=[i for i, kind in enumerate(kinds) if kind is InputKind.STATIC],
            pooled=[
                n.name for n, k in zip(placeholders, kinds, strict=True) if k is InputKind.POOLED
            ],
            names=self.names,
        )

    def _runner(self, name: str, fn: Boxed, infos: tuple[InputInfo, ...]) -> PartitionRunner:
        return PartitionRunner(
            fn,
            infos,
            self.owner(self.target.device),
            RunnerSettings.of(
                self.options,
                opaque=self.compiler.opaque,
                is_backward=self.direction == "backward",
            ),
            name=f"{self.direction} {name}",
        )

    def _summarise(
        self, parts: Mapping[str, fx.GraphModule], reasons: Mapping[str, Iterable[str]]
    ) -> None:
        telemetry.add_graph(
            telemetry.GraphSummary(
                self.direction,
                tuple(
                    telemetry.PartitionSummary(
                        name,
                        name.startswith("captured"),
                        _num_ops(gm),
                        tuple(reasons.get(name, ())),
                    )
                    for name, gm in parts.items()
                ),
            )
        )


def _boxed(executor: Executor) -> Boxed:
    def call(args: list[Any]) -> list[Any]:
        return executor(args)

    return _torch.mark_boxed(call)


def _reasons_by_part(
    gm: fx.GraphModule, unsafe_ops: Iterable[str], device: torch.device
) -> dict[str, list[str]]:
    """Why each eager partition is not captured, by the partition's name."""
    reasons: dict[str, list[str]] = {}
    for node in gm.graph.nodes:
        tag = get_tag(node)
        if tag is not None and not tag.captured:
            why = why_not_capturable(node, device, unsafe_ops=frozenset(unsafe_ops), gm=gm)
            if why is not None:
                reasons.setdefault(str(tag), []).append(str(why))
    return {name: list(dict.fromkeys(lines)) for name, lines in reasons.items()}


def _num_ops(gm: fx.GraphModule) -> int:
    return sum(n.op == "call_function" and "getitem" not in str(n.target) for n in gm.graph.nodes)
