"""What a checkpoint is called with: arguments of the function, of torch's checkpoint, and of wrong kinds."""

import contextlib
import functools
import logging

import pytest
import torch
from torch.autograd import forward_ad

import cgpass
from cgpass.errors import CheckpointArgumentError, DriverUnavailableError
from cgpass.recompute import api
from tests.recompute.steps import tensor

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning",
    "ignore:`torch.jit:DeprecationWarning",
)
OPTIONS = {"driver": "simulated", "compiler": "eager"}


@pytest.fixture(params=["eager", "compiled"])
def made(request):
    """Gives a function as it is, or compiled."""
    torch.compiler.reset()
    if request.param == "eager":
        yield lambda fn: fn
    else:
        yield functools.partial(torch.compile, backend=cgpass.cgpass, options=OPTIONS)
    torch.compiler.reset()


def scaled(x, preserve_rng_state=1.0, early_stop=1.0, debug=1.0):
    return x.sin() * preserve_rng_state * early_stop * debug


@pytest.mark.parametrize("name", ["preserve_rng_state", "early_stop", "debug"])
def test_arguments_of_fn_that_are_called_as_torchs(made, name):
    """torch's checkpoint took them for its own inside of what is compiled."""
    x = tensor(3, requires_grad=True)
    y = made(lambda x: cgpass.checkpoint(scaled, x, **{name: 3.0}))(x)
    y.sum().backward()
    torch.testing.assert_close(y, 3 * x.sin())
    torch.testing.assert_close(x.grad, 3 * x.cos())


class Swallows(torch.nn.Module):
    def forward(self, x, **kwargs):
        return x.sin()


@pytest.mark.parametrize("fn", [torch.nn.Linear(3, 3), Swallows(), lambda x, **kwargs: x.sin()])
@pytest.mark.parametrize("reentrant", [False, True])
def test_settings_of_torchs_checkpoint_are_refused(made, fn, reentrant):
    def call(x):
        return cgpass.checkpoint(fn, x, preserve_rng_state=False, use_reentrant=reentrant)

    with pytest.raises(CheckpointArgumentError) as error:
        made(call)(tensor(3))
    assert str(error.value) == (
        "cgpass.checkpoint: preserve_rng_state is a setting of torch.utils.checkpoint that cgpass.checkpoint doesn't "
        "have (random numbers are always preserved, recomputations always end early), and fn has no argument of that "
        "name. Leave it out; if fn shall have it, pass functools.partial(fn, preserve_rng_state=...)."
    )


WRONG = {
    "rng_tracker": ({"rng_tracker": {}}, "must be a cgpass.RNGStatesTracker or None, got dict"),
    "use_reentrant": ({"use_reentrant": None}, "use_reentrant must be True or False, got None"),
    "determinism_check": ({"determinism_check": "all"}, "one of 'default', 'none', got 'all'"),
    "reentrant with contexts": (
        {"use_reentrant": True, "context_fn": lambda: None},
        "context_fn works with use_reentrant=False only",
    ),
}


@pytest.mark.parametrize("which", list(WRONG))
def test_arguments_of_a_wrong_kind(made, which):
    """Compiled, torch ignored them or failed inside of Dynamo."""
    kwargs, expected = WRONG[which]
    x = tensor(3, requires_grad=True)
    with pytest.raises(CheckpointArgumentError) as error:
        made(lambda x: cgpass.checkpoint(torch.sin, x, **kwargs))(x)
    assert expected in str(error.value)


@pytest.mark.parametrize("fn", [3, None])
def test_what_can_not_be_called(made, fn):
    with pytest.raises(CheckpointArgumentError, match="fn must be callable, got"):
        made(lambda x: cgpass.checkpoint(fn, x))(tensor(3, requires_grad=True))


def test_contexts_that_are_none():
    contexts = (contextlib.nullcontext(), 3)
    with pytest.raises(CheckpointArgumentError, match=r"two context managers, .* got nullc.*, int"):
        cgpass.checkpoint(torch.sin, tensor(3), context_fn=lambda: contexts)


def test_a_graph_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        DriverUnavailableError, match="but torch finds no CUDA device; run the step"
    ):
        cgpass.CheckpointedGraph()


def dual(fn, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(fn(forward_ad.make_dual(x, x))).tangent


TRANSFORMS = {
    "vmap": lambda fn, x: torch.vmap(fn)(x),
    "grad": lambda fn, x: torch.func.grad(lambda x: fn(x).sum())(x),
    "vmap of grad": lambda fn, x: torch.vmap(torch.func.grad(lambda x: fn(x).sum()))(x),
    "jvp": lambda fn, x: torch.func.jvp(fn, (x,), (x,))[1],
    "jacrev": lambda fn, x: torch.func.jacrev(fn)(x),
    "forward-mode AD": dual,
}


@pytest.mark.parametrize("transform", list(TRANSFORMS))
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings(r"ignore:.torch\.jit:DeprecationWarning")
@pytest.mark.filterwarnings(r"ignore:.torch\.jit:FutureWarning")  # torch's own, of its first jvp
def test_transforms_run_the_function_plainly(transform, reentrant):
    """They failed on the functions that keep a checkpoint's arguments."""
    x = tensor(4, 3)

    def checkpointed(x):
        return cgpass.checkpoint(lambda x: x.sin().exp(), x, use_reentrant=reentrant)

    found = TRANSFORMS[transform](checkpointed, x)
    assert torch.equal(found, TRANSFORMS[transform](lambda x: x.sin().exp(), x))


def test_running_plainly_is_said_once(caplog):
    api._warn_of_plain_run.cache_clear()
    with caplog.at_level(logging.WARNING, "cgpass"):
        for _ in range(2):
            torch.vmap(lambda x: cgpass.checkpoint(torch.sin, x))(tensor(4, 3))
    (record,) = caplog.records
    assert record.getMessage() == (
        "cgpass.checkpoint: inside transforms of torch.func and forward-mode AD the function runs as it is: nothing is "
        "recomputed, no memory is saved, values and gradients are right."
    )
