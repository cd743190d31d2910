"""Warm-ups count by the options that a function was compiled with, whatever holds where it is looked at."""

import contextlib

import pytest
import torch

import cgpass
from cgpass.reason import CallReasons
from cgpass.report import check

X = torch.ones(4)


pytestmark = pytest.mark.usefixtures("simulated", "counted_alone")


def chain(x):
    return x.sin().cos().exp().tanh()


@pytest.fixture(params=["options", "set_defaults"])
def compiled(request):
    """What is called so often, and warms up in the first so many calls."""

    def make(warm_ups, calls):
        given = {"num_warmup_calls": warm_ups}
        around, options = contextlib.nullcontext(), given
        if request.param == "set_defaults":
            around, options = cgpass.set_defaults(**given), {}
        fn = torch.compile(chain, backend="cgpass", options=options)
        with around:
            for _ in range(calls):
                fn(X)
        return fn

    return make


def test_many_warm_ups_before_one_recording_do_not_count(compiled):
    compiled(6, 20)
    passes, said = check.verdict(check.work_done(), 0.95)
    assert passes
    assert said.startswith("cgpass check: passed: 100% of the 56 operators")
    assert "hardly a call was like" not in said
    assert "warm up" not in cgpass.summary()


def test_explain_calls_until_the_last_warm_up_is_over(compiled):
    report = cgpass.explain(compiled(11, 2), X, training=False)
    assert report.settled
    assert report.work == (4, 4)


def test_another_functions_warm_ups_do_not_count(compiled):
    compiled(50, 51)
    torch.compiler.reset()
    report = cgpass.explain(lambda x: x.sin().cos().exp().tanh(), X, training=False)
    assert report.settled
    assert report.graphs[0].calls < 20


@pytest.mark.parametrize(("needed", "codes"), [(1, ["new_shape"]), (6, [])])
def test_what_is_new_in_needed_warm_ups_is_no_reason(needed, codes):
    reasons = CallReasons()
    for _ in range(6):
        reasons.note_changed("new_shape", [("x", None)])
    counts = {"calls": 20, "plain_calls": 0, "warmups": 6, "recordings": 1}
    told = reasons.told(**counts, num_warmup_calls=needed)
    assert [each.code for each in told] == codes
