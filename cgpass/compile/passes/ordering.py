"""Order a two-coloured graph for few colour switches, within a memory limit.

Plain integers only, nothing of FX: `partition.py` translates a graph into an `OrderingProblem` and
applies the order. Node `i` of a problem is the i-th node of the original order.

Note [Fewest switches]
Without a memory limit the maximal drain is optimal for a given starting colour: run every ready
node of the current colour, switch, repeat. Whatever another order with the same starting colour has
run after k switches, the drain has run too. So the better of both starting colours has the fewest
switches any order can have, and a drain that meets the limit is as good as any. If none does, a
drain that runs only what fits is the answer, or the original order.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


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


def find_order(problem: OrderingProblem, max_memory_increase: float = 0.05) -> tuple[int, ...]:
    """Return an order with few colour switches whose peak is at most `1 + max_memory_increase` times the original's.

    Of equal counts the order nearest to the original (fewest inversions) wins. See Note [Fewest switches].
    """
    original = tuple(range(len(problem)))
    limit = math.floor(peak_bytes(problem, original) * (1 + max_memory_increase))
    if len(set(problem.captured)) <= 1:
        return original
    backwards = _reversed(problem)
    orders = [original]
    for start in (True, False):
        drains = [_drain(problem, start, math.inf), _drain(problem, start, limit)]
        late = _drain(backwards, start, math.inf)
        if late is not None:
            drains.append(tuple(len(late) - 1 - node for node in reversed(late)))
        orders += [order for order in drains if order is not None]
    fitting = [order for order in orders if peak_bytes(problem, order) <= limit]
    return min(fitting, key=lambda order: (count_switches(problem, order), count_inversions(order)))


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
    seen: list[int] = []
    total = 0
    for node in order:
        at = bisect.bisect(seen, node)
        total += len(seen) - at
        seen.insert(at, node)
    return total


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


def _drain(problem: OrderingProblem, start: bool, limit: float) -> tuple[int, ...] | None:
    """Run what is ready and fits of a colour, in original order, then switch; None if stuck."""
    successors = _successors(problem)
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
