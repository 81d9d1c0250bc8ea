"""Attention on the edges of a graph: validates a call, chooses an implementation and runs it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastattn._choose import KERNEL_DTYPES, Request, candidates, choose
from fastattn.graph import Graph, as_graph
from fastattn.ops import _graph_attention_autograd as fused
from fastattn.ops._common import apply_function, autocast_dtype, call_op, check_flags, needs_function, number
from fastattn.reference import graph_attention as reference
from fastattn.reference._common import wide_dtype

__all__ = ["edge_softmax", "gat_attention", "gatv2_attention", "graph_attention"]


class _Prepared(NamedTuple):
    """A checked call: the form of the score, and the eight tensors of the ops, None where they are absent."""

    score: str
    tensors: tuple[Tensor | None, ...]
    graph: Graph
    numbers: tuple[float, float, float]  # scale, negative_slope, dropout_p
    return_attention: bool
    request: Request


def _check(name: str, tensor, form: str, first: Tensor | None = None, wide: bool = False) -> None:
    """A dense tensor with the dimensions of ``form``; of the device and the dtype of ``first``, or (``wide``)
    of the dtype that sums have beside it."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise NotImplementedError(f"{name} must be a dense tensor; nested and sparse ones are not supported")
    if tensor.dtype not in KERNEL_DTYPES:
        raise RuntimeError(f"{name} must be float32, float64, bfloat16 or float16, got {tensor.dtype}")
    if tensor.dim() != form.count(",") + 1:
        raise RuntimeError(f"{name} must be {form}, got {tuple(tensor.shape)}")
    if first is None:
        return
    if tensor.device != first.device:
        raise RuntimeError(f"{name} is on {tensor.device}, the others are on {first.device}")
    allowed = (first.dtype, wide_dtype(first.dtype)) if wide else (first.dtype,)
    if tensor.dtype not in allowed:
        names = " or ".join(dict.fromkeys(str(d) for d in allowed))
        raise RuntimeError(f"{name} must be {names} beside {first.dtype} features, got {tensor.dtype}")


def _check_size(name: str, tensor: Tensor, dim: int, expected: int, what: str) -> None:
    if tensor.shape[dim] != expected:
        raise RuntimeError(f"{name} {tuple(tensor.shape)} must have {expected} {what} in dimension {dim}")


def _finish(score, tensors, graph, N_src, N_dst, name, numbers, return_attention, used) -> _Prepared:
    """The checks that every form shares: the graph, what belongs to its edges, and the options."""
    value, term, edge = tensors[2], tensors[5], tensors[6]
    graph = as_graph(graph, N_src, N_dst, name=name)
    if graph.device != value.device:
        raise RuntimeError(f"the graph is on {graph.device}, {name} on {value.device}")
    for tensor, kind in ((term, used.get("term")), (edge, "edge")):
        if tensor is not None:
            _check_size(kind, tensor, 0, graph.num_edges, "edges")
    scale, negative_slope, dropout_p = numbers
    negative_slope, dropout_p = number("negative_slope", negative_slope), number("dropout_p", dropout_p)
    if not -math.inf < negative_slope < math.inf:
        raise ValueError(f"negative_slope must be finite, got {negative_slope}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be between 0 and 1, got {dropout_p}")
    check_flags(return_attention=return_attention)
    options = [kind for kind, there in ((used.get("term"), term), ("edge", edge)) if there is not None]
    options += ["dropout_p"] * (dropout_p > 0) + ["return_attention"] * bool(return_attention)
    request = Request(value.device.type, value.dtype, tuple(options), "fastattn::graph_attention_forward")
    return _Prepared(
        score, tensors, graph, (scale, negative_slope, dropout_p), bool(return_attention), request
    )


def _cast(tensor, dtype: torch.dtype):
    cast = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if cast else tensor


def _run(call: _Prepared, impl: str) -> Tensor | tuple[Tensor, Tensor]:
    implementation = choose(call.request, impl)
    graph, value = call.graph, call.tensors[2]
    seed = None
    if call.numbers[2] > 0:
        # One draw from torch's generator decides a call's whole dropout pattern, whatever computes it.
        seed = torch.randint(0, 2**63 - 1, (1,), device=value.device)
    args = (call.score, *call.tensors, *graph.csr, seed, *call.numbers)
    if implementation == "reference":
        out, _, attention = reference.graph_attention(*args)
    elif needs_function(call.tensors):
        # Sorted by source only where a gradient will be asked for.
        watched = any(t is not None and t.requires_grad for t in call.tensors)
        csc = graph.csc[:3] if watched else (None, None, None)
        out, _, attention = apply_function(fused.GraphAttention, *args, call.return_attention, *csc)
    else:
        out, _, attention = call_op(fused.forward_op, *args, call.return_attention)
    return (out, attention) if call.return_attention else out


def _prepare_gat(
    x, alpha_src, alpha_dst, graph, *, alpha_edge=None, negative_slope=0.2, dropout_p=0.0,
    return_attention=False,
) -> _Prepared:  # fmt: skip
    _check("x", x, "(N_src, H, C)")
    N_src, H, _ = x.shape
    if autocast_dtype(x) is not None:
        # The features are what is read again and again: they keep the dtype that autocast gave them.
        wide = (x.dtype, wide_dtype(x.dtype))
        alpha_src, alpha_dst, alpha_edge = (
            _cast(t, x.dtype) if isinstance(t, Tensor) and t.dtype not in wide else t
            for t in (alpha_src, alpha_dst, alpha_edge)
        )
    _check("alpha_src", alpha_src, "(N_src, H)", x, wide=True)
    _check_size("alpha_src", alpha_src, 0, N_src, "sources")
    for name, tensor in (("alpha_dst", alpha_dst), ("alpha_edge", alpha_edge)):
        if tensor is not None:
            _check(name, tensor, "(N_dst, H)" if name == "alpha_dst" else "(E, H)", x, wide=True)
    for name, tensor in (("alpha_src", alpha_src), ("alpha_dst", alpha_dst), ("alpha_edge", alpha_edge)):
        if tensor is not None:
            _check_size(name, tensor, 1, H, "heads")
    N_dst = None if alpha_dst is None else alpha_dst.shape[0]
    tensors = (None, None, x, alpha_src, alpha_dst, alpha_edge, None, None)
    numbers = (1.0, negative_slope, dropout_p)
    used = {"term": "alpha_edge"}
    return _finish("additive", tensors, graph, N_src, N_dst, "x", numbers, return_attention, used)


def gat_attention(
    x: Tensor,
    alpha_src: Tensor,
    alpha_dst: Tensor | None,
    graph,
    *,
    alpha_edge: Tensor | None = None,
    negative_slope: float = 0.2,
    dropout_p: float = 0.0,
    return_attention: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The attention of a GAT: additive scores, their softmax over neighbours, and the weighted sum, in one.

    For each head, with :math:`e: m \to n` the edges that enter n:

    .. math::
        s_e = \mathrm{LeakyReLU}(\alpha^{src}_m + \alpha^{dst}_n + \alpha^{edge}_e), \qquad
        a_e = \frac{e^{s_e}}{\sum_{e' \to n} e^{s_{e'}}}, \qquad
        \mathrm{out}_n = \sum_{e: m \to n} \mathrm{dropout}(a_e)\, x_m

    Nothing with an entry per edge and channel is made, forward or backward: two numbers per target and head
    are kept, and weights are computed again.

    Args:
        x: (N_src, H, C) features of the sources, any strides.
        alpha_src: (N_src, H) the sources' terms of the score. alpha_dst: (N_dst, H) the targets', or None.
            Of x's dtype or float32.
        graph: a :class:`Graph`, or whatever one is made of, such as ``edge_index`` (2, E). A Graph is sorted
            once, everything else at each call. No self-loops are added.
        alpha_edge: (E, H) the term of each edge, in the order of the caller's edges.
        negative_slope: factor of negative sums, in LeakyReLU.
        dropout_p: probability of dropping a weight; the others are scaled by ``1 / (1 - dropout_p)``. Applied
            whenever it is not 0. The pattern depends on torch's generator and the caller's edge order alone.
        return_attention: also return the weights, after dropout.
        impl: "auto" or exactly one of "cpu", "reference", "triton", "cuda"; :func:`fastattn.explain` tells
            which one runs.

    Precision: scores, softmax and sums in float32 (float64 for float64), one rounding to x's dtype at the
    end. Under autocast x stays as it is. All gradients exist to second order, also those of the returned
    weights; forward mode only with ``impl="reference"``.

    Empty rows: a node that no edge enters gives 0 and no gradient. An edge with a term of -inf, or a score of
    -inf, is hidden: its weight is 0, and nothing at its other end matters, even if it is NaN. A row whose
    edges are all hidden is an empty one.

    Returns:
        out (N_dst, H, C) of x's dtype; with ``return_attention`` also the weights (E, H), in the order of the
        caller's edges and of x's dtype.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit together.
        ValueError: an option outside its range; a node number outside the graph. TypeError: no tensor, no
        graph.
        NotImplementedError: ``impl`` names an implementation that cannot run this call; the message says why.

    Source: Veličković et al., arXiv:1710.10903; recomputation: Zhang et al., arXiv:2110.09524.

    Example:
        >>> edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])
        >>> x, a_src, a_dst = torch.randn(3, 4, 8), torch.randn(3, 4), torch.randn(3, 4)
        >>> out, attention = fastattn.gat_attention(x, a_src, a_dst, edge_index, return_attention=True)
    """
    call = _prepare_gat(
        x, alpha_src, alpha_dst, graph, alpha_edge=alpha_edge, negative_slope=negative_slope,
        dropout_p=dropout_p, return_attention=return_attention,
    )  # fmt: skip
    return _run(call, impl)


def _prepare_dot(
    query, key, value, graph, *, scale=None, edge_bias=None, dropout_p=0.0, return_attention=False
) -> _Prepared:
    dtype = autocast_dtype(query)
    if dtype is not None:
        query, key, value = (_cast(t, dtype) for t in (query, key, value))
    _check("query", query, "(N_dst, H, D)")
    _check("key", key, "(N_src, H, D)", query)
    _check("value", value, "(N_src, H, C)", query)
    (N_dst, H, D), N_src = query.shape, key.shape[0]
    _check_size("key", key, 1, H, "heads")
    _check_size("key", key, 2, D, "channels, as query has,")
    _check_size("value", value, 0, N_src, "sources, as key has,")
    _check_size("value", value, 1, H, "heads")
    if edge_bias is not None:
        _check("edge_bias", edge_bias, "(E, H)", query, wide=True)
        _check_size("edge_bias", edge_bias, 1, H, "heads")
    scale = (D**-0.5 if D else 1.0) if scale is None else number("scale", scale)
    tensors = (query, key, value, None, None, edge_bias, None, None)
    numbers = (scale, 0.0, dropout_p)
    used = {"term": "edge_bias"}
    return _finish("dot", tensors, graph, N_src, N_dst, "key", numbers, return_attention, used)


def graph_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph,
    *,
    scale: float | None = None,
    edge_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    return_attention: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Scaled dot-product attention restricted to the edges of a graph, as in a graph transformer.

    For each head, with :math:`e: m \to n` the edges that enter n:

    .. math::
        s_e = \mathrm{scale} \cdot q_n \cdot k_m + \mathrm{bias}_e, \qquad
        a_e = \frac{e^{s_e}}{\sum_{e' \to n} e^{s_{e'}}}, \qquad
        \mathrm{out}_n = \sum_{e: m \to n} \mathrm{dropout}(a_e)\, v_m

    On a complete graph it is :func:`scaled_dot_product_attention`. Nothing with an entry per edge and channel
    is made, forward or backward.

    Args:
        query: (N_dst, H, D), any strides. key: (N_src, H, D). value: (N_src, H, C).
        graph: a :class:`Graph`, or whatever one is made of, such as ``edge_index`` (2, E).
        scale: factor of the products, by default ``1 / sqrt(D)``; any number.
        edge_bias: (E, H), added to the scaled products, in the order of the caller's edges; of the query's
            dtype or float32. -inf hides an edge.
        dropout_p, return_attention, impl: as in :func:`gat_attention`; precision and empty rows too. Under
            autocast query, key and value are cast as by :func:`scaled_dot_product_attention`.

    Returns:
        out (N_dst, H, C) of the query's dtype; with ``return_attention`` also the weights (E, H), after
        dropout, in the order of the caller's edges.

    Raises:
        RuntimeError, ValueError, TypeError, NotImplementedError: as :func:`gat_attention`.

    Source: Shi et al., arXiv:2009.03509; Dwivedi and Bresson, arXiv:2012.09699.

    Example:
        >>> edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])
        >>> q, k, v = (torch.randn(3, 4, 8) for _ in range(3))
        >>> out = fastattn.graph_attention(q, k, v, fastattn.Graph(edge_index, num_nodes=3))
    """
    call = _prepare_dot(
        query, key, value, graph, scale=scale, edge_bias=edge_bias, dropout_p=dropout_p,
        return_attention=return_attention,
    )  # fmt: skip
    return _run(call, impl)


def _prepare_gatv2(
    x_src, x_dst, att, graph, *, edge=None, negative_slope=0.2, dropout_p=0.0, return_attention=False
) -> _Prepared:
    _check("x_src", x_src, "(N_src, H, C)")
    if autocast_dtype(x_src) is not None:
        x_dst, edge = _cast(x_dst, x_src.dtype), _cast(edge, x_src.dtype)
        if isinstance(att, Tensor) and att.dtype != wide_dtype(x_src.dtype):
            att = _cast(att, x_src.dtype)
    _check("x_dst", x_dst, "(N_dst, H, C)", x_src)
    _check("att", att, "(H, C)", x_src, wide=True)
    N_src, H, C = x_src.shape
    _check_size("x_dst", x_dst, 1, H, "heads")
    _check_size("x_dst", x_dst, 2, C, "channels")
    _check_size("att", att, 0, H, "heads")
    _check_size("att", att, 1, C, "channels")
    if edge is not None:
        _check("edge", edge, "(E, H, C)", x_src)
        _check_size("edge", edge, 1, H, "heads")
        _check_size("edge", edge, 2, C, "channels")
    tensors = (x_dst, None, x_src, None, None, None, edge, att)
    numbers = (1.0, negative_slope, dropout_p)
    return _finish("gatv2", tensors, graph, N_src, x_dst.shape[0], "x_src", numbers, return_attention, {})


def gatv2_attention(
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    graph,
    *,
    edge: Tensor | None = None,
    negative_slope: float = 0.2,
    dropout_p: float = 0.0,
    return_attention: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The attention of a GATv2: scores that weigh the channels after the nonlinearity, not before.

    For each head, with :math:`e: m \to n` the edges that enter n:

    .. math::
        s_e = \mathrm{att} \cdot \mathrm{LeakyReLU}(x^{src}_m + x^{dst}_n + x^{edge}_e), \qquad
        a_e = \frac{e^{s_e}}{\sum_{e' \to n} e^{s_{e'}}}, \qquad
        \mathrm{out}_n = \sum_{e: m \to n} \mathrm{dropout}(a_e)\, x^{src}_m

    Nothing with an entry per edge and channel is made, but the gradient of ``edge``, if that is given.

    Args:
        x_src: (N_src, H, C) features of the sources, any strides. x_dst: (N_dst, H, C), the targets'.
        att: (H, C), of x's dtype or float32.
        graph: a :class:`Graph`, or whatever one is made of, such as ``edge_index`` (2, E).
        edge: (E, H, C) features of the edges, in the caller's order.
        negative_slope, dropout_p, return_attention, impl: as in :func:`gat_attention`; precision and empty
            rows too. An edge is hidden if its score is -inf.

    Returns:
        out (N_dst, H, C) of x's dtype; with ``return_attention`` also the weights (E, H), after dropout, in
        the order of the caller's edges.

    Raises:
        RuntimeError, ValueError, TypeError, NotImplementedError: as :func:`gat_attention`.

    Source: Brody et al., arXiv:2105.14491.

    Example:
        >>> edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])
        >>> x_src, x_dst, att = torch.randn(3, 4, 8), torch.randn(3, 4, 8), torch.randn(4, 8)
        >>> out = fastattn.gatv2_attention(x_src, x_dst, att, edge_index)
    """
    call = _prepare_gatv2(
        x_src, x_dst, att, graph, edge=edge, negative_slope=negative_slope, dropout_p=dropout_p,
        return_attention=return_attention,
    )  # fmt: skip
    return _run(call, impl)


def _prepare_softmax(score, graph) -> tuple[Graph, Request]:
    if isinstance(score, Tensor) and score.dim() == 0:
        raise RuntimeError("score must be (E, ...), got ()")
    _check("score", score, "(E" + ", ..." * (score.dim() - 1 if isinstance(score, Tensor) else 0) + ")")
    if isinstance(graph, Tensor) and graph.layout == torch.strided:
        graph = Graph(graph)
    elif not isinstance(graph, Graph):
        graph = Graph.from_sparse(graph)
    _check_size("score", score, 0, graph.num_edges, "edges")
    if graph.device != score.device:
        raise RuntimeError(f"the graph is on {graph.device}, score on {score.device}")
    return graph, Request(score.device.type, score.dtype, (), "fastattn::graph_attention_forward")


def edge_softmax(score: Tensor, graph, *, impl: str = "auto") -> Tensor:
    r"""Softmax over the edges that enter the same node.

    .. math:: a_e = e^{s_e} \Big/ \sum_{e' \to n} e^{s_{e'}} \qquad \text{for each edge } e \text{ into } n

    Args:
        score: (E, ...) one per edge, and per head or whatever follows, in the order of the caller's edges.
        graph: a :class:`Graph`, or whatever one is made of, such as ``edge_index`` (2, E).
        impl: as in :func:`gat_attention`.

    Precision: computed in float32 (float64 for float64) and rounded once to the score's dtype. Gradients
    exist to second order; forward mode only with ``impl="reference"``. A score of -inf hides its edge, which
    gets weight 0; if all edges of a node are hidden, all of their weights are 0.

    Returns:
        (E, ...) weights of the score's shape and dtype; those of a node add up to 1.

    Raises:
        RuntimeError, ValueError, TypeError, NotImplementedError: as :func:`gat_attention`.

    Source: Veličković et al., arXiv:1710.10903, equation 3.

    Example:
        >>> edge_index = torch.tensor([[0, 1, 2], [1, 1, 0]])
        >>> fastattn.edge_softmax(torch.tensor([0.0, 0.0, 3.0]), edge_index)
        tensor([0.5000, 0.5000, 1.0000])
    """
    graph, request = _prepare_softmax(score, graph)
    implementation = choose(request, impl)
    flat = score.reshape(score.shape[0], math.prod(score.shape[1:]))
    if implementation == "reference":
        attention = reference.edge_softmax(flat, *graph.csr[:3])
    elif needs_function((flat,)):
        attention = apply_function(fused.EdgeSoftmax, flat, *graph.csr)
    else:
        attention = fused.edge_softmax(flat, *graph.csr)
    return attention.reshape(score.shape)


def _choice_of(prepare):
    def choice(*args, impl="auto", **options):
        prepared = prepare(*args, **options)
        request = prepared[-1]
        return choose(request, impl), candidates(request)

    return choice


gat_attention._choice = _choice_of(_prepare_gat)
graph_attention._choice = _choice_of(_prepare_dot)
gatv2_attention._choice = _choice_of(_prepare_gatv2)
edge_softmax._choice = _choice_of(_prepare_softmax)
