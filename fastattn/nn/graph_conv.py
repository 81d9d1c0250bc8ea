"""Graph convolutions that sum, average or maximise over neighbours."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.graph import Graph
from fastattn.nn._graph_layer import (
    Adjacency,
    Pair,
    adjacency,
    as_pair,
    can_keep,
    check_channels,
    check_options,
    glorot_,
    number_of_nodes,
    pair_of_channels,
    plain_weight,
    self_loops,
    sizes_of,
    weights_of_matrix,
    widened,
)
from fastattn.ops.aggregation import aggregate

__all__ = ["GCNConv", "GINConv", "GatedGraphConv", "SAGEConv"]

_SUM = ("add", "sum")
_REDUCES = ("add", "sum", "mean", "max", "min")


class GCNConv(nn.Module):
    r"""The graph convolution of Kipf and Welling.

    .. math::
        x'_n = W \sum_{e = (m, n)} \frac{w_e}{\sqrt{d_m d_n}} x_m + b, \qquad d_n = \sum_{e = (m, n)} w_e

    over the edges and one self-loop per node. Constructor, parameters and numbers are those of
    ``torch_geometric.nn.GCNConv``. The normalisation is fused into the sum, and the sum runs over the
    narrower of the features before and after W.

    Args:
        in_channels, out_channels: F_in, F_out.
        improved: missing self-loops weigh 2 rather than 1. As in torch_geometric this acts on edges only
            beside ``edge_weight``; a sparse matrix always has weights.
        cached: keep the graph with its self-loops and weights of the first call for all later ones, whatever
            graph they are given; :meth:`reset_parameters` forgets it. A :class:`fastattn.Graph` needs no
            such promise: it remembers its self-loops by itself.
        add_self_loops: by default the value of ``normalize``. A self-loop that is there keeps its weight (the
            last one, if a node has several).
        normalize: False sums with the weights as they are.
        bias: add b.

    Shapes: x (..., N, F_in) to (..., N, F_out); edge_weight (E,).

    Empty rows: a node without edges, possible with ``add_self_loops=False``, gives b. A node whose degree is
    not positive takes no part in the sum.

    Precision: sums in float32 (float64 for float64), rounded once.

    Raises:
        ValueError: channels that are not positive, a pair of features, weights of a wrong shape.
        NotImplementedError: an option of torch_geometric's ``MessagePassing`` that changes the formula.

    Source: Kipf and Welling, https://arxiv.org/abs/1609.02907.

    Example:
        >>> import torch, fastattn
        >>> conv = fastattn.nn.GCNConv(16, 32)
        >>> graph = fastattn.Graph(torch.tensor([[0, 1, 2], [1, 2, 0]]), num_nodes=4)
        >>> conv(torch.randn(4, 16), graph).shape
        torch.Size([4, 32])
    """

    _normalized: tuple[Graph, Tensor | None, str] | None = None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        improved: bool = False,
        cached: bool = False,
        add_self_loops: bool | None = None,
        normalize: bool = True,
        bias: bool = True,
        *,
        device=None,
        dtype=None,
        **options,
    ) -> None:
        super().__init__()
        check_options("GCNConv", options, _SUM)
        check_channels("GCNConv", "in_channels", in_channels)
        check_channels("GCNConv", "out_channels", out_channels)
        if add_self_loops is None:
            add_self_loops = normalize
        if add_self_loops and not normalize:
            raise ValueError("GCNConv adds self-loops only with normalize=True, got normalize=False")
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.improved = improved
        self.cached = cached
        self.add_self_loops = add_self_loops
        self.normalize = normalize
        factory = {"device": device, "dtype": dtype}
        self.lin = nn.Linear(in_channels, out_channels, bias=False, **factory)
        self.register_parameter("bias", nn.Parameter(torch.empty(out_channels, **factory)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """New initial values, as torch_geometric draws them; forgets what ``cached`` has kept."""
        glorot_(self.lin.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        self._normalized = None

    def forward(self, x: Tensor, edge_index: Tensor | Graph, edge_weight: Tensor | None = None) -> Tensor:
        """Args:
            x: (..., N, F_in).
            edge_index: (2, E) integers, sources and targets; a :class:`fastattn.Graph`; an ``EdgeIndex``; a
                torch.sparse matrix or ``SparseTensor`` with targets as rows, whose values are the weights.
            edge_weight: (E,) in the order of the edges; has a gradient.

        Returns:
            (..., N, F_out).
        """
        if isinstance(x, (tuple, list)):
            raise ValueError("GCNConv takes one tensor of node features, got a pair: see SAGEConv")
        graph, weight, reduce = self._weighted_graph(x, edge_index, edge_weight)
        if weight is not None:
            weight = widened(weight, x)
        # Sum and matrix product may change places; the fewer bytes to gather the better.
        narrow = self.in_channels < self.out_channels and x.layout == torch.strided
        if narrow and _is_linear(self.lin):
            out = self.lin(aggregate(x, graph, reduce, edge_weight=weight))
        else:
            out = aggregate(self.lin(x), graph, reduce, edge_weight=weight)
        return out if self.bias is None else out + self.bias

    def _weighted_graph(self, x, edge_index, edge_weight) -> tuple[Graph, Tensor | None, str]:
        if self.cached and self._normalized is not None:
            return self._normalized
        num_nodes = number_of_nodes("GCNConv", x)
        given = adjacency(edge_index, num_nodes, num_nodes)
        graph, weight = given.graph, _edge_weight(given, edge_weight)
        if self.add_self_loops:
            loops = self_loops(graph, num_nodes, keep_own=given.kind == "matrix")
            fill = 2.0 if self.improved else 1.0
            if weight is None and given.kind != "edges" and fill != 1.0:
                weight = x.new_ones(graph.num_edges)
            if weight is not None:
                weight = loops.weights(weight, fill, own=given.kind == "edges")
            graph = loops.graph
        found = (graph, weight, "sym" if self.normalize else "sum")
        if self.cached and self.normalize and can_keep():
            self._normalized = found
        return found

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}"


class SAGEConv(nn.Module):
    r"""GraphSAGE's convolution.

    .. math::
        x'_n = W_l \, \mathrm{reduce}_{(m, n)}\, x_m + b + W_r x_n

    Constructor, parameters and numbers are those of ``torch_geometric.nn.SAGEConv``. Sums and means run over
    the narrower of the features before and after :math:`W_l`.

    Args:
        in_channels: F_in, or a pair (F_src, F_dst) for bipartite graphs.
        out_channels: F_out.
        aggr: "mean", "sum" (or "add"), "max" or "min".
        normalize: divide each x' by its Euclidean norm.
        root_weight: False leaves out :math:`W_r x_n`.
        project: first x_m becomes relu(W x_m + b'), for the sum only.
        bias: add b.

    Shapes: x (..., N, F_in), or a pair (N_src, F_src) and (N_dst, F_dst) or None, to (..., N_dst, F_out).

    Empty rows: the reduction over no edges is 0. Ties of a maximum give their gradient to the first edge of
    the row; torch_geometric divides it among them.

    Precision: sums in float32 (float64 for float64), rounded once.

    Raises:
        ValueError: sizes that do not fit. NotImplementedError: another ``aggr``, or an option of
        torch_geometric's ``MessagePassing`` that changes the formula.

    Source: Hamilton et al., https://arxiv.org/abs/1706.02216.

    Example:
        >>> import torch, fastattn
        >>> conv = fastattn.nn.SAGEConv(16, 32)
        >>> conv(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([4, 32])
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        aggr: str = "mean",
        normalize: bool = False,
        root_weight: bool = True,
        project: bool = False,
        bias: bool = True,
        *,
        device=None,
        dtype=None,
        **options,
    ) -> None:
        super().__init__()
        check_options("SAGEConv", options | {"aggr": aggr}, _REDUCES)
        in_src, in_dst = pair_of_channels(in_channels)
        check_channels("SAGEConv", "in_channels", in_src, in_dst)
        check_channels("SAGEConv", "out_channels", out_channels)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.aggr = aggr
        self.normalize = normalize
        self.root_weight = root_weight
        self.project = project
        factory = {"device": device, "dtype": dtype}
        if project:
            self.lin = nn.Linear(in_src, in_src, **factory)
        self.lin_l = nn.Linear(in_src, out_channels, bias=bias, **factory)
        if root_weight:
            self.lin_r = nn.Linear(in_dst, out_channels, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """New initial values, as torch_geometric draws them."""
        if self.project:
            self.lin.reset_parameters()
        self.lin_l.reset_parameters()
        if self.root_weight:
            self.lin_r.reset_parameters()

    def forward(
        self, x: Tensor | Pair, edge_index: Tensor | Graph, size: tuple[int, int] | None = None
    ) -> Tensor:
        """Args:
            x: (..., N, F_in), or a pair of source and target features; without targets no :math:`W_r x_n`.
            edge_index: as in :class:`GCNConv`; the values of a torch.sparse matrix multiply the features,
                those of a ``SparseTensor`` are not looked at, both as in torch_geometric.
            size: (N_src, N_dst), needed for edges where x has no targets and N_dst is not N_src.

        Returns:
            (..., N_dst, F_out).
        """
        x_src, x_dst = as_pair(x)
        given = adjacency(edge_index, *sizes_of("SAGEConv", x_src, x_dst, size))
        weight = _plain_weights(given, x_src)
        if self.project:
            x_src = self.lin(x_src).relu()
        narrow = self.aggr not in ("max", "min") and self.out_channels < x_src.shape[-1]
        if narrow and _is_linear(self.lin_l):
            projected = F.linear(x_src, self.lin_l.weight)
            out = aggregate(projected, given.graph, self.aggr, edge_weight=weight)
            out = out if self.lin_l.bias is None else out + self.lin_l.bias.to(out.dtype)
        else:
            out = self.lin_l(aggregate(x_src, given.graph, self.aggr, edge_weight=weight))
        if self.root_weight and x_dst is not None:
            out = out + self.lin_r(x_dst)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, aggr={self.aggr}"


class GINConv(nn.Module):
    r"""The graph isomorphism network's convolution.

    .. math::
        x'_n = \mathrm{nn}\Big((1 + \epsilon)\, x_n + \sum_{(m, n)} x_m\Big)

    Constructor, parameters and numbers are those of ``torch_geometric.nn.GINConv``.

    Args:
        nn: a module from F_in to F_out features.
        eps: initial :math:`\epsilon`.
        train_eps: make it a parameter rather than a buffer.
        aggr: "add" (or "sum"), "mean", "max" or "min".

    Shapes: x (..., N, F_in), or a pair (N_src, F_in) and (N_dst, F_in) or None, to (..., N_dst, F_out).

    Empty rows: the sum over no edges is 0. Precision: sums in float32 (float64 for float64), rounded once.

    Raises:
        ValueError: sizes that do not fit. NotImplementedError: an option of torch_geometric's
        ``MessagePassing`` that changes the formula.

    Source: Xu et al., https://arxiv.org/abs/1810.00826.

    Example:
        >>> import torch, fastattn
        >>> conv = fastattn.nn.GINConv(torch.nn.Linear(16, 32), train_eps=True)
        >>> conv(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([4, 32])
    """

    def __init__(
        self,
        nn: nn.Module,
        eps: float = 0.0,
        train_eps: bool = False,
        *,
        aggr: str = "add",
        device=None,
        dtype=None,
        **options,
    ) -> None:
        super().__init__()
        check_options("GINConv", options | {"aggr": aggr}, _REDUCES)
        self.nn = nn
        self.aggr = aggr
        self.initial_eps = eps
        value = torch.full((1,), float(eps), device=device, dtype=dtype)
        if train_eps:
            self.eps = torch.nn.Parameter(value)
        else:
            self.register_buffer("eps", value)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """New initial values for ``nn``, and the first :math:`\\epsilon`."""
        _reset(self.nn)
        with torch.no_grad():
            self.eps.fill_(self.initial_eps)

    def forward(
        self, x: Tensor | Pair, edge_index: Tensor | Graph, size: tuple[int, int] | None = None
    ) -> Tensor:
        """Args:
            x: (..., N, F_in), or a pair of source and target features; without targets the sum alone.
            edge_index, size: as in :class:`SAGEConv`.

        Returns:
            (..., N_dst, F_out).
        """
        x_src, x_dst = as_pair(x)
        given = adjacency(edge_index, *sizes_of("GINConv", x_src, x_dst, size))
        out = aggregate(x_src, given.graph, self.aggr, edge_weight=_plain_weights(given, x_src))
        if x_dst is not None:
            out = out + (1 + self.eps) * x_dst
        return self.nn(out)


class GatedGraphConv(nn.Module):
    r"""Gated graph convolution: L rounds of messages, each absorbed by a gated recurrent unit.

    .. math::
        h^0_n = (x_n, 0), \qquad m^l_n = \sum_{e = (m, n)} w_e W_l h^l_m, \qquad
        h^{l+1}_n = \mathrm{GRU}(m^l_n, h^l_n)

    Constructor, parameters and numbers are those of ``torch_geometric.nn.GatedGraphConv``.

    Args:
        out_channels: F_out, at least the number of input features, which are filled up with zeros.
        num_layers: L.
        aggr: "add" (or "sum"), "mean", "max" or "min".
        bias: biases in the recurrent unit.

    Shapes: x (N, F_in) to (N, F_out); edge_weight (E,).

    Empty rows: a node that receives nothing gets m = 0. Precision: sums in float32 (float64 for float64),
    rounded once.

    Raises:
        ValueError: more input features than ``out_channels``. NotImplementedError: an option of
        torch_geometric's ``MessagePassing`` that changes the formula.

    Source: Li et al., https://arxiv.org/abs/1511.05493.

    Example:
        >>> import torch, fastattn
        >>> conv = fastattn.nn.GatedGraphConv(32, num_layers=3)
        >>> conv(torch.randn(4, 16), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([4, 32])
    """

    def __init__(
        self,
        out_channels: int,
        num_layers: int,
        aggr: str = "add",
        bias: bool = True,
        *,
        device=None,
        dtype=None,
        **options,
    ) -> None:
        super().__init__()
        check_options("GatedGraphConv", options | {"aggr": aggr}, _REDUCES)
        check_channels("GatedGraphConv", "out_channels", out_channels)
        check_channels("GatedGraphConv", "num_layers", num_layers)
        self.out_channels = out_channels
        self.num_layers = num_layers
        self.aggr = aggr
        factory = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(num_layers, out_channels, out_channels, **factory))
        self.rnn = nn.GRUCell(out_channels, out_channels, bias=bias, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """New initial values, as torch_geometric draws them."""
        bound = 1 / math.sqrt(self.out_channels)
        nn.init.uniform_(self.weight, -bound, bound)
        self.rnn.reset_parameters()

    def forward(self, x: Tensor, edge_index: Tensor | Graph, edge_weight: Tensor | None = None) -> Tensor:
        """Args:
            x: (N, F_in), F_in at most ``out_channels``.
            edge_index: as in :class:`GCNConv`.
            edge_weight: (E,) in the order of the edges; has a gradient.

        Returns:
            (N, F_out).
        """
        num_nodes = number_of_nodes("GatedGraphConv", x)
        if x.dim() != 2:
            raise ValueError(f"GatedGraphConv takes (N, F) features, got {tuple(x.shape)}")
        channels = x.shape[1]
        if channels > self.out_channels:
            raise ValueError(f"x has {channels} features, GatedGraphConv only {self.out_channels}")
        given = adjacency(edge_index, num_nodes, num_nodes)
        weight = _edge_weight(given, edge_weight)
        h = F.pad(x, (0, self.out_channels - channels))
        for layer_weight in self.weight:
            messages = h @ layer_weight
            summed = aggregate(
                messages,
                given.graph,
                self.aggr,
                edge_weight=None if weight is None else widened(weight, messages),
            )
            h = self.rnn(summed, h)
        return h

    def extra_repr(self) -> str:
        return f"{self.out_channels}, num_layers={self.num_layers}"


def _edge_weight(given: Adjacency, edge_weight: Tensor | None) -> Tensor | None:
    values = weights_of_matrix(given)
    if edge_weight is None:
        return values
    if given.kind != "edges":
        raise ValueError("edge_weight beside a sparse matrix: its own values are the weights")
    if not isinstance(edge_weight, Tensor):
        raise TypeError(f"edge_weight must be a Tensor, got {type(edge_weight).__name__}")
    if edge_weight.numel() != given.graph.num_edges:
        raise ValueError(
            f"edge_weight must be ({given.graph.num_edges},), one per edge, got {tuple(edge_weight.shape)}"
        )
    return edge_weight.reshape(-1)


def _plain_weights(given: Adjacency, x: Tensor) -> Tensor | None:
    """Of layers without edge weights: only the values of a torch.sparse matrix act, as in its product."""
    values = weights_of_matrix(given) if given.kind == "matrix" else None
    return None if values is None else widened(values, x)


def _is_linear(layer: nn.Module) -> bool:
    return plain_weight(layer) is not None


def _reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
        return
    for child in module.children() if hasattr(module, "children") else ():
        _reset(child)
