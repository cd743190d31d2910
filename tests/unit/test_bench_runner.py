"""The benchmark of one call's host time: its stubs are what a runner expects, and every timed call is a replay."""

import bench_runner


def test_every_case_is_timed():
    rows = bench_runner.measure([2], repeats=1)
    assert [(row["case"], row["n"]) for row in rows] == [
        ("runner", 2),
        ("forward", 2),
        ("backward", 2),
    ]
    assert all(row["us"] > 0 for row in rows)
    assert bench_runner.table(rows).count("\n") == 4
