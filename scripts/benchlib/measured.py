"""README's section "Measured" from results: the table, and sentences that hold figures.

What there is no result of is not spoken of.
"""

import re
import textwrap
from typing import Any

from benchlib.report import (
    ONE_THREAD,
    WHOLE,
    differs,
    is_default,
    median,
    microseconds,
    number,
    ours,
    partitions,
    sound_row,
    step_text,
)

Results = dict[str, dict[str, Any]]  # part -> what its JSON holds
RIVALS = ("reduce-overhead", "default")
ARMS = ("default", "reduce-overhead", "cgpass", "limit")
LINKS = {
    "bench": ("benchmark", "md"),
    "memory": ("memory", "md"),
    "inference": ("inference", "md"),
    "overhead": ("host time", "md"),
    "recompute": ("recomputation", "json"),
    "graphed": ("graphed callables", "json"),
    "start": ("first steps", "json"),
    "tests": ("tests", "json"),
    "dist": ("tests on several devices", "json"),
    "dist-bench": ("training on several devices", "json"),
}
IN_ONE_THREAD = "training with [the backward in the thread that calls it](docs/performance.md#what-to-do-about-it)"


def short(title: str) -> str:
    """A model's name without its batch."""
    return title.partition(", ")[0]


def listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def span(values: list[float]) -> str:
    """The smallest and the largest value, once if they look the same."""
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} to {high}"


def device(data: dict[str, Any]) -> str:
    """The GPU's name, as machines are named after it."""
    meta = data.get("meta", data)
    return re.sub(r"^(NVIDIA|GeForce)\s+", "", meta.get("gpu") or meta.get("device") or "no GPU")


def torch_version(data: dict[str, Any]) -> str:
    """Major and minor version of torch."""
    return ".".join(data.get("meta", data)["torch"].split(".")[:2])


def step_table(bench: dict[str, Any]) -> str:
    """Milliseconds of a synchronised step, a row per model."""
    rows = ["| | " + " | ".join(ARMS) + " |", "|---" * (len(ARMS) + 1) + "|"]
    for model in bench["results"]:
        cells = [step_text(name, model["arms"]) for name in ARMS]
        rows.append("| " + " | ".join([model.get("title", model["model"]), *cells]) + " |")
    return "\n".join(rows)


def losses(bench: dict[str, Any]) -> str:
    """Whose losses were compared with those without graphs, and how they came out."""
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
    """Whether losses are plain torch.compile's, of models that are one partition each way."""
    if not found[True] and not found[False]:
        return ""
    text = " Where forward and backward are one graph each they are plain `torch.compile`'s, too"
    if found[False]:
        text += f", but not those of {listed(found[False])}"
    if found[None]:
        text += f"; not compared: {listed(found[None])}"
    return text + "."


def memory(found: dict[str, Any]) -> str:
    """Peak memory relative to default; models that are not captured whole by themselves."""
    whole, others = [], []
    for model in found["results"]:
        ours, default = (model["arms"].get(name, {}) for name in ("cgpass", "default"))
        if "peak_reserved_bytes" not in ours or "peak_reserved_bytes" not in default:
            continue
        ratio = ours["peak_reserved_bytes"] / default["peak_reserved_bytes"]
        counters = ours.get("warmup_counters", {})
        eager = counters.get("partitions_eager", 0)
        if not eager:
            whole.append(ratio)
            continue
        parts = eager + counters["partitions_captured"]
        name = short(model.get("title", model["model"]))
        others.append(f"{ratio:.2f} times on {name}, whose step is {parts} partitions")
    said = [f"{span(whole)} times that of plain `torch.compile`"] if whole else []
    said += others
    if not said:
        return ""
    if not whole:
        said[0] = said[0].replace(" times", " times that of plain `torch.compile`", 1)
    return "Peak reserved memory is " + ", and ".join(said) + "."


def recompute(found: dict[str, Any]) -> str:
    """What recomputed random operators cost, and what checkpoints save."""
    names = ("cgpass-inductor", "cgpass-inductor-paired", "reduce-overhead")
    exact, paired, rival = (number(found["pairs"][n]["random_ms"]["step_ms"], 1) for n in names)
    saved = {
        row["checkpoint"]: row["activation_mib"]
        for row in found["memory"]
        if row["way"] == "compiled"
    }
    blocks = found.get("num_blocks", 12)  # results from before it was noted
    return (
        f"{found['num_pairs']} random operators that are recomputed add {exact} ms to a step with "
        f'`rng="exact"` and {paired} ms with `"paired"`, against {rival} ms in reduce-overhead; '
        f"checkpoints bring a compiled stack of {blocks} blocks from {saved['none']:.0f} to "
        f"{saved['cgpass.checkpoint']:.0f} MiB of activations."
    )


def graphed(found: dict[str, Any]) -> str:
    """Host time of callables graphed by hand."""
    ratio = number(found["ratio_to_torch"]["cleared"]["both"])
    us = {
        arm: each["both"]["median_us"]
        for arm, each in found.get("results", {}).get("cleared", {}).items()
    }
    direct = ""
    if "cgpass, direct gradients" in us:
        ratio_of_direct = number(us["cgpass, direct gradients"] / us["torch"])
        direct = f', and {ratio_of_direct} times with `parameter_grads="direct"`'
    return (
        f"A small layer graphed by hand takes {ratio} times the host time of "
        f"`torch.cuda.make_graphed_callables` (forward and backward, gradients cleared){direct}."
    )


def start(found: dict[str, Any]) -> str:
    """What the first steps take more than in default."""
    measured = [row for row in found["results"] if "compared" in row]
    if not measured:
        return ""
    rows = [row["compared"] for row in measured]
    extra = span([row["extra_cold_s"] for row in rows])
    ratio = span([row["first_warm_ratio"] for row in rows])
    return (
        f"From `torch.compile` until all of a step is replayed it takes {extra} s longer than in default with nothing cached; in a "
        f"second process the first step is done after {ratio} times the time ({listed([short(each['title']) for each in measured])})."
    )


def second_process(found: dict[str, Any]) -> str:
    """Where the first step of a second process goes, beside what it has in default; older results don't tell."""
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


def overhead(found: dict[str, Any]) -> str:
    """Host time of a call of the deepest stack."""
    layers = max(row["layers"] for row in found["rows"])
    said = []
    for row in found["rows"]:
        us = sound_row(row)["us"]
        if row["layers"] != layers or "cgpass" not in us:
            continue
        more = []
        if row["mode"] != "inference" and "cgpass-direct" in us:
            more.append(f'{us["cgpass-direct"]:.0f} with `parameter_grads="direct"`')
        more += [f"{us[n]:.0f} in {n}" for n in ("reduce-overhead", "default") if n in us]
        against = f" ({', '.join(more)})" if more else ""
        mode = IN_ONE_THREAD if row["mode"] == ONE_THREAD else row["mode"]
        said.append(f"{mode} {us['cgpass']:.0f} us{against}")
    if not said:
        return ""
    what = f"Host time of a call of {layers} small layers, {4 * layers} parameters: "
    return what + "; ".join(said) + "." + _results_of_calls(found["rows"])


def _results_of_calls(rows: list[dict[str, Any]]) -> str:
    """Whether results of calls are those without graphs, and default's; older results don't say it."""
    if not all("differs" in row for row in rows):
        return ""
    differing = [
        f"{name} ({row['mode']}, {row['layers']} layers)"
        for row in rows
        for name in ours(row["differs"])
    ]
    but = f", but not those of {listed(differing)}" if differing else ""
    default = ", and plain `torch.compile`'s" if all("default" in row["us"] for row in rows) else ""
    return (
        " Results and gradients are bitwise those of the same kernels without graphs"
        f"{default}{but}."
    )


def inference(found: dict[str, Any]) -> str:
    """Host time of a call of each model without gradients."""
    said, labelled = [], False
    for model in found["results"]:
        arms = model["arms"]
        us = {name: microseconds(entry) for name, entry in arms.items()}
        if us.get("cgpass") is None or differs(arms["cgpass"], arms):
            continue
        timed = [name for name in RIVALS if us.get(name)]
        all_timed = timed == list(RIVALS)
        plain = labelled and all_timed
        labelled |= all_timed
        others = [f"{us[name]:.0f}" + f" in {name}" * (not plain) for name in timed]
        failed = [f"{name} fails" for name in RIVALS if "error" in arms.get(name, {})]
        told = "; ".join(filter(None, [", ".join(others), ", ".join(failed)]))
        against = f" ({told})" if told else ""
        said.append(f"{short(model.get('title', model['model']))} {us['cgpass']:.0f} us{against}")
    if not said:
        return ""
    return f"Host time of a call under `torch.no_grad()`: {'; '.join(said)}."


def distributed(found: dict[str, Any]) -> str:
    """Steps, memory and bits of training on several devices."""
    said, ratios, unequal, lost, hung = [], [], [], [], []
    for mode, data in found["modes"].items():
        if data["arms"].get("reduce-overhead", {}).get("process_group_ended") is False:
            hung.append(mode)
        ms = {arm: median(entry, "step_ms") for arm, entry in data["arms"].items()}
        ours, default = (data["arms"].get(arm, {}) for arm in ("cgpass", "default"))
        if ms.get("cgpass") is None:
            lost.append(mode)
            continue
        others = [
            f"{number(ms[arm])} in {arm}" if ms.get(arm) is not None else f"{arm} fails"
            for arm in ("default", "reduce-overhead")
            if arm in ms
        ]
        said.append(f"{mode} {number(ms['cgpass'])} ms ({', '.join(others)})")
        if "peak_reserved_bytes" in ours and "peak_reserved_bytes" in default:
            ratios.append(ours["peak_reserved_bytes"] / default["peak_reserved_bytes"])
        if not ours["check"]["equal"]:
            unequal.append(mode)
    if not said:
        return ""
    text = (
        f"On {found['meta']['devices']} such GPUs a step of the Llama takes, with {'; '.join(said)}"
    )
    text += f"; not with {listed(lost)}" if lost else ""
    text += "; losses and parameters are bitwise those of the same kernels without graphs "
    text += "(under deterministic algorithms)"
    text += f", but not with {listed(unequal)}" if unequal else ""
    if ratios:
        text += f", and peak reserved memory is {span(ratios)} times that of plain `torch.compile`"
    if hung:
        text += f". In reduce-overhead `destroy_process_group` never returned with {listed(hung)}"
    return text + "."


def commits(found: dict[str, Any]) -> str:
    """Of which commit results are, and models that were measured later."""
    said = [found.get("meta", found)["commit"]]
    said += [
        f"{short(model['title'])}: {model['commit']}"
        for model in found.get("results", ())
        if "commit" in model
    ]
    return "; ".join(said)


def links(results: Results, machine: str) -> str:
    """Where all figures are, and of which commit."""
    said = [
        f"[{text}](docs/results/{part}-{machine}.{ending}) ({commits(results[part])})"
        for part, (text, ending) in LINKS.items()
        if part in results
    ]
    return (
        "All figures, with machine, versions and command, by the commit that was measured: "
        + ", ".join(said)
        + "."
    )


def section(results: Results, machine: str) -> str:
    """All of it as Markdown; `machine` ends the names of the files."""
    bench = results["bench"]
    head = (
        f"One {device(bench)}, torch {torch_version(bench)}, milliseconds of a synchronised "
        "training step (forward, backward, fused AdamW; bf16 autocast), all arms in one process:"
    )
    sayers = {
        "memory": memory,
        "recompute": recompute,
        "graphed": graphed,
        "inference": inference,
        "overhead": overhead,
        "start": start,
        "dist-bench": distributed,
    }
    said = ['"limit" is one graph of Inductor\'s kernels captured by hand.', losses(bench)]
    said += [say(results[part]) for part, say in sayers.items() if part in results]
    said.append(links(results, machine))
    steps = f"![Step time relative to the limit](docs/results/steps-{machine}.svg)"
    blocks = [fill(head), step_table(bench), steps, fill(" ".join(filter(None, said)))]
    if "overhead" in results:
        blocks.append(f"![Host time over layers](docs/results/overhead-{machine}.svg)")
    return "\n\n".join(blocks) + "\n"


def fill(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)
