"""Operators that wait for the device with some arguments and not with others.

Source: calls and captures of each on an H200 with torch 2.11; ATen's implementations, 2.11 to 2.15.
"""

from collections.abc import Callable

import torch
from torch import fx

from cgpass.compile.facts import values

_MODE_SLICE = 2048
"""Elements of the longest slice that `mode` handles in one kernel."""


def why_it_syncs(name: str, node: fx.Node) -> str | None:
    """What a call of the operator `name` does on the host, None if these arguments need nothing there."""
    rule = _RULES.get(name)
    return None if rule is None else rule(node)


def _tensor(node: fx.Node, argument: str) -> torch.Tensor | None:
    value = values.argument(node, argument)
    if not isinstance(value, fx.Node):
        return None
    found = value.meta.get("val")
    return found if isinstance(found, torch.Tensor) else None


def _histc(node: fx.Node) -> str | None:
    if values.argument(node, "min") == values.argument(node, "max"):
        return "without a range it reads the smallest and largest value on the host"
    return None


def _grouped_mm(node: fx.Node) -> str | None:
    if any(t.dtype != torch.bfloat16 for t in values.tensors(node)):
        return "it reads the group offsets on the host unless the type is bfloat16"
    return None


def _sorter(node: fx.Node) -> str | None:
    return "it checks the sorter on the host" if _tensor(node, "sorter") is not None else None


def _check_errors(node: fx.Node) -> str | None:
    if values.argument(node, "check_errors"):
        return "with check_errors it reads on the host what failed"
    return None


def _mode(node: fx.Node) -> str | None:
    x, dim = _tensor(node, "self"), values.argument(node, "dim")
    if x is None or x.dim() == 0 or not isinstance(dim, int):
        return None
    size = x.size(dim)
    if isinstance(size, int) and size > _MODE_SLICE:
        return f"it counts slices of more than {_MODE_SLICE} elements on the host"
    return None


def _isin(node: fx.Node) -> str | None:
    elements, tests = _tensor(node, "elements"), _tensor(node, "test_elements")
    if elements is None or tests is None or values.argument(node, "assume_unique"):
        return None
    sizes = elements.numel(), tests.numel()
    if all(isinstance(n, int) for n in sizes) and sizes[1] >= 10 * sizes[0] ** 0.145:
        return "it looks for many elements by making them unique, whose number the host reads"
    return None


def _reads(*arguments: str) -> Callable[[fx.Node], str | None]:
    def rule(node: fx.Node) -> str | None:
        for argument in arguments:
            tensor = _tensor(node, argument)
            if tensor is not None and tensor.device.type != "cpu":
                return f"it reads {argument} on the host"
        return None

    return rule


_RULES: dict[str, Callable[[fx.Node], str | None]] = {
    "histc": _histc,
    "_grouped_mm": _grouped_mm,
    "searchsorted": _sorter,
    "linalg_cholesky_ex": _check_errors,
    "linalg_inv_ex": _check_errors,
    "linalg_lu_factor_ex": _check_errors,
    "_linalg_solve_ex": _check_errors,
    "mode": _mode,
    "isin": _isin,
    "masked_fill": _reads("value"),
    "masked_fill_": _reads("value"),
    "index_fill": _reads("value"),
    "index_fill_": _reads("value"),
    "linspace": _reads("start", "end"),
    "logspace": _reads("start", "end"),
}
