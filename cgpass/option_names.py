"""Names in options that only torch knows: operators, and settings of Inductor."""

import difflib
import logging

import torch

from cgpass import _torch
from cgpass.errors import OptionError
from cgpass.options import Options

log = logging.getLogger(__name__)


def overloads(name: str) -> list[object]:
    """The operators registered as `ns::op` or `ns::op.overload`."""
    namespace, _, op = name.partition("::")
    packet, _, overload = op.partition(".")
    found = getattr(getattr(torch.ops, namespace), packet, None)
    if found is None:
        return []
    if isinstance(found, torch._ops.HigherOrderOperator):
        return [found]
    return [getattr(found, one) for one in found.overloads() if overload in ("", one)]


def check_names(options: Options) -> None:
    """Refuse Inductor settings that are none; warn of operators that nobody registered."""
    if options.inductor:
        known = _torch.inductor_option_names()
        for name in options.inductor:
            if name == "triton.cudagraphs":
                raise OptionError(
                    "inductor={'triton.cudagraphs': ...}: cgpass makes the CUDA graphs; leave Inductor's own out"
                )
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise OptionError(f"inductor={{{name!r}: ...}} is no setting of Inductor{hint}")
    for name in options.unsafe_ops:
        if not overloads(name):
            log.warning("unsafe_ops names %s, but no such operator is registered", name)
