"""Hooks that run around warm-ups and captures, and never on a replay.

Note [When hooks run]
    Outside of what is captured, on the stream that is current where something is recorded: once for each warm-up and once
    for the capture, `pre_backward` and `backward` where there is a backward. Parameters that they move are left as they
    leave them, but for a call that records again, which has them as they were. Warm-up hooks don't run then.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cgpass.errors import GraphedArgumentError, HookError

CAPTURE_TIME = ("pre_forward", "forward", "pre_backward", "backward")
WARM_UP = ("pre_warmup", "post_warmup")


class HookSet:
    """The functions that one callable has for each moment."""

    def __init__(self, hooks: object, names: Sequence[str], where: str) -> None:
        """Check what a user gave: `names` are the moments that there are, `where` is for messages.

        Raises:
            GraphedArgumentError: No mapping, an unknown name, or something that can't be called.
        """
        self._where = where
        if not isinstance(hooks, Mapping | None):
            raise _wrong(where, "a dict of hook names and functions or None", hooks)
        self._functions: dict[str, Callable[..., Any]] = dict(hooks or {})
        for name, function in self._functions.items():
            if name not in names:
                raise GraphedArgumentError(
                    f"make_graphed_callables: {where} has an unknown hook {name!r}; known: {', '.join(names)}."
                )
            if not callable(function):
                raise _wrong(f"{where}[{name!r}]", "a function", function)

    def __bool__(self) -> bool:
        """Tell whether there are any."""
        return bool(self._functions)

    def run(self, name: str, *args: Any) -> None:
        """Call the function of one moment.

        Raises:
            HookError: It returned something.
        """
        function = self._functions.get(name)
        result = None if function is None else function(*args)
        if result is not None:
            raise HookError(
                f"make_graphed_callables: {self._where}[{name!r}] returned a {type(result).__name__}. Hooks can't replace "
                "arguments or results: have it return None."
            )


def capture_time_hooks(hooks: object, num_callables: int) -> list[HookSet]:
    """One set per callable.

    Raises:
        GraphedArgumentError: Another number of entries than callables, or as for `HookSet`.
    """
    where = "capture_time_hooks"
    if hooks is None:
        hooks = [None] * num_callables
    if not isinstance(hooks, list | tuple):
        raise _wrong(where, "a sequence with one entry per callable", hooks)
    if len(hooks) != num_callables:
        raise GraphedArgumentError(
            f"make_graphed_callables: {where} has {len(hooks)} entries for {num_callables} callables. Give one each, "
            "None where there is nothing to run."
        )
    return [HookSet(each, CAPTURE_TIME, f"{where}[{i}]") for i, each in enumerate(hooks)]


def _wrong(where: str, wanted: str, got: object) -> GraphedArgumentError:
    return GraphedArgumentError(
        f"make_graphed_callables: {where} must be {wanted}, got {type(got).__name__}."
    )
