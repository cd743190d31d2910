"""The inputs of a partition: which are read in place, which are copied and how, and the key of a call.

Note [One rule for inputs]
    What an input is depends on what the compiler knows and on where it lies in this call. A static input (a parameter, a
    buffer, a tensor marked static) is copied in the first two calls at a place that is new, so that one that moves in
    every other call (by SAM) needs no recordings, and read in place from then on.
    A value of another recording (a saved tensor, a value between partitions) is read in place where a living recording
    put it, and copied where a hook, offloading or a rescue moved it. All else on the device is copied. Places that take
    turns (FSDP2 empties a layer's storage, and the next one's comes to lie there) are no new ones.

    The only history is where the static inputs lay: addresses with weak references to their storages. It tells a tensor
    that was moved or replaced (its own storage lay elsewhere, or its predecessor's is gone), which is copied, from a
    tensor of another module that shares the code (its predecessor is still there): a call in which all parameters are
    another module's runs without a graph, and is in place from the next one on.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from cgpass import torch_private
from cgpass.compile.facts.input_info import InputInfo, InputKind
from cgpass.errors import InputError
from cgpass.runtime import fast

if TYPE_CHECKING:
    from cgpass.runtime.owner import Owner

ShapeKey = tuple[Any, ...]
"""Integers, identities of objects, and layouts of tensors where no guard of the caller and no integer covers them."""

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Layout:
    """Inputs of a partition by kind: static, copied, part of the key."""

    def __init__(
        self, infos: Sequence[InputInfo], *, check_static: bool, check_layout: bool
    ) -> None:
        self.infos = tuple(infos)

        def positions(kind: InputKind) -> tuple[int, ...]:
            return tuple(i for i, info in enumerate(infos) if info.kind is kind)

        self.copied = positions(InputKind.COPIED)
        self.pooled = positions(InputKind.POOLED)
        self.parameters = positions(InputKind.STATIC)
        self.checked = self.parameters if check_static else ()
        """Static inputs whose addresses belong to the key."""
        self.static = (*self.checked, *self.pooled)
        self.seeds = tuple(i for i, info in enumerate(infos) if info.is_seed)
        self.mutated = frozenset(i for i, info in enumerate(infos) if info.mutated)
        """Inputs that are written: those that plain calls and recordings turn out to write, too, where nobody told."""
        self.objects = positions(InputKind.OPAQUE)
        self.in_place = positions(InputKind.IN_PLACE)
        self._values = positions(InputKind.SYMINT)
        self._typed = check_layout
        tensors = {*self.copied, *self.parameters} if check_layout else ()
        self._parts: list[tuple[int, Callable[[Any], Any]]] = [
            *((i, type) for i in self._values if check_layout),  # True is 1, x[True] is not x[1]
            *((i, id) for i in self.objects),
            *((i, place_of) for i in self.copied if infos[i].whole_storage),
            *((i, layout_of) for i, info in enumerate(infos) if info.is_resized or i in tensors),
        ]
        """Parts of the key other than integers, by input."""

    def shape_key(self, args: Sequence[Any]) -> ShapeKey:
        """The part of a call's key that decides what is computed."""
        key = tuple([args[i] for i in self._values])
        if self._parts:
            key += tuple([part(args[i]) for i, part in self._parts])
        if self._typed:  # last: no input stands for them
            key += _ambient_modes()
        return key

    def static_key(self, args: Sequence[Any]) -> bytes:
        """The part that decides where it is read: addresses, of static inputs first."""
        return fast.static_key(args, self.static)

    def split(self, key: bytes) -> tuple[bytes, bytes]:
        """A static key's addresses of static inputs, and those of values of other recordings."""
        end = 8 * len(self.checked)
        return key[:end], key[end:]

    def changed(self, old: ShapeKey, new: ShapeKey) -> list[int]:
        """Positions of the inputs whose part of a shape key differs."""
        positions = (*self._values, *(i for i, _ in self._parts))
        parts = zip(positions, old, new, strict=False)  # after them come the modes
        return sorted({i for i, a, b in parts if a != b})


def _ambient_modes() -> tuple[Any, ...]:
    """Return the modes that decide operators' dtypes and kernels, besides their inputs."""
    autocast = [
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in ("cuda", "cpu")
    ]
    # torch.get_float32_matmul_precision raises where one of these was set
    backends: Any = torch.backends
    settings = backends, backends.cuda.matmul, backends.mkldnn.matmul
    precisions = [each.fp32_precision for each in settings]
    deterministic = torch.are_deterministic_algorithms_enabled()
    return (*autocast, torch.get_default_dtype(), deterministic, *precisions)


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's offset in its storage, and the storage's size."""
    return int(tensor.storage_offset()), tensor.untyped_storage().nbytes()


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the layout that a placeholder for `tensor` must have."""
    bits = (tensor.is_conj(), tensor.is_neg())
    return (tuple(tensor.size()), tensor.stride(), tensor.dtype, bits)


def check_tensor(name: str, value: torch.Tensor, device: torch.device) -> None:
    """Refuse tensors that a recording can't read.

    Raises:
        InputError: A subclass, a quantised tensor, a layout other than strided, or another device.
    """
    what, why = "a recording takes plain tensors", None
    if type(value) not in _PLAIN_TENSORS:
        why = f"is a {type(value).__name__}: {what}; pass its inner tensors, or use torch.compile(backend='cgpass'), which does"
    elif value.layout is not torch.strided:
        why = f"has layout {value.layout}: a recording takes strided tensors"
    elif value.is_quantized:
        why = f"is quantised ({value.dtype}): {what}; pass its int_repr()"
    elif value.device != device:
        why = f"lies on {value.device}, the recording on {device}: move it there"
    if why is not None:
        raise InputError(f"{name} {why}")


def listed(texts: Sequence[str], limit: int) -> str:
    """At most `limit` texts, and how many more there are."""
    more = [f"and {len(texts) - limit} more"] if len(texts) > limit else []
    return ", ".join([*texts[:limit], *more])


def describe(
    infos: Sequence[InputInfo],
    positions: Iterable[int],
    args: Sequence[Any] | None = None,
    limit: int = 5,
) -> str:
    """Names of inputs with the user's lines that read them, and with dtypes and sizes if `args` has tensors there."""
    texts = []
    for i in positions:
        kind = [] if args is None else [f"{args[i].dtype}{list(args[i].size())}"[6:]]
        about = ", ".join([*kind, *([f"read at {infos[i].line}"] if infos[i].line else [])])
        texts.append(f"{infos[i].name} ({about})" if about else infos[i].name)
    return listed(texts, limit)


# ---- what each input is


@dataclass(frozen=True)
class Found:
    """The inputs of one call, by kind."""

    places: bytes
    """Addresses (see `fast.static_key`) of the static inputs that are read in place; zero for those that are copied."""
    values: bytes
    """The same for values of other recordings."""
    new: tuple[int, ...]
    """Static inputs at a place that is new for them."""
    absent: tuple[int, ...]
    """Values of other recordings that lie where none put them."""
    code: str | None
    """Of the reason to run the call without a graph."""

    @property
    def copied(self) -> tuple[int, ...]:
        """Static inputs and values of other recordings that are copied in this call."""
        return () if self.code else (*self.new, *self.absent)


class Inputs:
    """Sorts the inputs of a partition's calls. See Note [One rule for inputs]."""

    def __init__(self, layout: Layout, owner: "Owner", max_places: int, max_copied: int) -> None:
        self._layout = layout
        self._owner = owner
        self._max_places = max_places
        self._max_copied = max_copied
        self.forget()

    def forget(self) -> None:
        """Forget every place."""
        self._known: dict[int, dict[tuple[int, int], tuple[torch_private.WeakStorage, int]]] = {
            i: {} for i in self._layout.checked
        }
        """Places of each static input: address and storage, which its reference keeps apart; the tensor's `id`."""
        self._before: tuple[bytes, bytes] | None = None
        """Addresses and storages of the last call whose inputs are all known."""

    def find(self, args: Sequence[Any], key: bytes, new: tuple[int, ...] | None = None) -> Found:
        """Sort one call's inputs; where `new` is given, these static ones are copied if they may be."""
        layout, owner = self._layout, self._owner
        places, values = layout.split(key)
        absent = tuple(
            i for i in layout.pooled if args[i].numel() and not owner.is_pool_storage(args[i])
        )
        is_another = False
        if new is None:
            new = self._at_new_places(args, places)
            is_another = bool(new) and self._is_another_module(args, new)
        code = "new_module" if is_another else self._why_not_copied(args, new, absent)
        made_plainly = any(args[i].untyped_storage() in owner.plain_results for i in absent)
        if code != "new_module" and made_plainly:
            code = "not_in_the_pool"
        if code is None:
            places = _without(places, layout.checked, new)
            values = _without(values, layout.pooled, absent)
        return Found(places, values, new, absent, code)

    def _at_new_places(self, args: Sequence[Any], places: bytes) -> tuple[int, ...]:
        now = places, fast.storage_key(args, self._layout.checked)
        if now == self._before:
            return ()
        known = self._known
        lies_at = zip(array("q", places), array("q", now[1]), strict=True)
        each = zip(self._layout.checked, lies_at, strict=True)
        new = tuple(
            i for i, at in each if at[0] and at not in known[i] and not self._was_left(i, at[0])
        )
        if not new:
            self._before = now
        return new

    def _was_left(self, i: int, address: int) -> bool:
        """Tell whether a storage that lay here was emptied, as FSDP2 does with what it gathered, for others to lie here."""
        lay_here = [ref.get() for (at, _), (ref, _) in self._known[i].items() if at == address]
        return any(storage is not None and not storage.nbytes() for storage in lay_here)

    def _why_not_copied(
        self, args: Sequence[Any], new: Sequence[int], absent: Sequence[int]
    ) -> str | None:
        copied, infos = (*new, *absent), self._layout.infos
        if any(infos[i].in_place for i in copied):
            return "in_place"
        if sum(args[i].nbytes for i in copied) > self._max_copied:
            return "too_large"
        if any(infos[i].whole_storage for i in copied):
            return "whole_storage"
        shared = shared_with_written(args, self._layout.mutated) if copied else ()
        if any(args[i].untyped_storage().data_ptr() in shared for i in copied):
            return "shares_memory"
        return None

    def _is_another_module(self, args: Sequence[Any], new: Sequence[int]) -> bool:
        """Tell whether all parameters (where there is none, all static inputs) are new, and none was moved or replaced."""
        checked = self._layout.checked
        group = [i for i in checked if isinstance(args[i], torch.nn.Parameter)] or checked
        return {*group} <= {*new} and not any(self.was_moved(i, args[i]) for i in group)

    def was_moved(self, i: int, value: torch.Tensor) -> bool:
        """Tell whether this very tensor or storage lay elsewhere before, or took the place of one that is gone.

        A tensor that is gone may have left its `id` to this one, which then counts as moved. A weak reference would tell,
        but `torch.utils.swap_tensors` refuses tensors that have one.
        """
        storage, name = value.untyped_storage()._cdata, id(value)
        known, here = self._known[i], (_place_of(value), storage)
        if any(at != here and (at[1] == storage or was == name) for at, (_, was) in known.items()):
            return True
        return bool(known) and next(reversed(known.values()))[0].expired()

    def storages(self, args: Sequence[Any], places: bytes) -> dict[int, torch_private.WeakStorage]:
        """Storages of the static inputs that are read in place, by what tells them apart; none is kept alive."""
        read = zip(self._layout.checked, array("q", places), strict=True)
        found = [args[i].untyped_storage() for i, address in read if address]
        found += [tensor.untyped_storage() for i in self._layout.in_place for tensor in args[i]]
        return {storage._cdata: torch_private.WeakStorage(storage) for storage in found}

    def remember(self, args: Sequence[Any], new: Iterable[int]) -> None:
        """Note where static inputs lie that are new there: of one storage the newest places, of others as they live."""
        for i in new:
            storage = args[i].untyped_storage()
            alive = {at: each for at, each in self._known[i].items() if not each[0].expired()}
            mine = [at for at in alive if at[1] == storage._cdata]
            for at in mine[: max(0, len(mine) - self._max_places + 1)]:
                del alive[at]
            place = _place_of(args[i]), storage._cdata
            alive[place] = torch_private.WeakStorage(storage), id(args[i])
            self._known[i] = alive
            self._before = None


def _place_of(value: torch.Tensor) -> int:
    """Return the part of keys that a static input makes."""
    return array("q", fast.static_key([value], (0,)))[0]


def shared_with_written(args: Sequence[Any], written: Iterable[int]) -> set[int]:
    """Addresses of storages that an input which is written shares with another one: copies of the two would not."""
    mine = {args[i].untyped_storage().data_ptr() for i in written if args[i].numel()}
    if not mine:
        return mine
    tensors = [value for value in args if isinstance(value, torch.Tensor) and value.numel()]
    numbers = Counter(value.untyped_storage().data_ptr() for value in tensors)
    return {address for address in mine if numbers[address] > 1}


def _without(key: bytes, positions: Sequence[int], left_out: Sequence[int]) -> bytes:
    """Addresses with zero for some of the inputs."""
    if not left_out:
        return key
    left, addresses = {*left_out}, zip(positions, array("q", key), strict=True)
    return array("q", [0 if i in left else address for i, address in addresses]).tobytes()


# ---- copies


COPIED_AS_THEY_ARE: Final = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16"),
        *("float32", "float64", "complex64", "complex128"),
    )
)
"""Dtypes that `torch._foreach_copy_` has kernels for.

Source: aten/src/ATen/native/cuda/ForeachBinaryOpList.cu `foreach_tensor_copy_list_kernel_cuda_`, 2.11.
"""

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element."""


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor's elements as integers if copying kernels don't know its dtype, else the tensor itself."""
    if tensor.dtype in COPIED_AS_THEY_ARE or tensor.is_quantized:
        return tensor
    return tensor.view(_BITS[tensor.dtype.itemsize])


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Tell whether two elements of `tensor` may share memory (expanded tensors, sliding windows)."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach = stride * size
    return False


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory between `tensor`'s first and last element, as one dimension."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.as_strided((0 if tensor.numel() == 0 else extent,), (1,))


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as one dimension of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as it lies in memory: without conjugate and negative bits, of a dtype that can be copied."""
    plain = torch_private.with_lazy_bits(tensor, conj=tensor.is_conj(), neg=tensor.is_neg())
    return as_bits(plain)


class Placeholder:
    """Memory of fixed address that stands for a copied input, laid out exactly as the input it was made for."""

    __slots__ = ("__weakref__", "_flat", "_whole", "is_odd", "target", "tensor")

    def __init__(self, like: torch.Tensor, *, whole_storage: bool = False) -> None:
        self._whole, self._flat = whole_storage, overlaps_itself(like)
        lazy = like.is_conj() or like.is_neg() or like.dtype not in COPIED_AS_THEY_ARE
        self.is_odd = lazy or whole_storage or self._flat
        """True if what is copied is not the input as it is."""
        source = self.source(like)
        self.target = torch.empty_strided(
            source.size(), source.stride(), dtype=source.dtype, device=source.device
        )
        offset = like.storage_offset() if whole_storage else 0
        self.tensor = torch_private.on_storage(self.target.untyped_storage(), like, offset=offset)

    def copy_from(self, value: torch.Tensor) -> None:
        """Give the placeholder the value of `value`."""
        self.target.copy_(self.source(value))

    def copy_to(self, value: torch.Tensor) -> None:
        """Give `value` the placeholder's value: its own elements, not what else lies in its storage."""
        if self._whole:
            memory_of(value).copy_(memory_of(self.tensor))
        else:
            self.source(value).copy_(self.target)

    def source(self, value: torch.Tensor) -> torch.Tensor:
        """Return the tensor to copy into `target` when the input is `value`: the memory it spans, if elements overlap."""
        if not self.is_odd:
            return value
        if self._whole:
            return bytes_of(value.untyped_storage())
        memory = memory_of(value)
        return flat_view(memory) if self._flat else memory


Copies = tuple[list[tuple[list[int], list[torch.Tensor]]], list[tuple[int, Placeholder]]]
"""Positions of inputs that are copied as they are and where to, by dtype; and each other one with its placeholder."""


def copies_in(placeholders: Mapping[int, Placeholder]) -> Copies:
    """One copy for each dtype among placeholders, and one for each that is odd, by position of their inputs."""
    groups: dict[torch.dtype, tuple[list[int], list[torch.Tensor]]] = {}
    filled = {i: p for i, p in sorted(placeholders.items()) if p.target.numel()}
    for i, placeholder in filled.items():
        if not placeholder.is_odd:
            positions, targets = groups.setdefault(placeholder.target.dtype, ([], []))
            positions.append(i)
            targets.append(placeholder.target)
    return [*groups.values()], [(i, p) for i, p in filled.items() if p.is_odd]


def copy_in(copies: Copies, args: Sequence[Any]) -> None:
    """Give placeholders the values of a call's inputs."""
    groups, odd = copies
    for positions, targets in groups:
        torch._foreach_copy_(targets, [args[i] for i in positions])
    for i, placeholder in odd:
        placeholder.copy_from(args[i])
