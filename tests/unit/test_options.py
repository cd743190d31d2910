"""`Options`, the process-wide defaults and the environment variables: what is accepted, and what a bad value is told."""

import pytest

from cgpass import options
from cgpass.errors import OptionError
from cgpass.options import Options, current_defaults, set_defaults


def test_what_is_given_goes_before_defaults_and_those_before_the_environment(monkeypatch):
    monkeypatch.setenv("CGPASS_DRIVER", "none")
    set_defaults(rng="paired")
    assert Options._parse(None) == Options._parse({}) == Options(rng="paired", driver="none")
    with set_defaults(rng="exact", driver="cuda") as inside:
        assert inside == current_defaults() == Options(driver="cuda")
        with set_defaults(driver="simulated"):
            assert Options._parse({"max_recordings": 3}).driver == "simulated"
        assert Options._parse({"driver": "cuda"}).driver == "cuda"
    with pytest.raises(ZeroDivisionError), set_defaults(driver="cuda"):
        raise ZeroDivisionError
    with pytest.raises(OptionError):
        set_defaults(driver="cuda", rng="no")
    assert current_defaults() == Options(rng="paired", driver="none")
    given = Options(unsafe_ops=["b::c", "a::b"], inductor={"x": [1]})
    assert Options._parse(given) is given, "complete ones"
    same = Options(unsafe_ops=("a::b", "b::c"), inductor={"x": [1]})
    assert (given, hash(given)) == (same, hash(same))
    assert given != Options(unsafe_ops=given.unsafe_ops)


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("CGPASS_COMPILER", "eager", {"compiler": "eager"}),
        ("CGPASS_MAX_RECORDINGS", " 7 ", {"max_recordings": 7}),
        (
            "CGPASS_UNSAFE_OPS",
            "my::op, aten::add.Tensor,",
            {"unsafe_ops": ("aten::add.Tensor", "my::op")},
        ),
        ("CGPASS_UNSAFE_OPS", "", {"unsafe_ops": ()}),
        ("CGPASS_INDUCTOR", '{"max_autotune": true}', {"inductor": {"max_autotune": True}}),
    ],
)
def test_environment_variables_are_read(monkeypatch, variable, text, expected):
    monkeypatch.setenv(variable, text)
    assert current_defaults() == Options(**expected)


def test_variables_that_are_no_options_are_named_in_one_warning(monkeypatch, caplog):
    options._warn_once.cache_clear()
    monkeypatch.setenv("CGPASS_SIMULATED", "1")
    monkeypatch.setenv("CGPASS_OPTIONS", "{}")
    assert current_defaults() == current_defaults() == Options()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        "cgpass: unknown environment variables are ignored: CGPASS_OPTIONS, CGPASS_SIMULATED; options are "
        "CGPASS_ followed by one of COMPILER, DRIVER, "
    )


KNOWN = (
    "known: compiler, driver, static_input_check, max_recordings, max_copied_mib, outputs, max_pending_calls, "
    "min_partition_ops, unsafe_ops, on_skip, rng, progress, inductor."
)
DRIVERS = "'auto', 'cuda', 'simulated', 'none'"
NAMES = "must hold names of the form 'ns::op' or 'ns::op.overload', got"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compilr": "eager"}, "unknown option 'compilr'; did you mean 'compiler'?"),
        ({3: 1}, f"unknown option 3; {KNOWN}"),
        (
            {"driver": "simulate"},
            f"option 'driver' must be one of {DRIVERS}, got 'simulate' (str); did you mean 'simulated'?",
        ),
        (
            {"driver": None},
            f"option 'driver' must be one of {DRIVERS}, got None (NoneType); did you mean 'none'?",
        ),
        ({"max_recordings": 0}, "option 'max_recordings' must be an int >= 1, got 0 (int)."),
        (
            {"max_pending_calls": True},
            "option 'max_pending_calls' must be an int >= 1, got True (bool).",
        ),
        (
            {"unsafe_ops": "aten::add"},
            "option 'unsafe_ops' must be a tuple or list of operator names, got 'aten::add' (str).",
        ),
        (
            {"unsafe_ops": ["torch.ops.aten.add.Tensor"]},
            f"option 'unsafe_ops' {NAMES} 'torch.ops.aten.add.Tensor' (str).",
        ),
        (
            ["driver", "none"],
            "options must be a dict of option names and values, got ['driver', 'none'] (list).",
        ),
        (
            {"rng": "x" * 100},
            f"option 'rng' must be one of 'exact', 'paired', got '{'x' * 56}... (str).",
        ),
    ],
)
def test_what_is_refused_and_how(given, message):
    with pytest.raises(OptionError) as caught:
        Options._parse(given)
    assert str(caught.value) == f"cgpass: {message}"


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("DRIVER", "cud", f"must be one of {DRIVERS}, got 'cud' (str); did you mean 'cuda'?"),
        ("MAX_RECORDINGS", "3.5", "must be an int >= 1, got '3.5' (str)."),
        (
            "INDUCTOR",
            "max_autotune",
            (
                "must be a dict of Inductor config names and values, as JSON in the environment, "
                "got 'max_autotune' (str)."
            ),
        ),
        ("MAX_RECORDING", "3", "is not an option; did you mean CGPASS_MAX_RECORDINGS?"),
    ],
)
def test_what_is_refused_of_the_environment(monkeypatch, variable, text, message):
    monkeypatch.setenv(f"CGPASS_{variable}", text)
    with pytest.raises(OptionError) as caught:
        current_defaults()
    assert str(caught.value) == f"cgpass: environment variable CGPASS_{variable} {message}"
