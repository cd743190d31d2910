"""The base of passes, and the runner that checks, times, logs and traces each one."""

import abc
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from cgpass.compile.facts.text import graph_text
from cgpass.errors import PassError
from cgpass.telemetry import tracing

log = logging.getLogger(__name__)

Direction = Literal["forward", "backward", "inference"]
"""Which of a function's graphs."""
_KEPT = (
    "stack_trace",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "seq_nr",
    "fwd_source_fn_stack",
    "source_fn_stack",
    "recompute",
    "ac_graph_id",
    "partitioner_tag",
    "custom",
)
"""Metadata that a new node takes over from the node it stands for."""


@dataclass(frozen=True)
class PassContext:
    """All that a pass may know beside the graph and its own settings."""

    device: torch.device
    """The device whose work is captured."""
    stage: str
    """The stage's name, for messages and dumps."""
    direction: Direction
    trace_id: Any = None
    """What torch's trace lists the passes under, where no compilation runs."""


@dataclass(frozen=True)
class PassResult:
    """The result of a pass, or of a row of them."""

    gm: fx.GraphModule
    modified: bool
    notes: tuple[Any, ...] = ()
    """What the pass has to say to its caller; of what kind is for the pass to define."""


@dataclass(frozen=True)
class Pass(abc.ABC):
    """One rewriting of a graph. Subclasses are frozen dataclasses; their fields are settings."""

    name: ClassVar[str]

    def requires(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        """Raise `PreconditionError` if the pass can't work on `gm`."""
        del gm, ctx

    @abc.abstractmethod
    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        """Rewrite `gm` in place or return another graph module."""

    def ensures(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        """Raise `PostconditionError` if the pass left a graph that breaks its promise."""
        del gm, ctx


def run_passes(passes: Sequence[Pass], gm: fx.GraphModule, ctx: PassContext) -> PassResult:
    """Run `passes` in order on a graph, which may be rewritten in place.

    Raises:
        PassError: A pass raised or left an invalid graph; the cause is attached.
    """
    _trace(ctx, 0, "before", gm)
    modified = False
    notes: list[Any] = []
    done: list[str] = []
    for position, one in enumerate(passes, 1):
        start = time.perf_counter()
        try:
            with tracing.event(f"{ctx.direction}.{one.name}"):
                result = _run_one(one, gm, ctx)
        except Exception as error:
            before = ", ".join(done) or "none"
            raise PassError(
                f"pass '{one.name}' failed in stage '{ctx.stage}' ({ctx.direction}): "
                f"{type(error).__name__}: {error}. Passes that ran before it: {before}."
            ) from error
        gm = result.gm
        modified |= result.modified
        notes.extend(result.notes)
        done.append(one.name)
        log.debug(
            "stage %s (%s): pass %s: %s, %d notes, %.1f ms",
            ctx.stage,
            ctx.direction,
            one.name,
            "modified" if result.modified else "left alone",
            len(result.notes),
            (time.perf_counter() - start) * 1e3,
        )
        if result.modified:
            _trace(ctx, position, one.name, gm)
    return PassResult(gm, modified, tuple(notes))


def _run_one(one: Pass, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
    one.requires(gm, ctx)
    result = one.run(gm, ctx)
    result.gm.graph.lint()
    if result.modified:
        result.gm.recompile()
    one.ensures(result.gm, ctx)
    return result


def _trace(ctx: PassContext, position: int, name: str, gm: fx.GraphModule) -> None:
    """Add a graph to torch's trace, where that goes to a file."""
    title = f"{ctx.stage}_{ctx.direction}_{position}_{name}"
    tracing.add_text(title, lambda: graph_text(gm), ctx.trace_id)


def inherit_meta(new: fx.Node, old: fx.Node, value: object) -> None:
    """Give `new` the fake value `value` and, of `old`, where it comes from and what the user asked for."""
    new.meta.update({key: old.meta[key] for key in _KEPT if key in old.meta})
    new.meta["val"] = value
