"""Which version of what a call does once per tensor is in use: Python's until the C++ in `_fast.cpp` is there.

Note [Two versions of each function]
    `start` loads the compiled module if it was built before, else compiles it in the background (4 s, behind the
    compilation of the user's graph). What this module has from `fast_python.py` is replaced when it is there, so callers
    write `fast.aliases(...)` and never import the functions themselves. Both versions take and return the same values:
    what one made (keys of recordings, counts of holders) the other goes on with.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from cgpass import _torch
from cgpass.options import fast_mode
from cgpass.runtime import fast_build
from cgpass.runtime.fast_python import (
    aliases,
    any_held,
    any_held_among,
    copies,
    exclusive,
    fill,
    fits,
    geometry,
    held,
    in_transform,
    layouts,
    members,
    put,
    put_accumulators,
    requiring_grad,
    stand_in,
    static_key,
    swap_storages,
    take_accumulators,
    unchanged,
    versions,
    views,
)

log = logging.getLogger(__name__)

PYTHON: Mapping[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        static_key,
        layouts,
        requiring_grad,
        unchanged,
        members,
        geometry,
        versions,
        in_transform,
        any_held,
        any_held_among,
        held,
        stand_in,
        exclusive,
        swap_storages,
        aliases,
        views,
        copies,
        put,
        fits,
        fill,
        take_accumulators,
        put_accumulators,
    )
}


class _Loader:
    """Has the compiled functions loaded once per process."""

    def __init__(self) -> None:
        self.started = False
        self.warned = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Load the compiled module if it was built before, else build it in the background."""
        with self._lock:
            if self.started:
                return
            mode = fast_mode()
            self.started = True
            if mode == "off":
                return
            try:
                path = fast_build.cached_path()
                if path.exists():
                    install(functions_of(fast_build.load(path)))
                    return
            except fast_build.BuildError as error:
                _say_why_not(error)
                return
            self._thread = threading.Thread(
                target=_build_and_install, args=(path,), name="cgpass-build", daemon=True
            )
            self._thread.start()
        if mode == "wait":
            self.wait()

    def wait(self) -> None:
        """Wait for the build, if there is one."""
        thread = self._thread
        if thread is not None:
            thread.join()


def _build_and_install(path: Path) -> None:
    try:
        fast_build.build(path)
        install(functions_of(fast_build.load(path)))
    except fast_build.BuildError as error:
        _say_why_not(error)


def _say_why_not(error: Exception) -> None:
    log.info("cgpass runs the Python versions of its C++ functions: %s", error)


def functions_of(module: ModuleType) -> Mapping[str, Callable[..., Any]]:
    """The compiled version of each function."""
    return {name: getattr(module, name) for name in PYTHON}


def install(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Have calls made from now on use these versions of the functions."""
    globals().update(functions)


def is_compiled() -> bool:
    """Whether the compiled versions are in use."""
    return static_key is not PYTHON["static_key"]


_loader = _Loader()


def start() -> None:
    """See Note [Two versions of each function]. Never waits for a compiler, unless `CGPASS_FAST=wait`."""
    if not _loader.started:
        _loader.start()


def wait() -> bool:
    """Wait until the functions are compiled or have failed to; returns whether they are."""
    start()
    _loader.wait()
    return is_compiled()


def can_swap() -> bool:
    """Whether `swap_storages` works: in torch itself, or compiled. Waits for the build where it has to."""
    if _torch.swap_data_ptr is not None:
        return True
    if not wait() and not _loader.warned:
        _loader.warned = True
        log.warning(
            "torch %s can't move the memory of a tensor, and cgpass has no compiled function that does: outputs and "
            "gradients are copied out of the graphs' memory in every call. Install a C++ compiler, or torch 2.13.",
            torch.__version__,
        )
    return is_compiled()
