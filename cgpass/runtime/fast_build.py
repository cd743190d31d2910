"""Compiles C++ files of this folder once per torch and Python, and keeps the results on disk for every later process."""

import atexit
import contextlib
import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from cgpass import _torch

FUNCTIONS = Path(__file__).with_name("_fast.cpp")
NODE = Path(__file__).with_name("_node.cpp")
_LIBRARIES = ("c10", "torch_cpu", "torch_python")


class BuildError(Exception):
    """Why there is no compiled module."""


def cached_path(source: Path = FUNCTIONS) -> Path:
    """Where a source's compiled module for this torch and this Python lies, or will.

    Raises:
        BuildError: This platform is not known to work, or there is no place to keep files.
    """
    if platform.system() != "Linux":
        raise BuildError(f"it is compiled on Linux only, not on {platform.system()}")
    if not _layout_is_known():
        raise BuildError(f"torch {torch.__version__} lays tensors out in a way not known")
    parts = (
        source.read_text(),
        torch.__version__,
        str(torch.version.git_version),
        str(torch.compiled_with_cxx11_abi()),
        str(sysconfig.get_config_var("SOABI")),
    )
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    try:
        return _cache_folder() / f"{source.stem.strip('_')}-{key}.so"
    except (OSError, RuntimeError) as error:
        raise BuildError(f"no folder to keep it in: {error}") from error


def _layout_is_known() -> bool:
    """Whether a Python tensor is its header and then the address of its TensorImpl, as `_fast.cpp` declares it.

    Source: torch/csrc/autograd/python_variable.h, `THPVariable`, 2.11 to 2.15.
    """
    if platform.python_implementation() != "CPython":
        return False
    with _torch.without_modes():  # a graph may be being traced
        tensor = torch.empty(0)
    address = id(tensor) + object.__basicsize__
    return ctypes.c_void_p.from_address(address).value == tensor._cdata


def _cache_folder() -> Path:
    """The user's cache folder; a temporary one if that can't be written."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cgpass"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    temporary = Path(tempfile.mkdtemp(prefix="cgpass-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


def _command(compiler: str, source: Path, target: Path) -> list[str]:
    root = Path(torch.__file__).parent
    return [
        *shlex.split(compiler),
        *("-std=c++20", "-O2", "-DNDEBUG", "-w", "-fPIC", "-shared", "-fvisibility=hidden"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{root / 'include'}",
        f"-I{sysconfig.get_paths()['include']}",
        *(str(source), "-o", str(target), f"-L{root / 'lib'}"),
        *(f"-l{library}" for library in _LIBRARIES),
    ]


def build(target: Path, source: Path = FUNCTIONS) -> None:
    """Compile to `target`. Several processes may do so at once: each compiles its own file and renames it last.

    Raises:
        BuildError: No compiler, or it failed; says which and the first line of its complaint.
    """
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        raise BuildError("no C++ compiler (c++, g++, clang++, or what CXX names)")
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.stem}-", suffix=".so", dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise BuildError(str(error)) from error
    temporary = Path(name)
    try:
        _compile(_command(compiler, source, temporary), temporary)
        temporary.replace(target)
    except OSError as error:
        raise BuildError(str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _compile(command: list[str], target: Path) -> None:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )

        def abandon() -> None:
            """A daemon thread doesn't outlive the interpreter; what it waits for must not either."""
            process.kill()
            process.wait()
            target.unlink(missing_ok=True)

        atexit.register(abandon)
        try:
            failed = process.wait()
        finally:
            atexit.unregister(abandon)
        if failed:
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()
            said = next((line for line in lines if "error" in line), lines[0] if lines else "")
            raise BuildError(f"{command[0]} failed with status {failed}: {said}")


def load(path: Path, source: Path = FUNCTIONS) -> ModuleType:
    """Import the compiled module of a source.

    Raises:
        BuildError: It can't be loaded into this process.
    """
    spec = importlib.util.spec_from_file_location(f"cgpass.runtime.{source.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"{path} can't be loaded: {error}") from error
    return module
