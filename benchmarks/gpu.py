"""What `--device cuda` measures: the cases of each operator on a GPU, its roofs, and how calls are timed.

Contestants are, as far as they are installed, `torch` (PyTorch's own choice), `cudnn`, `flash`, `efficient`
(its backends), `flex` (compiled FlexAttention), `flash_attn`, `fla`, the peers of the tables for the CPU, and
`triton` (fastattn's kernel; `cache` is the one for attention over a cache). A peer that cannot compute a case
is reported and does not fail the run.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn

from . import aggregation, attention, graph_attention, graphs, linear_attention
from . import plain_linear_attention as plain
from .cases import DTYPES, Bar, Contestant, Tensors, TimedCase, differentiate
from .graphs import installed
from .machine import Peer, version_of
from .roof import Roof

device = torch.device("cuda")

# Twice the last-level cache of any GPU of today; it is overwritten between calls.
FLUSH_BYTES = 512 << 20
MATMUL_SIZE = 8192
COPY_BYTES = 1 << 30


def time_calls(function: Callable[[], object], calls: int) -> float:
    """Seconds of the device that `calls` calls take together, each with cold caches.

    While the cache is overwritten the CPU prepares the call, so that launches count only as far as they take
    longer than that.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    for start, end in events:
        flush.zero_()
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return sum(start.elapsed_time(end) for start, end in events) / 1e3


def roofs(size: int = MATMUL_SIZE, copied: int = COPY_BYTES) -> dict[str, Roof]:
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    source = torch.ones(copied, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    found = (
        Roof("bf16", f"torch.matmul {size} bf16", 2 * size**3, lambda: a @ b),
        Roof("copy", f"copy of {copied >> 20} MiB", 2 * copied, lambda: target.copy_(source)),
    )
    return {roof.kind: roof for roof in found}


def hardware() -> dict:
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "gpu_capability": f"{properties.major}.{properties.minor}",
        "gpu_multiprocessors": properties.multi_processor_count,
        "gpu_memory_bytes": properties.total_memory,
    }


def versions() -> dict:
    return {
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "triton": version_of("triton"),
    }


def normal(*shapes: tuple[int, ...], dtype: str, backward: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    values = [torch.randn(shape, generator=generator, device=device).to(DTYPES[dtype]) for shape in shapes]
    return [tensor.requires_grad_(backward) for tensor in values]


class OnGPU(TimedCase):
    """`names` begins with the contestant that the others have to agree with."""

    def peers(self) -> tuple[str, ...]:
        raise NotImplementedError

    ours: tuple[str, ...] = ("triton",)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.peers(), *self.ours)

    @property
    def baselines(self) -> tuple[str, ...]:
        return self.peers()

    @property
    def may_fail(self) -> tuple[str, ...]:
        return self.peers()

    @property
    def same_as(self) -> dict[str, str]:
        return dict.fromkeys(self.names[1:], self.names[0])


def with_gradients(
    calls: dict[str, Contestant], inputs: Sequence[torch.Tensor], dtype: str, backward: bool
) -> dict[str, Contestant]:
    if not backward:
        return calls
    (grad,) = normal(next(iter(calls.values()))()[0].shape, dtype=dtype)
    return {name: lambda call=call: differentiate(call(), inputs, grad) for name, call in calls.items()}


BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class AttentionCase(OnGPU, attention.AttentionCase):
    @property
    def ours(self) -> tuple[str, ...]:
        return ("triton", "cache") if self.family == "decode" else ("triton",)

    def peers(self) -> tuple[str, ...]:
        return ("torch", *BACKENDS, "flex", *(["flash_attn"] if installed("flash_attn") else []))

    def contestants(self) -> dict[str, Contestant]:
        cached = (self.batch, self.kv_heads, self.keys, self.head_dim)
        shapes = ((self.batch, self.heads, self.queries, self.head_dim), cached, cached)
        inputs = normal(*shapes, dtype=self.dtype, backward=self.backward)
        grouped = self.heads != self.kv_heads

        def sdpa() -> Tensors:
            return (F.scaled_dot_product_attention(*inputs, is_causal=self.causal, enable_gqa=grouped),)

        def by(backend: SDPBackend) -> Tensors:
            with sdpa_kernel(backend):
                return sdpa()

        def flash_attn() -> Tensors:
            from flash_attn import flash_attn_func

            rows = (t.transpose(1, 2) for t in inputs)
            return (flash_attn_func(*rows, causal=self.causal).transpose(1, 2),)

        def triton() -> Tensors:
            out = fastattn.scaled_dot_product_attention(
                *inputs, is_causal=self.causal, enable_gqa=grouped, impl="triton"
            )
            return (out,)

        def cache() -> Tensors:
            return (fastattn.attention_with_kv_cache(*inputs, cache_seqlens=full, impl="triton"),)

        full = torch.full((self.batch,), self.keys, dtype=torch.int32, device=device)
        calls = {"torch": sdpa} | {name: functools.partial(by, b) for name, b in BACKENDS.items()}
        calls |= {"flex": self._flex(inputs, grouped), "flash_attn": flash_attn}
        calls |= {"triton": triton, "cache": cache}
        return with_gradients({name: calls[name] for name in self.names}, inputs, self.dtype, self.backward)

    def _flex(self, inputs: Sequence[torch.Tensor], grouped: bool) -> Contestant:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.reset()  # every shape is a recompilation, of which few are allowed
        compiled = torch.compile(flex_attention, dynamic=False)
        mask = None
        if self.causal:
            mask = create_block_mask(
                lambda b, h, i, j: i >= j, None, None, self.queries, self.keys, device=device
            )
        return lambda: (compiled(*inputs, block_mask=mask, enable_gqa=grouped),)


class LinearAttentionCase(OnGPU, linear_attention.LinearAttentionCase):
    roofs = ("copy",)

    @property
    def work(self) -> int:
        """The bytes that nobody can avoid: three inputs and the result; backward reads the inputs again and
        the result's gradient, and writes three."""
        tensors = 4 + 7 * self.backward
        shape = self.batch * self.heads * self.length * self.head_dim
        return tensors * shape * DTYPES[self.dtype].itemsize

    def peers(self) -> tuple[str, ...]:
        return (*linear_attention.CHUNKS, *(["fla"] if installed("fla") else []))

    def contestants(self) -> dict[str, Contestant]:
        shape = (self.batch, self.heads, self.length, self.head_dim)
        inputs = normal(shape, shape, shape, dtype=self.dtype, backward=self.backward)
        calls = {name: self._call(name, inputs) for name in self.names if name != "fla"}
        calls = with_gradients(calls, inputs, self.dtype, self.backward)
        if "fla" in self.names:
            calls["fla"] = self._fla(inputs)
        return {name: calls[name] for name in self.names}

    def _fla(self, inputs: list[torch.Tensor]) -> Contestant:
        """On tensors as it wants them, with the tokens in front of the heads."""
        from fla.ops.linear_attn import chunk_linear_attn

        rows = [t.detach().transpose(1, 2).contiguous().requires_grad_(self.backward) for t in inputs]
        (grad,) = normal(inputs[2].shape, dtype=self.dtype)  # as that of the others

        def call() -> Tensors:
            q, k = (plain.features(t) for t in rows[:2])
            return (chunk_linear_attn(q, k, rows[2], scale=1.0, normalize=True)[0],)

        if not self.backward:
            return lambda: (call()[0].transpose(1, 2),)
        return lambda: tuple(t.transpose(1, 2) for t in differentiate(call(), rows, grad.transpose(1, 2)))


def edges_there(name: str) -> graphs.Edges:
    edges = graphs.load(name)
    return graphs.Edges(edges.src.to(device), edges.dst.to(device), edges.num_nodes)


class AggregationCase(OnGPU, aggregation.AggregationCase):
    def peers(self) -> tuple[str, ...]:
        names = ["scatter_reduce"] if self.reduce == "max" else ["index_add"]
        if self.reduce != "max" and not self.weighted and self.dtype == "fp32":
            names.append("mm")
        names += [name for name in ("torch_sparse", "torch_scatter") if installed(name)]
        return (*names, *(["pyg_scatter", "pyg_segment"] if installed("torch_geometric") else []))

    def contestants(self) -> dict[str, Contestant]:
        edges = edges_there(self.graph)
        shapes = [(edges.num_nodes, self.width)] + [(edges.count,)] * self.weighted
        inputs = normal(*shapes, dtype=self.dtype, backward=self.backward)
        x, weight = inputs if self.weighted else (*inputs, None)
        graph = fastattn.Graph(edges.edge_index, num_nodes=edges.num_nodes)

        def scatter_reduce() -> Tensors:
            index = edges.dst.unsqueeze(1).expand(-1, self.width)
            out = x.new_zeros(edges.num_nodes, self.width)
            return (out.scatter_reduce(0, index, x.index_select(0, edges.src), "amax", include_self=False),)

        def triton() -> Tensors:
            return (fastattn.aggregate(x, graph, self.reduce, edge_weight=weight, impl="triton"),)

        calls = {
            name: scatter_reduce if name == "scatter_reduce" else self._peer(name, edges, x, weight)
            for name in self.peers()
        }
        return with_gradients(calls | {"triton": triton}, inputs, self.dtype, self.backward)


class GraphAttentionCase(OnGPU, graph_attention.GraphAttentionCase):
    def peers(self) -> tuple[str, ...]:
        return ("composition",)

    def contestants(self) -> dict[str, Contestant]:
        edges = edges_there(self.graph)
        rows, _ = graph_attention.inputs_of(self.family, edges, DTYPES[self.dtype])
        inputs = [t.to(device).requires_grad_(self.backward) for t in rows]
        graph = fastattn.Graph(edges.edge_index, num_nodes=edges.num_nodes)
        composed, function, _ = graph_attention.FUNCTIONS[self.family]
        calls = {
            "composition": lambda: (composed(*inputs, edges),),
            "triton": lambda: (function(*inputs, graph, impl="triton"),),
        }
        return with_gradients(calls, inputs, self.dtype, self.backward)


def _attention() -> Iterator[AttentionCase]:
    """16384 tokens of 2048 channels."""
    for head_dim in (64, 128):
        heads = 2048 // head_dim
        for length in (512, 2048, 16384):
            for causal, backward in ((True, False), (True, True), (False, False), (False, True)):
                if not causal and (head_dim, length) != (128, 2048):
                    continue
                direction = "forward+backward" if backward else "forward"
                tags = ("long " + direction,) if head_dim == 128 and length >= 2048 else ()
                yield AttentionCase(
                    "grid", 16384 // length, heads, heads, length, length, head_dim, "bf16",
                    causal=causal, backward=backward, tags=tags, quick=length == 2048,
                )  # fmt: skip
    for batch in (1, 16):
        yield AttentionCase(
            "decode", batch, 32, 8, 1, 16384, 128, "bf16", tags=("decode",), quick=batch == 16
        )


def _linear_attention() -> Iterator[LinearAttentionCase]:
    for batch, heads, length, head_dim in (
        (32, 32, 512, 64), (8, 32, 2048, 64), (1, 32, 16384, 64), (8, 16, 2048, 128), (1, 16, 16384, 128),
        (1, 1, 65536, 64),
    ):  # fmt: skip
        for backward in (False, True):
            tags = ("forward+backward" if backward else "forward",)
            yield LinearAttentionCase(
                "causal", batch, heads, length, head_dim, "bf16", backward, tags, quick=length == 2048
            )


def _aggregation() -> Iterator[AggregationCase]:
    for reduce, dtype, backward, weighted in (
        ("sum", "fp32", False, False), ("sum", "fp32", True, False), ("sum", "bf16", False, False),
        ("sym", "fp32", False, False), ("sym", "fp32", True, False), ("max", "fp32", False, False),
        ("sum", "fp32", False, True), ("sum", "fp32", True, True),
    ):  # fmt: skip
        for width in (64, 256):
            yield AggregationCase(
                graphs.SYNTHETIC, reduce, width, dtype, backward, weighted, ("all",), quick=width == 64
            )


def _graph_attention() -> Iterator[GraphAttentionCase]:
    for family in graph_attention.FUNCTIONS:
        for dtype in DTYPES:
            for backward in (False, True):
                yield GraphAttentionCase(
                    family, graphs.SYNTHETIC, dtype, backward, ("all",), quick=dtype == "fp32"
                )


@dataclass(frozen=True)
class Table:
    CASES: tuple[TimedCase, ...]
    BARS: tuple[Bar, ...]
    PEERS: tuple[Peer, ...]


def _faster(what: str, tag: str, each: float, peers: tuple[str, ...]) -> Bar:
    return Bar(what, tag, each=each, contestant="triton", baselines=peers)


def tables() -> dict[str, Table]:
    """By operator."""
    sums = (
        "index_add",
        "scatter_reduce",
        "mm",
        "torch_sparse",
        "torch_scatter",
        "pyg_scatter",
        "pyg_segment",
    )
    torch_and = (Peer("torch"),)
    return {
        "attention": Table(
            tuple(_attention()),
            (
                _faster("forward beside cuDNN, D=128, L >= 2048", "long forward", 0.75, ("cudnn",)),
                _faster("forward+backward beside cuDNN", "long forward+backward", 0.7, ("cudnn",)),
                Bar("decode, bandwidth", "decode", each=0.7, contestant="cache", measure="roof"),
            ),
            (*torch_and, Peer("flash-attn")),
        ),
        "linear_attention": Table(
            tuple(_linear_attention()),
            (
                Bar("forward, bandwidth", "forward", each=1 / 3, contestant="triton", measure="roof"),
                _faster("forward", "forward", 1.0, ("fla",)),
                _faster("forward+backward", "forward+backward", 1.0, ("fla",)),
            ),
            (*torch_and, Peer("flash-linear-attention")),
        ),
        "aggregation": Table(
            tuple(_aggregation()),
            (_faster("beside the fastest peer", "all", 1.0, sums),),
            (*torch_and, Peer("torch_sparse"), Peer("torch_scatter"), Peer("torch_geometric")),
        ),
        "graph_attention": Table(
            tuple(_graph_attention()),
            (_faster("beside the composition", "all", 1.0, ("composition",)),),
            (*torch_and, Peer("torch_geometric")),
        ),
    }
