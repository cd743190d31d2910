"""What each input is in a call: read in place, copied, or a reason to run the call without a graph.

Note [One rule for inputs]
    What an input is depends on what the compiler knows and on where it lies in this call. A static input (a parameter, a
    buffer, a tensor marked static) is read in place where it lay in an earlier call, and copied at a place that is new.
    A value of another recording (a saved tensor, a value between partitions) is read in place where a living recording
    put it, and copied where a hook, offloading or a rescue moved it. All else on the device is copied.

    The only history is where the static inputs lay: addresses with weak references to their storages, forgotten with
    these. It tells a tensor that was moved or replaced (its own storage lay elsewhere, or its predecessor's is gone),
    which is copied, from a tensor of another module that shares the code (its predecessor is still there): a call in
    which all parameters are another module's runs without a graph, and is in place from the next one on.
"""

import gc
import weakref
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cgpass import torch_private
from cgpass.runtime.owner import Owner
from cgpass.runtime.placeholders import num_bytes
from cgpass.runtime.signature import Layout

Holder = tuple["weakref.ref[torch.nn.Module]", str] | int
"""A module and its name for a tensor, or the `id` of a tensor that no module holds."""

_held: dict[int, tuple["weakref.ref[torch.nn.Module]", str]] = {}
"""By the `id`s of parameters and buffers of all modules, as of some time ago."""


def holders_of(tensors: Sequence[torch.Tensor]) -> tuple[Holder, ...]:
    """Who holds tensors: a module that gets another tensor for a parameter is the same holder, another module is not."""
    if not all(map(_is_held, tensors)):
        _held.clear()
        for each in gc.get_objects():
            if issubclass(type(each), torch.nn.Module):
                ref = weakref.ref(each)
                for own in _tensors_of(each):
                    for name, tensor in own.items():
                        _held.setdefault(id(tensor), (ref, name))
    return tuple(_held[id(tensor)] if _is_held(tensor) else id(tensor) for tensor in tensors)


def _is_held(tensor: torch.Tensor) -> bool:
    if id(tensor) not in _held:
        return False
    ref, name = _held[id(tensor)]
    module = ref()
    return module is not None and any(own.get(name) is tensor for own in _tensors_of(module))


def _tensors_of(module: torch.nn.Module) -> list[dict[str, Any]]:
    found = [vars(module).get(name) for name in ("_parameters", "_buffers")]
    return [own for own in found if isinstance(own, dict)]


@dataclass(frozen=True)
class Found:
    """What the inputs of one call are."""

    places: bytes
    """Addresses of the static inputs that are read in place; zero for those that are copied."""
    values: bytes
    """The same for values of other recordings."""
    copied: tuple[int, ...] = ()
    """Static inputs and values of other recordings that are copied in this call."""
    new: tuple[int, ...] = ()
    """Static inputs at a place that is new for them."""
    code: str | None = None
    """Of the reason to run the call without a graph."""
    absent: tuple[int, ...] = ()
    """Values of other recordings that lie where none put them."""


_Place = tuple[int, torch_private.WeakStorage, int]
"""The storage that lay there: its identity, and a reference that does not keep it alive; the tensor's `id`."""


class Inputs:
    """Sorts the inputs of a partition's calls. See Note [One rule for inputs]."""

    def __init__(self, layout: Layout, owner: Owner, *, max_places: int, max_copied: int) -> None:
        self._layout = layout
        self._owner = owner
        self._max_places = max_places
        self._max_copied = max_copied
        self._known: dict[int, dict[int, _Place]] = {i: {} for i in layout.checked}
        """Where each static input lay, by address."""
        self._last: dict[int, _Place] = {}
        """The storage that each static input had when it was new for the last time."""
        self._first: dict[tuple[Holder, ...], bytes] = {}
        """Where static inputs lay when they were recorded, by who holds them: known where moves are errors."""
        self._before = b""
        """Where the static inputs lay in the last call that was looked at."""
        self._there: list[torch_private.WeakStorage | None] = []
        """The storages that lay there; None for tensors without elements."""
        self._watermark: dict[int, int] = dict.fromkeys(layout.checked, max_places)

    def forget(self) -> None:
        """Forget every place."""
        for places in self._known.values():
            places.clear()
        self._last.clear()
        self._first.clear()
        self._before, self._there = b"", []

    def find(self, args: Sequence[Any], key: bytes) -> Found:
        """Sort one call's inputs."""
        layout, owner = self._layout, self._owner
        places, values = layout.split(key)
        absent = tuple(
            i for i in layout.pooled if args[i].numel() and not owner.is_pool_storage(args[i])
        )
        new = self._at_new_places(args, places)
        code = self._why_not_copied(args, new, absent)
        if any(owner.ran_without_a_graph(args[i]) for i in absent):
            code = "not_in_the_pool" if code != "new_module" else code
        if code is not None:
            return Found(places, values, (), new, code, absent)
        return Found(
            _without(places, layout.checked, new),
            _without(values, layout.pooled, absent),
            (*new, *absent),
            new,
            None,
            absent,
        )

    def _at_new_places(self, args: Sequence[Any], places: bytes) -> tuple[int, ...]:
        if not self._before:
            addresses = self._addresses(places)
            return tuple(i for i, now in addresses if not self._is_known(i, now, args[i]))
        before, gone = array("q", self._before), torch_private.expired(self._there)
        positions = zip(self._addresses(places), before, gone, strict=True)
        return tuple(
            i
            for (i, now), last, is_gone in positions
            if (now != last or is_gone) and not self._is_known(i, now, args[i])
        )

    def _addresses(self, places: bytes) -> Iterator[tuple[int, int]]:
        """Each static input with where it lies."""
        return zip(self._layout.checked, array("q", places), strict=True)

    def _why_not_copied(
        self, args: Sequence[Any], new: Sequence[int], absent: Sequence[int]
    ) -> str | None:
        if new and self._is_another_module(args, new):
            return "new_module"
        copied, infos = (*new, *absent), self._layout.infos
        if any(infos[i].in_place for i in copied):
            return "in_place"
        if sum(num_bytes(args[i]) for i in copied) > self._max_copied:
            return "too_large"
        if any(infos[i].whole_storage for i in copied):
            return "whole_storage"
        if _shares_what_is_written(args, copied, self._layout.mutated):
            return "shares_memory"
        return None

    def _is_another_module(self, args: Sequence[Any], new: Sequence[int]) -> bool:
        """Whether all parameters (where there is none, all static inputs) are new, and none was moved or replaced."""
        checked = self._layout.checked
        group = [i for i in checked if isinstance(args[i], torch.nn.Parameter)] or checked
        return {*group} <= {*new} and not any(self._was_moved(i, args[i]) for i in group)

    def _is_known(self, i: int, address: int, value: torch.Tensor) -> bool:
        """Whether this storage lay there before: what is alive may have been moved, and left its place to another one."""
        place = self._known[i].get(address)
        if not address or place is None:
            return not address
        return not place[1].expired and place[0] == value.untyped_storage()._cdata

    def _was_moved(self, i: int, value: torch.Tensor) -> bool:
        """Whether this very tensor or storage lay elsewhere before, or took the place of one that is gone.

        A tensor that is gone may have left its `id` to this one, which then counts as moved. A weak reference would tell,
        but `torch.utils.swap_tensors` refuses tensors that have one.
        """
        identity, name = value.untyped_storage()._cdata, id(value)
        for each, ref, known in self._known[i].values():
            if known == name or (each == identity and not ref.expired):
                return True
        last = self._last.get(i)
        return last is not None and last[1].expired

    def moved(
        self, args: Sequence[Any], key: bytes, found: Found, *, recorded: bool
    ) -> tuple[int, ...]:
        """Static inputs that moved or were replaced since their module's calls were recorded; another module's did not."""
        places, _ = self._layout.split(key)
        if self._layout.knows_no_modules:
            return found.new if recorded else ()
        holders = holders_of([args[i] for i in self._layout.checked])
        if not recorded:
            self._first[holders] = places
        before = self._first.setdefault(holders, places)
        pairs = zip(self._addresses(places), array("q", before), strict=True)
        return tuple(i for (i, now), first in pairs if first != now)

    def storages(self, args: Sequence[Any], places: bytes) -> dict[int, torch_private.WeakStorage]:
        """Storages of the static inputs that are read in place, by what tells them apart; none is kept alive."""
        found = [args[i].untyped_storage() for i, address in self._addresses(places) if address]
        return {storage._cdata: torch_private.WeakStorage(storage) for storage in found}

    def remember(self, args: Sequence[Any], key: bytes, found: Found) -> None:
        """Note where new static inputs of a call lie; keeps none of them alive."""
        places, _ = self._layout.split(key)
        if places == self._before and not found.new:
            return
        addresses = dict(self._addresses(places))
        for i in found.new:
            storage = args[i].untyped_storage()
            self._make_room(i, storage._cdata)
            place = storage._cdata, torch_private.WeakStorage(storage), id(args[i])
            self._known[i][addresses[i]] = self._last[i] = place
        known = (self._known[i].get(address) for i, address in addresses.items())
        self._before, self._there = places, [place and place[1] for place in known]

    def _make_room(self, i: int, identity: int) -> None:
        """Forget storages that are gone, and of this one the oldest place."""
        known = self._known[i]
        if len(known) < self._watermark[i]:
            return
        for address, place in list(known.items()):
            if place[1].expired:
                del known[address]
        mine = [address for address, place in known.items() if place[0] == identity]
        for address in mine[: max(0, len(mine) - self._max_places + 1)]:
            del known[address]
        self._watermark[i] = max(self._max_places, 2 * len(known))


def _shares_what_is_written(
    args: Sequence[Any], copied: Sequence[int], written: Sequence[int]
) -> bool:
    """Whether copies would come apart: of inputs on one storage, one of which is written."""
    if not (copied and written):
        return False
    places = Counter(
        value.untyped_storage().data_ptr()
        for value in args
        if isinstance(value, torch.Tensor) and value.numel()
    )
    shared = {args[i].untyped_storage().data_ptr() for i in written if args[i].numel()}
    shared = {address for address in shared if places[address] > 1}
    return any(args[i].untyped_storage().data_ptr() in shared for i in copied)


def _without(key: bytes, positions: Sequence[int], left_out: Sequence[int]) -> bytes:
    """Addresses with zero for some of the inputs."""
    if not left_out:
        return key
    addresses = array("q", key)
    for k, i in enumerate(positions):
        if i in left_out:
            addresses[k] = 0
    return addresses.tobytes()
