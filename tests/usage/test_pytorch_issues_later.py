"""Programs of PyTorch's issue tracker in which CUDA graphs failed, from number 160000 on; see the file for those before."""

import torch
from torch import nn

from tests.usage import programs
from tests.usage.programs import MLP, assert_replays

SMALL = {"min_partition_ops": 1}


def test_160281_a_function_fed_the_output_of_another(way):
    def program(session):
        f, g = session.compile(lambda x: x + 1), session.compile(lambda x: x + 2)
        values = [g(f(session.randn(2))) for _ in range(6)]
        h = f(g(f(values[-1])))
        return [*values, h]

    way.compare(program, **SMALL)


def test_169082_training_and_evaluation_without_a_number_gone_bad(way):
    def program(session):
        module, call = session.compiled(MLP)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        values = []
        for _ in range(3):
            for batch in session.batches(4, 8, count=3):
                loss = call(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                values.append(loss.detach())
            module.eval()
            with torch.no_grad():
                losses = [call(batch).square().mean() for batch in session.batches(4, 8)]
            module.train()
            values.append(torch.stack(losses).mean())
        assert all(value.isfinite() for value in values)
        return values + programs.state(module)

    assert_replays(way.compare(program))


def test_169545_gradients_of_vectors_add_up(way):
    def program(session):
        module, call = session.compiled(lambda: nn.Linear(10, 1), fullgraph=True)
        values = []
        for _ in range(5):
            x = session.randn(10).requires_grad_()
            loss = call(x).clone().sum().clone()
            loss.backward()
            values += [loss.detach(), x.grad, *programs.gradients(module)]
        return values

    assert_replays(way.compare(program, **SMALL))


def test_170604_marking_steps_changes_nothing(way):
    def program(session):
        call = session.compile(lambda x: torch.matmul(x, x))
        x, values = session.randn(10, 10), []
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            values.append(call(x))
            x = values[-1] / values[-1].norm()
        return values

    assert_replays(way.compare(program, **SMALL))


def test_181723_gradients_are_no_memory_of_the_graph(way):
    def program(session):
        module, call = session.compiled(MLP)
        values = []
        call(session.randn(4, 8)).sum().backward()
        first = [p.grad for p in module.parameters()]
        for p in module.parameters():
            p.grad = None
        for batch in session.batches(4, 8):
            call(batch).square().mean().backward()
            for p, grad in zip(module.parameters(), first, strict=True):
                p.grad, grad = grad.add_(p.grad), p.grad
                values += [grad, p.grad.clone()]
                p.grad = None
        return values

    assert_replays(way.compare(program))


def test_182531_addresses_that_take_turns_are_recorded_once_each(way):
    def program(session):
        module, call = session.compiled(MLP)
        sets = [[p.data * factor for p in module.parameters()] for factor in (1.0, 0.5, 2.0)]
        values = []
        with torch.no_grad():
            for number, batch in enumerate(session.batches(4, 8, count=24)):
                for p, data in zip(module.parameters(), sets[number % 3], strict=True):
                    p.data = data
                values.append(call(batch))
        return values

    counters = way.compare(program)
    assert_replays(counters)
    assert counters["recordings"] <= 6, counters


def test_183603_a_second_backward_through_one_forward(way):
    def program(session):
        module, call = session.compiled(MLP)
        values = []
        for batch in session.batches(4, 8):
            out = call(batch.requires_grad_())
            out.sum().backward(retain_graph=True)
            (out * 2).mean().backward()
            values += [out.detach(), batch.grad, *programs.gradients(module)]
            module.zero_grad()
        return values

    way.compare(program)


def test_188755_a_result_marked_static(way):
    def program(session):
        table = session.randn(4, 8)
        torch._dynamo.mark_static_address(table)

        def fn(x):
            table.mul_(0.5).add_(x)
            return table, (table * x).sin()

        call = session.compile(fn)
        values = []
        for batch in session.batches(4, 8):
            same, out = call(batch)
            assert same.data_ptr() == table.data_ptr()
            values += [same.clone(), out]
        return values

    way.compare(program)


def test_191369_results_of_one_function_change_places_in_the_next(way):
    def program(session):
        make = session.compile(lambda x: tuple((x * n).sin().cos() for n in (1, 2, 3)))
        use = session.compile(lambda a, b: (a * 2 - b).exp().cos())
        values = []
        for number in range(18):
            parts = make(session.randn(4, 8))
            values.append(use(parts[number % 3], parts[(number + 1) % 3]))
        return values

    counters = way.compare(program)
    assert_replays(counters)
    assert counters["recordings"] <= 12, counters


def test_194124_saved_tensors_of_many_graphs_with_pending_backwards(way):
    def program(session):
        modules = [session.module(MLP) for _ in range(3)]
        calls = [session.compile(m) for m in modules]
        values = []
        for _ in range(5):
            pending = []
            for call in calls:
                x = session.randn(4, 8)
                out = call(x)
                pending.append(out.square().mean())
                del out, x  # autograd alone holds what was saved
            calls[0](session.randn(4, 8))
            for loss in pending[::-1]:
                loss.backward()
            for module in modules:
                values += programs.gradients(module)
                module.zero_grad()
        return values

    way.compare(program)


def test_183313_a_weight_replaced_through_data_in_the_forward(way):
    class Standardised(nn.Conv2d):
        def forward(self, x):
            w = self.weight
            self.weight.data = (w - w.mean()) / (w.std() + 1e-5)
            return super().forward(x).relu()

    def program(session):
        module, call = session.compiled(lambda: Standardised(3, 4, 3))
        values = []
        for batch in session.batches(2, 3, 6, 6):
            with torch.no_grad():
                values.append(call(batch))
            values += programs.state(module)
        return values

    way.compare(program, on_skip="silent")
