"""Names in options that only torch knows: operators, and settings of Inductor."""

import dataclasses
import difflib
import logging
from collections.abc import Mapping
from typing import Any, Final

import torch

from cgpass import torch_private
from cgpass.errors import OptionError
from cgpass.options import Options

log = logging.getLogger(__name__)

_GRAPHS: Final = "triton.cudagraphs"
_OUR_GRAPHS: Final = "cgpass makes the CUDA graphs; leave Inductor's own out"


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


def parse_options(options: Mapping[str, Any] | Options | None, mode: str | None) -> Options:
    """Read what `torch.compile` was given; a mode or option that is Inductor's raises `OptionError` with where it belongs."""
    if isinstance(options, Mapping):
        _point_to_inductor(options)
    parsed = Options.parse(options)
    if mode not in (None, "default"):
        raise OptionError(
            f"mode={mode!r} belongs to Inductor and chooses its own CUDA graphs; with backend='cgpass' leave mode out "
            "and give Inductor's settings as options={'inductor': {...}}"
        )
    return parsed


def _point_to_inductor(options: Mapping[str, Any]) -> None:
    ours = {spec.name for spec in dataclasses.fields(Options)}
    strangers = {name: value for name, value in options.items() if name not in ours}
    known = torch_private.inductor_option_names() if strangers else ()
    for name, value in strangers.items():
        if name == _GRAPHS:
            raise OptionError(f"cgpass: unknown option {name!r}; {_OUR_GRAPHS}")
        if name in known:
            raise OptionError(
                f"cgpass: unknown option {name!r}; it is a setting of Inductor, so give it as "
                f"options={{'inductor': {{{name!r}: {value!r}}}}}"
            )


def check_names(options: Options) -> None:
    """Refuse Inductor settings that are none; warn of operators that nobody registered."""
    if options.inductor:
        known = torch_private.inductor_option_names()
        for name in options.inductor:
            if name == _GRAPHS:
                raise OptionError(f"inductor={{{name!r}: ...}}: {_OUR_GRAPHS}")
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise OptionError(f"inductor={{{name!r}: ...}} is no setting of Inductor{hint}")
    for name in options.unsafe_ops:
        if not overloads(name):
            near = difflib.get_close_matches(name, torch_private.operator_names(), n=1, cutoff=0.8)
            hint = f"; did you mean {near[0]}?" if near else ""
            log.warning("unsafe_ops names %s, but no such operator is registered%s", name, hint)
