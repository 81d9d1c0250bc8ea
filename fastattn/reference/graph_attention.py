"""Attention on graphs in plain PyTorch: what every other implementation has to reproduce.

The functions have the signatures of the registered ops: features (nodes, H, channels); edges grouped by
target as rowptr (N_dst + 1,), col (E,) and perm (E,), the number of each edge in the caller's order (None:
its position), and num_src, which is N_src; what belongs to edges is in the caller's order. They are
differentiable any number of times, also in forward mode, and run under ``torch.func`` and ``torch.compile``.
They hold one number per edge and channel.
"""

import torch
from torch import Tensor

from fastattn.reference._common import wide_dtype, without_autocast
from fastattn.reference.attention import dropout_keep

__all__ = ["edge_softmax", "graph_attention"]


def _ends(rowptr: Tensor, col: Tensor, perm: Tensor | None) -> tuple[Tensor, Tensor]:
    """Target and source of each edge, in the caller's order."""
    rows = torch.arange(rowptr.shape[0] - 1, device=col.device)
    dst, src = torch.repeat_interleave(rows, rowptr.diff(), output_size=col.shape[0]), col.long()
    if perm is None:
        return dst, src
    return tuple(torch.empty_like(src).scatter_(0, perm.long(), end) for end in (dst, src))


def _leaky_relu(x: Tensor, negative_slope: float) -> Tensor:
    return torch.where(x > 0, x, x * negative_slope)


def _additive_scores(alpha_src, alpha_dst, term, src, dst, negative_slope) -> Tensor:
    terms = []
    if alpha_src is not None:
        terms.append(alpha_src.index_select(0, src))
    if alpha_dst is not None:
        terms.append(alpha_dst.index_select(0, dst))
    if term is not None:
        terms.append(term)
    hidden = sum(terms).detach() == -torch.inf
    for t in terms:
        hidden = hidden | (t.detach() == -torch.inf)
    # What is hidden is replaced before the sum, so that a NaN beside it reaches no gradient.
    total = sum(torch.where(hidden, 0.0, t) for t in terms)
    return torch.where(hidden, -torch.inf, _leaky_relu(total, negative_slope))


def _dot_scores(query, key, term, src, dst, scale) -> Tensor:
    query, key = query.index_select(0, dst), key.index_select(0, src)
    if term is None:
        return (query * key).sum(-1) * scale
    hidden = term.detach() == -torch.inf
    query, key = (torch.where(hidden.unsqueeze(-1), 0.0, t) for t in (query, key))
    return (query * key).sum(-1) * scale + term


def _gatv2_scores(query, key, edge, att, src, dst, negative_slope) -> Tensor:
    total = key.index_select(0, src) + query.index_select(0, dst)
    if edge is not None:
        total = total + edge
    with torch.no_grad():
        hidden = (_leaky_relu(total, negative_slope) * att).sum(-1) == -torch.inf
    total = torch.where(hidden.unsqueeze(-1), 0.0, total)
    return torch.where(hidden, -torch.inf, (_leaky_relu(total, negative_slope) * att).sum(-1))


def _softmax(score: Tensor, dst: Tensor, num_dst: int) -> tuple[Tensor, Tensor]:
    """Weights (E, H) of the edges among those that enter the same target, and (N_dst, 2, H) what they were
    formed with: the largest score and the reciprocal of the sum."""
    (E, H), visible = score.shape, score.detach() != -torch.inf
    index = dst.unsqueeze(1).expand(E, H)
    # The maximum only keeps exp in range; it cancels, so it takes no part in the gradient.
    top = score.detach().new_full((num_dst, H), -torch.inf).scatter_reduce(0, index, score.detach(), "amax")
    top = torch.where(top == -torch.inf, 0.0, top)
    difference = torch.where(visible, score - top.index_select(0, dst), -torch.inf)
    weights = torch.where(visible, torch.exp(difference), 0.0)
    total = weights.new_zeros(num_dst, H).index_add(0, dst, weights)
    inverse = torch.where(total == 0, 0.0, 1 / torch.where(total == 0, 1.0, total))
    weights = torch.where(visible, weights * inverse.index_select(0, dst), 0.0)
    return weights, torch.stack([top, inverse], 1)


def graph_attention(
    score: str,
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    alpha_src: Tensor | None,
    alpha_dst: Tensor | None,
    score_term: Tensor | None,
    edge: Tensor | None,
    att: Tensor | None,
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    num_src: int,
    dropout_seed: Tensor | None,
    scale: float,
    negative_slope: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """out (N_dst, H, C), stats (N_dst, 2, H) and attention (E, H) as ``fastattn::graph_attention_forward``.

    With an edge e from m to n, the softmax of each head is over the edges that enter n, of the score

    - "additive": ``leaky_relu(alpha_src[m] + alpha_dst[n] + score_term[e])``, hidden where a term is -inf;
    - "dot": ``scale * <query[n], key[m]> + score_term[e]``, hidden where the term is -inf;
    - "gatv2": ``<att, leaky_relu(value[m] + query[n] + edge[e])>``;

    and wherever the score itself is -inf. A row that sees no edge gives 0 and no gradient.
    """
    with without_autocast(value):
        num_dst, dtype = rowptr.shape[0] - 1, value.dtype
        dst, src = _ends(rowptr, col, perm)
        inputs = (query, key, value, alpha_src, alpha_dst, score_term, edge, att)
        query, key, value, alpha_src, alpha_dst, score_term, edge, att = (
            None if t is None else t.to(wide_dtype(dtype)) for t in inputs
        )
        if score == "additive":
            if alpha_src is None and alpha_dst is None and score_term is None:
                scores = value.new_zeros(col.shape[0], value.shape[1])
            else:
                scores = _additive_scores(alpha_src, alpha_dst, score_term, src, dst, negative_slope)
        elif score == "dot":
            scores = _dot_scores(query, key, score_term, src, dst, scale)
        else:
            scores = _gatv2_scores(query, value, edge, att, src, dst, negative_slope)
        weights, stats = _softmax(scores, dst, num_dst)
        E, H = weights.shape
        if dropout_p > 0:
            keep = dropout_keep(dropout_seed, dropout_p, 1, H, 1, E).view(H, E).transpose(0, 1)
            weights = torch.where(keep, weights, 0.0) * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)
        visible = (scores.detach() != -torch.inf).unsqueeze(-1)
        message = weights.unsqueeze(-1) * torch.where(visible, value.index_select(0, src), 0.0)
        out = message.new_zeros(num_dst, H, value.shape[2]).index_add(0, dst, message)
        return out.to(dtype), stats, weights.to(dtype)


def edge_softmax(score: Tensor, rowptr: Tensor, col: Tensor, perm: Tensor | None) -> Tensor:
    """``exp(score) / sum of exp(score)`` (E, H) over the edges into a target; 0 where it is -inf."""
    with without_autocast(score):
        dst, _ = _ends(rowptr, col, perm)
        return _softmax(score.to(wide_dtype(score.dtype)), dst, rowptr.shape[0] - 1)[0].to(score.dtype)
