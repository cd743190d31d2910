"""Results of benchmarks, as their scripts write them."""

MACHINE = "h200-torch2.11"
META = {
    "torch": "2.11.0+cu130",
    "gpu": "NVIDIA H200",
    "driver": "580",
    "commit": "1234567890abcdef",
    "command": "python /root/checkout/scripts/bench.py --budget 510 --out /root/out/bench.json",
    "time": "2026-01-02 03:04:05",
    "seconds": 10.0,
}


def model(name, ms, title=None, **more):
    arms = {arm: {"step_ms": {"median": value}} for arm, value in ms.items()}
    if "cgpass" in arms:
        arms["cgpass"]["check"] = {"equal": True, "deterministic": False}
    return {"model": name, "title": title or f"{name}, B2", "arms": arms} | more


def bench(*models, **meta):
    return {"kind": "time", "meta": META | meta, "results": list(models)}


def overhead(**meta):
    us = {"default": 90.0, "reduce-overhead": 40.0, "cgpass": 30.0, "cgpass-direct": 20.4}
    rows = [
        {"layers": layers, "mode": mode, "us": us, "stages": {"cgpass": {"guards": 5.0}}}
        for layers in (1, 100)
        for mode in ("inference", "training")
    ]
    return {"kind": "overhead", "meta": META | meta, "rows": rows}


STEPS = {"default": 8.0, "reduce-overhead": 4.0, "cgpass": 3.0, "limit": 2.0}
