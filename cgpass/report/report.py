"""Reports: what `explain` returns, how they are kept in files, and what changed from one to another."""

import contextlib
import dataclasses
import json
import re
import types
import typing
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jinja2

from cgpass.errors import ReportError
from cgpass.report import text
from cgpass.report.model import Facts
from cgpass.report.text import milliseconds, share, size

SCHEMA: Final = 8
"""Version of the dictionaries that `Report.to_dict` gives."""


class Report(Facts):
    """A report on some calls. `print` shows it as text; `save` writes it as JSON, as text or as a page.

    Examples:
        >>> report = cgpass.explain(torch.nn.Linear(4, 4), torch.randn(2, 4))
        >>> [part.replays for part in report.partitions], report.work, report.boundaries
        ([8, 8], (64, 64), 0)
        >>> report.plain_calls
        0
        >>> report.save("report.json")
        >>> cgpass.Report.load("report.json") == cgpass.Report.from_dict(report.to_dict()) == report
        True
    """

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, data: Any) -> "Report":
        """The report that `to_dict` was called on.

        Raises:
            ReportError: It is no report, or one of a version that this version of cgpass doesn't know.
        """
        try:
            schema = data["schema"]
            if schema == SCHEMA:
                return _decoded(cls, {name: data[name] for name in data if name != "schema"})
        except (TypeError, KeyError, AttributeError) as error:
            raise ReportError(
                f"this is not a report of cgpass ({type(error).__name__}: {error}); save one with "
                "cgpass.explain(...).save('report.json')"
            ) from error
        raise ReportError(
            f"the report has schema {schema!r}, this version of cgpass reads schema {SCHEMA}: read it with the "
            f"version that wrote it ({data.get('cgpass', 'unknown')}), or make it again"
        )

    @classmethod
    def load(cls, path: str | Path) -> "Report":
        """The report that `save` wrote as JSON.

        Raises:
            ReportError: There is none.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ReportError(f"{path} can't be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ReportError(f"{path} is not JSON: {error}") from error
        return cls.from_dict(data)

    def save(self, path: str | Path) -> None:
        """Write the report to a file.

        Args:
            path: Ends in .json for what `load` reads, in .html for a page to look at, in .txt for the text.

        Raises:
            ReportError: Another ending, or the file can't be written; then it is as it was.
        """
        path = Path(path)
        check_place(path)
        said, target = WRITERS[path.suffix](self), path.resolve()
        part = target.with_name(f"cgpass-{uuid.uuid4().hex}.part")  # of this thread alone
        try:
            part.write_text(said, encoding="utf-8", errors="backslashreplace")
            part.replace(target)
        except OSError as error:
            raise ReportError(f"{path} can't be written: {error.strerror}") from error
        finally:  # also where it was interrupted
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def __str__(self) -> str:
        return text.text(self)


def html(report: Facts) -> str:
    """The report as one page that needs nothing else, for browsers in light and in dark."""
    source = Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return template.from_string(source).render(report=report, text=text)


WRITERS: Final[dict[str, Callable[[Report], str]]] = {
    ".json": lambda report: json.dumps(report.to_dict(), indent=2),
    ".html": html,
    ".txt": str,
}


def check_place(path: Path) -> None:
    """Refuse a file that a report can't be written to."""
    if path.suffix not in WRITERS:
        raise ReportError(f"a report is saved as {', '.join(WRITERS)}, got {str(path)!r}")
    if not path.parent.is_dir():
        raise ReportError(f"the folder {str(path.parent)!r} to save the report in does not exist")


def _decoded(kind: Any, value: Any) -> Any:
    """A value of JSON as what a field is annotated as."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{n: _decoded(hints.get(n, object), v) for n, v in value.items()})
    if origin is types.UnionType:  # of one type and None
        return None if value is None else _decoded(args[0], value)
    if origin is tuple:
        return tuple(_decoded(args[0], each) for each in value)
    return value


# ---- what changed


def diff(old: Report, new: Report) -> str:
    """List the changes from one report to another, in lines."""
    was, now = _figures(old), _figures(new)
    lines = [f"{k}: {was.get(k, 0)} -> {n}" for k, n in now.items() if n != was.get(k, "0")]
    before, after = _told(old), _told(new)
    for word, told, others in (("gone", before, after), ("new", after, before)):
        for key, alike in told.items():  # of these, what is no more or not yet as it is
            known = others.get(key, [])
            more = sorted(alike, key=known.count, reverse=True)[len(known) :]
            lines += [f"{word}: {each}" for each in more]
    return "\n".join(row for line in lines for row in text.wrapped(line)) or "nothing changed"


def _figures(report: Report) -> dict[str, str]:
    """All numbers that `diff` compares, as they are shown."""
    counts = {k: size(n) if k.endswith("bytes") else str(n) for k, n in report.counters.items()}
    return {
        "cgpass": report.cgpass,
        "torch": report.torch,
        "device": report.device,
        "native code": report.native or "-",
        "device time inside graphs": share(report.graphs_ms or 0, report.device_ms or 0),
        "operators in graphs": share(*report.work),
        "operators of graphs": str(sum(graph.num_ops for graph in report.graphs)),
        "boundaries": str(report.boundaries),
        "training steps in one graph": f"{report.whole_steps} of {report.steps}",
        "a call with graphs": milliseconds(report.ms),
        "a call without": milliseconds(report.plain_ms),
        "memory pools": size(report.pool_bytes),
        **counts,
    }


_NUMBER: Final = re.compile(
    r"(?<=\.py):\d+|(?<=captured_)\d+|(?<=eager_)\d+|(?<![\w.=\[])-?\d[\d.]*(?:e[-+]?\d+)?(?![\w\])])|(?<=\bcall)s\b"
)


def _told(report: Report) -> dict[str, list[str]]:
    """Lines on what costs time, by what stays where code moves and calls are more: not by line numbers and counts."""
    lines = [f"{each.line}: {text.what(each)}; {each.fix}" for each in text.findings(report)]
    for other in report.others:
        name, *causes = other.splitlines()
        lines += [f"{re.split(':|, graphed', name)[0]}: {each.strip()}" for each in causes]
    told: dict[str, list[str]] = {}
    for line in lines:
        told.setdefault(_NUMBER.sub("", line.replace(text.EARLIER, "")), []).append(line)
    return told
