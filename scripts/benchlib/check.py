"""Summary of a run of the tests, for scripts/gpu_check.sh.

    python -m benchlib.check --part tests --status 0 --out tests.json tests.xml

Fails if a test failed, or if none passed. Which tests were skipped, and why, is in the summary: read it.
"""

import argparse
import collections
import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchlib import meta


def summarise(part: str, status: int, cases: list[ElementTree.Element]) -> dict[str, Any]:
    """Return counts, what failed, and how many tests were skipped by reason."""
    failed, skipped, passed = [], collections.Counter(), 0
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = next((e for kind in ("failure", "error") for e in case.iter(kind)), None)
        skip = case.find("skipped")
        if bad is not None:
            failed.append({"name": name, "message": (bad.get("message") or bad.text or "")[:1500]})
        elif skip is not None:
            skipped[skip.get("message") or ""] += 1
        else:
            passed += 1
    return {
        "part": part,
        "ok": status == 0 and passed > 0 and not failed,
        "meta": meta.describe("cuda" if torch.cuda.is_available() else "cpu"),
        "passed": passed,
        "failed": failed,
        "skipped": dict(skipped),
        "properties": {
            f"{case.get('classname')}::{case.get('name')}, {each.get('name')}": each.get("value")
            for case in cases
            for each in case.iter("property")
        },
    }


def main(argv: list[str] | None = None) -> int:
    """Summarise, write, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", required=True)
    parser.add_argument("--status", type=int, required=True, help="pytest's exit status")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("report", type=Path, help="JUnit file; none is no test")
    args = parser.parse_args(argv)
    cases: list[ElementTree.Element] = []
    if args.report.exists():
        cases = list(ElementTree.parse(args.report).getroot().iter("testcase"))
    found = summarise(args.part, args.status, cases)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    for each in found["failed"]:
        print(f"FAILED {each['name']}: {' '.join(each['message'].split())[:300]}")
    for reason, count in found["skipped"].items():
        print(f"skipped: {reason} ({count})")
    verdict = "ok" if found["ok"] else "FAILED"
    print(f"{args.part}: {verdict}, {found['passed']} passed, {len(found['failed'])} failed")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
