"""`Options`, the process-wide defaults and the environment variables: what is accepted."""

import copy
import dataclasses
import pickle

import pytest

from cgpass import options
from cgpass.errors import CGPassError, OptionError
from cgpass.options import Options, current_defaults, set_defaults


def test_defaults_are_those_documented():
    assert dataclasses.asdict(Options()) == {
        "compiler": "inductor",
        "driver": "auto",
        "static_input_check": "rerecord",
        "max_recordings": 64,
        "max_copied_mib": 64,
        "outputs": "shared",
        "max_pending_calls": 16,
        "min_partition_ops": 4,
        "unsafe_ops": (),
        "on_skip": "warn",
        "rng": "exact",
        "progress": "auto",
        "inductor": {},
    }


def test_parse_of_nothing_gives_the_defaults():
    assert Options.parse(None) == Options.parse({}) == Options()


def test_parse_takes_names_and_values():
    parsed = Options.parse({"driver": "simulated", "max_recordings": 3})
    assert parsed == Options(driver="simulated", max_recordings=3)
    assert parsed != Options()


def test_parse_returns_complete_options_unchanged():
    given = Options(driver="none")
    with set_defaults(compiler="eager"):
        assert Options.parse(given) is given


def test_error_is_a_cgpass_error_and_a_value_error():
    with pytest.raises(OptionError) as caught:
        Options.parse({"no_such": 1})
    assert isinstance(caught.value, (CGPassError, ValueError))


@pytest.mark.parametrize(
    ("name", "smallest"),
    [
        ("max_recordings", 1),
        ("max_copied_mib", 0),
        ("max_pending_calls", 1),
        ("min_partition_ops", 1),
    ],
)
def test_numbers_have_a_smallest_value(name, smallest):
    assert getattr(Options.parse({name: smallest}), name) == smallest
    with pytest.raises(OptionError, match=f">= {smallest}"):
        Options.parse({name: smallest - 1})


@pytest.mark.parametrize("wrong", [True, 1.0, "1", None])
def test_numbers_are_ints(wrong):
    with pytest.raises(OptionError, match="must be an int"):
        Options(max_recordings=wrong)


@pytest.mark.parametrize("kind", [list, tuple, set, frozenset])
def test_operator_names_are_kept_as_a_sorted_tuple(kind):
    given = kind(["my::op", "aten::add.Tensor", "my::op"])
    assert Options(unsafe_ops=given).unsafe_ops == ("aten::add.Tensor", "my::op")


@pytest.mark.parametrize("wrong", ["aten.add", "aten::", "::add", "aten::add.", "a::b::c", "", 3])
def test_operator_names_have_a_namespace(wrong):
    with pytest.raises(OptionError, match="ns::op"):
        Options(unsafe_ops=(wrong,))


def test_one_string_is_not_a_list_of_operators():
    with pytest.raises(OptionError, match="tuple or list"):
        Options(unsafe_ops="aten::add")


def test_inductor_patches_are_copied():
    given = {"max_autotune": True}
    options = Options(inductor=given)
    given["max_autotune"] = False
    assert options.inductor == {"max_autotune": True}


def test_options_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().driver = "none"


def test_equal_options_hash_equal():
    first = Options(unsafe_ops=["b::c", "a::b"], inductor={"x": [1]})
    second = Options(unsafe_ops=("a::b", "b::c"), inductor={"x": [1]})
    assert first == second
    assert hash(first) == hash(second)
    assert first != Options(unsafe_ops=("a::b", "b::c"), inductor={"x": [2]})


def test_options_copy_and_pickle():
    options = Options(driver="none", inductor={"x": 1})
    assert copy.deepcopy(options) == options
    assert pickle.loads(pickle.dumps(options)) == options


def test_set_defaults_as_a_statement_stays():
    set_defaults(rng="paired")
    assert current_defaults() == Options(rng="paired")
    assert Options.parse({"driver": "none"}) == Options(rng="paired", driver="none")


def test_set_defaults_as_a_block_restores():
    set_defaults(max_recordings=2)
    with set_defaults(max_recordings=3, driver="none") as inside:
        assert inside == current_defaults() == Options(max_recordings=3, driver="none")
    assert current_defaults() == Options(max_recordings=2)


def test_set_defaults_restores_after_an_error():
    with pytest.raises(ZeroDivisionError), set_defaults(driver="none"):
        raise ZeroDivisionError
    assert current_defaults() == Options()


def test_set_defaults_nests():
    with set_defaults(driver="none"):
        with set_defaults(driver="simulated", rng="paired"):
            assert current_defaults() == Options(driver="simulated", rng="paired")
        assert current_defaults() == Options(driver="none")
    assert current_defaults() == Options()


def test_set_defaults_with_one_bad_value_changes_nothing():
    with pytest.raises(OptionError):
        set_defaults(driver="none", max_recordings=-1)
    assert current_defaults() == Options()


def test_a_given_option_goes_before_the_default():
    with set_defaults(driver="none"):
        assert Options.parse({"driver": "simulated"}).driver == "simulated"


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


def test_set_defaults_goes_before_the_environment(monkeypatch):
    monkeypatch.setenv("CGPASS_DRIVER", "none")
    with set_defaults(driver="simulated"):
        assert current_defaults().driver == "simulated"
    assert current_defaults().driver == "none"


def test_variables_of_the_scripts_are_left_alone(monkeypatch, caplog):
    monkeypatch.setenv("CGPASS_VENV", "somewhere")
    monkeypatch.setenv("CGPASS_RANDOM_PROGRAMS", "17")
    assert current_defaults() == Options()
    assert caplog.text == ""


def test_variables_that_are_no_options_are_named_in_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(options, "_told_unknown", set())
    monkeypatch.setenv("CGPASS_SIMULATED", "1")
    monkeypatch.setenv("CGPASS_OPTIONS", "{}")
    assert current_defaults() == current_defaults() == Options()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        "cgpass: environment variables that are no options are ignored: CGPASS_OPTIONS, CGPASS_SIMULATED; options are "
        "CGPASS_ followed by one of COMPILER, DRIVER, "
    )
