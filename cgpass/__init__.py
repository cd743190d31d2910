"""CUDA graphs for PyTorch that just work: `torch.compile(model, backend="cgpass")`."""

import importlib
import logging
from typing import TYPE_CHECKING, Any, Final

from cgpass import errors, telemetry, version
from cgpass.options import Options, set_defaults
from cgpass.runtime import registration

if TYPE_CHECKING:
    from cgpass.backend import cgpass, reset
    from cgpass.graphed.api import make_graphed_callables
    from cgpass.graphed.options import GraphedOptions
    from cgpass.recompute.api import checkpoint
    from cgpass.recompute.states import CheckpointedGraph
    from cgpass.recompute.tracker import RNGStatesTracker
    from cgpass.report.explain import explain
    from cgpass.report.report import Report
    from cgpass.report.summary import expect, summary
    from cgpass.report.verify import verify
    from cgpass.runtime.wrapper import CUDAGraphWrapper
    from cgpass.telemetry import counters
    from cgpass.whole_step import TrainStep, train_step

__all__ = [
    "CUDAGraphWrapper",
    "CheckpointedGraph",
    "GraphedOptions",
    "Options",
    "RNGStatesTracker",
    "Report",
    "TrainStep",
    "cgpass",
    "checkpoint",
    "counters",
    "errors",
    "expect",
    "explain",
    "make_graphed_callables",
    "reset",
    "set_defaults",
    "summary",
    "train_step",
    "verify",
]

__version__: Final = version.VERSION

_HOMES: Final = {
    "CUDAGraphWrapper": "cgpass.runtime.wrapper",
    "CheckpointedGraph": "cgpass.recompute.states",
    "GraphedOptions": "cgpass.graphed.options",
    "RNGStatesTracker": "cgpass.recompute.tracker",
    "Report": "cgpass.report.report",
    "cgpass": "cgpass.backend",
    "TrainStep": "cgpass.whole_step",
    "checkpoint": "cgpass.recompute.api",
    "counters": "cgpass.telemetry",
    "expect": "cgpass.report.summary",
    "explain": "cgpass.report.explain",
    "make_graphed_callables": "cgpass.graphed.api",
    "reset": "cgpass.backend",
    "summary": "cgpass.report.summary",
    "train_step": "cgpass.whole_step",
    "verify": "cgpass.report.verify",
}

if logging.lastResort is not None:
    logging.lastResort.addFilter(telemetry.named)
registration.turn_off_if_early()  # NCCL reads it once; later may be too late


def __getattr__(name: str) -> Any:
    """Load what needs torch on first use: `import cgpass` itself stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cgpass' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
