"""Summary of a run of the tests, for scripts/gpu_check.sh.

    python -m benchlib.check --part tests --status 0 --out tests.json tests.xml

Fails if a test failed, or if none passed. Which tests were skipped, and why, is in the summary: read it.
"""

import argparse
import collections
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import torch

from benchlib import meta


def main(argv: list[str] | None = None) -> int:
    """Summarise, write, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", required=True)
    parser.add_argument("--status", type=int, required=True, help="pytest's exit status")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("report", type=Path, help="JUnit file; none is no test")
    args = parser.parse_args(argv)
    root = ElementTree.parse(args.report).getroot() if args.report.exists() else None
    failed, skipped, passed, noted = [], collections.Counter(), 0, {}
    for case in root.iter("testcase") if root is not None else ():
        name = f"{case.get('classname')}::{case.get('name')}"
        noted |= {f"{name}, {p.get('name')}": p.get("value") for p in case.iter("property")}
        bad = next((e for kind in ("failure", "error") for e in case.iter(kind)), None)
        skip = case.find("skipped")
        if bad is not None:
            failed.append({"name": name, "message": (bad.get("message") or bad.text or "")[:1500]})
        elif skip is not None:
            skipped[skip.get("message") or ""] += 1
        else:
            passed += 1
    ok = args.status == 0 and passed > 0 and not failed
    about = meta.describe("cuda" if torch.cuda.is_available() else "cpu")
    found = {"part": args.part, "ok": ok, "meta": about, "passed": passed, "failed": failed}
    found |= {"skipped": skipped, "properties": noted}
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    for each in failed:
        print(f"FAILED {each['name']}: {' '.join(each['message'].split())[:300]}")
    for reason, count in skipped.items():
        print(f"skipped: {reason} ({count})")
    print(f"{args.part}: {'ok' if ok else 'FAILED'}, {passed} passed, {len(failed)} failed")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
