"""Ways to hand in tensors: changed ones, shared ones, kinds that change."""

import dataclasses
import math

import torch
from torch import nn

from tests.usage import programs
from tests.usage.programs import MLP, ConvNet, assert_replays, called_with, long_enough

# ---- changed inputs


class Cached(nn.Module):
    """One attention layer that writes keys and values of a token into a cache."""

    def __init__(self, length=8):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("keys", torch.zeros(2, length, 8))
        self.register_buffer("positions", torch.arange(length), persistent=False)

    def forward(self, x, values, position):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        self.keys.index_copy_(1, position, k)
        values.index_copy_(1, position, v)
        mask = self.positions <= position
        scores = (q @ self.keys.transpose(1, 2)).masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ values


def decode(session):
    """Ten tokens through a cache of eight, which then starts anew with another cache of values."""
    module, call = session.compiled(Cached)
    seen = []
    with torch.no_grad():
        for _ in range(2):
            cache = torch.zeros(2, 8, 8, device=session.device)
            for number in range(6):
                seen.append(call(session.randn(2, 1, 8), cache, session.tensor([number])))
            seen += [cache, module.keys.clone()]
            module.keys.zero_()
    return seen


def test_a_cache_of_keys_and_values(slow_way):
    assert_replays(slow_way.compare(decode))


def test_batch_norm_counts_under_no_grad_and_keeps_its_buffers(way):
    def program(session):
        module, call = session.compiled(ConvNet)
        values = []
        for number, batch in enumerate(session.batches(2, 3, 8, 8, count=9)):
            with torch.set_grad_enabled(number % 2 == 0):
                values.append(call(batch).detach())
            values += programs.state(module)
            if number == 5:
                for layer in module.modules():
                    if isinstance(layer, nn.BatchNorm2d):
                        layer.reset_running_stats()
        return values

    way.compare(program)


def test_an_input_changed_by_the_graph_and_by_the_user_between_calls(way):
    def program(session):
        def fn(x, state):
            state.mul_(0.9).add_(x.sum(0))
            return (state * x).sin()

        call = session.compile(fn)
        state, values = session.randn(8), []
        for number, batch in enumerate(session.batches(4, 8, count=9)):
            values += [call(batch, state), state.clone()]
            if number % 3 == 2:
                state.zero_()
            if number == 4:
                state = session.randn(8)
        return values

    assert_replays(way.compare(program))


def test_an_input_changed_without_gradient_that_needs_one_elsewhere(way):
    def program(session):
        def fn(x, weight):
            with torch.no_grad():
                weight.mul_(0.9)
            return (x @ weight).sin().cos()

        call = session.compile(fn)
        weight, values = session.randn(8, 8).requires_grad_(), []
        for batch in session.batches(4, 8):
            call(batch, weight).sum().backward()
            values += [weight.detach().clone(), weight.grad.clone()]
        return values

    way.compare(program)


def test_an_input_written_in_part_and_one_with_changed_strides(way):
    def fn(x, y):
        x[1:3, ::2] = y[0, 0]
        y.t_()
        return (x.sum() + y).sin().cos()

    way.compare(called_with(fn, lambda s: (s.randn(4, 8), s.randn(4, 8))))


def test_an_intermediate_result_changed_and_returned_before_and_after(way):
    def fn(x):
        y = x.sin() + 1
        before = y.clone()
        y.mul_(2)
        y[0] = before[1]
        return before, y, y.cos()

    assert_replays(way.compare(called_with(fn, lambda s: (s.randn(4, 8),))))


# ---- inputs that share memory


def test_views_of_one_tensor_that_overlap(way):
    def fn(a, b):
        return (a.sin() * 2 - b.cos()) * (a + b)

    def overlapping(session):
        base = session.randn(6, 8)
        return base[:4], base[2:]

    assert_replays(way.compare(called_with(fn, overlapping)))


def test_views_that_overlap_and_one_is_written(way):
    def fn(a, b):
        a.mul_(2).add_(1)
        return (b.sin() + 1).cos() + a

    def overlapping(session):
        base = session.randn(6, 8)
        return base[:4], base[2:]

    way.compare(called_with(fn, overlapping))


def test_windows_that_overlap_themselves(way):
    def fn(windows):
        return (windows.sin() * 2 + windows.sum(-1, keepdim=True)).cos()

    assert_replays(way.compare(called_with(fn, lambda s: (s.randn(12).unfold(0, 4, 2),))))


def test_parameters_and_their_views_as_inputs(way):
    def program(session):
        module = session.module(MLP)

        def fn(x, weight, part):
            return module(x) @ weight.t() + part.sum()

        call = session.compile(fn)
        weight, values = module.layers[0].weight, []
        for batch in session.batches(4, 8):
            out = call(batch, weight, weight[:2])
            out.square().mean().backward()
            values += [out.detach(), *programs.gradients(module)]
            module.zero_grad()
        return values

    way.compare(program)


def test_outputs_of_earlier_calls_and_views_of_them_as_inputs(way):
    def program(session):
        def fn(x, y):
            return (x.sin() + y).cos(), (x - y).exp().clamp(max=2)

        call = session.compile(fn)
        x, y = session.randn(4, 8), session.randn(4, 8)
        values = []
        for number in range(10):
            a, b = call(x, y)
            values += [a, b]
            x, y = ((a, b), (b, a), (a, a), (b.flip(0), a[torch.arange(4)]))[number % 4]
        return values

    way.compare(program)


def test_gradients_as_inputs(way):
    def program(session):
        module, call = session.compiled(MLP)
        shrink = session.compile(lambda gs: [(g * 0.5).sin() / (1 + g.norm()) for g in gs])
        values = []
        for batch in session.batches(4, 8):
            call(batch).square().mean().backward()
            values += shrink([p.grad for p in module.parameters()])
            module.zero_grad()
        return values

    assert_replays(way.compare(program))


# ---- kinds that change


def test_inputs_that_need_a_gradient_or_not(way):
    def program(session):
        module, call = session.compiled(MLP)
        values = []
        for number, batch in enumerate(session.batches(4, 8, count=12)):
            batch.requires_grad_(number % 3 == 0)
            given = batch * 1 if number % 2 else batch
            out = call(given)
            out.square().mean().backward()
            values += [out.detach(), *programs.gradients(module)]
            if batch.requires_grad:
                values.append(batch.grad)
            module.zero_grad()
        return values

    assert_replays(way.compare(program))


def test_tensors_made_in_inference_mode_and_outside(way):
    def program(session):
        module, call = session.compiled(MLP)
        with torch.inference_mode():
            made_inside = session.randn(4, 8)
        values = []
        for number, batch in enumerate(session.batches(4, 8, count=12)):
            if number % 3 == 0:
                with torch.inference_mode():
                    values.append(call(made_inside + batch).clone())
            elif number % 3 == 1:
                with torch.no_grad():
                    values.append(call(made_inside))
            else:
                call(batch).square().mean().backward()
                values += programs.gradients(module)
        return values

    way.compare(program)


def test_a_state_changed_in_inference_mode(way):
    def program(session):
        def fn(x, state):
            state.mul_(0.9).add_(x.sum(0))
            return (state * x).sin()

        call = session.compile(fn)
        outside, values = session.randn(8), []
        with torch.inference_mode():
            inside = session.randn(8)
            for number, batch in enumerate(session.batches(4, 8)):
                chosen = inside if number % 2 else outside
                values += [call(batch, chosen).clone(), chosen.clone()]
        return values

    way.compare(program)


def test_an_optional_input_and_keywords(way):
    def program(session):
        def fn(x, mask=None, *, scale=1.0, reverse=False):
            x = long_enough(x) * scale
            if mask is not None:
                x = x.masked_fill(mask, 0)
            return x.flip(0) if reverse else x

        call = session.compile(fn)
        values = []
        for _ in range(3):
            x = session.randn(4, 8)
            values += [call(x), call(x, x > 0), call(mask=None, x=x, reverse=True)]
            values += [call(x, scale=2.0), call(x, x > 0, reverse=True)]
        return values

    way.compare(program)


@dataclasses.dataclass
class Batch:
    rows: torch.Tensor
    more: list


def test_tensors_in_lists_dicts_and_dataclasses(way):
    def program(session):
        def fn(batch, named):
            x = long_enough(batch.rows) + sum(batch.more)
            return Batch(x * named["scale"], [x, x.t()])

        call = session.compile(fn)
        values = []
        for _ in range(6):
            batch = Batch(session.randn(4, 8), [session.randn(8), session.randn(4, 1)])
            out = call(batch, {"scale": session.randn(8), "unused": session.randn(1)})
            values += [out.rows, *out.more]
        return values

    assert_replays(way.compare(program))


def test_a_number_on_the_host_as_a_tensor(way):
    def program(session):
        call = session.compile(lambda x, n: long_enough(x * n) + n)
        numbers = (1.5, 2.5, 1.5, 3.5, -1.0)
        return [call(session.randn(4, 8), torch.tensor(n)) for n in numbers]

    way.compare(program, on_skip="silent")


def test_numbers_that_change(way):
    def program(session):
        call = session.compile(lambda x, n: long_enough(x * n) + n)
        values = []
        for n in (1, 2, 3, 2, 1.5, 2.5, 1.5, True, False, True, math.pi, 3):
            values.append(call(session.randn(4, 8), n))
        return values

    counters = way.compare(program)
    assert counters["replays"] > 0, counters


def test_autocast_on_and_off_around_the_call(way):
    def program(session):
        module, call = session.compiled(MLP)
        values = []
        for number, batch in enumerate(session.batches(4, 8)):
            with torch.autocast(session.device.type, torch.bfloat16, enabled=number % 2 == 1):
                out = call(batch)
            out.float().square().mean().backward()
            values += [out.detach(), *programs.gradients(module)]
            module.zero_grad()
        return values

    assert_replays(way.compare(program))
