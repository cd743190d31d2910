"""What the GPU tests share: small models, a training run, comparison with the run without graphs.

The suite runs on CUDA. With GPU_SUITE_DEVICE=cpu the same tests run through the simulated driver.
"""

import contextlib
import copy
import os
import warnings
from dataclasses import dataclass, field

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch import nn

import cgpass

DEVICE = torch.device(os.environ.get("GPU_SUITE_DEVICE", "cuda"))
DRIVER = "auto" if DEVICE.type == "cuda" else "simulated"
MARKS = [
    pytest.mark.filterwarnings("default"),
    *([pytest.mark.gpu] if DEVICE.type == "cuda" else []),
]
STEPS = 10
SEED = 7


class LanguageLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, labels=ids).loss


class ImageLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, image, label):
        return nn.functional.cross_entropy(self.model(image), label)


def tokens(vocab=256, shape=(2, 32)):
    return lambda generator: (torch.randint(0, vocab, shape, generator=generator),)


def images(side=64, count=4, classes=10):
    return lambda generator: (
        torch.randn(count, 3, side, side, generator=generator),
        torch.randint(0, classes, (count,), generator=generator),
    )


def gpt2(dropout=0.0):
    import transformers

    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2,
            n_embd=64,
            n_head=4,
            vocab_size=256,
            n_positions=64,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            use_cache=False,
        )
    )
    model.loss_type = "ForCausalLM"  # else it is looked up with a log message: a graph break
    return LanguageLoss(model)


def llama():
    import transformers

    return LanguageLoss(
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                num_hidden_layers=2,
                hidden_size=64,
                intermediate_size=128,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=256,
                use_cache=False,
            )
        )
    )


def bert(dropout=0.0):
    import transformers

    return LanguageLoss(
        transformers.BertForMaskedLM(
            transformers.BertConfig(
                num_hidden_layers=2,
                hidden_size=64,
                intermediate_size=128,
                num_attention_heads=4,
                vocab_size=256,
                hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
            )
        )
    )


def mixtral():
    import transformers

    return LanguageLoss(
        transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                num_hidden_layers=2,
                hidden_size=64,
                intermediate_size=128,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_local_experts=4,
                num_experts_per_tok=2,
                vocab_size=256,
                use_cache=False,
            )
        )
    )


def resnet():
    """ResNet-50 with narrow layers: every kind of block, little to compile per kernel."""
    import timm

    return ImageLoss(timm.create_model("resnet50", num_classes=10, base_width=16))


def vit():
    import timm

    return ImageLoss(
        timm.create_model(
            "vit_small_patch16_224", img_size=64, depth=2, embed_dim=96, num_heads=3, num_classes=10
        )
    )


@dataclass
class Run:
    """What one training run gave."""

    losses: list = field(default_factory=list)
    state: dict = field(default_factory=dict)
    grads: dict = field(default_factory=dict)
    rng: object = None
    counters: dict = field(default_factory=dict)


def moved(values):
    return tuple(value.to(DEVICE) for value in values)


def batches(make, count=STEPS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(SEED)
    made = (moved(make(generator)) for _ in range(count))
    return [tuple(v.to(dtype) if v.is_floating_point() else v for v in batch) for batch in made]


def autocast(enabled):
    if not enabled:
        return contextlib.nullcontext()
    return torch.autocast(DEVICE.type, dtype=torch.bfloat16)


@contextlib.contextmanager
def deterministic():
    """Deterministic algorithms; an op that has none only warns and the control run shows it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.matmul.allow_tf32 = tf32


@contextlib.contextmanager
def counted():
    """Yields a dict that holds the differences of the counters at exit."""
    before = cgpass.counters()
    found = {}
    yield found
    found.update({key: value - before[key] for key, value in cgpass.counters().items()})


def rng_state():
    return torch.cuda.get_rng_state() if DEVICE.type == "cuda" else torch.get_rng_state()


def fresh():
    """Drops all compiled code, so that two runs of one test share nothing."""
    torch.compiler.reset()
    cgpass.reset()


def cgpass_compile(module, **options):
    return torch.compile(module, backend=cgpass.cgpass, options={"driver": DRIVER, **options})


def train(master, compiled, data, *, amp=False, lr=1e-3):
    """Trains a copy of `master` through `compiled(module)`; one step per batch."""
    fresh()
    module = copy.deepcopy(master).to(DEVICE).train()
    call = compiled(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, fused=DEVICE.type == "cuda")
    torch.manual_seed(SEED)
    run = Run()
    with counted() as run.counters:
        for batch in data:
            optimizer.zero_grad(set_to_none=True)
            with autocast(amp):
                loss = call(*batch)
            loss.backward()
            optimizer.step()
            run.losses.append(loss.detach())
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
    run.losses = [float(loss) for loss in run.losses]
    run.grads = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    run.state = {name: value.clone() for name, value in module.state_dict().items()}
    run.rng = rng_state()
    return run


def differences(ours, theirs):
    """Names of what differs between two runs, bit for bit."""
    found = [
        f"loss of step {step}: {a!r} against {b!r}"
        for step, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True))
        if a != b
    ]
    for kind in ("state", "grads"):
        mine, other = getattr(ours, kind), getattr(theirs, kind)
        if mine.keys() != other.keys():
            found.append(f"{kind}: {sorted(mine.keys() ^ other.keys())} on one side only")
        found += [
            f"{kind} {name}: differs by up to {(mine[name] - other[name]).abs().max().item()}"
            for name in mine.keys() & other.keys()
            if not torch.equal(mine[name], other[name])
        ]
    if not torch.equal(ours.rng, theirs.rng):
        found.append("the RNG state afterwards")
    return found


def assert_same(ours, theirs, control=None):
    """Fails on any bit that differs; first shows that the plain runs are repeatable."""
    if control is not None:
        unstable = differences(theirs, control)
        assert not unstable, f"two runs without graphs differ, nothing is proven: {unstable[:5]}"
    found = differences(ours, theirs)
    assert not found, f"{len(found)} differences from the run without graphs: {found[:5]}"


def assert_replayed(counters, *, captured, eager=0, calls=STEPS, per_call=None):
    """Every captured partition was called each step and replayed after its warm-up.

    Args:
        counters: Differences of the counters over the run.
        captured: Captured partitions of all graphs together.
        eager: Eager partitions of all graphs together.
        calls: Steps.
        per_call: Calls of captured partitions in a step, if not each once.
    """
    assert (counters["partitions_captured"], counters["partitions_eager"]) == (captured, eager), (
        f"{counters}\n{cgpass.summary()}"
    )
    expected = calls * (captured if per_call is None else per_call)
    assert counters["calls"] == expected, counters
    assert counters["plain_calls"] == 0, counters
    assert counters["skips"] == 0, counters
    assert counters["warmups"] < expected / 2, counters
    assert counters["replays"] == counters["calls"] - counters["warmups"], counters
    assert counters["recordings"] >= captured, counters
