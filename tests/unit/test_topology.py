"""What a recording consists of: written down, and read from CUDA as its bindings answer."""

# ruff: noqa: N802  CUDA's names

import importlib
import json
import sys
import types
from enum import IntEnum

import pytest

from cgpass.errors import CaptureError, DriverUnavailableError
from cgpass.runtime.topology import GraphNode, Topology, read_cuda_graph


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class Type(IntEnum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1
    CU_GRAPH_NODE_TYPE_GRAPH = 4


class Bindings(types.ModuleType):
    """Three kernels, a copy and a child graph, as `cuda.bindings.driver` tells of them."""

    CUresult = Result
    handles = (0x10, 0x20, 0x30, 0x40, 0x50)
    edges = ((0x10, 0x20), (0x20, 0x30), (0x20, 0x40), (0x40, 0x50))
    version = 13
    is_old = False

    def cuGraphGetNodes(self, raw, num=0):
        if raw != 0x1:
            return Result.CUDA_ERROR_INVALID_VALUE, [], 0
        return Result.CUDA_SUCCESS, list(self.handles[:num]), len(self.handles)

    def cuGraphGetEdges(self, raw, num=0):
        before, after = ([edge[i] for edge in self.edges[:num]] for i in (0, 1))
        data = ([object()] * num,) * (self.version >= 13)
        return Result.CUDA_SUCCESS, before, after, *data, len(self.edges)

    def cuGraphNodeGetType(self, handle):
        types = {0x20: Type.CU_GRAPH_NODE_TYPE_MEMCPY, 0x50: Type.CU_GRAPH_NODE_TYPE_GRAPH}
        return Result.CUDA_SUCCESS, types.get(handle, Type.CU_GRAPH_NODE_TYPE_KERNEL)

    def cuGraphKernelNodeGetParams(self, handle):
        if handle == 0x40:
            return Result.CUDA_ERROR_INVALID_VALUE, None
        by_function = handle == 0x10
        params = types.SimpleNamespace(func=handle * by_function, kern=handle * (not by_function))
        return Result.CUDA_SUCCESS, params

    def cuFuncGetName(self, function):
        return Result.CUDA_SUCCESS, b"function_%x" % function

    def cuKernelGetName(self, kernel):
        if self.is_old:
            raise RuntimeError("Function cuKernelGetName not found")
        return Result.CUDA_SUCCESS, b"kernel_%x" % kernel


@pytest.fixture
def bindings(monkeypatch):
    module = Bindings("cuda.bindings.driver")
    monkeypatch.setattr(importlib, "import_module", {"cuda.bindings.driver": module}.__getitem__)
    return module


@pytest.mark.parametrize("version", [12, 13])
def test_nodes_and_edges_of_a_cuda_graph(bindings, version):
    bindings.version = version
    found = read_cuda_graph(0x1)
    assert found.nodes == (
        GraphNode("kernel", "function_10"),
        GraphNode("memcpy"),
        GraphNode("kernel", "kernel_30"),
        GraphNode("kernel"),
        GraphNode("child_graph"),
    )
    assert found.edges == ((0, 1), (1, 2), (1, 3), (3, 4))
    assert found.counts() == {"kernel": 3, "memcpy": 1, "child_graph": 1}


def test_a_driver_that_knows_no_names_of_kernels(bindings):
    bindings.is_old = True
    assert read_cuda_graph(0x1).nodes[2] == GraphNode("kernel")


def test_an_empty_graph(bindings):
    bindings.handles = bindings.edges = ()
    assert read_cuda_graph(0x1) == Topology((), ())


def test_a_driver_that_refuses(bindings):
    with pytest.raises(CaptureError, match=r"does not tell what a graph consists of: .*1"):
        read_cuda_graph(0x2)


def test_without_the_bindings(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(DriverUnavailableError, match="pip install cuda-bindings"):
        read_cuda_graph(0x1)


def test_the_bindings_have_what_is_asked_of_them():
    cuda = pytest.importorskip("cuda.bindings.driver")
    for name in vars(Bindings):
        if name.startswith("cu") or name == "CUresult":
            assert hasattr(cuda, name), name
    names = {kind.name for kind in cuda.CUgraphNodeType}
    assert {kind.name for kind in Type} <= names
    assert {"func", "kern"} <= set(dir(cuda.CUDA_KERNEL_NODE_PARAMS))


def test_names_are_quoted():
    topology = Topology((GraphNode("kernel", 'void f<"a\\b">()'),), ())
    assert 'kernel: void f<\\"a\\\\b\\">()' in topology.as_dot("t")
    told = json.loads(topology.as_json({"partition": "p"}))
    assert told["partition"] == "p"
    assert told["nodes"] == [{"id": 0, "type": "kernel", "name": 'void f<"a\\b">()'}]
