"""`train_step`: forward, loss, backward, clipping, optimizer and zero_grad as one replay.

Note [A whole step]
    The loss is compiled as ever, so Dynamo's guards cover the user's Python in each call, and nothing that it reads is
    frozen. Where Dynamo calls the forward graph (`TrainingCall`), a step runs one recording instead: the forward's
    kernels, the backward's for a gradient of ones, and the optimizer's own `step()`. So a call goes one of two ways:

    whole    one replay, or the same body without a graph, to warm it up
    pieces   forward, backward and optimizer one after the other, as the user would write them

    The first call of each variant that Dynamo compiles goes in pieces, since optimizers make their state then, and
    tells whether the variant can be a whole step (`_Whole.of`). What may change from call to call is looked at in each
    (`TrainStep._why_pieces`): gradients from before, hooks, state tensors. What else `step()` reads on the host is in
    the recording's key: numbers of the optimizer's groups as integers are, and addresses of its tensors.

    Learning rates are tensors while a step runs, in both ways, filled before it from what the groups have. So a schedule
    costs no recording, and both ways have the same bits.
"""

import dataclasses
import inspect
import logging
import math
import threading
import types
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from cgpass import telemetry, torch_private
from cgpass.backend import cgpass
from cgpass.compile.facts.input_info import InputInfo, InputKind
from cgpass.compile.option_names import parse_options
from cgpass.compile.plan import whole_plan
from cgpass.compile.training import Step, TrainingCall, here
from cgpass.errors import InputError, OptionError
from cgpass.options import Options
from cgpass.runtime import fast, native
from cgpass.runtime.changes import Mode, mend, open_modes
from cgpass.runtime.executor import Executor
from cgpass.runtime.partition import PartitionRunner
from cgpass.telemetry.reason import many

log = logging.getLogger(__name__)

_FIRST: Final = "the first call of a variant"
_NEW_STATE: Final = "the optimizer's state or groups are other tensors than before"
_NEW_NUMBERS: Final = "a hyperparameter has a new value ({}); each new value costs a call in pieces, but for the learning rate's"
_FOREIGN: Final = "something else than the optimizer's parameters gets gradients"
_NUMBERS_KEPT: Final = 64
"""Sets of hyperparameters that are known of an optimizer."""
_BY_VALUE = (int, float, bool, str, type(None))

_Met = tuple[TrainingCall, tuple[Any, ...], list[Any]]

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Whose fused kernels take the learning rate as a tensor."""
_numbers = iter(range(1 << 62))


def train_step(
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    max_norm: float | None = None,
    scaler: Any = None,
    accumulate: int = 1,
    options: Mapping[str, Any] | Options | None = None,
) -> "TrainStep":
    """Make a whole training step a function that replays as one CUDA graph.

        step = cgpass.train_step(loss_fn, optimizer, max_norm=1.0)
        for batch in loader:
            loss = step(*batch)
            scheduler.step()

    Args:
        loss_fn: Called with what the step is called with; a function or a module. Returns the loss, a tensor of one
            element, or the loss and something else, whose tensors are handed out detached.
        optimizer: Of torch.optim, or several. With `fused=True` or `capturable=True` its step is part of the graph; others
            run in pieces.
        max_norm: Gradients are clipped to this norm, over all optimizers' parameters (`clip_grad_norm_`).
        scaler: A `torch.amp.GradScaler`, updated once an update.
        accumulate: Calls to one update; gradients add up in `.grad`, and nothing is divided.
        options: As for `torch.compile(..., backend="cgpass")`.

    Returns:
        What runs a step. After an update `.grad` is None.

    Raises:
        OptionError: A bad value.
        InputError: `optimizer` or `scaler` is something else.
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise InputError(f"optimizer is a {type(each).__name__}, not a torch.optim.Optimizer")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InputError(f"scaler is a {type(scaler).__name__}, not a torch.amp.GradScaler")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise OptionError(f"accumulate={accumulate!r}: must be a number of calls, 1 or more")
    if max_norm is not None and not max_norm > 0:
        raise OptionError(f"max_norm={max_norm!r}: must be a positive number, or None")
    if not optimizers:
        raise InputError("optimizer is empty: give one optimizer or several")
    scaler = scaler if scaler is not None and scaler.is_enabled() else None
    update = _Update(optimizers, max_norm, scaler)
    return TrainStep(loss_fn, update, accumulate, options)


class TrainStep:
    """Runs training steps. See Note [A whole step]; made by `train_step`."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        update: "_Update",
        accumulate: int,
        options: Mapping[str, Any] | Options | None,
    ) -> None:
        self.loss_fn = loss_fn
        self.calls = self.whole_calls = 0
        self.in_pieces: Counter[str] = Counter()
        """Calls that ran in pieces, by the reason."""
        self._options = parse_options(options, None)
        self._update = update
        self._accumulate = accumulate
        self._due = 0
        """Calls since the last update."""
        self._lock = threading.RLock()
        fn = _detaching(loss_fn)
        given: dict[str, Any] = {"backend": cgpass, "options": _as_dict(options)}
        self._compiled = torch.compile(fn, fullgraph=True, **given)
        self._broken = torch.compile(fn, **given)
        self._broken_at: str | None = None
        """Why the loss is several graphs."""
        self._variants: weakref.WeakKeyDictionary[TrainingCall, _Whole | str] = (
            weakref.WeakKeyDictionary()
        )
        """What Dynamo compiled: whole steps, and why others are none."""
        self._met: _Met | None = None
        """A graph that this call ran in pieces, its inputs and outputs."""
        self._graphs = 0
        self._whole: _Whole | None = None
        """What this call ran as a whole."""
        self._why: str | None = None
        telemetry.add_step(self)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients before they were clipped in the last update; None without `max_norm`."""
        return self._update.grad_norm

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Run a step; with `accumulate`, the part of one.

        Returns:
            The loss, detached; with what else `loss_fn` returned, as a tuple. **Lifetime:** the caller's own.
        """
        with self._lock:
            before = here.step
            try:
                return self._call(batch, named, before)
            except BaseException:
                here.step = before
                mend(open_modes)
                raise

    def _call(self, batch: tuple[Any, ...], named: dict[str, Any], before: Step | None) -> Any:
        self.calls += 1
        self._why = self._why_pieces()
        self._update.fill_learning_rates()
        self._graphs, self._met, self._whole = 0, None, None
        here.step = self
        loss, *more = self._forward(batch, named)
        here.step = before
        if self._whole is not None:
            self.whole_calls += 1
        else:
            met, self._met = self._met, None
            self._run_pieces(loss)
            self._learn(met, loss)
            if self._options.driver != "none":
                self._note(self._why or _FIRST)
        return (loss.detach(), *more) if more else loss.detach()

    def flush(self) -> bool:
        """Update with what has accumulated since the last update; returns whether anything had."""
        with self._lock:
            due, self._due = self._due, 0
            if due:
                self._update.look()
                self._update.fill_learning_rates()
                self._update.run()
            return due > 0

    def explain(self) -> str:
        """How calls ran, and why not as one replay, a line each."""
        pieces = self.calls - self.whole_calls
        lines = [
            f"{self._name()}: {many(self.calls, 'call')}, {self.whole_calls} as a whole, {pieces} in pieces"
        ]
        lines += [f"  {number} in pieces: {why}" for why, number in self.in_pieces.most_common()]
        whole = (each for each in self._variants.values() if isinstance(each, _Whole))
        lines += [f"  {why}" for each in whole for why in each.reasons]
        return "\n".join(lines)

    def _name(self) -> str:
        fn = self.loss_fn
        return f"train_step of {getattr(fn, '__qualname__', type(fn).__qualname__)}"

    # ---- pieces

    def _forward(self, batch: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        if self._broken_at is None:
            try:
                return self._compiled(batch, named)
            except torch_private.not_one_graph() as error:
                if self._whole is not None:
                    raise
                lines = str(error).strip().splitlines()
                self._broken_at = lines[0] if lines else type(error).__name__
        self._why = f"the loss is not one graph: {self._broken_at}"
        return self._broken(batch, named)

    def _run_pieces(self, loss: torch.Tensor) -> None:
        scaler = self._update.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()
        self._due += 1
        if self._due == self._accumulate:
            self._due = 0
            self._update.run()
            self._update.look()  # optimizers make their state in the first step

    def _note(self, why: str) -> None:
        self.in_pieces[why] += 1
        if self.in_pieces[why] == 1 and why != _FIRST:
            level = logging.WARNING if self._options.on_skip == "warn" else logging.INFO
            log.log(level, "%s runs in pieces: %s", self._name(), why)

    def _why_pieces(self) -> str | None:
        """Why this call can't be a whole step, whatever Dynamo compiled for it."""
        new = self._update.look()
        if not fast.is_loaded:
            return (self.calls > 1 and native.loader.why_not) or _FIRST
        if self._options.driver == "none":
            return 'driver="none" turns graphs off'
        if self._accumulate > 1:
            return f"accumulate={self._accumulate}: gradients add up in pieces"
        return new or self._update.why_pieces()

    # ---- `training.Step`

    def note_graph(self, why: str) -> None:
        """See `training.Step`."""
        self._graphs += 1
        self._why = self._why or why

    def call(
        self,
        training: TrainingCall,
        args: tuple[Any, ...],
        run: Callable[[tuple[Any, ...]], Any],
    ) -> Any:
        """See `training.Step`."""
        self._graphs += 1
        variant = self._variants.get(training)
        if isinstance(variant, _Whole) and self._why is None:
            self._why = variant.why_not(args)
            if self._why is None:
                self._whole = variant
                return variant.run(args)
        returned = run(args)
        if variant is None:
            self._met = training, args, returned
        elif isinstance(variant, str):
            self._why = self._why or variant
        return returned

    def _learn(self, met: "_Met | None", loss: Any) -> None:
        """Find out whether the next call of this variant may be a whole step; the backward may be compiled only now."""
        if met is None:
            if not self._graphs:
                self._why = (
                    self._why or "Dynamo compiles nothing of it, or nothing in it requires grad"
                )
            return
        training, args, returned = met
        if self._graphs > 1:
            found: _Whole | str = "the loss is several graphs"
        elif not isinstance(loss, torch.Tensor) or not any(each is loss for each in returned):
            found = "the loss is not what the graph computes"
        else:
            found = _Whole.of(training, args, returned, loss, self._update, self._name())
        self._variants[training] = found
        if isinstance(found, str):
            self._why = self._why or found


def _as_dict(options: Mapping[str, Any] | Options | None) -> dict[str, Any]:
    """Options as `torch.compile` takes them."""
    return dataclasses.asdict(options) if isinstance(options, Options) else dict(options or {})


def _detaching(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """What is compiled; its code is its own, for Dynamo counts compilations of a code."""

    def loss_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        found = loss_fn(*args, **kwargs)
        if isinstance(found, tuple):
            loss, more = found
            return loss, pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, more)
        return (found,)

    name = f"loss_of_{next(_numbers)}"
    code = loss_of.__code__.replace(co_name=name)
    return types.FunctionType(code, loss_of.__globals__, name, None, loss_of.__closure__)


@dataclasses.dataclass
class _Rate:
    """A group's learning rate as a tensor."""

    group: dict[str, Any]
    tensor: torch.Tensor
    filled: float | None = None
    """What it was filled with; None where it is the user's own."""


class _RatesAsTensors(Mode):
    """Have groups read the tensors; fused optimizers, which could be captured, say that they can."""

    def __init__(self, rates: Sequence[_Rate]) -> None:
        super().__init__()
        self._rates = rates
        self._before: list[tuple[dict[str, Any], Any, Any]] = []

    def begin(self) -> None:
        self._before = [(r.group, r.group["lr"], r.group.get("capturable")) for r in self._rates]
        for rate in self._rates:
            rate.group["lr"] = rate.tensor
            if rate.tensor.is_cuda and rate.group.get("fused") and "capturable" in rate.group:
                rate.group["capturable"] = True

    def undo(self) -> None:
        for group, lr, capturable in self._before:
            group["lr"] = lr
            if "capturable" in group:
                group["capturable"] = capturable


class _NoGradientsAfter(Mode):
    """What a capture makes for `.grad` is no gradient: none is left there, however it ends."""

    def __init__(self, update: "_Update") -> None:
        super().__init__()
        self._update = update

    def undo(self) -> None:
        self._update.forget_gradients()


class _Update:
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
        self._rates: list[_Rate] = []
        """Of the groups, if all of them can be captured."""
        self.numbers: tuple[Any, ...] = ()
        """All that this call's update reads on the host, beside learning rates."""
        self._known: dict[tuple[Any, ...], None] = {}
        """Numbers of earlier calls."""
        self.looks = 0
        """How often the optimizers' tensors were others than before."""
        self._watched: tuple[Any, ...] | None = None
        """See `fast.are` and `fast.unchanged`."""
        self._why_never: str | None = None

    def groups(self) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        """Each group of parameters, with its optimizer."""
        return ((each, group) for each in self.optimizers for group in each.param_groups)

    def has(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Whether all of these are the optimizers'."""
        owned = {id(p) for _, group in self.groups() for p in group["params"]}
        return {id(leaf) for leaf in leaves} <= owned

    def run(self) -> None:
        """Clip, step and zero_grad."""
        scaler = self.scaler
        if self.max_norm is not None:
            if scaler is not None:
                for each in self.optimizers:
                    scaler.unscale_(each)
            params = [p for _, group in self.groups() for p in group["params"]]
            self.grad_norm = torch.nn.utils.clip_grad_norm_(params, self.max_norm)
        with _RatesAsTensors(self._rates):
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

    # ---- learning rates

    def fill_learning_rates(self) -> None:
        """Have the tensors be what the groups' learning rates are now."""
        for rate in self._rates:
            lr, device = rate.group["lr"], rate.group["params"][0].device
            if isinstance(lr, torch.Tensor) and lr.device == device:
                rate.tensor, rate.filled = lr, None
            elif rate.filled is None:
                rate.tensor = torch.tensor(float(lr), dtype=torch.float32, device=device)
                rate.filled = float(lr)
            elif lr != rate.filled:
                rate.filled = math.nan  # until it is
                rate.tensor.fill_(float(lr))
                rate.filled = float(lr)

    # ---- what changes

    def look(self) -> str | None:
        """Note the tensors of the optimizers, where they are others than before; returns why they are in no graph yet."""
        if self._watched is None or not fast.is_loaded:
            return self._look()
        lists, watch = self._watched
        if fast.unchanged(*watch) and all(fast.are(*known) for known in lists):
            return self._why_never
        return self._look() or _NEW_STATE

    def why_pieces(self) -> str | None:
        """Why the next update can't be part of a graph, as things stand in this call. To be asked after `look`."""
        for each in self.optimizers:
            if each._optimizer_step_pre_hooks or each._optimizer_step_post_hooks:
                return f"{type(each).__name__} has hooks on step()"
        if torch_private.has_global_optimizer_hooks():
            return "hooks are registered on every optimizer's step()"
        at = fast.first_watched(self.params)
        if at >= 0:
            grad = "has a gradient from before" if self.params[at].grad is not None else "has hooks"
            return f"parameter {at} of the optimizer {grad}"
        found = self._find_numbers()
        if isinstance(found, str):
            return found
        self.numbers = found
        if self.numbers not in self._known:
            last = next(reversed(self._known), ())
            self._know(self.numbers)
            pairs = zip(self.names(), last, self.numbers, strict=False)
            return _NEW_NUMBERS.format(", ".join([name for name, a, b in pairs if a != b][:3]))
        return None

    def _know(self, numbers: tuple[Any, ...]) -> None:
        self._known[numbers] = None
        if len(self._known) > _NUMBERS_KEPT:
            del self._known[next(iter(self._known))]

    def _look(self) -> str | None:
        self._watched = None
        self.looks += 1
        self.params = [p for _, group in self.groups() for p in group["params"]]
        self._why_never = self._find_why_never()
        used = [group for _, group in self.groups() if group["params"]]
        before = {id(rate.group): rate for rate in self._rates}
        new = (before.get(id(g)) or _Rate(g, torch.empty(0)) for g in used)
        self._rates = [] if self._why_never else list(new)
        mappings: list[Mapping[str, Any]] = []
        keys: list[str] = []
        values: list[Any] = []
        holders: list[Any] = []
        lists: list[tuple[Any, ...]] = []

        def watch(mapping: Mapping[str, Any], names: Sequence[str]) -> None:
            mappings.extend([mapping] * len(names))
            keys.extend(names)
            values.extend(mapping.get(name, ...) for name in names)

        for each in self.optimizers:
            watch(vars(each), ["state", "param_groups", "step", "zero_grad"])
            holders += [each.state, each.param_groups]
            for group in each.param_groups:
                watch(group, ["params", "fused", "foreach", "capturable", "differentiable"])
                holders += [group, group["params"]]
                lists.append((group["params"], [*range(len(group["params"]))], [*group["params"]]))
            for state in each.state.values():
                watch(state, list(state))
                holders.append(state)
        if self.scaler is not None:
            watch(vars(self.scaler), ["_scale", "_growth_tracker"])
        self.state = [value for value in values if isinstance(value, torch.Tensor)]
        sizes = array("q", map(len, holders)).tobytes()
        self._watched = lists, (mappings, keys, values, holders, sizes)
        numbers = self._find_numbers()
        if isinstance(numbers, tuple):
            self._know(numbers)
        return self._why_never

    def _find_why_never(self) -> str | None:
        """Why no update with these optimizers can be part of a graph."""
        for each, group in self.groups():
            if (why := _why_not_recordable(each, group)) is not None:
                return why
        if self.scaler is not None and (why := _why_not_scaled(self.scaler, self.optimizers)):
            return why
        tensors = [t for each in self.optimizers for s in each.state.values() for t in s.values()]
        places = {t.device for t in [*self.params, *tensors] if isinstance(t, torch.Tensor)}
        return f"the optimizer's tensors lie on {len(places)} devices" if len(places) > 1 else None

    def tensors(self) -> list[torch.Tensor]:
        """All that an update reads and writes beside parameters and gradients."""
        return [*self.state, *(rate.tensor for rate in self._rates)]

    def _find_numbers(self) -> tuple[Any, ...] | str:
        """All that an update reads on the host beside learning rates; or what of it is no number."""
        found: list[Any] = []
        for _, group in self.groups():
            for name, value in group.items():
                if name not in _NO_NUMBERS:
                    number = value if type(value) in _BY_VALUE else _by_value(value)
                    if number is ...:
                        return f"{name} of the optimizer is a {type(value).__name__}, not a number"
                    found.append(number)
        if (scaler := self.scaler) is not None:
            found += [scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval]
        backends = torch.backends
        found += [backends.cudnn.enabled, backends.cudnn.benchmark, backends.cuda.matmul.allow_tf32]
        found += [torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()]
        return tuple(found)

    def names(self) -> list[str]:
        """What each of `numbers` is, for messages."""
        found = [
            f"optimizer.param_groups[{n}]['{name}']"
            for n, (_, group) in enumerate(self.groups())
            for name in group
            if name not in _NO_NUMBERS
        ]
        if self.scaler is not None:
            found += [
                "scaler's growth_factor",
                "scaler's backoff_factor",
                "scaler's growth_interval",
            ]
        flags = ["cudnn.enabled", "cudnn.benchmark", "cuda.matmul.allow_tf32"]
        return [*found, *flags, "deterministic algorithms", "default dtype"]


_NO_NUMBERS: Final = frozenset({"params", "lr", "initial_lr"})


def _why_not_recordable(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str | None:
    cls = type(optimizer)
    if getattr(torch.optim, cls.__name__, None) is not cls:
        return f"{cls.__name__} is none of torch.optim's own optimizers"
    step = vars(optimizer).get("step")
    patched = step is not None and not hasattr(step, "_wrapped_by_lr_sched")
    if (
        patched
        or "zero_grad" in vars(optimizer)
        or not inspect.unwrap(cls.step).__module__.startswith("torch.optim.")
    ):
        return f"{cls.__name__}.step or zero_grad was replaced"
    if group.get("fused") and not isinstance(optimizer, _FUSED):
        return f"{cls.__name__} reads its learning rate on the host, with fused=True, too"
    if not (group.get("fused") or group.get("capturable")):
        fix = "fused=True" if "fused" in group else "capturable=True"
        if fix.partition("=")[0] not in group:
            return f"{cls.__name__} can't be captured; AdamW(fused=True) or SGD(fused=True) can"
        return f"{cls.__name__} reads the device in step(): make it with {fix}"
    if group.get("differentiable"):
        return f"{cls.__name__} has differentiable=True"
    if group.get("fused") and group.get("foreach"):
        return f"{cls.__name__} has both fused=True and foreach=True"
    return None


def _by_value(value: object) -> Any:
    """Sequences of numbers as tuples; `...` for what is no number."""
    if isinstance(value, (tuple, list)):
        found = tuple(map(_by_value, value))
        return ... if ... in found else found
    return value if isinstance(value, _BY_VALUE) else ...


def _why_not_scaled(scaler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    if type(scaler).__module__ not in ("torch.amp.grad_scaler", "torch.cuda.amp.grad_scaler"):
        return f"{type(scaler).__name__} is none of torch's own scalers"
    for each in optimizers:
        if not getattr(each, "_step_supports_amp_scaling", False):
            return f"the scaler asks the device whether {type(each).__name__} may step: fused=True leaves that to its kernels"
    return None


class _Whole:
    """A step of one variant that Dynamo compiled. See Note [A whole step]."""

    def __init__(
        self,
        training: TrainingCall,
        graphs: tuple[Any, ...],
        leaves: tuple[tuple[int, ...], list[torch.Tensor]],
        loss_at: int,
        update: _Update,
        name: str,
    ) -> None:
        """Nothing is recorded yet.

        Args:
            training: The graphs' caller.
            graphs: See `TrainingCall.graphs`.
            leaves: Which inputs are parameters that get gradients, and these.
            loss_at: Which output the loss is.
            update: Shared by all variants of a step.
            name: For messages.
        """
        self._training = weakref.ref(training)
        self._layout, forward, backward, _ = graphs
        self._forward: Executor = forward.executor
        self._backward: Executor = backward.executor
        self._positions, self._leaves = leaves
        self._trained = fast.requiring_grad(self._leaves)
        self._loss_at = loss_at
        self._update = weakref.ref(update)
        self._name = name
        self._looks = -1
        self._sizes: tuple[int, ...] = ()
        self._executor: Executor | None = None
        self._runner: PartitionRunner | None = None

    @classmethod
    def of(
        cls,
        training: TrainingCall,
        args: tuple[Any, ...],
        returned: list[Any],
        loss: torch.Tensor,
        update: _Update,
        name: str,
    ) -> "_Whole | str":
        """A variant's whole step, or why there is none.

        Args:
            training: What ran in pieces.
            args: Its inputs.
            returned: Its outputs.
            loss: One of these.
            update: Of the step.
            name: Of the step.
        """
        graphs = training.graphs
        if graphs is None:
            return "its backward is not compiled yet"
        layout, forward, backward, wanted = graphs
        if len(layout.differentiable) != 1:
            return f"{len(layout.differentiable)} results of the loss require grad; detach all but the loss"
        (loss_at,) = layout.differentiable
        if returned[loss_at] is not loss or loss.numel() != 1:
            return "the loss is no tensor of one element that requires grad"
        leaves = [args[n] for n in wanted]
        if not update.has(leaves) or len({*map(id, leaves)}) < len(leaves):
            return _FOREIGN
        for fn in (forward, backward):
            executor = getattr(fn, "executor", None)
            if executor is None:
                return "a part of it runs without CUDA graphs, or draws random numbers again in the backward"
            plan = executor.plan
            run: Any = plan.steps[0].run if len(plan.steps) == 1 else None
            if not isinstance(run, PartitionRunner) or not plan.is_one_partition:
                return "a part of it can't be captured, or reads a Python number that changes"
            if run.communicates:
                return "it communicates with other processes"
        return cls(training, graphs, (wanted, leaves), loss_at, update, name)

    def why_not(self, args: tuple[Any, ...]) -> str | None:
        """Why a call can't be a whole step."""
        training = self._training()
        if training is None or not training.is_plain(args):
            return "autograd is in a mode of its own in this call"
        if not fast.are(args, self._positions, self._leaves):
            return "parameters were replaced by others"
        if fast.requiring_grad(self._leaves) != self._trained:
            return "parameters were frozen"  # of which older versions of Dynamo say nothing
        update = self._update()
        if update is None or (update.looks != self._looks and not update.has(self._leaves)):
            return _FOREIGN
        self._looks = update.looks
        if self._runner is not None and self._runner.failure is not None:
            return f"capturing it failed: {self._runner.failure}"
        return None

    def run(self, args: tuple[Any, ...]) -> list[Any]:
        """Run a step; returns what the forward returns."""
        training, update = self._training(), self._update()
        assert training is not None
        assert update is not None
        layout = self._layout
        tensors = update.tensors()
        if self._sizes != (len(tensors), len(update.numbers)):
            self._make(tensors)
        executor, runner = self._executor, self._runner
        assert executor is not None
        assert runner is not None
        replays = runner.stats.replays
        with torch.no_grad():
            outputs = executor([*training.begin(args), *tensors, *update.numbers])
        if runner.stats.replays != replays:  # else operators said so themselves
            torch.autograd.graph.increment_version(self._leaves)
            torch.autograd.graph.increment_version(tensors)
            for each in update.optimizers:
                setattr(each, "_opt_called", True)  # noqa: B010  schedulers ask for it
        if update.max_norm is not None:
            update.grad_norm = outputs.pop()
        for n, dimensions in layout.dynamic:
            torch_private.mark_dynamic(outputs[n], dimensions)
        return outputs

    def _make(self, tensors: Sequence[torch.Tensor]) -> None:
        update = self._update()
        assert update is not None
        self._sizes = len(tensors), len(update.numbers)
        if self._runner is not None:
            self._runner.close()
        forward: Any = self._forward.plan.steps[0].run
        infos = [
            dataclasses.replace(info, kind=InputKind.STATIC, mutated=True, in_place=True)
            if n in self._positions
            else info
            for n, info in enumerate(forward.layout.infos)
        ]
        infos += [
            InputInfo(f"the optimizer's tensor {n}", InputKind.STATIC, mutated=True, in_place=True)
            for n, _ in enumerate(tensors)
        ]
        infos += [InputInfo(name, InputKind.SYMINT) for name in update.names()]
        options = forward.options
        if options.static_input_check != "rerecord":
            options = dataclasses.replace(options, static_input_check="rerecord")
        owner = forward.owner
        self._runner = PartitionRunner(
            self._body, tuple(infos), owner, options, name="whole step", opaque=forward.opaque
        )
        self._runner.name = self._name
        num_outputs = self._layout.num_returned + (update.max_norm is not None)
        visible = frozenset(range(num_outputs))
        plan = whole_plan(len(infos), num_outputs, self._runner, "captured_0", visible)
        self._executor = Executor(plan, owner, {"captured_0": f"cgpass: {self._name}"})

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why calls of it ran without a graph."""
        if self._runner is None:
            return ()
        run = telemetry.PartitionRun(self._runner.stats, (), self._runner.reasons)
        return tuple(map(str, run.reasons))

    def _body(self, args: list[Any]) -> list[Any]:
        """What is recorded, and runs plainly before that."""
        training, update = self._training(), self._update()
        assert training is not None
        assert update is not None
        layout, scaler = self._layout, update.scaler
        inputs = args[: layout.num_inputs]
        taken = {x.untyped_storage().data_ptr() for x in inputs if isinstance(x, torch.Tensor)}
        args.clear()
        with torch._C._DisableAutocast():
            outputs = list(_plain(self._forward)(inputs))
            returned = outputs[: layout.num_returned]
            saved = [*outputs[layout.checked], *outputs[layout.unchecked]]
            rest = outputs[layout.rest]
            outputs.clear()
            tangent = torch.ones_like(returned[self._loss_at])
            if scaler is not None:
                tangent = tangent * scaler._scale.to(tangent.dtype)
            call = [*rest, *saved, layout.tangents[0](tangent)]
            del rest, saved, tangent
            gradients = list(_plain(self._backward)(call))
        with _NoGradientsAfter(update):
            for n, leaf in zip(self._positions, self._leaves, strict=True):
                leaf.grad = _own_gradient(gradients[n], leaf, taken)
                gradients[n] = None
            update.run()
        return returned if update.grad_norm is None else [*returned, update.grad_norm]


def _plain(executor: Executor) -> Callable[[list[Any]], Sequence[Any]]:
    """What the one partition of a graph was compiled to."""
    run: Any = executor.plan.steps[0].run
    return run.fn


def _own_gradient(
    gradient: torch.Tensor | None, leaf: torch.Tensor, taken: set[int]
) -> torch.Tensor | None:
    """A gradient as autograd puts it into `.grad`: laid out as the parameter, in memory of its own.

    Source: torch/csrc/autograd/functions/accumulate_grad.h.
    """
    if gradient is None:
        return None
    address = gradient.untyped_storage().data_ptr()
    if gradient.stride() == leaf.stride() and address not in taken:
        taken.add(address)
        return gradient
    return torch.empty_like(leaf).copy_(gradient)
