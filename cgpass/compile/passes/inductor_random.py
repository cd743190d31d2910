"""Tag what Inductor has to compile in a partition that otherwise runs as aten operators."""

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from cgpass.compile.facts import values
from cgpass.compile.facts.partition_tag import PartitionTag, set_tag
from cgpass.compile.passes.base import Pass, PassContext, PassResult


@dataclass(frozen=True)
class InductorRandom(Pass):
    """Tag runs of random operators that only Inductor computes as captured, what is between them as eager.

    Nothing captures them: the tags say which runs become kernels of Inductor's. Nodes keep their order, but for
    `getitem`, which comes right behind its producer.
    """

    name: ClassVar[str] = "inductor_random"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        """Tag `gm`."""
        parts = gm.graph.find_nodes(op="call_function", target=operator.getitem)
        for node in reversed(list(parts)):
            producer = node.args[0]
            assert isinstance(producer, fx.Node)
            if producer.op == "call_function":
                producer.append(node)
        tag: PartitionTag | None = None
        for node in gm.graph.nodes:
            if node.op in ("placeholder", "get_attr", "output") or values.is_host_scalar(node):
                continue
            producer = node.args[0] if node.target is operator.getitem else node
            compiled = isinstance(producer, fx.Node) and values.is_inductor_random(producer)
            if tag is None or tag.captured != compiled:
                tag = PartitionTag(0 if tag is None else tag.index + 1, captured=compiled)
            set_tag(node, tag)
        return PassResult(gm, modified=True)
