"""Inputs of any layout, size and dtype, call after call."""

import pytest
import torch

from tests.usage import programs
from tests.usage.programs import MLP, ConvNet, assert_replays, called_with, long_enough


def test_expanded_and_strided_inputs_take_turns_with_plain_ones(way):
    makers = (
        lambda s: (s.randn(4, 8),),
        lambda s: (s.randn(8, 4).t(),),
        lambda s: (s.randn(1, 8).expand(4, 8),),
        lambda s: (s.randn(8, 16)[::2, ::2],),
        lambda s: (s.randn(5, 8)[1:],),
    )
    counters = way.compare(called_with(long_enough, *makers, count=20))
    assert counters["replays"] > 0, counters


def test_formats_of_memory_take_turns(way):
    def program(session):
        _, call = session.compiled(ConvNet)
        values = []
        with torch.no_grad():
            for number, batch in enumerate(session.batches(2, 3, 8, 8)):
                if number % 2:
                    batch = batch.to(memory_format=torch.channels_last)
                values.append(call(batch).contiguous())
        return values

    assert_replays(way.compare(program))


def test_inputs_that_start_anywhere_in_their_memory(way):
    """Sines, no products: those of matrices round otherwise in memory that is less aligned."""

    def program(session):
        call = session.compile(long_enough)
        values = []
        for offset in (0, 1, 3, 8, 1, 0, 5, 16):
            values.append(call(session.randn(64)[offset : offset + 32].view(4, 8)))
        return values

    assert_replays(way.compare(program))


def test_inputs_of_size_zero_take_turns_with_others(way):
    def program(session):
        call = session.compile(lambda x, y: (long_enough(x), long_enough(y).sum(0)), dynamic=True)
        values = []
        for size in (4, 0, 4, 0, 0, 4, 1, 0):
            values += call(session.randn(size, 8), session.randn(size))
        return values

    way.compare(program)


def test_empty_inputs_in_training(way):
    def program(session):
        module, call = session.compiled(MLP)
        values = []
        for _ in range(5):
            out = call(session.randn(0, 8))
            out.sum().backward()
            values += [out.detach(), *programs.gradients(module)]
        return values

    way.compare(program)


def test_inputs_without_dimensions(way):
    def fn(x, scale, shift):
        scale.mul_(2)
        return (x * scale + shift).sin(), scale.sin().cos() + shift

    makers = (
        lambda s: (s.randn(4), s.randn(()), s.randn(())),
        lambda s: (s.randn(4), s.randn(4)[2], s.tensor(3.0)),
    )
    assert_replays(way.compare(called_with(fn, *makers)))


def complex_tensor(session):
    return torch.complex(session.randn(4, 8), session.randn(4, 8))


@pytest.mark.parametrize(
    ("fn", "make"),
    [
        (lambda x: ((x * 2).sin() * x.conj()).sum(-1) + x.real.mean(), complex_tensor),
        (lambda x: (x & x.roll(1)) | (x ^ x.flip(0)) & ~x, lambda s: s.randn(4, 8) > 0),
        (lambda x: (x * 3 + 1).cumsum(0) % 7 - x.flip(0), lambda s: (s.randn(4, 8) * 9).long()),
        (lambda x: (x // 3 + 1) * x.flip(0) - 2, lambda s: (s.randn(4, 8) * 9).to(torch.int8)),
        (lambda x: (x + 3) * x.flip(0) // 2, lambda s: (s.randn(4, 8) * 9).to(torch.uint8)),
        (long_enough, lambda s: s.randn(4, 8).to(torch.bfloat16)),
        (long_enough, lambda s: s.randn(4, 8).to(torch.float16)),
        (long_enough, lambda s: s.randn(4, 8).double()),
        (
            lambda x: ((x.float() * 2).sin() + 1).to(torch.float8_e4m3fn),
            lambda s: s.randn(4, 8).to(torch.float8_e4m3fn),
        ),
    ],
    ids=["complex", "bool", "int64", "int8", "uint8", "bfloat16", "float16", "float64", "float8"],
)
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation")
def test_dtypes(way, fn, make):
    def program(session):
        call = session.compile(fn)
        values = [call(make(session)) for _ in range(5)]
        return [v.float() if v.dtype == torch.float8_e4m3fn else v for v in values]

    assert_replays(way.compare(program))


def test_weights_in_float8_with_scales(way):
    def program(session):
        def fn(x, weight, scale):
            largest = x.abs().amax().clamp(min=1e-6)
            small = (x / largest * 448).to(torch.float8_e4m3fn)
            return (small.float() * largest / 448) @ (weight.float() * scale).t()

        call = session.compile(fn)
        weight, scale = session.randn(8, 8).to(torch.float8_e4m3fn), session.tensor(0.5)
        return [call(batch, weight, scale) for batch in session.batches(4, 8)]

    assert_replays(way.compare(program))


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation")
def test_dtypes_take_turns(way):
    def program(session):
        call = session.compile(long_enough)
        dtypes = (torch.float32, torch.float64, torch.bfloat16)
        return [call(batch.to(dtypes[i % 3])) for i, batch in enumerate(session.batches(4, 8))]

    way.compare(program)
