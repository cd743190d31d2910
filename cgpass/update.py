"""The update that ends a training step: clipping, optimizers, scaler and `zero_grad`.

`whole_step` decides when this is part of a graph.
"""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final

import torch

from cgpass import torch_private
from cgpass.runtime import fast
from cgpass.runtime.changes import Mode

_NEW_STATE: Final = "the optimizer's groups, parameters or state tensors are others than before, and are recorded again"
_NEW_NUMBER: Final = (
    "{} changed, and a new value is recorded again; a learning rate may change freely"
)
_ANOMALY: Final = (
    "anomaly detection is on; torch.compile turns it on, too, while it compiles in another thread"
)
_RATES: Final = ("lr", "initial_lr")


@dataclasses.dataclass
class _Rate:
    """A group's learning rate as a tensor."""

    group: dict[str, Any]
    tensor: torch.Tensor
    filled: float | None = None
    """The rate in it; None where the tensor is the user's own."""


class _RatesAsTensors(Mode):
    """Have groups read the tensors. In a capture, groups of fused optimizers say that they are capturable, which they are."""

    def __init__(self, rates: Sequence[_Rate]) -> None:
        super().__init__()
        self._rates = rates
        self._before: list[tuple[dict[str, Any], Any, Any]] = []

    def begin(self) -> None:
        self._before = [(r.group, r.group["lr"], r.group.get("capturable")) for r in self._rates]
        for rate in self._rates:
            rate.group["lr"] = rate.tensor
            fused = rate.group.get("fused") and "capturable" in rate.group
            if fused and rate.tensor.is_cuda and torch_private.is_capturing():
                rate.group["capturable"] = True

    def undo(self) -> None:
        for group, lr, capturable in self._before:
            group["lr"] = lr
            if "capturable" in group:
                group["capturable"] = capturable


class NoGradientsAfter(Mode):
    """Leaves nothing in `.grad` that a capture made, however it ends."""

    def __init__(self, update: "Update") -> None:
        super().__init__()
        self._update = update

    def undo(self) -> None:
        """See `Mode`."""
        self._update.forget_gradients()
        if self._update.scaler is not None:  # a capture that failed in the middle runs again
            torch_private.steps_of_scaler(self._update.scaler).clear()


class Update:
    """Clipping, optimizers, scaler and zero_grad: the same Python in pieces, in warm-ups and in captures."""

    def __init__(
        self, optimizers: list[torch.optim.Optimizer], max_norm: float | None, scaler: Any
    ) -> None:
        self.optimizers = optimizers
        self.max_norm = max_norm
        self.scaler = scaler
        self.grad_norm: torch.Tensor | None = None
        self.params: list[torch.Tensor] = []
        self.state: list[torch.Tensor] = []
        """Tensors that updates read and write, beside parameters and gradients."""
        self.rates: list[_Rate] = []
        """Of the groups, if all of them can be captured."""
        self.numbers: dict[str, Any] = {}
        """All that updates read on the host, beside learning rates."""
        self.counts_writes = False
        """True if autograd is told what the optimizers write, as it is not by fused ones of torch 2.14."""
        self._last: tuple[tuple[Any, ...], tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]]
        self._last = (), ((), ())
        """Source of `read`'s last result, and that result."""
        self.known_as: dict[int, str] = {}
        """Names of parameters, by their `id`s; `params` holds them."""
        self.looks = 0
        """The number of times that the optimizers' tensors were others than before."""
        self._groups: list[dict[str, Any]] = []
        self._contents = self._parts = fast.NOTHING
        """All that optimizers have and read but learning rates, and where tensors of it lie; the same without numbers."""
        self._reads: dict[str, Any] = {}
        """Values that they read besides."""
        self._why_never: str | None = None

    def groups(self) -> list[dict[str, Any]]:
        """Each group of parameters."""
        return [group for each in self.optimizers for group in each.param_groups]

    def has(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Tell whether all of these are the optimizers', and each another one."""
        found = {*map(id, leaves)}
        return len(found) == len(leaves) and found <= {*map(id, self.params)}

    def owns(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Tell whether any of these shares memory with what updates read and write beside parameters."""
        own = {
            tensor.untyped_storage().data_ptr()
            for tensor in (*self.state, *[rate.tensor for rate in self.rates])
            if tensor.numel()
        }
        return not own.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in tensors)

    def run(self) -> None:
        """Clip, step and zero_grad."""
        scaler = self.scaler
        if self.max_norm is not None:
            if scaler is not None:
                for each in self.optimizers:
                    scaler.unscale_(each)
            params = [p for group in self.groups() for p in group["params"]]
            self.grad_norm = torch.nn.utils.clip_grad_norm_(params, self.max_norm)
        hooked = torch_private.step_hooks(self.optimizers)
        with contextlib.nullcontext() if hooked else _RatesAsTensors(self.rates):
            for each in self.optimizers:
                if scaler is None:
                    each.step()
                else:
                    scaler.step(each)
        if scaler is not None:
            scaler.update()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Have no parameter have a gradient."""
        for each in self.optimizers:
            each.zero_grad(set_to_none=True)

    def fill_learning_rates(self) -> None:
        """Have the tensors be what the groups' learning rates are now."""
        for rate in self.rates:
            lr, device = rate.group["lr"], rate.tensor.device
            if isinstance(lr, torch.Tensor) and lr.device == device:
                rate.filled, rate.tensor = None, lr  # a signal may come in between
            elif rate.filled is None or lr != rate.filled:
                if rate.filled is None:  # the tensor is the user's
                    rate.tensor = torch.empty((), dtype=torch.float32, device=device)
                rate.filled = math.nan  # until it is
                rate.tensor.fill_(float(lr))
                rate.filled = float(lr)

    def changed_since_filled(self) -> bool:
        """Tell if groups or flags are others than when the rates were filled, and fill them again."""
        numbers, changed = self.numbers, False
        for rate in self.rates:
            lr = rate.group["lr"]
            changed |= lr is not rate.tensor if rate.filled is None else bool(lr != rate.filled)
        self.look()
        self.fill_learning_rates()
        return changed or self.numbers != numbers

    # ---- what changes

    def look(self) -> str | None:
        """Note what optimizers have and read, where it is other than before; returns why the next update is in no graph."""
        groups, reads = self.groups(), torch_private.host_reads(self.scaler)
        now = found = fast.NOTHING
        if fast.is_loaded:
            parts = torch_private.parts_of_optimizers(self.optimizers, self.scaler)
            now = fast.contents([*parts, *groups], _RATES, self._contents)
            if now[0] is self._contents[0] and reads == self._reads:
                self._contents = now
                return self._why_never
            found = fast.contents([*parts, *[g["params"] for g in groups]], (), self._parts)
        why = self._look_anew(groups, found, reads)
        # Last of all, for a signal may come before.
        self._groups, self._contents, self._parts, self._reads = groups, now, found, reads
        return why

    def _look_anew(
        self, groups: list[dict[str, Any]], parts: tuple[list[Any], bytes], reads: dict[str, Any]
    ) -> str | None:
        """See `look`."""
        are_same = [*map(id, groups)] == [*map(id, self._groups)] and parts is not fast.NOTHING
        is_new = not are_same or parts[0] is not self._parts[0]
        if is_new:
            self.looks += 1
            self.params = [p for group in groups for p in group["params"]]
            params = {*map(id, self.params)}
            tensors = {id(x): x for x in parts[0] if isinstance(x, torch.Tensor)}
            self.state = [tensor for key, tensor in tensors.items() if key not in params]
        places = sorted({str(tensor.device) for tensor in (*self.params, *self.state)})
        last, numbers = self.numbers, _numbers_of(groups)
        why = torch_private.why_not_recordable(self.optimizers, self.scaler)
        if why is None and len(places) > 1:
            why = f"the optimizer's tensors lie on {' and '.join(places)}; keep them on one device"
        if isinstance(numbers, dict):
            self.numbers = numbers | reads
        else:
            why = why or f"{numbers} holds a tensor, or something else than numbers"
        self._why_never, used = why, [] if why else groups
        if is_new or len(used) != len(self.rates):
            device = places[0] if places else "cpu"
            self.rates = [_Rate(group, torch.empty(0, device=device)) for group in used]
        if why is not None or self._parts is fast.NOTHING:
            return why
        names = [n for n in last | self.numbers if last.get(n, ...) != self.numbers.get(n, ...)]
        changed = _NEW_NUMBER.format(", ".join(names[:3])) if names else None
        return _NEW_STATE if is_new else changed

    def why_pieces(self) -> str | None:
        """Say why the next update can't be part of a graph, as things stand in this call. To be asked after `look`."""
        if (hooked := torch_private.step_hooks(self.optimizers)) is not None:
            return hooked
        at = fast.first_watched(self.params)
        if at >= 0:
            leaf = self.params[at]
            name = self.known_as.get(id(leaf))
            name = name or f"parameter {at} of the optimizer, {[*leaf.shape]},"
            if leaf.grad is not None:
                return f"{name} has a gradient from before; call zero_grad() first"
            if torch.is_anomaly_enabled():
                return _ANOMALY
            return f"{name} has hooks, or gradients of another dtype; remove them"
        if self.scaler is not None and torch_private.steps_of_scaler(self.scaler):
            return "the scaler's unscale_() or step() was called before the step; leave that to the step"
        return None

    def read(self) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
        """The tensors that an update reads and writes beside parameters, and all that it reads, for the key."""
        rates = [rate.tensor for rate in self.rates]
        places = self._contents[1], fast.contents(rates, (), fast.NOTHING)[1]
        last = self.looks, self.numbers, places
        if last != self._last[0]:
            read = (*self.state, *rates), (self.looks, tuple(self.numbers.items()), places)
            self._last = last, read  # as one: a signal may come between two steps
        return self._last[1]


def _numbers_of(groups: Sequence[dict[str, Any]]) -> dict[str, Any] | str:
    """All that steps read in groups beside learning rates, by name; or the name of what is no number."""
    found: dict[str, Any] = {}
    for n, group in enumerate(groups):
        for name in [name for name in group if name not in ("params", *_RATES)]:
            key = f"optimizer.param_groups[{n}]['{name}']"
            found[key] = _by_value(group[name])
            if found[key] is ...:
                return key
    return found


def _by_value(value: object) -> Any:
    """Sequences of numbers as tuples; `...` for what is no number."""
    if isinstance(value, (tuple, list)):
        found = tuple(map(_by_value, value))
        return ... if ... in found else found
    return value if isinstance(value, (int, float, str, type(None))) else ...
