"""Facts about node values, on traced graphs over fake CUDA tensors."""

import importlib

import pytest
import torch

from cgpass.compile.facts import values
from tests.graphs import calls, dynamic, fake_cuda_graph, ints, node_named

aten = torch.ops.aten


def flags(gm, predicate):
    return [node.name for node in gm.graph.nodes if predicate(node)]


def one(gm, target):
    (node,) = calls(gm, target)
    return node


def test_host_scalars_read_shapes_but_no_data():
    def fn(x):
        n = x.nonzero().shape[0]
        return x.new_zeros(x.shape[0] * 2 + n), x.sum().item() * 2

    gm = fake_cuda_graph(fn, dynamic(4))
    scalars = flags(gm, values.is_host_scalar)
    assert not any(name.startswith("_local_scalar") for name in scalars)
    assert all(name.startswith(("sym_size", "mul", "add")) for name in scalars)
    assert len(scalars) >= 4


def test_a_number_out_of_a_tensor_operator_is_no_host_scalar():
    gm = fake_cuda_graph(lambda x: torch.nn.functional.dropout(x), (3,))
    item = one(gm, aten.native_dropout.default)
    item.meta["val"] = (item.meta["val"][0], 7)
    getitem = next(iter(item.users))
    getitem.meta["val"] = 7
    assert not values.is_host_scalar(getitem)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: x + 1, [True]),
        (lambda x: x.view(-1), [False]),
        (lambda x: x.add_(1), [False]),
        (lambda x: x.sum(0).expand(4, 4), [True, False]),
        (lambda x: x.sort()[0], [True, False, False]),
        (lambda x: x.new_zeros(0), [False]),
    ],
    ids=["new", "view", "in place", "expand", "getitem", "empty"],
)
@pytest.mark.parametrize("shape", [(4, 4), dynamic(4, 4)], ids=["static", "dynamic"])
def test_what_allocates(fn, expected, shape):
    gm = fake_cuda_graph(fn, shape)
    computing = [
        n for n in gm.graph.nodes if n.op == "call_function" and not values.is_host_scalar(n)
    ]
    found = [values.allocates(n) for n in computing]
    assert found[: len(expected)] == expected
    assert not any(found[len(expected) :])


def test_mutated_inputs_follow_the_schema():
    gm = fake_cuda_graph(lambda x, y: (x.copy_(y), torch.add(x, y, out=y)), (3,), (3,))
    x, y = node_named(gm, "x_1"), node_named(gm, "y_1")
    assert values.mutated_inputs(one(gm, aten.copy_.default)) == (x,)
    assert values.mutated_inputs(one(gm, aten.add.out)) == (y,)


def test_a_storage_that_is_resized_is_written_whatever_the_schema_says():
    gm = fake_cuda_graph(lambda x: x.sin(), (3,))
    importlib.import_module("torch._inductor.inductor_prims")
    resize = torch.ops.inductor.resize_storage_bytes_.default
    sin = one(gm, aten.sin.default)
    with gm.graph.inserting_after(sin):
        node = gm.graph.call_function(resize, (sin, 0))
    assert values.mutated_inputs(node) == (sin,)


def test_a_triton_kernel_may_write_to_all_its_tensors():
    gm = fake_cuda_graph(lambda x: x.sin(), (3,))
    x, sin = node_named(gm, "x_1"), one(gm, aten.sin.default)
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

    with gm.graph.inserting_after(sin):
        kernel = gm.graph.call_function(
            triton_kernel_wrapper_mutation, (), {"kernel_idx": 0, "kwargs": {"a": sin, "b": x}}
        )
    assert set(values.mutated_inputs(kernel)) == {x, sin}
    assert values.has_side_effect(kernel)


def test_a_nested_graph_that_writes_may_write_to_all_operands():
    gm = fake_cuda_graph(lambda x: x.sin(), (3,))
    gm.body = fake_cuda_graph(lambda x: x.view(-1).add_(1), (3,))
    x = node_named(gm, "x_1")
    with gm.graph.inserting_after(x):
        body = gm.graph.get_attr("body")
    with gm.graph.inserting_after(body):
        call = gm.graph.call_function(torch.ops.higher_order.invoke_subgraph, (body, "name", x))
    assert values.mutated_inputs(call) == (x,)
    gm.body = fake_cuda_graph(lambda x: x.view(-1).add(1), (3,))
    assert values.mutated_inputs(call) == ()


def test_random_operators_are_found_inside_wrappers_too():
    gm = fake_cuda_graph(lambda x: (torch.rand_like(x), x.sin()), (3,))
    sin = one(gm, aten.sin.default)
    assert flags(gm, values.is_random) == ["rand_like"]
    sin.target = torch.ops.higher_order.graphsafe_run_with_rng_state
    sin.args = (aten.rand_like.default, *sin.args)
    assert flags(gm, values.is_random) == ["rand_like", "sin"]


def test_collectives_of_dtensor_s_own_are_known_by_name():
    gm = fake_cuda_graph(lambda x: x.sin().cos(), (3,))
    one(gm, aten.sin.default).target = torch.ops._dtensor.shard_dim_alltoall.default
    assert flags(gm, values.is_collective) == ["sin"]
    assert flags(gm, values.starts_collective) == [], "it waits itself"


def test_symbols_are_ordered_by_name():
    def fn(x, i):
        return x.t(), x[: i.shape[0]], x.nonzero()

    gm = fake_cuda_graph(fn, dynamic(3, 4), ints(2))
    rows, columns = values.free_symbols(node_named(gm, "x_1"))
    transposed = next(n for n in gm.graph.nodes if n.op == "call_function" and values.tensors(n))
    assert values.free_symbols(transposed) == (rows, columns)
    assert values.unbacked_symbols(transposed) == ()
    nonzero = one(gm, aten.nonzero.default)
    (count,) = values.unbacked_symbols(nonzero)
    assert count in values.free_symbols(nonzero)
