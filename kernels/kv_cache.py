"""Attention over a cache in Triton: the registered op of fastattn/ops/kv_cache.py.

One kernel appends the new tokens; the next attends to all that the cache then holds. Its tile of queries has
the heads that share a key head side by side, row ``i * group + g`` being position i of the g-th of them, so
that decoding, with one position, reads the cache once for all of them and still fills a tile. Where there are
too few tiles to keep a GPU busy, several programs share the keys of one, and a third kernel joins what they
found, in the order of the keys: the same number of them gives the same bits.

Dao et al., Flash-Decoding (2023); pages: Kwon et al., arXiv:2309.06180.
"""

import torch
import triton
import triton.language as tl
from fastattn.kernels._attention_tiles import (
    block_at,
    blocks_of,
    clip,
    finish_rows,
    rows_see,
    scores_of,
    seen_keys,
    softmax_step,
)
from fastattn.kernels._common import (
    INTERPRETED,
    Config,
    block_of,
    check,
    describe,
    device,
    launch,
    load_rows,
    needs_wide_offsets,
    precision,
    product,
    to_log2,
    to_natural,
)
from fastattn.kernels._launch_tables import DECODE, PROMPT, choose_config
from torch import Tensor

from fastattn._choose import TRITON_HEAD_DIM

__all__ = ["attention_with_kv_cache"]

FEW_ROWS = 16  # a tile of decoding
# Tokens that a program appends, and rows that one joins.
APPENDED = Config(16, 1, 4, 1)
JOINED = Config(8, 1, 4, 1)
# Programs to divide the keys for: several for each SM of any GPU, whose loads hide each other's latency. A
# constant, so that results do not depend on the GPU; of at least this many blocks of keys each.
PROGRAMS, BLOCKS = 512, 4

LENGTHS = ["Hkv", "group", "L", "T", "capacity", "pages", "left", "right", "splits"]


@triton.jit(do_not_specialize=LENGTHS)
def append_kernel(
    key, value, key_cache, value_cache, lengths, table, key_stride, value_stride, key_cache_stride,
    value_cache_stride, lengths_stride, table_stride, Hkv, T, capacity, pages, page_size,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """New tokens of one sequence and head; those that the cache has no room for are left out."""
    tiles = (T + BLOCK_Q - 1) // BLOCK_Q
    first = tl.program_id(0) % tiles * BLOCK_Q
    n = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = n // Hkv, n % Hkv
    t = tl.arange(0, BLOCK_Q).to(tl.int64)
    channels, value_channels = tl.arange(0, BLOCK_D).to(tl.int64), tl.arange(0, BLOCK_DV).to(tl.int64)
    new = first + t < T
    j = tl.load(lengths + b * lengths_stride[0]).to(tl.int64) + first + t
    shown = new & (j >= 0) & (j < capacity)
    page, row = b + 0 * j, j
    if table is not None:
        at = table + b * table_stride[0] + j // page_size * table_stride[1]
        page, row = tl.load(at, mask=shown, other=0).to(tl.int64), j % page_size
        shown = shown & (page >= 0) & (page < pages)
    k = load_rows(key, key_stride, b, h, first, t, channels, new, D, BLOCK_D, True)
    v = load_rows(value, value_stride, b, h, first, t, value_channels, new, DV, BLOCK_DV, True)
    at = key_cache + page * key_cache_stride[0] + h * key_cache_stride[1] + row * key_cache_stride[2]
    at = at[:, None] + channels[None, :] * key_cache_stride[3]
    tl.store(at, k, mask=shown[:, None] & (channels < D)[None, :])
    at = value_cache + page * value_cache_stride[0] + h * value_cache_stride[1] + row * value_cache_stride[2]
    at = at[:, None] + value_channels[None, :] * value_cache_stride[3]
    tl.store(at, v, mask=shown[:, None] & (value_channels < DV)[None, :])


@device
def _store(
    out, out_stride, lse, b, h, i, L, H, channels, shown, DV: tl.constexpr, result, top, total, seen
):  # fmt: skip
    """Rows i of heads h, from what they add up to."""
    result, total = finish_rows(result, top, total, seen)
    tl.store(lse + (b * H + h) * L + i, to_natural(top, total), mask=shown)
    at = out + b * out_stride[0] + h * out_stride[1] + i.to(tl.int64) * out_stride[2]
    at = at[:, None] + channels[None, :] * out_stride[3]
    tl.store(at, result.to(out.dtype.element_ty), mask=shown[:, None] & (channels < DV)[None, :])


@triton.jit(do_not_specialize=LENGTHS)
def attend_kernel(
    query, key_cache, value_cache, lengths, table, alibi, sinks, out, lse, part, part_top, part_total,
    query_stride, key_cache_stride, value_cache_stride, lengths_stride, table_stride, alibi_stride,
    sinks_stride, out_stride,
    Hkv, group, L, T, capacity, pages, page_size, left, right, splits,
    scale: tl.float64, softcap: tl.float64,
    SOFTCAP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    UPCAST: tl.constexpr, BLOCKS_IN_PAGES: tl.constexpr,
):  # fmt: skip
    """One tile of queries and one of ``splits`` parts of their keys: out and lse, or their parts.

    BLOCKS_IN_PAGES: no block of keys is in two pages.
    """
    ACCURATE: tl.constexpr = tl.float64 if query.dtype.element_ty == tl.float64 else tl.float32
    split, place = tl.program_id(0) % splits, tl.program_id(0) // splits
    rows = L * group
    tiles = (rows + BLOCK_Q - 1) // BLOCK_Q
    first = (tiles - 1 - place % tiles) * BLOCK_Q
    n = (place // tiles).to(tl.int64)
    b, shared = n // Hkv, n % Hkv
    x = first + tl.arange(0, BLOCK_Q)
    in_tile = x < rows
    i, h = x // group, shared * group + x % group
    c, channels, value_channels = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    if WIDE:
        c, channels, value_channels = c.to(tl.int64), channels.to(tl.int64), value_channels.to(tl.int64)

    S = clip(tl.load(lengths + b * lengths_stride[0]).to(tl.int64) + T, capacity).to(tl.int32)
    offset = S - L
    last = tl.minimum(first + BLOCK_Q, rows) - 1
    begin, inner, outer, end = seen_keys(first // group, last // group, S, offset, left, right)
    blocks = tl.maximum((end + BLOCK_K - 1) // BLOCK_K - begin // BLOCK_K, 0)
    share = (blocks + splits - 1) // splits * BLOCK_K
    own = begin // BLOCK_K * BLOCK_K + split * share
    begin, end = tl.maximum(begin, own), tl.minimum(end, own + share)
    inner, outer = tl.maximum(inner, begin), tl.minimum(outer, end)

    slope = None
    if alibi is not None:
        slope = tl.load(alibi + b * alibi_stride[0] + h * alibi_stride[1], mask=in_tile, other=0.0)[:, None]
    top = tl.full([BLOCK_Q], -float("inf"), ACCURATE)
    total = tl.full([BLOCK_Q], 0, ACCURATE)
    if sinks is not None:
        sink = tl.load(sinks + h * sinks_stride[0], mask=in_tile, other=-float("inf"))
        top = tl.where(split == 0, to_log2(sink.to(ACCURATE)), top)
        total = tl.where(top == -float("inf"), total, 1.0)
    result = tl.full([BLOCK_Q, BLOCK_DV], 0, ACCURATE)
    at = query + b * query_stride[0] + h * query_stride[1] + i.to(tl.int64) * query_stride[2]
    q = tl.load(
        at[:, None] + channels[None, :] * query_stride[3],
        mask=in_tile[:, None] & (channels < D)[None, :], other=0.0,
    )  # fmt: skip
    for inside in tl.static_range(2):
        begin_at, count, before, gap = blocks_of(inside, begin, inner, outer, end, BLOCK_K, False)
        for block in range(0, count):
            column = block_at(block, begin_at, before, gap, BLOCK_K)
            present = (column + c >= begin) & (column + c < end)
            page, at_row, row = b, column, c
            if table is not None:
                entry = table + b * table_stride[0]
                if BLOCKS_IN_PAGES:
                    page = tl.load(entry + tl.cast(column // page_size, tl.int64) * table_stride[1])
                    at_row = column % page_size
                else:
                    entry += ((column + c) // page_size).to(tl.int64) * table_stride[1]
                    page = tl.load(entry, mask=present, other=0)[:, None]
                    at_row, row = 0, ((column + c) % page_size).to(tl.int64)
                page = clip(page.to(tl.int64), pages - 1)
            k = load_rows(key_cache, key_cache_stride, page, shared, at_row, row, channels, present, D,
                BLOCK_D, inside == 0,
            )  # fmt: skip
            dots = product(q, tl.trans(k), tl.full([BLOCK_Q, BLOCK_K], 0, ACCURATE), PRECISION, UPCAST)
            score, visible, _ = scores_of(
                dots, b, h, i[:, None], c[None, :], 0, column, L, S, offset, left, right, None, None,
                None, slope, scale, softcap, SOFTCAP, inside == 0,
            )  # fmt: skip
            if inside == 0:
                score = tl.where(visible, score, -float("inf"))
            weights, rescale, top, total = softmax_step(score, top, total)
            v = load_rows(value_cache, value_cache_stride, page, shared, at_row, row, value_channels,
                present, DV, BLOCK_DV, inside == 0,
            )  # fmt: skip
            result = product(weights, v, result * rescale[:, None], PRECISION, UPCAST)

    if part is not None:
        at = (split * (tl.num_programs(0) // splits // tiles) + n) * rows + x
        tl.store(part_top + at, top, mask=in_tile)
        tl.store(part_total + at, total, mask=in_tile)
        at = at[:, None] * DV + value_channels[None, :]
        tl.store(part + at, result, mask=in_tile[:, None] & (value_channels < DV)[None, :])
    else:
        _store(
            out, out_stride, lse, b, h, i, L, Hkv * group, value_channels, in_tile, DV, result, top, total,
            rows_see(i, S, offset, left, right),
        )  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def join_kernel(
    part, part_top, part_total, lengths, out, lse, lengths_stride, out_stride,
    Hkv, group, L, T, capacity, left, right, splits,
    DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Some rows of one sequence and key head: out and lse from the parts of all splits."""
    rows = L * group
    tiles = (rows + BLOCK_Q - 1) // BLOCK_Q
    x = tl.program_id(0) % tiles * BLOCK_Q + tl.arange(0, BLOCK_Q)
    n, heads = (tl.program_id(0) // tiles).to(tl.int64), tl.num_programs(0) // tiles
    b, shared = n // Hkv, n % Hkv
    in_tile, channels = x < rows, tl.arange(0, BLOCK_DV)
    shown = in_tile[:, None] & (channels < DV)[None, :]
    top = tl.full([BLOCK_Q], -float("inf"), part.dtype.element_ty)
    total = tl.full([BLOCK_Q], 0, part.dtype.element_ty)
    result = tl.full([BLOCK_Q, BLOCK_DV], 0, part.dtype.element_ty)
    for split in range(0, splits):
        at = (split * heads + n) * rows + x
        own = tl.load(part_top + at, mask=in_tile, other=-float("inf"))
        above = tl.maximum(top, own)
        shift = tl.where(above == -float("inf"), 0.0, above)
        before, now = tl.exp2(top - shift), tl.exp2(own - shift)
        total = total * before + tl.load(part_total + at, mask=in_tile, other=0.0) * now
        found = tl.load(part + at[:, None] * DV + channels[None, :], mask=shown, other=0.0)
        result = result * before[:, None] + found * now[:, None]
        top = above
    S = clip(tl.load(lengths + b * lengths_stride[0]).to(tl.int64) + T, capacity).to(tl.int32)
    i, h = x // group, shared * group + x % group
    _store(
        out, out_stride, lse, b, h, i, L, Hkv * group, channels, in_tile, DV, result, top, total,
        rows_see(i, S, S - L, left, right),
    )  # fmt: skip


def _checked(
    query, key_cache, value_cache, key, value, cache_seqlens, block_table, alibi_slopes, sinks
) -> tuple[int, int]:
    """The tokens that are appended, and those that a sequence has room for."""
    B, H, _, D = check("query", query, (None,) * 4)
    pages, Hkv, page_size, _ = check("key_cache", key_cache, (None, None, None, D), query.dtype)
    DV = check("value_cache", value_cache, (pages, Hkv, page_size, None), query.dtype)[3]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    if (H % Hkv if Hkv else H) != 0:
        raise RuntimeError(f"query heads must be a multiple of the caches' heads, got {H} and {Hkv}")
    if max(D, DV) > TRITON_HEAD_DIM:
        raise NotImplementedError(f"head dims up to {TRITON_HEAD_DIM}, got {max(D, DV)}")
    if (key is None) != (value is None):
        raise RuntimeError("key and value must be given together")
    T = 0
    if key is not None:
        T = check("key", key, (B, Hkv, None, D), query.dtype)[2]
        check("value", value, (B, Hkv, T, DV), query.dtype)
    integers = (torch.int32, torch.int64)
    check("cache_seqlens", cache_seqlens, (B,), *integers)
    capacity = page_size
    if block_table is None:
        check("key_cache", key_cache, (B, None, None, None))
    else:
        capacity *= check("block_table", block_table, (B, None), *integers)[1] if pages > 0 else 0
    if alibi_slopes is not None:
        check("alibi_slopes", alibi_slopes, (B, H) if alibi_slopes.dim() > 1 else (H,), wide)
    if sinks is not None:
        check("sinks", sinks, (H,), query.dtype, torch.float32)
    return T, capacity


def attention_with_kv_cache(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, key: Tensor | None, value: Tensor | None,
    cache_seqlens: Tensor, block_table: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None,
    scale: float, softcap: float, window_left: int, window_right: int, num_splits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    T, capacity = _checked(
        query, key_cache, value_cache, key, value, cache_seqlens, block_table, alibi_slopes, sinks
    )
    (B, H, L, D), (pages, Hkv, page_size, DV) = query.shape, value_cache.shape
    group = H // max(Hkv, 1)
    if max(L * group, capacity) >= 2**29:
        raise NotImplementedError(f"rows and tokens below 2**29, got {L * group} and {capacity}")
    if not (softcap >= 0 and window_left >= -1 and window_right >= -1 and num_splits >= 0):
        raise RuntimeError(
            f"softcap {softcap}, window {window_left}, {window_right} or num_splits {num_splits} is wrong"
        )
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    # Heads beside channels in memory: joining them afterwards is then a view.
    out = query.new_empty((B, L, H, DV)).transpose(1, 2)
    lse = query.new_empty((B, H, L), dtype=wide)

    table = DECODE if L * group <= FEW_ROWS else PROMPT
    config = choose_config(table, query.device, query.dtype, block_of(max(D, DV)))
    tiles, blocks = B * Hkv * -(-L * group // config.rows), -(-capacity // config.columns)
    splits = num_splits or min(PROGRAMS // max(tiles, 1), blocks // BLOCKS)
    splits = max(min(splits, blocks), 1)
    parts = [None] * 3
    if splits > 1:
        rows = (splits, B, Hkv, L * group)
        parts = [query.new_empty(shape, dtype=wide) for shape in ((*rows, DV), rows, rows)]

    strided = {
        "query": query, "key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache,
        "lengths": cache_seqlens, "table": block_table, "sinks": sinks, "out": out,
        "alibi": None if alibi_slopes is None else alibi_slopes.expand(B, H),
    }  # fmt: skip
    given = {
        **strided, **{f"{n}_stride": None if t is None else t.stride() for n, t in strided.items()},
        "lse": lse, **dict(zip(("part", "part_top", "part_total"), parts, strict=True)),
        "Hkv": Hkv, "group": group, "L": L, "T": T, "capacity": capacity, "pages": pages,
        "page_size": page_size, "splits": splits,
        # Beyond all keys; positions added to it then stay within 32 bits.
        "left": None if window_left < 0 else min(window_left, L + capacity),
        "right": None if window_right < 0 else min(window_right, L + capacity),
        "scale": float(scale), "softcap": float(softcap), "SOFTCAP": softcap > 0,
        "D": D, "DV": DV, "BLOCK_K": config.columns, "BLOCK_D": block_of(D), "BLOCK_DV": block_of(DV),
        "PRECISION": precision(query.dtype, query.device), "WIDE": needs_wide_offsets(*strided.values()),
        "UPCAST": INTERPRETED and query.dtype == torch.bfloat16,
        "BLOCKS_IN_PAGES": block_table is not None and page_size % config.columns == 0,
    }  # fmt: skip

    def run(kernel, programs: int, config: Config, **more) -> None:
        arguments = given | {"BLOCK_Q": config.rows} | more
        launch(kernel, programs, config, **{n: arguments[n] for n in kernel.arg_names})

    if T > 0:
        run(append_kernel, B * Hkv * -(-T // APPENDED.rows), APPENDED)
    # A descriptor reads rows that lie side by side.
    streamed = {}
    if block_table is None or given["BLOCKS_IN_PAGES"]:
        for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
            descriptor = describe(cache, config.columns, block_of(cache.shape[3]))
            if descriptor is not None:
                streamed |= {name: descriptor, f"{name}_stride": None}
    run(attend_kernel, tiles * splits, config, **streamed)
    if splits > 1:
        run(join_kernel, B * Hkv * -(-L * group // JOINED.rows), JOINED)
    return out, lse
