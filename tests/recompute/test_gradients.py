"""Gradients, results and random numbers are bitwise those of torch's checkpoint and of none."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import cgpass
from tests.recompute.steps import check, plain, same, step, tensor


@pytest.fixture(params=[False, True], ids=["hooks", "reentrant"])
def reentrant(request):
    return request.param


def chain(checkpoint, model, x):
    for block in model:
        x = checkpoint(block, x)
    loss = x.square().sum()
    loss.backward()
    return [loss.detach(), torch.rand(3)]


def test_a_chain_with_dropout(reentrant):
    check(chain, use_reentrant=reentrant)


def test_dropout_between_and_after_checkpoints(reentrant):
    def program(checkpoint, model, x):
        y = checkpoint(model[0], F.dropout(x, 0.3))
        y = F.dropout(checkpoint(model[1], F.dropout(y, 0.3)), 0.5)
        y.sum().backward()
        return [y.detach(), torch.rand(3)]

    check(program, use_reentrant=reentrant)


def test_several_forwards_and_backwards_in_any_order(reentrant):
    def program(checkpoint, model, x):
        losses = [checkpoint(model[i % 3], x * i).square().sum() for i in range(5)]
        for i in (3, 0, 4, 1):  # the backward of 2 never comes
            losses[i].backward()
        return [loss.detach() for loss in losses]

    check(program, use_reentrant=reentrant)


def test_numbers_drawn_between_forward_and_backward_do_not_matter(reentrant):
    def program(checkpoint, model, x):
        y = checkpoint(model[0], x)
        between = torch.rand(7)
        torch.manual_seed(99)
        y.sum().backward()
        return [between, torch.rand(3)]

    check(program, use_reentrant=reentrant)


def test_the_gradient_is_zero_where_dropout_made_the_output_zero(reentrant):
    x = tensor(64, 64, requires_grad=True)
    y = cgpass.checkpoint(F.dropout, x, 0.5, use_reentrant=reentrant)
    y.sum().backward()
    assert 0.4 < (y != 0).float().mean() < 0.6
    assert torch.equal(x.grad != 0, y != 0)


def test_accumulation_over_microbatches(reentrant):
    def program(checkpoint, model, x):
        for part in x.chunk(4):
            checkpoint(model[1], checkpoint(model[0], part)).sum().backward()
        return [torch.rand(3)]

    check(program, use_reentrant=reentrant)


def test_arguments_that_do_not_require_grad():
    def program(checkpoint, model, x):
        y = checkpoint(model[0], x.detach())
        y.sum().backward()
        return [y.detach()]

    check(program)


def test_keyword_arguments_nested_structures_and_results_that_are_no_tensors():
    def fn(pair, *, table, factor, name):
        y = F.dropout(pair[0] * table["w"] + pair[1][0], 0.5) * factor
        return {"y": y.sin(), "name": name, "rest": [y.exp(), None, 3]}

    def program(checkpoint, model, x):
        weight = model[0].up.weight
        pair, table = (x, [x * 2]), {"w": weight[:4, :]}
        out = checkpoint(fn, pair, table=table, factor=0.5, name="n")
        assert (out["name"], out["rest"][1:]) == ("n", [None, 3])
        (out["y"] * out["rest"][0]).sum().backward()
        return [out["y"].detach()]

    check(program)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # torch's
def test_a_chain_of_nested_checkpoints(reentrant):
    def program(checkpoint, model, x):
        def inner(x):
            return F.dropout(checkpoint(model[0], F.dropout(x, 0.2)), 0.2)

        def middle(x):
            return F.dropout(checkpoint(inner, x.sin()), 0.2) * checkpoint(model[1], x)

        y = checkpoint(middle, x)
        y.square().sum().backward()
        return [y.detach(), torch.rand(3)]

    check(program, use_reentrant=reentrant)


@pytest.mark.parametrize("outer", [False, True])
def test_one_kind_inside_the_other(outer):
    def program(checkpoint, model, x):
        def fn(x):
            return checkpoint(model[1], F.dropout(x, 0.2), use_reentrant=not outer)

        y = checkpoint(fn, x, use_reentrant=outer)
        y.square().sum().backward()
        return [y.detach()]

    same(step(program, cgpass.checkpoint), step(program, plain))


def test_retain_graph_recomputes_for_each_backward():
    def program(checkpoint, model, x):
        y = checkpoint(lambda x: checkpoint(model[1], model[0](x)), x).square().sum()
        y.backward(retain_graph=True)
        torch.rand(3)
        y.backward(retain_graph=True)
        y.backward()
        return [torch.rand(3)]

    check(program)


def test_retain_graph_reentrant():
    def program(checkpoint, model, x):
        y = checkpoint(model[1], x).square().sum()
        y.backward(retain_graph=True)
        y.backward()
        return [torch.rand(3)]

    check(program, use_reentrant=True)


def test_gradients_of_gradients():
    def program(checkpoint, model, x):
        y = checkpoint(lambda x: F.dropout(x.sin().exp(), 0.5), x)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        grad.square().sum().backward()
        return [grad.detach()]

    check(program)


def test_autograd_grad_of_some_inputs():
    def program(checkpoint, model, x):
        y = checkpoint(model[1], checkpoint(model[0], x)).sum()
        grads = torch.autograd.grad(y, [model[0].up.weight, x], retain_graph=True)
        y.backward(inputs=[model[1].down.bias])
        return list(grads)

    check(program)


def test_a_gradient_taken_inside_the_checkpoint():
    def fn(x):
        inner = x.detach().sin().requires_grad_()
        energy = F.dropout(inner, 0.5).exp().square().sum()
        (force,) = torch.autograd.grad(energy, inner)
        return (x * force).exp()

    def program(checkpoint, model, x):
        y = checkpoint(fn, x)
        y.sum().backward()
        return [y.detach()]

    check(program)


@pytest.mark.parametrize("cache", [True, False])
def test_autocast_is_restored(reentrant, cache):
    seen = []

    def fn(x, block):
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
        return block(x)

    def program(checkpoint, model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
            y = checkpoint(fn, x, model[0])
        y.sum().backward()
        return [y.detach()]

    check(program, use_reentrant=reentrant)
    assert seen == [(True, cache)] * len(seen)


def test_autocast_around_the_backward_does_not_reach_the_recomputation(reentrant):
    def program(checkpoint, model, x):
        y = checkpoint(model[0], x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y.sum().backward()
        return [y.detach()]

    check(program, use_reentrant=reentrant, against=("torch",))


def test_the_default_device_is_restored(reentrant):
    seen = []

    def fn(x):
        seen.append(torch.empty(1).device)
        return x.sin().exp()

    x = tensor(3, requires_grad=True)
    with torch.device("meta"):
        y = cgpass.checkpoint(fn, x, use_reentrant=reentrant)
    y.sum().backward()
    assert seen == [torch.device("meta")] * 2


def test_without_grad_mode_the_function_just_runs(reentrant):
    calls = []

    def fn(x):
        calls.append(torch.is_grad_enabled())
        return x.sin()

    x = tensor(3, requires_grad=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not cgpass.checkpoint(fn, x, use_reentrant=reentrant).requires_grad
    assert calls == [False, False]


def test_changes_in_place_inside_the_checkpoint():
    def fn(x):
        y = x.sin()
        y.mul_(2)
        z = y.exp() * 1
        z.add_(1)
        return z * y

    def program(checkpoint, model, x):
        y = checkpoint(fn, x)
        y.sum().backward()
        return [y.detach()]

    check(program)


def test_module_hooks_run_in_the_recomputation_too():
    ran = []
    block = torch.nn.Linear(4, 4)
    block.register_forward_hook(lambda *a: ran.append("forward"))
    block.register_full_backward_hook(lambda *a: ran.append("backward"))
    x = tensor(2, 4, requires_grad=True)
    x.register_hook(lambda grad: ran.append("x"))
    cgpass.checkpoint(block, x).square().sum().backward()
    assert ran.count("backward") == 1
    assert ran.count("x") == 1
    assert ran.count("forward") == 1  # stopped early: nothing after the last saved tensor is needed


def test_selective_checkpointing():
    ran = []

    def fn(x, w):
        ran.append("fn")
        return F.dropout(torch.mm(torch.mm(x, w).sin(), w).sigmoid(), 0.5).exp()

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(str(func))
            return func(*args, **kwargs or {})

    save = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def program(checkpoint, model, x):
        w = model[0].up.weight[:8]
        y = checkpoint(fn, x, w)
        ran.clear()
        with Count():
            y.sum().backward()
        return [y.detach()]

    check(program, context_fn=save)
    check(program, context_fn=save, against=())
    assert "fn" in ran
    forwards_again = ran[ran.index("fn") :]
    assert "aten.sin.default" in forwards_again
    assert forwards_again.count("aten.mm.default") == 4  # two products, two gradients each


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


def test_save_on_cpu_around_a_chain():
    def program(checkpoint, model, x):
        with torch.autograd.graph.save_on_cpu():
            return chain(checkpoint, model, x)

    check(program)


def test_a_custom_function_inside():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y, None)
            return x * y

        @staticmethod
        def backward(ctx, grad):
            x, y, nothing = ctx.saved_tensors
            assert nothing is None
            return grad * y, grad * x

    def program(checkpoint, model, x):
        y = checkpoint(lambda x: Twice.apply(F.dropout(x, 0.5), x.cos()).exp(), x)
        y.sum().backward()
        return [y.detach()]

    check(program)


def test_an_argument_changed_in_place_before_the_backward_is_autograds_own_error():
    x = tensor(3, requires_grad=True)
    z = x.sin()
    y = cgpass.checkpoint(lambda z: z.exp().sin(), z)
    z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_selective_checkpointing_inside_a_checkpoint():
    save = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def fn(x, w):
        return F.dropout(torch.mm(torch.mm(x, w).sin(), w).sigmoid(), 0.5).exp()

    def program(checkpoint, model, x):
        w = model[0].up.weight[:8]

        def outer(x):
            return checkpoint(fn, F.dropout(x.sin(), 0.5), w, context_fn=save).cos()

        y = checkpoint(outer, x)
        y.sum().backward()
        return [y.detach()]

    check(program)


def test_a_checkpoint_inside_selective_checkpointing():
    save = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def fn(x, w):
        return F.dropout(torch.mm(torch.mm(x, w).sin(), w).sigmoid(), 0.5).exp()

    def program(checkpoint, model, x):
        w = model[0].up.weight[:8]

        def outer(x):
            return checkpoint(fn, F.dropout(x.sin(), 0.5), w).cos()

        y = checkpoint(outer, x, context_fn=save)
        y.sum().backward()
        return [y.detach()]

    check(program, against=("plain",))
