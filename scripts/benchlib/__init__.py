"""Parts of scripts/bench.py: models, arms, measurements, the worker process and the report."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("cgpass") is None:  # run from a checkout that isn't installed
    sys.path.append(str(Path(__file__).resolve().parent.parent.parent))
