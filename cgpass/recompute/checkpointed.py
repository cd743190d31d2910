"""One checkpointed call: the tensors that it would save are dropped, and recomputed at first need."""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from cgpass import torch_private
from cgpass.errors import CheckpointError
from cgpass.recompute.states import Numbers

_OUTSIDE = -1
"""Stands for the backward pass when a saved tensor is read outside of any."""
_SAME = (
    "Both runs must compute the same: let nothing depend on what changes in between, such as a global, a counter, a "
    "cache, or train and eval mode."
)

Meta: TypeAlias = tuple[torch.dtype, torch.Size, torch.device]
"""The properties that a determinism check compares."""


def _meta(tensor: torch.Tensor) -> Meta:
    return tensor.dtype, tensor.shape, tensor.device


def _text(meta: Meta) -> str:
    dtype, shape, device = meta
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"


class _Keep(torch.autograd.Function):
    """A node that is there for its saved tensors only."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(anchor)


class Arguments:
    """The arguments of a call, their tensors saved on a node: hooks see them, and their versions are checked."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._leaves, self._spec = pytree.tree_flatten(
            (args, kwargs), lambda each: isinstance(each, torch.Size)
        )
        self._places = [i for i, v in enumerate(self._leaves) if isinstance(v, torch.Tensor)]
        tensors = [self._leaves[i] for i in self._places]
        for i in self._places:
            self._leaves[i] = None
        self.devices = devices_of(tensors)
        with torch.enable_grad():
            anchor = torch.empty(0, device="cpu", requires_grad=True)  # without it there is no node
            # the output and not its grad_fn: that, a Python object, doesn't keep the node of the graph alive
            self.output: Any = _Keep.apply(anchor, *tensors)

    def call(self, fn: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> Any:
        """Call `fn` with the node's saved tensors in their places."""
        leaves = list(self._leaves)
        for i, tensor in zip(self._places, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        del leaves, tensors
        return fn(*args, **kwargs)


def devices_of(tensors: list[torch.Tensor]) -> tuple[torch.device, ...]:
    """Return the devices where a computation with `tensors` may draw random numbers, the CPU apart: their devices, and CUDA's current."""
    found = dict.fromkeys(t.device for t in tensors if t.device.type not in ("cpu", "meta"))
    if torch.cuda.is_initialized():
        found[torch.device("cuda", torch.cuda.current_device())] = None
    return tuple(found)


def _settings(
    devices: tuple[torch.device, ...],
) -> list[Callable[[], contextlib.AbstractContextManager[Any]]]:
    """This thread's default device, and autocast for the CPU and `devices`: a backward's thread may have others."""
    default = torch.get_default_device()
    autocasts = [
        functools.partial(
            torch.autocast,
            type_,
            dtype=torch.get_autocast_dtype(type_),
            enabled=torch.is_autocast_enabled(type_),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        for type_ in dict.fromkeys(["cpu", *(device.type for device in devices)])
        if torch.amp.is_autocast_available(type_)
    ]

    def with_default() -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if default == torch.get_default_device() else default

    return [*autocasts, with_default]


@dataclass(eq=False)
class Slot:
    """Stands in the graph for a tensor that was dropped. Dies with the graph's node."""

    index: int
    """Position among the tensors that the checkpoint would have saved."""
    meta: Meta
    """Of the dropped tensor."""
    values: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    """The recomputed tensor and its version by backward pass, until that pass has used it."""


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
        numbers: Numbers,
        context: contextlib.AbstractContextManager[Any],
        *,
        check: bool,
    ) -> None:
        self._fn = fn
        self._arguments = arguments
        self._numbers = numbers
        self._context = context
        self._check = check
        self._settings = _settings(arguments.devices)
        # weak: the graph's nodes own the slots, and a freed node's tensor isn't needed any more
        self._slots: list[weakref.ref[Slot]] = []
        self._done: set[int] = set()
        self._lock = threading.RLock()  # a backward over two devices runs in two threads

    @property
    def name(self) -> str:
        """Return the function's name for messages."""
        return getattr(self._fn, "__qualname__", None) or type(self._fn).__qualname__

    @property
    def is_selective(self) -> bool:
        """Tell whether only some operators are recomputed, which torch allows once."""
        return type(self._context).__name__ == "_CachedTorchDispatchMode"

    @property
    def keeper(self) -> Any:
        """The node that the tensors among its arguments are saved on."""
        return self._arguments.output.grad_fn

    def hooks(self) -> contextlib.AbstractContextManager[None]:
        """Around the forward: drop everything that it saves."""
        return torch_private.checkpoint_hooks(self._drop, self._restore)

    def _drop(self, tensor: torch.Tensor) -> Slot:
        slot = Slot(len(self._slots), _meta(tensor))
        self._slots.append(weakref.ref(slot))
        return slot

    def _restore(self, slot: Slot) -> torch.Tensor:
        task = torch_private.graph_task()
        with self._lock:
            if task < 0:
                self._recompute(_OUTSIDE)
                try:
                    return self._take(slot, _OUTSIDE)
                finally:
                    self.forget(_OUTSIDE)
            if task not in self._done:
                self._recompute(task)
                self._done.add(task)
                torch_private.after_backward(functools.partial(_forget, weakref.ref(self), task))
            return self._take(slot, task)

    def _take(self, slot: Slot, task: int) -> torch.Tensor:
        """A slot's tensor, which the slot doesn't hold any longer."""
        what = f"cgpass.checkpoint: tensor {slot.index} that {self.name} saves for its backward, {_text(slot.meta)},"
        if task not in slot.values:
            raise CheckpointError(
                f"{what} was needed again after it was used and freed in the same backward pass. Read "
                "ctx.saved_tensors once in a custom function's backward and keep its tensors."
            )
        value, version = slot.values.pop(task)
        # autograd checks what it saves itself, not what hooks give it
        if value._version != version:
            raise CheckpointError(
                f"{what} was changed in place after it was saved. Change a clone, or use the operator that isn't in "
                "place."
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
        # may itself recompute, if a checkpoint around this one dropped them
        tensors = self.keeper.saved_tensors
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._numbers.again())
                stack.enter_context(redo.hooks())
                for setting in self._settings:
                    stack.enter_context(setting())
                stack.enter_context(self._context)
                stack.enter_context(torch.enable_grad())
                self._arguments.call(self._fn, tensors)
        except _Enough as enough:
            if enough.args != (redo,):
                raise  # of a checkpoint around this one
        except BaseException:
            self.forget(task)
            raise
        redo.require_complete()


def _forget(ref: "weakref.ref[Checkpoint]", task: int) -> None:
    checkpoint = ref()
    if checkpoint is not None:  # else the graph is gone
        checkpoint.forget(task)


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
            if self._check and slot.meta != _meta(tensor):
                self._error = CheckpointError(
                    f"cgpass.checkpoint: tensor {index} that {self._name} saves for its backward was "
                    f"{_text(slot.meta)} in the forward and is {_text(_meta(tensor))} in the recomputation. {_SAME} "
                    'determinism_check="none" leaves this check out.'
                )
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
                f"forward and {self._count} in the recomputation; tensor {first}, {_text(self._slots[first].meta)}, is "
                f"missing. {_SAME}"
            )
