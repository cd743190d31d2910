"""Ways to order forwards, backwards and optimizer steps."""

import logging

import pytest
import torch
from torch import nn

from cgpass.errors import DoubleBackwardError
from tests.usage import programs
from tests.usage.programs import MLP, Block, ConvNet, assert_replays


def test_any_number_of_forwards_with_some_abandoned_and_some_without_gradient(way):
    orders = [(0, 1), (2, 0), (1,), (), (3, 1, 0), (0, 1, 2), (2, 1, 0), (0,)]

    def program(session):
        module, call = session.compiled(MLP)
        values = []
        for order in orders:
            outs = []
            for batch in session.batches(4, 8, count=max(order, default=1) + 1):
                outs.append(call(batch))
                with torch.no_grad():
                    values.append(call(batch * 2))
            for number in order:
                outs[number].square().mean().backward()
            values += [out.detach() for out in outs]
            values += programs.gradients(module)
            module.zero_grad()
        return values

    way.compare(program)


def recurrent(session):
    """One cell called many times before its backwards; the state goes on, cut off from the past."""
    cell = session.module(lambda: nn.GRUCell(8, 8))
    call = session.compile(cell)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
    hidden, values = session.randn(2, 8), []
    for _ in range(5):
        outs = []
        for batch in session.batches(2, 8, count=4):
            hidden = call(batch, hidden)
            outs.append(hidden)
        torch.stack(outs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        values += [out.detach() for out in outs]
        hidden = hidden.detach()
    return values + programs.state(cell)


def test_a_recurrent_cell_with_truncated_backpropagation(slow_way):
    counters = slow_way.compare(recurrent)
    assert counters["plain_calls"] <= 1, counters  # a backward may find tensors of a warm-up
    assert counters["replays"] == counters["calls"] - counters["warmups"] - counters["plain_calls"]


def test_two_calls_in_one_loss(way):
    def program(session):
        module, call = session.compiled(MLP)
        values = []
        for batch in session.batches(4, 8, count=8):
            left, right = call(batch), call(batch.roll(1))
            (left - right).square().mean().backward()
            values += [left.detach(), right.detach(), *programs.gradients(module)]
            module.zero_grad()
        return values

    assert_replays(way.compare(program))


def test_evaluation_in_the_middle_of_an_accumulation(way):
    def program(session):
        module, call = session.compiled(ConvNet)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
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
        return values + programs.state(module)

    assert_replays(way.compare(program))


def test_a_retained_graph_runs_backward_again_after_later_steps(way):
    def program(session):
        module, call = session.compiled(MLP)
        values, retained = [], []
        for batch in session.batches(4, 8, count=9):
            loss = call(batch).square().mean()
            loss.backward(retain_graph=True)
            retained.append(loss)
            if len(retained) > 2:
                retained.pop(0).backward()
            values += programs.gradients(module)
            module.zero_grad()
        return values

    way.compare(program)


def two_heads(module):
    def fn(x):
        y = module(x)
        return y.sin().cos(), y.exp() * 2

    return fn


def test_gradients_of_one_of_several_outputs_and_then_of_the_other(way):
    def program(session):
        module = session.module(MLP)
        call = session.compile(two_heads(module))
        parameters, values = list(module.parameters()), []
        for number, batch in enumerate(session.batches(4, 8, count=8)):
            outs = call(batch)
            first, second = outs if number % 2 else outs[::-1]
            values += torch.autograd.grad(first.sum(), parameters, retain_graph=number % 3 > 0)
            if number % 3:
                values += torch.autograd.grad(second.sum(), parameters)
        return values

    way.compare(program)


def test_unused_outputs_and_outputs_without_gradient(way):
    def program(session):
        module = session.module(MLP)

        def fn(x):
            y = module(x)
            return y.sin(), y.detach().cos(), (y > 0), y.argmax(-1), y.exp()

        call = session.compile(fn)
        values = []
        for number, batch in enumerate(session.batches(4, 8, count=8)):
            used, cut, positive, best, unused = call(batch)
            assert not cut.requires_grad
            (unused if number % 3 == 2 else used).mean().backward()
            values += [cut, positive, best, *programs.gradients(module)]
        return values

    assert_replays(way.compare(program))


def test_a_second_derivative_is_a_clear_error(way):
    torch.compiler.reset()
    session = way.session()
    module, call = session.compiled(MLP)
    for batch in session.batches(4, 8, count=4):
        batch.requires_grad_()
        (grad,) = torch.autograd.grad(call(batch).square().sum(), batch, create_graph=True)
        with pytest.raises(DoubleBackwardError, match=r"double backward\. Call what is differ"):
            grad.square().sum().backward()
        expected = torch.autograd.grad(module(batch).square().sum(), batch)
        torch.testing.assert_close(grad, expected[0])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_over_a_number_of_batches_that_changes(way, set_to_none):
    def program(session):
        module, call = session.compiled(MLP)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        values = []
        for count in (1, 2, 4, 1, 3, 2, 1):
            optimizer.zero_grad(set_to_none=set_to_none)
            for batch in session.batches(4, 8, count=count):
                (call(batch).square().mean() / count).backward()
            values += programs.gradients(module)
            optimizer.step()
        return values + programs.state(module)

    assert_replays(way.compare(program))


def test_zero_grad_between_forward_and_backward(way):
    def program(session):
        module, call = session.compiled(MLP)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        values = []
        for batch in session.batches(4, 8, count=10):
            loss = call(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            values.append(loss.detach())
        return values + programs.state(module)

    assert_replays(way.compare(program))


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


def test_a_function_with_graph_breaks(way):
    counters = way.compare(programs.train(Breaks, programs.rows(4, 8), steps=8))
    assert counters["plain_calls"] == 0, counters
    assert counters["replays"] > 0, counters


class Blocks(nn.Module):
    def __init__(self, count=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def regional(session):
    """Each block is compiled in place: one compilation for all, trained with AdamW."""
    module = session.module(Blocks)
    for block in module.blocks:
        block.compile(backend=session.backend, options=session.options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    values = []
    for number, batch in enumerate(session.batches(2, 6, 16, count=6)):
        loss = module(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.detach())
        if number % 3 == 2:
            with torch.no_grad():
                values.append(module(batch))
    return values + programs.state(module)


def test_one_block_compiled_for_many_layers(way):
    counters = way.compare(regional)
    assert counters["replays"] > counters["plain_calls"], counters


def test_more_pending_forwards_than_recordings_are_right_with_one_warning(way, caplog):
    def program(session):
        module, call = session.compiled(MLP)
        values = []
        for _ in range(3):
            outs = [call(batch) for batch in session.batches(4, 8, count=24)]
            for out in outs:
                out.square().mean().backward()
            values += [out.detach() for out in outs] + programs.gradients(module)
            module.zero_grad()
        return values

    with caplog.at_level(logging.WARNING, "cgpass"):
        counters = way.compare(program)
    assert counters["replays"] > 0, counters
    warned = [r.getMessage() for r in caplog.records if "still referenced" in r.getMessage()]
    assert len(warned) == 1, warned


def test_gradients_that_come_in_are_of_any_layout(way):
    def program(session):
        module, call = session.compiled(MLP)
        values = []
        for number, batch in enumerate(session.batches(4, 8, count=12)):
            out = call(batch)
            incoming = (
                session.randn(4, 8),
                session.randn(8, 4).t(),
                session.randn(1, 8).expand(4, 8),
                session.randn(4, 16)[:, ::2],
            )[number % 4]
            out.backward(incoming)
            values += [incoming, *programs.gradients(module)]
            module.zero_grad()
        return values

    counters = way.compare(program)
    assert counters["replays"] > 0, counters


def test_backward_into_chosen_inputs_only(way):
    def program(session):
        module, call = session.compiled(MLP)
        first, *_, last = module.parameters()
        values = []
        for number, batch in enumerate(session.batches(4, 8, count=9)):
            chosen = ([first], [last], [first, last])[number % 3]
            call(batch).square().mean().backward(inputs=chosen)
            values += programs.gradients(module)
        return values

    assert_replays(way.compare(program))


def test_an_error_of_the_user_between_forward_and_backward(way):
    def program(session):
        module, call = session.compiled(MLP)
        values = []
        for number, batch in enumerate(session.batches(4, 8, count=9)):
            try:
                out = call(batch)
                loss = out.reshape(-1, 7 if number % 3 == 1 else 8).square().mean()
                loss.backward()
            except RuntimeError as error:
                values.append(str(error))
                continue
            values += [out.detach(), *programs.gradients(module)]
        return values

    assert_replays(way.compare(program))
