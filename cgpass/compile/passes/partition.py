"""Cut a graph into captured and eager partitions, reordered so that there are few of them.

Note [Fewest switches]
    Captured and eager stages alternate. The early stage of a group is the first of its kind that no predecessor forbids:
    whatever an order with the same first kind has run after k switches, these stages have run too. So the better of both
    first kinds has the fewest switches any order can have. The late stage of a group is the one in which it stood, if no
    reader needs it before: gathered at the beginning, casts of weights and recomputed values would take memory. Early
    stages are for graphs in which they leave so little to a later one that it is not worth a partition. A partition is
    worth `min_partition_ops` operators: an order that leaves more of them eager than it saves partitions is no better.

Note [A partition joins what it starts]
    A collective runs on a stream of its own, and `wait_tensor` has the current stream wait for it: through a table on
    the host of which result is whose work. A replay changes no table. So a wait in one partition for what another one
    started would find nothing to wait for and read too early, and a capture that leaves work unjoined is none. Inside
    of a partition the wait stays where it was, for the work to overlap with what lies between; where there is none, one
    comes last.
"""

import itertools
import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from cgpass.compile.facts import values
from cgpass.compile.facts.capturability import is_passive, why_not_capturable
from cgpass.compile.facts.lines import user_line
from cgpass.compile.facts.partition_tag import KEY, PartitionTag, get_tag
from cgpass.compile.passes.base import Pass, PassContext, inherit_meta
from cgpass.telemetry.reason import OTHER_FIXES, Reason, many


@dataclass(frozen=True)
class Partition(Pass):
    """Reorder the nodes for few boundaries and tag each with its partition.

    Dependencies, mutations, random numbers, collectives and side effects keep their order. Each partition waits for the
    collectives that it starts. Notes: a `Reason` for each eager operator, in order (`getitem` has its producer's), with
    its partition.
    """

    name: ClassVar[str] = "partition"

    unsafe_ops: frozenset[str] = frozenset()
    """Operators never captured, "ns::op" or "ns::op.overload"."""
    min_partition_ops: int = 4
    """A captured partition beside others with fewer operators that launch work runs without a graph."""
    collectives: bool = True
    """True if collectives may be captured."""

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> list[tuple[PartitionTag, Reason]]:
        """Tag `gm`'s nodes, in an order with few boundaries."""
        reasons = {
            node: why_not_capturable(
                node, ctx.device, unsafe_ops=self.unsafe_ops, collectives=self.collectives
            )
            for node in gm.graph.nodes
            if not is_passive(node)
        }
        groups = _groups(gm, reasons)
        captured = [reasons[group[0]] is None for group in groups]
        # A graph that is one partition is no splinter: it is captured if it does any work.
        minimum = 1 if all(captured) else self.min_partition_ops
        work = {first: _launches(first) for first, *_ in groups}
        found: Iterable[Sequence[int]] = [range(len(groups))]
        if not all(captured):
            found = orders(captured, _predecessors(gm, groups))
        cuts = (
            _cut([(groups[at], reasons[groups[at][0]]) for at in order], work, minimum)
            for order in found
        )
        segments = min(cuts, key=lambda cut: (_launched(cut, work, minimum), len(cut)))
        if len(segments) > 1:
            _reorder(gm, [node for segment in segments for group, _ in segment for node in group])
        notes: list[tuple[PartitionTag, Reason]] = []
        for index, segment in enumerate(segments):
            tag = PartitionTag(index, captured=segment[0][1] is None)
            notes += [(tag, reason) for _, reason in segment if reason is not None]
            for node in itertools.chain.from_iterable(group for group, _ in segment):
                node.meta[KEY] = tag
        join_collectives(gm)
        return notes


Group = tuple[fx.Node, ...]
"""An operator and what only takes its results apart: they stay together."""
Segment = list[tuple[Group, Reason | None]]
"""Groups that run one after the other, and why each is eager."""


def _groups(gm: fx.GraphModule, reasons: dict[fx.Node, Reason | None]) -> list[Group]:
    """Group each operator with its `getitem` nodes, an eager one also with views of its results that none captured reads.

    In a captured partition such views would be outputs that need no kernel, but an input that is copied in.
    """
    views: set[fx.Node] = set()  # that no captured operator reads
    for node, reason in reversed(reasons.items()):
        readers = (user in views or user not in reasons or reasons[user] for user in node.users)
        if reason is None and all(readers) and not _launches(node):
            views.add(node)
    inputs_of = _inputs(gm)
    home: dict[fx.Node, fx.Node] = {}
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in reasons:
        first, *others = {home[arg] for arg in inputs_of[node] if arg in home} or [node]
        stays = node.target is operator.getitem or (node in views and reasons[first] is not None)
        home[node] = first if stays and not others else node
        members.setdefault(home[node], []).append(node)
    return [tuple(group) for group in members.values()]


def _inputs(gm: fx.GraphModule) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Inputs of each node, where a host scalar stands for the inputs it is made of."""
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in gm.graph.nodes:
        behind = (
            found[arg] if values.is_host_scalar(arg) else (arg,) for arg in node.all_input_nodes
        )
        found[node] = tuple(dict.fromkeys(itertools.chain.from_iterable(behind)))
    return found


def _predecessors(gm: fx.GraphModule, groups: Sequence[Group]) -> list[set[int]]:
    """Groups that must run before each group: for its data, or for what it writes or what another one wrote before."""
    home = {node: at for at, group in enumerate(groups) for node in group}
    inputs_of = _inputs(gm)
    writer: dict[Hashable, int] = {}
    readers: dict[Hashable, list[int]] = {}
    found = []
    for at, (first, *_) in enumerate(groups):
        before = {home[arg] for arg in inputs_of[first] if arg in home}
        written = frozenset(_states(first)).union(*map(_memory, values.mutated_inputs(first)))
        for key in written.union(*map(_memory, inputs_of[first])):
            if key in writer:
                before.add(writer[key])
            if key in written:
                before.update(readers.pop(key, ()))
                writer[key] = at
            else:
                readers.setdefault(key, []).append(at)
        found.append(before)
    return found


def _states(node: fx.Node) -> Iterator[Hashable]:
    """Name what a node reads and writes beside tensors: the order of all that do stays."""
    if values.is_random(node):
        yield "random"
    if values.is_collective(node):
        yield "collective"
    # What only writes to its inputs is ordered by the memory it touches.
    if values.has_side_effect(node) and not values.mutated_inputs(node):
        yield "side effect"


def _memory(node: fx.Node) -> frozenset[Hashable]:
    """Return the memory of a node's value: its storages, or the attribute if tracing left no value."""
    keys = values.storage_keys(node)
    if not keys and node.op == "get_attr":
        return frozenset([str(node.target)])
    return frozenset(keys)


def _cut(
    groups: Iterable[tuple[Group, Reason | None]], work: Mapping[fx.Node, bool], minimum: int
) -> list[Segment]:
    """Cut an order where the colour changes; what is too small to capture turns eager."""
    segments: list[Segment] = []
    for captured, run in itertools.groupby(groups, key=lambda group: group[1] is None):
        members: Segment = list(run)
        count = sum(work[group[0]] for group, _ in members)
        if captured and count < minimum:
            members = [(group, _too_small(group[0], count, minimum)) for group, _ in members]
        if segments and (segments[-1][0][1] is None) == (members[0][1] is None):
            segments[-1].extend(members)
        else:
            segments.append(members)
    return segments


def _launched(segments: Iterable[Segment], work: Mapping[fx.Node, bool], minimum: int) -> int:
    """Count eager operators, and partitions as the fewest operators that are worth one."""
    found = 0
    for segment in segments:
        is_captured = segment[0][1] is None
        found += minimum if is_captured else sum(work[group[0]] for group, _ in segment)
    return found


def _launches(node: fx.Node) -> bool:
    """Tell if a node does work on the device; views don't."""
    return values.allocates(node) or values.has_side_effect(node)


def _too_small(node: fx.Node, count: int, minimum: int) -> Reason:
    line = user_line(node)
    if not count:
        detail = "it launches no work on the device"
        return Reason("no_work", str(node.target), detail, OTHER_FIXES["no_work"], line)
    verb = "does" if count == 1 else "do"
    detail = (
        f"its partition would hold {many(count, 'operator')} that {verb} work on the device (views don't count), "
        f"min_partition_ops is {minimum}"
    )
    fix = f"set min_partition_ops to {count}{' or less' if count > 1 else ''} to capture it"
    return Reason("too_small", str(node.target), detail, fix, line)


def _reorder(gm: fx.GraphModule, order: Iterable[fx.Node]) -> None:
    """Put nodes in `order`; attributes and host scalars come just before their first user."""
    nodes = list(gm.graph.nodes)
    placed: dict[fx.Node, None] = dict.fromkeys(n for n in nodes if n.op == "placeholder")

    def place(node: fx.Node) -> None:
        for arg in node.all_input_nodes:
            if arg not in placed:
                place(arg)
        placed[node] = None

    for node in (*order, *nodes):
        if node not in placed and node.op != "output":
            place(node)
    output = gm.graph.output_node()
    for node in placed:
        output.prepend(node)


def orders(
    captured: Sequence[bool], predecessors: Sequence[Iterable[int]]
) -> Iterator[Sequence[int]]:
    """Orders of groups that may have the fewest switches, nearest to the original first. See Note [Fewest switches]."""
    original = range(len(captured))
    staged = [_stages(captured, predecessors, first) for first in (True, False)]
    yield original
    for stages in itertools.chain(*zip(*staged, strict=True)):
        yield sorted(original, key=stages.__getitem__)


def _stages(
    captured: Sequence[bool], predecessors: Sequence[Iterable[int]], first: bool
) -> tuple[list[int], list[int]]:
    """Number of the stage in which each group runs, late and early, if the stages begin with a captured one or not."""
    early: list[int] = []
    for at, before in enumerate(predecessors):
        behind = (early[b] + (captured[b] != captured[at]) for b in before)
        early.append(max(behind, default=int(captured[at] != first)))
    begun = list(itertools.accumulate(early, max))
    late, latest = list(early), [max(early, default=0)] * len(early)
    for at in reversed(range(len(late))):
        limit = min(latest[at], begun[at] + 1)
        late[at] = limit - (limit - early[at]) % 2  # the last one of its kind
        for b in predecessors[at]:
            latest[b] = min(latest[b], late[at] - (captured[b] != captured[at]))
    return late, early


def join_collectives(gm: fx.GraphModule) -> None:
    """Wait at the end of a partition for what it started and nothing in it waits for.

    What later partitions, or the caller, wait for once more is there already.
    """
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
        wait.meta[KEY] = tag
        result.replace_all_uses_with(wait, lambda user, kept=(*inside, wait): user not in kept)
        last[tag] = wait


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
        found[-1].meta[KEY] = node.meta[KEY]
    return found
