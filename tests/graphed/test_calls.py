"""Arguments, results and gradients of graphed callables, against running them without a graph."""

import copy
import dataclasses
import logging
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

import cgpass
from tests.graphed.steps import (
    check,
    clear_grads,
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


def test_what_is_handed_out_keeps_its_values_over_many_calls(setting):
    graphed, module, plain = graphed_twins(setting, net())
    held = []
    for _ in range(8):
        x = setting.randn(4, 8, grad=True)
        clear_grads(module, plain)
        a, (grad,) = step(graphed, x)
        b, (want,) = step(plain, x)
        held.append((a, b.clone()))
        held.append((grad, want.clone()))
        held += [
            (p.grad, q.grad) for p, q in zip(module.parameters(), plain.parameters(), strict=True)
        ]
    for found, expected in held:
        same(found, expected)


def test_keyword_arguments_in_any_order(setting):
    def fn(x, *, scale, shift=None):
        return x * scale if shift is None else x * scale + shift

    x, scale, shift = setting.randn(3, grad=True), setting.randn(3), setting.randn(3)
    graphed = setting.graphed(fn, (x,), {"scale": scale, "shift": shift})
    scale, shift = setting.randn(3), setting.randn(3)
    a, (grad,) = step(graphed, x, shift=shift, scale=scale)
    b, (want,) = step(fn, x, scale=scale, shift=shift)
    same(a, b)
    same(grad, want)
    with pytest.raises(cgpass.errors.InputError, match="its arguments have another structure"):
        graphed(x, scale=scale)
    with pytest.raises(
        cgpass.errors.InputError,
        match=r"sample's: no kwargs\['shift'\], kwargs\['shfit'\] besides. Call",
    ):
        graphed(x, scale=scale, shfit=shift)


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
        x, first = setting.randn(2, 4, grad=True), number % 4 == 0
        found, expected = [each(x, is_first_microbatch=first) for each in (graphed, plain)]
        same(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
        same_grads(module, plain)
        if number % 4 == 3:
            for each in (module, plain):
                with torch.no_grad():
                    each.weight.add_(each.weight.grad, alpha=-0.1)
    stats = graphed.graphed.stats
    assert (stats.recordings, stats.rerecordings, stats.plain_calls) == (4, 1, 0)
    for strange in (None, 1, "yes"):
        message = r"kwargs\['is_first_microbatch'\] was True when"
        with pytest.raises(cgpass.errors.InputError, match=message):
            graphed(x, is_first_microbatch=strange)


def test_constants_are_checked(setting):
    def fn(x, settings, mode):
        return x ** settings["power"][0] if mode == "power" else x

    x, message = setting.randn(3), r"args\[1\]\['power'\]\[0\] was 2 when it was recorded"
    graphed = setting.graphed(fn, (x, {"power": [2]}, "power"))
    same(graphed(x, {"power": [2]}, "power"), x**2)
    for power in (3, 2.0, True, x):
        with pytest.raises(cgpass.errors.InputError, match=message):
            graphed(x, {"power": [power]}, "power")


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
    assert "with requires_grad=True. Convert it, or record a callable with such a sample" in said


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
        for a, b in zip(found, expected, strict=True):
            same(a, b)
        grads = torch.autograd.grad(sum((a**2).sum() for a in found), [x, weight])
        wanted = torch.autograd.grad(sum((b**2).sum() for b in expected), [x, weight])
        for a, b in zip(grads, wanted, strict=True):
            torch.testing.assert_close(a, b)


def test_an_argument_that_requires_grad_must_not_be_written(setting):
    def fn(x):
        with torch.no_grad():
            x.mul_(2)
        return x.sin()

    with pytest.raises(cgpass.errors.GraphedArgumentError, match=r"writes args\[0\] in place"):
        setting.graphed(fn, (setting.randn(3, grad=True),))


# ---- arguments and results of classes that the user made


class Nameless:
    """A node that does not tell what its children are called."""

    def __init__(self, first, second):
        self.first = first
        self.second = second


pytree.register_pytree_node(
    Nameless, lambda pair: ([pair.first, pair.second], None), lambda parts, _: Nameless(*parts)
)


def test_nodes_without_names_for_their_children(setting):
    module, plain = twins(setting, net())

    def of(layer):
        return lambda pair, *, scale: Nameless(layer(pair.first) * scale, pair.second.sin())

    sample = Nameless(setting.randn(4, 8), setting.randn(3))
    graphed = setting.graphed(of(module), (sample,), {"scale": 2.0}, modules=(module,))
    given = Nameless(setting.randn(4, 8), setting.randn(3))
    found, expected = graphed(given, scale=2.0), of(plain)(given, scale=2.0)
    for a, b in ((found.first, expected.first), (found.second, expected.second)):
        same(a, b)
    for result in (found, expected):
        result.first.square().sum().backward()
    same_grads(module, plain)
    with pytest.raises(cgpass.errors.InputError, match="leaf 1 of the arguments was \\[3\\]"):
        graphed(Nameless(setting.randn(4, 8), setting.randn(5)), scale=2.0)
    with pytest.raises(cgpass.errors.InputError, match=r"leaf 2 of the arguments was 2\.0"):
        graphed(given, scale=3.0)


@dataclasses.dataclass
class Unknown:
    values: object
    number: int = 1


@pytest.mark.parametrize("nested", [False, True])
def test_results_that_hide_tensors_are_refused(setting, nested):
    def wrapped(x):
        return Unknown([x]) if nested else Unknown(x)

    x = setting.randn(3)
    with pytest.raises(
        cgpass.errors.GraphedArgumentError,
        match=r"returns a Unknown that is new in each run and not a pytree node",
    ):
        setting.graphed(lambda x: wrapped(x * 2), (x,))
    other = Unknown(3)
    graphed = setting.graphed(lambda x, other: (x * 2, other), (x, other))
    assert graphed(x, other)[1] is other


@pytest.mark.parametrize("requires_grad", [True, False])
def test_views_of_arguments_that_are_laid_out_otherwise(setting, requires_grad, caplog):
    """A view is cut out of the call's own argument, so such a call runs without a graph, and says so."""
    linear = setting.module(torch.nn.Linear(4, 4))

    def fn(x):
        return linear(x), x[-1], x

    graphed = setting.graphed(fn, (setting.randn(3, 2, 4, grad=requires_grad),), modules=(linear,))
    for laid_out in (
        setting.randn(2, 3, 4).transpose(0, 1),
        setting.randn(3, 1, 4).expand(3, 2, 4),
    ):
        x, y = (laid_out.detach().requires_grad_(requires_grad) for _ in range(2))
        found, wanted = graphed(x), fn(y)
        for a, b in zip(found, wanted, strict=True):
            same(a, b)
        if requires_grad:
            found[1].square().sum().backward()
            wanted[1].square().sum().backward()
            same(x.grad, y.grad)
    assert "args[0], which results are views of, has another memory layout" in caplog.text
    stats = graphed.stats
    assert stats.plain_calls == 2
    found = graphed(setting.randn(3, 2, 4))
    assert found[1].shape == (2, 4)
    assert stats.plain_calls == 2


@pytest.mark.parametrize(
    ("warm", "captured"),
    [
        (lambda y: (y, y), lambda y: (y, None)),
        (lambda y: (y, None), lambda y: (y, y)),
        (lambda y: (y,), lambda y: (y, 3)),
        (lambda y: y, lambda y: (y, y * 3)),
        (lambda y: {"a": y}, lambda y: {"a": y, "b": {"c": None}}),
    ],
)
def test_a_result_whose_first_tensors_are_alike(setting, warm, captured):
    runs = []

    def fn(x):
        runs.append(len(runs))
        return (captured if len(runs) == 4 else warm)(x * 2)

    with pytest.raises(
        cgpass.errors.GraphedArgumentError, match=r"fn returns another structure than in the run"
    ):
        setting.graphed(fn, (setting.randn(4),))


class ReturnsBias(torch.nn.Linear):
    """As layers whose bias is added later, with results that have no history."""

    def forward(self, x):
        return x @ self.weight.t(), self.bias, x.detach(), self.weight.detach()


def test_a_parameter_as_a_result_and_results_without_a_history(setting):
    graphed, module, plain = graphed_twins(setting, ReturnsBias(8, 8))
    found = []
    for fn in (graphed, plain):
        x = setting.randn(4, 8, grad=True)
        x.data.fill_(0.5)
        y, bias, given, weight = fn(x)
        assert (given.requires_grad, weight.requires_grad) == (False, False)
        ((y + bias) * given + weight.sum()).square().sum().backward()
        found.append((y, x.grad))
    for a, b in zip(*found, strict=True):
        same(a, b)
    same_grads(module, plain)


# ---- arguments of every layout, that share memory, that are written, or that are one tensor


def complex_randn(setting, *shape):
    return torch.randn(*shape, dtype=torch.complex64, device=setting.device)


@pytest.mark.parametrize("lazy", ["conj", "neg"])
def test_samples_that_are_conjugates_or_negatives(setting, lazy):
    def make(flip):
        x = complex_randn(setting, 3)
        x = x.conj() if flip else x
        return x if lazy == "conj" else x.imag

    def fn(x):
        return x * 3

    graphed = setting.graphed(fn, (make(True),))
    for x in (make(False), make(True)):
        same(graphed(x).resolve_conj(), fn(x).resolve_conj())
    assert graphed.stats.plain_calls == 0


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x[None].expand(3, 3),
        lambda x: x.sum().expand(3, 3),
        lambda x: torch.complex(x, x).conj().imag.expand(3, 3),
        lambda x: torch.complex(x, x)[None].conj() * torch.ones(3, 1, device=x.device),
    ],
)
def test_gradients_of_any_layout(setting, fn):
    graphed = setting.graphed(fn, (setting.randn(3, grad=True),))
    for weight in (setting.randn(3, 3), setting.randn(3, 1).expand(3, 3), setting.randn(1, 3)):
        x = setting.randn(3, grad=True)
        grads = []
        for each in (graphed, fn):
            out = each(x)
            out.backward(weight.to(out.dtype).expand(3, 3))
            grads.append(x.grad)
            x.grad = None
        torch.testing.assert_close(*grads)


def test_tensors_without_elements(setting):
    graphed = setting.graphed(torch.sin, (setting.randn(0, 3, grad=True),))
    x = setting.randn(0, 3, grad=True)
    graphed(x).sum().backward()
    assert x.grad.shape == (0, 3)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_written_argument_that_shares_memory(setting, shift, caplog):
    def fn(a, b):
        a.add_(1)
        return b * 2

    def zeros():
        return torch.zeros(4, device=setting.device)

    graphed = setting.graphed(fn, (zeros()[:3], zeros()[:3]))
    found, expected = zeros(), zeros()
    same(
        graphed(found[:3], found[shift : 3 + shift]),
        fn(expected[:3], expected[shift : 3 + shift]),
    )
    same(found, expected)
    assert graphed.stats.plain_calls == 1
    assert "args[0], which it writes, shares memory with something else" in caplog.text
    same(graphed(zeros()[:3], zeros()[:3]), zeros()[:3])
    assert graphed.stats.plain_calls == 1


def test_a_written_argument_that_is_a_buffer(setting):
    class Adds(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, into):
            into.add_(1)
            return self.total * 2

    module = setting.module(Adds())
    graphed = setting.graphed(module, (torch.zeros(3, device=setting.device),))
    same(graphed(module.total), torch.full((3,), 2.0, device=setting.device))
    assert graphed.graphed.stats.plain_calls == 1


class Attends(torch.nn.Module):
    """Another projection where it attends to what it is given twice."""

    def __init__(self):
        super().__init__()
        self.own = torch.nn.Linear(4, 4)
        self.cross = torch.nn.Linear(4, 4)

    def forward(self, x, context):
        return (self.own if x is context else self.cross)(context) * x


def pairs(setting):
    """Arguments that are one tensor, and that are two."""
    x, y, z = (setting.randn(2, 4, grad=True) for _ in range(3))
    return {"one": (x, x), "two": (y, z)}


@pytest.mark.parametrize("sample", ["one", "two"])
@pytest.mark.parametrize("form", [lambda *args: args, lambda a, b: ({"a": a, "b": [b]},)])
def test_code_that_asks_whether_arguments_are_one(setting, sample, form, caplog):
    module = setting.module(Attends())
    twin = copy.deepcopy(module)

    def unpacking(fn):
        return lambda *given: fn(*given) if len(given) == 2 else fn(given[0]["a"], *given[0]["b"])

    graphed = setting.graphed(unpacking(module), form(*pairs(setting)[sample]), modules=(module,))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for kind, args in pairs(setting).items():
                before = graphed.stats.plain_calls
                expected = twin(*args)
                expected.square().sum().backward()
                wanted = [arg.grad.clone() for arg in args]
                for arg in args:
                    arg.grad = None
                found = graphed(*form(*args))
                found.square().sum().backward()
                same(found, expected)
                for arg, grad in zip(args, wanted, strict=True):
                    same(arg.grad, grad)
                same_grads(module, twin)
                is_plain = (kind == "one") is (sample == "two")
                assert graphed.stats.plain_calls - before == is_plain
    (message,) = [each.getMessage() for each in caplog.records]
    assert "runs without a graph: in the sample, other arguments were the same tensor" in message
