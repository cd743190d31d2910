"""Outputs that share memory although different partitions made them."""

import pytest
import torch

from tests.usage.programs import assert_replays


@torch.library.custom_op("aliases::doubled", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x):
    return torch.empty_like(x)


def output_and_later_part(x):
    y = (x * 2).sin().cos() + 1
    z = doubled(y)
    part = y[1:]
    return y, part, (part * z[1:]).sin().cos().tanh()


def part_and_later_whole(x):
    base = (x * 2).sin().cos() + 1
    z = doubled(base)
    whole = base.view(-1)
    return base[1:], whole, (whole.view(x.shape) * z).sin().cos().tanh()


def parts_of_what_is_not_returned(x):
    base = (x * 2).sin().cos() + 1
    z = doubled(base)
    return base[1:], base[:2], (base * z).sin().cos().tanh()


FUNCTIONS = [output_and_later_part, part_and_later_whole, parts_of_what_is_not_returned]


@pytest.mark.parametrize("outputs", ["shared", "owned"])
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_outputs_share_memory_in_every_call(way, fn, outputs):
    def program(session):
        call = session.compile(fn)
        held, values = [], []
        with torch.no_grad():
            for batch in session.batches(3, 3, count=10):
                first, second, third = call(batch)
                same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
                values.append(same)
                before = second.clone()
                first.add_(1)
                values += [second - before]
                held = [*held[-1:], (first, second, third)]
                values += [tensor.clone() for tensors in held for tensor in tensors]
        return values

    assert_replays(way.compare(program, outputs=outputs, min_partition_ops=1))


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_owned_outputs_never_lie_in_the_pool(setting, fn):
    """Whoever shares memory beyond torch's count of holders is not overwritten either."""
    session = setting.session(outputs="owned", min_partition_ops=1)
    torch.compiler.reset()
    call = session.compile(fn)
    kept = []
    with torch.no_grad():
        for batch in session.batches(3, 3, count=8):
            tensors = call(batch)
            views = [torch.from_dlpack(t) for t in tensors]
            kept.append((views, [t.clone() for t in tensors]))
            del tensors
    for views, expected in kept:
        for view, value in zip(views, expected, strict=True):
            assert torch.equal(view, value)


class Remembers(torch.autograd.Function):
    """Its gradient is the very tensor that its forward saved."""

    @staticmethod
    def forward(ctx, x):
        y = x.sin() * 2 + 1
        ctx.save_for_backward(y)
        return y.cos()

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return y


# torch 2.11 instantiates the class while it traces it
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize("outputs", ["shared", "owned"])
def test_a_gradient_that_is_a_saved_tensor_is_kept(way, outputs):
    def program(session):
        call = session.compile(lambda x: Remembers.apply(x + 1).exp().sin())
        kept = []
        for batch in session.batches(3, 3, count=8):
            x = batch.requires_grad_()
            kept += torch.autograd.grad(call(x).sum(), x)
        return kept

    assert_replays(way.compare(program, outputs=outputs, min_partition_ops=1))
