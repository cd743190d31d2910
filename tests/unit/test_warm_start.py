"""Graphs that AOTAutograd's cache keeps: what a second compilation has from there, and what it may not have."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F

import cgpass
from cgpass import torch_private

SIMULATED = {"driver": "simulated"}


@pytest.fixture(scope="module", autouse=True)
def cache():
    """One for all, since kernels take seconds: what is to be compiled for the first time has options of its own."""
    with fresh_cache():
        yield


@pytest.fixture(autouse=True)
def clean():
    yield
    torch.compiler.reset()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False)
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x):
        x = F.dropout(self.norm(self.first(x)).relu(), 0.5, self.training)
        return self.second(x).sin()


def train(module, **options):
    """Results of a module that is compiled anew, what was counted, and what is told of its graphs."""
    torch.compiler.reset()
    torch.manual_seed(0)
    call = torch.compile(module, backend="cgpass", options=SIMULATED | options)
    before = cgpass.counters()
    values = []
    for _ in range(4):
        out = call(torch.randn(4, 8))
        out.square().sum().backward()
        values += [out.detach(), *(p.grad.clone() for p in module.parameters())]
        module.zero_grad()
    with torch.no_grad():
        values += [call(torch.randn(4, 8)) for _ in range(3)]
    counted = {name: n - before[name] for name, n in cgpass.counters().items()}
    return values, counted, cgpass.summary().splitlines()[-4:-1]


def made():
    torch.manual_seed(1)
    return Net()


# ---- a hit


@pytest.mark.parametrize("options", [{}, {"rng": "paired"}])
def test_a_second_compilation_traces_nothing_and_is_the_same(options):
    values, first, told = train(made(), **options)
    assert (first["joint_graphs"], first["graphs_kept"], first["graphs"]) == (1, 0, 3)
    misses = counters["inductor"]["fxgraph_cache_miss"]
    again, second, told_again = train(made(), **options)
    assert (second["joint_graphs"], second["graphs_kept"], second["graphs"]) == (0, 3, 3)
    assert len(values) == len(again)
    assert all(map(torch.equal, values, again))
    for counted in (first, second):
        del counted["joint_graphs"], counted["graphs_kept"]
    assert first == second
    assert second["replays"] > 0
    assert told == told_again
    assert counters["inductor"]["fxgraph_cache_miss"] == misses


PROGRAM = """
import sys, torch, cgpass
torch._inductor.config.compile_threads = 1
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
call = torch.compile(module, backend="cgpass", options={"driver": "simulated"})
for _ in range(3):
    out = call(torch.randn(4, 8))
    out.square().sum().backward()
import json
print(json.dumps([cgpass.counters(), out.tolist(), module[0].weight.grad.tolist()]))
"""


def test_another_process_traces_nothing(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    found = []
    for seed in ("1", "2"):
        env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"), PYTHONHASHSEED=seed)
        env["PYTHONPATH"] = str(Path(cgpass.__file__).parents[1])
        done = subprocess.run(
            [sys.executable, str(program)], env=env, capture_output=True, text=True, check=True
        )
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (cold, *values), (warm, *again) = found
    assert values == again
    assert (cold["joint_graphs"], cold["graphs_kept"]) == (1, 0)
    assert (warm["joint_graphs"], warm["graphs_kept"]) == (0, 2)
    assert warm["replays"] == cold["replays"] > 0


@pytest.mark.parametrize("before", [False, True])
def test_garbage_is_collected_as_before_once_graphs_were_read(monkeypatch, before):
    train(made(), max_recordings=58)
    read, found = torch_private.unpickled, []

    def noting(data):
        found.append(gc.isenabled())
        return read(data)

    monkeypatch.setattr(torch_private, "unpickled", noting)
    (gc.enable if before else gc.disable)()
    try:
        train(made(), max_recordings=58)
        assert gc.isenabled() is before
    finally:
        gc.enable()
    assert found
    assert not any(found)


@pytest.mark.parametrize("number", [1, 2])
def test_what_can_not_be_read_is_traced_again(monkeypatch, number):
    """The forward, or the backward behind one that was read."""
    options = {"max_recordings": 60, "rng": "paired"}
    values, first, _ = train(made(), **options)
    read, calls = torch_private.unpickled, []

    def broken(data):
        calls.append(data)
        if len(calls) == number:
            raise ValueError("of another version")
        return read(data)

    monkeypatch.setattr(torch_private, "unpickled", broken)
    again, counted, _ = train(made(), **options)
    assert all(map(torch.equal, values, again))
    assert counted["joint_graphs"] == 1
    assert counted["replays"] == first["replays"]


def read_again(mode, values, inputs):
    """Values of nodes, and inputs, of a graph that was kept."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = inputs[0]
    nodes = [graph.call_function(torch.ops.aten.alias.default, (x,)) for _ in values]
    for node, value in zip(nodes, values, strict=True):
        node.meta["val"] = value
    graph.output(tuple(nodes))
    with tracing(TracingContext(mode)):
        found, read = torch_private.unpickled(
            torch_private.pickled(fx.GraphModule({}, graph), inputs)
        )
    return [node.meta["val"] for node in found.graph.output_node().all_input_nodes], read


def test_fake_tensors_that_are_views_stay_so():
    """What attention on CUDA returns, say: they know the mode of what they are views of."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        base = torch.randn(4, 4)
        views = [base.view(16), base.t()]
    again, (read,) = read_again(mode, views, [base])
    for view, new in zip(views, again, strict=True):
        assert (view.shape, view.stride()) == (new.shape, new.stride())
        assert new.untyped_storage()._cdata == read.untyped_storage()._cdata
        assert new._is_view()
        assert new.fake_mode is new._base.fake_mode is mode


# ---- what is kept


def compiled(fn, *inputs, **options):
    """Whether graphs of a function were kept, looked up in a second compilation."""
    found = []
    for _ in range(2):
        torch.compiler.reset()
        before = cgpass.counters()
        torch.compile(fn, backend="cgpass", options=SIMULATED | options)(*inputs)
        found.append(cgpass.counters()["graphs_kept"] - before["graphs_kept"])
    assert found[0] == 0
    return bool(found[1])


X = torch.ones(4, 8)


def test_constants_are_not_kept(caplog):
    def fn(x):
        return x * torch.tensor([1.0, 2.0] * 4)

    saved = counters["aot_autograd"]["autograd_cache_saved"]
    with caplog.at_level("WARNING"):
        assert not compiled(fn, X)
    assert not caplog.records
    assert counters["aot_autograd"]["autograd_cache_saved"] == saved


def test_classes_that_can_not_be_found_again_are_no_harm():
    class Local(torch.nn.Module):
        def forward(self, x):
            return x.sin() + 1

    assert not compiled(torch.nn.Sequential(Local()), X)


def test_what_was_marked_static_since_is_no_hit():
    def fn(x, cache):
        return (x + cache).sin()

    cache, found = torch.ones(4, 8), []
    for _ in range(2):
        torch.compiler.reset()
        before = cgpass.counters()
        call = torch.compile(fn, backend="cgpass", options=SIMULATED | {"min_partition_ops": 1})
        results = [call(torch.full((4, 8), float(n)), cache) for n in range(3)]
        assert all(map(torch.equal, results, [(n + cache).sin() for n in range(3)]))
        after = cgpass.counters()
        found.append([after[name] - before[name] for name in ("graphs_kept", "copied_bytes")])
        torch._dynamo.mark_static_address(cache)
    assert found == [[0, 2 * 2 * 128], [0, 2 * 128]]
