"""`summary`, what this process compiled in a few lines, and `expect`, a block whose events are counted."""

import contextlib
from collections import Counter
from collections.abc import Iterator

from cgpass import telemetry
from cgpass.errors import ExpectationError, OptionError
from cgpass.options import nearest
from cgpass.report import watch


def summary() -> str:
    """Summarize the graphs of this process, or since `cgpass.reset()`, in a few lines each.

    Examples:
        >>> compiled = torch.compile(torch.nn.Linear(4, 4), backend="cgpass")
        >>> compiled(torch.randn(2, 4)).sum().backward()
        >>> "forward of module Linear: 1 partition captured" in cgpass.summary()
        True

    For each kind of graph it says how many partitions are captured and eager, and why calls ran without a graph. Graph
    breaks, functions left to eager, training steps and callables graphed by hand follow, then the state of the native code.
    """
    report = watch.since_reset()
    graphs = Counter(map(str, report.graphs)).items()
    lines = [f"{times} times: {graph}" if times > 1 else graph for graph, times in graphs]
    lines += map(str, (*report.graph_breaks, *report.left_to_eager, *report.others))
    if not lines:
        return "no graph was compiled"
    native = [] if report.native is None else [f"native code: {report.native}"]
    return "\n".join(lines + native)


@contextlib.contextmanager
def expect(**counts: int) -> Iterator[dict[str, int]]:
    """Fail unless some of `cgpass.counters()` grow by exactly these amounts in a block.

    Examples:
        >>> compiled = torch.compile(torch.nn.Linear(4, 4), backend="cgpass")
        >>> def train(steps):
        ...     for _ in range(steps):
        ...         compiled(torch.randn(2, 4)).sum().backward()
        >>> train(2)
        >>> with cgpass.expect(replays=2 * 3, plain_calls=0):  # a forward and a backward each
        ...     train(3)

    Expect `replays`, not only `plain_calls=0`: no counter has the calls of a graph that is left out as a whole, because it
    is too small or not on CUDA. `cgpass.summary()` lists it. Calls of other threads count, too.

    Args:
        counts: The growth of each counter, as `cgpass.counters()` names them.

    Yields:
        A dict that holds the growth of every counter once the block is over.

    Raises:
        ExpectationError: A counter grew by another number. The message names it, and lists the graphs compiled inside. An
            exception of the block itself passes instead.
        OptionError: An unknown counter, or a count that is not an integer.
    """
    before = telemetry.counters()
    for name, count in counts.items():
        if name not in before:
            near = nearest(name, before)
            hint = f"; did you mean {near!r}?" if near else ""
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
        listed = "".join(f"\n{graph.summary}" for graph in compiled)
        made = f". Compiled inside:{listed}" if compiled else ". No graph was compiled inside."
        others = ", ".join(f"{name} {n}" for name, n in grown.items() if n and name not in counts)
        also = f" (other counters: {others})" if others else ""
        raise ExpectationError(f"cgpass.expect: {'; '.join(wrong)}{also}{made}")
