"""Ways to order forwards, backwards and optimizer steps, with hooks of every kind."""

import collections
import itertools

import pytest
import torch
from torch import nn

from tests.usage import programs
from tests.usage.programs import MLP, Block, ConvNet, Ways, gradients, learn, sgd, state

ways = Ways()


@ways()
def evaluation_in_the_middle_of_an_accumulation(session):
    module, call = session.compiled(ConvNet)
    optimizer = sgd(module)
    values = []
    for number, batch in enumerate(session.batches(2, 3, 8, 8, count=12)):
        call(batch).square().mean().backward()
        if number % 2 == 0:
            module.eval()
            with torch.inference_mode():
                values.append(call(batch).clone())
            module.train()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return values + state(module)


@ways()
def unused_outputs_and_outputs_without_gradient(session):
    module = session.module(MLP)

    def fn(x):
        y = module(x)
        return y.sin(), y.detach().cos(), (y > 0), y.argmax(-1), y.exp()

    call = session.compile(fn)
    for number, batch in enumerate(session.batches(4, 8, count=8)):
        used, cut, positive, best, unused = call(batch)
        assert not cut.requires_grad
        (unused if number % 3 == 2 else used).mean().backward()
        yield [cut, positive, best, *gradients(module)]


def accumulation_over_a_number_of_batches_that_changes(*, set_to_none):
    def program(session):
        module, call = session.compiled(MLP)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for count in (1, 2, 4, 1, 3, 2, 1):
            optimizer.zero_grad(set_to_none=set_to_none)
            for batch in session.batches(4, 8, count=count):
                (call(batch).square().mean() / count).backward()
            yield gradients(module)
            optimizer.step()
        yield state(module)

    return program


ways.add(
    {
        f"accumulation {name}": accumulation_over_a_number_of_batches_that_changes(set_to_none=none)
        for name, none in (("to None", True), ("in place", False))
    }
)


class Breaks(nn.Module):
    """Dynamo compiles this in parts: one graph breaks in the middle, one result is printed."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = MLP(), MLP(), MLP()
        self.seen = []

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        y = self.second(x)
        if y.detach().mean().item() > 1e6:
            y = -y
        return self.third(x + y) + x


ways.add(
    {"a function with graph breaks": programs.train(Breaks, programs.rows(4, 8), steps=8)},
    replays="some",
    counts={"plain_calls": 0},
)


@ways(replays="some")
def one_block_compiled_for_many_layers(session):
    """Each block is compiled in place: one compilation for all, trained with AdamW."""
    module = session.module(lambda: nn.Sequential(*(Block() for _ in range(4))))
    for block in module:
        block.compile(backend=session.backend, options=session.options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for number, batch in enumerate(session.batches(2, 6, 16, count=6)):
        yield learn(module, module(batch).square().mean(), optimizer)
        if number % 3 == 2:
            with torch.no_grad():
                yield [module(batch)]


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


@ways()
def an_error_of_the_user_between_forward_and_backward(session):
    module, call = session.compiled(MLP)
    for number, batch in enumerate(session.batches(4, 8, count=9)):
        try:
            out = call(batch)
            out.reshape(-1, 7 if number % 3 == 1 else 8).square().mean().backward()
        except RuntimeError as error:
            yield [str(error)]
            continue
        yield [out.detach(), *gradients(module)]


# ---- hooks


@ways(replays="some")
def saved_tensors_are_packed_as_other_dtypes_now_and_then(session):
    def pack(t):
        return t.double() if t.is_floating_point() else t

    def unpack(t):
        return t.float() if t.is_floating_point() else t

    module, call = session.compiled(MLP)
    for number, batch in enumerate(session.batches(4, 8, count=12)):
        if number % 4 == 3:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                out = call(batch)
        else:
            out = call(batch)
        yield [out.detach(), *learn(module, out.square().mean())]


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


@ways(replays="some")
def hooks_of_modules_inside_keep_the_activations(session):
    module, seen = session.module(MLP), {}
    for number, layer in enumerate(module.layers):
        layer.register_forward_hook(lambda m, args, out, n=number: seen.update({n: out}))
    call = session.compile(module)
    for batch in session.batches(4, 8, count=8):
        learned = learn(module, call(batch).square().mean())
        yield [*learned, *(activation.detach() for activation in seen.values())]


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


@ways()
def an_optimizer_that_calls_the_model_itself(session):
    module, call = session.compiled(MLP)
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.5, max_iter=4)
    values = []
    for batch in session.batches(4, 8, count=4):

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = call(batch).square().mean()
            loss.backward()
            values.append(loss.detach())
            return loss

        optimizer.step(closure)
    return values + state(module)


@ways()
def two_backwards_a_step_at_disturbed_parameters(session):
    module, call = session.compiled(MLP)
    optimizer, parameters = sgd(module, momentum=0.9), [*module.parameters()]
    for batch in session.batches(4, 8, count=6):
        call(batch).square().mean().backward()
        uphill = [p.grad for p in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, uphill, alpha=0.05)
        optimizer.zero_grad()
        call(batch).square().mean().backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, uphill, alpha=0.05)
        optimizer.step()
        optimizer.zero_grad()
        yield uphill
    yield state(module)


OPTIMIZERS = {
    "adamw": lambda p, rate: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p, rate: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "momentum": lambda p, rate: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "a rate that falls": lambda p, rate: torch.optim.AdamW(p, lr=rate),
}


def a_compiled_optimizer_step(make):
    def program(session):
        module, call = session.compiled(MLP)
        optimizer = make(module.parameters(), session.tensor(0.1))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        step = session.compile(optimizer.step)
        for number, batch in enumerate(session.batches(4, 8, count=8)):
            call(batch).square().mean().backward()
            step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            if make is OPTIMIZERS["a rate that falls"]:
                schedule.step()
            yield state(module)
        moments = [each for kept in optimizer.state.values() for each in kept.values()]
        yield [moment for moment in moments if isinstance(moment, torch.Tensor)]

    return program


ways.add(
    {
        f"a compiled optimizer step, {name}": a_compiled_optimizer_step(make)
        for name, make in OPTIMIZERS.items()
    },
    replays="some",
    on_skip="silent",
)


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
    attended = programs.train(Attention, programs.rows(2, 6, 16))
    ways.add(
        {f"attention whose {half} is eager": attended},
        replays="some",
        unsafe_ops=unsafe,
        on_skip="silent",
        min_partition_ops=1,
    )


@ways(replays="some", on_skip="silent")
def backwards_of_more_forwards_than_there_is_memory_for(session):
    """Past the limit calls run plainly, their backwards and forwards not always alike."""
    module, call = session.compiled(Attention)
    for count in (3, 20, 2, 1):
        outs = [call(x) for x in session.batches(2, 6, 16, count=count)]
        for out in reversed(outs):
            out.square().mean().backward()
        yield [*(out.detach() for out in outs), *gradients(module)]
        module.zero_grad()


@ways.everywhere
def test_ways_to_train(way, program):
    program.check(way)


def test_a_second_derivative_is_a_clear_error(way):
    session = way.session()
    module, call = session.compiled(MLP)
    for batch in session.batches(4, 8, count=4):
        batch.requires_grad_()
        (grad,) = torch.autograd.grad(call(batch).square().sum(), batch, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):
            grad.square().sum().backward()
        expected = torch.autograd.grad(module(batch).square().sum(), batch)
        torch.testing.assert_close(grad, expected[0])
