"""The models of the benchmark, with random weights: real ones, and small ones that show what the host does.

A workload is a module whose forward returns the loss, and a few batches to rotate through. The loss is part of the
module in every arm, so that all arms run the same forward and backward.
"""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Batch = dict[str, torch.Tensor]
NUM_BATCHES = 4


class LanguageLoss(nn.Module):
    """A transformers model with a loss of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, labels=labels).loss


class ImageLoss(nn.Module):
    """A classifier with cross entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(image), label)


class SquareLoss(nn.Module):
    """Layers one after the other, each under a checkpoint function if there is one, and the mean square."""

    def __init__(self, layers: list[nn.Module], saving: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.saving = saving

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.saving is None else self.saving(layer, x, use_reentrant=False)
        return x.square().mean()


class Residual(nn.Sequential):
    """Layers one after the other, and what goes around them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def small_layer(width: int = 64) -> nn.Module:
    """Make a layer of four parameters that gives the device next to nothing to do."""
    return Residual(nn.LayerNorm(width), nn.Linear(width, width))


def feed_forward(width: int, dropout: float = 0.1) -> nn.Module:
    up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    return Residual(nn.LayerNorm(width), up, nn.GELU(), down, nn.Dropout(dropout))


class Attention(nn.Module):
    """One head of self-attention with dropout."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.linear(x)[:, None]
        mixed = F.scaled_dot_product_attention(q, q, q, dropout_p=self.dropout)
        return x + mixed[:, 0]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model: how it and a batch are made on the CPU (tiny ones where asked for), and what is compiled by itself."""

    title: str
    build: Callable[[bool], nn.Module]
    batch: Callable[[torch.Generator, bool], Batch]
    autocast: bool = True
    dtype: torch.dtype = torch.float32
    regions: Callable[[Any], Iterable[nn.Module]] | None = None


@dataclass(kw_only=True)
class Workload:
    """A model on the CPU that every arm copies, and batches on the device."""

    spec: ModelSpec
    device: torch.device
    master: nn.Module
    batches: list[Batch]
    inference: bool = False


def tokens(batch: int, seq: int, vocab: int) -> Callable[[torch.Generator, bool], Batch]:
    def make(generator: torch.Generator, tiny: bool) -> Batch:
        shape = (2, 16) if tiny else (batch, seq)
        ids = torch.randint(0, 128 if tiny else vocab, shape, generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}

    return make


def images(batch: int, size: int) -> Callable[[torch.Generator, bool], Batch]:
    def make(generator: torch.Generator, tiny: bool) -> Batch:
        count, side = (2, 32) if tiny else (batch, size)
        return {
            "image": torch.randn(count, 3, side, side, generator=generator),
            "label": torch.randint(0, 10, (count,), generator=generator),
        }

    return make


def numbers(*shape: int) -> Callable[[torch.Generator, bool], Batch]:
    return lambda generator, tiny: {"x": torch.randn(shape, generator=generator)}


def transformer(
    name: str, small: dict[str, int], full: dict[str, Any] | None = None
) -> Callable[[bool], nn.Module]:
    def build(tiny: bool) -> nn.Module:
        kind = getattr(importlib.import_module("transformers"), name)
        model = kind(kind.config_class(**(full or {}) | (small if tiny else {})))
        if "LMHead" in name:
            # or it is looked up with a log message: a graph break
            model.loss_type = "ForCausalLM"
        return LanguageLoss(model)

    return build


TINY = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}
TINY |= {"num_attention_heads": 2, "vocab_size": 128}
GROUPED = TINY | {"num_key_value_heads": 2}

gpt2 = transformer(
    "GPT2LMHeadModel",
    {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 128, "n_positions": 32},
    {"use_cache": False},
)
bert = transformer("BertForMaskedLM", TINY)
SIZES = {"num_hidden_layers": 16, "hidden_size": 1024, "intermediate_size": 2816}
SIZES |= {"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000}
llama = transformer("LlamaForCausalLM", GROUPED, SIZES | {"use_cache": False})
SIZES = {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1792}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 8, "num_local_experts": 8}
SIZES |= {"num_experts_per_tok": 2, "vocab_size": 32000, "use_cache": False}
mixtral = transformer("MixtralForCausalLM", GROUPED | {"num_local_experts": 4}, SIZES)


def classifier(name: str, tiny_name: str, **small: int) -> Callable[[bool], nn.Module]:
    def build(tiny: bool) -> nn.Module:
        create = importlib.import_module("timm").create_model
        return ImageLoss(create(tiny_name, **small) if tiny else create(name))

    return build


resnet50 = classifier("resnet50", "resnet18")
VIT = "vit_small_patch16_224"
vit_small = classifier(VIT, VIT, img_size=32, depth=1, embed_dim=48, num_heads=3)


def stack(
    depth: int, layer: Callable[[], nn.Module] = small_layer, saving: str = ""
) -> Callable[[bool], nn.Module]:
    """Return what builds layers, each under a module's `checkpoint` where one is named."""

    def build(tiny: bool) -> nn.Module:
        function = importlib.import_module(saving).checkpoint if saving else None
        return SquareLoss([layer() for _ in range(min(depth, 3) if tiny else depth)], function)

    return build


class ActorCritic(nn.Module):
    """The loss of an actor and critic that share a body."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        layers = nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        self.body = nn.Sequential(*layers)
        self.policy, self.value = nn.Linear(width, 4), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, label: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        scores, values = self.policy(hidden).log_softmax(-1), self.value(hidden).squeeze(-1)
        chosen = scores.gather(-1, label.unsqueeze(-1)).squeeze(-1)
        entropy = -(scores.exp() * scores).sum(-1).mean()
        error = returns - values
        return error.square().mean() - (chosen * error.detach()).mean() - 0.01 * entropy


def episodes(generator: torch.Generator, tiny: bool) -> Batch:
    count = 8 if tiny else 1024
    return {
        "x": torch.randn(count, 8, generator=generator),
        "label": torch.randint(0, 4, (count,), generator=generator),
        "returns": torch.randn(count, generator=generator),
    }


LLAMA = {"build": llama, "batch": tokens(1, 256, 32000)}
MIXTRAL = {"build": mixtral, "batch": tokens(1, 128, 32000)}
FP32 = {"autocast": False}


def plain_layers(width: int, depth: int, batch: int) -> ModelSpec:
    """Linear and tanh, again and again: what physics, control and tables are learned with."""
    return ModelSpec(
        title=f"{depth} x {width}, B{batch}",
        build=stack(depth, lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh())),
        batch=numbers(batch, width),
        **FP32,
    )


REAL: dict[str, ModelSpec] = {
    "gpt2": ModelSpec(title="GPT-2 small, B2 T128", build=gpt2, batch=tokens(2, 128, 50257)),
    "llama": ModelSpec(title="Llama 16 x 1024, B1 T256", **LLAMA),
    "llama_layers": ModelSpec(
        title="Llama by layers, B1 T256", regions=lambda loss: loss.model.model.layers, **LLAMA
    ),
    "bert": ModelSpec(title="BERT-base, B4 T128", build=bert, batch=tokens(4, 128, 30522)),
    "resnet50": ModelSpec(title="ResNet-50, B8", build=resnet50, batch=images(8, 224)),
    "vit_small": ModelSpec(title="ViT-S, B8", build=vit_small, batch=images(8, 224)),
    "mixtral": ModelSpec(title="Mixtral 8 x 512, 8 experts, B1 T128", **MIXTRAL),
    "mixtral_bf16": ModelSpec(
        title="Mixtral, bf16 weights, no autocast", autocast=False, dtype=torch.bfloat16, **MIXTRAL
    ),
}
"""Models that a command measures by default."""

SPECS: dict[str, ModelSpec] = REAL | {
    **{
        f"stack{n}": ModelSpec(
            title=f"{n} small layer{'s' * (n > 1)}", build=stack(n), batch=numbers(4, 64), **FP32
        )
        for n in (1, 10, 100)
    },
    "mlp3": plain_layers(256, 3, 256),
    "mlp50": plain_layers(64, 50, 8),
    **{
        f"mlp_{width}x{depth}": plain_layers(width, depth, 64)
        for width in (64, 256, 1024)
        for depth in (3, 12, 50)
    },
    "actor_critic": ModelSpec(
        title="actor and critic, B1024", build=lambda tiny: ActorCritic(), batch=episodes, **FP32
    ),
    "layer": ModelSpec(
        title="attention and feed-forward, width 64",
        build=lambda tiny: SquareLoss([Attention(64, 0.0), feed_forward(64, 0.0)]),
        batch=numbers(1, 16, 64),
        **FP32,
    ),
    "attentions": ModelSpec(
        title="48 checkpointed attentions, dropout",
        build=stack(48, lambda: Attention(64, 0.1), "torch.utils.checkpoint"),
        batch=numbers(2, 64, 64),
        **FP32,
    ),
    **{
        name: ModelSpec(
            title=f"12 blocks, {title}",
            build=stack(12, lambda: feed_forward(1024), saving),
            batch=numbers(8, 512, 1024),
            **FP32,
        )
        for name, title, saving in (
            ("blocks", "no checkpoints", ""),
            ("blocks_torch", "torch.utils.checkpoint", "torch.utils.checkpoint"),
            ("blocks_cgpass", "cgpass.checkpoint", "cgpass"),
        )
    },
}


def make(name: str, device: torch.device, *, tiny: bool, inference: bool = False) -> Workload:
    """Build the named model and its batches from fixed seeds."""
    spec = SPECS[name]
    torch.manual_seed(0)
    master = spec.build(tiny).to(spec.dtype)
    generator = torch.Generator().manual_seed(1)
    batches = [
        {
            key: (value.to(spec.dtype) if value.is_floating_point() else value).to(device)
            for key, value in spec.batch(generator, tiny).items()
        }
        for _ in range(NUM_BATCHES)
    ]
    return Workload(spec=spec, device=device, master=master, batches=batches, inference=inference)
