"""`Arguments`: a call's arguments, put where a graph reads them and read back where it writes them."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from cgpass.graphed.values import InputMemory
from cgpass.runtime import fast
from cgpass.runtime.writes import extent, has_place


class Places:
    """Stretches of memory."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Args: tensors: whose memory it is; they are not held."""
        self._begins: list[int] = []
        self._ends: list[int] = []
        for begin, end in sorted(extent(t) for t in tensors if has_place(t)):
            if self._ends and begin < self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._begins.append(begin)
                self._ends.append(end)

    def meet(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory may share some of it."""
        if not self._begins or not has_place(tensor):
            return False
        begin, end = extent(tensor)
        before = bisect_left(self._begins, end) - 1
        return before >= 0 and begin < self._ends[before]


class Arguments:
    """Memory of the arguments of one recording.

    Note [Arguments that share memory]
        A graph reads every argument in memory of its own. So arguments that lie in the samples' memory, in places that
        others are copied to, are copied before any of these is. An argument that the callable writes and that shares
        memory with another one, with a parameter or with a sample has no such copy: what is written to one would have
        to be seen in the other. Such a call runs without a graph.
    """

    def __init__(
        self,
        memory: Sequence[InputMemory],
        names: Sequence[str],
        written: Sequence[int],
        statics: Sequence[torch.Tensor],
        viewed: Sequence[int],
    ) -> None:
        """Describe it.

        Args:
            memory: One for each argument.
            names: What the user calls them.
            written: Those that the graph writes.
            statics: What it reads besides; not held.
            viewed: Those that results are views of.
        """
        self.memory = list(memory)
        self._names = names
        self._written = list(written)
        samples = [m.tensor for m in memory if not m.is_own]
        self._samples = Places(samples)
        self._storages = {sample.untyped_storage().data_ptr() for sample in samples}
        self._shared = array("q", sorted(self._storages)).tobytes()
        self._targets = [m.tensor for m in memory]
        self._fixed = Places([*samples, *statics] if written else ())
        self._spanned = [i for i, m in enumerate(memory) if m.spans]
        self._viewed = list(viewed)
        self.are_simple = not (self._written or self._spanned or self._viewed)
        """Whether any call's arguments will do."""

    @property
    def are_written(self) -> bool:
        """Whether the graph writes some."""
        return bool(self._written)

    def why_not(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """Why a replay can't take these arguments."""
        for i in self._spanned:
            if not self.memory[i].is_laid_out_as(tensors[i]):
                return f"{self._names[i]} has another memory layout than the sample, whose elements share memory"
        for i in self._viewed:
            if not self.memory[i].is_laid_out_as(tensors[i]):
                return f"{self._names[i]}, which results are views of, has another memory layout than the sample"
        for i in self._written:
            if self._fixed.meet(tensors[i]):
                return f"{self._names[i]}, which it writes, shares memory with a parameter, a buffer or a sample"
            alone = Places([tensors[i]])
            for k, other in enumerate(tensors):
                if k != i and alone.meet(other):
                    return f"{self._names[i]}, which it writes, shares memory with {self._names[k]}"
        return None

    def copy_in(self, tensors: Sequence[torch.Tensor]) -> int:
        """Copy what does not lie where the graph reads it; returns bytes copied."""
        if not self._spanned:
            num_bytes = fast.fill(self._targets, tensors, self._shared)
            if num_bytes >= 0:
                return num_bytes
        away: list[tuple[InputMemory, torch.Tensor]] = []
        crossing = False
        for memory, tensor in zip(self.memory, tensors, strict=True):
            if not memory.holds(tensor):
                source = memory.source(tensor)
                crossing |= self._lies_in_samples(source)
                away.append((memory, source))
        if crossing:  # see Note [Arguments that share memory]
            away = [(memory, source.clone()) for memory, source in away]
        num_bytes = 0
        for memory, source in away:
            memory.target.copy_(source)
            num_bytes += memory.num_bytes
        return num_bytes

    def _lies_in_samples(self, tensor: torch.Tensor) -> bool:
        if not self._storages or tensor.untyped_storage().data_ptr() not in self._storages:
            return False
        return self._samples.meet(tensor)

    def write_back(self, tensors: Sequence[Any]) -> None:
        """Give written arguments their values."""
        for i in self._written:
            if not self.memory[i].holds(tensors[i]):
                tensors[i].copy_(self.memory[i].tensor)
