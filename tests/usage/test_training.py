"""Training loops give the bits of the run without graphs, and every step but the first replays."""

import collections
import itertools

import pytest
import torch
from torch import nn

from tests.usage import programs
from tests.usage.programs import (
    MLP,
    Block,
    ConvNet,
    FindsRows,
    ReadsValue,
    Tied,
    Ways,
    assert_replays,
    assert_steady,
    gradients,
    learn,
    sgd,
    state,
    trained_on,
)

MODELS = {
    "mlp": (MLP, programs.rows(4, 8)),
    "transformer block": (Block, programs.rows(2, 6, 16)),
    "batch norm": (ConvNet, programs.rows(2, 3, 8, 8)),
    "tied weights": (Tied, programs.tokens(16, 2, 5)),
}


@pytest.mark.parametrize("model", MODELS)
def test_training_replays_every_step_but_the_first(setting, model):
    counters = setting.compare(programs.trained(*MODELS[model]))
    assert_steady(counters, captured=2)
    assert counters["calls"] == 12


def of_sizes(*sizes):
    return trained_on(MLP, [(size, 8) for size in sizes], dynamic=True)


def test_each_size_of_a_dynamic_shape_has_its_recording(setting):
    counters = setting.compare(of_sizes(*[10, 6, 4] * 3))
    assert_steady(counters, captured=2, recordings=6, warmups=6)


def test_larger_sizes_that_come_later_have_smaller_ones_recorded_in_their_memory(setting):
    counters = setting.compare(of_sizes(*[4, 6, 10] * 4))
    # 4 and 6 once before a larger one came and once afterwards
    assert_steady(counters, captured=2, recordings=10, warmups=6)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_number_read_in_the_middle_splits_forward_and_backward(setting, compiler):
    program = programs.trained(ReadsValue, programs.rows(4, 8))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        counters = setting.compare(program, on_skip="silent", compiler=compiler)
    assert_steady(counters, captured=4, eager=2)  # the backward reads the number again


def test_a_size_that_depends_on_data_splits_the_forward(setting):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        counters = setting.compare(programs.trained(FindsRows), on_skip="silent")
    assert counters["partitions_eager"] >= 1
    assert_replays(counters)


# ---- orders of forwards, backwards and optimizer steps, with hooks of every kind


ways = Ways()


@ways(replays="some")
def gradients_that_come_in_are_of_any_layout(session):
    module, call = session.compiled(MLP)
    for number, batch in enumerate(session.batches(4, 8, count=12)):
        incoming = (
            session.randn(4, 8),
            session.randn(8, 4).t(),
            session.randn(1, 8).expand(4, 8),
            session.randn(4, 16)[:, ::2],
        )[number % 4]
        call(batch).backward(incoming)
        yield [incoming, *gradients(module)]
        module.zero_grad()


@ways()
def backward_into_chosen_inputs_only(session):
    module, call = session.compiled(MLP)
    first, *_, last = module.parameters()
    for number, batch in enumerate(session.batches(4, 8, count=9)):
        chosen = ([first], [last], [first, last])[number % 3]
        call(batch).square().mean().backward(inputs=chosen)
        yield gradients(module)


# ---- hooks


@ways()
def hooks_of_tensors_fire_once_a_step(session):
    module, call = session.compiled(MLP)
    fired = collections.Counter()
    for p in module.parameters():
        p.register_hook(lambda g: (fired.update(["parameter"]), g * 2)[1])
    for batch in session.batches(4, 8, count=8):
        fired.clear()
        batch.requires_grad_()
        batch.register_hook(lambda g: fired.update(["input"]))
        out = call(batch)
        assert not out._backward_hooks
        out.retain_grad()
        out.register_hook(lambda g: (fired.update(["output"]), g * 3)[1])
        learned = learn(module, out.square().mean())
        yield [out.grad, batch.grad, *learned]
        assert fired == {"parameter": 4, "input": 1, "output": 1}


@ways(replays="some")
def hooks_of_modules_fire_once_a_step(session):
    module, fired = session.module(MLP), collections.Counter()
    module.register_full_backward_hook(lambda m, gin, gout: fired.update(["backward"]))
    call = session.compile(module)
    call.register_forward_pre_hook(lambda m, args: fired.update(["before"]))
    call.register_forward_hook(lambda m, args, out: fired.update(["after"]))
    module.layers[-1].register_forward_hook(lambda m, args, out: out * 2)
    for batch in session.batches(4, 8, count=8):
        fired.clear()
        out = call(batch.requires_grad_())
        yield [out.detach(), *learn(module, out.square().mean()), batch.grad]
        assert fired == {"before": 1, "after": 1, "backward": 1}


# ---- optimizers


@ways()
def a_gradient_scaler_that_skips_steps(session):
    """Two steps whose gradients are not finite are skipped, and the scale falls."""
    module, call = session.compiled(MLP)
    optimizer = sgd(module)
    scaler = torch.amp.GradScaler(session.device.type, init_scale=1024.0, growth_interval=2)
    values = []
    for number, batch in enumerate(session.batches(4, 8, count=10)):
        if number in (3, 6):
            batch[0, 0] = float("inf")
        optimizer.zero_grad()
        with torch.autocast(session.device.type, torch.bfloat16):
            out = call(batch)
            loss = out.float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        values.append(nn.utils.clip_grad_norm_(module.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
        values += [out.detach(), scaler.get_scale()]
    scales = [value for value in values if isinstance(value, float)]
    assert any(after < before for before, after in itertools.pairwise(scales))
    return values + state(module)


@ways(replays="some", on_skip="silent")
def a_compiled_optimizer_step(session):
    """Its rate falls, and is a tensor."""
    module, call = session.compiled(MLP)
    optimizer = torch.optim.AdamW(module.parameters(), lr=session.tensor(0.1))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = session.compile(optimizer.step)
    for number, batch in enumerate(session.batches(4, 8, count=8)):
        call(batch).square().mean().backward()
        step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        schedule.step()
        yield state(module)
    moments = [each for kept in optimizer.state.values() for each in kept.values()]
    yield [moment for moment in moments if isinstance(moment, torch.Tensor)]


@ways(replays="none", on_skip="silent")
def a_step_compiled_as_a_whole(session):
    module = session.module(MLP)
    optimizer = sgd(module)

    def step(batch):
        loss = module(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = session.compile(step)
    losses = [step(batch) for batch in session.batches(4, 8, count=8)]
    return losses + state(module)


# ---- attention with dropout whose forward and backward do not both run in graphs

FORWARD = (
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        q = (x @ self.weight).view(2, 6, 2, 8).transpose(1, 2).sin()
        mixed = nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.3)
        return x + mixed.transpose(1, 2).reshape(2, 6, 16).cos()


for half, unsafe in (("forward", FORWARD), ("backward", [f"{op}_backward" for op in FORWARD])):
    attended = programs.trained(Attention, programs.rows(2, 6, 16))
    ways.add(
        {f"attention whose {half} is eager": attended},
        replays="some",
        unsafe_ops=unsafe,
        on_skip="silent",
        min_partition_ops=1,
    )


@ways.everywhere
def test_ways_to_train(way, program):
    program.check(way)
