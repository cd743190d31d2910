"""Random numbers: generator states that a backward recomputes from, states as operators, seeds of attention.

Note [Positions of generators]
    In "exact" mode the forward half of a pair draws from the user's own generator, as eager does. Where that stands
    just then is noted for the backward: read off the generator where the operator runs outside of a graph. A graph's replay runs
    no host code: there it is the position at the partition's start plus what a warm-up of the same shape learnt.
    In "paired" mode the forward half has a generator of its own. Every call sets it from where the user's generator
    stands, and moves that on, so a seed reaches it.

    A backward sets its private generators to the positions that came with its saved tensors, before anything runs.
    Nothing else is kept of a forward: backwards may come in any order, twice or never. All of this is numbers on the
    host. CPU generators have no positions but whole states, and host operators are there to read them in a replay.

    Private generators belong to a graph: one thread at a time has it draw from them.

Note [Seeds of attention]
    Memory-efficient attention with dropout returns the generator's seed and offset as two tensors. They lie on the
    host where the operator ran without a graph, on the device where it was captured; its backward reads them through a pointer
    to wherever it is called itself. What one partition made in a graph and another reads outside of one, or the other
    way round, has to change places in between.

    Source: aten/src/ATen/native/transformers/cuda/attention.cu and attention_backward.cu, 2.11.
"""

import contextlib
import ctypes
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS

from cgpass import torch_private
from cgpass.errors import CaptureError, CheckpointError, InputError
from cgpass.runtime.changes import Mode, new_lock
from cgpass.runtime.driver import BoxedCallable

STATE_BYTES: Final = torch.default_generator.get_state().numel()
_GOLDEN = 0x9E3779B97F4A7C15
_STEPS_OF_A_CALL = 1 << 26
"""Steps that a call in "paired" mode moves the user's generator: more than any operator draws, so calls never meet."""
_FOREIGN_CAPTURE: Final = (
    "a compiled function that recomputes random operators (activation checkpointing with dropout) was called "
    "inside a capture of your own: nobody can tell there which numbers its backward has to repeat. Call it "
    "outside, or checkpoint with cgpass.checkpoint in a capture by hand."
)
_drawing = new_lock()
"""One operator of a pair draws at a time: it reads where a generator stands, or stands in for it."""


class ForwardState(threading.local):
    """Stands for the user's generator where one forward operator draws from it."""

    position: Any = None
    """The generator's position when the operator drew in this thread's call."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def note(self) -> None:
        """The operator is about to draw; in a capture nobody can tell where."""
        if self._generator.device.type != "cuda" or not torch_private.is_capturing():
            self.position = _position_of(self._generator)

    def start(self) -> Any:
        """Return the position where a partition with this operator begins; nothing for generators that have no positions."""
        return _position_of(self._generator) if self._generator.device.type == "cuda" else None


def forward_states(args: Sequence[Any], among: Iterable[int]) -> tuple[list[ForwardState], Any]:
    """The states among a partition's inputs whose positions a call has to note, and where the partition begins.

    That is None on the CPU: operators note their positions in a replay, too.
    """
    states = [args[i] for i in among if isinstance(args[i], ForwardState)]
    return states, states[0].start() if states else None


def distances(states: Sequence[ForwardState], start: Any) -> list[int]:
    """Return how far from its beginning the operators of a partition drew, which ran without a graph."""
    return [] if start is None else [state.position[1] - start[1] for state in states]


def note_replayed(states: Sequence[ForwardState], start: Any, draws: Sequence[int]) -> None:
    """Note where the operators of a partition drew in a replay, whose `distances` are known."""
    if start is not None:
        for state, distance in zip(states, draws, strict=True):
            state.position = start[0], start[1] + distance


def caller_of(
    fn: BoxedCallable,
    devices: Sequence[torch.device],
    positions_at: int,
    *,
    is_backward: bool,
    exact: bool,
) -> BoxedCallable:
    """Return a caller for a compiled graph with pairs, one on each of the devices, that is called like one without.

    The graph's last inputs are the pairs' states; `positions_at` is where the positions are among its outputs or inputs.
    """
    torch_private.install_rng_kernel(run_with_state, _refuse_selective_checkpoint)
    is_on_cuda = any(device.type == "cuda" for device in devices)
    users = [torch_private.default_generator(device) for device in devices]
    has_own = is_backward or not exact
    states: list[Any] = [_private(user) if has_own else ForwardState(user) for user in users]
    lock = new_lock() if has_own else contextlib.nullcontext()

    def call(args: list[Any]) -> list[Any]:
        if is_on_cuda and torch_private.is_capturing():
            raise CaptureError(_FOREIGN_CAPTURE)
        with lock:
            if is_backward:
                _rewind(states, args.pop(positions_at))
            positions = [] if is_backward or exact else _set_states(states, users)
            args.extend(states)
            outputs = list(fn(args))
        if not is_backward:
            positions = positions or [state.position for state in states]
            outputs.insert(positions_at, _pack(positions))
        return outputs

    return torch_private.mark_boxed(call)


def _private(user: torch.Generator) -> torch.Generator:
    return torch.Generator() if user.device.type == "cpu" else user.clone_state()


def _set_states(states: Sequence[Any], users: Sequence[torch.Generator]) -> list[Any]:
    """Set private generators from where the users' stand, and move those on; returns their positions."""
    stands: dict[torch.device, tuple[int, int]] = {}
    positions: list[Any] = []
    for number, (state, user) in enumerate(zip(states, users, strict=True)):
        if user.device.type == "cuda":
            if user.device not in stands:
                stands[user.device] = _position_of(user)
                user.set_offset(stands[user.device][1] + _STEPS_OF_A_CALL)
            seed, offset = stands[user.device]
            seed = (seed * _GOLDEN + (number + 1) * _GOLDEN**2) % 2**63
            state.manual_seed(seed)
            state.set_offset(offset)
        else:
            with _drawing:
                state.manual_seed(int(torch.randint(2**62, (), generator=user, device="cpu")))
        positions.append(_position_of(state))
    return positions


def _rewind(states: Sequence[Any], positions: torch.Tensor) -> None:
    """Set private generators to positions that `_pack` has put together."""
    if positions.dtype is not torch.int64:
        raise InputError(
            f"a saved position of random numbers came back as {positions.dtype}: have your saved-tensor hooks return tensors "
            "of integers unchanged"
        )
    sizes = [2 if state.device.type == "cuda" else STATE_BYTES // 8 for state in states]
    for state, row in zip(states, positions.split(sizes), strict=True):
        if state.device.type == "cuda":
            bits, offset = row.tolist()
            state.manual_seed(bits % 2**64)
            state.set_offset(offset)
        else:
            state.set_state(row.clone().view(torch.uint8))


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
        is_on_cuda = state.device.type == "cuda"
        self._get = default.graphsafe_get_state if is_on_cuda else default.get_state
        self._set: Any = default.graphsafe_set_state if is_on_cuda else default.set_state
        self._state = state if is_on_cuda else state.get_state()
        self._before: Any = None

    def begin(self) -> None:
        self._before = self._get()
        self._set(self._state)

    def undo(self) -> None:
        if self._before is not None:
            self._set(self._before)
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
        "a selective checkpoint that is not compiled, and cgpass can't know which of its random operators that saves. "
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


def read_on_the_host(fn: BoxedCallable, positions: Sequence[int]) -> BoxedCallable:
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
