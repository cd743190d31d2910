"""What `cgpass.explain` puts back besides parameters, gradients and buffers."""

import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

import cgpass

X = torch.linspace(-1, 1, 32).view(4, 8)


@pytest.fixture(autouse=True)
def simulated():
    with cgpass.set_defaults(driver="simulated", compiler="eager", on_skip="silent"):
        yield


class Collecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.history, self.recent = [torch.zeros(2)], deque([1], maxlen=2)
        self.cache, self.seen = {"first": torch.zeros(8)}, {3}
        self.counts = {"calls": {"all": [0]}}

    @torch.compiler.disable
    def note(self, x):
        self.history.append(x.detach())
        self.recent.append(2)
        self.cache["first"].add_(1)
        self.cache["last"] = x.detach()
        self.seen.clear()
        self.counts["calls"]["all"][0] += 1
        self.added = [x.detach()]

    def forward(self, x):
        self.note(x)
        return self.layer(x).sin().cos().exp()


def test_containers_that_a_module_holds():
    model = Collecting()
    names = ("history", "recent", "cache", "seen", "counts")
    before = [getattr(model, name) for name in names]
    first = model.cache["first"]
    cgpass.explain(model, X)
    assert all(getattr(model, name) is each for name, each in zip(names, before, strict=True))
    assert [len(model.history), list(model.recent), model.seen] == [1, [1], {3}]
    assert list(model.cache) == ["first"]
    assert model.cache["first"] is first
    assert not first.any()
    assert model.counts == {"calls": {"all": [0]}}
    assert not hasattr(model, "added")


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = torch.Generator().manual_seed(3)
        self.layer = nn.Linear(8, 8)

    @torch.compiler.disable
    def noise(self, x):
        factor = np.random.rand() * random.random()
        return torch.randn(x.shape, generator=self.own) * factor + torch.randn(x.shape)

    def forward(self, x):
        return self.layer(x + self.noise(x))


def test_random_numbers_go_on_as_if_nothing_had_run():
    model = Noisy()
    states = [model.own.get_state(), torch.get_rng_state()]
    others = [str(np.random.get_state()), random.getstate()]
    cgpass.explain(model, X)
    now = [model.own.get_state(), torch.get_rng_state()]
    assert all(map(torch.equal, states, now))
    assert others == [str(np.random.get_state()), random.getstate()]
