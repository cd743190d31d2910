"""`Binding`: how a call's arguments fit the sample that a callable was recorded with."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cgpass.errors import InputError
from cgpass.graphed.constants import Snapshot, short, snapshot
from cgpass.runtime.signature import check_tensor


class Binding:
    """The structure of one sample's arguments: which are tensors, what the others must be."""

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
        self._is_simple = self._is_flat and not self._constants and not kwargs
        """Whether the arguments are nothing but tensors."""
        self.samples: list[torch.Tensor] = [leaves[i] for i in self._places]
        """The sample's tensors."""
        for i, sample in zip(self._places, self.samples, strict=True):
            check_tensor(f"{name}: {self._names[i]}", sample, device)
        self.requires_grad = [sample.requires_grad for sample in self.samples]
        self._expected = [(s.shape, s.dtype, s.requires_grad) for s in self.samples]

    def name_of(self, number: int) -> str:
        """What the user calls one of the tensors."""
        return self._names[self._places[number]]

    @property
    def names(self) -> list[str]:
        """What the user calls the tensors."""
        return [self.name_of(number) for number in range(len(self.samples))]

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call, in the sample's order.

        Raises:
            InputError: The call does not fit the sample; says where.
        """
        if self._is_simple and len(args) == self._num_args and not kwargs:
            tensors = list(args)
        else:
            leaves = self._leaves(args, kwargs)
            for i, kept in self._as_recorded:
                if not kept.is_of(leaves[i]):
                    raise self._other_constant(i, leaves[i], kept)
            tensors = [leaves[i] for i in self._places]
        grad, device = torch.is_grad_enabled(), self._device
        try:
            for tensor, (shape, dtype, requires_grad) in zip(tensors, self._expected, strict=True):
                if (
                    tensor.shape != shape
                    or tensor.dtype is not dtype
                    or tensor.device != device
                    or (grad and tensor.requires_grad and not requires_grad)
                ):
                    raise self._misfit(tensors)
        except AttributeError:
            raise self._misfit(tensors) from None
        return tensors

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
            raise InputError(
                f"{self._name}: the arguments have another structure than the sample had: expected {self._spec}, got "
                f"{spec}. Call it with what it was recorded with, or record it with a sample of this structure too."
            )
        return leaves

    def call(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with other tensors in the places of the sample's."""
        leaves: list[Any] = [None] * len(self._names)
        for i, value in self._constants:
            leaves[i] = value
        for i, tensor in zip(self._places, tensors, strict=True):
            leaves[i] = tensor
        return pytree.tree_unflatten(leaves, self._spec)

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
            what = f"{self._name}: {self.name_of(number)}"
            if not isinstance(tensor, torch.Tensor):
                return InputError(
                    f"{what} was a tensor in the sample, now it is a {type(tensor).__name__}."
                )
            if (tensor.shape, tensor.dtype, tensor.device) != (shape, dtype, self._device):
                expected = f"{list(shape)} {dtype} on {self._device}"
                got = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
                return InputError(
                    f"{what} was {expected} in the sample, now it is {got}. A graph has fixed shapes: pad it, or record "
                    "a callable for this shape too."
                )
            if tensor.requires_grad and not requires_grad:
                return InputError(
                    f"{what} requires grad, but did not in the sample: no gradient was recorded for it. Record with a "
                    "sample that requires grad, or detach it."
                )
        raise AssertionError("some tensor does not fit")


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


def _name_of(path: Sequence[Any]) -> str:
    """`argument 0`, `argument 'mask'`, `argument 1['x'][0]`."""
    _, key, *rest = path
    inner = pytree.keystr(tuple(rest))
    first = key.idx if isinstance(key, pytree.SequenceKey) else key.key
    return f"argument {first!r}{inner}"


def _keywords(names: tuple[str, ...]) -> str:
    return f" and {', '.join(names)} by keyword" if names else ""
