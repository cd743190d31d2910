"""Results with gaps: refused where they would replace what is kept, and where nothing is."""

import copy

import pytest
from benchlib import taking

from tests.unit.bench_results import STEPS, bench, model, overhead

ENDED = model("a", {}, error="the process ended")


def changed(arm, **more):
    """A model with something else of one arm; None takes it away."""
    found = model("a", STEPS)
    entry = found["arms"][arm] | more
    found["arms"][arm] = {key: value for key, value in entry.items() if value is not None}
    return found


def without(*arms):
    return model("a", {name: ms for name, ms in STEPS.items() if name not in arms})


GAPS = [
    (ENDED, "a: stopped by the process ended"),
    (changed("cgpass", step_ms=None), "a: no figure of cgpass"),
    (without("cgpass"), "a: no figure of cgpass"),
    (changed("cgpass", check=None), "a: losses of cgpass were not compared"),
    (changed("cgpass", check={"error": "no", "equal": False}), "a: losses of cgpass were not"),
    (changed("cgpass", stages={"error": "no replay"}), "a: no stages of cgpass: no replay"),
    (changed("cgpass", kernels={"error": "no"}), "a: no kernels of cgpass: no"),
]


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(("entry", "message"), GAPS)
def test_a_model_with_a_gap_is_not_kept(tmp_path, kept, entry, message):
    paths = taking.store({"bench": bench(model("a", STEPS))}, tmp_path) if kept else []
    before = [path.read_text() for path in paths]
    with pytest.raises(SystemExit, match=f"^bench: not whole: {message}"):
        taking.store({"bench": bench(entry)}, tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == before


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (["a"], "without b, which what is kept has"),
        ([], "without a, b, which what is kept has"),
        ([without("limit"), "b"], "a: without limit, which what is kept has"),
        ([changed("limit", step_ms=None), "b"], "a: without limit, which what is kept has"),
        ([changed("limit", error="no"), "b"], "a: without limit, which what is kept has"),
        ([ENDED], "a: stopped by the process ended; without b, which what is kept has"),
    ],
)
def test_what_lacks_something_that_is_kept_is_not(tmp_path, models, message):
    kept = bench(model("a", STEPS), model("b", STEPS))
    (path,) = taking.store({"bench": kept}, tmp_path)
    before = path.read_text()
    new = [model(each, STEPS) if isinstance(each, str) else each for each in models]
    with pytest.raises(SystemExit, match=f"^bench: not whole: {message}$"):
        taking.store({"bench": bench(*new)}, tmp_path)
    assert path.read_text() == before


def test_nothing_is_not_kept(tmp_path):
    with pytest.raises(SystemExit, match=r"^bench: not whole: no models$"):
        taking.store({"bench": bench()}, tmp_path)


def test_more_than_is_kept_is_kept(tmp_path):
    taking.store({"bench": bench(changed("limit", error="no"))}, tmp_path)
    more = bench(changed("limit", error="no"), model("b", STEPS))
    assert taking.store({"bench": more}, tmp_path)


def test_losses_are_not_compared_where_memory_is_measured(tmp_path):
    arms = {"cgpass": {"peak_reserved_bytes": 5}}
    memory = bench({"model": "a", "arms": arms}) | {"kind": "memory"}
    assert taking.store({"memory": memory}, tmp_path)
    arms["cgpass"] = {}
    with pytest.raises(SystemExit, match=r"^memory: not whole: a: no figure of cgpass$"):
        taking.store({"memory": memory}, tmp_path)


def test_stacks_with_fewer_rows_or_arms_are_not_kept(tmp_path):
    kept = overhead()
    (path,) = taking.store({"overhead": kept}, tmp_path)
    before = path.read_text()
    fewer, poorer = copy.deepcopy(kept), copy.deepcopy(kept)
    del fewer["rows"][3]
    del poorer["rows"][0]["us"]["cgpass-direct"]
    refused = {
        "without training, 100 layers, which what is kept has": fewer,
        "inference, 1 layers: without cgpass-direct": poorer,
    }
    for message, data in refused.items():
        with pytest.raises(SystemExit, match=f"^overhead: not whole: {message}"):
            taking.store({"overhead": data}, tmp_path)
    assert path.read_text() == before
    path.unlink()
    del poorer["rows"][0]["us"]["cgpass"]
    with pytest.raises(SystemExit, match="inference, 1 layers: without cgpass"):
        taking.store({"overhead": poorer}, tmp_path)
