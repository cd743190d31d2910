"""Finds the line, or the module, in which the user wrote what a node does."""

import itertools
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from torch import fx

from cgpass import torch_private

_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)')
_WRAPPER = re.compile(r" in \w*(wrap|inner|decorat)\w*$")
_HANDS_ON = re.compile(r"\*\w+, \*\*\w+\)")
_ROOT = re.compile(r"^L\['\w+'\](?:\.__self__)?\.?")
"""Of a module's path: what the compiled function calls the module that holds it."""
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")
TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
MODULES: Final = os.path.dirname(torch.nn.modules.__file__)
OURS = str(Path(__file__).parents[2]) + os.sep
"""Calls the user's loss function, and what he checkpoints, in what Dynamo compiles."""
PYTHON = sysconfig.get_path("stdlib") + os.sep
INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


def function_name(name: str) -> str:
    """The user's own name of a function, of what is left of it behind a graph break, too.

    Source: torch/_dynamo/resume_execution.py `TORCH_DYNAMO_RESUME_IN_PREFIX`, 2.11 to 2.15.
    """
    resumed = _RESUMED.match(name)
    name = resumed.group(1) if resumed else name
    return "<lambda>" if name == "_lambda_" else name


def place_of(line: str | None) -> str:
    """Of a line, `model.py:41`."""
    return (line or "").partition(" in ")[0].partition(": ")[0]


def user_line(node: fx.Node) -> str | None:
    """Return the user's line of a node: `model.py:41 in forward: code`, or else `module layers.0 (Linear)`."""
    found, stack = innermost(node.stack_trace), _modules(node)
    if found is not None or not stack:
        return found
    path, kind = stack[-1]
    path = _ROOT.sub("", path)
    return f"module {path} ({_class_name(kind)})" if path else f"module {_class_name(kind)}"


def innermost(trace: str | None) -> str | None:
    """Return the user's innermost line of a stack trace."""
    found = None
    for place, source in _user_frames(trace):
        found = f"{place}: {source}" if source else place
    return found


def _class_name(kind: object) -> str:
    return getattr(kind, "__name__", str(kind).rpartition(".")[2])


def _modules(node: fx.Node) -> list[tuple[str, object]]:
    """Modules whose forward a node is from, or is the backward of, outermost first: path and class."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return [(str(path), kind) for path, kind, *_ in stack.values()]


def spans(gm: fx.GraphModule) -> str | None:
    """Return the user's first and last line of a graph's calls: `model.py:41 to model.py:47`, or the one line."""
    calls = (node for node in gm.graph.nodes if node.op == "call_function")
    lines = [line for line in map(user_line, calls) if line is not None]
    if not lines:
        return None
    first, last = place_of(lines[0]), place_of(lines[-1])
    return lines[0] if first == last else f"{first} to {last}"


def begins_at(gm: fx.GraphModule) -> str | None:
    """Return the first line of the user's function that Dynamo traced: `model.py:41 in forward`.

    Decorators' frames are passed over. A function of torch's own, as an optimizer's step, is told of with the line that calls
    it. Where there is none, as in a `torch.nn.Sequential`, the outermost module: `module Sequential`.
    """
    for node in gm.graph.nodes:
        frames = list(_user_frames(node.stack_trace))
        for place, code in frames:
            hands_on = _WRAPPER.search(place) and _HANDS_ON.search(code)  # as a decorator does
            if place is frames[-1][0] or not hands_on:
                return place
    if (kind := torch_private.compiled_in_place()) is not None:  # of which torch names layers alone
        return f"module {_class_name(kind)}"
    stacks = filter(None, map(_modules, gm.graph.nodes))
    names = [_class_name(kind) for _, kind in dict.fromkeys(stack[0] for stack in stacks)]
    if names:
        return f"module {names[0]}" if len(names) == 1 else f"modules {names[0]} to {names[-1]}"
    own = next(filter(None, map(_torchs_own, gm.graph.nodes)), None)
    stack = () if own is None else traceback.walk_stack(None)
    caller = next((each for each in stack if is_users(each[0].f_code.co_filename)), None)
    if caller is None:
        return own
    code = caller[0].f_code
    return f"{own}, called at {at(code.co_filename, caller[1], code.co_name)}"


def is_users(file: str) -> bool:
    """Tell if a file is neither torch's, nor ours, nor Python's own."""
    if file.startswith((TORCH, OURS, "<frozen")):
        return False
    return not file.startswith(PYTHON) or INSTALLED.search(file) is not None


def library_file(filename: str) -> str:
    """`torch/optim/optimizer.py`, `logging/__init__.py`."""
    if filename.startswith(TORCH):
        filename = f"torch{os.sep}{filename.removeprefix(TORCH)}"
    return filename.removeprefix(PYTHON).replace(os.sep, "/")


def at(file: str, line: int | str | None, name: str | None = None, code: str | None = None) -> str:
    """`model.py:41 in forward: code`; of a file of torch's, `torch/optim/sgd.py:105 in step`."""
    place = f"{library_file(file) if file.startswith(TORCH) else os.path.basename(file)}:{line}"
    place += f" in {function_name(name)}" if name else ""
    return f"{place}: {code}" if code else place


def raised_at(error: BaseException) -> str | None:
    """Return the user's line that raised an error, or that of a module of torch's if he has none, as in a Sequential."""
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    own = [frame for frame in frames if is_users(frame.filename)]
    own += [frame for frame in frames if frame.filename.startswith(MODULES)]
    if not own:
        return None
    return at(own[0].filename, own[0].lineno, own[0].name, (own[0].line or "").rstrip(":"))


def _torchs_own(node: fx.Node) -> str | None:
    """Return the first line of torch's own function that a node comes from, such as an optimizer's: `torch/optim/adam.py:245 in step`."""
    match = _FRAME.search(node.stack_trace or "")
    if match is None or not match["file"].startswith(TORCH):
        return None
    return at(match["file"], match["line"], match["name"].strip())


def _user_frames(trace: str | None) -> Iterator[tuple[str, str]]:
    """Frames of a stack trace that aren't torch's own, outermost first: place and code."""
    lines = (trace or "").splitlines()
    for frame, code in itertools.zip_longest(lines, lines[1:], fillvalue=""):
        match = _FRAME.search(frame)
        if match is None or not is_users(match["file"]):
            continue
        place = at(match["file"], match["line"], match["name"].strip())
        yield place, "" if _FRAME.search(code) else code.strip()
