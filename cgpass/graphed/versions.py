"""Changes in place, between a forward and its backward, to what the backward reads where the user keeps it.

Autograd notices them by version counters of saved tensors. A graph saves parameters, buffers and samples in no other
sense than by reading them where they lie, so their counters are looked at here.
"""

from array import array
from collections.abc import Mapping, Sequence

import torch

from cgpass.errors import GraphedBackwardError
from cgpass.runtime import fast


class ReadByBackward:
    """What autograd would have saved of parameters, buffers and samples."""

    def __init__(
        self, name: str, statics: Mapping[int, str], samples: Mapping[str, torch.Tensor]
    ) -> None:
        """Describe it.

        Args:
            name: Of the callable.
            statics: Names of parameters and buffers, by position.
            samples: On the memory of samples, by the arguments' names.
        """
        self.name = name
        self.positions = tuple(statics)
        self.static_names = tuple(statics.values())
        self.samples = tuple(samples.values())
        self.sample_names = tuple(samples)
        self.all_samples = tuple(range(len(samples)))

    def versions(self, statics: list[torch.Tensor]) -> "Versions | None":
        """Those of now; None if there is nothing to look at."""
        return Versions(self, statics) if self.positions or self.samples else None


class Versions:
    """Version counters after one forward. **Lifetime:** holds the parameters and buffers, as autograd would."""

    __slots__ = ("_changed", "_of_samples", "_of_statics", "_read", "_statics")

    def __init__(self, read: ReadByBackward, statics: list[torch.Tensor]) -> None:
        """Note them."""
        self._read = read
        self._statics = statics
        self._of_statics = fast.versions(statics, read.positions)
        self._of_samples: bytes | None = fast.versions(read.samples, read.all_samples)
        self._changed: tuple[str, ...] = ()
        """Samples that were changed before their values were copied away."""

    def leave_samples(self) -> None:
        """Note that samples' values were copied away: what becomes of the samples is of no more concern."""
        self._changed = self._changed_samples()
        self._of_samples = None

    def take_samples(self) -> None:
        """Note that samples have their values again."""
        self._of_samples = fast.versions(self._read.samples, self._read.all_samples)

    def _changed_samples(self) -> tuple[str, ...]:
        before, read = self._of_samples, self._read
        if before is None or self._changed:
            return self._changed
        now = fast.versions(read.samples, read.all_samples)
        return () if now == before else _differing(read.sample_names, before, now)

    def check(self) -> None:
        """Refuse a backward that would read something else than its forward did.

        Raises:
            GraphedBackwardError: Something was changed in place.
        """
        read, names = self._read, self._changed_samples()
        now = fast.versions(self._statics, read.positions)
        if now != self._of_statics:
            names += _differing(read.static_names, self._of_statics, now)
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise GraphedBackwardError(
                f"{read.name}: needed for gradient computation, but modified by an inplace operation since this "
                f"forward: {', '.join(names[:5])}{more}. Run the backward first, or change a copy."
            )


def _differing(names: Sequence[str], before: bytes, now: bytes) -> tuple[str, ...]:
    versions = zip(names, array("q", before), array("q", now), strict=True)
    return tuple(name for name, a, b in versions if a != b)
