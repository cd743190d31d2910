"""Real architectures, small: ten training steps through CUDA graphs, bit for bit as without."""

import pytest
import torch

import cgpass
from tests.gpu import harness

pytestmark = harness.MARKS

MODELS = {
    "gpt2": (harness.gpt2, harness.tokens()),
    "llama": (harness.llama, harness.tokens()),
    "bert": (harness.bert, harness.tokens()),
    "resnet": (harness.resnet, harness.images()),
    "vit": (harness.vit, harness.images()),
}


def build(make):
    torch.manual_seed(harness.SEED)
    return make()


def compare(master, data, *, compiler, amp):
    """Runs with graphs, without, and without again as the control; checks every bit."""

    def without(module):
        return harness.cgpass_compile(module, compiler=compiler, driver="none")

    def graphs(module):
        return harness.cgpass_compile(module, compiler=compiler)

    with harness.deterministic():
        ours = harness.train(master, graphs, data, amp=amp)
        plain = harness.train(master, without, data, amp=amp)
        control = harness.train(master, without, data, amp=amp)
    harness.assert_same(ours, plain, control)
    assert plain.counters["replays"] == 0, plain.counters
    return ours, plain


def note(record_property, run):
    for key in ("partitions_captured", "partitions_eager", "replays", "recordings"):
        record_property(key, run.counters[key])


@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("compiler", ["inductor", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_training_without_graphs(name, compiler, amp, record_property):
    make, make_batch = MODELS[name]
    ours, _plain = compare(build(make), harness.batches(make_batch), compiler=compiler, amp=amp)
    note(record_property, ours)
    harness.assert_replayed(ours.counters, captured=2)
    assert ours.losses[-1] != ours.losses[0]


@pytest.mark.parametrize("name", MODELS)
def test_one_partition_gives_what_plain_compile_gives(name):
    make, make_batch = MODELS[name]
    master, data = build(make), harness.batches(make_batch, count=4)
    with harness.deterministic():
        ours = harness.train(master, harness.cgpass_compile, data, amp=True)
        plain = harness.train(master, torch.compile, data, amp=True)
        control = harness.train(master, torch.compile, data, amp=True)
    harness.assert_same(ours, plain, control)
    harness.assert_replayed(ours.counters, captured=2, calls=4)


@pytest.mark.parametrize("make", [harness.gpt2, harness.bert], ids=["gpt2", "bert"])
@pytest.mark.parametrize("compiler", ["inductor", "eager"])
def test_training_with_dropout(make, compiler):
    master = build(lambda: make(dropout=0.1))
    ours, _ = compare(master, harness.batches(harness.tokens()), compiler=compiler, amp=True)
    harness.assert_replayed(ours.counters, captured=2)


@pytest.mark.parametrize("compiler", ["inductor", "eager"])
def test_mixtral_with_bf16_weights_is_one_partition(compiler, record_property):
    master = build(harness.mixtral).to(torch.bfloat16)
    ours, _ = compare(master, harness.batches(harness.tokens()), compiler=compiler, amp=False)
    note(record_property, ours)
    harness.assert_replayed(ours.counters, captured=2)


@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("compiler", ["inductor", "eager"])
def test_mixtral_with_fp32_weights_runs_its_experts_between_graphs(compiler, amp, record_property):
    """The experts' grouped product of fp32 weights reads its offsets on the host."""
    data = harness.batches(harness.tokens())
    ours, _ = compare(build(harness.mixtral), data, compiler=compiler, amp=amp)
    note(record_property, ours)
    counters = ours.counters
    layers = 2
    # Each layer has two grouped products forward and two backward; what lies between is captured.
    assert layers <= counters["partitions_eager"] <= 4 * layers + 2, cgpass.summary()
    assert counters["partitions_captured"] >= 2 * layers, cgpass.summary()
    assert counters["calls"] == harness.STEPS * counters["partitions_captured"], counters
    assert counters["replays"] == counters["calls"] - counters["warmups"], counters
    assert counters["plain_calls"] == 0, counters


def run_inference(master, data, **options):
    harness.fresh()
    module = master.to(harness.DEVICE).eval()
    call = harness.cgpass_compile(module, **options)
    with harness.counted() as counters, torch.no_grad(), harness.autocast(True):
        held = [call(*batch) for batch in data]
    return held, counters


@pytest.mark.parametrize("compiler", ["inductor", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet", "vit"])
def test_inference_keeps_every_output_held(name, compiler):
    make, make_batch = MODELS[name]
    master, data = build(make).model, harness.batches(make_batch, count=6)
    data = [batch[:1] for batch in data]
    if name in ("gpt2", "llama"):
        master = Logits(master)
    with harness.deterministic():
        ours, counters = run_inference(master, data, compiler=compiler)
        plain, _ = run_inference(master, data, compiler=compiler, driver="none")
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert not torch.equal(ours[0], ours[1])
    harness.assert_replayed(counters, captured=1, calls=6)


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids).logits
