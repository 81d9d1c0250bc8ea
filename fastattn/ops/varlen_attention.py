"""Softmax attention of packed sequences: validates a call, chooses an implementation and runs it."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled

from fastattn._choose import Request, candidates, choose
from fastattn.ops._attention_autograd import Attention, forward_op
from fastattn.ops._attention_call import (
    FAR,
    UNLIMITED,
    autocast_tensors,
    check_options,
    check_tensors,
    shapes_found,
)
from fastattn.ops._common import apply_function, call_op, check_flags, integer, needs_function, number
from fastattn.ops._jagged import Packed, pack
from fastattn.ops.attention import draw_seed
from fastattn.reference import attention as reference

__all__ = ["attend_jagged", "choice_of_jagged", "varlen_attention"]


class _Prepared(NamedTuple):
    """A checked call: tensors in the form of the op, a batch of 1, and the sequences in it."""

    tensors: tuple[Tensor | None, ...]
    options: tuple[float, float, int, int, bool, float]
    sequences: tuple
    request: Request


def _check_bounds(name: str, bounds, query: Tensor) -> None:
    if not isinstance(bounds, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(bounds).__name__}")
    if bounds.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"{name} must be torch.int32 or torch.int64, got {bounds.dtype}")
    if bounds.dim() != 1 or bounds.shape[0] < 1:
        raise RuntimeError(f"{name} must be (sequences + 1,), got {tuple(bounds.shape)}")
    if bounds.device != query.device:
        raise RuntimeError(
            f"{name} is on {bounds.device}, query on {query.device}: all must be on one device"
        )


def _check_shapes(tensors, sequences: int) -> None:
    query, key, value, _, _, alibi_slopes, sinks = tensors
    for name, tensor in zip(("query", "key", "value"), tensors, strict=False):
        if tensor.dim() != 3:
            raise RuntimeError(f"{name} must be (total, heads, head dim), got {shapes_found(tensors)}")
    (_, H, D), Hkv = query.shape, key.shape[1]
    if key.shape[2] != D:
        raise RuntimeError(f"query and key must have the same head dim: {shapes_found(tensors)}")
    if value.shape[:2] != key.shape[:2]:
        raise RuntimeError(f"key and value must have the same tokens and heads: {shapes_found(tensors)}")
    if (H % Hkv != 0) if Hkv > 0 else H > 0:
        raise RuntimeError(f"key heads must divide the query's: {shapes_found(tensors)}")
    if alibi_slopes is not None and alibi_slopes.shape not in ((H,), (sequences, H)):
        raise RuntimeError(f"alibi_slopes must be ({H},) or ({sequences}, {H}): {shapes_found(tensors)}")
    if sinks is not None and sinks.shape != (H,):
        raise RuntimeError(f"sinks must be ({H},): {shapes_found(tensors)}")


def _prepare(
    query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, *,
    dropout_p=0.0, is_causal=False, scale=None, window_size=UNLIMITED, softcap=0.0, alibi_slopes=None,
    sinks=None, causal_alignment="lower_right", return_lse=False,
) -> _Prepared:  # fmt: skip
    tensors = (query, key, value, None, None, alibi_slopes, sinks)
    if _is_any_autocast_enabled():
        tensors = autocast_tensors(tensors)
    check_tensors(tensors)
    query, key, value, _, _, alibi_slopes, sinks = tensors
    for name, bounds in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_bounds(name, bounds, query)
    sequences = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k.shape[0] - 1 != sequences:
        raise RuntimeError(
            "cu_seqlens_q and cu_seqlens_k must have as many elements, "
            f"got {sequences + 1} and {cu_seqlens_k.shape[0]}"
        )
    _check_shapes(tensors, sequences)
    max_seqlen_q, max_seqlen_k = (
        None if longest is None else min(integer(name, longest), FAR)
        for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k))
    )
    dropout_p, softcap = number("dropout_p", dropout_p), number("softcap", softcap)
    check_flags(is_causal=is_causal, return_lse=return_lse)
    check_options(dropout_p, window_size, softcap, causal_alignment)
    if alibi_slopes is not None and query.dtype == torch.float64:
        alibi_slopes = alibi_slopes.to(torch.float64)

    window_left, window_right = (min(n if isinstance(n, int) else n.__index__(), FAR) for n in window_size)
    D = query.shape[2]
    scale = (D**-0.5 if D else 1.0) if scale is None else number("scale", scale)
    used = {
        "cu_seqlens_q": True,
        "cu_seqlens_k": True,
        "is_causal": is_causal,
        "window_size": window_left >= 0 or window_right >= 0,
        "softcap": softcap > 0,
        "dropout_p": dropout_p > 0,
        "alibi_slopes": alibi_slopes is not None,
        "sinks": sinks is not None,
    }
    window_right = 0 if is_causal else window_right
    options = (scale, softcap, window_left, window_right, causal_alignment == "lower_right", dropout_p)
    heads_first = [t.transpose(0, 1).unsqueeze(0) for t in (query, key, value)]
    return _Prepared(
        (*heads_first, None, None, alibi_slopes, sinks),
        options,
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        Request(
            query.device.type,
            query.dtype,
            tuple(n for n, given in used.items() if given),
            head_dim=max(D, value.shape[2]),
        ),  # fmt: skip
    )


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    causal_alignment: str = "lower_right",
    return_lse: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Softmax attention within packed sequences of different lengths, without padding.

    Query tokens ``cu_seqlens_q[n]`` to ``cu_seqlens_q[n + 1]`` attend to key tokens ``cu_seqlens_k[n]`` to
    ``cu_seqlens_k[n + 1]`` as in :func:`fastattn.scaled_dot_product_attention`, whose formula holds within
    each sequence, with L and S its own lengths:

    .. math::
        s_{ij} &= \mathrm{cap}(\mathrm{scale} \cdot q_i \cdot k_j)
                  - \mathrm{slope}\,|i + \mathrm{offset} - j| \\
        \mathrm{out}_i &= \sum_j \mathrm{dropout}(e^{s_{ij} - \mathrm{lse}_i})\, v_j, \qquad
        \mathrm{lse}_i = \log\Big(e^{\mathrm{sink}} + \sum_j e^{s_{ij}}\Big)

    Args:
        query: (total_q, H, D), any strides, such as a slice of a packed (total, 3, H, D) projection.
        key: (total_k, Hkv, D). value: (total_k, Hkv, Dv). Hkv divides H; query head h reads head
            ``h // (H // Hkv)``.
        cu_seqlens_q, cu_seqlens_k: (N + 1,) int32 or int64, the bounds of N sequences, from 0 to total_q and
            total_k. Sequences may be empty on either side.
        max_seqlen_q, max_seqlen_k: the length of the longest sequence, or more. Only checked.
        dropout_p: probability of dropping a weight, as there.
        is_causal: query i of a sequence sees its keys up to i + offset.
        scale: factor of the scores, by default ``1 / sqrt(D)``.
        window_size: keys visible left and right of the diagonal i + offset, -1 = unlimited.
        softcap: c of ``cap(x) = c tanh(x / c)``, 0 = off.
        alibi_slopes: (H,) or (N, H) float32 (float64 beside float64). Has a gradient.
        sinks: (H,) one more logit per head that has no value; query's dtype or float32. Has a gradient.
        causal_alignment: "lower_right" (offset S - L, the meaning of flash-attn) or "upper_left" (offset 0).
        return_lse: also return lse.
        impl: "auto" or exactly one of "cpu", "reference", "torch", "triton", "cuda".

    Precision: as of :func:`fastattn.scaled_dot_product_attention`, and so are the gradients.

    Empty rows: a query that sees no key, as one of a sequence without keys, gives 0, lse = -inf (the sink if
    there is one) and no gradient. Nothing in one sequence, such as a NaN, reaches another.

    Returns:
        out (total_q, H, Dv) of the query's dtype; with ``return_lse`` also lse (H, total_q), float32 (float64
        for float64 inputs), natural logarithm, differentiable.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit together; on the CPU also bounds that do not
            start at 0, decrease, do not end at the number of tokens, or exceed ``max_seqlen``.
        ValueError: an option outside its range. TypeError: something else in place of a tensor or number.
        NotImplementedError: ``impl`` names an implementation that cannot run this call; the message says why.

    Source: packed form and alignment: flash-attn, https://github.com/Dao-AILab/flash-attention; Dao et al.,
    arXiv:2205.14135.

    Example:
        >>> import torch, fastattn
        >>> q, k, v = (torch.randn(10, 8, 64) for _ in range(3))
        >>> bounds = torch.tensor([0, 3, 10], dtype=torch.int32)  # two sequences, of 3 and of 7 tokens
        >>> fastattn.varlen_attention(q, k, v, bounds, bounds, is_causal=True).shape
        torch.Size([10, 8, 64])
    """
    call = _prepare(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=dropout_p,
        is_causal=is_causal, scale=scale, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks, causal_alignment=causal_alignment, return_lse=return_lse,
    )  # fmt: skip
    implementation = choose(call.request, impl)
    seed = draw_seed(call.options[-1], query.device)
    args = (*call.tensors, seed, *call.options, *call.sequences)
    if implementation == "reference" and not query.is_meta:  # which would read the bounds
        out, lse = reference.attention(*args)
    elif needs_function(call.tensors):
        out, lse = apply_function(Attention, *args)
    else:
        out, lse = call_op(forward_op, *args)
    out = out.squeeze(0).transpose(0, 1)
    return (out, lse.squeeze(0)) if return_lse else out


def _choice(*args, impl="auto", **kwargs):
    request = _prepare(*args, **kwargs).request
    return choose(request, impl), candidates(request)


varlen_attention._choice = _choice


def _pack_jagged(query, key, value, masks, enable_gqa: bool) -> list[Packed]:
    if any(mask is not None for mask in masks):
        raise NotImplementedError("attn_mask and key_padding_mask are not supported beside nested tensors")
    packed = []
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        jagged = isinstance(tensor, Tensor) and tensor.is_nested and tensor.layout is torch.jagged
        if not jagged or tensor.dim() != 4 or tensor._ragged_idx != 2:
            raise NotImplementedError(
                f"{name} must be a nested tensor (B, H, ragged, D) of layout=torch.jagged, as query is: "
                "nested (B, ragged, H, D) transposed"
            )
        if tensor.shape[0] != query.shape[0]:
            raise RuntimeError(f"{name} has {tensor.shape[0]} sequences, query {query.shape[0]}")
        packed.append(pack(tensor.transpose(1, 2)))
    # Tensors that share their bounds have one ragged size, whatever it is.
    if key.shape[2] != value.shape[2] and not torch.equal(packed[1].bounds, packed[2].bounds):
        raise RuntimeError("key and value must have the same lengths")
    H, Hkv = query.shape[1], key.shape[1]
    if H != Hkv and not enable_gqa:
        raise RuntimeError(
            f"query has {H} heads and key {Hkv}: enable_gqa=True lets query heads share key and value heads"
        )
    return packed


def attend_jagged(query, key, value, masks, enable_gqa: bool, **options) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`fastattn.scaled_dot_product_attention` of jagged nested tensors (B, H, ragged, D)."""
    queries, keys, values = _pack_jagged(query, key, value, masks, enable_gqa)
    results = varlen_attention(
        queries.tokens, keys.tokens, values.tokens, queries.bounds, keys.bounds, **options
    )
    if options["return_lse"]:
        out, lse = results
        return queries.restore(out).transpose(1, 2), queries.restore(lse.transpose(0, 1)).transpose(1, 2)
    return queries.restore(results).transpose(1, 2)


def choice_of_jagged(query, key, value, masks, enable_gqa: bool, **options):
    queries, keys, values = _pack_jagged(query, key, value, masks, enable_gqa)
    return _choice(queries.tokens, keys.tokens, values.tokens, queries.bounds, keys.bounds, **options)
