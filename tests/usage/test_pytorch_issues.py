"""Programs of PyTorch's issue tracker in which CUDA graphs failed: a test is named after its number."""

import collections
import logging
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cgpass.errors import CaptureError
from tests.usage import programs
from tests.usage.programs import MLP, assert_replays

SMALL = {"min_partition_ops": 1}
"""These functions are as short as in the issues."""


def test_83148_checkpoint_around_a_module_with_dropout(way):
    def program(session):
        module, call = session.compiled(lambda: nn.Sequential(MLP(), nn.Dropout(0.5)))
        values = []
        for batch in session.batches(4, 8, count=5):
            batch.requires_grad_()
            out = checkpoint(call, batch, use_reentrant=False)
            out.square().mean().backward()
            values += [out.detach(), batch.grad, *programs.gradients(module)]
            module.zero_grad()
        return values

    way.compare(program)


def accumulated(session):
    """Four microbatches whose bias gradients add up to one."""
    module = session.module(lambda: nn.Sequential(MLP(), nn.Linear(8, 1)))
    call = session.compile(module)
    values = []
    for _ in range(4):
        for batch in session.batches(4, 8, count=4):
            (call(batch).mean() / 4).backward()
        assert module[1].bias.grad.item() == 1.0
        values += programs.gradients(module)
        module.zero_grad()
    return values


def test_96693_accumulated_gradients(slow_way):
    assert_replays(slow_way.compare(accumulated))


def test_104435_outputs_of_generation_steps_in_a_list(way):
    def program(session):
        _, call = session.compiled(programs.Tied)
        ids, logits = session.tensor([[1, 2, 3]]), []
        with torch.inference_mode():
            for _ in range(8):
                logits.append(call(ids[:, -3:])[:, -1])
                ids = torch.cat([ids, logits[-1].argmax(-1, keepdim=True)], dim=1)
            return [ids.clone(), *(row.clone() for row in logits)]

    way.compare(program)


def test_119241_a_number_on_the_host_does_not_stop_the_rest(way):
    def program(session):
        scale = torch.tensor(0.5)  # stays on the host
        call = session.compile(lambda x: ((x.sin() * scale).cos() + scale).exp())
        return [call(batch) for batch in session.batches(4, 8)]

    counters = way.compare(program, on_skip="silent")
    assert counters["replays"] > 0, counters


def test_122192_two_functions_after_two_and_after_three_rounds(way):
    def program(session):
        cosine, sine = session.compile(torch.cos), session.compile(torch.sin)
        values = []
        for rounds in (1, 2, 3):
            for _ in range(rounds):
                y = cosine(session.randn(5))
            z = sine(session.randn(5))
            values += [y, z]
        return values

    way.compare(program, **SMALL)


def test_124506_what_cannot_be_captured_is_an_error_where_that_is_asked_for(way):
    @torch.library.custom_op("cgpass_tests_124506::read", mutates_args=())
    def read(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    read.register_fake(torch.empty_like)
    torch.compiler.reset()
    unsafe = ("cgpass_tests_124506::read",)
    session = way.session(on_skip="raise", unsafe_ops=unsafe)
    call = session.compile(lambda x: read((x.sin() + 1).cos().exp()) + 1)
    with pytest.raises(Exception, match="cgpass_tests_124506") as error:
        call(session.randn(4, 8))
    assert isinstance(getattr(error.value, "inner_exception", None) or error.value, CaptureError)


def test_126914_hooks_do_not_pile_up_on_outputs(way):
    def program(session):
        module, call = session.compiled(MLP)
        fired, values = collections.Counter(), []
        for number, batch in enumerate(session.batches(4, 8, count=6)):
            out = call(batch)
            assert not out._backward_hooks
            out.register_hook(lambda g, n=number: fired.update([n]))
            out.square().mean().backward()
            values += programs.gradients(module)
        return [*values, *fired.items()]

    assert_replays(way.compare(program))
    assert way.run(program)[-7:-1] == [(number, 1) for number in range(6)]


def test_127145_the_warning_names_what_moved(way, caplog):
    def program(session):
        module, call = session.compiled(MLP)
        values, kept = [], []
        with torch.no_grad():
            for batch in session.batches(4, 8, count=10):
                values.append(call(batch))
                kept.append(module.layers[2].weight.data)
                module.layers[2].weight.data = kept[-1] * 1.1
        return values

    with caplog.at_level(logging.WARNING, "cgpass"):
        way.compare(program, max_copied_mib=0)
    warned = [r.getMessage() for r in caplog.records if "max_copied_mib=0" in r.getMessage()]
    assert len(warned) == 1, warned
    assert re.search(r"layers.2.weight.* read at \w+\.py:\d+", warned[0]), warned


def test_128396_prod(way):
    def program(session):
        module, linear = session.module(lambda: nn.Linear(8, 8)), []
        call = session.compile(lambda x: torch.prod(module(x), 1))
        for batch in session.batches(4, 8):
            out = call(batch)
            out.sum().backward()
            linear += [out.detach(), *programs.gradients(module)]
        return linear

    counters = way.compare(program, **SMALL, on_skip="silent")
    assert counters["replays"] > 0, counters


def test_129349_parameters_that_move_for_ever_are_not_recorded_for_ever(way):
    def program(session):
        module, call = session.compiled(MLP)
        values, kept = [], []
        with torch.no_grad():
            for batch in session.batches(4, 8, count=30):
                for p in module.parameters():
                    kept.append(p.data)
                    p.data = p.data * 0.99
                values.append(call(batch))
        return values

    counters = way.compare(program)
    assert counters["recordings"] == 1, counters
    assert counters["plain_calls"] == 0, counters


def test_131009_a_shape_that_changes(way):
    def program(session):
        call = session.compile(lambda x: ((x + 1).sin() * 2).cos())
        return [call(session.randn(n, 3)) for n in (2, 2, 3, 4, 3, 2, 4, 3)]

    assert_replays(way.compare(program))


def keep_both(session):
    call = session.compile(lambda x: torch.matmul(x, x))
    x = session.randn(10, 10)
    values = []
    for _ in range(4):
        y1 = call(x)
        y2 = call(x)
        values += [y1, y2]
    return values


def test_144386_two_results_of_one_function(way):
    assert_replays(way.compare(keep_both, **SMALL))


def test_146569_two_losses_and_the_second_backward(way):
    def program(session):
        module, call = session.compiled(MLP, fullgraph=True)
        values = []
        for batch in session.batches(4, 8):
            first = call(batch).square().mean()
            second = call(batch * 2).square().mean()
            first.backward()
            second.backward()
            values += [first.detach(), second.detach(), *programs.gradients(module)]
            module.zero_grad()
        return values

    assert_replays(way.compare(program))


def test_148439_losses_of_a_schedule_of_microbatches(way):
    def program(session):
        module, call = session.compiled(MLP)
        reduced = []
        for _ in range(3):
            losses, pending = [], collections.deque()
            for batch in session.batches(4, 8, count=6):  # two forwards ahead of the backwards
                pending.append(call(batch).square().mean())
                losses.append(pending[-1].detach())
                if len(pending) > 2:
                    pending.popleft().backward()
            while pending:
                pending.popleft().backward()
            reduced += [torch.stack(losses).mean(), *losses, *programs.gradients(module)]
            module.zero_grad()
        return reduced

    way.compare(program)


def test_152887_function_fed_its_own_output(slow_way):
    def program(session):
        f = session.compile(lambda x: x + 1)
        values = []
        for _ in range(4):
            x = session.randn(2)
            y = f(x)
            z = f(y)
            values += [x, y, z]
        return values

    assert_replays(slow_way.compare(program, **SMALL))


def test_153222_a_graph_retained_across_steps(way):
    def program(session):
        module, call = session.compiled(MLP)
        values, before = [], None
        for batch in session.batches(4, 8, count=8):
            loss = call(batch).square().mean()
            both = loss if before is None else loss + before
            both.backward(retain_graph=True)
            before = loss
            values += [both.detach(), *programs.gradients(module)]
            module.zero_grad()
        return values

    way.compare(program)


class Layer(nn.Module):
    def __init__(self, compile_it):
        super().__init__()
        self.before, self.inner = nn.Linear(8, 8), MLP()
        self.after = nn.Linear(8, 8)
        self.inner_call = [compile_it(self.inner)]

    def forward(self, x):
        return self.after(self.inner_call[0](self.before(x)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_154306_a_compiled_part_of_a_checkpointed_layer(way, reentrant):
    def program(session):
        torch.manual_seed(programs.SEED)
        layers = nn.ModuleList(Layer(session.compile) for _ in range(2)).to(session.device)
        values = []
        for x in session.batches(4, 8, count=6):
            x.requires_grad_()
            out = x
            for layer in layers:
                out = checkpoint(layer, out, use_reentrant=reentrant)
            out.square().mean().backward()
            values += [out.detach(), x.grad, *programs.gradients(layers)]
            layers.zero_grad()
        return values

    way.compare(program)


def test_158551_a_part_called_several_times_in_one_forward(way):
    def program(session):
        module, call = session.compiled(MLP)
        head = session.module(lambda: nn.Linear(24, 1))
        values = []
        for batch in session.batches(4, 8):
            parts = [call(batch.roll(shift, 0)) for shift in range(3)]
            loss = head(torch.cat(parts, -1)).square().mean()
            loss.backward()
            values += [loss.detach(), *programs.gradients(module), *programs.gradients(head)]
            module.zero_grad()
            head.zero_grad()
        return values

    way.compare(program)
