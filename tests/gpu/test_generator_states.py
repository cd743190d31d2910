"""Generators that are given another state object: a replay draws from the one that the user means."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import cgpass
from tests.gpu import harness

pytestmark = harness.MARKS


def body(x, w):
    return F.dropout(x @ w, 0.5).sin()


def step(x, w):
    return checkpoint(body, x, w, use_reentrant=False) * torch.rand_like(x)


WAYS = {
    "recorded outside": (None, None, None, "a", None, "b", "a", "a", None, "b"),
    "recorded inside": ("a", "a", "a", None, "b", "a", None, None, "b", "a"),
    "recorded in several": ("a", "b", None, "a", "b", None, "a", "b", None, "a"),
}


def run(fn, forks, x, w):
    """Results, gradients and where each state ends."""
    torch.cuda.manual_seed(7)
    tracker = cgpass.RNGStatesTracker()
    tracker.add("a", 1)
    tracker.add("b", 1)  # stands just where the other one does, and is another
    found = []
    for name in forks:
        leaf = w.detach().requires_grad_()
        if name is None:
            out = fn(x, leaf)
        else:
            with tracker.fork(name):
                out = fn(x, leaf)
        (grad,) = torch.autograd.grad(out.square().sum(), leaf)
        found += [out.detach().clone(), grad.clone()]
    found.append(torch.cuda.get_rng_state())
    found += tracker.get_states().values()
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("driver", ["auto", "none"])
def test_a_compiled_function_called_in_and_out_of_forks(way, driver):
    x, w = torch.randn(16, 16, device="cuda"), torch.randn(16, 16, device="cuda")
    options = {"compiler": "eager", "driver": driver}
    compiled = torch.compile(step, backend=cgpass.cgpass, options=options)
    expected = run(step, WAYS[way], x, w)
    for _ in range(2):
        for a, b in zip(run(compiled, WAYS[way], x, w), expected, strict=True):
            assert torch.equal(a, b)


def test_a_state_given_for_good():
    """Another state object from the middle of training on."""
    x = torch.randn(64, device="cuda")
    compiled = torch.compile(F.dropout, backend=cgpass.cgpass, options={"compiler": "eager"})
    default = torch.cuda.default_generators[0]
    before = default.graphsafe_get_state()

    def numbers(fn):
        torch.cuda.manual_seed(3)
        found = [fn(x).clone() for _ in range(4)]
        default.graphsafe_set_state(torch.Generator("cuda").manual_seed(5))
        found += [fn(x).clone() for _ in range(4)]
        torch.cuda.manual_seed(9)
        found += [fn(x).clone() for _ in range(2)]
        default.graphsafe_set_state(before)
        return [*found, fn(x).clone()]

    for a, b in zip(numbers(compiled), numbers(F.dropout), strict=True):
        assert torch.equal(a, b)
