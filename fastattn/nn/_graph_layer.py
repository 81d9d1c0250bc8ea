"""What the graph layers share: the graph of a call, self-loops, linear maps and checks of options."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import (
    _are_functorch_transforms_active,
    _get_tracing_state,
    _len_torch_dispatch_stack,
)
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.utils.weak import WeakIdKeyDictionary

from fastattn._choose import Request, choose
from fastattn.graph import Compressed, Graph, _check_sizes, _make, _plain, as_graph, is_pyg_edge_index
from fastattn.ops import _aggregation_autograd as fused
from fastattn.reference import aggregation as reference

Pair = tuple[Tensor, Tensor | None]


class Adjacency(NamedTuple):
    """The graph of a call, and what came with it where it was given as a sparse matrix.

    ``values`` are the matrix's, one per edge. ``kind`` is "edges", "matrix" (of torch) or "SparseTensor": the
    layers of torch_geometric treat the self-loops of each differently.
    """

    graph: Graph
    values: Tensor | None
    kind: str


def adjacency(edge_index, num_src: int, num_dst: int | None) -> Adjacency:
    """The graph behind what a layer was given; sorted anew only where it was not seen before.

    A graph is remembered for the very object that it was made of, as long as that lives, and taken again if
    its contents are still the same: reading them costs a few percent of sorting them.
    """
    if isinstance(edge_index, Graph):
        return Adjacency(as_graph(edge_index, num_src, num_dst), None, "edges")
    if isinstance(edge_index, Tensor) and edge_index.layout == torch.strided:
        edges = edge_index.as_tensor() if is_pyg_edge_index(edge_index) else edge_index
        return Adjacency(remembered(edge_index, (edges,), num_src, num_dst), None, "edges")
    if isinstance(edge_index, Tensor):
        parts, values = _parts_of_matrix(edge_index)
        return Adjacency(remembered(edge_index, parts, num_src, num_dst), values, "matrix")
    if hasattr(edge_index, "storage") and hasattr(edge_index, "sparse_sizes"):
        rowptr, col, values = edge_index.csr()
        return Adjacency(remembered(edge_index, (rowptr, col), num_src, num_dst), values, "SparseTensor")
    raise TypeError(
        "edge_index must be a (2, E) tensor, a fastattn.Graph, an EdgeIndex, a torch.sparse matrix or a "
        f"SparseTensor, got {type(edge_index).__name__}; Graph.from_sparse reads more formats"
    )


def _parts_of_matrix(matrix: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    if matrix.layout == torch.sparse_csr:
        return (matrix.crow_indices(), matrix.col_indices()), matrix.values()
    if matrix.layout == torch.sparse_csc:
        return (matrix.ccol_indices(), matrix.row_indices()), matrix.values()
    if matrix.layout != torch.sparse_coo:
        raise RuntimeError(f"edge_index must have CSR, CSC or COO layout, got {matrix.layout}")
    if matrix.is_coalesced():
        return (matrix.indices(),), matrix.values()
    if matrix.requires_grad:
        raise NotImplementedError(
            "edge_index is a COO matrix that is not coalesced, whose values torch gives no gradient: call "
            ".coalesce() on it, or pass edges and edge_weight"
        )
    return (matrix._indices(),), matrix._values()


def _is_traced() -> bool:
    """Whether what runs is written down, so that it must not depend on the values of this call."""
    return is_compiling() or _get_tracing_state() is not None or _len_torch_dispatch_stack() > 0


def can_keep() -> bool:
    """Whether tensors made of a call's may serve later calls: a transform's or a tracer's end with it."""
    return is_dynamo_compiling() or not (_is_traced() or _are_functorch_transforms_active())


class _Remembered(NamedTuple):
    parts: tuple[Tensor, ...]  # copies, so that a change in place is noticed however it was made
    graphs: dict[tuple[int, int | None], Graph]


_remembered: WeakIdKeyDictionary = WeakIdKeyDictionary()


def remembered(given, parts: tuple[Tensor, ...], num_src: int, num_dst: int | None) -> Graph:
    if _is_traced() or _are_functorch_transforms_active() or parts[0].is_meta:
        return as_graph(given, num_src, num_dst)
    found = _remembered.get(given)
    if found is None or not all(map(_same, found.parts, parts)):
        found = _Remembered(tuple(part.clone() for part in parts), {})
    sizes = (num_src, num_dst)
    if sizes not in found.graphs:
        found.graphs[sizes] = as_graph(given, num_src, num_dst)
        _remembered[given] = found
    return found.graphs[sizes]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


def weights_of_matrix(adjacency: Adjacency) -> Tensor | None:
    """The values of a sparse matrix as edge weights; None where all of them are 1 and stay so."""
    values = adjacency.values
    if values is None or values.dim() != 1:
        if values is not None:
            raise RuntimeError(f"edge_index must hold one value per edge, got {tuple(values.shape)}")
        return None
    if not values.requires_grad and not is_compiling() and bool((values == 1).all()):
        return None
    return values


# Self-loops


class SelfLoops:
    """A graph and one loop at each of its first ``count`` nodes, behind the edges that it keeps.

    ``graph`` has the kept edges in the caller's order, then the loops of node 0, 1, ... ``kept`` are the
    numbers of those edges in the graph it was made of, and ``own`` (count,) of the last loop that each node
    had there, -1 for none; both None where no edge was dropped. ``without`` has the kept edges only.
    """

    def __init__(self, graph: Graph, count: int, keep_own: bool) -> None:
        self.count, self.keep_own = count, keep_own
        self.kept = self.own = None
        self.without = graph
        size = graph.num_src, graph.num_dst
        src, dst = graph.edge_index()
        is_loop = src == dst
        # Compiled code must not depend on whether there are any: it drops what may be none.
        if not keep_own and (_is_traced() or bool(is_loop.any())):
            self.kept = is_loop.logical_not().nonzero().squeeze(1)
            number = torch.arange(src.shape[0], device=src.device).where(is_loop, -1)
            last = src.new_full((graph.num_src,), -1).scatter_reduce_(0, src, number, "amax")
            self.own = last[:count]
            src, dst = src[self.kept], dst[self.kept]
            if is_compiling() and graph.col.dtype == torch.int32:
                # Their number is not known yet, but the dtype that numbers them has to be.
                torch._check(src.shape[0] + count < 2**31)
            self.without = Graph(torch.stack([src, dst]), size=size)
        loops = torch.arange(count, device=src.device)
        self.graph = Graph(torch.stack([torch.cat([src, loops]), torch.cat([dst, loops])]), size=size)

    def keep(self, values: Tensor) -> Tensor:
        """Of a value per edge of the caller those that stay."""
        return values if self.kept is None else values.index_select(0, self.kept)

    def weights(self, edge_weight: Tensor, fill: float, own: bool) -> Tensor:
        """A weight per edge of ``graph``; with ``own`` a node that had a loop keeps its weight."""
        if self.own is None or not own:
            return torch.cat([self.keep(edge_weight), edge_weight.new_full((self.count,), fill)])
        missing = edge_weight.shape[0]
        chosen = torch.cat([self.kept, self.own.where(self.own >= 0, missing)])
        return F.pad(edge_weight, (0, 1), value=fill).index_select(0, chosen)


def self_loops(graph: Graph, count: int, *, keep_own: bool = False) -> SelfLoops:
    """Made once for a graph and kept with it, so that a layer that is called every step sorts nothing.

    With ``keep_own`` loops that the graph has stay beside the new ones, otherwise these replace them.
    """
    made = graph._derived.setdefault("self_loops", [])
    # Compared, not looked up: as a key the number of nodes would be a constant of compiled code.
    for loops in made:
        if loops.keep_own == keep_own and loops.count == count:
            return loops
    with _plain(graph.csr):
        made.append(SelfLoops(graph, count, keep_own))
    return made[-1]


def edges_as_sources(graph: Graph) -> Graph:
    """Each edge a source node of its own, with one edge to its target: aggregates values of edges."""
    found = graph._derived.get("edges_as_sources")
    if found is None:
        with _plain(graph.csr):
            E = graph.num_edges
            number = graph.perm
            if number is None:
                number = torch.arange(E, dtype=graph.col.dtype, device=graph.device)
            found = _make(E, graph.num_dst, Compressed(graph.rowptr, number, graph.perm, E))
        graph._derived["edges_as_sources"] = found
    return found


def edge_dot(a: Tensor, b: Tensor, graph: Graph) -> Tensor:
    """(E, H): per head the dot product of a (N_dst, H, D) at each edge's target with b (N_src, H, D) at its
    source, in the caller's order; summed in float32, float64 for float64, and rounded to a's dtype."""
    a, b = a.unsqueeze(0), b.unsqueeze(0)
    if choose(Request(a.device.type, a.dtype, (), "fastattn::edge_dot"), "auto") == "reference":
        dot = reference.edge_dot(a, b, *graph.csr, None, None, None, False, True)
    else:
        dot = fused.edge_dot(a, b, graph.csr, graph.csc, None, None, None, False, True)
    return dot.to(a.dtype)


# Inputs


def as_pair(x: Tensor | Pair) -> Pair:
    """Features of sources and of targets; the latter may be None where they are not needed."""
    if isinstance(x, Tensor):
        return x, x
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        raise TypeError(f"x must be a Tensor or a pair (x_src, x_dst), got {type(x).__name__}")
    x_src, x_dst = x
    if not isinstance(x_src, Tensor) or not (x_dst is None or isinstance(x_dst, Tensor)):
        raise TypeError(
            f"x must be a pair of Tensors, the second may be None, got ({type(x_src).__name__}, "
            f"{type(x_dst).__name__})"
        )
    return x_src, x_dst


def number_of_nodes(layer: str, x) -> int:
    if not isinstance(x, Tensor):
        raise TypeError(f"{layer}: x must be a Tensor, got {type(x).__name__}")
    if x.dim() < 2:
        raise ValueError(f"{layer}: x must be (..., N, F), got {tuple(x.shape)}")
    return x.shape[-2]


def sizes_of(layer: str, x_src: Tensor, x_dst: Tensor | None, size) -> tuple[int, int | None]:
    """Numbers of source and target nodes; the latter None where neither features nor ``size`` tell."""
    num_src = number_of_nodes(layer, x_src)
    num_dst = None if x_dst is None else number_of_nodes(layer, x_dst)
    if size is not None:
        size = _check_sizes(None, size)
        for name, given, found in zip(("source", "target"), size, (num_src, num_dst), strict=True):
            if given is not None and found is not None and given != found:
                raise ValueError(f"size says {given} {name} nodes, x has {found}")
        if num_dst is None:
            num_dst = size[1]
    return num_src, num_dst


def widened(weight: Tensor, x: Tensor) -> Tensor:
    """Edge weights in the features' dtype where that loses nothing."""
    if weight.dtype != x.dtype and torch.promote_types(weight.dtype, x.dtype) == x.dtype:
        return weight.to(x.dtype)
    return weight


def check_options(layer: str, options: dict, aggr: tuple[str, ...]) -> None:
    """Arguments of torch_geometric's ``MessagePassing`` that say what these layers do anyway are taken."""
    allowed = {
        "aggr": aggr,
        "flow": ("source_to_target",),
        "node_dim": (-2, 0),
        "decomposed_layers": (1,),
        "aggr_kwargs": (None, {}),
    }
    for name, given in options.items():
        if name not in allowed:
            raise TypeError(f"{layer} got an unexpected argument {name!r}")
        if not any(type(given) is type(a) and given == a for a in allowed[name]):
            hint = "; for flow='target_to_source' pass graph.reverse()" if name == "flow" else ""
            raise NotImplementedError(
                f"{layer} supports {name} = {' or '.join(map(repr, allowed[name]))}, got {given!r}{hint}"
            )


def check_channels(layer: str, name: str, *channels) -> None:
    for given in channels:
        if isinstance(given, bool) or not isinstance(given, int):
            raise TypeError(f"{layer}: {name} must be an integer, got {given!r}")
        if given < 1:
            raise ValueError(
                f"{layer}: {name} must be positive, got {given}; sizes are not inferred from the first input"
            )


def pair_of_channels(in_channels: int | tuple[int, int]) -> tuple[int, int]:
    if isinstance(in_channels, (tuple, list)) and len(in_channels) == 2:
        return tuple(in_channels)
    return in_channels, in_channels


# Linear maps and initial values


def linear(in_channels: int, out_channels: int, bias: bool, factory: dict) -> nn.Linear:
    return nn.Linear(in_channels, out_channels, bias=bias, **factory)


@torch.no_grad()
def glorot_(parameter: Tensor) -> None:
    """Uniform within sqrt(6 / (rows + columns)), of the last two dimensions (Glorot and Bengio, 2010)."""
    bound = math.sqrt(6 / (parameter.shape[-2] + parameter.shape[-1]))
    parameter.uniform_(-bound, bound)


def plain_weight(layer: nn.Module) -> Tensor | None:
    """The weight of a linear layer that is nothing more than it seems, so that its place may be changed.

    None for whatever else could be in its place: a layer with hooks, a parametrization, an adapter.
    """
    kind = type(layer)
    if kind is not nn.Linear and (kind.__module__, kind.__name__) != (
        "torch_geometric.nn.dense.linear",
        "Linear",
    ):
        return None
    if (
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or "forward" in vars(layer)
    ):
        return None
    return layer.weight


def head_scores(x: Tensor, *attention: Tensor) -> tuple[Tensor, ...]:
    """``(x * a).sum(-1)`` for each ``a`` (1, H, C): (N, H) each, from one pass over x (N, H, C)."""
    vectors = torch.stack([a.squeeze(0) for a in attention], dim=-1)
    return torch.matmul(x.transpose(0, 1), vectors).permute(2, 1, 0).unbind()


def edge_scores(layer: nn.Module, attention: Tensor, edge_attr: Tensor) -> Tensor:
    """``(layer(edge_attr).view(E, H, C) * attention).sum(-1)``: (E, H), without an (E, H, C) tensor."""
    _, H, C = attention.shape
    weight = plain_weight(layer)
    if weight is None or layer.bias is not None:
        return (layer(edge_attr).view(-1, H, C) * attention).sum(-1)
    return F.linear(edge_attr, (weight.view(H, C, -1) * attention.view(H, C, 1)).sum(1))
