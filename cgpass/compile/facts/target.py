"""Says on which device a graph is captured, or why nowhere."""

from dataclasses import dataclass

import torch
from torch import fx

from cgpass.compile.facts import values
from cgpass.compile.facts.op_tables import QUANTISING


@dataclass(frozen=True)
class Target:
    """The device on which a graph's partitions are captured, or why they are not."""

    device: torch.device
    records: bool
    skip: str | None = None
    """The reason that nothing of it can be captured, if so, empty if it has no tensors; `device` then means nothing."""

    @property
    def driver(self) -> str | None:
        """Return the driver that records it there, "cuda" or "simulated"; None if none does."""
        if not self.records:
            return None
        return "cuda" if self.device.type == "cuda" else "simulated"


def _skipped(why: str) -> Target:
    return Target(torch.device("cpu"), records=False, skip=why)


def find_target(gm: fx.GraphModule, driver: str) -> Target:
    """Choose the device that a graph with fake tensors in `meta["val"]` is captured on."""
    found = devices(gm)
    cuda = sorted((d for d in found if d.type == "cuda"), key=str)
    others = sorted({d.type for d in found} - {"cuda", "cpu", "meta"})
    if others:
        return _skipped(f"it uses a device that cgpass does not know: {', '.join(others)}")
    if len(cuda) > 1:
        return _skipped(f"it uses several devices: {', '.join(map(str, cuda))}")
    if not found:
        return _skipped("")
    if all(d.type == "meta" for d in found):
        return _skipped("its tensors are on meta and hold no values")
    if any(map(_quantises, gm.graph.nodes)):
        return _skipped("it makes quantised tensors")
    if driver == "none":
        return Target(cuda[0] if cuda else torch.device("cpu"), records=False)
    if driver == "simulated":
        if cuda:
            return _skipped('driver="simulated" records on CPU, but it uses CUDA')
        return Target(torch.device("cpu"), records=True)
    if not cuda:
        return _skipped(
            'it uses no CUDA device; move it to CUDA, or simulate graphs on the CPU with driver="simulated"'
        )
    return Target(cuda[0], records=True)


def _quantises(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.name in QUANTISING


def devices(gm: fx.GraphModule) -> set[torch.device]:
    """Devices of every tensor in a graph with fake tensors in `meta["val"]`."""
    return {tensor.device for node in gm.graph.nodes for tensor in values.tensors(node)}
