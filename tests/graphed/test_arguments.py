"""Arguments and gradients of every layout, that share memory, that are written, or that are one tensor."""

import copy
import itertools
import logging

import pytest
import torch

from tests.graphed.steps import same, same_grads


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
    [lambda x: x.contiguous(), lambda x: x.contiguous().add_(1).sum()],
    ids=["given", "written"],
)
def test_what_is_the_argument_itself_in_one_layout_alone(setting, fn):
    graphed = setting.graphed(fn, (setting.randn(3, 4),))
    for make in (torch.Tensor.contiguous, torch.Tensor.t):
        x = make(setting.randn(3, 4) if make is torch.Tensor.contiguous else setting.randn(4, 3))
        other = x.clone()
        same(graphed(x), fn(other))
        same(x, other)
        assert (graphed(x) is x) == (fn(other) is other)


def test_results_that_are_views_of_conjugates(setting):
    graphed = setting.graphed(lambda x: (x[1:], x * 2), (complex_randn(setting, 3),))
    for make in (torch.conj, torch.clone):
        x = make(complex_randn(setting, 3))
        same(graphed(x)[0].resolve_conj(), x[1:].resolve_conj())
    assert graphed.stats.plain_calls == 1


@pytest.mark.parametrize(
    "part", [lambda x: x[:, :4], lambda x: x[::2, 4:], lambda x: x.chunk(2, 1)[1]]
)
def test_samples_with_gaps(setting, part):
    layer = setting.module(torch.nn.Linear(4, 4))
    graphed = setting.graphed(layer, (part(setting.randn(6, 8)),))
    for _ in range(2):
        x = setting.randn(6, 8)
        grads = [
            torch.autograd.grad(fn(part(x)).square().sum(), list(layer.parameters()))
            for fn in (graphed, layer)
        ]
        same(*grads)


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


class Sums(torch.nn.Module):
    """Adds to a buffer or to an argument, and reads the other one."""

    def __init__(self, total, writes_own):
        super().__init__()
        self.total, self.writes_own = total, writes_own

    def forward(self, given):
        written, read = (self.total, given) if self.writes_own else (given, self.total)
        written.add_(1)
        return read * 2


@pytest.mark.parametrize(
    ("kind", "writes_own"), [*itertools.product((torch.nn.Buffer, torch.clone), (True, False))]
)
def test_an_argument_that_is_or_views_a_buffer(setting, kind, writes_own, caplog):
    """As a module's own state that is fed back, or a window of its cache: the write reaches the other one."""
    module, plain = (Sums(kind(setting.randn(3) * 0), writes_own) for _ in range(2))
    graphed = setting.graphed(module, (setting.randn(3),))
    module.total.zero_()  # warm-ups write plain attributes
    for way in (lambda net: net.total, lambda net: net.total[:], lambda net: net.total.clone()):
        same(graphed(way(module)), plain(way(plain)))
    assert graphed.graphed.stats.plain_calls == 2
    assert "shares memory with" in caplog.text


def test_an_argument_returned_under_no_grad_is_that_argument(setting):
    def fn(x, y):
        with torch.no_grad():
            seen = y.view(-1)
        return x, x.detach(), seen, x * y

    graphed = setting.graphed(fn, (setting.randn(3), setting.randn(3, grad=True)))
    x = setting.randn(3, grad=True)
    with torch.no_grad():
        same_one, detached, *_ = graphed(x, x * 2)
    assert same_one is x
    assert detached is not x
    assert not detached.requires_grad
    assert graphed.stats.replays == 1


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
                same([arg.grad for arg in args], wanted)
                same_grads(module, twin)
                is_plain = (kind == "one") is (sample == "two")
                assert graphed.stats.plain_calls - before == is_plain
    (message,) = [each.getMessage() for each in caplog.records]
    assert "is one tensor with another argument here or in the sample, not both" in message
