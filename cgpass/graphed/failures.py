"""Captures that fail: which callable, which operator, which line."""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from cgpass import torch_private
from cgpass.errors import CaptureError, CGPassError, GraphedArgumentError
from cgpass.runtime import rng
from cgpass.runtime.syncs import is_capture_error

_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) for module in (torch,))
_MODULES = str(Path(torch.nn.__file__ or "").parent / "modules")
_OWN = str(Path(__file__).parents[1])


@contextlib.contextmanager
def blamed(
    name: str, direction: str, again: Callable[[torch_private.TorchDispatchMode], object]
) -> Iterator[None]:
    """Have what a capture raises name the callable, the operator and the line.

    Args:
        name: Of the callable.
        direction: "forward" or "backward".
        again: Captures the same once more, in a mode that watches for the operator.

    Raises:
        CaptureError: In place of what torch or CUDA raise because a capture does not allow what was done.
    """
    try:
        yield
    except CGPassError:
        raise
    except Exception as error:
        if _is_foreign_generator(error):
            raise CaptureError(
                f"make_graphed_callables: the {direction} of {name} draws random numbers from a generator of its own, at "
                f"{user_line(error)}: {_first_line(error)}. Draw from the default one, or from a state of "
                "GraphedOptions(rng_tracker=...)."
            ) from _thrown_into(error)
        if not is_capture_error(error):
            raise
        line, operator = user_line(error), _operator(again)
        where = "" if operator is None else f", in {operator}"
        where += "" if line is None else f", at {line}"
        raise CaptureError(
            f"make_graphed_callables: the {direction} of {name} can't be captured{where}: {_first_line(error)}. "
            "Move what waits for the device (or needs the host) out of the callable or into a capture-time hook, or "
            'use torch.compile(backend="cgpass"), which captures around it.'
        ) from _thrown_into(error)


_FREED = "backward through the graph a second time"  # torch/csrc/autograd/variable.h, 2.11 to 2.15


@contextlib.contextmanager
def freed_graphs_named(name: str) -> Iterator[None]:
    """Have an error of a backward whose graph a forward used up name the callable.

    Args:
        name: Of the callable.

    Raises:
        GraphedArgumentError: In place of what autograd raises.
    """
    try:
        yield
    except RuntimeError as error:
        if _FREED not in str(error):
            raise
        raise GraphedArgumentError(
            f"make_graphed_callables: {name} takes gradients itself (torch.autograd.grad or backward) and so frees what "
            "the backward of its results needs. Pass create_graph=True or retain_graph=True there if they are to have "
            "one; else detach them, or record under torch.no_grad() with torch.enable_grad() inside."
        ) from _thrown_into(error)


_FOREIGN_GENERATOR = (
    "not registered with the graph",  # simulated
    "generator not in capture mode",  # ATen/cuda/CUDAGeneratorImpl.cpp, 2.11
    "capture_state != nullptr",  # the same, 2.15
)


def _is_foreign_generator(error: BaseException) -> bool:
    """Whether a capture met a generator that is not registered with the graph."""
    return any(words in str(error) for words in _FOREIGN_GENERATOR)


def _operator(again: Callable[[torch_private.TorchDispatchMode], object]) -> str | None:
    """The last operator that ran before a capture fails."""
    watch = LastOp()
    with contextlib.suppress(Exception):
        again(watch)
        return None
    return watch.name


def user_line(error: BaseException) -> str | None:
    """Where the user's code was when an error was raised: the innermost frame outside of torch and cgpass.

    Where there is none, as in a Sequential of torch's modules, that of the innermost module.
    """
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    users = [f for f in frames if not f.filename.startswith((*_LIBRARIES, _OWN, "<"))]
    modules = [f for f in frames if f.filename.startswith(_MODULES)]
    for frame in (*users, *modules):
        return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {(frame.line or '').rstrip(':')}"
    return None


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(".")


class LastOp(torch_private.TorchDispatchMode):
    """Notes the operator that runs; what puts the generators back after a failure is none."""

    def __init__(self) -> None:
        """Nothing ran yet."""
        super().__init__()
        self.name: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run it."""
        if func not in rng.OPERATORS:
            self.name = str(func)
        return func(*args, **(kwargs or {}))


def _thrown_into(error: BaseException) -> BaseException:
    """An error as it came out of a `with` block, for the generator that it was thrown into to raise another one from it.

    Its traceback begins with the generator's frame, which knows its caller, whose frame holds the error: a cycle that
    would keep what the other frames hold until the garbage collector comes (Python 3.12).
    """
    frames = error.__traceback__
    return error if frames is None else error.with_traceback(frames.tb_next)
