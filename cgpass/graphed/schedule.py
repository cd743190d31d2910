"""In which order forwards and backwards are warmed up, recorded and (as a rule) run.

Note [Numbers of forwards]
    Without an order there is one forward per callable; with one, one per callable and microbatch, chunk by chunk,
    microbatch by microbatch within a chunk, layer by layer within a microbatch. Backwards come as their forwards did.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cgpass.errors import ScheduleError


class Step(NamedTuple):
    """One forward or backward of one callable."""

    forward: bool
    number: int
    """Which forward it is, or belongs to. See Note [Numbers of forwards]."""


@dataclass(frozen=True)
class Schedule:
    """All forwards and backwards, in order."""

    callables: tuple[int, ...]
    """Which callable each forward runs."""
    steps: tuple[Step, ...]

    @property
    def forwards(self) -> tuple[int, ...]:
        """Numbers of the forwards in the order in which they run."""
        return tuple(step.number for step in self.steps if step.forward)


def simple(num_callables: int) -> Schedule:
    """All forwards, then their backwards reversed."""
    numbers = range(num_callables)
    forwards = [Step(True, number) for number in numbers]
    backwards = [Step(False, number) for number in reversed(numbers)]
    return Schedule(tuple(numbers), (*forwards, *backwards))


def interleaved(
    order: Sequence[int],
    num_callables: int,
    num_samples: int,
    num_layers_per_chunk: int | Sequence[int] | None,
) -> Schedule:
    """A pipeline's schedule; the arguments are options of `GraphedOptions`, and how many callables and samples there are."""
    num_chunks, num_microbatches = _walk(order)
    layers = _layers(num_layers_per_chunk, num_chunks, num_callables)
    if num_samples != num_callables * num_microbatches:
        raise ScheduleError(
            f"make_graphed_callables: order has {num_microbatches} microbatches of {num_callables} callables, so "
            f"{num_callables * num_microbatches} samples are expected, got {num_samples}. Give one per chunk, "
            "microbatch and layer, in this nesting."
        )
    starts = [sum(layers[:chunk]) for chunk in range(num_chunks)]
    callables = [
        starts[chunk] + layer
        for chunk in range(num_chunks)
        for _ in range(num_microbatches)
        for layer in range(layers[chunk])
    ]
    done = {True: [0] * num_chunks, False: [0] * num_chunks}
    steps: list[Step] = []
    for entry in order:
        forward, chunk = entry > 0, abs(entry) - 1
        first = starts[chunk] * num_microbatches + done[forward][chunk] * layers[chunk]
        numbers = range(first, first + layers[chunk])
        steps.extend(Step(forward, n) for n in (numbers if forward else reversed(numbers)))
        done[forward][chunk] += 1
    return Schedule(tuple(callables), tuple(steps))


def _walk(order: Sequence[int]) -> tuple[int, int]:
    """Numbers of chunks and of microbatches, if the order can be run."""
    if not isinstance(order, Sequence) or isinstance(order, str) or not order:
        raise ScheduleError(
            "make_graphed_callables: order must be a sequence of chunk numbers, positive for a forward and negative "
            f"for a backward, got {order!r}."
        )
    due: Counter[int] = Counter()
    forwards: Counter[int] = Counter()
    for position, entry in enumerate(order):
        if type(entry) is not int or not entry:
            raise _wrong(order, position, "chunks are ints from 1, negative for a backward")
        due[abs(entry)] += 1 if entry > 0 else -1
        forwards[abs(entry)] += entry > 0
        if due[abs(entry)] < 0:
            raise _wrong(order, position, "a backward before the forward that it belongs to")
    num_chunks, num_microbatches = max(forwards), forwards[1]
    for chunk in range(1, num_chunks + 1):
        if forwards[chunk] != num_microbatches:
            raise ScheduleError(
                f"make_graphed_callables: order has {forwards[chunk]} forwards of chunk {chunk}, {num_microbatches} of "
                "chunk 1. Every chunk runs every microbatch, and chunks are numbered without gaps."
            )
        if due[chunk]:
            last = max(p for p, entry in enumerate(order) if entry == chunk)
            raise _wrong(order, last, "a forward whose backward never comes")
    return num_chunks, num_microbatches


def _wrong(order: Sequence[int], position: int, what: str) -> ScheduleError:
    return ScheduleError(
        f"make_graphed_callables: order[{position}] is {order[position]!r}: {what}."
    )


def _layers(
    given: int | Sequence[int] | None, num_chunks: int, num_callables: int
) -> tuple[int, ...]:
    if given is None and not num_callables % num_chunks:
        given = num_callables // num_chunks
    is_sequence = isinstance(given, Sequence) and not isinstance(given, str)
    layers: tuple[Any, ...] = tuple(given) if is_sequence else (given,) * num_chunks
    if (
        len(layers) != num_chunks
        or any(type(n) is not int or n < 1 for n in layers)
        or sum(layers) != num_callables
    ):
        raise ScheduleError(
            f"make_graphed_callables: num_layers_per_chunk must be an int or {num_chunks} ints, one per chunk of the "
            f"order, each at least 1, that make {num_callables} layers, got {given!r}."
        )
    return layers
