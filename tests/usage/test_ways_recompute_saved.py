"""Random operators that have no pair of generators: their results are saved, whatever a checkpoint says."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.usage.programs import assert_replays, one_of_each_on_cpu
from tests.usage.test_ways_recompute import RNG, compare, trained


class Stack(nn.Module):
    """Three layers that are one region, in whose body lies a checkpoint."""

    policy = None

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(self.policy) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) + x
        return x

    class Layer(nn.Module):
        def __init__(self, policy):
            super().__init__()
            self.fc, self.policy = nn.Linear(16, 16), policy

        def part(self, x):
            return F.dropout(F.dropout(self.fc(x), 0.5).sin(), 0.3).exp()

        @torch.compiler.nested_compile_region
        def forward(self, x):
            how = {}
            if self.policy is not None:
                contexts = functools.partial(create_selective_checkpoint_contexts, self.policy)
                how = {"context_fn": contexts}
            return checkpoint(self.part, x, use_reentrant=False, **how)


def recompute_all(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_RECOMPUTE


class SelectiveStack(Stack):
    policy = staticmethod(recompute_all)


@pytest.mark.parametrize("rng", RNG)
@pytest.mark.parametrize("make", [Stack, SelectiveStack], ids=lambda make: make.__name__)
@pytest.mark.filterwarnings("ignore:.*context_fn")
def test_checkpoints_inside_of_nested_regions(way, make, rng):
    """The bodies were recomputed with other numbers, and moved the user's generator."""
    one_of_each_on_cpu(way, another=(rng == "exact") != (make is SelectiveStack))
    assert_replays(compare(way, trained(make, orders=((0,), (1, 0), (0, 1))), rng=rng))


@torch.compiler.nested_compile_region
def region(x):
    return F.dropout(x.sin(), 0.4)


class RegionsInside(nn.Module):
    """A region that draws is called twice inside of a checkpoint."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def part(self, x):
        return F.dropout(region(region(self.fc(x)) * 2), 0.2).exp()

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=False)


@torch.library.custom_op(
    "cgpass_saved::noise_", mutates_args=("x",), tags=(torch.Tag.nondeterministic_seeded,)
)
def noise_(x: torch.Tensor) -> None:
    x.mul_((torch.rand_like(x) > 0.5).to(x.dtype))


class Writes(RegionsInside):
    """An operator that draws and writes to its argument."""

    def part(self, x):
        mask, other = torch.ones_like(x), torch.ones_like(x)
        noise_(mask)
        noise_(other)
        return self.fc(x).sin() * mask - F.dropout(x, 0.2).exp() * other


@pytest.mark.parametrize("rng", RNG)
@pytest.mark.parametrize("make", [RegionsInside, Writes], ids=lambda make: make.__name__)
def test_higher_order_operators_that_draw_inside_of_checkpoints(way, make, rng):
    one_of_each_on_cpu(way, another=(rng == "exact") != (make is Writes))
    assert_replays(compare(way, trained(make, orders=((0,), (1, 0), (0, 1))), rng=rng))


@torch.library.custom_op(
    "cgpass_saved::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


noise.register_fake(torch.empty_like)
noise.register_autograd(lambda ctx, grad: grad)


class Twice(nn.Module):
    """Draws twice with the same arguments."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x):
        y = self.fc(x)
        return noise(y) - 2 * noise(y) + region(y) - 2 * region(y)


def test_equal_arguments_are_not_one_draw(way):
    assert_replays(compare(way, trained(Twice)))
