"""Graph layers that weigh neighbours by attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fastattn.graph import Graph
from fastattn.nn._graph_layer import (
    Adjacency,
    Pair,
    SelfLoops,
    adjacency,
    as_pair,
    check_channels,
    check_options,
    edge_dot,
    edge_scores,
    edges_as_sources,
    glorot_,
    head_scores,
    pair_of_channels,
    plain_weight,
    self_loops,
    sizes_of,
)
from fastattn.ops._common import autocast_dtype, number
from fastattn.ops.aggregation import aggregate
from fastattn.ops.graph_attention import gat_attention, gatv2_attention, graph_attention

__all__ = ["GATConv", "GATv2Conv", "GraphTransformerConv"]

_SUM = ("add", "sum")
_FILLS = ("add", "sum", "mean", "min", "max")


class GATConv(nn.Module):
    r"""Graph attention with additive scores.

    .. math::
        s_e &= \mathrm{LeakyReLU}(a_{src} \cdot W_{src} x_m + a_{dst} \cdot W_{dst} x_n + a_{edge} \cdot
               W_{edge} f_e), \qquad e = (m, n) \\
        x'_n &= \Vert_h \sum_{e = (m, n)} \mathrm{softmax}_n(s)_e \, W_{src} x_m + b

    for each head h, over the edges and one self-loop per node. Constructor, parameters and numbers are those
    of ``torch_geometric.nn.GATConv``. Scores, softmax and sum are one pass; only edge attributes cost memory
    by the edge, E x H scores.

    Args:
        in_channels: F_in, with W shared by sources and targets; or a pair (F_src, F_dst), each with its own.
        out_channels: C, per head. heads: H.
        concat: True gives H * C features, False the mean over the heads.
        negative_slope: of LeakyReLU.
        dropout: probability of dropping a weight in training.
        add_self_loops: first every self-loop is removed, then each node gets one; in bipartite graphs each of
            the first min(N_src, N_dst) nodes.
        edge_dim: number of edge attributes.
        fill_value: attributes of the self-loops: a number, a tensor (edge_dim,), or how to reduce those of
            the edges that enter the node: "mean", "add" (or "sum"), "max", "min".
        bias: add b. residual: add a learned linear map of x_n.

    Shapes: x (N, F_in), or a pair (N_src, F_src) and (N_dst, F_dst) or None, to (N_dst, H * C) or (N_dst, C);
    edge_attr (E, edge_dim) or (E,).

    Empty rows: a node that no edge enters gives b (and its residual).

    Precision: scores and sums in float32 (float64 for float64), rounded once. Dropout draws another pattern
    than torch_geometric for the same seed.

    Raises:
        ValueError: sizes that do not fit, ``edge_attr`` without ``edge_dim``.
        NotImplementedError: an option of torch_geometric's ``MessagePassing`` that changes the formula;
        ``fill_value="mul"``; ``return_attention_weights`` for a sparse matrix.

    Source: Veličković et al., https://arxiv.org/abs/1710.10903.

    Example:
        >>> import torch, fastattn
        >>> conv = fastattn.nn.GATConv(16, 8, heads=4)
        >>> edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> out, (edges, weights) = conv(torch.randn(4, 16), edge_index, return_attention_weights=True)
        >>> out.shape, edges.shape, weights.shape
        (torch.Size([4, 32]), torch.Size([2, 7]), torch.Size([7, 4]))
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: float | Tensor | str = "mean",
        bias: bool = True,
        residual: bool = False,
        *,
        device=None,
        dtype=None,
        **options,
    ) -> None:
        super().__init__()
        check_options("GATConv", options, _SUM)
        in_src, in_dst = _set_attention(self, "GATConv", in_channels, out_channels, heads, edge_dim, dropout)
        _check_fill("GATConv", fill_value)
        self.concat = concat
        self.negative_slope = negative_slope
        self.add_self_loops = add_self_loops
        self.fill_value = fill_value
        self.residual = residual
        factory = {"device": device, "dtype": dtype}
        width = heads * out_channels
        self.lin = self.lin_src = self.lin_dst = self.lin_edge = None
        if isinstance(in_channels, int):
            self.lin = nn.Linear(in_channels, width, bias=False, **factory)
        else:
            self.lin_src = nn.Linear(in_src, width, bias=False, **factory)
            self.lin_dst = nn.Linear(in_dst, width, bias=False, **factory)
        self.att_src = nn.Parameter(torch.empty(1, heads, out_channels, **factory))
        self.att_dst = nn.Parameter(torch.empty(1, heads, out_channels, **factory))
        if edge_dim is not None:
            self.lin_edge = nn.Linear(edge_dim, width, bias=False, **factory)
            self.att_edge = nn.Parameter(torch.empty(1, heads, out_channels, **factory))
        else:
            self.register_parameter("att_edge", None)
        _add_output(self, in_dst, width if concat else out_channels, bias, residual, factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """New initial values, as torch_geometric draws them."""
        for layer in (self.lin, self.lin_src, self.lin_dst, self.lin_edge, self.res):
            if layer is not None:
                glorot_(layer.weight)
        for attention in (self.att_src, self.att_dst, self.att_edge):
            if attention is not None:
                glorot_(attention)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor | Pair,
        edge_index: Tensor | Graph,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Tensor | Graph, Tensor]]:
        """Args:
            x: (N, F_in), or a pair of source and target features; without targets, or None there, the
                targets' part of the scores is left out.
            edge_index: (2, E) integers, sources and targets; a :class:`fastattn.Graph`; an ``EdgeIndex``; a
                torch.sparse matrix or ``SparseTensor`` with targets as rows. Values of a matrix that are
                vectors are edge attributes; numbers are not looked at, as in torch_geometric.
            edge_attr: (E, edge_dim) in the order of the edges; has a gradient.
            size: (N_src, N_dst), needed for edges where x has no targets and N_dst is not N_src.
            return_attention_weights: True also returns the edges with their self-loops, as (2, E') or, of a
                Graph, as the Graph, and their weights after dropout (E', H).

        Returns:
            (N_dst, H * C), or (N_dst, C) with ``concat=False``; or that and the pair of edges and weights.
        """
        H, C = self.heads, self.out_channels
        x_src, x_dst = _flat_pair(x, "GATConv")
        num_src, num_dst = sizes_of("GATConv", x_src, x_dst, size)
        given = adjacency(edge_index, num_src, num_dst)
        _check_returned("GATConv", given, return_attention_weights)
        residual = None if self.res is None or x_dst is None else self.res(x_dst)

        if self.lin is not None:
            source = self.lin(x_src).view(-1, H, C)
            target = source if x_dst is x_src else None if x_dst is None else self.lin(x_dst).view(-1, H, C)
        else:
            source = self.lin_src(x_src).view(-1, H, C)
            target = None if x_dst is None else self.lin_dst(x_dst).view(-1, H, C)
        if target is source:
            alpha_src, alpha_dst = head_scores(source, self.att_src, self.att_dst)
        else:
            (alpha_src,) = head_scores(source, self.att_src)
            (alpha_dst,) = (None,) if target is None else head_scores(target, self.att_dst)

        sizes = () if size is None else tuple(size)
        count = min(num_src, given.graph.num_dst) if not sizes or None in sizes else min(sizes)
        graph, edge_attr = _edges(self, "GATConv", given, edge_attr, count)
        alpha_edge = None if edge_attr is None else edge_scores(self.lin_edge, self.att_edge, edge_attr)
        found = gat_attention(
            source,
            alpha_src,
            alpha_dst,
            graph,
            alpha_edge=alpha_edge,
            negative_slope=self.negative_slope,
            dropout_p=self.dropout if self.training else 0.0,
            return_attention=bool(return_attention_weights),
        )
        return _result(self, found, residual, edge_index, graph)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}"


class GATv2Conv(nn.Module):
    r"""Graph attention whose ranking of neighbours depends on the node that asks.

    .. math::
        s_e &= a \cdot \mathrm{LeakyReLU}(W_l x_m + W_r x_n + W_{edge} f_e), \qquad e = (m, n) \\
        x'_n &= \Vert_h \sum_{e = (m, n)} \mathrm{softmax}_n(s)_e \, W_l x_m + b

    for each head h, over the edges and one self-loop per node. Constructor, parameters and numbers are those
    of ``torch_geometric.nn.GATv2Conv``.

    Args:
        in_channels: F_in, or a pair (F_src, F_dst) for bipartite graphs.
        share_weights: one matrix for :math:`W_l` and :math:`W_r`.
        Everything else as in :class:`GATConv`; ``bias`` also adds one to each of :math:`W_l, W_r`.

    Shapes: x (N, F_in), or a pair (N_src, F_src) and (N_dst, F_dst), to (N_dst, H * C) or (N_dst, C);
    edge_attr (E, edge_dim) or (E,).

    Empty rows, precision and errors: as in :class:`GATConv`.

    Source: Brody et al., https://arxiv.org/abs/2105.14491.

    Example:
        >>> import torch, fastattn
        >>> conv = fastattn.nn.GATv2Conv(16, 8, heads=4, concat=False)
        >>> conv(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([4, 8])
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: float | Tensor | str = "mean",
        bias: bool = True,
        share_weights: bool = False,
        residual: bool = False,
        *,
        device=None,
        dtype=None,
        **options,
    ) -> None:
        super().__init__()
        check_options("GATv2Conv", options, _SUM)
        in_src, in_dst = _set_attention(
            self, "GATv2Conv", in_channels, out_channels, heads, edge_dim, dropout
        )
        _check_fill("GATv2Conv", fill_value)
        self.concat = concat
        self.negative_slope = negative_slope
        self.add_self_loops = add_self_loops
        self.fill_value = fill_value
        self.residual = residual
        self.share_weights = share_weights
        factory = {"device": device, "dtype": dtype}
        width = heads * out_channels
        self.lin_l = nn.Linear(in_src, width, bias=bias, **factory)
        self.lin_r = self.lin_l if share_weights else nn.Linear(in_dst, width, bias=bias, **factory)
        self.att = nn.Parameter(torch.empty(1, heads, out_channels, **factory))
        self.lin_edge = None if edge_dim is None else nn.Linear(edge_dim, width, bias=False, **factory)
        _add_output(self, in_dst, width if concat else out_channels, bias, residual, factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """New initial values, as torch_geometric draws them."""
        for layer in (self.lin_l, self.lin_r, self.lin_edge, self.res):
            if layer is not None:
                glorot_(layer.weight)
                if layer.bias is not None:
                    bound = 1 / math.sqrt(layer.in_features)
                    nn.init.uniform_(layer.bias, -bound, bound)
        glorot_(self.att)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor | Pair,
        edge_index: Tensor | Graph,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Tensor | Graph, Tensor]]:
        """Args and returns: as :meth:`GATConv.forward`; a pair needs both features."""
        H, C = self.heads, self.out_channels
        x_src, x_dst = _flat_pair(x, "GATv2Conv")
        if x_dst is None:
            raise ValueError("GATv2Conv needs the features of the targets, got x = (x_src, None)")
        num_src, num_dst = sizes_of("GATv2Conv", x_src, x_dst, None)
        given = adjacency(edge_index, num_src, num_dst)
        _check_returned("GATv2Conv", given, return_attention_weights)
        residual = None if self.res is None else self.res(x_dst)
        source = self.lin_l(x_src).view(-1, H, C)
        same = self.share_weights and x_dst is x_src
        target = source if same else self.lin_r(x_dst).view(-1, H, C)
        graph, edge_attr = _edges(self, "GATv2Conv", given, edge_attr, min(num_src, num_dst))
        found = gatv2_attention(
            source,
            target,
            self.att.squeeze(0),
            graph,
            edge=None if edge_attr is None else self.lin_edge(edge_attr).view(-1, H, C),
            negative_slope=self.negative_slope,
            dropout_p=self.dropout if self.training else 0.0,
            return_attention=bool(return_attention_weights),
        )
        return _result(self, found, residual, edge_index, graph)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}"


class GraphTransformerConv(nn.Module):
    r"""Scaled dot-product attention over the neighbours.

    .. math::
        s_e &= q_n \cdot (k_m + W_{edge} f_e) / \sqrt{C}, \qquad e = (m, n) \\
        x'_n &= \Vert_h \sum_{e = (m, n)} \mathrm{softmax}_n(s)_e \, (v_m + W_{edge} f_e) + W_{skip} x_n

    for each head h, with q, k, v linear in x. Constructor, parameters and numbers are those of
    ``torch_geometric.nn.TransformerConv``, whose ``state_dict`` it loads. Edge attributes are projected once
    per node and head rather than once per edge: no tensor of E x H x C exists.

    Args:
        in_channels: F_in, or a pair (F_src, F_dst) for bipartite graphs.
        out_channels: C, per head. heads: H.
        concat: True gives H * C features, False the mean over the heads.
        beta: mix by a learned gate, ``g W_skip x_n + (1 - g) attention``, rather than add.
        dropout: probability of dropping a weight in training.
        edge_dim: number of edge attributes, which then have to be given.
        bias: in all linear maps but that of the edges.
        root_weight: False leaves out :math:`W_{skip} x_n`.

    Shapes: x (N, F_in), or a pair (N_src, F_src) and (N_dst, F_dst), to (N_dst, H * C) or (N_dst, C);
    edge_attr (E, edge_dim) or (E,).

    Empty rows: a node that no edge enters gives :math:`W_{skip} x_n` alone.

    Precision: scores and sums in float32 (float64 for float64), rounded once. Dropout draws another pattern
    than torch_geometric for the same seed.

    Raises:
        ValueError: sizes that do not fit; edge attributes missing, or given without ``edge_dim``.
        NotImplementedError: an option of torch_geometric's ``MessagePassing`` that changes the formula;
        ``return_attention_weights`` for a sparse matrix.

    Source: Shi et al., https://arxiv.org/abs/2009.03509.

    Example:
        >>> import torch, fastattn
        >>> conv = fastattn.nn.GraphTransformerConv(16, 8, heads=4, edge_dim=3)
        >>> edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> conv(torch.randn(4, 16), edge_index, edge_attr=torch.randn(3, 3)).shape
        torch.Size([4, 32])
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        beta: bool = False,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        root_weight: bool = True,
        *,
        device=None,
        dtype=None,
        **options,
    ) -> None:
        super().__init__()
        check_options("GraphTransformerConv", options, _SUM)
        in_src, in_dst = _set_attention(
            self, "GraphTransformerConv", in_channels, out_channels, heads, edge_dim, dropout
        )
        self.beta = beta and root_weight
        self.root_weight = root_weight
        self.concat = concat
        factory = {"device": device, "dtype": dtype}
        width = heads * out_channels
        self.lin_key = nn.Linear(in_src, width, bias=bias, **factory)
        self.lin_query = nn.Linear(in_dst, width, bias=bias, **factory)
        self.lin_value = nn.Linear(in_src, width, bias=bias, **factory)
        self.lin_edge = None if edge_dim is None else nn.Linear(edge_dim, width, bias=False, **factory)
        total = width if concat else out_channels
        self.lin_skip = nn.Linear(in_dst, total, bias=bias, **factory)
        self.lin_beta = nn.Linear(3 * total, 1, bias=False, **factory) if self.beta else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """New initial values, as torch_geometric draws them."""
        for layer in (
            self.lin_key,
            self.lin_query,
            self.lin_value,
            self.lin_edge,
            self.lin_skip,
            self.lin_beta,
        ):
            if layer is not None:
                layer.reset_parameters()

    def forward(
        self,
        x: Tensor | Pair,
        edge_index: Tensor | Graph,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Tensor | Graph, Tensor]]:
        """Args:
            x: (N, F_in), or a pair of source and target features.
            edge_index: as in :meth:`GATConv.forward`.
            edge_attr: (E, edge_dim) in the order of the edges; has a gradient.
            return_attention_weights: True or False, as in torch_geometric, also returns the edges, as (2, E)
                or, of a Graph, as the Graph, and their weights after dropout (E, H); None does not.

        Returns:
            (N_dst, H * C), or (N_dst, C) with ``concat=False``; or that and the pair of edges and weights.
        """
        H, C = self.heads, self.out_channels
        returned = return_attention_weights is not None
        x_src, x_dst = _flat_pair(x, "GraphTransformerConv")
        if x_dst is None:
            raise ValueError("GraphTransformerConv needs the features of the targets, got x = (x_src, None)")
        given = adjacency(edge_index, *sizes_of("GraphTransformerConv", x_src, x_dst, None))
        _check_returned("GraphTransformerConv", given, returned)
        graph = given.graph
        edge_attr = _edge_attr(self, "GraphTransformerConv", given, edge_attr)
        if self.lin_edge is not None and edge_attr is None:
            raise ValueError(
                f"edge_attr is missing: GraphTransformerConv was made with edge_dim={self.edge_dim}"
            )

        query = self.lin_query(x_dst).view(-1, H, C)
        key = self.lin_key(x_src).view(-1, H, C)
        value = self.lin_value(x_src).view(-1, H, C)
        edges = None if edge_attr is None else _Edges(self.lin_edge, edge_attr, H, C, query.dtype)
        found = graph_attention(
            query,
            key,
            value,
            graph,
            edge_bias=None if edges is None else edges.scores(query, graph) / math.sqrt(C),
            dropout_p=self.dropout if self.training else 0.0,
            return_attention=returned or edges is not None,
        )
        out, weights = (found, None) if isinstance(found, Tensor) else found
        if edges is not None:
            out = out + edges.sums(weights, graph)
        out = out.reshape(-1, H * C) if self.concat else out.mean(dim=1)
        if self.root_weight:
            skip = self.lin_skip(x_dst)
            if self.lin_beta is None:
                out = out + skip
            else:
                gate = self.lin_beta(torch.cat([out, skip, out - skip], dim=-1)).sigmoid()
                out = gate * skip + (1 - gate) * out
        else:
            out = _own(out)
        return (out, (_returned_edges(edge_index, graph), weights)) if returned else out

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}"


class _Edges:
    r"""The edges' part of scores and sums. :math:`q \cdot W f = W^T q \cdot f`, and
    :math:`\sum w_e W f_e = W \sum w_e f_e`: what has to be multiplied by W belongs to nodes, not to edges.
    """

    def __init__(self, layer: nn.Module, edge_attr: Tensor, H: int, C: int, dtype: torch.dtype) -> None:
        weight = plain_weight(layer)
        if weight is None or layer.bias is not None:
            self.weight, self.features = None, layer(edge_attr).view(-1, H, C)
        else:
            if edge_attr.dtype != dtype:
                if autocast_dtype(edge_attr) is None:
                    raise RuntimeError(f"edge_attr is {edge_attr.dtype}, the queries are {dtype}")
                edge_attr = edge_attr.to(dtype)  # as autocast would before it multiplies by the weight
            self.weight = weight.view(H, C, -1)
            self.features = edge_attr.unsqueeze(1).expand(-1, H, -1)

    def scores(self, query: Tensor, graph: Graph) -> Tensor:
        """(E, H): query of the edge's target times its attributes."""
        if self.weight is not None:
            query = torch.matmul(query.transpose(0, 1), self.weight).transpose(0, 1)
        return edge_dot(query, self.features, edges_as_sources(graph))

    def sums(self, weights: Tensor, graph: Graph) -> Tensor:
        """(N_dst, H, C): the attributes of each target's edges, by weight."""
        summed = aggregate(self.features, edges_as_sources(graph), "sum", edge_weight=weights)
        if self.weight is None:
            return summed
        return torch.matmul(summed.transpose(0, 1), self.weight.transpose(1, 2)).transpose(0, 1)


def _set_attention(
    layer: nn.Module, name: str, in_channels, out_channels, heads, edge_dim, dropout
) -> tuple[int, int]:
    """Sets what every layer of attention has, checked; returns the features of sources and targets."""
    in_src, in_dst = pair_of_channels(in_channels)
    check_channels(name, "in_channels", in_src, in_dst)
    check_channels(name, "out_channels", out_channels)
    check_channels(name, "heads", heads)
    if edge_dim is not None:
        check_channels(name, "edge_dim", edge_dim)
    if not 0.0 <= number("dropout", dropout) <= 1.0:
        raise ValueError(f"{name}: dropout must be between 0 and 1, got {dropout}")
    layer.in_channels = in_channels
    layer.out_channels = out_channels
    layer.heads = heads
    layer.edge_dim = edge_dim
    layer.dropout = dropout
    return in_src, in_dst


def _check_fill(layer: str, fill_value) -> None:
    if isinstance(fill_value, str) and fill_value not in _FILLS:
        raise NotImplementedError(
            f"{layer}: fill_value must be a number, a tensor or one of {_FILLS}, got {fill_value!r}"
        )
    if not isinstance(fill_value, (int, float, Tensor, str)):
        raise TypeError(f"{layer}: fill_value must be a number, a tensor or a name, got {fill_value!r}")


def _check_returned(layer: str, given: Adjacency, returned) -> None:
    if returned and given.kind != "edges":
        raise NotImplementedError(
            f"{layer}: return_attention_weights needs edges or a Graph as edge_index, got a sparse matrix"
        )


def _add_output(layer, in_dst: int, total: int, bias: bool, residual: bool, factory: dict) -> None:
    if residual:
        layer.res = nn.Linear(in_dst, total, bias=False, **factory)
    else:
        layer.register_parameter("res", None)
    layer.register_parameter("bias", nn.Parameter(torch.empty(total, **factory)) if bias else None)


def _result(layer, found: Tensor | tuple[Tensor, Tensor], residual: Tensor | None, edge_index, graph: Graph):
    """Of out (N_dst, H, C), or it and the weights: what the layer returns."""
    out, weights = (found, None) if isinstance(found, Tensor) else found
    out = out.reshape(-1, layer.heads * layer.out_channels) if layer.concat else out.mean(dim=1)
    if residual is not None:
        out = out + residual
    out = _own(out) if layer.bias is None else out + layer.bias
    return out if weights is None else (out, (_returned_edges(edge_index, graph), weights))


def _own(out: Tensor) -> Tensor:
    """``out`` for the caller to change in place: attention keeps its result for its derivative."""
    return out.clone() if out.requires_grad and out._is_view() else out


def _flat_pair(x: Tensor | Pair, layer: str) -> Pair:
    x_src, x_dst = as_pair(x)
    for name, features in (("sources", x_src), ("targets", x_dst)):
        if features is not None and features.dim() != 2:
            raise ValueError(
                f"{layer} takes (N, F) features, got {tuple(features.shape)} for the {name}; batch graphs as "
                "one graph of several components"
            )
    return x_src, x_dst


def _returned_edges(edge_index: Tensor | Graph, graph: Graph) -> Tensor | Graph:
    return graph if isinstance(edge_index, Graph) else graph.edge_index()


def _edge_attr(layer, name: str, given: Adjacency, edge_attr: Tensor | None) -> Tensor | None:
    """(E, edge_dim) attributes: those of the call, or values of a matrix that can be such."""
    if edge_attr is None and layer.lin_edge is not None and given.values is not None:
        # torch_geometric takes one number per edge for a weight, even where edge_dim is 1.
        if given.values.dim() > 1:
            edge_attr = given.values
    if edge_attr is None:
        return None
    if layer.lin_edge is None:
        raise ValueError(f"edge_attr was given, but {name} was made without edge_dim")
    if not isinstance(edge_attr, Tensor):
        raise TypeError(f"edge_attr must be a Tensor, got {type(edge_attr).__name__}")
    if edge_attr.layout != torch.strided or not edge_attr.is_floating_point():
        raise RuntimeError(
            f"edge_attr must be dense and of a floating dtype, got {edge_attr.layout} of {edge_attr.dtype}"
        )
    if edge_attr.device != given.graph.device:
        raise RuntimeError(f"edge_attr is on {edge_attr.device}, the edges are on {given.graph.device}")
    if edge_attr.dim() == 1:
        edge_attr = edge_attr.unsqueeze(1)
    # torch_geometric's lazy layers do not write down what they have inferred.
    expected = layer.edge_dim if layer.edge_dim > 0 else edge_attr.shape[-1]
    if edge_attr.shape != (given.graph.num_edges, expected):
        raise ValueError(
            f"edge_attr must be ({given.graph.num_edges}, {layer.edge_dim}), one row per edge, got "
            f"{tuple(edge_attr.shape)}"
        )
    return edge_attr


def _edges(layer, name: str, given: Adjacency, edge_attr: Tensor | None, count: int):
    """The graph with the self-loops that the layer adds, and the attributes of its edges."""
    edge_attr = _edge_attr(layer, name, given, edge_attr)
    if not layer.add_self_loops:
        return given.graph, edge_attr
    loops = self_loops(given.graph, count)
    if edge_attr is not None:
        kept = loops.keep(edge_attr)
        edge_attr = torch.cat([kept, _attr_of_loops(layer.fill_value, loops, kept)])
    return loops.graph, edge_attr


def _attr_of_loops(fill_value: float | Tensor | str, loops: SelfLoops, kept: Tensor) -> Tensor:
    if isinstance(fill_value, str):
        return aggregate(kept, edges_as_sources(loops.without), fill_value)[: loops.count]
    if isinstance(fill_value, Tensor):
        if fill_value.numel() not in (1, kept.shape[1]):
            raise ValueError(
                f"fill_value must have one entry or {kept.shape[1]}, as edge_attr, got "
                f"{tuple(fill_value.shape)}"
            )
        return fill_value.to(kept).expand(loops.count, kept.shape[1])
    return kept.new_full((loops.count, kept.shape[1]), fill_value)
