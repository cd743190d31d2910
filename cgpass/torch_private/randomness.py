"""Random numbers: generators, and the operator that runs others with a state of theirs."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._C import DispatchKey
from torch._guards import TracingContext
from torch._prims.rng_prims import graphsafe_run_with_rng_state
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random operators on a device draw from unless told otherwise."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]


run_with_rng_state: Any = graphsafe_run_with_rng_state
"""`graphsafe_run_with_rng_state(op, *args, rng_state, **kwargs)`."""


def install_rng_kernel(kernel: Callable[..., Any], refuse_saving: Callable[[], None]) -> None:
    """Have `graphsafe_run_with_rng_state` run `kernel` on CPU and CUDA; torch's own knows no CPU.

    `refuse_saving` raises where a selective checkpoint would have to save what it draws.
    """
    op = run_with_rng_state
    for key in (DispatchKey.CPU, DispatchKey.CUDA, DispatchKey.BackendSelect):
        if op.py_kernels.get(key) is not kernel:
            op.py_kernels.pop(key, None)
            op.py_impl(key)(kernel)
            op._dispatch_cache.clear()
    if not isinstance(op.python_key_table, _PastModes):
        op.python_key_table = _PastModes(op.python_key_table, op, refuse_saving)


class _PastModes(dict[Any, Any]):
    """Rules of a higher-order operator by dispatch mode: it runs past modes that have none and know no such operators.

    Source: torch/_ops.py `HigherOrderOperator.dispatch`, 2.11 to 2.15: those raise there.
    """

    def __init__(
        self, rules: Mapping[Any, Any], op: Callable[..., Any], refuse_saving: Callable[[], None]
    ) -> None:
        super().__init__(rules)
        self._op = op
        self._refuse_saving = refuse_saving
        self._saving = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)

    def __contains__(self, mode: object) -> bool:
        known = super().__contains__(mode)
        plain = isinstance(mode, type) and issubclass(mode, TorchDispatchMode)
        return known or (plain and not getattr(mode, "supports_higher_order_operators", False))

    def __missing__(self, mode: type) -> Callable[..., Any]:
        return self._refused if issubclass(mode, self._saving) else self._past

    def _refused(self, *args: Any, **kwargs: Any) -> None:
        self._refuse_saving()

    def _past(self, mode: object, *args: Any, **kwargs: Any) -> Any:
        return self._op(*args, **kwargs)


def hide_output_stride(position: int) -> None:
    """Tell AOTAutograd that a forward graph has one more output than was reported, of no tensor it knows."""
    context = TracingContext.try_get()
    if context is not None and context.output_strides:
        context.output_strides.insert(position, None)
