"""Neighbour aggregation in Triton: the registered ops of fastattn/ops/_aggregation_autograd.py.

Sums and extremes gather the rows of their neighbours into registers and write each result once; the product
of an edge is formed by programs of consecutive edges, which search for the rows that these belong to, so that
no row is too long for it. Nothing is added atomically. What decides the time is the bytes that are gathered,
E x F of them in the worst case: rows are read with 128 bits per lane, several edges at a time.
"""

import torch
import triton
import triton.language as tl
from fastattn.kernels._common import check, device
from fastattn.kernels._edges import (
    SIZES,
    Edges,
    Tile,
    as_rows,
    edges_of,
    feature_tile,
    join_sums,
    next_edges,
    node_and_number,
    pairs_of,
    parts_of,
    row_at,
    tile_of,
    wide_dtype,
)
from torch import Tensor

__all__ = ["aggregate_max", "aggregate_sum", "edge_dot", "sum_over_rows"]


@device
def _message(
    x, x_stride, b, h, channel, node, number, there, weight, weight_stride, col_scale, F: tl.constexpr,
    ZERO_HIDES: tl.constexpr, like: tl.constexpr,
):  # fmt: skip
    """w[e, h] * col_scale[m] * x[b, m, h] of a tile of edges, without the factors that are absent."""
    factor = tl.full(node.shape, 1.0, like)
    if weight is not None:
        at = weight + number * weight_stride[0] + h[:, None] * weight_stride[1]
        factor = tl.load(at, mask=there, other=0.0).to(like)
    if col_scale is not None:
        factor *= tl.load(col_scale + node, mask=there, other=0.0).to(like)
    if x is None:
        return factor[:, :, None]
    else:
        offset = b * x_stride[0] + node * x_stride[1] + h[:, None] * x_stride[2]
        value = feature_tile(x, offset, channel[None, None, :], there, F, like)
        if weight is not None or col_scale is not None:
            value *= factor[:, :, None]
        if ZERO_HIDES:
            value = tl.where((factor == 0)[:, :, None], 0.0, value)
        return value


@triton.jit(do_not_specialize=SIZES)
def _sum(
    x, x_stride, rowptr, col, perm, weight, weight_stride, row_scale, col_scale, arg, arg_stride, out,
    out_stride, parts, N, E, items, search, factor: tl.float64, H, B,
    ARG_OF_ROWS: tl.constexpr, ZERO_HIDES: tl.constexpr, STEP: tl.constexpr, F: tl.constexpr,
    ROWS: tl.constexpr, EDGES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """out[b, n, h] = factor * row_scale[n] * the sum of the messages of row n, or those that arg names."""
    CUT: tl.constexpr = parts is not None
    WIDE: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    item, h, other = pairs_of(items, H, ROWS)
    # Tiles of channels come one after the other, so that what is gathered at a time fits into caches.
    b, channel = other % B, other // B * CHANNELS + tl.arange(0, CHANNELS)
    row, begin, end, wanted = edges_of(rowptr, item, items, N, E, search, STEP, CUT)
    if arg is not None and ARG_OF_ROWS:
        at = arg + (b * arg_stride[0] + row * arg_stride[1] + h * arg_stride[2])[:, None] + channel[None, :]
        named = tl.load(at, mask=wanted[:, None] & (channel < F)[None, :], other=-1)[:, None, :]
    total = tl.zeros([ROWS, EDGES, CHANNELS], WIDE)
    for start in range(0, tl.max(end - begin, 0), EDGES):
        _, there, node, number = next_edges(col, perm, begin, end, start, EDGES)
        value = _message(
            x, x_stride, b, h, channel, node, number, there, weight, weight_stride, col_scale, F, ZERO_HIDES,
            WIDE,
        )  # fmt: skip
        if arg is not None:
            if not ARG_OF_ROWS:
                offset = b * arg_stride[0] + node * arg_stride[1] + h[:, None] * arg_stride[2]
                named = arg + offset[:, :, None] + channel[None, None, :]
                named = tl.load(named, mask=there[:, :, None] & (channel < F)[None, None, :], other=-1)
            value = tl.where(named == number[:, :, None], value, 0.0)
        total += value
    result = tl.sum(total, 1)
    mask = wanted[:, None] & (channel < F)[None, :]
    if CUT:
        tl.store(parts + (((item * B + b) * H + h) * F)[:, None] + channel[None, :], result, mask=mask)
    else:
        result *= tl.full([], factor, WIDE)
        if row_scale is not None:
            result *= tl.load(row_scale + row, mask=wanted, other=0.0).to(WIDE)[:, None]
        at = out + (b * out_stride[0] + row * out_stride[1] + h * out_stride[2])[:, None] + channel[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=mask)


@device
def _is_larger(value, place, best, best_place):
    """Whether a value that comes later than the best so far takes its place; -1 is the place of no value."""
    larger = (value > best) | ((value != value) & (best == best))
    return (place >= 0) & (larger | (best_place < 0))


@device
def _store_extreme(best, place, perm, out, arg, at, mask, MINIMUM: tl.constexpr):
    none = place < 0
    best = tl.where(none, 0.0, best)
    if MINIMUM:
        best = tl.where(none, best, -best)
    tl.store(out + at, best.to(out.dtype.element_ty), mask=mask)
    if arg is not None:
        number = place
        if perm is not None:
            number = tl.load(perm + place, mask=mask & ~none, other=-1)
        tl.store(arg + at, tl.where(none, -1, number).to(arg.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _max(
    x, x_stride, rowptr, col, perm, weight, weight_stride, out, arg, part_values, part_places, N, E, items,
    search, H, B, MINIMUM: tl.constexpr, STEP: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr,
    EDGES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The largest message of each row, and the number of its edge; minima are maxima of negative messages."""
    CUT: tl.constexpr = part_values is not None
    WIDE: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    PLACE: tl.constexpr = col.dtype.element_ty
    NOWHERE: tl.constexpr = 2**31 - 1 if PLACE == tl.int32 else 2**63 - 1
    item, h, other = pairs_of(items, H, ROWS)
    b, channel = other % B, other // B * CHANNELS + tl.arange(0, CHANNELS)
    row, begin, end, wanted = edges_of(rowptr, item, items, N, E, search, STEP, CUT)
    best = tl.zeros([ROWS, EDGES, CHANNELS], WIDE)
    place = tl.full([ROWS, EDGES, CHANNELS], -1, PLACE)
    for start in range(0, tl.max(end - begin, 0), EDGES):
        at, there, node, number = next_edges(col, perm, begin, end, start, EDGES)
        value = _message(
            x, x_stride, b, h, channel, node, number, there, weight, weight_stride, None, F, False, WIDE
        )
        if MINIMUM:
            value = -value
        new_place = tl.where(there, at, -1).to(PLACE)[:, :, None]
        takes = _is_larger(value, new_place, best, place)
        best = tl.where(takes, value, best)
        place = tl.where(takes, new_place, place)

    # Of the lanes' candidates the first NaN, or else the first of the largest.
    held = place >= 0
    nan = held & (best != best)
    any_nan = tl.max(nan.to(tl.int32), 1) > 0
    top = tl.max(tl.where(held & (best == best), best, -float("inf")), 1)
    attains = held & tl.where(any_nan[:, None, :], best != best, best == top[:, None, :])
    first = tl.min(tl.where(attains, place, NOWHERE), 1)
    first = tl.where(first == NOWHERE, -1, first).to(PLACE)
    top = tl.where(any_nan, float("nan"), top)

    mask = wanted[:, None] & (channel < F)[None, :]
    if CUT:
        at = (((item * B + b) * H + h) * F)[:, None] + channel[None, :]
        tl.store(part_values + at, top, mask=mask)
        tl.store(part_places + at, first, mask=mask)
    else:
        at = (((b * N + row) * H + h) * F)[:, None] + channel[None, :]
        _store_extreme(top, first, perm, out, arg, at, mask, MINIMUM)


@triton.jit(do_not_specialize=SIZES)
def _join_max(
    part_values, part_places, rowptr, perm, out, arg, N, E, items, search, H, B, MINIMUM: tl.constexpr,
    STEP: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    item, h, other = pairs_of(items, H, ROWS)
    b, channel = other % B, other // B * CHANNELS + tl.arange(0, CHANNELS)
    row, count, wanted = parts_of(rowptr, item, items, N, E, search, STEP)
    best = tl.zeros([ROWS, CHANNELS], part_values.dtype.element_ty)
    place = tl.full([ROWS, CHANNELS], -1, part_places.dtype.element_ty)
    for n in range(tl.max(count, 0)):
        at = ((((item + n) * B + b) * H + h) * F)[:, None] + channel[None, :]
        there = (n < count)[:, None] & (channel < F)[None, :]
        value = tl.load(part_values + at, mask=there, other=0.0)
        new_place = tl.load(part_places + at, mask=there, other=-1)
        takes = _is_larger(value, new_place, best, place)
        best = tl.where(takes, value, best)
        place = tl.where(takes, new_place, place)
    at = (((b * N + row) * H + h) * F)[:, None] + channel[None, :]
    mask = wanted[:, None] & (channel < F)[None, :]
    _store_extreme(best, place, perm, out, arg, at, mask, MINIMUM)


@triton.jit(do_not_specialize=SIZES)
def _dot(
    a, a_stride, b, b_stride, rowptr, col, perm, row_scale, col_scale, arg, arg_stride, dot, N, E, search, H,
    B, ARG_OF_ROWS: tl.constexpr, F: tl.constexpr, EDGES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """dot[e, h] = row_scale[n] * col_scale[m] * <a[:, n, h], b[:, m, h]> of EDGES edges and one head."""
    WIDE: tl.constexpr = dot.dtype.element_ty
    blocks = tl.cdiv(tl.cast(E, tl.int64), EDGES)
    program = tl.program_id(0).to(tl.int64)
    at = program % blocks * EDGES + tl.arange(0, EDGES)
    h = program // blocks
    there = at < E
    row = row_at(rowptr, tl.where(there, at, 0), N, search)
    node, number = node_and_number(col, perm, at, there)
    total = tl.zeros([EDGES, CHANNELS], WIDE)
    for batch in range(tl.cast(B, tl.int64)):
        a_row = batch * a_stride[0] + row * a_stride[1] + h * a_stride[2]
        b_row = batch * b_stride[0] + node * b_stride[1] + h * b_stride[2]
        if arg is not None:
            end = row if ARG_OF_ROWS else node
            named_row = arg + batch * arg_stride[0] + end * arg_stride[1] + h * arg_stride[2]
        for first in range(0, F, CHANNELS):
            channel = first + tl.arange(0, CHANNELS)[None, :]
            product = feature_tile(a, a_row, channel, there, F, WIDE)
            product *= feature_tile(b, b_row, channel, there, F, WIDE)
            if arg is not None:
                named = tl.load(named_row[:, None] + channel, mask=there[:, None] & (channel < F), other=-1)
                product = tl.where(named == number[:, None], product, 0.0)
            total += product
    result = tl.sum(total, 1)
    if row_scale is not None:
        result *= tl.load(row_scale + row, mask=there, other=0.0).to(WIDE)
    if col_scale is not None:
        result *= tl.load(col_scale + node, mask=there, other=0.0).to(WIDE)
    tl.store(dot + number * H + h, result, mask=there)


def _check_scales(dtype, row_scale, N, col_scale, M) -> tuple[Tensor | None, Tensor | None]:
    for name, scale, size in (("row_scale", row_scale, N), ("col_scale", col_scale, M)):
        if scale is not None:
            check(name, scale, (size,), wide_dtype(dtype))
    return tuple(None if s is None else s.contiguous() for s in (row_scale, col_scale))


def _check_weight(
    dtype, weight: Tensor | None, E: int, H: int
) -> tuple[Tensor | None, tuple[int, int] | None]:
    """The weights and their strides, 0 between heads that share them."""
    if weight is None:
        return None, None
    check("edge_weight", weight, (E, None), dtype, wide_dtype(dtype))
    if weight.shape[1] not in (1, H):
        raise RuntimeError(f"edge_weight must have 1 or {H} heads, got {tuple(weight.shape)}")
    return weight, weight.expand(E, H).stride()


def _check_features(name: str, x: Tensor, shape) -> None:
    check(name, x, shape, torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _without_heads(per_head: bool, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Heads are more channels where nothing tells them apart; then a tile is as wide as it can be."""
    if per_head:
        return tuple(None if t is None else as_rows(t) for t in tensors)
    return tuple(None if t is None else as_rows(t.flatten(2)).unsqueeze(2) for t in tensors)


def _strides(tensor: Tensor | None) -> tuple[int, int, int] | None:
    return None if tensor is None else tensor.stride()[:3]


def _sum_of_messages(
    edges: Edges, x: Tensor | None, out: Tensor, weight: Tensor | None, weight_stride, *,
    row_scale=None, col_scale=None, arg=None, arg_of_rows=False, factor=1.0, zero_hides=False,
) -> None:  # fmt: skip
    """Into out (B, N, H, F), contiguous."""
    B, _, H, F = out.shape
    tile = tile_of(out.device, out.dtype if x is None else x.dtype, F, 4)
    parts = edges.empty_parts(B, H, F, dtype=wide_dtype(out.dtype))
    edges.launch_rows(
        _sum, tile, H, B * -(-F // tile.CHANNELS), {"parts": parts}, x=x, x_stride=_strides(x), weight=weight,
        weight_stride=weight_stride, row_scale=row_scale, col_scale=col_scale, arg=arg,
        arg_stride=_strides(arg), out=out, out_stride=out.stride()[:3], factor=factor, B=B,
        ARG_OF_ROWS=arg_of_rows, ZERO_HIDES=zero_hides, F=F,
    )  # fmt: skip
    join_sums(edges, tile, parts, out, row_scale, factor)


def aggregate_sum(
    x: Tensor, rowptr: Tensor, col: Tensor, perm: Tensor | None, num_cols: int, edge_weight: Tensor | None,
    row_scale: Tensor | None, col_scale: Tensor | None, arg: Tensor | None, arg_of_rows: bool,
) -> Tensor:  # fmt: skip
    _check_features("x", x, (None, num_cols, None, None))
    edges, (B, M, H, F) = Edges(rowptr, col, perm), x.shape
    weight, weight_stride = _check_weight(x.dtype, edge_weight, edges.count, H)
    row_scale, col_scale = _check_scales(x.dtype, row_scale, edges.rows, col_scale, M)
    if arg is not None:
        check("arg", arg, (B, edges.rows if arg_of_rows else M, H, F), col.dtype)
    out = x.new_empty(B, edges.rows, H, F)
    x, arg, flat = _without_heads(weight is not None and weight.shape[1] > 1, x, arg, out)
    _sum_of_messages(
        edges, x, flat, weight, weight_stride, row_scale=row_scale, col_scale=col_scale, arg=arg,
        arg_of_rows=arg_of_rows,
    )  # fmt: skip
    return out


def sum_over_rows(
    edges: Edges, weight: Tensor, x: Tensor | None, dtype: torch.dtype, factor: float = 1.0
) -> Tensor:
    """factor * the sum of weight (E, H) * x (M, H, F) over each row's edges, (rows, H, F); of weights without
    x.

    A weight of 0 hides its edge's features, even if they are NaN.
    """
    H, F = weight.shape[1], 1 if x is None else x.shape[2]
    out = torch.empty(edges.rows, H, F, dtype=dtype, device=weight.device)
    x = None if x is None else as_rows(x).unsqueeze(0)
    _sum_of_messages(edges, x, out.unsqueeze(0), weight, weight.stride(), factor=factor, zero_hides=True)
    return out


def aggregate_max(
    x: Tensor, rowptr: Tensor, col: Tensor, perm: Tensor | None, num_cols: int, edge_weight: Tensor | None,
    minimum: bool, return_arg: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check_features("x", x, (None, num_cols, None, None))
    edges, (B, _, H, F) = Edges(rowptr, col, perm), x.shape
    weight, weight_stride = _check_weight(x.dtype, edge_weight, edges.count, H)
    out = x.new_empty(B, edges.rows, H, F)
    arg = col.new_empty(out.shape if return_arg else 0)
    per_head = weight is not None and weight.shape[1] > 1
    (x,) = _without_heads(per_head, x)
    _, _, H, F = x.shape
    tile = tile_of(x.device, x.dtype, F, 4)
    parts = {
        "part_values": edges.empty_parts(B, H, F, dtype=wide_dtype(x.dtype)),
        "part_places": edges.empty_parts(B, H, F, dtype=col.dtype),
    }
    tiles = -(-F // tile.CHANNELS)
    arguments = {"out": out, "arg": arg if return_arg else None, "B": B, "MINIMUM": minimum, "F": F}
    edges.launch_rows(
        _max, tile, H, B * tiles, parts, x=x, x_stride=_strides(x), weight=weight,
        weight_stride=weight_stride, **arguments,
    )  # fmt: skip
    if edges.cuts:
        programs = -(-edges.cuts * H // tile.ROWS) * B * tiles
        edges.launch(_join_max, tile, programs, items=edges.cuts, H=H, **parts, **arguments)
    return out, arg


def edge_dot(
    a: Tensor, b: Tensor, rowptr: Tensor, col: Tensor, perm: Tensor | None, num_cols: int,
    row_scale: Tensor | None, col_scale: Tensor | None, arg: Tensor | None, arg_of_rows: bool, per_head: bool,
) -> Tensor:  # fmt: skip
    _check_features("a", a, (None,) * 4)
    edges, (B, N, H, F) = Edges(rowptr, col, perm), a.shape
    check("a", a, (B, edges.rows, H, F))
    check("b", b, (B, num_cols, H, F), a.dtype)
    row_scale, col_scale = _check_scales(a.dtype, row_scale, N, col_scale, num_cols)
    if arg is not None:
        check("arg", arg, (B, N if arg_of_rows else num_cols, H, F), col.dtype)
    dot = a.new_empty(edges.count, H if per_head else 1, dtype=wide_dtype(a.dtype))
    a, b, arg = _without_heads(per_head, a, b, arg)
    _, _, H, F = a.shape
    tile = tile_of(a.device, a.dtype, F, 4)
    tile = Tile(1, tile.ROWS * tile.EDGES, tile.CHANNELS)
    edges.launch(
        _dot, tile, -(-edges.count // tile.EDGES) * H, a=a, a_stride=_strides(a), b=b, b_stride=_strides(b),
        row_scale=row_scale, col_scale=col_scale, arg=arg, arg_stride=_strides(arg), dot=dot, H=H, B=B,
        ARG_OF_ROWS=arg_of_rows, F=F,
    )  # fmt: skip
    return dot
