"""What AOTAutograd's key is given of ours: what tells graphs apart that it would not, and when nothing is kept."""

import contextlib
import functools
import os

import pytest
import torch
from torch._inductor import pattern_matcher
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes import joint_graph

from cgpass import torch_private
from cgpass.compile import warm_start
from cgpass.options import Options
from cgpass.torch_private import joint, kept_graphs

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


@pytest.mark.parametrize("x", [X, torch.ones(3, device="meta")], ids=["cpu", "no autocast"])
def test_a_key_is_the_same_for_the_same(x):
    assert key_of(sine, x) == key_of(sine, x) is not None


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
        lambda: joint.replaced(torch.backends.cudnn, "enabled", False),
        lambda: joint.replaced(torch.backends.opt_einsum, "strategy", "greedy"),
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


def test_keys_tell_options_apart():
    keys = {key_of(sine, X), key_of(sine, X, rng="paired"), key_of(sine, X, min_partition_ops=3)}
    assert len(keys) == 3


def test_keys_tell_where_an_input_begins():
    place = torch.ones(8, 8)
    assert key_of(sine, place[:4]) != key_of(sine, place[4:])


def test_objects_among_inductors_options_leave_a_key():
    keys = {key_of(sine, X, inductor={"post_grad_custom_pre_pass": Renamed()}) for _ in range(3)}
    assert len(keys) == 1
    assert None not in keys


def test_keys_tell_lines_apart():
    source, found = "def fn(x):\n    return x.sin() + 1\n", []
    for number in range(2):
        space = {}
        exec(compile("\n" * number + source, "<given>", "exec"), space)
        found.append(key_of(space["fn"], X))
    assert found[0] != found[1]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's own
def test_keys_tell_leaves_apart():
    leaf = torch.ones(4, 8, requires_grad=True)
    keys = {key_of(sine, leaf), key_of(sine, leaf * 1)}
    assert len(keys) == 2
    assert None not in keys


@pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning")
@pytest.mark.parametrize(
    "kind", ["AutogradMeta", "FuncTorchBatched", "AutocastCPU", "Functionalize"]
)
def test_operators_of_torchs_that_others_implement_leave_no_key(kind):
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("special_erfcx", lambda x: x, kind)
        assert key_of(sine, X) is None
    finally:
        library._destroy()
    assert key_of(sine, X) is not None


def keep(match, x):
    return x


@pytest.mark.parametrize("made", ["entry", "early", "replacement"])
def test_patterns_of_others_leave_no_key(made, monkeypatch):
    passes = pattern_matcher.PatternMatcherPass()
    if made == "early":
        monkeypatch.setattr(joint_graph, "early_patterns", passes)
    else:
        monkeypatch.setattr(joint_graph, "pass_patterns", [*joint_graph.pass_patterns, passes])
    assert key_of(sine, X) is not None
    if made != "replacement":
        pattern = pattern_matcher.CallFunction(torch.ops.aten.erf.default, pattern_matcher.Arg())
        pattern_matcher.register_graph_pattern(pattern, pass_dict=passes)(keep)
    else:
        pattern_matcher.register_replacement(
            lambda x: x.erf(), lambda x: x.cos(), [X], pattern_matcher.fwd_only, passes
        )
    assert key_of(sine, X) is None


def first_formula(x):
    return x + 1


def second_formula(x, by=1):
    return x + by


for formula in (first_formula, second_formula):  # that say they are torch's
    formula.__module__ = "torch.of_ours"
    formula.__code__ = formula.__code__.replace(co_filename=torch.nn.__file__)


def test_keys_tell_formulas_apart(monkeypatch):
    table, op = torch._inductor.decomposition.decompositions, torch.ops.aten.special_erfcx.default
    assert op not in table
    keys = [key_of(sine, X)]
    wrapped = functools.partial(second_formula, by=2)
    for formula in (first_formula, second_formula, wrapped, functools.partial(wrapped, by=3)):
        monkeypatch.setitem(table, op, formula)
        keys += [key_of(sine, X), key_of(sine, X)]
    assert keys[1::2] == keys[2::2]
    assert len(set(keys)) == 5
    assert None not in keys


def of_others(before):
    return lambda x, approximate="none": x


def around(before):
    return functools.wraps(before)(lambda *args, **kwargs: 2 * before(*args, **kwargs))


def of_a_namesake(before):
    """A formula of a package whose name begins as torch's."""
    found, path = around(before), os.path.dirname(torch.__file__) + "foo"
    found.__code__ = found.__code__.replace(co_filename=os.path.join(path, "ops.py"))
    return found


@pytest.mark.parametrize("kind", [of_others, around, of_a_namesake])
def test_formulas_of_others_leave_no_key(kind, monkeypatch):
    table, op = torch._inductor.decomposition.decompositions, torch.ops.aten.silu.default
    assert key_of(sine, X) is not None
    monkeypatch.setitem(table, op, kind(table[op]))
    assert key_of(sine, X) is None


@pytest.mark.parametrize("table", ["decompositions", "extra_random_decomps"])
def test_keys_know_formulas_that_the_next_compilation_does_not_read(table, monkeypatch):
    """The first compilation of a process makes a copy of both tables."""
    found, op = getattr(torch._inductor.decomposition, table), torch.ops.aten.special_erfcx.default
    copy = torch._inductor.decomposition.fast_random_decomps()
    key = key_of(sine, X)
    monkeypatch.setitem(found, op, first_formula)
    after = key_of(sine, X)
    monkeypatch.setitem(copy, op, first_formula)
    both = key_of(sine, X)
    assert None not in (key, after, both)
    assert both not in (key, after)
    assert (after == key) == (table == "extra_random_decomps")


def test_formulas_that_vmap_brings_leave_a_key():
    torch.vmap(torch.sin)(X)
    assert any(name.endswith("/FuncTorchBatched") for name in torch.library._impls)
    assert key_of(sine, X) is not None


def test_torchs_own_patterns_leave_a_key():
    joint_graph.joint_graph_passes(torch.fx.symbolic_trace(sine))
    assert len(joint_graph.pass_patterns[-1].patterns) + len(joint_graph.patterns.patterns) > 5
    assert key_of(sine, X) is not None


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
        lambda: joint.replaced(kept_graphs, "has_process_groups", lambda: True),
    ],
)
def test_where_traces_are_not_all_that_the_keys_tell_there_is_no_key(context):
    with context():
        assert key_of(sine, X) is None
