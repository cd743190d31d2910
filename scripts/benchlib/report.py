"""Results of the benchmarks as Markdown."""

from __future__ import annotations

import shlex
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

GRAPHS = ("forward", "backward")
FORWARD = GRAPHS[0]
STAGES = ("before", "launch", "after the launch", "rest")
"""Parts of a call in older results, which have none of PARTS."""
PARTS = (
    "until called",
    "autograd's walk",
    "wrappers",
    "signature and copies",
    "replay",
    "outputs",
    "eager operators",
    "gradients",
    "after the last graph",
)
"""Parts of a call of cgpass, as benchlib/staged.py takes them."""
LEAN = "cgpass-lean"
"""An arm: gradients set directly, and the backward in the thread that calls it."""
SAME_KERNELS = ("cgpass", "cgpass-direct", LEAN)
"""Arms whose kernels are those of the run without graphs: their losses are compared bitwise."""
WHOLE = ("2/0", "1/0")
"""Partitions, captured and eager, of what is one each way, or one without a backward: no kernel is another than default's."""
ONE_THREAD = "training, one thread"
"""A mode of it: the backward runs in the thread that calls it."""


def number(value: Any, digits: int = 2) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def median(entry: dict[str, Any], key: str) -> float | None:
    """Median of a measured quantity of an arm."""
    return entry.get(key, {}).get("median")


def is_default(entry: dict[str, Any], arms: dict[str, Any]) -> bool | None:
    """Whether losses are default's, which those of one partition each way have to be; None where it is not known.

    Args:
        entry: What was measured of an arm.
        arms: All arms of the model.
    """
    found = entry.get("check") or {}
    if "default" in found:
        return found["default"]["equal"]
    # An older result. What needed deterministic algorithms is not the same from run to run, nor are default's.
    theirs = arms.get("default", {}).get("losses")
    if partitions(entry) not in WHOLE or not theirs or not found or found.get("deterministic"):
        return None
    return entry.get("losses") == theirs


def differs(entry: dict[str, Any], arms: dict[str, Any]) -> bool:
    """Whether an arm's losses are others than they have to be; `arms` are all of the model."""
    equal = (entry.get("check") or {}).get("equal", True)
    return bool(entry.get("differs")) or not equal or is_default(entry, arms) is False


def ours(arms: Iterable[str]) -> list[str]:
    """The arms that are cgpass, in any setting."""
    return [name for name in arms if name.split("-")[0] == "cgpass"]


def sound_arms(arms: dict[str, Any]) -> dict[str, Any]:
    """Those of a model's arms whose losses don't differ."""
    return {name: entry for name, entry in arms.items() if not differs(entry, arms)}


def _note_on_default(entry: dict[str, Any], arms: dict[str, Any]) -> str:
    if not is_default(entry, arms):
        return ""
    check = entry["check"]
    mode = check.get("default", {}).get("deterministic") and not check["deterministic"]
    return ", and default's" + " in deterministic mode" * bool(mode)


def takes_after_cgpass(name: str, entry: dict[str, Any], arms: dict[str, Any]) -> bool:
    """Whether the losses of an arm that was not compared bitwise, in older results, are those of one that was."""
    ours = arms.get("cgpass", {}).get("losses")
    return name != "cgpass" and ours is not None and entry.get("losses") == ours


def note_on_losses(name: str, entry: dict[str, Any], arms: dict[str, Any]) -> str:
    """What was compared bitwise of an arm whose kernels are those of the run without graphs, and came out equal."""
    found = entry.get("check")
    if name not in SAME_KERNELS or not entry.get("losses") or differs(entry, arms):
        return ""
    if found:
        mode = ", deterministic mode" if found["deterministic"] else ""
        return f"losses bitwise equal{mode}{_note_on_default(entry, arms)}"
    if takes_after_cgpass(name, entry, arms):
        return "losses are cgpass'"
    return "losses not compared bitwise"


def one_line(error: str) -> str:
    return " ".join(error.split())[:110].replace("|", "/")


def mark(name: str, entry: dict[str, Any], arms: dict[str, Any] | None = None) -> str:
    """A note on an arm: its error, or what is known of its losses, and what its pieces take.

    Args:
        name: Of the arm.
        entry: What was measured of it.
        arms: All arms of the model, whose losses this one's are held against.
    """
    if "error" in entry:
        return "failed: " + one_line(entry["error"])
    notes, found = [], entry.get("check")
    if "error" in (found or {}):
        notes.append(f"**losses not compared**: {one_line(found['error'])}")
    elif differs(entry, arms or {}):
        only = found and found.get("equal") and not is_default(entry, arms or {})
        notes.append("**losses differ" + " from default's" * bool(only) + "**")
    notes += filter(None, [note_on_losses(name, entry, arms or {})])
    if found and not found.get("plain_repeatable", True):
        notes.append("the plain runs differ too")
    for key in ("stages", "kernels"):
        if "error" in (entry.get(key) or {}):
            notes.append(f"**no {key}**: {one_line(entry[key]['error'])}")
    pieces = entry.get("alone", {})
    if "error" in pieces:
        notes.append("pieces not timed: " + one_line(pieces["error"]))
    elif pieces:
        notes.append(
            f"alone: eager partitions {pieces['eager_ms']:.2f} ms, graphs {pieces['graphs_ms']:.2f}, optimizer "
            f"{pieces['optimizer_ms']:.2f}"
        )
    return "; ".join(notes)


def partitions(entry: dict[str, Any]) -> str:
    """Captured and eager partitions of an arm of cgpass."""
    counters = entry.get("warmup_counters")
    if not counters:
        return "-"
    return f"{counters.get('partitions_captured')}/{counters.get('partitions_eager')}"


def kernel_text(entry: dict[str, Any]) -> str:
    """Captured and total kernels of forward and backward."""
    found = entry.get("kernels") or {}
    return f"{found['captured']}/{found['total']}" if "total" in found else "-"


def time_rows(model: dict[str, Any]) -> list[str]:
    """Table of one model's arms."""
    rows = [
        (
            "| arm | step ms (p10 to p90) | loop ms | host fwd+bwd ms | GPU busy ms | kernels captured/all"
            " | partitions captured/eager | copied KiB/step | note |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, entry in model.get("arms", {}).items():
        step = entry.get("step_ms", {})
        text = "-"
        if step:
            text = f"{step['median']:.2f} ({step['p10']:.2f} to {step['p90']:.2f})"
        copied = entry.get("copied_bytes_per_step")
        cells = (
            name,
            text,
            number(median(entry, "loop_ms")),
            number(median(entry, "host_ms")),
            number((entry.get("kernels") or {}).get("gpu_busy_ms")),
            kernel_text(entry),
            partitions(entry),
            number(None if copied is None else copied / 1024, 1),
            mark(name, entry, model["arms"]),
        )
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def step_text(name: str, arms: dict[str, Any]) -> str:
    """Milliseconds of an arm's synchronised step, marked where its losses differ; `arms` are all of the model."""
    entry = arms.get(name, {})
    return number(median(entry, "step_ms")) + " (losses differ)" * differs(entry, arms)


def summary_rows(results: list[dict[str, Any]]) -> list[str]:
    """Synchronised steps of all models, and cgpass against its rivals."""
    names = ["eager", "default", "reduce-overhead", "cudagraphs", "cgpass", "limit"]
    rows = [
        "| step ms | " + " | ".join(names) + " | default / cgpass | reduce-overhead / cgpass |",
        "|---" * (len(names) + 3) + "|",
    ]
    for model in results:
        sound = {
            name: median(entry, "step_ms") for name, entry in sound_arms(model["arms"]).items()
        }
        ours = sound.get("cgpass")
        ratios = [
            number(theirs / ours if ours and theirs else None)
            for theirs in map(sound.get, ("default", "reduce-overhead"))
        ]
        steps = (step_text(name, model["arms"]) for name in names)
        rows.append("| " + " | ".join([model.get("title", model["model"]), *steps, *ratios]) + " |")
    return rows


def microseconds(entry: dict[str, Any], key: str = "median") -> float | None:
    """Of the host for a call."""
    ms = entry.get("host_ms", {}).get(key)
    return None if ms is None else 1e3 * ms


def inference_rows(results: list[dict[str, Any]]) -> list[str]:
    """Calls without gradients, one row per model and arm."""
    names = ["model", "arm", "host us (p10 to p90)", "call ms", "GPU busy ms"]
    names += ["kernels captured/all", "partitions captured/eager", "note"]
    rows = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for model in results:
        for name, entry in model.get("arms", {}).items():
            host, low, high = (microseconds(entry, key) for key in ("median", "p10", "p90"))
            cells = (
                model.get("title", model["model"]),
                name,
                "-" if host is None else f"{host:.0f} ({number(low, 0)} to {number(high, 0)})",
                number(median(entry, "step_ms")),
                number((entry.get("kernels") or {}).get("gpu_busy_ms")),
                kernel_text(entry),
                partitions(entry),
                mark(name, entry, model["arms"]),
            )
            rows.append("| " + " | ".join(cells) + " |")
        if "error" in model:
            stopped = "stopped: " + " ".join(model["error"].split())[:120].replace("|", "/")
            title = model.get("title", model["model"])
            rows.append("| " + " | ".join([title, *["-"] * 6, stopped]) + " |")
    return rows


def mebibytes(value: int | None) -> str:
    """Bytes as MiB."""
    return "-" if value is None else f"{value / 2**20:.0f}"


def memory_rows(results: list[dict[str, Any]]) -> list[str]:
    """Peak memory and compile time, one row per model and arm."""
    rows = [
        (
            "| model | arm | peak reserved MiB | peak allocated MiB | beyond the allocator MiB"
            " | build + first steps s | note |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for model in results:
        for name, entry in model.get("arms", {}).items():
            cells = (
                model.get("title", model["model"]),
                name,
                mebibytes(entry.get("peak_reserved_bytes")),
                mebibytes(entry.get("peak_allocated_bytes")),
                mebibytes(entry.get("beyond_allocator_bytes")),
                number(entry.get("prepare_s"), 1),
                "failed: " + entry["error"][:90].replace("|", "/") if "error" in entry else "",
            )
            rows.append("| " + " | ".join(cells).replace("\n", " ") + " |")
    return rows


def mark_of_call(name: str, row: dict[str, Any]) -> str:
    """A note on an arm of a stack whose results are not what they have to be."""
    return " (results differ)" * (name in row.get("differs", ()))


def sound_row(row: dict[str, Any]) -> dict[str, Any]:
    """A stack without the arms whose results differ."""
    wrong = row.get("differs", ())
    kept = {
        key: {name: found for name, found in row[key].items() if name not in wrong}
        for key in ("us", "stages")
        if key in row
    }
    return row | kept


def overhead_rows(rows: list[dict[str, Any]]) -> list[str]:
    """Host microseconds of a call by arm, and where those of cgpass go."""
    names = list(rows[0]["us"])
    lines = ["| | layers | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for row in rows:
        cells = [
            row["mode"],
            str(row["layers"]),
            *(str(row["us"].get(name, "-")) + mark_of_call(name, row) for name in names),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    every = [found for row in rows for found in row["stages"].values()]
    parts = [
        (graph, stage)
        for graph in GRAPHS
        for stage in (*STAGES, *PARTS)
        if any(stage in found.get(graph, {}) for found in every)
    ]
    heads = ["", "layers", "arm", "guards", *(f"{graph}: {stage}" for graph, stage in parts)]
    lines += ["", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        for name, found in row["stages"].items():
            figures = [str(found.get(graph, {}).get(stage, "-")) for graph, stage in parts]
            arm = name + mark_of_call(name, row)
            cells = [row["mode"], str(row["layers"]), arm, str(found.get("guards", "-")), *figures]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def without_directories(text: str) -> str:
    """A word of a command, without what names a place on some machine."""
    option, equals, value = text.partition("=") if text.startswith("-") else ("", "", text)
    path = PurePosixPath(value)
    if not (path.is_absolute() or {"..", "~"} & set(path.parts)):
        return text
    parts = (
        path.parts[path.parts.index("scripts") :] if "scripts" in path.parts else path.parts[-1:]
    )
    return option + equals + "/".join(parts)


def command_text(command: str) -> str:
    """A command as others would type it: files by their names."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    return shlex.join(map(without_directories, words)).replace("'&&'", "&&")


def of_its_own(model: dict[str, Any]) -> list[str]:
    """Of which commit a model's figures are, where that is not the others'."""
    if "commit" not in model:
        return []
    return [f"Commit {model['commit']}, command: `{command_text(model['command'])}`.", ""]


def render(data: dict[str, Any]) -> str:
    """The whole report."""
    meta = data["meta"]
    head = [
        f"torch {meta['torch']}, {meta['gpu']}, driver {meta['driver']}, commit {meta['commit']}.",
        f"Command: `{command_text(meta['command'])}`.",
        "",
    ]
    if data.get("left_out"):
        head += [f"**Left out, out of time: {', '.join(data['left_out'])}.**", ""]
    if data["kind"] == "overhead":
        note = "Host microseconds of a call of a stack of small layers, medians."
        return "\n".join([*head, note, "", *overhead_rows(data["rows"]), ""])
    if data["kind"] == "memory":
        note = f"One process per arm, fresh cache, {meta['parallel']} compiling at a time."
        return "\n".join([*head, note, "", *memory_rows(data["results"]), ""])
    if data["kind"] == "inference":
        note = "Calls under torch.no_grad() of the models in eval mode, the device waited for between them: medians."
        own = [
            f"{model.get('title', model['model'])}: {line}" if line else ""
            for model in data["results"]
            for line in of_its_own(model)
        ]
        return "\n".join([*head, note, "", *inference_rows(data["results"]), "", *own])
    body = [*summary_rows(data["results"]), ""]
    for model in data["results"]:
        error = f" (stopped: {model['error'][:120]})" if "error" in model else ""
        body += [f"## {model.get('title', model['model'])}{error}", "", *of_its_own(model)]
        body += [*time_rows(model), ""]
    return "\n".join([*head, *body])
