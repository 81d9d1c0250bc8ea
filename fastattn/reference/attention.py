"""Softmax attention in plain PyTorch: what every other implementation has to reproduce.

All tensors are four-dimensional as in the registered ops: query (B, H, L, D), key (B, Hkv, S, D), value (B,
Hkv, S, Dv); attn_mask has four dimensions that are full or 1. The functions are differentiable any number of
times and run under ``torch.func``, ``torch.compile`` and forward-mode differentiation (with ``cu_seqlens``,
whose values decide the shapes of the parts, not under ``torch.compile(fullgraph=True)``). They hold
(B, H, L, S) tensors.
"""

import torch
from torch import Tensor

from fastattn.reference._common import read_bounds, wide_dtype, without_autocast

__all__ = ["attention", "attention_weights", "dropout_keep"]

_LOW32 = 0xFFFFFFFF


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # Logical, not arithmetic: int64 stands in for uint64 here.
    return (x >> bits) & (2 ** (64 - bits) - 1)


def dropout_keep(
    seed: Tensor, dropout_p: float, B: int, H: int, L: int, S: int, first: int = 0, total: int | None = None
) -> Tensor:
    """The (B, H, L, S) boolean mask of weights that survive dropout; a pure function of seed and position.

    ``first`` and ``total``: the rows are those from ``first`` on, of ``total``. A splitmix64 step over the
    row number gives two 32-bit keys, a murmur-like mix of them with the key position gives the random word
    that is compared with the drop probability.
    """
    total = L if total is None else total
    rows = torch.arange(1, B * H * total + 1, device=seed.device).view(B, H, total, 1)[
        :, :, first : first + L
    ]
    z = seed.view(1, 1, 1, 1) + rows * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shift_right(z, 31)
    first, second = z & _LOW32, _shift_right(z, 32)
    x = (torch.arange(S, device=seed.device) * 0x9E3779B9 + first) & _LOW32
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _LOW32
    x = x ^ second
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _LOW32
    x = x ^ (x >> 16)
    if dropout_p >= 1.0:
        return torch.zeros_like(x, dtype=torch.bool)
    return x >= min(_LOW32, round(dropout_p * 2**32))


def _visible(query, key, attn_mask, key_padding_mask, window_left, window_right, lower_right) -> Tensor:
    """(B, H, L, S): whether masks, padding and window let the query see the key. Scores play no part."""
    (B, H, L, _), S = query.shape, key.shape[2]
    i = torch.arange(L, device=query.device).view(L, 1) + (S - L if lower_right else 0)
    j = torch.arange(S, device=query.device)
    visible = torch.ones(L, S, dtype=torch.bool, device=query.device)
    if window_left >= 0:
        visible = visible & (j >= i - window_left)
    if window_right >= 0:
        visible = visible & (j <= i + window_right)
    visible = visible.expand(B, H, L, S)
    if attn_mask is not None:
        visible = visible & (attn_mask if attn_mask.dtype == torch.bool else attn_mask != -torch.inf)
    if key_padding_mask is not None:
        visible = visible & key_padding_mask.view(B, 1, 1, S)
    return visible


def _masked_scores(
    query,
    key,
    attn_mask,
    key_padding_mask,
    alibi_slopes,
    scale,
    softcap,
    window_left,
    window_right,
    lower_right,
) -> tuple[Tensor, Tensor]:
    """Scores (B, H, L, S) in fp32 or fp64 with -inf where hidden, and the visibility they were hidden by."""
    (_, H, L, _), (Hkv, S) = query.shape, key.shape[1:3]
    compute = wide_dtype(query.dtype)
    visible = _visible(query, key, attn_mask, key_padding_mask, window_left, window_right, lower_right)
    # What nobody sees is replaced before the product, so that a NaN there reaches neither results nor
    # gradients.
    query = torch.where(visible.any(-1, keepdim=True), query.to(compute), 0.0)
    key = key.to(compute).repeat_interleave(H // max(Hkv, 1), 1)
    key = torch.where(visible.any(-2).unsqueeze(-1), key, 0.0)
    score = query @ key.transpose(-1, -2) * scale
    if softcap > 0:
        score = softcap * torch.tanh(score / softcap)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        score = score + torch.where(visible, attn_mask.to(compute), 0.0)
    if alibi_slopes is not None:
        i = torch.arange(L, device=query.device).view(L, 1) + (S - L if lower_right else 0)
        distance = (i - torch.arange(S, device=query.device)).abs().to(compute)
        score = score - alibi_slopes.to(compute)[..., None, None] * distance
    return torch.where(visible, score, -torch.inf), visible


def _exponentials(score, row_sees, sinks):
    """(top, exp(score - top), their sum with the sink, whether a row has any logit), by rows."""
    column = score.new_full((*score.shape[:-1], 1), -torch.inf)
    if sinks is not None:
        column = sinks.to(score.dtype).view(1, -1, 1, 1).expand_as(column)
    # The maximum only keeps exp in range; it cancels, so it takes no part in the gradient.
    top = torch.cat([score, column], -1).detach().amax(-1, keepdim=True)
    # A row that sees no key still has its sink, unless that is -inf: no logit at all.
    live = row_sees if sinks is None else row_sees | (column != -torch.inf)
    top = torch.where(live, top, 0.0)
    weights = torch.exp(score - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(column - top)
    return top, weights, torch.where(live, total, 1.0), live


def _dropped(weights, dropout_seed, dropout_p, *rows):
    if dropout_p == 0.0:
        return weights
    keep = dropout_keep(dropout_seed, dropout_p, *weights.shape, *rows)
    return torch.where(keep, weights, 0.0) * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)


def _attend(
    query, key, value, attn_mask, key_padding_mask, alibi_slopes, sinks, dropout_seed,
    scale, softcap, window_left, window_right, lower_right, dropout_p, *rows,
):  # fmt: skip
    """Sequences of one length; ``rows`` are those of a dropout pattern, see :func:`dropout_keep`."""
    H, Hkv = query.shape[1], key.shape[1]
    score, visible = _masked_scores(
        query,
        key,
        attn_mask,
        key_padding_mask,
        alibi_slopes,
        scale,
        softcap,
        window_left,
        window_right,
        lower_right,
    )
    row_sees = visible.any(-1, keepdim=True)
    top, weights, total, live = _exponentials(score, row_sees, sinks)
    lse = torch.where(live, torch.log(total) + top, -torch.inf).squeeze(-1)
    weights = _dropped(weights / total, dropout_seed, dropout_p, *rows)
    value = value.to(score.dtype).repeat_interleave(H // max(Hkv, 1), 1)
    value = torch.where(visible.any(-2).unsqueeze(-1), value, 0.0)
    out = torch.where(row_sees, weights @ value, 0.0)
    return out.to(query.dtype), lse


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    dropout_seed: Tensor | None,
    scale: float,
    softcap: float,
    window_left: int,
    window_right: int,
    lower_right: bool,
    dropout_p: float,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``softmax(scores) @ value`` and the log-sum-exp of the scores, as ``fastattn::attention_forward``.

    score[i, j] = softcap(scale * <query_i, key_j>) + mask[i, j] - slope * |i + offset - j| over the visible
    keys; the softmax has ``exp(sink)`` as one more term of its denominator. Half precision is computed in
    fp32 and rounded once. A row that sees no key gives 0, lse = -inf (the sink, if there is one) and no
    gradient. Sequences that ``cu_seqlens`` cut a batch of 1 into are computed one after the other.
    """
    masks = (attn_mask, key_padding_mask)
    options = (scale, softcap, window_left, window_right, lower_right, dropout_p)
    with without_autocast(query):
        if cu_seqlens_q is None:
            return _attend(query, key, value, *masks, alibi_slopes, sinks, dropout_seed, *options)
        total = query.shape[2]
        queries = read_bounds("cu_seqlens_q", cu_seqlens_q, total, max_seqlen_q)
        keys = read_bounds("cu_seqlens_k", cu_seqlens_k, key.shape[2], max_seqlen_k)
        if len(queries) != len(keys):
            raise RuntimeError(
                "cu_seqlens_q and cu_seqlens_k must have as many elements, "
                f"got {len(queries)} and {len(keys)}"
            )
        if len(queries) == 1:
            queries = keys = [0, 0]  # no sequence at all is like an empty one
        if sinks is not None:
            sinks = sinks.to(
                wide_dtype(query.dtype)
            )  # here, so that its gradient is summed in this precision
        parts = []
        for n, first in enumerate(queries[:-1]):
            q = query[:, :, first : queries[n + 1]]
            k, v = (t[:, :, keys[n] : keys[n + 1]] for t in (key, value))
            each = alibi_slopes is not None and alibi_slopes.dim() == 2
            slopes = alibi_slopes[n : n + 1] if each else alibi_slopes
            parts.append(_attend(q, k, v, *masks, slopes, sinks, dropout_seed, *options, first, total))
        out, lse = (torch.cat(part, 2) for part in zip(*parts, strict=True))
        return out.view(1, *query.shape[1:3], value.shape[3]), lse.view(1, *query.shape[1:3])


def attention_weights(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    dropout_seed: Tensor | None,
    scale: float,
    softcap: float,
    window_left: int,
    window_right: int,
    lower_right: bool,
    dropout_p: float,
    average_heads: bool,
) -> Tensor:
    """``exp(score - lse)`` after dropout, or its mean over heads; as ``fastattn::attention_weights``.

    ``sinks`` are in lse already. They are needed where lse is so large that it cannot hold the logarithm of
    the sum beside it (a row that is finfo.min everywhere has equal weights): such rows are summed once more.
    """
    with without_autocast(query):
        score, visible = _masked_scores(
            query,
            key,
            attn_mask,
            key_padding_mask,
            alibi_slopes,
            scale,
            softcap,
            window_left,
            window_right,
            lower_right,
        )
        # Rows that see nothing have lse = -inf; exp(-inf - 0) is the 0 that they should give.
        row_sees = visible.any(-1, keepdim=True)
        lse = torch.where(row_sees, lse.unsqueeze(-1), 0.0)
        top, _, total, _ = _exponentials(score.detach(), row_sees, sinks)
        far = lse.abs() > 32
        weights = torch.exp(score - torch.where(far, top + (lse - lse.detach()), lse))
        weights = weights / torch.where(far, total, 1.0).detach()
        weights = _dropped(weights, dropout_seed, dropout_p)
        return (weights.mean(1) if average_heads else weights).to(query.dtype)
