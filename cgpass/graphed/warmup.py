"""`Pass`: one forward with its sample, and its warm-ups."""

import contextlib
import logging
import random
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cgpass import torch_private
from cgpass.errors import CaptureError, CGPassError, GraphedArgumentError
from cgpass.graphed.binding import Binding
from cgpass.graphed.differentiated import Differentiated
from cgpass.graphed.hooks import HookSet
from cgpass.graphed.options import GraphedOptions
from cgpass.graphed.statics import Statics
from cgpass.graphed.values import OutputStructure, equal
from cgpass.recompute.states import CheckpointStates
from cgpass.runtime.driver import GraphDriver, is_capture_error
from cgpass.runtime.failures import random_state_kept
from cgpass.telemetry import CallStats

log = logging.getLogger(__name__)

_OPAQUE = (torch.Tensor, bool, int, float, complex, str, bytes)


@dataclass(eq=False)
class Pass:
    """One forward with its sample: what it takes to record it, now and again."""

    name: str
    run: Callable[..., Any]
    """The callable without a graph."""
    hooked: Any
    """The `module` that hooks get."""
    binding: Binding
    statics: Statics
    find_statics: Callable[[], Statics]
    """Finds them anew, when modules have other members than they had."""
    hooks: HookSet
    options: GraphedOptions
    stats: CallStats
    with_grad: bool
    """True if a backward is recorded where results require grad."""
    backward_dw: Callable[[], Any] | None = None
    """What makes the gradients that the backward leaves out, of weights, by filling their `.grad`."""
    structure: OutputStructure | None = None
    """Of the last run's result."""
    used: set[int] = field(default_factory=set)
    """Arguments and, after them, parameters that got a gradient in a warm-up."""
    split_off: set[int] = field(default_factory=set)
    """Parameters that `backward_dw` makes gradients for."""
    keeps_inputs: bool = False
    """See `Differentiated.keeps_inputs`."""
    asks_again: bool = False
    """See `Differentiated.asks_again`."""
    due: deque[Any] = field(default_factory=deque)
    """Calls whose backward ran, but not yet what was split off, oldest first."""
    records_backward: bool = True
    """False once a backward could not be captured that no sample had recorded."""
    told: set[str] = field(default_factory=set)
    """The log."""
    _objects: list[Any] | None = None
    _strangers: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    """Leaves of the last warm-up that are neither arguments nor parameters."""

    def warm_up(
        self, driver: GraphDriver, states: CheckpointStates, iterations: int, *, pool: bool
    ) -> None:
        """Run forward and backward on copies, and note what they do; in the pool, if nothing was recorded there yet."""
        run = driver.warm_up if pool else lambda fn, args: fn(args)
        number, self._objects, self.structure = 0, None, None
        self.used.clear()
        self.split_off.clear()
        while number < iterations:
            number += 1
            self._warm_up_once(run, states)
            self._refuse_strangers()
            self.stats.warmups += 1
            if not self.statics.unchanged():  # by a first call
                self.use_statics(self.find_statics())
                iterations = max(iterations, 2)
        self._refuse_unused()

    def tell(self, what: str) -> None:
        """Log once what makes calls slower than they could be."""
        if what not in self.told:
            self.told.add(what)
            log.warning("%s %s", self.name, what)

    def use_statics(self, statics: Statics) -> None:
        """Have other ones from now on: what is known by position is forgotten."""
        self.statics = statics
        self.used.clear()
        self.split_off.clear()

    def _warm_up_once(self, run: Callable[..., Any], states: CheckpointStates) -> None:
        samples = [sample.detach().clone() for sample in self.binding.samples]
        args, kwargs = self.binding.call(samples)
        self.hooks.run("pre_forward", self.hooked, args, kwargs)
        members = [t.detach().clone() for t in self.statics.distinct()]
        graph = Differentiated(self, warms_up=True)

        def forward(_: list[Any]) -> list[Any]:
            with no_autocast_cache(), states:
                return graph.forward(samples, members)

        outputs = run(forward, [])
        self.note_result(graph.result)
        assert self.structure is not None
        for i in graph.written:
            if i < len(samples) and self.binding.requires_grad[i]:
                raise self._refusal(
                    f"writes {self._name_of(i)} in place, which requires grad. Have it write a copy"
                )
        saved = graph.separate()
        self.keeps_inputs |= graph.keeps_inputs
        self._strangers = [weakref.ref(leaf) for leaf in graph.strangers]
        graph.strangers.clear()
        self.hooks.run("forward", self.hooked, args, kwargs, self.structure.build(outputs))
        if not graph.with_grad or not self.with_grad:
            return
        self.hooks.run("pre_backward", self.hooked)
        wanted = [i for i, leaf in enumerate(graph.leaves) if leaf.requires_grad]
        given = [torch.zeros_like(outputs[i]) for i in graph.with_grad]
        del outputs

        def backward(_: list[Any]) -> list[Any]:
            with no_autocast_cache():
                return list(graph.backward(saved, given, members, wanted))

        grads = run(backward, [])
        for i, grad in zip(wanted, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise self._refusal(
                    f"gives {self._name_of(i)} a gradient of layout {grad.layout}. Have it make dense ones"
                )
        self.asks_again |= graph.asks_again
        self.used.update(i for i, grad in zip(wanted, grads, strict=True) if grad is not None)
        del grads
        if self.backward_dw is not None:
            self.split_off.update(graph.weight_grads(self.backward_dw, members))
        self.hooks.run("backward", self.hooked)

    # ---- results

    def note_result(self, result: Any) -> None:
        """Look at a result: each call gets one made as this."""
        structure, before = OutputStructure.of(result), self.structure
        if before is not None and not structure.is_like(before):
            raise self._refusal(
                "returned another structure than in the run before. What it returns may not depend on how often it ran"
            )
        found = [leaf for leaf in pytree.tree_leaves(result) if not isinstance(leaf, _OPAQUE)]
        for now, then in zip(found, self._objects or found, strict=False):
            if not equal(now, then):
                raise self._refusal(
                    f"returns a {type(now).__name__} that it makes anew in each run and that is no pytree node. Return "
                    "the tensors themselves, or register the class (torch.utils._pytree.register_dataclass)"
                )
        self.structure, self._objects = structure, found

    # ---- refusals

    def _refusal(self, why: str) -> GraphedArgumentError:
        return GraphedArgumentError(f"make_graphed_callables: {self.name} {why}.")

    def _name_of(self, leaf: int) -> str:
        """Return what the user calls an argument, or a parameter after them."""
        names = self.binding.names
        named = [f"parameter {name}" for name in self.statics.distinct_names()]
        return [*names, *named][leaf]

    def _refuse_strangers(self) -> None:
        strangers, self._strangers = self._strangers, []
        if not self.statics.unchanged():
            return
        for leaf in [leaf for ref in strangers if (leaf := ref()) is not None]:
            owned = any(leaf is own for own in self.statics.now())
            if owned or leaf.numel():  # so the run did not make it
                raise self._refusal(
                    f"uses a tensor of shape {list(leaf.shape)} that requires grad and is neither an argument nor read as "
                    "an attribute of its modules. Name the module that has it, as in make_graphed_callables(fn, "
                    "sample_args, modules=(model,)), and read it there, or pass it as an argument"
                )

    def _refuse_unused(self) -> None:
        if self.options.allow_unused_input or not self.used:
            return
        num, statics = len(self.binding.samples), self.statics
        needed = [i for i, wanted in enumerate(self.binding.requires_grad) if wanted]
        if statics.required:
            needed += [num + k for k, t in enumerate(statics.distinct()) if t.requires_grad]
        split_off = {num + k for k in self.split_off}
        unused = [i for i in needed if i not in self.used | split_off]
        if unused:
            raise self._refusal(
                f"gives no gradient to {', '.join(map(self._name_of, unused))}. Have them not require grad, or set "
                "GraphedOptions(allow_unused_input=True)"
            )


# ---- what is around warm-ups and captures


@contextlib.contextmanager
def prepared(d: Pass, device: torch.device) -> Iterator[None]:
    """A block for warm-ups and captures, after which random number states are as before, Python's and NumPy's too."""
    tracker = d.options.rng_tracker
    numpy = sys.modules.get("numpy")
    host, host_numpy = random.getstate(), numpy and numpy.random.get_state(legacy=False)
    with (
        torch.inference_mode(False),
        torch.autograd.set_detect_anomaly(False),  # which would read data in a capture
        torch_private.no_parametrize_cache(),  # which would keep a weight that a warm-up computed, and its graph
        torch_private.no_outer_saved_tensors_hooks(),  # a checkpoint's, which expects what a replay saves
        random_state_kept(device, [] if tracker is None else list(tracker.generators.values())),
    ):
        try:
            yield
        finally:
            random.setstate(host)
            if numpy is not None:
                numpy.random.set_state(host_numpy)


@contextlib.contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Have autocast cast every weight anew: a cast weight of another run would be no part of the graph."""
    torch.clear_autocast_cache()
    with torch_private.autocast_cache_off():
        yield


# ---- failures

_TORCH = str(Path(torch.__file__).parent)
_MODULES = str(Path(torch.nn.__file__).parent / "modules")
_OWN = str(Path(__file__).parents[1])


@contextlib.contextmanager
def blamed(name: str, direction: str) -> Iterator[None]:
    """Have what a capture raises name the callable and the line: `CaptureError` for what torch or CUDA refuse."""
    try:
        yield
    except CGPassError:
        raise
    except Exception as error:
        # of a generator of the callable's own; the driver's words
        if not is_capture_error(error) and "not registered with the graph" not in str(error):
            raise
        reason = str(error).strip().split("\n", 1)[0].rstrip(".")
        line = _user_line(error)
        where = "" if line is None else f", at {line}"
        raise CaptureError(
            f"make_graphed_callables: the {direction} of {name} can't be captured{where}: {reason}. "
            "Move what waits for the device (or needs the host, or draws from a generator of its own) out of the callable, "
            'or use torch.compile(backend="cgpass"), which captures around it.'
        ) from error


def _user_line(error: BaseException) -> str | None:
    """Return where the user's code was: the innermost frame outside of torch and cgpass, else of the innermost module."""
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    users = [f for f in frames if not f.filename.startswith((_TORCH, _OWN, "<"))]
    modules = [f for f in frames if f.filename.startswith(_MODULES)]
    for frame in (*users, *modules):
        return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {(frame.line or '').rstrip(':')}"
    return None
