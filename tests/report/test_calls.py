"""What the calls that `cgpass.explain` makes hand on."""

import dataclasses
import weakref

import pytest
import torch
from torch import nn

import cgpass
from tests.usage.programs import counted

X = torch.linspace(-1, 1, 32).view(4, 8)


pytestmark = pytest.mark.usefixtures("simulated")


def handed_on(*args, look):
    """What a look at the arguments of each call found."""
    seen = []

    @torch.compiler.disable
    def fn(*args):
        seen.append(look(*args))
        return args[0] * 2

    cgpass.explain(fn, *args)
    return seen


def test_an_argument_that_is_given_twice_stays_one_tensor():
    found = handed_on(X, X, X.view(8, 4), look=lambda a, b, c: (a is b, a is c))
    assert set(found) == {(True, False)}


def test_the_same_tensor_is_one_input_of_the_graph():
    def fn(q, k):
        return (q @ k.T).sin().cos().exp()

    (part,) = cgpass.explain(fn, X, X).graphs[0].partitions
    (copied,) = part.copied_inputs
    assert copied.num_bytes == 128


def test_dimensions_that_are_marked_dynamic_stay_so():
    x = X.clone()
    torch._dynamo.mark_dynamic(x, 0)
    compiled = torch.compile(lambda x: x.sin().cos().exp(), backend="cgpass")
    cgpass.explain(compiled, x)
    with counted() as counters:
        compiled(torch.ones(9, 8))
    assert counters["graphs"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.complex64])
def test_no_more_than_what_arguments_cover_is_copied(dtype):
    whole = torch.arange(100_000, dtype=torch.float32).to(dtype)
    x, y, z = whole[1003:1011].view(2, 4).t(), whole[1005::20][:50], whole[:0]

    def look(a, b, c):
        shared = a.untyped_storage()._cdata == b.untyped_storage()._cdata
        alike = torch.equal(a, x) and torch.equal(b, y) and c.numel() == 0
        return shared, alike, a.stride() == x.stride(), a.untyped_storage().nbytes() < 16_000

    assert set(handed_on(x, y, z, look=look)) == {(True, True, True, True)}


def test_copies_are_as_aligned_as_what_they_copy():
    x = torch.arange(1000.0)[3:40]
    found = handed_on(x, look=lambda a: (a.data_ptr() - x.data_ptr()) % 64)
    assert set(found) == {0}


@pytest.mark.parametrize("keeps_gradients", [True, False])
def test_a_training_step_that_runs_its_backward_itself(keeps_gradients):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="cgpass")

    def step(x):
        optimizer.zero_grad()
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        if not keeps_gradients:
            optimizer.zero_grad()
        return loss

    weight = model[0].weight.clone()
    report = cgpass.explain(step, X)
    assert [(g.direction, g.calls_per_run) for g in report.graphs] == [
        ("forward", 1),
        ("backward", 1),
    ]
    assert torch.equal(model[0].weight, weight)
    assert model[0].weight.grad is None


def test_errors_of_the_backward_are_raised():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("its own")

    fn = torch.compiler.disable(Fails.apply)
    with pytest.raises(RuntimeError, match="its own"):
        cgpass.explain(fn, X.clone().requires_grad_())


def test_lazy_modules_are_initialised_afterwards():
    model = nn.Sequential(nn.LazyLinear(8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
    report = cgpass.explain(model, X)
    assert [graph.direction for graph in report.graphs] == ["forward", "backward"]
    assert type(model[0]) is nn.Linear
    assert (model[0].in_features, model[0].weight.shape) == (8, (8, 8))
    assert all(parameter.grad is None for parameter in model.parameters())


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: list


def test_tensors_in_dataclasses_have_a_backward():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
    compiled = torch.compile(model, backend="cgpass")
    report = cgpass.explain(lambda x: [Output(None, [compiled(x)])], X)
    assert [graph.direction for graph in report.graphs] == ["forward", "backward"]


def test_copies_of_arguments_die_after_the_next_call():
    refs, living = [], []

    @torch.compiler.disable
    def fn(x):
        living.append(sum(ref() is not None for ref in refs))
        refs.append(weakref.ref(x))
        return x * 2

    cgpass.explain(fn, X.clone().requires_grad_())
    assert max(living) <= 1


def test_a_backward_that_only_arguments_have_gradients_of_is_noticed():
    compiled = torch.compile(lambda x: x.sum(0).view(2, 4).t() * 2 + 1, backend="cgpass")

    def fn(x):
        result = compiled(x).sum()
        result.backward()
        return result

    report = cgpass.explain(fn, X.clone().requires_grad_())
    assert [graph.calls_per_run for graph in report.graphs] == [1, 1]


@pytest.mark.parametrize("none", [False, True])
def test_gradients_that_a_step_zeroes_in_place_stay_where_they_are(none):
    model, seen = nn.Linear(8, 8), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compiler.disable
    def step(x):
        seen.append(model.weight.grad)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=none)

    cgpass.explain(step, X)
    first, *others = seen
    assert first is None
    assert len({id(grad) for grad in others}) == 1
    assert (others[0] is None) is none
    assert model.weight.grad is None


def test_gradients_of_zero_are_computed_in_each_call():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    report = cgpass.explain(lambda x: (model(x) * 0).sin().cos(), X)
    assert [graph.direction for graph in report.graphs] == ["forward", "backward"]
    assert report.graphs[0].calls == report.graphs[1].calls
