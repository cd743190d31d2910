"""Where a graph reads its arguments, and how a result is made of its outputs."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cgpass import torch_private
from cgpass.runtime.inputs import Placeholder, overlaps_itself
from cgpass.runtime.owner import Owner
from cgpass.telemetry.reason import many


class InputMemory:
    """Where a graph reads one argument: a sample's own memory, or a placeholder."""

    __slots__ = (
        "__weakref__",
        "address",
        "is_own",
        "num_bytes",
        "spans",
        "stride",
        "target",
        "tensor",
    )

    def __init__(self, tensor: torch.Tensor, placeholder: Placeholder | None = None) -> None:
        """Args: tensor: on the memory. placeholder: that it belongs to; None for a sample."""
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self.stride = tensor.stride()
        self.num_bytes = tensor.nbytes
        self.is_own = placeholder is not None
        """Whether nobody but graphs reads it."""
        self.spans = placeholder if placeholder is not None and placeholder.flat else None
        """What is copied as the memory that it spans, since its elements share some."""
        self.target = tensor if self.spans is None else self.spans.target

    def holds(self, value: torch.Tensor) -> bool:
        """Whether a call's argument lies just here."""
        return (
            value.data_ptr() == self.address
            and value.stride() == self.stride
            and value.is_conj() == self.tensor.is_conj()
            and value.is_neg() == self.tensor.is_neg()
        )

    def is_laid_out_as(self, value: torch.Tensor) -> bool:
        """Whether the memory that a value spans is like this, where values are copied as such."""
        sizes = zip(value.size(), value.stride(), self.stride, strict=True)
        return (
            all(a == b or size < 2 for size, a, b in sizes)
            and value.is_conj() == self.tensor.is_conj()
            and value.is_neg() == self.tensor.is_neg()
        )

    def source(self, value: torch.Tensor) -> torch.Tensor:
        """What of a value is copied to `target`."""
        value = value.detach()
        return value if self.spans is None else self.spans.source(value)

    def fill(self, value: torch.Tensor) -> int:
        """Give the memory the value of `value`, unless it is there; returns bytes copied."""
        if self.holds(value):
            return 0
        self.target.copy_(self.source(value))
        return self.num_bytes


def leaf_like(sample: torch.Tensor, data: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
    """A leaf of autograd with other memory, and otherwise what Python code sees of a sample.

    Args:
        sample: Whose class, if that is `torch.nn.Parameter`, and attributes it has.
        data: On the memory.
        requires_grad: Whether it gets a gradient.
    """
    leaf = data.detach()
    if type(sample) is torch.nn.Parameter:
        leaf = torch.nn.Parameter(leaf, requires_grad)
    vars(leaf).update(vars(sample))
    return leaf.requires_grad_(requires_grad)


class _Tensor:
    """Stands for any in messages."""

    def __repr__(self) -> str:
        return "Tensor"


_TENSOR: Any = _Tensor()


@dataclass(frozen=True)
class OutputStructure:
    """How a callable's result is made of the graph's outputs."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    """Those that are no tensors, in their places."""
    tensors: tuple[int, ...]
    """Places of the others; of one that is there several times, the first."""
    repeats: tuple[tuple[int, int], ...] = ()
    """Further places of such, and which of the tensors it is."""
    plain: str = ""
    """"tensor" or "tuple", where the result is only that."""

    @classmethod
    def of(cls, result: Any) -> "OutputStructure":
        """The structure of a result; holds none of its tensors."""
        leaves, spec = pytree.tree_flatten(result)
        places: list[int] = []
        repeats: list[tuple[int, int]] = []
        numbers: dict[int, int] = {}
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            if id(leaf) in numbers:
                repeats.append((i, numbers[id(leaf)]))
            else:
                numbers[id(leaf)] = len(places)
                places.append(i)
        plain = ""
        if isinstance(result, torch.Tensor):
            plain = "tensor"
        elif type(result) is tuple and len(places) == len(result) == len(leaves):
            plain = "tuple"
        kept = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return cls(spec, kept, tuple(places), tuple(repeats), plain)

    def is_like(self, other: "OutputStructure") -> bool:
        """Whether tensors are in the same places among as many leaves; these and the nodes may be others."""
        ours, others = ((each.tensors, each.repeats, len(each.leaves)) for each in (self, other))
        return ours == others

    def __str__(self) -> str:
        try:
            return str(self.build([_TENSOR] * len(self.tensors)))
        except Exception:  # classes that look at their members
            return many(len(self.tensors), "tensor")

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """A result with these tensors."""
        if self.plain == "tensor":
            return tensors[0]
        if self.plain == "tuple":
            return tuple(tensors)
        leaves = list(self.leaves)
        for place, tensor in zip(self.tensors, tensors, strict=True):
            leaves[place] = tensor
        for place, number in self.repeats:
            leaves[place] = tensors[number]
        return pytree.tree_unflatten(leaves, self.spec)


_samples: "weakref.WeakValueDictionary[int, InputMemory]" = weakref.WeakValueDictionary()
"""What lies in samples' own memory, by the address of their storage: of all groups, as long as graphs read it."""


def sample_memory(sample: torch.Tensor) -> InputMemory | None:
    """The memory of a sample as that of an argument, unless a graph can't take it as it is or another has it."""
    if overlaps_itself(sample) or sample.is_conj() or sample.is_neg() or sample.is_inference():
        return None
    if Owner.is_any_pool_storage(
        sample
    ):  # another graph's result, which is moved when that is replayed
        return None
    address = sample.untyped_storage().data_ptr()
    if address in _samples:
        return None
    memory = _samples[address] = InputMemory(sample.detach())
    return memory


def give_up_samples(memory: Iterable[InputMemory]) -> None:
    """Have the memory of samples be free for other graphs, though somebody holds these still."""
    for each in memory:
        address = each.tensor.untyped_storage().data_ptr()
        if _samples.get(address) is each:
            del _samples[address]


def own_memory(like: torch.Tensor) -> InputMemory:
    """New memory for an argument."""
    like = like.detach()
    placeholder = Placeholder(like)
    placeholder.copy_from(like)
    return InputMemory(placeholder.tensor, placeholder)


def tensors_of(result: Any) -> Iterator[torch.Tensor]:
    """The tensors in a nested structure, in order, each once."""
    seen: set[int] = set()
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and id(leaf) not in seen:
            seen.add(id(leaf))
            yield leaf


def no_autocast(tensors: Iterable[torch.Tensor]) -> torch.autocast:
    """Have nothing cast on the device of `tensors`: as in a backward outside of the block that its forward ran in."""
    kind = next((tensor.device.type for tensor in tensors), "cpu")
    return torch.autocast(kind, enabled=False)


@contextlib.contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Have autocast cast every weight anew: a cast weight of another run would be no part of the graph."""
    torch.clear_autocast_cache()
    with torch_private.autocast_cache_off():
        yield
