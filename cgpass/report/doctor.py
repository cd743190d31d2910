"""`python -m cgpass doctor`: looks for what graphs need, and records and replays a tiny one."""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.utils import collect_env

from cgpass import telemetry
from cgpass.backend import cgpass
from cgpass.errors import OptionError
from cgpass.options import current_defaults
from cgpass.report.text import wrapped
from cgpass.runtime import native
from cgpass.telemetry import progress
from cgpass.version import VERSION

_ENVIRONMENT: Final = {
    "TORCH_COMPILE_DISABLE": "torch.compile does nothing: unset it",
    "TORCHDYNAMO_DISABLE": "torch.compile does nothing: unset it",
    "CUDA_LAUNCH_BLOCKING": "each launch waits, and captures fail: unset it",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "graphs need the caching allocator: unset it",
}
"""Variables that do harm, and what to do about them."""

Finding = tuple[str, str, str | None]
"""Subject, result and remedy of a check; the last is empty where all is well, None where tests can do without."""


def doctor(out: Callable[[str], object]) -> int:
    """Look at everything, and say so line by line; returns the status to exit with."""
    sick = 0
    for look in (_torch, _compiler, _native, _environment, _tiny_graph):
        for what, said, fix in look():
            mark = "!!" if fix else "--" if fix is None else "ok"
            do = f"{'' if said.endswith('?') else '.'} {fix}" if fix else ""
            out("\n".join(wrapped(f"{mark} {what}: {said}{do}")))
            sick += bool(fix)
    out(f"{sick} to look at (!!)" if sick else "all is well")
    return 1 if sick else 0


def _torch() -> Iterator[Finding]:
    yield "cgpass", f"{VERSION}, Python {sys.version.split()[0]}", ""
    parts = [int(n) for n in torch.__version__.split("+")[0].split(".")[:2] if n.isdigit()]
    known = [2, 11] <= parts <= [2, 15]
    yield "torch", torch.__version__, "" if known else "Use torch 2.11 to 2.15"
    if not importlib.metadata.entry_points(group="torch_dynamo_backends", name="cgpass"):
        said = 'not installed by pip: torch.compile(..., backend="cgpass") needs `import cgpass`'
        yield "backend", said, ""
    devices = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    found = ", ".join(devices) or 'no device: driver="simulated" imitates graphs, for tests alone'
    version = collect_env.get_nvidia_driver_version(collect_env.run) or "not found"
    said = f"{version}, CUDA {torch.version.cuda or 'none'} in torch, {found}"
    yield "driver", said, "" if devices else None


def _compiler() -> Iterator[Finding]:
    try:
        name = native.compiler()[0]
        path = shutil.which(name)
        yield "C++ compiler", path or f"there is no {name}", "" if path else native.ANOTHER
    except native.BuildError as error:
        yield "C++ compiler", str(error), error.fix
    lacks = importlib.util.find_spec("triton") is None
    fix = "Install triton, or use compiler='eager'" if lacks and torch.cuda.is_available() else ""
    yield "triton", "not installed" if lacks else "installed", fix


def _native() -> Iterator[Finding]:
    try:
        with progress.shown("compiling native code", "auto"):
            path = native.build(keep=True)
        native.load(path)
        yield "native code", str(path), ""
    except native.BuildError as error:
        yield "native code", str(error), error.fix


def _environment() -> Iterator[Finding]:
    for name, fix in _ENVIRONMENT.items():
        if (value := os.environ.get(name, "")) == "1":
            yield f"{name}={value}", "is set", fix
    try:
        driver = current_defaults().driver
    except OptionError as error:
        yield "options", str(error).removeprefix("cgpass: ").rstrip("."), "Change or unset it"
        return
    fix = "It turns all graphs off: unset CGPASS_DRIVER" if driver == "none" else ""
    yield "options", f"driver={driver!r}", fix


def _tiny_graph() -> Iterator[Finding]:
    driver, device = ("cuda", "cuda") if torch.cuda.is_available() else ("simulated", "cpu")
    x, before = torch.linspace(-1, 1, 64, device=device), telemetry.counters()
    options: dict[str, Any] = {"driver": driver, "compiler": "eager"}
    try:
        call = torch.compile(lambda x: x.sin() * 2 + 1, backend=cgpass, options=options)
        right = all(torch.equal(call(x * n), (x * n).sin() * 2 + 1) for n in range(1, 5))
    except Exception as error:  # whatever it is, it is what is looked for
        error = getattr(error, "inner_exception", error)  # of what Dynamo wraps
        if isinstance(error, OptionError):  # told of above
            return
        text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        yield "a tiny graph", f"{type(error).__name__}: {text}", "See the lines above, or report it"
        return
    grown = telemetry.grown(telemetry.counters(), before)
    said = f"{grown['recordings']} recorded, {grown['replays']} replays, numbers {'right' if right else 'WRONG'}"
    fine = right and grown["recordings"] == 1 and grown["replays"] == 3
    yield f"a tiny graph ({driver})", said, "" if fine else "See the lines above, or report it"
