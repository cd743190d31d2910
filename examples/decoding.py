"""Greedy decoding with a static KV cache: the prompt runs without a graph, each further token is one replay.

The cache is made once and reset between prompts. It stays where it lies, so that one recording serves all of them; a
new cache would be recorded anew.
"""

import os
import sys
from importlib.util import find_spec

os.environ.setdefault("HF_HUB_OFFLINE", "1")

if not find_spec("transformers"):
    print("examples/decoding.py needs transformers: pip install -e '.[demo]'")
    sys.exit()

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import cgpass

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # there the graphs are simulated, and Inductor, slow on CPU, is left out
    cgpass.set_defaults(driver="simulated", compiler="eager")

VOCABULARY, BATCH, LONGEST = 128, 2, 64


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
    )
    return LlamaForCausalLM(config).to(DEVICE).eval()


class Decoder:
    """A model, what continues it token by token, and a cache that both write."""

    def __init__(self, model: LlamaForCausalLM, one_token: torch.nn.Module) -> None:
        self.model = model
        self.one_token = one_token
        self.cache = StaticCache(config=model.config, max_cache_len=LONGEST)

    @torch.no_grad()
    def __call__(self, prompt: torch.Tensor, new_tokens: int) -> torch.Tensor:
        """Continue (batch, length) tokens; returns (batch, new_tokens)."""
        self.cache.reset()
        logits = self.model(prompt, past_key_values=self.cache).logits
        tokens = [logits[:, -1:].argmax(dim=-1)]
        while len(tokens) < new_tokens:
            logits = self.one_token(tokens[-1], past_key_values=self.cache).logits
            tokens.append(logits.argmax(dim=-1))
        return torch.cat(tokens, dim=1)


def main() -> None:
    torch.manual_seed(0)
    model = make_model()
    plain = Decoder(model, model)
    graphed = Decoder(model, torch.compile(model, backend="cgpass"))
    same = True
    for length in (5, 9, 7):  # prompts of any length: they are not part of the graph
        prompt = torch.randint(VOCABULARY, (BATCH, length), device=DEVICE)
        found = graphed(prompt, new_tokens=20)
        same &= torch.equal(found, plain(prompt, new_tokens=20))
    print(cgpass.summary())
    counts = cgpass.counters()
    print(", ".join(f"{name} {counts[name]}" for name in ("recordings", "replays", "plain_calls")))
    print(f"the same tokens as without graphs: {same}")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
