"""A mixture of experts: what depends on the data runs between CUDA graphs, all else inside of them.

The experts' tokens come in groups whose sizes only the router knows. What needs these sizes on the host is a partition
of its own, and `cgpass.explain` names it. Experts that are computed without them are captured with all the rest.
"""

import os
import sys
from importlib.util import find_spec

os.environ.setdefault("HF_HUB_OFFLINE", "1")

if not find_spec("transformers"):
    print("examples/moe.py needs transformers: pip install -e '.[demo]'")
    sys.exit()

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import cgpass

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # there the graphs are simulated, and Inductor, slow on CPU, is left out
    cgpass.set_defaults(driver="simulated", compiler="eager")

VOCABULARY = 64


def make_model(experts: str) -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    model = MixtralForCausalLM(config)
    model.set_experts_implementation(experts)
    model.loss_type = "ForCausalLM"  # left to be guessed, it logs a warning that breaks the graph
    return model.to(DEVICE)


def main() -> None:
    tokens = torch.randint(VOCABULARY, (2, 8), device=DEVICE)
    for experts in ("grouped_mm", "batched_mm"):
        report = cgpass.explain(make_model(experts), input_ids=tokens, labels=tokens)
        captured, all_of_it = report.work
        print(f"experts as {experts}: {captured} of {all_of_it} operators in CUDA graphs")
        for graph in report.graphs:
            plain = [part for part in graph.partitions if not part.captured]
            parts = len(graph.partitions)
            print(f"  {graph.direction}: {parts} partition{'s' * (parts != 1)}, {len(plain)} plain")
            for reason in plain[0].reasons if plain else ():
                print(f"    {reason.op} [{reason.code}]: {reason.detail}")


if __name__ == "__main__":
    main()
