"""Training loops give the bits of the run without graphs, and every step but the first replays."""

import pytest
import torch

from tests.usage import programs
from tests.usage.programs import MLP, Block, ConvNet, FindsRows, ReadsValue, Tied, assert_steady

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


def test_training_through_inductor(setting):
    """On CPU the transformer block is test_randomness.py's, with dropout: its kernels take long to build."""
    model = "mlp" if setting.device.type == "cpu" else "transformer block"
    counters = setting.compare(programs.train(*MODELS[model]), compiler="inductor")
    assert_steady(counters, captured=2)


def changing_sizes(make, sizes, **kwargs):
    def program(session):
        module, call = session.compiled(make, **kwargs)
        values = []
        for size in sizes:
            out = call(session.randn(size, 8))
            out.square().mean().backward()
            values += [out.detach(), *programs.gradients(module)]
            module.zero_grad(set_to_none=True)
        return values

    return program


def test_each_size_of_a_dynamic_shape_has_its_recording(setting):
    sizes = [10, 6, 4] * 3
    counters = setting.compare(changing_sizes(MLP, sizes, dynamic=True))
    assert_steady(counters, captured=2, recordings=6, warmups=6)


def test_larger_sizes_that_come_later_have_smaller_ones_recorded_in_their_memory(setting):
    sizes = [4, 6, 10] * 4
    counters = setting.compare(changing_sizes(MLP, sizes, dynamic=True))
    # 4 and 6 once before a larger one came and once afterwards
    assert_steady(counters, captured=2, recordings=10, warmups=6)


def test_shapes_found_to_be_dynamic_are_compiled_once_more(setting):
    # 4 compiles for 4 alone, 10 for any size: two graphs of two partitions each
    sizes = [4, 4, 10, 6, 10, 6, 10, 6]
    counters = setting.compare(changing_sizes(MLP, sizes))
    assert_steady(counters, captured=4, recordings=6, warmups=6)


def test_a_number_read_in_the_middle_splits_forward_and_backward(setting):
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        counters = setting.compare(
            programs.train(ReadsValue, programs.rows(4, 8)), on_skip="silent"
        )
    assert_steady(counters, captured=4, eager=2)  # the backward reads the number again


def test_a_number_read_in_the_middle_through_inductor(setting):
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        counters = setting.compare(
            programs.train(ReadsValue, programs.rows(4, 8)), on_skip="silent", compiler="inductor"
        )
    assert_steady(counters, captured=4, eager=2)  # the backward reads the number again


def test_a_size_that_depends_on_data_splits_the_forward(setting):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        counters = setting.compare(programs.train(FindsRows, programs.rows(4, 8)), on_skip="silent")
    assert counters["partitions_eager"] >= 1
    assert counters["plain_calls"] == 0
    assert counters["replays"] == counters["calls"] - counters["warmups"] > 0


def test_training_and_evaluation_alternate(setting):
    def program(session):
        module, call = session.compiled(ConvNet)
        values = []
        for index, batch in enumerate(session.batches(2, 3, 8, 8, count=12)):
            if index % 2:
                module.eval()
                with torch.no_grad():
                    values.append(call(batch))
                module.train()
            else:
                out = call(batch)
                out.square().mean().backward()
                values += [out.detach(), *programs.gradients(module)]
                module.zero_grad(set_to_none=True)
        return values + programs.state(module)

    assert_steady(setting.compare(program), captured=3)


def test_no_grad_alternates_with_training(setting):
    def program(session):
        module, call = session.compiled(MLP)
        values = []
        for batch in session.batches(4, 8):
            with torch.no_grad():
                values.append(call(batch))
            out = call(batch)
            out.sum().backward()
            values += [out.detach(), *programs.gradients(module)]
        return values

    assert_steady(setting.compare(program), captured=3)


def test_two_models_do_not_disturb_each_other(setting):
    def program(session):
        first, call_first = session.compiled(MLP)
        second, call_second = session.compiled(lambda: MLP(depth=3))
        values = []
        for batch in session.batches(4, 8):
            middle = call_first(batch)
            out = call_second(middle)
            out.square().mean().backward()
            values += [middle.detach(), out.detach()]
            values += programs.gradients(first) + programs.gradients(second)
        return values

    assert_steady(setting.compare(program), captured=4)
