"""`cgpass.counters()` where torch has its own: `torch._dynamo.utils.counters["cgpass"]`."""

from collections import Counter
from collections.abc import Iterator, Mapping

from cgpass import telemetry, torch_private


class LiveCounter(Mapping[str, int]):
    """Says what `cgpass.counters()` does, whenever it is read. Clearing it makes it count from there."""

    def __init__(self) -> None:
        self._base: dict[str, int] = {}

    def clear(self) -> None:
        """Count from here."""
        self._base = telemetry.counters()

    def copy(self) -> Counter[str]:
        """The counts as they are now."""
        counts = telemetry.counters()
        return Counter({name: n - self._base.get(name, 0) for name, n in counts.items()})

    def __getitem__(self, name: str) -> int:
        return self.copy()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.copy())

    def __len__(self) -> int:
        return len(self.copy())

    def __repr__(self) -> str:
        return repr(self.copy())

    def __reduce__(self) -> tuple[type, tuple[dict[str, int]]]:
        return Counter, (dict(self.copy()),)


_shown: LiveCounter | None = None


def show() -> None:
    """Have torch's counters list ours; again and from zero on, if somebody emptied them."""
    global _shown
    counters = torch_private.dynamo_counters()
    if _shown is None or counters.get("cgpass") is not _shown:
        again, _shown = _shown is not None, LiveCounter()
        if again:
            _shown.clear()
        counters["cgpass"] = _shown
