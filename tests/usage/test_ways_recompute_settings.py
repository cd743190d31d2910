"""Recomputed random operators under settings: torch's, cgpass', hooks; and captures that fail beside them."""

import functools

import pytest
import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from cgpass.errors import CheckpointError, DoubleBackwardError
from tests.usage.programs import Setting, assert_replays, one_of_each_on_cpu
from tests.usage.test_ways_recompute import RNG, Masks, Noise, compare, trained


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(layer(x).sin(), 0.5).cos()
        return x


@pytest.mark.parametrize("budget", [0.1, 0.5])
def test_a_memory_budget(way, budget):
    with functorch_config.patch(activation_memory_budget=budget):
        assert_replays(compare(way, trained(Deep)))


@pytest.mark.parametrize("make", [Masks, Noise], ids=lambda make: make.__name__)
def test_compiled_autograd(setting, make):
    """The backward is traced once more, without our states: those operators run between graphs."""
    with dynamo_config.patch(compiled_autograd=True):
        compare(setting, trained(make), on_skip="silent")


def test_inductor_keeps_torchs_own_handling_on_the_cpu():
    """Random operators that Inductor leaves alone run between graphs, and draw eager's numbers."""
    setting = Setting(torch.device("cpu"), "simulated", "inductor")
    with inductor_config.patch(fallback_random=True):
        counters = setting.compare(trained(Masks), on_skip="silent")
        values = setting.run(trained(Masks), on_skip="silent")
    assert counters["replays"] > 0
    for ours, eager in zip(values, setting.run_eagerly(trained(Masks)), strict=True):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("rng", RNG)
@pytest.mark.parametrize(
    "options",
    [
        {"unsafe_ops": ("aten::native_dropout", "aten::bernoulli", "aten::rand_like")},
        {"unsafe_ops": ("aten::randperm", "aten::randint"), "min_partition_ops": 1},
        {"min_partition_ops": 30},
        {"outputs": "owned"},
    ],
    ids=["unsafe", "unsafe small", "large", "owned"],
)
def test_options(way, options, rng):
    in_turn = {"outputs", "min_partition_ops"}
    exact = bool(in_turn & options.keys()) and "unsafe_ops" not in options
    one_of_each_on_cpu(way, another=(rng == "exact") != exact)
    counters = compare(way, trained(Noise), rng=rng, on_skip="silent", **options)
    assert counters["plain_calls"] == 0


@pytest.mark.parametrize("rng", RNG)
@pytest.mark.parametrize(
    "hooks",
    [save_on_cpu, lambda: saved_tensors_hooks(torch.clone, torch.clone)],
    ids=["save_on_cpu", "copies"],
)
def test_saved_tensors_go_through_hooks(way, hooks, rng):
    one_of_each_on_cpu(way, another=(rng == "exact") != (hooks is save_on_cpu))

    def program(session):
        module, call = session.compiled(Masks)
        values = []
        for x in session.batches(4, 16, count=6):
            with hooks():
                out = call(x)
            out.square().sum().backward()
            values += [out.detach(), module.first.weight.grad.clone()]
            module.zero_grad()
        return values

    compare(way, program, rng=rng)


def test_differentiating_twice_is_refused_as_ever(way):
    _, call = way.session().compiled(Masks)
    x = torch.randn(4, 16, device=way.device, requires_grad=True)
    (grad,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
    with pytest.raises(DoubleBackwardError, match="does not support double backward"):
        grad.sum().backward()


@torch.library.custom_op("cgpass_recompute::reads", mutates_args=())
def reads(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.sum().item() < 1e30 else x.clone()


@reads.register_fake
def _(x):
    return torch.empty_like(x)


reads.register_autograd(lambda ctx, grad: reads(grad))


class Fails(nn.Module):
    """What fails to be captured stands between two pairs of one partition, recomputed with them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def part(self, x):
        x = reads(F.dropout(self.first(x), 0.5))
        return F.dropout(self.second(x).relu(), 0.3)

    def forward(self, x):
        x = checkpoint(self.part, F.dropout(x, 0.1), use_reentrant=False)
        return F.dropout(checkpoint(self.part, x, use_reentrant=False), 0.2)


@pytest.mark.parametrize("rng", RNG)
@pytest.mark.parametrize("orders", [None, ((0, 1, 2), (2, 1, 0), (0,))], ids=["in turn", "mixed"])
def test_a_partition_is_split_around_what_fails(way, rng, orders):
    one_of_each_on_cpu(way, another=(rng == "exact") != (orders is None))
    program = trained(Fails, count=9, orders=orders)
    counters = compare(way, program, rng=rng, on_skip="silent", min_partition_ops=1)
    assert counters["replays"] > 0


class Watching(TorchDispatchMode):
    """Knows no higher-order operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def test_a_backward_in_a_dispatch_mode(way):
    def program(session):
        module, train = session.compiled(Masks)
        found = []
        for x in session.batches(4, 16):
            y = train(x.requires_grad_())
            with Watching():
                y.square().sum().backward()
            found += [y.detach().clone(), x.grad]
            found += [p.grad.clone() for p in module.parameters()]
            module.zero_grad()
        return found

    assert_replays(compare(way, program))


def test_a_selective_checkpoint_around_what_is_compiled(way):
    save = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def program(session):
        _, train = session.compiled(Masks)
        x = session.randn(4, 16).requires_grad_()
        return checkpoint(train, x, use_reentrant=False, context_fn=save)

    with pytest.raises(CheckpointError, match="inside a selective checkpoint that is not compiled"):
        way.run(program, compiler="eager")
