"""Softmax attention in float64 numpy, one query row at a time; shares nothing with the reference.

Only the keys a row sees are ever looked at, so hidden NaNs and empty rows need no special treatment. The
gradient is the written-out Jacobian of the softmax. Beside each result stands its magnitude: the same
sum with absolute values of its terms, which rounding errors are proportional to.
"""

import numpy as np


def keep_mask(seed: int, dropout_p: float, B: int, H: int, L: int, S: int) -> np.ndarray:
    """The dropout pattern, in Python integers."""
    kept = np.zeros((B, H, L, S), dtype=bool)
    if dropout_p >= 1:
        return kept
    threshold = min(2**32 - 1, round(dropout_p * 2**32))
    low, wide = 2**32 - 1, 2**64 - 1
    for row, index in enumerate(np.ndindex(B, H, L)):
        z = (seed + (row + 1) * 0x9E3779B97F4A7C15) & wide
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & wide
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & wide
        z ^= z >> 31
        for j in range(S):
            x = (j * 0x9E3779B9 + z) & low
            x = ((x ^ (x >> 16)) * 0x85EBCA6B) & low
            x ^= z >> 32
            x = ((x ^ (x >> 13)) * 0xC2B2AE35) & low
            kept[(*index, j)] = (x ^ (x >> 16)) >= threshold
    return kept


def visible_keys(i, L, S, mask_row, padding_row, window, is_causal, lower_right) -> np.ndarray:
    diagonal = i + (S - L if lower_right else 0)
    left, right = window
    seen = []
    for j in range(S):
        if left != -1 and j < diagonal - left:
            continue
        if right != -1 and j > diagonal + right:
            continue
        if is_causal and j > diagonal:
            continue
        if padding_row is not None and not padding_row[j]:
            continue
        if mask_row is not None and (not mask_row[j] if mask_row.dtype == bool else mask_row[j] == -np.inf):
            continue
        seen.append(j)
    return np.array(seen, dtype=np.int64)


def attention(
    query, key, value, attn_mask=None, key_padding_mask=None, alibi_slopes=None, sinks=None, *,
    scale, softcap=0.0, window=(-1, -1), is_causal=False, lower_right=False, keep=None, dropout_p=0.0,
    grad_out=None, grad_lse=None, score_rounding=1.0,
):  # fmt: skip
    """Results and magnitudes, two dicts: out, lse, weights and, with incoming gradients, grad_<input>.

    ``score_rounding``: how much finer than the inputs' precision that of the scores is.
    """
    (B, H, L, _), (_, Hkv, S, _), Dv = query.shape, key.shape, value.shape[3]
    inputs = {
        "query": query, "key": key, "value": value, "attn_mask": attn_mask, "alibi_slopes": alibi_slopes,
        "sinks": sinks,
    }  # fmt: skip
    result = {
        "out": np.zeros((B, H, L, Dv)),
        "lse": np.full((B, H, L), -np.inf),
        "weights": np.zeros((B, H, L, S)),
    }
    size = {"out": np.zeros((B, H, L, Dv)), "lse": np.zeros((B, H, L)), "weights": np.zeros((B, H, L, S))}
    for name, array in inputs.items():
        if array is not None and array.dtype != bool:
            result[f"grad_{name}"], size[f"grad_{name}"] = np.zeros(array.shape), np.zeros(array.shape)

    def add(name, index, amount, magnitude):
        # Indices repeat where an input is broadcast, so np.add.at instead of +=.
        np.add.at(result[f"grad_{name}"], index, amount)
        np.add.at(size[f"grad_{name}"], index, magnitude)

    for b, h, i in np.ndindex(B, H, L):
        g = h // (H // Hkv)
        mask_row = None
        if attn_mask is not None:
            mask_index = tuple(
                0 if n == 1 else at for n, at in zip(attn_mask.shape[:3], (b, h, i), strict=True)
            )
            mask_row = np.broadcast_to(attn_mask[mask_index], (S,))
        padding_row = None if key_padding_mask is None else key_padding_mask[b]
        j = visible_keys(i, L, S, mask_row, padding_row, window, is_causal, lower_right)
        q, k, v = query[b, h, i], key[b, g, j], value[b, g, j]
        capped = score = scale * (k @ q)
        if softcap:
            capped = score = softcap * np.tanh(score / softcap)
        if mask_row is not None and mask_row.dtype != bool:
            score = score + mask_row[j]
        distance = np.abs(i + (S - L if lower_right else 0) - j)
        if alibi_slopes is not None:
            slope_index = (h,) if alibi_slopes.ndim == 1 else (b, h)
            score = score - alibi_slopes[slope_index] * distance
        sink = -np.inf if sinks is None else sinks[h]
        if len(j) == 0 and sinks is None:
            continue
        top = max(score.max(initial=-np.inf), sink)
        lse = top + np.log(np.exp(score - top).sum() + np.exp(sink - top))
        p = np.exp(score - lse)
        factor = np.ones(len(j))
        if keep is not None:
            factor = np.where(keep[b, h, i, j], 1 / (1 - dropout_p) if dropout_p < 1 else 0.0, 0.0)
        out = (p * factor) @ v
        result["out"][b, h, i], result["lse"][b, h, i] = out, lse
        result["weights"][b, h, i, j] = p * factor
        # Rounding in a score is relative to the terms it is summed from, and makes a relative error in exp.
        terms = abs(scale) * (np.abs(k) @ np.abs(q)) + np.abs(score)
        level = 1 + score_rounding * terms.max(initial=abs(sink) if sinks is not None else 0.0)
        size["out"][b, h, i] = level * ((p * factor) @ np.abs(v))
        size["lse"][b, h, i] = level
        size["weights"][b, h, i, j] = level * p * factor
        if grad_out is None:
            continue
        go, gl = grad_out[b, h, i], 0.0 if grad_lse is None else grad_lse[b, h, i]
        if len(j) == 0:
            go = np.zeros_like(go)
        dp = factor * (v @ go)
        inner = p @ dp
        dp_size = factor * (np.abs(v) @ np.abs(go))
        inner_size = p @ dp_size + abs(gl)
        ds = p * (dp - inner + gl)
        ds_size = level * p * (dp_size + inner_size)
        add(
            "value",
            (b, g, j),
            np.outer(p * factor, go),
            level * np.outer(p * factor, np.abs(go)),
        )
        if attn_mask is not None and attn_mask.dtype != bool:
            mask_j = np.zeros_like(j) if attn_mask.shape[3] == 1 else j
            add("attn_mask", (*mask_index, mask_j), ds, ds_size)
        if alibi_slopes is not None:
            add("alibi_slopes", slope_index, -(ds @ distance), ds_size @ distance)
        if sinks is not None:
            add("sinks", (h,), np.exp(sink - lse) * (gl - inner), level * np.exp(sink - lse) * inner_size)
        if softcap:
            ds = ds * (1 - (capped / softcap) ** 2)
        add("query", (b, h, i), scale * (ds @ k), abs(scale) * (ds_size @ np.abs(k)))
        add("key", (b, g, j), scale * np.outer(ds, q), abs(scale) * np.outer(ds_size, np.abs(q)))
    return result, size
