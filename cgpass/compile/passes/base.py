"""The base of passes, the runner that checks, times, logs and traces each one, and a graph's text."""

import abc
import logging
import re
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from cgpass import torch_private
from cgpass.compile.facts.partition_tag import get_tag
from cgpass.errors import PassError

log = logging.getLogger(__name__)

Direction = Literal["forward", "backward", "inference"]
"""One of a function's graphs."""
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
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class PassContext:
    """All that a pass may know beside the graph and its own settings."""

    device: torch.device
    """The device whose work is captured."""
    stage: str
    """The stage's name, for messages and traces."""
    direction: Direction


@dataclass(frozen=True)
class Pass(abc.ABC):
    """One rewriting of a graph. Subclasses are frozen dataclasses; their fields are settings."""

    name: ClassVar[str]

    @abc.abstractmethod
    def run(self, gm: fx.GraphModule, ctx: PassContext) -> Sequence[Any]:
        """Rewrite `gm` in place; return what the pass has to say to its caller."""


def run_passes(passes: Sequence[Pass], gm: fx.GraphModule, ctx: PassContext) -> list[Any]:
    """Run `passes` in order on a graph, which they rewrite in place; return what they have to say.

    Raises:
        PassError: A pass raised or left an invalid graph; the cause is attached.
    """
    text = _trace(ctx, "0_before", gm)
    notes: list[Any] = []
    for position, one in enumerate(passes, 1):
        start = time.perf_counter()
        try:
            notes += one.run(gm, ctx)
            gm.graph.lint()
        except Exception as error:
            before = ", ".join(done.name for done in passes[: position - 1]) or "none"
            raise PassError(
                f"pass '{one.name}' failed in stage '{ctx.stage}' ({ctx.direction}): "
                f"{type(error).__name__}: {error}. Passes that ran before it: {before}."
            ) from error
        took_ms = (time.perf_counter() - start) * 1e3
        log.debug("stage %s (%s): pass %s: %.1f ms", ctx.stage, ctx.direction, one.name, took_ms)
        text = _trace(ctx, f"{position}_{one.name}", gm, text)
    gm.recompile()
    return notes


def _trace(ctx: PassContext, step: str, gm: fx.GraphModule, before: str = "") -> str:
    """Add a graph that changed to torch's trace, where that goes to a file; return its text."""
    text = graph_text(gm) if torch_private.is_traced() else ""
    if text != before:
        torch_private.trace(f"{ctx.stage}_{ctx.direction}_{step}", lambda: text)
    return text


def graph_text(gm: fx.GraphModule) -> str:
    """Return a graph as text that is the same in every run: nodes with their values and partitions, nested graphs."""
    lines = [_ADDRESS.sub("", _line(node)) for node in gm.graph.nodes]
    for name, body in gm.named_children():
        if isinstance(body, fx.GraphModule):
            lines += [f"{name}:", textwrap.indent(graph_text(body), "    ")]
    return "\n".join(lines)


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    call = f"{node.op}({name})" if node.op == "get_attr" else node.op
    if node.op.startswith("call"):
        given = [*map(str, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())]
        named = node.target if isinstance(node.target, torch._ops.OpOverload) else name
        call = f"{named}({', '.join(given)})"
    tag = get_tag(node)
    value = _value_text(node.meta.get("val"))
    return f"{node.name}: {value} = {call}" + (f"  # {tag}" if tag else "")


def _value_text(value: object) -> str:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, value.shape))}]@{value.device.type}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_value_text, value))})"
    return str(value) if isinstance(value, int | float | torch.SymInt) else type(value).__name__


def inherit_meta(new: fx.Node, old: fx.Node, value: object) -> None:
    """Give `new` the fake value `value` and, of `old`, where it comes from and what the user asked for."""
    new.meta.update({key: old.meta[key] for key in _KEPT if key in old.meta})
    new.meta["val"] = value
