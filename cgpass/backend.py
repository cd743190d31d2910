"""The torch.compile backend: joins AOTAutograd, passes, compilers and the runtime."""

import contextlib
import dataclasses
import functools
import logging
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from cgpass import telemetry, torch_private
from cgpass.compile import culprits, formulas
from cgpass.compile.assembly import GraphBuilder, copy_of, passes_for
from cgpass.compile.cache import GraphCache
from cgpass.compile.culprits import FailedOperators
from cgpass.compile.facts.breaks import graph_break_of
from cgpass.compile.facts.capturability import has_cpu_scalars, is_argument
from cgpass.compile.facts.input_info import InputKind
from cgpass.compile.facts.inputs import value_kinds
from cgpass.compile.facts.lines import begins_at, function_name
from cgpass.compile.facts.partition_tag import get_tag
from cgpass.compile.facts.target import find_target
from cgpass.compile.facts.values import graph_outputs, has_nested_ints
from cgpass.compile.layouts import Boxed, laid_out_otherwise
from cgpass.compile.passes.base import Direction, PassContext, run_passes
from cgpass.compile.passes.own_gradients import OwnGradients
from cgpass.compile.passes.rng_pairs import FunctionalizeRng, RngPairs, split_joint
from cgpass.compile.training import TrainingCall
from cgpass.errors import DoubleBackwardError, DriverUnavailableError, OptionError
from cgpass.options import Options, nearest
from cgpass.runtime import native
from cgpass.runtime.driver import CUDADriver
from cgpass.runtime.gathered import give_gathered_a_pool, give_pool_back
from cgpass.runtime.owner import Owner, release_idle
from cgpass.runtime.rng import caller_of
from cgpass.runtime.simulated import SimulatedDriver
from cgpass.telemetry import progress
from cgpass.telemetry.summaries import Source

log = logging.getLogger(__name__)

_OURS: Final = {
    "triton.cudagraphs": "cgpass makes the CUDA graphs; leave Inductor's own out",
    "custom_partitioner_fn": "cgpass splits the joint graph itself",
}
"""Settings of Inductor that nobody may change."""
_NUM_RETURNED: Final = "cgpass_num_returned"
"""Metadata of a forward graph's output: how many values the user gets. Saved tensors come after them."""


def cgpass(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | Options | None = None,
    mode: str | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo; the backend behind `torch.compile(..., backend="cgpass")`.

    Examples:
        >>> compiled = torch.compile(torch.nn.Linear(4, 4), backend=cgpass.cgpass)  # or backend="cgpass"
        >>> compiled(torch.randn(2, 4)).sum().backward()

    Args:
        gm: Dynamo's graph.
        example_inputs: Its inputs, fake or real.
        options: Fields of `cgpass.Options`.
        mode: Leave it out: Inductor's modes choose Inductor's own CUDA graphs.
        name: Given by newer torch versions, for messages only.

    Returns:
        A callable with Dynamo's calling convention. **Lifetime:** outputs and gradients are the caller's own.

    Raises:
        OptionError: An unknown option or a bad value.
        DriverUnavailableError: `driver="cuda"` without CUDA.
        CaptureError: `on_skip="raise"`, and a part of the graph can't be captured.
    """
    del name
    torch_private.register_backend("cgpass", cgpass)
    torch_private.note_graph_breaks()
    give_gathered_a_pool()
    parsed = parse_options(options)
    if mode not in (None, "default"):
        raise OptionError(
            f"mode={mode!r} belongs to Inductor and chooses its own CUDA graphs; with backend='cgpass' leave mode out "
            "and give Inductor's settings as options={'inductor': {...}}"
        )
    if parsed.driver == "cuda" and not torch.cuda.is_available():
        raise DriverUnavailableError(
            'driver="cuda", but torch finds no CUDA device; use driver="auto", or driver="simulated" on CPU'
        )
    _check_names(parsed)
    if parsed.driver != "none" and (parsed.driver != "auto" or torch.cuda.is_available()):
        native.loader.start()
    return Compilation(parsed, gm).compile(gm, example_inputs)


def parse_options(options: Mapping[str, Any] | Options | None) -> Options:
    """Read the options given to `torch.compile`; for an option of Inductor's `OptionError` says where it belongs."""
    given = options if isinstance(options, Mapping) else {}
    strangers = given.keys() - {spec.name for spec in dataclasses.fields(Options)}
    known = torch_private.inductor_option_names() if strangers else ()
    for name in strangers.intersection(known):
        where = f"it is a setting of Inductor, so give it as options={{'inductor': {{{name!r}: {given[name]!r}}}}}"
        hint = _OURS.get(name, where)
        raise OptionError(f"cgpass: unknown option {name!r}; {hint}")
    return Options._parse(options)


def _check_names(options: Options) -> None:
    """Refuse Inductor settings that are none; warn of operators that nobody registered."""
    known = torch_private.inductor_option_names() if options.inductor else ()
    for name in options.inductor:
        if name in _OURS:
            raise OptionError(f"inductor={{{name!r}: ...}}: {_OURS[name]}")
        if name not in known:
            near = nearest(name, known)
            hint = f"; did you mean {near!r}?" if near else ""
            raise OptionError(f"inductor={{{name!r}: ...}} is not a setting of Inductor{hint}")
    registered = torch_private.operator_names() if options.unsafe_ops else ()
    for name in options.unsafe_ops:
        is_higher_order = name.startswith("higher_order::")  # these are in no list
        if not is_higher_order and name.removesuffix(".default") not in registered:
            near = nearest(name, registered, cutoff=0.8)
            hint = f"; did you mean {near}?" if near else ""
            log.warning("unsafe_ops names %s, but no such operator is registered%s", name, hint)


def _name_calls(gm: fx.GraphModule) -> None:
    """Have `names_behind` find what modules of torch's call: Dynamo notes the module's class in place of the function."""
    for graph in (each.graph for each in gm.modules() if isinstance(each, fx.GraphModule)):
        for node in graph.nodes:
            if node.op in ("call_function", "call_method"):
                stack = node.meta.get("source_fn_stack", ())
                node.meta["source_fn_stack"] = [*stack, (node.name, node.target)]


def reset() -> None:
    """Free every recording of this process; `torch.compiler.reset()` calls it too.

    Examples:
        >>> compiled = torch.compile(torch.nn.Linear(4, 4), backend="cgpass")
        >>> compiled(torch.randn(2, 4)).sum().backward()
        >>> cgpass.reset()
        >>> cgpass.summary()
        'no graph was compiled'

    Compiled functions stay usable: their next calls warm up and record again. A function that another thread is calling
    frees its recordings in its next call. `cgpass.summary()` starts again, with graphs that are compiled or called from now
    on. Functions that reached torch's recompile limit stay listed, since they run in eager until `torch.compiler.reset()`.
    `cgpass.counters()` are not reset.
    """
    telemetry.registry.since = telemetry.now()
    for each in torch_private.graph_breaks():
        each.earlier = True
    release_idle()
    give_pool_back()


def reset_with_torch() -> None:
    """The same as torch forgets what it compiled."""
    torch_private.end_notes()
    culprits.forget_all()
    reset()


setattr(cgpass, "reset", reset_with_torch)  # noqa: B010  torch._dynamo.reset() looks for this attribute
# torch.compile loads this module for what it compiles afterwards
torch_private.note_graph_breaks()
give_gathered_a_pool()


def _modules_read(
    code: types.CodeType | None, holders: Iterable[Sequence[str]]
) -> list[torch.nn.Module]:
    """Modules in the call of a compiled function that runs in this thread, if one does: those that have its parameters.

    Without parameters, those that it has a name for.
    """
    wanted, frame = code and _written_as(code), sys._getframe()
    while frame is not None and _written_as(frame.f_code) != wanted:
        frame = frame.f_back
    if frame is None:
        return []
    found, names = list[torch.nn.Module](), {"L": frame.f_locals, "G": frame.f_globals}
    for chain in holders:
        for each in chain:
            with contextlib.suppress(Exception):  # it may name what is not there by now
                if isinstance(module := eval(each, names), torch.nn.Module):
                    found.append(module)
                    break
    while not found and frame is not None:
        found = [each for each in frame.f_locals.values() if isinstance(each, torch.nn.Module)]
        is_rest = function_name(frame.f_code.co_name) != frame.f_code.co_name
        frame = frame.f_back if is_rest else None
    return found


def _written_as(code: types.CodeType) -> tuple[str, int, str]:
    """What the code that Dynamo runs has from the user's."""
    return code.co_filename, code.co_firstlineno, code.co_name


class Compilation:
    """One call of the backend: a forward and later a backward graph, or an inference graph.

    The callables it makes keep the owner of their recordings alive.
    """

    def __init__(self, options: Options, gm: fx.GraphModule) -> None:
        self.options = options
        self._owner: Owner | None = None
        self._names = torch_private.input_names(gm)
        self._static = torch_private.static_inputs(gm)
        holders = torch_private.holders(gm, self._static)
        self._modules_read = functools.partial(
            _modules_read, torch_private.compiled_code(), holders
        )
        self._saved: dict[str, InputKind] = {}
        self._parameters: frozenset[int] = frozenset()
        """Inputs of the forward that are parameters or buffers, and outputs of the backward that are their gradients."""
        code, callers = torch_private.note_function()
        self._source = Source(begins_at(gm), torch_private.current_trace_id(), code, callers)
        function = telemetry.new_function()
        self._failed = FailedOperators(function)
        self._builder = functools.partial(
            GraphBuilder,
            options=options,
            owner=self._owner_on,
            failed=self._failed,
            source=self._source,
            function=function,
            graph_break=graph_break_of(gm),
        )
        self._training = TrainingCall()
        self._formulas: list[Any] = []
        """See `formulas.watched`."""

    # ---- wiring

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Hand the graph to AOTAutograd with our split and our compilers."""
        told = progress.shown(f"compiling {self._source.place or 'a graph'}", self.options.progress)
        if self.options.unsafe_ops:
            _name_calls(gm)
        watched = formulas.watched(gm, self._formulas)
        with told, watched, torch_private.double_backwards_raise(DoubleBackwardError):
            if self.options.compiler == "eager":
                compiled = torch_private.compile_with_aten(
                    gm, example_inputs, compiler=self._compile_graph, partition_fn=self._split
                )
            else:
                cache = GraphCache(self._compile_graph, gm, example_inputs, self.options)
                compiled = torch_private.compile_with_inductor(
                    gm,
                    example_inputs,
                    inner_compile=cache.compile,
                    partition_fn=self._split,
                    config_patches=self.options.inductor,
                    cache_key=cache.key,
                    restore=cache.restore,
                )
        return self._training.around(compiled, gm)

    def _split(self, joint: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        settings["compiler"] = self.options.compiler
        forward, backward = split_joint(joint, inputs, **settings)
        if inputs:  # else it is the body of an `invoke_subgraph`
            forward.graph.output_node().meta[_NUM_RETURNED] = settings["num_fwd_outputs"]
            self._training.forget()  # what could be had of a kept pair, of which the backward could not
            telemetry.registry.compiled.joint_graphs += 1
        return forward, backward

    # ---- one graph

    def _compile_graph(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **settings: Any
    ) -> Boxed:
        """Partition a graph as it is after AOTAutograd, compile the partitions and join them to a boxed callable.

        The `settings` are those of `compile_fx_inner`.
        """
        direction: Direction = "forward"
        if settings.get("is_backward"):
            direction = "backward"
        elif settings.get("is_inference"):
            direction = "inference"
        else:
            torch_private.donate_no_buffers()
            placeholders = gm.graph.find_nodes(op="placeholder")
            self._parameters = frozenset(
                i for i, node in enumerate(placeholders) if self._is_static(node)
            )
        outputs = graph_outputs(gm)
        context = PassContext(device=torch.device("cpu"), stage="rng", direction=direction)
        # By themselves: what runs without a CUDA graph must repeat its forward's numbers, too, and give gradients apart.
        found = run_passes((OwnGradients(), FunctionalizeRng()), gm, context)
        if found:
            fn = self._with_pairs(gm, example_inputs, direction, settings, *found)
        else:
            fn = self._compile_tensors(gm, example_inputs, direction, settings)
        setattr(fn, "formulas", self._formulas)  # noqa: B010  as long as there is who may call them
        if direction == "forward":
            self._training.note_forward(fn)
        elif direction == "backward":
            self._training.note_backward(fn, outputs)
        return fn

    def _with_pairs(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        direction: Direction,
        settings: dict[str, Any],
        pairs: RngPairs,
    ) -> Boxed:
        """Compile a graph whose last inputs are states of generators, and call it as AOTAutograd does."""
        inputs, at = list(example_inputs), pairs.positions_at
        backward = direction == "backward"
        if backward:
            del inputs[at]
            if (static := settings.get("static_input_idxs")) is not None:
                settings["static_input_idxs"] = [i - (i > at) for i in static if i != at]
        placeholders = gm.graph.find_nodes(op="placeholder")
        inputs += [node.meta["val"] for node in placeholders[len(inputs) :]]
        fn = self._compile_tensors(gm, inputs, direction, settings)
        if not backward:
            torch_private.hide_output_stride(at)
        exact = self.options.rng == "exact"
        return caller_of(fn, pairs.devices, at, is_backward=backward, exact=exact)

    def _compile_tensors(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        direction: Direction,
        settings: dict[str, Any],
    ) -> Boxed:
        """Do the work of `_compile_graph` for a graph that has neither pairs nor positions of them."""
        target = find_target(gm, self.options.driver)
        build = self._builder(
            direction=direction, target=target, settings=settings, parameters=self._parameters
        )
        if target.skip is not None:
            return build.plainly(gm, example_inputs, skip=target.skip)
        context = PassContext(device=target.device, stage="graph", direction=direction)
        # What our passes put in is for partitions: Inductor has no lowering for `aten._to_copy`.
        original = copy_of(gm) if has_cpu_scalars(gm) else gm
        otherwise = laid_out_otherwise(gm, example_inputs) if direction == "backward" else []
        self._failed.mark(gm)
        found = run_passes(passes_for(gm, self.options, target), gm, context)
        reasons = [reason for _, reason in found]
        tags = {tag for tag in map(get_tag, gm.graph.nodes) if tag is not None}
        # A partition gets the sizes alone that it reads, of which nested integers are none.
        is_whole = len(tags) == 1 and not (
            has_nested_ints(gm) or any(map(is_argument, gm.graph.nodes))
        )
        inputs = gm.graph.find_nodes(op="placeholder")
        if direction == "backward":
            known = dict(self._saved)
        else:
            known = {n.name: InputKind.STATIC for n in inputs if self._is_static(n)}
        for name in [inputs[i].name for i in otherwise]:
            if not is_whole:
                known[name] = InputKind.COPIED  # new in each call
            elif known.get(name) is InputKind.STATIC:
                known[name] = InputKind.POOLED  # the forward's copy of a parameter
        build.kinds = value_kinds(gm, known)
        if direction == "forward":
            self._saved = build.kinds
        if not any(tag.captured for tag in tags):
            return build.plainly(original, example_inputs, reasons)
        if target.records:
            build.report(reasons)
        build.names = self._user_names(gm)
        output = gm.graph.output_node()
        build.visible = frozenset(range(output.meta.get(_NUM_RETURNED, len(graph_outputs(gm)))))
        if is_whole:
            return build.whole(gm, example_inputs, otherwise)
        return build.partitioned(gm, found, otherwise)

    def _is_static(self, node: fx.Node) -> bool:
        """Tell if a forward or inference graph's input keeps its address, as AOTAutograd knows."""
        return torch_private.input_key(node) in self._static

    def _user_names(self, gm: fx.GraphModule) -> dict[str, str]:
        """Return the user's name of each input of a forward or inference graph, by placeholder name."""
        names: dict[str, str] = {}
        for node in gm.graph.find_nodes(op="placeholder"):
            if name := torch_private.input_name(node, self._names):
                names[node.name] = name
        for node in filter(is_argument, gm.graph.nodes):
            source = node.all_input_nodes[0].name
            names[node.name] = names.get(source, source)
        return names

    def _owner_on(self, device: torch.device) -> Owner:
        """The owner of this function's recordings."""
        if self._owner is None:
            driver = SimulatedDriver(device) if device.type == "cpu" else CUDADriver(device)
            self._owner = Owner(driver, self.options, self._modules_read)
        return self._owner
