"""What can't be captured, and errors: the guilty operator runs eagerly, the rest is captured, errors come through."""

import logging

import pytest
import torch
from torch import nn

import cgpass
from cgpass import telemetry
from cgpass.errors import CaptureError
from cgpass.runtime.capturing import is_any_capture_running
from tests.usage.programs import MLP, rows, train

COMPILERS = ["eager", "inductor"]


def is_recording(device):
    if device.type == "cuda":
        return torch.cuda.is_current_stream_capturing()
    return is_any_capture_running()


@torch.library.custom_op("failures::syncs", mutates_args=())
def syncs(x: torch.Tensor) -> torch.Tensor:
    """Reads a number on the host, where no tag tells."""
    return x * (1 + (x.sum() > 0).item())


@torch.library.custom_op("failures::fails", mutates_args=())
def fails(x: torch.Tensor) -> torch.Tensor:
    """Does something that no capture allows."""
    if is_recording(x.device):
        raise RuntimeError("fails: not while the stream is capturing")
    return x * 2


@torch.library.custom_op("failures::fails_oddly", mutates_args=())
def fails_oddly(x: torch.Tensor) -> torch.Tensor:
    """As `fails`, with an error that nobody would know for one of a capture."""
    if is_recording(x.device):
        raise ValueError("odd")
    return x * 2


@torch.library.custom_op("failures::counts", mutates_args=("count",))
def counts(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Writes an input and fails while it is captured, having written."""
    count.add_(1)
    if is_recording(x.device):
        raise RuntimeError("counts: not while the stream is capturing")
    return x + count


ERRORS = []
"""What `raises` raises, call by call."""


class UsersError(Exception):
    pass


@torch.library.custom_op("failures::raises", mutates_args=())
def raises(x: torch.Tensor) -> torch.Tensor:
    """Raises the user's error when it is due."""
    error = ERRORS.pop(0) if ERRORS else None
    if error is not None:
        raise error
    return x * 2


for op in (syncs, fails, fails_oddly, raises):
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, grad: grad * 2)
counts.register_fake(lambda x, count: torch.empty_like(x))


@pytest.fixture(autouse=True)
def no_error_due():
    ERRORS.clear()
    yield
    ERRORS.clear()


class Around(nn.Module):
    """A custom operator between two parts worth capturing."""

    def __init__(self, op, width=8):
        super().__init__()
        self.first = MLP(width)
        self.second = MLP(width)
        self.op = op

    def forward(self, x):
        return self.second(self.op(self.first(x)))


def inference(op, steps=6):
    def program(session):
        _, call = session.compiled(lambda: Around(op))
        with torch.no_grad():
            return [call(x).clone() for x in session.batches(4, 8, count=steps)]

    return program


def warned(caplog):
    ours = (r for r in caplog.records if r.name.startswith("cgpass"))
    return [r.getMessage() for r in ours if r.levelno == logging.WARNING]


def close(setting, program, **options):
    """As `Setting.compare`, for programs whose split changes what Inductor fuses."""
    before = cgpass.counters()
    ours = setting.run(program, **options)
    counters = {key: value - before[key] for key, value in cgpass.counters().items()}
    plain = setting.run(program, **options | {"driver": "none"})
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)
    return counters


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("op", [syncs, fails, fails_oddly], ids=lambda op: op._name)
def test_the_guilty_operator_runs_between_graphs(setting, caplog, op, compiler):
    with caplog.at_level(logging.WARNING, "cgpass"):
        counters = close(setting, inference(op), compiler=compiler)
    assert (counters["partitions_captured"], counters["partitions_eager"]) == (2, 1)
    assert counters["recordings"] == 2
    assert counters["replays"] >= 2 * 3
    (message,) = warned(caplog)
    assert message.startswith("inference captured_0 can't be captured as a whole")
    assert f"failures.{op._name}.default at test_failures.py:" in message
    assert "in forward: return self.second(self.op(self.first(x)))" in message
    assert "name it in unsafe_ops" in message
    ours = str(telemetry.graphs()[-2])
    assert ours.startswith("inference: 2 captured")
    assert f"captured_0.eager_1: failures.{op._name}.default at test_failures.py:" in ours


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("op", [syncs, fails], ids=lambda op: op._name)
def test_training_around_a_guilty_operator(setting, op, compiler):
    program = train(lambda: Around(op), rows(4, 8), steps=14)
    counters = close(setting, program, compiler=compiler)
    assert counters["partitions_eager"] == 1
    assert counters["replays"] > counters["warmups"]
