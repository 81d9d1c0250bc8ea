"""Softmax attention: the cases, the bars they are held to, and the contestants of each.

A case is a row of plain values; everything measured follows from it. Contestants are `torch`
(`F.scaled_dot_product_attention` or `nn.MultiheadAttention` as PyTorch chooses its kernel), `cpu`
(fastattn's C++ kernel) and `auto` (fastattn's own choice, which is what a user gets).
"""

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import fastattn

from . import cases
from .cases import DTYPES, ROOFS, Bar, Contestant, Tensors, TimedCase, differentiate
from .machine import Peer

# On any device. PyTorch is timed; the others are named so that a reader sees which comparisons this machine
# could not make.
PEERS = (
    Peer("torch"),
    Peer("flash-attn", "needs an NVIDIA or AMD GPU"),
    Peer("xformers", "its fused attention needs a GPU"),
    Peer("onnxruntime", "forward only, outside autograd: not timed here"),
    Peer("openvino", "forward only, outside autograd: not timed here"),
    Peer("intel-extension-for-pytorch", "replaces PyTorch's own kernels: not timed here"),
)

# Batch, heads, length, head dim.
GRID = (
    (4, 12, 128, 64),
    (2, 8, 512, 64),
    (1, 8, 1024, 128),
    (1, 8, 2048, 64),
    (1, 4, 4096, 64),
    (8, 8, 197, 64),
    (16, 8, 64, 32),
)
QUICK_GRID = ((4, 12, 128, 64), (2, 8, 512, 64), (1, 8, 2048, 64))


def visible_pairs(queries: int, keys: int, causal: bool, window: int | None) -> int:
    """Query-key pairs that one head computes; the diagonal runs from the upper left corner.

    `window` counts the keys kept left of the diagonal and implies that none is kept right of it.
    """
    if window is None and not causal:
        return queries * keys
    left = queries if window is None else window
    return sum(max(0, min(i, keys - 1) - max(0, i - left) + 1) for i in range(queries))


def attention_flops(batch: int, heads: int, pairs: int, head_dim: int, backward: bool) -> int:
    """Two products of 2 D operations per visible pair; backward is five of them, so 2.5 times forward."""
    forward = 4 * batch * heads * pairs * head_dim
    return forward * 7 // 2 if backward else forward


@dataclass(frozen=True)
class AttentionCase(TimedCase):
    """One call of scaled_dot_product_attention."""

    family: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    dtype: str
    causal: bool = False
    window: int | None = None  # keys left of the diagonal, none right of it
    bias: bool = False  # a learnable (1, H, L, S) bias
    backward: bool = False
    tags: tuple[str, ...] = ()
    quick: bool = False

    names = ("torch", "cpu", "auto")

    @property
    def name(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        length = f"{self.queries}" if self.queries == self.keys else f"{self.queries}/{self.keys}"
        pattern = f"window{self.window}" if self.window is not None else "causal" if self.causal else "full"
        direction = "forward+backward" if self.backward else "forward"
        return "/".join(
            (
                self.family,
                f"{self.batch}x{heads}x{length}x{self.head_dim}",
                pattern,
                self.dtype,
                direction,
            )
        )

    @property
    def roofs(self) -> tuple[str, ...]:
        return ("copy",) if self.family == "decode" else ROOFS[self.dtype]

    @property
    def flops(self) -> int:
        pairs = visible_pairs(self.queries, self.keys, self.causal, self.window)
        return attention_flops(self.batch, self.heads, pairs, self.head_dim, self.backward)

    @property
    def work(self) -> int:
        """What the roofs are rates of: operations, or for decoding the bytes of the cache, read once."""
        if self.roofs != ("copy",):
            return self.flops
        itemsize = DTYPES[self.dtype].itemsize
        return 2 * self.batch * self.kv_heads * self.keys * self.head_dim * itemsize

    def contestants(self) -> dict[str, Contestant]:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(DTYPES[self.dtype])

        query = normal(self.batch, self.heads, self.queries, self.head_dim)
        key = normal(self.batch, self.kv_heads, self.keys, self.head_dim)
        value = normal(self.batch, self.kv_heads, self.keys, self.head_dim)
        grad = normal(self.batch, self.heads, self.queries, self.head_dim)
        bias = normal(1, self.heads, self.queries, self.keys) if self.bias else None
        inputs = (query, key, value) if bias is None else (query, key, value, bias)
        if self.backward:
            for tensor in inputs:
                tensor.requires_grad_()
        grouped = self.heads != self.kv_heads

        # PyTorch has no window: its users pass a boolean mask, made once here and not timed.
        mask = bias
        if self.window is not None:
            distance = torch.arange(self.queries)[:, None] - torch.arange(self.keys)
            mask = (distance >= 0) & (distance <= self.window)

        def of_torch() -> Tensors:
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=self.causal, enable_gqa=grouped
            )
            return (out,)

        # Only what the case is about, as a user would write it.
        options = {} if self.window is None else {"window_size": (self.window, 0)}

        def of_fastattn(impl: str) -> Contestant:
            def call() -> Tensors:
                out = fastattn.scaled_dot_product_attention(
                    query,
                    key,
                    value,
                    attn_mask=bias,
                    is_causal=self.causal,
                    enable_gqa=grouped,
                    impl=impl,
                    **options,
                )
                return (out,)

            return call

        calls = {"torch": of_torch, "cpu": of_fastattn("cpu"), "auto": of_fastattn("auto")}
        if not self.backward:
            return calls
        return {name: lambda call=call: differentiate(call(), inputs, grad) for name, call in calls.items()}


@dataclass(frozen=True)
class ModuleCase(TimedCase):
    """One call of nn.MultiheadAttention as self-attention, batch first, against the swapped module."""

    batch: int
    length: int
    embed_dim: int
    heads: int
    need_weights: bool
    backward: bool  # train mode with gradients to the input and all parameters; else eval mode under no_grad
    dtype: str = "fp32"
    tags: tuple[str, ...] = ()
    quick: bool = False
    family: str = "module"
    roofs: tuple[str, ...] = ("fp32",)

    names = ("torch", "auto")

    @property
    def name(self) -> str:
        weights = "weights" if self.need_weights else "no-weights"
        direction = "forward+backward" if self.backward else "eval"
        shape = f"{self.batch}x{self.length}x{self.embed_dim}h{self.heads}"
        return f"module/{shape}/{weights}/{self.dtype}/{direction}"

    @property
    def flops(self) -> int:
        """Attention and the four projections; the mean of the weights over the heads is not counted."""
        projections = 4 * 2 * self.batch * self.length * self.embed_dim**2
        attention = attention_flops(
            self.batch, self.heads, self.length**2, self.embed_dim // self.heads, self.backward
        )
        return attention + projections * (3 if self.backward else 1)

    @property
    def work(self) -> int:
        return self.flops

    def contestants(self) -> dict[str, Contestant]:
        torch.manual_seed(0)
        theirs = torch.nn.MultiheadAttention(self.embed_dim, self.heads, batch_first=True)
        theirs.train(self.backward)
        ours = copy.deepcopy(theirs)  # the swap happens in place
        fastattn.replace_attention(ours)
        x = torch.randn(self.batch, self.length, self.embed_dim)
        grad = torch.randn_like(x)
        x.requires_grad_(self.backward)

        def of(module: torch.nn.Module) -> Contestant:
            parameters = (x, *module.parameters())

            def call() -> Tensors:
                if self.backward:
                    return differentiate(module(x, x, x, need_weights=self.need_weights), parameters, grad)
                with torch.no_grad():
                    out, weights = module(x, x, x, need_weights=self.need_weights)
                return (out,) if weights is None else (out, weights)

            return call

        return {"torch": of(theirs), "auto": of(ours)}


@dataclass(frozen=True)
class LayerCase(TimedCase):
    """One nn.TransformerEncoderLayer in evaluation without gradients, where torch has one function for all of
    it, against the layer with the swapped module, which runs module by module."""

    batch: int
    length: int
    embed_dim: int
    heads: int
    dtype: str = "fp32"
    tags: tuple[str, ...] = ("layer",)
    quick: bool = False
    family: str = "layer"
    roofs: tuple[str, ...] = ("fp32",)

    names = ("torch", "auto")

    @property
    def name(self) -> str:
        return f"layer/{self.batch}x{self.length}x{self.embed_dim}h{self.heads}/{self.dtype}/eval"

    @property
    def flops(self) -> int:
        """Attention, its four projections and the two of the feedforward block, four times as wide."""
        products = 12 * 2 * self.batch * self.length * self.embed_dim**2
        head_dim = self.embed_dim // self.heads
        return products + attention_flops(self.batch, self.heads, self.length**2, head_dim, False)

    @property
    def work(self) -> int:
        return self.flops

    def contestants(self) -> dict[str, Contestant]:
        torch.manual_seed(0)
        theirs = torch.nn.TransformerEncoderLayer(
            self.embed_dim, self.heads, 4 * self.embed_dim, batch_first=True
        )
        theirs.eval()
        ours = copy.deepcopy(theirs, {id(p): p for p in theirs.parameters()})
        fastattn.replace_attention(ours)
        x = torch.randn(self.batch, self.length, self.embed_dim)

        def of(module: torch.nn.Module) -> Contestant:
            def call() -> Tensors:
                with torch.no_grad():
                    return (module(x),)

            return call

        return {"torch": of(theirs), "auto": of(ours)}


class MemoryCase(cases.MemoryCase):
    def output(
        self, contestant: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        if contestant == "torch":
            return F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return fastattn.scaled_dot_product_attention(
            query, key, value, is_causal=self.causal, impl=contestant
        )


Case = AttentionCase | ModuleCase | LayerCase | MemoryCase


BARS = (
    Bar("fp32 forward", "grid fp32 forward", geomean=1.5, each=1.0),
    Bar("fp32 forward+backward", "grid fp32 forward+backward", geomean=1.5, each=1.0),
    Bar("bf16 forward", "grid bf16 forward", geomean=2.0, each=1.2),
    Bar("bf16 forward+backward", "grid bf16 forward+backward", geomean=2.0, each=1.2),
    Bar("causal, L <= 1024, fp32 forward", "short causal", each=2.0),
    Bar("decode, L=1, 32/8 heads", "decode", each=10.0),
    Bar("window 256 at L=4096", "window", each=8.0),
    Bar("learnable bias, forward+backward", "bias", each=2.0),
    Bar("MultiheadAttention, need_weights=True", "module weights", each=1.3, contestant="auto"),
    Bar("MultiheadAttention, need_weights=False", "module no-weights", each=1.15, contestant="auto"),
    Bar("TransformerEncoderLayer in evaluation", "layer", each=1.0, contestant="auto"),
    Bar("FMA peak, fp32 forward, L=2048", "peak fp32", each=0.70, measure="roof"),
    Bar("FMA peak, bf16 forward, L=2048", "peak bf16", each=0.50, measure="roof"),
    Bar("memory, forward+backward, L=16384", "memory", each=1.5, contestant="auto", measure="memory"),
    Bar("small call (at most 1.5x torch's time)", "small", each=1 / 1.5, contestant="auto"),
    Bar("auto never slower, whole grid", "grid", each=1.0, contestant="auto"),
    Bar("auto never slower, random shapes, forward", "random forward", each=1.0, contestant="auto"),
    Bar(
        "auto never slower, random shapes, forward+backward",
        "random forward+backward",
        each=1.0,
        contestant="auto",
    ),
)


def _grid() -> Iterator[AttentionCase]:
    for batch, heads, length, head_dim in GRID:
        for dtype in DTYPES:
            for backward in (False, True):
                for causal in (False, True):
                    tags = ["grid", f"grid {dtype} {'forward+backward' if backward else 'forward'}"]
                    if causal and length <= 1024 and dtype == "fp32" and not backward:
                        tags.append("short causal")
                    if length == 2048 and not backward:
                        tags.append(f"peak {dtype}")
                    yield AttentionCase(
                        "grid",
                        batch,
                        heads,
                        heads,
                        length,
                        length,
                        head_dim,
                        dtype,
                        causal=causal,
                        backward=backward,
                        tags=tuple(tags),
                        quick=(batch, heads, length, head_dim) in QUICK_GRID,
                    )


def _decode() -> Iterator[AttentionCase]:
    for batch in (1, 8):
        for keys in (2048, 4096):
            for dtype in DTYPES:
                quick = batch == 8 and keys == 2048
                yield AttentionCase(
                    "decode", batch, 32, 8, 1, keys, 128, dtype, tags=("decode",), quick=quick
                )


def _random() -> Iterator[AttentionCase]:
    """Shapes that nobody chose: few queries, odd lengths and head dims, many small heads, shared heads."""
    draw = random.Random(0)
    for backward in (False, True):
        drawn = set()
        while len(drawn) < 24:
            batch, kv_heads = draw.choice((1, 1, 2, 4, 16, 64)), draw.choice((1, 2, 4, 8))
            heads = kv_heads * draw.choice((1, 1, 1, 2, 4))
            queries = draw.choice((1, 1, 2, 4, 7, 16, 33, 64, 128, 197, 256, 512, 1024))
            keys = draw.choice((queries, queries, 16, 77, 300, 1024, 2048))
            head_dim = draw.choice((16, 32, 40, 64, 64, 80, 96, 128, 256))
            shape = (batch, heads, kv_heads, queries, keys, head_dim, draw.choice(tuple(DTYPES)))
            size = batch * heads * queries * keys * head_dim
            if shape in drawn or not 1e6 < size < 3e8:
                continue
            drawn.add(shape)
            tag = f"random {'forward+backward' if backward else 'forward'}"
            causal = queries == keys and draw.random() < 0.5
            yield AttentionCase("random", *shape, causal=causal, backward=backward, tags=(tag,))


def _cases() -> Iterator[Case]:
    yield from _grid()
    yield from _random()
    yield from _decode()
    for dtype in DTYPES:
        for backward in (False, True):
            quick = dtype == "fp32" and not backward
            yield AttentionCase(
                "window",
                *(1, 4, 4, 4096, 4096, 64, dtype),
                window=256,
                backward=backward,
                tags=("window",),
                quick=quick,
            )
    for batch, heads, length in ((2, 8, 512), (1, 8, 1024)):
        for dtype in DTYPES:
            yield AttentionCase(
                "bias",
                *(batch, heads, heads, length, length, 64, dtype),
                bias=True,
                backward=True,
                tags=("bias",),
                quick=length == 512,
            )
    yield AttentionCase("small", 1, 1, 1, 8, 8, 16, "fp32", tags=("small",), quick=True)
    for need_weights in (True, False):
        for backward in (False, True):
            tag = "module weights" if need_weights else "module no-weights"
            yield ModuleCase(4, 512, 512, 8, need_weights, backward, tags=(tag,), quick=True)
    for batch, length in ((32, 16), (8, 64), (4, 128), (4, 512), (1, 2048)):
        yield LayerCase(batch, length, 512, 8)
    for dtype in DTYPES:
        for causal in (False, True):
            yield MemoryCase(1, 8, 16384, 64, dtype, causal, tags=("memory",))


CASES: tuple[Case, ...] = tuple(_cases())
