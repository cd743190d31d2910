"""The functions that `make_graphed_callables` returns, and that graphed modules call."""

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import torch

from cgpass import torch_private
from cgpass.graphed.pair import Pair, in_place
from cgpass.graphed.statics import Statics
from cgpass.graphed.warmup import Pass, prepared
from cgpass.runtime import fast
from cgpass.runtime.changes import mend, open_modes
from cgpass.runtime.owner import Owner

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

Key = tuple[Statics, bytes, bytes]
"""Where parameters and buffers are found, where they lie, and which of them require grad."""


class Group:
    """The callables of one `make_graphed_callables`; a member of the owner of their recordings."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.members: list[Callable[[], None]] = []
        """Functions that free the recordings of each callable."""
        owner.add(self)

    def close(self) -> None:
        """Free every recording."""
        for free in self.members:
            free()
        if self.owner.closed:
            self.members.clear()

    forget_recordings = close

    def forget_failures(self) -> None:
        """Nothing to do: what a callable has used up goes with its recordings."""


class GraphedFunction:
    """Runs one callable from its recordings, or without a graph where that would be wrong: see `_why_plain`."""

    def __init__(self, description: Pass, group: Group | None) -> None:
        """Args: description: what is called. group: what records; None to run without a graph always."""
        self._pass = description
        self._group = group
        self.ungraphed: Any = description.run
        """What runs the callable without a graph."""
        self.stats = description.stats
        """Counts of calls, recordings and replays."""
        self._pairs: dict[Key, list[Pair]] = {}
        self._last: Key | None = None
        self._num_rerecords = 0
        self._device_type = "cpu" if group is None else group.owner.driver.device.type
        self._settings = self._settings_now()
        self.__name__ = description.name
        if group is not None:
            group.members.append(self._free)

    def add(self, pair: Pair) -> None:
        """Take a recording."""
        key = pair.statics, pair.key, fast.requiring_grad(pair.statics.now())
        self._pairs.setdefault(key, []).append(pair)
        self._last = key

    # ---- a call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, with arguments structured as the sample's.

        Returns:
            What the callable returns. **Lifetime:** the caller's own; gradients are too, unless `own_grads=False`.

        Raises:
            InputError: The arguments don't fit the sample.
        """
        if torch_private.is_exporting():
            return self.ungraphed(*args, **kwargs)
        if torch.compiler.is_compiling():
            return _outside_dynamo(self, args, kwargs)
        has_grad = torch.is_grad_enabled()
        try:
            return self._call(args, kwargs)
        except BaseException:
            mend(open_modes)
            torch_private.set_grad_enabled(has_grad)
            raise

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        group, d = self._group, self._pass
        d.stats.calls += 1
        if group is not None:
            group.owner.mend()
        if group is None or group.owner.closed or group.owner.driver.is_capturing():
            return self._run_plainly(None, args, kwargs)
        if _is_watched():
            why = "a transform, a tracer or a dispatch mode, which would not see a replay, is on"
            return self._run_plainly(why, args, kwargs)
        tensors = d.binding.bind(args, kwargs)
        why = self._why_plain(tensors)
        if tensors is None or why is not None:
            return self._run_plainly(why, args, kwargs)
        with group.owner.lock:
            group.owner.driver.enter_call()
            pair, members = self._pair(group.owner, tensors)
            why = "it was recorded again more often than max_rerecords, or parameters are computed"
            if pair is not None:
                why = pair.why_not(tensors)
                if why is None:
                    return pair.structure.build(pair.run(tensors, members))
        return self._run_plainly(why, args, kwargs)

    def _settings_now(self) -> tuple[Any, ...]:
        """Return what is in the graph of the settings around a call."""
        tracker, on = self._pass.options.rng_tracker, torch.is_autocast_enabled(self._device_type)
        dtype = torch.get_autocast_dtype(self._device_type) if on else None
        return dtype, tracker and tracker.current

    def _why_plain(self, tensors: list[torch.Tensor] | None) -> str | None:
        """Why a call can't be replayed with arguments, settings and modules as they are; None if it can."""
        statics = self._pass.statics
        if tensors is None:
            return "other arguments are one tensor than in the sample"
        if self._settings_now() != self._settings:
            return "it was recorded under other autocast settings, or in another fork of its rng_tracker"
        if torch.is_grad_enabled() and not self._pass.with_grad:
            return "it was recorded under torch.no_grad()"
        if not self._pairs:
            self._pass.use_statics(self._pass.find_statics())
        elif not statics.unchanged():
            return (
                f"{statics.changes()} changed since it was recorded (reset() has it recorded again)"
            )
        return None

    def _pair(
        self, owner: Owner, tensors: list[torch.Tensor]
    ) -> tuple[Pair | None, list[torch.Tensor]]:
        """The pair to be replayed, and parameters and buffers as they are."""
        statics = self._pass.statics
        try:
            now = statics.now()
            key = statics, fast.layouts(now), fast.requiring_grad(now)
        except (KeyError, TypeError, AttributeError):  # one was removed
            return None, []
        pairs = self._pairs.get(key, [])
        for is_ready in (owner.is_safe, owner.rescue):
            for pair in pairs:
                if pair.is_free() and is_ready(pair.forward):
                    self._last = key
                    return pair, pair.take(now)
        pair = self._record_again(owner, key, tensors, held=not all(pair.closed for pair in pairs))
        return pair, now if pair is None else pair.take(now)

    def _run_plainly(self, why: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._pass.stats.plain_calls += 1
        if why is not None:
            self._pass.tell(f"runs without a graph: {why}.")
        return self.ungraphed(*args, **kwargs)

    def count_plain_call(self) -> None:
        """Count a call that somebody else runs without a graph."""
        if not torch.compiler.is_compiling():
            self._pass.stats.calls += 1
            self._pass.stats.plain_calls += 1

    # ---- recording again

    def _record_again(
        self, owner: Owner, key: Key, tensors: list[torch.Tensor], *, held: bool
    ) -> Pair | None:
        """Record for parameters elsewhere, or beside what a pending call needs; None if that can't be."""
        d, old = self._pass, self._last
        if old is not None:
            # Parameters that are computed in each call (functional_call) lie elsewhere each time.
            is_computed = any(t.grad_fn is not None for t in key[0].now())
            if self._num_rerecords >= d.options.max_rerecords or is_computed:
                return None
            self._num_rerecords += 1
            d.stats.rerecordings += 1
            why = "results of earlier calls are still referenced, or wait for their backward"
            why = why if held else "parameters or buffers moved"
            log.info("%s records again (%d): %s", d.name, self._num_rerecords, why)
        pair = Pair(d, owner)
        with in_place(key[0]) if d.hooks else contextlib.nullcontext():
            with prepared(d, owner.driver.device):
                d.warm_up(owner.driver, pair.states, 1, pool=False)
            pair.record_forward(tensors)
            pair.after_forward()
        self.add(pair)
        # Hooks may move parameters: where they had them, this call's own may never be.
        same = pair.statics is key[0] and pair.key == key[1] == fast.layouts(key[0].now())
        return pair if same or old is None else None

    # ---- end

    def _free(self) -> None:
        for pair in [pair for pairs in self._pairs.values() for pair in pairs]:
            pair.close()
        self._pairs.clear()
        self._last = None
        self._num_rerecords = 0
        self._pass.told.clear()
        self._pass.records_backward = True

    def reset(self) -> None:
        """Free the graphs and their memory. The next call records again, capture-time hooks included."""
        if self._group is not None:
            with self._group.owner.lock:
                self._free()

    def close(self) -> None:
        """Free the graphs and their memory. Calls made afterwards run without a graph."""
        self.reset()
        if self._group is not None and self._free in self._group.members:
            self._group.members.remove(self._free)
        self._group = None

    def run_with(self, plain: Any) -> None:
        """Have another function run the callable without a graph, and be recorded."""
        self.ungraphed = self._pass.run = plain

    def __reduce__(self) -> Any:
        """Copies and pickles are of the callable alone."""
        return _itself, (self.ungraphed,)

    @property
    def splits_backward(self) -> bool:
        """True if the callable computes its weights' gradients apart."""
        return self._pass.backward_dw is not None

    def backward_dw(self) -> None:
        """Make what the oldest backward that lacks it left out: the weights' gradients, added to their `.grad`.

        A backward that ran without a graph is the callable's own to complete.
        """
        due = self._pass.due
        if due:
            call = due.popleft()
            call.pair.run_weight_grads(call)
        else:
            assert self._pass.backward_dw is not None
            self._pass.backward_dw()


@torch_private.outside_dynamo
def _outside_dynamo(fn: GraphedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn._call(args, kwargs)


def _is_watched() -> bool:
    """Tell whether something is on that would not see a replay."""
    return bool(
        torch_private.in_functorch()
        or torch_private.in_forward_ad()
        or torch_private.num_dispatch_modes()
        or torch_private.is_jit_traced()
        or torch_private.uses_compiled_autograd()
    )


def _itself(plain: Any) -> Any:
    return plain
