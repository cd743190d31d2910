"""`Gathered`: parameters that have memory only while they are used, as FSDP's."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from cgpass import _torch

_LOOKS: Final = 256
"""Calls without a replay in which it is looked for."""


class Gathered:
    """Finds inputs whose storages were emptied after a call, and by them tells modules apart that share the code.

    Layers whose parameters are gathered in one place have one signature, but recordings of their own: they run one
    after the other, with what the ones before left for the backward.
    """

    def __init__(self, parameters: Iterable[int]) -> None:
        """Args: parameters: inputs that may be gathered."""
        self._watched = tuple(parameters)
        self._last: list[tuple[int, _torch.WeakStorage]] = []
        self._looks = 0
        self._positions: frozenset[int] = frozenset()

    @property
    def any(self) -> bool:
        """Whether some were found."""
        return bool(self._positions)

    def note(self, args: Sequence[Any]) -> None:
        """Note a call's inputs, and what became of the last one's. **Lifetime:** holds none of them."""
        if self._looks >= _LOOKS:
            return
        self._looks += 1
        self._positions |= {i for i, ref in self._last if _is_empty(ref)}
        self._last = [(i, _torch.WeakStorage(args[i].untyped_storage())) for i in self._watched]

    def module(self, args: Sequence[Any]) -> frozenset[int]:
        """Which module a call is of, by its gathered parameters' storages; nothing where none are gathered."""
        return frozenset(args[i].untyped_storage()._cdata for i in self._positions)


def _is_empty(ref: _torch.WeakStorage) -> bool:
    storage = ref.get()
    return storage is not None and storage.nbytes() == 0
