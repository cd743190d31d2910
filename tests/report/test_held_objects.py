"""What `cgpass.explain` looks at on its way through objects that modules hold."""

import types
import weakref

import pytest
import torch
from torch import nn

import cgpass
from cgpass.report import reached
from tests.report.test_explain import X
from tests.report.test_next_call import Cache, Log

pytestmark = pytest.mark.usefixtures("simulated")


class Strict:
    """Lets nobody read its attributes but by its own method."""

    def __init__(self):
        self.values = [1]

    def __getattribute__(self, name):
        raise RuntimeError(name)


class Iterated(list):
    def __iter__(self):
        raise RuntimeError("iterated")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
def test_no_code_of_objects_runs_that_nobody_calls():
    held = {
        "strict": Strict(),
        "iterated": Iterated([1]),
        "proxy": weakref.proxy(Log()),  # whose object is gone
        "long": 1 << 20_000,
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }

    class Holding(nn.Module):
        def __init__(self):
            super().__init__()
            self.log = Log()
            self.log.held, self.holder = held, types.SimpleNamespace(**held)

        def forward(self, x):
            return x.sin().cos().exp()

    model = Holding()
    assert any(value is held["strict"] for value in reached.values_in(model.log))
    cgpass.explain(model, X, training=False)
    assert model.log.held is held


def test_a_large_vocabulary_hides_no_position():
    cache = Cache(1, is_buffer=True)
    cache.tokenizer = Log()
    cache.tokenizer.words = {f"word {n}": n for n in range(30_000)}
    cgpass.explain(cache, torch.randn(1, 8), training=False)
    assert cache.position.tolist() == [0]
