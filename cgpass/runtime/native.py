"""Compiles `_native.cpp` once per torch and Python, keeps the result on disk, and loads it.

Note [When native code is compiled]
    A compilation that may record starts it, beside itself. The first call of a function that has captured partitions
    waits for it, whatever that call does: all that decides about it is in there. So a process that may record leaves it
    for every later one, however short it is; one that records nothing (`driver="none"`) neither starts it nor waits. Of
    several processes one compiles, under a lock that the kernel takes from a process that dies; the others wait, and load what
    it made. The file gets its name when it is complete.

Note [Where there is no native code]
    It is needed to record: nothing does the same in Python. Where it can't be had (no compiler, one that fails, not
    Linux) every call of what would be captured runs without a graph, with the same kernels, as with `driver="none"`;
    one warning says why and what to install. `Owner.enter_call` and `make_graphed_callables` ask for it.

`torch.utils.cpp_extension` is not used: it needs ninja, prints, runs the compiler for its version in each process, and
a killed process leaves a lock behind that all later ones wait for.
"""

import atexit
import contextlib
import errno
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

import torch

from cgpass.runtime import fast
from cgpass.runtime.changes import new_lock
from cgpass.telemetry import progress

if sys.platform != "win32":  # where nothing is compiled
    import fcntl

log = logging.getLogger(__name__)

SOURCE: Final = Path(__file__).with_name("_native.cpp")
_ELSEWHERE: Final = "Set XDG_CACHE_HOME to a folder that can be written"
_INSTALL: Final = "Install g++ or clang++, or set CXX to a compiler"
ANOTHER: Final = "Set CXX to another compiler, or install g++ or clang++"


class BuildError(Exception):
    """Native code is missing: says why, what to do about it, and all that the compiler said."""

    def __init__(self, why: str, fix: str, said: str = "") -> None:
        super().__init__(why)
        self.fix = fix
        self.said = said


def file_name() -> str:
    """Return the file name of the compiled module for this torch and this Python.

    Raises:
        BuildError: This platform is not known to work.
    """
    if platform.system() != "Linux":
        raise BuildError(f"it is for Linux, not for {platform.system()}", "Use Linux")
    parts = (
        SOURCE.read_text(),
        torch.__version__,
        str(torch.version.git_version),
        str(torch.compiled_with_cxx11_abi()),
        str(sysconfig.get_config_var("SOABI")),
    )
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return f"native-{key}.so"


def cache_folder() -> Path:
    """Return the folder of the compiled module."""
    home = os.path.expanduser("~").removeprefix("~")  # a user of a container may have none
    return Path(os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache") / "cgpass"


def build(*, keep: bool = False) -> Path:
    """Compile the module unless it is compiled; waits for another process that does. Returns its path.

    If the cache folder can't be written, or is full, a temporary folder is used, which is gone when the process ends;
    with `keep` that is an error.

    Raises:
        BuildError: Says why that can't be.
    """
    try:
        path = cache_folder() / file_name()
        try:
            return _built(path)
        except OSError as error:
            if keep:
                raise
            folder = _temporary_folder()
            log.info("native code is compiled for this process alone, in %s: %s", folder, error)
            return _built(folder / path.name)
    except OSError as error:
        raise BuildError(str(error), _ELSEWHERE) from error


def _temporary_folder(beside: Path | None = None) -> Path:
    """A folder that is gone when this process ends, whatever becomes of processes that it forks."""
    folder, process = tempfile.mkdtemp(prefix=_prefix(), dir=beside), os.getpid()
    atexit.register(lambda: process == os.getpid() and shutil.rmtree(folder, ignore_errors=True))
    return Path(folder)


def _prefix() -> str:
    """Names of this machine's folders begin so: another one may share the cache, but no locks. No host's name has a `=`."""
    return f"cgpass-{platform.node()}="


def _built(path: Path) -> Path:
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.parent) as is_alone:
        if path.exists():
            return path
        if is_alone:
            for left in path.parent.iterdir():
                if left.name.startswith(_prefix()):  # by a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
        log.info(
            "native code for torch %s is compiled, once, to %s", torch.__version__, path.parent
        )
        folder = _temporary_folder(path.parent)
        try:
            made = folder / path.name
            _compile(made)
            with made.open("rb") as file:
                os.fsync(file.fileno())  # loading part of it would crash
            made.replace(path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return path


_threads = new_lock()
"""The file's lock is one of processes."""


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """A block that one process runs at a time where the file system has locks; yields whether it has."""
    with _threads, (folder / ".lock").open("w") as file:
        is_alone = False
        with contextlib.suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX)  # not flock: a forked child would have it, too
            is_alone = True
        yield is_alone


def _compile(made: Path) -> None:
    """Run the compiler; where this process ends before, `made` is gone, and there is nowhere to write to."""
    command = _command(made)
    try:
        run = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(made.parent), "LC_ALL": "C"},
            process_group=0,  # or Ctrl-C would end the compiler, and this process go on without graphs
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise BuildError(f"{command[0]} can't be run: {error.strerror}", _INSTALL) from error
    if run.returncode:
        for code in (errno.ENOSPC, errno.EDQUOT):
            if os.strerror(code).lower() in run.stdout.lower():
                raise OSError(code, os.strerror(code), str(made.parent.parent))
        lines = run.stdout.splitlines()
        first = next((line for line in lines if "error" in line), lines[0] if lines else "")
        why = f"{command[0]} failed with status {run.returncode}: {first}".removesuffix(": ")
        raise BuildError(why, ANOTHER, run.stdout)


def compiler() -> list[str]:
    """Return the command that compiles C++.

    Raises:
        BuildError: There is none.
    """
    command = os.environ.get("CXX", "").strip() or next(
        filter(shutil.which, ("c++", "g++", "clang++")), None
    )
    if command is None:
        raise BuildError("no C++ compiler was found (c++, g++, clang++)", _INSTALL)
    try:
        return shlex.split(command)
    except ValueError as error:
        raise BuildError(f"CXX is no command, but {command!r}: {error}", ANOTHER) from error


def _command(made: Path) -> list[str]:
    root = Path(torch.__file__).parent
    return [
        *compiler(),
        *("-std=c++20", "-O2", "-DNDEBUG", "-w", "-fPIC", "-shared", "-fvisibility=hidden"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{root / 'include'}",
        f"-I{sysconfig.get_paths()['include']}",
        *(str(SOURCE), "-o", str(made), f"-L{root / 'lib'}"),
        *("-lc10", "-ltorch_cpu", "-ltorch_python"),
    ]


def load(path: Path) -> ModuleType:
    """Import the compiled module.

    Raises:
        BuildError: It can't be loaded into this process.
    """
    spec = importlib.util.spec_from_file_location(f"cgpass.runtime.{SOURCE.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        fix = "Delete the file to compile it again"
        raise BuildError(f"{path} can't be loaded: {error}", fix) from error
    return module


class Loader:
    """Has the native code compiled and loaded once per process."""

    def __init__(self) -> None:
        self.why_not: str | None = "nothing is recorded; cgpass.summary() says why"
        """The reason that there is none, and as it looks will be none."""
        self._process: int | None = None
        """The one that it was started in; a thread is not forked."""
        self._thread: threading.Thread | None = None
        self._lock = new_lock()

    def start(self) -> None:
        """See Note [When native code is compiled]. Waits for nothing."""
        with self._lock:
            if self._process == os.getpid():
                return
            self.why_not = None
            thread = threading.Thread(target=self._load, name="cgpass-build", daemon=True)
            thread.start()
            self._thread, self._process = thread, os.getpid()  # last: an exception may come before

    def _load(self) -> None:
        try:
            fast.fill_in(load(build()))
        except BuildError as error:
            self.why_not = str(error)
            said = " (`python -m cgpass build` shows its whole output)" if error.said else ""
            log.warning(
                "cgpass has no native code, so everything runs without a graph: %s%s. %s.",
                error,
                said,
                error.fix,
            )

    def wait(self, setting: progress.Setting = "off") -> bool:
        """Start if need be, and wait until all is loaded or can't be, with a progress line; returns whether it is."""
        if fast.is_loaded:
            return True
        self.start()
        thread = self._thread
        if thread is not None and thread.is_alive():
            with progress.shown("compiling native code, once per torch version", setting):
                thread.join()
        return fast.is_loaded

    @property
    def status(self) -> str | None:
        """Say that it is in use, or why it is not; None as long as nothing was to be recorded."""
        if self._process is None:
            return None
        if fast.is_loaded:
            return "in use"
        return "being compiled" if self.why_not is None else f"not in use: {self.why_not}"


loader = Loader()
