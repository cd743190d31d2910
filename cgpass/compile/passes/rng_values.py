"""Give random operators that were wrapped for recomputation the value that the split left out."""

import contextlib
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from cgpass import torch_private
from cgpass.compile.facts import values
from cgpass.compile.passes.base import Pass, PassContext, PassResult

_OPERATOR_AT = {
    "run_and_save_rng_state": 0,
    "run_with_rng_state": 1,
    "graphsafe_run_with_rng_state": 0,
}
"""The wrappers, and where the operator stands among their arguments; its own follow."""


@dataclass(frozen=True)
class RngValues(Pass):
    """Set `meta["val"]` of wrapped random operators that have none.

    Source: torch/_functorch/partitioners.py `functionalize_rng_ops`, which makes these nodes, 2.11 to 2.15.
    """

    name: ClassVar[str] = "rng_values"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        """Annotate `gm`; its nodes stay as they are."""
        missing = [
            node
            for node in gm.graph.nodes
            if values.hop_name(node) in _OPERATOR_AT and "val" not in node.meta
        ]
        for node in missing:
            with _fake_mode(gm):
                node.meta["val"] = _value(node)
        return PassResult(gm, modified=False)


def _fake_mode(gm: fx.GraphModule) -> contextlib.AbstractContextManager[Any]:
    found = itertools.chain.from_iterable(map(values.tensors, gm.graph.nodes))
    fake = next((tensor for tensor in found if torch_private.is_fake(tensor)), None)
    return contextlib.nullcontext() if fake is None else torch_private.mode_of(fake)


def _value(node: fx.Node) -> object:
    name = str(values.hop_name(node))
    if name == "run_and_save_rng_state":
        parts = {user.args[1]: user.meta["val"] for user in node.users}
        return parts.get(0), parts.get(1)
    at = _OPERATOR_AT[name]
    operator: Any = node.args[at]
    kwargs = {key: value for key, value in node.kwargs.items() if key != "rng_state"}
    args, kwargs = fx.node.map_arg((node.args[at + 1 :], kwargs), lambda arg: arg.meta["val"])
    return operator(*args, **kwargs)
