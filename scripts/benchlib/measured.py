"""Write README's section "Measured": a table, and a sentence for each other result.

A sentence without a result is left out.
"""

import re
import textwrap
from typing import Any

from benchlib.report import ONE_THREAD, WHOLE, is_default, number, partitions, sound_row, step_text

Results = dict[str, dict[str, Any]]  # part -> what its JSON holds
RIVALS = ("default", "reduce-overhead")
ARMS = (*RIVALS, "cgpass", "limit")
TITLES = {
    "bench": "steps",
    "memory": "memory",
    "inference": "inference",
    "overhead": "host time",
    "recompute": "recomputation",
    "graphed": "graphed callables",
    "start": "first steps",
    "tests": "tests",
    "dist": "tests on several GPUs",
    "dist-bench": "training on several GPUs",
}


def short(title: str) -> str:
    """Return a model's name without its batch."""
    return title.partition(", ")[0]


def listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def span(values: list[float]) -> str:
    """Return the smallest and the largest value, once if they look the same."""
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} to {high}"


def device(data: dict[str, Any]) -> str:
    """Return the GPU's name, as machines are named after it."""
    meta = data.get("meta", data)
    return re.sub(r"^(NVIDIA|GeForce)\s+", "", meta.get("gpu") or meta.get("device") or "no GPU")


def torch_version(data: dict[str, Any]) -> str:
    """Return the major and minor version of torch."""
    return ".".join(data.get("meta", data)["torch"].split(".")[:2])


def table(heads: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def step_table(bench: dict[str, Any], several: dict[str, Any] | None = None) -> str:
    """Write milliseconds of a synchronised step: a row per model, then per way to use several devices."""
    rows = [
        [model.get("title", model["model"]), *(step_text(arm, model["arms"]) for arm in ARMS)]
        for model in bench["results"]
    ]
    if several:
        on = f"Llama on {several['meta']['devices']} GPUs"
        rows += [
            [f"{on}, {mode}", *(step_text(arm, data["arms"]) for arm in ARMS)]
            for mode, data in several["modes"].items()
        ]
    return table(ARMS, rows)


def calls(overhead: dict[str, Any]) -> str:
    """Say what the host takes for a call of the deepest stack, in microseconds."""
    layers = max(row["layers"] for row in overhead["rows"])
    said = []
    for row in overhead["rows"]:
        us = sound_row(row)["us"]
        if row["layers"] == layers and row["mode"] != ONE_THREAD and "cgpass" in us:
            others = ", ".join(f"{us[arm]:.0f} in {arm}" for arm in RIVALS if arm in us)
            said.append(f"{row['mode']} {us['cgpass']:.0f} us ({others})")
    what = f"For {layers} small layers, {4 * layers} parameters, the host takes: "
    return what + "; ".join(said) + "." if said else ""


def losses(bench: dict[str, Any]) -> str:
    """Say whose losses were compared with those without graphs, and how they came out."""
    checked, deterministic, unequal, unchecked = [], [], [], []
    against_default: dict[bool | None, list[str]] = {True: [], False: [], None: []}
    for model in bench["results"]:
        name = short(model.get("title", model["model"]))
        ours = model["arms"].get("cgpass", {})
        found = ours.get("check")
        if found is None:
            unchecked.append(name)
            continue
        (checked if found["equal"] else unequal).append(name)
        if found.get("deterministic"):
            deterministic.append(name)
        if found["equal"] and partitions(ours) in WHOLE:
            against_default[is_default(ours, model["arms"])].append(name)
    if not checked and unequal:
        return f"Losses of {listed(unequal)} are not those of the same kernels without graphs."
    if not checked:
        return ""
    text = "Losses are bitwise those of the same kernels without graphs"
    if deterministic:
        text += f" ({listed(deterministic)}: under deterministic algorithms)"
    if unequal:
        text += f", but not those of {listed(unequal)}"
    if unchecked:
        text += f"; not compared: {listed(unchecked)}"
    return text + "." + _losses_of_default(against_default)


def _losses_of_default(found: dict[bool | None, list[str]]) -> str:
    """Say whether losses are plain torch.compile's, of models that are one partition each way."""
    if not found[True] and not found[False]:
        return ""
    text = " Where forward and backward are one graph each they are plain `torch.compile`'s, too"
    if found[False]:
        text += f", but not those of {listed(found[False])}"
    if found[None]:
        text += f"; not compared: {listed(found[None])}"
    return text + "."


def reserved(arms: dict[str, dict[str, Any]]) -> list[float]:
    """Return peak reserved memory relative to default, if both are known."""
    key = "peak_reserved_bytes"
    ours, default = (arms.get(name, {}).get(key) for name in ("cgpass", "default"))
    return [ours / default] if ours and default else []


def memory(results: Results) -> str:
    """Say how much memory is reserved, on one device and on several."""
    one = results.get("memory", {}).get("results", ())
    several = results.get("dist-bench", {}).get("modes", {}).values()
    found = [[r for each in group for r in reserved(each["arms"])] for group in (one, several)]
    if not found[0]:
        return ""
    more = f", and {span(found[1])} times on several GPUs" if found[1] else ""
    return f"Peak reserved memory is {span(found[0])} times that of plain `torch.compile`{more}."


def start(found: dict[str, Any]) -> str:
    """Say what the first steps take more than in default."""
    measured = [row for row in found["results"] if "compared" in row]
    if not measured:
        return ""
    rows = [row["compared"] for row in measured]
    extra = span([row["extra_cold_s"] for row in rows])
    ratio = span([row["first_warm_ratio"] for row in rows])
    return (
        f"The first steps take {extra} s more than in default, and the first step of a second process {ratio} times as "
        f"long ({listed([short(each['title']) for each in measured])})."
    )


def second_process(found: dict[str, Any]) -> str:
    """Say where the first step of a second process goes; older results don't tell."""
    said = []
    for row in found["results"]:
        warm = {arm: row["arms"].get(arm, {}).get("warm", {}) for arm in ("cgpass", "default")}
        if "compared" not in row or not all("spent_s" in each for each in warm.values()):
            continue
        ours, theirs = ({**each["spent_s"]} for each in warm.values())
        parts = [
            f"{what} {seconds:.2f}" + f" (default {theirs[what]:.2f})" * bool(theirs.get(what))
            for what, seconds in ours.items()
        ]
        more = [each["compile_s"] + each["steps_s"][0] for each in warm.values()]
        said.append(f"{short(row['title'])} {more[0] - more[1]:.2f} more: {', '.join(parts)}")
    if not said:
        return ""
    return f"In a second process the first step takes, in seconds, with {'; '.join(said)}."


def distributed(found: dict[str, Any]) -> str:
    """Say what is known of bits and ends of training on several devices."""
    hung = [
        mode
        for mode, data in found["modes"].items()
        if data["arms"].get("reduce-overhead", {}).get("process_group_ended") is False
    ]
    unequal = [
        mode
        for mode, data in found["modes"].items()
        if not data["arms"].get("cgpass", {}).get("check", {}).get("equal")
    ]
    text = f"On {found['meta']['devices']} GPUs losses and parameters are bitwise the same, too"
    text += f", but not with {listed(unequal)}" if unequal else ""
    if hung:
        text += f". In reduce-overhead `destroy_process_group` never returned ({listed(hung)})"
    return text + "."


def commits(found: dict[str, Any]) -> str:
    """Return the commit of results, and models that were measured later."""
    said = [found.get("meta", found)["commit"]]
    said += [
        f"{short(model['title'])}: {model['commit']}"
        for model in found.get("results", ())
        if "commit" in model
    ]
    return "; ".join(said)


def sources(results: Results) -> str:
    """Say where all figures are, and of which commit and day."""
    found: dict[str, list[str]] = {}
    for part, text in TITLES.items():
        if part in results:
            data = results[part]
            when = f"{commits(data)} ({data.get('meta', data)['time'].partition(' ')[0]})"
            found.setdefault(when, []).append(text)
    said = "; ".join(f"{', '.join(texts)}: {when}" for when, texts in found.items())
    return f"All figures, with machine, versions and command, are in [docs/results](docs/results), by commit: {said}."


def section(results: Results) -> str:
    """Write all of it as Markdown."""
    bench = results["bench"]
    head = (
        f"One {device(bench)}, torch {torch_version(bench)}: milliseconds of a training step (forward, backward, "
        'fused AdamW; bf16 autocast) that the host waits for. "limit" is one graph of the same kernels, captured by hand.'
    )
    sayers = {"overhead": calls, "bench": losses, "dist-bench": distributed, "start": start}
    said = [say(results[part]) for part, say in sayers.items() if part in results]
    lines = [fill(f"- {each}", "  ") for each in (*said, memory(results), sources(results)) if each]
    return (
        "\n\n".join((fill(head), step_table(bench, results.get("dist-bench")), "\n".join(lines)))
        + "\n"
    )


def fill(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, 118, break_long_words=False, break_on_hyphens=False, subsequent_indent=indent
    )
