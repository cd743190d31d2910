"""Keys of Inductor's cache, kept with the graphs that they are for: to make one takes as long as to read the graph.

AOTAutograd keeps them, too, for its own hits. Source: torch/_functorch/_aot_autograd/aot_autograd_result.py
`FxGraphCacheLoadable`, torch/_inductor/codecache.py `FxGraphCache.prepare_key`, 2.11 to 2.15.
"""

import contextlib
import contextvars
import hashlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from cgpass._torch.replacing import Replaced

InductorKeys = Mapping[str, Any]
"""What Inductor's cache is asked for, by what the graph is."""

_known: contextvars.ContextVar[MutableMapping[str, Any] | None] = contextvars.ContextVar(
    "_known", default=None
)


@contextlib.contextmanager
def inductor_keys(known: InductorKeys | None = None) -> Iterator[InductorKeys]:
    """Have Inductor take the keys of graphs that are known, and note those of others.

    Args:
        known: Of another process, where all that a key tells besides the graph was the same.

    Returns:
        In a context, those that are known or noted.
    """
    keys = dict(known or {})
    token = _known.set(keys)
    try:
        with _asking_first:
            yield keys
    finally:
        _known.reset(token)


def _code_cache() -> Any:
    from torch._inductor.codecache import FxGraphCache

    return FxGraphCache


def _prepare_key(
    prepare: Callable[..., Any],
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    fx_kwargs: Mapping[str, Any],
    inputs_to_check: Sequence[int],
    *more: Any,
    **others: Any,
) -> Any:
    keys = _known.get()
    assert keys is not None
    what = _identity(gm, example_inputs, fx_kwargs, inputs_to_check)
    if what not in keys:
        key, info = prepare(gm, example_inputs, fx_kwargs, inputs_to_check, *more, **others)
        if key is None:
            return key, info
        keys[what] = key
    return keys[what], {}


_asking_first = Replaced(_code_cache, "prepare_key", _prepare_key)


def _identity(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    settings: Mapping[str, Any],
    inputs_to_check: Sequence[int],
) -> str:
    """Tells the graphs apart that one kept graph is cut into, and how each is compiled."""
    told = hashlib.sha256()
    for node in gm.graph.nodes:
        told.update(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs}\n".encode())
    for value in inputs:
        told.update(f"{_layout(value)}\n".encode())
    for name in sorted(settings.keys() - {"graph_id"}):  # which no key tells
        told.update(f"{name} {settings[name]!r}\n".encode())
    told.update(str(list(inputs_to_check)).encode())
    return told.hexdigest()


def _layout(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, value.size(), value.stride(), value.storage_offset(), value.device
