"""Graphs that AOTAutograd's cache keeps: what a second compilation has from there, and what tells graphs apart."""

import contextlib
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters as torchs
from torch._guards import TracingContext, tracing
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import cgpass
from cgpass import torch_private
from cgpass.compile import cache as cache_module
from cgpass.compile.cache import GraphCache
from cgpass.options import Options
from cgpass.torch_private import kept_graphs
from tests.operators import doubling
from tests.usage.programs import counted

SIMULATED = {"driver": "simulated"}
pytestmark = pytest.mark.usefixtures("nothing_compiled_stays")
REPOSITORY = Path(cgpass.__file__).parents[1]
X = torch.ones(4, 8)


@pytest.fixture(scope="module", autouse=True)
def cache():
    """One for all, since kernels take seconds: what is to be compiled for the first time has options of its own."""
    with fresh_cache():
        yield


def train(module, **options):
    """Results of a module that is compiled again, what was counted, and what is told of its graphs."""
    torch.compiler.reset()
    torch.manual_seed(0)
    call = torch.compile(module, backend="cgpass", options=SIMULATED | options)
    values = []
    with counted() as found:
        for _ in range(4):
            out = call(torch.randn(4, 8))
            out.square().sum().backward()
            values += [out.detach(), *(p.grad.clone() for p in module.parameters())]
            module.zero_grad()
        with torch.no_grad():
            values += [call(torch.randn(4, 8)) for _ in range(3)]
    return values, found, cgpass.summary().splitlines()[-4:-1]


def made():
    torch.manual_seed(1)
    first, last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False)
    between = torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(0.5)
    return torch.nn.Sequential(first, *between, last, torch.nn.Tanh())


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


def started(program, cache, seed):
    """A process of its own, and where it has graphs kept."""
    known = {"PYTHONPATH": str(REPOSITORY), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    env = os.environ | known | {"PYTHONHASHSEED": seed}
    return subprocess.Popen([sys.executable, str(program)], env=env, stdout=subprocess.PIPE)


def result(process):
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return json.loads(said.splitlines()[-1])


def test_a_process_traces_what_none_before_it_left_whole(tmp_path):
    """Two write at once, the third reads, the fourth finds entries that are cut short; all have the same numbers."""
    program, cache = tmp_path / "program.py", tmp_path / "cache"
    program.write_text(PROGRAM)
    (cold, *values), (_, *others) = map(result, [started(program, cache, seed) for seed in "12"])
    warm, *again = result(started(program, cache, "3"))
    entries = [p for p in cache.rglob("*") if p.is_file() and "aotautograd" in str(p)]
    assert entries
    for path in entries:
        os.truncate(path, path.stat().st_size // 2)
    cut, *anew = result(started(program, cache, "4"))
    assert values == others == again == anew
    assert (warm["joint_graphs"], warm["graphs_kept"]) == (0, 2)
    assert (cut["joint_graphs"], cut["graphs_kept"]) == (1, 0)
    assert warm["replays"] == cold["replays"] == cut["replays"] > 0


@pytest.mark.parametrize("number", [None, 1, 2])
def test_a_second_compilation_traces_what_it_cannot_read(monkeypatch, number):
    """Nothing, or the forward, or the backward behind a forward that was read; results are the same."""
    options = {"max_recordings": 60, "rng": "paired"}
    values, first, told = train(made(), **options)
    read, calls = torch_private.unpickled, []

    def broken(data):
        calls.append(gc.isenabled())
        if len(calls) == number:
            raise ValueError("of another version")
        return read(data)

    monkeypatch.setattr(torch_private, "unpickled", broken)
    misses = torchs["inductor"]["fxgraph_cache_miss"]
    again, second, told_again = train(made(), **options)
    assert all(map(torch.equal, values, again))
    assert second["joint_graphs"] == (number is not None)
    assert second["replays"] == first["replays"] > 0
    assert gc.isenabled()
    if number is None:
        assert not any(calls), "no garbage is collected while graphs are read"
        assert (second["graphs_kept"], second["graphs"]) == (3, first["graphs"])
        assert told == told_again
        assert torchs["inductor"]["fxgraph_cache_miss"] == misses


def test_fake_tensors_that_are_views_stay_so():
    """Attention on CUDA returns such: views know the mode of their bases."""
    mode, graph = FakeTensorMode(shape_env=ShapeEnv()), fx.Graph()
    with mode:
        base = torch.randn(4, 4)
        views = [base.view(16), base.t()]
    x = graph.placeholder("x")
    x.meta["val"] = base
    nodes = [graph.call_function(torch.ops.aten.alias.default, (x,)) for _ in views]
    for node, value in zip(nodes, views, strict=True):
        node.meta["val"] = value
    graph.output(tuple(nodes))
    with tracing(TracingContext(mode)):
        data = torch_private.pickled(fx.GraphModule({}, graph), [base])
        found, (read,) = torch_private.unpickled(data)
    for view, node in zip(views, found.graph.output_node().all_input_nodes, strict=True):
        new = node.meta["val"]
        assert (view.shape, view.stride()) == (new.shape, new.stride())
        assert new.untyped_storage()._cdata == read.untyped_storage()._cdata
        assert new._is_view()
        assert new.fake_mode is new._base.fake_mode is mode


def compiled(fn, *inputs, **options):
    """Tell if a second compilation of a function finds graphs that were kept."""
    found = []
    for _ in range(2):
        torch.compiler.reset()
        with counted() as counters:
            torch.compile(fn, backend="cgpass", options=SIMULATED | options)(*inputs)
        found.append(counters["graphs_kept"])
    assert found[0] == 0
    return bool(found[1])


def test_constants_and_classes_that_can_not_be_found_again_are_not_kept(caplog):
    class Local(torch.nn.Module):
        def forward(self, x):
            return x.sin() + 1

    saved = torchs["aot_autograd"]["autograd_cache_saved"]
    assert not compiled(lambda x: x * torch.tensor([1.0, 2.0] * 4), X)
    assert torchs["aot_autograd"]["autograd_cache_saved"] == saved
    assert not compiled(torch.nn.Sequential(Local()), X)
    assert not caplog.records


def key_of(fn, *inputs, **options):
    """The key that AOTAutograd's cache is given for a function, without compiling it."""
    found = []

    def backend(gm, example_inputs):
        cache = GraphCache(lambda *_: None, gm, example_inputs, Options(**options))
        found.append(cache.key)
        return gm

    torch.compiler.reset()
    torch.compile(fn, backend=backend)(*inputs)
    (key,) = found
    return key


def sine(x):
    return x.sin() + 1


class Renamed(CustomGraphPass):
    """A pass of the user's."""

    def __call__(self, graph):
        pass

    def uuid(self):
        return "renamed"


@contextlib.contextmanager
def put(change, value, before):
    change(value)
    try:
        yield
    finally:
        change(before)


@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        lambda: torch_private.replaced(torch.backends.cudnn, "enabled", False),
        lambda: torch_private.replaced(torch.backends.opt_einsum, "strategy", "greedy"),
        lambda: put(torch.set_default_dtype, torch.float64, torch.float32),
        lambda: put(torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp, True, False),
        lambda: torch._functorch.config.patch(activation_memory_budget_solver="greedy"),
    ],
)
def test_keys_tell_apart_what_torchs_may_not(context):
    key = key_of(sine, X)
    with context():
        other = key_of(sine, X)
    assert None is not other != key


def test_a_key_is_the_same_for_the_same_alone():
    place, leaf = torch.ones(8, 8), torch.ones(4, 8, requires_grad=True)
    static = torch.ones(4, 8)
    torch._dynamo.mark_static_address(static)
    calls = [
        lambda: key_of(sine, leaf),
        lambda: key_of(sine, leaf * 1),
        lambda: key_of(sine, leaf, rng="paired"),
        lambda: key_of(sine, place[4:]),
        lambda: key_of(sine, static),
        lambda: key_of(sine, X, inductor={"post_grad_custom_pre_pass": Renamed()}),
    ]
    keys = [call() for call in calls]
    assert keys == [call() for call in calls]
    assert None not in keys
    assert len(set(keys[:5])) == 5
    source, lines = "def fn(x):\n    return x.sin() + 1\n", []
    for number in range(2):
        space = {}
        exec(compile("\n" * number + source, "<given>", "exec"), space)
        lines.append(key_of(space["fn"], X))
    assert lines[0] != lines[1]


@pytest.mark.parametrize("room", ["compile", "torch_private"])
def test_what_another_version_of_cgpass_kept_is_not_read(monkeypatch, tmp_path, room):
    monkeypatch.setattr(cache_module, "__file__", str(tmp_path / "compile" / "cache.py"))
    for name in ("compile", "torch_private"):
        (tmp_path / name).mkdir()
    cache_module._own_code.cache_clear()
    key = key_of(sine, X)
    (tmp_path / room / "added.py").write_text("cut = None")
    cache_module._own_code.cache_clear()
    assert None is not key != key_of(sine, X)
    cache_module._own_code.cache_clear()


doubled = doubling("doubled")


def packs(x):
    return x


def test_what_has_no_key(monkeypatch, caplog):
    """Operators of others, memory that inputs share, symbolic sizes, and what fails."""
    assert key_of(lambda x: doubled(x) + 1, X) is None
    assert key_of(lambda x, y: x.add_(1) + y, X, X.view(8, 4).view(4, 8)) is None
    x = X.clone()
    torch._dynamo.mark_dynamic(x, 0)
    assert key_of(sine, x) is None
    monkeypatch.setattr(torch_private, "told_by_no_key", lambda: 1 / 0)
    with caplog.at_level("INFO", "cgpass"):
        assert key_of(sine, X) is None
    assert "AOTAutograd's cache is left out: division by zero" in caplog.text


def patched(module, name, value):
    return lambda: module.patch({name: value})


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning")
@pytest.mark.parametrize(
    "context",
    [
        patched(torch._functorch.config, "enable_autograd_cache", False),
        patched(torch._functorch.config, "strict_autograd_cache", True),
        patched(torch._functorch.config, "joint_custom_pass", packs),
        patched(torch._functorch.config, "activation_memory_budget_solver", packs),
        patched(torch._inductor.config, "fx_graph_cache", False),
        patched(torch.compiler.config, "force_disable_caches", True),
        patched(torch._dynamo.config, "compiled_autograd", True),
        lambda: torch.autograd.graph.saved_tensors_hooks(packs, packs),
        lambda: torch_private.replaced(kept_graphs, "has_process_groups", lambda: True),
    ],
)
def test_where_traces_are_not_all_that_the_keys_tell_there_is_no_key(context):
    with context():
        assert key_of(sine, X) is None
