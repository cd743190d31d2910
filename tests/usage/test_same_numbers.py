"""The same numbers as without graphs, however tensors are handed in and wherever values lie, call after call."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.operators import doubling
from tests.usage.programs import (
    ALL,
    MLP,
    Counter,
    Ways,
    assert_steady,
    called_with,
    counted,
    learn,
    long_enough,
    noting,
    one_of_each_on_cpu,
    trained_on,
)

ways = Ways()


def mutated_input(session):
    module, call = session.compiled(Counter)
    state = session.tensor([1.0, 2.0, 3.0])
    outs = [call(batch, state) for batch in session.batches(4, 8)]
    return [*outs, module.seen, state]


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_mutated_input_is_written_back(setting, compiler):
    assert_steady(setting.compare(mutated_input, compiler=compiler), captured=1)


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


def rows(session):
    return (session.randn(4, 8),)


def numbers(*values):
    def program(session):
        call = session.compile(lambda x, n: long_enough(x * n) + n)
        return [call(session.randn(4, 8), n) for n in values]

    return program


ways.add(
    {
        "numbers that change": numbers(1, 2, 3, 2, 1.5, 2.5, 1.5, True, False, True, math.pi, 3),
        "complex numbers": numbers(1j, 2 + 1j, 1j, 3.5, 2 + 1j),
        "NumPy's numbers": numbers(*map(np.float32, (0.1, 0.2, 0.3)), *map(np.int64, (2, 3, 2))),
        "NumPy's doubles and bools": numbers(*map(np.float64, (0.1, 0.2)), *map(np.bool_, (1, 0))),
        "a number on the host as a tensor": numbers(*map(torch.tensor, (1.5, 2.5, 1.5, 3.5, -1.0))),
    },
    replays="some",
    on_skip="silent",
)


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
        for lengths in [(3, 4)] * 6 + [(4, 3)] * 3 + [(5, 3, 1)] * 3:
            x = jagged(session, *lengths)
            result, *others = torch.utils._pytree.tree_leaves(call(x))
            assert result.shape[0] == x.shape[0]
            (result + result.sin()).values().sum().backward()
            yield [result.values(), result.offsets(), x.grad.values(), *others]
        yield [layer.weight.grad]

    return program


@pytest.mark.parametrize("name", FUNCTIONS)
def test_new_offsets_of_equal_sizes_replay(way, name):
    counters = way.compare(steps(FUNCTIONS[name]), min_partition_ops=1)
    assert counters["recordings"] <= 4
    assert counters["replays"] >= counters["calls"] - 6


def test_results_go_together_with_the_very_input_of_the_call(slow_way):
    def program(session):
        call = session.compile(lambda x: F.gelu(x.sin()) * 2)
        for _ in range(5):
            x = jagged(session, 3, 4)
            result = call(x)
            assert result.shape[1] == x.shape[1]
            yield [(result + x).values().detach()]
            with pytest.raises(RuntimeError, match=r"shape|ragged"):
                result + jagged(session, 3, 4)

    counters = slow_way.compare(program, min_partition_ops=1)
    assert counters["replays"] == 4


# ---- values between and out of graphs lie as others expect, also if a compiled graph is split

wait, wait_too = (doubling(name, reads=True) for name in ("wait", "wait_too"))
wait_later = doubling("wait_later")
for op in (wait_too, wait_later):
    op.register_autograd(lambda ctx, grad: wait(grad))

WAITS = {"both": wait_too, "backward": wait_later}


class Sliced(nn.Module):
    """Saves a slice with gaps, which Inductor's forward saves without them, and copies of weights."""

    def __init__(self, where):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.wait = WAITS[where]

    def forward(self, x):
        part = self.first(x)[:, :, ::2, 1:]
        return self.second(self.wait(part) * part * part.cos()).tanh()


@pytest.mark.parametrize("where", WAITS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_slices_that_are_saved_lie_as_the_backward_expects(setting, where, dynamic):
    """The program splits, gives what eager gives, and settles."""
    one_of_each_on_cpu(setting, another=dynamic and where == "backward")
    steps, sizes = [], [(2, 4, 5, 6)] * 24
    if dynamic:
        sizes = [(2, 4, 5, 6)] * 16 + [(3, 4, 7, 6)] * 16 + [(2, 4, 5, 6)] * 8

    def program(session):
        module, call = session.compiled(lambda: Sliced(where), dynamic=dynamic)
        for size in sizes:
            batch = session.randn(*size).requires_grad_()
            out = call(batch)
            yield [out, *learn(module, out.square().mean()), batch.grad]

    with counted() as counters:
        noted = noting(program, setting.driver, steps)
        ours = setting.run(noted, compiler="inductor", on_skip="silent", min_partition_ops=1)
    assert counters["partitions_eager"] > 0
    assert counters["calls"] == sum(counters[n] for n in ("replays", "warmups", "plain_calls"))
    assert all(step["replays"] == step["calls"] > 0 for step in steps[-4:])
    torch.testing.assert_close(ours, setting.run_eagerly(program), rtol=1e-3, atol=1e-4)


def convolutions():
    """Of so many channels that Inductor computes them channels-last."""
    first, second = (nn.Conv2d(*sizes, 3, padding=1) for sizes in ((72, 80), (80, 72)))
    return nn.Sequential(first, nn.ReLU(), nn.Conv2d(80, 80, 1), nn.ReLU(), second)


def strides(tensor):
    """Of the dimensions in which there is more than one element."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_lie_as_weights(setting, monkeypatch, channels_last):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    found = {}

    def program(session):
        module, call = session.compiled(lambda: convolutions().to(memory_format=layout))
        x = session.randn(2, 72, 8, 8).to(memory_format=layout)
        parameters = list(module.parameters())
        for _ in range(4):
            found["ours"] = torch.autograd.grad(call(x).square().sum(), parameters)
        default = torch.compile(module)(x)
        found["default"] = torch.autograd.grad(default.square().sum(), parameters)
        found["weights"] = parameters
        return [grad.clone() for grad in found["ours"]]

    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    setting.run(program, compiler="inductor")
    for ours, default, weight in zip(*found.values(), strict=True):
        assert strides(ours) == strides(weight)
        assert torch.equal(ours, default)
    differ = any(
        strides(g) != strides(w) for g, w in zip(found["default"], found["weights"], strict=True)
    )
    assert differ is not channels_last, "what is tested here is there no more"
