"""Ways to hand in tensors: changed ones, shared ones, of any layout, size, dtype and kind, call after call."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.usage.programs import (
    ALL,
    MLP,
    Counter,
    Ways,
    assert_steady,
    called_with,
    learn,
    long_enough,
    steady,
    trained_on,
)

ways = Ways()


def mutated_input(session):
    """A buffer and an input are changed by every call."""
    module, call = session.compiled(Counter)
    state = session.tensor([1.0, 2.0, 3.0])
    outs = [call(batch, state) for batch in session.batches(4, 8)]
    return [*outs, module.seen, state]


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_mutated_input_is_written_back(setting, compiler):
    assert_steady(setting.compare(mutated_input, compiler=compiler), captured=1)


def product(a, b):
    return (a.sin() * 2 - b.cos()) * (a + b)


@ways(counts=steady(2))
def the_same_tensor_twice_and_two_tensors_alternate(session):
    call = session.compile(product)
    for number in range(8):
        a = session.randn(4, 8)
        yield [call(a, a if number % 2 else session.randn(4, 8))]


@ways(replays="none")
def conjugate_and_negative_bits(session):
    def fn(x, w):
        y = (x @ w).sin() * w.sum().conj()
        return y, y.conj(), x.conj(), torch._neg_view(y.real)

    call = session.compile(fn)
    for number in range(8):
        parts = session.randn(3, 4), session.randn(3, 4), session.randn(4, 2), session.randn(4, 2)
        x = torch.complex(*parts[:2]).conj().requires_grad_(number > 3)
        w = torch.complex(*parts[2:]).requires_grad_(number > 3)
        outputs = call(x, w)
        yield [o.resolve_conj().resolve_neg().detach().clone() for o in outputs]
        if number > 3:
            yield [g.resolve_conj() for g in torch.autograd.grad(outputs[0].abs().sum(), (x, w))]


# ---- changed inputs


@ways(replays="some")
def an_input_changed_without_gradient_that_needs_one_elsewhere(session):
    def fn(x, weight):
        with torch.no_grad():
            weight.mul_(0.9)
        return (x @ weight).sin().cos()

    call, weight = session.compile(fn), session.randn(8, 8).requires_grad_()
    for batch in session.batches(4, 8):
        call(batch, weight).sum().backward()
        yield [weight.detach().clone(), weight.grad.clone()]


def rows(session):
    return (session.randn(4, 8),)


# ---- inputs that share memory


def overlapping(session):
    base = session.randn(6, 8)
    return base[:4], base[2:]


def writes_the_first(a, b):
    a.mul_(2).add_(1)
    return (b.sin() + 1).cos() + a


ways.add(
    {"views that overlap and one is written": called_with(writes_the_first, overlapping)},
    replays="none",
)


# ---- kinds that change


@ways(replays="some")
def tensors_made_in_inference_mode_and_outside(session):
    module, call = session.compiled(MLP)
    with torch.inference_mode():
        made_inside = session.randn(4, 8)
    for number, batch in enumerate(session.batches(4, 8, count=12)):
        if number % 3 == 0:
            with torch.inference_mode():
                values = [call(made_inside + batch).clone()]
        elif number % 3 == 1:
            with torch.no_grad():
                values = [call(made_inside)]
        else:
            values = learn(module, call(batch).square().mean())
        yield values


def numbers(*values):
    def program(session):
        call = session.compile(lambda x, n: long_enough(x * n) + n)
        return [call(session.randn(4, 8), n) for n in values]

    return program


ways.add(
    {
        "numbers that change": numbers(1, 2, 3, 2, 1.5, 2.5, 1.5, True, False, True, math.pi, 3),
        "a number on the host as a tensor": numbers(*map(torch.tensor, (1.5, 2.5, 1.5, 3.5, -1.0))),
    },
    replays="some",
    on_skip="silent",
)


# ---- layouts

ways.add(
    {
        "expanded and strided inputs in turn": called_with(
            long_enough,
            rows,
            lambda s: (s.randn(8, 4).t(),),
            lambda s: (s.randn(1, 8).expand(4, 8),),
            lambda s: (s.randn(8, 16)[::2, ::2],),
            lambda s: (s.randn(5, 8)[1:],),
            lambda s: (s.randn(11).unfold(0, 8, 1),),
            count=20,
        )
    },
    replays="some",
)


class Strided(nn.Module):
    """Reads its input's storage at fixed places."""

    def __init__(self, offset):
        super().__init__()
        self.offset = offset

    def forward(self, x):
        window = x.as_strided((2, 3), (3, 1), self.offset)
        return (window.sin() + 1).cos() * 2


class WritesStrided(nn.Module):
    def forward(self, x):
        x.as_strided((3,), (2,), 5).mul_(-2)
        return (x.sin() + 1).cos() * 2


def called_on_a_slice(make, *, grad=False):
    def program(session):
        _, call = session.compiled(make)
        for _ in range(8):
            whole = session.randn(24).requires_grad_(grad)
            out = call(whole[2:14])
            if grad:
                out.sum().backward()
            yield [out, whole.detach().clone(), whole.grad]

    return program


ways.add(
    {
        "as_strided inside": called_on_a_slice(lambda: Strided(2)),
        "as_strided past the end": called_on_a_slice(lambda: Strided(16)),
        "as_strided with a gradient": called_on_a_slice(lambda: Strided(4), grad=True),
        "as_strided written": called_on_a_slice(WritesStrided),
    }
)


@ways(replays="some")
def one_of_two_overlapping_slices_is_written(session):
    """AOTAutograd makes one tensor of the two, and counts from the beginning of its storage."""

    def fn(x, y):
        x.mul_(2)
        return ((x + y).sin() + 1).cos()

    _, source = session.compiled(nn.Identity)
    call = session.compile(fn)
    for _ in range(8):
        part = source(session.randn(24) * 2)[2:]
        yield [call(part[:12], part[4:16]), part.clone()]


# ---- sizes


ONE_AND_TWO = [(n, 8) for n in (4, 1, 2, 1, 4)]
ways.add(
    {
        "empty inputs": trained_on(MLP, [(0, 8)] * 5),
        "dynamic sizes of one and two": trained_on(MLP, ONE_AND_TWO, dynamic=True),
    },
    replays="some",
)
# as in other tests that build Inductor's kernels of it
ways.add(
    {"a last batch that is smaller": trained_on(MLP, [(4, 8), (4, 8), (4, 8), (2, 8)] * 4)},
    settings=ALL,
)


# ---- dtypes


def scaled_without_dimensions(x, scale, shift):
    scale.mul_(2)
    return (x * scale + shift).sin(), scale.sin().cos() + shift


DTYPES = {
    "complex": (
        lambda x: ((x * 2).sin() * x.conj()).sum(-1) + x.real.mean(),
        lambda s: torch.complex(s.randn(4, 8), s.randn(4, 8)),
    ),
    "bool": (lambda x: (x & x.roll(1)) | (x ^ x.flip(0)) & ~x, lambda s: s.randn(4, 8) > 0),
    "float8": (
        lambda x, w: ((x.float() * 2).sin() @ w.float().t()).to(x.dtype).view(torch.uint8),
        lambda s: [s.randn(8, 8).to(torch.float8_e4m3fn) for _ in range(2)],
    ),
}


def of_a_dtype(fn, make):
    def program(session):
        call = session.compile(fn)
        for _ in range(5):
            made = make(session)
            yield [call(*([made] if isinstance(made, torch.Tensor) else made))]

    return program


ways.add({name: of_a_dtype(*case) for name, case in DTYPES.items()})
ways.add(
    {
        "inputs without dimensions": called_with(
            scaled_without_dimensions,
            lambda s: (s.randn(4), s.randn(()), s.randn(())),
            lambda s: (s.randn(4), s.randn(4)[2], s.tensor(3.0)),
        )
    }
)


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation")
@ways.everywhere
def test_inputs(way, program):
    program.check(way)


# ---- jagged tensors: those of equal sizes share recordings, whatever their offsets are


def jagged(session, *lengths):
    rows = [session.randn(length, 8) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)


FUNCTIONS = {
    "of its shape": lambda x: F.gelu(x) * 2,
    "transposed": lambda x: (x.sin() * 2).transpose(1, 2),
    "with its values": lambda x: (x.sin() * 2, x.values().cos() + 1),
}


def steps(fn):
    def program(session):
        layer, _ = session.compiled(lambda: nn.Linear(8, 8))
        call = session.compile(lambda x: fn(layer(x)))
        results = []
        for lengths in [(3, 4)] * 6 + [(4, 3)] * 3 + [(5, 3, 1)] * 3:
            x = jagged(session, *lengths)
            result, *others = torch.utils._pytree.tree_leaves(call(x))
            assert result.shape[0] == x.shape[0]
            (result + result.sin()).values().sum().backward()
            results += [result.values(), result.offsets(), x.grad.values(), *others]
        return [*results, layer.weight.grad]

    return program


@pytest.mark.parametrize("name", FUNCTIONS)
def test_new_offsets_of_equal_sizes_replay(way, name):
    counters = way.compare(steps(FUNCTIONS[name]), min_partition_ops=1)
    assert counters["recordings"] <= 4
    assert counters["replays"] >= counters["calls"] - 6


def test_results_go_together_with_the_very_input_of_the_call(slow_way):
    def program(session):
        call = session.compile(lambda x: F.gelu(x.sin()) * 2)
        results = []
        for _ in range(5):
            x = jagged(session, 3, 4)
            result = call(x)
            assert result.shape[1] == x.shape[1]
            results.append((result + x).values().detach())
            with pytest.raises(RuntimeError, match=r"shape|ragged"):
                result + jagged(session, 3, 4)
        return results

    counters = slow_way.compare(program, min_partition_ops=1)
    assert counters["replays"] == 4
