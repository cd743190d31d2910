"""`cgpass.verify`: replays are compared with plain runs, and what is wrong is named."""

import logging
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cgpass
from cgpass.errors import OptionError, VerificationError
from tests.usage import programs
from tests.usage.programs import MLP, trained_on
from tests.usage.test_broken_drivers import frozen_rng, no_input_copy, no_write_back


class Layer(nn.Module):
    """Draws, writes a buffer, and is recomputed."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def part(self, x):
        return F.dropout(self.first(x).relu(), 0.5)

    def forward(self, x):
        x = torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=False)
        return self.norm(F.dropout(self.second(x), 0.2))


@pytest.mark.parametrize("rng", ["exact", "paired"])
def test_what_is_right_passes_and_stays_as_it_is(way, rng):
    trained = trained_on(Layer, [(4, 8)] * 12)
    expected = way.run(trained, rng=rng)
    with cgpass.verify() as verification:
        checked = way.run(trained, rng=rng)
    assert verification.checked > 12
    assert all(map(torch.equal, expected, checked))


def inference(session):
    _, call = session.compiled(MLP)
    with torch.no_grad():
        return [call(batch).clone() for batch in session.batches(4, 8, count=6)]


def dropped_out(session):
    call = session.compile(lambda x: F.dropout(x.sin(), 0.5).cos().exp())
    return [call(batch) for batch in session.batches(4, 8, count=6)]


def written(session):
    call = session.compile(lambda x, y: x.mul_(2).add_(y.sin()).cos())
    return [call(x.clone(), x) for x in session.batches(4, 8, count=6)]


@pytest.mark.parametrize(
    ("break_it", "program", "named"),
    [
        (no_input_copy, inference, r"output 0 \(gelu_1 at programs.py:\d+ in forward"),
        (frozen_rng, dropped_out, r"random numbers were not drawn as without a graph"),
        (
            no_write_back,
            written,
            r"input x, which it writes, \(float32\[4, 8\]\) differs in 32",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_wrong_is_named(monkeypatch, break_it, program, named):
    setting = programs.Setting(torch.device("cpu"), "simulated")
    break_it(monkeypatch)
    with cgpass.verify(), pytest.raises(VerificationError) as error:
        setting.run(program)
    message = str(error.value)
    assert message.startswith("cgpass.verify: inference captured_0 of ")
    assert re.search(named, message), message
    torch.compiler.reset()


@torch.library.custom_op("verification::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    """Stands for kernels that add up in any order."""
    noise.calls += 1
    return x * noise.calls


noise.calls = 0
noise.register_fake(torch.empty_like)


def test_kernels_that_do_not_repeat_themselves_are_named_once(setting, caplog):
    def program(session):
        call = session.compile(lambda x: noise(x.sin()).cos().exp() + 1)
        return [call(batch) for batch in session.batches(4, 8, count=8)]

    with cgpass.verify(), caplog.at_level(logging.WARNING, "cgpass"):
        setting.run(program)
    (message,) = [
        r.getMessage() for r in caplog.records if "test_verification.py" in r.getMessage()
    ]
    assert "runs without graphs differ among themselves" in message
    assert "test_verification.py" in message


def test_every_so_manieth_call_of_what_is_there_and_what_comes(setting):
    session = setting.session()
    _, early = session.compiled(MLP)
    with torch.no_grad():
        for _ in range(4):
            early(session.randn(4, 8))
        verification = cgpass.verify(every=3)
        for _ in range(9):
            early(session.randn(4, 8))
        assert verification.checked == 3
        _, late = session.compiled(MLP)
        for _ in range(9):
            late(session.randn(4, 8))
        assert verification.checked == 6
        verification.close()
        verification.close()
        for _ in range(9):
            early(session.randn(4, 8))
        assert verification.checked == 6


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "1"])
def test_numbers_that_are_none(every):
    with pytest.raises(OptionError, match=r"cgpass.verify: every must be a positive int"):
        cgpass.verify(every=every)
