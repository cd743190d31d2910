"""Cut a graph into captured and eager partitions, reordered so that there are few of them.

Note [Fewest switches]
    Without a memory limit the maximal drain is optimal for a given starting colour: run every ready node of the current
    colour, switch, repeat. Whatever another order with the same starting colour has run after k switches, the drain has
    run too. So the better of both starting colours has the fewest switches any order can have. A drain that runs only
    what fits into the limit is the same one where all fits; where it gets stuck, the original order is the answer.
"""

import bisect
import itertools
import math
import operator
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from cgpass.compile.facts import values
from cgpass.compile.facts.capturability import is_passive, why_not_capturable
from cgpass.compile.facts.lines import user_line
from cgpass.compile.facts.partition_tag import PartitionTag, set_tag
from cgpass.compile.passes.base import Pass, PassContext
from cgpass.telemetry.reason import OTHER_FIXES, Reason, many


@dataclass(frozen=True)
class Partition(Pass):
    """Reorder the nodes for few boundaries and tag each with its partition.

    Dependencies, mutations, random numbers, collectives and side effects keep their order. Notes:
    a `Reason` for each eager operator, in order (`getitem` has its producer's); each is also noted at the operator.
    """

    name: ClassVar[str] = "partition"

    unsafe_ops: frozenset[str] = frozenset()
    """Operators never captured, "ns::op" or "ns::op.overload"."""
    min_partition_ops: int = 4
    """A captured partition beside others with fewer operators that launch work runs plainly."""
    max_memory_increase: float = 0.05
    """How much reordering may raise the estimated peak memory, as a fraction."""
    collectives: bool = True
    """True if collectives may be captured."""

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> list[Reason]:
        """Tag `gm`'s nodes, in an order with few boundaries."""
        groups = _groups(gm)
        reasons = [
            why_not_capturable(
                group[0],
                ctx.device,
                unsafe_ops=self.unsafe_ops,
                collectives=self.collectives,
            )
            for group in groups
        ]
        if any(reasons):
            groups, reasons = _with_views(gm, groups, reasons)
        captured = tuple(reason is None for reason in reasons)
        # A graph that is one partition is no splinter: it is captured if it does any work.
        minimum = 1 if all(captured) else self.min_partition_ops
        order: Sequence[int] = range(len(groups))
        if len(set(captured)) > 1:
            order = find_order(_problem(gm, groups, captured), self.max_memory_increase)
        segments = _cut(groups, reasons, order, minimum)
        _apply(gm, groups, segments)
        return [reason for segment in segments for _, reason in segment if reason is not None]


Group = tuple[fx.Node, ...]
"""An operator and the `getitem` nodes that take its results apart: they stay together. See also `_with_views`."""


Segment = list[tuple[int, Reason | None]]
"""Groups that run one after the other, and why each is eager."""


def _groups(gm: fx.GraphModule) -> list[Group]:
    members: dict[fx.Node, list[fx.Node]] = {}
    home: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if is_passive(node):
            continue
        producer = node.args[0] if node.target is operator.getitem else None
        first = home.get(producer, node) if isinstance(producer, fx.Node) else node
        home[node] = first
        members.setdefault(first, []).append(node)
    return [tuple(group) for group in members.values()]


def _with_views(
    gm: fx.GraphModule, groups: Sequence[Group], reasons: Sequence[Reason | None]
) -> tuple[list[Group], list[Reason | None]]:
    """Let views of what an eager operator makes be part of its group, unless a captured operator reads them.

    In a captured partition they would be outputs that need no kernel, but an input that is copied in.
    """
    eager = {at for at, reason in enumerate(reasons) if reason is not None}
    home = {node: at for at, group in enumerate(groups) for node in group}
    views: set[int] = set()  # that no captured operator reads
    for at, group in reversed(list(enumerate(groups))):
        readers = {home.get(user) for node in group for user in node.users}
        if at not in eager and not _launches(group[0]) and readers <= {None, at, *eager, *views}:
            views.add(at)
    inputs_of = _inputs(gm)
    owner = {at: at for at in eager}
    merged: dict[int, list[fx.Node]] = {}
    for at, group in enumerate(groups):
        bases = {home[arg] for arg in inputs_of[group[0]] if arg in home}
        if at in views and len(bases) == 1 and (base := bases.pop()) in owner:
            owner[at] = owner[base]
        merged.setdefault(owner.get(at, at), []).extend(group)
    return [tuple(group) for group in merged.values()], [reasons[at] for at in merged]


def _inputs(gm: fx.GraphModule) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Inputs of each node, where a host scalar stands for the inputs it is made of."""
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in gm.graph.nodes:
        behind = (
            found[arg] if values.is_host_scalar(arg) else (arg,) for arg in node.all_input_nodes
        )
        found[node] = tuple(dict.fromkeys(itertools.chain.from_iterable(behind)))
    return found


@dataclass(frozen=True)
class OrderingProblem:
    """Nodes in a valid order, what they depend on and what memory they need; node `i` is the i-th of the original order."""

    captured: tuple[bool, ...]
    """Colour of each node."""
    predecessors: tuple[tuple[int, ...], ...]
    """Nodes that must run before each node: its data and whatever else fixes their order."""
    allocated_bytes: tuple[int, ...]
    """Memory that each node allocates for its value."""
    reads: tuple[tuple[int, ...], ...]
    """Nodes whose value each node reads; a value is freed after its last reader has run."""
    kept: frozenset[int] = frozenset()
    """Nodes whose value is never freed: the graph's outputs."""

    def __len__(self) -> int:
        return len(self.captured)


def _problem(
    gm: fx.GraphModule, groups: Sequence[Group], captured: tuple[bool, ...]
) -> OrderingProblem:
    home = {node: at for at, group in enumerate(groups) for node in group}
    owner: dict[int, int] = {}
    predecessors: list[dict[int, None]] = []
    reads: list[dict[int, None]] = []
    chains = _Chains()
    inputs_of = _inputs(gm)
    for at, group in enumerate(groups):
        inputs = inputs_of[group[0]]
        before = {home[arg]: None for arg in inputs if arg in home}
        before.update(dict.fromkeys(chains.add(at, group[0], inputs)))
        predecessors.append(before)
        keys = itertools.chain.from_iterable(map(values.storage_keys, inputs))
        reads.append({owner[key]: None for key in keys if key in owner})
        for node in group:
            for key in values.storage_keys(node):
                owner.setdefault(key, at)
    returned = itertools.chain.from_iterable(
        values.storage_keys(arg) for arg in inputs_of[gm.graph.output_node()]
    )
    return OrderingProblem(
        captured=captured,
        predecessors=tuple(tuple(sorted(before)) for before in predecessors),
        allocated_bytes=tuple(values.output_bytes(group[0]) for group in groups),
        reads=tuple(tuple(sorted(read)) for read in reads),
        kept=frozenset(owner[key] for key in returned if key in owner),
    )


class _Chains:
    """Orders that no data flow shows: mutations, random numbers, collectives, side effects."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._writer: dict[Hashable, int] = {}
        self._readers: dict[Hashable, list[int]] = {}

    def add(self, at: int, node: fx.Node, inputs: Iterable[fx.Node]) -> list[int]:
        """Register a group; return the groups that must run before it."""
        before: list[int] = []
        for kind in _kinds(node):
            if kind in self._last:
                before.append(self._last[kind])
            self._last[kind] = at
        written = {key for arg in values.mutated_inputs(node) for key in _memory(arg)}
        read = dict.fromkeys(key for arg in inputs for key in _memory(arg))
        for key in read:
            if key in self._writer:
                before.append(self._writer[key])
            if key in written:
                before.extend(self._readers.pop(key, ()))
                self._writer[key] = at
            else:
                self._readers.setdefault(key, []).append(at)
        return before


def _kinds(node: fx.Node) -> Iterator[str]:
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
    groups: Sequence[Group], reasons: Sequence[Reason | None], order: Iterable[int], minimum: int
) -> list[Segment]:
    """Cut an order where the colour changes; what is too small to capture turns eager."""
    segments: list[Segment] = []
    for captured, run in itertools.groupby(order, key=lambda at: reasons[at] is None):
        members: Segment = [(at, reasons[at]) for at in run]
        count = sum(_launches(groups[at][0]) for at, _ in members)
        if captured and count < minimum:
            members = [(at, _too_small(groups[at][0], count, minimum)) for at, _ in members]
        if segments and (segments[-1][0][1] is None) == (members[0][1] is None):
            segments[-1].extend(members)
        else:
            segments.append(members)
    return segments


def _launches(node: fx.Node) -> bool:
    """Tell if a node does work on the device; views don't."""
    return values.output_bytes(node) > 0 or values.has_side_effect(node)


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


def _apply(gm: fx.GraphModule, groups: Sequence[Group], segments: Sequence[Segment]) -> None:
    if len(segments) > 1:
        _reorder(gm, [node for segment in segments for at, _ in segment for node in groups[at]])
    for index, segment in enumerate(segments):
        tag = PartitionTag(index, captured=segment[0][1] is None)
        for at, reason in segment:
            for node in groups[at]:
                set_tag(node, tag, reason if node is groups[at][0] else None)


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


def find_order(problem: OrderingProblem, max_memory_increase: float = 0.05) -> tuple[int, ...]:
    """Return an order with few colour switches whose peak is at most `1 + max_memory_increase` times the original's.

    See Note [Fewest switches].
    """
    original = tuple(range(len(problem)))
    limit = math.floor(peak_bytes(problem, original) * (1 + max_memory_increase))
    drains = (_drain(problem, start, limit) for start in (True, False))
    return min([original, *filter(None, drains)], key=lambda order: count_switches(problem, order))


def count_switches(problem: OrderingProblem, order: Sequence[int]) -> int:
    """Return the number of colour changes along `order`."""
    colours = [problem.captured[node] for node in order]
    return sum(a != b for a, b in itertools.pairwise(colours))


def peak_bytes(problem: OrderingProblem, order: Sequence[int]) -> int:
    """Return the estimated peak of live bytes along `order`."""
    memory = _Memory(problem)
    peak = 0
    for node in order:
        peak = max(peak, memory.live_bytes + problem.allocated_bytes[node])
        memory.run(node)
    return peak


class _Memory:
    """Live bytes while the nodes of a problem run one after another."""

    def __init__(self, problem: OrderingProblem) -> None:
        self.live_bytes = 0
        self._allocated = problem.allocated_bytes
        self._reads = [tuple(dict.fromkeys(reads)) for reads in problem.reads]
        self._waiting = [0] * len(problem)
        """How many readers of each value have not run; one more for a value that is kept."""
        for reads in self._reads:
            for value in reads:
                self._waiting[value] += 1
        for value in problem.kept:
            self._waiting[value] += 1

    def run(self, node: int) -> None:
        if self._waiting[node]:
            self.live_bytes += self._allocated[node]
        for value in self._reads[node]:
            self._waiting[value] -= 1
            if not self._waiting[value]:
                self.live_bytes -= self._allocated[value]


def _drain(problem: OrderingProblem, start: bool, limit: float) -> tuple[int, ...] | None:
    """Run the ready nodes of one colour that fit, in original order, then switch; None if stuck."""
    successors: list[list[int]] = [[] for _ in range(len(problem))]
    for node, before in enumerate(problem.predecessors):
        for predecessor in dict.fromkeys(before):
            successors[predecessor].append(node)
    missing = [len(set(before)) for before in problem.predecessors]
    ready: dict[bool, list[int]] = {True: [], False: []}
    memory = _Memory(problem)
    for node, count in enumerate(missing):
        if not count:
            ready[problem.captured[node]].append(node)
    order: list[int] = []
    colour, stuck = start, False
    while len(order) < len(problem):
        free = limit - memory.live_bytes
        fitting = (i for i, n in enumerate(ready[colour]) if problem.allocated_bytes[n] <= free)
        at = next(fitting, None)
        if at is None:
            if stuck:
                return None
            colour, stuck = not colour, True
            continue
        stuck = False
        node = ready[colour].pop(at)
        order.append(node)
        memory.run(node)
        for successor in successors[node]:
            missing[successor] -= 1
            if not missing[successor]:
                bisect.insort(ready[problem.captured[successor]], successor)
    return tuple(order)
