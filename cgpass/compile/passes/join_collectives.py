"""Have each partition wait for the collectives that it starts.

Note [A partition joins what it starts]
    A collective runs on a stream of its own, and `wait_tensor` has the current stream wait for it: through a table on
    the host of which result is whose work. A replay changes no table. So a wait in one partition for what another one
    started would find nothing to wait for and read too early, and a capture that leaves work unjoined is none. Inside
    of a partition the wait stays where it was, for the work to overlap with what lies between; where there is none, one
    comes last.
"""

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from cgpass.compile.facts import values
from cgpass.compile.facts.partition_tag import KEY, get_tag, set_tag
from cgpass.compile.passes.base import Pass, PassContext, inherit_meta


@dataclass(frozen=True)
class JoinCollectives(Pass):
    """Wait at the end of a partition for what it started and nothing in it waits for.

    Needs a tagged graph. What later partitions, or the caller, wait for once more is there already.
    """

    name: ClassVar[str] = "join_collectives"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> tuple[()]:
        """Add waits to `gm`."""
        tagged = [node for node in gm.graph.nodes if get_tag(node) is not None]
        started = filter(values.starts_collective, tagged)
        results = [result for node in started for result in _results(node)]
        last = {get_tag(node): node for node in gm.graph.nodes}
        for result in results:
            wait_tensor = torch.ops._c10d_functional.wait_tensor.default
            tag = result.meta[KEY]
            inside = [user for user in result.users if get_tag(user) == tag]
            if any(user.target is wait_tensor for user in inside):
                continue
            with gm.graph.inserting_after(last[tag]):
                wait = gm.graph.call_function(wait_tensor, (result,))
            inherit_meta(wait, result, result.meta["val"])
            set_tag(wait, tag)
            result.replace_all_uses_with(wait, lambda user, kept=(*inside, wait): user not in kept)
            last[tag] = wait
        return ()


def _results(node: fx.Node) -> list[fx.Node]:
    """The nodes that stand for the tensors that a collective returns; adds those that nobody reads."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return [node]
    found = [user for user in node.users if user.target is operator.getitem]
    for position in {*range(len(value))} - {user.args[1] for user in found}:
        with node.graph.inserting_after(node):
            found.append(node.graph.call_function(operator.getitem, (node, position)))
        inherit_meta(found[-1], node, value[position])
        set_tag(found[-1], node.meta[KEY])
    return found
