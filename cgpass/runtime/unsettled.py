"""`Unsettled`: says when calls do nothing but warm up, since something in them differs every time."""

import logging
from typing import Final

from cgpass.runtime.owner import Limits
from cgpass.runtime.signature import Layout, ShapeKey, StaticKey, describe
from cgpass.telemetry import CallStats

log = logging.getLogger(__name__)

WARM_UPS: Final = 64
"""Warm-ups in a row, each of another shape or set of parameters, that are said something about.

Where the limits on recordings are higher, as many as these: layers that share code warm up one after the other.
"""


class Unsettled:
    """Counts what changed from warm-up to warm-up while nothing was replayed; warns once."""

    def __init__(
        self, name: str, layout: Layout, limits: Limits, stats: CallStats, level: int
    ) -> None:
        """Args: name: of the partition. level: to log at. The others: as for `RecordingTable`."""
        self._name = name
        self._layout = layout
        self._limits = limits
        self._stats = stats
        self._level = level
        self._said = False
        self._last: tuple[ShapeKey, StaticKey] | None = None
        self._replays = 0
        self._shapes = 0
        self._sets = 0

    def note_warm_up(self, shape_key: ShapeKey, static_key: StaticKey) -> None:
        """Note one warm-up; says what changed all the time if it is one too many."""
        last, self._last = self._last, (shape_key, static_key)
        if self._said or last is None:
            return
        if self._stats.replays != self._replays:
            self._replays = self._stats.replays
            self._shapes = self._sets = 0
        shape_changed = last[0] != shape_key
        self._shapes += shape_changed
        moved = self._layout.parameters_moved(last[1], static_key)
        self._sets = 0 if shape_changed else self._sets + bool(moved)
        limits = self._limits
        if self._shapes >= max(WARM_UPS, limits.max_recordings):
            self._say(
                self._shapes, self._layout.changed(last[0], shape_key), "another value or layout of"
            )
        elif self._sets >= max(WARM_UPS, limits.max_static_sets):
            self._say(self._sets, moved, "other tensors for")

    def _say(self, count: int, positions: list[int], what: str) -> None:
        self._said = True
        log.log(
            self._level,
            "%s: %d calls in a row were never recorded, since each came with %s %s. "
            "Pass a number that changes as a 0-dim tensor on the device, keep to a few sizes, and write new values into "
            "parameters and buffers (copy_) instead of replacing them.",
            self._name,
            count,
            what,
            describe(self._layout.infos[i] for i in positions),
        )
