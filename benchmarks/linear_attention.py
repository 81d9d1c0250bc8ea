"""Linear attention: the cases, the bars they are held to, and the contestants of each.

Contestants are `chunk64` and `chunk128` (plain PyTorch, plain_linear_attention.py), `idiap` (the kernel of
pytorch-fast-transformers, where it is installed), `sdpa` (softmax attention of PyTorch on the same tensors,
another function), `plain` (the step or the two products of non-causal attention in plain PyTorch), `cpu`
(fastattn's C++ kernel) and `auto` (fastattn's own choice).
"""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import fastattn
from fastattn.integrations.fast_transformers import causal_dot_product

from . import cases
from . import plain_linear_attention as plain
from .cases import DTYPES, ROOFS, Bar, Contestant, Tensors, TimedCase, differentiate
from .machine import Peer

PEERS = (
    Peer("torch"),
    Peer("pytorch-fast-transformers"),
    Peer("flash-linear-attention", "its kernels need a GPU"),
    Peer("performer-pytorch", "its causal product is that of pytorch-fast-transformers"),
)
IDIAP = importlib.util.find_spec("fast_transformers") is not None

# Batch, heads, length, head dim.
SHAPES = ((1, 8, 1024, 64), (2, 8, 4096, 64), (1, 16, 2048, 128), (8, 8, 512, 32))
CHUNKS = {"chunk64": 64, "chunk128": 128}
CACHED_TOKENS = 4096
# Operations are counted for chunks of this length, whatever a contestant chooses.
COUNTED_CHUNK = 64


def causal_flops(batch: int, heads: int, length: int, head_dim: int, backward: bool) -> int:
    """What the chunk form needs: the lower triangles, and the products with the states between chunks.

    Forward: q k^T and its product with v per pair of the triangle; k^T v and q S per token, where the first
    chunk needs no state and the last leaves none. Backward: three products more with D, two with Dv per pair,
    and five times the one of a state.
    """
    chunk = min(COUNTED_CHUNK, length)
    pairs = length * (chunk + 1) // 2
    states = (length - chunk) * head_dim**2
    forward = 2 * (pairs * 2 * head_dim + 2 * states)
    gradients = 2 * (pairs * 5 * head_dim + 5 * states) if backward else 0
    return batch * heads * (forward + gradients)


@dataclass(frozen=True)
class LinearAttentionCase(TimedCase):
    """One call of linear_attention; family "product" is the causal product without features and sums."""

    family: str
    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: str
    backward: bool = False
    tags: tuple[str, ...] = ()
    quick: bool = False

    @property
    def name(self) -> str:
        direction = "forward+backward" if self.backward else "forward"
        return (
            f"{self.family}/{self.batch}x{self.heads}x{self.length}x{self.head_dim}/{self.dtype}/{direction}"
        )

    @property
    def names(self) -> tuple[str, ...]:
        if self.family == "full":
            return ("plain", "cpu", "auto")
        peers = (*CHUNKS, *(["idiap"] if IDIAP and self.dtype == "fp32" else []))
        return (*peers, *(["sdpa"] if self.family == "causal" else []), "cpu", "auto")

    @property
    def baselines(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in ("cpu", "auto"))

    @property
    def same_as(self) -> Mapping[str, str]:
        first, *others = self.names
        return {name: first for name in others if name != "sdpa"}

    @property
    def roofs(self) -> tuple[str, ...]:
        return ROOFS[self.dtype]

    @property
    def flops(self) -> int:
        if self.family == "full":
            return 4 * self.batch * self.heads * self.length * self.head_dim**2
        return causal_flops(self.batch, self.heads, self.length, self.head_dim, self.backward)

    @property
    def work(self) -> int:
        return self.flops

    def contestants(self) -> dict[str, Contestant]:
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch, self.heads, self.length, self.head_dim)
        *inputs, grad = (torch.randn(shape, generator=generator).to(DTYPES[self.dtype]) for _ in range(4))
        for tensor in inputs:
            tensor.requires_grad_(self.backward)
        calls = {name: self._call(name, inputs) for name in self.names}
        if not self.backward:
            return calls
        return {name: lambda call=call: differentiate(call(), inputs, grad) for name, call in calls.items()}

    def _call(self, name: str, inputs: list[torch.Tensor]) -> Contestant:
        bare = self.family == "product"

        def call() -> Tensors:
            if name in CHUNKS:
                return (plain.chunked(*inputs, CHUNKS[name], bare),)
            if name == "plain":
                return (plain.full(*inputs),)
            if name == "sdpa":
                return (F.scaled_dot_product_attention(*inputs, is_causal=True),)
            if name == "idiap":
                return (plain.idiap(*inputs, bare),)
            if bare:
                # What the migration shim calls, with a choice of the implementation.
                options = {"feature_map": "identity", "is_causal": True, "normalize": False}
                if name == "auto":
                    return (causal_dot_product(*inputs),)
                return (fastattn.linear_attention(*inputs, impl=name, **options),)
            return (fastattn.linear_attention(*inputs, is_causal=self.family == "causal", impl=name),)

        return call


@dataclass(frozen=True)
class StepCase(TimedCase):
    """One token of every sequence, the state updated in place, beside softmax attention to a full cache."""

    batch: int
    heads: int
    head_dim: int
    dtype: str
    tags: tuple[str, ...] = ()
    quick: bool = True
    family: str = "step"

    names = ("plain", "sdpa", "cpu", "auto")
    baselines = ("plain", "sdpa")
    same_as = {"cpu": "plain", "auto": "plain"}
    roofs = ("copy",)

    @property
    def name(self) -> str:
        return f"step/{self.batch}x{self.heads}x{self.head_dim}/{self.dtype}"

    @property
    def flops(self) -> int:
        return 4 * self.batch * self.heads * self.head_dim**2

    @property
    def work(self) -> int:
        """The bytes of the state, read and written."""
        return 2 * 4 * self.batch * self.heads * self.head_dim**2

    def contestants(self) -> dict[str, Contestant]:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(self.batch, self.heads, *shape, generator=generator).to(DTYPES[self.dtype])

        query, key, value = (normal(self.head_dim) for _ in range(3))
        cache = [normal(CACHED_TOKENS, self.head_dim) for _ in range(2)]

        def of_plain() -> Contestant:
            state = fastattn.LinearAttentionState.zeros(self.batch, self.heads, self.head_dim, self.head_dim)
            return lambda: (plain.step(query, key, value, state.kv, state.z),)

        def of_fastattn(impl: str) -> Contestant:
            state = fastattn.LinearAttentionState.zeros(self.batch, self.heads, self.head_dim, self.head_dim)
            return lambda: fastattn.linear_attention_step(query, key, value, state, inplace=True, impl=impl)[
                :1
            ]

        def of_torch() -> Tensors:
            return (F.scaled_dot_product_attention(query.unsqueeze(2), *cache),)

        return {"plain": of_plain(), "sdpa": of_torch, "cpu": of_fastattn("cpu"), "auto": of_fastattn("auto")}


@dataclass(frozen=True)
class MemoryCase(cases.MemoryCase):
    names = ("chunk128", "auto")

    def output(
        self, contestant: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        if contestant in CHUNKS:
            return plain.chunked(query, key, value, min(CHUNKS[contestant], query.shape[2]))
        return fastattn.linear_attention(query, key, value, is_causal=self.causal, impl=contestant)


Case = LinearAttentionCase | StepCase | MemoryCase

_PLAIN = tuple(CHUNKS)
BARS = (
    Bar("causal fp32 forward", "causal fp32 forward", geomean=2.2, each=1.5, baselines=_PLAIN),
    Bar(
        "causal fp32 forward+backward",
        "causal fp32 forward+backward",
        geomean=2.2,
        each=1.5,
        baselines=_PLAIN,
    ),
    Bar("causal bf16 forward", "causal bf16 forward", geomean=1.8, baselines=_PLAIN),
    Bar("causal bf16 forward+backward", "causal bf16 forward+backward", geomean=1.8, baselines=_PLAIN),
    Bar("causal product, forward", "product forward", geomean=2.5, baselines=("idiap",)),
    Bar("causal product, forward+backward", "product forward+backward", geomean=2.5, baselines=("idiap",)),
    Bar("softmax attention, forward", "beside softmax", each=4.0, baselines=("sdpa",)),
    Bar("softmax attention, forward, L=4096", "beside softmax L=4096", each=8.0, baselines=("sdpa",)),
    Bar("step", "step", each=3.0, baselines=("plain",)),
    Bar(f"step beside {CACHED_TOKENS} cached tokens", "step", each=15.0, baselines=("sdpa",)),
    Bar("not causal, fp32 forward", "full fp32 forward", each=1.3, baselines=("plain",)),
    Bar("FMA peak, causal fp32 forward, D=64 and 128", "peak fp32", each=0.55, measure="roof"),
    Bar("memory, forward+backward, L=65536", "memory", each=1.5, contestant="auto", measure="memory"),
)


def _causal() -> Iterator[LinearAttentionCase]:
    for batch, heads, length, head_dim in SHAPES:
        for dtype in DTYPES:
            for backward in (False, True):
                tags = [f"causal {dtype} {'forward+backward' if backward else 'forward'}"]
                if not backward:
                    tags.append("beside softmax")
                    if length == 4096:
                        tags.append("beside softmax L=4096")
                    if dtype == "fp32" and head_dim in (64, 128):
                        tags.append("peak fp32")
                shape = (batch, heads, length, head_dim)
                yield LinearAttentionCase(
                    "causal", *shape, dtype, backward, tuple(tags), quick=length <= 1024
                )


def _cases() -> Iterator[Case]:
    yield from _causal()
    for shape in SHAPES:
        for backward in (False, True):
            tag = f"product {'forward+backward' if backward else 'forward'}"
            yield LinearAttentionCase("product", *shape, "fp32", backward, (tag,), quick=shape[2] <= 1024)
    # One head alone: its sequence has to be split for the second thread to have work.
    for backward in (False, True):
        yield LinearAttentionCase("causal", 1, 1, 8192, 64, "fp32", backward)
    for dtype in DTYPES:
        yield LinearAttentionCase(
            "full", 2, 8, 4096, 64, dtype, tags=(f"full {dtype} forward",), quick=dtype == "fp32"
        )
    for batch in (1, 16):
        for dtype in DTYPES:
            yield StepCase(batch, 8, 64, dtype, tags=("step",))
    for dtype in DTYPES:
        yield MemoryCase(1, 8, 65536, 64, dtype, True, tags=("memory",))


CASES: tuple[Case, ...] = tuple(_cases())
