"""Handles captures that fail: asks why, restores state, gives memory back."""

import contextlib
import traceback
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from cgpass.runtime.driver import GraphDriver


class OnFailure(Protocol):
    """Finds the operator of a partition that can't be captured, so that the rest is captured."""

    def __call__(self, args: list[Any], error: Exception) -> tuple[str, bool]:
        """Explain why the capture of a partition raised `error`; returns if the function's next call compiles it again.

        Leaves a call's inputs `args` as they are.

        Raises:
            Exception: `error` itself, where it is the user's own.
            CaptureError: If `on_skip` is "raise".
        """
        ...

    def forget(self) -> None:
        """Take back that the partition runs without a graph: it is captured again."""
        ...


def random_states(
    device: torch.device, args: Iterable[Any]
) -> list[tuple[torch.Generator, torch.Tensor]]:
    """Return every generator that work on `device` with inputs `args` may draw from, and where it is."""
    generators = [torch.default_generator, *(a for a in args if isinstance(a, torch.Generator))]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    return [(g, g.get_state()) for g in generators]


@contextlib.contextmanager
def random_state_kept(device: torch.device, args: Iterable[Any]) -> Iterator[None]:
    """Leave every generator where it is that work on `device` with inputs `args` may draw from."""
    with contextlib.ExitStack() as stack:
        for generator, state in 2 * random_states(device, args):  # an exception may end one
            stack.callback(generator.set_state, state)
        yield


def give_memory_back(error: BaseException, driver: GraphDriver) -> None:
    """Free what a capture held that ran out of memory: values in its frames, and what pools have that nobody uses."""
    traceback.clear_frames(error.__traceback__)
    driver.give_back()
