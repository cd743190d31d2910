"""What a runner does around captures that fail: who is asked why, state put back, memory given back."""

import contextlib
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Outcome:
    """What was found to be wrong with a partition whose capture failed."""

    why: str
    again: bool = False
    """Whether the function's next call compiles it again, without what can't be captured."""


class OnFailure(Protocol):
    """Finds what in a partition can't be captured, and has the rest captured."""

    @property
    def checks_warm_ups(self) -> bool:
        """Whether to look out for what waits for the device before anything is captured."""
        ...

    def __call__(self, args: list[Any], error: Exception | None) -> Outcome | None:
        """Find what is wrong with a partition; None if nothing is known.

        Args:
            args: Inputs of a call; left as they are.
            error: What its capture raised; None if the sync check found something in a warm-up.

        Raises:
            Exception: `error` itself, where it is the user's own.
            CaptureError: If `on_skip` is "raise".
        """
        ...

    def forget(self) -> None:
        """Take back that the partition runs plainly: it is captured again."""
        ...


def generators_of(device: torch.device, args: Iterable[Any]) -> list[torch.Generator]:
    """The generators that work on `device` with inputs `args` may draw from."""
    found = [torch.default_generator]
    if device.type == "cuda":
        found.append(torch.cuda.default_generators[device.index])
    return found + [a for a in args if isinstance(a, torch.Generator)]


@contextlib.contextmanager
def random_state_kept(device: torch.device, args: Iterable[Any]) -> Iterator[None]:
    """Leave every generator where it is."""
    states = [(g, g.get_state()) for g in generators_of(device, args)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def thrown_into(error: BaseException) -> BaseException:
    """An error as it came out of a `with` block, for the generator that it was thrown into to raise another one from it.

    Its traceback begins with the generator's frame, which knows its caller, whose frame holds the error: a cycle that
    would keep what the other frames hold until the garbage collector comes (Python 3.12).
    """
    frames = error.__traceback__
    return error if frames is None else error.with_traceback(frames.tb_next)


def give_memory_back(error: BaseException, device: torch.device) -> None:
    """Free what a capture held that ran out of memory: values in its frames, and blocks that lie idle."""
    traceback.clear_frames(error.__traceback__)
    if device.type == "cuda":
        torch.cuda.empty_cache()
