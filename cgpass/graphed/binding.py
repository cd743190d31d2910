"""`Binding`: how a call's arguments fit the sample that a callable was recorded with."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cgpass.errors import GraphedArgumentError, InputError
from cgpass.graphed.constants import Snapshot, short, snapshot
from cgpass.graphed.values import leaf_like
from cgpass.runtime import fast
from cgpass.runtime.inputs import check_tensor


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
        """Take the structure of a sample.

        Args:
            name: Of the callable, for messages.
            args: The sample's.
            kwargs: The sample's.
            device: Where its tensors must lie.

        Raises:
            InputError: A tensor that a recording can't read.
        """
        self._name = name
        self._device = device
        self._keys = tuple(kwargs)
        self._num_args = len(args)
        self._names, leaves, self._spec = _flattened(args, kwargs)
        self._is_flat = len(leaves) == len(args) + len(kwargs) and all(
            leaf is arg for leaf, arg in zip(leaves, [*args, *kwargs.values()], strict=True)
        )
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._constants = [(i, v) for i, v in enumerate(leaves) if i not in self._places]
        self._as_recorded = [(i, snapshot(v)) for i, v in self._constants]
        self._was_run = False
        self._is_simple = self._is_flat and not self._constants and not kwargs
        """Whether the arguments are nothing but tensors."""
        tensors: list[torch.Tensor] = [leaves[i] for i in self._places]
        for i, tensor in zip(self._places, tensors, strict=True):
            check_tensor(f"{name}: {self._names[i]}", tensor, device)
        self._expected = [(t.shape, t.dtype, t.requires_grad) for t in tensors]
        self._likes = [
            torch.empty((), dtype=t.dtype, device=device).expand(t.shape) for t in tensors
        ]
        """Tensors like them, that nobody changes."""
        self._may_require_grad = bytes([t.requires_grad for t in tensors])
        self._firsts = _firsts(tensors)
        self._distinct = sorted(set(self._firsts))
        self._repeats = [(i, first) for i, first in enumerate(self._firsts) if i != first]
        self.samples = [tensors[i] for i in self._distinct]
        """The sample's tensors, each once."""
        self.requires_grad = [sample.requires_grad for sample in self.samples]

    def name_of(self, number: int) -> str:
        """What the user calls one of the tensors, in the first of its places."""
        return self._names[self._places[self._distinct[number]]]

    @property
    def names(self) -> list[str]:
        """What the user calls the tensors."""
        return [self.name_of(number) for number in range(len(self.samples))]

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """The tensors of a call, in the order of `samples`; None where other ones are one tensor than in the sample.

        And where they are none, but stand for some that `torch.fx.symbolic_trace` does not know.

        Raises:
            InputError: The call does not fit the sample; says where.
        """
        try:
            tensors = self._tensors(args, kwargs)
            if not fast.fits(tensors, self._likes, self._may_require_grad):
                raise self._misfit(tensors)
        except InputError:
            if _are_symbolic(args, kwargs):
                return None
            raise
        for i, first in self._repeats:
            if tensors[i] is not tensors[first]:
                return None
        if len(tensors) > 1 and len(set(map(id, tensors))) != len(self._distinct):
            return None
        return [tensors[i] for i in self._distinct] if self._repeats else tensors

    def why_unbound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Where `bind` returns None: which arguments are one tensor, or are none."""
        if _are_symbolic(args, kwargs):
            return "torch.fx.symbolic_trace, which would keep no replay, traces it"
        names = [self._names[i] for i in self._places]
        firsts = _firsts(self._tensors(args, kwargs))
        pairs = zip(names, firsts, self._firsts, strict=True)
        name, now, before = next(each for each in pairs if each[1] != each[2])
        if before > now:
            return (
                f"{name} is the same tensor as {names[now]}, and was another one in the sample. Code that asks whether "
                "they are one would go another way: pass a view of it, as x.view_as(x), or record a callable with such "
                "a sample too"
            )
        return (
            f"{name} is another tensor than {names[before]}, and was the same in the sample. Record a callable with two "
            "tensors in the sample for such calls"
        )

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """What is in the places of the sample's tensors."""
        if self._is_simple and len(args) == self._num_args and not kwargs:
            return list(args)
        leaves = self._leaves(args, kwargs)
        for i, kept in self._as_recorded:
            if not kept.is_of(leaves[i]):
                raise self._other_constant(i, leaves[i], kept)
        return [leaves[i] for i in self._places]

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        if len(args) != self._num_args or len(kwargs) != len(self._keys):
            raise self._other_arguments(args, kwargs)
        try:
            given = {key: kwargs[key] for key in self._keys} if kwargs else kwargs
        except KeyError:
            raise self._other_arguments(args, kwargs) from None
        if self._is_flat:
            return [*args, *given.values()]
        leaves, spec = pytree.tree_flatten((args, given))
        if spec != self._spec:
            if _has_other_order(self._spec, (args, given)):
                raise InputError(
                    f"{self._name}: some dictionary among the arguments has its keys in another order than in the "
                    "sample, and code that goes through them would give something else. Have them in the sample's order."
                )
            raise InputError(
                f"{self._name}: the arguments have another structure than the sample had: expected {self._spec}, got "
                f"{spec}. Call it with what it was recorded with, or record it with a sample of this structure too."
            )
        return leaves

    def leaves(self, data: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Leaves of autograd in the places of `samples`, which Python code can't tell from these, on other memory."""
        return [
            leaf_like(sample, each, requires_grad=wanted)
            for sample, each, wanted in zip(self.samples, data, self.requires_grad, strict=True)
        ]

    def call(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with other tensors in the places of `samples`."""
        leaves: list[Any] = [None] * len(self._names)
        for i, value in self._constants:
            leaves[i] = value
        given = dict(zip(self._distinct, tensors, strict=True))
        for i, first in zip(self._places, self._firsts, strict=True):
            leaves[i] = given[first]
        return pytree.tree_unflatten(leaves, self._spec)

    def filled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> list[str]:
        """Places in arguments where a run left tensors that are none of those that it was called with.

        Args:
            args: Of `call`, after the run.
            kwargs: As well.
            tensors: That `call` was given.
        """
        given = set(map(id, tensors))
        names, leaves, _ = _flattened(args, kwargs)
        return [
            name
            for name, leaf in zip(names, leaves, strict=True)
            if isinstance(leaf, torch.Tensor) and id(leaf) not in given
        ]

    def keep_constants(self) -> None:
        """Have what is no tensor be what it is before a run that recording makes: an earlier one may have set it up."""
        self._as_recorded = [
            (i, kept if kept.is_of(kept.value) else snapshot(kept.value))
            for i, kept in self._as_recorded
        ]

    def refuse_changed(self) -> None:
        """Look at what is no tensor after such a run, which must have left it alone; but for the first one.

        Raises:
            GraphedArgumentError: It did not, as every call would.
        """
        was_run, self._was_run = self._was_run, True
        for i, kept in self._as_recorded if was_run else ():
            if not kept.is_of(kept.value):
                raise GraphedArgumentError(
                    f"make_graphed_callables: {self._name} writes into {self._names[i]}, a {type(kept.value).__name__}, "
                    "when it runs, which no replay does. Have it return what it puts there."
                )

    # ---- messages

    def _other_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> InputError:
        want = f"{self._num_args} positional arguments" + _keywords(self._keys)
        got = f"{len(args)}" + _keywords(tuple(kwargs))
        return InputError(
            f"{self._name}: recorded with {want}, called with {got}. Call it just as the sample does."
        )

    def _other_constant(self, i: int, got: object, expected: Snapshot) -> InputError:
        return InputError(
            f"{self._name}: {self._names[i]} was {expected} when it was recorded and is {short(got)} now; the "
            "graph has the recorded value in it. Pass the same, make it a tensor, or record another callable for it."
        )

    def _misfit(self, tensors: Sequence[Any]) -> InputError:
        for number, (tensor, (shape, dtype, requires_grad)) in enumerate(
            zip(tensors, self._expected, strict=True)
        ):
            what = f"{self._name}: {self._names[self._places[number]]}"
            if not isinstance(tensor, torch.Tensor):
                return InputError(
                    f"{what} was a tensor in the sample, now it is a {type(tensor).__name__}."
                )
            if tensor.layout is not torch.strided or tensor.is_nested:
                kind = "nested" if tensor.is_nested else tensor.layout
                return InputError(
                    f"{what} is {kind} now, and graphs read dense tensors. Pass it as such, or call the original."
                )
            if (tensor.shape, tensor.dtype, tensor.device) != (shape, dtype, self._device):
                expected = f"{list(shape)} {dtype} on {self._device}"
                got = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
                if tensor.shape != shape:
                    fix = (
                        "A graph has fixed shapes: pad it, or record a callable for this shape too."
                    )
                elif tensor.dtype != dtype:
                    fix = f"Convert it with .to({dtype}), or record a callable with {tensor.dtype}."
                else:
                    fix = f"Move it with .to({str(self._device)!r})."
                return InputError(f"{what} was {expected} in the sample, now it is {got}. {fix}")
            if tensor.requires_grad and not requires_grad:
                return InputError(
                    f"{what} requires grad, but did not in the sample: no gradient was recorded for it. Record with a "
                    "sample that requires grad, or detach it."
                )
        raise AssertionError("some tensor does not fit")


def _are_symbolic(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether arguments stand for what `torch.fx.symbolic_trace` will be called with."""
    leaves = pytree.tree_leaves((args, kwargs))
    return any(isinstance(leaf, torch.fx.Proxy) for leaf in leaves)


def _firsts(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each one the first position of the same object."""
    known: dict[int, int] = {}
    return [known.setdefault(id(tensor), i) for i, tensor in enumerate(tensors)]


def _flattened(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[str], list[Any], pytree.TreeSpec]:
    """Names of all leaves, the leaves, and their structure."""
    try:
        pairs, spec = pytree.tree_flatten_with_path((args, dict(kwargs)))
    except ValueError:  # some node does not tell what its children are called
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        counts = [(k, pytree.tree_structure(v).num_leaves) for k, v in enumerate(args)]
        counts += [(k, pytree.tree_structure(v).num_leaves) for k, v in kwargs.items()]
        return (
            [f"argument {k!r}, leaf {n}" for k, count in counts for n in range(count)],
            leaves,
            spec,
        )
    return [_name_of(path) for path, _ in pairs], [leaf for _, leaf in pairs], spec


def _has_other_order(spec: pytree.TreeSpec, tree: Any) -> bool:
    """Whether a tree differs from a structure in nothing but the order of dictionaries' keys."""
    try:
        leaves = spec.flatten_up_to(tree)
    except (ValueError, TypeError):
        return False
    return all(pytree.tree_structure(leaf).is_leaf() for leaf in leaves)


def _name_of(path: Sequence[Any]) -> str:
    """`argument 0`, `argument 'mask'`, `argument 1['x'][0]`."""
    _, key, *rest = path
    inner = pytree.keystr(tuple(rest))
    first = key.idx if isinstance(key, pytree.SequenceKey) else key.key
    return f"argument {first!r}{inner}"


def _keywords(names: tuple[str, ...]) -> str:
    return f" and {', '.join(names)} by keyword" if names else ""
