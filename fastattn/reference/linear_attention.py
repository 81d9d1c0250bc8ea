"""Linear attention in plain PyTorch: what every other implementation has to reproduce.

All tensors are four-dimensional as in the registered ops: query (B, H, L, D), key (B, Hkv, S, D), value (B,
Hkv, S, Dv). The functions are differentiable any number of times and run under ``torch.func``,
``torch.compile`` and forward-mode differentiation (with ``cu_seqlens``, whose values decide the shapes of
what is computed, not under ``torch.compile``). Causal attention goes through the sequence in chunks: memory
grows with the length, not with its square.
"""

from itertools import repeat

import torch
from torch import Tensor

from fastattn.reference._common import read_bounds, wide_dtype, without_autocast

__all__ = ["FEATURE_MAPS", "linear_attention", "linear_attention_step"]

# elu(x) + 1, whose branch for x <= 0 is kept from overflowing where it is not taken.
FEATURE_MAPS = {
    "elu": lambda x: torch.where(x > 0, x + 1, torch.exp(torch.where(x > 0, 0.0, x))),
    "relu": torch.relu,
    "exp": torch.exp,
    "identity": lambda x: x,
}

_CHUNK = 64


def _quotient(numerator: Tensor, denominator: Tensor, eps: float) -> Tensor:
    """numerator / (denominator + eps); 0 without a gradient where the denominator is nothing to divide by."""
    total = denominator + eps
    live = (denominator != 0) & (total.reciprocal().abs() != torch.inf)
    quotient = torch.where(live, numerator, 0.0) / torch.where(live, total, 1.0)
    return torch.where(live, quotient, 0.0)


def _within(decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What decays (B, H, C) do in one chunk: four factors, and zeros across a reset.

    They are: of key j in the output of query i (B, H, C, C), of the state before the chunk in the output of i
    (B, H, C, 1), of key j in the state after the chunk (B, H, C, 1), and of the state before in that after
    (B, H, 1, 1). A decay whose exponential is zero resets the state, as -inf does; it is counted instead of
    summed, so that no infinity is subtracted from another. Sums are in float64: their differences matter.
    """
    reset = torch.exp(decay.detach()) == 0
    total = torch.where(reset, 0.0, decay).double().cumsum(-1)
    resets = reset.cumsum(-1)

    def factor(seen, log):
        return torch.exp(torch.where(seen, log, -torch.inf)).to(decay.dtype)

    position = torch.arange(decay.shape[-1], device=decay.device)
    i, j = total.unsqueeze(-1), total.unsqueeze(-2)
    seen = (position.unsqueeze(-1) >= position) & (resets.unsqueeze(-1) == resets.unsqueeze(-2))
    last, last_reset = total[..., -1:], resets[..., -1:]
    between = factor(seen, i - j)
    before = factor(resets == 0, total)
    after = factor(resets == last_reset, last - total)
    through = factor(last_reset == 0, last)
    return between, before.unsqueeze(-1), after.unsqueeze(-1), through.unsqueeze(-1)


def _causal(query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None, state: Tensor):
    """Outputs (B, H, L, Dv) of features, and the state (B, H, D, Dv) after the last token."""
    outputs = []
    chunks = zip(*(t.split(_CHUNK, 2) for t in (query, key, value)), strict=True)
    decays = repeat(None) if decay is None else decay.split(_CHUNK, 2)
    for (q, k, v), d in zip(chunks, decays, strict=False):
        position = torch.arange(q.shape[2], device=q.device)
        # Selected, not multiplied by zero: a NaN in a later key stays out of the scores of earlier rows.
        scores = torch.where(position.unsqueeze(-1) >= position, q @ k.mT, 0.0)
        if d is None:
            outputs.append(scores @ v + q @ state)
            state = state + k.mT @ v
        else:
            between, before, after, through = _within(d)
            # Nothing before a reset is read, not even multiplied by zero.
            carried = torch.where(before > 0, q @ state, 0.0) * before
            outputs.append((scores * between) @ v + carried)
            state = torch.where(through > 0, state, 0.0) * through + (k * after).mT @ v
    return torch.cat(outputs, 2), state


def _attend(query, key, value, decay, key_padding_mask, kv, z, feature_map, causal, normalize, eps, scale):
    """A call without cu_seqlens: out, den and the final state."""
    (B, H, L, D), (Hkv, S), Dv = query.shape, key.shape[1:3], value.shape[3]
    dtype, wide = query.dtype, wide_dtype(query.dtype)
    phi = FEATURE_MAPS[feature_map]
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    attended = None if key_padding_mask is None else key_padding_mask.view(B, 1, S, 1)
    sees = None  # (B, 1, L or 1, 1): whether the query sees anything, where that is in question
    if kv is None and (S == 0 or attended is not None):
        if attended is None:
            sees = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=query.device)
        else:
            sees = attended.cumsum(2) > 0 if causal else attended.any(2, keepdim=True)
        query = torch.where(sees, query, 0.0)
    if attended is not None:
        # What a padded token holds is replaced before anything is computed from it: multiplied by zero, NaN
        # would stay NaN, in values and gradients.
        key, value = torch.where(attended, key, 0.0), torch.where(attended, value, 0.0)
    q, k = phi(query), phi(key)
    if attended is not None:
        k = torch.where(attended, k, 0.0)
    # The normaliser is the output for one more value that is 1.
    v = torch.cat([value, value.new_ones((*value.shape[:3], 1))], -1)
    k, v = (t.repeat_interleave(H // max(Hkv, 1), 1) for t in (k, v))
    if kv is None:
        state = q.new_zeros((B, H, D, Dv + 1))
    else:
        state = torch.cat([kv.to(wide), z.to(wide).unsqueeze(-1)], -1)
    if causal and L > 0:
        if decay is not None:
            decay = (decay if decay.dim() == 3 else decay.unsqueeze(-1)).to(wide).expand(B, H, L)
            if key_padding_mask is not None:
                decay = torch.where(key_padding_mask.view(B, 1, S), decay, 0.0)
        result, state = _causal(q, k, v, decay, state)
    else:
        state = state + k.mT @ v
        result = q @ state
    numerator, den = result.split((Dv, 1), -1)
    out = _quotient(numerator, den, eps) if normalize else numerator * scale
    if sees is not None:
        out = torch.where(sees, out, 0.0)
    return out.to(dtype), den.squeeze(-1), state[..., :Dv].contiguous(), state[..., Dv].contiguous()


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_kv: Tensor | None,
    initial_z: Tensor | None,
    feature_map: str,
    causal: bool,
    normalize: bool,
    eps: float,
    scale: float,
    return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, denominator and final state, as ``fastattn::linear_attention_forward``.

    state_t = exp(decay_t) state_{t-1} + phi(k_t) [v_t, 1]^T, or the sum over all keys if not causal;
    [num_t, den_t] = phi(q_t)^T state_t; out = num / (den + eps), or scale * num if not normalised. Half
    precision is computed in fp32 and rounded once. A denominator of zero gives 0 and no gradient, and so does
    a query that sees neither a key nor an initial state, even if it holds NaN.
    """
    with without_autocast(query):
        options = (feature_map, causal, normalize, eps, scale)
        if cu_seqlens is None:
            results = _attend(query, key, value, decay, key_padding_mask, initial_kv, initial_z, *options)
        else:
            bounds = read_bounds("cu_seqlens", cu_seqlens, query.shape[2])
            pieces = []
            for n, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
                q, k, v = (t[:, :, start:end] for t in (query, key, value))
                d = decay[..., start:end] if decay is not None and decay.dim() == 3 else decay
                kv, z = (None if t is None else t[n : n + 1] for t in (initial_kv, initial_z))
                pieces.append(_attend(q, k, v, d, None, kv, z, *options))
            if not pieces:
                pieces.append(_attend(query, key, value, decay, None, None, None, *options))
                pieces[0] = (*pieces[0][:2], pieces[0][2][:0], pieces[0][3][:0])
            results = tuple(
                torch.cat(t, d) for t, d in zip(zip(*pieces, strict=True), (2, 2, 0, 0), strict=True)
            )
        out, den, kv, z = results
        nothing = den.new_zeros(0)
        return out, den if normalize else nothing, *((kv, z) if return_state else (nothing, nothing))


def linear_attention_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv: Tensor,
    z: Tensor,
    decay: Tensor | None,
    feature_map: str,
    normalize: bool,
    eps: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One token of :func:`linear_attention`: out (B, H, Dv) and the new kv, z."""
    with without_autocast(query):
        wide, phi = kv.dtype, FEATURE_MAPS[feature_map]
        repeats = query.shape[1] // max(key.shape[1], 1)
        q, k = phi(query.to(wide)), phi(key.to(wide)).repeat_interleave(repeats, 1)
        v = value.to(wide).repeat_interleave(repeats, 1)
        if decay is not None:
            factor = torch.exp(decay.to(wide)).unsqueeze(-1)
            z = torch.where(factor > 0, z, 0.0) * factor
            kv = torch.where(factor.unsqueeze(-1) > 0, kv, 0.0) * factor.unsqueeze(-1)
        kv = kv + k.unsqueeze(-1) * v.unsqueeze(-2)
        z = z + k
        numerator = (q.unsqueeze(-2) @ kv).squeeze(-2)
        out = _quotient(numerator, (q * z).sum(-1, keepdim=True), eps) if normalize else numerator * scale
        return out.to(query.dtype), kv, z
