"""Neighbour aggregation: validates a call, chooses an implementation and runs it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from fastattn import _triton
from fastattn._choose import KERNEL_DTYPES, Request, candidates, choose
from fastattn.graph import Ends, Graph, _check_size, as_graph
from fastattn.ops import _aggregation_autograd as fused
from fastattn.ops._common import autocast_dtype, is_plain, is_watched, needs_function
from fastattn.reference import aggregation as reference
from fastattn.reference._common import wide_dtype

__all__ = ["aggregate", "segment_reduce"]

# What each name computes; "add", "amax" and "amin" are what other libraries call these.
_REDUCES = {name: name for name in ("sum", "mean", "sym", "both", "max", "min")}
_REDUCES |= {"add": "sum", "amax": "max", "amin": "min"}
_OPS = {"max": "fastattn::aggregate_max", "min": "fastattn::aggregate_max"}


class _Prepared(NamedTuple):
    """A checked call: features (B, N_src, H, F) and weights (E, H) or (E, 1) as the ops take them.

    ``batch`` are the caller's leading dimensions, ``inner`` the ones behind the nodes.
    """

    x: Tensor
    graph: Graph
    reduce: str
    edge_weight: Tensor | None
    batch: tuple[int, ...]
    inner: tuple[int, ...]
    request: Request


def _check_features(name: str, x) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(x).__name__}")
    if x.is_nested or x.layout != torch.strided:
        raise NotImplementedError(f"{name} must be a dense tensor; nested and sparse ones are not supported")
    if x.dtype not in KERNEL_DTYPES:
        raise RuntimeError(f"{name} must be float32, float64, bfloat16 or float16, got {x.dtype}")


def _check_reduce(reduce, allowed) -> str:
    if not isinstance(reduce, str) or reduce not in allowed:
        raise ValueError(f"reduce must be one of {', '.join(map(repr, allowed))}, got {reduce!r}")
    return _REDUCES[reduce]


def _prepare(x, graph, reduce="sum", edge_weight=None) -> _Prepared:
    _check_features("x", x)
    reduce = _check_reduce(reduce, _REDUCES)
    heads = False
    if edge_weight is not None:
        if isinstance(edge_weight, Tensor) and autocast_dtype(x) is not None:
            # The features are what is read again and again: they keep the dtype that autocast gave them.
            edge_weight = edge_weight.to(x.dtype)
        _check_features("edge_weight", edge_weight)
        if edge_weight.dtype != x.dtype:
            raise RuntimeError(f"edge_weight is {edge_weight.dtype}, x {x.dtype}: they must agree")
        if edge_weight.device != x.device:
            raise RuntimeError(f"edge_weight is on {edge_weight.device}, x on {x.device}")
        if edge_weight.dim() not in (1, 2):
            raise RuntimeError(f"edge_weight must be (E,) or (E, H), got {tuple(edge_weight.shape)}")
        heads = edge_weight.dim() == 2
    if x.dim() < 2 + heads:
        form = "(..., N, H, C) beside edge_weight (E, H)" if heads else "(..., N, F)"
        raise RuntimeError(f"x must be {form}, got {tuple(x.shape)}")
    split = x.dim() - 2 - heads
    batch, N, inner = x.shape[:split], x.shape[split], x.shape[split + 1 :]
    graph = as_graph(graph, N)
    if graph.device != x.device:
        raise RuntimeError(f"the graph is on {graph.device}, x on {x.device}")
    if edge_weight is not None:
        if edge_weight.shape[0] != graph.num_edges:
            raise RuntimeError(
                f"edge_weight has {edge_weight.shape[0]} entries, the graph {graph.num_edges} edges"
            )
        if heads and edge_weight.shape[1] not in (1, inner[0]):
            raise RuntimeError(
                f"edge_weight has {edge_weight.shape[1]} heads, x {inner[0]}: {tuple(edge_weight.shape)} "
                f"beside {tuple(x.shape)}"
            )
        edge_weight = edge_weight if heads else edge_weight.unsqueeze(1)
    if reduce == "sym" and graph.num_src != graph.num_dst:
        raise ValueError(
            f"reduce='sym' needs one set of nodes, the graph has {graph.num_src} sources and {graph.num_dst} "
            "targets: use 'both'"
        )
    options = () if edge_weight is None else ("edge_weight",)
    request = Request(x.device.type, x.dtype, options, _OPS.get(reduce, "fastattn::aggregate_sum"))
    x = x.reshape(math.prod(batch), N, *(inner if heads else (1, *inner)))
    return _Prepared(x, graph, reduce, edge_weight, tuple(batch), tuple(inner), request)


def _run(call: _Prepared, implementation: str) -> Tensor:
    x, graph, reduce, weight = call[:4]
    csr = graph.csr
    # Sorted by source only where a gradient will be asked for: of the features, or of the degrees.
    degrees = reduce == "sym" and weight is not None
    watched = needs_function((x, weight if degrees else None))
    csc = graph.csc if implementation != "reference" and watched else None

    def summed(x, weight, row_scale=None, col_scale=None) -> Tensor:
        if implementation == "reference":
            return reference.aggregate_sum(x, *csr, weight, row_scale, col_scale, None, False)
        return fused.aggregate_sum(x, csr, csc, weight, row_scale, col_scale)

    wide = wide_dtype(x.dtype)
    if reduce in ("max", "min"):
        if implementation == "reference":
            out, _ = reference.aggregate_max(x, *csr, weight, reduce == "min")
        else:
            out = fused.aggregate_max(x, csr, csc, weight, reduce == "min")
    elif reduce != "sym" or weight is None:
        out = summed(x, weight, *_scales(graph, reduce, wide))
    else:
        H = weight.shape[1]
        root = _inverse_root(summed(x.new_ones((), dtype=wide).expand(1, x.shape[1], H, 1), weight.to(wide)))
        if H == 1:
            out = summed(x, weight, root.view(-1), root.view(-1))
        else:
            # Each head has degrees of its own. Half precision stays wide in between, to be rounded once.
            out = (summed(x.to(wide) * root, weight.to(wide)) * root).to(x.dtype)
    return out.reshape(*call.batch, graph.num_dst, *call.inner)


# The vectors that a sum's rows and their other ends are multiplied by. Weighted "sym" makes its own.
_SCALES = {
    "sum": (None, None), "mean": ("in", None), "sym": ("in_root", "in_root"), "both": ("in_root", "out_root"),
}  # fmt: skip


def _scales(graph: Graph, reduce: str, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    row, col = _SCALES[reduce]
    return row and graph._vector(row, dtype), col and graph._vector(col, dtype)


def _is_simple(x, graph: Graph, edge_weight) -> bool:
    """Whether this may go the short way of _aggregation_autograd.py, as far as the tensors go."""
    kind = x.__class__
    if not ((kind is Tensor or kind is torch.nn.Parameter) and is_plain(x)):
        return False
    dims, node = x.dim(), -2
    if edge_weight is not None:
        kind = edge_weight.__class__
        if not (
            (kind is Tensor or kind is torch.nn.Parameter)
            and is_plain(edge_weight)
            and edge_weight.dtype == x.dtype
            and 1 <= edge_weight.dim() <= 2
            and edge_weight.size(0) == graph.num_edges
        ):
            return False
        if edge_weight.dim() == 2:
            if not (dims == 3 and edge_weight.size(1) in (1, x.size(1))):
                return False
            node = 0
    return (
        2 <= dims <= 3
        and x.size(node) == graph.num_src
        and not is_watched()
        and forward_ad._current_level < 0
        and not _triton.replaces_native("fastattn::aggregate_sum")
    )


def _form(x: Tensor, graph: Graph, reduce, weighted: bool, impl) -> fused.Form | None:
    """What the short way makes of a call; None where the call is not for it or an error."""
    if reduce not in _REDUCES or x.dtype not in KERNEL_DTYPES or not graph.is_plain:
        return None
    name = _REDUCES[reduce]
    if name == "sym" and (weighted or graph.num_src != graph.num_dst):
        return None
    if choose(Request("cpu", x.dtype, (), _OPS.get(name, "fastattn::aggregate_sum")), impl) != "cpu":
        return None
    if name in ("max", "min"):
        return fused.Form(None, None, name == "min")
    return fused.Form(*_scales(graph, name, wide_dtype(x.dtype)), None)


def _inverse_root(degree: Tensor) -> Tensor:
    """One over the square root, 0 for degrees that have none; a NaN stays. Finite gradients everywhere."""
    none = degree <= 0
    return torch.where(none, 0.0, torch.where(none, 1.0, degree).rsqrt())


def aggregate(
    x: Tensor, graph, reduce: str = "sum", *, edge_weight: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    r"""For each node, its neighbours' features reduced to one: ``A @ x`` and its relatives in one pass.

    With :math:`m \to n` the edges that enter n, :math:`w` their weights (1 without ``edge_weight``) and
    :math:`d_n` their number:

    .. math::
        \mathrm{sum}_n = \sum_{m \to n} w\, x_m, \qquad
        \mathrm{mean}_n = \frac{1}{d_n} \sum_{m \to n} w\, x_m, \qquad
        \mathrm{max}_n = \max_{m \to n} w\, x_m

    .. math::
        \mathrm{sym}_n = \sum_{m \to n} \frac{w\, x_m}{\sqrt{D_n D_m}}, \quad D_n = \sum_{m \to n} w, \qquad
        \mathrm{both}_n = \sum_{m \to n} \frac{w\, x_m}{\sqrt{d_n\, d^{\mathrm{out}}_m}}

    No message, normalised weight or other array with an entry per edge and feature is ever made.

    Args:
        x: (..., N_src, F) features of the sources, any strides; with ``edge_weight`` (E, H) it is
            (..., N_src, H, C).
        graph: a :class:`Graph`, or whatever one is made of: ``edge_index`` (2, E), a sparse matrix whose rows
            are the targets, a DGL graph. A Graph is sorted once, everything else at each call.
        reduce: "sum" (or "add"), "mean", "sym", "both", "max" ("amax"), "min" ("amin"). "sym" is the
            normalisation of a GCN, by the weighted in-degree at both ends; it needs as many sources as
            targets. "both" is that of DGL: edges are counted, at the source those that leave it.
        edge_weight: (E,), or (E, H) for a weight per head, (E, 1) for the same in each, in the order of the
            caller's edges and of x's dtype.
        impl: "auto" or exactly one of "cpu", "reference", "triton", "cuda"; :func:`fastattn.explain` tells
            which one runs.

    Precision: sums, counts and degrees in float32 (float64 for float64), one rounding to x's dtype at the
    end. Under autocast x stays as it is, and the weights take its dtype. All derivatives exist, to any
    order; forward mode only with ``impl="reference"``.

    Empty rows: a node that no edge enters gives 0 and no gradient, whatever the reduction. "sym" takes 0 for
    one over the root of a degree that is not positive.

    Ties: of equal values "max" and "min" take the first edge of the row in the caller's order, and the
    gradient goes to it alone. A NaN is the result of its row, and the first one takes the gradient.

    Returns:
        (..., N_dst, F) or (..., N_dst, H, C), of x's dtype.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit together.
        ValueError: an unknown reduction; a node number outside the graph. TypeError: no tensor or graph.
        NotImplementedError: ``impl`` names an implementation that cannot run this call; the message says why.

    Source: "sym": Kipf and Welling, arXiv:1609.02907; "mean" and "max": Hamilton et al., arXiv:1706.02216.

    Example:
        >>> edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])
        >>> x = torch.tensor([[1.0], [2.0], [4.0]])
        >>> fastattn.aggregate(x, fastattn.Graph(edge_index, num_nodes=3), "mean")
        tensor([[4.0000], [2.5000], [2.0000]])
    """
    if (
        graph.__class__ is Graph
        and reduce.__class__ is str
        and impl.__class__ is str
        and not is_compiling()
        and _is_simple(x, graph, edge_weight)
    ):
        key = reduce, x.dtype, edge_weight is None, impl
        form = graph._forms.get(key)
        if form is None:
            form = _form(x, graph, reduce, edge_weight is not None, impl)
        if form is not None:
            graph._forms[key] = form
            return fused.aggregate_rows(x, edge_weight, graph, form)
    call = _prepare(x, graph, reduce, edge_weight)
    return _run(call, choose(call.request, impl))


def _choice(x, graph, reduce="sum", *, edge_weight=None, impl="auto"):
    request = _prepare(x, graph, reduce, edge_weight).request
    return choose(request, impl), candidates(request)


aggregate._choice = _choice

_SEGMENTS = Ends("rows", "batch", "rows", "segments")
_SEGMENT_REDUCES = tuple(name for name in _REDUCES if name not in ("sym", "both"))


def _segments(x, ptr, batch, num_segments) -> Graph:
    """The bipartite graph with one edge from each row of x to the segment that it belongs to."""
    if x.dim() < 2:
        raise RuntimeError(f"x must be (..., N, F), got {tuple(x.shape)}")
    if (ptr is None) == (batch is None):
        raise ValueError(f"give ptr or batch, got {'neither' if ptr is None else 'both'}")
    N = x.shape[-2]
    index = ptr if batch is None else batch
    name = "ptr" if batch is None else "batch"
    if not isinstance(index, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(index).__name__}")
    if index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(
            f"{name} must be int64 or int32 with one dimension, got {index.dtype} {tuple(index.shape)}"
        )
    if index.device != x.device:
        raise RuntimeError(f"{name} is on {index.device}, x on {x.device}")
    if num_segments is not None:
        num_segments = _check_size("num_segments", num_segments)
    rows = torch.arange(N, dtype=index.dtype, device=index.device)
    if batch is None:
        if num_segments is not None and num_segments != index.shape[0] - 1:
            raise ValueError(f"num_segments is {num_segments}, ptr has {index.shape[0] - 1} segments")
        try:
            return Graph.from_csr(index, rows, num_src=N)
        except (ValueError, RuntimeError) as error:  # in the caller's words
            raise type(error)(str(error).replace("rowptr", "ptr").replace("col ends", "x ends")) from None
    if index.shape[0] != N:
        raise RuntimeError(f"batch has {index.shape[0]} entries, x {N} rows")
    return Graph._of_edges(rows, index, N, num_segments, _SEGMENTS)


def segment_reduce(
    x: Tensor,
    reduce: str = "sum",
    *,
    ptr: Tensor | None = None,
    batch: Tensor | None = None,
    num_segments: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Reduces groups of rows to one row each: the readout of a batch of graphs.

    ``out[s] = reduce(x[n] for n in segment s)``, as :func:`aggregate` does for the neighbours of a node.

    Args:
        x: (..., N, F), any strides.
        reduce: "sum" (or "add"), "mean", "max" ("amax"), "min" ("amin").
        ptr: (S + 1,) int64 or int32: segment s is the rows ptr[s] to ptr[s + 1]; from 0 to N.
        batch: (N,) int64 or int32, instead of ``ptr``: the segment of each row, in any order.
        num_segments: S beside ``batch``; by default the largest number in it plus one.
        impl: as in :func:`aggregate`.

    Precision, ties, gradients and errors are those of :func:`aggregate`; an empty segment gives 0.

    Returns:
        (..., S, F), of x's dtype.

    Example:
        >>> x = torch.tensor([[1.0], [2.0], [4.0]])
        >>> fastattn.segment_reduce(x, "mean", batch=torch.tensor([0, 0, 1]))
        tensor([[1.5000], [4.0000]])
    """
    _check_features("x", x)
    _check_reduce(reduce, _SEGMENT_REDUCES)
    return aggregate(x, _segments(x, ptr, batch, num_segments), reduce, impl=impl)


def _segment_choice(x, reduce="sum", *, ptr=None, batch=None, num_segments=None, impl="auto"):
    _check_features("x", x)
    _check_reduce(reduce, _SEGMENT_REDUCES)
    return _choice(x, _segments(x, ptr, batch, num_segments), reduce, impl=impl)


segment_reduce._choice = _segment_choice
