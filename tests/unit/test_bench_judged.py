"""What cgpass is judged by when results are compared, and what is too little to be worse."""

import pytest
from benchlib import compare

from tests.unit.test_bench_compare import OLD, overhead, timed, worse


def test_a_faster_host_is_no_regression():
    """Default is all host; the device makes up most of a step of cgpass."""
    faster = timed(0.7, default=8.0, reduce_overhead=4.2, cgpass=4.0, limit=3.5)
    for name, ms in {"default": 5.6, "reduce-overhead": 3.9, "cgpass": 3.85, "limit": 3.5}.items():
        faster["results"][0]["arms"][name]["step_ms"] = {"median": ms}
    found = compare.compare(OLD, faster, 5.0)
    assert (found.worse, found.judged) == ([], 2)
    assert "+37.5 %" in found.ratios["Small, B2", "cgpass / default"]["step ms"]


def test_without_the_limit_another_arm_judges():
    slower = {"default": 8.0, "cgpass": 5.0}
    old = timed(default=8.0, reduce_overhead=4.2, cgpass=4.0)
    assert worse(old, timed(reduce_overhead=4.2, **slower))[0].startswith(
        "Small, B2, step ms, cgpass / reduce-overhead: 0.95 -> 1.19"
    )
    del old["results"][0]["arms"]["reduce-overhead"]
    assert worse(old, timed(**slower))[0].startswith(
        "Small, B2, step ms, cgpass / default: 0.50 -> 0.62"
    )


@pytest.mark.parametrize(
    ("spread", "note", "num_worse"), [(0.08, " **worse**", 1), (0.12, ", as calls vary", 0)]
)
def test_what_grew_by_no_more_than_calls_vary_is_no_regression(spread, note, num_worse):
    old, new = timed(cgpass=4.0, limit=3.5), timed(cgpass=4.6, limit=3.5)
    for data in (old, new):
        for arm in data["results"][0]["arms"].values():
            del arm["host_ms"]
            ms = arm["step_ms"]["median"]
            arm["step_ms"] |= {"p10": ms * (1 - spread), "p90": ms * (1 + spread)}
    found = compare.compare(old, new, 5.0)
    assert found.ratios["Small, B2", "cgpass / limit"]["step ms"].endswith(note)
    assert len(found.worse) == num_worse
    said = (
        "None of 1 figures is worse by more than 5 % and what calls vary by; 1 grew, within that."
    )
    assert (said in compare.render(old, new, found)) is (num_worse == 0)


def test_a_long_tail_excuses_little():
    """A few slow calls move the mean and the ninetieth percentile, but not the median."""
    old, new = timed(cgpass=4.0, limit=3.5), timed(cgpass=4.6, limit=3.5)
    for data in (old, new):
        for arm in data["results"][0]["arms"].values():
            ms = arm["step_ms"]["median"]
            arm["step_ms"] |= {"p10": ms * 0.99, "p90": ms * 2}
    assert worse(old, new)[0].startswith("Small, B2, step ms, cgpass / limit: 1.14 -> 1.31")


@pytest.mark.parametrize(("slower", "num_worse"), [(1.2, 0), (1.3, 1)])
def test_wild_calls_excuse_only_so_much(slower, num_worse):
    old, new = timed(cgpass=4.0, limit=3.5), timed(cgpass=4.0 * slower, limit=3.5)
    for data in (old, new):
        for arm in data["results"][0]["arms"].values():
            del arm["host_ms"]
            ms = arm["step_ms"]["median"]
            arm["step_ms"] |= {"p10": ms * 0.2, "p90": ms * 3}
    assert len(worse(old, new)) == num_worse


def test_an_arm_that_computes_something_else_judges_nothing():
    old, new = timed(cgpass=4.0, limit=3.5), timed(cgpass=6.0, limit=5.25)
    for data in (old, new):
        data["results"][0]["arms"]["reduce-overhead"] = {"step_ms": {"median": 4.2}}
    assert worse(old, new) == []
    new["results"][0]["arms"]["limit"]["differs"] = True
    differs = "Small, B2, {}: computes something else now, and judges nothing"
    assert worse(old, new) == [
        differs.format("limit"),
        "Small, B2, step ms, cgpass / reduce-overhead: 0.95 -> 1.43 (+50.0 %)",
    ]
    new["results"][0]["arms"]["reduce-overhead"]["differs"] = True
    found = compare.compare(old, new, 5.0)
    assert found.worse[:2] == [differs.format("limit"), differs.format("reduce-overhead")]
    assert "Small, B2, step ms, cgpass: no sound arm to judge it by" in found.notes
    assert compare.compare(new, new, 5.0).worse == []
    old = overhead(reduce_overhead=400.0, default=900.0, cgpass=300.0)
    new = overhead(reduce_overhead=800.0, default=900.0, cgpass=600.0)
    assert worse(old, new) == []
    new["rows"][0]["differs"] = ["reduce-overhead"]
    assert worse(old, new) == [
        "training, 10 layers, reduce-overhead: computes something else now, and judges nothing",
        "training, 10 layers, us, cgpass / default: 0.33 -> 0.67 (+100.0 %)",
    ]


def test_overhead_is_judged_by_default_where_nothing_else_runs():
    old, new = overhead(default=900.0, cgpass=300.0), overhead(default=900.0, cgpass=400.0)
    assert worse(old, new) == ["training, 10 layers, us, cgpass / default: 0.33 -> 0.44 (+33.3 %)"]
