"""What a second process need not trace again: graphs that AOTAutograd's cache keeps.

Note [Graphs in AOTAutograd's cache]
    On a hit AOTAutograd neither traces nor splits; it has from its cache what a compiler made of the graphs. What cgpass
    makes of them can't leave the process. So what is kept of a graph is the graph itself, as it was after the split: on
    a hit it goes through our passes as a fresh one does, and Inductor's cache has its kernels, under keys that are kept
    with the graph. A graph is compiled from its kept form in the first process, too: so that both compile the same.

    AOTAutograd's key consists of Dynamo's graph, what the inputs look like, and settings. Ours is added to it: our
    options, the lines that the graph stands for, which messages name, and what else a trace depends on that AOTAutograd
    leaves out.

    Few kinds of graphs are kept: those of torch's own operators on plain tensors of known sizes, in one process.
    Others are traced in each process, as all are where AOTAutograd's cache is off.
"""

import dataclasses
import functools
import hashlib
import itertools
import logging
import operator
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from cgpass import _torch, telemetry
from cgpass.compile import Boxed
from cgpass.options import Options
from cgpass.runtime.capturing import no_gc
from cgpass.version import VERSION

log = logging.getLogger(__name__)

_NAMESPACES: Final = frozenset({"aten", "prims", "inductor_prims"})
_OF_THE_CALL: Final = frozenset(
    {"cudagraphs", "boxed_forward_device_index", "compile_region_name", "graph_id"}
)
"""Settings of one compilation, of which the next one has its own."""


@dataclass(frozen=True)
class KeptGraph:
    """A forward, backward or inference graph after the split. See Note [Graphs in AOTAutograd's cache]."""

    data: bytes
    settings: Mapping[str, Any]
    """What it is compiled with."""
    num_fwd_outputs: int
    """Outputs of the forward that are no saved values."""
    metadata: Any
    """AOTAutograd's, of inputs and outputs."""
    keys: _torch.InductorKeys = field(default_factory=dict)
    """Of its partitions, in Inductor's cache."""


class GraphCache:
    """Compiles graphs so that AOTAutograd's cache keeps them, and those that it kept."""

    def __init__(
        self,
        compile_graph: Callable[[fx.GraphModule, Sequence[Any], Mapping[str, Any], int], Boxed],
    ) -> None:
        """Nothing is kept.

        Args:
            compile_graph: Compiles a graph for its fake inputs, with settings of Inductor's; of its outputs so many are
                the forward's, the others are saved.
        """
        self.key: str | None = None
        """What AOTAutograd's cache is to add to its own key; None where it is to keep nothing."""
        self.restored = False
        """Whether graphs were had from there, or tried to: what is split afterwards could not be."""
        self._compile = compile_graph

    def find_key(self, gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> None:
        """Set the key.

        Args:
            gm: Dynamo's graph.
            inputs: Its inputs, fake or real.
            options: What it is compiled with.
        """
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
        with _torch.compiled_by_themselves(), _torch.inductor_keys() as keys:
            fn = self._compile(gm, inputs, settings, num_fwd_outputs)
        kept = None if kept is None else dataclasses.replace(kept, keys=keys)
        return _torch.cached_code(fn, kept)

    def restore(self, kept: KeptGraph, settings: Mapping[str, Any]) -> Boxed:
        """Compile a graph that AOTAutograd's cache kept.

        Args:
            kept: The graph.
            settings: This compilation's own.
        """
        self.restored = True
        _torch.set_forward_metadata(kept.metadata)
        own = {name: value for name, value in settings.items() if name in _OF_THE_CALL}
        # So many objects come at once that Python would look through all there are again and again, a third of a second
        # each time where libraries of models are loaded.
        with no_gc(), _torch.compiled_by_themselves(), _torch.inductor_keys(kept.keys):
            gm, inputs = _torch.unpickled(kept.data)
            fn = self._compile(gm, inputs, {**kept.settings, **own}, kept.num_fwd_outputs)
        telemetry.compile_stats.graphs_kept += 1
        return fn


def _may_be_kept(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    if not _torch.keeps_graphs() or _torch.handles_subclasses(gm):
        return False
    if not all(map(_is_plain, inputs)) or _share_memory(inputs):
        return False
    return not any(_is_of_others(node.target) for node in _nodes(gm))


def _key(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> str:
    tensors = [i for i in inputs if isinstance(i, torch.Tensor)]
    devices = sorted({tensor.device.type for tensor in tensors} | {"cpu", "cuda"})
    marks = map(_torch.static_mark, gm.graph.find_nodes(op="placeholder"))
    facts = ((tensor.is_leaf, tensor.storage_offset()) for tensor in tensors)
    own = dataclasses.replace(options, inductor={})  # those for Inductor are in AOTAutograd's key
    ambient = (
        *_settings(devices),
        *_torch.settings_of_no_key(),
        *sorted(_torch.formulas(_NAMESPACES)),
    )
    parts = (_own_code(), repr(own), *marks, *facts, *ambient, *_places(gm))
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


@functools.cache
def _own_code() -> str:
    """Tells versions of cgpass apart, those that are being worked on, too."""
    code = hashlib.sha256(VERSION.encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        code.update(path.read_bytes())
    return code.hexdigest()


def _kept(
    gm: fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any], num_fwd_outputs: int
) -> tuple[KeptGraph | None, fx.GraphModule, Sequence[Any]]:
    """A graph to be kept, or None, and the graph and its inputs to go on with."""
    nothing = None, gm, inputs
    if not all(map(_is_plain, inputs)) or not all(map(_is_kept, gm.graph.nodes)):
        return nothing
    lasting = {name: value for name, value in settings.items() if name not in _OF_THE_CALL}
    try:
        pickle.dumps(lasting)
        data = _torch.pickled(gm, inputs)
        anew, fakes = _torch.unpickled(data)
    except Exception as error:
        log.info("a graph is not kept in AOTAutograd's cache: %s", error)
        return nothing
    if [node.name for node in anew.graph.nodes] != [node.name for node in gm.graph.nodes]:
        return nothing  # the backward's saved values are known by their names in the forward
    return KeptGraph(data, lasting, num_fwd_outputs, _torch.forward_metadata()), anew, fakes


def _nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    graphs = (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))
    return itertools.chain.from_iterable(graph.nodes for graph in graphs)


def _is_of_others(target: object) -> bool:
    """Whether it is an operator whose formulas somebody may change without torch's key noticing."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in _NAMESPACES


def _is_kept(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return _is_plain(node.meta.get("val"))
    if node.op != "call_function" or not _is_plain(node.meta.get("val")):
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in _NAMESPACES
    return target is operator.getitem


def _is_plain(value: object) -> bool:
    """Whether a value is a plain tensor of known size, or no tensor and no symbol."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, torch.Tensor):
        return _torch.is_plain_tensor(value)
    return value is None or type(value) in (int, float, bool)


def _share_memory(inputs: Sequence[Any]) -> bool:
    """Whether inputs do; AOTAutograd's key says nothing of that."""
    storages = [i.untyped_storage()._cdata for i in inputs if isinstance(i, torch.Tensor)]
    return len(set(storages)) < len(storages)


def _settings(devices: Iterable[str]) -> Iterator[Any]:
    """What a trace depends on beside what AOTAutograd's key has in every version."""
    for device in filter(torch.amp.is_autocast_available, devices):
        yield torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    yield torch.is_autocast_cache_enabled()
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    yield from (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled())
    yield from (cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled(), _torch.attention_order())
    yield cuda.fp16_bf16_reduction_math_sdp_allowed()
    yield str(cuda.preferred_linalg_library()), torch.backends.mha.get_fastpath_enabled()
    yield from (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32)
    yield from (torch.backends.mkldnn.enabled, torch.get_default_dtype())
    yield from (torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy)
    yield torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _places(gm: fx.GraphModule) -> Iterator[str]:
    """Lines and modules that the nodes stand for."""
    for node in _nodes(gm):
        yield node.stack_trace or ""
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            yield f"{path} {kind}"
