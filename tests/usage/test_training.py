"""Training loops give the bits of the run without graphs, and every step but the first replays."""

import pytest
import torch

from tests.usage import programs
from tests.usage.programs import (
    ATEN,
    MLP,
    Block,
    ConvNet,
    FindsRows,
    ReadsValue,
    Tied,
    Ways,
    assert_replays,
    assert_steady,
    learn,
    steady,
)

MODELS = {
    "mlp": (MLP, programs.rows(4, 8)),
    "transformer block": (Block, programs.rows(2, 6, 16)),
    "batch norm": (ConvNet, programs.rows(2, 3, 8, 8)),
    "tied weights": (Tied, programs.tokens(16, 2, 5)),
}


@pytest.mark.parametrize("model", MODELS)
def test_training_replays_every_step_but_the_first(setting, model):
    counters = setting.compare(programs.train(*MODELS[model]))
    assert_steady(counters, captured=2)
    assert counters["calls"] == 12


def changing_sizes(sizes, **kwargs):
    def program(session):
        module, call = session.compiled(MLP, **kwargs)
        for size in sizes:
            out = call(session.randn(size, 8))
            yield [out.detach(), *learn(module, out.square().mean())]

    return program


def test_each_size_of_a_dynamic_shape_has_its_recording(setting):
    counters = setting.compare(changing_sizes([10, 6, 4] * 3, dynamic=True))
    assert_steady(counters, captured=2, recordings=6, warmups=6)


def test_larger_sizes_that_come_later_have_smaller_ones_recorded_in_their_memory(setting):
    counters = setting.compare(changing_sizes([4, 6, 10] * 4, dynamic=True))
    # 4 and 6 once before a larger one came and once afterwards
    assert_steady(counters, captured=2, recordings=10, warmups=6)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_number_read_in_the_middle_splits_forward_and_backward(setting, compiler):
    program = programs.train(ReadsValue, programs.rows(4, 8))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        counters = setting.compare(program, on_skip="silent", compiler=compiler)
    assert_steady(counters, captured=4, eager=2)  # the backward reads the number again


def test_a_size_that_depends_on_data_splits_the_forward(setting):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        counters = setting.compare(programs.train(FindsRows, programs.rows(4, 8)), on_skip="silent")
    assert counters["partitions_eager"] >= 1
    assert_replays(counters)


ways = Ways(*ATEN)


@ways(counts=steady(4))
def training_no_grad_and_evaluation_take_turns(session):
    module, call = session.compiled(ConvNet)
    for batch in session.batches(2, 3, 8, 8, count=8):
        with torch.no_grad():
            yield [call(batch)]
            module.eval()
            yield [call(batch)]
            module.train()
        out = call(batch)
        yield [out.detach(), *learn(module, out.square().mean()), *programs.state(module)]


@ways.everywhere
def test_other_ways_to_train(way, program):
    program.check(way)
