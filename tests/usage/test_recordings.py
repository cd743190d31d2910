"""`cgpass.recordings` and `cgpass.dump_graph`."""

import gc
import json

import pytest
import torch

import cgpass
from cgpass.errors import CaptureError, InputError


def chain(x):
    return x.sin().cos().tanh().exp()


@pytest.fixture
def session(setting):
    cgpass.reset()
    return setting.session(keep_graphs="on")


def recorded(session, calls=2):
    call, x = session.compile(chain), session.randn(4)
    for _ in range(calls):
        call(x)
    return call, x


def test_recordings_are_listed_with_where_they_are_from_and_why(session):
    kept = recorded(session)
    (one,) = cgpass.recordings()
    assert one.partition.startswith("inference captured_0 of test_recordings.py:")
    assert one.partition.endswith(" in chain")
    assert (one.cause, one.detail) == ("first", "the first call after the warm-up")
    assert one.copied_bytes == 16
    assert one.device == str(session.device)
    assert str(one) == f"{one.partition}: the first call after the warm-up"
    del kept


def test_as_json(session, tmp_path):
    kept = recorded(session)
    (one,) = cgpass.recordings()
    path = tmp_path / "graph.json"
    counts = cgpass.dump_graph(one, path)
    told = json.loads(path.read_text())
    assert told["counts"] == counts
    assert sum(counts.values()) == len(told["nodes"]) == 4
    assert [node["id"] for node in told["nodes"]] == [0, 1, 2, 3]
    assert len(told["edges"]) == 3
    assert told["partition"] == one.partition
    assert told["cause"] == "first"
    if session.device.type == "cpu":
        assert counts == {"operator": 4}
        assert told["edges"] == [[0, 1], [1, 2], [2, 3]]
        assert [node["name"] for node in told["nodes"]] == [
            f"aten.{name}.default" for name in ("sin", "cos", "tanh", "exp")
        ]
    else:
        assert counts == {"kernel": 4}
        assert any("sin" in node["name"] for node in told["nodes"])
    del kept


def test_as_dot(session, tmp_path):
    kept = recorded(session)
    (one,) = cgpass.recordings()
    path = tmp_path / "graph.dot"
    cgpass.dump_graph(one, str(path))
    lines = path.read_text().splitlines()
    assert lines[0] == "digraph recording {"
    assert lines[1] == f'  label="{one}";'
    assert lines[-1] == "}"
    assert sum(" -> " in line for line in lines) == 3
    assert sum("[label=" in line for line in lines) == 4
    del kept


def test_a_recording_replays_after_it_was_dumped(session, tmp_path):
    call, x = recorded(session)
    cgpass.dump_graph(cgpass.recordings()[0], tmp_path / "graph.json")
    with cgpass.expect(replays=1, recordings=0):
        assert torch.equal(call(x), chain(x))


def test_recordings_are_not_kept_alive_by_being_listed(session, tmp_path):
    kept = recorded(session)
    (one,) = cgpass.recordings()
    cgpass.reset()
    assert cgpass.recordings() == ()
    with pytest.raises(CaptureError, match=r"the recording is gone \(inference captured_0 of "):
        cgpass.dump_graph(one, tmp_path / "graph.json")
    del kept


def test_what_it_refuses(session, tmp_path):
    call, _ = recorded(session)
    with pytest.raises(InputError, match=r"must be one of cgpass.recordings\(\), got function"):
        cgpass.dump_graph(call, tmp_path / "graph.json")
    (one,) = cgpass.recordings()
    with pytest.raises(InputError, match=r"path must end with \.json or \.dot, got '.*graph\.png'"):
        cgpass.dump_graph(one, tmp_path / "graph.png")
    assert list(tmp_path.iterdir()) == []


def test_what_was_graphed_by_hand_and_what_is_wrapped(session, tmp_path):
    x = session.randn(4)
    by_hand = cgpass.make_graphed_callables(
        chain, (x,), options=cgpass.GraphedOptions(driver=session.options["driver"])
    )
    wrapped = session.wrap(chain, name="mine")
    for _ in range(2):
        wrapped(x)
    found = {each.partition: each for each in cgpass.recordings()}
    assert set(found) == {"forward of chain, graphed by hand", "mine"}
    assert cgpass.dump_graph(found["mine"], tmp_path / "mine.dot")
    del by_hand


@pytest.mark.gpu
def test_cuda_forgets_what_nobody_asked_it_to_keep(tmp_path):
    torch.compiler.reset()
    gc.collect()  # what another test graphed by hand
    call = torch.compile(chain, backend="cgpass", options={"compiler": "eager"})
    x = torch.randn(4, device="cuda")
    call(x), call(x)
    (one,) = (each for each in cgpass.recordings() if each.partition.endswith("in chain"))
    with pytest.raises(CaptureError, match=r'options=\{"keep_graphs": "on"\}'):
        cgpass.dump_graph(one, tmp_path / "graph.json")
    torch.compiler.reset()


@pytest.mark.gpu
def test_kernels_copies_and_random_numbers_of_a_training_step(tmp_path):
    torch.compiler.reset()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5), torch.nn.GELU())
    model = model.cuda()
    call = torch.compile(model, backend="cgpass", options={"keep_graphs": "on"})
    for _ in range(3):
        call(torch.randn(8, 64, device="cuda")).sum().backward()
    found = cgpass.recordings()
    assert {each.partition.split(" ")[0] for each in found} == {"forward", "backward"}
    for each in found:
        counts = cgpass.dump_graph(each, tmp_path / "graph.json")
        assert counts["kernel"] > 1
        told = json.loads((tmp_path / "graph.json").read_text())
        assert all(node["name"] for node in told["nodes"] if node["type"] == "kernel")
        assert len(told["edges"]) >= len(told["nodes"]) - 1
    torch.compiler.reset()
