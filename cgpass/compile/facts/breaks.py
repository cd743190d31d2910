"""Graph breaks, and what `torch.compile` left to eager, by torch's own notes: line, cause and remedy."""

import itertools
import os
import re
import textwrap
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from torch import fx

from cgpass import torch_private
from cgpass.compile.facts import lines, op_tables
from cgpass.compile.facts.lines import at, is_users, library_file, place_of
from cgpass.telemetry.reason import OTHER_FIXES, Reason
from cgpass.telemetry.summaries import GraphSummary

_HOST_READ: Final = op_tables.FIXES["host_read"]
_OUTSIDE: Final = "call it outside of what is compiled"
_BEHIND: Final = f"{_OUTSIDE}, or behind `if not torch.compiler.is_compiling():`"
_BRANCH: Final = "use torch.where; to check: assert torch.isfinite(x).all(), 'text'"
_GRAPHED: Final = "leave it: it has its own graphs; in the loss of a train_step call a plain one"
_BY_ITSELF: Final = "leave it: torch compiles the function called there by itself"
_KNOWN: Final = (
    (r"Tensor\.backward\(\) call", "the backward is called", "leave it: it has its own graphs"),
    (r"`Optimizer\.zero_grad`", "gradients are cleared", "leave it: it launches little"),
    (r"\.item\(\)|_local_scalar_dense|tolist\(\)", "the host reads a tensor's value", _HOST_READ),
    (r"generic_jump|Data-dependent branching", "a branch on a tensor's value", _BRANCH),
    (r"builtin operator `(print)`|_(warnings\.warn)`", r"\1\2 can't be traced", _BEHIND),
    (r"logging\.Logger|[Ll]ogger", "a logger's method can't be traced", _BEHIND),
    (
        "[Bb]ackwards? hooks require compiled autograd",
        "a module has full backward hooks",
        "compile the modules beside it, or hook tensors instead: tensor.register_hook(...)",
    ),
    (r"optim/lr_scheduler\.py` should", "a scheduler wraps the optimizer's step", _BY_ITSELF),
    ("functorch tracing attempt", "it was called inside a transform", OTHER_FIXES["transform"]),
    (r"enter a `(\w+)` context manager", r"a `with` block of a \1 can't be traced", _OUTSIDE),
    ("Reconstruction failure", "what it calls can't be kept across a graph break", _OUTSIDE),
    ("sparse [Tt]ensor", "a sparse tensor is made or used", _OUTSIDE),
    (r"compiler\.disable\(\)", "what torch.compiler.disable keeps out is called", _OUTSIDE),
    ("Unsafe side effect", "a hook or checkpoint writes what is outside", "return it instead"),
    ("Observed exception", "an exception is raised", "check and raise before what is compiled"),
    ("trace_autograd_ops", "gradients are taken inside", "take them with torch.func.grad"),
    ("_step_outside_dynamo", "a training step is called", "leave it: it has its own graph"),
    ("_outside_dynamo", "a callable graphed by hand is called", _GRAPHED),
    (r"torch\._dynamo\.graph_break\(\)", "torch._dynamo.graph_break() is called", "remove it"),
    ("comprehension_graph_break", "a graph break in a comprehension", "take it out of there"),
    (
        r"builtin `([^`]+?)\.?`|builtin operator `([^`]+)`|that the function `([^`]+)`",
        r"\1\2\3 can't be traced",
        _OUTSIDE,
    ),
)
"""Torch's words, what they mean, and what to do.

Source: torch/_dynamo/graph_break_registry.json, `GraphCompileReason`, 2.11 to 2.15.
"""
_GUARDS: Final = {
    "BACKEND_MATCH": "compile it once, for one backend and with one set of options, or call torch.compiler.reset() before you change them",
    r"^torch/optim/(.*\['lr'\]|\S* limit (?!.*param_groups))": "each optimizer is compiled once more; make an lr "
    "that changes a tensor: lr=torch.tensor(1e-3) (without foreach=True), then lr.fill_(...)",
    "^torch/optim/.* limit ": "keep it fixed (OneCycleLR, CyclicLR: cycle_momentum=False), or call step() outside of what is compiled",
    "^torch/optim/": "leave it, unless it goes on: each optimizer, and each set of its parameters, is compiled once more",
    r"^user's \w+ len\(": "keep its length: return values, or append them outside of what is compiled",
    " limit .*requires_grad.*Guard failed on a parameter": "call torch.compiler.reset() after you freeze or unfreeze layers for good",
}
"""What a function was compiled once more for, and what to do: whose it is, whether that reached a limit, and the guard."""
_NO_HELP: Final = re.compile("an issue|caused by an earlier graph break|graph break is fundamental")
"""Hints that are none to users."""
_LOOP: Final = "or call the container's layers one by one in a forward of your own, without a loop: torch does not compile its own containers by themselves"
_OPERATOR: Final = re.compile(r"(?<=Operator )`(aten\.(\w+)\.\w+)`")
_RANDOM: Final = re.compile(r"^(?!.*\.(?:item|tolist)\().*(?<!torch\.)\brandom\.\w+\(")
_INDEXED: Final = re.compile(r"^(?!.*\.(?:item|tolist)\().*\w\[\w+\]")
_SENTENCE: Final = re.compile(r"\. (?=[A-Z])")  # "e.g. " ends none
_LENGTH: Final = 160
"""Of the words of torch's own that are shown."""
Callers = dict[torch_private.Function, list[str]]
_LIMIT: Final = re.compile(r"exceeding the (\w*recompile_limit) .*currently set to (\d+)")
_GUARD: Final = re.compile(
    r"(?:\[?\d+/\d+\]?: )?(.*?)(?: +# (.*?) *# (\S+):(\d+) in (\S+).*| {2,}# .*)?(?: *\(HINT: .*\))?\s*$"
)
"""A guard that failed, with the line that needs it."""
_WRAPPER: Final = os.path.join("torch", "_dynamo", "external_utils.py")
"""Holds the function as which Dynamo compiles modules of torch's. Source: `wrap_inline`, 2.11 to 2.15."""


def graph_break_of(gm: fx.GraphModule) -> Reason | None:
    """Find out why Dynamo ended a graph where it did; None if the function ends there, too.

    Source: torch/_dynamo/output_graph.py, `GraphCompileReason`, set on every graph, 2.11 to 2.15.
    """
    found: Any = getattr(gm, "compile_subgraph_reason", None)
    if found is None or not getattr(found, "graph_break", False):
        return None
    stack = list(getattr(found, "user_stack", None) or ())
    if str(found.reason) == "step_unsupported":  # all from there on is left to eager
        return _cut_short(stack[-1:])
    return _of_stack(str(found.reason), stack)


def reason_of(text: str, line: str | None) -> Reason:
    """A graph break as torch tells of it, in a cause and one remedy.

    Source: torch/_dynamo/exc.py, `format_graph_break_message`, `augment_exc_message`, 2.11 to 2.15.
    """
    said = [each.strip() for each in text.strip().splitlines()]
    detail = next(filter(None, said), "torch says no more").partition(". ")[0][:_LENGTH]
    hints = [each.removeprefix("Hint: ") for each in said if each.startswith("Hint: ")]
    hint = next((hint for hint in hints if not _NO_HELP.search(hint)), "")
    fix = _SENTENCE.split(hint.rpartition(" when running in eager. ")[2])[0].removesuffix(".")
    fix = textwrap.shorten(fix, _LENGTH) or "TORCH_LOGS=graph_breaks shows more"
    for pattern, cause, remedy in _KNOWN:
        if found := re.search(pattern, text):
            detail, fix = found.expand(cause), found.expand(remedy)
            break
    if _RANDOM.search(line or "") and re.search("dense|branching|jump|numpy fu|builtin op", text):
        detail = "a random number of Python or NumPy is used"
        fix = "draw it before, and pass it as a tensor; or use torch.rand"
    if fix == _HOST_READ and _INDEXED.search(line or ""):
        fix += "; write x[i.view(1)] for x[i] with a 0-dim tensor i"
    operator = _OPERATOR.search(text)
    if operator is not None and operator[2] in op_tables.OPERATOR_FIXES:
        detail = f"{operator[1]} reads data, or makes a size that depends on it"
        fix = op_tables.OPERATOR_FIXES[operator[2]]
    in_loop = ", in a loop" if "graph break in loop" in text else ""
    return Reason("graph_break", "", f"graph break: {detail}{in_loop}", fix, line)


def _given_up(text: str, stack: Sequence[Any], rest: str) -> Reason:
    """A graph break that Dynamo can't go on behind, so that `rest` is left to eager."""
    reason, file = _of_stack(text, stack), stack[-1].filename if stack else ""
    fix, is_others = reason.fix, not is_users(file) or lines.INSTALLED.search(file)
    if library_file(file).startswith("torch/distributed/fsdp/"):
        fix = 'compile each layer by itself (layer.compile(backend="cgpass"))'
    elif library_file(file).startswith("torch/optim/"):
        fix = "call step() outside of what is compiled"
        fix += ", or make the optimizer without fused=True" * ("compiler.disable()" in text)
    elif "torch._dynamo.graph_break()" in text and is_others:
        fix = _OUTSIDE
    more = "or move the code that can be compiled into its own function"
    if fix == OTHER_FIXES["transform"]:
        more = "then call torch.compiler.reset()"
    return replace(reason, fix=f"{fix}; {more}", rest=rest)


def _of_stack(text: str, stack: Sequence[Any]) -> Reason:
    """A graph break, by the innermost line that isn't torch's, if there is one."""
    last: Any = stack[-1] if stack else None
    users = [each for each in stack if is_users(each.filename)]
    frame = users[-1] if users else last
    line = frame and at(frame.filename, frame.lineno, frame.name, frame.line)
    reason = reason_of(text, line or lines.innermost(text))  # torch's text of a failed backend
    detail, fix, rest = reason.detail, reason.fix, _left_by_torch(stack)
    if frame is not last:
        inside = f", in {library_file(last.filename)}:{last.lineno}"
        detail += inside * (not last.filename.startswith(lines.OURS))
        if "torch._dynamo.graph_break()" in text:
            fix = _BY_ITSELF
        elif fix in (_BEHIND, _HOST_READ, _BRANCH) or fix.startswith(("Avoid ", "Remove ")):
            fix = _OUTSIDE
    elif len(users) > 1:
        detail += f", reached from {at(users[0].filename, users[0].lineno, users[0].name)}"
    return replace(
        reason, detail=detail, fix=fix + f"; {_LOOP}" * ("container.py" in (rest or "")), rest=rest
    )


def _left_by_torch(stack: Sequence[Any]) -> str | None:
    """Name torch's own module between a graph's function and a break in what it called: Dynamo compiles none of these by itself."""
    between = os.path.join(lines.MODULES, "module.py")  # lies between any two modules
    frames = [each for each in stack if each.filename != between]
    for caller, frame in itertools.pairwise(frames):
        if os.path.dirname(frame.filename) == lines.MODULES and frame.name == "forward":
            name = library_file(frame.filename)
            if caller.filename.startswith(lines.TORCH):
                return f"what {name} runs besides"
            where = at(caller.filename, caller.lineno, caller.name)
            return f"what {name} runs, called at {where}"
    return None


def _cut_short(stack: Sequence[Any]) -> Reason:
    """Of a graph that ends at a line, since a break further on is in a block that Dynamo can't go on in.

    Source: torch/_dynamo/symbolic_convert.py `InstructionTranslatorBase.step`, `step_graph_break`, 2.11 to 2.15.
    """
    text, rest = "a block (try:, with) has a graph break", "the rest of a function"
    if stack:
        frame = stack[-1]
        where = at(frame.filename, frame.lineno)
        rest = f"the rest of {lines.function_name(frame.name)} from {where} on"
        mine = threading.get_ident()
        noted = [each for each in torch_private.graph_breaks() if each.thread == mine]
        if noted and noted[-1].function[::2] == (frame.filename, frame.name):
            text, stack = noted[-1].text, noted[-1].stack or stack
    return _given_up(text, stack, rest)


# ---- what Dynamo noted of all that was compiled


def graph_breaks(
    before: Mapping[torch_private.GraphBreak, bool],
    graphs: Sequence[GraphSummary],
) -> list[Reason]:
    """Graph breaks that were met, each once; behind those with a `rest` torch left that to eager.

    Those that graphs end at, those noted since `before` (where True says of some that torch had forgotten them), and of
    earlier ones those of functions that ran, or whose calls had some graph compiled that did. Libraries that run in
    eager anyway, as what logs or shows progress, have breaks of their own: they are left out.
    """
    files = {place_of(graph.place).rpartition(":")[0] for graph in graphs}
    functions = {code for graph in graphs for code in (graph.code, *graph.callers)}
    found = [graph.graph_break for graph in graphs if graph.graph_break is not None]
    for each in sorted(torch_private.graph_breaks(), key=before.__contains__):
        is_earlier = each in before
        if is_earlier and (before[each] or each.whole not in functions):
            continue
        reason = replace(_of_stack(each.text, each.stack), is_earlier=is_earlier)
        users = [frame.filename for frame in each.stack if is_users(frame.filename)]
        mine = (not lines.INSTALLED.search(f) or os.path.basename(f) in files for f in users)
        found += [reason] if reason.rest is not None or any(mine) else []
    every: dict[Any, Reason] = {}
    for reason in found:
        cause = reason.detail.partition(", ")[0]
        every.setdefault((place_of(reason.line) or reason, reason.rest, cause), reason)
    return list(every.values())


def callers(graphs: Iterable[GraphSummary]) -> Callers:
    """Map functions of torch's own, such as optimizers' steps, to the user's lines that call them, or that they call."""
    found: Callers = {}
    places = {(graph.code, graph.place) for graph in graphs if graph.code and graph.place}
    for code, place in sorted(places):
        called = place.rpartition(", called at ")[2]
        if called != place or code[0].endswith(_WRAPPER):
            found.setdefault(code, []).extend({called}.difference(found.get(code, ())))
    return found


def left_to_eager(before: Sequence[Any], called_at: Callers) -> list[Reason]:
    """Functions whose last compilation was given up; of those noted `before` only what was compiled for our backend."""
    old, living = set(map(id, before)), _last(torch_private.compilations(since_reset=True))
    found = []
    for function, each in (_last(torch_private.compilations()) | living).items():
        is_old = id(each) in old
        is_ours = torch_private.is_ours(each)
        counts = not is_old or (is_ours and living.get(function) is each)
        pythons = all(map(_is_pythons, (function[0], each.fail_user_frame_filename)))
        if counts and torch_private.was_given_up(each) and not pythons:
            found.append(replace(_described(function, each, called_at), is_earlier=is_old))
    return found


def _is_pythons(file: str | None) -> bool:
    return file is not None and file.startswith(lines.PYTHON) and not is_users(file)


def recompiled(before: Sequence[Any], called_at: Callers, left: Iterable[Reason]) -> list[Reason]:
    """List the recompilations of functions that cgpass compiles: each cause at each line, and how often.

    Those that `left` has as the cause of a recompile limit are left out.
    """
    limits = [
        (each.rest, _without_values(each.detail)) for each in left if each.code == "recompile_limit"
    ]
    old, found = set(map(id, before)), dict[tuple[str, str], Reason]()
    for each in torch_private.compilations():
        text, is_new = each.recompile_reason, id(each) not in old and torch_private.is_ours(each)
        if text and is_new and each.co_name is not None and not torch_private.was_given_up(each):
            cause, line, fix = _cause(text, each.co_filename, OTHER_FIXES["recompiled"])
            where = _where((each.co_filename, each.co_firstlineno, each.co_name), called_at)
            told = _without_values(cause)
            if any(rest == where and f": {told}. Calls" in detail for rest, detail in limits):
                continue
            line = where if line is None or line.startswith(("torch/", "whole_step.py:")) else line
            key = line, told
            count = found[key].count + 1 if key in found else 1
            detail = f"compiled once more: {cause}"
            found[key] = Reason("recompiled", "", detail, fix, line, count=count)
    return list(found.values())


def _without_values(cause: str) -> str:
    """A guard's text as it is for other values, too: numbers in names and indices stay."""
    return re.sub(r"(?<![\w\[.'])(?<!index )-?\d([-.e\d]*\d)?", "", cause)


def _where(function: torch_private.Function, called_at: Callers) -> str:
    file, line, name = function
    called = ", ".join(called_at.get(function, ())[:3])
    if file.endswith(_WRAPPER):
        called = called and f", here {called}"
        return f"modules of torch's own classes and functions under its decorators (they count as one{called})"
    if file.startswith(lines.OURS):
        return "the loss function of a training step"
    return at(file, line, name) + f", called at {called}" * bool(called)


def _last(notes: Iterable[Any]) -> dict[torch_private.Function, Any]:
    """The last compilation of each function."""
    functions: dict[str, torch_private.Function] = {}
    last: dict[torch_private.Function, Any] = {}
    for each in notes:
        frame = torch_private.function_of(each.compile_id)
        if each.co_name is not None:
            functions[frame] = each.co_filename, each.co_firstlineno, each.co_name
        elif frame not in functions or not _LIMIT.search(each.fail_reason or ""):  # a backward's
            continue
        last[functions[frame]] = each
    return last


def _described(function: torch_private.Function, compilation: Any, called_at: Callers) -> Reason:
    rest = _where(function, called_at)
    limit = _LIMIT.search(compilation.fail_reason or "")
    if limit is None:
        file, number = compilation.fail_user_frame_filename, compilation.fail_user_frame_lineno
        stack: Sequence[Any] = [traceback.FrameSummary(file, number, "")] if file else ()
        for each in torch_private.graph_breaks():
            places = [(frame.filename, frame.lineno) for frame in each.stack[-1:]]
            if each.function == function and places == [(file, number)]:
                stack = each.stack
        return _given_up(compilation.fail_reason or compilation.fail_type, stack, rest)
    option, times = limit.groups()
    text, fix = compilation.recompile_reason or "", OTHER_FIXES["recompile_limit"]
    cause, line, fix = _cause(text, function[0], fix)
    why = f"; the guard that failed last: {cause}" if cause else ""
    often = f"{times} times, as often as torch._dynamo.config.{option} allows"
    detail = f"it was compiled {often}{why}. Calls that no compiled version fits run in eager"
    return Reason("recompile_limit", "", detail, fix, line, rest)


def _cause(text: str, own: str, fix: str) -> tuple[str, str | None, str]:
    """Of a recompilation of code in a file of its own: what changed, the line that needs it, a better remedy, if any.

    Torch's hint at a setting for parameters helps where a size changed, that for integers never: each needs a recording.
    Source: torch/_dynamo/guards.py `get_guard_fail_reason_helper`, 2.11 to 2.15.
    """
    is_limit = fix == OTHER_FIXES["recompile_limit"]
    guard, code, file, line, name = _GUARD.findall(text.partition("\n")[0])[0]
    whose = "user's" if is_users(own) else library_file(own)
    what = f"{whose} {'limit' if is_limit else 'once'} {guard}"
    fix = next((remedy for pattern, remedy in _GUARDS.items() if re.search(pattern, what)), fix)
    guard = re.sub(r", \d{9,}(?=\))", "", guard)  # an id, another one in each process
    if guard.startswith("BACKEND_MATCH"):
        guard = "backend or options were others"
    elif "size mismatch" not in guard:
        guard = guard.partition(". Guard failed on a parameter")[0]
    where = lines.innermost(text)
    if where is None and line and own.endswith(file):  # torch names its end alone
        where = at(own, line, name, code)
    return guard.rstrip(". ("), where, fix
