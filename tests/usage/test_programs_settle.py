"""Programs as users write them: after their first steps all calls are replays, and the numbers are those of no graphs.

A program here is a generator, which yields what a user could see of each step. Everything may happen in the first 60 of
its steps; in the 60 that follow no call runs without a graph and nothing is recorded.
"""

import copy
import itertools

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.usage.programs import (
    ALL,
    MLP,
    AssignedBuffer,
    Block,
    Checkpointed,
    Ways,
    gradients,
    learn,
    noting,
    sgd,
    state,
    trained_on,
)

STEPS, SETTLED = 120, 60
NEVER = ("warmups", "plain_calls", "recordings")
"""Counters that no longer grow then."""

settles = Ways()


def check(setting, program, *, steps=STEPS, settled=SETTLED):
    """Run a program with graphs and without: the same bits, and only replays once it has settled. Gives the counters."""
    changes = []

    def for_so_long(session):
        return itertools.islice(program(session), steps)

    counters = setting.compare(noting(for_so_long, setting.driver, changes))
    unsettled = {
        number: change
        for number, change in enumerate(changes)
        if number >= settled and any(change[name] for name in NEVER)
    }
    assert not unsettled, unsettled
    assert len(changes) == steps
    assert sum(change["replays"] for change in changes[settled:]) > 0
    return counters


@settles()
def unrolled(session):
    """As recurrent networks over sequences of two lengths."""
    cell, call = session.compiled(lambda: nn.RNNCell(8, 8))
    optimizer = sgd(cell)
    for length in itertools.cycle((4, 8)):
        hidden, loss = session.randn(4, 8), 0
        for _ in range(length):
            hidden = call(session.randn(4, 8), hidden)
            loss = loss + hidden.square().mean()
        yield learn(cell, loss, optimizer)


@settles()
def three_pending(session):
    module, call = session.compiled(MLP)
    for order in itertools.cycle(itertools.permutations(range(3))):
        losses = [call(session.randn(4, 8)).square().mean() for _ in order]
        for index in order:
            losses[index].backward()
        yield [*losses, *gradients(module)]
        module.zero_grad()


class Attribute(AssignedBuffer):
    """Keeps its state in a plain attribute."""

    def __init__(self):
        super().__init__()
        del self.prev
        self.prev = torch.zeros(8)


def stateful(make, *, training):
    def program(session):
        module, call = session.compiled(make)
        optimizer = sgd(module)
        while True:
            with torch.set_grad_enabled(training):
                out = call(session.randn(4, 8))
            learned = learn(module, out.square().mean(), optimizer) if training else []
            yield [out, module.prev, *learned]

    return program


settles.add(
    {
        f"{make.__name__} {training}": stateful(make, training=training)
        for make in (Attribute, AssignedBuffer)
        for training in (True, False)
    }
)


def layer():
    return Block(8, dropout=0.2)


settles.add(
    {
        "checkpoint_inside": trained_on(lambda: Checkpointed(layer), [(2, 3, 8)] * STEPS),
        "two_batch_sizes": trained_on(MLP, [(4, 8), (8, 8)] * STEPS),
        "growing_sizes": trained_on(MLP, [(2 + min(n // 8, 6), 8) for n in range(STEPS)]),
    }
)


@settles()
def teacher_and_student(session):
    student, call = session.compiled(MLP)
    teacher = copy.deepcopy(student).requires_grad_(False)
    teach, optimizer = session.compile(teacher), sgd(student)
    while True:
        batch = session.randn(4, 8)
        with torch.no_grad():
            target = teach(batch)
        values = learn(student, F.mse_loss(call(batch), target + 1), optimizer)
        with torch.no_grad():
            torch._foreach_lerp_([*teacher.parameters()], [*student.parameters()], 0.1)
        yield [*values, *state(teacher)]


@settles()
def layers_frozen_now_and_then(session):
    module, call = session.compiled(MLP)
    optimizer = sgd(module)
    for number in itertools.count():
        module.layers[0].requires_grad_(number % 10 < 5)
        yield learn(module, call(session.randn(4, 8)).square().mean(), optimizer)


def swap_data(module, others):
    for parameter, other in zip(module.parameters(), others, strict=True):
        parameter.data, other.data = other.data, parameter.data


@settles()
def state_loaded_by_assignment(session):
    module, call = session.compiled(MLP)
    for number in itertools.count():
        if number in (10, 20):
            loaded = {name: value * 1.5 for name, value in module.state_dict().items()}
            module.load_state_dict(loaded, assign=True)
        yield learn(module, call(session.randn(4, 8)).square().mean(), sgd(module))


def changed_before_each_step(change, make=MLP):
    def program(session):
        module, call = session.compiled(make)
        while True:
            change(module)
            yield learn(module, call(session.randn(4, 8)).square().mean())

    return program


def views_of_one_new_tensor(module):
    """As where a flat parameter is gathered for every step."""
    parameters = [*module.parameters()]
    flat = torch.cat([p.detach().flatten() for p in parameters]) * 1.01
    parts = flat.split([p.numel() for p in parameters])
    for parameter, data in zip(parameters, parts, strict=True):
        parameter.data = data.view_as(parameter)


class TwoBuffers(nn.Module):
    """Reads one buffer and writes another."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("old", torch.zeros(8))
        self.register_buffer("new", torch.ones(8))

    def forward(self, x):
        y = torch.tanh(self.linear(x) + self.old)
        self.new.copy_(y.detach().mean(0))
        return y * self.new


def buffers_change_places(module):
    module.old, module.new = module.new, module.old


settles.add(
    {
        "views_of_one_new_tensor": changed_before_each_step(views_of_one_new_tensor),
        "buffers_change_places": changed_before_each_step(buffers_change_places, TwoBuffers),
    }
)


@settles()
def weights_of_an_inner_loop(session):
    """As MAML: results of a backward are the weights of the next forward."""
    module = session.module(MLP)
    call = session.compile(lambda weights, x: torch.func.functional_call(module, weights, x))
    optimizer = sgd(module)
    while True:
        weights = dict(module.named_parameters())
        loss = call(weights, session.randn(4, 8)).square().mean()
        grads = torch.autograd.grad(loss, [*weights.values()])
        inner = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), grads, strict=True)}
        yield learn(module, call(inner, session.randn(4, 8)).square().mean(), optimizer)


class Attention(nn.Module):
    """Decodes one token, with a cache of keys of its own and one of values that it is given."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("keys", torch.zeros(2, 6, 8))

    def forward(self, x, position, values):
        self.keys.index_copy_(1, position, self.k(x))
        values.index_copy_(1, position, self.v(x))
        seen = torch.arange(self.keys.shape[1], device=x.device) <= position
        scores = (self.q(x) @ self.keys.transpose(1, 2)).masked_fill(~seen, float("-inf"))
        return scores.softmax(-1) @ values


@settles(settings=ALL)
def decoding_with_one_cache_that_stays_and_one_made_anew(session):
    module, call = session.compiled(lambda: Attention().requires_grad_(False))
    for number in itertools.count():
        if number % 6 == 0:
            module.keys.zero_()
            values = torch.zeros(2, 6, 8, device=session.device)
        with torch.no_grad():
            out = call(session.randn(2, 1, 8), session.tensor([number % 6]), values)
        yield [out, module.keys, values]


@settles()
def evaluation_in_between(session):
    module, call = session.compiled(lambda: nn.Sequential(MLP(), nn.Dropout(0.2), MLP()))
    optimizer = sgd(module)
    for number in itertools.count():
        values = learn(module, call(session.randn(4, 8)).square().mean(), optimizer)
        if number % 5 == 4:
            module.eval()
            with torch.no_grad():
                values += [call(session.randn(6, 8)) for _ in range(3)]
            module.train()
        yield values


def checkpoint_around(*, use_reentrant):
    def program(session):
        module, call = session.compiled(lambda: Block(8, dropout=0.2))
        optimizer = sgd(module)
        while True:
            x = session.randn(2, 3, 8).requires_grad_()
            out = checkpoint(call, x, use_reentrant=use_reentrant)
            out = checkpoint(call, out, use_reentrant=use_reentrant)
            yield [*learn(module, out.square().mean(), optimizer), x.grad]

    return program


settles.add(
    {
        "checkpoint_around": checkpoint_around(use_reentrant=False),
        "reentrant_checkpoint_around": checkpoint_around(use_reentrant=True),
    }
)


@settles()
def saved_on_cpu(session):
    module, call = session.compiled(MLP)
    optimizer = sgd(module)
    for number in itertools.count():
        with save_on_cpu():
            first = call(session.randn(4, 8))
            second = call(first)
        loss = (second if number % 2 else first + second).square().mean()
        yield learn(module, loss, optimizer)


@settles()
def backward_that_never_comes(session):
    module, call = session.compiled(MLP)
    for number in itertools.count():
        loss = call(session.randn(4, 8)).square().mean()
        yield learn(module, loss) if number % 3 else [loss]


@settles(settings=ALL)
def optimizers_in_the_backward(session):
    """Each parameter is stepped as soon as its gradient is there, and the gradient dropped."""
    module, call = session.compiled(MLP)
    optimizers = {p: torch.optim.AdamW([p], lr=0.01) for p in module.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    while True:
        loss = call(session.randn(4, 8)).square().mean()
        loss.backward()
        yield [loss, *state(module)]


@settles()
def evaluation_while_a_backward_is_due(session):
    """With other weights among it."""
    module, call = session.compiled(MLP)
    optimizer = sgd(module)
    averages = [p.detach() * 0.9 for p in module.parameters()]
    while True:
        loss = call(session.randn(4, 8)).square().mean()
        swap_data(module, averages)
        with torch.no_grad():
            values = [call(session.randn(4, 8))]
        swap_data(module, averages)
        with torch.inference_mode():
            values.append(call(session.randn(4, 8)).clone())
        yield values + learn(module, loss, optimizer)


@settles.everywhere
def test_after_its_first_steps_a_program_only_replays(way, program):
    check(way, program.program)
