"""`cgpass.explain` calls a function again and again, and each call is the one that would come next."""

import copy

import pytest
import torch
from torch import nn

import cgpass
from cgpass.report import state
from tests.report.test_explain import Model, X

pytestmark = pytest.mark.usefixtures("simulated")


class Cache(nn.Module):
    """Keys, and how many there are; one call too many is out of bounds."""

    def __init__(self, size, *, replaces, is_buffer):
        super().__init__()
        self.replaces = replaces
        self.register_buffer("keys", torch.zeros(size, 8))
        position = torch.zeros(1, dtype=torch.long)
        self.position = nn.Buffer(position) if is_buffer else position
        self.register_buffer("is_used", torch.zeros(size, dtype=torch.bool))

    def forward(self, x):
        self.keys.index_copy_(0, self.position, x)
        self.is_used.index_fill_(0, self.position, True)
        if self.replaces:
            self.position = self.position + 1
        else:
            self.position.add_(1)
        return (self.keys.sum(0) * x).tanh().exp(), self.is_used.clone()


@pytest.mark.parametrize("is_buffer", [False, True])
@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("used", [0, 2])
def test_every_call_is_the_one_that_would_come_next(is_buffer, replaces, used):
    cache = Cache(used + 1, replaces=replaces, is_buffer=is_buffer)
    compiled = torch.compile(cache, backend=cgpass.cgpass)
    x = torch.randn(1, 8)
    with torch.no_grad():
        for _ in range(used):
            compiled(x)
    position, before = cache.position, copy.deepcopy(cache.state_dict())
    report = cgpass.explain(compiled, x, training=False)
    assert report.settled
    assert cache.position is position
    for name, value in cache.state_dict().items():
        assert torch.equal(value, before[name]), name
    with torch.no_grad():
        _, is_used = compiled(x)
    assert is_used.all()
    assert int(cache.position) == used + 1


def test_many_whole_numbers_are_weights_and_kept_on_the_host_alone(monkeypatch):
    made = []
    make = state._Numbers.__init__

    def noting(self, storage):
        made.append(storage.nbytes())
        make(self, storage)

    monkeypatch.setattr(state._Numbers, "__init__", noting)
    model = Model()
    model.register_buffer("weights", torch.ones(2**20 + 1, dtype=torch.int8))
    model.register_buffer("position", torch.zeros(4, dtype=torch.long))
    cgpass.explain(model, X)
    assert max(made) == 32
