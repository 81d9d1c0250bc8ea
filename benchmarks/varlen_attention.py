"""Attention of packed sequences: the cases, the bars they are held to, and the contestants of each.

Contestants are `torch` (padding, `F.scaled_dot_product_attention` with a mask, and packing again),
`torch_loop` (PyTorch's function on one sequence after the other), `cpu` (fastattn's C++ kernel) and `auto`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

import fastattn

from .attention import attention_flops, visible_pairs
from .cases import DTYPES, ROOFS, Bar, Contestant, Tensors, TimedCase, differentiate
from .machine import Peer

PEERS = (
    Peer("torch"),
    Peer("flash-attn", "needs an NVIDIA or AMD GPU"),
    Peer("xformers", "its fused attention needs a GPU"),
)


@dataclass(frozen=True)
class VarlenCase(TimedCase):
    """Self-attention of packed sequences, their lengths uniform in the logarithm."""

    sequences: int
    shortest: int
    longest: int
    heads: int
    head_dim: int
    dtype: str
    causal: bool = False
    backward: bool = False
    tags: tuple[str, ...] = ()
    quick: bool = False
    family: str = "varlen"

    names = ("torch", "torch_loop", "cpu", "auto")
    baselines = ("torch", "torch_loop")

    @property
    def name(self) -> str:
        lengths = f"{self.sequences}x{self.shortest}-{self.longest}"
        pattern = "causal" if self.causal else "full"
        direction = "forward+backward" if self.backward else "forward"
        return f"varlen/{lengths}x{self.heads}x{self.head_dim}/{pattern}/{self.dtype}/{direction}"

    @property
    def roofs(self) -> tuple[str, ...]:
        return ROOFS[self.dtype]

    @cached_property
    def lengths(self) -> list[int]:
        generator = torch.Generator().manual_seed(0)
        share = torch.rand(self.sequences, generator=generator, dtype=torch.float64)
        return (self.shortest * (self.longest / self.shortest) ** share).round().int().tolist()

    @property
    def flops(self) -> int:
        pairs = sum(visible_pairs(n, n, self.causal, None) for n in self.lengths)
        return attention_flops(1, self.heads, pairs, self.head_dim, self.backward)

    @property
    def work(self) -> int:
        return self.flops

    def contestants(self) -> dict[str, Contestant]:
        generator = torch.Generator().manual_seed(1)
        shape = (sum(self.lengths), self.heads, self.head_dim)
        query, key, value, grad = (
            torch.randn(shape, generator=generator).to(DTYPES[self.dtype]) for _ in range(4)
        )
        inputs = (query, key, value)
        for tensor in inputs:
            tensor.requires_grad_(self.backward)

        # Made once, and not timed.
        length = torch.tensor(self.lengths)
        bounds = F.pad(length.cumsum(0), (1, 0)).int()
        real = torch.arange(max(self.lengths)) < length[:, None]
        mask = real[:, None, None, :]
        if self.causal:
            mask = mask & torch.ones(real.shape[1], real.shape[1], dtype=torch.bool).tril()

        def padded(tensor: torch.Tensor) -> torch.Tensor:
            room = tensor.new_zeros(*real.shape, *tensor.shape[1:])
            return room.masked_scatter(real[..., None, None], tensor).transpose(1, 2)

        def torch_padded() -> Tensors:
            out = F.scaled_dot_product_attention(*map(padded, inputs), attn_mask=mask)
            return (out.transpose(1, 2)[real],)

        def torch_loop() -> Tensors:
            parts = zip(*(t.transpose(0, 1)[None].split(self.lengths, 2) for t in inputs), strict=True)
            outs = [F.scaled_dot_product_attention(*part, is_causal=self.causal) for part in parts]
            return (torch.cat(outs, 2)[0].transpose(0, 1),)

        def of_fastattn(impl: str) -> Contestant:
            return lambda: (
                fastattn.varlen_attention(*inputs, bounds, bounds, is_causal=self.causal, impl=impl),
            )

        calls = {"torch": torch_padded, "torch_loop": torch_loop}
        calls |= {"cpu": of_fastattn("cpu"), "auto": of_fastattn("auto")}
        if not self.backward:
            return calls
        return {name: lambda call=call: differentiate(call(), inputs, grad) for name, call in calls.items()}


BARS = tuple(
    Bar(f"{direction}, against {what}", f"bar {direction}", each=each, baselines=(baseline,))
    for direction in ("forward", "forward+backward")
    for what, baseline, each in (("padding", "torch", 3.0), ("a loop over sequences", "torch_loop", 1.5))
)


def _cases() -> Iterator[VarlenCase]:
    for dtype in DTYPES:
        for causal in (False, True):
            for backward in (False, True):
                plain = dtype == "fp32" and not causal
                tags = (f"bar {'forward+backward' if backward else 'forward'}",) if plain else ()
                yield VarlenCase(64, 16, 1024, 8, 64, dtype, causal, backward, tags, quick=plain)


CASES = tuple(_cases())
