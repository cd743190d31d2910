"""Collectives: their graphs end before their process groups; and on a tape, as a CUDA graph has them.

Note [Graphs and process groups]
    NCCL's communicators wait for the graphs that hold work of theirs, and `destroy_process_group` waits for these: with
    such a graph alive it never returns. What a graph holds is not known of all (a callable that was captured by hand,
    an operator of the user's own), so the first recording that is made while there are process groups has all recordings
    freed before any group shuts down or is aborted, and when the interpreter ends.

On CUDA a replay orders everything by streams; here a call that starts a functional collective returns once its results
are there, and one in place is waited for before the next call that uses its memory. As on CUDA nothing is
communicated while it is recorded.
"""

import functools
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cgpass import torch_private
from cgpass.compile.facts import op_tables
from cgpass.runtime import registration
from cgpass.runtime.writes import extent, has_place, tensors_in

_FUNCTIONAL, _IN_PLACE = "_c10d_functional", "c10d"


def may_be_captured(device: torch.device) -> bool:
    """Tell whether graphs on a device can hold collectives. See Note [Buffers that NCCL registers]."""
    if device.type != "cuda" or registration.is_off():
        return True
    expandable = torch_private.uses_expandable_segments()
    return not (registration.asks_for_expandable_segments() if expandable is None else expandable)


def _is_of(func: Any, namespace: str) -> bool:
    return isinstance(func, torch._ops.OpOverload) and func.namespace == namespace


def starts(func: Any) -> bool:
    """Tell whether an operator starts a functional collective."""
    return _is_of(func, _FUNCTIONAL) and func._opname not in op_tables.STARTS_NOTHING


def only_wraps(func: Any) -> bool:
    """Tell whether an operator makes a tensor that waits when it is used, and does nothing else."""
    return _is_of(func, _FUNCTIONAL) and func._opname == "_wrap_tensor_autograd"


def communicates(func: Any) -> bool:
    """Tell whether an operator communicates while it is called, by itself or as what it starts goes on."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    name = func._schema.name
    return starts(func) or _works_in_place(func) or name in op_tables.WAITING_COLLECTIVES


def _works_in_place(func: Any) -> bool:
    return _is_of(func, _IN_PLACE) and func._opname != "check_for_nan"


def made_alone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Results of a collective as a capture has them: their memory, without any communication."""
    if _works_in_place(func):  # on what it is given first, which it returns beside its work
        work = torch_private.finished_work()
        return (args[0], work) if len(func._schema.returns) > 1 else work
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, kwargs))
    zeros = functools.partial(torch.zeros_like, device="cpu")
    return pytree.tree_map_only(torch.Tensor, zeros, func(*args, **kwargs))


class Alone(torch_private.TorchDispatchMode):
    """Has what is called inside communicate with nobody."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code inside stays compiled: it communicates through operators."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if communicates(func):
            with torch_private.without_modes():  # which would call what is on CPU
                return made_alone(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class UnderWay:
    """Collectives in place that a replay started: those that have nothing to do with each other go on together.

    Processes that send to each other before they receive would wait for one another for ever.
    """

    def __init__(self) -> None:
        self._works: list[Any] = []
        self._places: list[tuple[int, int]] = []

    def wait_before(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any
    ) -> None:
        """Wait before a call that may touch what they read or write."""
        if not self._works or _only_views(func):
            return
        touched = _extents((args, kwargs, results))
        known = isinstance(func, torch._ops.OpOverload) and not starts(func)
        if not known or any(a < d and c < b for a, b in touched for c, d in self._places):
            self.wait()

    def note(self, func: Any, args: tuple[Any, ...], results: Any) -> None:
        """Note what a call started; what a functional collective makes is waited for at once."""
        for value in tensors_in(results) if starts(func) else ():
            torch.ops._c10d_functional.wait_tensor(value)
        if _works_in_place(func):
            self._works += [v for v in pytree.tree_leaves(results) if hasattr(v, "wait")]
            self._places += _extents(args)

    def wait(self) -> None:
        """Wait for all."""
        for work in self._works:
            work.wait()
        self._works.clear()
        self._places.clear()


def _only_views(func: Any) -> bool:
    """Tell whether a call reads and writes no memory."""
    schema = getattr(func, "_schema", None)
    infos = [each.alias_info for each in schema.returns] if schema is not None else []
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


def _extents(values: Any) -> list[tuple[int, int]]:
    return [extent(tensor) for tensor in tensors_in(values) if has_place(tensor)]
