"""`SimulatedDriver`: CUDA graphs' rules on CPU, failings included.

A recording is a tape of aten calls with the addresses they touched. A replay runs the tape again on that memory: host
code does not run again, inputs are read where they lay, outputs and temporaries are written where they lay. They lie
in one pool, whose blocks are free as soon as nobody holds them, within a recording as after it: what is recorded later
lies on them. A partition compiled by Inductor calls no aten op that could be taped, so it is taped as one call.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from cgpass import torch_private
from cgpass.compile.facts.values import draws
from cgpass.runtime import rng
from cgpass.runtime.capturing import capture_runs, no_gc
from cgpass.runtime.changes import Mode
from cgpass.runtime.collectives import (
    Alone,
    UnderWay,
    Unjoined,
    communicates,
    completed,
    holds_up_the_host,
    made_alone,
    only_wraps,
)
from cgpass.runtime.driver import BoxedCallable, CapturedGraph, GraphDriver
from cgpass.runtime.syncs import HostMethods, HostReads, call_watched, reads_on_host, refuse
from cgpass.runtime.writes import tensors_in, written_by

_POISON = 0xFF
_REFUSAL = "operation not permitted when stream is capturing"


def _implementation(generator: torch.Generator) -> int:
    """Identity of the C++ generator behind a Python object."""
    return getattr(generator, "_cdata")  # noqa: B009  in no stub


def _address(tensor: torch.Tensor) -> int:
    """Where its memory is; zeros that autograd makes without any are nowhere, as empty tensors are."""
    return 0 if torch_private.is_zero_tensor(tensor) else tensor.untyped_storage().data_ptr()


def _is_new(value: Any, known: Container[int]) -> bool:
    """Whether a call made this tensor, rather than returning one it was given."""
    if not isinstance(value, torch.Tensor) or value.untyped_storage().nbytes() == 0:
        return False
    address = _address(value)
    return address != 0 and address not in known


class _Block:
    """Memory that stays where it is."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer = torch.UntypedStorage(num_bytes)
        self.address = self._buffer.data_ptr()
        self.num_bytes = num_bytes


class SimulatedPool:
    """Memory of one owner's recordings: a block is free when the last storage on it has died."""

    def __init__(self) -> None:
        self._free: dict[int, list[_Block]] = {}
        self._blocks: dict[int, _Block] = {}

    def __contains__(self, address: int) -> bool:
        return address in self._blocks

    def addresses(self) -> frozenset[int]:
        """Where blocks lie, free ones too."""
        return frozenset(self._blocks)

    def live_blocks(self) -> dict[int, int]:
        """Bytes of the blocks that are not free, by address."""
        free = {block.address for blocks in self._free.values() for block in blocks}
        return {a: block.num_bytes for a, block in self._blocks.items() if a not in free}

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        """A storage on a free block. **Lifetime:** it owns the block, whatever becomes of the pool."""
        free = self._free.setdefault(num_bytes, [])
        block = free.pop() if free else _Block(num_bytes)
        self._blocks[block.address] = block
        view = memoryview((ctypes.c_char * num_bytes).from_address(block.address)).cast("B")
        finalizer: Any = weakref.finalize(view, free.append, block)
        finalizer.atexit = False
        return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


class RecordedStates:
    """The default generator as one recording sees it: its states are read and set by operators, which are recorded.

    Attributes:
        foreign: Whether it stands where another recording, or code outside of any, stood: a replay does not go there,
            so nothing may draw.
    """

    def __init__(self, made: Callable[[torch.Tensor], bool], refuse: Callable[[str], None]) -> None:
        self._made = made
        self._refuse = refuse
        self.foreign = False

    def get_state(self) -> torch.Tensor:
        """`torch.get_rng_state`."""
        if self.foreign:
            return torch.default_generator.get_state()
        return rng.get_state(torch.default_generator)

    def set_state(self, state: torch.Tensor) -> None:
        """`torch.set_rng_state`."""
        self.foreign = not self._made(state)
        if self.foreign:
            rng.put_state(torch.default_generator, state)
        else:
            rng.set_state(torch.default_generator, state)

    def manual_seed(self, seed: int) -> torch.Generator:
        """`torch.manual_seed`."""
        if seed % 2**64 != torch.default_generator.initial_seed():
            self._refuse("torch.manual_seed, which no replay repeats. Seed before the call")
        return torch.default_generator

    def initial_seed(self) -> int:
        """`torch.initial_seed`."""
        return torch.default_generator.initial_seed()

    def seed(self) -> int:
        """`torch.seed`."""
        self._refuse("torch.seed, which no replay repeats. Seed before the call")
        return torch.default_generator.initial_seed()

    def refuse_draw(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise if an operator draws where no replay draws."""
        if self.foreign and draws(func, args, kwargs):
            self._refuse(f"{func} draws {_FOREIGN}")

    def end(self) -> None:
        """Raise if the recording leaves the generator where no replay leaves it."""
        if self.foreign:
            self._refuse(f"torch.set_rng_state without setting it back, {_FOREIGN}")


_FOREIGN: Final = (
    "from a state that was read outside of this recording, where no replay draws. Recompute by cgpass.checkpoint "
    "instead of torch.utils.checkpoint, and set states before the call"
)


_in_use: Final[dict[int, RecordedStates | None]] = {}
"""What stands for the default generator, by thread."""
_recordings: Final[list[Mode]] = []


class _Stand:
    """Stands for the default generator where torch's functions look it up; other threads get the generator itself."""

    def __getattr__(self, name: str) -> Any:
        states = _in_use.get(threading.get_ident())
        return getattr(torch.default_generator if states is None else states, name)


_stand: Final = _Stand()


class _Using(Mode):
    """Have torch's functions on the default generator work on other states in this thread."""

    def __init__(self, states: RecordedStates | None) -> None:
        super().__init__()
        self._states = states
        self._outer: list[RecordedStates | None] = []

    def begin(self) -> None:
        self._outer.append(_in_use.get(self.thread))
        _in_use[self.thread] = self._states

    def undo(self) -> None:
        if not self._outer:
            return
        if self._outer[0] is None:
            _in_use.pop(self.thread, None)
        else:
            _in_use[self.thread] = self._outer[0]


def inside_operator() -> Mode:
    """What an operator does with the generator is its own business: a replay runs it again."""
    return _Using(None)


class _Recorded(_Using):
    """Have torch's functions on the default generator work on the states of a recording in this thread."""

    def begin(self) -> None:
        _recordings.append(self)
        torch_private.replace_default_generator(_stand)
        super().begin()

    def undo(self) -> None:
        super().undo()
        if self in _recordings:
            _recordings.remove(self)
        if not _recordings:
            torch_private.replace_default_generator(torch.default_generator)


_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], bool, Any]
"""Function, arguments, whether gradients were enabled, results."""


class _Tape(torch_private.TorchDispatchMode):
    """Runs aten ops and notes each with the memory it read and wrote."""

    supports_higher_order_operators = True

    def __init__(
        self,
        pool: SimulatedPool,
        inputs: Sequence[torch.Tensor],
        generators: Sequence[torch.Generator],
    ) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self._pool = pool
        self._inputs = {_address(tensor) for tensor in inputs}
        self._reused = pool.addresses()
        self._before: dict[int, torch.UntypedStorage] = {}
        """What lay at an address that a call wrote, if that was there before the recording."""
        self._fresh: dict[int, int] = {}
        """Sizes of the blocks that are this recording's first of all."""
        # a dispatched call gets another Python object of the same generator
        self._registered = {_implementation(generator) for generator in generators}
        self._placed: set[int] = set()
        self.unjoined = Unjoined()
        self.states = RecordedStates(self.made, refuse(_REFUSAL))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch_private.see_to_calls(types):
            return NotImplemented
        if only_wraps(func):
            return func(*args, **kwargs)
        self._refuse(func, args, kwargs)
        return self.note(func, args, kwargs)

    def note(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func`, put what it allocated into the pool, and note the call."""
        for tensor in written_by(func, args, kwargs):
            self._keep_contents(_address(tensor), tensor.untyped_storage().nbytes())
        known = {_address(t) for t in tensors_in((args, kwargs))}
        where = pytree.tree_map(self._where, (args, kwargs))
        placed: dict[int, torch.UntypedStorage] = {}
        out = pytree.tree_map(
            lambda value: self._place(value, placed) if _is_new(value, known) else value,
            self._call(func, args, kwargs),
        )
        grad = torch.is_grad_enabled()
        self.unjoined.note(func, map(_address, tensors_in(out)))
        self.calls.append((completed(func), *where, grad, pytree.tree_map(self._where, out)))
        return out

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if communicates(func):
            return made_alone(func, args, kwargs)
        with inside_operator():
            return call_watched(func, args, kwargs, HostReads(refuse(_REFUSAL)))

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether an operator of this recording made the memory of a tensor."""
        return _address(tensor) in self._placed

    def _where(self, value: Any) -> Any:
        """A tensor that stands for `value`'s memory and holds nothing; constants are held."""
        if not isinstance(value, torch.Tensor):
            return value
        address = _address(value)
        if address == 0:
            return value
        lies_still = address in self._pool or address in self._inputs
        return torch_private.tensor_at_address(value) if lies_still else value

    def _place(self, value: torch.Tensor, placed: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        """`value` in the pool; tensors of one call that share memory go on sharing it."""
        storage = placed.get(_address(value))
        if storage is None:
            storage = placed[_address(value)] = self._move(value.untyped_storage())
        return torch_private.on_storage(storage, value)

    def _move(self, source: torch.UntypedStorage) -> torch.UntypedStorage:
        storage = self._pool.allocate(source.nbytes())
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        self._placed.add(address)
        if address not in self._fresh:
            if address in self._reused:
                self._keep_contents(address, num_bytes)
            else:
                self._fresh[address] = num_bytes
        storage.copy_(source)
        return storage

    def _keep_contents(self, address: int, num_bytes: int) -> None:
        if address not in self._fresh and address not in self._before:
            storage = torch_private.storage_at(address, num_bytes, torch.device("cpu"))
            self._before[address] = storage.clone()

    def undo(self) -> None:
        """Put back what was there before; memory that nobody had used before holds nothing of meaning."""
        for address, num_bytes in self._fresh.items():
            storage = torch_private.storage_at(address, num_bytes, torch.device("cpu"))
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(_POISON)
        for address, content in self._before.items():
            torch_private.storage_at(address, content.nbytes(), torch.device("cpu")).copy_(content)

    def _refuse(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if reads_on_host(func, args) or holds_up_the_host(func):
            raise RuntimeError(f"{_REFUSAL}: {func}")
        self.states.refuse_draw(func, args, kwargs)
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Generator) and _implementation(leaf) not in self._registered:
                raise RuntimeError(f"a generator used by {func} is not registered with the graph")


class SimulatedGraph(CapturedGraph):
    """A tape that can be run again."""

    def __init__(self, tape: _Tape, memory: Sequence[object]) -> None:
        self._calls = tape.calls
        self._memory = memory

    def replay(self) -> None:
        """Run every call on the memory of the recording."""
        with torch.no_grad(), torch.autocast("cpu", enabled=False):  # casts are calls of their own
            under_way = UnderWay()
            for func, args, kwargs, grad, recorded in self._calls:
                # Some operators make less where no backward is to come.
                torch.set_grad_enabled(grad)
                under_way.wait_before(func, args, kwargs, recorded)
                again = func(*args, **kwargs)
                under_way.note(func, args, again)
                for old, new in zip(tensors_in(recorded), tensors_in(again), strict=True):
                    if _address(old) != _address(new):  # whole: elements may share memory
                        old.untyped_storage().copy_(new.untyped_storage())
            under_way.wait()

    def reset(self) -> None:
        """Drop the tape, and the memory that no graph uses and nobody holds."""
        self._calls = []
        self._memory = ()


_alone: Final[list[Mode]] = []


def is_recording() -> bool:
    """Whether a simulated driver records in this thread: a recording inside would be part of it."""
    thread = threading.get_ident()
    return any(mode.thread == thread for mode in _alone)


class _Alone(Mode):
    """This thread records: afterwards inputs and generators are as before."""

    def __init__(self, tape: _Tape, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self._tape: _Tape | None = tape
        self._generators = generators
        self._states: list[tuple[torch.Generator, torch.Tensor]] = []

    def begin(self) -> None:
        self._states = [(generator, generator.get_state()) for generator in self._generators]
        _alone.append(self)

    def undo(self) -> None:
        if self._tape is not None:
            self._tape.undo()
            for generator, state in self._states:
                generator.set_state(state)
            vars(self._tape).pop("states", None)  # which hold the tape in turn
            self._tape = None
        if self in _alone:
            _alone.remove(self)


class SimulatedDriver(GraphDriver):
    """`GraphDriver` on CPU."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device or torch.device("cpu"))
        self._pools: weakref.WeakValueDictionary[int, SimulatedPool] = weakref.WeakValueDictionary()
        """Kept by the graphs that use them."""

    def record(
        self, fn: BoxedCallable, args: list[Any], *, opaque: bool, slot: int = 0
    ) -> tuple[CapturedGraph, list[Any]]:
        """See `GraphDriver.record`. Runs `fn` once, then puts back its inputs and the generators."""
        generators = [
            torch.default_generator,
            *(a for a in args if isinstance(a, torch.Generator)),
        ]
        pool = self._pools.get(slot) or SimulatedPool()
        self._pools[slot] = pool
        inputs = tensors_in(args)
        tape = _Tape(pool, inputs, generators)
        memory = list(self._pools.values())  # as CUDA graphs: inputs live as long as who owns them
        del inputs
        with _Alone(tape, generators), capture_runs(), no_gc(), torch.no_grad():
            outputs = self._run(tape, fn, args, opaque=opaque)
        return SimulatedGraph(tape, memory), outputs

    def _run(self, tape: _Tape, fn: BoxedCallable, args: list[Any], *, opaque: bool) -> list[Any]:
        if opaque:
            inputs = tuple(args)
            args.clear()
            with HostReads(refuse(_REFUSAL)), Alone():
                return list(tape.note(lambda *inputs: tuple(fn(list(inputs))), inputs, {}))
        with HostMethods(refuse(_REFUSAL)), _Recorded(tape.states), tape:
            outputs = list(fn(args))
        tape.states.end()
        tape.unjoined.refuse()
        return outputs

    def live_blocks(self, slot: int) -> dict[int, int]:
        """See `GraphDriver.live_blocks`."""
        pool = self._pools.get(slot)
        return {} if pool is None else pool.live_blocks()

    def is_capturing(self) -> bool:
        """Whether this thread records right now, through whichever driver."""
        return is_recording()
