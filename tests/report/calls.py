"""Runners whose calls ran without a graph, or warm up again and again, for each code of a reason."""

import contextlib

import torch

from cgpass.options import Options
from cgpass.runtime.owner import Owner
from cgpass.runtime.recording import StagingError
from cgpass.runtime.simulated import SimulatedDriver
from tests.unit.runtime.runners import COPIED, POOLED, STATIC, SYMINT, call, runner

X = torch.ones(2)
LINE = "model.py:1 in forward: code"


def scaled(x, n):
    return [x * n]


def too_many_shapes():
    run = runner(scaled, COPIED, SYMINT, max_recordings=1)
    for n in (1, 1, 2, 3, 4):
        call(run, X, n)
    return run


def held():
    run = runner(
        lambda x: [x * 2, x + 1],
        COPIED,
        owner=Owner(SimulatedDriver(), Options(max_pending_calls=1)),
    )
    run.uses = [(True, False), (False, True)]
    kept = [run.run([torch.ones(2)])[0] for _ in range(6)]
    assert len(kept) == 6
    return run


def made_elsewhere():
    owner = Owner(SimulatedDriver())
    first = runner(lambda x: [x * 2], COPIED, owner=owner)
    second = runner(lambda h: [h + 1], POOLED, owner=owner)
    for _ in range(3):
        outputs, _ = first.run([torch.ones(2)])
        call(second, *outputs)
    value = torch.ones(2)
    owner.note_plain_results([value])
    call(second, value)
    return second


def bypassed(why):
    run = runner(lambda x: [x * 2], COPIED)
    run.owner.bypassed = why
    call(run, X)
    return run


def captured_by_others():
    run = runner(lambda x: [x * 2], COPIED)
    run.owner.driver.is_capturing = lambda: True
    call(run, X)
    return run


def raising():
    def fails(x):
        raise LookupError

    run = runner(fails, COPIED)
    with contextlib.suppress(LookupError):
        call(run, X)
    return run


def sharing():
    run = runner(lambda x, y: [x.add_(1), y * 2], COPIED, COPIED, check_layout=True)
    run.layout.mutated = frozenset({0})
    x = torch.ones(4)
    call(run, x[:2], x[1:3])
    return run


def put_off():
    run = runner(lambda x: [x * 2], COPIED)
    call(run, X)
    run.owner.closed = True
    call(run, X)
    return run


def failing(error):
    def fails(*args, **kwargs):
        raise error

    run = runner(lambda x: [x * 2], COPIED)
    run.owner.driver.record = fails
    for _ in range(4):
        call(run, X)
    return run


def replaced():
    run = runner(scaled, COPIED, STATIC)
    kept = [torch.ones(2) for _ in range(12)]
    for weight in kept:
        call(run, X, weight)
    return run


def of_a_new_shape_each():
    run = runner(scaled, COPIED, SYMINT)
    for n in range(12):
        call(run, X, n)
    return run


CALLS = {
    "max_recordings": (
        too_many_shapes,
        "3 of 5 calls ran without a graph: max_recordings=1 shapes are recorded, and",
    ),
    "max_pending_calls": (
        held,
        "ran without a graph: results of 1 earlier call were still referenced, as many as max_pending_calls=1 allows",
    ),
    "not_in_the_pool": (
        made_elsewhere,
        "1 of 4 calls ran without a graph: the partition that makes x0 ran without a graph",
    ),
    "transform": (
        lambda: bypassed("transform"),
        "1 of 1 call ran without a graph: they were made inside a transform",
    ),
    "no_native_code": (
        lambda: bypassed("no_native_code"),
        "1 of 1 call ran without a graph: recording needs the native code, which is missing",
    ),
    "outer_capture": (
        captured_by_others,
        "1 of 1 call ran without a graph: they ran inside a capture of your own",
    ),
    "raised": (raising, "1 of 1 call did not end: they raised an error, or are still running"),
    "shares_memory": (
        sharing,
        (
            "1 of 1 call ran without a graph: it writes inputs, and these share memory: x0 (read at model.py:0 in forward: "
            "code), x1"
        ),
    ),
    "passing": (put_off, "1 of 2 calls ran without a graph: they could not be recorded just then"),
    "capture": (
        lambda: failing(RuntimeError("operation not permitted when stream is capturing")),
        "ran without a graph: RuntimeError: operation not permitted when stream is capturing",
    ),
    "out_of_memory": (
        lambda: failing(torch.OutOfMemoryError("CUDA out of memory")),
        "3 of 4 calls ran without a graph: OutOfMemoryError: CUDA out of memory",
    ),
    "no_placeholder": (
        lambda: failing(StagingError("x0 can't be given memory of fixed address")),
        "2 of 4 calls ran without a graph: StagingError: x0 can't be given memory of fixed address",
    ),
    "new_tensor": (
        replaced,
        "is a new tensor in 11 of 12 calls: each such call warms up, or is recorded",
    ),
    "new_shape": (
        of_a_new_shape_each,
        "has another value or layout in 11 of 12 calls: each such call warms up, or is recorded",
    ),
}
"""Code: what provokes it, and the reason's detail."""
BLAMED = {
    "max_recordings": ("", LINE),
    "not_in_the_pool": ("", "model.py:0 in forward: code"),
    "new_tensor": ("x1", LINE),
    "new_shape": ("x1", LINE),
}
"""Operator and line of those that have them."""
