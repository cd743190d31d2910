"""The arms of the benchmark: ways to run the same forward and backward.

Every arm has its own copy of the model and its own fused AdamW, which runs outside any graph.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import time
from typing import TYPE_CHECKING, Any

import torch

import cgpass
from benchlib.report import LEAN
from cgpass.runtime import native

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchlib.models import Batch, Workload

INFERENCE = ("default", "reduce-overhead", "cgpass")
NAMES = ("eager", "default", "reduce-overhead", "cudagraphs", "cgpass", LEAN, "limit")
REFERENCE = "cgpass-none"
KNOWN = (*NAMES, "cgpass-eager", "cgpass-direct", REFERENCE)


def backend() -> Any:
    """The backend's name where its entry point is installed, else the function itself."""
    found = importlib.metadata.entry_points(group="torch_dynamo_backends", name="cgpass")
    return "cgpass" if found else cgpass.cgpass


def check_name(name: str) -> None:
    """Refuses an arm that doesn't exist.

    Raises:
        ValueError: The arm isn't known.
    """
    if name not in KNOWN:
        raise ValueError(f"unknown arm {name!r}; known: {', '.join(KNOWN)}")


def compile_settings(name: str, device: torch.device) -> dict[str, Any] | None:
    """Keyword arguments for torch.compile, None for eager."""
    check_name(name)
    if name.startswith("cgpass"):
        options = {"driver": "auto" if device.type == "cuda" else "simulated"}
        if name == "cgpass-eager":
            options["compiler"] = "eager"
        if name in ("cgpass-direct", LEAN):
            options["parameter_grads"] = "direct"
        if name == REFERENCE:
            options["driver"] = "none"
        return {"backend": backend(), "options": options}
    settings: dict[str, dict[str, Any] | None] = {
        "eager": None,
        "reduce-overhead": {"mode": "reduce-overhead"},
        "cudagraphs": {"backend": "cudagraphs"},
    }
    return settings.get(name, {})


class Arm:
    """A copy of the model, its optimizer, and one way to run forward and backward.

    Attributes:
        name: The arm's name.
        module: The model on the device.
        optimizer: Fused AdamW over the model's parameters.
        compile_s: Seconds that `torch.compile` took, with what it imports; nothing is traced yet.
    """

    def __init__(self, name: str, workload: Workload) -> None:
        settings = compile_settings(name, workload.device)
        self.name = name
        self.workload = workload
        self.module = workload.instance(name.replace("-", "_"))
        self.optimizer = self._new_optimizer()
        self._call: Callable[..., torch.Tensor] = self.module
        start = time.perf_counter()
        if settings is not None and workload.spec.regions is not None:
            for region in workload.spec.regions(self.module):
                region.compile(**settings)
        elif settings is not None:
            self._call = torch.compile(self.module, **settings)
        self.compile_s = time.perf_counter() - start
        self._marks_steps = name in ("reduce-overhead", "cudagraphs")

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.module.parameters(), lr=1e-4, fused=True)

    def prepare(self) -> None:
        """Does what must happen once before the first step: waits for what cgpass compiles in the background."""
        if self.name.startswith("cgpass"):
            native.loader.wait()

    def begin(self) -> None:
        """Starts a step: marks it where the arm wants that, and drops the gradients."""
        if self._marks_steps:
            torch.compiler.cudagraph_mark_step_begin()
        self.optimizer.zero_grad(set_to_none=True)

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Runs forward and backward; returns the loss.

        Lifetime: with graphs the loss may lie in a graph's pool; read it before the next step.
        """
        with self._autocast():
            loss = self._call(**batch)
        with self._threads():
            loss.backward()
        return loss.detach()

    def finish(self) -> None:
        """Ends a step: the optimizer."""
        self.optimizer.step()

    def step(self, batch: Batch) -> torch.Tensor:
        """One whole training step; returns the loss."""
        self.begin()
        loss = self.forward_backward(batch)
        self.finish()
        return loss

    def restart(self) -> None:
        """Puts the weights, buffers and optimizer back to where they started."""
        with torch.no_grad():
            start = self.workload.master.state_dict()
            for key, value in self.module.state_dict().items():
                value.copy_(start[key])
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer = self._new_optimizer()

    def _threads(self) -> contextlib.AbstractContextManager[Any]:
        if self.name == LEAN:
            return torch.autograd.set_multithreading_enabled(False)
        return contextlib.nullcontext()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if not self.workload.spec.autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.workload.device.type, dtype=torch.bfloat16)


class InferenceArm(Arm):
    """Calls of the model in eval mode that nobody wants gradients of: forward alone."""

    def __init__(self, name: str, workload: Workload) -> None:
        super().__init__(name, workload)
        self.module.eval()

    def begin(self) -> None:
        """Marks a step where the arm wants that."""
        if self._marks_steps:
            torch.compiler.cudagraph_mark_step_begin()

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Runs the forward; returns the loss."""
        with torch.no_grad(), self._autocast():
            return self._call(**batch)

    def finish(self) -> None:
        """There is nothing to be updated."""

    def restart(self) -> None:
        """Nothing has changed."""


class LimitArm(Arm):
    """The lower bound: one graph, captured by hand, of forward and backward of Inductor's kernels.

    Its inputs and gradients are static. `copies_inputs` makes it read the batch it is given, for
    checking the losses; the timed replay reads the memory it was captured with.
    """

    def __init__(self, name: str, workload: Workload) -> None:
        super().__init__(name, workload)
        self.copies_inputs = True
        self._static = {key: value.clone() for key, value in workload.batches[0].items()}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss: torch.Tensor | None = None

    def prepare(self) -> None:
        """Warms up on a side stream, then captures.

        Raises:
            RuntimeError: There is no CUDA device, or the model synchronises with the host.
        """
        if self.workload.device.type != "cuda":
            raise RuntimeError("the limit needs a CUDA device")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._drop_and_run()
            side.synchronize()
            self._run_without_sync()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.optimizer.zero_grad(set_to_none=True)
        # cuBLAS' workspace must be captured too: whoever clears the workspaces later (Inductor's graphs and
        # cgpass do, for every recording) would free it under this graph.
        torch._C._cuda_clearCublasWorkspaces()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            self._loss = super().forward_backward(self._static)
        self._graph = graph
        torch.cuda.synchronize()

    def begin(self) -> None:
        """The gradients are static: nothing to drop."""

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Replays the graph."""
        if self.copies_inputs:
            for key, value in batch.items():
                self._static[key].copy_(value)
        self._graph.replay()
        return self._loss

    def restart(self) -> None:
        """Resets weights and optimizer state, keeping the gradients where the graph writes them."""
        grads = [parameter.grad for parameter in self.module.parameters()]
        super().restart()
        for parameter, grad in zip(self.module.parameters(), grads, strict=True):
            parameter.grad = grad

    def _drop_and_run(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        super().forward_backward(self._static)

    def _run_without_sync(self) -> None:
        """Fails here rather than inside a capture, which would harm the process's generators."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            self._drop_and_run()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def make(name: str, workload: Workload) -> Arm:
    """The arm of that name, not yet prepared."""
    if workload.inference:
        return InferenceArm(name, workload)
    return (LimitArm if name == "limit" else Arm)(name, workload)


def repair(device: torch.device) -> None:
    """Makes the process usable after an arm failed, perhaps inside a capture.

    A random op drawn inside a capture that failed leaves the generator believing that it is still
    being captured.
    """
    if device.type != "cuda":
        return
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())
    torch.randn(1, device=device)
    torch.cuda.synchronize()
