"""What AOTAutograd's key is given of ours: what tells graphs apart that it would not, and when nothing is kept."""

import contextlib

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from cgpass import torch_private
from cgpass.compile import warm_start
from cgpass.options import Options
from cgpass.torch_private import kept_graphs

X = torch.ones(4, 8)


@pytest.fixture(autouse=True)
def clean():
    yield
    torch.compiler.reset()


def key_of(fn, *inputs, **options):
    """The key that AOTAutograd's cache is given for a function, without compiling it."""
    found = []

    def backend(gm, example_inputs):
        cache = warm_start.GraphCache(lambda *_: None)
        cache.find_key(gm, example_inputs, Options(**options))
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
        lambda: torch.autocast("cpu", torch.float16),
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


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's own
def test_a_key_is_the_same_for_the_same_alone():
    place, leaf = torch.ones(8, 8), torch.ones(4, 8, requires_grad=True)
    calls = [
        lambda: key_of(sine, leaf),
        lambda: key_of(sine, leaf * 1),
        lambda: key_of(sine, leaf, rng="paired"),
        lambda: key_of(sine, place[4:]),
        lambda: key_of(sine, X, inductor={"post_grad_custom_pre_pass": Renamed()}),
    ]
    keys = [call() for call in calls]
    assert keys == [call() for call in calls]
    assert None not in keys
    assert len(set(keys[:4])) == 4


def test_keys_tell_lines_apart():
    source, found = "def fn(x):\n    return x.sin() + 1\n", []
    for number in range(2):
        space = {}
        exec(compile("\n" * number + source, "<given>", "exec"), space)
        found.append(key_of(space["fn"], X))
    assert found[0] != found[1]


def test_an_error_leaves_no_key(monkeypatch, caplog):
    monkeypatch.setattr(torch_private, "told_by_no_key", lambda: 1 / 0)
    with caplog.at_level("INFO", "cgpass"):
        assert key_of(sine, X) is None
    assert "AOTAutograd's cache is left out: division by zero" in caplog.text


@torch.library.custom_op("cgpass_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)


def packs(x):
    return x


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        (lambda x: doubled(x) + 1, [X]),
        (lambda x, y: x.add_(1) + y, [X, X.view(8, 4).view(4, 8)]),
    ],
    ids=["operators of others", "shared memory"],
)
def test_what_has_no_key(fn, inputs):
    assert key_of(fn, *inputs) is None


def test_symbolic_sizes_have_no_key():
    x = X.clone()
    torch._dynamo.mark_dynamic(x, 0)
    assert key_of(sine, x) is None


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
