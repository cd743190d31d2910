"""Messages, arguments, and that whatever is raised comes through and leaves everything as it was."""

import functools

import pytest
import torch
import torch.nn.functional as F

import cgpass
from cgpass.errors import (
    CheckpointArgumentError,
    CheckpointError,
    DriverUnavailableError,
    RNGTrackerError,
)
from cgpass.recompute import api, checkpointed
from tests.graphed.test_transforms import TRANSFORMS
from tests.recompute.steps import tensor, tracker_of

OPTIONS = {"driver": "simulated", "compiler": "eager"}


class Changing:
    """Another function in the recomputation than in the forward."""

    def __init__(self, *fns):
        self.fns = list(fns)

    def __call__(self, *args):
        return self.fns.pop(0)(*args)


def fail_backward(*fns, x=None, **kwargs):
    x = tensor(2, 3, requires_grad=True) if x is None else x
    y = cgpass.checkpoint(Changing(*fns), x, **kwargs)
    with pytest.raises(CheckpointError) as error:
        y.sum().backward()
    return str(error.value)


SAME = f" {checkpointed._SAME}"


def test_another_shape():
    assert fail_backward(torch.sin, lambda x: x[:1].sin()) == (
        "cgpass.checkpoint: tensor 0 that Changing saves for its backward was float32[2, 3] on cpu in the forward "
        f"and is float32[1, 3] on cpu in the recomputation.{SAME} "
        'determinism_check="none" leaves this check out.'
    )
    x = torch.ones(2, 3, requires_grad=True)
    fn = Changing(torch.sin, lambda x: x.double().sin())
    cgpass.checkpoint(fn, x, determinism_check="none").sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(2, 3).double().cos().float())


def test_fewer_tensors():
    found = fail_backward(lambda x: x.sin().exp().cos(), torch.sin)
    assert found == (
        "cgpass.checkpoint: Changing saved 3 or more tensors for its backward in the forward and 1 in the "
        f"recomputation; tensor 1, float32[2, 3] on cpu, is missing.{SAME}"
    )


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
        "backward and keep its tensors."
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


@pytest.mark.parametrize("raised", [ZeroDivisionError("mine"), KeyboardInterrupt("mine")])
def test_an_exception_in_forward_and_recomputation(raised):
    tracker = tracker_of(a=1)

    def fail(x):
        with tracker.fork("a"):
            F.dropout(x.sin(), 0.5)
            raise raised

    x = tensor(3, requires_grad=True)
    fn = Changing(lambda x: F.dropout(x.sin(), 0.5).exp(), fail)
    with pytest.raises(type(raised)):
        cgpass.checkpoint(fail, x)
    require_clean(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = cgpass.checkpoint(fn, x, rng_tracker=tracker)
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


def test_a_tracker_that_lost_a_state_before_the_backward():
    tracker = tracker_of(a=1)
    x = tensor(3, requires_grad=True)
    y = cgpass.checkpoint(torch.sin, x, rng_tracker=tracker)
    tracker.reset()
    with pytest.raises(
        RNGTrackerError, match="'a' was there in a checkpoint's forward and is gone"
    ):
        y.sum().backward()


@pytest.fixture(params=["eager", "compiled"])
def made(request, nothing_compiled_stays):
    """Gives a function as it is, or compiled."""
    if request.param == "eager":
        return lambda fn: fn
    return functools.partial(torch.compile, backend=cgpass.cgpass, options=OPTIONS)


SETTING = (
    "preserve_rng_state is a setting of torch.utils.checkpoint that cgpass.checkpoint doesn't have (random numbers are "
    "always preserved, recomputations always end early), and fn has no argument of that name. Leave it out; if fn needs "
    "it, pass functools.partial(fn, preserve_rng_state=...)."
)
WRONG = {
    SETTING: {"fn": lambda x, **kwargs: x.sin(), "preserve_rng_state": False},
    "fn must be callable, got Tensor. Pass the function and its arguments": {"fn": torch.ones(3)},
    "rng_tracker must be a cgpass.RNGStatesTracker or None, got dict": {"rng_tracker": {}},
    "determinism_check must be one of 'default', 'none', got 'all'": {"determinism_check": "all"},
}


@pytest.mark.parametrize("expected", WRONG)
def test_arguments_that_are_refused(made, expected):
    """Compiled, torch ignored them or failed inside of Dynamo."""
    kwargs = {"fn": torch.sin, **WRONG[expected]}
    fn, x = kwargs.pop("fn"), tensor(3, requires_grad=True)
    with pytest.raises(CheckpointArgumentError) as error:
        made(lambda x: cgpass.checkpoint(fn, x, **kwargs))(x)
    assert str(error.value).startswith(f"cgpass.checkpoint: {expected}")


def test_a_graph_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        DriverUnavailableError, match="but torch finds no CUDA device; run the step"
    ):
        cgpass.CheckpointedGraph()


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_run_the_function_plainly(transform, caplog):
    x = tensor(4, 3)
    api._warn_once.cache_clear()

    def checkpointed(x):
        return cgpass.checkpoint(lambda x: x.sin().exp(), x)

    for _ in range(2):
        found = transform(checkpointed, x)
        assert torch.equal(found, transform(lambda x: x.sin().exp(), x))
    (record,) = caplog.records
    assert record.getMessage() == (
        "cgpass.checkpoint: inside transforms of torch.func and forward-mode AD the function runs as it is: nothing is "
        "recomputed, no memory is saved, values and gradients are right."
    )
