"""`cgpass.counters()` where torch has its own: `torch._dynamo.utils.counters["cgpass"]`."""

import collections
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

from cgpass import telemetry, torch_private


class LiveCounter(collections.Counter[str]):
    """A counter that says what somebody else counts, whenever it is read. Clearing it makes it count from there."""

    is_shown = False

    def __init__(self, read: Callable[[], Mapping[str, int]]) -> None:
        """Args: read: gives the counts."""
        super().__init__()
        self._read = read
        self._base: dict[str, int] = {}

    def _refresh(self) -> "LiveCounter":
        for name, count in self._read().items():
            dict.__setitem__(self, name, count - self._base.get(name, 0))
        return self

    def clear(self) -> None:
        """Count from here."""
        self._base = dict(self._read())
        super().clear()

    def copy(self) -> collections.Counter[str]:  # pyrefly: ignore[bad-override]
        """The counts as they are now."""
        return collections.Counter(dict(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return collections.Counter, (dict(self.items()),)

    def __getitem__(self, name: str) -> int:
        return dict.get(self._refresh(), name, 0)

    def get(self, name: str, default: Any = None) -> Any:  # pyrefly: ignore[bad-override]
        """One count."""
        return dict.get(self._refresh(), name, default)

    def __contains__(self, name: object) -> bool:
        return dict.__contains__(self._refresh(), name)

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self._refresh())

    def __len__(self) -> int:
        return dict.__len__(self._refresh())

    def __eq__(self, other: object) -> bool:
        return dict(self.items()) == other

    __hash__ = None  # pyrefly: ignore

    def __repr__(self) -> str:
        return repr(self.copy())

    def keys(self) -> KeysView[str]:  # pyrefly: ignore[bad-override]
        """Names."""
        return dict.keys(self._refresh())

    def values(self) -> ValuesView[int]:  # pyrefly: ignore[bad-override]
        """Counts."""
        return dict.values(self._refresh())

    def items(self) -> ItemsView[str, int]:  # pyrefly: ignore[bad-override]
        """Names and counts."""
        return dict.items(self._refresh())


_counter = LiveCounter(telemetry.counters)


def show() -> None:
    """Have torch's counters list ours; again and from zero on, if somebody emptied them."""
    counters = torch_private.dynamo_counters()
    if counters.get("cgpass") is not _counter:
        if _counter.is_shown:
            _counter.clear()
        _counter.is_shown = True
        counters["cgpass"] = _counter
