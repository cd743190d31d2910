"""Ways to hold, keep, hand on and edit what a compiled function returned."""

import collections
import copy
import io

import pytest
import torch
from torch import nn

from tests.usage import programs
from tests.usage.programs import MLP, Tied, assert_replays, long_enough


def losses_in_a_list(session):
    """Losses for logging: with their graph, detached, and as a running sum."""
    module, call = session.compiled(MLP)
    kept, detached, total = [], [], 0.0
    for batch in session.batches(4, 8, count=10):
        loss = call(batch).square().mean()
        loss.backward()
        kept.append(loss)
        detached.append(loss.detach())
        total = total + loss.detach()
        module.zero_grad()
    return [*(loss.detach() for loss in kept), *detached, total]


def test_losses_in_a_list(slow_way):
    assert_replays(slow_way.compare(losses_in_a_list))


def test_a_loss_computed_inside_and_kept_with_its_graph(way):
    def program(session):
        module = session.module(MLP)
        call = session.compile(lambda x, y: (module(x) - y).square().mean())
        losses = []
        for batch in session.batches(4, 8, count=10):
            losses.append(call(batch, batch.roll(1)))
            losses[-1].backward()
            module.zero_grad()
        return [loss.detach() for loss in losses]

    way.compare(program)


def test_logits_kept_for_ten_steps(way):
    def program(session):
        _, call = session.compiled(Tied)
        kept, means = collections.deque(maxlen=10), []
        with torch.no_grad():
            for ids in programs.tokens(16, 2, 5)(session, 25):
                kept.append(call(ids))
                means.append(torch.stack(tuple(kept)).mean(0))
        return [*means, *kept]

    way.compare(program)


def test_the_function_fed_its_own_output_twice_and_trained_through(way):
    def program(session):
        module, call = session.compiled(MLP)
        values = []
        for batch in session.batches(4, 8):
            once = call(batch)
            thrice = call(call(once))
            (once + thrice).square().mean().backward()
            values += [once.detach(), thrice.detach(), *programs.gradients(module)]
            module.zero_grad()
        return values

    way.compare(program)


def test_results_of_autograd_grad_are_kept(way):
    def program(session):
        module, call = session.compiled(MLP)
        kept = []
        for batch in session.batches(4, 8, count=10):
            batch.requires_grad_()
            inputs = (batch, *module.parameters())
            kept += torch.autograd.grad(call(batch).square().mean(), inputs)
        return kept

    assert_replays(way.compare(program))


def test_gradients_are_handed_to_the_parameters_of_another_model(way):
    def program(session):
        module, call = session.compiled(MLP)
        master = session.module(MLP).double()
        optimizer = torch.optim.AdamW(master.parameters(), lr=0.01)
        direct = session.module(MLP)
        momentum = torch.optim.SGD(direct.parameters(), lr=0.1, momentum=0.9)
        for batch in session.batches(4, 8, count=8):
            call(batch).square().mean().backward()
            for p, wide, same in zip(
                module.parameters(), master.parameters(), direct.parameters(), strict=True
            ):
                wide.grad = p.grad.double()
                same.grad, p.grad = p.grad, None
            optimizer.step()
            momentum.step()  # its first buffers are the gradients themselves
            with torch.no_grad():
                for p, wide in zip(module.parameters(), master.parameters(), strict=True):
                    p.copy_(wide)
        return programs.state(module) + programs.state(direct)

    assert_replays(way.compare(program))


def test_gradients_are_clipped_and_scaled_in_place_and_stay(way):
    def program(session):
        module, call = session.compiled(MLP)
        kept = []
        for batch in session.batches(4, 8, count=8):
            call(batch).square().mean().backward()
            kept.append(nn.utils.clip_grad_norm_(module.parameters(), 0.01))
            for p in module.parameters():
                kept.append(p.grad.mul_(3))
            module.zero_grad()
        return kept

    assert_replays(way.compare(program))


def test_outputs_with_gradient_are_edited_before_the_backward(way):
    def program(session):
        module, call = session.compiled(MLP)
        values = []
        for number, batch in enumerate(session.batches(4, 8, count=9)):
            out = call(batch)
            if number % 3 == 0:
                edited = out.clone().add_(1).relu_()
            elif number % 3 == 1:
                edited = out.mul_(2)
            else:
                edited = out
                edited[1:3] = 0
            edited.square().mean().backward()
            values += [out.detach(), edited.detach(), *programs.gradients(module)]
            module.zero_grad()
        return values

    assert_replays(way.compare(program))


def test_outputs_are_edited_without_gradient_between_calls(way):
    def program(session):
        module, call = session.compiled(MLP)
        outs = []
        for batch in session.batches(4, 8, count=8):
            out = call(batch)
            out.sum().backward()
            with torch.no_grad():
                out.add_(1)
                if outs:
                    outs[-1].mul_(out)
            outs.append(out)
        return [*(out.detach() for out in outs), *programs.gradients(module)]

    assert_replays(way.compare(program))


def test_an_edited_output_that_the_backward_needs_never_gives_a_wrong_gradient(way):
    """Eager raises; memory of its own for the output gives the true gradient. Nothing in between."""

    def fn(x, weight):
        y = x @ weight
        return y, y.square().sum(), y.sin().cos().sum()

    torch.compiler.reset()
    session = way.session()
    weight = session.randn(8, 8).requires_grad_()
    call = session.compile(fn)
    for number, batch in enumerate(session.batches(4, 8)):
        (expected,) = torch.autograd.grad(fn(batch, weight)[1], weight)
        out, loss, _ = call(batch, weight)
        if number % 2 == 0:
            torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], expected)
            continue
        out.detach().mul_(2)
        message = ""
        try:
            (found,) = torch.autograd.grad(loss, weight)
        except RuntimeError as error:
            found, message = expected, str(error)
        torch.testing.assert_close(found, expected)
        assert not message or "modified by an inplace operation" in message


def test_two_outputs_are_views_of_what_is_not_returned(way):
    def program(session):
        module = session.module(MLP)

        def halves(x):
            return module(x).chunk(2, dim=-1)

        call = session.compile(halves)
        values = []
        for batch in session.batches(4, 8):
            left, right = call(batch)
            left.square().mean().backward()
            values += [left.detach(), right.detach(), *programs.gradients(module)]
            del left
            values.append(right.detach())
        return values

    assert_replays(way.compare(program))


def test_outputs_that_are_inputs_parameters_and_views_of_them(way):
    def program(session):
        module = session.module(MLP)

        def fn(x):
            weight = module.layers[0].weight
            return x, x[1:], weight, weight.t(), module(x)

        call = session.compile(fn)
        values = []
        for batch in session.batches(4, 8):
            same, part, weight, turned, out = call(batch)
            assert same is batch
            assert weight is module.layers[0].weight
            assert turned.data_ptr() == weight.data_ptr()
            assert part.data_ptr() == batch[1:].data_ptr()
            (out.square().mean() + turned.sum()).backward()
            values += [same, part.clone(), turned.detach().clone(), out.detach()]
            values += programs.gradients(module)
            with torch.no_grad():
                turned.add_(0.1)
        return values

    assert_replays(way.compare(program))


def test_one_result_returned_twice(way):
    def program(session):
        def fn(x):
            y = long_enough(x)
            return y, {"again": y, "turned": y.t()}, [y, None, 3]

        call = session.compile(fn)
        values = []
        for batch in session.batches(4, 8):
            y, named, (third, nothing, three) = call(batch)
            y.add_(1)
            assert (nothing, three) == (None, 3)
            values += [y, named["again"], named["turned"], third]
        return values

    assert_replays(way.compare(program))


def test_slices_outlive_their_whole(way):
    def program(session):
        _, call = session.compiled(MLP)
        values = []
        with torch.no_grad():
            for batch in session.batches(4, 8, count=10):
                out = call(batch)
                values += [out[0], out[:, 3], *out.split(2), out.t(), out.flatten()[5]]
                del out
        return values

    way.compare(program)


def test_owned_outputs_through_dlpack(way):
    def program(session):
        module, call = session.compiled(MLP)
        kept = []
        for batch in session.batches(4, 8, count=10):
            out = call(batch)
            kept.append(torch.from_dlpack(out.detach()))
            out.square().mean().backward()
            kept += [torch.from_dlpack(p.grad) for p in module.parameters()]
            del out
            module.zero_grad()
        return kept

    assert_replays(way.compare(program, outputs="owned"))


def test_arrays_of_outputs(way):
    def program(session):
        _, call = session.compiled(MLP)
        arrays = []
        with torch.no_grad():
            for batch in session.batches(4, 8, count=10):
                arrays.append(call(batch).cpu().numpy())
        return [torch.from_numpy(array) for array in arrays]

    pytest.importorskip("numpy")
    way.compare(program, outputs="owned")  # on CPU an array is a bare address


def test_outputs_become_parameters_buffers_and_averages(way):
    def program(session):
        module, call = session.compiled(MLP)
        mean = session.randn(4, 8)
        trained = []
        for batch in session.batches(4, 8):
            out = call(batch)
            out.square().mean().backward()
            mean.lerp_(out.detach(), 0.1)
            parameter = nn.Parameter(out.detach())
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            parameter.square().sum().backward()
            optimizer.step()
            trained.append(parameter.data)
        module.register_buffer("mean", mean)
        module.register_buffer("last", out.detach())
        values = []
        for batch in session.batches(4, 8, count=4):
            values.append(call(batch).detach())
        return [*trained, *values, *programs.state(module)]

    way.compare(program)


def test_outputs_are_copied_deeply_pickled_and_stored(way):
    def program(session):
        _, call = session.compiled(MLP)
        values = []
        with torch.no_grad():
            for batch in session.batches(4, 8):
                out = call(batch)
                file = io.BytesIO()
                torch.save(out[1:], file)
                file.seek(0)
                values += [copy.deepcopy(out), torch.load(file), out.untyped_storage().nbytes()]
        return values

    assert_replays(way.compare(program))


def test_an_iterator_holds_one_result_while_it_asks_for_the_next(way):
    def program(session):
        _, call = session.compiled(MLP)

        def results():
            for batch in session.batches(4, 8, count=12):
                yield call(batch)

        with torch.no_grad():
            return [(a + b).clone() for a, b in zip(results(), results(), strict=True)]

    assert_replays(way.compare(program))


def test_a_closure_over_an_output_called_much_later(way):
    def program(session):
        _, call = session.compiled(MLP)
        thunks = []
        for batch in session.batches(4, 8, count=10):
            out = call(batch)
            thunks.append(lambda out=out: out.detach() * 2)
        return [thunk() for thunk in thunks]

    way.compare(program)


def test_the_memory_of_an_output_is_replaced_by_the_user(way):
    def program(session):
        _, call = session.compiled(MLP)
        kept = []
        with torch.no_grad():
            for number, batch in enumerate(session.batches(4, 8, count=9)):
                out = call(batch)
                if number % 3 == 0:
                    out.data = out.data * 2
                elif number % 3 == 1:
                    out.set_(session.randn(3, 3))
                else:
                    out.resize_(2, 8)
                kept.append(out)
        return kept

    way.compare(program)
