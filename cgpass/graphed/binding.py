"""Arguments and results: how a call's fit the sample that a callable was recorded with, how results are rebuilt."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cgpass.errors import InputError
from cgpass.runtime import fast
from cgpass.runtime.inputs import check_tensor, overlaps_itself

_OPAQUE = (bool, int, float, complex, str, bytes)
"""Classes of results that may be others in each run; the recorded run's are returned."""


class Structure:
    """The structure of arguments or results that tensors fill, each given once; holds none of them."""

    def __init__(self, value: Any) -> None:
        leaves, self.spec = pytree.tree_flatten(value, _is_leaf)
        tensors = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        distinct = {id(tensor): tensor for _, tensor in tensors}
        numbers = {each: number for number, each in enumerate(distinct)}
        self.places = [(i, numbers[id(tensor)]) for i, tensor in tensors]
        """Places of tensors, and which one is there: one that is there several times is one."""
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._is_tensor = isinstance(value, torch.Tensor)

    def misfit(self, before: "Structure") -> str | None:
        """Say how this differs from the run before: tensors in other places, or objects that can be no constants."""
        if self.places != before.places or len(self.leaves) != len(before.leaves):
            return "another structure than in the run before. Its result must not depend on how often it ran"
        for now, then in zip(self.leaves, before.leaves, strict=True):
            if not isinstance(now, _OPAQUE) and not equal(now, then):
                return (
                    f"a {type(now).__name__} that is new in each run and not a pytree node. Return the tensors "
                    "themselves, or register the class (torch.utils._pytree.register_dataclass)"
                )
        return None

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The same with these tensors."""
        if self._is_tensor:
            return tensors[0]
        leaves = self.leaves.copy()
        for place, number in self.places:
            leaves[place] = tensors[number]
        return pytree.tree_unflatten(leaves, self.spec)


class Binding:
    """The structure of one sample's arguments: which are tensors, what the others must be.

    Note [Arguments that are one tensor]
        Python code may ask whether two arguments are one object (`query is key`), and what it answered is in the graph.
        So a tensor that a sample has in several places is one tensor for the recording: one piece of memory, one leaf
        whose gradient is the sum. A call in which other arguments are one tensor runs without a graph, also where
        copies would do: whether anybody asks can't be seen.
    """

    def __init__(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
    ) -> None:
        """Take the structure of a sample, whose tensors must lie on the device.

        Raises:
            InputError: A tensor that a recording can't read.
        """
        self._name = name
        self.device = device
        leaves = pytree.tree_leaves((args, dict(kwargs)), _is_leaf)
        self._structure = Structure((args, dict(kwargs)))
        self._keywords = list(kwargs)
        self._names = _names(args, kwargs, len(leaves))
        self._places = [i for i, _ in self._structure.places]
        self._constants = [(i, v) for i, v in enumerate(leaves) if i not in self._places]
        self._flag_places = [i for i, v in self._constants if type(v) is bool]
        self.flags = tuple(leaves[i] for i in self._flag_places)
        """The sample's flags; each combination of others is recorded, too."""
        is_simple = not kwargs and all(isinstance(arg, torch.Tensor) for arg in args)
        self._num_tensors = len(args) if is_simple else -1
        """The number of arguments, if all are tensors and none is given by keyword; else -1."""
        tensors: list[torch.Tensor] = [leaves[i] for i in self._places]
        for i, tensor in zip(self._places, tensors, strict=True):
            check_tensor(f"{name}: {self._names[i]}", tensor, device)
        self._likes = [
            torch.empty((), dtype=t.dtype, device=device).expand(t.shape) for t in tensors
        ]
        """Tensors like them, that nobody changes."""
        self._may_require_grad = bytes([t.requires_grad for t in tensors])
        self._firsts = firsts(tensors)
        self._distinct = sorted(set(self._firsts))
        self.samples = [_dense(tensors[i]) for i in self._distinct]
        """The sample's tensors, each once, each element in a place of its own."""
        self.names = [self._names[self._places[number]] for number in self._distinct]
        """The user's names of them, each in the first of its places."""

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[torch.Tensor] | str, tuple[bool, ...]]:
        """The tensors of a call, in the order of `samples`, or why a replay would be wrong for them; and its flags.

        Raises:
            InputError: The call does not fit the sample; says where.
        """
        tensors, flags = self._tensors(args, kwargs)
        if not fast.fits(tensors, self._likes, self._may_require_grad):
            if fast.fits(tensors, self._likes, bytes([True] * len(tensors))):
                return self._misfit(tensors), flags
            raise InputError(f"{self._name}: {self._misfit(tensors)}.")
        if len(tensors) > 1 and firsts(tensors) != self._firsts:
            pairs = zip(firsts(tensors), self._firsts, strict=True)
            i = next(n for n, (now, then) in enumerate(pairs) if now != then)
            name = self._names[self._places[i]]
            return (
                f"{name} is one tensor with another argument here or in the sample, not both",
                flags,
            )
        return [tensors[i] for i in self._distinct], flags

    def _tensors(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[torch.Tensor], tuple[bool, ...]]:
        """Return what is in the places of the sample's tensors, and of its flags."""
        if len(args) == self._num_tensors and not kwargs:
            return list(args), ()
        if kwargs and list(kwargs) != self._keywords:  # code may go through them in order
            ordered = {name: kwargs[name] for name in self._keywords if name in kwargs}
            kwargs = ordered | kwargs
        leaves, spec = pytree.tree_flatten((args, kwargs), _is_leaf)
        if spec != self._structure.spec:
            found, wanted = dict.fromkeys(_names(args, kwargs, len(leaves))), self._names
            said = [f"no {name}" for name in wanted if name not in found]
            said += [f"{name} besides" for name in found if name not in wanted]
            raise InputError(
                f"{self._name}: its arguments have another structure than the sample's: "
                f"{', '.join(said) or 'other containers, or keys in another order'}. Call it as the sample does."
            )
        for i, value in self._constants:
            are_flags = type(leaves[i]) is type(value) is bool
            if not are_flags and not equal(leaves[i], value):
                raise InputError(
                    f"{self._name}: {self._names[i]} was {value!r:.60} when it was recorded and is {leaves[i]!r:.60} "
                    "now; the graph has the recorded value in it. Pass the same, or record another callable for it."
                )
        return [leaves[i] for i in self._places], tuple(leaves[i] for i in self._flag_places)

    def call(
        self, tensors: Sequence[torch.Tensor], flags: Sequence[bool]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with other tensors in the places of `samples`, and other flags."""
        for i, flag in zip(self._flag_places, flags, strict=True):
            self._structure.leaves[i] = flag
        return self._structure.build(tensors)

    def _misfit(self, tensors: Sequence[Any]) -> str:
        """Return which of a call's tensors does not fit the sample, and how."""
        like = zip(self._places, tensors, self._likes, self._may_require_grad, strict=True)
        i, tensor, expected, requires_grad = next(
            each for each in like if not fast.fits([each[1]], [each[2]], bytes([each[3]]))
        )
        fix = "Convert it, or record a callable with such a sample too"
        if fast.fits([tensor], [expected], b"\1"):
            fix = "Make the callable with a sample that requires grad"
        return (
            f"{self._names[i]} was {_described(expected, requires_grad)} in the sample, now it "
            f"is {_described(tensor, getattr(tensor, 'requires_grad', False))}. {fix}"
        )


def _described(value: Any, requires_grad: int) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    is_plain = value.layout is torch.strided and not value.is_nested
    odd = "nested" if value.is_nested else str(value.layout)
    text = f"{list(value.shape)} {value.dtype} on {value.device}" if is_plain else odd
    return f"{text} with requires_grad=True" if requires_grad else text


def _dense(sample: torch.Tensor) -> torch.Tensor:
    dense, is_lazy = sample, sample.is_conj() or sample.is_neg() or sample.is_inference()
    if is_lazy or overlaps_itself(sample):
        with torch.inference_mode(False), torch.no_grad():
            dense = torch.empty_like(sample, memory_format=torch.contiguous_format).copy_(sample)
    return like_leaf(sample, dense)


def like_leaf(sample: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return a leaf of autograd with other memory, and otherwise what Python code sees of a sample."""
    leaf = data.detach()
    if type(sample) is torch.nn.Parameter:
        leaf = torch.nn.Parameter(leaf, sample.requires_grad)
    vars(leaf).update(vars(sample))
    return leaf.requires_grad_(sample.requires_grad)


def _is_leaf(value: object) -> bool:
    """Keep sizes whole: pytree makes tuples of them."""
    return isinstance(value, torch.Size)


def _names(args: tuple[Any, ...], kwargs: Mapping[str, Any], count: int) -> list[str]:
    """Return `args[0]`, `kwargs['mask']`, `args[1]['x'][0]`."""
    try:
        pairs, _ = pytree.tree_flatten_with_path((args, dict(kwargs)), _is_leaf)
    except ValueError:  # some node does not tell what its children are called
        return [f"leaf {n} of the arguments" for n in range(count)]
    roots = {"[0]": "args", "[1]": "kwargs"}
    paths = [(pytree.keystr(path[:1]), pytree.keystr(path[1:])) for path, _ in pairs]
    return [roots[root] + rest for root, rest in paths]


def firsts(objects: Sequence[Any]) -> list[int]:
    """For each one the first position of the same object."""
    known: dict[int, int] = {}
    return [known.setdefault(id(each), i) for i, each in enumerate(objects)]


def equal(a: object, b: object) -> bool:
    """Tell whether two values are alike for a graph, which has the first in it: numbers of one type and sign."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, torch.nn.Module):
        return False
    if isinstance(a, float | complex):
        return repr(a) == repr(b)
    try:
        return bool(a == b)
    except Exception:  # what can't say whether it is equal isn't
        return False
