"""Graphs that AOTAutograd's cache keeps: a second process need not trace them again.

Note [Graphs in AOTAutograd's cache]
    On a hit AOTAutograd neither traces nor splits; it has from its cache what a compiler made of the graphs. What cgpass
    makes of them can't leave the process. So the graph itself is kept, as it was after the split: on a hit it goes
    through our passes as a fresh one does, and Inductor's cache has its kernels. A graph is compiled from its kept form
    in the first process, too: so that both compile the same.

    AOTAutograd's key consists of Dynamo's graph, what the inputs look like, and settings. Ours is added to it: our
    source and options, the lines that the graph stands for, which messages name, and what else a trace depends on.
    Kept are graphs of torch's own operators on plain tensors of known sizes, in one process. Others are always traced.
"""

import functools
import hashlib
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from cgpass import telemetry, torch_private
from cgpass.compile.layouts import Boxed
from cgpass.options import Options
from cgpass.runtime.capturing import Pause

log = logging.getLogger(__name__)


_OF_THE_CALL = ("cudagraphs", "boxed_forward_device_index", "compile_region_name", "graph_id")
"""Settings of one compilation, of which the next one has its own."""


class GraphCache:
    """Compiles graphs so that AOTAutograd's cache keeps them, and those that it kept, all of one of Dynamo's graphs."""

    def __init__(
        self,
        compile_graph: Callable[..., Boxed],
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        options: Options,
    ) -> None:
        self.key: str | None = None
        """An addition to AOTAutograd's own key; None where its cache is to keep nothing."""
        self._compile = compile_graph
        try:
            self.key = _key(gm, inputs, options)
        except Exception as error:
            log.info("AOTAutograd's cache is left out: %s", error)

    def compile(self, gm: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        """Compile a graph as it is after the split, as `compile_fx_inner`; what is returned is called as `Boxed` is."""
        if self.key is None:
            return self._compile(gm, inputs, **settings)
        kept = None
        try:
            if torch_private.is_plain(inputs) and all(map(_is_kept, gm.graph.nodes)):
                lasting = {name: settings[name] for name in settings if name not in _OF_THE_CALL}
                data = torch_private.pickled(gm, tuple(inputs), lasting)
                anew, fakes, _ = torch_private.unpickled(data)
                # the backward's saved values are known by their names in the forward
                if [n.name for n in anew.graph.nodes] == [n.name for n in gm.graph.nodes]:
                    kept, gm, inputs = data, anew, fakes
        except Exception as error:
            log.info("a graph is not kept in AOTAutograd's cache: %s", error)
        return torch_private.cached_code(self._compile(gm, inputs, **settings), kept)

    def restore(self, kept: bytes, settings: Mapping[str, Any]) -> Boxed:
        """Compile a graph that AOTAutograd's cache kept, with this compilation's own settings."""
        own = {name: value for name, value in settings.items() if name in _OF_THE_CALL}
        with Pause():  # collections would look at these many objects again and again
            gm, inputs, lasting = torch_private.unpickled(kept)
            fn = self._compile(gm, inputs, **lasting, **own)
        telemetry.registry.compiled.graphs_kept += 1
        return fn


def _key(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> str | None:
    graphs = (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))
    nodes = [node for graph in graphs for node in graph.nodes]
    tensors = [i for i in inputs if isinstance(i, torch.Tensor)]
    if not torch_private.is_plain(inputs) or any(_is_of_others(node.target) for node in nodes):
        return None
    if len({tensor.untyped_storage()._cdata for tensor in tensors}) < len(tensors):
        return None  # of shared memory AOTAutograd's key says nothing
    settings = torch_private.told_by_no_key()
    if settings is None or torch_private.handles_subclasses(gm):
        return None
    marks = map(torch_private.static_mark, gm.graph.find_nodes(op="placeholder"))
    facts = ((tensor.is_leaf, tensor.storage_offset()) for tensor in tensors)
    places = ((n.stack_trace, *(n.meta.get("nn_module_stack") or {}).values()) for n in nodes)
    own = replace(options, inductor={})  # those for Inductor are in AOTAutograd's key
    parts = (_own_code(), repr(own), *marks, *facts, *settings, *places)
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


@functools.cache
def _own_code() -> str:
    """Tells versions of cgpass apart, those that are being worked on, too: `torch_private` splits and keeps graphs."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _is_of_others(target: object) -> bool:
    """Tell if it is an operator of another namespace, whose formulas may change without torch's key noticing."""
    is_operator = isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    return is_operator and str(target).partition(".")[0] not in torch_private.NAMESPACES


def _is_kept(node: fx.Node) -> bool:
    is_torchs = isinstance(node.target, torch._ops.OpOverload) and not _is_of_others(node.target)
    known = is_torchs or node.op in ("placeholder", "output") or node.target is operator.getitem
    return known and torch_private.is_plain(node.meta.get("val"))
