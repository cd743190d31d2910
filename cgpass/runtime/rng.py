"""Random numbers: generator states that a backward recomputes from, states as operators, seeds of attention.

Note [Positions of generators]
    In "exact" mode the forward half of a pair draws from the user's own generator, as eager does. Where that stands
    just then is noted for the backward: read off the generator where the operator runs plainly. A graph's replay runs
    no host code: there it is the position at the partition's start plus what a warm-up of the same shape learnt.
    In "paired" mode the forward half has a generator of its own. Every call sets it from where the user's generator
    stands, and moves that on, so a seed reaches it.

    A backward sets its private generators to the positions that came with its saved tensors, before anything runs.
    Nothing else is kept of a forward: backwards may come in any order, twice or never. All of this is numbers on the
    host. CPU generators have no positions but whole states, and host operators are there to read them in a replay.

    Private generators belong to a graph: one thread at a time has it draw from them.

Note [Seeds of attention]
    Memory-efficient attention with dropout returns the generator's seed and offset as two tensors. They lie on the
    host where the operator ran plainly, on the device where it was captured; its backward reads them through a pointer
    to wherever it is called itself. What one partition made in a graph and another reads outside of one, or the other
    way round, has to change places in between.

    Source: aten/src/ATen/native/transformers/cuda/attention.cu and attention_backward.cu, 2.11.
"""

import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS

from cgpass import torch_private
from cgpass.errors import CaptureError, CheckpointError, InputError
from cgpass.runtime.changes import Mode, new_lock

Boxed = Callable[[list[Any]], Sequence[Any]]
STATE_BYTES: Final = torch.default_generator.get_state().numel()
_GOLDEN = 0x9E3779B97F4A7C15
_STEPS_OF_A_CALL = 1 << 26
"""How far a call in "paired" mode moves the user's generator: more than any operator draws, and calls never meet."""
_drawing = new_lock()
"""One operator of a pair draws at a time: it reads where a generator stands, or stands in for it."""


class ForwardState:
    """Stands for the user's generator where one forward operator draws from it."""

    __slots__ = ("_generator", "_number", "_positions")

    def __init__(self, generator: torch.Generator, positions: threading.local, number: int) -> None:
        """`positions.by_number` are where the pairs drew in one thread's call."""
        self._generator = generator
        self._positions = positions
        self._number = number

    @property
    def position(self) -> Any:
        """Where the operator drew in this call."""
        return self._positions.by_number[self._number]

    @position.setter
    def position(self, position: Any) -> None:
        self._positions.by_number[self._number] = position

    def note(self) -> None:
        """The operator is about to draw; in a capture nobody can tell where."""
        if self._generator.device.type != "cuda" or not torch_private.is_capturing():
            self.position = _position_of(self._generator)

    def start(self) -> Any:
        """Return the position where a partition with this operator begins; nothing for generators that have no positions."""
        return _position_of(self._generator) if self._generator.device.type == "cuda" else None


def forward_states(args: Sequence[Any], among: Iterable[int]) -> tuple[ForwardState, ...]:
    """The states among a partition's inputs whose positions a call has to note."""
    return tuple([args[i] for i in among if isinstance(args[i], ForwardState)])


def note_positions(
    states: Sequence[ForwardState], start: Any, distances: list[int], *, replayed: bool
) -> None:
    """Note where a partition's operators drew. Distances from where it began are learnt of plain calls, used for replays."""
    if start is None:  # on the CPU operators note it in a replay, too
        return
    seed, offset = start
    if replayed:
        for state, distance in zip(states, distances, strict=True):
            state.position = seed, offset + distance
    else:
        distances[:] = [state.position[1] - offset for state in states]


class _Caller:
    """Calls a graph with pairs of generators, one of each on each of the devices."""

    def __init__(self, fn: Boxed, devices: Sequence[torch.device], positions_at: int) -> None:
        self._fn = fn
        self._at = positions_at
        """Where positions go among a forward's outputs, or are among a backward's inputs."""
        self._is_on_cuda = any(device.type == "cuda" for device in devices)
        self._generators = [torch_private.default_generator(device) for device in devices]
        """The user's."""

    def _refuse_foreign_capture(self) -> None:
        if self._is_on_cuda and torch_private.is_capturing():
            raise CaptureError(
                "a compiled function that recomputes random operators (activation checkpointing with dropout) was called "
                "inside a capture of your own: nobody can tell there which numbers its backward has to repeat. Call it "
                "outside, or checkpoint with cgpass.checkpoint in a capture by hand."
            )


class ExactForward(_Caller):
    """Calls a forward graph whose pairs draw from the user's generator."""

    def __init__(self, fn: Boxed, devices: Sequence[torch.device], positions_at: int) -> None:
        super().__init__(fn, devices, positions_at)
        self._positions = threading.local()
        self._nowhere = [_position_of(generator) for generator in self._generators]
        self._states = [
            ForwardState(generator, self._positions, number)
            for number, generator in enumerate(self._generators)
        ]

    def __call__(self, args: list[Any]) -> list[Any]:
        """Call it; `args` is emptied."""
        self._refuse_foreign_capture()
        self._positions.by_number = self._nowhere.copy()
        args.extend(self._states)
        outputs = list(self._fn(args))
        outputs.insert(self._at, _pack(self._positions.by_number))
        return outputs


class _Private(_Caller):
    """One whose pairs have generators of their own here."""

    def __init__(self, fn: Boxed, devices: Sequence[torch.device], positions_at: int) -> None:
        super().__init__(fn, devices, positions_at)
        self._states = [
            torch.Generator() if generator.device.type == "cpu" else generator.clone_state()
            for generator in self._generators
        ]
        self._lock = new_lock()

    def _run(self, args: list[Any]) -> list[Any]:
        args.extend(self._states)
        return list(self._fn(args))


class PairedForward(_Private):
    """Calls a forward graph whose pairs have generators of their own."""

    def __call__(self, args: list[Any]) -> list[Any]:
        """Call it; `args` is emptied."""
        self._refuse_foreign_capture()
        with self._lock:
            snapshot = _pack(self._set_states())
            outputs = self._run(args)
        outputs.insert(self._at, snapshot)
        return outputs

    def _set_states(self) -> list[Any]:
        """Set the private generators from where the users' stand, and move those on; returns their positions."""
        stands: dict[torch.device, tuple[int, int]] = {}
        positions: list[Any] = []
        for number, (state, user) in enumerate(zip(self._states, self._generators, strict=True)):
            if user.device.type == "cuda":
                if user.device not in stands:
                    stands[user.device] = _position_of(user)
                    user.set_offset(stands[user.device][1] + _STEPS_OF_A_CALL)
                seed, offset = stands[user.device]
                seed = (seed * _GOLDEN + (number + 1) * _GOLDEN**2) % 2**63
                state.manual_seed(seed)
                state.set_offset(offset)
                positions.append((seed, offset))
            else:
                with _drawing:
                    state.manual_seed(int(torch.randint(2**62, (), generator=user, device="cpu")))
                positions.append(state.get_state())
        return positions


class Backward(_Private):
    """Calls a backward graph whose pairs draw what their forward drew."""

    def __call__(self, args: list[Any]) -> list[Any]:
        """Call it; `args` is emptied."""
        self._refuse_foreign_capture()
        positions = args.pop(self._at)
        with self._lock:
            self._rewind(positions)
            return self._run(args)

    def _rewind(self, positions: torch.Tensor) -> None:
        """Set the generators to positions that `_pack` has put together."""
        if positions.dtype is not torch.int64:
            raise InputError(
                "where a forward's random operators drew was saved for its backward as an integer tensor, but came back "
                f"as {positions.dtype}: have your saved-tensor hooks leave tensors of integers as they are"
            )
        sizes = [2 if g.device.type == "cuda" else STATE_BYTES // 8 for g in self._generators]
        for state, row in zip(self._states, positions.split(sizes), strict=True):
            if state.device.type == "cuda":
                bits, offset = row.tolist()
                state.manual_seed(bits % 2**64)
                state.set_offset(offset)
            else:
                state.set_state(row.clone().view(torch.uint8))


def caller_of(
    fn: Boxed,
    direction: Literal["forward", "backward"],
    devices: Sequence[torch.device],
    positions_at: int,
    *,
    exact: bool,
) -> Boxed:
    """Return a caller for a compiled graph with pairs that is called like one without.

    The graph's last inputs are the pairs' states; `positions_at` is where the positions are among its outputs or inputs.
    """
    torch_private.install_rng_kernel(run_with_state, _refuse_selective_checkpoint)
    if direction == "backward":
        return Backward(fn, devices, positions_at)
    make = ExactForward if exact else PairedForward
    return make(fn, devices, positions_at)


def run_with_state(op: Any, *args: Any, rng_state: Any = None, **kwargs: Any) -> Any:
    """`graphsafe_run_with_rng_state`: run an operator that draws from a state, on CPU too."""
    with _drawing:
        if isinstance(rng_state, ForwardState):
            rng_state.note()
            return op(*args, **kwargs)
        default = torch_private.default_generator(rng_state.device)
        with _InPlaceOf(default, rng_state):
            return op(*args, **kwargs)


class _InPlaceOf(Mode):
    """Have operators draw from `state`; the generator that they draw from else stays where it is."""

    def __init__(self, default: torch.Generator, state: torch.Generator) -> None:
        super().__init__()
        self._default = default
        self._state = state
        self._before: Any = None

    def begin(self) -> None:
        default, state = self._default, self._state
        if state.device.type == "cuda":
            self._before = default.graphsafe_get_state()
            default.graphsafe_set_state(state)
        else:
            self._before = default.get_state()
            default.set_state(state.get_state())

    def undo(self) -> None:
        default, before = self._default, self._before
        if before is None:
            return
        if self._state.device.type == "cuda":
            default.graphsafe_set_state(before)
        else:
            default.set_state(before)
        self._before = None


# ---- generators and positions


def _position_of(generator: torch.Generator) -> Any:
    """Seed and offset of a CUDA generator, the whole state of another one."""
    if generator.device.type == "cuda":
        return generator.initial_seed(), generator.get_offset()
    return generator.get_state()


def _pack(positions: Sequence[Any]) -> torch.Tensor:
    """Positions as one tensor, int64, one after the other: seed (of 64 bits) and offset, or a whole state."""
    if not any(isinstance(position, torch.Tensor) for position in positions):
        return torch.tensor([n for position in positions for n in _signed(position)], device="cpu")
    rows = (
        p if isinstance(p, torch.Tensor) else torch.tensor(_signed(p), device="cpu")
        for p in positions
    )
    return torch.cat([row.view(torch.int64) for row in rows])


def _signed(position: tuple[int, int]) -> tuple[int, int]:
    """A position whose seed fits an int64."""
    seed, offset = position
    return (seed + 2**63) % 2**64 - 2**63, offset


def _refuse_selective_checkpoint() -> None:
    raise CheckpointError(
        "a compiled function that recomputes random operators (activation checkpointing with dropout) was called inside "
        "a selective checkpoint that is not compiled: which of its random operators that one saves, nobody can tell. "
        "Have torch.compile compile the selective checkpoint too, or use one without context_fn."
    )


# ---- states of CPU generators, read and set by operators: a recording runs them again in their place


@torch.library.custom_op(
    "cgpass::read_rng_state", mutates_args=(), schema="(Generator generator) -> Tensor"
)
def read_rng_state(generator: torch.Generator) -> torch.Tensor:
    """A generator's state, uint8 `(STATE_BYTES,)`. **Lifetime:** the caller's own."""
    return generator.get_state()


@torch.library.custom_op(
    "cgpass::set_rng_state",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor state, Generator generator) -> ()",
)
def set_rng_state(state: torch.Tensor, generator: torch.Generator) -> None:
    """Set a generator to a state that `read_rng_state` gave.

    Memory that nobody has written is passed over: a backward may be recorded before its forward was ever run again,
    and what it computes then means nothing.
    """
    content = ctypes.string_at(state.data_ptr(), state.numel())
    if content.count(content[:1]) != len(content):
        generator.set_state(state)


@read_rng_state.register_fake
def _(generator: torch.Generator) -> torch.Tensor:
    """A state's metadata."""
    return torch.empty(STATE_BYTES, dtype=torch.uint8, device="cpu")


@set_rng_state.register_fake
def _(state: torch.Tensor, generator: torch.Generator) -> None:
    """Changes no metadata."""


OPERATORS: Final = (read_rng_state._opoverload, set_rng_state._opoverload)
SAC_IGNORED_OPS.update(OPERATORS)


# ---- seeds of attention


def read_on_the_host(fn: Boxed, positions: Sequence[int]) -> Boxed:
    """`fn`, with the seeds among its inputs on the host unless a capture runs."""
    if not positions:
        return fn

    def run(args: list[Any]) -> Sequence[Any]:
        if not torch_private.is_capturing():
            for i in positions:
                args[i] = args[i].cpu()
        return fn(args)

    return torch_private.mark_boxed(run)


def put_on_the_device(args: list[Any], positions: Sequence[int], device: torch.device) -> None:
    """Have the seeds among a call's inputs where a graph reads them. Never waits for the device."""
    for i in positions:
        args[i] = args[i].to(device, non_blocking=True)
