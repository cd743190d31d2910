"""Keys of Inductor's cache that are kept with graphs: the same as would be made anew, and asked for where one fits."""

import threading

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor import codecache
from torch._inductor.codecache import FxGraphCache
from torch._inductor.utils import fresh_cache

import cgpass
from cgpass import _torch
from cgpass._torch import kept_keys
from tests.graphs import fake_cuda_graph


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.second(torch.cumsum(self.first(x).sin(), 0).cos()).exp().sin()


def train(module):
    torch.compiler.reset()
    options = {"driver": "simulated", "unsafe_ops": ("aten::cumsum",), "min_partition_ops": 1}
    call = torch.compile(module, backend="cgpass", options=options)
    before = cgpass.counters()
    call(torch.ones(4, 8)).sum().backward()
    return {name: n - before[name] for name, n in cgpass.counters().items()}


def test_kept_keys_are_those_that_would_be_made_anew(monkeypatch):
    made, asked = [], []
    make, identity = codecache.compiled_fx_graph_hash, kept_keys._identity

    def making(*args):
        made.append(make(*args)[0])
        return make(*args)

    def identifying(*args):
        asked.append(make(*args)[0])
        return identity(*args)

    monkeypatch.setattr(codecache, "compiled_fx_graph_hash", making)
    monkeypatch.setattr(kept_keys, "_identity", identifying)
    module = Net()
    with fresh_cache():
        first = train(module)
        anew, misses = list(made), counters["inductor"]["fxgraph_cache_miss"]
        assert asked == anew
        assert len(set(anew)) == first["partitions_captured"] == 4
        del made[:], asked[:]
        second = train(module)
    assert (first["graphs_kept"], second["graphs_kept"]) == (0, 2)
    assert made == []
    assert asked == anew
    assert counters["inductor"]["fxgraph_cache_miss"] == misses


@pytest.fixture
def prepared(monkeypatch):
    """What Inductor was asked to make a key of; it is told that there is none for an empty list of inputs."""
    asked = []

    def prepare(gm, inputs, *rest):
        asked.append(gm)
        return (None, {"cache_state": "bypass"}) if not inputs else ((f"key {len(asked)}", []), {})

    monkeypatch.setattr(FxGraphCache, "prepare_key", staticmethod(prepare))
    return asked


def ask(gm, shape=(3,), remote=False, **settings):
    inputs = [torch.ones(shape)] if shape else []
    key, _ = FxGraphCache.prepare_key(gm, inputs, settings, [], remote)
    return key and key[0]


def test_a_key_is_of_a_graph_its_inputs_and_its_settings(prepared):
    sine = fake_cuda_graph(lambda x: x.sin(), (3,))
    with _torch.inductor_keys() as noted:
        assert [ask(sine), ask(sine), ask(sine, graph_id=3)] == ["key 1"] * 3
        assert ask(sine, shape=(4,)) == "key 2"
        assert ask(sine, is_backward=True) == "key 3"
        assert ask(sine, static_input_idxs=[0]) == "key 4"
        assert ask(fake_cuda_graph(lambda x: x.cos(), (3,))) == "key 5"
        assert ask(fake_cuda_graph(lambda x: x + 2, (3,))) == "key 6"
        assert ask(fake_cuda_graph(lambda x: x + 3, (3,))) == "key 7"
    assert len(noted) == 7
    assert ask(sine) == "key 8"  # asked as if nothing had been
    with _torch.inductor_keys(noted) as known:
        assert ask(sine) == "key 1"
        assert ask(sine, is_inference=True) == "key 9"
    assert len(known) == len(noted) + 1


def test_what_inductor_does_not_keep_has_no_key(prepared):
    gm = fx.symbolic_trace(lambda: 1)
    with _torch.inductor_keys() as noted:
        assert [ask(gm, shape=()), ask(gm, shape=())] == [None, None]
    assert len(prepared) == 2
    assert not noted


def test_other_threads_ask_inductor(prepared):
    gm, told = fake_cuda_graph(lambda x: x.sin(), (3,)), []
    with _torch.inductor_keys() as noted:
        ask(gm)
        thread = threading.Thread(target=lambda: told.append(ask(gm)))
        thread.start()
        thread.join()
    assert told == ["key 2"]
    assert len(noted) == 1


def test_an_error_leaves_inductor_as_it_was(prepared):
    before = FxGraphCache.__dict__["prepare_key"]
    with pytest.raises(ZeroDivisionError), _torch.inductor_keys():
        raise ZeroDivisionError
    assert FxGraphCache.__dict__["prepare_key"] is before
