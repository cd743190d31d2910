"""`Group`: what the callables of one `make_graphed_callables` share."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgpass.graphed.accumulators import Accumulators
from cgpass.graphed.pending import PendingCalls
from cgpass.options import current_defaults
from cgpass.runtime.inputs import Placeholder, layout_of, overlaps_itself
from cgpass.runtime.owner import Owner
from cgpass.runtime.recording import Recording
from cgpass.telemetry import CallStats, progress


class Group:
    """Pools, driver and order of recordings; a member of its owner."""

    def __init__(self, owner: Owner, *, own_grads: bool) -> None:
        """Nothing is recorded yet.

        Args:
            owner: Of the recordings.
            own_grads: Whether gradients that somebody holds are moved before they would be overwritten.
        """
        self.owner = owner
        self.driver = owner.driver
        self.device: torch.device = owner.driver.device
        self.own_grads = own_grads
        self._pending: dict[int, PendingCalls] = {}
        self._grads: weakref.WeakValueDictionary[tuple[Any, ...], Placeholder] = (
            weakref.WeakValueDictionary()
        )
        self.accumulators = Accumulators()
        """Taken for as long as something is being recorded."""
        self.members: list[Callable[[], None]] = []
        """What frees the recordings of each callable."""
        owner.add(self)

    def pending(self, slot: int) -> PendingCalls:
        """Forwards of a pool whose backward may come."""
        return self._pending.setdefault(slot, PendingCalls())

    def prepare(self, recording: Recording, pending: PendingCalls) -> None:
        """Have a replay overwrite nothing that is still needed.

        Args:
            recording: What is about to be replayed.
            pending: Forwards of its pool whose backward may come.
        """
        pending.make_way(recording.birth)
        if not self.owner.is_safe(recording):
            self.owner.rescue(recording)

    def hand_out(self, recording: Recording, outputs: list[Any], *, own: bool = True) -> list[Any]:
        """Outputs of a replay as the user gets them.

        Args:
            recording: What was replayed.
            outputs: What `Recording.run` returned.
            own: Whether they keep their values however often it is replayed again.
        """
        if not own:
            return outputs
        self.owner.note_handed_out(recording)
        return outputs

    def grad_placeholders(
        self, outputs: Sequence[torch.Tensor], *, shared: bool
    ) -> list[Placeholder]:
        """Where gradients of outputs lie for a replay.

        Args:
            outputs: Whose gradients they are.
            shared: Whether all passes may share them: the replay is over when the next one's are copied in.
        """
        outputs = [_like_gradient(out) for out in outputs]
        if not shared:
            return [Placeholder(out) for out in outputs]
        counts: Counter[tuple[Any, ...]] = Counter()
        found: list[Placeholder] = []
        for out in outputs:
            layout = layout_of(out)
            key = (*layout, counts[layout])
            counts[layout] += 1
            placeholder = self._grads.get(key)
            if placeholder is None:
                placeholder = self._grads[key] = Placeholder(out)
            found.append(placeholder)
        return found

    def new_recording(
        self,
        fn: Callable[[list[Any]], list[Any]],
        args: Sequence[Any],
        slot: int,
        stats: CallStats,
        *,
        label: str,
        own: bool = True,
        generators: Sequence[torch.Generator] = (),
    ) -> Recording:
        """Have the driver record `fn(args)`.

        Args:
            fn: Takes a list and returns one.
            args: Tensors, read where they lie.
            slot: Pool to record into.
            stats: Where it is counted.
            label: What it is a recording of, for listings.
            own: Whether outputs may have to be copied for the user.
            generators: To be registered with the graph, beside the default ones.
        """
        owner, staged = self.owner, list(args)
        released = owner.released(slot)
        with progress.shown(f"recording {label}", current_defaults().progress):
            graph, outputs = self.driver.record(fn, [*staged, *generators], opaque=False, slot=slot)
        recording = Recording(
            graph,
            outputs,
            staged,
            {},
            released=released,
            birth=owner.next_birth(),
            slot=slot,
            stats=stats,
        )
        del outputs
        recording.seal()
        owner.add_recording(recording)
        stats.recordings += 1
        return recording

    # ---- a member of the owner

    def close(self) -> None:
        """Free every recording."""
        for free in self.members:
            free()
        if self.owner.closed:
            self.members.clear()
        self._pending.clear()

    def forget_failures(self) -> None:
        """Nothing to do: what a callable has used up goes with its recordings."""

    def forget_recordings(self) -> None:
        """As `close`: nobody asks this owner to start over, or tells it of calls."""
        self.close()

    def would_move_apart(self, victim: Recording, by: Recording) -> bool:
        """See `Member`: outputs of callables stay where they are."""
        del victim, by
        return False

    def move_apart(self, by: Recording) -> None:
        """See `Member`: never asked for."""


def _like_gradient(output: torch.Tensor) -> torch.Tensor:
    """A tensor laid out as gradients of an output are taken: each element has a place of its own."""
    if overlaps_itself(output) or output.is_conj() or output.is_neg():
        return torch.empty_like(output.detach())
    return output
