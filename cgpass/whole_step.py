"""`train_step`: forward, loss, backward, clipping, optimizer and zero_grad as one replay.

Note [A whole step]
    The loss is compiled as ever, so Dynamo's guards cover the user's Python in each call, and nothing that it reads is
    frozen. Where Dynamo calls the forward graph, a step runs one recording instead: the forward's kernels, the
    backward's for a gradient of ones, and the optimizer's own `step()`. Where some of the loss can't be captured, the
    parts of forward and backward run in turn, without autograd, and the recording is that of the update. Else a call
    runs in pieces: forward, backward and optimizer one after the other, as the user would write them.

    The first call of each variant that Dynamo compiles goes in pieces, since optimizers make their state then, and
    tells whether the next ones may be whole (`_why_never`). What may change from call to call is looked at in each
    (`TrainStep._why_pieces`, `_Whole.why_not`). What else `step()` reads on the host is in the recording's key, with
    the places of the optimizer's tensors (`Update.read`); native code tells if those are as before.

    Learning rates are tensors while a step runs, in both ways, filled from what the groups have. So a schedule costs no
    recording, and both ways have the same bits. Only hooks on `step()`, which may change them, find the user's own.
"""

import dataclasses
import inspect
import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch
from torch.utils import _pytree as pytree

from cgpass import telemetry, torch_private
from cgpass.backend import cgpass, parse_options
from cgpass.compile.facts.input_info import InputInfo, InputKind
from cgpass.compile.plan import Argument, Single, whole_plan
from cgpass.compile.training import TrainingCall, here
from cgpass.errors import InputError, OptionError
from cgpass.options import Options
from cgpass.runtime import fast, native
from cgpass.runtime.changes import mend, new_lock, open_modes
from cgpass.runtime.executor import Executor
from cgpass.runtime.fast import taker
from cgpass.runtime.partition import PartitionRunner
from cgpass.telemetry import FIRST_CALL, RAISED
from cgpass.telemetry.reason import many
from cgpass.update import NoGradientsAfter, Update

log = logging.getLogger(__name__)

_FOREIGN: Final = "something else than the optimizer's parameters gets gradients; freeze, detach or give it to an optimizer of the step"
_IN_TURN: Final = "not all of the loss can be captured, see cgpass.explain(loss_fn, batch); the optimizer's step is a graph of its own"
_WRITES_NUMBERS: Final = (
    "the loss changes the optimizer's param_groups or flags; change them between two steps"
)
_WRITES_TENSORS: Final = "the loss writes a tensor of the optimizer; write it between two steps"
_COMMUNICATES: Final = "it communicates with other processes"
_WRAPPERS: Final = "torch/nn/parallel/distributed.py", "torch/distributed/fsdp/"
"""Files of DistributedDataParallel and FSDP, at which Dynamo stops (2.11 to 2.15)."""
_TWICE: Final = (
    "the loss takes gradients with create_graph=True, which torch.compile can't; it runs as in eager, and can be compiled "
    "with torch.func.grad"
)
_ITS_LINE: Final = "cgpass.explain(loss_fn, batch) names the line"
_TOO_OFTEN: Final = "it was compiled torch._dynamo.config.recompile_limit times; keep what changes the same, or make it a tensor"
_names = itertools.count()
_Args = tuple[Any, ...]
_Options = Mapping[str, Any] | Options | None


def train_step(
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    max_norm: float | None = None,
    scaler: Any = None,
    accumulate: int = 1,
    options: _Options = None,
) -> "TrainStep":
    """Turn a whole training step into a function that replays as one CUDA graph.

    Examples:
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        >>> def loss_fn(x, y):
        ...     return torch.nn.functional.mse_loss(model(x), y)
        >>> step = cgpass.train_step(loss_fn, optimizer, max_norm=1.0)
        >>> losses = [step(torch.ones(4, 8), torch.zeros(4, 1)) for _ in range(5)]
        >>> losses[0] > losses[-1], model.weight.grad
        (tensor(True), None)

    Args:
        loss_fn: A function or a module; the step passes its own arguments to it. It returns the loss, a tensor of one
            element, or the loss and something else, whose tensors the step returns detached.
        optimizer: One optimizer of torch.optim, or several. With `fused=True` or `capturable=True` its step is part of the
            graph; others run in pieces.
        max_norm: Clip gradients to this norm, over all optimizers' parameters (`clip_grad_norm_`).
        scaler: A `torch.amp.GradScaler`; each update updates it once.
        accumulate: Calls for one update. Gradients add up in `.grad`, and nothing is divided.
        options: As for `torch.compile(..., backend="cgpass")`.

    Returns:
        A function that runs a step. After an update `.grad` is None.

    Raises:
        OptionError: A bad value.
        InputError: `optimizer` or `scaler` is something else, or an optimizer's `step` needs a closure.
    """
    if not callable(loss_fn):
        raise InputError(f"loss_fn is a {type(loss_fn).__name__}: give a function or a module")
    optimizers = [*optimizer] if isinstance(optimizer, Sequence) else [optimizer]
    if not optimizers:
        raise InputError("optimizer is empty: give one optimizer or several")
    for each in optimizers:
        name = type(each).__name__
        if not isinstance(each, torch.optim.Optimizer):
            raise InputError(f"optimizer is a {name}, not a torch.optim.Optimizer")
        closure = inspect.signature(each.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise InputError(
                f"{name}.step() calls the loss itself (closure): write its loop by hand"
            )
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InputError(f"scaler is a {type(scaler).__name__}, not a torch.amp.GradScaler")
    if type(accumulate) is not int or accumulate < 1:
        raise OptionError(f"accumulate={accumulate!r}: must be a number of calls, 1 or more")
    is_number = isinstance(max_norm, (int, float)) and not isinstance(max_norm, bool)
    if max_norm is not None and not (is_number and max_norm > 0):
        raise OptionError(f"max_norm={max_norm!r}: must be a positive number, or None")
    scaler = scaler if scaler is not None and scaler.is_enabled() else None
    return TrainStep(loss_fn, Update(optimizers, max_norm, scaler), accumulate, options)


class TrainStep:
    """Runs training steps; made by `cgpass.train_step`.

    Examples:
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        >>> step = cgpass.train_step(lambda x: model(x).square().mean(), optimizer, max_norm=1.0)
        >>> losses = [step(torch.ones(4, 8)) for _ in range(5)]
        >>> step.later_calls, step.graph_calls, step.grad_norm > 0
        (4, 3, tensor(True))
        >>> step.calls, step.whole_calls, step.in_pieces["the first call of a variant"]
        (5, 4, 1)
        >>> step.flush()  # no call waits for others, as with `accumulate`
        False
        >>> print(step.explain())
        train_step of <lambda>: 5 calls, 4 as a whole, 1 in pieces
          1 in pieces: the first call of a variant
          one graph, recorded 1 time and replayed 3 times: ...
    """

    def __init__(
        self, loss_fn: Callable[..., Any], update: Update, accumulate: int, options: _Options
    ) -> None:
        self._name = f"train_step of {getattr(loss_fn, '__qualname__', type(loss_fn).__qualname__)}"
        self._counts = telemetry.StepCalls(self._name)
        given: Any = dataclasses.asdict(options) if isinstance(options, Options) else options or {}
        ours = given
        if isinstance(given, Mapping):  # torch takes out its own, which says what Dynamo guards
            ours = {name: value for name, value in given.items() if name != "guard_filter_fn"}
        self._options = parse_options(ours)
        self._update = update
        self._accumulate = accumulate
        self._due = 0
        """Calls since the last update."""
        self._lock = new_lock()
        self._fn = fn = _detaching(loss_fn)
        self._compiled = torch.compile(fn, fullgraph=True, backend=cgpass, options={**given})
        self._broken = torch.compile(fn, backend=cgpass, options={**given})
        self._why_broken: str | None = None
        """The cause of several graphs in the loss."""
        self._too_often = False
        """True if Dynamo compiles no more variants; those that it knows go on."""
        self._variants: weakref.WeakKeyDictionary[TrainingCall, _Whole | str]
        self._variants = weakref.WeakKeyDictionary()
        """Variants that Dynamo compiled: how each runs, or why in pieces."""
        finalizer: Any = weakref.finalize(self, torch_private.forget_compiled, fn.__code__)
        finalizer.atexit = False
        telemetry.registry.counts.append(self._counts)

    @property
    def calls(self) -> int:
        """All calls."""
        return self._counts.calls

    @property
    def whole_calls(self) -> int:
        """Calls that ran as a whole."""
        return self._counts.whole_calls

    @property
    def in_pieces(self) -> Counter[str]:
        """Calls that did not run as a whole, by the reason."""
        return self._counts.in_pieces

    @property
    def later_calls(self) -> int:
        """Calls but for the first of each variant, which runs in pieces, those that accumulate, and those that raised."""
        return self._counts.later_calls

    @property
    def graph_calls(self) -> int:
        """Calls that were one graph: those as a whole, but for warm-ups and others without the graph."""
        return self._counts.counted().get("replays", 0)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients before they were clipped in the last update; None without `max_norm`."""
        return self._update.grad_norm

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Run a step; with `accumulate`, the part of one.

        Returns:
            The loss, detached; with what else `loss_fn` returned, as a tuple. **Lifetime:** the caller's own.
        """
        if torch.compiler.is_dynamo_compiling():
            return _step_outside_dynamo(self, batch, named)
        with self._lock:
            before, has_grad = here.step, torch.is_grad_enabled()
            try:
                return self._call(batch, named, before)
            except BaseException:
                torch_private.set_grad_enabled(has_grad)
                self.in_pieces[RAISED] += 1
                here.step = before
                mend(open_modes)
                raise

    def _call(self, batch: _Args, named: dict[str, Any], before: Any) -> Any:
        self._counts.calls += 1
        call = _Call(self._variants, self._why_pieces())
        self._update.fill_learning_rates()
        here.step = call
        loss, *more = self._forward(call, batch, named)
        here.step = before
        if call.whole is None:
            if not isinstance(loss, torch.Tensor):
                raise InputError(
                    f"loss_fn returned a {type(loss).__name__}: return the loss, a tensor, or (loss, more)"
                )
            writes = self._update.changed_since_filled()  # what the loss wrote holds in this step
            self._run_pieces(loss)
            self._learn(call, loss, _WRITES_NUMBERS if writes else None)
        if call.whole is not None and call.whole.is_one:
            self._counts.whole_calls += 1
        else:
            self._note(call.why or (FIRST_CALL if call.whole is None else _IN_TURN))
        return (loss.detach(), *more) if more else loss.detach()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copies: of the loss there would be none."""
        raise InputError(
            f"{self._name} can't be copied or pickled: copy what it trains, copy.deepcopy((module, optimizer)), "
            "and call cgpass.train_step again"
        )

    def flush(self) -> bool:
        """Update with what has accumulated since the last update; returns whether anything had."""
        with self._lock:
            due = self._due
            if due:
                self._update.look()
                self._update.fill_learning_rates()
                self._due = 0  # an update is not to be made twice
                self._update.run()
            return due > 0

    def explain(self) -> str:
        """Say how calls ran, why not as one replay, and what the graphs read, a line each."""
        return self._counts.explain()

    def _note(self, why: str) -> None:
        self.in_pieces[why] += 1
        if self.in_pieces[why] == 1 and why != FIRST_CALL and self._options.driver != "none":
            level = logging.WARNING if self._options.on_skip == "warn" else logging.INFO
            log.log(level, "%s runs in pieces: %s", self._name, why)

    # ---- pieces

    def _forward(self, call: "_Call", batch: _Args, named: dict[str, Any]) -> _Args:
        is_off = not self._variants and torch_private.is_off()
        if is_off or torch_private.num_dispatch_modes():  # Dynamo compiles nothing, and raises
            off = "TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE turns torch.compile off"
            call.why = off if is_off else "a TorchDispatchMode is on; leave its block for the step"
            return self._fn(batch, named)
        self._too_often = self._too_often and torch_private.has_compiled(self._fn.__code__)
        why = self._why_broken
        if why is None and not self._too_often:
            try:
                return self._compiled(batch, named)
            except torch_private.not_one_graph() as error:
                if call.whole is not None:
                    raise
                self._too_often = isinstance(error, torch_private.not_one_graph()[-1])
                if not self._too_often:
                    first = next(iter(str(error).strip().splitlines()), "")
                    why = f"the loss is not one graph: {first}; {_ITS_LINE}"
                    why = _COMMUNICATES if any(file in str(error) for file in _WRAPPERS) else why
        call.why = why or call.why
        if why is self._why_broken:
            return self._broken(batch, named)
        # If the loss raises, its next call may be one graph: Dynamo must not come to know it as several before.
        with torch_private.WatchesForTwice() as watch:
            found = self._fn(batch, named)
        if watch.found:  # a compiled one would raise
            call.why = why = _TWICE
            self._broken = self._fn
        self._why_broken = why
        return found

    def _run_pieces(self, loss: torch.Tensor) -> None:
        scaler = self._update.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()
        self._due += 1
        if self._due == self._accumulate:
            self._due = 0
            params = self._update.params
            before = sum([parameter._version for parameter in params])
            self._update.run()
            self._update.counts_writes = sum([p._version for p in params]) != before
            self._update.look()  # optimizers make their state in the first step

    def _why_pieces(self) -> str | None:
        """Say why this call can't be a whole step, whatever Dynamo compiled for it."""
        why = self._update.look()
        if self._options.driver == "none":
            return 'driver="none" turns graphs off'
        if not fast.is_loaded:
            known = self.calls > 1 and torch_private.has_compiled(self._fn.__code__)
            return (native.loader.why_not if known else None) or FIRST_CALL
        if self._accumulate > 1:
            return f"accumulate={self._accumulate}: gradients add up in pieces"
        if torch_private.has_default_saved_tensors_hooks():
            return "hooks on saved tensors are set; leave their block for the step"
        if torch_private.has_function_modes():
            return "a TorchFunctionMode is on; leave its block for the step"
        return why or self._update.why_pieces()

    def _learn(self, call: "_Call", loss: torch.Tensor, found: str | None) -> None:
        """Find out which way the next call of this variant may go; its backward may be compiled only now."""
        if self._too_often:
            call.why = call.why or _TOO_OFTEN
        elif call.met is None and not call.graphs:
            call.why = (
                call.why or "Dynamo compiled none of the loss, or nothing in it requires grad"
            )
        if call.met is None or self._too_often:
            return
        training, args, returned = call.met
        found = "the loss is several graphs" if call.graphs > 1 else found
        found = found or _why_never(training, args, returned, loss)
        self._variants[training] = variant = found or _Whole(
            training, args, self._update, self._name
        )
        if isinstance(variant, _Whole):
            self._counts.variants.append(variant.counts())
        call.why = call.why or found


@torch_private.outside_dynamo
def _step_outside_dynamo(step: TrainStep, batch: _Args, named: dict[str, Any]) -> Any:
    return step(*batch, **named)


@dataclasses.dataclass(slots=True)
class _Call:
    """One call of a step, for the graphs that Dynamo comes to in it. See `training.here`."""

    variants: "weakref.WeakKeyDictionary[TrainingCall, _Whole | str]"
    why: str | None
    """The reason that it runs in pieces, as far as that is known."""
    graphs: int = 0
    whole: "_Whole | None" = None
    """The variant that it ran as a whole, or in turn."""
    met: tuple[TrainingCall, _Args, list[Any]] | None = None
    """A graph that it ran in pieces and nobody knows yet, its inputs and outputs."""

    def note_graph(self, why: str) -> None:
        """See `training.here`."""
        self.graphs += 1
        self.why = self.why or why

    def call(self, training: TrainingCall, args: _Args, run: Callable[[_Args], Any]) -> Any:
        """See `training.here`."""
        self.graphs += 1
        variant = self.variants.get(training)
        if isinstance(variant, _Whole) and self.why is None:
            self.why = variant.why_not(training, args)
            if self.why is None:
                self.whole = variant
                return variant.run(training, args)
        returned = run(args)
        if variant is None:
            self.met = training, args, returned
        elif isinstance(variant, str):
            self.why = self.why or variant
        return returned


def _detaching(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the loss for compilation, in code of its own, for Dynamo counts compilations of a code."""

    def loss_of(args: _Args, kwargs: dict[str, Any]) -> _Args:
        found = loss_fn(*args, **kwargs)
        if not (isinstance(found, tuple) and len(found) == 2):
            return (found,)
        loss, more = found
        if not isinstance(loss, torch.Tensor):
            return (loss,)
        # A copy: a graph that returns a tensor and a detach() of it, as of `loss, {"loss": loss.detach()}`, is no plain one.
        return loss.clone(), pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, more)

    loss_of.__code__ = loss_of.__code__.replace(co_name=f"loss_of_{next(_names)}")
    return loss_of


def _why_never(
    training: TrainingCall, args: _Args, returned: list[Any], loss: torch.Tensor
) -> str | None:
    """Say why all calls of a graph that Dynamo compiled run in pieces, judged by one that did."""
    graphs = training.graphs
    if graphs is None:
        return "its backward is not compiled yet"
    layout, forward, backward, _ = graphs
    if len(args) != layout.num_inputs:
        return f"Dynamo compiled parameters into the graph, for instance because {_WRITES_NUMBERS}"
    if len(layout.differentiable) != 1:
        return f"{len(layout.differentiable)} results of the loss require grad; detach all but the loss"
    if returned[layout.differentiable[0]] is not loss or loss.numel() != 1:
        return "the loss is not a tensor of one element that requires grad"
    for fn in (forward, backward):
        if not isinstance(fn, Executor):
            return "a part of it runs without CUDA graphs, or draws random numbers again in the backward"
        runners = _runners(fn)
        if not runners:
            return "none of the loss is captured; cgpass.explain(loss_fn, batch) says why"
        if any(runner.communicates for runner in runners):
            return _COMMUNICATES
    return None


def _runners(executor: Executor) -> list[PartitionRunner]:
    return [step.run for step in executor.plan.steps if isinstance(step.run, PartitionRunner)]


class _Whole:
    """A step of one variant that Dynamo compiled. See Note [A whole step]."""

    def __init__(self, training: TrainingCall, args: _Args, update: Update, name: str) -> None:
        """Nothing is recorded yet."""
        graphs: Any = training.graphs
        self._layout, self._forward, self._backward, self._positions = graphs
        part = _runners(self._forward)[0]
        first, second = Single.of(self._forward.plan), Single.of(self._backward.plan)
        self.is_one = first is not None and second is not None
        """True if one graph can hold all of it."""
        self._arguments: Mapping[int, Argument] = {}
        """Inputs that are scalars on the CPU, and are put on the device before."""
        self._take_leaves = taker(self._positions)
        self._contents: tuple[list[Any], bytes] = fast.contents(
            self._take_leaves(args), (), fast.NOTHING
        )
        self._has_slices = any(map(torch_private.has_gaps, self._contents[0]))
        self._places = b""
        """Of what the loss writes, and of learning rates."""
        self._update = update
        self._looks = -1
        leaves: Sequence[int] = self._positions
        if first is not None and second is not None:
            infos, self._arguments = first.infos(), first.arguments
            self._forward, self._backward = first.alone(), second.alone()
            update.known_as.update((id(args[n]), infos[n].name) for n in leaves)
        else:
            gradient = InputInfo("a gradient", InputKind.POOLED, mutated=True)
            infos = [gradient, InputInfo("a parameter", InputKind.STATIC)]
            infos = [info for info in infos for _ in leaves]
            leaves = range(len(leaves), 2 * len(leaves))
        for n in leaves:
            infos[n] = dataclasses.replace(
                infos[n], kind=InputKind.STATIC, mutated=True, in_place=True
            )
        infos.append(InputInfo("the optimizer's tensors", InputKind.IN_PLACE))
        infos.append(InputInfo("what the optimizer reads, or its place", InputKind.SYMINT))
        options = dataclasses.replace(part.options, static_input_check="rerecord")
        opaque = self.is_one and part.opaque
        self._runner = PartitionRunner(
            self._body, infos, part.owner, options, name="whole step", opaque=opaque
        )
        self._runner.name = name
        num_outputs = self.is_one * self._layout.num_returned + (update.max_norm is not None)
        visible = frozenset(range(num_outputs))
        plan = whole_plan(len(infos), num_outputs, self._runner, "captured_0", visible)
        self._executor = Executor(plan, part.owner, {"captured_0": f"cgpass: {name}"})

    @property
    def _leaves(self) -> list[torch.Tensor]:
        """Tensors that get gradients in this call."""
        return self._contents[0]

    def why_not(self, training: TrainingCall, args: _Args) -> str | None:
        """Say why a call runs in pieces; None if it need not."""
        update = self._update
        if not training.is_plain(args):
            return "autograd is in a mode of its own in this call"
        contents = fast.contents(self._take_leaves(args), (), self._contents)
        if contents[0] is not self._contents[0]:
            self._looks = -1
        self._contents = contents
        written = [args[n] for n in self._layout.written]
        if written:
            rates = [rate.tensor for rate in update.rates]
            places = fast.contents([*written, *rates], (), fast.NOTHING)[1]
            if places != self._places:
                self._looks, self._places = -1, places
        if 0 in fast.requiring_grad(self._leaves):
            return "a parameter was frozen, which torch 2.11 does not notice; call torch.compiler.reset()"
        if update.looks != self._looks:
            if not update.has(self._leaves):
                return _FOREIGN
            if update.owns(written):
                return _WRITES_TENSORS
        self._looks = update.looks
        if self._runner.failure is not None:
            return f"capturing it failed: {self._runner.failure}"
        return None

    def run(self, training: TrainingCall, args: _Args) -> list[Any]:
        """Run a step; returns what the forward returns."""
        update, stats = self._update, self._runner.stats
        replays = stats.replays
        update.grad_norm = None  # the step itself must not hold what a replay writes
        # It was on; where this raises, the step sets it again.
        torch_private.set_grad_enabled(False)
        inputs, outputs = training.begin(args), list[Any]()
        for n, put in self._arguments.items():
            (inputs[n],) = put([inputs[n]])
        if not self.is_one:
            outputs, inputs = self._gradients(inputs)
            inputs += self._leaves
        inputs += update.read()
        outputs += self._executor(inputs)
        torch_private.set_grad_enabled(True)
        if update.counts_writes and stats.replays != replays:  # else operators said so themselves
            torch.autograd.graph.increment_version(self._leaves)
            torch.autograd.graph.increment_version(update.state)
        if update.max_norm is not None:
            update.grad_norm = outputs.pop()
        for n, dimensions in self._layout.dynamic:
            torch_private.mark_dynamic(outputs[n], dimensions)
        return outputs

    def counts(self) -> telemetry.Variant:
        """Return its counts, and what its graph reads."""
        runner, own = self._runner, len(self._update.state) + len(self._update.rates)
        layout = runner.layout
        reads = (
            f"reads {many(len(layout.parameters), 'parameter')} and {many(own, 'tensor')} of the optimizer in place, "
            f"copies {many(len(layout.copied), 'input')}"
        )
        return telemetry.Variant(runner.stats, runner.notes, runner.reasons, self.is_one, reads)

    def _body(self, args: list[Any]) -> list[Any]:
        """Run the step, or the update alone: before it is recorded, and while it is."""
        update = self._update
        inputs = args[: self._layout.num_inputs if self.is_one else len(self._leaves)]
        args.clear()
        returned, gradients = self._gradients(inputs) if self.is_one else ([], inputs)
        with NoGradientsAfter(update):
            for leaf in reversed(self._leaves):
                leaf.grad = gradients.pop()
            update.run()
        return returned if update.max_norm is None else [*returned, update.grad_norm]

    def _gradients(self, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return what the forward returns, and gradients as autograd would put them into `.grad`."""
        layout, scaler = self._layout, self._update.scaler
        with torch_private.autocast_off():
            outputs = self._forward(inputs)
            returned = outputs[: layout.num_returned]
            saved = [*outputs[layout.checked], *outputs[layout.unchecked]]
            rest = outputs[layout.rest]
            outputs.clear()
            tangent = torch.ones_like(returned[layout.differentiable[0]])
            if scaler is not None:
                tangent = tangent * torch_private.scale_of(scaler).to(tangent.dtype)
            call = [*rest, *saved, layout.tangents[0](tangent)]
            del rest, saved, tangent
            gradients = self._backward(call)
        found: list[Any] = []
        for n, leaf in zip(self._positions, self._leaves, strict=True):
            found.append(_own_gradient(gradients[n], leaf, self._has_slices))
            gradients[n] = None
        return returned, found


def _own_gradient(gradient: torch.Tensor, leaf: torch.Tensor, may_be_slice: bool) -> torch.Tensor:
    """A gradient as autograd puts it into `.grad`: laid out as the parameter, but contiguous where that is a slice.

    Its memory is its own: see `OwnGradients`.

    Source: torch/csrc/autograd/functions/accumulate_grad.h.
    """
    if may_be_slice and torch_private.has_gaps(leaf):
        return gradient.contiguous()
    if gradient.stride() == leaf.stride():
        return gradient
    return torch.empty_like(leaf).copy_(gradient)
