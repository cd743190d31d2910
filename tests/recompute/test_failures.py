"""Messages, and that whatever is raised comes through and leaves everything as it was."""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

import cgpass
from cgpass.errors import CheckpointArgumentError, CheckpointError, RNGTrackerError
from tests.recompute.steps import tensor


class Changing:
    """Another function in the recomputation than in the forward."""

    def __init__(self, *fns):
        self.fns = list(fns)

    def __call__(self, *args):
        return self.fns.pop(0)(*args)


def message(error):
    return str(error.value)


def fail_backward(*fns, x=None, **kwargs):
    x = tensor(2, 3, requires_grad=True) if x is None else x
    y = cgpass.checkpoint(Changing(*fns), x, **kwargs)
    with pytest.raises(CheckpointError) as error:
        y.sum().backward()
    return message(error)


SAME = (
    " Both runs must compute the same: let nothing depend on what changes in between, such as a global, a counter, a "
    "cache, or train and eval mode."
)


def test_another_shape():
    assert fail_backward(torch.sin, lambda x: x[:1].sin()) == (
        "cgpass.checkpoint: tensor 0 that Changing saves for its backward was float32[2, 3] on cpu in the forward "
        f"and is float32[1, 3] on cpu in the recomputation.{SAME} "
        'determinism_check="none" leaves this check out.'
    )


def test_another_dtype_and_device():
    found = fail_backward(torch.sin, lambda x: x.double().sin())
    assert "was float32[2, 3] on cpu in the forward and is float64[2, 3] on cpu" in found
    found = fail_backward(torch.sin, lambda x: x.to("meta").sin())
    assert "is float32[2, 3] on meta in the recomputation" in found


def test_fewer_tensors():
    found = fail_backward(lambda x: x.sin().exp().cos(), torch.sin)
    assert found == (
        "cgpass.checkpoint: Changing saved 3 or more tensors for its backward in the forward and 1 in the "
        f"recomputation; tensor 1, float32[2, 3] on cpu, is missing.{SAME}"
    )


def test_determinism_check_none_takes_what_it_gets():
    x = torch.ones(2, 3, requires_grad=True)
    fn = Changing(torch.sin, lambda x: x.double().sin())
    cgpass.checkpoint(fn, x, determinism_check="none").sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(2, 3).double().cos().float())


def test_reading_saved_tensors_twice():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return ctx.saved_tensors[0] * grad + ctx.saved_tensors[0]

    found = fail_backward(Twice.apply, Twice.apply)
    assert found == (
        "cgpass.checkpoint: tensor 0 that Changing saves for its backward, float32[2, 3] on cpu, was needed again "
        "after it was used and freed in the same backward pass. Read ctx.saved_tensors once in a custom function's "
        "backward and keep what it gives."
    )


def test_a_saved_tensor_changed_in_place():
    def fn(x):
        y = x.exp()
        y.add_(1)
        return y.sin()

    assert (
        "tensor 0 that Changing saves for its backward, float32[2, 3] on cpu, was changed in place"
        in (fail_backward(fn, fn))
    )


def test_a_second_backward_without_retain_graph_is_torchs_own_error():
    y = cgpass.checkpoint(torch.sin, tensor(3, requires_grad=True)).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_fn_that_is_not_callable(reentrant):
    with pytest.raises(CheckpointArgumentError) as error:
        cgpass.checkpoint(tensor(3), use_reentrant=reentrant)
    assert message(error) == (
        "cgpass.checkpoint: fn must be callable, got Tensor. Pass the function and its arguments, "
        "checkpoint(fn, x), not its result, checkpoint(fn(x))."
    )


def test_a_determinism_check_that_does_not_exist():
    with pytest.raises(CheckpointArgumentError) as error:
        cgpass.checkpoint(torch.sin, tensor(3), determinism_check="strict")
    assert message(error) == (
        "cgpass.checkpoint: determinism_check must be one of 'default', 'none', got 'strict'."
    )


def test_context_fn_with_reentrant():
    with pytest.raises(CheckpointArgumentError) as error:
        cgpass.checkpoint(torch.sin, tensor(3), use_reentrant=True, context_fn=lambda: None)
    assert message(error) == (
        "cgpass.checkpoint: context_fn works with use_reentrant=False only. Leave one of the two out."
    )


@pytest.mark.parametrize("context_fn", [lambda: None, 3, lambda: (contextlib.nullcontext(),)])
def test_a_context_fn_that_gives_something_else(context_fn):
    with pytest.raises(CheckpointArgumentError, match="function that returns two context managers"):
        cgpass.checkpoint(torch.sin, tensor(3), context_fn=context_fn)


def test_a_forward_context_that_swallows_exceptions():
    def fail(x):
        raise ValueError

    x = tensor(3, requires_grad=True)
    with pytest.raises(CheckpointError, match=r"swallowed an exception of .*fail, which"):
        cgpass.checkpoint(
            fail, x, context_fn=lambda: (contextlib.suppress(ValueError), contextlib.nullcontext())
        )


@pytest.mark.parametrize("raised", [ZeroDivisionError("mine"), KeyboardInterrupt("mine")])
@pytest.mark.parametrize("reentrant", [False, True])
def test_an_exception_in_the_forward(raised, reentrant):
    def fail(x):
        torch.rand(3)
        x.sin().exp()
        raise raised

    x = tensor(3, requires_grad=True)
    with pytest.raises(type(raised)) as error:
        cgpass.checkpoint(fail, x, use_reentrant=reentrant)
    assert error.value is raised
    require_clean(x)


@pytest.mark.parametrize("raised", [ZeroDivisionError("mine"), KeyboardInterrupt("mine")])
@pytest.mark.parametrize("reentrant", [False, True])
def test_an_exception_in_the_recomputation(raised, reentrant):
    tracker = cgpass.RNGStatesTracker("cpu")
    tracker.add("a", 1)

    def fail(x):
        with tracker.fork("a"):
            F.dropout(x.sin(), 0.5)
            raise raised

    x = tensor(3, requires_grad=True)
    fn = Changing(lambda x: F.dropout(x.sin(), 0.5).exp(), fail)
    with torch.autocast("cpu", torch.bfloat16):
        y = cgpass.checkpoint(fn, x, use_reentrant=reentrant, rng_tracker=tracker)
    states = tracker.get_states()
    torch.manual_seed(7)
    with pytest.raises(type(raised)) as error:
        y.sum().backward(retain_graph=True)
    assert error.value is raised
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(tracker.get_states()["a"], states["a"])
    assert tracker.current is None
    require_clean(x)
    fn.fns.append(lambda x: F.dropout(x.sin(), 0.5).exp())  # the next backward works
    y.sum().backward()
    assert x.grad is not None


def require_clean(x):
    """Hooks, grad mode and autocast are as outside of any checkpoint."""
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    y = x.sin().exp()
    assert torch.equal(y.grad_fn._saved_result, y)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, y.detach() * x.detach().cos())


def test_a_user_who_catches_every_exception_does_not_catch_the_early_stop():
    caught = []

    def fn(x):
        try:
            y = x.sin().exp()
        except Exception as error:
            caught.append(error)
            raise
        return y + 1

    x = tensor(3, requires_grad=True)
    cgpass.checkpoint(fn, x).sum().backward()
    assert caught == []
    assert x.grad is not None


def test_a_failed_recomputation_holds_no_tensors():
    made = []

    def fail(x):
        y = x.sin()
        made.append(weakref.ref(y))
        y.exp()
        raise ZeroDivisionError

    x = tensor(3, requires_grad=True)
    y = cgpass.checkpoint(Changing(lambda x: x.sin().exp().cos(), fail), x)
    with contextlib.suppress(ZeroDivisionError):
        y.sum().backward()
    gc.collect()
    assert made[0]() is None


@pytest.mark.parametrize("how", ["grad", "inputs"])
def test_reentrant_refuses_partial_backwards(how):
    x = tensor(3, requires_grad=True)
    y = cgpass.checkpoint(torch.sin, x, use_reentrant=True).sum()
    run = {"grad": lambda: torch.autograd.grad(y, x), "inputs": lambda: y.backward(inputs=[x])}
    with pytest.raises(CheckpointError, match=r"Call backward\(\) without inputs"):
        run[how]()


def test_reentrant_recomputation_with_other_results():
    found = fail_backward(torch.sin, lambda x: (x, x), use_reentrant=True)
    assert "returned 1 tensors in the forward and 2 in the recomputation" in found
    found = fail_backward(torch.sin, lambda x: x[:1].sin(), use_reentrant=True)
    assert "output 0 has shape [2, 3] in the forward and [1, 3] in the recomputation" in found


def test_tracker_names():
    tracker = cgpass.RNGStatesTracker("cpu")
    with pytest.raises(RNGTrackerError) as error, tracker.fork():
        pass
    assert message(error) == (
        "RNGStatesTracker: there is no state named 'model-parallel-rng'; there are none. "
        "add('model-parallel-rng', seed) it first."
    )
    tracker.add("a", 1)
    with pytest.raises(RNGTrackerError) as error:
        tracker.add("a", 2)
    assert message(error) == (
        "RNGStatesTracker: there is a state named 'a' already. Choose another name, or reset() first."
    )
    with pytest.raises(RNGTrackerError, match="named 'b'; there are 'a'"), tracker.fork("b"):
        pass


def test_a_tracker_that_lost_a_state_before_the_backward():
    tracker = cgpass.RNGStatesTracker("cpu")
    tracker.add("a", 1)
    x = tensor(3, requires_grad=True)
    y = cgpass.checkpoint(torch.sin, x, rng_tracker=tracker)
    tracker.reset()
    with pytest.raises(
        RNGTrackerError, match="'a' was there in a checkpoint's forward and is gone"
    ):
        y.sum().backward()
