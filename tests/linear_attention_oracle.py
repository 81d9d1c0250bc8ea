"""Linear attention in float64 numpy, as a full matrix of weights per head; shares nothing with the reference.

The decays between two tokens are a product that grows by one factor per row, never a difference of
logarithms, and every gradient is written out. Beside each result stands its magnitude: the same sum with
absolute values of its terms, which rounding errors are proportional to.
"""

import numpy as np

FEATURES = {
    "elu": (lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))), lambda x: np.exp(np.minimum(x, 0))),
    "relu": (lambda x: np.maximum(x, 0), lambda x: np.where(x > 0, 1.0, 0.0)),
    "exp": (np.exp, np.exp),
    "identity": (lambda x: x, np.ones_like),
}


def weights_of_decay(steps: np.ndarray, attended: np.ndarray, causal: bool, rows: int):
    """How much of key j (rows, S), and of the initial state (rows,), is left when query i reads it.

    The last entry of both is that of the state after the last token.
    """
    S = len(attended)
    if not causal:
        return np.tile(attended.astype(float), (rows + 1, 1)), np.ones(rows + 1)
    left, initial = np.zeros((S + 1, S)), np.ones(S + 1)
    for i in range(S):
        factor = np.exp(steps[i]) if attended[i] else 1.0
        left[i] = left[i - 1] * factor if i else 0.0
        initial[i] = (initial[i - 1] if i else 1.0) * factor
        left[i, i] = attended[i]
    left[S], initial[S] = (left[S - 1], initial[S - 1]) if S else (0.0, 1.0)
    return left, initial


def linear_attention(
    query, key, value, decay=None, key_padding_mask=None, cu_seqlens=None, initial_kv=None, initial_z=None, *,
    feature_map="elu", is_causal=False, normalize=True, eps=1e-6, scale=None, grad_out=None, grad_kv=None,
    grad_z=None,
):  # fmt: skip
    """Results and magnitudes, two dicts: out, kv, z and grad_<input> for the given incoming gradients."""
    (B, H, L, D), (_, Hkv, S, _), Dv = query.shape, key.shape, value.shape[3]
    phi, slope = FEATURES[feature_map]
    bounds = [0, L] if cu_seqlens is None else cu_seqlens
    N = B if cu_seqlens is None else len(bounds) - 1
    inputs = {
        "query": query, "key": key, "value": value, "decay": decay, "initial_kv": initial_kv,
        "initial_z": initial_z,
    }  # fmt: skip
    shapes = {"out": (B, H, L, Dv), "kv": (N, H, D, Dv), "z": (N, H, D)}
    shapes |= {f"grad_{name}": array.shape for name, array in inputs.items() if array is not None}
    result, size = ({name: np.zeros(shape) for name, shape in shapes.items()} for _ in range(2))

    for b, h, n in np.ndindex(B, H, len(bounds) - 1):
        rows = slice(bounds[n], bounds[n + 1])
        columns = rows if cu_seqlens is not None else slice(0, S)
        s = b if cu_seqlens is None else n
        g = h // (H // Hkv)
        attended = np.ones(S, bool) if key_padding_mask is None else key_padding_mask[b]
        attended = attended[columns]
        steps = np.zeros(L) if decay is None else decay[h] if decay.ndim == 1 else decay[b, h]
        steps = np.broadcast_to(steps, (L,))[rows]
        here = len(steps)
        left, initial = weights_of_decay(steps, attended, is_causal, here)
        # What is left of a token is exp(-x): its rounding error grows with x.
        doubt, initial_doubt = (m * (1 + np.abs(np.log(np.where(m > 0, m, 1.0)))) for m in (left, initial))
        xq = query[b, h, rows]
        seen = np.full(here, True) if initial_kv is not None else (left[:here] > 0).any(1)
        xq = np.where(seen[:, None], xq, 0.0)
        xk = np.where(attended[:, None], key[b, g, columns], 0.0)
        v = np.where(attended[:, None], value[b, g, columns], 0.0)
        q, k = phi(xq), phi(xk)
        S0 = np.zeros((D, Dv)) if initial_kv is None else initial_kv[s, h]
        z0 = np.zeros(D) if initial_z is None else initial_z[s, h]

        last, last_doubt = left[here], doubt[here]
        result["kv"][s, h] = (k * last[:, None]).T @ v + initial[here] * S0
        size["kv"][s, h] = (np.abs(k) * last_doubt[:, None]).T @ np.abs(v) + initial_doubt[here] * np.abs(S0)
        result["z"][s, h] = last @ k + initial[here] * z0
        size["z"][s, h] = last_doubt @ np.abs(k) + initial_doubt[here] * np.abs(z0)

        left, doubt = left[:here], doubt[:here]
        c, c_doubt, c_last = initial[:here, None], initial_doubt[:here, None], initial_doubt[here]
        weights, weights_size = left * (q @ k.T), doubt * (np.abs(q) @ np.abs(k).T)
        num = weights @ v + c * (q @ S0)
        num_size = weights_size @ np.abs(v) + c_doubt * (np.abs(q) @ np.abs(S0))
        den = weights.sum(1, keepdims=True) + c * (q @ z0)[:, None]
        den_size = weights_size.sum(1, keepdims=True) + c_doubt * (np.abs(q) @ np.abs(z0))[:, None]
        live = seen[:, None].copy()
        factor = np.full((here, 1), 1.0 if scale is None else scale)
        level = np.ones((here, 1))
        if normalize:
            live &= (den != 0) & (den + eps != 0)
            factor = np.where(live, 1 / np.where(live, den + eps, 1.0), 0.0)
            level = 1 + den_size * np.abs(factor)
        out = np.where(live, num * factor, 0.0)
        out_size = num_size * np.abs(factor) * level
        result["out"][b, h, rows], size["out"][b, h, rows] = out, out_size
        if grad_out is None:
            continue

        go = np.where(live, grad_out[b, h, rows], 0.0)
        gkv, gz = grad_kv[s, h], grad_z[s, h]
        g_num, g_num_size = go * factor, np.abs(go * factor) * level
        g_den, g_den_size = np.zeros((here, 1)), np.zeros((here, 1))
        if normalize:
            g_den = -(go * out).sum(1, keepdims=True) * factor
            g_den_size = (np.abs(go) * out_size).sum(1, keepdims=True) * np.abs(factor) * level
        gw, gw_size = left * (g_num @ v.T + g_den), doubt * (g_num_size @ np.abs(v).T + g_den_size)
        d, d_size = last[:, None], last_doubt[:, None]
        gq = gw @ k + c * (g_num @ S0.T + g_den * z0)
        gq_size = gw_size @ np.abs(k) + c_doubt * (g_num_size @ np.abs(S0).T + g_den_size * np.abs(z0))
        gk = gw.T @ q + d * (v @ gkv.T + gz)
        gk_size = gw_size.T @ np.abs(q) + d_size * (np.abs(v) @ np.abs(gkv).T + np.abs(gz))
        gv = weights.T @ g_num + d * (k @ gkv)
        gv_size = weights_size.T @ g_num_size + d_size * (np.abs(k) @ np.abs(gkv))
        result["grad_query"][b, h, rows] = gq * slope(xq) * seen[:, None]
        size["grad_query"][b, h, rows] = gq_size * slope(xq)
        result["grad_key"][b, g, columns] += gk * slope(xk) * attended[:, None]
        size["grad_key"][b, g, columns] += gk_size * slope(xk)
        result["grad_value"][b, g, columns] += gv
        size["grad_value"][b, g, columns] += gv_size
        if initial_kv is not None:
            result["grad_initial_kv"][s, h] = (c * q).T @ g_num + initial[here] * gkv
            size["grad_initial_kv"][s, h] = (c_doubt * np.abs(q)).T @ g_num_size + c_last * np.abs(gkv)
            result["grad_initial_z"][s, h] = (c * q * g_den).sum(0) + initial[here] * gz
            size["grad_initial_z"][s, h] = (c_doubt * np.abs(q) * g_den_size).sum(0) + c_last * np.abs(gz)
        if decay is None:
            continue
        # A decay acts on all that came before it, in all that comes from it on.
        pairs, pairs_size = gw * (q @ k.T), gw_size * (np.abs(q) @ np.abs(k).T)
        start = c[:, 0] * ((q @ S0 * g_num).sum(1) + (q @ z0) * g_den[:, 0])
        start_size = (np.abs(q) @ np.abs(S0) * g_num_size).sum(1) + (np.abs(q) @ np.abs(z0)) * g_den_size[
            :, 0
        ]
        start_size = c_doubt[:, 0] * start_size
        end = last * ((k @ gkv * v).sum(1) + k @ gz)
        end_size = last_doubt * ((np.abs(k) @ np.abs(gkv) * np.abs(v)).sum(1) + np.abs(k) @ np.abs(gz))
        whole = initial[here] * ((S0 * gkv).sum() + z0 @ gz)
        whole_size = c_last * ((np.abs(S0 * gkv)).sum() + np.abs(z0) @ np.abs(gz))
        for t in range(here):
            if attended[t]:
                amount = pairs[t:, :t].sum() + start[t:].sum() + end[:t].sum() + whole
                magnitude = pairs_size[t:, :t].sum() + start_size[t:].sum() + end_size[:t].sum() + whole_size
                index = (h,) if decay.ndim == 1 else (b, h, bounds[n] + t)
                result["grad_decay"][index] += amount
                size["grad_decay"][index] += magnitude
    return result, size
