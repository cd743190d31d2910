"""Dynamo: backends, what is compiled by which, and its graphs' inputs."""

import os
import re
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_registering = threading.Lock()


def register_backend(name: str, backend: Callable[..., Any]) -> None:
    """Have Dynamo know a backend that was given as a function, and call its `reset` in `torch.compiler.reset()`.

    Dynamo calls it of what `torch.compile` was given since the last time alone, though what was given before it is
    compiled again, too.

    For backends that it knows, newer versions drop the weak references to parameters that tracing leaves behind;
    with them `torch.utils.swap_tensors` refuses the parameters.

    Source: torch/_dynamo/convert_frame.py, `_is_registered_backend`, 2.15; the registry is the same from 2.11 on.
    torch/_dynamo/eval_frame.py, `cached_backends`, 2.11 to 2.15.
    """
    from torch._dynamo import eval_frame
    from torch._dynamo.backends import registry

    with _registering:
        if name not in registry._COMPILER_FNS:
            registry.register_backend(backend, name=name)
        eval_frame.cached_backends.setdefault(id(backend), backend)


def compiled_code() -> types.CodeType | None:
    """The code that Dynamo compiles right now, None outside of it.

    Source: torch/_dynamo/symbolic_convert.py `tls`, `InstructionTranslator`, 2.11 to 2.15.
    """
    return getattr(_translator(), "f_code", None)


def _translator() -> Any:
    convert = sys.modules.get("torch._dynamo.symbolic_convert")
    translator = getattr(getattr(convert, "tls", None), "current_tx", None)
    return None if translator is None else translator.output.root_tx


def compiled_in_place() -> type | None:
    """Class of the module that Dynamo compiles right now, if it was compiled in place.

    Source: torch/nn/modules/module.py `compile`, torch/_dynamo/external_utils.py `wrap_inline`, 2.11 to 2.15.
    """
    call = getattr(_translator(), "f_locals", {}).get("fn")
    module = getattr(call, "__self__", None)
    return type(module) if isinstance(module, torch.nn.Module) else None


def compile_again(code: types.CodeType, compile_id: Any) -> bool:
    """Have Dynamo compile a function again in the next call that would run a compilation; tell if it will.

    It won't where it knows nothing of it, or may compile no more. Whatever runs now and holds that goes on with it.

    Source: torch/_dynamo/eval_frame.py `_stance`, cache_size.py `exceeds_recompile_limit`,
    `_has_same_id_matched_objs`, guards.py `CheckFunctionManager.invalidate`, 2.11 to 2.15.
    """
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo import config
    from torch._dynamo.eval_frame import _stance
    from torch._dynamo.guards import DeletedGuardManagerWrapper as Deleted

    entries: list[Any] = _debug_get_cache_entry_list(code)
    valid = [entry for entry in entries if not isinstance(entry.guard_manager, Deleted)]
    guarded = (entry.guard_manager.id_matched_objs.items() for entry in valid)
    alike = Counter(tuple((name, id(ref())) for name, ref in objects) for objects in guarded)
    ours = [entry for entry in valid if entry.compile_id == compile_id]
    if (
        not ours
        or _stance.stance != "default"
        or _stance.skip_guard_eval_unsafe
        or config.error_on_recompile
        or config.enable_compiler_collectives  # all ranks would have to compile
        or max(alike.values()) >= config.recompile_limit
        or max(each.compile_id.frame_compile_id for each in valid) + 1
        >= config.accumulated_recompile_limit
    ):
        return False
    # entries that are invalid count towards `recompile_limit`, too, unless they guard on another object
    deleted, nothing_like_it = Deleted("an operator of it can't be captured"), object()
    setattr(deleted, "id_matched_objs", {"": lambda: nothing_like_it})  # noqa: B010
    for entry in ours:
        entry.guard_manager.extra_state.invalidate(entry, deleted)
    return True


def has_compiled(code: types.CodeType) -> bool:
    """Tell if Dynamo knows anything that it compiled for a code."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    return bool(_debug_get_cache_entry_list(code))


def is_off() -> bool:
    """Tell if Dynamo is to compile nothing.

    Source: torch/_dynamo/config.py `disable`, eval_frame.py `_optimize`, 2.11 to 2.15.
    """
    return torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1"


def is_compiled(fn: Any) -> bool:
    """Tell if `torch.compile` returned a callable, or was called on a module in place.

    What `torch.compiler.disable` returns carries its original, too, and a mark.

    Source: torch/_dynamo/eval_frame.py `OptimizedModule`, `_TorchDynamoContext.__call__`, 2.11 to 2.15.
    """
    if isinstance(fn, torch.nn.Module):
        from torch._dynamo.eval_frame import OptimizedModule

        compiled = isinstance(fn, OptimizedModule) or fn._compiled_call_impl is not None
        return compiled or is_compiled(fn.forward)
    return hasattr(fn, "_torchdynamo_orig_callable") and not is_disabled(fn)


def is_disabled(fn: Any) -> bool:
    """Tell if `torch.compiler.disable` returned a function."""
    return bool(getattr(fn, "_torchdynamo_disable", False))


def input_names(gm: torch.fx.GraphModule) -> dict[int | str, str]:
    """Return the user's name of each input of Dynamo's graph, by its key: `layers.0.weight`, `batch['ids']`, else the placeholder's name."""
    nodes = enumerate(gm.graph.find_nodes(op="placeholder"))
    texts = {key: getattr(each, "name", "") for key, each in _sources(gm).items()}
    names = {key: named_by_user(text) for key, text in texts.items() if text}
    counts = Counter(names.values())
    rooted = {
        key: named_by_user(texts[key], rooted=True) for key in names if counts[names[key]] > 1
    }
    return {n: node.name for n, node in nodes} | names | rooted


def _sources(gm: torch.fx.GraphModule) -> dict[int | str, Any]:
    nodes = enumerate(gm.graph.find_nodes(op="placeholder"))
    return {
        n: getattr(each.meta.get("grapharg"), "source", None) for n, each in nodes
    } | _attributes(gm)


def holders(gm: torch.fx.GraphModule, keys: Iterable[int | str]) -> set[tuple[str, ...]]:
    """Return the names of what has each of these inputs, innermost first: in the compiled function's locals `L` and globals `G`.

    Source: torch/_guards.py `Source.name`, `ChainedSource`, 2.11 to 2.15.
    """
    found, sources = set(), _sources(gm)
    for source in map(sources.get, keys):
        names = []
        while (source := getattr(source, "base", None)) is not None:
            names.append(source.name)
        found.add(tuple(names))
    return found


def _attributes(gm: torch.fx.GraphModule) -> dict[Any, Any]:
    """Sources of the tensors that Dynamo made attributes of its graph, as what optimizers hold, by name.

    Source: torch/_functorch/_aot_autograd/frontend_utils.py, 2.11 to 2.15.
    """
    sources = getattr(gm, "_param_name_to_source", None) or {}
    held = dict([*gm.named_parameters(), *gm.named_buffers()])
    return {name: source for name, source in sources.items() if name in held}


def named_by_user(source: str, *, rooted: bool = False) -> str:
    """Turn Dynamo's name of a value, `L['self']._modules['fc']._parameters['weight']`, into the user's, `fc.weight`.

    What a compiled module holds is called as in its `state_dict()`. `fn` is what `torch.compile` calls the module where it
    was given one that has a forward of torch's own, or the method of one that is compiled in place. `rooted` keeps what the
    function calls the compiled module: `self.fc.weight`.

    Source: torch/_dynamo/source.py, guards.py; external_utils.py `wrap_inline`, 2.11 to 2.15.
    """
    text = source if rooted else _COMPILED_MODULE.sub("", source)
    for pattern, words in _USER_WORDS:
        text = pattern.sub(words, text)
    return text.lstrip(".")


_COMPILED_MODULE: Final = re.compile(
    r"^L\['(?:self|fn)'\](?:\.__self__)?(?=\._(?:modules|parameters|buffers)\[)"
)
_NTH_KEY: Final = re.compile(r"\[list\(dict\.keys\([^()]*\)\)\[(\d+)\]\]"), r"[key \1]"
_USER_WORDS: Final = (
    (re.compile(r"^___from_numpy\((.*)\)$"), r"\1"),
    (re.compile(r"(?<![\w.])G\['__import_(\w+)'\]"), lambda found: found[1].replace("_dot_", ".")),
    (re.compile(r"(?<![\w.])[LG]\['(\w+)'\]"), r"\1"),
    (re.compile(r"(?:[\w.]*\.__closure__\[\d+\]\.cell_contents)+(?=\.\w)"), ""),
    (re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]"), r".\1"),
    _NTH_KEY,
    _NTH_KEY,  # of what lies under such a key itself
    (re.compile(r"\.(size|stride)\(\)\[(\d+)\]"), r".\1(\2)"),
)


def static_mark(node: torch.fx.Node) -> str | None:
    """Return the way a placeholder of Dynamo's graph was said to keep its address, None if it was not.

    Source: torch/_dynamo/decorators.py `mark_static_address`, 2.11 to 2.15.
    """
    return node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")


def static_inputs(gm: torch.fx.GraphModule) -> frozenset[int | str]:
    """Keys of the inputs of Dynamo's graph that are parameters, buffers, or said to keep their address."""
    nodes = enumerate(gm.graph.find_nodes(op="placeholder"))
    return frozenset(_attributes(gm)).union(
        i
        for i, node in nodes
        if static_mark(node) or isinstance(node.meta.get("example_value"), torch.nn.Parameter)
    )


def input_key(node: torch.fx.Node) -> int | str | None:
    """Position among Dynamo's inputs, or name among its attributes, of what a placeholder of AOTAutograd's graph stands for, if it is (part of) one.

    Source: torch/_functorch/_aot_autograd/descriptors.py, 2.11 to 2.15.
    """
    return _key(node.meta.get("desc"))


def _key(desc: Any) -> int | str | None:
    while hasattr(desc, "base"):  # a part of a tensor subclass
        desc = desc.base
    return getattr(desc, "idx", getattr(desc, "target", None))


def input_name(node: torch.fx.Node, names: Mapping[int | str, str]) -> str | None:
    """Return the user's name of what a placeholder of AOTAutograd's graph stands for; `x._base` if several views are made from it."""
    base_of = getattr(node.meta.get("desc"), "base_of", None)
    key = _key(base_of) if base_of else input_key(node)
    name = None if key is None else names.get(key)
    return f"{name}._base" if base_of and name else name


def handles_subclasses(gm: torch.fx.GraphModule) -> bool:
    """Tell if inputs or outputs of Dynamo's graph are tensors that AOTAutograd takes apart (DTensor)."""
    nodes = [*gm.graph.find_nodes(op="placeholder"), *gm.graph.output_node().all_input_nodes]
    return any(is_traceable_wrapper_subclass(node.meta.get("example_value")) for node in nodes)


def forget_compiled(code: types.CodeType) -> None:
    """Drop what Dynamo compiled for a code, and with it what the compiled functions hold.

    Source: torch/_dynamo/eval_frame.py `remove_from_cache`, 2.11 to 2.15.
    """
    torch._dynamo.eval_frame.reset_code(code)


def not_one_graph() -> tuple[type[BaseException], ...]:
    """Return the errors that Dynamo raises if a function is more than one graph and `fullgraph=True`, last that of `recompile_limit`.

    Source: torch/_dynamo/exc.py, 2.11 to 2.15.
    """
    from torch._dynamo import exc

    return exc.Unsupported, exc.UserError, exc.FailOnRecompileLimitHit
