"""Reports made by hand."""

from cgpass.report.model import (
    CopiedInput,
    FunctionReport,
    GraphReport,
    PartitionReport,
    ReasonReport,
    RecordingReport,
    Report,
)


def sample(text="", **changes):
    """A report with a bit of everything; `text` is added to all that users and torch name."""
    reason = ReasonReport(
        code="host_read",
        op=f"aten._local_scalar_dense.default{text}",
        detail=f"the host reads a tensor's data and waits for the device{text}",
        fix=f"keep the value on the device (torch.where, tensor arithmetic) instead of item(){text}",
        line=f"model.py:41 in forward: scale = x.max().item(){text}",
    )
    chosen = ReasonReport(
        code="too_small",
        op="aten.cos.default",
        detail="its partition would hold 1 operator that does work on the device (views don't count), "
        "min_partition_ops is 4",
        fix="set min_partition_ops to 1 to capture it",
        count=2,
    )
    moved = f"weight{text} (float32[8, 8]) moved from 0x7f00 to 0x7f80"
    captured = PartitionReport(
        name=f"captured_0{text}",
        captured=True,
        num_ops=40,
        kernels=12,
        kernels_in_graphs=12,
        copied_inputs=(
            CopiedInput(name=f"x{text}", num_bytes=3 << 20, line=f"model.py:40 in forward{text}"),
            CopiedInput(name="mask", num_bytes=100),
        ),
        static_inputs=24,
        recordings=(
            RecordingReport(
                cause="first",
                detail="the first call after the warm-up",
                copied_bytes=100,
                pool=0,
                record_ms=8.5,
                instantiate_ms=1.5,
                warm_up_ms=20.0,
            ),
            RecordingReport(
                cause="moved", detail=moved, copied_bytes=3 << 20, pool=1, record_ms=7.25
            ),
        ),
        live_recordings=2,
        counts={"calls": 30, "replays": 26, "plain_calls": 3, "recordings": 5, "rescues": 2},
        output_bytes=5 << 20,
        ms=0.75,
        plain_ms=3.5,
    )
    eager = PartitionReport(
        name=f"eager_1{text}",
        captured=False,
        num_ops=3,
        kernels=4,
        kernels_in_graphs=0,
        reasons=(reason, chosen),
        ms=0.25,
        plain_ms=0.25,
    )
    forward = GraphReport(
        number=0,
        direction="forward",
        calls=30,
        calls_per_run=12.0,
        num_ops=43,
        partitions=(captured, eager),
        ms=1.0,
        plain_ms=3.75,
    )
    plain = GraphReport(
        number=1,
        direction="backward",
        calls=30,
        calls_per_run=1.0,
        num_ops=2,
        skip=f"it uses several devices: cuda:0, cuda:1{text}",
        kernels=2,
    )
    function = FunctionReport(
        number=0,
        place=f"model.py:38 in forward{text}",
        graphs=(forward, plain),
        graph_break=ReasonReport(
            code="graph_break", op="", detail=f"print{text}", fix="leave it out", line=None
        ),
        driver="cuda",
        pool_bytes=96 << 20,
    )
    given = {
        "cgpass": "0.1.0",
        "torch": "2.11.0+cu130",
        "device": f"NVIDIA H200{text}",
        "functions": (function,),
        "runs": 5,
        "ms": 1.5,
        "plain_ms": 4.5,
        "gpu_share": 0.9,
    }
    return Report(**(given | changes))
