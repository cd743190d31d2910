"""What `make_graphed_callables` returns: functions, and modules whose `forward` is one."""

import logging
import weakref
from collections import OrderedDict
from typing import Any

import torch

from cgpass import _torch
from cgpass.errors import StaticInputMovedError
from cgpass.graphed.capture import Capture
from cgpass.graphed.group import Group
from cgpass.graphed.passes import Pass
from cgpass.graphed.preparation import prepared
from cgpass.graphed.recorded import RecordedPass
from cgpass.graphed.target import unpatched
from cgpass.graphed.values import own_memory

log = logging.getLogger(__name__)

_SETS_KEPT = 4
"""Sets of addresses that one callable keeps recordings for."""

Key = tuple[bytes, tuple[bool, ...]]
"""Addresses of parameters and buffers, and which of them require grad."""


class GraphedFunction:
    """Runs one callable from its recordings, or plainly where that would be wrong.

    It runs plainly inside a capture of the user's own, in transforms of `torch.func` and forward-mode AD, in
    dispatch modes and `torch.export`, under other autocast settings than it was recorded with, for arguments that share memory in ways that no graph can follow, once
    closed, and at unknown addresses of parameters past `max_rerecords`.
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
        self.__name__ = description.name
        if group is not None:
            group.members.append(self._free)

    @property
    def stats(self) -> Any:
        """Counts of calls, recordings and replays."""
        return self._pass.stats

    def add(self, recorded: RecordedPass) -> None:
        """Take a recording."""
        statics = self._pass.statics.now()
        key = (recorded.forward_key, tuple([s.requires_grad for s in statics]))
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
        if _torch.is_exporting():
            return self._plain(*args, **kwargs)
        if torch.compiler.is_compiling():
            return _outside_dynamo(self, args, kwargs)
        return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        group, stats = self._group, self._pass.stats
        stats.calls += 1
        if group is None or group.driver.is_capturing() or group.owner.closed:
            return self._run_plainly(None, args, kwargs)
        if _torch.in_functorch() or _torch.in_forward_ad():
            why = "a transform of torch.func or forward-mode AD, which a replay would leave out, is on"
            return self._run_plainly(why, args, kwargs)
        if _torch.operators_are_watched():
            why = "a dispatch mode (a tracer, a counter of operators, fake tensors), which sees no replay, is on"
            return self._run_plainly(why, args, kwargs)
        tensors = self._pass.binding.bind(args, kwargs)
        if _autocast(self._device_type) != self._autocast:
            return self._run_plainly("it was recorded under other autocast settings", args, kwargs)
        if torch.is_grad_enabled() and not self._pass.with_grad:
            return self._run_plainly("it was recorded under torch.no_grad()", args, kwargs)
        statics = self._pass.statics.now()
        recorded = self._find(statics)
        if recorded is None:
            return self._run_plainly("parameters moved more often than max_rerecords", args, kwargs)
        why_not = None if recorded.arguments.are_simple else recorded.arguments.why_not(tensors)
        if why_not is not None:
            return self._run_plainly(why_not, args, kwargs)
        recorded.last_used = stats.calls
        return recorded.call(tensors, statics)

    def _find(self, statics: list[torch.Tensor]) -> RecordedPass | None:
        key, recorded = self._last
        if self._check == "off" and recorded is not None:
            return recorded
        now = (self._pass.statics.key_of(statics), tuple([s.requires_grad for s in statics]))
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

    # ---- recording again

    def _record_again(self, now: Key) -> RecordedPass | None:
        d, group = self._pass, self._group
        assert group is not None
        old = self._last[0]
        if old is not None:
            moved = d.statics.moved(old[0], now[0])
            if moved and self._check == "error":
                raise StaticInputMovedError(
                    f"{d.name}: parameters or buffers moved since it was recorded: {moved}. Keep them where they are, "
                    'or use static_input_check="rerecord".'
                )
            if self._num_rerecords >= d.options.max_rerecords:
                return None
            self._num_rerecords += 1
            d.stats.rerecordings += 1
            log.info("%s records again (%d): %s", d.name, self._num_rerecords, moved)
        with group.owner.lock:
            self._make_room()
            recorded = record_alone(d, group)
        self._recorded[recorded.forward_key, now[1]] = recorded
        return recorded if recorded.forward_key == now[0] else None  # hooks may move parameters

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
        """Free the graphs and their memory. The next call records again, hooks included."""
        if self._group is not None:
            with self._group.owner.lock:
                self._free()

    def close(self) -> None:
        """Free the graphs and their memory. Calls made afterwards run without a graph."""
        self.reset()
        self._group = None

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
        capture = Capture(
            d,
            group,
            states,
            group.owner.new_slot(),
            [own_memory(sample) for sample in d.binding.samples],
        )
        capture.capture_forward()
        capture.capture_backward()
        return capture.finish()


@_torch.outside_dynamo
def _outside_dynamo(fn: GraphedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn._call(args, kwargs)


def _autocast(device_type: str) -> torch.dtype | None:
    """The dtype that autocast casts to now; None if it is off."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


# ---- modules

_HOOK_DICTS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


class _Forward:
    """A module's `forward`: graphed in the mode that it was recorded in, its own in the other one."""

    def __init__(self, module: torch.nn.Module, graphed: GraphedFunction) -> None:
        self._module = weakref.ref(module)
        self._mode = module.training
        self._graphed = graphed
        self._plain = unpatched(module, self._module)

    @property
    def __code__(self) -> Any:
        """Where it is defined, which `torch.export` asks of every `forward`."""
        return type(self).__call__.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if module is None or module.training is not self._mode:
            return self._plain(*args, **kwargs)
        return self._graphed(*args, **kwargs)


def with_forward(module: torch.nn.Module, graphed: GraphedFunction, *, patch: bool) -> Any:
    """A module whose `forward` is graphed.

    Args:
        module: What was recorded.
        graphed: Its recordings.
        patch: Whether to change `module` itself; else it is a shallow copy that shares parameters, buffers and
            submodules, and has hooks and a mode of its own.
    """
    if not patch:
        original, module = module, object.__new__(type(module))
        module.__dict__.update(original.__dict__)
        for name in _HOOK_DICTS:
            if name in module.__dict__:
                module.__dict__[name] = OrderedDict()
    module.__dict__["forward"] = _Forward(module, graphed)
    module.__dict__["reset"] = graphed.reset
    module.__dict__["close"] = graphed.close
    module.__dict__["graphed"] = graphed
    if graphed.splits_backward:
        module.__dict__["backward_dw"] = graphed.backward_dw
    return module
