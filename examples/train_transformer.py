"""Train a small GPT-2 with backend="cgpass" and show what was captured.

The model is built from its configuration and the text lies beside this file: nothing is downloaded.
The same training is done twice, with graphs and without (driver="none"), and must give the same
losses and parameters bit for bit. On CUDA the time of a step is compared with torch.compile's.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # repeatable matrix products

if not find_spec("transformers"):
    print("examples/train_transformer.py needs transformers: pip install -e '.[demo]'")
    sys.exit()

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import cgpass

DATA = Path(__file__).parent / "data"
SEED = 0


@dataclass(frozen=True)
class Setting:
    """What is trained, and how often."""

    device: torch.device
    steps: int
    batch: int
    length: int
    width: int
    layers: int
    dropout: float


@dataclass(frozen=True)
class Trained:
    """What one training left behind."""

    losses: list[float]
    parameters: list[torch.Tensor]
    step_ms: list[float]


def read_tokens() -> torch.Tensor:
    """Return the bytes of the text files in order, (bytes,) int64: one byte is one token."""
    text = b"\n\n".join(path.read_bytes() for path in sorted(DATA.glob("*.txt")))
    return torch.tensor(list(text), dtype=torch.int64)


def make_batches(setting: Setting) -> list[torch.Tensor]:
    """Return one (batch, length) tensor of tokens per step, at random places of the text."""
    tokens = read_tokens()
    generator = torch.Generator().manual_seed(SEED)
    batches = []
    for _ in range(setting.steps):
        starts = torch.randint(len(tokens) - setting.length, (setting.batch,), generator=generator)
        rows = [tokens[start : start + setting.length] for start in starts.tolist()]
        batches.append(torch.stack(rows).to(setting.device))
    return batches


def make_model(setting: Setting) -> GPT2LMHeadModel:
    """Build the model from its configuration, always with the same weights."""
    torch.manual_seed(SEED)
    config = GPT2Config(
        vocab_size=256,
        n_positions=setting.length,
        n_embd=setting.width,
        n_layer=setting.layers,
        n_head=4,
        resid_pdrop=setting.dropout,
        embd_pdrop=setting.dropout,
        attn_pdrop=setting.dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # left to be guessed, it logs a warning that breaks the graph
    return model.to(setting.device).train()


def synchronize(device: torch.device) -> None:
    """Wait for the device, where there is something to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def train(setting: Setting, title: str, **how) -> Trained:
    """Train from the same start on the same text; `how` goes to torch.compile."""
    torch.compiler.reset()
    batches = make_batches(setting)
    model = make_model(setting)
    compiled = torch.compile(model, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(SEED)
    losses, step_ms = [], []
    print(f"\n{title}")
    for step, batch in enumerate(batches):
        synchronize(setting.device)
        start = time.perf_counter()
        loss = compiled(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(setting.device)
        step_ms.append((time.perf_counter() - start) * 1e3)
        losses.append(loss.item())
        if step in (0, 1) or step % 5 == 4 or step == setting.steps - 1:
            print(f"  step {step + 1:3d}  loss {losses[-1]:.4f}  {step_ms[-1]:9.1f} ms", flush=True)
    return Trained(losses, [p.detach().clone() for p in model.parameters()], step_ms)


def difference(first: Trained, second: Trained) -> str | None:
    """Say where two trainings part, or None if they are the same bit for bit."""
    for step, (a, b) in enumerate(zip(first.losses, second.losses, strict=True)):
        if a != b:
            return f"losses part at step {step + 1}: {a!r} with graphs, {b!r} without"
    for index, (a, b) in enumerate(zip(first.parameters, second.parameters, strict=True)):
        if not torch.equal(a, b):
            return f"parameter {index} differs by up to {(a - b).abs().max().item():.3g}"
    return None


def compiler_trouble() -> str | None:
    """Say why Inductor could not build its kernels here, or None if it can."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler ({compiler}) was found"
    include = sysconfig.get_path("include")
    done = subprocess.run(
        [compiler, "-x", "c++", "-fsyntax-only", f"-I{include}", "-"],
        input="#include <Python.h>\n#include <vector>\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return f"{compiler} can't build against {include}: {done.stderr.strip().splitlines()[0]}"
    return None


def choose_compiler(wanted: str) -> str:
    """Return "inductor" where it works, else "eager", and say so."""
    if wanted != "auto":
        return wanted
    trouble = compiler_trouble()
    if trouble is None:
        return "inductor"
    print(f'Inductor needs a C++ compiler: {trouble}. Using compiler="eager" instead.')
    return "eager"


def choose_driver(wanted: str, device: torch.device) -> str:
    """Return the driver: CUDA's own on CUDA, else the simulated one."""
    if wanted != "auto":
        return wanted
    return "cuda" if device.type == "cuda" else "simulated"


def report_captured(before: dict[str, int], graphs: str) -> int:
    """Print what the run since `before` captured, what not and why; return its replays."""
    after = cgpass.counters()
    print("\nWhat was captured, what was not and why:")
    print("\n".join(f"  {line}" for line in graphs.splitlines()))
    for name, total in after.items():
        if count := total - before.get(name, 0):
            print(f"  {name:20} {count:,}")
    return after["replays"] - before["replays"]


def compare_step_times(setting: Setting, options: dict[str, str], compiler: str) -> None:
    """Time a step with and without graphs, repeatable operators not asked for."""
    graphs = train(setting, 'Timing backend="cgpass"', backend="cgpass", options=options)
    if compiler == "inductor":
        plain = train(setting, "Timing plain torch.compile")
    else:
        plain = train(setting, 'Timing backend="aot_eager"', backend="aot_eager")
    half = setting.steps // 2
    with_ms, without_ms = (statistics.median(run.step_ms[half:]) for run in (graphs, plain))
    print(
        f"\nMedian step of the last {setting.steps - half}: {with_ms:.2f} ms with graphs, "
        f"{without_ms:.2f} ms without: {without_ms / with_ms:.2f} times as fast."
    )


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30, help="training steps (default: 30)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--compiler",
        choices=("auto", "inductor", "eager"),
        default="auto",
        help="what makes the kernels (default: inductor where a C++ compiler is found)",
    )
    parser.add_argument(
        "--driver",
        choices=("auto", "cuda", "simulated", "none"),
        default="auto",
        help="what records and replays (default: cuda on CUDA, else simulated)",
    )
    parser.add_argument("--dropout", type=float, default=0.1, help="(default: 0.1)")
    parser.add_argument("--layers", type=int, default=2, help="(default: 2)")
    parser.add_argument("--width", type=int, default=64, help="a multiple of 4 (default: 64)")
    parsed = parser.parse_args(arguments)
    if parsed.steps < 2:
        parser.error("--steps must be at least 2: a warm-up and a recording")
    return parsed


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(found if args.device == "auto" else args.device)
    setting = Setting(device, args.steps, 4, 64, args.width, args.layers, args.dropout)
    compiler = choose_compiler(args.compiler)
    options = {"compiler": compiler, "driver": choose_driver(args.driver, device)}
    model = make_model(setting)
    print(
        f"GPT-2, {args.layers} layers, {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"dropout {args.dropout}, on {device}; {len(read_tokens()):,} tokens of text; "
        f"torch {torch.__version__}; options {options}"
    )

    torch.use_deterministic_algorithms(mode=True)
    before = cgpass.counters()
    graphs = train(setting, f"With graphs: {options}", backend="cgpass", options=options)
    replays = report_captured(before, cgpass.summary())
    plainly = options | {"driver": "none"}
    plain = train(setting, f"Without graphs: {plainly}", backend="cgpass", options=plainly)
    torch.use_deterministic_algorithms(mode=False)

    if options["driver"] == "simulated":
        print(
            "\nGraphs were simulated on CPU: that shows what is captured, and is no measure of speed."
        )
    if device.type == "cuda":
        compare_step_times(setting, options, compiler)
    trouble = difference(graphs, plain)
    if trouble is None and options["driver"] != "none" and not replays:
        trouble = "nothing was replayed"
    if trouble:
        print(f"\nFAILED: {trouble}")
        return 1
    print(
        f"\nOK: {args.steps} losses and all parameters are bitwise those of the run without graphs."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
