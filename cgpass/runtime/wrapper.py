"""`CUDAGraphWrapper`: any callable of tensors, recorded once per signature and replayed."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cgpass import torch_private
from cgpass.compile.facts.input_info import InputInfo, InputKind
from cgpass.errors import DriverUnavailableError, InputError, OutputError
from cgpass.options import Options
from cgpass.runtime import changes
from cgpass.runtime.driver import CUDADriver, GraphDriver
from cgpass.runtime.executor import ranged
from cgpass.runtime.owner import Owner
from cgpass.runtime.runner import PartitionRunner
from cgpass.runtime.signature import check_tensor, infer_infos, infer_kind
from cgpass.runtime.simulated import SimulatedDriver
from cgpass.runtime.writes import shares_memory
from cgpass.telemetry import CallStats

log = logging.getLogger(__name__)

_profiler = torch_private.profiler_state


class CUDAGraphWrapper:
    """Calls a function of tensors through CUDA graphs.

    The first call of a signature (tensor layouts, integers, identities of other objects) warms up, the second
    records, later ones replay. Inputs are copied into memory of fixed address, except those named static, which are
    read where they lie and recorded again when they move. Inputs that `fn` writes are written back; a call in which
    such an input shares memory with another one runs plainly.

    `fn` is called with positional arguments, under `torch.no_grad()`, and may return any nested structure of plain
    tensors and other values. A replay makes its outputs anew, so tensors that it makes itself may be no subclass (nor
    `torch.nn.Parameter`) and may not require grad: such a call raises. Its Python code does not run on a replay: what
    it reads from closures and from attributes of objects is frozen. Tensors among that are read where they lay in the
    recorded call, and kept alive by the recording as far as operators were given them; one that is returned is that very
    tensor in every call. Keep alive yourself what only other kernels read: those of an inner `torch.compile`, Triton
    kernels that are launched directly, what a tensor subclass wraps. Writes to inputs are noticed by what operators
    say that they write; what is written beside operators (by a Triton kernel that is launched directly, through numpy) is
    noticed if the first call changes some bits. Inputs are copied without the rest of their storage, so `as_strided` must
    not be used on inputs that are part of a larger tensor, unless they are static.

    **Lifetime:** tensors returned are the caller's own: no later call changes them. An output that is (a view of) an
    input is that input of the call.

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
            InputError: `static_input_indices` are no positions.
        """
        self._fn = fn
        self._static = _positions(static_input_indices)
        self._options = Options.parse(options)
        self._name = name or getattr(fn, "__qualname__", type(fn).__name__)
        self._runner: PartitionRunner | None = None
        self._infos: tuple[InputInfo, ...] = ()
        self._warned_shared = self._warned_of_none = False

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
            InputError: An input of another kind, another number of inputs than before, or gradients are wanted.
            OutputError: The function returned a tensor of a type, or requiring gradients, that a replay can't give it.
            DriverUnavailableError: The driver asked for can't record on the inputs' device.
            CaptureError: The function can't be captured and `on_skip` is "raise".
            StaticInputMovedError: A static input moved and `static_input_check` is "error".
        """
        if torch.is_grad_enabled():
            self._refuse_gradients(args)
        device = _device_of(args) or _device_of(pytree.tree_leaves(args))
        driver = self._options.driver
        if driver == "none" or device is None or (driver == "auto" and device.type != "cuda"):
            wanted = driver in ("cuda", "simulated") or torch.cuda.is_available()
            if device is None and args and driver != "none" and wanted:
                self._warn_of_no_tensors()
            with torch.no_grad():
                return self._fn(*args)
        runner = self._runner
        if runner is None:
            runner = self._runner = self._new_runner(args, device)
        self._check(args, runner.owner.driver.device)
        if (
            runner.written
            and not torch_private.in_vmap_or_functorch()
            and shares_memory(args, runner.written)
        ):
            return self._run_shared(runner, args)
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
            if recording is not None and runner.owns_outputs:
                runner.stats.copied_bytes += recording.copy_out(results)
        spec = results.pop()
        return pytree.tree_unflatten(results, spec)

    def _warn_of_no_tensors(self) -> None:
        if not self._warned_of_none:
            self._warned_of_none = True
            level = logging.WARNING if self._options.on_skip == "warn" else logging.INFO
            log.log(
                level,
                "%s: no input is a tensor, so calls run without a graph. Pass tensors by themselves, not in objects.",
                self._name,
            )

    def _run_shared(self, runner: PartitionRunner, args: Sequence[Any]) -> Any:
        if not self._warned_shared:
            self._warned_shared = True
            log.warning(
                "%s writes inputs, and some of its inputs share memory: such calls run without a graph. "
                "Pass tensors that share none.",
                self._name,
            )
        runner.stats.calls += 1
        runner.stats.plain_calls += 1
        with torch.no_grad():
            return self._fn(*args)

    def _new_runner(self, args: Sequence[Any], device: torch.device) -> PartitionRunner:
        try:
            self._infos = infer_infos(args, self._static, device)
        except InputError as error:
            raise InputError(f"{self._name}: {error}") from None
        driver = _driver(self._options, device)
        owner = Owner(driver, max_pending_calls=self._options.max_pending_calls)
        return PartitionRunner(
            self._run_flat, self._infos, owner, self._options, name=self._name, check_layout=True
        )

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

    def _check(self, args: Sequence[Any], device: torch.device) -> None:
        if len(args) != len(self._infos):
            raise InputError(
                f"{self._name} was first called with {len(self._infos)} inputs, now with {len(args)}"
            )
        for index, (info, value) in enumerate(zip(self._infos, args, strict=True)):
            is_tensor = info.kind in (InputKind.COPIED, InputKind.STATIC)
            if is_tensor != isinstance(value, torch.Tensor):
                raise InputError(
                    f"{self._name}: {info.name} was {'a tensor' if is_tensor else 'no tensor'} in the first call, "
                    f"now it is a {type(value).__name__}"
                )
            if is_tensor:
                check_tensor(f"{self._name}: {info.name}", value, device)
            elif infer_kind(index, value, frozenset(), device) is not info.kind:
                raise InputError(
                    f"{self._name}: {info.name} is a {type(value).__name__}, in the first call it was of another kind"
                )

    def _check_output(self, number: int, value: torch.Tensor) -> None:
        if value.is_quantized:
            raise OutputError(
                f"{self._name}: output {number} is quantised ({value.dtype}), but a replay makes plain tensors; return "
                "its int_repr(), its scale and its zero point"
            )
        if type(value) is not torch.Tensor or value.requires_grad:
            kind = (
                "requires grad" if type(value) is torch.Tensor else f"is a {type(value).__name__}"
            )
            raise OutputError(
                f"{self._name}: output {number} {kind}, but a replay makes plain tensors that require no grad; "
                "return such a tensor, and convert it outside"
            )

    def _refuse_gradients(self, args: Sequence[Any]) -> None:
        for i, value in enumerate(args):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise InputError(
                    f"{self._name}: input {i} requires grad, but no autograd graph is recorded. Call it under "
                    'torch.no_grad(), or train with torch.compile(backend="cgpass")'
                )

    def close(self) -> None:
        """Free every recording; later calls run the function plainly."""
        if self._runner is not None:
            self._runner.owner.close()


def _positions(indices: Iterable[int]) -> tuple[int, ...]:
    """`indices`, checked."""
    found = tuple(indices) if isinstance(indices, Iterable) else (indices,)
    wrong = [i for i in found if not isinstance(i, int) or isinstance(i, bool)]
    if wrong or not isinstance(indices, Iterable):
        shown = repr(wrong[0] if wrong else indices)
        raise InputError(
            f"static_input_indices must be positions of inputs, as in (0, 2), got {shown}"
        )
    return found


def _device_of(args: Sequence[Any]) -> torch.device | None:
    return next((value.device for value in args if isinstance(value, torch.Tensor)), None)


def _driver(options: Options, device: torch.device) -> GraphDriver:
    driver = options.driver
    if driver == "simulated" and device.type == "cpu":
        return SimulatedDriver(device)
    if driver in ("cuda", "auto") and device.type == "cuda":
        return CUDADriver(device)
    raise DriverUnavailableError(
        f'driver="{driver}" can\'t record inputs on {device}; use driver="auto", or move them'
    )
