"""Nodes that no CUDA graph can hold; reasons that a compiled function provokes are those of tests/report."""

import operator

import pytest
import torch
from torch import fx
from torch.nn import functional as F

import cgpass
from cgpass.compile.facts import op_tables
from cgpass.compile.facts.capturability import LIFTED, names_behind, why_not_capturable
from cgpass.compile.facts.target import find_target
from cgpass.telemetry.reason import Reason
from tests.graphs import CUDA, Spec, calls, cpu, dynamic, fake_cuda_graph, ints
from tests.operators import doubling

aten = torch.ops.aten
hops = torch.ops.higher_order


plain = doubling("plain")


def placed(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph, its calls written at model.py:41 and the lines that follow."""
    called = [node for node in gm.graph.nodes if node.op == "call_function"]
    for number, node in enumerate(called, 41):
        node.stack_trace = f'  File "/a/model.py", line {number}, in forward\n    line {number}\n'
    return gm


def written_at(number: int) -> str:
    """The place that `placed` gives a call."""
    return f"model.py:{number} in forward: line {number}"


def reasons(fn, *specs, **kwargs) -> list[Reason]:
    gm = placed(fake_cuda_graph(fn, *specs))
    found = [why(node, **kwargs) for node in gm.graph.nodes]
    return [reason for reason in found if reason is not None]


def by_hand(target, *args, value=None, like=None, body=None, **kwargs) -> fx.Node:
    """One call on a CUDA input `x` (and a nested graph `body`), made without tracing."""
    gm = fake_cuda_graph(lambda x: x.sin(), (3,))
    (sin,) = calls(gm, aten.sin.default)
    x = sin.args[0]
    if body is not None:
        gm.body = body
    with gm.graph.inserting_after(sin):
        node = gm.graph.call_function(target, (), kwargs)
    named = {"x": x}
    if body is not None:
        with gm.graph.inserting_before(node):
            named["body"] = gm.graph.get_attr("body")
    node.args = tuple(named.get(arg, arg) if isinstance(arg, str) else arg for arg in args)
    node.meta["val"] = x.meta["val"] if value is None else value
    placed(gm)
    return node


def why(node: fx.Node, device=CUDA, **kwargs) -> Reason | None:
    """The reason, which names the node's operator and line; parts of a result that of what made it."""
    reason = why_not_capturable(node, device, **kwargs)
    if reason is not None and node.target is not operator.getitem:
        called = [each for each in node.graph.nodes if each.op == "call_function"]
        assert reason.line == written_at(41 + called.index(node))
        name = str(node.target) if hasattr(node.target, "name") else node.target.__name__
        if node.target in (hops.with_effects, hops.graphsafe_run_with_rng_state):
            (wrapped,) = (arg for arg in node.args if isinstance(arg, torch._ops.OpOverload))
            name = f"{name}({wrapped})"
        assert reason.op == name
    return reason


def sparse():
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.ones(3).to_sparse()


PROVOKED = {
    "python_call": lambda: [why(by_hand(sorted, "x"))],
    "host_state": lambda: [why(by_hand(aten.resize_.default, "x", [2]))],
    "effect_token": lambda: [why(by_hand(torch.ops.prims._make_token.default, value=token()))],
    "higher_order_op": lambda: [
        why(by_hand(hops.run_and_save_rng_state, aten.rand_like.default, "x"))
    ],
    "nested_graph": lambda: [
        why(by_hand(hops.invoke_subgraph, "body", "name", "x", body=reading_body()))
    ],
    "other_device": lambda: reasons(torch.sin, Spec((3,), device="cuda:1")),
    "cpu_number": lambda: reasons(torch.sin, cpu()),
    "cpu_tensor": lambda: reasons(torch.sin, cpu(3)),
    "device_to_host": lambda: reasons(lambda x: x.cpu(), (3,)),
    "host_to_device": lambda: reasons(lambda x: x.to(CUDA), cpu(3)),
    "lifted": lambda: [why(lifted_copy())],
    "cpu_scalar": lambda: reasons(torch.mul, (3,), cpu()),
    "layout": lambda: [why(by_hand(aten.add.Tensor, 1, 2, value=sparse()), torch.device("cpu"))],
    "host_only": lambda: [why(by_hand(aten.sym_constrain_range.default, 3, value=()))],
    "expandable_segments": lambda: [
        why(
            by_hand(torch.ops._c10d_functional.all_reduce.default, "x", "sum", "0"),
            collectives=False,
        )
    ],
}


def token() -> torch.Tensor:
    return torch.empty(0)


def with_effects(op) -> fx.Node:
    return by_hand(hops.with_effects, token(), op, "x", value=(token(), token()))


def lifted_copy() -> fx.Node:
    graph = placed(fake_cuda_graph(lambda x: x.sum().to(CUDA), cpu(3)))
    (node,) = graph.graph.find_nodes(op="call_function", target=aten._to_copy.default)
    node.meta[LIFTED] = True
    return node


def reading_body() -> fx.GraphModule:
    return fake_cuda_graph(lambda x: x.sum().item(), (3,))


def fix_of(code) -> str:
    """The operator's own where it has one."""
    own = {"dynamic_shape": "nonzero", "host_sync": "histc"}
    return op_tables.OPERATOR_FIXES[own[code]] if code in own else op_tables.FIXES[code]


@pytest.mark.parametrize(
    ("fn", "inputs", "fix"),
    [
        (torch.linalg.cholesky, [(3, 3)], "use torch.linalg.cholesky_ex, which does not check"),
        (torch.linalg.ldl_factor, [(3, 3)], op_tables.OPERATOR_FIXES["linalg_ldl_factor_ex"]),
        (
            lambda x: x + torch.tensor([1.0, 2.0, 3.0]).to(CUDA),
            [(3,)],
            "make the constant once, outside of the compiled function (register_buffer)",
        ),
    ],
)
def test_the_fix_is_that_of_the_operator(fn, inputs, fix):
    assert reasons(fn, *inputs)[0].fix == fix


@pytest.mark.parametrize("name", op_tables.OPERATOR_FIXES)
def test_operators_with_a_fix_of_their_own_are_known_to_torch(name):
    assert hasattr(aten, name)


def test_a_part_of_a_result_is_judged_as_what_made_it():
    found = reasons(lambda x: torch.linalg.eigh(x)[0], (3, 3))
    assert len(found) > 1
    assert {(reason.code, reason.op) for reason in found} == {
        ("host_sync", "aten._linalg_eigh.default")
    }


def test_an_operator_with_effects_is_named_and_judged_as_itself():
    check = with_effects(aten._linalg_check_errors.default)
    assert why(check).code == "host_sync"
    named = why(check, unsafe_ops=frozenset({"aten::_linalg_check_errors"}))
    assert named.code == "unsafe_ops"
    assert named.detail == "aten::_linalg_check_errors is listed in unsafe_ops"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tokens_of_effects_are_left_out_on_every_device_and_nobody_is_told(device):
    for op, args in (("_make_token", ()), ("_sink_tokens", ([token()],))):
        node = by_hand(getattr(torch.ops.prims, op).default, *args, value=token())
        assert why(node, torch.device(device)).is_chosen


CAPTURABLE = {
    "index_put": lambda: reasons(lambda x, i: x.index_put((i,), x[:2], True), (3,), ints(2)),
    "histc with a range": lambda: reasons(lambda x: torch.histc(x, 4, 0.0, 1.0), (3,)),
    "nonzero_static": lambda: reasons(lambda x: torch.nonzero_static(x, size=2), (3,)),
    "repeat_interleave": lambda: reasons(
        lambda x, n: torch.repeat_interleave(x, n, output_size=6), (3,), ints(3)
    ),
    "a custom operator": lambda: reasons(plain, (3,)),
    "writing to an input": lambda: reasons(lambda x: x.copy_(x + 1), (3,)),
    "symbolic sizes": lambda: reasons(lambda x: x.view(-1) * x.shape[0], dynamic(3, 4)),
}


@pytest.mark.parametrize("name", CAPTURABLE)
def test_a_node_is_captured(name):
    assert CAPTURABLE[name]() == []


SYNCS = {
    "searchsorted": (
        lambda x, i: torch.searchsorted(x, x, sorter=i),
        lambda x, i: torch.searchsorted(x, x),
        [(4,), ints(4)],
    ),
    "cholesky_ex": (
        lambda x: torch.linalg.cholesky_ex(x, check_errors=True),
        torch.linalg.cholesky_ex,
        [(4, 4)],
    ),
    "masked_fill": (
        lambda x: x.masked_fill(x > 0, x[0, 0]),
        lambda x: x.masked_fill(x > 0, 2.0),
        [(4, 4)],
    ),
    "linspace": (
        lambda x: aten.linspace.Tensor_Tensor(x[0], x[1], 5, device="cuda"),
        lambda x: x + torch.linspace(0, 1, 4, device="cuda"),
        [(4,)],
    ),
}


@pytest.mark.parametrize("name", SYNCS)
def test_arguments_decide_whether_an_operator_waits(name):
    waits, runs_on, specs = SYNCS[name]
    (reason,) = {str(r): r for r in reasons(waits, *specs) if name in r.op}.values()
    assert reason.code == "host_sync"
    assert reasons(runs_on, *specs) == []


def test_a_wrapped_operator_decides_for_its_wrapper():
    wrap = hops.graphsafe_run_with_rng_state
    assert why(by_hand(wrap, aten.rand_like.default, "x")) is None
    reason = why(by_hand(wrap, aten.bincount.default, "x"))
    assert reason.code == "dynamic_shape"


def test_a_nested_graph_decides_for_its_caller():
    good = fake_cuda_graph(torch.sin, (3,))
    assert why(by_hand(hops.invoke_subgraph, "body", "name", "x", body=good)) is None
    reason = why(by_hand(hops.invoke_subgraph, "body", "name", "x", body=reading_body()))
    assert reason.detail.startswith("inside it, aten._local_scalar_dense.default: the host reads")
    missing = why(by_hand(hops.invoke_subgraph, "name", "x"))
    assert missing.detail == "its nested graph was not found"


def test_zeros_without_memory():
    zeros = aten._efficientzerotensor.default
    (found,) = reasons(lambda x: x.sin() + zeros([3], device=x.device), (3,))
    assert found.code == "layout"
    assert "zeros that has no memory" in str(found)


def test_a_graph_that_makes_quantised_tensors_is_captured_nowhere():
    """The fake tensors that stand for them do not say so. Operators of other libraries make plain integers."""
    torch.library.define("cgpass_tests::quantize_per_tensor", "(Tensor x) -> Tensor")
    found = []
    for target in (aten, torch.ops.cgpass_tests):
        graph = fx.Graph()
        x = graph.placeholder("x")
        made = graph.call_function(target.quantize_per_tensor.default, (x,))
        x.meta["val"] = made.meta["val"] = torch.empty(2, 3)
        graph.output((made,))
        found.append(find_target(fx.GraphModule({}, graph), "simulated").skip)
    assert found == ["it makes quantised tensors", None]


# ---- by which names a node may be listed in `unsafe_ops`


def behind(target, *args, **meta):
    node = by_hand(target, *args, "x")
    node.meta.update(meta)
    return sorted(names_behind(node))


MM = ["aten::mm", "aten::mm.default"]


def test_a_node_is_the_operator_that_it_calls_or_wraps_or_was_decomposed_from():
    assert behind(aten.mm.default) == MM
    assert behind(hops.cond) == ["higher_order::cond"]
    assert set(MM) < {*behind(hops.graphsafe_run_with_rng_state, aten.mm.default)}
    found = behind(aten.mm.default, original_aten=aten.add.Tensor)
    assert found == ["aten::add", "aten::add.Tensor", *MM]
    forwards = behind(aten.mm.default, fwd_source_fn_stack=[("f", F.linear)])
    assert forwards == MM, "of a backward's nodes"


@pytest.mark.parametrize(
    ("target", "names"),
    [
        (F.linear, {"aten::linear"}),
        ("softmax", {"aten::softmax"}),
        ("add_", {"aten::add_"}),
        (operator.add, {"aten::add"}),
        (operator.iadd, {"aten::add_"}),
        (operator.getitem, set()),
        (aten.linear.default, {"aten::linear", "aten::linear.default"}),
        (aten.linear, {"aten::linear"}),
        (aten.gelu_backward, {"aten::gelu_backward"}),
        (sorted, set()),
    ],
    ids=lambda value: "" if isinstance(value, set) else getattr(value, "__name__", str(value)),
)
def test_the_call_in_the_users_code_is_named(target, names):
    found = set(behind(aten.mm.default, source_fn_stack=[("f", target)])) - {*MM}
    assert {name for name in found if name.count(".") == 0} == {n for n in names if "." not in n}
    assert names <= found


@pytest.mark.parametrize("name", ["aten::linear", "aten::linear.default"])
def test_what_a_module_of_torchs_calls_is_named(name):
    module = torch.nn.Linear(4, 4)
    options = {"driver": "simulated", "compiler": "eager", "unsafe_ops": [name]}

    def fn(x):
        return module(x).sin().cos().exp().tanh()

    torch.compile(fn, backend="cgpass", options=options)(torch.ones(4))
    assert f"it is a part of {name}, which is listed in unsafe_ops" in cgpass.summary()
