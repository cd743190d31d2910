"""What a runner does around captures that fail: warm-ups under the sync check, state put back, memory given back."""

import contextlib
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from cgpass.runtime.driver import BoxedCallable
from cgpass.runtime.syncs import is_sync_error, sync_check

_MAX_BACKUP_BYTES = 1 << 28
"""Inputs that are written take a copy for the sync check; above this size the check is left out."""


@dataclass(frozen=True)
class Outcome:
    """What came of splitting a partition whose capture failed."""

    replacement: BoxedCallable | None = None
    """Runs the partition from now on. **Lifetime:** outputs that the user gets are the caller's own."""
    why: str | None = None
    """Why none of it can be captured, if that is known."""


class Resplit(Protocol):
    """Finds what in a partition can't be captured, and captures the rest."""

    @property
    def checks_warm_ups(self) -> bool:
        """Whether to look out for what waits for the device before anything is captured."""
        ...

    def __call__(self, args: list[Any], error: Exception | None) -> Outcome:
        """Split a partition.

        Args:
            args: Inputs of a call; left as they are.
            error: What its capture raised; None if the sync check found something in a warm-up.

        Raises:
            Exception: `error` itself, where it is the user's own.
            CaptureError: If `on_skip` is "raise".
        """
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


def run_checked(
    fn: BoxedCallable, args: list[Any], *, mutated: Sequence[int], device: torch.device
) -> tuple[Sequence[Any], bool]:
    """Run `fn(args)` under the sync check.

    Returns:
        The outputs, and whether something waited for the device. That may have been a first call's initialisation.
    """
    written = [a for i in mutated if isinstance(a := args[i], torch.Tensor)]
    if sum(t.numel() * t.element_size() for t in written) > _MAX_BACKUP_BYTES:
        return fn(args), False
    backups = [(t, t.detach().clone()) for t in written]
    states = [(g, g.get_state()) for g in generators_of(device, args)]
    try:
        with sync_check(device):
            return fn(list(args)), False
    except RuntimeError as error:
        if not is_sync_error(error):
            raise
    with torch.no_grad():
        for tensor, backup in backups:
            tensor.copy_(backup)
    for generator, state in states:
        generator.set_state(state)
    return fn(args), True


def give_memory_back(error: BaseException, device: torch.device) -> None:
    """Free what a capture held that ran out of memory: values in its frames, and blocks that lie idle."""
    traceback.clear_frames(error.__traceback__)
    if device.type == "cuda":
        torch.cuda.empty_cache()
