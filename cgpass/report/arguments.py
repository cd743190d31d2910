"""What `explain` makes of its arguments: options taken out, and a batch given as the function takes it."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from cgpass.errors import InputError, OptionError
from cgpass.options import Options

Function = Callable[..., Any] | torch.nn.Module
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_BY_POSITION: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def options_of(fn: Function, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Take `options=` out of the keywords, unless the function has such an argument itself."""
    ours = {"options", *(spec.name for spec in dataclasses.fields(Options))}
    mine = {name: kwargs[name] for name in sorted(ours & kwargs.keys()) if not _takes(fn, name)}
    options = mine.pop("options", None)
    if mine:
        given = ", ".join(f"{name}=..." for name in mine)
        raise OptionError(
            f"cgpass.explain takes options as one argument: write options={mine} instead of {given}"
        )
    if options is not None:
        del kwargs["options"]
    return dict(options or {})


def _takes(fn: Function, name: str) -> bool:
    """Whether a function has an argument of that name, or may have one."""
    signature = _signature(fn)
    if signature is None:
        return True
    named = signature.parameters.values()
    return any(each.name == name or each.kind is each.VAR_KEYWORD for each in named)


def _signature(fn: Function) -> inspect.Signature | None:
    fn = getattr(fn, "_orig_mod", fn)
    try:
        return inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    except (TypeError, ValueError):  # one of C++
        return None


def arguments_of(fn: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Give a batch that is a mapping, tuple or list by itself as the function takes it: spread out, or as it is.

    Raises:
        InputError: It takes neither.
    """
    signature = _signature(fn)
    if signature is None or kwargs or len(args) != 1 or not _is_batch(args[0]):
        return args, kwargs
    (batch,) = args
    spread: Arguments
    if isinstance(batch, Mapping):
        spread = (), dict(batch)
        is_one = next(iter(signature.parameters), None) not in batch
    else:
        spread = tuple(batch), {}
        is_one = True
        if [each.kind in _BY_POSITION for each in signature.parameters.values()].count(True) == 1:
            return args, kwargs
    why = _why_not(signature, *spread)
    if why is None:
        return spread
    if is_one and _why_not(signature, args, kwargs) is None:
        return args, kwargs
    stars = "**" if isinstance(batch, Mapping) else "*"
    raise InputError(
        f"cgpass.explain: {_name_of(fn)} does not take {stars}batch: {why}; {_to_write(signature)}"
    )


def _is_batch(value: Any) -> bool:
    return bool(isinstance(value, Mapping) or type(value) in (tuple, list)) and len(value) > 0


def _why_not(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def _name_of(fn: Function) -> str:
    fn = getattr(fn, "_orig_mod", fn)
    if isinstance(fn, torch.nn.Module):
        return f"{type(fn).__name__}.forward"
    return str(getattr(fn, "__name__", type(fn).__name__))


def _to_write(signature: inspect.Signature) -> str:
    names = [
        f"{name}=..." for name, each in signature.parameters.items() if each.kind in _BY_POSITION
    ]
    names = [*names[:3], "..."] if len(names) > 3 else names
    return f"write out what it takes: cgpass.explain(model, {', '.join(names)})"


@contextlib.contextmanager
def refusals_told(fn: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Say what to write where a function that was given a batch as one argument can't do with its type."""
    signature = _signature(fn)
    if signature is None or kwargs or len(args) != 1 or not _is_batch(args[0]):
        yield
        return
    kind = type(args[0]).__name__
    try:
        yield
    except (AttributeError, TypeError) as error:
        text = str(error)
        if f"'{kind}'" not in text and f"not {kind}" not in text:
            raise
        raise InputError(
            f"cgpass.explain: {_name_of(fn)} was given the {kind} as one argument: {text}; {_to_write(signature)}"
        ) from None
