"""DGL's message passing functions on fastattn's operators.

They take DGL graphs of one edge type by what these offer (``edges``, ``num_src_nodes``, ``num_dst_nodes``,
``canonical_etypes``); DGL itself is not imported. A graph is sorted at its first call and kept for as long as
it lives and has the same edges.
"""

import math

import torch
from torch import Tensor

from fastattn.graph import Graph
from fastattn.nn._graph_layer import remembered
from fastattn.ops.aggregation import aggregate

__all__ = ["copy_u_max", "copy_u_mean", "copy_u_min", "copy_u_sum", "u_mul_e_sum"]


def copy_u_sum(g, x: Tensor) -> Tensor:
    r"""``dgl.ops.copy_u_sum``: the sum of the features of each node's in-neighbours.

    .. math:: \mathrm{out}_n = \sum_{e = (m, n)} x_m

    Args:
        g: a DGL graph or block of one edge type.
        x: (N_src, ...) features of the source nodes.

    Returns:
        (N_dst, ...). A node without in-edges gets 0.

    Raises:
        RuntimeError: x does not have a row per source node; several edge types.
        TypeError: ``g`` is no DGL graph, x no tensor.

    Precision and gradients: as :func:`fastattn.aggregate`.

    Example:
        >>> from fastattn.integrations.dgl import copy_u_sum
        >>> h = copy_u_sum(g, g.ndata["h"])  # g.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
    """
    return _copy_u(g, x, "sum")


def copy_u_mean(g, x: Tensor) -> Tensor:
    """``dgl.ops.copy_u_mean``: :func:`copy_u_sum` over the number of in-edges; 0 where there is none."""
    return _copy_u(g, x, "mean")


def copy_u_max(g, x: Tensor) -> Tensor:
    """``dgl.ops.copy_u_max``: the largest feature among the in-neighbours; 0 where there is none.

    Of equal ones the first edge takes the gradient. Unlike DGL's, an infinity stays one, and a NaN is not
    passed over.
    """
    return _copy_u(g, x, "max")


def copy_u_min(g, x: Tensor) -> Tensor:
    """``dgl.ops.copy_u_min``: as :func:`copy_u_max`, the smallest."""
    return _copy_u(g, x, "min")


def u_mul_e_sum(g, x: Tensor, e: Tensor) -> Tensor:
    r"""``dgl.ops.u_mul_e_sum``: the sum of the in-neighbours' features times the edges'.

    .. math:: \mathrm{out}_n = \sum_{e = (m, n)} x_m \odot w_e

    Args:
        g: a DGL graph or block of one edge type.
        x: (N_src, ...) features of the source nodes.
        e: (E, ...) features of the edges, by edge id. Feature dimensions broadcast from the right: weights
            (E, H, 1) beside features (N, H, C) are one per head. Nothing is held per edge but ``e`` itself
            and its gradient.

    Returns:
        (N_dst, ...) with the broadcast feature dimensions. A node without in-edges gets 0.

    Raises:
        RuntimeError: shapes or dtypes that do not fit together. TypeError: ``g`` is no DGL graph; no tensor.

    Precision and gradients: as :func:`fastattn.aggregate`.

    Example:
        >>> from fastattn.integrations.dgl import u_mul_e_sum
        >>> h = u_mul_e_sum(g, h, weights.unsqueeze(-1))  # h (N, H, C), weights (E, H)
    """
    graph = _graph_of(g)
    _check_rows("x", x)
    _check_rows("e", e)
    if e.shape[0] != graph.num_edges:
        raise RuntimeError(f"e has {e.shape[0]} rows, the graph {graph.num_edges} edges")
    try:
        shape = torch.broadcast_shapes(x.shape[1:], e.shape[1:])
    except RuntimeError:
        raise RuntimeError(
            f"the features of x {tuple(x.shape)} and e {tuple(e.shape)} do not broadcast"
        ) from None
    x, e = (t.reshape(t.shape[0], *(1,) * (len(shape) - t.dim() + 1), *t.shape[1:]) for t in (x, e))
    # Weights are constant over the last dimensions: these are the channels, those before them the heads.
    split = max((n + 1 for n, size in enumerate(e.shape[1:]) if size != 1), default=0)
    heads, channels = math.prod(shape[:split]), math.prod(shape[split:])
    x = x.expand(x.shape[0], *shape).reshape(x.shape[0], heads, channels)
    e = e.expand(e.shape[0], *shape[:split], *e.shape[split + 1 :]).reshape(e.shape[0], heads)
    return aggregate(x, graph, "sum", edge_weight=e).reshape(graph.num_dst, *shape)


def _copy_u(g, x: Tensor, reduce: str) -> Tensor:
    graph = _graph_of(g)
    _check_rows("x", x)
    shape = x.shape[1:]
    out = aggregate(x.reshape(x.shape[0], math.prod(shape)), graph, reduce)
    return out.reshape(graph.num_dst, *shape)


def _check_rows(name: str, tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(tensor).__name__}")
    if tensor.dim() == 0:
        raise RuntimeError(f"{name} must have a row for each node or edge, got shape ()")


def _graph_of(g) -> Graph:
    if not (hasattr(g, "canonical_etypes") and hasattr(g, "edges") and hasattr(g, "num_src_nodes")):
        raise TypeError(f"g must be a DGL graph, got {type(g).__name__}")
    if len(g.canonical_etypes) != 1:
        return Graph.from_sparse(g)  # which says why not
    ends = g.edges(form="uv", order="eid")
    return remembered(g, tuple(ends), int(g.num_src_nodes()), int(g.num_dst_nodes()))
