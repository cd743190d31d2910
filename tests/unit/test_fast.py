"""The C++ functions do what the Python versions of them do, and building them fails softly."""

import logging
import random
import subprocess
import sys
from array import array
from collections import deque
from pathlib import Path

import pytest
import torch

from cgpass import _torch, options
from cgpass.errors import OptionError
from cgpass.runtime import fast, fast_build
from cgpass.runtime.liveness import HeldStorages
from cgpass.runtime.recording import overlaps_itself

PYTHON = fast.PYTHON


@pytest.fixture(scope="session")
def compiled():
    """The compiled versions by name."""
    try:
        path = fast_build.cached_path()
        if not path.exists():
            fast_build.build(path)
        return fast.functions_of(fast_build.load(path))
    except fast_build.BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["python", "compiled"])
def functions(request):
    return PYTHON if request.param == "python" else request.getfixturevalue("compiled")


def tensors(seed):
    """Tensors of every layout and of many dtypes."""
    rng = random.Random(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
    found = []
    for _ in range(40):
        size = [rng.randrange(4) for _ in range(rng.randrange(4))]
        tensor = torch.arange(64).reshape(4, 4, 4).to(rng.choice(dtypes))
        tensor = tensor.as_strided(size, [16, 4, 1][: len(size)], rng.randrange(3))
        if rng.random() < 0.3:
            tensor = tensor.clone()
        if rng.random() < 0.3:
            tensor = tensor.permute(rng.sample(range(len(size)), len(size)))
        if rng.random() < 0.2:
            tensor = tensor[..., None].expand(*tensor.size(), 3)
        found.append(tensor)
    return [*found, torch.nn.Parameter(torch.zeros(3)), torch.tensor(2.5), torch.empty(0)]


def copies(functions, *sources):
    """Copies of tensors of any dtypes."""
    return [functions["copies"]((t,), ((tuple(t.size()), t.stride()),))[0] for t in sources]


def facts(tensor):
    return (
        tensor.size(),
        tensor.stride(),
        tensor.dtype,
        tensor.storage_offset(),
        tensor.requires_grad,
        tensor.is_leaf,
        tensor._is_view(),
        tensor.is_inference(),
        tensor.is_conj(),
        tensor._version,
        type(tensor),
    )


@pytest.mark.parametrize("seed", range(5))
def test_keys_are_the_addresses(functions, seed):
    args = tensors(seed)
    positions = tuple(random.Random(seed).sample(range(len(args)), 20))
    key = functions["static_key"](args, positions)
    assert array("q", key).tolist() == [args[i].data_ptr() for i in positions]
    assert key == PYTHON["static_key"](args, positions)
    assert functions["static_key"](args, ()) == b""


def test_keys_tell_offsets_in_one_storage_apart(functions):
    base = torch.zeros(8)
    keys = {functions["static_key"]([base[i:]], (0,)) for i in range(8)}
    assert len(keys) == 8


def test_keys_of_what_is_no_tensor_or_not_there_are_refused(functions):
    with pytest.raises(TypeError):
        functions["static_key"]([None], (0,))
    with pytest.raises(IndexError):
        functions["static_key"]([torch.zeros(1)], (1,))


def test_a_holder_of_any_storage_is_noticed(functions):
    owned = [torch.zeros(2) for _ in range(10)]
    cdatas = tuple(t.untyped_storage()._cdata for t in owned)
    baseline = tuple(map(_torch.storage_use_count, cdatas))
    assert functions["any_held"](cdatas, baseline) is False
    for tensor in owned:
        view = tensor[1:]
        assert functions["any_held"](cdatas, baseline) is True
        del view
    assert functions["any_held"](cdatas, baseline) is False
    assert functions["any_held"]((), ()) is False
    with pytest.raises(ValueError, match=r"argument|as many"):
        functions["any_held"](cdatas, baseline[:-1])


@pytest.mark.parametrize("seed", range(3))
def test_aliases_are_detached(functions, seed):
    originals = tensors(seed)
    originals.append(torch.ones(2, requires_grad=True).sin())
    originals.append(torch.zeros(2, dtype=torch.complex64).conj())
    found = functions["aliases"](tuple(originals))
    for ours, original in zip(found, originals, strict=True):
        assert facts(ours) == facts(original.detach())
        assert ours is not original
        assert ours.untyped_storage()._cdata == original.untyped_storage()._cdata
        assert ours.data_ptr() == original.data_ptr()


def test_aliases_share_the_version_counter(functions):
    original = torch.zeros(2)
    (alias,) = functions["aliases"]((original,))
    alias.add_(1)
    assert (original._version, original.tolist()) == (1, [1, 1])
    original.add_(1)
    assert alias._version == 2


def test_aliases_that_backward_needs_are_checked_for_changes(functions):
    original = torch.ones(2)
    (alias,) = functions["aliases"]((original,))
    alias.requires_grad_()
    loss = (alias * alias).sum()
    original.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_aliases_may_change_their_own_layout(functions):
    original = torch.zeros(2, 3)
    (alias,) = functions["aliases"]((original,))
    alias.t_()
    assert (alias.size(), original.size()) == ((3, 2), (2, 3))
    alias.set_(torch.ones(4))
    assert original.tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("outer", [True, False])
def test_aliases_and_copies_in_inference_mode(functions, outer):
    normal = torch.zeros(2)
    with torch.inference_mode():
        inference = torch.zeros(2)
    with torch.inference_mode(outer):
        pairs = [
            (functions["aliases"]((normal, inference)), PYTHON["aliases"]((normal, inference))),
            (copies(functions, normal, inference), copies(PYTHON, normal, inference)),
        ]
        for found, expected in pairs:
            assert [t.is_inference() for t in found] == [t.is_inference() for t in expected]
            assert [t.tolist() for t in found] == [[0, 0], [0, 0]]


def test_views_lie_in_the_inputs_storage(functions):
    base = torch.arange(12.0)
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    specs = ((1, (3, 2), (1, 3), 0), (0, (2, 2), (4, 1), 1), (0, (), (), 3), (0, (0, 2), (2, 1), 0))
    with torch.no_grad():
        found = functions["views"]([base[2:], weight], specs)
        expected = [weight.t(), base.as_strided((2, 2), (4, 1), 3), base[5], base[:0].view(0, 2)]
    for ours, value in zip(found, expected, strict=True):
        assert torch.equal(ours, value)
        assert ours.stride() == value.stride()
        assert (ours._is_view(), ours.requires_grad) == (False, False)
    found[1].add_(1)
    assert base._version == 1
    assert base[3].item() == 4
    with pytest.raises(RuntimeError, match=r"out of the bounds|out of bounds"):
        functions["views"]([base], ((0, (13,), (1,), 0),))


@pytest.mark.parametrize("seed", range(3))
def test_copies_own_their_memory(functions, seed):
    sources = [t.detach() for t in tensors(seed) if not overlaps_itself(t)]
    assert len(sources) > 10
    by_dtype = {}
    for source in sources:
        by_dtype.setdefault(source.dtype, []).append(source)
    for members in by_dtype.values():
        layouts = tuple((tuple(t.size()), t.stride()) for t in members)
        found = functions["copies"](tuple(members), layouts)
        expected = PYTHON["copies"](tuple(members), layouts)
        for ours, source, theirs in zip(found, members, expected, strict=True):
            assert torch.equal(ours, source)
            assert facts(ours) == facts(theirs)
            assert ours.untyped_storage()._cdata != source.untyped_storage()._cdata
            assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
    assert functions["copies"]((), ()) == []


@pytest.mark.gpu
def test_copies_on_cuda(functions):
    device = torch.device("cuda", 0)
    sources = tuple(torch.randn(3, 5, device=device)[:, :n].t() for n in range(1, 6))
    layouts = tuple((tuple(t.size()), t.stride()) for t in sources)
    before = torch.cuda.memory_allocated(device)
    found = functions["copies"](sources, layouts)
    assert torch.cuda.memory_allocated(device) > before
    assert [facts(t) for t in found] == [facts(t) for t in PYTHON["copies"](sources, layouts)]
    assert all(map(torch.equal, found, sources))
    assert {t.device for t in found} == {device}
    assert functions["static_key"](list(found), (2,)) == array("q", [found[2].data_ptr()]).tobytes()
    del found
    assert torch.cuda.memory_allocated(device) == before


@pytest.mark.multigpu(2)
def test_copies_on_another_device_than_the_current_one(functions):
    with torch.cuda.device(0):
        (copy,) = copies(functions, torch.ones(3, device="cuda:1"))
    assert copy.device == torch.device("cuda", 1)
    assert copy.tolist() == [1, 1, 1]


def test_copies_know_no_autograd_and_may_grow(functions):
    source = torch.ones(2, requires_grad=True)
    (copy,) = copies(functions, source)
    assert not copy.requires_grad
    copy.resize_(5)
    assert copy.requires_grad_().sum().backward() is None


ODD = {
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "sparse rows": lambda: torch.eye(2).to_sparse_csr(),
    "meta": lambda: torch.empty(3, device="meta"),
    "no tensor": lambda: None,
}


@pytest.mark.filterwarnings("ignore")  # torch's own, on quantised and sparse tensors
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ["aliases", "copies", "views", "static_key"])
def test_tensors_that_are_not_plain_are_taken_or_refused_alike(compiled, kind, name):
    odd = ODD[kind]()
    args = {
        "aliases": ((odd,),),
        "copies": ((odd,), (((3,), (1,)),)),
        "views": ([odd], ((0, (1,), (1,), 0),)),
        "static_key": ([odd], (0,)),
    }

    def outcome(functions):
        try:
            found = functions[name](*args[name])
        except (RuntimeError, TypeError, AttributeError):
            return "refused"
        return found if isinstance(found, bytes) else [(t.layout, t.dtype, t.device) for t in found]

    assert outcome(compiled) == outcome(PYTHON)


def test_copies_of_memory_that_no_allocator_owns(functions):
    memory = array("f", [1, 2, 3])
    source = torch.frombuffer(memory, dtype=torch.float32)
    (copy,) = copies(functions, source)
    memory[0] = 5
    assert (copy.tolist(), source.tolist()) == ([1, 2, 3], [5, 2, 3])


@pytest.mark.parametrize("kind", [list, tuple, deque])
def test_put_assigns(functions, kind):
    into = list("abcd")
    functions["put"](into, (3, 1), kind([1, None]))
    assert into == ["a", None, "c", 1]
    with pytest.raises(ValueError, match="as many values as positions"):
        functions["put"](into, (0, 1), [1])
    with pytest.raises(IndexError):
        functions["put"](into, (4,), [1])


def test_no_reference_is_lost_or_kept(functions):
    tensor, value = torch.zeros(2), object()
    args, specs = [tensor], ((0, (1,), (1,), 0),)
    before = (sys.getrefcount(tensor), sys.getrefcount(value))
    storage = tensor.untyped_storage()._cdata
    held = _torch.storage_use_count(storage)
    for _ in range(10):
        functions["static_key"](args, (0,))
        functions["aliases"]((tensor,))
        functions["views"](args, specs)
        functions["copies"]((tensor,), (((2,), (1,)),))
        into = [None]
        functions["put"](into, (0,), (value,))
        del into
    assert (sys.getrefcount(tensor), sys.getrefcount(value)) == before
    assert _torch.storage_use_count(storage) == held


def test_one_version_goes_on_with_what_the_other_made(compiled, monkeypatch):
    for name, function in PYTHON.items():
        monkeypatch.setattr(fast, name, function)
    owned = [torch.zeros(2), torch.zeros(3)]
    held = HeldStorages(owned)
    key = fast.static_key(owned, (0, 1))
    fast.install(compiled)
    assert not held.any_held()
    assert fast.static_key(owned, (0, 1)) == key
    alias = owned[1].detach()
    assert held.any_held()
    del alias
    assert fast.is_compiled()


# ---- building


def fresh_loader(monkeypatch, folder, mode="1"):
    """A loader that has loaded nothing, with an empty cache."""
    for name, function in PYTHON.items():
        monkeypatch.setattr(fast, name, function)
    monkeypatch.setattr(fast, "_loader", fast._Loader())
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setenv("CGPASS_FAST", mode)


@pytest.mark.parametrize(
    ("compiler", "expected"),
    [
        ("/nowhere/c++", "No such file"),
        ("false", "false failed with status 1"),
        (f"{sys.executable} -c 'print(\"x.cpp:1: error: bad\"); exit(3)'", "status 3: x.cpp:1"),
    ],
)
def test_a_failed_build_is_said_once_and_python_goes_on(
    monkeypatch, tmp_path, caplog, compiler, expected
):
    fresh_loader(monkeypatch, tmp_path)
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.INFO, "cgpass"):
        fast.start()
        assert not fast.wait()
        assert not fast.wait()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert expected in record.message
    assert list(tmp_path.rglob("*.so")) == []
    assert len(fast.aliases((torch.zeros(1),))) == 1


def test_no_compiler_is_said(monkeypatch, tmp_path, caplog):
    fresh_loader(monkeypatch, tmp_path)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.INFO, "cgpass"):
        assert not fast.wait()
    assert "no C++ compiler" in caplog.text


def test_a_broken_file_in_the_cache_is_not_loaded(monkeypatch, tmp_path, caplog):
    fresh_loader(monkeypatch, tmp_path)
    fast_build.cached_path().write_text("nothing to load")
    with caplog.at_level(logging.INFO, "cgpass"):
        assert not fast.wait()
    assert "can't be loaded" in caplog.text


def test_an_unknown_layout_of_tensors_is_not_compiled_for(monkeypatch, tmp_path, caplog):
    fresh_loader(monkeypatch, tmp_path)
    monkeypatch.setattr(fast_build, "_layout_is_known", lambda: False)
    with caplog.at_level(logging.INFO, "cgpass"):
        assert not fast.wait()
    assert "lays tensors out" in caplog.text


def test_it_can_be_switched_off(monkeypatch, tmp_path, caplog):
    fresh_loader(monkeypatch, tmp_path, mode="0")
    with caplog.at_level(logging.INFO, "cgpass"):
        assert not fast.wait()
    assert caplog.records == []
    assert list(tmp_path.iterdir()) == []


def test_what_the_variable_may_say(monkeypatch):
    for text, mode in {"0": "off", "1": "on", "WAIT": "wait"}.items():
        monkeypatch.setenv("CGPASS_FAST", text)
        assert options.fast_mode() == mode
        assert options.current_defaults() == options.Options()
    monkeypatch.setenv("CGPASS_FAST", "yes")
    with pytest.raises(
        OptionError, match=r"CGPASS_FAST must be one of '0', '1', 'wait', got 'yes'"
    ):
        options.fast_mode()


def test_an_unwritable_cache_is_replaced_by_a_temporary_one(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = fast_build.cached_path()
    assert tmp_path not in path.parents
    assert path.parent.is_dir()


def test_two_processes_at_once_leave_one_file(compiled, tmp_path, monkeypatch):
    del compiled  # there is a compiler
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CGPASS_FAST", "wait")
    monkeypatch.setenv("PYTHONPATH", str(Path(fast.__file__).parents[2]))
    program = (
        "from cgpass.runtime import fast, fast_build; fast.start(); assert fast.is_compiled(); "
        "import torch; print(fast.aliases((torch.ones(1),))[0].item())"
    )
    command = [sys.executable, "-c", program]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in running] == ["1.0", "1.0"]
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [fast_build.cached_path().name]


def test_a_process_that_ends_early_leaves_nothing(compiled, tmp_path, monkeypatch):
    del compiled  # there is a compiler
    monkeypatch.setenv("CGPASS_FAST", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(fast.__file__).parents[2]))
    program = "import time; from cgpass.runtime import fast; fast.start(); time.sleep(0.3)"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
