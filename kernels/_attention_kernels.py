"""The kernels of softmax attention, launched by attention.py.

A program of the forward holds one tile of queries and walks over the keys that its rows may see: first the
blocks at the edges of the window, where the causal diagonal and the last key are, then those that every row
sees, where nothing has to be checked. Under masks everything is checked, in one loop. The backward is two
kernels that compute the scores again, one with a tile of queries for their gradient and one with a tile of
keys for theirs, so that every gradient has one writer and one order of summation: no atomics, repeatable bit
by bit.

What no row of a tile sees is read as zero, so that a NaN there cannot meet a weight of zero in a product.

Dao, FlashAttention-2, arXiv:2307.08691; the online softmax: Milakov and Gimelshein, arXiv:1805.02867.
"""

import triton
import triton.language as tl
from fastattn.kernels._attention_tiles import (
    block_at,
    blocks_of,
    clip,
    finish_rows,
    first_tile,
    load_level,
    load_numbers,
    number_rows,
    offsets,
    query_tile,
    rows_see,
    scores_of,
    seeing_rows,
    seen_keys,
    shown_keys,
    slope_of,
    softmax_step,
    tile_of,
    weights_of,
)
from fastattn.kernels._common import (
    dropout_keep,
    dropout_words,
    load_rows,
    product,
    seed_word,
    store_rows,
    to_log2,
    to_natural,
)

__all__ = [
    "forward_kernel", "grad_key_value_kernel", "grad_mask_kernel", "grad_query_kernel", "sum_tiles_kernel",
    "weights_kernel",
]  # fmt: skip

# Lengths, and what depends on them, are never specialised: a new length must not mean a new compilation.
LENGTHS = ["N", "H", "group", "L", "S", "lower_right", "left", "right", "threshold"]


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    query, key, value, mask, padding, alibi, sinks, seed, out, lse, log_sum,
    query_stride, key_stride, value_stride, mask_stride, padding_stride, alibi_stride, sinks_stride,
    out_stride,
    bounds_q, bounds_k, N, H, group, L, S, lower_right, left, right, threshold,
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
    HIDING: tl.constexpr = MASKED or PADDED
    n, b, h, row, first_q, first_k, first_row, L, S, offset, begin, inner, outer, end = query_tile(
        bounds_q, bounds_k, N, H, L, S, lower_right, left, right, BLOCK_Q
    )
    i = row + tl.arange(0, BLOCK_Q)
    in_tile = i < L
    r, c = offsets(BLOCK_Q, WIDE), offsets(BLOCK_K, WIDE)
    channels, value_channels = offsets(BLOCK_D, WIDE), offsets(BLOCK_DV, WIDE)
    slope = slope_of(alibi, alibi_stride, n, h) if alibi is not None else None
    if seed is not None:
        word1, word2 = dropout_words(seed_word(seed), first_row + i + 1)

    top = tl.full([BLOCK_Q], -float("inf"), ACCURATE)
    total = tl.full([BLOCK_Q], 0, ACCURATE)
    if sinks is not None:
        sink = to_log2(tl.load(sinks + h * sinks_stride[0]).to(ACCURATE))
        top = tl.full([BLOCK_Q], 0, ACCURATE) + sink
        total = tl.where(top == -float("inf"), total, 1.0)
    seen = tl.full([BLOCK_Q], 0, tl.int32) > 0
    if value is None:
        given = to_log2(tl.load(lse + first_row + i, mask=in_tile, other=0.0))
        # An error of 2^-19 in a float32 weight, of 2^-11 in a half precision one.
        COARSE: tl.constexpr = 2.0**6 if query.dtype.element_ty.primitive_bitwidth >= 32 else 2.0**13
        coarse = (tl.abs(given) > COARSE) & (tl.abs(given) < float("inf"))
        wanted = tl.max(coarse.to(tl.int32), 0)
        begin, inner, outer, end = begin * wanted, inner * wanted, outer * wanted, end * wanted
    else:
        result = tl.full([BLOCK_Q, BLOCK_DV], 0, ACCURATE)

    q = load_rows(query, query_stride, b, h, first_q + row, r, channels, in_tile, D, BLOCK_D, True)
    for part in tl.static_range(1 if HIDING else 2):
        first, count, before, gap = blocks_of(part, begin, inner, outer, end, BLOCK_K, HIDING)
        for block in range(0, count):
            column = block_at(block, first, before, gap, BLOCK_K)
            present = (column + c >= begin) & (column + c < end)
            present = shown_keys(padding, padding_stride, b, column + c, present)
            shown = present[None, :] if PADDED else None
            k = load_rows(key, key_stride, b, h // group, first_k + column, c, channels, present, D,
                BLOCK_D, part == 0,
            )  # fmt: skip
            dots = product(q, tl.trans(k), tl.full([BLOCK_Q, BLOCK_K], 0, ACCURATE), PRECISION, UPCAST)
            score, visible, _ = scores_of(
                dots, b, h, r[:, None], c[None, :], row, column, L, S, offset, left, right, mask,
                mask_stride, shown, slope, scale, softcap, SOFTCAP, part == 0,
            )  # fmt: skip
            if part == 0:
                score = tl.where(visible, score, -float("inf"))
            if HIDING:
                seen = seen | (tl.max(visible.to(tl.int32), 1) > 0)
            weights, rescale, top, total = softmax_step(score, top, total)
            if value is not None:
                v = load_rows(value, value_stride, b, h // group, first_k + column, c, value_channels,
                    present, DV, BLOCK_DV, part == 0,
                )  # fmt: skip
                if MASKED:
                    v = tl.where((tl.max(visible.to(tl.int32), 0) > 0)[:, None], v, 0.0)
                if seed is not None:
                    keep = dropout_keep(word1[:, None], word2[:, None], (column + c)[None, :], threshold)
                    weights = tl.where(keep, weights, 0.0)
                result = product(weights, v, result * rescale[:, None], PRECISION, UPCAST)

    if value is None:
        tl.store(lse + first_row + i, tl.where(coarse, top, given), mask=in_tile)
        tl.store(log_sum + first_row + i, tl.where(coarse, tl.log2(total), 0.0), mask=in_tile)
    else:
        if not HIDING:
            seen = rows_see(i, S, offset, left, right)
        result, total = finish_rows(result * tl.full([], keep_scale, ACCURATE), top, total, seen)
        store_rows(out, out_stride, b, h, first_q + row, r, value_channels, in_tile, DV, result)
        tl.store(lse + first_row + i, to_natural(top, total), mask=in_tile)


@triton.jit(do_not_specialize=LENGTHS)
def grad_query_kernel(
    grad_out, grad_lse, query, key, value, mask, padding, alibi, sinks, seed, out, lse, log_sum,
    grad_query, delta, levels, seen_rows, alibi_sum, sinks_sum,
    grad_out_stride, grad_lse_stride, query_stride, key_stride, value_stride, mask_stride, padding_stride,
    alibi_stride, sinks_stride, out_stride, grad_query_stride,
    bounds_q, bounds_k, N, H, group, L, S, lower_right, left, right, threshold,
    scale: tl.float64, softcap: tl.float64, keep_scale: tl.float64,
    SOFTCAP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head: their gradient; for that of keys and values ``delta``, the ``levels``
    of weights in units of log2, and where there are masks which rows see anything; and what the tile adds to
    the gradients of slopes and sinks.

    With P the weights, dP = dO V^T and delta = rowsum(dO * O) - dlse, the gradient of a score is dS = P *
    (dP - delta).
    """
    ACCURATE: tl.constexpr = tl.float64 if query.dtype.element_ty == tl.float64 else tl.float32
    MASKED: tl.constexpr = mask is not None
    PADDED: tl.constexpr = padding is not None
    HIDING: tl.constexpr = MASKED or PADDED
    n, b, h, row, first_q, first_k, first_row, L, S, offset, begin, inner, outer, end = query_tile(
        bounds_q, bounds_k, N, H, L, S, lower_right, left, right, BLOCK_Q
    )
    i = row + tl.arange(0, BLOCK_Q)
    in_tile = i < L
    r, c = offsets(BLOCK_Q, WIDE), offsets(BLOCK_K, WIDE)
    channels, value_channels = offsets(BLOCK_D, WIDE), offsets(BLOCK_DV, WIDE)
    slope = slope_of(alibi, alibi_stride, n, h) if alibi is not None else None
    if seed is not None:
        word1, word2 = dropout_words(seed_word(seed), first_row + i + 1)

    q = load_rows(query, query_stride, b, h, first_q + row, r, channels, in_tile, D, BLOCK_D, True)
    do = load_rows(
        grad_out, grad_out_stride, b, h, first_q + row, r, value_channels, in_tile, DV, BLOCK_DV, True
    )
    o = load_rows(out, out_stride, b, h, first_q + row, r, value_channels, in_tile, DV, BLOCK_DV, True)
    inside = tl.sum(do.to(ACCURATE) * o.to(ACCURATE), 1)
    outside = tl.full([BLOCK_Q], 0, ACCURATE)
    if grad_lse is not None:
        grad_lse += b * grad_lse_stride[0] + h * grad_lse_stride[1]
        grad_lse += tl.cast(first_q + row, tl.int64) * grad_lse_stride[2]
        outside = tl.load(grad_lse + r * grad_lse_stride[2], mask=in_tile, other=0.0)
    difference = inside - outside
    tl.store(delta + first_row + i, difference, mask=in_tile)
    level, logarithm = load_level(lse, log_sum, first_row + i, in_tile)
    tl.store(levels + first_row + i, level, mask=in_tile)
    logarithm_column = logarithm
    if log_sum is not None:
        logarithm_column = logarithm[:, None]

    seen = tl.full([BLOCK_Q], 0, tl.int32) > 0
    grad = tl.full([BLOCK_Q, BLOCK_D], 0, ACCURATE)
    slopes = tl.full([BLOCK_Q], 0, ACCURATE)
    for part in tl.static_range(1 if HIDING else 2):
        first, count, before, gap = blocks_of(part, begin, inner, outer, end, BLOCK_K, HIDING)
        for block in range(0, count):
            column = block_at(block, first, before, gap, BLOCK_K)
            present = (column + c >= begin) & (column + c < end)
            present = shown_keys(padding, padding_stride, b, column + c, present)
            shown = present[None, :] if PADDED else None
            k = load_rows(key, key_stride, b, h // group, first_k + column, c, channels, present, D,
                BLOCK_D, part == 0,
            )  # fmt: skip
            v = load_rows(value, value_stride, b, h // group, first_k + column, c, value_channels,
                present, DV, BLOCK_DV, part == 0,
            )  # fmt: skip
            dots = product(q, tl.trans(k), tl.full([BLOCK_Q, BLOCK_K], 0, ACCURATE), PRECISION, UPCAST)
            score, visible, bend = scores_of(
                dots, b, h, r[:, None], c[None, :], row, column, L, S, offset, left, right, mask,
                mask_stride, shown, slope, scale, softcap, SOFTCAP, part == 0,
            )  # fmt: skip
            weights = weights_of(score, level[:, None], logarithm_column, visible, part == 0)
            grads = product(do, tl.trans(v), tl.full([BLOCK_Q, BLOCK_K], 0, ACCURATE), PRECISION, UPCAST)
            if seed is not None:
                keep = dropout_keep(word1[:, None], word2[:, None], (column + c)[None, :], threshold)
                grads = tl.where(keep, grads * tl.full([], keep_scale, ACCURATE), 0.0)
            grads = weights * (grads - difference[:, None])
            if part == 0:
                grads = tl.where(visible, grads, 0.0)
            if HIDING:
                seen = seen | (tl.max(visible.to(tl.int32), 1) > 0)
            if MASKED:
                k = tl.where((tl.max(visible.to(tl.int32), 0) > 0)[:, None], k, 0.0)
            if alibi_sum is not None:
                distance = tl.abs(i[:, None] + offset - (column + c)[None, :]).to(ACCURATE)
                slopes -= tl.sum(grads * distance, 1)
            if SOFTCAP:
                grads *= bend
            grad = product(grads, k, grad, PRECISION, UPCAST)

    if not HIDING:
        seen = rows_see(i, S, offset, left, right)
    seen = seen & in_tile
    if seen_rows is not None:
        tl.store(seen_rows + first_row + i, seen.to(seen_rows.dtype.element_ty), mask=in_tile)
    grad = tl.where(seen[:, None], grad * tl.full([], scale, ACCURATE), 0.0)
    store_rows(grad_query, grad_query_stride, b, h, first_q + row, r, channels, in_tile, D, grad)
    if alibi_sum is not None:
        tl.store(alibi_sum + tl.program_id(0), tl.sum(slopes, 0))
    if sinks_sum is not None:
        sink = tl.full([BLOCK_Q], 0, ACCURATE) + to_log2(tl.load(sinks + h * sinks_stride[0]).to(ACCURATE))
        weights = weights_of(sink, level, logarithm, in_tile & (sink != -float("inf")), True)
        taken = tl.where(in_tile, weights * (outside - tl.where(seen, inside, 0.0)), 0.0)
        tl.store(sinks_sum + tl.program_id(0), tl.sum(taken, 0))


@triton.jit(do_not_specialize=LENGTHS)
def grad_key_value_kernel(
    grad_out, query, key, value, mask, padding, alibi, seed, levels, log_sum, delta, seen_rows, grad_key,
    grad_value,
    grad_out_stride, query_stride, key_stride, value_stride, mask_stride, padding_stride, alibi_stride,
    grad_key_stride, grad_value_stride,
    bounds_q, bounds_k, N, H, group, L, S, lower_right, left, right, threshold,
    scale: tl.float64, softcap: tl.float64, keep_scale: tl.float64,
    SOFTCAP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of keys of one key/value head: their gradients, over all query heads that share it."""
    ACCURATE: tl.constexpr = tl.float64 if key.dtype.element_ty == tl.float64 else tl.float32
    PADDED: tl.constexpr = padding is not None
    HIDING: tl.constexpr = mask is not None or padding is not None
    total_rows = L
    n, b, shared, column, first_k, first_q, S, L = tile_of(
        bounds_k, bounds_q, N, H // group, S, L, BLOCK_K, False
    )
    offset = lower_right * (S - L)
    j = column + tl.arange(0, BLOCK_K)
    in_tile = j < S
    r, c = offsets(BLOCK_Q, WIDE), offsets(BLOCK_K, WIDE)
    channels, value_channels = offsets(BLOCK_D, WIDE), offsets(BLOCK_DV, WIDE)

    shown = shown_keys(padding, padding_stride, b, j, in_tile)[:, None] if PADDED else None
    k = load_rows(key, key_stride, b, shared, first_k + column, c, channels, in_tile, D, BLOCK_D, True)
    v = load_rows(
        value, value_stride, b, shared, first_k + column, c, value_channels, in_tile, DV, BLOCK_DV, True
    )
    dk = tl.full([BLOCK_K, BLOCK_D], 0, ACCURATE)
    dv = tl.full([BLOCK_K, BLOCK_DV], 0, ACCURATE)
    begin, inner, outer, end = seeing_rows(
        column, tl.minimum(column + BLOCK_K, S) - 1, L, offset, left, right
    )
    # The compiler moves what does not change out of loops, into registers that the sums need.
    for g in tl.range(0, group, disable_licm=True):
        h = shared * group + g
        first_row = number_rows(bounds_q, b, h, H, total_rows, first_q)
        slope = slope_of(alibi, alibi_stride, n, h) if alibi is not None else None
        for part in tl.static_range(1 if HIDING else 2):
            first, count, before, gap = blocks_of(part, begin, inner, outer, end, BLOCK_Q, HIDING)
            for block in tl.range(0, count, disable_licm=True):
                row = block_at(block, first, before, gap, BLOCK_Q)
                i = row + tl.arange(0, BLOCK_Q)
                present = (i >= begin) & (i < end)
                if HIDING:
                    present = load_numbers(seen_rows, first_row + row, r, present, 0, part == 0) != 0
                q = load_rows(query, query_stride, b, h, first_q + row, r, channels, present, D, BLOCK_D,
                    part == 0,
                )  # fmt: skip
                do = load_rows(grad_out, grad_out_stride, b, h, first_q + row, r, value_channels, present,
                    DV, BLOCK_DV, part == 0,
                )  # fmt: skip
                level = load_numbers(levels, first_row + row, r, present, float("inf"), part == 0)
                difference = load_numbers(delta, first_row + row, r, present, 0.0, part == 0)
                logarithm = 0.0
                if log_sum is not None:
                    logarithm = load_numbers(log_sum, first_row + row, r, present, 0.0, part == 0)[None, :]
                dots = product(k, tl.trans(q), tl.full([BLOCK_K, BLOCK_Q], 0, ACCURATE), PRECISION, UPCAST)
                score, visible, bend = scores_of(
                    dots, b, h, r[None, :], c[:, None], row, column, L, S, offset, left, right,
                    mask, mask_stride, shown, slope, scale, softcap, SOFTCAP, part == 0,
                )  # fmt: skip
                weights = weights_of(score, level[None, :], logarithm, visible, part == 0)
                kept = weights
                if seed is not None:
                    word1, word2 = dropout_words(seed_word(seed), first_row + i + 1)
                    keep = dropout_keep(word1[None, :], word2[None, :], j[:, None], threshold)
                    kept = tl.where(keep, weights, 0.0)
                dv = product(kept, do, dv, PRECISION, UPCAST)
                grads = product(v, tl.trans(do), tl.full([BLOCK_K, BLOCK_Q], 0, ACCURATE), PRECISION, UPCAST)
                if seed is not None:
                    grads = tl.where(keep, grads * tl.full([], keep_scale, ACCURATE), 0.0)
                grads = weights * (grads - difference[None, :])
                if part == 0:
                    grads = tl.where(visible, grads, 0.0)
                if SOFTCAP:
                    grads *= bend
                dk = product(grads, q, dk, PRECISION, UPCAST)

    store_rows(grad_key, grad_key_stride, b, shared, first_k + column, c, channels, in_tile, D,
               dk * tl.full([], scale, ACCURATE))  # fmt: skip
    store_rows(grad_value, grad_value_stride, b, shared, first_k + column, c, value_channels, in_tile, DV,
               dv * tl.full([], keep_scale, ACCURATE))  # fmt: skip


@triton.jit(do_not_specialize=[*LENGTHS, "sizes", "shared", "chunks", "per_chunk"])
def grad_mask_kernel(
    grad_out, query, key, value, mask, padding, alibi, seed, lse, log_sum, delta, grad_mask,
    grad_out_stride, query_stride, key_stride, value_stride, mask_stride, padding_stride, alibi_stride,
    grad_mask_stride, sizes, shared, chunks, per_chunk,
    H, group, L, S, lower_right, left, right, threshold,
    scale: tl.float64, softcap: tl.float64, keep_scale: tl.float64,
    SOFTCAP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    UPCAST: tl.constexpr, ROWS_SHARED: tl.constexpr, KEYS_SHARED: tl.constexpr,
):  # fmt: skip
    """One tile of a mask's gradient, over a chunk of what shares it: ``shared`` batches, heads, tiles of rows
    and of keys are added one after another. The mask itself has ``sizes`` of them."""
    ACCURATE: tl.constexpr = tl.float64 if query.dtype.element_ty == tl.float64 else tl.float32
    offset = lower_right * (S - L)
    chunk = tl.program_id(0) % chunks
    n = tl.program_id(0) // chunks
    n, key_tile = n // sizes[3], n % sizes[3]
    n, row_tile = n // sizes[2], n % sizes[2]
    mask_b, mask_h = n // sizes[1], n % sizes[1]
    r, c = offsets(BLOCK_Q, WIDE), offsets(BLOCK_K, WIDE)
    channels, value_channels = offsets(BLOCK_D, WIDE), offsets(BLOCK_DV, WIDE)

    total = tl.full([BLOCK_Q, BLOCK_K], 0, ACCURATE)
    tiles = tl.cast(shared[2], tl.int64) * shared[3]
    first = tl.cast(chunk, tl.int64) * per_chunk
    for item in range(first, tl.minimum(first + per_chunk, tiles * shared[1] * shared[0])):
        column = (key_tile + (item % shared[3]).to(tl.int32)) * BLOCK_K
        row = (row_tile + (item // shared[3] % shared[2]).to(tl.int32)) * BLOCK_Q
        h, b = mask_h + item // tiles % shared[1], mask_b + item // tiles // shared[1]
        begin, inner, outer, end = seen_keys(row, tl.minimum(row + BLOCK_Q, L) - 1, S, offset, left, right)
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
            shown = shown_keys(padding, padding_stride, b, j, j < S)[None, :] if padding is not None else None
            slope = slope_of(alibi, alibi_stride, b, h) if alibi is not None else None
            dots = product(q, tl.trans(k), tl.full([BLOCK_Q, BLOCK_K], 0, ACCURATE), PRECISION, UPCAST)
            score, visible, _ = scores_of(
                dots, b, h, r[:, None], c[None, :], row, column, L, S, offset, left, right,
                mask, mask_stride, shown, slope, scale, softcap, SOFTCAP,
                True,
            )  # fmt: skip
            first_row = (b * H + h) * L
            level, logarithm = load_level(lse, log_sum, first_row + i, i < L)
            if log_sum is not None:
                logarithm = logarithm[:, None]
            weights = weights_of(score, level[:, None], logarithm, visible, True)
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
def weights_kernel(
    query, key, mask, padding, alibi, seed, lse, log_sum, weights,
    query_stride, key_stride, mask_stride, padding_stride, alibi_stride,
    H, group, L, S, lower_right, left, right, threshold,
    scale: tl.float64, softcap: tl.float64, keep_scale: tl.float64,
    SOFTCAP: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
    AVERAGE: tl.constexpr,
):  # fmt: skip
    """One tile of the weights themselves, of a head or of the mean over heads."""
    ACCURATE: tl.constexpr = tl.float64 if query.dtype.element_ty == tl.float64 else tl.float32
    offset = lower_right * (S - L)
    key_tiles, row_tiles = (S + BLOCK_K - 1) // BLOCK_K, (L + BLOCK_Q - 1) // BLOCK_Q
    column = tl.program_id(0) % key_tiles * BLOCK_K
    n = tl.program_id(0) // key_tiles
    row = n % row_tiles * BLOCK_Q
    n = (n // row_tiles).to(tl.int64)
    if AVERAGE:
        b, first_head, heads = n, n * 0, H
    else:
        b, first_head, heads = n // H, n % H, H // H
    r, c, channels = offsets(BLOCK_Q, WIDE), offsets(BLOCK_K, WIDE), offsets(BLOCK_D, WIDE)
    i, j = row + tl.arange(0, BLOCK_Q), column + tl.arange(0, BLOCK_K)
    shown = shown_keys(padding, padding_stride, b, j, j < S)[None, :] if padding is not None else None
    total = tl.full([BLOCK_Q, BLOCK_K], 0, ACCURATE)
    for x in range(0, heads):
        h = first_head + x
        q = load_rows(query, query_stride, b, h, row, r,
                      channels, i < L, D, BLOCK_D, True)  # fmt: skip
        k = load_rows(key, key_stride, b, h // group, column,
                      c, channels, j < S, D, BLOCK_D, True)  # fmt: skip
        slope = slope_of(alibi, alibi_stride, b, h) if alibi is not None else None
        dots = product(q, tl.trans(k), tl.full([BLOCK_Q, BLOCK_K], 0, ACCURATE), PRECISION, UPCAST)
        score, visible, _ = scores_of(
            dots, b, h, r[:, None], c[None, :], row, column, L, S, offset, left, right, mask, mask_stride,
            shown, slope, scale, softcap, SOFTCAP, True,
        )  # fmt: skip
        first_row = (b * H + h) * L
        level, logarithm = load_level(lse, log_sum, first_row + i, i < L)
        if log_sum is not None:
            logarithm = logarithm[:, None]
        found = weights_of(score, level[:, None], logarithm, visible, True)
        if seed is not None:
            word1, word2 = dropout_words(seed_word(seed), first_row + i + 1)
            keep = dropout_keep(word1[:, None], word2[:, None], j[None, :], threshold)
            found = tl.where(keep, found * tl.full([], keep_scale, ACCURATE), 0.0)
        total += found
    if AVERAGE:
        total = total / H
    at = weights + (n * L + row) * S + column + tl.arange(0, BLOCK_Q)[:, None].to(tl.int64) * S + c[None, :]
    tl.store(at, total.to(weights.dtype.element_ty), mask=(i < L)[:, None] & (j < S)[None, :])


@triton.jit(do_not_specialize=["N", "length"])
def sum_tiles_kernel(partial, total, bounds, N, length, BLOCK: tl.constexpr):
    """(heads, N) sums over the tiles of a sequence, out of (heads, places for tiles)."""
    n, h = tl.program_id(0) % N, (tl.program_id(0) // N).to(tl.int64)
    places = length // BLOCK + N + 2
    tokens = tl.load(bounds + n + 1) - tl.load(bounds + n)
    begin = clip(first_tile(bounds, n, BLOCK), places)
    end = clip(begin + ((tokens + BLOCK - 1) // BLOCK).to(tl.int32), places)
    result = tl.full([], 0, partial.dtype.element_ty)
    for place in range(begin, end):
        result += tl.load(partial + h * places + place)
    tl.store(total + tl.program_id(0), result)
