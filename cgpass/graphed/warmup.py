"""`Pass`: one forward with its sample, and its warm-ups."""

import contextlib
import logging
import random
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cgpass import torch_private
from cgpass.errors import CaptureError, CGPassError, GraphedArgumentError
from cgpass.graphed.binding import Binding, OutputStructure, equal
from cgpass.graphed.differentiated import Differentiated
from cgpass.graphed.modules import Target
from cgpass.graphed.options import GraphedOptions, Hooks, run_hook
from cgpass.recompute.states import CheckpointStates
from cgpass.runtime.driver import GraphDriver, is_capture_error
from cgpass.runtime.failures import random_state_kept
from cgpass.telemetry import new_call_stats

log = logging.getLogger(__name__)

_OPAQUE = (torch.Tensor, bool, int, float, complex, str, bytes)


class Pass:
    """One forward with its sample: what it takes to record it, now and again."""

    def __init__(
        self, target: Target, binding: Binding, hooks: Hooks | None, options: GraphedOptions
    ) -> None:
        self.name, self.run = target.name, target.run
        self.binding, self.hooks, self.options = binding, hooks, options
        self.stats = new_call_stats(target.name)
        self.with_grad = torch.is_grad_enabled()
        """True if a backward is recorded where results require grad."""
        self.backward_dw = target.backward_dw
        """What makes the gradients that the backward leaves out, of weights, by filling their `.grad`."""
        self.structure: OutputStructure | None = None
        """Of the last run's result."""
        self.keeps_inputs = False
        """See `Differentiated.keeps_inputs`."""
        self.due: deque[Any] = deque()
        """Calls whose backward ran, but not yet what was split off, oldest first."""
        self.told: set[str] = set()
        """The log."""
        self._target = target
        self._objects: list[Any] | None = None
        self.find_statics()

    def find_statics(self) -> None:
        """Look for parameters and buffers once more: modules have other members than they had."""
        self.statics = self._target.statics(self.binding.device)

    def run_hook(self, name: str, *args: Any) -> None:
        """Run a capture-time hook."""
        run_hook(self.hooks, name, self._target.given, *args)

    def tell(self, what: str) -> None:
        """Log once what makes calls slower than they could be."""
        if what not in self.told:
            self.told.add(what)
            log.warning("%s %s", self.name, what)

    # ---- warm-ups

    def warm_up(
        self, driver: GraphDriver, states: CheckpointStates, iterations: int, *, pool: bool
    ) -> None:
        """Run forward and backward on copies, and note what they do; in the pool, if nothing was recorded there yet."""
        run = driver.warm_up if pool else lambda fn, args: fn(args)
        number, self._objects, self.structure = 0, None, None
        while number < iterations:
            number += 1
            strangers = self._warm_up_once(run, states)
            self.stats.warmups += 1
            if self.statics.unchanged():
                self._refuse([leaf for ref in strangers if (leaf := ref()) is not None])
            else:  # by a first call
                self.find_statics()
                iterations = max(iterations, 2)

    def _warm_up_once(
        self, run: Callable[..., Any], states: CheckpointStates
    ) -> list[weakref.ref[torch.Tensor]]:
        """Returns leaves that are neither arguments nor parameters."""
        samples = [sample.detach().clone() for sample in self.binding.samples]
        args, kwargs = self.binding.call(samples)
        self.run_hook("pre_forward", args, kwargs)
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
        strangers = [weakref.ref(leaf) for leaf in graph.strangers]
        graph.strangers.clear()
        self.run_hook("forward", args, kwargs, self.structure.build(outputs))
        if not graph.with_grad:
            return strangers
        self.run_hook("pre_backward")
        wanted = [i for i, leaf in enumerate(graph.leaves) if leaf.requires_grad]
        given = [torch.zeros_like(outputs[i]) for i in graph.with_grad]
        del outputs

        def backward(_: list[Any]) -> list[Any]:
            with no_autocast_cache():
                return graph.backward(saved, given, members, wanted)

        for i, grad in zip(wanted, run(backward, []), strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise self._refusal(
                    f"gives {self._name_of(i)} a gradient of layout {grad.layout}. Have it make dense ones"
                )
        if self.backward_dw is not None:
            graph.weight_grads(self.backward_dw, members)
        self.run_hook("backward")
        return strangers

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

    def _refuse(self, strangers: list[torch.Tensor]) -> None:
        """Refuse what is used and not named; a leaf without elements the run may have made."""
        own = set(map(id, self.statics.now()))
        for leaf in strangers:
            if id(leaf) in own or leaf.numel():
                raise self._refusal(
                    f"uses a tensor of shape {list(leaf.shape)} that requires grad and is neither an argument nor read as "
                    "an attribute of its modules. Name the module that has it, as in make_graphed_callables(fn, "
                    "sample_args, modules=(model,)), and read it there, or pass it as an argument"
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

_LIBRARIES = str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<"
"""Where files begin that are none of the user's."""


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
    """Return where the user's code was: the innermost frame outside of torch and cgpass."""
    for frame in traceback.extract_tb(error.__traceback__)[::-1]:
        if not frame.filename.startswith(_LIBRARIES):
            line = (frame.line or "").rstrip(":")
            return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {line}"
    return None
