"""What AOTAutograd's key is given of ours: what tells graphs apart that it would not, and when nothing is kept."""

import contextlib
import functools
import os

import pytest
import torch
from torch._inductor import pattern_matcher
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes import joint_graph

from cgpass import _torch, warm_start
from cgpass._torch import joint, kept_graphs
from cgpass.options import Options

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


def test_a_key_is_the_same_for_the_same():
    assert key_of(sine, X) == key_of(sine, X) is not None


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def half_sums():
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)


@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        lambda: joint.replaced(torch.backends.cudnn, "enabled", False),
        lambda: joint.replaced(torch.backends.opt_einsum, "strategy", "greedy"),
        default_dtype,
        half_sums,
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


def test_what_has_no_autocast_has_a_key_all_the_same():
    assert key_of(sine, torch.ones(3, device="meta")) is not None


def test_formulas_of_others_leave_no_key():
    sine_of = torch._inductor.decomposition.decompositions
    op = torch.ops.aten.gelu.default
    assert op not in sine_of or sine_of[op].__module__.startswith("torch")
    before = sine_of.get(op)
    sine_of[op] = lambda x, approximate="none": x
    try:
        assert key_of(sine, X) is None
    finally:
        sine_of.pop(op)
        if before is not None:
            sine_of[op] = before
    assert key_of(sine, X) is not None


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


def as_torchs(fn, module="torch.nn"):
    """A function that says it is torch's."""
    fn.__module__ = module
    fn.__code__ = fn.__code__.replace(co_filename=torch.nn.__file__)
    return fn


def first_formula(x):
    return x + 1


as_torchs(first_formula, "torch.of_ours")


def second_formula(x, by=1):
    return x + by


as_torchs(second_formula, "torch.of_ours")


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


def test_a_formula_around_one_of_torchs_leaves_no_key(monkeypatch):
    table, op = torch._inductor.decomposition.decompositions, torch.ops.aten.silu.default
    before = table[op]

    @functools.wraps(before)
    def twice(*args, **kwargs):
        return 2 * before(*args, **kwargs)

    assert key_of(sine, X) is not None
    monkeypatch.setitem(table, op, twice)
    assert key_of(sine, X) is None
    # of a package whose name begins as torch's
    directory = os.path.dirname(torch.__file__) + "foo"
    twice.__code__ = twice.__code__.replace(co_filename=os.path.join(directory, "ops.py"))
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


@pytest.mark.parametrize("name", ["joint_custom_pass", "activation_memory_budget_solver"])
def test_passes_that_torchs_key_leaves_out_leave_none(name):
    with torch._functorch.config.patch({name: lambda *args: None}):
        assert key_of(sine, X) is None


def test_keys_tell_solvers_apart():
    with torch._functorch.config.patch(activation_memory_budget_solver="greedy"):
        key = key_of(sine, X)
    assert None is not key != key_of(sine, X)


def test_torchs_own_patterns_leave_a_key():
    joint_graph.joint_graph_passes(torch.fx.symbolic_trace(sine))
    assert len(joint_graph.pass_patterns[-1].patterns) + len(joint_graph.patterns.patterns) > 5
    assert key_of(sine, X) is not None


def test_an_error_leaves_no_key(monkeypatch, caplog):
    monkeypatch.setattr(_torch, "told_by_no_key", lambda: 1 / 0)
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


def test_hooks_on_saved_tensors_leave_no_key():
    with torch.autograd.graph.saved_tensors_hooks(packs, packs):
        assert key_of(sine, X) is None


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning")
@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (torch._functorch.config, "enable_autograd_cache", False),
        (torch._functorch.config, "strict_autograd_cache", True),
        (torch._inductor.config, "fx_graph_cache", False),
        (torch.compiler.config, "force_disable_caches", True),
        (torch._dynamo.config, "compiled_autograd", True),
    ],
)
def test_where_caches_are_off_there_is_no_key(module, name, value):
    with module.patch({name: value}):
        assert key_of(sine, X) is None


def test_in_a_process_of_several_there_is_no_key(monkeypatch):
    monkeypatch.setattr(kept_graphs, "has_process_groups", lambda: True)
    assert key_of(sine, X) is None
