"""Linear attention under the names, shapes and defaults of flash-linear-attention (``fla.ops.linear_attn``).

Both functions compute the same, as there, and differ in ``reverse`` and in the default of ``normalize``. They
take already mapped queries and keys: no feature map is applied.
"""

import torch
from torch import Tensor

from fastattn.ops._common import check_flags, number, wide_dtype
from fastattn.ops.linear_attention import LinearAttentionState, linear_attention

__all__ = ["chunk_linear_attn", "fused_recurrent_linear_attn"]

# Added by fla to denominators that are multiplied by `scale`.
_EPS = 1e-10

State = Tensor | tuple[Tensor, Tensor]


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State | None]:
    r"""Causal linear attention ``o_t = scale q_t . S_t`` with ``S_t = S_{t-1} + k_t v_t^T``, normalized by
    default.

    With ``normalize``, ``o_t`` is divided by ``scale q_t . z_t + 1e-10``, where ``z_t = z_{t-1} + k_t``.

    Args:
        q, k: (B, T, H, K).
        v: (B, T, H, V).
        scale: ``1 / sqrt(K)`` if not given. With ``normalize`` it must be positive.
        initial_state: ``S`` before the first token, (N, H, K, V), where N is B or the number of sequences of
            ``cu_seqlens``; with ``normalize`` the pair of it and ``z``, (N, 1, H, K). A tensor alone with
            ``normalize`` starts ``z`` at 0, as in fla.
        output_final_state: return the state behind the last token, too.
        normalize: divide by the sum of the weights.
        cu_seqlens: (N + 1) integers, where the sequences begin in one row of tokens; then B is 1.

    Returns:
        ``o`` (B, T, H, V) in the dtype of ``q``, and the final state in the form of ``initial_state``, ``S``
        or with ``normalize`` the pair ``(S, z)``, in float32 (float64 for float64); ``None`` without
        ``output_final_state``. fla rounds ``z`` to the dtype of ``k``.

    Where a denominator is exactly 0, the output is 0.

    Raises:
        ValueError: ``scale`` is not positive and ``normalize`` is true; ``cu_seqlens`` with B other than 1; a
            tensor has another number of dimensions.
        RuntimeError, TypeError: shapes, dtypes or devices do not fit.

    Source: https://github.com/fla-org/flash-linear-attention; Katharopoulos et al., Transformers are RNNs,
    https://arxiv.org/abs/2006.16236.

    Example:
        >>> import torch
        >>> from fastattn.integrations.fla import chunk_linear_attn
        >>> q, k, v = (torch.rand(1, 10, 4, 8) for _ in range(3))
        >>> whole, _ = chunk_linear_attn(q, k, v)
        >>> first, state = chunk_linear_attn(q[:, :6], k[:, :6], v[:, :6], output_final_state=True)
        >>> rest, _ = chunk_linear_attn(q[:, 6:], k[:, 6:], v[:, 6:], initial_state=state)
        >>> torch.allclose(torch.cat([first, rest], 1), whole, atol=1e-6)
        True
    """
    _check(q, k, v, cu_seqlens)
    check_flags(output_final_state=output_final_state, normalize=normalize)
    scale = max(k.shape[-1], 1) ** -0.5 if scale is None else number("scale", scale)
    eps = 1e-6
    if normalize:
        if not scale > 0:
            raise ValueError(f"scale must be positive with normalize=True, got {scale}")
        # scale a / (scale b + e) is a / (b + e / scale)
        scale, eps = None, _EPS / scale
    # Packed tokens are (T, H, K) there, the others (B, H, T, K).
    q, k, v = (x.transpose(1, 2) if cu_seqlens is None else x.squeeze(0) for x in (q, k, v))
    out = linear_attention(
        q,
        k,
        v,
        feature_map="identity",
        is_causal=True,
        normalize=normalize,
        eps=eps,
        scale=scale,
        cu_seqlens=cu_seqlens,
        initial_state=_state(initial_state, normalize, wide_dtype(q.dtype)),
        return_state=output_final_state,
    )
    out, state = out if output_final_state else (out, None)
    out = out.transpose(1, 2) if cu_seqlens is None else out.unsqueeze(0)
    if state is None:
        return out, None
    return out, (state.kv, state.z.unsqueeze(1)) if normalize else state.kv


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State | None]:
    r"""As :func:`chunk_linear_attn`, not normalized by default, and with ``reverse`` from the last token on.

    With ``reverse`` each sequence is read from its end: ``o_t`` sees the tokens t and later,
    ``initial_state`` is that behind the last token, and the final state is that of the first.

    Example:
        >>> import torch
        >>> from fastattn.integrations.fla import fused_recurrent_linear_attn
        >>> q, k, v = (torch.rand(1, 10, 4, 8) for _ in range(3))
        >>> out, state = fused_recurrent_linear_attn(q, k, v, output_final_state=True)
        >>> out.shape, state.shape
        (torch.Size([1, 10, 4, 8]), torch.Size([1, 4, 8, 8]))
    """
    check_flags(reverse=reverse)
    if not reverse:
        return chunk_linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)
    _check(q, k, v, cu_seqlens)
    q, k, v = (x.flip(1) for x in (q, k, v))
    if cu_seqlens is not None:
        cu_seqlens = q.shape[1] - cu_seqlens.flip(0)
        initial_state = _reorder(initial_state)
    out, state = chunk_linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)
    return out.flip(1), state if cu_seqlens is None else _reorder(state)


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name} must be (batch, tokens, heads, channels), got {tuple(x.shape)}")
        if cu_seqlens is not None and x.shape[0] != 1:
            raise ValueError(f"cu_seqlens needs one row of tokens, batch size 1, got {name} {tuple(x.shape)}")
    if cu_seqlens is not None:
        if not isinstance(cu_seqlens, Tensor):
            raise TypeError(f"cu_seqlens must be a Tensor, got {type(cu_seqlens).__name__}")
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(f"cu_seqlens must be (sequences + 1,), got {tuple(cu_seqlens.shape)}")


def _state(given: State | None, normalize: bool, dtype: torch.dtype) -> LinearAttentionState | None:
    if given is None:
        return None
    kv, z = given if normalize and isinstance(given, (tuple, list)) and len(given) == 2 else (given, None)
    if not isinstance(kv, Tensor) or not (z is None or isinstance(z, Tensor)):
        form = "a tensor (N, H, K, V)" + (" or the pair of it and z" if normalize else "")
        raise TypeError(
            f"initial_state must be {form} with normalize={normalize}, got {type(given).__name__}"
        )
    if kv.dim() != 4:
        raise ValueError(f"initial_state must be (N, H, K, V), got {tuple(kv.shape)}")
    if z is None:
        kv = kv.to(dtype)
        return LinearAttentionState(kv, kv.new_zeros(kv.shape[:3]))
    if z.dim() != 4 or z.shape[1] != 1:
        raise ValueError(f"z of initial_state must be (N, 1, H, K), got {tuple(z.shape)}")
    return LinearAttentionState(kv.to(dtype), z.squeeze(1).to(dtype))


def _reorder(state: State | None) -> State | None:
    """The states of the sequences in reverse order; what is no state is left to be refused."""
    if isinstance(state, (tuple, list)):
        return tuple(_reorder(x) for x in state)
    return state.flip(0) if isinstance(state, Tensor) and state.dim() > 0 else state
