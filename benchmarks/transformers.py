"""Whole generations with small Llamas of Hugging Face transformers, by `model.generate`.

Contestants are `sdpa` and `fastattn`, the values of `attn_implementation`, with the cache that transformers
makes, and `fastattn_cache`, which passes a `GrowingCache`; `sdpa_cache` passes that to `sdpa`. Weights are
random, prompts too, half of the cases have prompts of different lengths, padded on the left; speed does not
depend on what the weights are. A case is one call of generate, greedy.
"""

import functools
from dataclasses import dataclass

import torch

import fastattn.integrations.transformers as integration

from .cases import Bar, Contestant, TimedCase
from .machine import Peer, version_of

PEERS = (Peer("torch"), Peer("transformers"))
BARS = (
    Bar(
        "generation of 256 tokens, batch 4",
        "bar",
        geomean=1.3,
        contestant="fastattn_cache",
        baselines=("sdpa",),
    ),
)

VOCABULARY, BATCH, NEW = 4096, 4, 256


@functools.cache
def llama(hidden: int, layers: int, heads: int, key_heads: int):
    from transformers import LlamaConfig, LlamaForCausalLM

    integration.register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, max_position_embeddings=8192,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@dataclass(frozen=True)
class TransformersCase(TimedCase):
    hidden: int
    layers: int
    heads: int
    key_heads: int
    prompt: int
    padded: bool
    new: int = NEW
    tags: tuple[str, ...] = ("bar",)
    quick: bool = False
    dtype: str = "fp32"
    family: str = "transformers"

    names = ("sdpa", "sdpa_cache", "fastattn", "fastattn_cache")
    baselines = ("sdpa", "sdpa_cache")
    same_as = dict.fromkeys(names[1:], names[0])
    roofs = ("fp32",)
    is_there = version_of("transformers") is not None

    @property
    def name(self) -> str:
        model = f"llama{self.hidden}x{self.layers}/{self.heads}-{self.key_heads}"
        return f"transformers/{model}/{self.prompt}+{self.new}/{'padded' if self.padded else 'even'}"

    @property
    def flops(self) -> int:
        """Of the weights, once for each token: what no contestant can avoid."""
        attention = self.hidden**2 * (2 + 2 * self.key_heads / self.heads)
        layer = attention + 3 * self.hidden * 3 * self.hidden
        tokens = self.prompt + self.new
        head = self.hidden * VOCABULARY * self.new  # of the last token of each step
        return int(2 * BATCH * (tokens * self.layers * layer + head))

    @property
    def work(self) -> int:
        return self.flops

    def contestants(self) -> dict[str, Contestant]:
        model = llama(self.hidden, self.layers, self.heads, self.key_heads)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1, VOCABULARY, (BATCH, self.prompt), generator=generator)
        mask = torch.ones_like(ids)
        if self.padded:
            for row in range(1, BATCH):
                mask[row, : row * self.prompt // 8] = 0

        def generate(name: str) -> Contestant:
            implementation, _, cached = name.partition("_")

            def run():
                model.set_attn_implementation(implementation)
                cache = {"cache": integration.GrowingCache(model.config)} if cached else {}
                return (
                    model.generate(
                        ids, attention_mask=mask, max_new_tokens=self.new, do_sample=False, **cache
                    ),
                )

            return run

        return {name: generate(name) for name in self.names}


CASES = tuple(
    TransformersCase(256, 4, 4, 2, prompt, padded, quick=prompt == 128)
    for prompt in (128, 1024)
    for padded in (False, True)
) + tuple(TransformersCase(512, 4, 8, 2, prompt, True) for prompt in (16, 512, 2048))
