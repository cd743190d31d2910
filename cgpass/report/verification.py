"""`verify`: replays that are compared, bit by bit, with the same kernels without a graph."""

import contextlib
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from cgpass import telemetry, torch_private
from cgpass.errors import OptionError, VerificationError
from cgpass.runtime.executor import Executor, Run, Step
from cgpass.runtime.partition import PartitionRunner
from cgpass.runtime.recording import Recording
from cgpass.runtime.rng import put_on_the_device
from cgpass.runtime.writes import has_place

log = logging.getLogger(__name__)


def verify(every: int = 1) -> "Verification":
    """Check replays against plain runs, from now on or for a `with` block.

        with cgpass.verify(every=100):
            train()

    Of each captured partition every n-th call also runs plainly, on copies of the inputs and with the random
    numbers that the replay drew, and what it returns and writes is compared bit by bit. That waits for the device and
    takes the memory of the copies; calls in between cost nothing. Functions compiled later are checked, too.

    Partitions that communicate are left out, named in a warning: other processes would take no part in the run that is
    compared with, which may be a call of this process alone.

    Kernels that give other bits in each run (atomic additions, say) can't be compared: they are run plainly twice
    where they differ, and named in a warning. `torch.use_deterministic_algorithms(True)` chooses others.

    Args:
        every: Which calls of a partition are checked: 1 for each.

    Returns:
        What counts the checks and ends them: `checked`, `close()`. **Lifetime:** checks go on until it is closed.

    Raises:
        OptionError: `every` is no positive integer.
        VerificationError: In a call that is checked: a replay gave other bits. Names the partition, the output and the
            first of the elements. The call had all its effects by then.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise OptionError(f"cgpass.verify: every must be a positive int, got {every!r}")
    return Verification(every)


class Verification:
    """Checks that go on; see `verify`."""

    def __init__(self, every: int) -> None:
        self.checked = 0
        """Calls of partitions that were compared."""
        self._every = every
        self._warned: set[str] = set()
        self._left_out: dict[int, list[_Partition]] = {}
        """By graph; until that is said."""
        self._stack = contextlib.ExitStack()
        self._stack.callback(telemetry.listen(self._add))
        for number, (_, runs) in telemetry.graph_runs().items():
            for run in runs:
                self._add(number, run)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End the checks."""
        self._stack.close()

    def _add(self, number: int, run: telemetry.GraphRun) -> None:
        """Check what runs a graph, as long as that is there."""
        executor = run.live()
        if isinstance(executor, Executor):
            wrap = functools.partial(self._wrapped, number)
            self._stack.callback(executor.wrap(wrap))

    def _wrapped(self, number: int, step: Step, run: Run) -> Run:
        runner = step.run
        if not isinstance(runner, PartitionRunner):
            return run
        part = _Partition(number, step.name, runner, step.made)
        if runner.communicates:
            return self._left_alone(part, run)
        calls = 0

        def checked(args: list[Any]) -> tuple[Sequence[Any], Recording | None]:
            nonlocal calls
            calls += 1
            if calls % self._every or runner.owner.bypassed:
                return run(args)
            return self._check(part, run, args)

        return checked

    def _left_alone(self, part: "_Partition", run: Run) -> Run:
        """`run`, which says in the first call of a graph what of it is left out."""
        others = self._left_out.setdefault(part.graph, [])
        others.append(part)

        def told(args: list[Any]) -> tuple[Sequence[Any], Recording | None]:
            if others:
                log.warning(
                    "cgpass.verify: not verified, since other processes need not take part in another run of what "
                    "communicates: %s",
                    ", ".join(each.place() for each in others),
                )
                others.clear()
            return run(args)

        return told

    def _check(
        self, part: "_Partition", run: Run, args: list[Any]
    ) -> tuple[Sequence[Any], Recording | None]:
        draws = _Draws(args, part.runner.owner.driver.device)
        copies, written = part.copied(args), part.written(args)
        outputs, recording = run(args)
        if recording is None:
            return outputs, recording
        self.checked += 1
        after = draws.now()
        try:
            plain, writes = part.run_plainly(copies, draws)
            drew = [torch.equal(a, b) for a, b in zip(after, draws.now(), strict=True)]
            for kind, ours, theirs in (
                ("output", dict(enumerate(outputs)), dict(enumerate(plain))),
                ("input", written, writes),
                ("generator", dict(enumerate(drew)), dict.fromkeys(range(len(drew)), True)),
            ):
                found = _first_difference(ours, theirs)
                if found is not None:
                    again, _ = part.run_plainly(copies, draws)
                    same = _first_difference(dict(enumerate(plain)), dict(enumerate(again)))
                    self._say(part, kind, found, repeats=same is None)
                    break
        finally:
            draws.put(after)
        return outputs, recording

    def _say(self, part: "_Partition", kind: str, found: tuple[int, str], *, repeats: bool) -> None:
        position, how = found
        if kind == "generator":
            how = "random numbers were not drawn as without a graph: the generator stands elsewhere"
            text = f"{part.place()}: {how}"
        else:
            text = f"{part.place()}: {part.name_of(kind, position)} {how}"
        if repeats:
            raise VerificationError(
                f"cgpass.verify: {text}. This is a fault of the capture: name the operator in unsafe_ops, and report it."
            )
        if part.place() not in self._warned:
            self._warned.add(part.place())
            log.warning(
                "%s, but runs without graphs differ among themselves, too: it can't be verified. "
                "torch.use_deterministic_algorithms(True) chooses kernels that repeat themselves.",
                text,
            )


@dataclass(frozen=True)
class _Partition:
    """A captured partition that is checked."""

    graph: int
    name: str
    runner: PartitionRunner
    made: tuple[str, ...]

    def place(self) -> str:
        """Which partition it is, `forward captured_0 of model.py:41 in forward`."""
        known = telemetry.graph_runs().get(self.graph)
        direction = known[0].direction if known else "graph"
        place = known[0].place if known else None
        return f"{direction} {self.name}{f' of {place}' if place else ''}"

    def name_of(self, kind: str, position: int) -> str:
        """An output or a written input, for messages."""
        if kind == "input":
            return f"input {self.runner.layout.infos[position].name}, which it writes,"
        made = f" ({self.made[position]})" if position < len(self.made) else ""
        return f"output {position}{made}"

    def written(self, args: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Inputs that it writes."""
        positions = {*self.runner.layout.mutated, *self.runner.written}
        return {i: args[i] for i in sorted(positions) if isinstance(args[i], torch.Tensor)}

    def copied(self, args: Sequence[Any], *, pooled: bool = True) -> list[Any]:
        """Inputs for a plain run: copies of what a run may write, which is what it writes and what dies inside."""
        touched = [*self.written(args).values()]
        if pooled:
            touched += [args[i] for i in self.runner.layout.pooled]
        storages = {s._cdata: s for s in map(_storage, touched) if s is not None}
        clones = {key: storage.clone() for key, storage in storages.items()}
        found = list(args)
        for i, value in enumerate(args):
            storage = _storage(value)
            if storage is not None and storage._cdata in clones:
                found[i] = torch_private.on_storage(clones[storage._cdata], value)
        return found

    def run_plainly(
        self, copies: Sequence[Any], draws: "_Draws"
    ) -> tuple[Sequence[Any], dict[int, torch.Tensor]]:
        """Outputs of a run without a graph, and what it wrote; `copies` stay as they are."""
        args = self.copied(copies, pooled=False)
        if self.runner.layout.seeds:
            device = self.runner.owner.driver.device
            put_on_the_device(args, self.runner.layout.seeds, device)
        writes = self.written(args)
        draws.put(draws.before)
        with torch.inference_mode(False), torch.no_grad():
            return self.runner.fn(args), writes


class _Draws:
    """Generators that a partition may draw from, and where they stood before it ran."""

    def __init__(self, args: Sequence[Any], device: torch.device) -> None:
        found = [value for value in args if isinstance(value, torch.Generator)]
        self._generators = [*found, torch_private.default_generator(torch.device("cpu"))]
        if device.type != "cpu":
            self._generators.append(torch_private.default_generator(device))
        self.before = self.now()

    def now(self) -> list[torch.Tensor]:
        """Their states."""
        return [generator.get_state() for generator in self._generators]

    def put(self, states: Sequence[torch.Tensor]) -> None:
        """Have them stand there."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def _storage(value: Any) -> torch.UntypedStorage | None:
    return value.untyped_storage() if has_place(value) else None


def _first_difference(ours: Mapping[int, Any], theirs: Mapping[int, Any]) -> tuple[int, str] | None:
    """The first value that differs, by its position, and how."""
    for position, value in ours.items():
        how = _difference(value, theirs[position])
        if how is not None:
            return position, how
    return None


def _difference(ours: Any, plain: Any) -> str | None:
    """How a value differs from the plain run's, None if it is the same bit by bit."""
    if not isinstance(ours, torch.Tensor) or not isinstance(plain, torch.Tensor):
        same = ours is plain or (type(ours) is type(plain) and ours == plain)
        return None if same else f"is {ours!r}, and {plain!r} without a graph"
    if (ours.shape, ours.dtype) != (plain.shape, plain.dtype):
        return f"is {_kind(ours)}, and {_kind(plain)} without a graph"
    if ours.is_sparse or ours.is_nested or not ours.numel():
        return None
    a, b = _bits(ours), _bits(plain)
    unequal = (a != b).any(dim=-1)
    count = int(unequal.sum())
    if not count:
        return None
    first = int(unequal.nonzero()[0])
    index = tuple(int(n) for n in torch.unravel_index(torch.tensor(first), ours.shape))
    return (
        f"({_kind(ours)}) differs in {count} of {ours.numel()} elements, first at {list(index)}: "
        f"{_shown(ours[index])}, and {_shown(plain[index])} without a graph"
    )


def _shown(element: torch.Tensor) -> str:
    """A number, or the bytes of what Python has no number for."""
    try:
        return repr(element.item())
    except NotImplementedError:
        return f"bytes {_bits(element).flatten().tolist()}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """uint8[elements, bytes of each]."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1, 1)
    return flat.view(torch.uint8)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
