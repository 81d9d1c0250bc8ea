"""Attention on graphs in Triton: the registered ops of fastattn/ops/_graph_attention_autograd.py.

No array with an entry per edge and channel is made but the gradient of ``edge``, and every sum has one writer
and one order. A row of features is gathered once or twice per edge and head, and that decides the time. What
is wider than a tile is taken in several, by a program each; these compute the scores again.
"""

import torch
from fastattn.kernels import _graph_attention_kernels as kernels
from fastattn.kernels._common import check, dropout_threshold
from fastattn.kernels._edges import Edges, Tile, as_rows, join_sums, tile_of, wide_dtype
from fastattn.kernels.aggregation import sum_over_rows
from torch import Tensor

__all__ = ["edge_softmax_backward", "graph_attention_backward", "graph_attention_forward"]


class _Call:
    """The arguments that forward and backward share, checked."""

    def __init__(
        self, score, query, key, value, alpha_src, alpha_dst, score_term, edge, att, rowptr, col, perm,
        num_src, dropout_seed, scale, negative_slope, dropout_p,
    ):  # fmt: skip
        if score not in ("additive", "dot", "gatv2"):
            raise RuntimeError(f"score must be additive, dot or gatv2, got {score}")
        check(
            "value", value, (num_src, None, None), torch.float32, torch.float64, torch.bfloat16, torch.float16
        )
        self.edges = Edges(rowptr, col, perm)
        self.N_src, self.H, self.C = value.shape
        self.N_dst, self.E = self.edges.rows, self.edges.count
        self.score, self.dtype, self.device = score, value.dtype, value.device
        self.wide = wide_dtype(self.dtype)
        if not 0 <= dropout_p <= 1:
            raise RuntimeError(f"dropout_p must be in [0, 1], got {dropout_p}")
        if dropout_p > 0:
            check("dropout_seed", dropout_seed, (1,), torch.int64)
        self.D = 0
        self.query = self.key = self.alpha_src = self.alpha_dst = self.edge = self.att = None
        self.value = as_rows(value)
        if score == "additive":
            self.alpha_src = self._table("alpha_src", alpha_src, self.N_src)
            self.alpha_dst = self._table("alpha_dst", alpha_dst, self.N_dst)
        else:
            self.D = check(
                "query", query, (self.N_dst, self.H, None if score == "dot" else self.C), self.dtype
            )[2]
            self.query = as_rows(query)
            if score == "dot":
                check("key", key, (self.N_src, self.H, self.D), self.dtype)
                self.key = as_rows(key)
            else:
                self.key = self.value
                check("att", att, (self.H, self.D), self.dtype, self.wide)
                self.att = att.contiguous()
                if edge is not None:
                    check("edge", edge, (self.E, self.H, self.D), self.dtype)
                    self.edge = as_rows(edge)
                if score_term is not None:
                    raise RuntimeError('score_term does not go with the score "gatv2"')
        self.term = self._table("score_term", score_term, self.E)
        self.arguments = {
            "value": self.value, "value_stride": self.value.stride()[:2], "term": self.term,
            "edge": self.edge, "edge_stride": None if self.edge is None else self.edge.stride()[:2],
            "att": self.att, "seed": dropout_seed if dropout_p > 0 else None,
            "threshold": dropout_threshold(dropout_p),
            "keep_scale": 1 / (1 - dropout_p) if dropout_p < 1 else 0.0, "scale": float(scale),
            "slope": float(negative_slope), "SCORE": score, "D": self.D, "C": self.C,
        }  # fmt: skip

    def _table(self, name: str, tensor: Tensor | None, rows: int) -> Tensor | None:
        """A number per row and head, in the dtype of sums: they are small beside the features."""
        if tensor is None:
            return None
        check(name, tensor, (rows, self.H), self.dtype, self.wide)
        return tensor.to(self.wide).contiguous()

    def ends(self, own: str) -> dict[str, object]:
        """The tensors of both ends of the edges, of which ``own`` is the one that they are grouped by."""
        target, source = (self.query, self.alpha_dst), (self.key, self.alpha_src)
        mine, others = (target, source) if own == "target" else (source, target)
        return {
            "own": mine[0], "own_stride": None if mine[0] is None else mine[0].stride()[:2],
            "own_alpha": mine[1], "other": others[0],
            "other_stride": None if others[0] is None else others[0].stride()[:2], "other_alpha": others[1],
        }  # fmt: skip

    def tile(self, loads: int) -> tuple[Tile, int]:
        """A tile, and how many of them the channels need."""
        width = max(self.C, self.D, 1)
        tile = tile_of(self.device, self.dtype, width, loads)
        return tile, -(-width // tile.CHANNELS)


def graph_attention_forward(score: str, *args) -> tuple[Tensor, Tensor, Tensor]:
    *args, return_attention = args
    call = _Call(score, *args)
    H, C, edges = call.H, call.C, call.edges
    out = torch.empty(call.N_dst, H, C, dtype=call.dtype, device=call.device)
    stats = torch.empty(call.N_dst, 2, H, dtype=call.wide, device=call.device)
    scores = torch.empty(call.E, H, dtype=call.wide, device=call.device) if return_attention else None
    parts = {
        "part_stats": edges.empty_parts(2, H, dtype=call.wide),
        "part_out": edges.empty_parts(H, C, dtype=call.wide),
    }
    tile, tiles = call.tile(4)
    if tiles > 1:  # the score loops over all of them, which takes registers of its own
        tile, _ = call.tile(2)
    tiles = max(-(-C // tile.CHANNELS), 1)
    results = {"out": out, "stats": stats}
    edges.launch_rows(
        kernels.forward_kernel, tile, H, tiles, parts, scores=scores, **results, **call.ends("target"),
        **call.arguments,
    )  # fmt: skip
    if edges.cuts:
        programs = -(-edges.cuts * H // tile.ROWS) * tiles
        edges.launch(kernels.join_kernel, tile, programs, items=edges.cuts, H=H, C=C, **results, **parts)
    if not return_attention:
        return out, stats, out.new_empty(0)
    attention = scores if call.dtype == call.wide else torch.empty_like(scores, dtype=call.dtype)
    edges.launch_edges(
        kernels.attention_kernel, H, scores=scores, stats=stats, attention=attention, **call.arguments
    )
    return out, stats, attention


def graph_attention_backward(
    grad_out: Tensor, grad_attention: Tensor | None, out: Tensor, stats: Tensor, attention: Tensor,
    score: str, query: Tensor | None, key: Tensor | None, value: Tensor, alpha_src: Tensor | None,
    alpha_dst: Tensor | None, score_term: Tensor | None, edge: Tensor | None, att: Tensor | None,
    rowptr: Tensor, col: Tensor, perm: Tensor | None, num_src: int, colptr: Tensor, row: Tensor,
    perm_t: Tensor | None, dropout_seed: Tensor | None, scale: float, negative_slope: float,
    dropout_p: float, edge_grad: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    call = _Call(
        score, query, key, value, alpha_src, alpha_dst, score_term, edge, att, rowptr, col, perm,
        num_src, dropout_seed, scale, negative_slope, dropout_p,
    )  # fmt: skip
    H, C, D, wide, by_target = call.H, call.C, call.D, call.wide, call.edges
    by_source = Edges(colptr, row, perm_t, ("colptr", "row", "perm_t"))
    if (by_source.rows, by_source.count) != (call.N_src, call.E):
        raise RuntimeError(
            f"colptr and row must be those of the transpose, with {call.N_src} rows and {call.E} edges; got "
            f"{by_source.rows} and {by_source.count}"
        )
    for name, tensor in (("grad_out", grad_out), ("out", out)):
        check(name, tensor, (call.N_dst, H, C), call.dtype)
    check("stats", stats, (call.N_dst, 2, H), wide)
    grad_out, out, stats = as_rows(grad_out), out.contiguous(), stats.contiguous()

    if grad_attention is None:
        delta = torch.zeros(call.N_dst, H, dtype=wide, device=call.device)
    else:
        for name, tensor in (("grad_attention", grad_attention), ("attention", attention)):
            check(name, tensor, (call.E, H), call.dtype)
        grad_attention = grad_attention.contiguous()
        delta = _row_products(by_target, attention, grad_attention)
    tile, tiles = call.tile(2)
    by_target.launch(
        kernels.delta_kernel, tile, -(-call.N_dst * H // tile.ROWS), out=out, grad_out=grad_out,
        grad_out_stride=grad_out.stride()[:2], delta=delta, H=H, C=C,
    )  # fmt: skip

    def empty(there: bool, *shape: int, dtype: torch.dtype) -> Tensor | None:
        return torch.empty(shape, dtype=dtype, device=call.device) if there else None

    dot, gatv2 = score == "dot", score == "gatv2"
    grads = {
        "grad_alpha": empty(alpha_src is not None, call.N_src, H, dtype=wide),
        "grad_key": empty(dot, call.N_src, H, D, dtype=call.dtype),
        "grad_value": empty(True, call.N_src, H, C, dtype=call.dtype),
    }
    parts = {
        "part_alpha": None if alpha_src is None else by_source.empty_parts(1, H, 1, dtype=wide),
        "part_key": by_source.empty_parts(1, H, D, dtype=wide) if dot else None,
        "part_value": by_source.empty_parts(1, H, C, dtype=wide),
    }
    grad_score = empty(True, call.E, H, dtype=wide)
    grad_edge = empty(edge is not None and edge_grad, call.E, H, D, dtype=call.dtype)
    by_source.launch_rows(
        kernels.grad_sources_kernel, tile, H, tiles, parts, stats=stats, delta=delta, grad_out=grad_out,
        grad_out_stride=grad_out.stride()[:2], grad_attention=grad_attention, grad_score=grad_score,
        grad_edge=grad_edge, **grads, **call.ends("source"), **call.arguments,
    )  # fmt: skip
    for name, factor in (("alpha", 1.0), ("key", scale), ("value", 1.0)):
        part, grad = parts[f"part_{name}"], grads[f"grad_{name}"]
        if grad is not None:
            join_sums(by_source, tile, part, grad.view(1, call.N_src, H, part.shape[-1]), factor=factor)

    absent = lambda: value.new_empty(0)  # noqa: E731
    grad_query, grad_alpha_dst, grad_att = absent(), absent(), absent()
    if dot:
        grad_query = sum_over_rows(by_target, grad_score, key, call.dtype, scale)
    elif gatv2:
        grad_query, grad_att = _grad_gatv2(call, grad_score, tile, tiles)
        grad_att = grad_att.to(att.dtype)
    elif alpha_dst is not None:
        grad_alpha_dst = sum_over_rows(by_target, grad_score, None, wide).squeeze(2).to(alpha_dst.dtype)
    return (
        grad_query,
        grads["grad_key"] if dot else absent(),
        grads["grad_value"],
        absent() if alpha_src is None else grads["grad_alpha"].to(alpha_src.dtype),
        grad_alpha_dst,
        absent() if score_term is None else grad_score.to(score_term.dtype),
        absent() if grad_edge is None else grad_edge,
        grad_att,
    )


def _grad_gatv2(call: _Call, grad_score: Tensor, tile: Tile, tiles: int) -> tuple[Tensor, Tensor]:
    H, D, edges = call.H, call.D, call.edges
    grad_query = torch.empty(call.N_dst, H, D, dtype=call.dtype, device=call.device)
    # Every target's share by itself: as much memory as the features, and one order of summation.
    shares = torch.empty(call.N_dst, H, D, dtype=call.wide, device=call.device)
    parts = {name: edges.empty_parts(1, H, D, dtype=call.wide) for name in ("part_query", "part_att")}
    edges.launch_rows(
        kernels.grad_gatv2_targets_kernel, tile, H, tiles, parts, grad_score=grad_score,
        grad_query=grad_query, grad_att=shares, **call.ends("target"), **call.arguments,
    )  # fmt: skip
    for part, grad in zip(parts.values(), (grad_query, shares), strict=True):
        join_sums(edges, tile, part, grad.unsqueeze(0))
    return grad_query, shares.sum(0)


def _row_products(edges: Edges, attention: Tensor, grad: Tensor) -> Tensor:
    """(rows, H): sums of attention * grad over edges; a weight of 0 hides what came back for it."""
    wide = wide_dtype(attention.dtype)
    products = torch.where(attention == 0, 0.0, attention.to(wide) * grad.to(wide))
    return sum_over_rows(edges, products, None, wide).squeeze(2)


def edge_softmax_backward(
    grad: Tensor, score: Tensor, attention: Tensor, rowptr: Tensor, col: Tensor, perm: Tensor | None
) -> Tensor:
    edges = Edges(rowptr, col, perm)
    _, H = check(
        "score", score, (edges.count, None), torch.float32, torch.float64, torch.bfloat16, torch.float16
    )
    for name, tensor in (("grad", grad), ("attention", attention)):
        check(name, tensor, (edges.count, H), score.dtype)
    delta = _row_products(edges, attention, grad)
    grad_score = torch.empty(score.shape, dtype=score.dtype, device=score.device)
    edges.launch_edges(
        kernels.softmax_grad_kernel, H, grad=grad.contiguous(), score=score.contiguous(),
        attention=attention.contiguous(), delta=delta, grad_score=grad_score,
    )  # fmt: skip
    return grad_score
