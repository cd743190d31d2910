"""Settings: `Options`, the process-wide defaults and the `CGPASS_*` variables."""

import difflib
import functools
import json
import logging
import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from cgpass.errors import OptionError

log = logging.getLogger(__name__)
_warn_once: Final = functools.cache(log.warning)

SCRIPTS_OWN: Final = frozenset({"CGPASS_VENV", "CGPASS_RANDOM_PROGRAMS"})
"""Variables that this repository's scripts and tests read."""
ENV_PREFIX: Final = "CGPASS_"
_OPERATOR: Final = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*(\.[A-Za-z_]\w*)?")


def _choice(*allowed: str) -> Any:
    return field(default=allowed[0], metadata={"allowed": allowed})


def _count(default: int, *, at_least: int) -> Any:
    return field(default=default, metadata={"at_least": at_least})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of one compiled function; immutable, comparable and hashable.

    Examples:
        >>> options = cgpass.Options(outputs="owned", max_recordings=8)
        >>> compiled = torch.compile(torch.sin, backend="cgpass", options={"outputs": "owned", "max_recordings": 8})

    Built directly, fields that you leave out have the defaults below. `torch.compile(..., options={...})` starts from the
    process-wide defaults instead.

    Raises:
        OptionError: A field has a value that is not allowed.
    """

    compiler: Literal["inductor", "eager"] = _choice("inductor", "eager")
    """Kernels of a partition: Inductor's, or aten operators as they are."""

    driver: Literal["auto", "cuda", "simulated", "none"] = _choice(
        "auto", "cuda", "simulated", "none"
    )
    """Records and replays graphs; `auto`: `cuda` if the graph is on CUDA, else `none`."""

    static_input_check: Literal["rerecord", "error", "off"] = _choice("rerecord", "error", "off")
    """Reaction to a parameter that moved or was replaced. Use `off` only if parameters provably never move. Another
    module that shares the code does not count."""

    max_recordings: int = _count(64, at_least=1)
    """Recordings that a partition keeps for one set of parameters and buffers: for different sizes, and for calls that
    wait for their backward."""

    max_copied_mib: int = _count(64, at_least=0)
    """A call copies parameters and buffers that lie at new addresses, up to this many MiB; above that it runs without a
    graph."""

    outputs: Literal["shared", "owned"] = _choice("shared", "owned")
    """`shared`: outputs live in the graph's pool and are copied out only if still alive when it is reused.
    `owned`: every output is a copy."""

    max_pending_calls: int = _count(16, at_least=1)
    """Calls of one function that may wait for their backward, each with memory of its own; further ones run without a
    graph."""

    min_partition_ops: int = _count(4, at_least=1)
    """If something in a graph can't be captured, partitions around it with fewer operators that do work on the device
    run without a graph, too; views don't count. A graph that is one partition is captured whatever its size."""

    unsafe_ops: tuple[str, ...] = ()
    """Operators that are never captured, as `ns::op` or `ns::op.overload`."""

    on_skip: Literal["warn", "raise", "silent"] = _choice("warn", "raise", "silent")
    """Reaction to a partition that can't be captured."""

    rng: Literal["exact", "paired"] = _choice("exact", "paired")
    """`exact`: eager's own random numbers. `paired`: generator pairs with their own seeds."""

    progress: Literal["auto", "off"] = _choice("auto", "off")
    """Shows a line while a compilation or recording takes long; `auto`: if stderr is a terminal."""

    inductor: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Settings of Inductor for the partitions."""

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = _validated(spec.name, getattr(self, spec.name))
            object.__setattr__(self, spec.name, value)

    @classmethod
    def _parse(cls, options: "Mapping[str, Any] | Options | None" = None) -> "Options":
        """Read names and values that a user gave, over the process-wide defaults; an `Options` is complete in itself.

        Raises:
            OptionError: An unknown name (with the nearest known one) or a bad value.
        """
        if isinstance(options, Options):
            return options
        if options is not None and not isinstance(options, Mapping):
            raise OptionError(
                f"cgpass: options must be a dict of option names and values, got {_shown(options)}."
            )
        return cls(**{**_defaults(), **_known(options or {})})


_SPECS: Final = {spec.name: spec for spec in fields(Options)}
_lock: Final = threading.RLock()  # a signal may come inside
_overrides: Final[dict[str, Any]] = {}


class set_defaults:  # noqa: N801  called as a function
    """Change the defaults of every function that is compiled from now on in this process.

    As a statement, the change stays. As `with cgpass.set_defaults(...):`, the block gets the new defaults, and the old ones
    return at its end. A function reads them when it compiles: in its first call and when it recompiles (for another shape,
    say), not at `torch.compile`. Make these calls inside the block, or pass `options=`, which stay with the function.
    `options=` wins over these defaults, which win over the environment variables `CGPASS_<OPTION>`.

    Examples:
        >>> with cgpass.set_defaults(driver="none") as options:
        ...     options.driver
        'none'

    Args:
        **options: Fields of `Options`.

    Raises:
        OptionError: An unknown name or a bad value; nothing is changed then.
    """

    def __init__(self, **options: Any) -> None:
        self._set = {name: _validated(name, value) for name, value in _known(options).items()}
        with _lock:
            self._before = {name: _overrides[name] for name in self._set.keys() & _overrides.keys()}
            _overrides.update(self._set)

    def __enter__(self) -> Options:
        return current_defaults()

    def __exit__(self, *raised: object) -> None:
        with _lock:
            for name in self._set:
                _overrides.pop(name, None)
            _overrides.update(self._before)


def current_defaults() -> Options:
    """Return the process-wide defaults: `set_defaults` over `CGPASS_*` over the built-in ones."""
    return Options(**_defaults())


def _defaults() -> dict[str, Any]:
    with _lock:
        return {**_from_environment(), **_overrides}


def _from_environment() -> dict[str, Any]:
    """Read `CGPASS_<OPTION>`; say once which other variables of that prefix there are."""
    found, unknown = {}, []
    for variable in sorted(os.environ):
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name in _SPECS:
            found[name] = from_text(variable, name, os.environ[variable])
        elif near := nearest(name, _SPECS, cutoff=0.75):  # RUN is no misspelt RNG
            raise OptionError(
                f"cgpass: environment variable {variable} is not an option; "
                f"did you mean {ENV_PREFIX}{near.upper()}?"
            )
        elif variable not in SCRIPTS_OWN:
            unknown.append(variable)
    if unknown:
        _warn_once(
            "cgpass: unknown environment variables are ignored: %s; options are %s followed by one of %s",
            ", ".join(unknown),
            ENV_PREFIX,
            ", ".join(name.upper() for name in _SPECS),
        )
    return found


def from_text(variable: str, name: str, text: str) -> Any:
    """Return the value of an option that an environment variable gives.

    Raises:
        OptionError: A bad value.
    """
    value: Any = text.strip()
    try:
        if "at_least" in _SPECS[name].metadata:
            value = int(value)
        elif name == "inductor":
            value = json.loads(value)
        elif name == "unsafe_ops":
            value = [item.strip() for item in value.split(",") if item.strip()]
    except ValueError:
        value = text  # refused below, as the user wrote it
    return _validated(name, value, f"environment variable {variable}")


def _known(options: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in options:
        if name not in _SPECS:
            near = nearest(name, _SPECS)
            hint = f"did you mean {near!r}?" if near else f"known: {', '.join(_SPECS)}."
            raise OptionError(f"cgpass: unknown option {name!r}; {hint}")
    return options


def nearest(name: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that one looks like, if there is any."""
    matches = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=cutoff)
    return matches[0] if matches else None


def _validated(name: str, value: Any, where: str | None = None) -> Any:
    """Return `value` in the form that `Options` keeps, or raise naming `where` it came from."""
    metadata, hint = _SPECS[name].metadata, "."
    if "allowed" in metadata:
        allowed = metadata["allowed"]
        if isinstance(value, str) and value in allowed:
            return value
        wanted, near = f"be one of {', '.join(map(repr, allowed))}", nearest(value, allowed)
        hint = f"; did you mean {near!r}?" if near else "."
    elif "at_least" in metadata:
        if type(value) is int and value >= metadata["at_least"]:
            return value
        wanted = f"be an int >= {metadata['at_least']}"
    elif name == "inductor":
        if isinstance(value, Mapping):
            return dict(value)
        wanted = "be a dict of Inductor config names and values, as JSON in the environment"
    elif isinstance(value, (tuple, list, set, frozenset)):
        bad = [op for op in value if not (isinstance(op, str) and _OPERATOR.fullmatch(op))]
        if not bad:
            return tuple(sorted(set(value)))
        wanted, value = "hold names of the form 'ns::op' or 'ns::op.overload'", bad[0]
    else:
        wanted = "be a tuple or list of operator names"
    where = where or f"option {name!r}"
    raise OptionError(f"cgpass: {where} must {wanted}, got {_shown(value)}{hint}")


def _shown(value: Any) -> str:
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"{text} ({type(value).__name__})"
