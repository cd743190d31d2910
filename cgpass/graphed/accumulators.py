"""`Accumulators`: leaves whose gradients are added up elsewhere while callables are recorded."""

from collections.abc import Iterable
from typing import Any

import torch

from cgpass.runtime import fast


class Accumulators:
    """What adds to leaves' `.grad`, taken from them and put back.

    Note [A captured graph has accumulators of its own]
        A leaf knows one autograd node that adds to its `.grad`, as long as some graph has it, and the node keeps the
        stream on which it was made. Whatever backward reaches a node on another stream makes that stream wait: a
        capture would have the user's own stream wait for it, which CUDA refuses, and a later backward of the user's
        would wait for a stream of ours. So a recording begins with leaves that know no node, and ends with them
        knowing what they knew before; hooks on it (DistributedDataParallel has some) stay where they are.
    """

    def __init__(self) -> None:
        """Nothing is taken yet."""
        self._leaves: list[torch.Tensor] = []
        self._taken: list[Any] = []
        self._seen: set[int] = set()

    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take what the leaves among some tensors know, once for each."""
        leaves = [t for t in tensors if t.requires_grad and t.is_leaf and id(t) not in self._seen]
        leaves = list({id(t): t for t in leaves}.values())
        self._seen.update(map(id, leaves))
        self._taken += fast.take_accumulators(leaves)
        self._leaves += leaves

    def forget_warm_ups(self) -> None:
        """Have the leaves forget what warm-ups made, but for what somebody hooked: that may be of another stream.

        A module whose hooks leave there what they computed (torch.nn.utils.prune) holds a graph of its last run.
        Before the first capture only: a backward finds the gradient of a leaf by what the leaf knows.
        """
        fast.drop_accumulators(self._leaves)

    def put_back(self, *, forget: bool = False) -> None:
        """Have all leaves know it again.

        Of what was made meanwhile they know what somebody hooked. Nothing else: a module whose hooks leave there what
        they computed (torch.nn.utils.spectral_norm) holds a graph of a capture.

        Args:
            forget: Whether graphs of ours stay, so that leaves must not know what somebody hooked, either.
        """
        leaves, taken = self._leaves, self._taken
        (fast.take_accumulators if forget else fast.drop_accumulators)(leaves)
        self._leaves, self._taken = [], []
        self._seen.clear()
        fast.put_accumulators(leaves, taken)
