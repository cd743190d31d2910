"""Which version of what a call does once per tensor is in use: Python's until the C++ in `_fast.cpp` is there.

Note [Two versions of each function]
    `native` compiles the module, at the latest before the first recording. What this module has from `fast_python.py` is
    then replaced, so callers write `fast.aliases(...)` and never import the functions themselves. Both versions take and
    return the same values: what one made (keys of recordings, counts of holders) the other goes on with.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from cgpass import _torch
from cgpass.runtime import native
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


def functions_of(module: ModuleType) -> Mapping[str, Callable[..., Any]]:
    """The compiled version of each function."""
    return {name: getattr(module, name) for name in PYTHON}


def install(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Have calls made from now on use these versions of the functions."""
    globals().update(functions)


def is_compiled() -> bool:
    """Whether the compiled versions are in use."""
    return static_key is not PYTHON["static_key"]


def _use(module: ModuleType) -> None:
    install(functions_of(module))


native.loader.on_load(native.FUNCTIONS, _use)


def wait() -> bool:
    """Wait until the functions are compiled or have failed to; returns whether they are in use."""
    native.loader.wait()
    return is_compiled()


def can_swap() -> bool:
    """Whether `swap_storages` works: in torch itself, or compiled. Waits for the compiler where it has to."""
    return _torch.swap_data_ptr is not None or wait()
