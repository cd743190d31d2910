"""Reports of a few calls, and those made by hand."""

from dataclasses import replace

import cgpass
from cgpass.report.model import CopiedInput, GraphReport, PartitionReport
from cgpass.report.report import Report
from cgpass.telemetry.reason import Reason
from cgpass.telemetry.summaries import RecordingNote

READ = "keep the value on the device (torch.where, tensor arithmetic) instead of item()"


def watched(call, *inputs):
    """The report of a block that makes a call with each input."""
    with cgpass.explain() as report:
        for each in inputs:
            call(each)
    return report


def joined(text):
    """Without line breaks: names and lines may be wrapped."""
    return " ".join(str(text).split())


def of_parts(*changes):
    """A report of one graph, whose partitions are the sample's first one but for some changes."""
    graph = sample().graphs[0]
    parts = tuple(replace(graph.partitions[0], **each) for each in changes)
    return sample(graphs=(replace(graph, partitions=parts),))


def sample(text="", **changes):
    """A report with a bit of everything; `text` is added to all that users and torch name."""
    reason = Reason(
        "host_read",
        f"aten._local_scalar_dense.default{text}",
        f"the host reads a tensor's data and waits for the device{text}",
        f"{READ}{text}",
        f"model.py:41 in forward: scale = x.max().item(){text}",
    )
    small = "its partition would hold 1 operator that does work on the device"
    chosen = Reason("too_small", "aten.cos.default", small, "set min_partition_ops to 1", count=2)
    moved = f"weight{text} (float32[8, 8]) moved from 0x7f00 to 0x7f80"
    first = RecordingNote("first", "the first call after the warm-up", 100, 8.5)
    counts = {"calls": 30, "replays": 26, "recordings": 2, "rescues": 2, "warmups": 1}
    counts["copied_bytes"] = 26 * (100 + (3 << 20))
    captured = PartitionReport(
        name="captured_0",
        captured=True,
        num_ops=40,
        calls=29,
        counts=counts,
        recordings=(first, RecordingNote("moved", moved, 3 << 20, 7.25)),
        copied_inputs=(
            CopiedInput(name=f"x{text}", num_bytes=3 << 20, line=f"model.py:40 in forward{text}"),
            CopiedInput(name="mask", num_bytes=100),
        ),
        static_inputs=24,
        output_bytes=5 << 20,
        device_ms=0.75,
    )
    eager = PartitionReport(
        name="eager_1",
        captured=False,
        num_ops=3,
        reasons=(reason, chosen),
        calls=29,
        device_ms=0.25,
    )
    forward = GraphReport(
        graph_break=Reason("graph_break", "", "graph break", "remove it", "model.py:50 in f"),
        direction="forward",
        partitions=(captured, eager),
        num_ops=43,
        place=f"model.py:38 in forward{text}",
        function=0,
        driver="cuda",
        calls=30,
    )
    plain = GraphReport(
        direction="backward",
        partitions=(),
        skip=f"it uses several devices: cuda:0, cuda:1{text}; use one",
        num_ops=2,
        place=f"model.py:38 in forward{text}",
        function=0,
        calls=30,
    )
    given = {
        "cgpass": "0.1.0",
        "torch": "2.11.0+cu130",
        "device": f"NVIDIA H200{text}",
        "made": "2026-01-01 12:00",
        "command": f"train.py{text}",
        "model": f"model.py:38 in forward{text}",
        "graphs": (forward, plain),
        "graph_breaks": (
            Reason("graph_break", "", f"graph break: print{text}", "remove it", "model.py:50 in f"),
        ),
        "left_to_eager": (
            Reason(
                "recompile_limit",
                "",
                "8 times",
                "use a tensor",
                "model.py:60 in g",
                "model.py:59 in g",
            ),
        ),
        "counters": {
            "recordings": 2,
            "replays": 26,
            "warmups": 1,
            "copied_bytes": 78 << 20,
            "plain_calls": 3,
        },
        "pool_bytes": 96 << 20,
        "graphs_ms": 0.75,
        "device_ms": 1.25,
        "ms": 1.5,
        "plain_ms": 4.5,
    }
    return Report(**(given | changes))
