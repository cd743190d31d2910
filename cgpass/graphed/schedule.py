"""In which order forwards and backwards are warmed up, recorded and (as a rule) run.

Note [Numbers of forwards]
    Without an order there is one forward per callable. With one, there is a forward per callable and microbatch, each
    with a sample and a graph of its own: chunk by chunk, microbatch by microbatch within a chunk, layer by layer within
    a microbatch. Backwards of a chunk take its microbatches in the order of their forwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cgpass.errors import ScheduleError


@dataclass(frozen=True)
class Step:
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
    """A pipeline's schedule.

    Args:
        order: Chunk numbers from 1, positive for a forward, negative for a backward.
        num_callables: The layers of all chunks.
        num_samples: Of them and all microbatches.
        num_layers_per_chunk: The same for all chunks, one for each, or as many in each as there are.

    Raises:
        ScheduleError: What is wrong with the order, at which position; or numbers that don't fit it.
    """
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
    for position, entry in enumerate(order):
        if not isinstance(entry, int) or isinstance(entry, bool) or entry == 0:
            raise _wrong(order, position, _why_no_chunk(entry))
    num_chunks = max(map(abs, order))
    forwards, backwards = [0] * num_chunks, [0] * num_chunks
    for position, entry in enumerate(order):
        chunk = abs(entry) - 1
        if entry > 0:
            forwards[chunk] += 1
        elif backwards[chunk] == forwards[chunk]:
            missing = f"a backward of chunk {chunk + 1} before the forward that it belongs to"
            raise _wrong(order, position, missing)
        else:
            backwards[chunk] += 1
    fewest = min(forwards)
    most = max(range(num_chunks), key=forwards.__getitem__)
    if forwards[most] != fewest:
        positions = [p for p, entry in enumerate(order) if entry == most + 1]
        least = forwards.index(fewest) + 1
        what = (
            f"forward {fewest + 1} of chunk {most + 1}, while chunk {least} has {fewest} in all. Every chunk runs every "
            "microbatch, and chunks are numbered without gaps"
        )
        raise _wrong(order, positions[fewest], what)
    for chunk in range(num_chunks):
        if backwards[chunk] != forwards[chunk]:
            last = max(p for p, entry in enumerate(order) if entry == chunk + 1)
            raise _wrong(order, last, f"a forward of chunk {chunk + 1} whose backward never comes")
    return num_chunks, forwards[0]


def _why_no_chunk(entry: Any) -> str:
    if entry:
        return f"a {type(entry).__name__} and no int"
    return "chunks are numbered from 1, negative for a backward"


def _wrong(order: Sequence[int], position: int, what: str) -> ScheduleError:
    return ScheduleError(
        f"make_graphed_callables: order[{position}] is {order[position]!r}: {what}."
    )


def _layers(
    given: int | Sequence[int] | None, num_chunks: int, num_callables: int
) -> tuple[int, ...]:
    if given is None:
        given, rest = divmod(num_callables, num_chunks)
        if rest:
            raise ScheduleError(
                f"make_graphed_callables: {num_callables} callables can't be shared out evenly to the {num_chunks} "
                "chunks of the order. Give num_layers_per_chunk."
            )
    is_sequence = isinstance(given, Sequence) and not isinstance(given, str)
    layers = tuple(given) if is_sequence else (given,) * num_chunks
    if len(layers) != num_chunks or any(type(n) is not int or n < 1 for n in layers):
        raise ScheduleError(
            f"make_graphed_callables: num_layers_per_chunk must be an int or {num_chunks} ints, one per chunk of the "
            f"order, each at least 1, got {given!r}."
        )
    if sum(layers) != num_callables:
        raise ScheduleError(
            f"make_graphed_callables: num_layers_per_chunk={given!r} makes {sum(layers)} layers in {num_chunks} chunks, "
            f"but there are {num_callables} callables."
        )
    return layers
