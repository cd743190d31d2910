"""`SimulatedDriver`: CUDA graphs' rules on CPU, failings included.

A recording is a tape of aten calls with the very memory they touched. A replay runs the tape again on that memory:
host code does not run again, inputs are read where they lay, outputs and temporaries are written where they lay, in
one pool that later recordings reuse. A partition compiled by Inductor calls no aten op that could be taped, so it is
taped as one call.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cgpass import _torch
from cgpass.runtime.capturing import capture_runs
from cgpass.runtime.driver import BoxedCallable, CapturedGraph, no_gc
from cgpass.runtime.syncs import HostReads, call_watched, reads_on_host

_POISON = 0xFF
_REFUSAL = "operation not permitted when stream is capturing"


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors that a call may write: those its schema says, all of them where there is no schema."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return _tensors((args, kwargs))
    named = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
    writes = [
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    return _tensors([named.get(name) for name in writes])


def _implementation(generator: torch.Generator) -> int:
    """Identity of the C++ generator behind a Python object."""
    return getattr(generator, "_cdata")  # noqa: B009  in no stub


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class SimulatedPool:
    """Memory of one owner's recordings: blocks that are free take the next recording's values."""

    def __init__(self) -> None:
        """An empty pool."""
        self._free: dict[int, list[torch.UntypedStorage]] = {}

    def place(self, value: torch.Tensor) -> torch.Tensor:
        """`value` moved into a free block of its size, if there is one."""
        blocks = self._free.get(value.untyped_storage().nbytes())
        if not blocks:
            return value
        out = torch.empty(0, dtype=value.dtype)
        out.set_(blocks.pop(), value.storage_offset(), value.size(), value.stride())
        return out.copy_(value)

    def release(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Take back blocks that a finished recording no longer needs."""
        for storage in storages:
            self._free.setdefault(storage.nbytes(), []).append(storage)


class _Tape(TorchDispatchMode):
    """Runs aten ops and notes each with the tensors it read and wrote."""

    def __init__(self, pool: SimulatedPool, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []
        self.fresh: dict[int, torch.UntypedStorage] = {}
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """Storages that a call wrote and that existed before the recording, with a copy of what they held."""
        self._pool = pool
        # a dispatched call gets another Python object of the same generator
        self._registered = {_implementation(generator) for generator in generators}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._refuse(func, args, kwargs)
        return self.note(func, args, kwargs)

    def note(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func`, put what it allocated into the pool, and note the call."""
        self._keep_contents(_written(func, args, kwargs))
        known = {_address(t) for t in _tensors((args, kwargs))} | self.fresh.keys()
        out = call_watched(func, args, kwargs, HostReads(_REFUSAL))

        def own(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.untyped_storage().nbytes() == 0:
                return value
            if _address(value) in known:
                return value
            placed = self._pool.place(value)
            self.fresh[_address(placed)] = placed.untyped_storage()
            return placed

        out = pytree.tree_map(own, out)
        self.calls.append((func, args, kwargs, out))
        return out

    def _keep_contents(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            address = _address(tensor)
            if address not in self.fresh and address not in self.before:
                storage = tensor.untyped_storage()
                self.before[address] = (storage, storage.clone())

    def restore(self) -> None:
        """Put back what calls wrote into memory that existed before."""
        for storage, content in self.before.values():
            storage.copy_(content)

    def _refuse(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if reads_on_host(func, args):
            raise RuntimeError(f"{_REFUSAL}: {func}")
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Generator) and _implementation(leaf) not in self._registered:
                raise RuntimeError(f"a generator used by {func} is not registered with the graph")


class SimulatedGraph:
    """A tape that can be run again."""

    def __init__(self, tape: _Tape, keepalive: Sequence[object]) -> None:
        """Args: tape: what was recorded. keepalive: owners of the memory that the tape reads by address."""
        self._calls = tape.calls
        self._keepalive = keepalive
        self._storages = list(tape.fresh.values())

    def replay(self) -> None:
        """Run every call on the memory of the recording."""
        with torch.no_grad():
            for func, args, kwargs, recorded in self._calls:
                again = func(*args, **kwargs)
                for old, new in zip(_tensors(recorded), _tensors(again), strict=True):
                    if _address(old) != _address(new):
                        old.copy_(new)

    def reset(self) -> None:
        """Drop the tape. Memory stays as long as another graph that reads it keeps this one alive."""
        self._calls = []
        self._keepalive = ()


class SimulatedDriver:
    """`GraphDriver` on CPU."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Args: device: the CPU."""
        self._device = device or torch.device("cpu")
        self._pools: dict[int, SimulatedPool] = {}
        self._recording = False
        self._makers: weakref.WeakValueDictionary[int, SimulatedGraph] = (
            weakref.WeakValueDictionary()
        )
        """Which graph's memory lies at an address."""

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return self._device

    def record(
        self, fn: BoxedCallable, args: list[Any], *, opaque: bool, slot: int = 0
    ) -> tuple[CapturedGraph, list[Any]]:
        """See `GraphDriver.record`. Runs `fn` once, then puts back its inputs and the generators."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        # Not the outputs of other recordings themselves: holding those would look like a user who does.
        keepalive = [self._makers.get(_address(t), t) for t in tensors]
        generators = [
            torch.default_generator,
            *(a for a in args if isinstance(a, torch.Generator)),
        ]
        states = [g.get_state() for g in generators]
        if not self._makers:
            self._pools.clear()  # no graph is left that uses their memory
        pool = self._pools.setdefault(slot, SimulatedPool())
        tape = _Tape(pool, generators)
        inputs = [_torch.tensor_at_address(a) if isinstance(a, torch.Tensor) else a for a in args]
        self._recording = True
        try:
            with capture_runs(), no_gc(), torch.no_grad():
                outputs = self._run(tape, fn, inputs, opaque=opaque)
        finally:
            self._recording = False
            tape.restore()
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        kept = {_address(t) for t in _tensors(outputs)}
        pool.release([s for address, s in tape.fresh.items() if address not in kept])
        for storage in tape.fresh.values():
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(_POISON)
        graph = SimulatedGraph(tape, keepalive)
        self._makers.update(dict.fromkeys(tape.fresh, graph))
        return graph, outputs

    def _run(self, tape: _Tape, fn: BoxedCallable, inputs: list[Any], *, opaque: bool) -> list[Any]:
        if opaque:
            with HostReads(_REFUSAL):
                return list(tape.note(lambda *args: tuple(fn(list(args))), tuple(inputs), {}))
        with tape:
            return list(fn(list(inputs)))

    def is_capturing(self) -> bool:
        """Whether this driver records right now."""
        return self._recording

    def enter_call(self) -> None:
        """Nothing to order: the CPU has one stream."""
