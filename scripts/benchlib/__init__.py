"""Parts of scripts/bench.py: models, arms, the processes that run them, and the report."""
