"""A graph as text that is the same in every run: for goldens, logs and trace artifacts.

No ids and no addresses.
"""

import re
import textwrap

import torch
from torch import fx

from cgpass.compile.facts import partition_tag

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def graph_text(gm: fx.GraphModule) -> str:
    """Return one line a node, `name: dtype[shape]@device = target(args)`, with `# captured_<i>` or `# eager_<i>` behind it.

    The graphs that a graph calls or refers to follow, indented below their name.
    """
    lines = list(map(_line, gm.graph.nodes))
    for name, body in _nested(gm).items():
        lines += [f"{name}:", textwrap.indent(graph_text(body), "    ")]
    return "\n".join(lines)


def _nested(gm: fx.GraphModule) -> dict[str, fx.GraphModule]:
    modules = dict(gm.named_modules())
    referring = (node for node in gm.graph.nodes if node.op in ("call_module", "get_attr"))
    found = {str(node.target): modules.get(str(node.target)) for node in referring}
    return {name: body for name, body in found.items() if isinstance(body, fx.GraphModule)}


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_text(node.args[0])}"
    if node.op == "placeholder":
        call = "placeholder"
    elif node.op == "get_attr":
        call = f"get_attr({node.target})"
    else:
        given = [_text(a) for a in node.args]
        given += [f"{k}={_text(v)}" for k, v in node.kwargs.items()]
        call = f"{_text(node.target)}({', '.join(given)})"
    value = node.meta.get("val")
    head = node.name if value is None else f"{node.name}: {value_text(value)}"
    tag = partition_tag.get_tag(node)
    return f"{head} = {call}" + ("" if tag is None else f"  # {tag}")


def value_text(value: object) -> str:
    """A value as the graph's text shows it: `float32[2, 8]@cuda` for a tensor."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, value.shape))}]@{value.device.type}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(value_text(v) for v in value)})"
    if isinstance(value, torch.SymInt):
        return f"SymInt({value})"
    if isinstance(value, (int, float, torch.SymFloat, torch.SymBool)) or value is None:
        return str(value)
    return type(value).__name__


def _text(arg: object) -> str:
    if isinstance(arg, (list, tuple)):
        inner = ", ".join(_text(a) for a in arg)
        if isinstance(arg, list):
            return f"[{inner}]"
        return f"({inner},)" if len(arg) == 1 else f"({inner})"
    if isinstance(arg, dict):
        return "{" + ", ".join(f"{k}: {_text(v)}" for k, v in arg.items()) + "}"
    if isinstance(arg, torch._ops.HigherOrderOperator):
        return arg.name()
    if isinstance(arg, (fx.Node, str, torch._ops.OpOverload, torch.device)):
        return str(arg)
    if isinstance(arg, (torch.dtype, torch.layout, torch.memory_format)):
        return str(arg).removeprefix("torch.")
    return getattr(arg, "__name__", None) or _ADDRESS.sub("", repr(arg))
