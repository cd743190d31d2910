"""`CUDAGraphWrapper`: any callable of tensors, recorded once per signature and replayed."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cgpass import torch_private
from cgpass.compile.facts.input_info import InputInfo, InputKind
from cgpass.errors import InputError, OutputError
from cgpass.options import Options
from cgpass.runtime import changes, fast
from cgpass.runtime.executor import ranged
from cgpass.runtime.inputs import check_tensor
from cgpass.runtime.owner import Owner
from cgpass.runtime.partition import PartitionRunner
from cgpass.runtime.simulated import driver_for
from cgpass.telemetry import CallStats

log = logging.getLogger(__name__)

_profiler = torch_private.profiler_state
_TENSORS = (InputKind.COPIED, InputKind.STATIC)
_BY_VALUE = (int, bool, str, type(None), torch.dtype, torch.device, torch.layout)


class CUDAGraphWrapper:
    """Calls a function of tensors through CUDA graphs.

    The first call of a signature (tensor layouts, integers, identities of other objects) warms up, the second records, later
    ones replay. Inputs are copied into memory of fixed address. Static inputs are read in place, and recorded again when they
    move. Inputs that `fn` writes are written back; if such an input shares memory with another one, the call runs without a
    graph.

    Examples:
        >>> scaled = cgpass.CUDAGraphWrapper(lambda x, factor: (x * factor).relu())
        >>> [scaled(torch.tensor([float(i)]), 2).item() for i in range(4)]
        [0.0, 2.0, 4.0, 6.0]
        >>> scaled.stats.warmups, scaled.stats.recordings, scaled.stats.replays
        (1, 1, 3)
        >>> scaled.close()

    Call `fn` with positional arguments, under `torch.no_grad()`. It may return any nested structure of plain tensors and other
    values. New tensors that it returns may be no subclass (nor `torch.nn.Parameter`) and may not require grad: such a call
    raises.

    Python code does not run on a replay, so values from closures and attributes are frozen. Tensors among them are read where
    they lay in the recorded call. The recording keeps those alive that operators read; keep others alive yourself: those that
    only an inner `torch.compile`, a Triton kernel launched directly or a tensor subclass reads. A returned one is the same
    tensor in every call.

    Writes to inputs are found by operators' schemas. Other writes (by a Triton kernel launched directly, through numpy) are
    found if the first call changes some bits. Inputs are copied without the rest of their storage, so don't use `as_strided` on
    inputs that are part of a larger tensor, unless they are static.

    **Lifetime:** returned tensors are the caller's own: no later call changes them. An output that is an input, or a view of
    one, is that input of the call.

    Source: the capture rules of the CUDA C++ Programming Guide, "CUDA Graphs".
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        static_input_indices: Iterable[int] = (),
        options: Mapping[str, Any] | Options | None = None,
        name: str | None = None,
    ) -> None:
        """Wrap `fn`.

        Args:
            fn: What to record.
            static_input_indices: Positions of tensors to be read where they lie: parameters, buffers, caches.
            options: As for `torch.compile(..., backend="cgpass")`; those that say how to compile have no effect.
            name: For messages; the function's own by default.

        Raises:
            OptionError: An unknown option or a bad value.
        """
        self._fn = fn
        self._static = tuple(static_input_indices)
        self._options = Options._parse(options)
        self._name = name or getattr(fn, "__qualname__", type(fn).__name__)
        self._runner: PartitionRunner | None = None
        self._warned = False

    @property
    def stats(self) -> CallStats | None:
        """Counts of calls, recordings and replays; None before the first call."""
        return None if self._runner is None else self._runner.stats

    def __call__(self, *args: Any) -> Any:
        """Call the function.

        Args:
            *args: Tensors on one device, integers, strings, None, generators, or objects kept by identity.

        Returns:
            What the function returns.

        Raises:
            InputError: An input of another kind, another number of inputs than before (or than `static_input_indices`
                reach), or gradients are wanted.
            OutputError: The function returned a tensor of a type, or requiring gradients, that a replay can't give it.
            DriverUnavailableError: The driver asked for can't record on the inputs' device.
            CaptureError: The function can't be captured and `on_skip` is "raise".
            StaticInputMovedError: A static input moved and `static_input_check` is "error".
        """
        if torch.compiler.is_dynamo_compiling():
            return _outside_dynamo(self, args)
        if torch.is_grad_enabled():
            self._refuse_gradients(args)
        device = _device_of(args) or _device_of(pytree.tree_leaves(args))
        driver = self._options.driver
        if driver == "none" or device is None or (driver == "auto" and device.type != "cuda"):
            if args and driver != "none" and not self._warned:
                self._say_why_plain(device)
            with torch.no_grad():
                return self._fn(*args)
        runner = self._runner
        if runner is None:
            runner = self._runner = self._new_runner(args, device)
        else:
            self._check(args, runner)
        with runner.owner.lock, torch.no_grad():
            runner.owner.enter_call()
            run = runner.run
            if _profiler._is_profiler_enabled:
                run = ranged(run, f"cgpass: {self._name}")
            try:
                outputs, recording = run(list(args))
            except BaseException:
                changes.mend(changes.open_modes)
                raise
            results = list(outputs)
            if recording is not None and runner.owner.copies_results:
                runner.stats.copied_bytes += fast.copy_out(results, recording.own_at)
        spec = results.pop()
        return pytree.tree_unflatten(results, spec)

    def _say_why_plain(self, device: torch.device | None) -> None:
        why = "no input is a tensor, so calls run without a graph. Pass tensors by themselves, not in objects."
        if device is not None:
            why = (
                f"inputs are on {device}, so calls run without a graph. Move them to CUDA, or simulate graphs on the CPU "
                'with driver="simulated".'
            )
        warns = self._options.on_skip == "warn"
        self._warned = True
        log.log(logging.WARNING if warns else logging.DEBUG, "%s: %s", self._name, why)

    def _new_runner(self, args: Sequence[Any], device: torch.device) -> PartitionRunner:
        for i in self._static:
            if i not in range(len(args)):
                raise InputError(
                    f"{self._name}: static_input_indices has {i!r}, but the call has {len(args)} inputs"
                )
        kinds = self._kinds(args, device)
        infos = tuple(InputInfo(f"input {i}", kind) for i, kind in enumerate(kinds))
        driver = driver_for(self._options.driver, device)
        assert driver is not None
        owner = Owner(driver, self._options)
        return PartitionRunner(
            self._run_flat,
            infos,
            owner,
            self._options,
            name=self._name,
            check_layout=True,
            by_hand=True,
        )

    def _kinds(self, args: Sequence[Any], device: torch.device) -> list[InputKind]:
        return [
            _kind(f"{self._name}: input {i}", value, device, is_static=i in self._static)
            for i, value in enumerate(args)
        ]

    def _run_flat(self, args: list[Any]) -> list[Any]:
        """The function with its outputs flat, their structure last."""
        inputs = tuple(args)
        args.clear()
        leaves, spec = pytree.tree_flatten(self._fn(*inputs))
        given = {id(value) for value in inputs}
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in given:
                self._check_output(number, leaf)
        return [*leaves, spec]

    def _check(self, args: Sequence[Any], runner: PartitionRunner) -> None:
        infos = runner.layout.infos
        if len(args) != len(infos):
            raise InputError(
                f"{self._name} was first called with {len(infos)} inputs, now with {len(args)}"
            )
        kinds = self._kinds(args, runner.owner.driver.device)
        for info, kind, value in zip(infos, kinds, args, strict=True):
            if kind is not info.kind:
                was = "a tensor" if info.kind in _TENSORS else "of another kind"
                raise InputError(
                    f"{self._name}: {info.name} is a {type(value).__name__}, in the first call it was {was}"
                )

    def _check_output(self, number: int, value: torch.Tensor) -> None:
        if value.is_quantized:
            what = f"is quantised ({value.dtype})"
        elif type(value) is not torch.Tensor:
            what = f"is a {type(value).__name__}"
        elif value.requires_grad:
            what = "requires grad"
        else:
            return
        raise OutputError(
            f"{self._name}: output {number} {what}, but a replay makes plain tensors that require no grad; return such a "
            "tensor, and convert it outside"
        )

    def _refuse_gradients(self, args: Sequence[Any]) -> None:
        for i, value in enumerate(args):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise InputError(
                    f"{self._name}: input {i} requires grad, but no autograd graph is recorded. Call it under "
                    'torch.no_grad(), or train with torch.compile(backend="cgpass")'
                )

    def close(self) -> None:
        """Free every recording; later calls run the function without a graph."""
        if self._runner is not None:
            self._runner.owner.close()


def _device_of(args: Sequence[Any]) -> torch.device | None:
    return next((value.device for value in args if isinstance(value, torch.Tensor)), None)


def _kind(name: str, value: Any, device: torch.device, *, is_static: bool) -> InputKind:
    """Kind of one input, told by its value; an `InputError` for what a recording can't take."""
    if isinstance(value, torch.Tensor):
        check_tensor(name, value, device)
        return InputKind.STATIC if is_static else InputKind.COPIED
    if is_static:
        raise InputError(f"{name} is named static but is a {type(value).__name__}, not a tensor")
    if isinstance(value, _BY_VALUE):
        return InputKind.SYMINT
    if isinstance(value, float | complex | list | tuple | dict | set):
        raise InputError(
            f"{name} is a {type(value).__name__}: a graph would freeze its value; "
            "pass tensors (a changing number as a 0-dim tensor on the device), integers or generators"
        )
    return InputKind.OPAQUE


@torch_private.outside_dynamo
def _outside_dynamo(fn: CUDAGraphWrapper, args: tuple[Any, ...]) -> Any:
    return fn(*args)
