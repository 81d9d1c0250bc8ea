"""What the kernels of softmax attention share: which keys a tile of queries sees, its scores and weights.

Scores are in units of log2 throughout: the scale carries log2(e), and weights are exp2.
"""

import triton.language as tl
from fastattn.kernels._common import LOG2E, device, to_log2

__all__ = [
    "block_at", "blocks_of", "clip", "finish_rows", "first_tile", "load_level", "load_numbers", "number_rows",
    "offsets", "query_tile", "rows_see", "scores_of", "seeing_rows", "seen_keys", "shown_keys", "slope_of",
    "softmax_step", "tile_of", "weights_of",
]  # fmt: skip


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
def first_tile(bounds, n, BLOCK: tl.constexpr):
    """Where in a row of tiles that hold packed sequences those of sequence n begin.

    This leaves room for the partial tile at each one's end, and for the tokens in front of the first and
    behind the last: there are total // BLOCK + N + 2 places, and a program needs to know nothing but the
    bounds to find its own.
    """
    return (tl.load(bounds + n) // BLOCK).to(tl.int32) + n + 1


@device
def _packed_tile(place, bounds, other_bounds, N, total, other_total, BLOCK: tl.constexpr):
    """The sequence of a place, the number of its tile, and where on either side the sequence lies.

    A place behind the last tile has a sequence of no tokens. Those in front of the first sequence and behind
    the last see nothing. Whatever the bounds, nothing outside of the tensors is read or written.
    """
    n, after = place * 0 - 1, place * 0 + N + 1
    while after - n > 1:
        middle = (n + after) // 2
        if first_tile(bounds, middle, BLOCK) <= place:
            n = middle
        else:
            after = middle
    own = (n >= 0) & (n < N)
    low, high = tl.maximum(n, 0), tl.minimum(n + 1, N)
    tile = place - tl.where(n < 0, 0, first_tile(bounds, low, BLOCK))
    begin = tl.where(n < 0, 0, clip(tl.load(bounds + low).to(tl.int64), total))
    end = tl.where(n < N, clip(tl.load(bounds + high).to(tl.int64), total), total)
    other = clip(tl.load(other_bounds + low).to(tl.int64), other_total)
    other_end = clip(tl.load(other_bounds + high).to(tl.int64), other_total)
    length = tl.maximum(end - begin, 0).to(tl.int32)
    there = (tile >= 0) & (tile * BLOCK < length)
    length = tl.where(there, length, 0)
    other_length = tl.where(there & own, tl.maximum(other_end - other, 0).to(tl.int32), 0)
    return tl.minimum(low, N - 1), tl.where(there, tile, 0), begin, other, length, other_length


@device
def tile_of(
    bounds, other_bounds, N, heads, length, other_length, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr
):
    """The tile of a program, one of a head's queries or keys: sequence, batch entry (0 where sequences are
    packed), head, first row in the tile, where the sequence begins in the tensors of its own side and of the
    other, and its lengths there."""
    program = tl.program_id(0)
    if bounds is None:
        tiles = (length + BLOCK - 1) // BLOCK
        tile = program % tiles
        head = (program // tiles).to(tl.int64)
        n, h = head // heads, head % heads
        b, begin, other = n, 0, 0
    else:
        places = length // BLOCK + N + 2
        n, tile, begin, other, length, other_length = _packed_tile(
            program % places, bounds, other_bounds, N, length, other_length, BLOCK
        )
        n, h = n.to(tl.int64), (program // places).to(tl.int64)
        b = n * 0
        tiles = (length + BLOCK - 1) // BLOCK
    if LAST_FIRST:
        tile = tl.maximum(tiles - 1 - tile, 0)
    return n, b, h, tile * BLOCK, begin, other, length, other_length


@device
def number_rows(bounds, b, h, H, L, begin):
    """The number of a head's first row, counted as in lse; ``L`` is the length of the whole tensor."""
    if bounds is None:
        return (b * H + h) * L
    else:
        return h * L + begin


@device
def clip(x, end):
    return tl.minimum(tl.maximum(x, 0), end)


@device
def seen_keys(first, last, S, offset, left, right):
    """Keys [begin, end) that some row of first..last may see, and [inner, outer) that all of them do."""
    begin, inner, outer, end = S * 0, S * 0, S, S
    if left is not None:
        begin = clip(first + offset - left, S)
        inner = clip(last + offset - left, S)
    if right is not None:
        outer = clip(first + offset + right + 1, S)
        end = clip(last + offset + right + 1, S)
    return begin, inner, outer, end


@device
def query_tile(bounds_q, bounds_k, N, H, total_rows, S, lower_right, left, right, BLOCK: tl.constexpr):
    """The tile of queries of a program: as ``tile_of``, with the number of its head's first row, the offset
    of the diagonal, and which keys its rows see. The last rows come first: under a causal mask they are the
    longest."""
    n, b, h, row, first_q, first_k, L, S = tile_of(bounds_q, bounds_k, N, H, total_rows, S, BLOCK, True)
    first_row = number_rows(bounds_q, b, h, H, total_rows, first_q)
    offset = lower_right * (S - L)
    begin, inner, outer, end = seen_keys(row, tl.minimum(row + BLOCK, L) - 1, S, offset, left, right)
    return n, b, h, row, first_q, first_k, first_row, L, S, offset, begin, inner, outer, end


@device
def offsets(BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """0, 1, ... within a tile, of 64 bits where strides are so large that these need them."""
    return tl.arange(0, BLOCK).to(tl.int64 if WIDE else tl.int32)


@device
def slope_of(alibi, alibi_stride, n, h):
    return tl.load(alibi + n * alibi_stride[0] + h * alibi_stride[1])


@device
def seeing_rows(first, last, L, offset, left, right):
    """Rows [begin, end) that may see some key of first..last, and [inner, outer) that see all of them."""
    begin, inner, outer, end = L * 0, L * 0, L, L
    if right is not None:
        begin = clip(first - offset - right, L)
        inner = clip(last - offset - right, L)
    if left is not None:
        outer = clip(first - offset + left + 1, L)
        end = clip(last - offset + left + 1, L)
    return begin, inner, outer, end


@device
def blocks_of(part: tl.constexpr, begin, inner, outer, end, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Blocks of both edges (part 0), or of the inside that needs no check (part 1): where they begin, how
    many they are, how many come before a gap, and its width. Under WHOLE everything is an edge."""
    first, inner, outer = begin // BLOCK * BLOCK, (inner + BLOCK - 1) // BLOCK * BLOCK, outer // BLOCK * BLOCK
    if part == 1:
        count = tl.maximum(outer - inner, 0) // BLOCK
        return inner, count, count, 0
    elif WHOLE:
        count = tl.maximum(end - first + BLOCK - 1, 0) // BLOCK
        return first, count, count, 0
    else:
        left = tl.maximum(tl.minimum(inner, end) - first + BLOCK - 1, 0) // BLOCK
        after = tl.maximum(inner, outer)
        right = tl.maximum(end - after + BLOCK - 1, 0) // BLOCK
        return first, left + right, left, after - (first + left * BLOCK)


@device
def block_at(block, first, before, gap, BLOCK: tl.constexpr):
    """Where a block of ``blocks_of`` begins."""
    return first + block * BLOCK + tl.where(block < before, 0, gap)


@device
def rows_see(i, S, offset, left, right):
    """Whether the window leaves a row any key."""
    begin, inner, outer, end = seen_keys(i, i, S, offset, left, right)
    return begin + 0 * i < end


@device
def scores_of(
    dots, b, h, r, c, row, column, L, S, offset, left, right, mask, mask_stride, shown, slope, scale, softcap,
    SOFTCAP: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Scores in units of log2, which of them are visible, and d(capped score) / d(scaled score); what is not
    visible may have any score.

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
        at = at + (r * mask_stride[2] + c * mask_stride[3])
        if mask.dtype.element_ty.is_int():
            visible = visible & (tl.load(at, mask=visible, other=0) != 0)
        else:
            bias = tl.load(at, mask=visible, other=-float("inf")).to(ACCURATE)
            visible = visible & (bias != -float("inf"))
            score += to_log2(bias)
    if SOFTCAP and (CHECK or shown is not None or mask is not None):
        bend = tl.where(visible, bend, 0.0)
    return score, visible, bend


@device
def shown_keys(padding, padding_stride, b, j, present):
    """Of the keys j that are ``present``, those that key_padding_mask shows."""
    if padding is None:
        return present
    else:
        at = padding + b * padding_stride[0] + j.to(tl.int64) * padding_stride[1]
        return tl.load(at, mask=present, other=0) != 0


@device
def weights_of(score, level, logarithm, visible, CHECK: tl.constexpr):
    """exp2(score - level - logarithm), the softmax; ``level`` may be infinite where nothing is visible."""
    weights = tl.exp2(score - level - logarithm)
    if CHECK:
        weights = tl.where(visible, weights, 0.0)
    return weights


@device
def load_level(lse, log_sum, at, shown):
    """What turns the scores of rows into weights, in units of log2; rows that are not ``shown`` weigh 0."""
    level = tl.load(lse + at, mask=shown, other=float("inf"))
    if log_sum is None:
        return to_log2(level), 0.0
    else:
        return level, tl.load(log_sum + at, mask=shown, other=0.0)


@device
def load_numbers(base, first, rows, shown, other, CHECK: tl.constexpr):
    """One number for each row; under CHECK ``other`` where it is not ``shown``."""
    if CHECK:
        return tl.load(base + first + rows, mask=shown, other=other)
    else:
        return tl.load(base + first + rows)


@device
def softmax_step(score, top, total):
    """The online softmax: weights of a block of scores, what older sums are rescaled by, and the new sums."""
    above = tl.maximum(top, tl.max(score, 1))
    shift = tl.where(above == -float("inf"), 0.0, above)
    rescale = tl.exp2(top - shift)
    weights = tl.exp2(score - shift[:, None])
    return weights, rescale, above, total * rescale + tl.sum(weights, 1)


@device
def finish_rows(result, top, total, seen):
    """The softmax of rows and its denominator; rows that have not ``seen`` a key are zero.

    Only masks make a row empty: scores that are all -inf by value are NaN, as in plain PyTorch.
    """
    total = tl.where(seen & (top == -float("inf")), float("nan"), total)
    return tl.where(seen[:, None], result * (1 / total)[:, None], 0.0), total
