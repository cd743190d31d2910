"""What the tests of the runtime share: runners of plain functions on the simulated driver."""

import torch

from cgpass.inputs import InputInfo, InputKind
from cgpass.runtime.owner import Owner
from cgpass.runtime.runner import PartitionRunner
from cgpass.runtime.settings import RunnerSettings
from cgpass.runtime.simulated import SimulatedDriver

COPIED, STATIC, POOLED = InputKind.COPIED, InputKind.STATIC, InputKind.POOLED
SYMINT, OPAQUE = InputKind.SYMINT, InputKind.OPAQUE


def infos(*kinds, mutated=()):
    return tuple(
        InputInfo(f"x{i}", kind, f"model.py:{i} in forward: code", i in mutated)
        for i, kind in enumerate(kinds)
    )


def runner(fn, *kinds, owner=None, mutated=(), on_failure=None, **settings):
    """A runner of `fn(*inputs)`; runners given one `owner` share its pool."""
    return PartitionRunner(
        lambda args: fn(*args),
        infos(*kinds, mutated=mutated),
        owner or Owner(SimulatedDriver()),
        RunnerSettings(**settings),
        name="forward captured_0",
        on_failure=on_failure,
    )


def call(run, *args):
    """Outputs of one call as Python lists; holds nothing afterwards."""
    outputs, _ = run.run(list(args))
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in outputs]


def counts(run):
    """Warm-ups, recordings, replays, plain calls."""
    stats = run.stats
    return (stats.warmups, stats.recordings, stats.replays, stats.plain_calls)
