"""Host time of a call of a stack of small layers: what torch.compile, cgpass and autograd add to a step.

    python scripts/bench_overhead.py
    python scripts/bench_overhead.py --layers 1,10,100 --json overhead.json --markdown overhead.md
    python scripts/bench_overhead.py --from new.json --compare old.json

A layer has four parameters and width 64: the device has next to nothing to do. Microseconds until a call returns,
medians; the device is waited for between calls, outside of what is timed. All arms take turns in one process.
  inference             a call under torch.no_grad()
  training              gradients set to None, forward to a loss, backward
  training, one thread  the same, the backward in the thread that calls it: without that autograd has a thread of its
                        own per CUDA device
Results of cgpass, and in training all gradients, have to be bitwise those of the same kernels without graphs, and
default's: where those of an arm differ it is marked, and the status is 1.
`--compare` has status 1 where cgpass got worse against reduce-overhead of its own run than in an older result,
or where an arm or a depth of that is not measured now.
For cgpass a second table says where the time goes; the JSON has for how long the device is busy, too. Without CUDA the
simulated driver runs, whose replays are replaced by nothing once it has recorded: what is left is host time too, of
another machine.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from benchlib import arguments, compare, meta, plots, report
from benchlib.measure import kernels_of, synchronize
from benchlib.report import ONE_THREAD
from benchlib.staged import guards, stages
from torch import nn

import cgpass
from cgpass.runtime import native, owner

REFERENCE = "cgpass-none"
"""Not timed: cgpass' kernels without graphs."""
ARMS = ("eager", "default", "reduce-overhead", "cgpass", "cgpass-direct")
Steps = dict[str, Callable[[], None]]
"""What is timed, by the arm's name."""


class Layer(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Layer() for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Arm:
    """A way to call a stack of its own."""

    def __init__(self, name: str, layers: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.name, self.device = name, device
        self.module = Stack(layers).to(device)
        self.parameters = list(self.module.parameters())
        self.x = torch.randn(4, 64, device=device)
        self._marks = name == "reduce-overhead"
        self.call: Callable[..., Any] = self.module
        if name != "eager":
            self.call = torch.compile(self.module, **self._settings())

    def _settings(self) -> dict[str, Any]:
        if self.name == "reduce-overhead":
            return {"mode": "reduce-overhead"}
        if self.name == "default":
            return {} if self.device.type == "cuda" else {"backend": "aot_eager"}
        options: dict[str, Any] = {}
        if self.device.type == "cpu":
            options = {"driver": "simulated", "compiler": "eager"}
        if self.name == REFERENCE:
            options["driver"] = "none"
        if self.name == "cgpass-direct":
            options["parameter_grads"] = "direct"
        return {"backend": cgpass.cgpass, "options": options}

    def inference(self) -> None:
        if self._marks:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            self.call(self.x)

    def training(self) -> None:
        if self._marks:
            torch.compiler.cudagraph_mark_step_begin()
        for parameter in self.parameters:
            parameter.grad = None
        self.call(self.x).backward()

    def values(self, mode: str) -> list[torch.Tensor]:
        """Copies of what one call gives: the loss, and in training each parameter's gradient.

        The input holds other numbers than in the calls that are timed, so that it is not what these left behind.
        """
        if self._marks:
            torch.compiler.cudagraph_mark_step_begin()
        self.x.mul_(2)
        for parameter in self.parameters:
            parameter.grad = None
        with torch.set_grad_enabled(mode != "inference"):
            loss = self.call(self.x)
        if mode != "inference":
            loss.backward()
        self.x.mul_(0.5)
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return [loss.detach().clone(), *(grad.clone() for grad in grads)]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Whether all values are bitwise equal."""
    return len(ours) == len(theirs) and all(
        torch.equal(one.view(torch.int32), other.view(torch.int32))
        for one, other in zip(ours, theirs, strict=True)
    )


def without_graphs(layers: int, mode: str, device: torch.device) -> list[torch.Tensor]:
    """What the same kernels give; Dynamo knows nothing of it afterwards."""
    torch.compiler.reset()
    return Arm(REFERENCE, layers, device).values(mode)


def close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Whether values that other kernels computed are no further apart than rounding makes them."""
    return len(ours) == len(theirs) and all(
        float((one - other).abs().max()) <= 0.01 * float(other.abs().max())
        for one, other in zip(ours, theirs, strict=True)
    )


def differing(arms: dict[str, Arm], mode: str, plain: list[torch.Tensor]) -> list[str]:
    """Arms of cgpass that don't give bitwise what the same kernels do without graphs, or not what default does.

    A stack is one partition each way, so that no kernel of cgpass is another than default's. Of other arms those that give
    something else than these kernels.
    """
    found = {name: arm.values(mode) for name, arm in arms.items()}
    held = [plain, *(values for name, values in found.items() if name == "default")]
    wrong = []
    for name, values in found.items():
        is_ours = name.startswith("cgpass")
        if not (all(same(values, each) for each in held) if is_ours else close(values, plain)):
            wrong.append(name)
    return wrong


def block(step: Callable[[], None], device: torch.device, calls: int) -> list[float]:
    """Microseconds of each of some calls."""
    found = []
    for _ in range(calls):
        synchronize(device)
        start = time.perf_counter()
        step()
        found.append((time.perf_counter() - start) * 1e6)
    return found


def replay_nothing() -> None:
    """For the simulated driver, whose replays run every operator: leave host time alone."""
    for each in list(owner._owners):
        for slot in each._slots:
            for recording in slot.recordings:
                recording.replay = lambda: None


def recorded(layers: int, mode: str, device: torch.device, names: list[str]) -> dict[str, Arm]:
    """All arms, compiled and recorded."""
    torch.compiler.reset()
    arms = {name: Arm(name, layers, device) for name in names}
    for arm in arms.values():
        for _ in range(40):  # past what watches inputs that stay in place
            getattr(arm, mode)()
    return arms


def measure(steps: Steps, layers: int, mode: str, device: torch.device) -> dict[str, Any]:
    """Medians by arm, and stages of cgpass."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    before = cgpass.counters()
    for _ in range(10):
        for name, step in steps.items():
            times[name] += block(step, device, 20)[5:]
    after = cgpass.counters()
    if after["recordings"] != before["recordings"] or after["plain_calls"] != before["plain_calls"]:
        raise RuntimeError(f"not every call was a replay: {before} {after}")
    result: dict[str, Any] = {
        "layers": layers,
        "mode": mode,
        "us": {name: round(statistics.median(found), 1) for name, found in times.items()},
    }
    result["stages"] = {
        name: stages(step, device) for name, step in steps.items() if name.startswith("cgpass")
    }
    return result


def run(layers: list[int], names: list[str], device: torch.device) -> Iterator[dict[str, Any]]:
    """All depths in both modes: what is known after each."""
    native.loader.wait()
    rows: list[dict[str, Any]] = []
    for depth in layers:
        for row in of_depth(depth, names, device):
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            yield result(rows, device)
    for depth in layers:  # last: what is timed in a process that was profiled may take longer
        note_profiled([row for row in rows if row["layers"] == depth], names, device)
    yield result(rows, device)


def result(rows: list[dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """What is written."""
    return {"kind": "overhead", "meta": meta.describe(device.type), "rows": rows}


def note_profiled(rows: list[dict[str, Any]], names: list[str], device: torch.device) -> None:
    """Notes in cgpass' stages what profiles tell: guards, and for how long a call keeps the device busy, in microseconds.

    Args:
        rows: Of one depth.
        names: All arms.
        device: Where they run.
    """
    ours = [name for name in names if name.startswith("cgpass")]
    for mode in ("inference", "training"):
        for name, arm in recorded(rows[0]["layers"], mode, device, ours).items():
            step = getattr(arm, mode)
            found = [kernels_of(step, device) for _ in range(3)] if device.type == "cuda" else []
            for row in rows:
                if not row["mode"].startswith(mode):
                    continue
                noted = row["stages"][name]
                if found:
                    busy_ms = statistics.median(each["gpu_busy_ms"] for each in found)
                    noted["gpu_busy"] = round(1e3 * busy_ms, 1)
                with torch.autograd.set_multithreading_enabled(row["mode"] != ONE_THREAD):
                    noted["guards"] = guards(step, device, until_done=noted["until_done"])


def of_depth(layers: int, names: list[str], device: torch.device) -> Iterator[dict[str, Any]]:
    """One depth in all modes."""
    for mode in ("inference", "training"):
        plain = without_graphs(layers, mode, device)
        arms = recorded(layers, mode, device, names)
        wrong = {"differs": differing(arms, mode, plain)}
        if device.type == "cpu":
            replay_nothing()
        steps = {name: getattr(arm, mode) for name, arm in arms.items()}
        yield measure(steps, layers, mode, device) | wrong
    if device.type == "cuda":  # on CPU it is so anyway
        with torch.autograd.set_multithreading_enabled(False):
            for step in steps.values():
                step()
            wrong = {"differs": differing(arms, mode, plain)}
            row = measure(steps, layers, ONE_THREAD, device) | wrong
        yield row


def save(path: Path | None, text: str) -> None:
    """Writes a file if one was asked for, and the folder that it is in."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layers",
        type=arguments.counts,
        help="numbers of layers, with commas (1,10,100)",
    )
    parser.add_argument(
        "--arms",
        type=arguments.names(ARMS),
        help=f"with commas, of {','.join(ARMS)}; default: all that run here",
    )
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--markdown", type=Path, help="file for the tables")
    parser.add_argument(
        "--plot", type=Path, help="file for lines over layers (.svg; needs matplotlib)"
    )
    compare.add_arguments(parser, ("overhead",))
    options = parser.parse_args(argv)
    compare.check_arguments(parser, options, "overhead")
    plots.check_argument(parser, options.plot, "overhead")
    if options.source:
        data = options.source
        save(options.json, json.dumps(data, indent=1) + "\n")
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        here = [n for n in ARMS if device.type == "cuda" or n != "reduce-overhead"]
        for data in run(options.layers or [1, 10, 100], options.arms or here, device):
            # each time: what is interrupted keeps what it has
            save(options.json, json.dumps(data, indent=1) + "\n")
    text = report.render(data)
    save(options.markdown, text)
    if options.plot:
        plots.draw(options.plot, plots.figures(data))
    print(text, flush=True)
    worse, wrong = compare.against(options, data), list(compare.flags(data))
    for what in wrong:
        print(what, file=sys.stderr)
    return 1 if worse or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
