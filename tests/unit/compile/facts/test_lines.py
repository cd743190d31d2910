"""Lines of user code behind nodes."""

import pytest
import torch

from cgpass.compile.facts import lines
from tests.graphs import calls, fake_cuda_graph

aten = torch.ops.aten


def test_user_line_is_the_innermost_frame_outside_of_torch():
    gm = fake_cuda_graph(lambda x: x.sin(), (3,))
    (sin,) = calls(gm, aten.sin.default)
    sin.meta["stack_trace"] = (
        '  File "/a/train.py", line 7, in step\n    loss = model(x)\n'
        '  File "/a/model.py", line 41, in forward\n    return torch.sin(x)\n               ^^^^\n'
        f'  File "{torch.__file__}", line 3, in sin\n    inner()\n'
    )
    assert lines.user_line(sin) == "model.py:41 in forward: return torch.sin(x)"
    sin.meta["stack_trace"] = '  File "/a/model.py", line 41, in <lambda>'
    assert lines.user_line(sin) == "model.py:41 in <lambda>"
    sin.meta["stack_trace"] = '  File "/a/my "own" model.py", line 41, in forward'
    assert lines.user_line(sin) == 'my "own" model.py:41 in forward'
    sin.meta.pop("stack_trace")
    assert lines.user_line(sin) is None


def test_functions_left_behind_a_graph_break_have_their_own_names():
    names = [
        "forward",
        "torch_dynamo_resume_in_forward_at_9",
        "torch_dynamo_resume_in__lambda__at_9",
    ]
    assert [lines.function_name(name) for name in names] == ["forward", "forward", "<lambda>"]


@pytest.mark.parametrize("key", ["nn_module_stack", "fwd_nn_module_stack"])
def test_without_a_frame_the_innermost_module_is_named(key):
    gm = fake_cuda_graph(lambda x: x.sin(), (3,))
    (sin,) = calls(gm, aten.sin.default)
    sin.meta = {"val": sin.meta["val"]}
    root = ("L['self']", torch.nn.Sequential)
    sin.meta[key] = {"1": root, "2": ("L['self'].layers.0", "torch.nn.modules.linear.Linear")}
    assert lines.user_line(sin) == "module layers.0 (Linear)"
    sin.meta[key]["2"] = "L['fn'].__self__.layers.0", torch.nn.Linear
    assert lines.user_line(sin) == "module layers.0 (Linear)"
    sin.meta[key] = {"1": root}
    assert lines.user_line(sin) == "module Sequential"


def test_a_function_begins_where_no_decorator_only_hands_on():
    gm = fake_cuda_graph(lambda x: x.sin(), (3,))
    for node in gm.graph.nodes:
        node.meta.pop("stack_trace", None)
        node.meta.pop("nn_module_stack", None)
    assert lines.begins_at(gm) is None
    (sin,) = calls(gm, aten.sin.default)
    sin.meta["nn_module_stack"] = {"1": ("L['fn']", torch.nn.Sequential), "2": ("", torch.nn.ReLU)}
    assert lines.begins_at(gm) == "module Sequential"
    wrapper = '  File "/a/generic.py", line 9, in wrapper\n    out = func(self, *args, **kwargs)\n'
    forward = '  File "/a/model.py", line 41, in forward\n    return torch.sin(x)\n'
    sin.meta["stack_trace"] = wrapper + forward
    assert lines.begins_at(gm) == "model.py:41 in forward"
    sin.meta["stack_trace"] = wrapper
    assert lines.begins_at(gm) == "generic.py:9 in wrapper"
    sin.meta["stack_trace"] = wrapper.replace("func(self, *args, **kwargs)", "x + 1") + forward
    assert lines.begins_at(gm) == "generic.py:9 in wrapper"


@pytest.mark.parametrize("in_place", [True, False])
def test_layers_of_a_container_that_was_compiled(in_place):
    """If it was so in place, torch names the layers alone."""
    found = []

    def backend(gm, inputs):
        found.append(lines.begins_at(gm))
        return gm

    nn = torch.nn
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh())
    if in_place:
        model.compile(backend=backend)
    call = model if in_place else torch.compile(model, backend=backend)
    call(torch.ones(2, 4))
    if in_place and not found:
        pytest.skip("this torch leaves containers of its own that are compiled in place to eager")
    assert found == ["module Sequential"]
