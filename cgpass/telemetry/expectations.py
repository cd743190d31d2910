"""`expect`: a block whose events are counted and have to be as many as said."""

import contextlib
import difflib
from collections.abc import Iterator

from cgpass import telemetry
from cgpass.errors import ExpectationError, OptionError


@contextlib.contextmanager
def expect(**counts: int) -> Iterator[dict[str, int]]:
    """Fail unless some of `cgpass.counters()` grow inside by exactly so much.

        train(first_batches)
        with cgpass.expect(replays=2 * len(other_batches), plain_calls=0):  # a forward and a backward each
            train(other_batches)

    Expect `replays`, not only the absence of something else: calls of a graph that is left alone as a whole, since it
    is too small or not on CUDA, are in no counter. `cgpass.summary()` lists it.

    Counters are the whole process's: what other threads do meanwhile counts, too.

    Args:
        counts: Growth by counter, as `cgpass.counters()` names them.

    Yields:
        A dict that holds the growth of every counter once the block is over.

    Raises:
        ExpectationError: A counter grew by another number. Says which, and lists the graphs that were compiled inside.
            An exception of the block's own passes instead.
        OptionError: A counter that isn't there, or a number that is none.
    """
    before = telemetry.counters()
    for name, count in counts.items():
        if name not in before:
            near = difflib.get_close_matches(name, before, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise OptionError(f"cgpass.expect: there is no counter {name!r}{hint}")
        if isinstance(count, bool) or not isinstance(count, int):
            raise OptionError(f"cgpass.expect: {name} must be an int, got {count!r}")
    grown: dict[str, int] = {}
    yield grown
    grown.update({name: now - before[name] for name, now in telemetry.counters().items()})
    wrong = [
        f"{name} grew by {grown[name]}, not by {count}"
        for name, count in counts.items()
        if grown[name] != count
    ]
    if wrong:
        compiled = telemetry.graphs(since=before["graphs"])
        listed = "".join(f"\n{graph}" for graph in compiled)
        made = f". Compiled inside:{listed}" if compiled else ". No graph was compiled inside."
        others = ", ".join(f"{name} {n}" for name, n in grown.items() if n and name not in counts)
        also = f" (all else: {others})" if others else ""
        raise ExpectationError(f"cgpass.expect: {'; '.join(wrong)}{also}{made}")
