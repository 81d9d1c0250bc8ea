"""Neighbour aggregation: the cases, the bars they are held to, and the contestants of each.

Contestants are `mm` (`torch.sparse.mm`), `mm_reduce` (its forms with a reduction), `index_add` (gather, then
that; for weights with gradients and for small graphs), `torch_sparse` (`matmul`), `torch_scatter` (gather,
then `segment_csr`) and `pyg_scatter`, `pyg_segment` (gather, then torch_geometric's functions), as far as
they are installed; `cpu` (fastattn's C++ kernel) and `auto` (fastattn's own choice). Only peers that come
near the fastest one are timed, see graphs.py. Every peer gets its matrix or pointers ready made, with the
normalised weights of "sym" in them and, for torch_sparse, the transpose of its backward pass.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

import fastattn

from . import graphs
from .cases import DTYPES, Bar, Contestant, Tensors, TimedCase, differentiate
from .machine import Peer
from .runner import CaseResult

PEERS = (
    Peer("torch"),
    Peer("torch_sparse"),
    Peer("torch_scatter"),
    Peer("torch_geometric"),
    Peer("pyg-lib", "its scatter and segment are reached through torch_geometric"),
    Peer("dgl", "does not import beside this torch"),
)

REDUCES = ("sum", "mean", "sym", "max")
WIDTHS = (32, 64, 128, 256)
QUICK_WIDTHS = (64,)
RANDOM_CASES = 24
OURS = ("cpu", "auto")
_TORCH_NAMES = {"sum": "sum", "mean": "mean", "sym": "sum", "max": "amax"}
_PYG_NAMES = {"sum": "sum", "mean": "mean", "sym": "sum", "max": "max"}


def peers_of(reduce: str, dtype: str, backward: bool = False, weighted: bool = False) -> tuple[str, ...]:
    """The first one is what the others have to agree with, and is always timed."""
    if weighted:  # torch.sparse.mm gives weights their gradient in a serial loop: half a minute a call
        names = ["index_add"]
    else:
        names = ["mm"] if reduce in ("sum", "sym") and dtype == "fp32" else []
        names.append("mm_reduce")
    if graphs.installed("torch_sparse"):
        names.append("torch_sparse")
    if graphs.installed("torch_scatter"):
        names.append("torch_scatter")
    if graphs.installed("torch_geometric"):
        names.append("pyg_scatter")
        if not (reduce == "max" and backward):  # parallel edges tie, and get another gradient from it
            names.append("pyg_segment")
    return tuple(names)


def gathered_bytes(edges: int, nodes: int, width: int, itemsize: int) -> int:
    """A row of x per edge, its source's number, and a row of the result per node."""
    return edges * (width * itemsize + 4) + nodes * (width * itemsize + 8)


@dataclass(frozen=True)
class AggregationCase(TimedCase):
    """One call of aggregate; ``weighted`` with edge weights that have a gradient."""

    graph: str
    reduce: str
    width: int
    dtype: str = "fp32"
    backward: bool = False
    weighted: bool = False
    tags: tuple[str, ...] = ()
    quick: bool = False
    family: str = ""

    roofs = ("copy",)

    @property
    def name(self) -> str:
        what = f"weighted {self.reduce}" if self.weighted else self.reduce
        direction = "forward+backward" if self.backward else "forward"
        name = f"{what}/{self.graph}/{self.width}/{self.dtype}/{direction}"
        return f"{self.family}/{name}" if self.family else name

    @property
    def is_there(self) -> bool:
        return graphs.is_there(self.graph)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.baselines, *OURS)

    @property
    def baselines(self) -> tuple[str, ...]:
        peers = peers_of(self.reduce, self.dtype, self.backward, self.weighted)
        return (*peers, "index_add") if self.family and self.reduce == "sum" else peers

    @property
    def may_fail(self) -> tuple[str, ...]:
        # Some add up bf16 in bf16, and a hub's sum then has no digit right.
        return self.baselines[1:]

    @property
    def same_as(self) -> Mapping[str, str]:
        # Ties of a maximum give their gradient to one edge here and in torch.sparse.mm.
        first, *others = self.names
        return dict.fromkeys(others, first)

    @property
    def work(self) -> int:
        edges = graphs.load(self.graph)
        itemsize = DTYPES[self.dtype].itemsize
        # The gradient of the features gathers again; that of the weights reads both ends of every edge.
        passes = 1 + self.backward + self.weighted
        return passes * gathered_bytes(edges.count, edges.num_nodes, self.width, itemsize)

    @property
    def flops(self) -> int:
        return (2 if self.weighted else 1) * graphs.load(self.graph).count * self.width

    def contestants(self) -> dict[str, Contestant]:
        edges, dtype = graphs.load(self.graph), DTYPES[self.dtype]
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(edges.num_nodes, self.width, generator=generator).to(dtype)
        grad = torch.randn(edges.num_nodes, self.width, generator=generator).to(dtype)
        weight = torch.rand(edges.count, generator=generator).to(dtype) if self.weighted else None
        inputs = (x,) if weight is None else (x, weight)
        if self.backward:
            for tensor in inputs:
                tensor.requires_grad_()
        calls = {name: self._peer(name, edges, x, weight) for name in self.baselines}
        graph = fastattn.Graph(edges.edge_index, num_nodes=edges.num_nodes)

        def ours(impl: str) -> Contestant:
            def call() -> Tensors:
                return (fastattn.aggregate(x, graph, self.reduce, edge_weight=weight, impl=impl),)

            return call

        calls |= {name: ours(name) for name in OURS}
        if self.backward:
            calls = {
                name: lambda call=call: differentiate(call(), inputs, grad) for name, call in calls.items()
            }
        first = self.baselines[0]
        return {first: calls[first]} | graphs.hopeful(calls, self.baselines)

    def _peer(self, name: str, edges: graphs.Edges, x: torch.Tensor, weight) -> Contestant:
        values = torch.ones(edges.count, dtype=x.dtype, device=x.device) if weight is None else weight
        if self.reduce == "sym":
            root = edges.rowptr.diff().to(x.dtype).rsqrt()
            root[root.isinf()] = 0.0
            values = root[edges.src] * root[edges.dst]
        scaled = weight is not None or self.reduce == "sym"
        reduce = _PYG_NAMES[self.reduce]

        if name in ("mm", "mm_reduce"):
            options = () if name == "mm" else (_TORCH_NAMES[self.reduce],)
            matrix = edges.csr(values)
            return lambda: (torch.sparse.mm(matrix, x, *options),)
        if name == "torch_sparse":
            return self._torch_sparse(edges, x, values if scaled else None, reduce)
        if name == "index_add":

            def reduced(messages):
                out = messages.new_zeros(edges.num_nodes, self.width)
                return out.index_add(0, edges.dst, messages)
        elif name == "torch_scatter":
            from torch_scatter import segment_csr

            def reduced(messages):
                return segment_csr(messages, edges.rowptr, reduce=reduce)
        else:
            from torch_geometric import utils

            if name == "pyg_scatter":

                def reduced(messages):
                    return utils.scatter(messages, edges.dst, dim_size=edges.num_nodes, reduce=reduce)
            else:

                def reduced(messages):
                    return utils.segment(messages, edges.rowptr, reduce=reduce)

        def call() -> Tensors:
            messages = x.index_select(0, edges.src)
            return (reduced(messages * values.unsqueeze(1) if scaled else messages),)

        return call

    def _torch_sparse(self, edges: graphs.Edges, x, values, reduce: str) -> Contestant:
        import torch_sparse

        size = (edges.num_nodes, edges.num_nodes)
        matrix = torch_sparse.SparseTensor(rowptr=edges.rowptr, col=edges.src, sparse_sizes=size)
        matrix = matrix.fill_cache_()
        if values is None:
            return lambda: (torch_sparse.matmul(matrix, x, reduce),)
        return lambda: (torch_sparse.matmul(matrix.set_value(values, layout="csr"), x, reduce),)


@dataclass(frozen=True)
class BuildCase(TimedCase):
    """A Graph made of edges in random order, beside sorting their targets by torch.argsort."""

    graph: str
    tags: tuple[str, ...] = ("build",)
    quick: bool = True
    dtype: str = "fp32"

    roofs = ("copy",)
    names = ("argsort", "auto")
    baselines = ("argsort",)
    same_as = {}  # a Graph is no permutation

    @property
    def name(self) -> str:
        return f"build/{self.graph}"

    @property
    def is_there(self) -> bool:
        return graphs.is_there(self.graph)

    @property
    def flops(self) -> int:
        return 0

    @property
    def work(self) -> int:
        return 16 * graphs.load(self.graph).count

    def contestants(self) -> dict[str, Contestant]:
        edges = graphs.load(self.graph)
        order = torch.randperm(edges.count, generator=torch.Generator().manual_seed(0))
        edge_index = edges.edge_index[:, order].contiguous()
        targets = edge_index[1]
        return {
            "argsort": lambda: (torch.argsort(targets),),
            "auto": lambda: (fastattn.Graph(edge_index, num_nodes=edges.num_nodes).rowptr,),
        }


Case = AggregationCase | BuildCase


def _random() -> Iterator[AggregationCase]:
    """Graphs that no kernel was tuned for: up to 20000 nodes and 200000 edges, drawn by their logarithms."""
    draw = random.Random(0)
    for backward in (False, True):
        direction = "forward+backward" if backward else "forward"
        for _ in range(RANDOM_CASES):
            nodes, edges = round(10 ** draw.uniform(1, 4.3)), round(10 ** draw.uniform(1, 5.3))
            width = draw.choice((1, 3, 8, 16, 32, 48, 64, 100, 128, 256, 512))
            yield AggregationCase(
                f"{graphs.SYNTHETIC}-{nodes}x{edges}",
                draw.choice(REDUCES),
                width,
                draw.choice(tuple(DTYPES)),
                backward=backward,
                tags=(f"random {direction}",),
                family="random",
            )


def _cases() -> Iterator[Case]:
    yield from _random()
    for graph in graphs.NAMES:
        for reduce in REDUCES:
            for width in WIDTHS:
                for backward in (False, True):
                    direction = "forward+backward" if backward else "forward"
                    tags = [f"fp32 {direction}"]
                    if graph == graphs.SYNTHETIC:
                        tags.append(f"synthetic {direction}")
                    if (graph, reduce, width, backward) == (graphs.SYNTHETIC, "sum", 128, False):
                        tags.append("bandwidth")
                    yield AggregationCase(
                        graph,
                        reduce,
                        width,
                        backward=backward,
                        tags=tuple(tags),
                        quick=width in QUICK_WIDTHS,
                    )
        for width in WIDTHS:
            quick = width in QUICK_WIDTHS
            yield AggregationCase(graph, "sum", width, "bf16", tags=("bf16 sum",), quick=quick)
            yield AggregationCase(
                graph, "sum", width, backward=True, weighted=True, tags=("weighted",), quick=quick
            )
    yield BuildCase(graphs.SYNTHETIC)


CASES: tuple[Case, ...] = tuple(_cases())

_ANY = peers_of("sum", "fp32")
_WEIGHTED = peers_of("sum", "fp32", weighted=True)
_RANDOM = (*_ANY, "index_add")
BARS = (
    Bar("sum, mean, sym, max, fp32 forward", "fp32 forward", geomean=1.6, each=1.0, baselines=_ANY),
    Bar("the same on the synthetic graph", "synthetic forward", geomean=2.0, each=1.0, baselines=_ANY),
    Bar("forward+backward", "fp32 forward+backward", geomean=2.5, each=1.2, baselines=_ANY),
    Bar("bf16 sum", "bf16 sum", each=2.0, baselines=_ANY),
    Bar("weighted sum, gradient to the weights too", "weighted", each=3.0, baselines=_WEIGHTED),
    Bar("gathered bytes beside a copy, synthetic graph, F=128", "bandwidth", each=0.6, measure="roof"),
    *(
        Bar(
            f"auto never slower, random graphs, {direction}",
            f"random {direction}",
            each=1.0,
            contestant="auto",
            baselines=_RANDOM,
        )
        for direction in ("forward", "forward+backward")
    ),
    Bar(
        "Graph of 2M edges beside torch.argsort", "build", each=1.0, contestant="auto", baselines=("argsort",)
    ),
)


def summary(results: Sequence[CaseResult]) -> list[str]:
    """How even the work is: counted, so that it holds on machines with fewer cores than threads."""
    if not hasattr(torch.ops.fastattn, "edges_per_worker"):  # it comes with the native library
        return []
    lines = []
    for name in filter(graphs.is_there, graphs.NAMES):
        edges = graphs.load(name)
        found = []
        for threads in (2, 4, 16):
            counts = torch.ops.fastattn.edges_per_worker(edges.rowptr, threads)
            found.append(f"{counts.max().item() / (edges.count / threads):.3f} of {threads} threads")
        lines.append(f"{name}: edges of the busiest worker over its share: " + ", ".join(found))
    return lines
