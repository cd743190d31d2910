"""Compiles `_native.cpp` once per torch and Python, keeps the result on disk, and loads it.

Note [When native code is compiled]
    A compilation that may record starts it, beside itself. The first call of a function that has captured partitions
    waits for it, whatever that call does: all that decides about it is in there. So a process that may record leaves it
    for every later one, however short it is; one that records nothing (`driver="none"`) neither starts it nor waits. A
    process that ends before kills the compiler: the file gets its name when it is complete. Of several processes one
    compiles, under a lock that the kernel takes from whoever dies; the others wait, and load what it made.

Note [Where there is no native code]
    It is needed to record: nothing does the same in Python. Where it can't be had (no compiler, one that fails, not
    Linux) every call of what would be captured runs without a graph, with the same kernels, as with `driver="none"`;
    one warning says why and what to install. `Owner.enter_call` and `make_graphed_callables` ask for it.

`torch.utils.cpp_extension` is not used: it needs ninja, prints, runs the compiler for its version in each process, and
a killed process leaves a lock behind that all later ones wait for.
"""

import atexit
import contextlib
import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import signal
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

from cgpass import torch_private
from cgpass.runtime import fast
from cgpass.telemetry import progress

if sys.platform != "win32":  # where nothing is compiled
    import fcntl

log = logging.getLogger(__name__)

SOURCE: Final = Path(__file__).with_name("_native.cpp")
_ELSEWHERE: Final = "Set XDG_CACHE_HOME to a folder that can be written"
_INSTALL: Final = "Install g++ or clang++, or name a compiler by CXX="
_ANOTHER: Final = "Name another compiler by CXX=, or install g++ or clang++"
_HASH_BYTES: Final = hashlib.sha256().digest_size
_LIBRARIES: Final = ("c10", "torch_cpu", "torch_python")


class BuildError(Exception):
    """Why there is no native code, what to do about it, and all that the compiler said."""

    def __init__(self, why: str, fix: str, said: str = "") -> None:
        super().__init__(why)
        self.fix = fix
        self.said = said


class _EndedError(BuildError):
    """The process ended meanwhile."""


# ---- where it lies


def file_name() -> str:
    """What the compiled module for this torch and this Python is called.

    Raises:
        BuildError: This platform, or this torch, is not known to work.
    """
    if platform.system() != "Linux":
        raise BuildError(f"it is for Linux, not for {platform.system()}", "Use Linux")
    if not _layout_is_known():
        raise BuildError(
            f"torch {torch.__version__} lays tensors out in a way not known",
            "Use torch 2.11 to 2.15",
        )
    parts = (
        SOURCE.read_text(),
        torch.__version__,
        str(torch.version.git_version),
        str(torch.compiled_with_cxx11_abi()),
        str(sysconfig.get_config_var("SOABI")),
    )
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return f"native-{key}.so"


def _layout_is_known() -> bool:
    """Whether a Python tensor is its header and then the address of its TensorImpl, as `_native.cpp` declares it.

    Source: torch/csrc/autograd/python_variable.h, `THPVariable`, 2.11 to 2.15.
    """
    if platform.python_implementation() != "CPython":
        return False
    with torch_private.without_modes():  # a graph may be being traced
        tensor = torch.empty(0, device="cpu")
    address = id(tensor) + object.__basicsize__
    return ctypes.c_void_p.from_address(address).value == tensor._cdata


def cache_folder() -> Path:
    """Where the compiled module is kept."""
    home = os.path.expanduser("~").removeprefix("~")  # a user of a container may have none
    return Path(os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache") / "cgpass"


# ---- compiling


def build(*, keep: bool = False) -> Path:
    """Compile the module unless it is compiled; waits for another process that does.

    Args:
        keep: Whether a cache folder that can't be written is an error; else a temporary folder is used, which is gone
            when the process ends.

    Returns:
        The compiled module.

    Raises:
        BuildError: Says why that can't be.
    """
    path = cache_folder() / file_name()
    try:
        if not is_whole(path):
            path = _writable(path.parent, keep=keep) / path.name
            with _alone(path.parent):
                if not is_whole(path):
                    _compile(path)
    except OSError as error:
        raise BuildError(str(error), _ELSEWHERE) from error
    return path


def is_whole(path: Path) -> bool:
    """Whether a compiled module is there as it was written: it ends with a hash of the rest.

    A machine that stops, or a disk that is full, may leave part of a file, and loading that would end the process.
    """
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-_HASH_BYTES]).digest() == data[-_HASH_BYTES:]


def _write_whole(made: Path, path: Path) -> None:
    data = made.read_bytes()
    path.write_bytes(data + hashlib.sha256(data).digest())  # the loader reads no further than data


def _writable(folder: Path, *, keep: bool) -> Path:
    """A folder, or a temporary one where that can't be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refusal = None if os.access(folder, os.W_OK) else f"{folder} can't be written"
    except OSError as error:
        refusal = f"{folder} can't be made: {error.strerror}"
    if refusal is None:
        return folder
    if keep:
        raise BuildError(refusal, _ELSEWHERE)
    folder = Path(tempfile.mkdtemp(prefix="cgpass-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    log.info("native code is compiled for this process alone, in %s: %s", folder, refusal)
    return folder


def _compile(path: Path) -> None:
    log.info("native code for torch %s is compiled, once, to %s", torch.__version__, path.parent)
    run = _Run(_compiler(), path)
    try:
        run.start()
        run.finish()
    finally:
        run.stop()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A block that one process runs at a time, where the file system has locks."""
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough where a forked child has it
        os.close(handle)


@contextlib.contextmanager
def _no_signals() -> Iterator[None]:
    """A block that no signal's handler ends: a process that was just started would be nobody's."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _compiler() -> list[str]:
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        raise BuildError("no C++ compiler was found (c++, g++, clang++)", _INSTALL)
    return shlex.split(compiler)


class _Run:
    """One run of the compiler."""

    def __init__(self, compiler: list[str], target: Path) -> None:
        self._target = target
        self._folder = Path(tempfile.mkdtemp(prefix="cgpass-build-"))
        self._made = self._folder / target.name
        root = Path(torch.__file__).parent
        self._command = [
            *compiler,
            *("-std=c++20", "-O2", "-DNDEBUG", "-w", "-fPIC", "-shared", "-fvisibility=hidden"),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            f"-I{root / 'include'}",
            f"-I{sysconfig.get_paths()['include']}",
            *(str(SOURCE), "-o", str(self._made), f"-L{root / 'lib'}"),
            *(f"-l{library}" for library in _LIBRARIES),
        ]
        self._log = self._folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False
        self._pid = os.getpid()
        # A daemon thread doesn't outlive the interpreter; what it waits for must not either.
        atexit.register(self.stop)

    def start(self) -> None:
        with self._log.open("wb") as output, _no_signals():
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"TMPDIR": str(self._folder)},
                    process_group=0,  # all that it starts ends with it
                )
            except OSError as error:
                why = f"{self._command[0]} can't be run: {error.strerror}"
                raise BuildError(why, _INSTALL) from error

    def finish(self) -> None:
        assert self._process is not None
        status = self._process.wait()
        if self._is_stopped:
            raise _EndedError("the process ended", "")
        if status:
            said = self._log.read_text(errors="replace")
            lines = said.splitlines()
            first = next((line for line in lines if "error" in line), lines[0] if lines else "")
            why = f"{self._command[0]} failed with status {status}: {first}".removesuffix(": ")
            raise BuildError(why, _ANOTHER, said)
        # The folder may be on another file system, and that may have no locks: nobody else writes to this name.
        part = self._target.with_suffix(f".{self._folder.name}.part")
        try:
            _write_whole(self._made, part)
            part.replace(self._target)
        finally:
            part.unlink(missing_ok=True)

    def stop(self) -> None:
        """Kill the compiler and all that it started, if it runs; nothing of it is left."""
        if os.getpid() != self._pid:  # a forked child ends
            return
        atexit.unregister(self.stop)
        process = self._process
        if process is not None and process.poll() is None:
            self._is_stopped = True
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


# ---- loading


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
        fix = "Delete the file to have it compiled again"
        raise BuildError(f"{path} can't be loaded: {error}", fix) from error
    return module


class Loader:
    """Has the native code compiled and loaded once per process."""

    def __init__(self) -> None:
        self.why_not: str | None = "native code is compiled for recordings, and nothing is recorded"
        """Why there is none, and as it looks will be none."""
        self._progress: progress.Setting = "off"
        self._process: int | None = None
        """The one that it was started in; a thread is not forked."""
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self, setting: progress.Setting = "off") -> None:
        """See Note [When native code is compiled]. Waits for nothing.

        Args:
            setting: Whether a line on the terminal says so while somebody waits.
        """
        with self._lock:
            self._progress = setting
            if self._process == os.getpid():
                return
            self._process, self.why_not = os.getpid(), None
            self._thread = threading.Thread(target=self._load, name="cgpass-build", daemon=True)
            self._thread.start()

    def _load(self) -> None:
        try:
            fast.fill_in(load(build()))
        except _EndedError:
            return
        except BuildError as error:
            self.why_not = str(error)
            _warn(error)

    def wait(self, setting: progress.Setting | None = None) -> bool:
        """Start if need be, and wait until all is loaded or can't be; returns whether it is.

        Args:
            setting: As for `start`; None for that of the last start.
        """
        if fast.is_loaded:
            return True
        self.start(self._progress if setting is None else setting)
        thread = self._thread
        if thread is not None and thread.is_alive():
            with progress.shown("compiling native code, once per torch version", self._progress):
                thread.join()
        return fast.is_loaded

    @property
    def status(self) -> str | None:
        """Whether it is in use, and if not why; None as long as nothing was to be recorded."""
        if self._process is None:
            return None
        if fast.is_loaded:
            return "in use"
        return "being compiled" if self.why_not is None else f"not in use: {self.why_not}"


def _warn(error: BuildError) -> None:
    """The one warning of a process that has no native code."""
    said = " (`python -m cgpass build` shows all that it said)" if error.said else ""
    log.warning(
        "cgpass has no native code, without which nothing is recorded and everything runs without a graph: %s%s. %s.",
        error,
        said,
        error.fix,
    )


loader = Loader()
