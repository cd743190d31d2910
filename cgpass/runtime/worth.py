"""`Worth`: whether a captured partition is any faster than it is plainly.

Note [What a capture is worth]
    A replay saves the host most of what a plain call takes it, and costs the device copies of the inputs that move. What
    the host saves is known once the partition is recorded: while it was, nothing ran but the host. Where copies take
    clearly less, it is captured, and where they take clearly more, it is not. What other partitions read of its outputs
    counts against leaving it plain: they would have to copy that. Where next to nothing is copied there is nothing to
    weigh: launching one kernel from Python takes longer than launching a graph of it and filling its placeholder. How many
    nodes a graph has is not counted: launching their kernels plainly is what was timed, and launching a graph takes the
    host much the same time for a hundred layers as for one (docs/performance.md, "replay").

    Where it is close (always with `capture_policy="measured"`) a few calls decide, each with the device waited for:
    replays, and plain calls of the same shape, made for this alone. A recording may be replaced before it was replayed
    often enough: inputs moved, memory was laid out anew, results are held. So the replays of all recordings of the
    partition count, but for the first of each, on which the device is given the graph; only where recordings are
    hardly ever replayed twice do first ones count, too. Each replay is compared with plain calls of its own shape,
    which are made once a shape that comes again, on copies of the inputs that the partition writes.

    Either is decided once, by the shapes that come first. A partition that is left plain stays so until
    `cgpass.reset()`. One that communicates, or may do more than compute and write inputs, is never judged: see
    `graph.values.is_repeatable`.
"""

import functools
import logging
import statistics
import time
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any, Final, Protocol

import torch

from cgpass import _torch
from cgpass.runtime.bits import copy_all
from cgpass.runtime.driver import BoxedCallable
from cgpass.runtime.failures import random_state_kept
from cgpass.runtime.owner import Owner
from cgpass.runtime.recording import Recording
from cgpass.runtime.signature import Layout, ShapeKey
from cgpass.telemetry import CallStats

log = logging.getLogger(__name__)

_LAUNCH_US: Final = 15.0
"""Host time of a replay: launching the graph, and filling placeholders."""
_CLEARLY: Final = 2.0
"""How many times as much is clearly more."""
_PLAIN_CALLS: Final = 5
"""Plain calls that are timed for each shape; the first does not count."""
_REPLAYS: Final = 5
"""Replays that are compared with plain calls; the one in the middle decides."""
_FIRST_REPLAYS: Final = 128
"""Replays, each its recording's first, that are not compared."""


class Candidate(Protocol):
    """A partition that is recorded."""

    name: str
    """For messages."""
    fn: BoxedCallable
    """What it runs."""
    layout: Layout
    """Of its inputs. Replaced when more of them are copied."""
    owner: Owner
    stats: CallStats
    """Told of trials."""

    def leave_plain(self, why: str) -> None:
        """Run plainly from now on, for a reason."""
        ...


class Worth(Protocol):
    """Judges the recordings of one partition."""

    @property
    def found(self) -> str | None:
        """What was measured of the partition, once that decided."""
        ...

    def is_given(self, part: Candidate, recording: Recording, args: Sequence[Any]) -> bool:
        """Whether to keep a recording that was just made and not replayed yet; else the partition runs plainly.

        Args:
            part: The partition.
            recording: Of a call's signature.
            args: That call's inputs.
        """
        ...


class Always:
    """`capture_policy="always"`."""

    found: Final = None

    def is_given(self, part: Candidate, recording: Recording, args: Sequence[Any]) -> bool:
        """True."""
        del part, recording, args
        return True


class Judge:
    """`capture_policy="auto"` and `"measured"`. See Note [What a capture is worth]."""

    def __init__(self, *, measures: bool) -> None:
        """Args: measures: whether to time where copies alone would decide, too."""
        self._measures = measures
        self._trial = Trial()

    @property
    def found(self) -> str | None:
        """See `Worth`."""
        return self._trial.found

    def is_given(self, part: Candidate, recording: Recording, args: Sequence[Any]) -> bool:
        """See `Worth`. Decides with the first recording; where that is close, replays of it and of later ones do."""
        trial = self._trial
        if trial.is_over:
            return True
        device = part.owner.driver.device
        bytes_per_us = _torch.memory_bandwidth(device) / 2e6  # read and written
        cost = recording.copied_bytes / bytes_per_us
        handed_on = recording.bytes_read() / bytes_per_us
        saved = max(recording.run_us - _LAUNCH_US, 0.0)
        gain = saved + handed_on
        is_close = gain < _CLEARLY * cost and cost < _CLEARLY * gain
        trial.is_wanted |= self._measures or is_close
        if trial.is_wanted:
            trial.time(part, recording, args, handed_on)
            return True
        trial.is_over = True
        if cost < max(_CLEARLY * gain, _LAUNCH_US):  # nobody notices less
            return True
        part.leave_plain(
            f"copying {recording.copied_bytes >> 20} MiB of inputs into its graph would take the device about "
            f"{cost:.0f} us a call, and the graph would save the host {saved:.0f} us"
        )
        return False


class Trial:
    """Times replays of a partition until it is decided, whichever recording makes them."""

    def __init__(self) -> None:
        """Nothing was timed yet."""
        self.is_wanted = False
        """Whether replays are to decide."""
        self.is_over = False
        """Whether it is decided; nothing is timed any more."""
        self.found: str | None = None
        """What decided."""
        self._plain_us: dict[ShapeKey, float] = {}
        self._times: list[tuple[float, float]] = []
        """Of each replay what it took, and what a plain call of its shape takes."""
        self._num_first = 0

    def time(
        self, part: Candidate, recording: Recording, args: Sequence[Any], others_us: float
    ) -> None:
        """Have a recording's replays timed until it is decided.

        Args:
            part: The partition.
            recording: Not replayed yet.
            args: Inputs of the call that was recorded.
            others_us: What others pay for a plain call.
        """
        shape = part.layout.shape_key(args)
        recording.run = _Timed(self, part, recording, shape, others_us)  # type: ignore[method-assign]

    def counts(self, *, is_first: bool) -> bool:
        """Whether a replay is compared; `is_first` says that it is its recording's first."""
        self._num_first += is_first
        return not is_first or self._num_first > _FIRST_REPLAYS

    def plain_us(
        self,
        part: Candidate,
        shape: ShapeKey,
        args: Sequence[Any],
        written: Container[int],
        others_us: float,
    ) -> float:
        """What a plain call of a shape takes, and what others pay for it."""
        if shape not in self._plain_us:
            took = _time_plainly(part.fn, args, written, part.owner.driver.device)
            self._plain_us[shape] = took + others_us
        return self._plain_us[shape]

    def add(self, part: Candidate, replay_us: float, plain_us: float) -> None:
        """Compare a replay with a plain call of its shape."""
        self._times.append((replay_us, plain_us))
        if len(self._times) == _REPLAYS:
            self.is_over = True
            self._decide(part)

    def _decide(self, part: Candidate) -> None:
        times = sorted(self._times, key=lambda found: found[0] - found[1])
        replay_us, plain_us = times[len(times) // 2]
        self.found = (
            f"a replay takes {replay_us:.0f} us and a plain call {plain_us:.0f} us, as measured in "
            "its first calls"
        )
        part.stats.trials += 1
        if replay_us > plain_us:
            part.leave_plain(self.found)
        else:
            log.info("%s stays captured: %s", part.name, self.found)


class _Timed:
    """Takes the place of a recording's `run` until it is decided."""

    def __init__(
        self,
        trial: Trial,
        part: Candidate,
        recording: Recording,
        shape: ShapeKey,
        others_us: float,
    ) -> None:
        self._trial = trial
        self._part = weakref.ref(part)  # kept alive, as the recording, by whoever replays it
        self._recording = weakref.ref(recording)
        self._shape = shape
        self._others_us = others_us
        self._is_first = True

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        part, recording, trial = self._part(), self._recording(), self._trial
        assert part is not None
        assert recording is not None
        is_first, self._is_first = self._is_first, False
        if not trial.is_over and trial.counts(is_first=is_first):
            return self._timed(part, recording, args)
        if trial.is_over:
            del recording.run  # the class's own again
        return Recording.run(recording, args)

    def _timed(self, part: Candidate, recording: Recording, args: Sequence[Any]) -> list[Any]:
        trial, plain_us = self._trial, 0.0
        try:
            plain_us = trial.plain_us(part, self._shape, args, recording.written, self._others_us)
        except RuntimeError as error:  # a replay needs none of what failed: workspace, memory
            trial.is_over = True
            why = str(error).partition("\n")[0]
            log.info("%s stays captured, it can't be timed without a graph: %s", part.name, why)
        if trial.is_over:
            return self(args)
        device = part.owner.driver.device
        outputs, replay_us = _timed(lambda: Recording.run(recording, args), device)
        trial.add(part, replay_us, plain_us)
        return outputs


def _time_plainly(
    fn: BoxedCallable, args: Sequence[Any], written: Container[int], device: torch.device
) -> float:
    times = []
    with random_state_kept(device, args):
        for _ in range(_PLAIN_CALLS):
            given = [_copy(value) if i in written else value for i, value in enumerate(args)]
            times.append(_timed(functools.partial(fn, given), device)[1])
    return statistics.median(times[1:])


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    memory = torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    copy_all([memory], [tensor])
    return memory


def _timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """What a call returns, and microseconds until the device is done with it."""
    _wait(device)
    start = time.perf_counter()
    result = call()
    _wait(device)
    return result, (time.perf_counter() - start) * 1e6


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def worth(policy: str) -> Worth:
    """What judges by a policy, as `cgpass.Options.capture_policy` has it."""
    return Always() if policy == "always" else Judge(measures=policy == "measured")
