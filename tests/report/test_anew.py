"""What `cgpass.explain` compiles itself is compiled anew each time, and forgotten."""

import gc

import pytest
import torch
from torch import nn

import cgpass
from cgpass.report import api
from tests.usage.programs import counted

X = torch.linspace(-1, 1, 32).view(4, 8)


pytestmark = pytest.mark.usefixtures("simulated")


def model():
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())


def all_captured(report):
    return report.work[0] == report.work[1] > 0


@pytest.mark.parametrize("what", [model(), lambda x: x.sin().cos().exp().tanh()])
def test_options_are_those_of_the_call(what):
    assert all_captured(cgpass.explain(what, X))
    with cgpass.set_defaults(driver="none"):
        report = cgpass.explain(what, X)
    assert report.work[0] == 0
    assert [function.driver for function in report.functions] == [None]
    assert all_captured(cgpass.explain(what, X))


def test_a_second_explain_keeps_no_recordings_either():
    layers = model()
    for _ in range(3):
        cgpass.explain(layers, X)
        gc.collect()
        living = [live for *_, live in api.live_runs()]
        assert not [live for live in living if live.owner and live.owner.has_recordings()]


def test_what_was_compiled_before_stays_compiled():
    layers = model()
    compiled = torch.compile(layers, backend="cgpass")
    for _ in range(4):
        compiled(X).sum().backward()
    cgpass.explain(layers, X)
    with counted() as counters:
        compiled(X).sum().backward()
    assert (counters["graphs"], counters["recordings"], counters["replays"]) == (0, 0, 2)


def test_it_does_not_count_towards_the_recompile_limit():
    def fn(x):
        return x.sin().cos().exp().tanh()

    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(4):
            assert all_captured(cgpass.explain(fn, X, training=False))
        compiled = torch.compile(fn, backend="cgpass")
        with counted() as counters:
            compiled(X)
    assert counters["graphs"] == 1


def test_parameters_can_be_swapped_afterwards():
    layers = model()
    cgpass.explain(layers, X, training=False)
    weight = layers[0].weight
    torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros_like(weight)))
    assert not weight.any()


def test_messages_name_the_backend():
    def fn(x):
        return (torch.histc(x, 8).max() * x).sin().cos().exp().tanh()

    with (
        cgpass.set_defaults(on_skip="raise"),
        pytest.raises(Exception, match=r"^backend='cgpass' "),
    ):
        cgpass.explain(fn, X)
