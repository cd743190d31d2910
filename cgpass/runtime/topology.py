"""What a recording consists of: nodes by type, and which waits for which."""

import collections
import contextlib
import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cgpass.errors import CaptureError, DriverUnavailableError

_COLOURS = {"kernel": "#cfe2f3", "memcpy": "#fff2cc", "memset": "#d9ead3", "operator": "#cfe2f3"}
_NAMES = {"graph": "child_graph"}


@dataclass(frozen=True)
class GraphNode:
    """One piece of recorded work."""

    type: str
    """`kernel`, `memcpy`, `memset`, `child_graph`, ... as CUDA calls them; `operator` or `compiled` if simulated."""
    name: str | None = None
    """The kernel's or the operator's, where that is known."""


@dataclass(frozen=True)
class Topology:
    """A graph's nodes, in the order in which the driver lists them."""

    nodes: tuple[GraphNode, ...]
    edges: tuple[tuple[int, int], ...]
    """Positions of two nodes, the second of which waits for the first."""

    def counts(self) -> dict[str, int]:
        """Nodes by type, the most frequent first."""
        return dict(collections.Counter(node.type for node in self.nodes).most_common())

    def as_json(self, about: dict[str, Any]) -> str:
        """As JSON, after what else is to be said."""
        nodes = [
            {"id": i, "type": node.type, "name": node.name} for i, node in enumerate(self.nodes)
        ]
        told = {**about, "counts": self.counts(), "nodes": nodes, "edges": self.edges}
        return json.dumps(told, indent=1)

    def as_dot(self, title: str) -> str:
        """As Graphviz's DOT."""
        return "\n".join(["digraph recording {", *self._dot_lines(title), "}", ""])

    def _dot_lines(self, title: str) -> Iterator[str]:
        yield f"  label={_quoted(title)};"
        yield "  node [shape=box, style=filled, fillcolor=white];"
        for i, node in enumerate(self.nodes):
            label = node.type if node.name is None else f"{node.type}: {node.name}"
            colour = _COLOURS.get(node.type, "white")
            yield f'  n{i} [label={_quoted(label)}, fillcolor="{colour}"];'
        for before, after in self.edges:
            yield f"  n{before} -> n{after};"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def read_cuda_graph(raw: int) -> Topology:
    """Nodes and edges of a `cudaGraph_t`. Bodies of child graphs and of conditional nodes are not entered.

    Args:
        raw: Its handle, `torch.cuda.CUDAGraph.raw_cuda_graph()`.

    Raises:
        DriverUnavailableError: The package cuda-bindings, which torch brings on Linux, is not there.
        CaptureError: The driver refuses to tell.

    Source: CUDA Driver API, "Graph Management"; cuda-bindings 12 and 13, which differ in what follows the edges.
    """
    try:
        cuda = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DriverUnavailableError(
            "reading a CUDA graph needs the package cuda-bindings: pip install cuda-bindings"
        ) from error
    num_nodes = _checked(cuda, cuda.cuGraphGetNodes(raw))[-1]
    handles = _checked(cuda, cuda.cuGraphGetNodes(raw, num_nodes))[0] if num_nodes else []
    num_edges = _checked(cuda, cuda.cuGraphGetEdges(raw))[-1]
    before, after, *_ = (
        _checked(cuda, cuda.cuGraphGetEdges(raw, num_edges)) if num_edges else ([], [])
    )
    number = {int(handle): i for i, handle in enumerate(handles)}
    return Topology(
        tuple(_node(cuda, handle) for handle in handles),
        tuple((number[int(a)], number[int(b)]) for a, b in zip(before, after, strict=True)),
    )


def _checked(cuda: Any, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    if answer[0] != cuda.CUresult.CUDA_SUCCESS:
        raise CaptureError(f"the CUDA driver does not tell what a graph consists of: {answer[0]}")
    return answer[1:]


def _node(cuda: Any, handle: Any) -> GraphNode:
    (kind,) = _checked(cuda, cuda.cuGraphNodeGetType(handle))
    type_ = kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
    name = _kernel_name(cuda, handle) if type_ == "kernel" else None
    return GraphNode(_NAMES.get(type_, type_), name)


def _kernel_name(cuda: Any, handle: Any) -> str | None:
    """A kernel node's function, as the compiler mangled it; None where the driver does not know."""
    error, params = cuda.cuGraphKernelNodeGetParams(handle)
    if error != cuda.CUresult.CUDA_SUCCESS:
        return None
    for ask, of in (("cuFuncGetName", params.func), ("cuKernelGetName", params.kern)):
        if of is not None and int(of):
            with contextlib.suppress(RuntimeError):  # a driver that is older than the function
                error, name = getattr(cuda, ask)(of)
                if error == cuda.CUresult.CUDA_SUCCESS:
                    return name.decode()
    return None
