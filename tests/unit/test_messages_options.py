"""The texts that a user meets who mistypes an option."""

import pytest

from cgpass.errors import OptionError
from cgpass.options import Options, current_defaults, set_defaults

PARSED = [
    (
        {"compilr": "eager"},
        "cgpass: unknown option 'compilr'; did you mean 'compiler'?",
    ),
    (
        {"spam": 1},
        (
            "cgpass: unknown option 'spam'; known: compiler, driver, static_input_check, "
            "max_recordings, max_copied_mib, outputs, max_pending_calls, min_partition_ops, unsafe_ops, on_skip, rng, "
            "progress, inductor."
        ),
    ),
    (
        {"driver": "simulate"},
        (
            "cgpass: option 'driver' must be one of 'auto', 'cuda', 'simulated', 'none', "
            "got 'simulate' (str); did you mean 'simulated'?"
        ),
    ),
    (
        {"max_recordings": 0},
        "cgpass: option 'max_recordings' must be an int >= 1, got 0 (int).",
    ),
    (
        {"max_rerecords": 3},
        "cgpass: option 'max_rerecords' was removed: a parameter that moves is copied, up to max_copied_mib a call.",
    ),
    (
        {"unsafe_ops": ["torch.ops.aten.add.Tensor"]},
        (
            "cgpass: option 'unsafe_ops' must hold names of the form 'ns::op' or 'ns::op.overload', "
            "got 'torch.ops.aten.add.Tensor' (str); did you mean 'aten::add.Tensor'?"
        ),
    ),
    (
        {"inductor": [("max_autotune", True)]},
        (
            "cgpass: option 'inductor' must be a dict of Inductor config names and values, "
            "got [('max_autotune', True)] (list)."
        ),
    ),
    (
        ["driver", "none"],
        "cgpass: options must be a dict of option names and values, got ['driver', 'none'] (list).",
    ),
    (
        {"rng": "x" * 100},
        (
            "cgpass: option 'rng' must be one of 'exact', 'paired', "
            "got 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx... (str)."
        ),
    ),
]

ENVIRONMENT = [
    (
        "CGPASS_DRIVER",
        "cud",
        (
            "cgpass: environment variable CGPASS_DRIVER must be one of 'auto', 'cuda', 'simulated', "
            "'none', got 'cud' (str); did you mean 'cuda'?"
        ),
    ),
    (
        "CGPASS_MAX_RECORDINGS",
        "3.5",
        "cgpass: environment variable CGPASS_MAX_RECORDINGS must be an int >= 1, got '3.5' (str).",
    ),
    (
        "CGPASS_INDUCTOR",
        "max_autotune",
        (
            "cgpass: environment variable CGPASS_INDUCTOR must hold Inductor config names and values as JSON, "
            "e.g. CGPASS_INDUCTOR='{\"max_autotune\": true}', got 'max_autotune' (str)."
        ),
    ),
    (
        "CGPASS_MAX_RECORDING",
        "3",
        (
            "cgpass: environment variable CGPASS_MAX_RECORDING is not an option; "
            "did you mean CGPASS_MAX_RECORDINGS?"
        ),
    ),
]


@pytest.mark.parametrize(("given", "message"), PARSED)
def test_parse(given, message):
    with pytest.raises(OptionError) as caught:
        Options.parse(given)
    assert str(caught.value) == message


@pytest.mark.parametrize(("variable", "text", "message"), ENVIRONMENT)
def test_environment(monkeypatch, variable, text, message):
    monkeypatch.setenv(variable, text)
    with pytest.raises(OptionError) as caught:
        current_defaults()
    assert str(caught.value) == message


def test_set_defaults_names_the_nearest_option():
    with pytest.raises(OptionError) as caught:
        set_defaults(min_partition_op=1)
    assert (
        str(caught.value)
        == "cgpass: unknown option 'min_partition_op'; did you mean 'min_partition_ops'?"
    )
