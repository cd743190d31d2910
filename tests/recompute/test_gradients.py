"""Gradients, results and random numbers are bitwise those of torch's checkpoint and of none."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torchs
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import cgpass
from tests.recompute.steps import check, plain, same, step, tensor
from tests.unit.runtime.leaves import Listed


def structures(checkpoint, model, x):
    def fn(pair, *, table, factor, name):
        y = F.dropout(pair[0] * table["w"] + pair[1][0], 0.5) * factor
        return {"y": y.sin(), "name": name, "rest": [y.exp(), None, 3]}

    pair, table = (x, [x * 2]), {"w": model[0].up.weight[:4, :]}
    out = checkpoint(fn, pair, table=table, factor=0.5, name="n")
    assert (out["name"], out["rest"][1:]) == ("n", [None, 3])
    (out["y"] * out["rest"][0]).sum().backward()
    return [out["y"].detach()]


def gradients_of_gradients(checkpoint, model, x):
    y = checkpoint(lambda x: F.dropout(x.sin().exp(), 0.5), x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    grad.square().sum().backward()
    return [grad.detach()]


def some_inputs(checkpoint, model, x):
    y = checkpoint(model[1], checkpoint(model[0], x)).sum()
    grads = torch.autograd.grad(y, [model[0].up.weight, x], retain_graph=True)
    y.backward(inputs=[model[1].down.bias])
    return list(grads)


def gradient_inside(checkpoint, model, x):
    def fn(x):
        inner = x.detach().sin().requires_grad_()
        energy = F.dropout(inner, 0.5).exp().square().sum()
        (force,) = torch.autograd.grad(energy, inner)
        return (x * force).exp()

    y = checkpoint(fn, x)
    y.sum().backward()
    return [y.detach()]


@pytest.mark.parametrize(
    "program", [structures, gradients_of_gradients, some_inputs, gradient_inside]
)
def test_the_bits_of_torchs_checkpoint_and_of_none(program):
    check(program)


@pytest.mark.parametrize("outer", [False, True])
def test_torchs_reentrant_checkpoint_inside_and_around(outer):
    theirs = functools.partial(torchs, use_reentrant=True)

    def program(checkpoint, model, x):
        around, inside = (theirs, checkpoint) if outer else (checkpoint, theirs)
        if checkpoint is plain:
            around = inside = plain
        y = around(lambda x: inside(model[1], F.dropout(x, 0.2)), x)
        y.square().sum().backward()
        return [y.detach()]

    same(step(program, cgpass.checkpoint), step(program, plain))


@pytest.mark.parametrize("cache", [True, False])
def test_autocast_and_the_default_device_are_restored(cache):
    seen = []

    def fn(x, block):
        here = torch.get_default_device().type
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled(), here))
        return block(x)

    def program(checkpoint, model, x):
        enabled = torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache)
        with enabled, torch.device("meta"):
            y = checkpoint(fn, x, model[0])
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=not cache):
            y.sum().backward()
        return [y.detach()]

    check(program)
    assert seen == [(True, cache, "meta")] * len(seen)


def test_selective_checkpointing():
    aten, listed = torch.ops.aten, Listed()
    save = functools.partial(create_selective_checkpoint_contexts, [aten.mm.default])

    def program(checkpoint, model, x):
        w = model[0].up.weight[:8]
        y = checkpoint(lambda x: F.dropout(torch.mm(torch.mm(x, w).sin(), w), 0.5).exp(), x)
        listed.ops.clear()
        with listed:
            y.sum().backward()
        return [y.detach()]

    check(program, context_fn=save)
    step(program, cgpass.checkpoint, context_fn=save)
    assert aten.sin.default in listed.ops
    assert listed.ops.count(aten.mm.default) == 4  # two products, two gradients each


def test_saved_tensor_hooks_around_a_checkpoint_see_its_arguments():
    packed = []

    def pack(x):
        packed.append(tuple(x.shape))
        return x.clone()

    x = tensor(3, 5, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = cgpass.checkpoint(lambda x: x.sin().exp(), x)
    assert packed == [(3, 5)]
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().sin().exp() * x.detach().cos())


def test_an_argument_changed_in_place_before_the_backward_is_autograds_own_error():
    x = tensor(3, requires_grad=True)
    z = x.sin()
    y = cgpass.checkpoint(lambda z: z.exp().sin(), z)
    z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_size_among_the_arguments_stays_one():
    x = torch.randn(3, requires_grad=True)
    cgpass.checkpoint(
        lambda x, size: x.exp() * size.numel(), x, torch.Size([2, 3])
    ).sum().backward()
    assert torch.equal(x.grad, x.exp() * 6)
