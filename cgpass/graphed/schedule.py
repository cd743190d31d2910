"""In which order forwards and backwards are warmed up, recorded and (as a rule) run.

Note [Numbers of forwards]
    There is one forward per callable and microbatch, chunk by chunk, microbatch by microbatch within a chunk, layer by
    layer within a microbatch. Backwards come as their forwards did. Without an order there is one chunk and one microbatch.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cgpass.errors import ScheduleError


@dataclass(frozen=True)
class Schedule:
    """All forwards and backwards, in order."""

    callables: tuple[int, ...]
    """Which callable each forward runs. See Note [Numbers of forwards]."""
    steps: tuple[tuple[bool, int], ...]
    """True for a forward, and which one it is, or belongs to."""


def schedule_of(order: Sequence[int], num_callables: int, num_samples: int) -> Schedule:
    """A pipeline's schedule, whose chunks have as many callables each.

    Raises:
        ScheduleError: The order can't be run, or these are not as many callables and samples as it takes.
    """
    num_chunks, num_microbatches = _walk(order)
    layers, rest = divmod(num_callables, num_chunks)
    if rest or num_samples != num_callables * num_microbatches:
        raise ScheduleError(
            f"make_graphed_callables: {num_callables} callables, but {num_samples} samples, for {num_chunks} chunks and "
            f"{num_microbatches} microbatches. Give as many callables for each chunk, and a sample for each microbatch of "
            "each callable."
        )
    per_chunk = layers * num_microbatches
    callables = [n // per_chunk * layers + n % layers for n in range(num_samples)]
    done: Counter[int] = Counter()
    steps: list[tuple[bool, int]] = []
    for entry in order:
        first = (abs(entry) - 1) * per_chunk + done[entry] * layers
        numbers = range(first, first + layers)
        steps += [(entry > 0, n) for n in (numbers if entry > 0 else reversed(numbers))]
        done[entry] += 1
    return Schedule(tuple(callables), tuple(steps))


def _walk(order: Sequence[int]) -> tuple[int, int]:
    """Numbers of chunks and of microbatches, if the order can be run."""
    if not isinstance(order, Sequence) or isinstance(order, str) or not order:
        raise ScheduleError(
            "make_graphed_callables: order must be a sequence of chunk numbers, positive for a forward and negative "
            f"for a backward, got {order!r}."
        )
    done: Counter[int] = Counter()
    for position, entry in enumerate(order):
        if type(entry) is not int or not entry:
            raise _wrong(order, position, "chunks are ints from 1, negative for a backward")
        done[entry] += 1
        if done[-abs(entry)] > done[abs(entry)]:
            raise _wrong(order, position, "a backward before the forward that it belongs to")
    num_chunks, num_microbatches = max(map(abs, order)), done[1]
    for chunk in range(1, num_chunks + 1):
        if done[chunk] != num_microbatches:
            raise ScheduleError(
                f"make_graphed_callables: order has {done[chunk]} forwards of chunk {chunk}, {num_microbatches} of "
                "chunk 1. Every chunk runs every microbatch, and chunks are numbered without gaps."
            )
        if done[-chunk] < done[chunk]:
            last = max(p for p, entry in enumerate(order) if entry == chunk)
            raise _wrong(order, last, "a forward whose backward never comes")
    return num_chunks, num_microbatches


def _wrong(order: Sequence[int], position: int, what: str) -> ScheduleError:
    return ScheduleError(
        f"make_graphed_callables: order[{position}] is {order[position]!r}: {what}."
    )
