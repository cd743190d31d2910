"""Modules and functions to record: `Target`, and their state when recorded: `Statics`."""

import contextlib
import copyreg
import functools
import operator
import re
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from cgpass import torch_private
from cgpass.errors import GraphedArgumentError
from cgpass.runtime import fast
from cgpass.runtime.inputs import check_tensor

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")
_REFUSED = {
    **dict.fromkeys(
        _WRAPPERS,
        "has a wrapped module, a {}, whose hooks no replay runs. Record the module inside, then wrap",
    ),
    "ScriptModule": "has a TorchScript module, a {}. Give the original",
    # of another class from its first call on
    "LazyModuleMixin": "has a lazy module that has not run yet, a {}: call it once",
}
"""Classes of torch's, and what is said of modules of them."""
_HOOKS = re.compile("_(forward|backward)_.*hooks.*")
"""Dictionaries of a module's hooks around its calls."""
_MEMBERS = ("_modules", "_parameters", "_buffers")
_OWN_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
ACCUMULATED = "main_grad"
"""An attribute of parameters to which the backwards of Megatron and TransformerEngine add gradients."""


class Target:
    """A module or function to be recorded, with the modules that it uses.

    If copied, of a module it is a shallow copy, `plain`, which shares parameters, buffers and submodules, and has hooks of
    its own. What is recorded knows that one, and never what replays it: no reference leads from a graph, which C++ holds,
    to the graph's holder.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        modules: Sequence[torch.nn.Module],
        index: int | None,
        *,
        copied: bool,
    ) -> None:
        """Check that it can be.

        Raises:
            GraphedArgumentError: It has hooks, or it is or has a wrapper such as DistributedDataParallel.
        """
        if not callable(fn):
            raise GraphedArgumentError(
                f"make_graphed_callables: callable {index or 0} is a {type(fn).__name__}; give a module, a function or a tuple of them."
            )
        self.given = fn
        """The user's module or function."""
        self.is_module = isinstance(fn, torch.nn.Module)
        own = getattr(fn, "__qualname__", type(fn).__name__).replace("<locals>.", "")
        self.name = own if index is None else f"callable {index} ({own})"
        self.run: Callable[..., Any] = getattr(fn, "ungraphed", fn)
        """The callable without a graph."""
        self.plain: Any = self.run
        holder = getattr(self.run, "__self__", None)
        if isinstance(fn, torch.nn.Module):
            holder = self.plain = _copy_of(fn) if copied else fn
            forward = vars(fn).get("forward", self.plain.forward)
            self.run = getattr(forward, "ungraphed", forward)
        self.modules = list(modules)
        if isinstance(holder, torch.nn.Module) and holder not in self.modules:
            self.modules.insert(0, holder)
        is_forward = self.is_module or getattr(self.run, "__name__", "") == "forward"
        self.around = holder if is_forward else None
        """The module whose hooks run around it."""
        self._check()

    def _check(self) -> None:
        strange = [each for each in self.modules if not isinstance(each, torch.nn.Module)]
        if strange:
            raise self.refusal(
                f"was given with {type(strange[0]).__name__} among its modules. Give modules, as in modules=(model,)"
            )
        for path, inner in _named(self.modules):
            for base in type(inner).__mro__:
                if "torch." in base.__module__ and base.__name__ in _REFUSED:
                    kind = type(inner).__name__ + f" at {path!r}" * bool(path)
                    raise self.refusal(_REFUSED[base.__name__].format(kind))
            if self.backward_dw is None and _delays(inner, False):
                raise self.refusal(
                    f"has a module, {path or type(inner).__name__}, with its own backward_dw(). Record that one alone, or give "
                    "yours a backward_dw() that calls it"
                )
        given: Any = vars(self.given) if self.is_module else {}
        hooks = [kind for kind in _OWN_HOOKS if given.get(kind)]
        if hooks:
            raise self.refusal(
                f"has hooks ({hooks[0].strip('_')}), which a replay would not run. Register them on what "
                "make_graphed_callables returns, or use capture_time_hooks"
            )
        if given.get("_compiled_call_impl") is not None:
            raise self.refusal("was compiled in place. Give what torch.compile(module) returns")

    def refusal(self, why: str) -> GraphedArgumentError:
        """Return what is raised where it can't be recorded."""
        return GraphedArgumentError(f"make_graphed_callables: {self.name} {why}.")

    @property
    def backward_dw(self) -> Callable[[], Any] | None:
        """Return the function that computes the gradients that the backward leaves out, if there is one."""
        return getattr(self._holder, "backward_dw", None) if _delays(self._holder, True) else None

    @property
    def says_delays(self) -> bool:
        """Tell if it says that each backward leaves gradients out."""
        return _delays(self._holder, False)

    @property
    def _holder(self) -> Any:
        return self.plain if self.around is None else self.around

    def _offers(self, name: str) -> bool:
        """Tell whether the module has a member of that name; of what it forwards, all but `graphed` count."""
        own = {name for members in _MEMBERS for name in vars(self.plain)[members]}
        is_own = name in own or hasattr(type(self.plain), name)
        return is_own or (name != "graphed" and hasattr(self.plain, name))

    def graphed(self, function: Any) -> torch.nn.Module:
        """Return a module with the attributes of `plain` whose forward is a `GraphedFunction`.

        What knows of graphs is in its class, and not among the attributes, which copies and pickles have.
        """
        kind, run = type(self.plain), self.run
        own = None if getattr(run, "__self__", None) is self.plain else run

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            # others are made by `type(module)(...)`, as a slice of a Sequential is
            is_other = self is not the_one()
            if not is_other and not torch_private.is_exporting():
                if type(self) is made:
                    return function(*args, **kwargs)
                function.note_plain("its class changed after recording (parametrize it before)")
            if own is None or is_other:
                return kind.forward(self, *args, **kwargs)
            return own(*args, **kwargs)

        alone = functools.partial(_alone, kind, own)
        setattr(forward, "ungraphed", run)  # noqa: B010
        members: dict[str, Any] = {
            **{name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")},
            _ORIGINAL: kind,
            "__reduce_ex__": lambda self, protocol: _any_class(alone(self).__reduce_ex__(protocol)),
            "forward": forward,
        }
        if hasattr(kind, "__deepcopy__"):
            members["__deepcopy__"] = lambda self, memo: alone(self).__deepcopy__(memo)
        added = {"graphed": function, "reset": function.reset, "close": function.close}
        members |= {name: each for name, each in added.items() if not self._offers(name)}
        if function.makes_weight_grads is not None:

            def backward_dw(self: Any) -> Callable[[], Any]:
                if self is the_one():
                    return function.backward_dw
                return vars(self).get("backward_dw") or functools.partial(kind.backward_dw, self)

            members["backward_dw"] = property(backward_dw)  # before what the object itself has
        made: Any = type(kind)(kind.__name__, (kind,), members)
        module: torch.nn.Module = object.__new__(made)
        object.__setattr__(module, "__dict__", vars(self.plain))
        the_one = weakref.ref(module)
        return module


def _delays(holder: Any, otherwise: bool) -> bool:
    """Tell whether `backward_dw()` has to follow a backward, if that can be known."""
    needed = getattr(holder, "need_backward_dw", otherwise)
    return bool(needed() if callable(needed) else needed)


_ORIGINAL = "_class_without_graphs"
"""The attribute of a graphed module's class that has the user's class."""


def _alone(kind: type, own: Callable[..., Any] | None, module: torch.nn.Module) -> Any:
    """Return a module of the user's class with the attributes of a graphed one, and the forward that was put over its class's."""
    plain: Any = object.__new__(kind)
    vars(plain).update(vars(module))
    if own is not None:
        vars(plain).setdefault("forward", own)
    return plain


def _any_class(reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Have `pickle` not ask whether what is reduced is of the class that is made of it."""
    make, *rest = reduced
    return object.__new__ if make is copyreg.__newobj__ else make, *rest  # pyrefly: ignore


def _copy_of(module: torch.nn.Module) -> Any:
    plain = object.__new__(getattr(type(module), _ORIGINAL, type(module)))
    vars(plain).update(vars(module))
    vars(plain).update((n, OrderedDict()) for n in vars(module) if _HOOKS.fullmatch(n))
    vars(plain).pop("forward", None)
    return plain


# ---- what modules are like


class Statics:
    """Parameters and buffers of a callable, looked up where its modules keep them.

    What a recording depends on besides is compared by identity in each call, as entries of the modules' dictionaries:
    modes, members and hooks. **Lifetime:** holds the submodules as they were, and all modules' dictionaries.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        device: torch.device,
        name: str,
        around: torch.nn.Module | None,
    ) -> None:
        """Find them on a device; tensors elsewhere are none that a graph could read.

        Hooks of the module `around` run around what is recorded.
        """
        self._dicts: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self.names: list[str] = []
        entries: list[tuple[Any, Any, str]] = []
        self._sizes: list[tuple[Any, int, str]] = []
        for path, module in _named(modules):
            own, label = vars(module), path or type(module).__name__
            entries.append((own, "training", f"the mode of {label}"))
            holders = dict.fromkeys(_MEMBERS, f"a member of {label}")
            if module is not around:
                entries.append((own, "forward", f"the forward of {label}"))
                holders |= dict.fromkeys(_OWN_HOOKS, f"a hook of {label}")
            for kind, said in holders.items():
                holder = own[kind]
                self._sizes.append((holder, len(holder), said))
                for key, value in holder.items():
                    if not isinstance(value, torch.Tensor):  # these may be replaced
                        entries.append((holder, key, said))
                        continue
                    full = f"{path}.{key}".lstrip(".")
                    if value.device == device:
                        check_tensor(f"{name}: {full}", value, device)
                        self._dicts.append(holder)
                        self._keys.append(key)
                        self.names.append(full)
        self._entries = [(holder, key, holder.get(key, ...), said) for holder, key, said in entries]
        """Dictionaries, keys, what was there, and what a message calls it."""
        columns = [[entry[k] for entry in self._entries] for k in range(3)]
        self._accumulate = bool(_accumulated(self.now()))
        """True if addresses of `main_grad` count: it was there, or a backward added to one that came later."""
        sizes = array("q", [size for _, size, _ in self._sizes]).tobytes()
        self._compared = *columns, [holder for holder, _, _ in self._sizes], sizes

    def unchanged(self) -> bool:
        """Tell whether modes, members and hooks are what they were."""
        return fast.unchanged(*self._compared)

    def changes(self) -> str:
        """Return the names of everything that changed."""
        found = [
            said for holder, key, was, said in self._entries if holder.get(key, ...) is not was
        ]
        found += [said for holder, size, said in self._sizes if len(holder) != size]
        return ", ".join(dict.fromkeys(found))

    # ---- tensors

    def now(self) -> list[torch.Tensor]:
        """The tensors as they are; one object that has several names is there as often."""
        return list(map(operator.getitem, self._dicts, self._keys))

    def layouts(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """Addresses and layouts of the tensors, and of what fused backwards add their gradients to."""
        if self._accumulate:
            tensors = [*tensors, *_accumulated(tensors)]
        return fast.layouts(tensors)

    def distinct(self) -> list[torch.Tensor]:
        """The tensors as they are, each once."""
        return list({id(tensor): tensor for tensor in self.now()}.values())

    @contextlib.contextmanager
    def left_in_place(self) -> Iterator[None]:
        """A block in which hooks may move or free the tensors, which then lie where they were."""
        before = [(t, t.data, t.untyped_storage().nbytes(), t.data.clone()) for t in self.now()]
        try:
            yield
        finally:
            for tensor, place, size, value in before:
                if place.untyped_storage().nbytes() < size:
                    place.untyped_storage().resize_(size)
                if not torch.equal(place, value):
                    place.copy_(value)
                tensor.data = place

    @contextlib.contextmanager
    def accumulated_kept(self) -> Iterator[None]:
        """A block that adds to `main_grad` of parameters, which is then as it was."""
        found = _accumulated(self.distinct())
        before = [(each, each.clone(), each._version) for each in found]
        try:
            yield
        finally:
            for grad, value, version in before:
                self._accumulate |= grad._version != version  # kernels in C++ may not count
                grad.copy_(value)

    def held(self) -> list[Any]:
        """Return what modules hold by the names of the tensors; `...` where there is no such name any more."""
        return [holder.get(key, ...) for holder, key in zip(self._dicts, self._keys, strict=True)]

    def put(self, values: Sequence[Any]) -> None:
        """Have modules hold values, as `held` returns them."""
        for holder, key, value in zip(self._dicts, self._keys, values, strict=True):
            if value is ...:
                holder.pop(key, None)
            else:
                holder[key] = value


def _accumulated(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    found = [vars(each).get(ACCUMULATED) for each in tensors]
    return [each for each in found if isinstance(each, torch.Tensor)]


def _named(modules: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    """All modules in some, each once, with their paths."""
    seen: set[torch.nn.Module] = set()
    return [each for top in modules for each in top.named_modules(seen)]
