"""`summary`, what this process compiled in a few lines, and `expect`, a block whose events are counted."""

import contextlib
import difflib
from collections import Counter
from collections.abc import Iterator

from cgpass import telemetry
from cgpass.errors import ExpectationError, OptionError
from cgpass.report import watch


def summary() -> str:
    """Return what ran in this process, or since `cgpass.reset()`, a few lines for each graph.

    Graphs that are alike are told of once: partitions captured and eager, and why calls ran without a graph. Then graph
    breaks, and functions that `torch.compile` left to eager; training steps and what `make_graphed_callables` returned,
    and how they were called. Last, whether the native code is in use, unless nothing was to be recorded.
    """
    report = watch.since_reset()
    lines = [
        str(graph).replace("\n", f" ({times} times)\n" if times > 1 else "\n", 1)
        for graph, times in Counter(f"{graph}\n" for graph in report.graphs).items()
    ]
    lines += map(str, (*report.graph_breaks, *report.left_to_eager, *report.others))
    if not lines:
        return "no graph was compiled"
    native = [] if report.native is None else [f"native code: {report.native}"]
    return "\n".join([each.rstrip("\n") for each in lines] + native)


@contextlib.contextmanager
def expect(**counts: int) -> Iterator[dict[str, int]]:
    """Fail unless some of `cgpass.counters()` grow inside by exactly so much.

    Examples:
        >>> compiled = torch.compile(torch.nn.Linear(4, 4), backend="cgpass")
        >>> def train(steps):
        ...     for _ in range(steps):
        ...         compiled(torch.randn(2, 4)).sum().backward()
        >>> train(2)
        >>> with cgpass.expect(replays=2 * 3, plain_calls=0):  # a forward and a backward each
        ...     train(3)

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
    grown.update(telemetry.grown(telemetry.counters(), before))
    wrong = [
        f"{name} grew by {grown[name]}, not by {count}"
        for name, count in counts.items()
        if grown[name] != count
    ]
    if wrong:
        compiled = telemetry.graphs(before["graphs"])
        listed = "".join(f"\n{graph}" for graph in compiled)
        made = f". Compiled inside:{listed}" if compiled else ". No graph was compiled inside."
        others = ", ".join(f"{name} {n}" for name, n in grown.items() if n and name not in counts)
        also = f" (all else: {others})" if others else ""
        raise ExpectationError(f"cgpass.expect: {'; '.join(wrong)}{also}{made}")
