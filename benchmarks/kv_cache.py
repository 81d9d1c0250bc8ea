"""Attention over a cache: one step of decoding, or one chunk of a prompt, of sequences that differ in length.

Contestants are `torch` (F.scaled_dot_product_attention on the padded cache, with a mask made once), `loop`
(the same for one sequence after the other, without masks or padding), `cpu` (fastattn's C++ kernel on that
cache) and `paged` (the same on pages of 16 tokens in random order). All of them write the new tokens first.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

import fastattn

from .cases import DTYPES, Bar, Contestant, Tensors, TimedCase
from .machine import Peer

PEERS = (Peer("torch"), Peer("flash-attn", "needs an NVIDIA or AMD GPU"))
PAGE_SIZE = 16


@dataclass(frozen=True)
class KVCacheCase(TimedCase):
    """`batch` sequences of `longest` / batch, 2 `longest` / batch, ..., `longest` tokens; `tokens` new."""

    family: str
    batch: int
    heads: int
    kv_heads: int
    tokens: int
    longest: int
    head_dim: int
    dtype: str
    names: tuple[str, ...] = ("torch", "loop", "cpu", "paged")
    baselines: tuple[str, ...] = ("torch",)
    tags: tuple[str, ...] = ()
    quick: bool = False

    @property
    def roofs(self) -> tuple[str, ...]:
        return ("read",) if self.tokens == 1 else ("fp32",)

    @property
    def same_as(self) -> dict[str, str]:
        return dict.fromkeys(self.names[1:], self.names[0])

    @property
    def name(self) -> str:
        shape = f"{self.batch}x{self.heads}/{self.kv_heads}x{self.tokens}/{self.longest}x{self.head_dim}"
        return f"{self.family}/{shape}/{self.dtype}"

    @property
    def lengths(self) -> list[int]:
        """Of the sequences, with their new tokens."""
        return [self.longest * (b + 1) // self.batch for b in range(self.batch)]

    @property
    def flops(self) -> int:
        pairs = sum(self.tokens * n - self.tokens * (self.tokens - 1) // 2 for n in self.lengths)
        return 4 * self.heads * pairs * self.head_dim

    @property
    def work(self) -> int:
        """Of a step of decoding the bytes of keys and values, read once."""
        if self.tokens > 1:
            return self.flops
        return 2 * sum(self.lengths) * self.kv_heads * self.head_dim * DTYPES[self.dtype].itemsize

    def contestants(self) -> dict[str, Contestant]:
        generator = torch.Generator().manual_seed(0)
        B, T, Hkv, D, S = self.batch, self.tokens, self.kv_heads, self.head_dim, self.longest

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(DTYPES[self.dtype])

        query, key, value = normal(B, self.heads, T, D), normal(B, Hkv, T, D), normal(B, Hkv, T, D)
        key_cache, value_cache = normal(B, Hkv, S, D), normal(B, Hkv, S, D)
        seqlens = torch.tensor(self.lengths, dtype=torch.int32) - T
        rows = torch.arange(B)[:, None]
        columns = seqlens.long()[:, None] + torch.arange(T)
        mask = (torch.arange(S) <= columns[:, :, None])[:, None]

        def append() -> None:
            key_cache[rows, :, columns] = key.transpose(1, 2)
            value_cache[rows, :, columns] = value.transpose(1, 2)

        def of_torch() -> Tensors:
            append()
            out = F.scaled_dot_product_attention(
                query, key_cache, value_cache, attn_mask=mask, enable_gqa=True
            )
            return (out,)

        def loop() -> Tensors:
            append()
            outputs = [
                F.scaled_dot_product_attention(
                    query[b : b + 1], key_cache[b : b + 1, :, :n], value_cache[b : b + 1, :, :n],
                    attn_mask=None if T == 1 else mask[b : b + 1, :, :, :n], enable_gqa=True,
                )
                for b, n in enumerate(self.lengths)
            ]  # fmt: skip
            return (torch.cat(outputs),)

        def cpu() -> Tensors:
            out = fastattn.attention_with_kv_cache(
                query, key_cache, value_cache, key, value, cache_seqlens=seqlens, impl="cpu"
            )
            return (out,)

        columns_of_table = -(-S // PAGE_SIZE)
        table = torch.randperm(B * columns_of_table, generator=generator).view(B, columns_of_table).int()
        pools = []
        for cache in (key_cache, value_cache):
            padded = F.pad(cache, (0, 0, 0, columns_of_table * PAGE_SIZE - S))
            pages = padded.unflatten(2, (columns_of_table, PAGE_SIZE)).transpose(1, 2).flatten(0, 1)
            pools.append(torch.empty_like(pages).index_copy_(0, table.flatten().long(), pages))

        def paged() -> Tensors:
            out = fastattn.attention_with_kv_cache(
                query, *pools, key, value, cache_seqlens=seqlens, block_table=table, impl="cpu"
            )
            return (out,)

        calls = {"torch": of_torch, "loop": loop, "cpu": cpu, "paged": paged}
        return {name: calls[name] for name in self.names}


BARS = (
    Bar("decode, 32/8 heads, ragged up to 4096, beside torch with a mask", "decode", each=10.0),
    Bar("read bandwidth, the same", "decode", each=0.6, measure="roof"),
    Bar(
        "pages of 16 beside a contiguous cache", "paged", each=1 / 1.1, contestant="paged", baselines=("cpu",)
    ),
)


def _cases():
    for dtype in DTYPES:
        shape = (8, 32, 8, 1, 4096, 128, dtype)
        yield KVCacheCase("decode", *shape, tags=("decode",), quick=True)
        yield KVCacheCase(
            "paged", *shape, names=("cpu", "paged"), baselines=("cpu",), tags=("paged",), quick=True
        )
        yield KVCacheCase("decode", 1, 32, 8, 1, 4096, 128, dtype)
        yield KVCacheCase("decode", 8, 8, 8, 1, 4096, 64, dtype)
        yield KVCacheCase("chunk", 4, 32, 8, 64, 2048, 128, dtype)
    yield KVCacheCase("small", 2, 2, 2, 1, 8, 16, "fp32", quick=True)


CASES = tuple(_cases())
