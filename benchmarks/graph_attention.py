"""Graph attention: the cases, the bars they are held to, and the contestants of each.

Contestants are `composition` (torch_geometric's softmax and scatter around gathered rows, as its GATConv and
TransformerConv compose them; without torch_geometric the same of torch's own functions), `cpu` (fastattn's
C++ kernel) and `auto` (fastattn's own choice). A training step is timed on a model of torch_geometric's
GATConv as it is (`model`) and converted (`converted`).
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import fastattn
from fastattn.ops.graph_attention import gat_attention, graph_attention

from . import graphs
from .aggregation import gathered_bytes
from .cases import DTYPES, ApartCase, Bar, Contestant, Tensors, TimedCase, differentiate
from .machine import Peer

PEERS = (
    Peer("torch"),
    Peer("torch_geometric"),
    Peer("torch_scatter", "torch_geometric's scatter and softmax use it where it is installed"),
    Peer("dgl", "does not import beside this torch"),
    Peer("turbo-gnn", "needs an NVIDIA GPU"),
)
PYG = graphs.installed("torch_geometric")
HEADS, CHANNELS = 4, 32
OURS = ("cpu", "auto")


def softmax(score: torch.Tensor, edges: graphs.Edges) -> torch.Tensor:
    if PYG:
        from torch_geometric import utils

        return utils.softmax(score, edges.dst, num_nodes=edges.num_nodes)
    index = edges.dst.unsqueeze(1).expand_as(score)
    top = score.new_zeros(edges.num_nodes, score.shape[1]).scatter_reduce(
        0, index, score.detach(), "amax", include_self=False
    )
    weights = (score - top.index_select(0, edges.dst)).exp()
    total = torch.zeros_like(top).index_add(0, edges.dst, weights)
    return weights / total.index_select(0, edges.dst)


def scatter(messages: torch.Tensor, edges: graphs.Edges) -> torch.Tensor:
    if PYG:
        from torch_geometric import utils

        return utils.scatter(messages, edges.dst, dim_size=edges.num_nodes, reduce="sum")
    out = messages.new_zeros(edges.num_nodes, *messages.shape[1:])
    return out.index_add(0, edges.dst, messages)


def composed_gat(x, alpha_src, alpha_dst, edges: graphs.Edges) -> torch.Tensor:
    score = alpha_src.index_select(0, edges.src) + alpha_dst.index_select(0, edges.dst)
    weights = softmax(F.leaky_relu(score, 0.2), edges)
    return scatter(weights.unsqueeze(-1) * x.index_select(0, edges.src), edges)


def composed_dot(query, key, value, edges: graphs.Edges) -> torch.Tensor:
    product = query.index_select(0, edges.dst) * key.index_select(0, edges.src)
    weights = softmax(product.sum(-1) / math.sqrt(query.shape[-1]), edges)
    return scatter(weights.unsqueeze(-1) * value.index_select(0, edges.src), edges)


# Composition, operator, and rows of features that each edge gathers.
FUNCTIONS = {
    "gat": (composed_gat, gat_attention, 1),
    "dot": (composed_dot, graph_attention, 2),
}


def inputs_of(
    family: str, edges: graphs.Edges, dtype: torch.dtype
) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(edges.num_nodes, *shape, generator=generator).to(dtype)

    rows = [normal(HEADS, CHANNELS)] + [normal(HEADS) for _ in range(2)]
    if family == "dot":
        rows = [normal(HEADS, CHANNELS) for _ in range(3)]
    return rows, normal(HEADS, CHANNELS)


@dataclass(frozen=True)
class GraphAttentionCase(TimedCase):
    """One call of gat_attention ("gat") or graph_attention ("dot")."""

    family: str
    graph: str
    dtype: str = "fp32"
    backward: bool = False
    tags: tuple[str, ...] = ()
    quick: bool = False

    roofs = ("copy",)
    baselines = ("composition",)
    names = ("composition", *OURS)
    same_as = dict.fromkeys(OURS, "composition")

    @property
    def name(self) -> str:
        direction = "forward+backward" if self.backward else "forward"
        return f"{self.family}/{self.graph}/{HEADS}x{CHANNELS}/{self.dtype}/{direction}"

    @property
    def is_there(self) -> bool:
        return graphs.is_there(self.graph)

    @property
    def work(self) -> int:
        """Rows that are gathered at the least: those of the sources, and of the gradients in backward."""
        edges, rows = graphs.load(self.graph), FUNCTIONS[self.family][2]
        width = HEADS * CHANNELS
        passes = rows + (2 * rows if self.backward else 0)
        return passes * gathered_bytes(edges.count, edges.num_nodes, width, DTYPES[self.dtype].itemsize)

    @property
    def flops(self) -> int:
        rows = FUNCTIONS[self.family][2]
        forward = 2 * rows * graphs.load(self.graph).count * HEADS * CHANNELS
        return 3 * forward if self.backward else forward

    def contestants(self) -> dict[str, Contestant]:
        edges = graphs.load(self.graph)
        inputs, grad = inputs_of(self.family, edges, DTYPES[self.dtype])
        graph = fastattn.Graph(edges.edge_index, num_nodes=edges.num_nodes)
        composed, function, _ = FUNCTIONS[self.family]
        for tensor in inputs:
            tensor.requires_grad_(self.backward)

        def of(impl: str) -> Contestant:
            def call() -> Tensors:
                if impl == "composition":
                    return (composed(*inputs, edges),)
                return (function(*inputs, graph, impl=impl),)

            return call

        calls = {name: of(name) for name in self.names}
        if not self.backward:
            return calls
        return {name: lambda call=call: differentiate(call(), inputs, grad) for name, call in calls.items()}


@dataclass(frozen=True)
class TrainingCase(TimedCase):
    """A step of training: two layers of torch_geometric's GATConv with an ELU between them, and Adam."""

    graph: str
    features: int = 64
    classes: int = 16
    dtype: str = "fp32"
    tags: tuple[str, ...] = ("training",)
    quick: bool = False

    roofs = ("copy",)
    baselines = ("model",)
    names = ("model", "converted") if PYG else ()
    same_as = {"converted": "model"} if PYG else {}

    @property
    def name(self) -> str:
        return f"training/{self.graph}/GAT"

    @property
    def is_there(self) -> bool:
        return PYG and graphs.is_there(self.graph)

    @property
    def work(self) -> int:
        edges = graphs.load(self.graph)
        widths = (HEADS * CHANNELS, self.classes)
        return sum(3 * gathered_bytes(edges.count, edges.num_nodes, width, 4) for width in widths)

    @property
    def flops(self) -> int:
        return 6 * graphs.load(self.graph).count * (HEADS * CHANNELS + self.classes)

    def contestants(self) -> dict[str, Contestant]:
        from torch_geometric.nn import GATConv

        from fastattn.integrations.torch_geometric import convert

        class Model(torch.nn.Module):
            def __init__(self, features: int, classes: int) -> None:
                super().__init__()
                self.first = GATConv(features, CHANNELS, heads=HEADS)
                self.second = GATConv(HEADS * CHANNELS, classes)

            def forward(self, x, edge_index):
                return self.second(F.elu(self.first(x, edge_index)), edge_index)

        torch.manual_seed(0)
        edges = graphs.load(self.graph)
        edge_index = edges.edge_index
        x = torch.randn(edges.num_nodes, self.features)
        labels = torch.randint(self.classes, (edges.num_nodes,))
        theirs = Model(self.features, self.classes)
        ours = copy.deepcopy(theirs)
        convert(ours)

        def step(model: torch.nn.Module) -> Contestant:
            # So small a rate that contestants with other numbers of steps behind them still agree.
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-9)

            def call() -> Tensors:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x, edge_index), labels)
                loss.backward()
                optimizer.step()
                return (loss.detach(), *(parameter.grad for parameter in model.parameters()))

            return call

        return {"model": step(theirs), "converted": step(ours)}


@dataclass(frozen=True)
class MemoryCase(ApartCase):
    """Peak memory of gat_attention or graph_attention, forward and backward."""

    family: str
    graph: str
    dtype: str = "fp32"
    tags: tuple[str, ...] = ("memory",)
    quick: bool = False

    names = ("composition", "auto")

    @property
    def name(self) -> str:
        return f"memory/{self.family}/{self.graph}/{HEADS}x{CHANNELS}/{self.dtype}/forward+backward"

    @property
    def is_there(self) -> bool:
        return graphs.is_there(self.graph)

    def prepare(self) -> None:
        graphs.load(self.graph)

    def step(self, contestant: str, whole: bool) -> int:
        edges = graphs.load(self.graph) if whole else graphs.power_law(100, 500)
        inputs, grad = inputs_of(self.family, edges, DTYPES[self.dtype])
        for tensor in inputs:
            tensor.requires_grad_()
        composed, function, _ = FUNCTIONS[self.family]
        if contestant == "composition":
            out = composed(*inputs, edges)
        else:
            out = function(
                *inputs, fastattn.Graph(edges.edge_index, num_nodes=edges.num_nodes), impl=contestant
            )
        grads = torch.autograd.grad(out, inputs, grad)
        return sum(tensor.nbytes for tensor in (*inputs, grad, out, *grads))


Case = GraphAttentionCase | TrainingCase | MemoryCase


def _cases() -> Iterator[Case]:
    for graph in graphs.NAMES:
        for family in FUNCTIONS:
            for backward in (False, True):
                tag = f"{family} {'forward+backward' if backward else 'forward'}"
                yield GraphAttentionCase(
                    family, graph, backward=backward, tags=(tag,), quick=graph != graphs.SYNTHETIC
                )
            yield GraphAttentionCase(family, graph, "bf16", tags=(f"{family} bf16",))
        yield TrainingCase(graph, quick=graph != graphs.SYNTHETIC)
    for family in FUNCTIONS:
        yield MemoryCase(family, graphs.SYNTHETIC)


CASES: tuple[Case, ...] = tuple(_cases())

_COMPOSITION = ("composition",)
BARS = (
    Bar("gat_attention, forward", "gat forward", each=8.0, baselines=_COMPOSITION),
    Bar("gat_attention, forward+backward", "gat forward+backward", each=8.0, baselines=_COMPOSITION),
    Bar("graph_attention, forward", "dot forward", each=8.0, baselines=_COMPOSITION),
    Bar("graph_attention, forward+backward", "dot forward+backward", each=8.0, baselines=_COMPOSITION),
    Bar(
        "memory beyond inputs, outputs and gradients",
        "memory",
        each=8.0,
        contestant="auto",
        measure="workspace",
        baselines=_COMPOSITION,
    ),
    Bar(
        "training step of a converted GAT", "training", each=3.0, contestant="converted", baselines=("model",)
    ),
)
