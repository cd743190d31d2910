"""Input that cgpass refuses with a clear error, or runs without a graph with a reason."""

import pytest
import torch

import cgpass
from cgpass.errors import CaptureError, DriverUnavailableError, OptionError
from tests.usage import programs
from tests.usage.programs import FindsRows, long_enough

X = torch.ones(4, 8)


def compiled(fn, **options):
    torch.compiler.reset()
    options = {"driver": "simulated", "compiler": "eager", **options}
    return torch.compile(fn, backend=cgpass.cgpass, options=options)


def cause(error):
    """The error that a backend raised, out of Dynamo's own."""
    return getattr(error.value, "inner_exception", None) or error.value


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"inductor": ["x"]}, "must be a dict of Inductor config names and values"),
        (
            {"max_autotune": True},
            "it is a setting of Inductor, so give it as options={'inductor': {'max_autotune': True}}",
        ),
        (
            {"triton.cudagraphs": True},
            "unknown option 'triton.cudagraphs'; cgpass makes the CUDA graphs; leave Inductor's own out",
        ),
        (
            {"inductor": {"max_autotun": True}},
            "is not a setting of Inductor; did you mean 'max_autot",
        ),
        ({"inductor": {"triton.cudagraphs": True}}, "cgpass makes the CUDA graphs"),
        ({"inductor": {"custom_partitioner_fn": None}}, "cgpass splits the joint graph itself"),
        pytest.param(
            {"driver": "cuda"},
            'driver="cuda", but torch finds no CUDA device; use driver="auto", or driver="simulated" on CPU',
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA"),
        ),
    ],
    ids=str,
)
def test_options_that_are_refused(options, text):
    with pytest.raises(Exception, match="cgpass") as error:
        compiled(long_enough, **options)(X)
    kind = DriverUnavailableError if options == {"driver": "cuda"} else OptionError
    assert isinstance(cause(error), kind)
    assert text in str(error.value)


def test_mode_is_refused():
    torch.compiler.reset()
    call = torch.compile(long_enough, backend=cgpass.cgpass, mode="reduce-overhead")
    with pytest.raises(Exception, match="reduce-overhead") as error:
        call(X)
    assert isinstance(cause(error), OptionError)
    assert "leave mode out" in str(error.value)


def test_an_operator_that_is_none_is_named(caplog):
    compiled(long_enough, unsafe_ops=["aten::no_such_op", "aten::sin", "aten::hstc"])(X)
    messages = [each for each in caplog.messages if "no such operator" in each]
    assert messages == [
        "unsafe_ops names aten::hstc, but no such operator is registered; did you mean aten::histc?",
        "unsafe_ops names aten::no_such_op, but no such operator is registered",
    ]


def test_a_device_that_is_neither_cpu_nor_cuda(caplog):
    call = compiled(long_enough)
    with programs.counted() as counters:
        for _ in range(3):
            assert call(torch.ones(4, device="meta")).device.type == "meta"
    assert (counters["recordings"], counters["replays"]) == (0, 0), counters
    (said,) = [r.getMessage() for r in caplog.records if r.name.startswith("cgpass")]
    assert said.startswith("the inference graph of programs.py:")
    assert " in long_enough runs without CUDA graphs: " in said


def quantised(x):
    return torch.quantize_per_tensor(long_enough(x), 0.1, 2, torch.quint8)


VALUES = {
    "sparse outputs": lambda x: (long_enough(x) * 2).to_sparse(),
    "sparse inputs": lambda x, s: long_enough(torch.sparse.mm(s, x)),
    "quantised outputs": quantised,
    "quantised inside": lambda x: long_enough(quantised(x).dequantize()) + x,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", VALUES)
def test_sparse_and_quantised_values_are_right(kind):
    fn = VALUES[kind]
    call = compiled(fn, on_skip="silent")
    for value in range(4):
        inputs = [torch.full((3, 3), float(value)), torch.eye(3).to_sparse()]
        inputs = inputs[: 1 + (kind == "sparse inputs")]
        ours, plain = (
            each.int_repr() if each.is_quantized else each.to_dense()
            for each in (call(*inputs), fn(*inputs))
        )
        assert torch.equal(ours, plain)


def test_raise_names_what_is_in_the_way():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        call = compiled(FindsRows(), on_skip="raise")
        with pytest.raises(Exception, match="without CUDA graphs") as error:
            call(X)
    assert isinstance(cause(error), CaptureError)
    assert "aten.nonzero" in str(error.value)
    assert "programs.py" in str(error.value)


def test_warn_says_it_once_per_graph(caplog):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        call = compiled(FindsRows())
        with torch.no_grad():
            for _ in range(3):
                call(X)
    said = [r.getMessage() for r in caplog.records if r.name.startswith("cgpass")]
    assert len(said) == 1
    assert "aten.nonzero" in said[0]
    assert "programs.py" in said[0]
