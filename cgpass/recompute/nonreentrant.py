"""Checkpointing by saved-tensor hooks: what would be saved is dropped, and recomputed at first need."""

import contextlib
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from cgpass import torch_private
from cgpass.errors import CheckpointError
from cgpass.recompute.ambient import Ambient
from cgpass.recompute.inputs import Arguments, KeptTensors
from cgpass.recompute.numbers import Numbers

_OUTSIDE = -1
"""Stands for the backward pass when a saved tensor is read outside of any."""


@dataclass(frozen=True)
class Meta:
    """What a determinism check compares."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Meta":
        """A tensor's."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"


@dataclass(eq=False)
class Slot:
    """Stands in the graph for a tensor that was dropped. Dies with the graph's node.

    Attributes:
        index: Position among the tensors that the checkpoint would have saved.
        meta: Of the dropped tensor.
        values: The recomputed tensor and its version by backward pass, until that pass has used it.
    """

    index: int
    meta: Meta
    values: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)


class _Enough(BaseException):
    """Ends a recomputation whose last needed tensor is there. Not for the user's `except Exception`."""


class Checkpoint:
    """One checkpointed call.

    The graph holds it, through the hooks that its nodes keep; it holds the call's arguments and, weakly, the slots.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        arguments: Arguments,
        *,
        numbers: Numbers,
        ambient: Ambient,
        context: contextlib.AbstractContextManager[Any],
        check: bool,
    ) -> None:
        """A call about to run; takes the tensors out of `arguments`.

        Args:
            fn: What is computed, now and again.
            arguments: Of the call.
            numbers: Random number states as they are now.
            ambient: Settings as they are now.
            context: Entered around each recomputation.
            check: Whether recomputed tensors are compared with the forward's.
        """
        self._fn = fn
        self._arguments = arguments
        self._tensors = KeptTensors(arguments.split())
        self._numbers = numbers
        self._ambient = ambient
        self._context = context
        self._check = check
        # weak: the graph's nodes own the slots, and a freed node's tensor isn't needed any more
        self._slots: list[weakref.ref[Slot]] = []
        self._done: set[int] = set()
        self._lock = threading.RLock()  # a backward over two devices runs in two threads

    @property
    def name(self) -> str:
        """What the function is called in messages."""
        return getattr(self._fn, "__qualname__", None) or type(self._fn).__qualname__

    @property
    def keeper(self) -> Any:
        """The node that the tensors among its arguments are saved on."""
        return self._tensors.node

    def hooks(self) -> contextlib.AbstractContextManager[None]:
        """Around the forward."""
        return torch_private.checkpoint_hooks(self._drop, self._restore)

    def _drop(self, tensor: torch.Tensor) -> Slot:
        slot = Slot(len(self._slots), Meta.of(tensor))
        self._slots.append(weakref.ref(slot))
        return slot

    def _restore(self, slot: Slot) -> torch.Tensor:
        task = torch_private.graph_task()
        with self._lock:
            if task < 0:
                return self._read_outside(slot)
            if task not in self._done:
                self._recompute(task)
                self._done.add(task)
                torch_private.after_backward(_forgetting(self, task))
            return self._take(slot, task)

    def _read_outside(self, slot: Slot) -> torch.Tensor:
        self._recompute(_OUTSIDE)
        try:
            return self._take(slot, _OUTSIDE)
        finally:
            self.forget(_OUTSIDE)

    def _take(self, slot: Slot, task: int) -> torch.Tensor:
        """A slot's tensor, which the slot doesn't hold any longer."""
        if task not in slot.values:
            self._fail(
                slot,
                "was needed again after it was used and freed in the same backward pass. Read ctx.saved_tensors once "
                "in a custom function's backward and keep what it gives.",
            )
        value, version = slot.values.pop(task)
        if (
            value._version != version
        ):  # autograd checks what it saves itself, not what hooks give it
            self._fail(
                slot,
                "was changed in place after it was saved. Change a clone, or use the operator that isn't in place.",
            )
        return value

    def _alive(self) -> dict[int, Slot]:
        slots = (ref() for ref in self._slots)
        return {slot.index: slot for slot in slots if slot is not None}

    def forget(self, task: int) -> None:
        """Drop what a backward pass had recomputed and did not use."""
        with self._lock:
            self._done.discard(task)
            for slot in self._alive().values():
                slot.values.pop(task, None)

    def _recompute(self, task: int) -> None:
        """Fill every living slot for a backward pass."""
        redo = _Recomputation(self.name, task, self._alive(), check=self._check)
        tensors = (
            self._tensors.get()
        )  # may itself recompute, if a checkpoint around this one dropped them
        try:
            with (
                self._numbers.replayed(),
                redo.hooks(),
                self._ambient.entered(),
                self._context,
                torch.enable_grad(),
            ):
                self._arguments.call(self._fn, tensors)
        except _Enough as enough:
            if enough.args != (redo,):
                raise  # of a checkpoint around this one
        except BaseException:
            self.forget(task)
            raise
        redo.require_complete()

    def _fail(self, slot: Slot, why: str) -> NoReturn:
        raise CheckpointError(
            f"cgpass.checkpoint: tensor {slot.index} that {self.name} saves for its backward, {slot.meta}, {why}"
        )


def _forgetting(checkpoint: Checkpoint, task: int) -> Callable[[], None]:
    """`checkpoint.forget(task)`, if the graph still holds it by then."""
    ref = weakref.ref(checkpoint)

    def forget() -> None:
        alive = ref()
        if alive is not None:
            alive.forget(task)

    return forget


class _Recomputation:
    """One run of the function for one backward pass."""

    def __init__(self, name: str, task: int, slots: dict[int, Slot], *, check: bool) -> None:
        self._name = name
        self._task = task
        self._slots = slots
        self._check = check
        self._last = max(slots)
        self._count = 0
        self._error: CheckpointError | None = None

    def hooks(self) -> contextlib.AbstractContextManager[None]:
        """Around the run. The graph that it builds is thrown away; backward passes inside of it find their tensors."""
        return torch_private.checkpoint_hooks(self._keep, lambda tensor: tensor)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        index = self._count
        self._count += 1
        slot = self._slots.get(index)
        value = tensor.detach() if tensor.requires_grad else tensor
        if slot is not None:
            if self._check and slot.meta != Meta.of(tensor):
                self._error = self._differs(slot, Meta.of(tensor))
                raise _Enough(self)
            slot.values[self._task] = value, value._version
        if index >= self._last:
            raise _Enough(self)
        return value

    def require_complete(self) -> None:
        """Raise unless every slot is filled."""
        if self._error is not None:
            raise self._error
        if self._count <= self._last:
            first = min(index for index in self._slots if index >= self._count)
            raise CheckpointError(
                f"cgpass.checkpoint: {self._name} saved {self._last + 1} or more tensors for its backward in the "
                f"forward and {self._count} in the recomputation; tensor {first}, {self._slots[first].meta}, is "
                f"missing. {_SAME}"
            )

    def _differs(self, slot: Slot, found: Meta) -> CheckpointError:
        return CheckpointError(
            f"cgpass.checkpoint: tensor {slot.index} that {self._name} saves for its backward was {slot.meta} in the "
            f'forward and is {found} in the recomputation. {_SAME} determinism_check="none" leaves this check out.'
        )


_SAME = (
    "Both runs must compute the same: let nothing depend on what changes in between, such as a global, a counter, a "
    "cache, or train and eval mode."
)


def run(
    checkpoint: Checkpoint,
    call: Callable[[], Any],
    context: contextlib.AbstractContextManager[Any],
    numbers: Numbers,
) -> Any:
    """The forward: `call` with everything it saves dropped.

    Args:
        checkpoint: Whose hooks see what is saved.
        call: Runs the function.
        context: The user's, around the forward.
        numbers: Of the checkpoint.
    """
    results = []
    with checkpoint.hooks(), numbers.forward(), context:
        results.append(call())
    if not results:
        raise CheckpointError(
            f"cgpass.checkpoint: the forward context of context_fn swallowed an exception of {checkpoint.name}, which "
            f"leaves nothing to return. Let exceptions through."
        )
    return results[0]
