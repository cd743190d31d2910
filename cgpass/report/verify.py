"""`verify`: replays that are compared, bit by bit, with the same kernels without a graph."""

import contextlib
import functools
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from cgpass import telemetry
from cgpass.errors import OptionError, VerificationError
from cgpass.report import watch
from cgpass.runtime.executor import Run, Step
from cgpass.runtime.failures import random_state_kept, random_states
from cgpass.runtime.partition import PartitionRunner
from cgpass.runtime.rng import put_on_the_device
from cgpass.runtime.writes import bits, copied

log = logging.getLogger(__name__)

_NOT: Final = "cgpass.verify: %s: %s: not verified"
_WRONG: Final = "cgpass.verify: {}: {}. This is a fault of the capture: name the operator in unsafe_ops, and report it."
_DRAWN: Final = "the state of generator {} (random numbers were not drawn as without a graph)"


class verify(contextlib.ExitStack):  # noqa: N801  called as the functions beside it are
    """Check replays against runs without a graph, from now on until `close()`, or for a `with` block.

    Examples:
        >>> compiled = torch.compile(torch.nn.Linear(4, 4).eval(), backend="cgpass")
        >>> with torch.no_grad(), cgpass.verify(every=2) as checks:
        ...     results = [compiled(torch.randn(2, 4)) for _ in range(5)]
        >>> checks.checked  # calls of partitions that were compared
        2

    Every n-th call of each captured partition also runs without a graph, on copies of the inputs and with the same
    random numbers. Its results and written inputs are compared bit by bit, which waits for the device. A warning names
    what can't be compared: partitions that communicate, or whose kernels give other bits in each run
    (`torch.use_deterministic_algorithms(True)` chooses others), whole steps, and callables graphed by hand.

    Raises:
        OptionError: `every` is not a positive integer.
        VerificationError: In a checked call: a replay gave other bits. The call had all its effects by then.
    """

    def __init__(self, every: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise OptionError(f"cgpass.verify: every must be a positive int, got {every!r}")
        super().__init__()
        self.checked = 0
        self._every = every
        self._warned = functools.cache(log.warning)
        self.callback(self._tell_of_others, telemetry.now().others)
        telemetry.listen(
            lambda graph: [each.wrap(self._wrapped, self) for each in watch.live([graph])], self
        )

    def _tell_of_others(self, before: Mapping[Any, dict[str, int]]) -> None:
        for each, counts in telemetry.now().others.items():
            if counts != before.get(each) and counts["calls"]:
                log.warning(_NOT, each.name, "only compiled functions are compared")

    def _wrapped(self, step: Step, run: Run) -> Run:
        if not isinstance(runner := step.run, PartitionRunner):
            return run
        if runner.communicates:
            self._warned(_NOT, runner.name, "it communicates, so it can't run once more alone")
            return run
        return functools.partial(self._run, step.made, runner, run, itertools.count(1))

    def _run(
        self, made: Sequence[str], runner: PartitionRunner, run: Run, calls: Any, args: list[Any]
    ) -> tuple[Sequence[Any], Any]:
        if next(calls) % self._every or runner.owner.bypassed:
            return run(args)
        layout, infos, device = runner.layout, runner.layout.infos, runner.owner.driver.device
        written = sorted({*layout.mutated}.difference(layout.pooled))
        states, copies = random_states(device, args), copied(args, [*written, *layout.pooled])
        inputs = [None if i in layout.pooled else x for i, x in enumerate(args)]  # can die inside

        def found(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[tuple[str, Any]]:
            names = made or ["unnamed"] * len(outputs)
            named = [(f"output {n} ({names[n]})", each) for n, each in enumerate(outputs)]
            named += [(f"input {infos[i].name}, which it writes,", inputs[i]) for i in written]
            return named + [(_DRAWN.format(n), g.get_state()) for n, (g, _) in enumerate(states)]

        def without_a_graph() -> list[tuple[str, Any]]:
            args = copied(copies, [*layout.mutated])
            put_on_the_device(args, layout.seeds, device)
            for generator, state in states:
                generator.set_state(state)
            with torch.inference_mode(False), torch.no_grad():
                return found(runner.fn(list(args)), args)

        outputs, recording = run(args)
        if recording is None:
            return outputs, recording
        self.checked += 1
        with random_state_kept(device, inputs):
            ours, plain = found(outputs, inputs), without_a_graph()
            different = _difference(ours, plain)
            if different and _difference(plain, without_a_graph()):
                self._warned(_NOT, runner.name, "runs without graphs differ among themselves")
            elif different:
                raise VerificationError(_WRONG.format(runner.name, different))
        return outputs, recording


def _difference(ours: Sequence[tuple[str, Any]], plain: Sequence[tuple[str, Any]]) -> str | None:
    """Describe the first value that is another one without a graph; None if all bits are the same."""
    for (name, a), (_, b) in zip(ours, plain, strict=True):
        if not isinstance(a, torch.Tensor):
            if a is not b and a != b:
                return f"{name} is {a!r}, and {b!r} without a graph"
        elif count := int((bits(a) != bits(b)).view(-1, a.itemsize).any(-1).sum()):
            kind = f"{a.dtype}{list(a.shape)}".removeprefix("torch.")
            return f"{name} ({kind}) differs in {count} of {a.numel()} elements from its value without a graph"
    return None
