"""Pixel-by-pixel generation of 28x28 images: the speed experiment of arXiv 2006.16236 with untrained weights.

A decoder of 8 layers with 8 heads, d = 256 and a feed-forward of 1024 writes 784 pixels. Contestants are
`recompute` (softmax attention, the whole prefix for every pixel), `kv_cache` (softmax attention with a cache
of keys and values; both by F.scaled_dot_product_attention) and `linear`
(fastattn.nn.LinearMultiheadAttention, one step per pixel). The same decoder around each; speed does not
depend on what the weights are. A case is one pixel at one position, and the summary adds up an image from
them.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastattn

from .cases import Bar, Contestant, TimedCase
from .machine import Peer
from .runner import CaseResult

PEERS = (Peer("torch"),)
BARS: tuple[Bar, ...] = ()

LAYERS, HEADS, D_MODEL, FEED_FORWARD = 8, 8, 256, 1024
LENGTH, LEVELS = 784, 256
POSITIONS = (0, 195, 391, 587, LENGTH - 1)
BATCHES = (1, 64)


class SoftmaxAttention(nn.MultiheadAttention):
    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H, L, D) each, from (B, L, E)."""
        projected = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        return projected.unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind()

    def forward(self, x: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(*self._heads(x), is_causal=True)
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def initial_state(self, batch: int) -> Tensor:
        return torch.zeros(2, batch, self.num_heads, LENGTH, self.head_dim)

    def step(self, x: Tensor, cache: Tensor, position: int) -> Tensor:
        query, *new = self._heads(x.unsqueeze(1))
        for old, one in zip(cache, new, strict=True):
            old[:, :, position] = one[:, :, 0]
        out = F.scaled_dot_product_attention(query, *cache[:, :, :, : position + 1])
        return self.out_proj(out.flatten(1))


class LinearAttention(fastattn.nn.LinearMultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x, is_causal=True)[0]

    def step(self, x: Tensor, state: fastattn.LinearAttentionState, position: int) -> Tensor:
        return super().step(x, state, inplace=True)[0]


class Layer(nn.Module):
    def __init__(self, attention: nn.Module):
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(nn.LayerNorm(D_MODEL) for _ in range(2))
        self.feed_forward = nn.Sequential(
            nn.Linear(D_MODEL, FEED_FORWARD), nn.GELU(), nn.Linear(FEED_FORWARD, D_MODEL)
        )

    def forward(self, x: Tensor, *state_and_position) -> Tensor:
        attend = self.attention.step if state_and_position else self.attention
        x = x + attend(self.norms[0](x), *state_and_position)
        return x + self.feed_forward(self.norms[1](x))


class Decoder(nn.Module):
    """Logits of the next pixel, from all pixels so far, or from the last one and a state of those before."""

    def __init__(self, attention: type[nn.Module]):
        super().__init__()
        self.pixels = nn.Embedding(LEVELS, D_MODEL)
        self.positions = nn.Embedding(LENGTH, D_MODEL)
        self.layers = nn.ModuleList(Layer(attention(D_MODEL, HEADS, batch_first=True)) for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(D_MODEL), nn.Linear(D_MODEL, LEVELS))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.pixels(pixels) + self.positions.weight[: pixels.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, -1])

    def initial_states(self, batch: int) -> list:
        return [layer.attention.initial_state(batch) for layer in self.layers]

    def step(self, pixel: Tensor, position: int, states: list) -> Tensor:
        x = self.pixels(pixel) + self.positions.weight[position]
        for layer, state in zip(self.layers, states, strict=True):
            x = layer(x, state, position)
        return self.head(x)


@functools.cache
def decoder(attention: type[nn.Module]) -> Decoder:
    torch.manual_seed(0)
    return Decoder(attention).eval().requires_grad_(False)


@dataclass(frozen=True)
class GenerationCase(TimedCase):
    """One pixel of every image of a batch, `position` others before it."""

    batch: int
    position: int
    tags: tuple[str, ...] = ()
    quick: bool = False
    dtype: str = "fp32"
    family: str = "generation"

    names = ("recompute", "kv_cache", "linear")
    baselines = ("recompute", "kv_cache")
    same_as = {"kv_cache": "recompute"}
    roofs = ("fp32",)

    @property
    def name(self) -> str:
        return f"generation/{self.batch}/pixel{self.position}"

    @property
    def flops(self) -> int:
        """Of the weights, once for each image: what no contestant can avoid."""
        layer = 4 * D_MODEL**2 + 2 * D_MODEL * FEED_FORWARD
        return 2 * self.batch * (LAYERS * layer + D_MODEL * LEVELS)

    @property
    def work(self) -> int:
        return self.flops

    def contestants(self) -> dict[str, Contestant]:
        softmax, linear = decoder(SoftmaxAttention), decoder(LinearAttention)
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(LEVELS, (self.batch, self.position + 1), generator=generator)
        last = pixels[:, -1]

        def after_prefix(model: Decoder) -> Contestant:
            states = model.initial_states(self.batch)
            for position in range(self.position):
                model.step(pixels[:, position], position, states)
            return lambda: (model.step(last, self.position, states),)

        return {
            "recompute": lambda: (softmax(pixels),),
            "kv_cache": after_prefix(softmax),
            "linear": after_prefix(linear),
        }


CASES = tuple(
    GenerationCase(batch, position, quick=batch == 1) for batch in BATCHES for position in POSITIONS
)


def image_seconds(results: Sequence[CaseResult], batch: int) -> dict[str, float]:
    """Seconds for all pixels of a batch of images, linear between the measured positions; empty unless all of
    them were measured."""
    measured = {result.name: result.seconds for result in results}
    cases = [case for case in CASES if case.batch == batch]
    if any(not measured.get(case.name) for case in cases):
        return {}
    seconds = dict.fromkeys(GenerationCase.names, 0.0)
    for name in seconds:
        at = [measured[case.name][name].median for case in cases]
        seconds[name] = at[0] + sum(
            (after.position - before.position) * (first + second) / 2 + (second - first) / 2
            for before, after, first, second in zip(cases, cases[1:], at, at[1:], strict=False)
        )
    return seconds


def summary(results: Sequence[CaseResult]) -> list[str]:
    lines = []
    for batch in BATCHES:
        seconds = image_seconds(results, batch)
        if seconds:
            rates = ", ".join(f"{name} {batch / taken:.3g}" for name, taken in seconds.items())
            fair, paper = (seconds[name] / seconds["linear"] for name in ("kv_cache", "recompute"))
            lines.append(
                f"{LENGTH} pixels, batch {batch}, images per second: {rates}; "
                f"linear is {fair:.2f}x as fast as a KV cache, {paper:.0f}x as recomputing"
            )
    return lines
