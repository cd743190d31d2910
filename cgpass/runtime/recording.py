"""One captured graph with its placeholders and outputs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cgpass import torch_private
from cgpass.runtime import fast
from cgpass.runtime.driver import CapturedGraph
from cgpass.runtime.output_memory import OutputMemory
from cgpass.runtime.outputs import CopyOut, InputAlias, alias_of_input, part_of
from cgpass.runtime.placeholders import Placeholder, copies_in, num_bytes
from cgpass.telemetry import CallStats


class Recording:
    """One captured graph: where its inputs must lie, and what it hands out.

    Made by `PartitionRunner`, which also checks that a call's inputs match before it calls `run`.
    """

    closed = False
    made_for: tuple[int, ...] = ()
    """Identities of the storages that it reads in place: of layers whose parameters come to one place in turn, one's."""

    def __init__(
        self,
        graph: CapturedGraph,
        outputs: Sequence[Any],
        staged: Sequence[Any],
        placeholders: Mapping[int, Placeholder],
        *,
        mutated: Sequence[int] = (),
        visible: frozenset[int] | None = None,
        read: frozenset[int] = frozenset(),
        consumes: Mapping[int, int] | None = None,
        outside: Mapping[int, torch.UntypedStorage] | None = None,
        released: dict[int, tuple[int, ...]] | None = None,
        counts_writes: bool = False,
        birth: int = 0,
        slot: int = 0,
        stats: CallStats | None = None,
    ) -> None:
        self._stats = stats or CallStats()
        self.birth = birth
        self.slot = slot
        self.released = released or {}
        """Blocks that were free when it was made, by the birth of the recording whose outputs lay there."""
        self.written = frozenset(mutated)
        """Inputs that a replay writes, or that are written from the memory that it writes."""
        self.draws: list[int] = []
        """See `table.Seen.draws`."""
        self.replay: Callable[[], None] = graph.replay
        self.instantiate_ms = graph.instantiate_ms
        """See `CapturedGraph`."""
        self._graph = graph
        consumes = consumes or {}
        self._consumed, self._users = tuple(consumes), tuple(consumes.values())
        """Inputs whose memory it writes, and the number of users of a storage that nobody else holds."""
        self._outside = dict(outside or {})
        """What it reads or returns that is neither an input nor made by it, by address: kept alive here."""
        self._placeholders = dict(placeholders)  # kept alive as long as a recording reads them
        self._copies = copies_in(placeholders)
        self._counts_writes = counts_writes
        """Whether autograd is to know of every write, since nobody else tells it."""
        self._write_back = [(i, placeholders[i]) for i in mutated if i in placeholders]
        self.copied_bytes = sum(group.num_bytes for group in self._copies) + sum(
            num_bytes(p.target) for _, p in self._write_back
        )
        by_storage = {
            value.untyped_storage().data_ptr(): i
            for i, value in reversed(list(enumerate(staged)))
            if isinstance(value, torch.Tensor)
            and i not in consumes
            and value.untyped_storage().nbytes()
        }
        self.own: dict[int, int] = {}
        """Which of the memory's tensors an output is, by position."""
        self._outputs = list(outputs)
        self._take_over(outputs, staged, by_storage, visible, read)
        del outputs
        self._sort_aliases(staged)
        self._arrange()
        self._copies_out: CopyOut | None = None

    def _sort_aliases(self, staged: Sequence[Any]) -> None:
        """Tell outputs that are plain views of inputs from other aliases of them."""
        aliases = [(n, a) for n, a in enumerate(self._outputs) if isinstance(a, InputAlias)]
        self.aliases = frozenset(n for n, _ in aliases)
        """Outputs that are (views of) inputs."""
        views = [(n, a) for n, a in aliases if a.is_plain_view_of(staged[a.index])]
        self._views_at = tuple(n for n, _ in views)
        self._views = tuple(a.as_view() for _, a in views)
        same = [(n, a) for n, a in aliases if a.identity]
        self.viewed = frozenset(a.index for _, a in aliases if not a.identity)
        """Inputs that outputs are views of; such outputs are laid out as if the inputs were as they were."""
        self._same_at = tuple(n for n, _ in same)
        self._same_of = fast.taker(tuple(a.index for _, a in same))
        others = {n for n, _ in aliases} - {*self._views_at, *self._same_at}
        self._other_aliases = [(n, a) for n, a in aliases if n in others]
        self._retyped = [a for _, a in aliases if a.dtype != staged[a.index].dtype]

    def _take_over(
        self,
        outputs: Sequence[Any],
        staged: Sequence[Any],
        by_storage: Mapping[int, int],
        visible: frozenset[int] | None,
        read: frozenset[int],
    ) -> None:
        """Sort outputs: views of inputs, what lies elsewhere, and tensors of the recording's own, each once."""
        own: list[torch.Tensor] = []
        numbers: dict[int, int] = {}
        for n, output in enumerate(outputs):
            if not isinstance(output, torch.Tensor):
                continue
            alias = alias_of_input(output, staged, by_storage)
            if alias is not None:
                self._outputs[n] = alias
                continue
            if output.untyped_storage().data_ptr() in self._outside:
                continue  # handed out as that very tensor: no replay writes where it lies
            if id(output) not in numbers:
                numbers[id(output)] = len(own)
                own.append(output)
            self.own[n] = numbers[id(output)]
        shown = {number for n, number in self.own.items() if visible is None or n in visible}
        used = {number for n, number in self.own.items() if n in read}
        self.memory = OutputMemory(
            own,
            [(n in shown, n in used) for n in range(len(own))],
            share=self._graph.share,
        )

    @property
    def copied_inputs(self) -> dict[int, int]:
        """Bytes that each replay copies, by position of the input; those that it writes are copied back, too."""
        back = {i for i, _ in self._write_back}
        return {
            i: num_bytes(placeholder.target) * (1 + (i in back))
            for i, placeholder in self._placeholders.items()
        }

    def seal(self) -> None:
        """Note that nobody but this recording holds its outputs; to be called once, last of all."""
        self.memory.seal()

    def _arrange(self) -> None:
        """Work out what never changes between replays."""
        for n, number in self.own.items():
            self._outputs[n] = self.memory.tensors[number]
        first: dict[int, int] = {}
        for n, number in self.own.items():
            first.setdefault(number, n)
        self._twins = [(n, first[k]) for n, k in self.own.items() if first[k] != n]
        leaders: dict[int, int] = {}
        self._followers: list[tuple[int, fast.ViewSpec]] = []
        for number, n in list(first.items()):
            tensor = self.memory.tensors[number]
            leader = leaders.setdefault(tensor.untyped_storage()._cdata, n)
            spec = part_of(self._outputs[leader], tensor, leader)
            if leader != n and spec is not None:
                del first[number]
                self._followers.append((n, spec))
        empty = [k for k in first if not self.memory.tensors[k].untyped_storage().nbytes()]
        self._empty = [(first.pop(number), self.memory.tensors[number]) for number in empty]
        """Outputs without memory, made anew in each call: who gets one may enlarge it (`out=`, say)."""
        self._escaping_at = tuple(first.values())
        self._escaping = tuple(self.memory.tensors[number] for number in first)

    def may_replay(self, args: Sequence[Any]) -> bool:
        """Whether a replay can make its outputs, and writes no inputs that somebody else holds."""
        if self._retyped and not self.fits(args):
            return False
        return not self._consumed or fast.exclusive(args, self._consumed, self._users)

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether outputs that are inputs seen as another dtype can be made of these; without graphs they raise."""
        return all(alias.fits(args[alias.index]) for alias in self._retyped)

    def run(self, args: Sequence[Any]) -> list[Any]:
        """Copy in what moves, replay, and hand out the outputs.

        **Lifetime:** tensors returned are fresh aliases of pool memory: the next replay of this recording writes
        over them, unless `LiveOutputs` is asked first.
        """
        for group in self._copies:
            group.copy_from(args)
        self.replay()
        for i, placeholder in self._write_back:
            # A compiled function itself counts those writes that autograd is to know of.
            placeholder.copy_to(args[i].data)
            if self._counts_writes and not args[i].is_inference():
                torch.autograd.graph.increment_version(args[i])
        outputs = self._outputs.copy()
        if torch.is_inference_mode_enabled():  # what is made in it are inference tensors
            made = [torch_private.on_storage(t.untyped_storage(), t) for t in self._escaping]
        else:
            made = fast.aliases(self._escaping)
        fast.put(outputs, self._escaping_at, made)
        for n, like in self._empty:
            storage = torch.UntypedStorage(0, device=like.device)
            outputs[n] = torch_private.on_storage(storage, like)
        if self._followers:  # what shares memory shares the count of writes that autograd checks
            for n, spec in self._followers:
                (outputs[n],) = fast.views(outputs, (spec,))
        for n, twin in self._twins:
            outputs[n] = outputs[twin]
        fast.put(outputs, self._views_at, fast.views(args, self._views))
        fast.put(outputs, self._same_at, self._same_of(args))
        for n, alias in self._other_aliases:
            outputs[n] = alias.of(args[alias.index])
        return outputs

    def copy_out(self, results: list[Any]) -> int:
        """Put copies of its own outputs in their place, for the caller to keep; returns bytes copied."""
        if self._copies_out is None:
            self._copies_out = CopyOut(results, tuple(self.own))
        self._copies_out.run(results)
        return self._copies_out.copied_bytes

    # ---- what is held

    def rescue(self, blocks: Sequence[int]) -> int:
        """Move held outputs to memory of their own; returns bytes copied. See `OutputMemory`."""
        copied = self.memory.rescue(blocks)
        self._arrange()
        if not copied:
            return 0
        self._stats.rescues += 1
        self._stats.rescued_bytes += copied
        return copied

    def close(self, *, whole_pool: bool = True) -> None:
        """Free the graph; outputs that somebody holds stay theirs. See `OutputMemory.let_go`."""
        self.memory.let_go(whole_pool=whole_pool)
        self._graph.reset()
        self.closed = True
