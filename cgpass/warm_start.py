"""What a second process need not trace again: graphs that AOTAutograd's cache keeps.

Note [Graphs in AOTAutograd's cache]
    On a hit AOTAutograd neither traces nor splits; it has from its cache what a compiler made of the graphs. What cgpass
    makes of them can't leave the process. So the graph itself is kept, as it was after the split: on a hit it goes
    through our passes as a fresh one does, and Inductor's cache has its kernels. A graph is compiled from its kept form
    in the first process, too: so that both compile the same.

    AOTAutograd's key consists of Dynamo's graph, what the inputs look like, and settings. Ours is added to it: our
    source and options, the lines that the graph stands for, which messages name, and what else a trace depends on.

    Few kinds of graphs are kept: those of torch's own operators on plain tensors of known sizes, in one process.
    Others are traced in each process, as all are where AOTAutograd's cache is off.
"""

import dataclasses
import functools
import hashlib
import itertools
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from cgpass import _torch, telemetry
from cgpass.compile import Boxed
from cgpass.options import Options
from cgpass.runtime.capturing import no_gc

log = logging.getLogger(__name__)

_OF_THE_CALL: Final = frozenset(
    {"cudagraphs", "boxed_forward_device_index", "compile_region_name", "graph_id"}
)
"""Settings of one compilation, of which the next one has its own."""


class GraphCache:
    """Compiles graphs so that AOTAutograd's cache keeps them, and those that it kept."""

    def __init__(
        self,
        compile_graph: Callable[[fx.GraphModule, Sequence[Any], Mapping[str, Any], int], Boxed],
    ) -> None:
        self.key: str | None = None
        """What AOTAutograd's cache is to add to its own key; None where it is to keep nothing."""
        self.restored = False
        """Whether graphs were had from there, or tried to: what is split afterwards could not be."""
        self._compile = compile_graph

    def find_key(self, gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> None:
        """Set the key for Dynamo's graph, its inputs, fake or real, and what it is compiled with."""
        try:
            self.key = _key(gm, inputs, options) if _may_be_kept(gm, inputs) else None
        except Exception as error:
            log.info("AOTAutograd's cache is left out: %s", error)

    def compile(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        settings: Mapping[str, Any],
        num_fwd_outputs: int,
    ) -> Any:
        """Compile a graph as it is after the split; what is returned is called as `Boxed` is."""
        if self.key is None:
            return self._compile(gm, inputs, settings, num_fwd_outputs)
        kept, gm, inputs = _kept(gm, inputs, settings, num_fwd_outputs)
        with _torch.compiled_by_themselves():
            return _torch.cached_code(self._compile(gm, inputs, settings, num_fwd_outputs), kept)

    def restore(self, kept: bytes, settings: Mapping[str, Any]) -> Boxed:
        """Compile a graph that AOTAutograd's cache kept, with this compilation's own settings."""
        self.restored = True
        own = {name: value for name, value in settings.items() if name in _OF_THE_CALL}
        # So many objects come at once that Python would look through all there are again and again, a third of a second
        # each time where libraries of models are loaded.
        with no_gc(), _torch.compiled_by_themselves():
            gm, inputs, lasting, num_fwd_outputs = _torch.unpickled(kept)
            fn = self._compile(gm, inputs, {**lasting, **own}, num_fwd_outputs)
        telemetry.compile_stats.graphs_kept += 1
        return fn


def _may_be_kept(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    if not _torch.keeps_graphs() or _torch.handles_subclasses(gm) or not _is_plain(inputs):
        return False
    storages = [i.untyped_storage()._cdata for i in inputs if isinstance(i, torch.Tensor)]
    shared = len(set(storages)) < len(storages)  # of which AOTAutograd's key says nothing
    return not shared and not any(_is_of_others(node.target) for node in _nodes(gm))


def _key(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> str:
    marks = map(_torch.static_mark, gm.graph.find_nodes(op="placeholder"))
    tensors = (i for i in inputs if isinstance(i, torch.Tensor))
    facts = ((tensor.is_leaf, tensor.storage_offset()) for tensor in tensors)
    own = dataclasses.replace(options, inductor={})  # those for Inductor are in AOTAutograd's key
    parts = (_own_code(), repr(own), *marks, *facts, *_torch.told_by_no_key(), *_places(gm))
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


@functools.cache
def _own_code() -> str:
    """Tells versions of cgpass apart, those that are being worked on, too."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        code.update(path.read_bytes())
    return code.hexdigest()


def _kept(
    gm: fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any], num_fwd_outputs: int
) -> tuple[bytes | None, fx.GraphModule, Sequence[Any]]:
    """A graph to be kept, or None, and the graph and its inputs to go on with."""
    nothing = None, gm, inputs
    if not _is_plain(inputs) or not all(map(_is_kept, gm.graph.nodes)):
        return nothing
    lasting = {name: value for name, value in settings.items() if name not in _OF_THE_CALL}
    try:
        data = _torch.pickled(gm, tuple(inputs), lasting, num_fwd_outputs)
        anew, fakes, *_ = _torch.unpickled(data)
    except Exception as error:
        log.info("a graph is not kept in AOTAutograd's cache: %s", error)
        return nothing
    if [node.name for node in anew.graph.nodes] != [node.name for node in gm.graph.nodes]:
        return nothing  # the backward's saved values are known by their names in the forward
    return data, anew, fakes


def _nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    graphs = (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))
    return itertools.chain.from_iterable(graph.nodes for graph in graphs)


def _is_of_others(target: object) -> bool:
    """Whether it is an operator whose formulas somebody may change without torch's key noticing."""
    if not isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return False
    return str(target).partition(".")[0] not in _torch.NAMESPACES


def _is_kept(node: fx.Node) -> bool:
    if node.op == "call_function" and node.target is not operator.getitem:
        known = isinstance(node.target, torch._ops.OpOverload) and not _is_of_others(node.target)
    else:
        known = node.op in ("placeholder", "output", "call_function")
    return known and _is_plain(node.meta.get("val"))


def _is_plain(value: object) -> bool:
    """Whether a value is a plain tensor of known size, or no tensor and no symbol."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, torch.Tensor):
        return _torch.is_plain_tensor(value)
    return value is None or type(value) in (int, float, bool)


def _places(gm: fx.GraphModule) -> Iterator[str]:
    """Lines and modules that the nodes stand for."""
    for node in _nodes(gm):
        yield f"{node.stack_trace} {list((node.meta.get('nn_module_stack') or {}).values())}"
