"""What a function changes when it is called, kept to be put back: modules, tensors, gradients, random numbers."""

import contextlib
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from cgpass.report.positions import Positions
from cgpass.report.reached import (
    Called,
    has_storage,
    is_a,
    is_object,
    lie_alike,
    memory_parts,
    own_attributes,
    own_dict,
    read_by_name,
    slots_of,
    tensors_of,
    values_in,
)
from cgpass.runtime.inputs import bytes_of

_SIMPLE: Final = (
    *(bool, int, float, complex, str, bytes, type(None), torch.Tensor),
    *(list, tuple, dict, set, deque),
)
"""Attributes of these types that a call adds to a module are taken away again."""
_MISSING: Final = object()
_OF_MODULES: Final = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has; what they hold is torch's."""


class _Storage:
    """Contents of a storage, kept in host memory."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self._num_bytes = storage.nbytes()
        self._contents = bytes_of(storage).to("cpu", copy=True)

    def put_back(self) -> None:
        storage = self._storage
        if storage.nbytes() != self._num_bytes:
            storage.resize_(self._num_bytes)
        now = bytes_of(storage)
        if now.device.type != "cpu" or not torch.equal(now, self._contents):
            now.copy_(self._contents)


class _Tensor:
    """Where a tensor lies, and how."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._alias = tensor.detach()
        self._requires_grad = tensor.requires_grad

    def put_back(self) -> None:
        tensor, alias = self.tensor, self._alias
        if not all(map(lie_alike, memory_parts(tensor), memory_parts(alias))):
            tensor.data = alias
        if tensor.is_leaf and tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)


class _Containers:
    """What lists, dictionaries, sets and deques hold, in others of them, too; the objects that they are stay."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._before: dict[int, tuple[Any, list[Any]]] = {}
        open_ = list(values)
        while open_:
            value = open_.pop()
            if issubclass(type(value), tuple):
                open_ += tuple.__iter__(value)
            elif type(value) in _CONTAINERS and id(value) not in self._before:
                self._before[id(value)] = value, _items(value)
                open_ += value.values() if isinstance(value, dict) else value

    def put_back(self) -> None:
        for value, before in self._before.values():
            now = _items(value)
            if len(now) == len(before) and all(map(_is_same, now, before)):
                continue
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(before)


_CONTAINERS: Final = (list, dict, set, deque, OrderedDict, defaultdict)


def _items(container: Any) -> list[Any]:
    return list(container.items() if isinstance(container, dict) else container)


def _is_same(a: Any, b: Any) -> bool:
    """Whether entries are the same objects; those of dictionaries are pairs made anew."""
    if type(a) is tuple and type(b) is tuple and len(a) == len(b):
        return all(x is y for x, y in zip(a, b, strict=True))
    return a is b


class _Attributes:
    """Entries of a module's dictionaries: parameters, buffers, submodules, and attributes of users' own classes.

    Torch's own classes keep in attributes what belongs to objects elsewhere: a reducer, a compiled callable.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        own = vars(module)
        inner = (own.get(name) for name in ("_parameters", "_buffers", "_modules"))
        self._dicts = [each for each in inner if isinstance(each, dict)]
        own_values = []
        if not (
            type(module).__module__.startswith("torch.") or isinstance(module, LazyModuleMixin)
        ):
            self._dicts.insert(0, own)
            own_values = [value for name, value in own.items() if name not in _OF_MODULES]
        self._containers = _Containers([*own_values, own.get("_non_persistent_buffers_set")])
        self._before = [dict(each) for each in self._dicts]
        self._module = module
        self._training = module.training

    def values(self) -> Iterator[Any]:
        for before in self._before:
            yield from before.values()

    def named(self) -> Iterator[Any]:
        """Names and values of now, but for what every module has."""
        for now in self._dicts:
            yield from (pair for pair in now.items() if pair[0] not in _OF_MODULES)

    def put_back(self) -> None:
        if self._module.training != self._training:
            self._module.training = self._training
        for now, before in zip(self._dicts, self._before, strict=True):
            _put_names_back(now, before)
        self._containers.put_back()


class _Objects:
    """Attributes of objects of users' classes."""

    def __init__(self, objects: Iterable[Any]) -> None:
        objects = list({id(each): each for each in objects}.values())
        own = map(own_dict, objects)
        self._before = [(each, dict(each)) for each in own if each is not None]
        self._slots = [
            (slot, each, slot.__get__(each))
            for each in objects
            for slot in slots_of(each)
            if slot.__name__ in own_attributes(each)
        ]
        values = [value for _, before in self._before for value in before.values()]
        self._containers = _Containers([*values, *(value for _, _, value in self._slots)])

    def put_back(self) -> None:
        for now, before in self._before:
            _put_names_back(now, before)
        for slot, each, value in self._slots:
            with contextlib.suppress(AttributeError, TypeError):  # it can't be set
                slot.__set__(each, value)
        self._containers.put_back()


def _put_names_back(now: dict[str, Any], before: dict[str, Any]) -> None:
    """Have a dictionary as it was, but for additions that may be of use, such as a compiled function."""
    for name in [name for name in now if name not in before]:
        if is_a(now[name], _SIMPLE):
            del now[name]
    for name, value in before.items():
        if now.get(name, _MISSING) is not value:
            now[name] = value
    _put_in_order(now, before)


def _put_in_order(now: dict[str, Any], names: Iterable[str]) -> None:
    """Have a dictionary begin with some of its names in their order: that of parameters is what optimizers go by."""
    items = {name: now[name] for name in names} | now
    if list(items) != list(now):
        now.clear()
        now.update(items)


class State:
    """Everything that is put back."""

    def __init__(self, called: Called) -> None:
        """Keep what a call reaches.

        Args:
            called: The function and its arguments.
        """
        modules = {id(each): each for each in called.modules}
        for value in called.held:
            if is_a(value, torch.nn.Module):
                modules.update((id(each), each) for each in value.modules())
        self._attributes = [_Attributes(module) for module in modules.values()]
        optimizers = list(
            {
                id(each): each
                for each in (*called.values, *called.held)
                if is_a(each, torch.optim.Optimizer)
            }.values()
        )
        self._optimizers = _Containers(
            [each for found in optimizers for each in (found.state, found.param_groups)]
        )
        self._tensors: dict[int, _Tensor] = {}
        self._storages: dict[int, _Storage] = {}
        self._positions = Positions(called, self._named)
        self._grads: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._random = _Random()
        held: list[Any] = [
            value for attributes in self._attributes for value in attributes.values()
        ]
        held += [value for values in read_by_name(called.fn) for value in values.values()]
        seen = set[int]()
        found = [each for root in (*held, *called.objects) for each in values_in(root, seen)]
        self._objects = _Objects(filter(is_object, found))
        held += [each for each in found if is_a(each, torch.Tensor)]
        for each in optimizers:
            held += [*each.param_groups, *each.state.values()]
        self.keep(tensors_of(held))
        self._random.keep_generators(pytree.tree_leaves(held))

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep more tensors."""
        for tensor in tensors:
            if id(tensor) in self._tensors or is_lazy(tensor):
                continue
            self._tensors[id(tensor)] = _Tensor(tensor)
            self._random.keep(tensor.device)
            for part in memory_parts(tensor):
                storage = part.untyped_storage()
                if storage._cdata not in self._storages:
                    self._storages[storage._cdata] = _Storage(storage)
            if tensor.is_leaf and tensor.requires_grad:
                self.put_gradients_aside([tensor])

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, or another one on its memory, is kept."""
        return id(tensor) in self._tensors or (
            has_storage(tensor) and tensor.untyped_storage()._cdata in self._storages
        )

    @property
    def devices(self) -> set[torch.device]:
        """Of all that is kept."""
        return {place.tensor.device for place in self._tensors.values()}

    def put_gradients_aside(self, leaves: Iterable[torch.Tensor]) -> None:
        """Keep the gradients of tensors that were not known yet; they have none then."""
        for leaf in leaves:
            if id(leaf) not in self._grads:
                self._grads[id(leaf)] = (leaf, leaf.grad)
                leaf.grad = None

    def have_gradients(self, leaves: Iterable[torch.Tensor]) -> bool:
        """Whether tensors that are known, and so had none, have gradients now."""
        return any(leaf.grad is not None for leaf in leaves if id(leaf) in self._grads)

    def gradients_are_zero(self) -> bool:
        """Whether there are gradients, and no number but zero in them: the function itself zeroed them in place."""
        grads = [leaf.grad for leaf, _ in self._grads.values() if leaf.grad is not None]
        return bool(grads) and not any(not has_storage(grad) or bool(grad.any()) for grad in grads)

    def drop_gradients(self) -> None:
        """As `zero_grad` does."""
        for leaf, _ in self._grads.values():
            leaf.grad = None

    def rewind(self) -> None:
        """Put back what calls count. See Note [Every call is the one that would come next]."""
        self._positions.rewind()

    def _named(self) -> Iterator[Any]:
        for attributes in self._attributes:
            yield from attributes.named()

    def put_back(self) -> None:
        """Have everything as it was: the same objects, on the same memory, with the same bits."""
        with torch.no_grad():
            for attributes in self._attributes:
                attributes.put_back()
            self._objects.put_back()
            self._optimizers.put_back()
            for place in self._tensors.values():
                place.put_back()
            for storage in self._storages.values():
                storage.put_back()
            for leaf, grad in self._grads.values():
                leaf.grad = grad
        self._random.put_back()


class _Random:
    """States of the default generators, of generators that are held, of Python's and of numpy's."""

    def __init__(self) -> None:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random
        self._of_numpy = None if self._numpy is None else self._numpy.get_state()
        self._held: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self._cpu = torch.get_rng_state()
        self._cuda: dict[torch.device, torch.Tensor] = {}

    def keep(self, device: torch.device) -> None:
        if device.type == "cuda" and device not in self._cuda:
            self._cuda[device] = torch.cuda.get_rng_state(device)

    def keep_generators(self, values: Iterable[Any]) -> None:
        for value in values:
            if is_a(value, torch.Generator):
                self._held[id(value)] = value, value.get_state()

    def put_back(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            self._numpy.set_state(self._of_numpy)
        for generator, state in self._held.values():
            generator.set_state(state)
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)
