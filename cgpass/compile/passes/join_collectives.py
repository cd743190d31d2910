"""Have each partition wait for the collectives that it starts.

Note [A partition joins what it starts]
    A collective runs on a stream of its own, and `wait_tensor` has the current stream wait for it: through a table on
    the host of which result is whose work. A replay changes no table. So a wait in one partition for what another one
    started would find nothing to wait for and read too early, and a capture that leaves work unjoined is none. Inside
    of a partition the wait stays where it was, for the work to overlap with what lies between; where there is none, one
    comes last.
"""

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from cgpass import torch_private
from cgpass.compile.facts import values
from cgpass.compile.facts.partition_tag import KEY, PartitionTag, get_tag, set_tag
from cgpass.compile.passes.base import Pass, PassContext, inherit_meta
from cgpass.errors import PostconditionError


@dataclass(frozen=True)
class JoinCollectives(Pass):
    """Wait at the end of a partition for what it started and nothing in it waits for.

    Needs a tagged graph. What later partitions, or the caller, wait for once more is there already.
    """

    name: ClassVar[str] = "join_collectives"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> tuple[()]:
        """Add waits to `gm`."""
        for node in _collectives(gm):
            _name_all_results(node)
        unjoined = list(_unjoined(gm))
        last = _last_nodes(gm) if unjoined else {}
        for result, tag in unjoined:
            end = last[tag]
            with gm.graph.inserting_after(end):
                wait = gm.graph.call_function(torch_private.wait_tensor(), (result,))
            inherit_meta(wait, result, result.meta["val"])
            set_tag(wait, tag)
            outside = [user for user in result.users if get_tag(user) != tag]
            for user in outside:
                user.replace_input_with(result, wait)
            last[tag] = wait
        return ()

    def ensures(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        """Nothing that is started is left to others."""
        left = [result.name for result, _ in _unjoined(gm)]
        left += [node.name for node in _collectives(gm) if _unnamed(node)]
        if left:
            raise PostconditionError(f"nothing waits for {', '.join(left)} where it is started")


def _collectives(gm: fx.GraphModule) -> list[fx.Node]:
    """Those that a partition starts."""
    return [n for n in gm.graph.nodes if get_tag(n) is not None and values.starts_collective(n)]


def _unjoined(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, PartitionTag]]:
    """Results of collectives that their own partition does not wait for."""
    for node in _collectives(gm):
        tag = node.meta[KEY]
        for result in _results(node):
            if not any(get_tag(wait) == tag for wait in _waits(result)):
                yield result, tag


def _results(node: fx.Node) -> list[fx.Node]:
    """The nodes that stand for the tensors that a collective returns."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return [node]
    return [user for user in node.users if user.target is operator.getitem]


def _unnamed(node: fx.Node) -> list[int]:
    """Positions of results that no node stands for, since nobody reads them."""
    val = node.meta.get("val")
    if not isinstance(val, list | tuple):
        return []
    return sorted(set(range(len(val))) - {result.args[1] for result in _results(node)})


def _name_all_results(node: fx.Node) -> None:
    for position in _unnamed(node):
        with node.graph.inserting_after(node):
            result = node.graph.call_function(operator.getitem, (node, position))
        inherit_meta(result, node, node.meta["val"][position])
        set_tag(result, node.meta[KEY])


def _waits(result: fx.Node) -> Iterable[fx.Node]:
    return (user for user in result.users if user.target is torch_private.wait_tensor())


def _last_nodes(gm: fx.GraphModule) -> dict[PartitionTag, fx.Node]:
    return {tag: node for node in gm.graph.nodes if (tag := get_tag(node)) is not None}
