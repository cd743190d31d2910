"""Programs of PyTorch's issue tracker in which CUDA graphs failed: a program is named after its number."""

import collections

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cgpass.errors import CaptureError
from tests.usage import programs
from tests.usage.programs import ALL, MLP, Ways, gradients, learn, state

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


@ways(replays="none")  # each call's ids have other strides
def issue_104435_outputs_of_generation_steps_in_a_list(session):
    _, call = session.compiled(programs.Tied)
    ids, logits = session.tensor([[1, 2, 3]]), []
    with torch.inference_mode():
        for _ in range(8):
            logits.append(call(ids[:, -3:])[:, -1])
            ids = torch.cat([ids, logits[-1].argmax(-1, keepdim=True)], dim=1)
        return [ids.clone(), *(row.clone() for row in logits)]


@ways(replays="some", on_skip="silent")
def issue_119241_a_number_on_the_host_does_not_stop_the_rest(session):
    scale = torch.tensor(0.5)  # stays on the host
    call = session.compile(lambda x: ((x.sin() * scale).cos() + scale).exp())
    return [call(batch) for batch in session.batches(4, 8)]


@ways(replays="some", **SMALL)
def issue_122192_two_functions_after_two_and_after_three_rounds(session):
    cosine, sine = session.compile(torch.cos), session.compile(torch.sin)
    for rounds in (1, 2, 3):
        for _ in range(rounds):
            y = cosine(session.randn(5))
        yield [y, sine(session.randn(5))]


@ways(replays="some", on_skip="silent", **SMALL)
def issue_128396_prod(session):
    module = session.module(lambda: nn.Linear(8, 8))
    call = session.compile(lambda x: torch.prod(module(x), 1))
    for batch in session.batches(4, 8):
        out = call(batch)
        out.sum().backward()
        yield [out.detach(), *gradients(module)]


@ways(**SMALL)
def issue_144386_two_results_of_one_function(session):
    call, x = session.compile(lambda x: torch.matmul(x, x)), session.randn(10, 10)
    for _ in range(4):
        y1 = call(x)
        y2 = call(x)
        yield [y1, y2]


@ways(replays="some")
def issue_148439_losses_of_a_schedule_of_microbatches(session):
    module, call = session.compiled(MLP)
    for _ in range(3):
        losses, pending = [], collections.deque()
        for batch in session.batches(4, 8, count=6):  # two forwards ahead of the backwards
            pending.append(call(batch).square().mean())
            losses.append(pending[-1].detach())
            if len(pending) > 2:
                pending.popleft().backward()
        while pending:
            pending.popleft().backward()
        yield [torch.stack(losses).mean(), *losses, *gradients(module)]
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


class Layer(nn.Module):
    def __init__(self, compile_it):
        super().__init__()
        self.before, self.inner = nn.Linear(8, 8), MLP()
        self.after = nn.Linear(8, 8)
        self.inner_call = [compile_it(self.inner)]

    def forward(self, x):
        return self.after(self.inner_call[0](self.before(x)))


def a_compiled_part_of_a_checkpointed_layer(*, reentrant):
    def program(session):
        layers = session.module(lambda: nn.ModuleList(Layer(session.compile) for _ in range(2)))
        for x in session.batches(4, 8, count=6):
            out = x.requires_grad_()
            for layer in layers:
                out = checkpoint(layer, out, use_reentrant=reentrant)
            yield [out.detach(), *learn(layers, out.square().mean()), x.grad]

    return program


ways.add(
    {
        f"issue 154306 reentrant {flag}": a_compiled_part_of_a_checkpointed_layer(reentrant=flag)
        for flag in (False, True)
    },
    replays="some",
)


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


@ways(replays="some")
def issue_194124_saved_tensors_of_many_graphs_with_pending_backwards(session):
    modules = [session.module(MLP) for _ in range(3)]
    calls = [session.compile(m) for m in modules]
    for _ in range(5):
        # autograd alone holds what was saved
        pending = [call(session.randn(4, 8)).square().mean() for call in calls]
        calls[0](session.randn(4, 8))
        for loss in pending[::-1]:
            loss.backward()
        for module in modules:
            yield gradients(module)
            module.zero_grad()


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
