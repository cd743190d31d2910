"""Hugging Face's Trainer on a model that was compiled with backend="cgpass": one line before it.

`TrainingArguments(torch_compile_backend=...)` takes only names that accelerate lists, and those of other packages are
not among them. `model.compile` does the same: the model is compiled in place, and Trainer calls it.
"""

import os
import sys
import tempfile
from importlib.util import find_spec

os.environ.setdefault("HF_HUB_OFFLINE", "1")

if not (find_spec("transformers") and find_spec("accelerate")):
    print(
        "examples/huggingface_trainer.py needs transformers and accelerate: pip install -e '.[demo]'"
    )
    sys.exit()

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import cgpass

if not torch.cuda.is_available():  # then graphs are simulated; Inductor, slow on CPU, is left out
    cgpass.set_defaults(driver="simulated", compiler="eager")

VOCABULARY, LENGTH, STEPS = 64, 16, 10


def make_model() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # left to be guessed, it logs a warning that breaks the graph
    return model


def make_texts(number: int) -> list[dict[str, torch.Tensor]]:
    """Texts that count upwards from anywhere."""
    starts = torch.randint(VOCABULARY, (number, 1))
    tokens = (starts + torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    torch.manual_seed(0)
    model = make_model()
    model.compile(backend="cgpass")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = Trainer(model, arguments, train_dataset=make_texts(8 * 2 * STEPS))
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(cgpass.summary())
    counts = cgpass.counters()
    print(", ".join(f"{name} {counts[name]}" for name in ("recordings", "replays", "plain_calls")))


if __name__ == "__main__":
    main()
