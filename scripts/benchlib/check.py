"""Summary of a pytest run for scripts/gpu_check.sh.

    python -m benchlib.check --part tests --status 0 --out tests.json report.xml ...

Fails if a test failed, if none ran, or if a test was skipped, or a file left out, for a reason that isn't known here.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import torch

from benchlib import meta

KNOWN_SKIPS = (
    r"needs \d+ CUDA device\(s\), found \d+",
    r"needs \d+ GPUs, found \d+",
    r"expecttest is not installed",
    r"could not import 'expecttest'",
    r"this torch's own split fails",
    r"this torch has no such operator",
    r"Inductor's kernels take no batched tensors",
    r"needs torch >= 2\.1[2-9]",
    r"this torch notes nothing about the kernels of one graph",
    r"could not import 'torch\.cuda\.graph_annotations'",
    r"the second backward is an error",
    r"torch\.compile by itself raises",
)


def is_known(reason: str) -> bool:
    """Whether a skip's reason is one of the known ones."""
    return any(re.search(pattern, reason) for pattern in KNOWN_SKIPS)


def read(path: Path) -> list[dict[str, Any]]:
    """The test cases of a JUnit file."""
    cases = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        found: dict[str, Any] = {
            "name": f"{case.get('classname')}::{case.get('name')}",
            "seconds": round(float(case.get("time") or 0), 2),
            "outcome": "passed",
        }
        properties = {p.get("name"): p.get("value") for p in case.iter("property")}
        if properties:
            found["properties"] = properties
        for outcome in ("failure", "error", "skipped"):
            element = case.find(outcome)
            if element is not None:
                found["outcome"] = outcome
                found["message"] = (element.get("message") or element.text or "")[:1500]
        cases.append(found)
    return cases


def summarise(
    part: str, status: int, cases: list[dict[str, Any]], left_out: list[str]
) -> dict[str, Any]:
    """Counts, and the names that matter."""
    skips: dict[str, list[str]] = {}
    for case in cases:
        if case["outcome"] == "skipped":
            skips.setdefault(case["message"], []).append(case["name"])
    unknown = {reason: names for reason, names in skips.items() if not is_known(reason)}
    for file, _, reason in (each.partition(": ") for each in left_out):
        if not is_known(reason):
            unknown.setdefault(reason, []).append(file)
    failed = [case for case in cases if case["outcome"] in ("failure", "error")]
    passed = sum(case["outcome"] == "passed" for case in cases)
    # Pytest's 5 (nothing collected) leaves it to the number of tests below.
    broken = status not in (0, 1, 5) or (status == 1 and not failed)
    ran = passed > 0 or (part == "dist" and (skips or left_out))
    ok = bool(not failed and not unknown and not broken and ran)
    cuda = torch.cuda.is_available()
    return {
        "part": part,
        "ok": ok,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": meta.commit(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(0) if cuda else None,
        "gpus": torch.cuda.device_count() if cuda else 0,
        "pytest_status": status,
        "passed": passed,
        "failed": [{key: case[key] for key in ("name", "message", "seconds")} for case in failed],
        "known_skips": {reason: len(names) for reason, names in skips.items() if is_known(reason)},
        "known_skip_names": sorted(
            name for reason, names in skips.items() if is_known(reason) for name in names
        ),
        "unknown_skips": unknown,
        "properties": {case["name"]: case["properties"] for case in cases if "properties" in case},
        "slowest": sorted(((case["seconds"], case["name"]) for case in cases), reverse=True)[:15],
        "left_out": left_out,
    }


def main(argv: list[str] | None = None) -> int:
    """Summarises, writes, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", required=True)
    parser.add_argument("--status", type=int, required=True, help="pytest's exit status")
    parser.add_argument("--left-out", nargs="*", default=[], help="files left out, with reason")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("reports", nargs="*", type=Path)
    args = parser.parse_args(argv)
    cases = [case for path in args.reports if path.exists() for case in read(path)]
    result = summarise(args.part, args.status, cases, args.left_out)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for case in result["failed"]:
        print(f"FAILED {case['name']}: {' '.join(case['message'].split())[:300]}")
    for reason, names in result["unknown_skips"].items():
        print(f"UNKNOWN SKIP {reason!r}: {names[:5]}")
    for reason, count in result["known_skips"].items():
        print(f"known skip: {reason} ({count})")
    for left in args.left_out:
        if is_known(left.partition(": ")[2]):
            print(f"known skip: {left}")
    verdict = "ok" if result["ok"] else "FAILED"
    print(f"{args.part}: {verdict}, {result['passed']} passed, {len(result['failed'])} failed")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
