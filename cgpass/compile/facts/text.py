"""A graph as text that is the same in every run: for goldens, logs and trace artifacts.

No ids, addresses or hash-dependent names: symbols are numbered by first appearance.
"""

import re
from collections.abc import Callable

import torch
from torch import fx

from cgpass.compile.facts import partition_tag

_SYMBOL = re.compile(r"\b(zuf|zf|s|u)\d+\b")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def graph_text(gm: fx.GraphModule) -> str:
    """Return one line a node, `name: dtype[shape]@device = target(args)`, with `# captured_<i>` or `# eager_<i>` behind it.

    The graphs that a graph calls or refers to follow, indented below their name.
    """
    rename = _symbol_names()
    return "\n".join(_lines(gm, rename))


def _symbol_names() -> Callable[[str], str]:
    known: dict[str, str] = {}
    counts: dict[str, int] = {}

    def replace(match: re.Match[str]) -> str:
        name, kind = match[0], match[1]
        if name not in known:
            known[name] = f"{kind}{counts.get(kind, 0)}"
            counts[kind] = counts.get(kind, 0) + 1
        return known[name]

    return lambda text: _SYMBOL.sub(replace, text)


def _lines(gm: fx.GraphModule, rename: Callable[[str], str]) -> list[str]:
    lines = [_line(node, rename) for node in gm.graph.nodes]
    for name, body in _nested(gm).items():
        lines.append(f"{name}:")
        lines.extend(f"    {line}" for line in _lines(body, rename))
    return lines


def _nested(gm: fx.GraphModule) -> dict[str, fx.GraphModule]:
    modules = dict(gm.named_modules())
    found = {}
    for node in gm.graph.nodes:
        body = modules.get(str(node.target)) if node.op in ("call_module", "get_attr") else None
        if isinstance(body, fx.GraphModule):
            found[str(node.target)] = body
    return found


def _line(node: fx.Node, rename: Callable[[str], str]) -> str:
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
    head = node.name if value is None else f"{node.name}: {rename(value_text(value))}"
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
