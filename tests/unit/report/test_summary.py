"""`cgpass.expect` in programs that record, replay and run without a graph."""

import pytest
import torch

import cgpass
from cgpass.errors import ExpectationError, OptionError


@pytest.fixture
def call():
    options = {"driver": "simulated", "compiler": "eager", "min_partition_ops": 1}
    torch.compiler.reset()
    call = torch.compile(lambda x: x.sin() * 2, backend=cgpass.cgpass, options=options)
    yield lambda rows=3: call(torch.ones(rows))
    torch.compiler.reset()


def test_what_was_not_is_named_with_what_was_compiled(call):
    call()
    message = r"^cgpass\.expect: recordings grew by 1, not by 0; replays grew by 1, not by 3 \(other counters: calls 1, "
    with (
        pytest.raises(ExpectationError, match=message) as error,
        cgpass.expect(recordings=0, replays=3),
    ):
        call()
    assert str(error.value).endswith(". No graph was compiled inside.")
    few = cgpass.expect(graphs=0, warmups=1)
    with pytest.raises(ExpectationError, match="Compiled inside") as error, few:
        call(4)
    assert "inference of test_summary.py" in str(error.value)
    assert "warmups" not in str(error.value).split("(all")[0]


def test_the_blocks_own_error_passes(call):
    with pytest.raises(ValueError, match="mine"), cgpass.expect(calls=7):
        raise ValueError("mine")


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"recording": 0}, "there is no counter 'recording'; did you mean 'recordings'?"),
        ({"zzz": 0}, "there is no counter 'zzz'$"),
        ({"calls": True}, "calls must be an int, got True"),
        ({"calls": "1"}, "calls must be an int, got '1'"),
    ],
)
def test_bad_counts(counts, message):
    entered = []
    with pytest.raises(OptionError, match=message.replace("?", r"\?")), cgpass.expect(**counts):
        entered.append(1)
    assert not entered
