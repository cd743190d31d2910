"""Real architectures, small: ten training steps through CUDA graphs, bit for bit as without."""

import pytest
import torch
from benchlib.models import SPECS

import cgpass
from tests.gpu import harness
from tests.usage.programs import Setting, assert_replays, counted, differences, learn, state

pytestmark = harness.MARKS
STEPS = 10
MODELS = ["gpt2", "llama", "bert", "resnet50", "vit_small"]
COMPILERS = pytest.mark.parametrize("compiler", ["inductor", "eager"])
AMP = pytest.mark.parametrize("amp", [False, True], ids=["fp32", "bf16"])


def batches(name, session, dtype=torch.float32):
    for _ in range(STEPS):
        batch = SPECS[name].batch(session.generator, True)
        yield {
            key: (value.to(dtype) if value.is_floating_point() else value).to(session.device)
            for key, value in batch.items()
        }


def trained(name, *, amp, dtype=torch.float32, dropout=None, compiled=None):
    """A program of training steps; GPT-2 and BERT have dropouts of their own."""

    def program(session):
        module = session.module(lambda: SPECS[name].build(True)).to(dtype).train()
        for each in module.modules():
            if isinstance(each, torch.nn.Dropout) and dropout is not None:
                each.p = dropout
        call = (compiled or session.compile)(module)
        optimizer = torch.optim.AdamW(module.parameters(), fused=session.device.type == "cuda")
        for batch in batches(name, session, dtype):
            with torch.autocast(session.device.type, torch.bfloat16, enabled=amp):
                loss = call(**batch)
            yield learn(module, loss, optimizer)
        yield state(module)

    return program


def compare(program, compiler="inductor", plain=None):
    """Runs with graphs, without, and without again as the control; checks every bit. Gives the counters with graphs."""
    setting = Setting(harness.DEVICE, harness.DRIVER, compiler, warn_only=True)
    with counted() as counters:
        ours = setting.run(program)
    without, control = (setting.run(plain or program, driver="none") for _ in range(2))
    unstable = differences(without, control)
    assert not unstable, f"two runs without graphs differ, nothing is proven: {unstable[:5]}"
    found = differences(ours, without)
    assert not found, f"{len(found)} differences from the run without graphs: {found[:5]}"
    assert all(value.isfinite().all() for value in without)
    return counters


def assert_one_partition(counters, *, graphs=2):
    """Of each graph, called in each step."""
    partitions = (counters["partitions_captured"], counters["partitions_eager"])
    assert partitions == (graphs, 0), f"{counters}\n{cgpass.summary()}"
    assert counters["calls"] == graphs * STEPS, counters
    assert counters["warmups"] < counters["calls"] / 2, counters
    assert_replays(counters)


@AMP
@COMPILERS
@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_training_without_graphs(name, compiler, amp):
    assert_one_partition(compare(trained(name, amp=amp), compiler))


@pytest.mark.parametrize("name", MODELS)
def test_one_partition_gives_what_plain_compile_gives(name):
    made = {"amp": True, "dropout": 0.0}
    plain = trained(name, compiled=torch.compile, **made)
    assert_one_partition(compare(trained(name, **made), plain=plain))


@COMPILERS
def test_mixtral_with_bf16_weights_is_one_partition(compiler):
    program = trained("mixtral", amp=False, dtype=torch.bfloat16)
    assert_one_partition(compare(program, compiler))


@AMP
@COMPILERS
def test_mixtral_with_fp32_weights_runs_its_experts_between_graphs(compiler, amp):
    """The experts' grouped product of fp32 weights reads its offsets on the host."""
    counters = compare(trained("mixtral", amp=amp), compiler)
    # The layer has two grouped products forward and two backward; what lies between is captured.
    assert 1 <= counters["partitions_eager"] <= 4 + 2, cgpass.summary()
    assert counters["partitions_captured"] >= 2, cgpass.summary()
    assert counters["calls"] == STEPS * counters["partitions_captured"], counters
    assert_replays(counters)
