"""Order a two-coloured graph for the fewest colour switches, within a memory limit.

Plain integers only, nothing of FX: `partition.py` translates a graph into an `OrderingProblem` and
applies the order. Node `i` of a problem is the i-th node of the original order.

Note [Fewest switches]
Without a memory limit the maximal drain is optimal for a given starting colour: run every ready
node of the current colour, switch, repeat. Whatever another order with the same starting colour has
run after k switches, the drain has run too. So the better of both starting colours has the fewest
switches any order can have. That count is a lower bound for orders within the memory limit, and a
drain that meets the limit reaches it. Only if none does is there a search over down-sets: live
bytes and ready nodes depend only on which nodes have run, so (nodes run, last colour) is a complete
state, and the shortest path by (switches, inversions) is the best and, among those, the nearest
order.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

_MAX_STEPS = 50_000
"""Steps of the exact search: all that 12 nodes can have (2**13 states, 6 steps each on average)."""


@dataclass(frozen=True)
class OrderingProblem:
    """Nodes in a valid order, what they depend on and what memory they need."""

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


@dataclass(frozen=True)
class Ordering:
    """An order of a problem's nodes, cut where the colour changes."""

    order: tuple[int, ...]
    segments: tuple[tuple[int, ...], ...]
    peak_bytes: int
    """Estimated peak of this order."""
    original_peak_bytes: int
    """Estimated peak of the original order."""

    @property
    def switches(self) -> int:
        """Number of colour changes."""
        return max(0, len(self.segments) - 1)


def find_order(problem: OrderingProblem, max_memory_increase: float = 0.05) -> Ordering:
    """Return the order with the fewest colour switches among those within the memory limit.

    The limit is `1 + max_memory_increase` times the original order's estimated peak. Exact for
    graphs of up to 12 nodes, and for larger ones where a drain meets the limit or the search stays
    within its budget; else the best that a memory-limited drain finds. Among equal counts the order
    nearest to the original (fewest inversions) of those considered wins, the original itself where
    it is as good as any. Deterministic.
    """
    original = tuple(range(len(problem)))
    original_peak = peak_bytes(problem, original)
    limit = math.floor(original_peak * (1 + max_memory_increase))
    order = _best_order(problem, original, limit)
    return Ordering(
        order=order,
        segments=_segments(problem, order),
        peak_bytes=peak_bytes(problem, order),
        original_peak_bytes=original_peak,
    )


def count_switches(problem: OrderingProblem, order: Sequence[int]) -> int:
    """Return how often the colour changes along `order`."""
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


def count_inversions(order: Sequence[int]) -> int:
    """Return how many pairs stand the other way round than in the original order."""
    tree = [0] * (len(order) + 1)
    total = 0
    for seen, node in enumerate(order):
        at, smaller = node + 1, 0
        while at > 0:
            smaller += tree[at]
            at -= at & -at
        total += seen - smaller
        at = node + 1
        while at <= len(order):
            tree[at] += 1
            at += at & -at
    return total


def _best_order(problem: OrderingProblem, original: tuple[int, ...], limit: int) -> tuple[int, ...]:
    if len(set(problem.captured)) <= 1:
        return original
    early = [_drain(problem, start, math.inf) for start in (True, False)]
    drains = [original, *(order for order in early if order is not None)]
    backwards = _reversed(problem)
    for start in (True, False):
        order = _drain(backwards, start, math.inf)
        if order is not None:
            drains.append(tuple(len(order) - 1 - node for node in reversed(order)))
    fewest = min(count_switches(problem, order) for order in drains)
    fitting = [
        order
        for order in drains
        if count_switches(problem, order) == fewest and peak_bytes(problem, order) <= limit
    ]
    if fitting:
        return min(fitting, key=count_inversions)
    exact = _search(problem, limit)
    if exact is not None:
        return exact
    limited = [_drain(problem, start, limit) for start in (True, False)]
    candidates = [original, *(order for order in limited if order is not None)]
    candidates += [order for order in drains if peak_bytes(problem, order) <= limit]
    return min(
        candidates, key=lambda order: (count_switches(problem, order), count_inversions(order))
    )


def _segments(problem: OrderingProblem, order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    segments: list[list[int]] = []
    for node in order:
        if not segments or problem.captured[segments[-1][-1]] != problem.captured[node]:
            segments.append([])
        segments[-1].append(node)
    return tuple(tuple(segment) for segment in segments)


def _successors(problem: OrderingProblem) -> list[list[int]]:
    successors: list[list[int]] = [[] for _ in range(len(problem))]
    for node, before in enumerate(problem.predecessors):
        for predecessor in dict.fromkeys(before):
            successors[predecessor].append(node)
    return successors


def _reversed(problem: OrderingProblem) -> OrderingProblem:
    """The problem read from its end, without its memory: drained, nodes run as late as they can."""
    last = len(problem) - 1
    flipped = [tuple(last - node for node in after) for after in _successors(problem)]
    nothing: tuple[tuple[int, ...], ...] = ((),) * len(problem)
    return OrderingProblem(
        captured=problem.captured[::-1],
        predecessors=tuple(flipped[::-1]),
        allocated_bytes=(0,) * len(problem),
        reads=nothing,
    )


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


class _ReadyNodes:
    """Ready nodes of one colour: finds the first one that fits into some memory in O(log n)."""

    def __init__(self, size: int) -> None:
        self._leaves = 1 << max(0, size - 1).bit_length()
        self._least = [math.inf] * (2 * self._leaves)

    def set(self, node: int, bytes_needed: float) -> None:
        at = node + self._leaves
        self._least[at] = bytes_needed
        while at > 1:
            at //= 2
            self._least[at] = min(self._least[2 * at], self._least[2 * at + 1])

    def pop_first(self, free_bytes: float) -> int | None:
        if self._least[1] > free_bytes or self._least[1] == math.inf:
            return None
        at = 1
        while at < self._leaves:
            left = self._least[2 * at]
            at = 2 * at if left <= free_bytes and left != math.inf else 2 * at + 1
        node = at - self._leaves
        self.set(node, math.inf)
        return node


def _drain(problem: OrderingProblem, start: bool, limit: float) -> tuple[int, ...] | None:
    """Run what is ready and fits of a colour, in original order, then switch; None if stuck."""
    successors = _successors(problem)
    missing = [len(set(before)) for before in problem.predecessors]
    ready = {True: _ReadyNodes(len(problem)), False: _ReadyNodes(len(problem))}
    memory = _Memory(problem)
    for node, count in enumerate(missing):
        if not count:
            ready[problem.captured[node]].set(node, problem.allocated_bytes[node])
    order: list[int] = []
    colour, stuck = start, False
    while len(order) < len(problem):
        node = ready[colour].pop_first(limit - memory.live_bytes)
        if node is None:
            if stuck:
                return None
            colour, stuck = not colour, True
            continue
        stuck = False
        order.append(node)
        memory.run(node)
        for successor in successors[node]:
            missing[successor] -= 1
            if not missing[successor]:
                needed = problem.allocated_bytes[successor]
                ready[problem.captured[successor]].set(successor, needed)
    return tuple(order)


@dataclass(frozen=True)
class _Masks:
    """A problem as bit masks over its nodes, for the search over down-sets."""

    before: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    readers: tuple[int, ...]
    kept: frozenset[int]
    successors: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, problem: OrderingProblem) -> "_Masks":
        readers = [0] * len(problem)
        for node, reads in enumerate(problem.reads):
            for value in reads:
                readers[value] |= 1 << node
        return cls(
            before=tuple(_mask(before) for before in problem.predecessors),
            reads=tuple(tuple(dict.fromkeys(reads)) for reads in problem.reads),
            readers=tuple(readers),
            kept=problem.kept,
            successors=tuple(tuple(after) for after in _successors(problem)),
        )

    def freed_by(self, node: int, done: int) -> list[int]:
        """Values that die when `node` completes the down-set `done`."""
        values = [*self.reads[node], node]
        return [v for v in values if v not in self.kept and not self.readers[v] & ~done]


def _mask(nodes: Sequence[int]) -> int:
    mask = 0
    for node in nodes:
        mask |= 1 << node
    return mask


@dataclass(frozen=True)
class _State:
    """A down-set, the colour it ended with, and the node that completed it."""

    done: int
    ready: int
    live_bytes: int
    node: int
    parent: "_State | None"


def _search(problem: OrderingProblem, limit: int) -> tuple[int, ...] | None:
    """Shortest path over down-sets by (switches, inversions); None if the budget runs out."""
    masks = _Masks.of(problem)
    everything = (1 << len(problem)) - 1
    sources = _mask([node for node, before in enumerate(masks.before) if not before])
    queue: list[tuple[int, int, int, _State]] = [(0, 0, 0, _State(0, sources, 0, -1, None))]
    visited: set[tuple[int, bool | None]] = set()
    steps = 0
    while queue:
        switches, inversions, _, state = heapq.heappop(queue)
        colour = problem.captured[state.node] if state.parent else None
        if (state.done, colour) in visited:
            continue
        if state.done == everything:
            return _path(state)
        visited.add((state.done, colour))
        if steps > _MAX_STEPS:
            return None
        for node in _bits(state.ready):
            if state.live_bytes + problem.allocated_bytes[node] > limit:
                continue
            switched = colour is not None and problem.captured[node] != colour
            overtaken = (~state.done & ((1 << node) - 1)).bit_count()
            steps += 1
            following = _step(problem, masks, state, node)
            heapq.heappush(queue, (switches + switched, inversions + overtaken, steps, following))
    return None


def _step(problem: OrderingProblem, masks: _Masks, state: _State, node: int) -> _State:
    done = state.done | 1 << node
    ready = state.ready & ~(1 << node)
    for successor in masks.successors[node]:
        if not masks.before[successor] & ~done:
            ready |= 1 << successor
    live = state.live_bytes + problem.allocated_bytes[node]
    live -= sum(problem.allocated_bytes[value] for value in masks.freed_by(node, done))
    return _State(done, ready, live, node, state)


def _bits(mask: int) -> list[int]:
    bits = []
    while mask:
        lowest = mask & -mask
        bits.append(lowest.bit_length() - 1)
        mask ^= lowest
    return bits


def _path(state: _State) -> tuple[int, ...]:
    order: list[int] = []
    at: _State | None = state
    while at is not None and at.parent is not None:
        order.append(at.node)
        at = at.parent
    return tuple(reversed(order))
