"""The tables of docs/performance.md: where the time of a step and of a call goes."""

from typing import Any

from benchlib import goals
from benchlib.measured import Results, device, fill, second_process, short, torch_version
from benchlib.report import GRAPHS, LEAN, PARTS, STAGES, differs, median, microseconds, number

GUARDS = "Dynamo's guards, part of what is before the forward"
DONE = "until the device is done"
IDLE = "of that, the device is idle"


def name_of(model: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """A model's name without its batch; the whole title where another's name begins alike."""
    titles = [each.get("title", each["model"]) for each in others]
    title = model.get("title", model["model"])
    alike = [each for each in titles if short(each).startswith(short(title))]
    return short(title) if len(alike) == 1 else title


def steps(bench: dict[str, Any]) -> str:
    """Milliseconds of a training step, a row per model that has a limit."""
    names = ["step", "limit's step", "loop", "limit's loop", "host", "limit's host", "GPU busy"]
    names += ["leanest step", "leanest host"]
    rows = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for model in goals.without_differing(bench)["results"]:
        ours, lean, limit = (model["arms"].get(name, {}) for name in ("cgpass", LEAN, "limit"))
        if median(limit, "step_ms") is None:
            continue
        cells = [
            number(median(entry, f"{key}_ms"))
            for key in ("step", "loop", "host")
            for entry in (ours, limit)
        ]
        cells.append(number(ours.get("kernels", {}).get("gpu_busy_ms")))
        cells += [number(median(lean, f"{key}_ms")) for key in ("step", "host")]
        rows.append("| " + " | ".join([name_of(model, bench["results"]), *cells]) + " |")
    return "\n".join(rows)


def model_stages(bench: dict[str, Any]) -> str:
    """Microseconds of a forward and a backward, a column per model; empty if none has any."""
    found = [
        (name_of(model, bench["results"]), entry, entry["stages"])
        for model in goals.without_differing(bench)["results"]
        if "until_done" in (entry := model["arms"].get("cgpass", {})).get("stages", {})
    ]
    if not found:
        return ""
    lines = [
        "| | " + " | ".join(name for name, _, _ in found) + " |",
        "|---" * (len(found) + 1) + "|",
    ]

    def line(what: str, values: list[float | None]) -> None:
        lines.append("| " + " | ".join([what, *(number(value, 0) for value in values)]) + " |")

    line(DONE, [each["until_done"] for _, _, each in found])
    busy = [entry.get("kernels", {}).get("gpu_busy_ms") for _, entry, _ in found]
    idle = [
        None if ms is None else each["until_done"] - 1e3 * ms
        for ms, (_, _, each) in zip(busy, found, strict=True)
    ]
    line(IDLE, idle)
    replays = [each.get("replays") for _, _, each in found]
    if any(replays):
        line("graphs that are replayed", replays)
    line(GUARDS, [each.get("guards") for _, _, each in found])
    for graph in GRAPHS:
        for stage in (*STAGES, *PARTS):
            values = [each.get(graph, {}).get(stage) for _, _, each in found]
            if any(values):
                line(f"{graph}: {stage}", values)
    return "\n".join(lines)


def calls(inference: dict[str, Any]) -> str:
    """Host microseconds and synchronised milliseconds of a call without gradients, a row per model."""
    arms = ("default", "reduce-overhead", "cgpass")
    names = [f"{arm}, host us" for arm in arms] + [f"{arm}, ms" for arm in arms]
    names.append("GPU busy, ms")
    rows = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for model in inference["results"]:
        entries = [model["arms"].get(arm, {}) for arm in arms]
        cells = [number(microseconds(entry), 0) for entry in entries]
        cells += [number(median(entry, "step_ms")) for entry in entries]
        cells.append(number(entries[-1].get("kernels", {}).get("gpu_busy_ms")))
        for n, entry in enumerate(entries):
            if differs(entry, model["arms"]):
                for cell in (n, n + len(arms)):
                    cells[cell] += " (results differ)"
        rows.append("| " + " | ".join([name_of(model, inference["results"]), *cells]) + " |")
    return "\n".join(rows)


def inference_blocks(inference: dict[str, Any], machine: str) -> list[str]:
    """What is said of calls without gradients."""
    said = (
        "The same models in eval mode, called under `torch.no_grad()`, the device waited for between calls: host "
        f"microseconds until a call returns, milliseconds until the device is done ([all figures](results/inference-{machine}.md))."
    )
    blocks = [fill(said), calls(inference)]
    if table := model_stages(inference):
        blocks += ["Where a call's host time goes, in microseconds:", table]
    return blocks


def stages(overhead: dict[str, Any]) -> str:
    """Microseconds of a call of a stack, a row per stage and a column per depth."""
    rows = overhead["rows"]
    heads = [f"{row['mode']}, {row['layers']}" for row in rows]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]

    def line(name: str, values: list[Any]) -> None:
        shown = ["-" if value is None else f"{value:.0f}" for value in values]
        lines.append("| " + " | ".join([name, *shown]) + " |")

    line("all", [row["us"].get("cgpass") for row in rows])
    found = [row["stages"].get("cgpass", {}) for row in rows]
    busy = [each.get("gpu_busy") for each in found]
    if any(busy):
        line(DONE, [each.get("until_done") for each in found])
        idle = zip(busy, found, strict=True)
        line(IDLE, [None if us is None else each["until_done"] - us for us, each in idle])
    line(GUARDS, [each.get("guards") for each in found])
    for graph in GRAPHS:
        for stage in (*STAGES, *PARTS):
            values = [each.get(graph, {}).get(stage) for each in found]
            if any(values):
                line(f"{graph}: {stage}", values)
    line('all with `parameter_grads="direct"`', [row["us"].get("cgpass-direct") for row in rows])
    line("reduce-overhead", [row["us"].get("reduce-overhead") for row in rows])
    return "\n".join(lines)


def section(results: Results, machine: str) -> str:
    """All of them, as Markdown; `machine` ends the names of the files."""
    bench, blocks = results["bench"], []
    on = f"One {device(bench)}, torch {torch_version(bench)}"
    blocks.append(
        fill(
            f"{on}: milliseconds of a training step ([all figures](results/bench-{machine}.md)). In "
            '"step" the host waits for the device after each step, in "loop" it does not; "host" is the '
            'host\'s time for forward and backward, "GPU busy" the device\'s. "Leanest" is with `parameter_grads="direct"` and the backward in the '
            "thread that calls it ([how](#what-to-do-about-it))."
        )
    )
    blocks.append(steps(bench))
    if table := model_stages(bench):
        blocks.append(
            fill(
                "A forward and a backward of these models, the device idle before: microseconds. A stage is what the host "
                "does in it ([which](#what-the-stages-are)), in all graphs of a step together, medians each, so they need "
                "not add up."
            )
        )
        blocks.append(table)
    if "inference" in results:
        blocks += inference_blocks(results["inference"], machine)
    if "overhead" in results:
        blocks.append(
            fill(
                "A stack of small layers, four parameters each, the device idle before each call: host "
                f"microseconds ([all figures](results/overhead-{machine}.md)). "
                '"all" is measured in calls of its own, so the parts, a median each, need not add up to it. Setting '
                "gradients to None belongs to what is before the forward. "
                'With "one thread" the backward runs in the thread that calls it.'
            )
        )
        blocks.append(stages(goals.without_differing(results["overhead"])))
    blocks.append(
        fill(
            "Targets and results. The goals were set on a faster host, on which reduce-overhead took 59 us "
            "for one layer and 191 us for 100 of them, inference, and 3872 us for training 100; what it took in these runs "
            "tells how fast this host is."
        )
    )
    blocks.append(goals.table(results))
    blocks.append(fill(goals.in_a_loop(bench)))
    if "start" in results and (said := second_process(results["start"])):
        blocks.append(fill(said))
    return "\n\n".join(blocks) + "\n"
