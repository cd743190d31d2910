"""Losses of arms compared bitwise with those of the same kernels without graphs, and with default's."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from benchlib import arms, measure

if TYPE_CHECKING:
    from benchlib.models import Workload

Losses = list[float]


class Reference:
    """Losses of a model without graphs, and of default, computed once for all arms that are compared with them.

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
        return self._twice(arms.REFERENCE)

    @functools.cached_property
    def deterministic(self) -> tuple[Losses, Losses]:
        """The same under deterministic algorithms."""
        with measure.deterministic():
            return self._twice(arms.REFERENCE)

    @functools.cached_property
    def default(self) -> tuple[Losses, Losses]:
        """Two more runs of default."""
        return self._twice("default")

    @functools.cached_property
    def deterministic_default(self) -> Losses:
        """A run of default under deterministic algorithms."""
        return self._run_deterministic("default")

    def check(self, name: str, measured: Losses, default: Losses | None = None) -> dict[str, Any]:
        """Compares an arm's losses.

        If the plain runs themselves differ, or the arm differs from them, the arm runs again under deterministic
        algorithms; that comparison then decides. So it is with default where default's own runs differ.

        Args:
            name: Of the arm.
            measured: Its losses.
            default: Default's, where the arm has to have them.
        """
        found = self._against_plain(name, measured)
        return found if default is None else found | self._against_default(name, found, default)

    def _against_plain(self, name: str, measured: Losses) -> dict[str, Any]:
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

    def _against_default(self, name: str, found: dict[str, Any], theirs: Losses) -> dict[str, Any]:
        """What `check` adds: "default", and the losses under deterministic algorithms where they are needed."""
        again: dict[str, Any] = {}
        if not found["deterministic"]:
            equal = found["losses"] == theirs
            if equal or self.default == (theirs, theirs):
                return {"default": {"losses": theirs, "equal": equal, "deterministic": False}}
            again = {"deterministic_losses": self._run_deterministic(name)}
        ours, theirs = (found | again)["deterministic_losses"], self.deterministic_default
        default = {"losses": theirs, "equal": ours == theirs, "deterministic": True}
        return again | {"default": default}

    def _twice(self, name: str) -> tuple[Losses, Losses]:
        found = measure.losses_twice(self.workload, self.steps, name)
        measure.release(self.workload.device)
        return found

    def _run_deterministic(self, name: str) -> Losses:
        with measure.deterministic():
            arm = arms.make(name, self.workload)
            arm.prepare()
            found = measure.losses(arm, self.steps)
            del arm
        measure.release(self.workload.device)
        return found
