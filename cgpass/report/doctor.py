"""`python -m cgpass doctor`: whether what graphs need is there, and whether a tiny one is recorded and replayed."""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from cgpass import telemetry
from cgpass.backend import cgpass
from cgpass.options import Options
from cgpass.report.text import wrapped
from cgpass.runtime import native
from cgpass.version import VERSION

_ENVIRONMENT: Final = {
    "TORCH_COMPILE_DISABLE": "torch.compile does nothing: unset it",
    "TORCHDYNAMO_DISABLE": "torch.compile does nothing: unset it",
    "CUDA_LAUNCH_BLOCKING": "each launch waits, and captures fail: unset it",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "graphs need the caching allocator: unset it",
    "TORCHINDUCTOR_CUDAGRAPHS": "Inductor's own graphs; cgpass turns them off inside",
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "PYTORCH_ALLOC_CONF": "",
    "NCCL_GRAPH_REGISTER": "",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCH_LOGS": "",
    "TORCH_TRACE": "",
    "XDG_CACHE_HOME": "",
    "CXX": "",
}
"""Variables that matter, and what to do about them where something is to be done."""


@dataclass(frozen=True)
class Finding:
    """What one look found."""

    what: str
    said: str
    fix: str = ""
    """What to do; empty where all is well."""

    def __str__(self) -> str:
        mark = "!!" if self.fix else "ok"
        return f"{mark} {self.what}: {self.said}{f'. {self.fix}' if self.fix else ''}"


def doctor(out: Callable[[str], object]) -> int:
    """Look at everything, and say so line by line; returns the status to exit with."""
    start, sick = time.monotonic(), 0
    for look in (_versions, _driver, _compiler, _native, _caches, _environment, _tiny_graph):
        for finding in look():
            out("\n".join(wrapped(str(finding))) + "\n")
            sick += bool(finding.fix)
    took = f"after {time.monotonic() - start:.1f} s"
    out(f"{'all is well' if not sick else f'{sick} to look at (!!)'}, {took}\n")
    return 1 if sick else 0


def _versions() -> Iterator[Finding]:
    yield Finding("cgpass", f"{VERSION}, Python {sys.version.split()[0]}")
    parts = [int(n) for n in torch.__version__.split("+")[0].split(".")[:2] if n.isdigit()]
    known = [2, 11] <= parts <= [2, 15]
    yield Finding("torch", torch.__version__, "" if known else "Use torch 2.11 to 2.15")
    names = {each.name for each in importlib.metadata.entry_points(group="torch_dynamo_backends")}
    if "cgpass" not in names:
        said = 'torch.compile(..., backend="cgpass") needs `import cgpass` before it'
        yield Finding("backend", f"not installed by pip, {said}")


def _driver() -> Iterator[Finding]:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
        yield Finding("driver", f"CUDA {torch.version.cuda}, {', '.join(names)}")
    elif torch.version.cuda is None:
        yield Finding("driver", "torch without CUDA: graphs are simulated, for tests alone")
    else:
        yield Finding("driver", f"CUDA {torch.version.cuda}, no device: graphs are simulated")


def _compiler() -> Iterator[Finding]:
    named = os.environ.get("CXX", "").split(" ")[0]
    found = [named] if named else ["c++", "g++", "clang++"]
    path = next(filter(None, map(shutil.which, found)), None)
    fix = "" if path else "Install g++ or clang++, or name a compiler by CXX="
    yield Finding("C++ compiler", path or f"none of {', '.join(found)}", fix)
    has_triton = importlib.util.find_spec("triton") is not None
    fix = (
        ""
        if has_triton or not torch.cuda.is_available()
        else "Install triton, or use compiler='eager'"
    )
    yield Finding("triton", "installed" if has_triton else "not installed", fix)


def _native() -> Iterator[Finding]:
    try:
        path = native.cache_folder() / native.file_name()
    except native.BuildError as error:
        yield Finding("native code", str(error), error.fix)
        return
    kept = path.exists()
    start = time.monotonic()
    if native.loader.wait("off"):
        how = f"loaded from {path}" if kept else f"compiled in {time.monotonic() - start:.0f} s"
        yield Finding("native code", how)
    else:
        yield Finding("native code", str(native.loader.status), "See python -m cgpass build")


def _caches() -> Iterator[Finding]:
    folder = native.cache_folder()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    fix = "" if os.access(there, os.W_OK) else "Set XDG_CACHE_HOME to a folder that can be written"
    yield Finding("cache of native code", str(folder), fix)
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    yield Finding("cache of Inductor", inductor or "the default of torch")


def _environment() -> Iterator[Finding]:
    options = {name for name in os.environ if name.startswith("CGPASS_")}
    for name in sorted({*_ENVIRONMENT, *options} & os.environ.keys()):
        value, fix = os.environ[name], _ENVIRONMENT.get(name, "")
        yield Finding(f"{name}={value}", "is set", "" if value in ("", "0") else fix)
    if options:
        try:
            Options.parse(None)
        except ValueError as error:
            yield Finding("options", str(error), "Set CGPASS_ variables to what Options takes")


def _tiny_graph() -> Iterator[Finding]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    driver = "cuda" if device == "cuda" else "simulated"
    x = torch.linspace(-1, 1, 64, device=device)
    before = telemetry.counters()
    try:
        options: dict[str, Any] = {"driver": driver, "compiler": "eager"}
        call = torch.compile(lambda x: x.sin() * 2 + 1, backend=cgpass, options=options)
        right = all(torch.equal(call(x * n), (x * n).sin() * 2 + 1) for n in range(1, 5))
    except Exception as error:  # whatever it is, it is what is looked for
        text = (str(error).strip().splitlines() or [""])[0]
        yield Finding("a tiny graph", f"{type(error).__name__}: {text}", "Report it")
        return
    grown = {name: count - before[name] for name, count in telemetry.counters().items()}
    said = f"{grown['recordings']} recorded, {grown['replays']} replays, numbers {'right' if right else 'WRONG'}"
    fine = right and grown["recordings"] == 1 and grown["replays"] == 3
    yield Finding(
        f"a tiny graph ({driver})", said, "" if fine else "See the lines above, or report it"
    )
