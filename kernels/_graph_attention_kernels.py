"""The kernels of attention on graphs, launched by graph_attention.py.

The forward is an online softmax over the edges of each target and head. The backward computes everything of
an edge again, from the largest score and the reciprocal of the sum that the forward kept: by source for what
the sources get, where it leaves the gradient of each edge's score, and by target for the sums of those. Both
walk over the edges of a tile of rows and heads, and compute scores in the same way seen from either end.

Milakov and Gimelshein, arXiv:1805.02867; recomputation on graphs: Zhang et al., arXiv:2110.09524.
"""

import triton
import triton.language as tl
from fastattn.kernels._common import LOG2E, device, dropout_keep, dropout_words, seed_word
from fastattn.kernels._edges import (
    SIZES,
    edges_and_heads,
    edges_of,
    feature_tile,
    next_edges,
    pairs_of,
    parts_of,
)

__all__ = [
    "attention_kernel", "delta_kernel", "forward_kernel", "grad_gatv2_targets_kernel", "grad_sources_kernel",
    "join_kernel", "softmax_grad_kernel",
]  # fmt: skip

NO_SPECIAL = [*SIZES, "threshold"]


@device
def _exp(x):
    return tl.exp2(x * LOG2E)


@device
def _leaky_relu(x, slope):
    return tl.where(x > 0, x, x * slope)


@device
def _own_tile(own, own_row, channel, present, D: tl.constexpr, like: tl.constexpr):
    return feature_tile(own, own_row, channel[None, :], present, D, like)[:, None, :]


@device
def _att_tile(att, h, channel, D: tl.constexpr, like: tl.constexpr):
    at = att + h[:, None] * D + channel[None, :]
    return tl.load(at, mask=(channel < D)[None, :], other=0.0).to(like)[:, None, :]


@device
def _edge_sum(
    own_tile, other, other_row, edge, edge_row, channel, there, D: tl.constexpr, like: tl.constexpr
):
    """What LeakyReLU is applied to in GATv2, of a tile of channels."""
    total = own_tile + feature_tile(other, other_row, channel[None, None, :], there, D, like)
    if edge is not None:
        total += feature_tile(edge, edge_row, channel[None, None, :], there, D, like)
    return total


@device
def _product(
    own_tile, att_tile, other, other_row, edge, edge_row, channel, there, slope, D: tl.constexpr,
    like: tl.constexpr,
):  # fmt: skip
    """A tile of channels of a score: the product of both ends, or of att with what both add up to."""
    if att_tile is None:
        return tl.sum(own_tile * feature_tile(other, other_row, channel[None, None, :], there, D, like), 2)
    else:
        total = _edge_sum(own_tile, other, other_row, edge, edge_row, channel, there, D, like)
        return tl.sum(att_tile * _leaky_relu(total, slope), 2)


@device
def _rows_of_edges(node, number, h, stride, edge, edge_stride):
    """Where the features of the other ends are, and those of the edges."""
    edge_row = node
    if edge is not None:
        edge_row = number * edge_stride[0] + h[:, None] * edge_stride[1]
    return node * stride[0] + h[:, None] * stride[1], edge_row


@device
def _scores(
    SCORE: tl.constexpr, own, own_row, own_tile, own_alpha, other, other_stride, other_alpha, term, edge,
    edge_stride, att, att_tile, h, H, node, number, there, present, scale, slope, D: tl.constexpr,
    CHANNELS: tl.constexpr, like: tl.constexpr,
):  # fmt: skip
    """Scores of a tile of edges, which of them are visible, and d score / d (sum of its terms).

    ``own`` is the end that the edges are grouped by; the formulas are the same seen from either. Its first
    tile of channels, and that of att, are at hand, and so is its alpha.
    """
    visible = there
    if SCORE == "additive":
        score = tl.zeros(node.shape, like)
        if own_alpha is not None:
            visible = visible & (own_alpha != -float("inf"))[:, None]
            score += own_alpha[:, None]
        if other_alpha is not None:
            alpha = tl.load(other_alpha + node * H + h[:, None], mask=there, other=0.0)
            visible = visible & (alpha != -float("inf"))
            score += alpha
    else:
        other_row, edge_row = _rows_of_edges(node, number, h, other_stride, edge, edge_stride)
        channel = tl.arange(0, CHANNELS)
        score = _product(
            own_tile, att_tile, other, other_row, edge, edge_row, channel, there, slope, D, like
        )  # fmt: skip
        if D > CHANNELS:
            for first in range(CHANNELS, D, CHANNELS):
                channel = first + tl.arange(0, CHANNELS)
                next_att = None
                if SCORE == "gatv2":
                    next_att = _att_tile(att, h, channel, D, like)
                score += _product(
                    _own_tile(own, own_row, channel, present, D, like), next_att, other, other_row, edge,
                    edge_row, channel, there, slope, D, like,
                )  # fmt: skip
        if SCORE == "dot":
            score *= scale
    if term is not None:
        added = tl.load(term + number * H + h[:, None], mask=there, other=0.0)
        visible = visible & (added != -float("inf"))
        score += added
    bend = tl.full(node.shape, 1.0, like)
    if SCORE == "additive":
        visible = visible & (score != -float("inf"))
        bend = tl.where(score > 0, bend, slope)
        score = _leaky_relu(score, slope)
    visible = visible & (score != -float("inf"))
    return tl.where(visible, score, -float("inf")), visible, bend


@device
def _dropped(weight, word1, word2, number, threshold, keep_scale):
    return tl.where(dropout_keep(word1, word2, number, threshold), weight * keep_scale, 0.0)


@device
def _store_out(top, total, result, out, stats, row, h, H, channel, is_first, wanted, C: tl.constexpr):
    top = tl.where(top == -float("inf"), 0.0, top)
    inverse = tl.where(total == 0, 0.0, 1 / tl.where(total == 0, 1.0, total))
    at = stats + row * 2 * H + h
    tl.store(at, top, mask=wanted & is_first)
    tl.store(at + H, inverse, mask=wanted & is_first)
    if C > 0:
        at = out + ((row * H + h) * C)[:, None] + channel[None, :]
        result = (result * inverse[:, None]).to(out.dtype.element_ty)
        tl.store(at, result, mask=wanted[:, None] & (channel < C)[None, :])


@triton.jit(do_not_specialize=NO_SPECIAL)
def forward_kernel(
    own, own_stride, own_alpha, other, other_stride, other_alpha, value, value_stride, term, edge,
    edge_stride, att, rowptr, col, perm, seed, out, stats, scores, part_stats, part_out, N, E, items, search,
    threshold, scale: tl.float64, slope: tl.float64, keep_scale: tl.float64, H, SCORE: tl.constexpr,
    STEP: tl.constexpr, D: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, EDGES: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """out and stats of each target and head; for a cut its largest score, sum and weighted sum."""
    CUT: tl.constexpr = part_stats is not None
    WIDE: tl.constexpr = stats.dtype.element_ty
    item, h, other_tile = pairs_of(items, H, ROWS)
    is_first = h * 0 + other_tile == 0  # a vector: the interpreter combines no mask with a scalar
    channel = other_tile * CHANNELS + tl.arange(0, CHANNELS)
    row, begin, end, wanted = edges_of(rowptr, item, items, N, E, search, STEP, CUT)
    scale, slope = tl.full([], scale, WIDE), tl.full([], slope, WIDE)
    present = begin < end
    own_row = row * own_stride[0] + h * own_stride[1] if own is not None else row
    own_tile = _own_tile(own, own_row, tl.arange(0, CHANNELS), present, D, WIDE) if own is not None else None
    att_tile = _att_tile(att, h, tl.arange(0, CHANNELS), D, WIDE) if att is not None else None
    alpha = tl.load(own_alpha + row * H + h, mask=present, other=0.0) if own_alpha is not None else None
    if seed is not None:
        word1, word2 = dropout_words(seed_word(seed), h + 1)
    top = tl.full([ROWS], -float("inf"), WIDE)
    total = tl.zeros([ROWS, EDGES], WIDE)
    if C > 0:
        result = tl.zeros([ROWS, EDGES, CHANNELS], WIDE)
    for start in range(0, tl.max(end - begin, 0), EDGES):
        _, there, node, number = next_edges(col, perm, begin, end, start, EDGES)
        score, visible, _ = _scores(
            SCORE, own, own_row, own_tile, alpha, other, other_stride, other_alpha, term, edge, edge_stride,
            att, att_tile, h, H, node, number, there, present, scale, slope, D, CHANNELS, WIDE,
        )  # fmt: skip
        if scores is not None:
            tl.store(scores + number * H + h[:, None], score, mask=there & is_first[:, None])
        above = tl.maximum(top, tl.max(tl.where(score == score, score, -float("inf")), 1))
        base = tl.where(above == -float("inf"), 0.0, above)
        rescale = _exp(top - base)
        weight = _exp(score - base[:, None])
        total = total * rescale[:, None] + weight
        top = above
        if C > 0:
            kept = weight
            if seed is not None:
                kept = _dropped(
                    weight, word1[:, None], word2[:, None], number, threshold, tl.full([], keep_scale, WIDE)
                )
            offset = node * value_stride[0] + h[:, None] * value_stride[1]
            values = feature_tile(value, offset, channel[None, None, :], there, C, WIDE)
            values = tl.where(visible[:, :, None], values, 0.0)
            result = result * rescale[:, None, None] + kept[:, :, None] * values
    total_sum = tl.sum(total, 1)
    if C > 0:
        result_sum = tl.sum(result, 1)
    else:
        result_sum = total_sum
    if CUT:
        at = part_stats + item * 2 * H + h
        tl.store(at, top, mask=wanted & is_first)
        tl.store(at + H, total_sum, mask=wanted & is_first)
        if C > 0:
            at = part_out + ((item * H + h) * C)[:, None] + channel[None, :]
            tl.store(at, result_sum, mask=wanted[:, None] & (channel < C)[None, :])
    else:
        _store_out(top, total_sum, result_sum, out, stats, row, h, H, channel, is_first, wanted, C)


@triton.jit(do_not_specialize=NO_SPECIAL)
def join_kernel(
    rowptr, out, stats, part_stats, part_out, N, E, items, search, H, STEP: tl.constexpr, C: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """out and stats of the targets whose rows are divided."""
    WIDE: tl.constexpr = stats.dtype.element_ty
    item, h, other_tile = pairs_of(items, H, ROWS)
    channel = other_tile * CHANNELS + tl.arange(0, CHANNELS)
    row, count, wanted = parts_of(rowptr, item, items, N, E, search, STEP)
    top = tl.full([ROWS], -float("inf"), WIDE)
    total = tl.zeros([ROWS], WIDE)
    result = tl.zeros([ROWS, CHANNELS], WIDE)
    for n in range(tl.max(count, 0)):
        there = n < count
        at = part_stats + (item + n) * 2 * H + h
        next_top = tl.load(at, mask=there, other=-float("inf"))
        above = tl.maximum(top, next_top)
        base = tl.where(above == -float("inf"), 0.0, above)
        factor, next_factor = _exp(top - base), _exp(next_top - base)
        total = total * factor + tl.load(at + H, mask=there, other=0.0) * next_factor
        top = above
        if C > 0:
            part = feature_tile(part_out, ((item + n) * H + h) * C, channel[None, :], there, C, WIDE)
            result = result * factor[:, None] + part * next_factor[:, None]
    _store_out(top, total, result, out, stats, row, h, H, channel, h * 0 + other_tile == 0, wanted, C)


@triton.jit(do_not_specialize=NO_SPECIAL)
def attention_kernel(
    scores, stats, attention, rowptr, perm, seed, N, E, search, threshold, keep_scale: tl.float64, H,
    EDGES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The weights of edges from their scores, after dropout. A tile is of edges and heads."""
    WIDE: tl.constexpr = stats.dtype.element_ty
    row, number, h, mask = edges_and_heads(rowptr, perm, N, E, search, H, EDGES, CHANNELS)
    score = tl.load(scores + number * H + h, mask=mask, other=0.0)
    top = tl.load(stats + row * 2 * H + h, mask=mask, other=0.0)
    inverse = tl.load(stats + row * 2 * H + H + h, mask=mask, other=0.0)
    weight = _exp(score - top) * inverse
    if seed is not None:
        word1, word2 = dropout_words(seed_word(seed), h + 1)
        weight = _dropped(weight, word1, word2, number, threshold, tl.full([], keep_scale, WIDE))
    weight = tl.where(score == -float("inf"), 0.0, weight)
    tl.store(attention + number * H + h, weight.to(attention.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def softmax_grad_kernel(
    grad, score, attention, delta, grad_score, rowptr, perm, N, E, search, H, EDGES: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """grad_score = attention (grad - delta), delta (N, H); a tile is of edges and heads."""
    WIDE: tl.constexpr = delta.dtype.element_ty
    row, number, h, mask = edges_and_heads(rowptr, perm, N, E, search, H, EDGES, CHANNELS)
    at = number * H + h
    incoming = tl.load(grad + at, mask=mask, other=0.0).to(WIDE)
    weight = tl.load(attention + at, mask=mask, other=0.0).to(WIDE)
    change = weight * (incoming - tl.load(delta + row * H + h, mask=mask, other=0.0))
    change = tl.where(weight == 1, incoming * 0, change)
    hidden = tl.load(score + at, mask=mask, other=0.0).to(WIDE) == -float("inf")
    change = tl.where(hidden, 0.0, change)
    tl.store(grad_score + at, change.to(grad_score.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def delta_kernel(
    out, grad_out, grad_out_stride, delta, N, H, C: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    """delta (N, H) += <grad_out, out>."""
    pair = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, h = pair // H, pair % H
    there = row < N
    total = tl.load(delta + pair, mask=there, other=0.0)
    products = tl.zeros([ROWS, CHANNELS], total.dtype)
    for first in range(0, C, CHANNELS):
        channel = first + tl.arange(0, CHANNELS)[None, :]
        offset = row * grad_out_stride[0] + h * grad_out_stride[1]
        product = feature_tile(grad_out, offset, channel, there, C, total.dtype)
        products += product * feature_tile(out, pair * C, channel, there, C, total.dtype)
    tl.store(delta + pair, total + tl.sum(products, 1), mask=there)


@triton.jit(do_not_specialize=NO_SPECIAL)
def grad_sources_kernel(
    own, own_stride, own_alpha, other, other_stride, other_alpha, value, value_stride, term, edge,
    edge_stride, att, rowptr, col, perm, seed, stats, delta, grad_out, grad_out_stride, grad_attention,
    grad_score, grad_edge, grad_alpha, grad_key, grad_value, part_alpha, part_key, part_value, N, E, items,
    search, threshold, scale: tl.float64, slope: tl.float64, keep_scale: tl.float64, H, SCORE: tl.constexpr,
    STEP: tl.constexpr, D: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, EDGES: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """The gradients of a source and head, and of the scores of its edges.

    With a the weights before dropout, grad_score = a (keep (<grad_out, value> + grad_attention) - delta).
    """
    CUT: tl.constexpr = part_value is not None
    WIDE: tl.constexpr = stats.dtype.element_ty
    item, h, other_tile = pairs_of(items, H, ROWS)
    is_first = h * 0 + other_tile == 0
    if C <= CHANNELS and D <= CHANNELS:
        # The tile of the scores: what is read for them need not be read again.
        channel = tl.arange(0, CHANNELS)
    else:
        channel = other_tile * CHANNELS + tl.arange(0, CHANNELS)
    row, begin, end, wanted = edges_of(rowptr, item, items, N, E, search, STEP, CUT)
    scale, slope = tl.full([], scale, WIDE), tl.full([], slope, WIDE)
    present = begin < end
    own_row = row * own_stride[0] + h * own_stride[1] if own is not None else row
    own_tile = _own_tile(own, own_row, tl.arange(0, CHANNELS), present, D, WIDE) if own is not None else None
    att_tile = _att_tile(att, h, tl.arange(0, CHANNELS), D, WIDE) if att is not None else None
    alpha = tl.load(own_alpha + row * H + h, mask=present, other=0.0) if own_alpha is not None else None
    if seed is not None:
        word1, word2 = dropout_words(seed_word(seed), h + 1)
    of_alpha = tl.zeros([ROWS, EDGES], WIDE)
    of_value = tl.zeros([ROWS, EDGES, CHANNELS], WIDE)
    if SCORE == "dot":
        of_key = tl.zeros([ROWS, EDGES, CHANNELS], WIDE)
    # The tiles of this program: those of the scores, where there is one.
    own_part = own_tile
    att_part = att_tile
    if SCORE == "gatv2" and D > CHANNELS:
        own_part = _own_tile(own, own_row, channel, present, D, WIDE)
        att_part = _att_tile(att, h, channel, D, WIDE)
    value_row = row * value_stride[0] + h * value_stride[1]
    if C > 0:
        value_tile = _own_tile(value, value_row, tl.arange(0, CHANNELS), present, C, WIDE)
    for start in range(0, tl.max(end - begin, 0), EDGES):
        _, there, node, number = next_edges(col, perm, begin, end, start, EDGES)
        score, visible, bend = _scores(
            SCORE, own, own_row, own_tile, alpha, other, other_stride, other_alpha, term, edge, edge_stride,
            att, att_tile, h, H, node, number, there, present, scale, slope, D, CHANNELS, WIDE,
        )  # fmt: skip
        at = stats + node * 2 * H + h[:, None]
        weight = _exp(score - tl.load(at, mask=there, other=0.0)) * tl.load(at + H, mask=there, other=0.0)

        grad_row = node * grad_out_stride[0] + h[:, None] * grad_out_stride[1]
        grad = tl.zeros([ROWS, EDGES], WIDE)
        if C > 0:
            first_channel = tl.arange(0, CHANNELS)
            grad = _product(
                value_tile, None, grad_out, grad_row, None, None, first_channel, there, slope, C, WIDE
            )  # fmt: skip
        if C > CHANNELS:
            for first in range(CHANNELS, C, CHANNELS):
                next_channel = first + tl.arange(0, CHANNELS)
                grad += _product(
                    _own_tile(value, value_row, next_channel, present, C, WIDE), None, grad_out, grad_row,
                    None, None, next_channel, there, slope, C, WIDE,
                )  # fmt: skip
        if grad_attention is not None:
            grad += tl.load(grad_attention + number * H + h[:, None], mask=there, other=0.0).to(WIDE)
        kept = weight
        if seed is not None:
            keep_scale_ = tl.full([], keep_scale, WIDE)
            kept = _dropped(weight, word1[:, None], word2[:, None], number, threshold, keep_scale_)
            grad = _dropped(grad, word1[:, None], word2[:, None], number, threshold, keep_scale_)
        lead = grad - tl.load(delta + node * H + h[:, None], mask=there, other=0.0)
        # The weight of a row's only edge is 1 whatever its score; grad and delta then differ by rounding.
        lead = tl.where(weight == 1, grad * 0, lead)
        grad = weight * lead * bend
        grad = tl.where(visible, grad, 0.0)
        tl.store(grad_score + number * H + h[:, None], grad, mask=there & is_first[:, None])
        of_alpha += grad

        seen = visible[:, :, None]
        if C > 0:
            rows = feature_tile(grad_out, grad_row, channel[None, None, :], there, C, WIDE)
            of_value += tl.where(seen, kept[:, :, None] * rows, 0.0)
        if SCORE == "dot":
            other_row = node * other_stride[0] + h[:, None] * other_stride[1]
            rows = feature_tile(other, other_row, channel[None, None, :], there, D, WIDE)
            of_key += tl.where(seen, grad[:, :, None] * rows, 0.0)
        if SCORE == "gatv2":
            other_row, edge_row = _rows_of_edges(node, number, h, other_stride, edge, edge_stride)
            sums = _edge_sum(own_part, other, other_row, edge, edge_row, channel, there, D, WIDE)
            through = grad[:, :, None] * att_part * tl.where(sums > 0, 1.0, slope)
            through = tl.where(seen, through, 0.0)
            of_value += through
            if grad_edge is not None:
                at = grad_edge + ((number * H + h[:, None]) * D)[:, :, None] + channel[None, None, :]
                mask = there[:, :, None] & (channel < D)[None, None, :]
                tl.store(at, through.to(grad_edge.dtype.element_ty), mask=mask)

    alpha_sum, value_sum = tl.sum(of_alpha, 1), tl.sum(of_value, 1)
    value_mask = wanted[:, None] & (channel < C)[None, :]
    if CUT:
        if part_alpha is not None:
            tl.store(part_alpha + item * H + h, alpha_sum, mask=wanted & is_first)
        tl.store(part_value + ((item * H + h) * C)[:, None] + channel[None, :], value_sum, mask=value_mask)
    else:
        if grad_alpha is not None:
            tl.store(grad_alpha + row * H + h, alpha_sum, mask=wanted & is_first)
        at = grad_value + ((row * H + h) * C)[:, None] + channel[None, :]
        tl.store(at, value_sum.to(grad_value.dtype.element_ty), mask=value_mask)
    if SCORE == "dot":
        key_sum = tl.sum(of_key, 1)
        key_mask = wanted[:, None] & (channel < D)[None, :]
        if CUT:
            tl.store(part_key + ((item * H + h) * D)[:, None] + channel[None, :], key_sum, mask=key_mask)
        else:
            at = grad_key + ((row * H + h) * D)[:, None] + channel[None, :]
            tl.store(at, (key_sum * scale).to(grad_key.dtype.element_ty), mask=key_mask)


@triton.jit(do_not_specialize=SIZES)
def grad_gatv2_targets_kernel(
    own, own_stride, other, other_stride, edge, edge_stride, att, rowptr, col, perm, grad_score, grad_query,
    grad_att, part_query, part_att, N, E, items, search, slope: tl.float64, H, STEP: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, EDGES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The gradient of a target's features, and its share of that of att, of one head."""
    CUT: tl.constexpr = part_query is not None
    WIDE: tl.constexpr = grad_score.dtype.element_ty
    item, h, other_tile = pairs_of(items, H, ROWS)
    channel = other_tile * CHANNELS + tl.arange(0, CHANNELS)
    row, begin, end, wanted = edges_of(rowptr, item, items, N, E, search, STEP, CUT)
    slope = tl.full([], slope, WIDE)
    own_row = row * own_stride[0] + h * own_stride[1]
    own_tile = _own_tile(own, own_row, channel, begin < end, D, WIDE)
    att_tile = _att_tile(att, h, channel, D, WIDE)
    of_query = tl.zeros([ROWS, EDGES, CHANNELS], WIDE)
    of_att = tl.zeros([ROWS, EDGES, CHANNELS], WIDE)
    for start in range(0, tl.max(end - begin, 0), EDGES):
        _, there, node, number = next_edges(col, perm, begin, end, start, EDGES)
        other_row, edge_row = _rows_of_edges(node, number, h, other_stride, edge, edge_stride)
        sums = _edge_sum(own_tile, other, other_row, edge, edge_row, channel, there, D, WIDE)
        grad = tl.load(grad_score + number * H + h[:, None], mask=there, other=0.0)[:, :, None]
        # What a hidden edge would add is not even 0 times something.
        of_query += tl.where(grad == 0, 0.0, grad * att_tile * tl.where(sums > 0, 1.0, slope))
        of_att += tl.where(grad == 0, 0.0, grad * _leaky_relu(sums, slope))
    query_sum, att_sum = tl.sum(of_query, 1), tl.sum(of_att, 1)
    mask = wanted[:, None] & (channel < D)[None, :]
    if CUT:
        at = ((item * H + h) * D)[:, None] + channel[None, :]
        tl.store(part_query + at, query_sum, mask=mask)
        tl.store(part_att + at, att_sum, mask=mask)
    else:
        at = ((row * H + h) * D)[:, None] + channel[None, :]
        tl.store(grad_query + at, query_sum.to(grad_query.dtype.element_ty), mask=mask)
        tl.store(grad_att + at, att_sum, mask=mask)
