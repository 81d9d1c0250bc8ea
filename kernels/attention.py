"""Softmax attention in Triton: the registered ops of fastattn/ops/_attention_autograd.py.

A program of the forward holds one tile of queries and walks over the keys that its rows may see, in three
stretches: the blocks at the left edge of the window, those that every row sees, where nothing has to be
checked, and those at the right edge, where the causal diagonal and the last key are. The backward is two
kernels that compute the scores again, one with a tile of queries for their gradient and one with a tile of
keys for theirs, so that every gradient has one writer and one order of summation: no atomics, repeatable bit
by bit.

Scores are in units of log2 throughout: the scale carries log2(e), and weights are exp2. What no row of a tile
sees is read as zero, so that a NaN there cannot meet a weight of zero in a product.

Dao, FlashAttention-2, arXiv:2307.08691; the online softmax: Milakov and Gimelshein, arXiv:1805.02867.
"""

import math

import torch
import triton
import triton.language as tl
from fastattn.kernels._common import (
    INTERPRETED,
    LOG2E,
    Config,
    architecture,
    block_of,
    check,
    choose_config,
    device,
    dropout_keep,
    dropout_threshold,
    dropout_words,
    launch,
    load_rows,
    needs_wide_offsets,
    precision,
    product,
    seed_word,
    store_rows,
    to_log2,
    to_natural,
)
from torch import Tensor

from fastattn._choose import TRITON_HEAD_DIM

__all__ = ["attention_backward", "attention_forward", "attention_weights"]

# Launch tables: by architecture, then the first row whose element size (bytes) and tile width (channels, the
# wider of D and Dv as a power of two) hold the call. First guesses, of which some spill registers
# (`python -m fastattn.kernels`); no GPU has measured them yet.
# - 128 query rows over 8 warps are two warpgroups of 64 rows each, the shape of Hopper's wgmma; Ampere and
#   CDNA have smaller matrix instructions, and less shared memory (163 KB and 64 KB, not 227 KB) for stages.
# - float32 forms its products on the ordinary units and holds both operands in registers: small tiles.
# - the gradients of keys and values are two accumulators of a tile's width: smaller tiles again.
# - the interpreter's time goes by operations, its tests are about edges of tiles: small but not smallest.
Table = dict[str, tuple[tuple[int, int, Config], ...]]
FORWARD: Table = {
    "cuda:80": (
        (2, 64, Config(128, 64, 4, 3)), (2, 128, Config(128, 64, 8, 3)), (2, 256, Config(64, 32, 4, 2)),
        (2, 512, Config(32, 16, 4, 2)), (4, 64, Config(64, 32, 4, 2)), (4, 128, Config(32, 32, 4, 2)),
        (4, 512, Config(16, 16, 4, 1)), (8, 512, Config(16, 16, 4, 1)),
    ),
    "cuda:90": (
        (2, 64, Config(128, 128, 8, 3)), (2, 128, Config(128, 64, 8, 3)), (2, 256, Config(64, 64, 4, 2)),
        (2, 512, Config(64, 32, 8, 1)), (4, 64, Config(64, 32, 4, 2)), (4, 128, Config(32, 32, 4, 2)),
        (4, 512, Config(16, 16, 4, 1)), (8, 512, Config(16, 16, 4, 1)),
    ),
    "hip": (
        (2, 64, Config(64, 64, 4, 1)), (2, 128, Config(32, 64, 4, 1)), (2, 256, Config(32, 32, 4, 1)),
        (2, 512, Config(32, 16, 4, 1)), (4, 64, Config(64, 32, 4, 1)), (4, 128, Config(32, 32, 4, 1)),
        (4, 512, Config(16, 16, 4, 1)), (8, 512, Config(16, 16, 4, 1)),
    ),
    "interpreter": ((8, 512, Config(32, 32, 1, 1)),),
}  # fmt: skip
GRAD_QUERY: Table = {
    "cuda:80": (
        (2, 64, Config(64, 64, 4, 2)), (2, 128, Config(64, 64, 8, 2)), (2, 256, Config(32, 32, 4, 1)),
        (2, 512, Config(16, 16, 4, 1)), (4, 64, Config(32, 32, 4, 1)), (4, 512, Config(16, 16, 4, 1)),
        (8, 512, Config(16, 16, 4, 1)),
    ),
    "cuda:90": (
        (2, 64, Config(64, 128, 8, 2)), (2, 128, Config(64, 128, 8, 2)), (2, 256, Config(64, 64, 8, 1)),
        (2, 512, Config(16, 16, 4, 1)), (4, 64, Config(32, 32, 4, 1)), (4, 512, Config(16, 16, 4, 1)),
        (8, 512, Config(16, 16, 4, 1)),
    ),
    "hip": (
        (2, 64, Config(64, 64, 4, 1)), (2, 128, Config(32, 64, 4, 1)), (2, 256, Config(16, 32, 4, 1)),
        (2, 512, Config(16, 16, 4, 1)), (4, 64, Config(32, 32, 4, 1)), (4, 512, Config(16, 16, 4, 1)),
        (8, 512, Config(16, 16, 4, 1)),
    ),
    "interpreter": ((8, 512, Config(32, 32, 1, 1)),),
}  # fmt: skip
GRAD_KEY_VALUE: Table = {
    "cuda:80": (
        (2, 64, Config(64, 64, 4, 2)), (2, 128, Config(32, 64, 4, 2)), (2, 256, Config(16, 32, 4, 1)),
        (2, 512, Config(16, 16, 4, 1)), (4, 64, Config(32, 32, 4, 1)), (4, 512, Config(16, 16, 4, 1)),
        (8, 512, Config(16, 16, 4, 1)),
    ),
    "cuda:90": (
        (2, 64, Config(32, 128, 8, 2)), (2, 128, Config(32, 64, 8, 2)), (2, 256, Config(32, 64, 8, 1)),
        (2, 512, Config(16, 16, 4, 1)), (4, 64, Config(32, 32, 4, 1)), (4, 512, Config(16, 16, 4, 1)),
        (8, 512, Config(16, 16, 4, 1)),
    ),
    "hip": (
        (2, 64, Config(64, 64, 4, 1)), (2, 128, Config(32, 64, 4, 1)), (2, 256, Config(16, 32, 4, 1)),
        (2, 512, Config(16, 16, 4, 1)), (4, 64, Config(32, 32, 4, 1)), (4, 512, Config(16, 16, 4, 1)),
        (8, 512, Config(16, 16, 4, 1)),
    ),
    "interpreter": ((8, 512, Config(32, 32, 1, 1)),),
}  # fmt: skip
for table in (FORWARD, GRAD_QUERY, GRAD_KEY_VALUE):
    table["cuda:100"] = table["cuda:90"]  # tcgen05 takes the shapes of wgmma
    table["xpu"] = table["cuda:80"]  # nothing is known of it; the small tiles


# Beyond this a score in units of log2 is exact to no better than 2^-4.
COARSE = tl.constexpr(2.0**20)

# Lengths, and what depends on them, are never specialised: a new length must not mean a new compilation.
LENGTHS = ["H", "group", "L", "S", "offset", "left", "right", "threshold"]


@device
def _tanh(x):
    """A continued fraction near 0, where the exponential form would lose its leading digits."""
    DEPTH: tl.constexpr = 8 if x.dtype == tl.float64 else 4
    y = x * x
    numerator, denominator = x, x * 0 + 1
    last_numerator, last_denominator = x * 0, x * 0 + 1
    for n in tl.static_range(1, DEPTH):
        next_numerator = (2 * n + 1) * numerator + y * last_numerator
        next_denominator = (2 * n + 1) * denominator + y * last_denominator
        last_numerator, last_denominator = numerator, denominator
        numerator, denominator = next_numerator, next_denominator
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = tl.abs(x) > 0.5
    numerator = tl.where(far, tl.where(x < 0, e - 1, 1 - e), numerator)
    return numerator / tl.where(far, 1 + e, denominator)


@device
def _clip(x, end):
    return tl.minimum(tl.maximum(x, 0), end)


@device
def _seen_keys(first, last, S, offset, left, right):
    """Keys [begin, end) that some row of first..last may see, and [inner, outer) that all of them do."""
    begin, inner, outer, end = S * 0, S * 0, S, S
    if left is not None:
        begin = _clip(first + offset - left, S)
        inner = _clip(last + offset - left, S)
    if right is not None:
        outer = _clip(first + offset + right + 1, S)
        end = _clip(last + offset + right + 1, S)
    return begin, inner, outer, end


@device
def _seeing_rows(first, last, L, offset, left, right):
    """Rows [begin, end) that may see some key of first..last, and [inner, outer) that see all of them."""
    begin, inner, outer, end = L * 0, L * 0, L, L
    if right is not None:
        begin = _clip(first - offset - right, L)
        inner = _clip(last - offset - right, L)
    if left is not None:
        outer = _clip(first - offset + left + 1, L)
        end = _clip(last - offset + left + 1, L)
    return begin, inner, outer, end


@device
def _stretch(part: tl.constexpr, begin, inner, outer, end, BLOCK: tl.constexpr):
    """Blocks of the left edge, of the inside that needs no check, and of the right edge."""
    inner = (inner + BLOCK - 1) // BLOCK * BLOCK
    outer = outer // BLOCK * BLOCK
    if part == 0:
        return begin // BLOCK * BLOCK, tl.minimum(inner, end)
    elif part == 1:
        return inner, outer
    else:
        return tl.maximum(inner, outer), end


@device
def _rows_see(i, S, offset, left, right):
    """Whether the window leaves a row any key."""
    begin, inner, outer, end = _seen_keys(i, i, S, offset, left, right)
    return begin + 0 * i < end


@device
def _scores(
    dots, b, h, r, c, row, column, L, S, offset, left, right, mask, mask_stride, shown, slope, scale, softcap,
    SOFTCAP: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Scores in units of log2, which of them are visible, and d(capped score) / d(scaled score).

    For rows ``row + r`` and keys ``column + c``, in either orientation. ``shown``: those that
    key_padding_mask shows.
    """
    ACCURATE: tl.constexpr = dots.dtype
    i, j = row + r, column + c
    bend = dots
    if SOFTCAP:
        capped = _tanh(dots * tl.full([], scale / softcap, ACCURATE))
        bend = 1 - capped * capped
        score = capped * tl.full([], softcap * LOG2E, ACCURATE)
    else:
        score = dots * tl.full([], scale * LOG2E, ACCURATE)
    if slope is not None:
        score -= slope * LOG2E * tl.abs(i + offset - j).to(ACCURATE)
    visible = (i < L) & (j < S)
    if CHECK:
        if left is not None:
            visible = visible & (j >= i + offset - left)
        if right is not None:
            visible = visible & (j <= i + offset + right)
    if shown is not None:
        visible = visible & shown
    if mask is not None:
        at = mask + b * mask_stride[0] + h * mask_stride[1]
        at += tl.cast(row, tl.int64) * mask_stride[2] + tl.cast(column, tl.int64) * mask_stride[3]
        at = at + r * mask_stride[2] + c * mask_stride[3]
        if mask.dtype.element_ty == tl.uint8:
            visible = visible & (tl.load(at, mask=visible, other=0) != 0)
        else:
            bias = tl.load(at, mask=visible, other=-float("inf")).to(ACCURATE)
            visible = visible & (bias != -float("inf"))
            score += to_log2(bias)
    if CHECK or shown is not None or mask is not None:
        score = tl.where(visible, score, -float("inf"))
        if SOFTCAP:
            bend = tl.where(visible, bend, 0.0)
    return score, visible, bend


@device
def _shown(padding, padding_stride, b, j, present):
    """Of the keys j that are ``present``, those that key_padding_mask shows."""
    at = padding + b * padding_stride[0] + j.to(tl.int64) * padding_stride[1]
    return tl.load(at, mask=present, other=0) != 0


@device
def _weights(score, level, logarithm, visible, CHECK: tl.constexpr):
    """exp2(score - level - logarithm), the softmax; ``level`` may be infinite where nothing is visible."""
    weights = tl.exp2(score - level - logarithm)
    if CHECK:
        weights = tl.where(visible, weights, 0.0)
    return weights


@device
def _load_level(lse, log_sum, at, shown):
    """What turns the scores of rows into weights, in units of log2; rows that are not ``shown`` weigh 0."""
    level = tl.load(lse + at, mask=shown, other=float("inf"))
    if log_sum is None:
        return to_log2(level), 0.0
    else:
        return level, tl.load(log_sum + at, mask=shown, other=0.0)


@triton.jit(do_not_specialize=LENGTHS)
def _forward(
    query, key, value, mask, padding, alibi, sinks, seed, out, lse, log_sum,
    query_stride, key_stride, value_stride, mask_stride, padding_stride, alibi_stride, sinks_stride,
    out_stride,
    H, group, L, S, offset, left, right, threshold,
    scale: tl.float64, softcap: tl.float64, keep_scale: tl.float64,
    SOFTCAP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head: out and lse.

    Or, without values, what turns its scores back into weights: ``lse`` is in natural units first and in
    those of log2 afterwards, and where it is too large to tell how many keys share a weight, it becomes their
    maximum and ``log_sum`` that number's logarithm.
    """
    ACCURATE: tl.constexpr = tl.float64 if query.dtype.element_ty == tl.float64 else tl.float32
    MASKED: tl.constexpr = mask is not None
    PADDED: tl.constexpr = padding is not None
    # The last rows come first: under a causal mask they are the longest.
    tiles = (L + BLOCK_Q - 1) // BLOCK_Q
    row = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_Q
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // H, head % H
    r, c = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    channels, value_channels = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    i = row + r
    in_tile = i < L
    if WIDE:
        r, c = r.to(tl.int64), c.to(tl.int64)
        channels, value_channels = channels.to(tl.int64), value_channels.to(tl.int64)

    slope = None
    if alibi is not None:
        slope = tl.load(alibi + b * alibi_stride[0] + h * alibi_stride[1])
    if seed is not None:
        word1, word2 = dropout_words(seed_word(seed), head * L + i + 1)

    top = tl.full([BLOCK_Q], -float("inf"), ACCURATE)
    total = tl.full([BLOCK_Q], 0, ACCURATE)
    if sinks is not None:
        sink = to_log2(tl.load(sinks + h * sinks_stride[0]).to(ACCURATE))
        top = tl.full([BLOCK_Q], 0, ACCURATE) + sink
        total = tl.where(top == -float("inf"), total, 1.0)
    begin, inner, outer, end = _seen_keys(row, tl.minimum(row + BLOCK_Q, L) - 1, S, offset, left, right)
    seen = tl.full([BLOCK_Q], 0, tl.int32) > 0
    if value is None:
        given = to_log2(tl.load(lse + head * L + i, mask=in_tile, other=0.0))
        coarse = (tl.abs(given) > COARSE) & (tl.abs(given) < float("inf"))
        wanted = tl.max(coarse.to(tl.int32), 0)
        begin, inner, outer, end = begin * wanted, inner * wanted, outer * wanted, end * wanted
    else:
        result = tl.full([BLOCK_Q, BLOCK_DV], 0, ACCURATE)

    q = load_rows(query, query_stride, b, h, row, r, channels, in_tile, D, BLOCK_D, True)
    for part in tl.static_range(3):
        if part != 0 or left is not None:
            start, stop = _stretch(part, begin, inner, outer, end, BLOCK_K)
            for column in range(start, stop, BLOCK_K):
                present = (column + c >= begin) & (column + c < end)
                shown = None
                if PADDED:
                    present = _shown(padding, padding_stride, b, column + c, present)
                    shown = present[None, :]
                k = load_rows(key, key_stride, b, h // group, column, c, channels, present, D, BLOCK_D,
                    part != 1 or PADDED,
                )  # fmt: skip
                dots = product(q, tl.trans(k), tl.full([BLOCK_Q, BLOCK_K], 0, ACCURATE), PRECISION, UPCAST)
                score, visible, _ = _scores(
                    dots, b, h, r[:, None], c[None, :], row, column, L, S, offset, left, right, mask,
                    mask_stride, shown, slope, scale, softcap, SOFTCAP, part != 1,
                )  # fmt: skip
                if MASKED or PADDED:
                    seen = seen | (tl.max(visible.to(tl.int32), 1) > 0)
                above = tl.maximum(top, tl.max(score, 1))
                shift = tl.where(above == -float("inf"), 0.0, above)
                rescale = tl.exp2(top - shift)
                weights = tl.exp2(score - shift[:, None])
                total = total * rescale + tl.sum(weights, 1)
                top = above
                if value is not None:
                    v = load_rows(value, value_stride, b, h // group, column, c, value_channels, present, DV,
                        BLOCK_DV, part != 1 or PADDED,
                    )  # fmt: skip
                    if MASKED:
                        v = tl.where((tl.max(visible.to(tl.int32), 0) > 0)[:, None], v, 0.0)
                    if seed is not None:
                        keep = dropout_keep(word1[:, None], word2[:, None], (column + c)[None, :], threshold)
                        weights = tl.where(keep, weights, 0.0)
                    result = product(weights, v, result * rescale[:, None], PRECISION, UPCAST)

    if value is None:
        tl.store(lse + head * L + i, tl.where(coarse, top, given), mask=in_tile)
        tl.store(log_sum + head * L + i, tl.where(coarse, tl.log2(total), 0.0), mask=in_tile)
    else:
        if not (MASKED or PADDED):
            seen = _rows_see(i, S, offset, left, right)
        # Only masks make a row empty: scores that are all -inf by value are NaN, as in plain PyTorch.
        total = tl.where(seen & (top == -float("inf")), float("nan"), total)
        result = tl.where(seen[:, None], result * (tl.full([], keep_scale, ACCURATE) / total)[:, None], 0.0)
        store_rows(out, out_stride, b, h, row, r,
                   value_channels, in_tile, DV, result)  # fmt: skip
        tl.store(lse + head * L + i, to_natural(top, total), mask=in_tile)


@triton.jit(do_not_specialize=LENGTHS)
def _grad_query(
    grad_out, grad_lse, query, key, value, mask, padding, alibi, sinks, seed, out, lse, log_sum,
    grad_query, delta, alibi_sum, sinks_sum,
    grad_out_stride, grad_lse_stride, query_stride, key_stride, value_stride, mask_stride, padding_stride,
    alibi_stride, sinks_stride, out_stride, grad_query_stride,
    H, group, L, S, offset, left, right, threshold,
    scale: tl.float64, softcap: tl.float64, keep_scale: tl.float64,
    SOFTCAP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head: their gradient, ``delta`` for that of keys and values, and what the
    tile adds to the gradients of slopes and sinks.

    With P the weights, dP = dO V^T and delta = rowsum(dO * O) - dlse, the gradient of a score is dS = P *
    (dP - delta).
    """
    ACCURATE: tl.constexpr = tl.float64 if query.dtype.element_ty == tl.float64 else tl.float32
    MASKED: tl.constexpr = mask is not None
    PADDED: tl.constexpr = padding is not None
    tiles = (L + BLOCK_Q - 1) // BLOCK_Q
    tile = tiles - 1 - tl.program_id(0) % tiles
    row = tile * BLOCK_Q
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // H, head % H
    r, c = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    channels, value_channels = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    i = row + r
    in_tile = i < L
    if WIDE:
        r, c = r.to(tl.int64), c.to(tl.int64)
        channels, value_channels = channels.to(tl.int64), value_channels.to(tl.int64)

    slope = None
    if alibi is not None:
        slope = tl.load(alibi + b * alibi_stride[0] + h * alibi_stride[1])
    if seed is not None:
        word1, word2 = dropout_words(seed_word(seed), head * L + i + 1)

    q = load_rows(query, query_stride, b, h, row, r, channels, in_tile, D, BLOCK_D, True)
    do = load_rows(
        grad_out,
        grad_out_stride,
        b,
        h,
        row,
        r,
        value_channels,
        in_tile,
        DV,
        BLOCK_DV,
        True,
    )
    o = load_rows(out, out_stride, b, h, row, r, value_channels,
        in_tile, DV, BLOCK_DV, True,
    )  # fmt: skip
    inside = tl.sum(do.to(ACCURATE) * o.to(ACCURATE), 1)
    outside = tl.full([BLOCK_Q], 0, ACCURATE)
    if grad_lse is not None:
        grad_lse += (
            b * grad_lse_stride[0] + h * grad_lse_stride[1] + tl.cast(row, tl.int64) * grad_lse_stride[2]
        )
        outside = tl.load(grad_lse + r * grad_lse_stride[2], mask=in_tile, other=0.0)
    difference = inside - outside
    tl.store(delta + head * L + i, difference, mask=in_tile)
    level, logarithm = _load_level(lse, log_sum, head * L + i, in_tile)
    logarithm_column = logarithm
    if log_sum is not None:
        logarithm_column = logarithm[:, None]

    begin, inner, outer, end = _seen_keys(row, tl.minimum(row + BLOCK_Q, L) - 1, S, offset, left, right)
    seen = tl.full([BLOCK_Q], 0, tl.int32) > 0
    grad = tl.full([BLOCK_Q, BLOCK_D], 0, ACCURATE)
    slopes = tl.full([BLOCK_Q], 0, ACCURATE)
    for part in tl.static_range(3):
        if part != 0 or left is not None:
            start, stop = _stretch(part, begin, inner, outer, end, BLOCK_K)
            for column in range(start, stop, BLOCK_K):
                present = (column + c >= begin) & (column + c < end)
                shown = None
                if PADDED:
                    present = _shown(padding, padding_stride, b, column + c, present)
                    shown = present[None, :]
                k = load_rows(key, key_stride, b, h // group, column, c, channels, present, D, BLOCK_D,
                    part != 1 or PADDED,
                )  # fmt: skip
                v = load_rows(value, value_stride, b, h // group, column, c, value_channels, present, DV,
                    BLOCK_DV, part != 1 or PADDED,
                )  # fmt: skip
                dots = product(q, tl.trans(k), tl.full([BLOCK_Q, BLOCK_K], 0, ACCURATE), PRECISION, UPCAST)
                score, visible, bend = _scores(
                    dots, b, h, r[:, None], c[None, :], row, column, L, S, offset, left, right, mask,
                    mask_stride, shown, slope, scale, softcap, SOFTCAP, part != 1,
                )  # fmt: skip
                weights = _weights(
                    score, level[:, None], logarithm_column, visible, part != 1 or MASKED or PADDED
                )
                grads = product(do, tl.trans(v), tl.full([BLOCK_Q, BLOCK_K], 0, ACCURATE), PRECISION, UPCAST)
                if seed is not None:
                    keep = dropout_keep(word1[:, None], word2[:, None], (column + c)[None, :], threshold)
                    grads = tl.where(keep, grads * tl.full([], keep_scale, ACCURATE), 0.0)
                grads = weights * (grads - difference[:, None])
                if part != 1 or MASKED or PADDED:
                    grads = tl.where(visible, grads, 0.0)
                if MASKED or PADDED:
                    seen = seen | (tl.max(visible.to(tl.int32), 1) > 0)
                if MASKED:
                    k = tl.where((tl.max(visible.to(tl.int32), 0) > 0)[:, None], k, 0.0)
                if alibi_sum is not None:
                    distance = tl.abs(i[:, None] + offset - (column + c)[None, :]).to(ACCURATE)
                    slopes -= tl.sum(grads * distance, 1)
                if SOFTCAP:
                    grads *= bend
                grad = product(grads, k, grad, PRECISION, UPCAST)

    if not (MASKED or PADDED):
        seen = _rows_see(i, S, offset, left, right)
    seen = seen & in_tile
    grad = tl.where(seen[:, None], grad * tl.full([], scale, ACCURATE), 0.0)
    store_rows(grad_query, grad_query_stride, b, h, row, r, channels, in_tile, D, grad)  # fmt: skip
    if alibi_sum is not None:
        tl.store(alibi_sum + head * tiles + tile, tl.sum(slopes, 0))
    if sinks_sum is not None:
        sink = tl.full([BLOCK_Q], 0, ACCURATE) + to_log2(tl.load(sinks + h * sinks_stride[0]).to(ACCURATE))
        weights = _weights(sink, level, logarithm, in_tile & (sink != -float("inf")), True)
        taken = tl.where(in_tile, weights * (outside - tl.where(seen, inside, 0.0)), 0.0)
        tl.store(sinks_sum + head * tiles + tile, tl.sum(taken, 0))


@triton.jit(do_not_specialize=LENGTHS)
def _grad_key_value(
    grad_out, query, key, value, mask, padding, alibi, seed, lse, log_sum, delta, grad_key, grad_value,
    grad_out_stride, query_stride, key_stride, value_stride, mask_stride, padding_stride, alibi_stride,
    grad_key_stride, grad_value_stride,
    H, group, L, S, offset, left, right, threshold,
    scale: tl.float64, softcap: tl.float64, keep_scale: tl.float64,
    SOFTCAP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of keys of one key/value head: their gradients, over all query heads that share it."""
    ACCURATE: tl.constexpr = tl.float64 if query.dtype.element_ty == tl.float64 else tl.float32
    MASKED: tl.constexpr = mask is not None
    PADDED: tl.constexpr = padding is not None
    tiles = (S + BLOCK_K - 1) // BLOCK_K
    column = tl.program_id(0) % tiles * BLOCK_K
    shared = (tl.program_id(0) // tiles).to(tl.int64)
    b, shared = shared // (H // group), shared % (H // group)
    r, c = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    channels, value_channels = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    j = column + c
    in_tile = j < S
    if WIDE:
        r, c = r.to(tl.int64), c.to(tl.int64)
        channels, value_channels = channels.to(tl.int64), value_channels.to(tl.int64)

    shown = None
    if PADDED:
        shown = _shown(padding, padding_stride, b, j, in_tile)[:, None]
    k = load_rows(key, key_stride, b, shared, column, c,
                  channels, in_tile, D, BLOCK_D, True)  # fmt: skip
    v = load_rows(value, value_stride, b, shared,
                  column, c, value_channels, in_tile, DV, BLOCK_DV, True)  # fmt: skip
    dk = tl.full([BLOCK_K, BLOCK_D], 0, ACCURATE)
    dv = tl.full([BLOCK_K, BLOCK_DV], 0, ACCURATE)
    begin, inner, outer, end = _seeing_rows(
        column, tl.minimum(column + BLOCK_K, S) - 1, L, offset, left, right
    )
    for g in range(0, group):
        h = shared * group + g
        first_row = (b * H + h) * L
        slope = None
        if alibi is not None:
            slope = tl.load(alibi + b * alibi_stride[0] + h * alibi_stride[1])
        for part in tl.static_range(3):
            if part != 0 or right is not None:
                start, stop = _stretch(part, begin, inner, outer, end, BLOCK_Q)
                for row in range(start, stop, BLOCK_Q):
                    i = row + tl.arange(0, BLOCK_Q)
                    present = (i >= begin) & (i < end)
                    q = load_rows(query, query_stride, b, h, row, r, channels, present, D, BLOCK_D,
                        part != 1,
                    )  # fmt: skip
                    do = load_rows(grad_out, grad_out_stride, b, h, row, r, value_channels, present, DV,
                        BLOCK_DV, part != 1,
                    )  # fmt: skip
                    level, logarithm = _load_level(lse, log_sum, first_row + i, present)
                    if log_sum is not None:
                        logarithm = logarithm[None, :]
                    difference = tl.load(delta + first_row + i, mask=present, other=0.0)
                    dots = product(
                        k, tl.trans(q), tl.full([BLOCK_K, BLOCK_Q], 0, ACCURATE), PRECISION, UPCAST
                    )
                    score, visible, bend = _scores(
                        dots, b, h, r[None, :], c[:, None], row, column, L, S, offset, left, right,
                        mask, mask_stride, shown, slope, scale, softcap, SOFTCAP, part != 1,
                    )  # fmt: skip
                    weights = _weights(
                        score, level[None, :], logarithm, visible, part != 1 or MASKED or PADDED
                    )
                    if MASKED or PADDED:
                        some = (tl.max(visible.to(tl.int32), 0) > 0)[:, None]
                        q, do = tl.where(some, q, 0.0), tl.where(some, do, 0.0)
                    grads = product(
                        v, tl.trans(do), tl.full([BLOCK_K, BLOCK_Q], 0, ACCURATE), PRECISION, UPCAST
                    )
                    kept = weights
                    if seed is not None:
                        word1, word2 = dropout_words(seed_word(seed), first_row + i + 1)
                        keep = dropout_keep(word1[None, :], word2[None, :], j[:, None], threshold)
                        kept = tl.where(keep, weights, 0.0)
                        grads = tl.where(keep, grads * tl.full([], keep_scale, ACCURATE), 0.0)
                    dv = product(kept, do, dv, PRECISION, UPCAST)
                    grads = weights * (grads - difference[None, :])
                    if part != 1 or MASKED or PADDED:
                        grads = tl.where(visible, grads, 0.0)
                    if SOFTCAP:
                        grads *= bend
                    dk = product(grads, q, dk, PRECISION, UPCAST)

    store_rows(grad_key, grad_key_stride, b, shared, column, c, channels, in_tile, D,
               dk * tl.full([], scale, ACCURATE))  # fmt: skip
    store_rows(grad_value, grad_value_stride, b, shared, column, c, value_channels, in_tile, DV,
               dv * tl.full([], keep_scale, ACCURATE))  # fmt: skip


@triton.jit(do_not_specialize=[*LENGTHS, "sizes", "shared", "chunks", "per_chunk"])
def _grad_mask(
    grad_out, query, key, value, mask, padding, alibi, seed, lse, log_sum, delta, grad_mask,
    grad_out_stride, query_stride, key_stride, value_stride, mask_stride, padding_stride, alibi_stride,
    grad_mask_stride, sizes, shared, chunks, per_chunk,
    H, group, L, S, offset, left, right, threshold,
    scale: tl.float64, softcap: tl.float64, keep_scale: tl.float64,
    SOFTCAP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    UPCAST: tl.constexpr, ROWS_SHARED: tl.constexpr, KEYS_SHARED: tl.constexpr,
):  # fmt: skip
    """One tile of a mask's gradient, over a chunk of what shares it: ``shared`` batches, heads, tiles of rows
    and of keys are added one after another. The mask itself has ``sizes`` of them."""
    ACCURATE: tl.constexpr = tl.float64 if query.dtype.element_ty == tl.float64 else tl.float32
    chunk = tl.program_id(0) % chunks
    n = tl.program_id(0) // chunks
    n, key_tile = n // sizes[3], n % sizes[3]
    n, row_tile = n // sizes[2], n % sizes[2]
    mask_b, mask_h = n // sizes[1], n % sizes[1]
    r, c = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    channels, value_channels = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    if WIDE:
        r, c = r.to(tl.int64), c.to(tl.int64)
        channels, value_channels = channels.to(tl.int64), value_channels.to(tl.int64)

    total = tl.full([BLOCK_Q, BLOCK_K], 0, ACCURATE)
    items = shared[0] * shared[1] * shared[2] * shared[3]
    for item in range(chunk * per_chunk, tl.minimum((chunk + 1) * per_chunk, items)):
        column = (key_tile + item % shared[3]) * BLOCK_K
        row = (row_tile + item // shared[3] % shared[2]) * BLOCK_Q
        h = tl.cast(mask_h + item // (shared[3] * shared[2]) % shared[1], tl.int64)
        b = tl.cast(mask_b + item // (shared[3] * shared[2] * shared[1]), tl.int64)
        begin, inner, outer, end = _seen_keys(row, tl.minimum(row + BLOCK_Q, L) - 1, S, offset, left, right)
        if (column < end) & (column + BLOCK_K > begin):
            i, j = row + tl.arange(0, BLOCK_Q), column + tl.arange(0, BLOCK_K)
            q = load_rows(query, query_stride, b, h,
                          row, r, channels, i < L, D, BLOCK_D, True)  # fmt: skip
            do = load_rows(grad_out, grad_out_stride, b, h, row, r, value_channels, i < L, DV, BLOCK_DV, True,
            )  # fmt: skip
            k = load_rows(key, key_stride, b, h // group,
                          column, c, channels, j < S, D, BLOCK_D, True)  # fmt: skip
            v = load_rows(value, value_stride, b, h // group,
                column, c, value_channels, j < S, DV, BLOCK_DV, True,
            )  # fmt: skip
            shown = None
            if padding is not None:
                shown = _shown(padding, padding_stride, b, j, j < S)[None, :]
            slope = None
            if alibi is not None:
                slope = tl.load(alibi + b * alibi_stride[0] + h * alibi_stride[1])
            dots = product(q, tl.trans(k), tl.full([BLOCK_Q, BLOCK_K], 0, ACCURATE), PRECISION, UPCAST)
            score, visible, _ = _scores(
                dots, b, h, r[:, None], c[None, :], row, column, L, S, offset, left, right,
                mask, mask_stride, shown, slope, scale, softcap, SOFTCAP,
                True,
            )  # fmt: skip
            first_row = (b * H + h) * L
            level, logarithm = _load_level(lse, log_sum, first_row + i, i < L)
            if log_sum is not None:
                logarithm = logarithm[:, None]
            weights = _weights(score, level[:, None], logarithm, visible, True)
            grads = product(do, tl.trans(v), tl.full([BLOCK_Q, BLOCK_K], 0, ACCURATE), PRECISION, UPCAST)
            if seed is not None:
                word1, word2 = dropout_words(seed_word(seed), first_row + i + 1)
                keep = dropout_keep(word1[:, None], word2[:, None], j[None, :], threshold)
                grads = tl.where(keep, grads * tl.full([], keep_scale, ACCURATE), 0.0)
            difference = tl.load(delta + first_row + i, mask=i < L, other=0.0)
            total += tl.where(visible, weights * (grads - difference[:, None]), 0.0)

    grad_mask += (
        tl.cast(chunk, tl.int64) * grad_mask_stride[0] + tl.cast(mask_b, tl.int64) * grad_mask_stride[1]
    )
    grad_mask += tl.cast(mask_h, tl.int64) * grad_mask_stride[2]
    rows, columns = row_tile * BLOCK_Q + r, key_tile * BLOCK_K + c
    if ROWS_SHARED and KEYS_SHARED:
        tl.store(grad_mask, tl.sum(tl.sum(total, 1), 0))
    elif ROWS_SHARED:
        tl.store(grad_mask + columns, tl.sum(total, 0), mask=columns < S)
    elif KEYS_SHARED:
        tl.store(grad_mask + rows, tl.sum(total, 1), mask=rows < L)
    else:
        at = grad_mask + rows[:, None].to(tl.int64) * grad_mask_stride[3] + columns[None, :]
        tl.store(at, total, mask=(rows < L)[:, None] & (columns < S)[None, :])


@triton.jit(do_not_specialize=LENGTHS)
def _all_weights(
    query, key, mask, padding, alibi, seed, lse, log_sum, weights,
    query_stride, key_stride, mask_stride, padding_stride, alibi_stride,
    H, group, L, S, offset, left, right, threshold,
    scale: tl.float64, softcap: tl.float64, keep_scale: tl.float64,
    SOFTCAP: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
    AVERAGE: tl.constexpr,
):  # fmt: skip
    """One tile of the weights themselves, of a head or of the mean over heads."""
    ACCURATE: tl.constexpr = tl.float64 if query.dtype.element_ty == tl.float64 else tl.float32
    key_tiles, row_tiles = (S + BLOCK_K - 1) // BLOCK_K, (L + BLOCK_Q - 1) // BLOCK_Q
    column = tl.program_id(0) % key_tiles * BLOCK_K
    n = tl.program_id(0) // key_tiles
    row = n % row_tiles * BLOCK_Q
    n = (n // row_tiles).to(tl.int64)
    if AVERAGE:
        b, first_head, heads = n, n * 0, H
    else:
        b, first_head, heads = n // H, n % H, H // H
    r, c = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    channels = tl.arange(0, BLOCK_D)
    i, j = row + r, column + c
    if WIDE:
        r, c, channels = r.to(tl.int64), c.to(tl.int64), channels.to(tl.int64)
    shown = None
    if padding is not None:
        shown = _shown(padding, padding_stride, b, j, j < S)[None, :]
    total = tl.full([BLOCK_Q, BLOCK_K], 0, ACCURATE)
    for x in range(0, heads):
        h = first_head + x
        q = load_rows(query, query_stride, b, h, row, r,
                      channels, i < L, D, BLOCK_D, True)  # fmt: skip
        k = load_rows(key, key_stride, b, h // group, column,
                      c, channels, j < S, D, BLOCK_D, True)  # fmt: skip
        slope = None
        if alibi is not None:
            slope = tl.load(alibi + b * alibi_stride[0] + h * alibi_stride[1])
        dots = product(q, tl.trans(k), tl.full([BLOCK_Q, BLOCK_K], 0, ACCURATE), PRECISION, UPCAST)
        score, visible, _ = _scores(
            dots, b, h, r[:, None], c[None, :], row, column, L, S, offset, left, right, mask, mask_stride,
            shown, slope, scale, softcap, SOFTCAP, True,
        )  # fmt: skip
        first_row = (b * H + h) * L
        level, logarithm = _load_level(lse, log_sum, first_row + i, i < L)
        if log_sum is not None:
            logarithm = logarithm[:, None]
        found = _weights(score, level[:, None], logarithm, visible, True)
        if seed is not None:
            word1, word2 = dropout_words(seed_word(seed), first_row + i + 1)
            keep = dropout_keep(word1[:, None], word2[:, None], j[None, :], threshold)
            found = tl.where(keep, found * tl.full([], keep_scale, ACCURATE), 0.0)
        total += found
    if AVERAGE:
        total = total / H
    at = weights + (n * L + row) * S + column + tl.arange(0, BLOCK_Q)[:, None].to(tl.int64) * S + c[None, :]
    tl.store(at, total.to(weights.dtype.element_ty), mask=(i < L)[:, None] & (j < S)[None, :])


# Masks' gradients are added in this many chunks where the mask has few tiles of its own: enough for any GPU,
# and independent of it, so that the order of summation is too.
CHUNKS = 512


class _Call:
    """The arguments that all kernels share, checked."""

    def __init__(
        self, query, key, value, attn_mask, key_padding_mask, alibi_slopes, sinks, dropout_seed, scale,
        softcap, window_left, window_right, lower_right, dropout_p, more=(),
    ):  # fmt: skip
        self.B, self.H, self.L, D = check("query", query, (None,) * 4)
        _, Hkv, self.S, _ = check("key", key, (self.B, None, None, D), query.dtype)
        DV = 0 if value is None else check("value", value, (self.B, Hkv, self.S, None), query.dtype)[3]
        B, H, L, S = self.B, self.H, self.L, self.S
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        if H % max(Hkv, 1) or (Hkv == 0) != (H == 0):
            raise RuntimeError(f"query heads must be a multiple of key heads, got {H} and {Hkv}")
        if max(D, DV) > TRITON_HEAD_DIM:
            raise NotImplementedError(f"head dims up to {TRITON_HEAD_DIM}, got {max(D, DV)}")
        if max(L, S) >= 2**29:
            raise NotImplementedError(f"lengths below 2**29, got {L} queries and {S} keys")
        if attn_mask is not None:
            shape = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
            if len(shape) != 4 or any(n not in (1, m) for n, m in zip(shape, (B, H, L, S), strict=False)):
                raise RuntimeError(
                    f"attn_mask must broadcast to {(B, H, L, S)}, got {tuple(attn_mask.shape)}"
                )
            check("attn_mask", attn_mask, None, torch.bool, query.dtype, torch.float32)
            self.mask_shape = shape
            attn_mask = attn_mask.expand(B, H, L, S)
        if key_padding_mask is not None:
            check("key_padding_mask", key_padding_mask, (B, S), torch.bool)
        if alibi_slopes is not None:
            shape = (B, H) if alibi_slopes.dim() > 1 else (H,)
            check("alibi_slopes", alibi_slopes, shape, wide)
            alibi_slopes = alibi_slopes.expand(B, H)
        if sinks is not None:
            check("sinks", sinks, (H,), query.dtype, torch.float32)
        if dropout_p > 0:
            check("dropout_seed", dropout_seed, (1,), torch.int64)
        if not (softcap >= 0 and 0 <= dropout_p <= 1 and window_left >= -1 and window_right >= -1):
            raise RuntimeError(
                f"softcap {softcap}, dropout_p {dropout_p} or window {window_left}, {window_right} is wrong"
            )
        self.float_mask = attn_mask is not None and attn_mask.dtype != torch.bool
        self.width = block_of(max(D, DV))
        self.dtype, self.wide, self.device = query.dtype, wide, query.device
        strided = {
            "query": query, "key": key, "value": value, "mask": attn_mask, "padding": key_padding_mask,
            "alibi": alibi_slopes, "sinks": sinks, **dict(more),
        }  # fmt: skip
        self.arguments = {
            "seed": dropout_seed if dropout_p > 0 else None,
            "H": H, "group": H // max(Hkv, 1), "L": L, "S": S, "offset": S - L if lower_right else 0,
            # Beyond all keys; positions added to it then stay within 32 bits.
            "left": None if window_left < 0 else min(window_left, L + S),
            "right": None if window_right < 0 else min(window_right, L + S),
            "threshold": dropout_threshold(dropout_p),
            "keep_scale": 1 / (1 - dropout_p) if dropout_p < 1 else 0.0,
            "scale": float(scale), "softcap": float(softcap), "SOFTCAP": softcap > 0,
            "D": D, "DV": DV, "BLOCK_D": block_of(D), "BLOCK_DV": block_of(DV),
            "PRECISION": precision(query.dtype), "WIDE": needs_wide_offsets(*strided.values()),
            "UPCAST": INTERPRETED and query.dtype == torch.bfloat16,
        }  # fmt: skip
        for name, tensor in strided.items():
            self.add(name, tensor)

    def add(self, name: str, tensor: Tensor | None) -> None:
        if tensor is not None and tensor.dtype == torch.bool:
            tensor = tensor.view(torch.uint8)
        self.arguments[name] = tensor
        self.arguments[f"{name}_stride"] = None if tensor is None else tensor.stride()

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.wide, device=self.device)

    def launch(self, kernel, table: Table, programs, **more) -> None:
        """``programs`` is their number, given the tile. A kernel gets those of the arguments that it has."""
        config = choose_config(table[architecture(self.device)], self.dtype, self.width)
        given = {**self.arguments, "BLOCK_Q": config.BLOCK_Q, "BLOCK_K": config.BLOCK_K, **more}
        launch(kernel, programs(config), config, **{n: given[n] for n in kernel.arg_names})

    def tiles(self, config: Config) -> tuple[int, int]:
        return -(-self.L // config.BLOCK_Q), -(-self.S // config.BLOCK_K)

    def level(self, lse: Tensor) -> tuple[Tensor, Tensor | None]:
        """lse and log_sum for the kernels that compute weights again.

        A mask may add such large numbers (a row that is finfo.min everywhere has equal weights) that lse
        cannot hold the logarithm of how many keys share a weight.
        """
        check("lse", lse, (self.B, self.H, self.L), self.wide)
        if not self.float_mask:
            return lse.contiguous(), None
        level, log_sum = lse.clone(memory_format=torch.contiguous_format), self.empty(self.B, self.H, self.L)
        self.launch(
            _forward, FORWARD, lambda config: self.B * self.H * self.tiles(config)[0], value=None,
            value_stride=None, seed=None, lse=level, log_sum=log_sum, out=None, out_stride=None,
        )  # fmt: skip
        return level, log_sum


def _refuse_packed(packed) -> None:
    if any(p is not None for p in packed):
        raise NotImplementedError("the Triton kernels do not know packed sequences (cu_seqlens) yet")


def attention_forward(query: Tensor, key: Tensor, value: Tensor, *args) -> tuple[Tensor, Tensor]:
    _refuse_packed(args[11:])
    call = _Call(query, key, value, *args[:11])
    # Heads beside channels in memory: joining them afterwards is then a view.
    out = query.new_empty((call.B, call.L, call.H, value.shape[3])).transpose(1, 2)
    lse = call.empty(call.B, call.H, call.L)
    call.add("out", out)
    call.launch(
        _forward, FORWARD, lambda config: call.B * call.H * call.tiles(config)[0], lse=lse, log_sum=None
    )
    return out, lse


def attention_backward(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
    lse: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, alibi_slopes: Tensor | None,
    sinks: Tensor | None, dropout_seed: Tensor | None, scale: float, softcap: float, window_left: int,
    window_right: int, lower_right: bool, dropout_p: float, mask_grad: bool, alibi_grad: bool,
    sinks_grad: bool, *packed,
) -> tuple[Tensor, ...]:  # fmt: skip
    _refuse_packed(packed)
    grads = [torch.empty_like(t) for t in (query, key, value)]
    call = _Call(
        query, key, value, attn_mask, key_padding_mask, alibi_slopes, sinks, dropout_seed, scale, softcap,
        window_left, window_right, lower_right, dropout_p,
        zip(("grad_query", "grad_key", "grad_value"), grads, strict=True),
    )  # fmt: skip
    B, H, L = call.B, call.H, call.L
    for name, tensor in (("grad_out", grad_out), ("out", out)):
        check(name, tensor, (B, H, L, value.shape[3]), query.dtype)
    if grad_lse is not None:
        check("grad_lse", grad_lse, (B, H, L), call.wide)
    for name, tensor, wanted in (
        ("attn_mask", attn_mask, mask_grad), ("alibi_slopes", alibi_slopes, alibi_grad),
        ("sinks", sinks, sinks_grad),
    ):  # fmt: skip
        if wanted and (tensor is None or not tensor.is_floating_point()):
            raise RuntimeError(f"{name} must be floating point to have a gradient, got {tensor}")
    for name, tensor in (("grad_out", grad_out), ("out", out), ("grad_lse", grad_lse)):
        call.add(name, tensor)
    level, log_sum = call.level(lse)
    delta = call.empty(B, H, L)
    saved = {"lse": level, "log_sum": log_sum, "delta": delta}

    rows = call.tiles(choose_config(GRAD_QUERY[architecture(call.device)], call.dtype, call.width))[0]
    alibi_sum = call.empty(B, H, rows) if alibi_grad else None
    sinks_sum = call.empty(B, H, rows) if sinks_grad else None
    call.launch(
        _grad_query,
        GRAD_QUERY,
        lambda config: B * H * rows,
        alibi_sum=alibi_sum,
        sinks_sum=sinks_sum,
        **saved,
    )
    call.launch(
        _grad_key_value, GRAD_KEY_VALUE, lambda config: B * key.shape[1] * call.tiles(config)[1], **saved
    )
    grad_mask, grad_alibi, grad_sinks = query.new_empty(0), query.new_empty(0), query.new_empty(0)
    if mask_grad:
        grad_mask = _sum_mask_grad(call, attn_mask, saved)
    if alibi_grad:
        grad_alibi = alibi_sum.sum(-1 if alibi_slopes.dim() > 1 else (0, 2)).to(alibi_slopes.dtype)
    if sinks_grad:
        grad_sinks = sinks_sum.sum((0, 2)).to(sinks.dtype)
    return *grads, grad_mask, grad_alibi, grad_sinks


def _sum_mask_grad(call: _Call, attn_mask: Tensor, saved: dict[str, Tensor]) -> Tensor:
    config = choose_config(GRAD_QUERY[architecture(call.device)], call.dtype, call.width)
    whole = (call.B, call.H, *call.tiles(config))
    # A dimension of size 1 is one tile, added up over everything; where there is one of everything, too.
    split = [n != 1 for n in call.mask_shape]
    sizes = tuple(n if own else 1 for n, own in zip(whole, split, strict=True))
    shared = tuple(1 if own else n for n, own in zip(whole, split, strict=True))
    tiles, items = math.prod(sizes), math.prod(shared)
    if items >= 2**31:
        raise NotImplementedError(
            f"the gradient of attn_mask adds up {items} tiles, at most 2**31 are supported"
        )
    chunks = min(max(CHUNKS // max(tiles, 1), 1), max(items, 1))
    partial = call.empty(chunks, *call.mask_shape)
    call.launch(
        _grad_mask, GRAD_QUERY, lambda config: tiles * chunks, grad_mask=partial,
        grad_mask_stride=partial.stride(), sizes=sizes, shared=shared, chunks=chunks,
        per_chunk=-(-items // chunks), ROWS_SHARED=not split[2],
        KEYS_SHARED=not split[3], **saved,
    )  # fmt: skip
    total = partial.sum(0) if chunks > 1 else partial[0]
    return total.to(attn_mask.dtype).reshape(attn_mask.shape)


def attention_weights(
    query: Tensor, key: Tensor, lse: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None,
    alibi_slopes: Tensor | None, dropout_seed: Tensor | None, *args,
) -> Tensor:  # fmt: skip
    *options, average_heads = args
    call = _Call(query, key, None, attn_mask, key_padding_mask, alibi_slopes, None, dropout_seed, *options)
    level, log_sum = call.level(lse)
    shape = (call.B, call.L, call.S) if average_heads else (call.B, call.H, call.L, call.S)
    weights = query.new_empty(shape)
    call.launch(
        _all_weights, FORWARD, lambda config: math.prod((*shape[:-2], *call.tiles(config))), weights=weights,
        lse=level, log_sum=log_sum, AVERAGE=average_heads,
    )  # fmt: skip
    return weights
