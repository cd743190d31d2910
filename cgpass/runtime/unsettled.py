"""`Unsettled`: says when calls do nothing but warm up, since something in them differs every time.

Note [Inputs that always move]
    A parameter or buffer that is another tensor, or lies elsewhere, in call after call is better copied: a module may
    give a buffer a new tensor whenever it runs. Other modules that share the code look the same until they run again;
    they bring all of their parameters. So inputs that are most of what is read in place have as many calls as there may
    be sets of them; fewer bytes have as many as shapes have.

    The very same tensors that lie elsewhere in every call (`p.data = new`) are no other module's, and have fewer calls.

    Addresses that come back (the allocator takes turns between a few) have recordings of their own, and each call that
    one of these is replayed for makes up for one that was not.

Note [Storages that are freed and allocated again]
    FSDP frees the gathered parameters of a layer after it ran, and allocates the same storages again before it runs next.
    A caching allocator gives a step that allocates what the last one did the same places: each of those gets a
    recording when it comes a second time (one for each new place would be thrown away). With an allocator that never
    comes back to a place (the CPU's) every call would warm up. So after some such calls for each set of parameters
    these are copied, if they are few bytes: layers that share code then share one recording, and a copy's memory. Many
    bytes are not: their copy would take the memory that freeing them saves.

    The smallest, as weights of norms, come back late or never, since the allocator has many places for them, and each
    time a whole graph would be recorded for a copy saved that costs less than its launch. They are copied soon, whatever
    is replayed in between. And once there are as many recordings as may be, all that are few bytes are copied.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from cgpass.inputs import InputKind
from cgpass.reason import CallReasons, is_size, new_value
from cgpass.runtime.limits import Limits
from cgpass.runtime.placeholders import num_bytes
from cgpass.runtime.signature import Layout, ShapeKey, StaticKey, describe, describe_moved
from cgpass.runtime.writes import shares_memory
from cgpass.telemetry import CallStats

log = logging.getLogger(__name__)

WARM_UPS: Final = 64
"""Warm-ups in a row, each of another shape or set of parameters, that are said something about.

Where the limits on recordings are higher, as many as these: layers that share code warm up one after the other.
"""
PLACES: Final = 6
"""Calls in a row, for each set of parameters, whose storages were freed and lie where they never did."""
SMALL: Final = 64 << 20
"""Bytes of a call's parameters that may be copied then."""
SOON: Final = 2
"""As `PLACES`, for the smallest parameters."""
TINY: Final = 64 << 10
"""Bytes of one of those; there may be sixteen times as many in all."""
_HOMES_KEPT: Final = 1024
_NAMED: Final = 3
"""Sizes or numbers that a message names."""
_KEEP_TENSORS: Final = (
    "Write new values into parameters and buffers (copy_) instead of replacing them"
)


class _Tally:
    """Calls in which parameters moved, and how often each did."""

    def __init__(self) -> None:
        self.calls = 0
        self.moves: Counter[int] = Counter()

    def add(self, moved: Sequence[int]) -> None:
        self.calls += 1
        self.moves.update(moved)

    def take_back(self, calls: int) -> None:
        """Count so many calls less, and begin anew where none are left."""
        self.calls = max(0, self.calls - calls)
        if not self.calls:
            self.moves.clear()

    def moving(self) -> list[int]:
        """Those that moved in most of the calls."""
        return sorted(i for i, count in self.moves.items() if 2 * count > self.calls)


class Unsettled:
    """Counts what changed from one call without a recording to the next; warns once."""

    def __init__(
        self,
        name: str,
        layout: Layout,
        limits: Limits,
        stats: CallStats,
        level: int,
        reasons: CallReasons | None = None,
    ) -> None:
        """Args: name: of the partition. level: to log at. The others: as for `RecordingTable`."""
        self._reasons = CallReasons() if reasons is None else reasons
        self._before: tuple[ShapeKey, StaticKey] | None = None
        """Of the last call noted."""
        self._name = name
        self._layout = layout
        self._limits = limits
        self._stats = stats
        self._level = level
        self._said = False
        self._last: tuple[ShapeKey, StaticKey] | None = None
        self._reuses = 0
        self._shapes = 0
        self._sets = 0
        self._homes: dict[tuple[int, ...], StaticKey] = {}
        """Where the storages of each set of parameters lay last."""
        self._freed = _Tally()
        """Of storages that were freed and lay elsewhere; a replay makes up for one call."""
        self._ever_freed = _Tally()
        """Of the same, whatever was replayed."""
        self._others = False
        """Whether some of these calls came with other tensors, not with the same ones elsewhere."""
        self._moves: Counter[int] = Counter()
        """Of each parameter, among the calls that count in `_sets`."""

    def note(
        self,
        shape_key: ShapeKey,
        static_key: StaticKey,
        args: Sequence[Any],
        *,
        same_objects: bool = False,
    ) -> list[int]:
        """Note one call whose parameters were not seen there before; says what changed all the time if it is one too many.

        Args:
            shape_key: The call's.
            static_key: The call's.
            args: Its inputs.
            same_objects: Whether its parameters are the very tensors of the last call, and lie elsewhere.

        Returns:
            Parameters that are better copied. See Note [Inputs that always move].
        """
        self._note_changed(shape_key, static_key)
        freed = self._note_freed(static_key, args)
        if freed:
            return freed
        last, self._last = self._last, (shape_key, static_key)
        if self._said or last is None:
            return []
        self._note_reuses()
        shape_changed = last[0] != shape_key
        self._shapes += shape_changed
        moved = [] if shape_changed else self._layout.parameters_moved(last[1], static_key)
        self._sets = 0 if shape_changed else self._sets + bool(moved)
        if not self._sets:
            self._moves.clear()
            self._others = False
        self._others |= bool(moved) and not same_objects
        self._moves.update(moved)
        limits = self._limits
        if self._shapes >= max(WARM_UPS, limits.max_recordings):
            changed = self._layout.changed(last[0], shape_key)
            self._say_never_recorded(self._shapes, *self._what_changed(changed, args))
        elif self._sets >= WARM_UPS:
            return self._better_copied(args)
        return []

    def _note_changed(self, shape_key: ShapeKey, static_key: StaticKey) -> None:
        """Note what is new in a call, for reports."""
        before, self._before = self._before, (shape_key, static_key)
        if before is None:
            return
        if before[0] != shape_key:
            code, changed = "new_shape", self._layout.changed(before[0], shape_key)
        else:
            code, changed = "new_tensor", self._layout.parameters_moved(before[1], static_key)
        infos = self._layout.infos
        self._reasons.note_changed(code, [(infos[i].name, infos[i].line) for i in changed])

    def _note_reuses(self) -> None:
        """Note replays, but for those that recordings begin with."""
        reuses = self._stats.replays - self._stats.recordings
        if reuses != self._reuses:
            self._shapes = 0
            self._sets = max(0, self._sets - (reuses - self._reuses))
            self._freed.take_back(reuses - self._reuses)
            self._reuses = reuses

    def freed(self, static_key: StaticKey, args: Sequence[Any]) -> list[int]:
        """Parameters whose storages lie elsewhere than they did when this set of them was seen last."""
        home = self._homes.get(self._storages(args)) if self._homes else None
        return [] if home is None else self._layout.parameters_moved(home, static_key)

    def _storages(self, args: Sequence[Any]) -> tuple[int, ...]:
        return tuple(args[i].untyped_storage()._cdata for i in self._layout.parameters)

    def _note_freed(self, static_key: StaticKey, args: Sequence[Any]) -> list[int]:
        """See Note [Storages that are freed and allocated again]; returns parameters that are better copied."""
        moved = self.freed(static_key, args)
        if len(self._homes) >= _HOMES_KEPT:
            self._homes.clear()
        self._homes[self._storages(args)] = static_key
        if self._said or not moved:
            return []
        self._note_reuses()
        self._freed.add(moved)
        self._ever_freed.add(moved)
        sets = len(self._homes)
        if self._ever_freed.calls >= SOON * sets:
            tiny = self._tiny(args)
            if tiny and self._why_not_copied(tiny, args) is None:
                return self._copied(tiny, args, logging.INFO)
        moving = self._freed.moving()
        if self._freed.calls < PLACES * sets:
            return []
        self._said = True
        why = self._why_not_copied(moving, args)
        if why is None:
            return self._copied(moving, args, self._level)
        log.log(
            self._level,
            "%s %s: such calls run without a graph. What is gathered in the compiled function itself is replayed: see "
            "simple_fsdp in examples/train_distributed.py.",
            self._told_freed(moving, args),
            why,
        )
        return []

    def note_full(self, static_key: StaticKey, args: Sequence[Any]) -> list[int]:
        """Note a call at a place for which there is no recording any more; returns parameters that are better copied."""
        moved = self.freed(static_key, args)
        if self._said or not moved or self._why_not_copied(moved, args) is not None:
            return []
        self._ever_freed.add(moved)
        self._said = True
        return self._copied(moved, args, self._level)

    def _tiny(self, args: Sequence[Any]) -> list[int]:
        tiny = [i for i in self._ever_freed.moving() if num_bytes(args[i]) <= TINY]
        return tiny if sum(num_bytes(args[i]) for i in tiny) <= 16 * TINY else []

    def _why_not_copied(self, moving: Sequence[int], args: Sequence[Any]) -> str | None:
        size = sum(num_bytes(args[i]) for i in moving)
        if size > SMALL:
            return f"They have {size} bytes, too many to be copied"
        if any(self._layout.infos[i].whole_storage for i in moving):
            return "They can't be copied, since more of their storages is read than they are"
        if shares_memory(args, self._layout.mutated):
            return "They can't be copied, since an input that is written shares memory with another"
        return None

    def _copied(self, moving: list[int], args: Sequence[Any], level: int) -> list[int]:
        """Say that parameters whose storages are freed are copied."""
        size = sum(num_bytes(args[i]) for i in moving)
        told = self._told_freed(moving, args)
        log.log(level, "%s They are copied from now on: %d bytes a call.", told, size)
        return moving

    def _told_freed(self, moving: Sequence[int], args: Sequence[Any]) -> str:
        moves = self._ever_freed.moves
        names = describe_moved(self._layout.infos, args, {i: moves[i] for i in moving})
        return (
            f"{self._name}: the storages of {names} are freed and allocated again between calls (as FSDP does), and lay "
            f"elsewhere in {self._ever_freed.calls} calls."
        )

    def _better_copied(self, args: Sequence[Any]) -> list[int]:
        moving = [i for i, count in self._moves.items() if 2 * count > self._sets]
        moved_bytes = sum(num_bytes(args[i]) for i in moving)
        in_place = sum(num_bytes(args[i]) for i in self._layout.parameters)
        many = max(WARM_UPS, self._limits.max_static_sets) if self._others else WARM_UPS
        if 2 * moved_bytes > in_place and self._sets < many:
            return []
        infos = self._layout.infos
        whole = any(infos[i].whole_storage for i in moving)
        if not moving or whole or shares_memory(args, self._layout.mutated):
            if self._sets >= many:
                moved = describe(infos[i] for i in sorted(self._moves))
                why = f"each came with other tensors for {moved}"
                self._say_never_recorded(self._sets, why, _KEEP_TENSORS)
            return []
        self._said = True
        log.log(
            self._level,
            "%s: %d calls came with other tensors for %s, or with these elsewhere: they are copied from now on. Write "
            "new values into parameters and buffers (copy_) instead of replacing them%s.",
            self._name,
            max(self._moves[i] for i in moving),
            describe_moved(infos, args, {i: self._moves[i] for i in moving}),
            "; if so many modules share the code, raise max_static_sets"
            * (self._others and self._sets >= many),
        )
        return sorted(moving)

    def _what_changed(self, positions: Sequence[int], args: Sequence[Any]) -> tuple[str, str]:
        """Why calls whose shapes differ have no recording, and what to do: of sizes alone, where some are among them."""
        infos = self._layout.infos
        numbers = [i for i in positions if infos[i].kind is InputKind.SYMINT]
        sizes = [i for i in numbers if is_size(infos[i].name)]
        told = sizes or numbers
        if not told:
            what = describe(infos[i] for i in positions)
            if positions and all(i in self._layout.objects for i in positions):
                return f"each came with another object for {what}", "Pass the same one in each call"
            return f"each came with another size or layout of {what}", "Keep to a few sizes: pad it"
        texts, fixes = zip(*(new_value(infos[i].name) for i in told), strict=True)
        lines = (f", read at {infos[i].line}" if infos[i].line else "" for i in told)
        named = [
            f"{text} ({args[i]} in this call{line})"
            for text, i, line in zip(texts, told, lines, strict=True)
        ]
        verb = "takes" if len(named) == 1 else "take"
        fix = "; ".join(dict.fromkeys(fixes))
        return f"{' and '.join(named[:_NAMED])} {verb} new values all the time", fix[
            0
        ].upper() + fix[1:]

    def _say_never_recorded(self, count: int, why: str, fix: str) -> None:
        self._said = True
        log.log(
            self._level,
            "%s: %d calls in a row were never recorded, since %s. %s.",
            self._name,
            count,
            why,
            fix,
        )
