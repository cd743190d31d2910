"""Helpers of the tests of the runtime: runners of functions on the simulated driver."""

import torch

from cgpass.compile.facts.input_info import InputInfo, InputKind
from cgpass.options import Options
from cgpass.runtime.owner import Owner
from cgpass.runtime.partition import PartitionRunner
from cgpass.runtime.simulated import SimulatedDriver

COPIED, STATIC, POOLED = InputKind.COPIED, InputKind.STATIC, InputKind.POOLED
SYMINT, OPAQUE = InputKind.SYMINT, InputKind.OPAQUE


def infos(*kinds, mutated=()):
    return tuple(
        InputInfo(f"x{i}", kind, f"model.py:{i} in forward: code", i in mutated)
        for i, kind in enumerate(kinds)
    )


def partition(fn, infos, owner, name="part", on_failure=None, **settings):
    """A runner; settings are options, or what it takes besides."""
    own = {k: settings.pop(k) for k in ("opaque", "is_backward", "check_layout") if k in settings}
    options = Options(**{"progress": "off", **settings})
    owner = owner or Owner(SimulatedDriver(), options)
    return PartitionRunner(fn, infos, owner, options, name=name, on_failure=on_failure, **own)


def runner(fn, *kinds, owner=None, mutated=(), on_failure=None, **settings):
    """A runner of `fn(*inputs)`; runners given one `owner` share its pool."""
    return partition(
        lambda args: fn(*args),
        infos(*kinds, mutated=mutated),
        owner,
        "forward captured_0",
        on_failure,
        **settings,
    )


def call(run, *args):
    """Outputs of one call as Python lists; holds nothing afterwards."""
    outputs, _ = run.run(list(args))
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in outputs]


def counts(run):
    """Warm-ups, recordings, replays, plain calls."""
    stats = run.stats
    return (stats.warmups, stats.recordings, stats.replays, stats.plain_calls)
