"""Programs of PyTorch's issue tracker in which CUDA graphs failed: a program is named after its number."""

import pytest
import torch
from torch import nn

from cgpass.errors import CaptureError
from tests.usage.programs import ALL, MLP, Ways, gradients, state

ways = Ways()
SMALL = {"min_partition_ops": 1}
"""These functions are as short as in the issues."""


@ways(settings=ALL)
def issue_96693_accumulated_gradients(session):
    """Four microbatches whose bias gradients add up to one."""
    module, call = session.compiled(lambda: nn.Sequential(MLP(), nn.Linear(8, 1)))
    for _ in range(4):
        for batch in session.batches(4, 8, count=4):
            (call(batch).mean() / 4).backward()
        assert module[1].bias.grad.item() == 1.0
        yield gradients(module)
        module.zero_grad()


@ways(settings=ALL, **SMALL)
def issue_152887_function_fed_its_own_output(session):
    call = session.compile(lambda x: x + 1)
    for x in session.batches(2, count=4):
        y = call(x)
        yield [x, y, call(y)]


@ways(replays="some")
def issue_153222_a_graph_retained_across_steps(session):
    module, call = session.compiled(MLP)
    before = None
    for batch in session.batches(4, 8, count=8):
        loss = call(batch).square().mean()
        both = loss if before is None else loss + before
        both.backward(retain_graph=True)
        before = loss
        yield [both.detach(), *gradients(module)]
        module.zero_grad()


@ways(**SMALL)
def issue_169545_gradients_of_vectors_add_up(session):
    module, call = session.compiled(lambda: nn.Linear(10, 1), fullgraph=True)
    for x in session.batches(10, count=5):
        loss = call(x.requires_grad_()).clone().sum().clone()
        loss.backward()
        yield [loss.detach(), x.grad, *gradients(module)]


@ways(**SMALL)
def issue_170604_marking_steps_changes_nothing(session):
    call, x = session.compile(lambda x: torch.matmul(x, x)), session.randn(10, 10)
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        y = call(x)
        yield [y]
        x = y / y.norm()


@ways()
def issue_181723_gradients_are_no_memory_of_the_graph(session):
    module, call = session.compiled(MLP)
    call(session.randn(4, 8)).sum().backward()
    first = [p.grad for p in module.parameters()]
    for p in module.parameters():
        p.grad = None
    for batch in session.batches(4, 8):
        call(batch).square().mean().backward()
        for p, grad in zip(module.parameters(), first, strict=True):
            p.grad, grad = grad.add_(p.grad), p.grad
            yield [grad, p.grad.clone()]
            p.grad = None


@ways(most={"recordings": 6})
def issue_182531_addresses_that_take_turns_are_recorded_once_each(session):
    module, call = session.compiled(MLP)
    sets = [[p.data * factor for p in module.parameters()] for factor in (1.0, 0.5, 2.0)]
    with torch.no_grad():
        for number, batch in enumerate(session.batches(4, 8, count=24)):
            for p, data in zip(module.parameters(), sets[number % 3], strict=True):
                p.data = data
            yield [call(batch)]


@ways(replays="some", on_skip="silent")
def issue_183313_a_weight_replaced_through_data_in_the_forward(session):
    class Standardised(nn.Conv2d):
        def forward(self, x):
            w = self.weight
            self.weight.data = (w - w.mean()) / (w.std() + 1e-5)
            return super().forward(x).relu()

    module, call = session.compiled(lambda: Standardised(3, 4, 3))
    for batch in session.batches(2, 3, 6, 6):
        with torch.no_grad():
            out = call(batch)
        yield [out, *state(module)]


@ways(replays="some")
def issue_188755_a_result_marked_static(session):
    table = session.randn(4, 8)
    torch._dynamo.mark_static_address(table)

    def fn(x):
        table.mul_(0.5).add_(x)
        return table, (table * x).sin()

    call = session.compile(fn)
    for batch in session.batches(4, 8):
        same, out = call(batch)
        assert same.data_ptr() == table.data_ptr()
        yield [same.clone(), out]


@ways(most={"recordings": 12})
def issue_191369_results_of_one_function_change_places_in_the_next(session):
    make = session.compile(lambda x: tuple((x * n).sin().cos() for n in (1, 2, 3)))
    use = session.compile(lambda a, b: (a * 2 - b).exp().cos())
    for number in range(18):
        parts = make(session.randn(4, 8))
        yield [use(parts[number % 3], parts[(number + 1) % 3])]


@ways.everywhere
def test_issues(way, program):
    program.check(way)


def test_124506_what_cannot_be_captured_is_an_error_where_that_is_asked_for(way):
    @torch.library.custom_op("cgpass_tests_124506::read", mutates_args=())
    def read(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    read.register_fake(torch.empty_like)
    session = way.session(on_skip="raise", unsafe_ops=("cgpass_tests_124506::read",))
    call = session.compile(lambda x: read((x.sin() + 1).cos().exp()) + 1)
    with pytest.raises(Exception, match="cgpass_tests_124506") as error:
        call(session.randn(4, 8))
    assert isinstance(getattr(error.value, "inner_exception", None) or error.value, CaptureError)
