"""The arms of the benchmark: ways to run the same training step, or the same call without gradients.

Every arm has its own copy of the model and its own fused AdamW.
"""

import contextlib
import copy
import importlib
import operator
import time
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

import torch

from benchlib.models import Batch, Workload

KNOWN = {
    "eager": "no compilation",
    "default": "torch.compile",
    "reduce-overhead": "torch.compile with mode='reduce-overhead'",
    "cgpass": "torch.compile with backend='cgpass'",
    "cgpass-step": "cgpass.train_step, the optimizer part of the graph",
    "graphed": "cgpass.make_graphed_callables",
    "torch-graphed": "torch.cuda.make_graphed_callables",
    "limit": "one graph of default's forward and backward, captured by hand; nothing is checked or copied",
    "limit-step": "the same of default's kernels, with the optimizer",
}
USUAL = ("default", "reduce-overhead", "cgpass", "limit")
NEEDS_CUDA = {"reduce-overhead", "torch-graphed", "limit", "limit-step"}
BASELINE = "@baseline"


def parse(name: str) -> tuple[str, dict[str, Any]]:
    """Split "cgpass:rng=paired" into the arm and its options."""
    base, *pairs = name.removesuffix(BASELINE).split(":")
    if base not in KNOWN:
        raise ArgumentTypeError(f"unknown arm {base!r}; known: {', '.join(KNOWN)}")
    if pairs and not is_ours(base):
        raise ArgumentTypeError(f"{base!r} takes no options; arms of cgpass do")
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ArgumentTypeError(f"{pair!r} in {name!r} is no option=value")
        options[key] = int(value) if value.isdigit() else value
    return base, options


def is_ours(name: str) -> bool:
    """Return whether an arm is cgpass, of this checkout, in any setting."""
    return name.split(":")[0] in ("cgpass", "cgpass-step", "graphed") and BASELINE not in name


def wait_for_native_code() -> None:
    """Wait for what cgpass compiles once a machine, by the names that this checkout or an older one has for it."""
    for module, name in (("native", "loader.wait"), ("fast", "wait"), ("node", "wait")):
        with contextlib.suppress(ImportError, AttributeError):
            wait = operator.attrgetter(name)(importlib.import_module(f"cgpass.runtime.{module}"))
            wait()


class Arm:
    """A copy of the model, its optimizer, and one way to run a step."""

    caches_casts = True

    def __init__(self, name: str, workload: Workload, *, plain: bool = False) -> None:
        self.base, self.options = parse(name)
        self.name, self.workload, self.plain = name, workload, plain
        module: Any = copy.deepcopy(workload.master).to(workload.device)
        self.module = module.train(not workload.inference)
        self._call: Callable[..., torch.Tensor] = self.module
        self.started = time.perf_counter()
        self._compile()
        self.optimizer = self._new_optimizer()

    def _compile(self) -> None:
        spec = self.workload.spec
        if self.base == "eager":
            return
        settings: dict[str, Any] = {}
        if self.base == "cgpass":
            cgpass = importlib.import_module("cgpass").cgpass
            settings = {"backend": cgpass, "options": self._our_options()}
        elif self.base == "reduce-overhead":
            settings = {"mode": self.base}
        elif self.workload.device.type == "cpu":
            settings = {"backend": "aot_eager"}  # kernels for the CPU are not what is measured
        if spec.regions is not None:
            for region in spec.regions(self.module):
                region.compile(**settings)
        else:
            self._call = torch.compile(self.module, **settings)

    def _our_options(self) -> dict[str, Any]:
        """Return the options of a compiled arm of cgpass; `plain` is its kernels without graphs.

        On CPU the simulated driver runs aten kernels.
        """
        is_simulated = self.workload.device.type == "cpu"
        here = {"compiler": "eager", "driver": "simulated"} if is_simulated else {}
        return here | self.options | ({"driver": "none"} if self.plain else {})

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.module.parameters(), lr=1e-4, fused=True)

    def prepare(self) -> None:
        """Do what must happen once before the first step."""
        if self.base in ("cgpass", "cgpass-step", "graphed"):  # what is compiled in the background
            wait_for_native_code()

    def begin(self) -> None:
        """Start a step: mark it where the arm wants that, and drop the gradients."""
        if self.base == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        if not self.workload.inference:
            self.optimizer.zero_grad(set_to_none=True)

    def run(self, batch: Batch) -> torch.Tensor:
        """Run forward and backward, or the forward alone; return the loss.

        Lifetime: with graphs the loss may lie in a graph's pool; read it before the next step.
        """
        if self.workload.inference:
            with torch.no_grad():
                return self._loss(batch)
        loss = self._loss(batch)
        loss.backward()
        return loss.detach()

    def finish(self) -> None:
        """End a step: run the optimizer."""
        if not self.workload.inference:
            self.optimizer.step()

    def nothing(self) -> None:
        """Do nothing, where `run` does all of it."""

    def step(self, batch: Batch) -> torch.Tensor:
        """Run one whole step; return the loss."""
        self.begin()
        loss = self.run(batch)
        self.finish()
        return loss

    def _restart(self) -> None:
        """Put weights, buffers and optimizer back to where they started, in place."""
        with torch.no_grad():
            start = self.workload.master.state_dict()
            for key, value in self.module.state_dict().items():
                value.copy_(start[key])
            for state in self.optimizer.state.values():
                for value in state.values():
                    value.zero_()

    def _loss(self, batch: Batch) -> torch.Tensor:
        with self._autocast():
            return self._call(**batch)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if not self.workload.spec.autocast:
            return contextlib.nullcontext()
        kind = self.workload.device.type
        return torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=self.caches_casts)


class StepArm(Arm):
    """`cgpass.train_step`: one call is the whole step."""

    def _compile(self) -> None:
        if self.workload.inference or self.workload.spec.regions:
            raise RuntimeError("train_step is for training steps of whole models")

    def prepare(self) -> None:
        super().prepare()
        module, autocast = self.module, self._autocast()

        def loss_fn(**batch: torch.Tensor) -> torch.Tensor:
            with autocast:
                return module(**batch)

        train_step = importlib.import_module("cgpass").train_step
        self._step = train_step(loss_fn, self.optimizer, options=self._our_options())

    def run(self, batch: Batch) -> torch.Tensor:
        return self._step(**batch)

    begin = finish = Arm.nothing


class GraphedArm(Arm):
    """The module recorded by `make_graphed_callables`, ours or torch's, with its batch as the sample."""

    caches_casts = False

    def _compile(self) -> None:
        if self.workload.inference:
            raise RuntimeError("callables are graphed for training")

    def prepare(self) -> None:
        super().prepare()
        sample = tuple(value.clone() for value in self.workload.batches[0].values())
        with self._autocast():
            if self.base == "torch-graphed":
                graphed: Any = torch.cuda.make_graphed_callables(self.module, sample)
            else:
                driver = "simulated" if self.workload.device.type == "cpu" else "auto"
                options = {"driver": "none" if self.plain else driver} | self.options
                make = importlib.import_module("cgpass").make_graphed_callables
                graphed = make(self.module, sample, options=options)
        self._call = lambda **batch: graphed(*batch.values())
        self._restart()


class LimitArm(Arm):
    """The lower bound: one graph, captured by hand.

    Its inputs and gradients are static. `copies_inputs` makes it read the batch it is given, for checking the losses;
    the timed replay reads the memory it was captured with.
    """

    def _compile(self) -> None:
        super()._compile()
        self.copies_inputs = True
        self._static = {key: value.clone() for key, value in self.workload.batches[0].items()}

    def _new_optimizer(self) -> torch.optim.Optimizer:
        if self.base != "limit-step":
            return super()._new_optimizer()
        lr = torch.tensor(1e-4, device=self.workload.device)
        return torch.optim.AdamW(self.module.parameters(), lr=lr, fused=True, capturable=True)

    def prepare(self) -> None:
        """Warm up on a side stream, then capture; raises where the model synchronises with the host."""
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for last in (False, False, False, True):
                torch.cuda.set_sync_debug_mode("error" if last else "default")
                try:  # fail here rather than inside a capture, which would harm the process' generators
                    super().begin()
                    self._body()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                side.synchronize()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        super().begin()
        # cuBLAS' workspace must be captured, too: who clears the workspaces later (Inductor's graphs and cgpass
        # do, for every recording) would free it under this graph.
        torch._C._cuda_clearCublasWorkspaces()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            self._result = self._body()
        self._graph = graph
        self._restart()
        torch.cuda.synchronize()

    def _body(self) -> torch.Tensor:
        result = super().run(self._static)
        if self.base == "limit-step":
            super().finish()
        return result

    begin = Arm.nothing  # the gradients are static

    def run(self, batch: Batch) -> torch.Tensor:
        """Replay the graph."""
        if self.copies_inputs:
            for key, value in batch.items():
                self._static[key].copy_(value)
        self._graph.replay()
        return self._result

    def finish(self) -> None:
        if self.base != "limit-step":
            super().finish()


def make(name: str, workload: Workload, *, plain: bool = False) -> Arm:
    """Return the arm of that name, not yet prepared."""
    base = parse(name)[0]
    if base in NEEDS_CUDA and workload.device.type != "cuda":
        raise RuntimeError(f"{base} needs a CUDA device")
    kinds = {"cgpass-step": StepArm, "graphed": GraphedArm, "torch-graphed": GraphedArm}
    kind = LimitArm if base.startswith("limit") else kinds.get(base, Arm)
    return kind(name, workload, plain=plain)
