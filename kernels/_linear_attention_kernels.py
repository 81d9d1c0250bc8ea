"""The kernels of linear attention, launched by linear_attention.py.

Output and gradients are one walk over the chunks of a sequence,

    result_i = sum over the chunk of (x_i . y_j) u_j + x_i . state,      state = sum of y_j u_j^T so far,

with other roles for the tensors: x, y, u are phi(q), phi(k), v for the output and, with g the gradient of the
numerator, g, v, phi(k) for the queries'; in reverse order phi(k), phi(q), g for the values' and v, g, phi(q)
for the keys'. The denominator is one more value that is 1, hence one more term of x . y in the gradients of
queries and keys, and z is a column of the state, or a row of it. Feature maps are applied to what is loaded,
and differentiated in what is stored.

Hua et al., arXiv:2202.10447; decay: Sun et al., arXiv:2307.08621, and Dao and Gu, arXiv:2405.21060.
"""

import triton
import triton.language as tl
from fastattn.kernels._common import device, load_rows, store_rows

__all__ = ["add_up", "grad_den", "recurrence", "walk"]

# Lengths, and what depends on them, are never specialised: a new length must not mean a new compilation.
LENGTHS = ["B", "H", "group", "T", "L", "segments"]


@device
def _feature(x, MAP: tl.constexpr):
    """phi; a NaN stays one, which maximum and minimum would not let it."""
    if MAP == "elu":
        return tl.where(x > 0, x + 1, tl.exp(tl.where(x > 0, 0.0, x)))
    elif MAP == "relu":
        return tl.where(x <= 0, 0.0, x)
    elif MAP == "exp":
        return tl.exp(x)
    else:
        return x


@device
def _slope(x, MAP: tl.constexpr):
    """The derivative of phi."""
    if MAP == "elu":
        return tl.exp(tl.where(x > 0, 0.0, x))
    elif MAP == "relu":
        return tl.where(x <= 0, 0.0, 1.0)
    elif MAP == "exp":
        return tl.exp(x)
    else:
        return tl.full(x.shape, 1.0, x.dtype)


@device
def _operand(x, OPERAND: tl.constexpr, DROPPED: tl.constexpr):
    """x as products read it: as OPERAND, or float32 without its last bits.

    Tensor cores cut off what TF32 does not have, which would make every sum too small; here it is rounded.
    """
    if DROPPED > 0 and x.dtype == tl.float32:
        bits = x.to(tl.uint32, bitcast=True) + (1 << (DROPPED - 1))
        return tl.where(x == x, (bits >> DROPPED << DROPPED).to(tl.float32, bitcast=True), x)
    else:
        return x.to(OPERAND)


@device
def _dot(a, b, total, PRECISION: tl.constexpr):
    return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)


@device
def _features(
    base, stride, b, h, first, rows, columns, shown, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    MAP: tl.constexpr, ACCURATE: tl.constexpr,
):  # fmt: skip
    """phi of rows, zero where a row is not shown and beyond the last column, whatever phi(0) is."""
    x = load_rows(base, stride, b, h, first, rows, columns, shown, WIDTH, BLOCK, True).to(ACCURATE)
    x = _feature(x, MAP)
    if MAP == "elu" or MAP == "exp":
        x = tl.where(shown[:, None] & (columns < WIDTH)[None, :], x, 0.0)
    return x


@device
def _quotient(den, shown, eps, scale):
    """The factor of numerators, and which rows have one: a denominator of zero, or next to it, has none."""
    if den is None:
        return tl.where(shown, scale, 0.0), shown
    else:
        factor = 1 / (den + eps)
        live = shown & (den != 0) & (tl.abs(factor) != float("inf"))
        return tl.where(live, factor, 0.0), live


@device
def _grads(
    grad_out, stride, b, h, first, rows, columns, factor, live, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Rows of the gradient of the numerator."""
    x = load_rows(grad_out, stride, b, h, first, rows, columns, live, WIDTH, BLOCK, True)
    return tl.where(live[:, None], x.to(factor.dtype) * factor[:, None], 0.0)


@device
def _bounds(cu_seqlens, n, T):
    """Batch entry, first token and number of tokens of sequence n; never outside of the tensor."""
    if cu_seqlens is None:
        return n, T * 0, T
    else:
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + n), 0), T).to(tl.int32)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + n + 1), begin), T).to(tl.int32)
        return n * 0, begin, end - begin


@device
def _split(x, like: tl.constexpr):
    """Float64 as high + low, so that a difference of two large sums is not rounded at their size."""
    high = x.to(like)
    return high, (x - high.to(tl.float64)).to(like)


@triton.jit(do_not_specialize=LENGTHS)
def walk(
    query, key, value, grad_out, den, delta, decay, padding, seen_from, cu_seqlens, start_kv, start_z, end_kv,
    end_z, end_decay, result, states, grad_decay,
    query_stride, key_stride, value_stride, grad_out_stride, decay_stride, padding_stride, start_kv_stride,
    start_z_stride, end_kv_stride, end_z_stride, result_stride,
    B, H, group, T, L, segments, eps: tl.float64, scale: tl.float64,
    ROLE: tl.constexpr, CAUSAL: tl.constexpr, MAP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_X: tl.constexpr, LEAST: tl.constexpr,
    OPERAND: tl.constexpr, DROPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One segment of one head, and COLUMNS of its state: the result of a role, or the state at the end.

    Gradients of decay, of token t: what passes from a token before t to one from t on, in four parts. Within
    the chunk, and from the state to its queries, where queries have their gradient; from its keys into the
    state behind, and from the state before to that, where keys have theirs: ``states`` holds what the
    former met before each chunk.
    """
    ACCURATE: tl.constexpr = tl.float64 if query.dtype.element_ty == tl.float64 else tl.float32
    REVERSE: tl.constexpr = ROLE == "grad_value" or ROLE == "grad_key"
    ON_FEATURES: tl.constexpr = ROLE == "out" or ROLE == "grad_value"  # x and y are
    X: tl.constexpr = D if ON_FEATURES else DV
    U: tl.constexpr = DV if ON_FEATURES else D
    Z: tl.constexpr = BLOCK_X if ON_FEATURES else COLUMNS
    UPDATE: tl.constexpr = CAUSAL or result is None
    # What the tokens of the walk are.
    KEYS: tl.constexpr = CAUSAL or (result is None) != REVERSE
    QUERIES: tl.constexpr = CAUSAL or not KEYS
    TILES: tl.constexpr = (U + COLUMNS - 1) // COLUMNS if U > 0 else 1
    tile = tl.program_id(0) % TILES
    pair = (tl.program_id(0) // TILES).to(tl.int64)
    segment = (pair % segments).to(tl.int32)
    h = pair // segments % H
    n = pair // segments // H
    b, begin, length = _bounds(cu_seqlens, n, T)
    span = tl.cdiv(tl.cdiv(length, LEAST), segments) * LEAST
    first = begin + tl.minimum(segment * span, length)
    stop = begin + tl.minimum((segment + 1) * span, length)
    hk = h // group
    eps, scale = tl.full([], eps, ACCURATE), tl.full([], scale, ACCURATE)

    r = tl.arange(0, CHUNK)
    x_at, u_at = tl.arange(0, BLOCK_X), tile * COLUMNS + tl.arange(0, COLUMNS)
    x_at, u_at = x_at.to(tl.int64), u_at.to(tl.int64)
    inside = (x_at < X)[:, None] & (u_at < U)[None, :]
    z_at = x_at if ON_FEATURES else u_at
    state = tl.zeros([BLOCK_X, COLUMNS], ACCURATE)
    z = tl.zeros([Z], ACCURATE)
    slot = n
    if CAUSAL:
        slot = n * segments + segment
    if start_kv is not None:
        source = start_kv + slot * start_kv_stride[0] + h * start_kv_stride[1]
        source = source + x_at[:, None] * start_kv_stride[2] + u_at[None, :] * start_kv_stride[3]
        state = tl.load(source, mask=inside, other=0.0)
    if start_z is not None:
        source = start_z + slot * start_z_stride[0] + h * start_z_stride[1]
        z = tl.load(source + z_at * start_z_stride[2], mask=z_at < D, other=0.0)
    if seen_from is not None:
        seen = tl.load(seen_from + b)
    through = tl.full([], 1, ACCURATE)

    chunks = tl.cdiv(stop - first, CHUNK)
    for count in range(0, chunks):
        number = count
        if REVERSE:
            number = chunks - 1 - count
        at = first + number * CHUNK
        t = at + r
        # Of the whole sequence: offsets that do not depend on the chunk would wait in registers for the next.
        rows = t.to(tl.int64)
        present = t < stop
        has_key, has_query = present, present
        if padding is not None and KEYS:
            offset = b * padding_stride[0] + rows * padding_stride[1]
            has_key = tl.load(padding + offset, mask=present, other=0) != 0
        if seen_from is not None and QUERIES:
            has_query = present & (t >= seen)
        row = (b * H + h) * L + rows
        if ROLE != "out" and QUERIES:
            level = None
            if den is not None:
                level = tl.load(den + row, mask=has_query, other=0.0)
            factor, live = _quotient(level, has_query, eps, scale)
            if delta is not None:
                dden = tl.load(delta + row, mask=has_query, other=0.0)

        # Operands; those that are not features need no more than their own precision.
        if result is not None:
            if ROLE == "out":
                x = _features(query, query_stride, b, h, 0, rows, x_at, has_query, D, BLOCK_X, MAP, ACCURATE)
            elif ROLE == "grad_value":
                x = _features(key, key_stride, b, hk, 0, rows, x_at, has_key, D, BLOCK_X, MAP, ACCURATE)
            elif ROLE == "grad_query":
                x = _grads(grad_out, grad_out_stride, b, h, 0, rows, x_at, factor, live, DV, BLOCK_X)
            else:
                x = load_rows(value, value_stride, b, hk, 0, rows, x_at, has_key, DV, BLOCK_X, True)
            x = _operand(x, OPERAND, DROPPED)
        if UPDATE:
            if ROLE == "out":
                y = _features(key, key_stride, b, hk, 0, rows, x_at, has_key, D, BLOCK_X, MAP, ACCURATE)
                u = load_rows(value, value_stride, b, hk, 0, rows, u_at, has_key, DV, COLUMNS, True)
                moved = y
            elif ROLE == "grad_value":
                y = _features(query, query_stride, b, h, 0, rows, x_at, has_query, D, BLOCK_X, MAP, ACCURATE)
                u = _grads(grad_out, grad_out_stride, b, h, 0, rows, u_at, factor, live, DV, COLUMNS)
                moved = y
            elif ROLE == "grad_query":
                y = load_rows(value, value_stride, b, hk, 0, rows, x_at, has_key, DV, BLOCK_X, True)
                u = _features(key, key_stride, b, hk, 0, rows, u_at, has_key, D, COLUMNS, MAP, ACCURATE)
                moved = u
            else:
                y = _grads(grad_out, grad_out_stride, b, h, 0, rows, x_at, factor, live, DV, BLOCK_X)
                u = _features(query, query_stride, b, h, 0, rows, u_at, has_query, D, COLUMNS, MAP, ACCURATE)
                moved = u
            y, u = _operand(y, OPERAND, DROPPED), _operand(u, OPERAND, DROPPED)

        # With g the sum of log-decays up to a token: from before the chunk into it exp(g), and from it to
        # behind the chunk exp(g_last - g). Decays that erase everything are counted instead of summed: no
        # infinity is subtracted from another, and those after it lose no precision.
        if decay is not None:
            offset = b * decay_stride[0] + h * decay_stride[1] + rows * decay_stride[2]
            log = tl.load(decay + offset, mask=has_key, other=0.0).to(ACCURATE)
            erases = (tl.exp(log) == 0).to(tl.int32)
            log = tl.where(erases > 0, 0.0, log).to(tl.float64)
            high, low = _split(tl.cumsum(log, 0), ACCURATE)
            last, last_low = _split(tl.sum(log, 0), ACCURATE)
            erased, all_erased = tl.cumsum(erases, 0), tl.sum(erases, 0)
            into = tl.where(erased == 0, tl.exp(high), 0.0)
            out_of = tl.where(erased == all_erased, tl.exp((last - high) + (last_low - low)), 0.0)
            kept = tl.where(all_erased == 0, tl.exp(last), 0.0)
            through *= kept
            to_row, from_row = into, out_of
            if REVERSE:
                to_row, from_row = out_of, into

        if result is not None:
            carried = _operand(state, OPERAND, DROPPED)
            carried = _dot(x, carried, tl.zeros([CHUNK, COLUMNS], ACCURATE), PRECISION)
            if ROLE == "out":
                weight = tl.sum(x.to(ACCURATE) * z[None, :], 1)
            elif ROLE == "grad_key":
                carried += z[None, :]
            elif ROLE == "grad_query" and delta is not None:
                carried += dden[:, None] * z[None, :]
            if decay is not None:
                # Nothing before a reset is read, not even multiplied by zero.
                carried = tl.where((to_row > 0)[:, None], carried, 0.0) * to_row[:, None]
                if ROLE == "out":
                    weight = tl.where(to_row > 0, weight, 0.0) * to_row
            total = carried
            if CAUSAL:
                weights = _dot(x, tl.trans(y), tl.zeros([CHUNK, CHUNK], ACCURATE), PRECISION)
                if ROLE == "grad_query" and delta is not None:
                    weights += dden[:, None]
                if ROLE == "grad_key" and delta is not None:
                    weights += dden[None, :]
                if REVERSE:
                    seen_pair = r[:, None] <= r[None, :]
                else:
                    seen_pair = r[:, None] >= r[None, :]
                if decay is not None:
                    seen_pair = seen_pair & (erased[:, None] == erased[None, :])
                    between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
                    if REVERSE:
                        between = -between
                    weights *= tl.exp(tl.where(seen_pair, between, -float("inf")))
                # Selected, not multiplied by zero: a NaN in a later key stays out of earlier rows.
                weights = tl.where(seen_pair, weights, 0.0)
                rounded = _operand(weights, OPERAND, DROPPED)
                if ROLE == "out":
                    weight += tl.sum(rounded.to(ACCURATE), 1)
                total = _dot(rounded, u, total, PRECISION)

            if ROLE == "out":
                if den is None:
                    total = tl.where(has_query[:, None], total * scale, 0.0)
                else:
                    factor, live = _quotient(weight, present, eps, scale)
                    total = tl.where(live[:, None], total * factor[:, None], 0.0)
                    tl.store(den + row, weight, mask=t < tl.where(tile == 0, stop, 0))
            elif ROLE == "grad_value":
                total = tl.where(has_key[:, None], total, 0.0)
            else:
                if ROLE == "grad_query":
                    shown = has_query
                    own = load_rows(query, query_stride, b, h, 0, rows, u_at, shown, D, COLUMNS, True)
                else:
                    shown = has_key
                    own = load_rows(key, key_stride, b, hk, 0, rows, u_at, shown, D, COLUMNS, True)
                own = own.to(ACCURATE)
                total = tl.where(shown[:, None], total * _slope(own, MAP), 0.0)
                if grad_decay is not None:
                    place = grad_decay + ((tile * B + b) * H + h) * L + rows
                    # One spot per chunk, wherever sequences begin and end.
                    spot = tl.cast(begin, tl.int64)
                    if cu_seqlens is None:
                        spot = n * T
                    spot = spot // CHUNK + n + (at - begin) // CHUNK
                    spot = states + (spot * H + h) * (DV + 1) * D
                    state_at = spot + x_at[:, None] * D + u_at[None, :]
                    z_spot = spot + DV * D + u_at
                    own = tl.where(shown[:, None] & (u_at < D)[None, :], _feature(own, MAP), 0.0)
                    flow = tl.sum(own * carried, 1)
                    if ROLE == "grad_query":
                        products = _operand(own, OPERAND, DROPPED)
                        products = _dot(products, tl.trans(u), tl.zeros([CHUNK, CHUNK], ACCURATE), PRECISION)
                        pairs = tl.where(r[:, None] > r[None, :], products * weights, 0.0)
                        flow += tl.sum(pairs, 1) - tl.sum(pairs, 0)
                        flow += tl.sum(flow, 0) - tl.cumsum(flow, 0)
                        tl.store(state_at, state, mask=inside)
                        tl.store(z_spot, z, mask=u_at < D)
                    else:
                        before = tl.load(state_at, mask=inside, other=0.0)
                        all_through = tl.sum(tl.sum(before * state, 1), 0)
                        all_through += tl.sum(tl.load(z_spot, mask=u_at < D, other=0.0) * z, 0)
                        flow = tl.cumsum(flow, 0) - flow
                        flow += tl.where(kept > 0, all_through * kept, 0.0)
                        flow += tl.load(place, mask=present, other=0.0)
                    tl.store(place, tl.where(has_key, flow, 0.0), mask=present)
            store_rows(result, result_stride, b, h, 0, rows, u_at, present, U, total)

        if UPDATE:
            if decay is not None:
                moved *= from_row[:, None]
                state = tl.where(kept > 0, state, 0.0) * kept
                z = tl.where(kept > 0, z, 0.0) * kept
            if REVERSE and delta is not None:
                z += tl.sum(moved * dden[:, None], 0)
            moved = _operand(moved, OPERAND, DROPPED)
            if not REVERSE:
                z += tl.sum(moved.to(ACCURATE), 0)  # rounded, as numerators are: a mean of ones is one
            if ON_FEATURES:
                state = _dot(tl.trans(moved), u, state, PRECISION)
            else:
                state = _dot(tl.trans(y), moved, state, PRECISION)
            if BLOCK_X > X or TILES * COLUMNS > U:
                state = tl.where(inside, state, 0.0)  # not zero times infinity

    slot = n * segments + segment
    if end_kv is not None:
        at = end_kv + slot * end_kv_stride[0] + h * end_kv_stride[1]
        at = at + x_at[:, None] * end_kv_stride[2] + u_at[None, :] * end_kv_stride[3]
        tl.store(at, state, mask=inside)
        at = end_z + slot * end_z_stride[0] + h * end_z_stride[1] + z_at * end_z_stride[2]
        tl.store(at, z, mask=z_at < tl.where(tile == 0, D, 0))
    if end_decay is not None:
        tl.store(end_decay + slot * H + h, through, mask=tile == 0)


@triton.jit(do_not_specialize=LENGTHS)
def add_up(
    local, decays, start_kv, start_z, end_kv, end_z, start_kv_stride, start_z_stride, H, segments,
    CAUSAL: tl.constexpr, REVERSE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turns what each segment adds to the state into the state that it starts from.

    Where order does not matter, the first segment gets the state of the whole sequence. The last DV columns
    of ``local`` (sequences x segments, H, D * DV + D) are z.
    """
    SIZE: tl.constexpr = D * DV + D
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK if SIZE > 0 else 1
    WIDTH: tl.constexpr = DV if DV > 0 else 1
    e = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    pair = (tl.program_id(0) // BLOCKS).to(tl.int64)
    h, n = pair % H, pair // H
    of_kv, of_z = e < D * DV, (e >= D * DV) & (e < SIZE)
    row, column = (e // WIDTH).to(tl.int64), (e % WIDTH).to(tl.int64)
    state = tl.zeros([BLOCK], local.dtype.element_ty)
    if start_kv is not None:
        at = start_kv + n * start_kv_stride[0] + h * start_kv_stride[1]
        at = at + row * start_kv_stride[2] + column * start_kv_stride[3]
        state += tl.load(at, mask=of_kv, other=0.0)
    if start_z is not None:
        at = start_z + n * start_z_stride[0] + h * start_z_stride[1]
        state += tl.load(at + (e - D * DV).to(tl.int64) * start_z_stride[2], mask=of_z, other=0.0)
    for count in range(0, segments):
        segment = count
        if REVERSE:
            segment = segments - 1 - count
        slot = (n * segments + segment) * H + h
        place = local + slot * SIZE + e
        added = tl.load(place, mask=e < SIZE, other=0.0)
        if CAUSAL:
            tl.store(place, state, mask=e < SIZE)
        if decays is not None:
            kept = tl.load(decays + slot)
            state = tl.where(kept > 0, state, 0.0) * kept
        state += added
    if not CAUSAL:
        tl.store(local + (n * segments * H + h) * SIZE + e, state, mask=e < SIZE)
    if end_kv is not None:
        tl.store(end_kv + pair * (D * DV) + e, state, mask=of_kv)
        tl.store(end_z + pair * D + (e - D * DV), state, mask=of_z)


@triton.jit(do_not_specialize=LENGTHS)
def grad_den(
    grad_out, out, den, delta, grad_out_stride, out_stride, H, L, eps: tl.float64, DV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The gradient of denominators: -(grad_out . out) / (den + eps)."""
    ACCURATE: tl.constexpr = delta.dtype.element_ty
    tiles = tl.cdiv(L, CHUNK)
    first = tl.program_id(0) % tiles * CHUNK
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // H, head % H
    r = tl.arange(0, CHUNK).to(tl.int64)
    present = first + r < L
    at = head * L + first + r
    factor, live = _quotient(
        tl.load(den + at, mask=present, other=0.0), present, tl.full([], eps, ACCURATE), 0.0
    )
    total = tl.zeros([CHUNK, BLOCK_DV], ACCURATE)
    for column in range(0, DV, BLOCK_DV):
        c = column + tl.arange(0, BLOCK_DV).to(tl.int64)
        x = load_rows(out, out_stride, b, h, first, r, c, live, DV, BLOCK_DV, True).to(ACCURATE)
        y = load_rows(grad_out, grad_out_stride, b, h, first, r, c, live, DV, BLOCK_DV, True)
        total += x * y.to(ACCURATE)
    tl.store(delta + at, tl.where(live, -tl.sum(total, 1) * factor, 0.0), mask=present)


@device
def _token(base, stride, b, h, t, columns, shown, WIDTH: tl.constexpr):
    """One row of the matrix (b, h), zeros if it is not ``shown``."""
    at = base + b * stride[0] + h * stride[1] + t * stride[2] + columns * stride[3]
    return tl.load(at, mask=columns < tl.where(shown, WIDTH, 0), other=0.0)


@triton.jit(do_not_specialize=LENGTHS)
def recurrence(
    query, key, value, decay, padding, cu_seqlens, start_kv, start_z, out, den, end_kv, end_z,
    query_stride, key_stride, value_stride, decay_stride, padding_stride, start_kv_stride, start_z_stride,
    out_stride, end_kv_stride, end_z_stride,
    H, group, L, eps: tl.float64, scale: tl.float64,
    NORMALIZE: tl.constexpr, MAP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    COLUMNS: tl.constexpr, TILES: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """One head of a sequence, token by token, and TILES tiles of COLUMNS of its state: no products of
    matrices, the state is read once and written once."""
    ACCURATE: tl.constexpr = tl.float64 if query.dtype.element_ty == tl.float64 else tl.float32
    PROGRAMS: tl.constexpr = (DV + COLUMNS * TILES - 1) // (COLUMNS * TILES) if DV > 0 else 1
    tile = tl.program_id(0) % PROGRAMS
    head = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    n, h = head // H, head % H
    hk = h // group
    b, begin, length = _bounds(cu_seqlens, n, L)
    eps, scale = tl.full([], eps, ACCURATE), tl.full([], scale, ACCURATE)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    inside = d < D
    first_z = tl.zeros([BLOCK_D], ACCURATE)
    if start_z is not None:
        z_source = start_z + n * start_z_stride[0] + h * start_z_stride[1] + d * start_z_stride[2]
        first_z = tl.load(z_source, mask=inside, other=0.0)
    if IN_PLACE:
        tl.debug_barrier()  # warps that hold the same elements have all read them before one writes
    for column in range(tile * TILES * COLUMNS, (tile + 1) * TILES * COLUMNS, COLUMNS):
        c = column + tl.arange(0, COLUMNS).to(tl.int64)
        of_state = inside[:, None] & (c < DV)[None, :]
        state, z = tl.zeros([BLOCK_D, COLUMNS], ACCURATE), first_z
        if start_kv is not None:
            source = start_kv + n * start_kv_stride[0] + h * start_kv_stride[1]
            source = source + d[:, None] * start_kv_stride[2] + c[None, :] * start_kv_stride[3]
            state = tl.load(source, mask=of_state, other=0.0)
        if IN_PLACE:
            tl.debug_barrier()
        # Whether a query sees anything: those before the first key hold what nobody may read.
        seen = begin * 0 > 0 if start_kv is None else begin >= 0
        for count in range(0, length):
            t = tl.cast(begin + count, tl.int64)
            has_key = t >= 0
            if padding is not None:
                has_key = tl.load(padding + b * padding_stride[0] + t * padding_stride[1]) != 0
            seen = seen | has_key
            q = _feature(_token(query, query_stride, b, h, t, d, seen, D).to(ACCURATE), MAP)
            k = _feature(_token(key, key_stride, b, hk, t, d, has_key, D).to(ACCURATE), MAP)
            v = _token(value, value_stride, b, hk, t, c, has_key, DV).to(ACCURATE)
            k = tl.where(d < tl.where(has_key, D, 0), k, 0.0)  # whatever phi(0) is
            if decay is not None:
                at = decay + b * decay_stride[0] + h * decay_stride[1] + t * decay_stride[2]
                kept = tl.exp(tl.load(at, mask=has_key, other=0.0).to(ACCURATE))
                z = tl.where(kept > 0, z, 0.0) * kept
                state = tl.where(kept > 0, state, 0.0) * kept
            z += k
            state += k[:, None] * v[None, :]
            if BLOCK_D > D:
                state = tl.where(inside[:, None], state, 0.0)  # not zero times infinity
            weight = None
            if NORMALIZE:
                weight = tl.sum(q * z, 0)
                if den is not None:
                    tl.store(den + (b * H + h) * L + t, weight, mask=column == 0)
            factor, live = _quotient(weight, seen, eps, scale)
            result = tl.where(live, tl.sum(q[:, None] * state, 0) * factor, 0.0)
            at = out + b * out_stride[0] + h * out_stride[1] + t * out_stride[2] + c * out_stride[3]
            tl.store(at, result.to(out.dtype.element_ty), mask=c < DV)
        if end_kv is not None:
            at = end_kv + n * end_kv_stride[0] + h * end_kv_stride[1]
            at = at + d[:, None] * end_kv_stride[2] + c[None, :] * end_kv_stride[3]
            tl.store(at, state, mask=of_state)
            at = end_z + n * end_z_stride[0] + h * end_z_stride[1] + d * end_z_stride[2]
            tl.store(at, z, mask=d < tl.where(column == 0, D, 0))
