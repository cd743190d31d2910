"""The functions that `make_graphed_callables` returns, and that graphed modules call."""

import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import torch

from cgpass import torch_private
from cgpass.errors import CaptureError
from cgpass.graphed.modules import Statics
from cgpass.graphed.pair import Pair, in_place
from cgpass.graphed.warmup import Pass, prepared
from cgpass.runtime import fast
from cgpass.runtime.changes import mend, open_modes
from cgpass.runtime.owner import Owner

log = logging.getLogger(__name__)

Key = tuple[Statics, bytes, bytes]
"""Where parameters and buffers are found, where they lie, and which of them require grad."""


class GraphedFunction:
    """Runs one callable from its recordings, or without a graph where that would be wrong: see `_why_plain`."""

    def __init__(self, description: Pass, owner: Owner | None) -> None:
        """Args: description: what is called. owner: what records; None to run without a graph always."""
        self.description = description
        self._owner = owner
        self.ungraphed: Any = description.run
        """What runs the callable without a graph."""
        self.stats = description.stats
        """Counts of calls, recordings and replays."""
        self._pairs: dict[Key, list[Pair]] = {}
        self._last: Key | None = None
        self._num_rerecords = 0
        self._device_type = "cpu" if owner is None else owner.driver.device.type
        self._settings = self._settings_now()
        self.__name__ = description.name
        if owner is not None:
            free = self._free
            owner.add(
                SimpleNamespace(close=free, forget_recordings=free, forget_failures=lambda: None)
            )

    def add(self, pair: Pair) -> None:
        """Take a recording."""
        key = pair.statics, pair.key, fast.requiring_grad(pair.statics.now())
        self._pairs.setdefault(key, []).append(pair)
        self._last = key

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
        owner, d = self._owner, self.description
        d.stats.calls += 1
        if owner is not None:
            owner.mend()
        if owner is None or owner.closed or owner.driver.is_capturing():
            return self._run_plainly(None, args, kwargs)
        why = self._why_plain()
        tensors = d.binding.bind(args, kwargs) if why is None else None
        if tensors is None:
            why = why or "other arguments are one tensor than in the sample"
            return self._run_plainly(why, args, kwargs)
        with owner.lock:
            owner.driver.enter_call()
            pair, members = self._pair(owner)
            why = "it was recorded again more often than max_rerecords, or parameters are computed"
            if pair is not None:
                why = pair.why_not(tensors)
                if why is None:
                    return pair.structure.build(pair.run(tensors, members))
        return self._run_plainly(why, args, kwargs)

    def _settings_now(self) -> tuple[Any, ...]:
        """Return what is in the graph of the settings around a call."""
        tracker, on = (
            self.description.options.rng_tracker,
            torch.is_autocast_enabled(self._device_type),
        )
        dtype = torch.get_autocast_dtype(self._device_type) if on else None
        return dtype, tracker and tracker.current

    def _why_plain(self) -> str | None:
        """Why a call can't be replayed with settings and modules as they are; None if it can."""
        statics = self.description.statics
        if _is_watched():
            return "a transform, a tracer or a dispatch mode, which would not see a replay, is on"
        if self._settings_now() != self._settings:
            return "it was recorded under other autocast settings, or in another fork of its rng_tracker"
        if torch.is_grad_enabled() and not self.description.with_grad:
            return "it was recorded under torch.no_grad()"
        if not self._pairs:
            self.description.find_statics()
        elif not statics.unchanged():
            return (
                f"{statics.changes()} changed since it was recorded (reset() has it recorded again)"
            )
        return None

    def _pair(self, owner: Owner) -> tuple[Pair | None, list[torch.Tensor]]:
        """The pair to be replayed, and parameters and buffers as they are."""
        statics = self.description.statics
        try:
            now = statics.now()
            key = statics, fast.layouts(now), fast.requiring_grad(now)
        except (KeyError, TypeError, AttributeError):  # one was removed
            return None, []
        pairs = self._pairs.get(key, [])
        pair = next((each for each in pairs if each.is_free()), None)
        if pair is None:
            pair = self._record_again(owner, key, held=bool(pairs))
        elif not owner.is_safe(pair.forward):
            owner.rescue(pair.forward)
        self._last = key if pair is not None else self._last
        return pair, now if pair is None else pair.take(now)

    def _run_plainly(self, why: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.description.stats.plain_calls += 1
        if why is not None:
            self.description.tell(f"runs without a graph: {why}.")
        return self.ungraphed(*args, **kwargs)

    # ---- recording again

    def _record_again(self, owner: Owner, key: Key, *, held: bool) -> Pair | None:
        """Record for parameters elsewhere, or beside what a pending call needs; None if that can't be."""
        d, old = self.description, self._last
        if old is not None:
            # Parameters that are computed in each call (functional_call) lie elsewhere each time.
            is_computed = any(t.grad_fn is not None for t in key[0].now())
            if self._num_rerecords >= d.options.max_rerecords or is_computed:
                return None
            self._num_rerecords += 1
            d.stats.rerecordings += 1
            why = "tensors kept beside autograd wait for their backward"
            why = why if held else "parameters or buffers moved"
            log.info("%s records again (%d): %s", d.name, self._num_rerecords, why)
        pair = Pair(d, owner)
        owner.driver.prepare_thread()
        hooked = in_place(key[0]) if d.hooks else contextlib.nullcontext()
        try:
            with hooked, prepared(d, owner.driver.device), torch.no_grad():
                d.warm_up(owner.driver, pair.states, 1, pool=False)
                pair.record()
        except BaseException as error:
            pair.close()
            if old is None or not isinstance(error, CaptureError):
                raise
            d.tell(f"runs without a graph: {str(error).rstrip('.')}.")
            self._num_rerecords = d.options.max_rerecords
            return None
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
        self.description.told.clear()

    def reset(self) -> None:
        """Free the graphs and their memory. The next call records again, capture-time hooks included."""
        if self._owner is not None:
            with self._owner.lock:
                self._free()

    def close(self) -> None:
        """Free the graphs and their memory. Calls made afterwards run without a graph."""
        self.reset()
        self._owner = None

    def __reduce__(self) -> Any:
        """Copies and pickles are of the callable alone."""
        return _itself, (self.ungraphed,)

    @property
    def splits_backward(self) -> bool:
        """True if the callable computes its weights' gradients apart."""
        return self.description.backward_dw is not None

    def backward_dw(self) -> None:
        """Make what the oldest backward that lacks it left out: the weights' gradients, added to their `.grad`.

        A backward that ran without a graph is the callable's own to complete.
        """
        due = self.description.due
        if due:
            call = due.popleft()
            call.pair.run_weight_grads(call)
        else:
            assert self.description.backward_dw is not None
            self.description.backward_dw()


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
