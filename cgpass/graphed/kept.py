"""`KeptState`: parameters and buffers as they were before they were warmed up and recorded."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from cgpass import torch_private


@dataclass(eq=False)
class _Kept:
    """A tensor and what it was."""

    tensor: torch.Tensor
    before: torch.Tensor | None
    """None if it is not written."""
    shape: torch.Size
    version: int
    is_parameter: bool

    def is_there(self) -> bool:
        """Whether it has the memory of then: hooks may have taken it away."""
        return bool(self.tensor.shape == self.shape and self.tensor.untyped_storage().nbytes())

    def is_written(self) -> bool:
        """Whether it has another value now."""
        return (
            self.before is not None
            and self.is_there()
            and not torch.equal(self.tensor, self.before)
        )


class KeptState:
    """What warm-ups and captures may write.

    Note [Versions are put back with values]
        Whoever's backward is pending saved a buffer at the version that it had, and autograd compares: so what has its
        value again has its version, too. Some operators write without counting (batch norm's), and then a copy back
        that counts would be the only change that autograd sees.
    """

    def __init__(self) -> None:
        """Nothing is kept yet."""
        self._kept: dict[int, _Kept] = {}
        """By identity of the tensor, as it was when it was first kept."""

    def keep(self, tensors: Iterable[torch.Tensor], num_parameters: int) -> None:
        """Copy what may be written.

        Args:
            tensors: Each once; parameters come first.
            num_parameters: How many of them are parameters, which are copied for their first forward and backward only: these tell.
        """
        for i, tensor in enumerate(tensors):
            if id(tensor) not in self._kept and tensor.is_leaf:
                self._kept[id(tensor)] = _Kept(
                    tensor,
                    tensor.detach().clone(),
                    tensor.shape,
                    tensor._version,
                    i < num_parameters,
                )

    def forget_unwritten(self) -> None:
        """Give up the copies of parameters that a forward and its backward did not write."""
        for kept in self._kept.values():
            if kept.is_parameter and not kept.is_written():
                kept.before = None

    def put_back(self) -> None:
        """Undo what was written; see Note [Versions are put back with values].

        What was given up and written later, by hooks, keeps its new version with its new value.
        """
        there = [k for k in self._kept.values() if k.before is not None and k.is_there()]
        with torch.no_grad():
            for kept in there:
                if kept.before is not None and kept.is_written():
                    kept.tensor.copy_(kept.before)
        changed = [kept for kept in there if kept.tensor._version != kept.version]
        torch_private.set_versions([k.tensor for k in changed], [k.version for k in changed])
        self._kept.clear()
