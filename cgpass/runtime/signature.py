"""What must match for a recording to be replayed, and differences as text."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from cgpass.compile.facts.input_info import InputInfo, InputKind
from cgpass.errors import InputError
from cgpass.runtime import fast
from cgpass.runtime.placeholders import num_bytes
from cgpass.telemetry.reason import is_size, new_value

ShapeKey = tuple[Any, ...]
"""Integers, identities of objects, and layouts of tensors where no guard of the caller and no integer covers them."""
StaticKey = bytes
"""Addresses of static inputs, one after the other: one hash and one comparison whatever their number."""

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_BY_VALUE = (int, bool, str, type(None), torch.dtype, torch.device, torch.layout)


class Layout:
    """Which inputs of a partition are static, copied, or part of the signature."""

    def __init__(
        self, infos: Sequence[InputInfo], *, check_static: bool, check_layout: bool
    ) -> None:
        self.infos = tuple(infos)
        kinds = [info.kind for info in infos]

        def positions(*wanted: InputKind) -> tuple[int, ...]:
            return tuple(i for i, kind in enumerate(kinds) if kind in wanted)

        self.copied = positions(InputKind.COPIED)
        self.pooled = positions(InputKind.POOLED)
        self.parameters = positions(InputKind.STATIC)
        self.checked = self.parameters if check_static else ()
        """Static inputs whose addresses are part of the signature."""
        self.static = (*self.checked, *self.pooled)
        self.seeds = tuple(i for i, info in enumerate(infos) if info.is_seed)
        self.mutated = tuple(i for i, info in enumerate(infos) if info.mutated)
        self.objects = positions(InputKind.GENERATOR, InputKind.OPAQUE)
        self._values = positions(InputKind.SYMINT)
        self._typed = self.knows_no_modules = check_layout
        self._whole = tuple(i for i in self.copied if infos[i].whole_storage)
        self._layouts = (
            positions(InputKind.COPIED, InputKind.STATIC)
            if check_layout
            else tuple(i for i, info in enumerate(infos) if info.is_resized)
        )

    def shape_key(self, args: Sequence[Any]) -> ShapeKey:
        """The part of the signature that decides what is computed."""
        key = tuple([args[i] for i in self._values])
        if self._typed:  # True is 1 and x[True] is not x[1]
            key += tuple([type(args[i]) for i in self._values])
        if self.objects:
            key += tuple([id(args[i]) for i in self.objects])
        if self._whole:
            key += tuple([place_of(args[i]) for i in self._whole])
        if self._layouts:
            key += tuple([layout_of(args[i]) for i in self._layouts])
        if self._typed:  # last: no input stands for them
            key += _ambient_modes()
        return key

    def bytes_that_move(self, args: Sequence[Any]) -> int:
        """Size of the inputs that are not known to stay in place."""
        return sum(num_bytes(args[i]) for i in (*self.copied, *self.pooled))

    def static_key(self, args: Sequence[Any]) -> StaticKey:
        """The part of the signature that decides where it is read."""
        return fast.static_key(args, self.static)

    def split(self, key: StaticKey) -> tuple[StaticKey, StaticKey]:
        """A static key's addresses of static inputs, and those of values of other recordings."""
        end = 8 * len(self.checked)
        return key[:end], key[end:]

    def changed(self, old: ShapeKey, new: ShapeKey) -> list[int]:
        """Positions of the inputs whose part of a shape key differs."""
        types = self._values if self._typed else ()
        positions = (*self._values, *types, *self.objects, *self._whole, *self._layouts)
        parts = zip(positions, old, new, strict=False)  # after them come the modes
        return sorted({i for i, a, b in parts if a != b})


def _ambient_modes() -> tuple[Any, ...]:
    """What decides which dtypes operators make, and by which kernels, besides their inputs."""
    autocast = [
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in ("cuda", "cpu")
    ]
    kernels = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    return (*autocast, torch.get_default_dtype(), *kernels)


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins in its storage, and how large that is."""
    return int(tensor.storage_offset()), tensor.untyped_storage().nbytes()


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a placeholder for `tensor` has to have."""
    bits = (tensor.is_conj(), tensor.is_neg())
    return (tuple(tensor.size()), tensor.stride(), tensor.dtype, bits)


def describe(infos: Iterable[InputInfo], limit: int = 5) -> str:
    """Names of inputs with the user's lines that read them, at most `limit` of them."""
    infos = list(infos)
    parts = [i.name if i.line is None else f"{i.name} (read at {i.line})" for i in infos[:limit]]
    if len(infos) > limit:
        parts.append(f"and {len(infos) - limit} more")
    return ", ".join(parts)


def describe_tensor(info: InputInfo, value: torch.Tensor) -> str:
    """Name of a tensor with its dtype and size and the user's line that reads it."""
    line = "" if info.line is None else f", read at {info.line}"
    return f"{info.name} ({str(value.dtype).removeprefix('torch.')}{list(value.size())}{line})"


def describe_tensors(
    infos: Sequence[InputInfo], args: Sequence[Any], positions: Sequence[int]
) -> str:
    """Names of tensors with their dtypes and sizes and the user's lines that read them, at most five of them."""
    parts = [describe_tensor(infos[i], args[i]) for i in positions[:5]]
    if len(positions) > 5:
        parts.append(f"and {len(positions) - 5} more")
    return ", ".join(parts)


def infer_infos(
    args: Sequence[Any], static_input_indices: Iterable[int], device: torch.device
) -> tuple[InputInfo, ...]:
    """Kinds of inputs of a callable that nothing is known of but one call's inputs.

    Raises:
        InputError: An input is of a kind that a recording can't take; names its position.
    """
    static = frozenset(static_input_indices)
    unknown = sorted(i for i in static if not 0 <= i < len(args))
    if unknown:
        raise InputError(
            f"static_input_indices names input {unknown[0]}, but the call has {len(args)}"
        )
    return tuple(
        InputInfo(f"input {i}", infer_kind(i, value, static, device))
        for i, value in enumerate(args)
    )


def infer_kind(index: int, value: Any, static: frozenset[int], device: torch.device) -> InputKind:
    """Kind of one input, told by its value.

    Raises:
        InputError: As `infer_infos`.
    """
    if isinstance(value, torch.Tensor):
        check_tensor(f"input {index}", value, device)
        return InputKind.STATIC if index in static else InputKind.COPIED
    if index in static:
        raise InputError(
            f"input {index} is named static but is a {type(value).__name__}, not a tensor"
        )
    if isinstance(value, torch.Generator):
        return InputKind.GENERATOR
    if isinstance(value, _BY_VALUE):
        return InputKind.SYMINT
    if isinstance(value, float | complex | list | tuple | dict | set):
        raise InputError(
            f"input {index} is a {type(value).__name__}: a graph would freeze its value; "
            "pass tensors (a changing number as a 0-dim tensor on the device), integers or generators"
        )
    return InputKind.OPAQUE


def check_tensor(name: str, value: torch.Tensor, device: torch.device) -> None:
    """Refuse tensors that a recording can't read.

    Raises:
        InputError: A subclass, a quantised tensor, a layout other than strided, or another device.
    """
    if type(value) not in _PLAIN_TENSORS:
        raise InputError(
            f"{name} is a {type(value).__name__}: a recording takes plain tensors; "
            "pass its inner tensors, or use torch.compile(backend='cgpass'), which does"
        )
    if value.layout is not torch.strided:
        raise InputError(f"{name} has layout {value.layout}: a recording takes strided tensors")
    if value.is_quantized:
        raise InputError(
            f"{name} is quantised ({value.dtype}): a recording takes plain tensors; pass its int_repr()"
        )
    if value.device != device:
        raise InputError(f"{name} lies on {value.device}, the recording on {device}: move it there")


def what_never_repeats(
    layout: Layout, positions: Sequence[int], args: Sequence[Any]
) -> tuple[str, str]:
    """Why calls that differ in these inputs were never recorded, and what to do: of sizes alone, if some are among them."""
    infos = layout.infos
    numbers = [i for i in positions if infos[i].kind is InputKind.SYMINT]
    told = [i for i in numbers if is_size(infos[i].name)] or numbers
    if not told:
        what = describe(infos[i] for i in positions)
        if positions and all(i in layout.objects for i in positions):
            return f"each came with another object for {what}", "Pass the same one in each call"
        return f"each came with another size or layout of {what}", "Keep to a few sizes: pad it"
    texts, fixes = zip(*(new_value(infos[i].name) for i in told), strict=True)
    lines = (f", read at {infos[i].line}" if infos[i].line else "" for i in told)
    named = [
        f"{text} ({args[i]} in this call{line})"
        for text, i, line in zip(texts[:3], told, lines, strict=False)
    ]
    verb = "takes" if len(named) == 1 else "take"
    fix = "; ".join(dict.fromkeys(fixes))
    return f"{' and '.join(named)} {verb} new values all the time", fix[0].upper() + fix[1:]
