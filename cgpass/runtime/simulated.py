"""`SimulatedDriver`: CUDA graphs' rules on CPU, failings included.

A recording is a tape of aten calls with the addresses they touched. A replay runs the tape again on that memory: host
code does not run again, inputs are read where they lay, outputs and temporaries are written where they lay. They lie
in one pool, whose blocks are free as soon as nobody holds them, within a recording as after it: what is recorded later
lies on them. A partition compiled by Inductor calls no aten op that could be taped, so it is taped as one call.
"""

import ctypes
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from cgpass import torch_private
from cgpass.errors import DriverUnavailableError
from cgpass.runtime import rng
from cgpass.runtime.capturing import Capture, is_capturing_here
from cgpass.runtime.collectives import (
    Alone,
    UnderWay,
    communicates,
    made_alone,
    only_wraps,
)
from cgpass.runtime.driver import BoxedCallable, CapturedGraph, CUDADriver, GraphDriver
from cgpass.runtime.failures import random_states
from cgpass.runtime.writes import tensors_in, written_by

_POISON = 0xFF
"""Bytes of memory that nobody has written: nothing of meaning."""
_HOST_READS = (torch.Tag.data_dependent_output, torch.Tag.cudagraph_unsafe)
_HOST_METHODS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.cpu)
_FOREIGN: Final = (
    "from a state that another thread drew from (give it a torch.Generator), or that was set in what is recorded "
    "(torch.manual_seed, torch.set_rng_state), where no replay draws. "
    "Recompute by cgpass.checkpoint instead of torch.utils.checkpoint, and seed before the call"
)


def _refuse(what: Any) -> NoReturn:
    raise RuntimeError(f"operation not permitted when stream is capturing: {what}")


def _reads_on_host(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether an operator hands a tensor's data to the host, which on CUDA waits for the device."""
    tags = getattr(func, "tags", ())
    if any(tag in tags for tag in _HOST_READS) or str(func) == "aten.item.default":
        return True
    if torch.Tag.dynamic_output_shape not in tags or kwargs.get("output_size") is not None:
        return False
    if func.overloadpacket is not torch.ops.aten.index:
        return True
    return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1]))


class _HostMethods(TorchFunctionMode):
    """Refuses methods that give the host a tensor's data, and call no operator where that lies there already."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _HOST_METHODS:
            _refuse(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class _HostReads(torch_private.TorchDispatchMode):
    """Refuses to read a tensor's data on the host, inside custom operators too."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _reads_on_host(func, args, kwargs):
            _refuse(func)
        return self.call(func, args, kwargs)

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator, with what the implementation of a custom one on CPU calls under this mode."""
        implementation = torch_private.cpu_implementation(func)
        if implementation is None:
            return func(*args, **kwargs)
        with _HostMethods(), self:
            return implementation(*args, **kwargs)


def _implementation(generator: torch.Generator) -> int:
    """Identity of the C++ generator behind a Python object."""
    return getattr(generator, "_cdata")  # noqa: B009  in no stub


def _random_state() -> bytes:
    """The default generator's, read without an operator."""
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


def _address(tensor: torch.Tensor) -> int:
    """Return the memory's address; autograd's zeros without memory and empty tensors have none."""
    return 0 if torch_private.is_zero_tensor(tensor) else tensor.untyped_storage().data_ptr()


def _is_new(value: Any, known: Container[int]) -> bool:
    """Tell whether a call made this tensor, rather than returning one it was given."""
    if not isinstance(value, torch.Tensor) or value.untyped_storage().nbytes() == 0:
        return False
    address = _address(value)
    return address != 0 and address not in known


class SimulatedPool:
    """Memory of one owner's recordings: a block is free when the last storage on it has died."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.UntypedStorage]] = {}
        """By size. A block is a storage that stays where it is."""
        self._blocks: dict[int, torch.UntypedStorage] = {}

    def __contains__(self, address: int) -> bool:
        return address in self._blocks

    def live_blocks(self) -> set[int]:
        """Addresses of the blocks that are not free."""
        free = {block.data_ptr() for blocks in self._free.values() for block in blocks}
        return self._blocks.keys() - free

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        """A storage on a free block. **Lifetime:** it owns the block, whatever becomes of the pool."""
        free = self._free.setdefault(num_bytes, [])
        new: Any = torch.UntypedStorage  # no stub has its `fill_`
        block = free.pop() if free else new(num_bytes).fill_(_POISON)
        self._blocks[block.data_ptr()] = block
        view = memoryview((ctypes.c_char * num_bytes).from_address(block.data_ptr())).cast("B")
        finalizer: Any = weakref.finalize(view, free.append, block)
        finalizer.atexit = False
        return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


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
        self._before: dict[int, torch.UntypedStorage] = {}
        """What lay at addresses that a call wrote."""
        # a dispatched call gets another Python object of the same generator
        self._registered = {_implementation(generator) for generator in generators}
        self._random_state = _random_state()
        """Of the default generator, after the last call that was taped."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch_private.see_to_calls(types):
            return NotImplemented
        if only_wraps(func):
            return func(*args, **kwargs)
        if _reads_on_host(func, args, kwargs):
            _refuse(func)
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Generator) and _implementation(leaf) not in self._registered:
                raise RuntimeError(f"a generator used by {func} is not registered with the graph")
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
        self.calls.append((func, *where, grad, pytree.tree_map(self._where, out)))
        return out

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if communicates(func):
            return made_alone(func, args, kwargs)
        before = _random_state()
        out = _HostReads().call(func, args, kwargs)
        after = _random_state()
        if before == self._random_state:
            self._random_state = after
        elif func in rng.OPERATORS or before != after:
            _refuse(f"{func} draws {_FOREIGN}")
        return out

    def end(self) -> None:
        """Refuse what a capture can't end with."""
        if _random_state() != self._random_state:
            _refuse(f"torch.set_rng_state without setting it back, {_FOREIGN}")

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
        self._keep_contents(storage.data_ptr(), storage.nbytes())
        storage.copy_(source)
        return storage

    def _keep_contents(self, address: int, num_bytes: int) -> None:
        if address not in self._before:
            storage = torch_private.storage_at(address, num_bytes, torch.device("cpu"))
            self._before[address] = storage.clone()

    def undo(self) -> None:
        """Put back what was there before."""
        for address, content in self._before.items():
            torch_private.storage_at(address, content.nbytes(), torch.device("cpu")).copy_(content)


class SimulatedGraph(CapturedGraph):
    """A tape that can be run again."""

    def __init__(self, tape: _Tape, memory: Sequence[object]) -> None:
        self._calls = tape.calls
        self._memory = memory

    def replay(self) -> None:
        """Run every call on the memory of the recording."""
        under_way, casts = UnderWay(), torch.is_autocast_enabled("cpu")
        try:
            # Casts are calls of their own. An exception inside of `torch.autocast` would leave its cache in use for good.
            torch.set_autocast_enabled("cpu", False)
            with torch.no_grad():
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
        finally:
            torch.set_autocast_enabled("cpu", casts)

    def reset(self) -> None:
        """Drop the tape, and the memory that no graph uses and nobody holds."""
        self._calls = []
        self._memory = ()


class _Recording(Capture):
    """This thread records: afterwards inputs and generators are as before."""

    def __init__(self, tape: _Tape, states: Sequence[tuple[torch.Generator, torch.Tensor]]) -> None:
        super().__init__()
        self._tape: _Tape | None = tape
        self._states = states

    def undo(self) -> None:
        super().undo()
        if self._tape is not None:
            self._tape.undo()
            for generator, state in self._states:
                generator.set_state(state)
            self._tape = None


class SimulatedDriver(GraphDriver):
    """`GraphDriver` on CPU."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device or torch.device("cpu"))
        self._pools: weakref.WeakValueDictionary[int, SimulatedPool] = weakref.WeakValueDictionary()
        """Kept by the graphs that use them."""

    def record(
        self, fn: BoxedCallable, args: list[Any], *, opaque: bool, pool_index: int = 0
    ) -> tuple[CapturedGraph, list[Any]]:
        """See `GraphDriver.record`. Runs `fn` once, then restores its inputs and the generators."""
        states = random_states(self.device, args)
        pool = self._pools.get(pool_index) or SimulatedPool()
        self._pools[pool_index] = pool
        inputs = tensors_in(args)
        tape = _Tape(pool, inputs, [generator for generator, _ in states])
        memory = list(self._pools.values())  # as CUDA graphs: inputs live as long as who owns them
        del inputs
        with _Recording(tape, states), torch.no_grad():
            outputs = self._run(tape, fn, args, opaque=opaque)
        return SimulatedGraph(tape, memory), outputs

    def _run(self, tape: _Tape, fn: BoxedCallable, args: list[Any], *, opaque: bool) -> list[Any]:
        if opaque:
            inputs = tuple(args)
            args.clear()
            with _HostMethods(), _HostReads(), Alone():
                return list(tape.note(lambda *inputs: tuple(fn(list(inputs))), inputs, {}))
        with _HostMethods(), tape:
            outputs = list(fn(args))
        tape.end()
        return outputs

    def live_blocks(self, pool_index: int) -> set[int]:
        """See `GraphDriver.live_blocks`."""
        pool = self._pools.get(pool_index)
        return set() if pool is None else pool.live_blocks()

    def is_capturing(self) -> bool:
        """Tell whether this thread records right now, through whichever driver: a recording inside would be part of it."""
        return is_capturing_here()


def driver_for(wanted: str, device: torch.device, **settings: Any) -> GraphDriver | None:
    """Make the driver that the option means on the tensors' device; None if nothing is to be recorded there.

    `settings` are for `CUDADriver`.

    Raises:
        DriverUnavailableError: It can't record on the device.
    """
    if wanted == "none" or (wanted == "auto" and device.type != "cuda"):
        return None
    if wanted == "simulated" and device.type == "cpu":
        return SimulatedDriver(device)
    if wanted != "simulated" and device.type == "cuda":
        return CUDADriver(device, **settings)
    raise DriverUnavailableError(
        f'driver="{wanted}" can\'t record on {device}; use driver="auto", or move the tensors'
    )
