"""Reads Dynamo's counters, graph breaks, and functions that it gave up."""

import functools
import sys
import threading
import traceback
from collections import deque
from dataclasses import dataclass
from typing import Any

from torch._guards import CompileContext

_forgotten: Any = None
"""The newest note of what Dynamo forgot."""


def compilations(*, since_reset: bool = False) -> list[Any]:
    """Return torch's notes of compilations, oldest first: which function each was of, how it went, why it was needed.

    Backwards that are compiled when they first run are among them, without a function's name. Dynamo is not loaded for
    it: a script may still set what that reads when it is.

    Source: torch/_dynamo/utils.py `CompilationMetrics`, `get_compilation_metrics`, 2.11 to 2.15.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    notes = [] if utils is None else list(utils.get_compilation_metrics())
    old = [i for i, note in enumerate(notes) if since_reset and note is _forgotten]
    return notes[old[0] + 1 :] if old else notes


def was_given_up(compilation: Any) -> bool:
    """Tell if a compilation ended in a function, or what is left of it, that runs in eager.

    Source: torch/_dynamo/convert_frame.py `ConvertFrame.__call__`, 2.11 to 2.15.
    """
    from torch._dynamo import exc

    if not compilation.fail_type:
        return False
    kind = getattr(exc, compilation.fail_type, None)
    soft = isinstance(kind, type) and issubclass(kind, (exc.Unsupported, exc.UserError))
    return soft or bool(compilation.config_suppress_errors)


Function = tuple[str, int, str]
"""File, first line and name."""


@dataclass(eq=False, slots=True)
class GraphBreak:
    """A graph break, as Dynamo told of it."""

    function: Function
    """The function that was compiled and had it, in itself or in what it calls."""
    whole: Function
    """The same, of what is compiled behind an earlier break the whole function."""
    text: str
    stack: tuple[traceback.FrameSummary, ...]
    """All frames that it was traced through, outermost first."""
    thread: int
    over: bool = False
    """True if Dynamo forgot since what it compiled."""
    earlier: bool = False
    """True if summaries began again since."""


_NOTED = 4096
"""Compilations that torch keeps notes of."""
_graph_breaks: deque[GraphBreak] = deque(maxlen=1024)
_ours: set[str] = set()
"""Numbers of functions that were compiled for our backend."""
_old: dict[int, Any] = {}
"""Notes of such compilations that Dynamo forgot."""


def note_function() -> tuple[Function | None, tuple[Function, ...]]:
    """Note which function Dynamo compiles for our backend now; return it, and those with breaks that run around it.

    The whole function, if this is what is behind a break.
    """
    from torch._dynamo.symbolic_convert import tls

    _ours.add(function_of(CompileContext.current_compile_id()))
    translator = getattr(tls, "current_tx", None)
    broken, around = {each.whole for each in _graph_breaks}, set[Function]()
    frame = sys._getframe()
    while frame is not None:
        around |= broken & {_whole(frame.f_code)}
        frame = frame.f_back
    return None if translator is None else _whole(translator.f_code), tuple(around)


def _whole(code: Any) -> Function:
    """Source: torch/_dynamo/resume_execution.py `ContinueExecutionCache`, 2.11 to 2.15."""
    from torch._dynamo.resume_execution import ContinueExecutionCache

    rest = ContinueExecutionCache.generated_code_metadata.get(code)
    code = code if rest is None else rest.code
    return code.co_filename, code.co_firstlineno, code.co_name


def function_of(compile_id: object) -> str:
    """Torch's number of the function that a compilation was of: the same in each of them."""
    return str(compile_id).rpartition("/")[0]


def is_ours(compilation: Any) -> bool:
    """Tell if a function was compiled for our backend before, in this compilation or another."""
    own = compilation.co_filename, compilation.co_firstlineno, compilation.co_name
    known = {each.function for each in _graph_breaks if not each.over}
    return id(compilation) in _old or function_of(compilation.compile_id) in _ours or own in known


class _UntilLoaded:
    """Among import hooks: has graph breaks noted as soon as Dynamo is loaded."""

    @staticmethod
    def find_spec(*_: Any) -> None:
        note_graph_breaks()


def note_graph_breaks() -> None:
    """Have graph breaks noted from now on, and more compilations; nothing happens until Dynamo is loaded.

    Where Dynamo can't go on behind one, the graph that it compiles before it carries no word of it; where no operator
    is before it there is no such graph. Those of functions that are compiled for another backend are left out.

    Source: torch/_dynamo/symbolic_convert.py `InstructionTranslatorBase.log_graph_break`; torch/_dynamo/utils.py
    `set_compilation_metrics_limit`, 64 by default, 2.11 to 2.15.
    """
    convert = sys.modules.get("torch._dynamo.symbolic_convert")
    kind = getattr(convert, "InstructionTranslatorBase", None)
    log = getattr(kind, "log_graph_break", None)
    others: list[Any] = [each for each in sys.meta_path if each is not _UntilLoaded]
    sys.meta_path = [_UntilLoaded] * (log is None) + others  # an import may go over the old list
    if kind is None or log is None or hasattr(log, "_notes_for_cgpass"):
        return
    sys.modules["torch._dynamo.utils"].set_compilation_metrics_limit(_NOTED)

    @functools.wraps(log)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (backend := _backend_of_ours(self)) is not None:
            from torch._dynamo import eval_frame

            eval_frame.cached_backends.setdefault(id(backend), backend)  # as `register_backend`
            code, error = self.f_code, kwargs.get("exc", args[-1] if args else None)
            _graph_breaks.append(
                GraphBreak(
                    (code.co_filename, code.co_firstlineno, code.co_name),
                    _whole(code),
                    str(getattr(error, "msg", None) or error),
                    tuple(getattr(error, "real_stack", None) or ()),
                    threading.get_ident(),
                )
            )
        return log(self, *args, **kwargs)

    noting._notes_for_cgpass = True  # pyrefly: ignore[missing-attribute]
    kind.log_graph_break = noting


def _backend_of_ours(translator: Any) -> Any:
    """Return our backend, by whatever name, if what is compiled goes to it.

    Source: torch/_dynamo/repro/after_dynamo.py `WrapBackendDebug`, 2.11 to 2.15.
    """
    ours, backend = None, getattr(getattr(translator, "output", None), "compiler_fn", None)
    while backend is not None:
        name = getattr(backend, "_compiler_name", None) or getattr(backend, "__name__", None)
        if str(name).startswith("cgpass"):
            ours = backend
        inside = ("_torchdynamo_orig_backend", "compiler_fn", "func")
        backend = next((found for each in inside if (found := getattr(backend, each, None))), None)
    return ours


def graph_breaks() -> list[GraphBreak]:
    """The newest of this process since they are noted, oldest first."""
    return list(_graph_breaks)


def end_notes() -> None:
    """Note that Dynamo forgets all that it compiled so far, and numbers functions from 0 again."""
    global _forgotten, _old
    notes = compilations()
    _old = {id(each): each for each in notes if is_ours(each)}
    _forgotten = next(reversed(notes), None)
    _ours.clear()
    for each in graph_breaks():
        each.over = True
