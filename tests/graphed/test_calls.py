"""Arguments, results and gradients of graphed callables, against running them without a graph."""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

import cgpass
from tests.graphed.steps import (
    check,
    graphed_twins,
    net,
    same,
    same_grads,
    step,
    twins,
)


class Pair(NamedTuple):
    first: Any
    second: Any


def test_keyword_arguments_come_in_the_order_of_the_sample(setting):
    def fn(x, **named):
        return x * torch.cat([*named.values()])

    x, scale, shift = setting.randn(5, grad=True), setting.randn(2), setting.randn(3)
    graphed = setting.graphed(fn, (x,), {"scale": scale, "shift": shift})
    scale, shift = setting.randn(2), setting.randn(3)
    expected = step(fn, x, scale=scale, shift=shift)
    for named in ({"shift": shift, "scale": scale}, {"scale": scale, "shift": shift}):
        same(step(graphed, x, **named), expected)
    assert graphed.stats.plain_calls == 0
    with pytest.raises(cgpass.errors.InputError, match="its arguments have another structure"):
        graphed(x, scale=scale)
    with pytest.raises(
        cgpass.errors.InputError,
        match=r"sample's: no kwargs\['shift'\], kwargs\['shfit'\] besides. Call",
    ):
        graphed(x, scale=scale, shfit=shift)


def test_nested_arguments(setting):
    def fn(batch, pair, settings):
        return batch["x"] * pair.first + batch["more"][0] ** settings["power"]

    def sample():
        return (
            {"x": setting.randn(3, grad=True), "more": [setting.randn(3)]},
            Pair(setting.randn(3), 2),
            {"power": 2},
        )

    graphed = setting.graphed(fn, sample())
    args = sample()
    same(graphed(*args), fn(*args))
    for power in (3, 2.0, True, args[0]["x"]):
        args[2]["power"] = power
        message = r"args\[2\]\['power'\] was 2 when it was recorded and is"
        with pytest.raises(cgpass.errors.InputError, match=message):
            graphed(*args)
    with pytest.raises(cgpass.errors.InputError, match="another structure"):
        graphed({"x": args[0]["x"]}, args[1], {"power": 2})


class Caches(torch.nn.Module):
    """Keeps its weight as it is to be computed with, which it makes in the first microbatch alone."""

    def __init__(self, device):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4, device=device))
        self.register_buffer("cached", torch.zeros(4, 4, device=device))

    def forward(self, x, *, is_first_microbatch):
        if is_first_microbatch:
            self.cached.copy_(self.weight.detach().bfloat16())
        return x @ self.cached + (x @ self.weight) * 0.5


def test_a_flag_that_says_when_weights_are_cached(setting):
    module, plain = twins(setting, Caches(setting.device))
    sample = setting.randn(2, 4, grad=True)
    graphed = setting.graphed(module, (sample,), {"is_first_microbatch": True})
    for number in range(8):
        check(setting, graphed, plain, shape=(2, 4), is_first_microbatch=number % 4 == 0)
        if number % 4 == 3:
            for each in (module, plain):
                with torch.no_grad():
                    each.weight.add_(each.weight.grad, alpha=-0.1)
    stats = graphed.graphed.stats
    assert (stats.recordings, stats.rerecordings, stats.plain_calls) == (4, 1, 0)
    for strange in (None, 1, "yes"):
        message = r"kwargs\['is_first_microbatch'\] was True when"
        with pytest.raises(cgpass.errors.InputError, match=message):
            graphed(sample, is_first_microbatch=strange)


def test_tensors_that_do_not_fit_are_refused(setting):
    graphed = setting.graphed(net().to(setting.device), (setting.randn(4, 8),))
    refused = {
        r"args\[0\] was \[4, 8\] torch.float32 on .* now it is \[5, 8\] .*\. Convert it, or record a "
        "callable with such a sample too": setting.randn(5, 8),
        r"now it is .* torch.float64 on": setting.randn(4, 8).double(),
        r"now it is .* on meta": torch.empty(4, 8, device="meta"),
        "in the sample, now it is a float": 1.5,
        "now it is torch.sparse_coo": setting.randn(4, 8).to_sparse(),
    }
    for message, value in refused.items():
        with pytest.raises(cgpass.errors.InputError, match=message):
            graphed(value)


def test_an_argument_that_requires_grad_where_the_sample_did_not(setting, caplog):
    graphed, _, plain = graphed_twins(setting, net(), grad=False)
    with torch.no_grad():
        x = setting.randn(4, 8, grad=True)
        same(graphed(x), plain(x))
    assert graphed.graphed.stats.plain_calls == 0
    check(setting, graphed, plain, 3)
    assert graphed.graphed.stats.plain_calls == 3
    same_grads(graphed, plain)
    (said,) = caplog.messages
    assert "runs without a graph: args[0] was [4, 8] torch.float32 on" in said
    assert "with requires_grad=True. Make the callable with a sample that requires grad" in said


@dataclasses.dataclass
class Opaque:
    name: str


def test_results_of_any_structure(setting):
    constant = Opaque("kept")

    def fn(x):
        return {
            "out": [x.sin(), (x.cos(), 3)],
            "pair": Pair(x * 2, None),
            "indices": x.argsort(),
            "size": x.shape,
            "constant": constant,
        }

    x = setting.randn(5, grad=True)
    graphed = setting.graphed(fn, (x,))
    for _ in range(2):
        x = setting.randn(5, grad=True)
        found, expected = graphed(x), fn(x)
        same(found["out"][0], expected["out"][0])
        same(found["out"][1][0], expected["out"][1][0])
        assert found["out"][1][1] == 3
        assert isinstance(found["pair"], Pair)
        assert found["pair"].second is None
        same(found["indices"], expected["indices"])
        assert not found["indices"].requires_grad
        assert found["constant"] is constant
        assert found["size"].numel() == 5
        (found["pair"].first * found["out"][0]).sum().backward()  # the others get no gradient
        (want,) = torch.autograd.grad((expected["pair"].first * expected["out"][0]).sum(), x)
        same(x.grad, want)


def test_results_that_are_inputs_parameters_or_share_memory(setting):
    module = setting.module(torch.nn.LayerNorm(4))
    weight = module.weight

    def fn(x):
        y = x * module.weight
        return x, x[1:], module.weight, y, y[:2], y

    x = setting.randn(4, grad=True)
    graphed = setting.graphed(fn, (x,), modules=(module,))
    for _ in range(2):
        x = setting.randn(4, grad=True)
        found, expected = graphed(x), fn(x)
        same(found, expected)
        grads = torch.autograd.grad(sum((a**2).sum() for a in found), [x, weight])
        wanted = torch.autograd.grad(sum((b**2).sum() for b in expected), [x, weight])
        torch.testing.assert_close(grads, wanted)


def test_an_argument_that_requires_grad_must_not_be_written(setting):
    def fn(x):
        with torch.no_grad():
            x.mul_(2)
        return x.sin()

    with pytest.raises(cgpass.errors.GraphedArgumentError, match=r"writes args\[0\] in place"):
        setting.graphed(fn, (setting.randn(3, grad=True),))
