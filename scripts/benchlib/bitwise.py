"""Losses of arms compared bitwise with those of the same kernels without graphs."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from benchlib import arms, measure

if TYPE_CHECKING:
    from benchlib.models import Workload

Losses = list[float]


class Reference:
    """Losses of a model without graphs, computed once for all arms that are compared with them.

    Attributes:
        workload: The model with its batches.
        steps: Steps whose losses are compared.
    """

    def __init__(self, workload: Workload, steps: int) -> None:
        self.workload = workload
        self.steps = steps

    @functools.cached_property
    def plain(self) -> tuple[Losses, Losses]:
        """Of a run, and of its control: the same once more."""
        found = measure.reference_losses(self.workload, self.steps)
        measure.release(self.workload.device)
        return found

    @functools.cached_property
    def deterministic(self) -> tuple[Losses, Losses]:
        """The same under deterministic algorithms."""
        with measure.deterministic():
            found = measure.reference_losses(self.workload, self.steps)
        measure.release(self.workload.device)
        return found

    def check(self, name: str, measured: Losses) -> dict[str, Any]:
        """Compares an arm's losses.

        If the plain runs themselves differ, or the arm differs from them, the arm runs again under deterministic
        algorithms; that comparison then decides.
        """
        plain, control = self.plain
        result: dict[str, Any] = {
            "steps": self.steps,
            "losses": measured,
            "plain": plain,
            "plain_repeatable": plain == control,
            "equal": plain == measured,
            "deterministic": False,
        }
        if result["equal"] and result["plain_repeatable"]:
            return result
        plain, control = self.deterministic
        again = self._run_deterministic(name)
        return result | {
            "deterministic": True,
            "deterministic_losses": again,
            "deterministic_plain": plain,
            "plain_repeatable": plain == control,
            "equal": plain == again,
        }

    def _run_deterministic(self, name: str) -> Losses:
        with measure.deterministic():
            arm = arms.make(name, self.workload)
            arm.prepare()
            found = measure.losses(arm, self.steps)
            del arm
        measure.release(self.workload.device)
        return found
