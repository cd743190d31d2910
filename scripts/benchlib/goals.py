"""What cgpass is to reach, and what it does: a table of docs/performance.md."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchlib.measured import Results, short, span
from benchlib.report import LEAN, ONE_THREAD, median, number, sound_arms, sound_row

DIRECT = "cgpass-direct"
Figures = dict[str, float]  # by model, say


@dataclass(frozen=True)
class Goal:
    """A figure that is to be reached wherever it is measured."""

    what: str
    goal: str
    part: str
    """Which results have it."""
    at_most: float
    figures: Callable[[dict[str, Any], str], Figures]
    """Of an arm."""
    digits: int = 2
    arm: str = "cgpass"
    allowance: Callable[[dict[str, Any]], Figures] = lambda found: {}
    """What is added to `at_most`, by model."""
    names_all: bool = False
    """Whether to name what was measured, where that is only some of the models."""
    at_least: float = 0.0
    """What is less is no figure."""
    why_not_less: str = ""


def _models(found: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for model in found["results"]:
        yield model.get("title", model["model"]), model["arms"]


def _over_limit(found: dict[str, Any], arm: str) -> Figures:
    """Milliseconds that a synchronised step takes more than the limit's."""
    figures = {}
    for title, arms in _models(found):
        ours, limit = (median(arms.get(name, {}), "step_ms") for name in (arm, "limit"))
        if ours is not None and limit is not None and not _is_regional(title):
            figures[title] = ours - limit
    return figures


def _times_limit(found: dict[str, Any], arm: str) -> Figures:
    """How many times the limit's a synchronised step takes."""
    arms = dict(_models(found))
    return {
        title: 1 + more / median(arms[title]["limit"], "step_ms")
        for title, more in _over_limit(found, arm).items()
    }


def _is_regional(title: str) -> bool:
    return "by layers" in title


def _host(found: dict[str, Any], arm: str) -> Figures:
    """Milliseconds of the host for a forward and a backward, of models that are one graph each way."""
    return {
        title: value
        for title, arms in _models(found)
        if "limit" in arms and "error" not in arms["limit"] and not _is_regional(title)
        if (value := median(arms.get(arm, {}), "host_ms")) is not None
    }


def _regional(found: dict[str, Any], arm: str) -> Figures:
    return {
        title: value
        for title, arms in _models(found)
        if _is_regional(title) and (value := median(arms.get(arm, {}), "step_ms")) is not None
    }


def _with_eager_partitions(found: dict[str, Any], arm: str) -> Figures:
    """Milliseconds of a synchronised step, of models not all of which can be captured."""
    return {
        title: value
        for title, arms in _models(found)
        if arms.get("cgpass", {}).get("warmup_counters", {}).get("partitions_eager")
        and (value := median(arms.get(arm, {}), "step_ms")) is not None
    }


def _of_pieces(found: dict[str, Any], arm: str) -> Figures:
    """How many times what its eager partitions, graphs and optimizer take alone a synchronised step takes."""
    figures = {}
    for title, arms in _models(found):
        pieces = arms.get("cgpass", {}).get("alone", {})
        step = median(arms.get(arm, {}), "step_ms")
        if pieces and "error" not in pieces and step is not None:
            figures[title] = step / sum(pieces.values())
    return figures


def _memory(found: dict[str, Any], arm: str) -> Figures:
    key = "peak_reserved_bytes"
    return {
        title: arms[arm][key] / arms["default"][key]
        for title, arms in _models(found)
        if arms.get(arm, {}).get(key) and arms.get("default", {}).get(key)
    }


def _mean_memory(found: dict[str, Any], arm: str) -> Figures:
    ratios = list(_memory(found, arm).values())
    return {"all models": sum(ratios) / len(ratios)} if ratios else {}


def _call(mode: str, layers: int) -> Callable[[dict[str, Any], str], Figures]:
    """Microseconds of a call of a stack."""

    def figures(found: dict[str, Any], arm: str) -> Figures:
        return {
            f"{layers} layers": row["us"][arm]
            for row in found["rows"]
            if (row["mode"], row["layers"]) == (mode, layers) and arm in row["us"]
        }

    return figures


def _sound(entry: dict[str, Any]) -> dict[str, Any]:
    return entry | {"arms": sound_arms(entry.get("arms", {}))}


def without_differing(found: dict[str, Any]) -> dict[str, Any]:
    """The same without arms whose losses, or results, differ: what computes something else reaches nothing."""
    if "modes" in found:
        return found | {"modes": {mode: _sound(each) for mode, each in found["modes"].items()}}
    if "rows" in found:
        return found | {"rows": [sound_row(row) for row in found["rows"]]}
    if isinstance(found.get("results"), list):
        return found | {"results": [_sound(model) for model in found["results"]]}
    return found


def _graphed(found: dict[str, Any], arm: str) -> Figures:
    ratio = found["ratio_to_torch"]["cleared"]["both"]
    return {"layer": ratio} if arm == "cgpass" else {}


def _start(key: str) -> Callable[[dict[str, Any], str], Figures]:
    def figures(found: dict[str, Any], arm: str) -> Figures:
        rows = [row for row in found["results"] if "compared" in row and arm == "cgpass"]
        return {row["title"]: row["compared"][key] for row in rows}

    return figures


def _for_further_pieces(found: dict[str, Any]) -> Figures:
    """Seconds that the goal of the first steps adds for each piece but the first."""
    rows = [row for row in found["results"] if "compared" in row]
    return {row["title"]: 0.3 * (row["compared"]["partitions"] - 1) for row in rows}


def _memory_of_several(found: dict[str, Any], arm: str) -> Figures:
    key = "peak_reserved_bytes"
    return {
        mode: each["arms"][arm][key] / each["arms"]["default"][key]
        for mode, each in found["modes"].items()
        if each["arms"].get(arm, {}).get(key) and each["arms"].get("default", {}).get(key)
    }


GOALS = (
    Goal("synchronised step, ms over the limit", "0.15", "bench", 0.15, _over_limit),
    Goal("the same, leanest", "0.15", "bench", 0.15, _over_limit, arm=LEAN),
    Goal("synchronised step, times the limit's", "1.03, an aim", "bench", 1.03, _times_limit),
    Goal("the same, leanest", "1.03, an aim", "bench", 1.03, _times_limit, arm=LEAN),
    Goal("host, forward and backward, ms", "1.2", "bench", 1.2, _host),
    Goal("the same, leanest", "1.2", "bench", 1.2, _host, arm=LEAN),
    Goal("Llama compiled layer by layer, ms a step", "7.0", "bench", 7.0, _regional),
    Goal("the same, leanest", "7.0", "bench", 7.0, _regional, arm=LEAN),
    Goal("step with eager partitions, ms", "10, an aim", "bench", 10.0, _with_eager_partitions),
    Goal(
        "step with eager partitions, times its pieces alone",
        "1.15",
        "bench",
        1.15,
        _of_pieces,
        at_least=1.0,
        why_not_less="the pieces took longer alone",
    ),
    Goal("one layer, inference, us", "35", "overhead", 35, _call("inference", 1), 0),
    Goal("100 layers, inference, us", "110", "overhead", 110, _call("inference", 100), 0),
    Goal("100 layers, training, us", "2300", "overhead", 2300, _call("training", 100), 0),
    Goal("the same, one thread", "2300", "overhead", 2300, _call(ONE_THREAD, 100), 0),
    Goal(
        'training, `parameter_grads="direct"`',
        "1200",
        "overhead",
        1200,
        _call("training", 100),
        0,
        DIRECT,
    ),
    Goal("the same, one thread", "1200", "overhead", 1200, _call(ONE_THREAD, 100), 0, DIRECT),
    Goal("peak reserved, times default's", "1.03", "memory", 1.03, _memory),
    Goal("the same, mean of all models", "1.00, an aim", "memory", 1.0, _mean_memory, 3),
    Goal("on several GPUs, times default's", "1.02", "dist-bench", 1.02, _memory_of_several),
    Goal(
        "first steps, s more than default's",
        "2, and 0.3 a further piece",
        "start",
        2.0,
        _start("extra_cold_s"),
        allowance=_for_further_pieces,
        names_all=True,
    ),
    Goal(
        "second process, first step, times default's",
        "1.3",
        "start",
        1.3,
        _start("first_warm_ratio"),
        names_all=True,
    ),
    Goal("a layer graphed by hand, times torch's host time", "1.0", "graphed", 1.0, _graphed),
)


def _shown(figures: Figures, digits: int) -> str:
    values = list(figures.values())
    ends = (min(values), max(values)) if values else ()
    return " to ".join(dict.fromkeys(f"{value:.{digits}f}" for value in ends)) or "-"


def _verdict(goal: Goal, found: dict[str, Any], figures: Figures) -> list[str]:
    """Whether the goal is reached."""
    more = goal.allowance(found)
    bounds = {name: goal.at_most + more.get(name, 0.0) for name in figures}
    missed = {name: value for name, value in figures.items() if value > bounds[name]}
    if missed and len(missed) < len(figures):
        names = (f"{short(name)} ({_above(value, bounds[name])})" for name, value in missed.items())
        return [f"not with {', '.join(names)}"]
    return ["not reached" if missed else "reached"] if figures else []


def _above(value: float, bound: float) -> str:
    """A figure with as many digits as show that it is above what is allowed."""
    return number(value) if round(value, 2) > bound else number(value, 3)


def _no_figures(goal: Goal, void: list[str], figures: Figures) -> list[str]:
    """Of which models there is no figure, and why; their names where there are others."""
    if not void:
        return []
    names = f" of {', '.join(map(short, void))}" if figures else ""
    return [f"no figure{names}: {goal.why_not_less}"]


def _who_differs(found: dict[str, Any], name: str, arm: str) -> str:
    """Why a figure of a model is none: its own losses differ, or those of what it is measured by."""
    arms = dict(_models(found)).get(name, {}) if isinstance(found.get("results"), list) else {}
    wrong = [each for each in arms if each not in sound_arms(arms)]
    if arm in wrong or not wrong:
        return "losses differ"
    return f"losses of {', '.join(wrong)} differ"


def table(results: Results) -> str:
    """A row for each goal that there are figures of."""
    names = ["", "goal, at most", "cgpass", "reduce-overhead, same run", ""]
    rows = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for goal in GOALS:
        found = results.get(goal.part)
        measured = goal.figures(found, goal.arm) if found else {}
        if not found or not measured:
            continue
        sound = without_differing(found)
        known = goal.figures(sound, goal.arm)
        void = [name for name, value in known.items() if value < goal.at_least]
        ours = {name: value for name, value in known.items() if name not in void}
        theirs = goal.figures(sound, "reduce-overhead") if goal.arm == "cgpass" else {}
        theirs = {name: value for name, value in theirs.items() if name not in void}
        said = [*_verdict(goal, sound, ours), *_no_figures(goal, void, ours)]
        if goal.names_all and ours:
            said.append(f"measured with {', '.join(map(short, ours))}")
        said += [
            f"{short(name)} ({_who_differs(found, name, goal.arm)})"
            for name in measured
            if name not in known
        ]
        cells = [goal.what, goal.goal, _shown(ours, goal.digits), _shown(theirs, goal.digits)]
        rows.append("| " + " | ".join([*cells, "; ".join(said)]) + " |")
    return "\n".join(rows)


def in_a_loop(bench: dict[str, Any]) -> str:
    """How near steps come to the limit's where the host does not wait."""
    ratios = []
    for _, arms in _models(without_differing(bench)):
        ours, limit = (median(arms.get(name, {}), "loop_ms") for name in ("cgpass", "limit"))
        if ours is not None and limit is not None:
            ratios.append(ours / limit)
    if not ratios:
        return ""
    return (
        "What a synchronised step takes over the limit is time in which the device waits for the host: before the first "
        "graph, between the two, and after the second. Where steps follow each other without a wait they take "
        f"{span(ratios)} times the limit's."
    )
