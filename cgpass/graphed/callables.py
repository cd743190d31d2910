"""The functions that `make_graphed_callables` returns, and that graphed modules call."""

import contextlib
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from cgpass import telemetry, torch_private
from cgpass.errors import CGPassError, GraphedBackwardError, HookError, InputError
from cgpass.graphed.binding import Binding
from cgpass.graphed.modules import Statics, Target
from cgpass.graphed.options import GraphedOptions, Hooks, run_hook
from cgpass.graphed.pair import Call, Key, Pair
from cgpass.runtime import fast
from cgpass.runtime.changes import mend, open_modes
from cgpass.runtime.failures import random_state_kept
from cgpass.runtime.owner import Owner
from cgpass.telemetry import ByHand

log = logging.getLogger(__name__)


_PENDING: Final = "earlier calls wait for their backward"
_REORDERED: Final = "backwards came in another order than recorded"
_FREED: Final = "recordings were freed, by reset(), a failure, or calls of a second thread"
_CHANGES: Final = (
    "parameters or buffers moved; write into them in place (copy_)",
    "other parameters require gradients",
    "a flag among the arguments changed",
)
"""Causes of one more recording, by the part of the key that differs from one like it."""
_splitting: weakref.WeakSet["GraphedFunction"] = weakref.WeakSet()
"""Those whose backwards leave gradients of weights for later."""


@contextlib.contextmanager
def prepared(options: GraphedOptions, device: torch.device) -> Iterator[None]:
    """A block for warm-ups and captures, after which random number states are as before."""
    tracker = options.rng_tracker
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autograd.set_detect_anomaly(False),  # which would read data in a capture
        torch_private.no_parametrize_cache(),  # which would keep a weight that a warm-up computed, and its graph
        torch_private.no_outer_saved_tensors_hooks(),  # a checkpoint's, which expects what a replay saves
        random_state_kept(device, [] if tracker is None else list(tracker.generators.values())),
    ):
        try:
            yield
        except BaseException:
            # before random states are put back, for a capture that broke off has others
            mend(open_modes)
            raise


class GraphedFunction:
    """Runs one callable from its recordings, or without a graph where that would be wrong: see `_why_plain`."""

    statics: Statics

    def __init__(
        self,
        target: Target,
        binding: Binding,
        hooks: Hooks | None,
        options: GraphedOptions,
        owner: Owner | None,
    ) -> None:
        self.name = self.__name__ = self.__qualname__ = target.name
        self.refusal = target.refusal
        self.ungraphed: Callable[..., Any] = target.run
        """Runs the callable without a graph."""
        self.stats = ByHand(name=target.name, driver=options.driver)
        """Counts of calls, recordings and replays."""
        telemetry.registry.counts.append(self.stats)
        self.binding, self.hooks, self.options = binding, hooks, options
        self.with_grad = torch.is_grad_enabled()
        """True if a backward is recorded where results require grad."""
        self.makes_weight_grads = target.backward_dw
        """Makes the gradients that the backward leaves out, of weights: fills their `.grad`, or adds to `main_grad`."""
        self.always_leaves_some = target.says_delays
        """True if the module says so itself."""
        self.due: deque[Call | None] = deque()
        """Calls whose backward ran, but not yet what was split off, oldest first; None for one without a graph."""
        self.leaves_nothing: dict[tuple[bool, ...], str | None] = {}
        """Which parameters required gradients where a warm-up's backward left none out, and what `backward_dw` raised there."""
        self._target = target
        self._owner = owner
        """Makes the recordings; None to run without a graph always."""
        off, none = (
            'driver="none" turns graphs off',
            "modules and samples are on a device without graphs",
        )
        self._no_graph = off if options.driver == "none" else none
        self._told: set[str] = set()
        self._pairs: dict[Key, list[Pair]] = {}
        self._num_left = options.max_rerecords
        """Recordings that it may still make."""
        self._refused: dict[Key, str] = {}
        """Keys for which nothing is recorded, and the cause."""
        self._failed: dict[Key, str] = {}
        """Failures that may have been chance: the same once more is a refusal."""
        self._in_hook = False
        self._settings = self._settings_now()
        self._states: dict[str, torch.Generator] = {}
        """States of the tracker that recordings draw from."""
        self.find_statics()
        if self.makes_weight_grads is not None:
            _splitting.add(self)
        if owner is not None:
            owner.add(self._free, self._free)

    def find_statics(self) -> None:
        """Look for parameters and buffers, once more when modules have other members than they had."""
        self._close_pairs()
        target = self._target
        self.statics = Statics(target.modules, self.binding.device, self.name, target.around)

    def run_hook(self, name: str, *args: Any) -> None:
        """Run a capture-time hook."""
        self._in_hook = True
        run_hook(self.hooks, name, self._target.given, *args)
        self._in_hook = False

    def tell(self, what: str) -> None:
        """Log once what makes calls slower than they could be."""
        if what not in self._told:
            self._told.add(what)
            log.warning("%s %s", self.name, what)

    def add(self, pair: Pair) -> None:
        """Take a recording."""
        known = self._pairs.get(pair.key, ())
        self._pairs[pair.key] = [*(each for each in known if not each.closed), pair]
        self._states = self._states_now()

    # ---- a call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, with arguments structured as the sample's.

        Returns:
            What the callable returns. **Lifetime:** the caller's own; gradients are, too.

        Raises:
            InputError: The arguments don't fit the sample.
        """
        if torch_private.is_exporting():
            return self.ungraphed(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return _outside_dynamo(self, args, kwargs)
        has_grad = torch.is_grad_enabled()
        try:
            return self._call(args, kwargs)
        except BaseException:
            mend(open_modes)
            torch_private.set_grad_enabled(has_grad)
            raise

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner = self._owner
        self.stats.calls += 1
        if owner is None or owner.closed or owner.driver.is_capturing():
            why = self._no_graph if owner is None else "it was closed"
            self.count_plain(why if owner is None or owner.closed else "a capture of yours")
            return self._run_plainly(args, kwargs)
        why = self._why_plain()
        tensors, flags = (why, ()) if why else self.binding.bind(args, kwargs)
        if isinstance(tensors, str):
            why = tensors
        else:
            with owner.lock:
                owner.enter_call()
                pair, members = self._pair(owner, flags)
                if isinstance(pair, str):
                    why = pair
                else:
                    tensors += members
                    why = pair.why_not(tensors)
                    if why is None:
                        return pair.structure.build(pair.run(tensors))
        self.note_plain(why)
        return self._run_plainly(args, kwargs)

    def trained(self) -> tuple[bool, ...]:
        """Tell which parameters and buffers require a gradient."""
        return tuple(bool(getattr(each, "requires_grad", False)) for each in self.statics.held())

    def has_frozen(self) -> bool:
        """Tell if some of its parameters require no gradient."""
        held = self.statics.held()
        return any(isinstance(p, torch.nn.Parameter) and not p.requires_grad for p in held)

    def leaves_gradients_out(self) -> bool:
        """Tell if each backward leaves some to `backward_dw`, with parameters as they are."""
        if self.makes_weight_grads is None:
            return False
        trained = self.trained()
        return any(trained) and trained not in self.leaves_nothing

    def _run_plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run without a graph; each backward takes its turn among those that `backward_dw` completes."""
        result = self.ungraphed(*args, **kwargs)
        if not self.leaves_gradients_out():
            return result
        due, tasks = self.due, {-1}  # a result that the module keeps would keep all of this

        def begins(_: Any) -> None:
            if (task := torch_private.graph_task()) not in tasks:
                tasks.add(task)
                due.append(None)

        known = {id(each) for each in pytree.tree_leaves((args, kwargs))}
        for each in pytree.tree_leaves(result):
            if isinstance(each, torch.Tensor) and id(each) not in known:
                # a view that is written in place gets another node
                nodes: list[Any] = [each.grad_fn, getattr(each._base, "grad_fn", None)]
                for node in filter(None, nodes):
                    node.register_prehook(begins)
        return result

    def _settings_now(self) -> tuple[Any, ...]:
        """Return the settings around a call that a graph would freeze."""
        tracker, kind = self.options.rng_tracker, self.binding.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return dtype, tracker and tracker.current

    def _states_now(self) -> dict[str, torch.Generator]:
        """Return what the graphs draw from, besides the default states."""
        tracker = self.options.rng_tracker
        return {} if tracker is None else dict(tracker.generators)

    def _why_plain(self) -> str | None:
        """Say why settings and modules, as they are, forbid a replay; None if they don't."""
        if _is_watched():
            return (
                "a transform, a tracer or a mode of torch's is active, and would not see a replay"
            )
        if self._settings_now() != self._settings:
            return "autocast, or the fork of its rng_tracker, is another than when it was made (make it inside the same one)"
        if self._pairs and not self._states.items() <= self._states_now().items():
            return "states of its rng_tracker were replaced (reset() makes it record again)"
        if torch.is_grad_enabled() and not self.with_grad:
            return "it was recorded under torch.no_grad()"
        if not (self._pairs or self._refused):
            try:
                self.find_statics()
            except InputError as error:
                return str(error).rstrip(".")
        elif not self.statics.unchanged():
            changes = self.statics.changes()
            return f"{changes} changed since it was recorded (reset() makes it record again)"
        return None

    def _pair(
        self, owner: Owner, flags: tuple[bool, ...], *, may_record: bool = True
    ) -> tuple[Pair | str, list[torch.Tensor]]:
        """The pair to be replayed, or why there is none; and parameters and buffers as they are."""
        try:
            now = self.statics.now()
            key = self.statics.layouts(now), fast.requiring_grad(now), flags
        except (KeyError, TypeError, AttributeError, RuntimeError):
            return "a parameter or buffer was removed, or is no dense tensor any more", []
        pairs = self._pairs.get(key, ())
        for pair in pairs:
            if pair.is_free():
                return pair, pair.take(now)
        why = self._refused.get(key)
        if why is None and (why := self._why_never(now)) is not None:
            why = self._failed.get(key, why)
        if why is None and may_record:
            why = self._record_again(owner, key)
            if why is None:
                # a first run may make some, and where hooks had them, this call's own may never be
                return self._pair(owner, flags, may_record=False)
        return why or "capture-time hooks move parameters to other addresses than calls use", []

    def _why_never(self, now: list[torch.Tensor]) -> str | None:
        """Say why nothing is recorded, whatever it is for; None if that may be tried."""
        if self._num_left <= 0:
            return "it was recorded again as often as max_rerecords allows"
        if any(tensor.grad_fn is not None for tensor in now):
            # They lie elsewhere each time.
            return "parameters are computed in each call (functional_call)"
        if self.makes_weight_grads is not None:
            # warm-ups would complete that one: modules keep what is due themselves, some for several layers
            for each in _splitting:
                if any(call is None or call.is_plain for call in each.due):
                    return f"call {each.name}.backward_dw() first: a backward that ran without a graph lacks it"
        return None

    def count_plain(self, why: str) -> None:
        """Count a call, or a backward, that runs without a graph."""
        self.stats.plain_calls += 1
        self.stats.why[f"without a graph: {why}"] += 1

    def note_plain(self, why: str) -> None:
        """Count a call that runs without a graph, and say why."""
        self.count_plain(why)
        self.tell(f"runs without a graph: {why}.")

    # ---- recording again

    def _record_again(self, owner: Owner, key: Key) -> str | None:
        """Record for parameters elsewhere, other flags, or beside a pending call; returns why that can't be."""
        self._num_left -= 1
        cause = _FREED if self.stats.recordings else None
        if self._pairs:
            others = [[a != b for a, b in zip(known, key, strict=True)] for known in self._pairs]
            nearest, beside = min(others, key=sum), self._pairs.get(key, ())
            cause = _PENDING if any(not pair.closed for pair in beside) else _REORDERED
            if True in nearest:
                cause = _CHANGES[nearest.index(True)]
        pair = Pair(self, owner, key[-1])
        owner.driver.prepare_thread()
        hooked = self.statics.left_in_place() if self.hooks else contextlib.nullcontext()
        try:
            with hooked, prepared(self.options, owner.driver.device):
                pair.warm_up(1)
                pair.record_forward()
                pair.record_backward()
        except BaseException as error:
            pair.close()
            if self._in_hook or isinstance(error, HookError) or not isinstance(error, Exception):
                self._in_hook = False
                raise
            # whatever it is, the call itself may run, or raise it
            mend(open_modes)
            why = (str(error).strip().splitlines() or [""])[0].rstrip(".")
            why = why if isinstance(error, CGPassError) else f"{type(error).__name__}: {why}"
            if self._failed.get(key) == why:
                self._refused[key] = why
            self._failed[key] = why  # once may be chance
            return why
        self.add(pair)
        if cause is not None:
            self.stats.rerecordings += cause is not _FREED
            self.stats.why[f"recorded: {cause}"] += 1
            log.info("%s recorded again: %s", self.name, cause)
        return None

    # ---- end

    def _close_pairs(self) -> None:
        for pair in [pair for pairs in self._pairs.values() for pair in pairs]:
            pair.close()
        self._pairs.clear()

    def _free(self) -> None:
        self._close_pairs()
        self._num_left = self.options.max_rerecords + 1
        self._refused.clear()
        self._failed.clear()
        self._told.clear()
        self.leaves_nothing.clear()

    def reset(self) -> None:
        """Free the graphs and their memory. The next call records again, capture-time hooks included."""
        if self._owner is not None:
            with self._owner.lock:
                self._free()

    def close(self) -> None:
        """Free the graphs and their memory. Calls made afterwards run without a graph."""
        self.reset()
        self._owner, self._no_graph = None, "it was closed"

    def __reduce__(self) -> Any:
        """Copies and pickles are of the callable alone."""
        return _itself, (self.ungraphed,)

    def backward_dw(self) -> None:
        """Compute the weights' gradients that the oldest backward left out, and add them to `.grad`.

        A backward that ran without a graph is the callable's own to complete.

        Raises:
            GraphedBackwardError: It raised when it was recorded: nothing was left to it.
        """
        error = None if self.due else self.leaves_nothing.get(self.trained())
        if error is not None:
            raise GraphedBackwardError(
                f"{self.name}: its backward_dw() raised {error} when it was recorded, so it is in no graph. Make it work there, "
                "and call reset()."
            )
        call = self.due.popleft() if self.due else None
        if call is not None:
            assert call.pair is not None
            call.pair.run_weight_grads(call)
        elif self.makes_weight_grads is not None:
            self.makes_weight_grads()


@torch_private.outside_dynamo
def _outside_dynamo(fn: GraphedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)


def _is_watched() -> bool:
    """Tell whether something is on that would not see a replay."""
    return bool(
        torch_private.in_functorch()
        or torch_private.in_forward_ad()
        or torch_private.num_dispatch_modes()
        or torch_private.has_function_modes()
        or torch_private.is_jit_traced()
        or torch_private.uses_compiled_autograd()
    )


def _itself(plain: Any) -> Any:
    return plain
