"""The models of the benchmark: transformers and timm configs with random weights.

A workload is a module whose forward returns the loss, and a few batches to rotate through. The loss
is part of the compiled module in every arm, so that all arms run the same forward and backward.
"""

from __future__ import annotations

import copy
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import timm
import torch
import transformers
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Batch = dict[str, torch.Tensor]

NUM_BATCHES = 4


class LanguageLoss(nn.Module):
    """A transformers model with a loss of its own; forward returns only the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Loss of token ids and labels, both (batch, seq) int64."""
        return self.model(input_ids=input_ids, labels=labels).loss


class ImageLoss(nn.Module):
    """A classifier with cross entropy; forward returns only the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Loss of images (batch, 3, height, width) and labels (batch,) int64."""
        return nn.functional.cross_entropy(self.model(image), label)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One row of the benchmark.

    Attributes:
        name: Name on the command line.
        title: Name in the report, with the batch.
        build: Makes the loss module on the CPU; the argument asks for a tiny one.
        batch: Makes one batch on the CPU from (generator, tiny).
        autocast: Whether the forward runs under bf16 autocast.
        dtype: Type of the weights.
        regions: Finds the modules that are compiled, each by itself; None where the whole is.
    """

    name: str
    title: str
    build: Callable[[bool], nn.Module]
    batch: Callable[[torch.Generator, bool], Batch]
    autocast: bool = True
    dtype: torch.dtype = torch.float32
    regions: Callable[[nn.Module], Iterable[nn.Module]] | None = None


@dataclass(kw_only=True)
class Workload:
    """A model on the CPU that every arm copies, and batches on the device.

    `inference` has arms call it without gradients and in eval mode.
    """

    spec: ModelSpec
    device: torch.device
    master: nn.Module
    batches: list[Batch] = field(default_factory=list)
    inference: bool = False

    def instance(self, tag: str) -> nn.Module:
        """A copy of the model on the device, in training mode.

        Its forward has a code object of its own, so that Dynamo's cache of one arm is never
        searched by another.
        """
        module = copy.deepcopy(self.master).to(self.device).train()
        base = type(module)
        code = base.forward.__code__.replace(co_name=f"forward_{tag}")
        forward = types.FunctionType(code, base.forward.__globals__, f"forward_{tag}")
        module.__class__ = type(f"{base.__name__}_{tag}", (base,), {"forward": forward})
        return module


def tokens(batch: int, seq: int, vocab: int) -> Callable[[torch.Generator, bool], Batch]:
    """Maker of random token batches; labels are the tokens themselves."""

    def make(generator: torch.Generator, tiny: bool) -> Batch:
        shape = (2, 16) if tiny else (batch, seq)
        high = 128 if tiny else vocab
        ids = torch.randint(0, high, shape, generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}

    return make


def images(batch: int, size: int) -> Callable[[torch.Generator, bool], Batch]:
    """Maker of random image batches."""

    def make(generator: torch.Generator, tiny: bool) -> Batch:
        count, side = (2, 32) if tiny else (batch, size)
        return {
            "image": torch.randn(count, 3, side, side, generator=generator),
            "label": torch.randint(0, 10, (count,), generator=generator),
        }

    return make


def gpt2(tiny: bool) -> nn.Module:
    """GPT-2 small."""
    small = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 128, "n_positions": 32}
    config = transformers.GPT2Config(use_cache=False, **(small if tiny else {}))
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else it is looked up with a log message: a graph break
    return LanguageLoss(model)


def bert(tiny: bool) -> nn.Module:
    """BERT-base with its masked-token head."""
    small = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 128,
    }
    return LanguageLoss(
        transformers.BertForMaskedLM(transformers.BertConfig(**(small if tiny else {})))
    )


def llama(tiny: bool) -> nn.Module:
    """Llama of 16 layers, hidden size 1024."""
    config = transformers.LlamaConfig(
        num_hidden_layers=1 if tiny else 16,
        hidden_size=32 if tiny else 1024,
        intermediate_size=64 if tiny else 2816,
        num_attention_heads=2 if tiny else 16,
        num_key_value_heads=2 if tiny else 16,
        vocab_size=128 if tiny else 32000,
        use_cache=False,
    )
    return LanguageLoss(transformers.LlamaForCausalLM(config))


def mixtral(tiny: bool) -> nn.Module:
    """Mixtral of 8 layers, hidden size 512, 8 experts, two of them per token."""
    config = transformers.MixtralConfig(
        num_hidden_layers=1 if tiny else 8,
        hidden_size=32 if tiny else 512,
        intermediate_size=64 if tiny else 1792,
        num_attention_heads=2 if tiny else 8,
        num_key_value_heads=2 if tiny else 8,
        num_local_experts=4 if tiny else 8,
        num_experts_per_tok=2,
        vocab_size=128 if tiny else 32000,
        use_cache=False,
    )
    return LanguageLoss(transformers.MixtralForCausalLM(config))


def resnet50(tiny: bool) -> nn.Module:
    """ResNet-50 (ResNet-18 when tiny)."""
    return ImageLoss(timm.create_model("resnet18" if tiny else "resnet50", num_classes=1000))


def vit_small(tiny: bool) -> nn.Module:
    """ViT-S/16."""
    small = {"img_size": 32, "depth": 1, "embed_dim": 48, "num_heads": 3}
    return ImageLoss(timm.create_model("vit_small_patch16_224", **(small if tiny else {})))


SPECS = {
    spec.name: spec
    for spec in (
        ModelSpec(name="gpt2", title="GPT-2 small, B2 T128", build=gpt2,
                  batch=tokens(2, 128, 50257)),
        ModelSpec(name="llama", title="Llama 16 x 1024, B1 T256", build=llama,
                  batch=tokens(1, 256, 32000)),
        ModelSpec(name="llama_layers", title="Llama by layers, B1 T256", build=llama,
                  batch=tokens(1, 256, 32000), regions=lambda loss: loss.model.model.layers),
        ModelSpec(name="bert", title="BERT-base, B4 T128", build=bert,
                  batch=tokens(4, 128, 30522)),
        ModelSpec(name="resnet50", title="ResNet-50, B8", build=resnet50, batch=images(8, 224)),
        ModelSpec(name="vit_small", title="ViT-S, B8", build=vit_small, batch=images(8, 224)),
        ModelSpec(name="mixtral", title="Mixtral 8 x 512, 8 experts, B1 T128", build=mixtral,
                  batch=tokens(1, 128, 32000)),
        ModelSpec(name="mixtral_bf16", title="Mixtral, bf16 weights, no autocast", build=mixtral,
                  batch=tokens(1, 128, 32000), autocast=False, dtype=torch.bfloat16),
    )
}  # fmt: skip


def title(name: str, *, tiny: bool) -> str:
    """The named model's title; a tiny one is not what the title says."""
    return SPECS[name].title + " (tiny)" * tiny


def workload(name: str, device: torch.device, *, tiny: bool, seed: int = 0) -> Workload:
    """Builds the named model and its batches from a seed."""
    spec = SPECS[name]
    torch.manual_seed(seed)
    master = spec.build(tiny).to(spec.dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    made = [spec.batch(generator, tiny) for _ in range(NUM_BATCHES)]
    moved = [
        {
            key: (value.to(spec.dtype) if value.is_floating_point() else value).to(device)
            for key, value in batch.items()
        }
        for batch in made
    ]
    return Workload(spec=spec, device=device, master=master, batches=moved)
