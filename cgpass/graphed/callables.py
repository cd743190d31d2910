"""What `make_graphed_callables` returns for functions, and what graphed modules call."""

import contextlib
import logging
from typing import Any

import torch

from cgpass import torch_private
from cgpass.errors import StaticInputMovedError
from cgpass.graphed.capture import Capture
from cgpass.graphed.group import Group
from cgpass.graphed.moves import put_back
from cgpass.graphed.passes import Pass
from cgpass.graphed.preparation import is_preparing, prepared
from cgpass.graphed.recorded import RecordedPass
from cgpass.graphed.statics import MemberGoneError, Statics
from cgpass.graphed.values import own_memory
from cgpass.runtime import fast
from cgpass.runtime.changes import mend, open_modes

log = logging.getLogger(__name__)

_SETS_KEPT = 4
"""Sets of addresses that one callable keeps recordings for."""

Key = tuple[Statics, bytes, bytes]
"""Where parameters and buffers are found, where they lie, and which of them require grad."""


class GraphedFunction:
    """Runs one callable from its recordings, or plainly where that would be wrong.

    It runs plainly inside a capture of the user's own, in transforms of `torch.func` and forward-mode AD, in dispatch
    modes, `torch.export` and other tracers, under other autocast settings than it was recorded with, in another fork of its
    `rng_tracker`, where a module is in another mode (training or eval), where other arguments are one tensor than in
    the sample, for arguments that share memory in ways that no graph can follow, once closed, and at unknown addresses
    of parameters past `max_rerecords`.
    """

    def __init__(self, description: Pass, group: Group | None) -> None:
        """Args: description: what is called. group: what records; None to run plainly always."""
        self._pass = description
        self._group = group
        self._plain = description.run
        self._check = description.options.static_input_check
        self._recorded: dict[Key, RecordedPass] = {}
        self._last: tuple[Key | None, RecordedPass | None] = (None, None)
        self._num_rerecords = 0
        self._warned: set[str] = set()
        self._device_type = "cpu" if group is None else group.device.type
        self._autocast = _autocast(self._device_type)
        self._tracker = description.options.rng_tracker
        self._fork = None if self._tracker is None else self._tracker.current
        self.__name__ = description.name
        if group is not None:
            group.members.append(self._free)

    @property
    def stats(self) -> Any:
        """Counts of calls, recordings and replays."""
        return self._pass.stats

    def add(self, recorded: RecordedPass) -> None:
        """Take a recording."""
        statics = recorded.statics
        statics.note_hooks()  # a first run may have set some
        key = (statics, recorded.forward_key, fast.requiring_grad(statics.now()))
        self._recorded[key] = recorded
        self._last = (key, recorded)

    # ---- a call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, with arguments structured as the sample's.

        Returns:
            What the callable returns. **Lifetime:** the caller's own; gradients are too, unless `own_grads=False`.

        Raises:
            InputError: The arguments don't fit the sample.
            StaticInputMovedError: A parameter or buffer moved and `static_input_check` is "error".
        """
        if torch_private.is_exporting():
            return self._plain(*args, **kwargs)
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
        group, stats = self._group, self._pass.stats
        stats.calls += 1
        if group is not None:
            group.owner.mend()
        if group is None or group.driver.is_capturing() or group.owner.closed:
            return self._run_plainly(None, args, kwargs)
        if _is_watched():
            why_unseen = None if is_preparing() else _why_unseen()
            return self._run_plainly(why_unseen, args, kwargs)
        tensors = self._pass.binding.bind(args, kwargs)
        if tensors is None:
            return self._run_plainly(self._pass.binding.why_unbound(args, kwargs), args, kwargs)
        why = self._why_other_settings()
        if why is not None:
            return self._run_plainly(why, args, kwargs)
        statics = self._pass.statics
        unchanged = statics.unchanged()
        if not unchanged:
            why = self._why_other_modules(statics)
            if why is not None:
                return self._run_plainly(why or None, args, kwargs)
            statics = self._pass.statics
        recorded, parameters = self._find_now(statics, unchanged=unchanged)
        if recorded is None:
            return self._run_plainly(self._why_unrecorded(), args, kwargs)
        why_not = None if recorded.arguments.are_simple else recorded.arguments.why_not(tensors)
        if why_not is not None:
            return self._run_plainly(why_not, args, kwargs)
        recorded.last_used = stats.calls
        return recorded.call(tensors, parameters)

    def _why_other_settings(self) -> str | None:
        """What is other around a call than it was around the recording; None if nothing is."""
        if _autocast(self._device_type) != self._autocast:
            return "it was recorded under other autocast settings"
        if self._tracker is not None and self._tracker.current != self._fork:
            return (
                f"it was recorded in fork {self._fork!r} of its rng_tracker (None: outside of any)"
            )
        if torch.is_grad_enabled() and not self._pass.with_grad:
            return "it was recorded under torch.no_grad()"
        return None

    def _why_other_modules(self, statics: Statics) -> str | None:
        """Why a call can't be replayed with modules as they are, empty if that is what a user expects.

        None if it can be, or is recorded anew.
        """
        if not statics.has_its_modes():
            names = statics.other_modes()
            return f"{names} changed between training and eval mode" if names else ""
        names = "" if self._check == "off" else statics.other_hooks()
        if not names or not statics.has_its_members():
            return None
        if self._recorded and not self._moved(statics):
            return f"hooks or forward of {names} are others than when it was recorded (reset() records them)"
        self._pass.use_statics(self._pass.find_statics())
        return None

    def _moved(self, statics: Statics) -> bool:
        """Whether parameters lie elsewhere than in the last call, so that all is recorded anew."""
        last = self._last[0]
        try:
            return last is not None and statics.key_of(statics.now()) != last[1]
        except MemberGoneError:
            return True

    def _find_now(
        self, statics: Statics, *, unchanged: bool
    ) -> tuple[RecordedPass | None, list[torch.Tensor]]:
        """The recording to be replayed, and parameters and buffers as they are."""
        if self._check != "off" and not unchanged and not statics.has_its_members():
            statics = self._follow_members()
        try:
            parameters = statics.now()
            return self._find(parameters), parameters
        except MemberGoneError:
            parameters = self._follow_members().now()
            return self._find(parameters), parameters

    def _find(self, statics: list[torch.Tensor]) -> RecordedPass | None:
        key, recorded = self._last
        if self._check == "off" and recorded is not None:
            return recorded
        found = self._pass.statics
        now = (found, found.key_of(statics), fast.requiring_grad(statics))
        if now == key and recorded is not None:
            return recorded
        recorded = self._recorded.get(now)
        if recorded is None:
            recorded = self._record_again(now)
        if recorded is not None:
            self._last = (now, recorded)
        return recorded

    def _run_plainly(self, why: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._pass.stats.plain_calls += 1
        if why is not None and why not in self._warned:
            self._warned.add(why)
            log.warning("%s runs without a graph: %s.", self._pass.name, why)
        return self._plain(*args, **kwargs)

    def count_plain_call(self) -> None:
        """Count a call that somebody else runs without a graph."""
        if not torch.compiler.is_compiling():
            self._pass.stats.calls += 1
            self._pass.stats.plain_calls += 1

    # ---- recording again

    def _follow_members(self) -> Statics:
        """Have the modules' submodules, parameters and buffers as they are now."""
        d = self._pass
        if self._check == "error":
            raise StaticInputMovedError(
                f"{d.name}: its modules have other members than when it was recorded: {d.statics.other_members()}. Keep "
                'them, or use static_input_check="rerecord".'
            )
        known = {id(key[0]): key[0] for key in self._recorded}
        before = [each for each in known.values() if each.fits()]
        d.use_statics(before[0] if before else d.find_statics())
        return d.statics

    def _record_again(self, now: Key) -> RecordedPass | None:
        d, group = self._pass, self._group
        assert group is not None
        old = self._last[0]
        if old is not None:
            moved = now[0].moved(old[1], now[1]) if old[0] is now[0] else old[0].other_members()
            if moved and self._check == "error":
                raise StaticInputMovedError(
                    f"{d.name}: parameters or buffers moved since it was recorded: {moved}. Keep them where they are, "
                    'or use static_input_check="rerecord".'
                )
            if self._num_rerecords >= d.options.max_rerecords or _computed(now[0]) is not None:
                return None
            self._num_rerecords += 1
            d.stats.rerecordings += 1
            log.info("%s records again (%d): %s", d.name, self._num_rerecords, moved)
        with group.owner.lock, put_back(now[0]) if d.hooks else contextlib.nullcontext():
            self._make_room()
            recorded = record_alone(d, group)
        self._recorded[recorded.statics, recorded.forward_key, now[2]] = recorded
        # Hooks may move parameters; where they had them for the backward, this call's own may never be.
        if now[1] != recorded.forward_key or recorded.backward_key not in (b"", now[1]):
            return None
        if d.hooks and now[0].key_of(now[0].now()) != now[1]:  # they were freed and are elsewhere
            return None
        return recorded

    def _why_unrecorded(self) -> str:
        """Why there is no recording for parameters where they are, and none is made."""
        name = _computed(self._pass.statics)
        if name is not None:
            return f"parameters are computed in each call ({name} has a grad_fn), so that they lie elsewhere each time"
        if self._num_rerecords >= self._pass.options.max_rerecords:
            return "parameters moved more often than max_rerecords"
        return "capture-time hooks moved parameters"

    def _make_room(self) -> None:
        idle = [(k, r) for k, r in self._recorded.items() if not r.is_pending()]
        if len(self._recorded) >= _SETS_KEPT and idle:
            key, recorded = min(idle, key=lambda pair: pair[1].last_used)
            del self._recorded[key]
            recorded.close()

    # ---- end

    def _free(self) -> None:
        for recorded in self._recorded.values():
            recorded.close()
        self._recorded.clear()
        self._last = (None, None)
        self._num_rerecords = 0
        self._warned.clear()

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

    @property
    def ungraphed(self) -> Any:
        """What runs the callable without a graph."""
        return self._plain

    @property
    def beneath(self) -> Any:
        """Where it was set as a module's `forward`: what that is without it."""
        return self._plain

    def run_with(self, plain: Any) -> None:
        """Have another function run the callable without a graph, and be recorded."""
        self._plain = self._pass.run = plain

    def __reduce__(self) -> Any:
        """Copies and pickles are of the callable alone."""
        return _itself, (self._plain,)

    @property
    def splits_backward(self) -> bool:
        """Whether the callable computes its weights' gradients apart."""
        return self._pass.backward_dw is not None

    def backward_dw(self) -> None:
        """Make what the oldest backward that lacks it left out: the weights' gradients, added to their `.grad`.

        A backward that ran plainly is the callable's own to complete.
        """
        due = self._pass.due_weight_grads
        if due:
            due[0].recorded.run_weight_grads(due[0])
        else:
            assert self._pass.backward_dw is not None
            self._pass.backward_dw()


def record_alone(d: Pass, group: Group) -> RecordedPass:
    """Record one pass by itself, in a pool of its own."""
    with prepared(d, group):
        states = d.new_states(group.device)
        d.warm_up(group, states, 1, pool=False)
        group.accumulators.forget_warm_ups()
        capture = Capture(
            d,
            group,
            states,
            group.owner.new_slot(),
            [own_memory(sample) for sample in d.binding.samples],
        )
        try:
            capture.capture_forward()
            capture.capture_backward()
            return capture.finish()
        except BaseException:
            capture.give_up()
            raise


@torch_private.outside_dynamo
def _outside_dynamo(fn: GraphedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn._call(args, kwargs)


def _computed(statics: Statics) -> str | None:
    """The name of a parameter that is no leaf, as those may be that `torch.func.functional_call` is given."""
    pairs = zip(statics.names, statics.now(), strict=True)
    return next((name for name, tensor in pairs if tensor.grad_fn is not None), None)


def _is_watched() -> int:
    """Whether something is on that would not see a replay."""
    return (
        torch_private.in_functorch()
        or torch_private.in_forward_ad()
        or torch_private.num_dispatch_modes()
        or torch_private.is_jit_traced()
    )


def _why_unseen() -> str:
    """What is on that would not see a replay."""
    if torch_private.is_jit_traced():
        return "torch.jit.trace, which would keep a replay's result as a constant, is on"
    if torch_private.in_functorch() or torch_private.in_forward_ad():
        return "a transform of torch.func or forward-mode AD, which a replay would leave out, is on"
    return "a dispatch mode (a tracer, a counter of operators, fake tensors), which sees no replay, is on"


def _autocast(device_type: str) -> torch.dtype | None:
    """The dtype that autocast casts to now; None if it is off."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _itself(plain: Any) -> Any:
    return plain
