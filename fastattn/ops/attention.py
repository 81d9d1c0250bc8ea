"""Softmax attention: validates a call, chooses an implementation and runs it."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastattn._choose import candidates, choose
from fastattn.ops._attention_autograd import (
    Attention,
    AttentionWeights,
    apply_plain_attention,
    forward_op,
    forward_with_weights_op,
)
from fastattn.ops._attention_call import (
    UNLIMITED,
    Prepared,
    allow_common,
    common_scale,
    prepare,
    restore,
    wants_gradient,
)
from fastattn.ops._common import CPU_KEYS, apply_function, call_op, needs_function
from fastattn.reference import attention as reference

__all__ = ["attention_with_weights", "draw_seed", "scaled_dot_product_attention"]

_forward_on_cpu = forward_op._handle.redispatch_boxed
_forward_with_weights_on_cpu = forward_with_weights_op._handle.redispatch_boxed


def draw_seed(dropout_p: float, device: torch.device | str) -> Tensor | None:
    """One draw from torch's generator decides a call's whole dropout pattern, whatever computes it."""
    return None if dropout_p == 0.0 else torch.randint(0, 2**63 - 1, (1,), device=device)


def _is_jagged(query) -> bool:
    return isinstance(query, Tensor) and query.is_nested and query.layout is torch.jagged


def _run(call: Prepared, seed: Tensor | None, implementation: str) -> tuple[Tensor, Tensor | None]:
    tensors = call[:7]
    if implementation in ("cpu", "triton"):
        if needs_function(tensors):
            return apply_function(Attention, *tensors, seed, *call.options)
        return call_op(forward_op, *tensors, seed, *call.options)
    if implementation == "torch":
        gqa = call.key.shape[1] != call.query.shape[1]
        if call.query.device.type == "cpu":
            # torch's fused CPU kernel turns rows of NaN into zeros; its composed path does not.
            with sdpa_kernel(SDPBackend.MATH):
                return _torch_attention(call, gqa), None
        return _torch_attention(call, gqa), None
    return reference.attention(*tensors, seed, *call.options)


def _torch_attention(call: Prepared, enable_gqa: bool) -> Tensor:
    return F.scaled_dot_product_attention(
        call.query, call.key, call.value, scale=call.options[0], enable_gqa=enable_gqa
    )


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    causal_alignment: str = "upper_left",
    return_lse: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Softmax attention: ``torch.nn.functional.scaled_dot_product_attention`` with more options.

    .. math::
        s_{ij} &= \mathrm{cap}(\mathrm{scale} \cdot q_i \cdot k_j) + \mathrm{mask}_{ij}
                  - \mathrm{slope}\,|i + \mathrm{offset} - j|, \qquad
        \mathrm{cap}(x) = c \tanh(x / c) \\
        \mathrm{lse}_i &= \log\Big(e^{\mathrm{sink}} + \sum_{j\ \mathrm{visible}} e^{s_{ij}}\Big) \\
        \mathrm{out}_i &= \sum_{j\ \mathrm{visible}} \mathrm{dropout}(e^{s_{ij} - \mathrm{lse}_i})\, v_j

    A key is visible to a query unless a boolean mask is False there, a float mask is -inf,
    ``key_padding_mask`` is False, or it lies outside ``[i + offset - left, i + offset + right]``. Masks,
    causality, window and padding combine.

    Args:
        query: (..., H, L, D), any strides; (L, D) and any number of leading dimensions work, and broadcast.
            Or nested tensors (B, H, ragged, D) of ``layout=torch.jagged``, without masks; results are nested.
        key: (..., Hkv, S, D). value: (..., Hkv, S, Dv).
        attn_mask: broadcastable to (..., H, L, S); boolean (True = attend), or added to the scaled scores: of
            the query's dtype or float32. Has a gradient in its own shape. Also one of
            ``torch.nn.attention.bias``.
        dropout_p: probability of dropping a weight; the others are scaled by ``1 / (1 - dropout_p)``. Applied
            whenever it is not 0. The pattern depends on torch's generator alone.
        is_causal: query i sees keys up to i + offset, also in combination with a mask.
        scale: factor of the scores, by default ``1 / sqrt(D)``; any number, also 0 or negative.
        enable_gqa: allows Hkv to divide H; query head h reads key head ``h // (H // Hkv)``.
        window_size: keys visible left and right of the diagonal, -1 = unlimited.
        softcap: c above, 0 = off.
        alibi_slopes: (H,) or (B, H) float32 (float64 beside float64). Has a gradient.
        sinks: (H,) one more logit per head that takes probability and has no value; query's dtype or float32.
            Has a gradient.
        key_padding_mask: (B, S) boolean, True = attend. For 3-D inputs (H, L, D) it is (S,), or (N, S) if the
            leading dimension is a batch.
        causal_alignment: the corner ``is_causal``, ``window_size`` and ``alibi_slopes`` are anchored to:
            "upper_left" (offset 0) or "lower_right" (offset S - L).
        return_lse: also return lse.
        impl: "auto" or exactly one of "cpu", "torch", "reference", "triton", "cuda"; :func:`fastattn.explain`
            tells which one runs.

    Precision: products and sums in float32 (float64 for float64), one rounding to the query's dtype at the
    end. Under autocast query, key and value are cast as by torch. All gradients exist to second order;
    forward mode only with ``impl="reference"``.

    Empty rows: a query that sees no key gives 0, lse = -inf (the sink if there is one) and no gradient, even
    if it or its incoming gradient is NaN. What no query sees never matters; a visible NaN or infinity is
    never hidden.

    Returns:
        out (..., H, L, Dv) of the query's dtype; with ``return_lse`` also lse (..., H, L), float32 (float64
        for float64 inputs), natural logarithm, differentiable.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit together.
        ValueError: an option outside its range. TypeError: something else in place of a tensor.
        NotImplementedError: ``impl`` names an implementation that cannot run this call; the message says why.

    Source: Vaswani et al., arXiv:1706.03762; log-sum-exp form and recomputation: Dao et al.,
    arXiv:2205.14135; ALiBi: Press et al., arXiv:2108.12409; sinks: Xiao et al., arXiv:2309.17453.

    Example:
        >>> q, k, v = (torch.randn(2, 8, 128, 64) for _ in range(3))
        >>> out, lse = fastattn.scaled_dot_product_attention(q, k, v, is_causal=True, return_lse=True)
    """
    if (
        alibi_slopes is None
        and sinks is None
        and (impl == "auto" or impl == "cpu")
        and (window_size is UNLIMITED or window_size == UNLIMITED)
        and softcap.__class__ is float
        and softcap == 0.0
        and causal_alignment == "upper_left"
        and return_lse.__class__ is bool
        and (
            factor := common_scale(
                query, key, value, attn_mask, key_padding_mask, dropout_p, is_causal, scale, enable_gqa
            )
        )
        is not None
    ):
        right = 0 if is_causal else -1
        seed = None if dropout_p == 0.0 else draw_seed(dropout_p, "cpu")
        try:
            if wants_gradient(query, key, value, attn_mask):
                mask = attn_mask[None, None] if attn_mask is not None and attn_mask.dim() == 2 else attn_mask
                out, lse = apply_plain_attention(
                    query, key, value, mask, key_padding_mask, None, None, seed,
                    factor, 0.0, -1, right, False, dropout_p,
                )  # fmt: skip
            elif is_causal or seed is not None:
                out, lse = _forward_on_cpu(
                    CPU_KEYS, query, key, value, attn_mask, key_padding_mask, None, None, seed,
                    factor, 0.0, -1, right, False, dropout_p,
                )  # fmt: skip
            else:
                out, lse = _forward_on_cpu(
                    CPU_KEYS, query, key, value, attn_mask, key_padding_mask, None, None, None, factor
                )
            return (out, lse) if return_lse else out
        except RuntimeError:
            pass  # what the kernel refuses takes the long way, which says why or knows a form it accepts

    if _is_jagged(query):
        from fastattn.ops.varlen_attention import attend_jagged  # which is built on this module

        return attend_jagged(
            query, key, value, (attn_mask, key_padding_mask), enable_gqa, dropout_p=dropout_p,
            is_causal=is_causal, scale=scale, window_size=window_size, softcap=softcap,
            alibi_slopes=alibi_slopes, sinks=sinks, causal_alignment=causal_alignment, return_lse=return_lse,
            impl=impl,
        )  # fmt: skip
    call = prepare(
        (query, key, value, attn_mask, key_padding_mask, alibi_slopes, sinks), dropout_p, is_causal, scale,
        enable_gqa, window_size, softcap, causal_alignment, return_lse,
    )  # fmt: skip
    implementation = choose(call.request, impl)
    if implementation == "cpu" and not is_compiling():
        allow_common()
    out, lse = _run(call, draw_seed(call.options[-1], query.device), implementation)
    return (restore(out, call), restore(lse, call)) if return_lse else restore(out, call)


def _choice(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, *,
    key_padding_mask=None, alibi_slopes=None, sinks=None, impl="auto", **options,
):  # fmt: skip
    if _is_jagged(query):
        from fastattn.ops.varlen_attention import choice_of_jagged

        return choice_of_jagged(
            query, key, value, (attn_mask, key_padding_mask), enable_gqa, dropout_p=dropout_p,
            is_causal=is_causal, scale=scale, alibi_slopes=alibi_slopes, sinks=sinks, impl=impl,
            **({"causal_alignment": "upper_left"} | options),
        )  # fmt: skip
    tensors = (query, key, value, attn_mask, key_padding_mask, alibi_slopes, sinks)
    call = prepare(tensors, dropout_p, is_causal, scale, enable_gqa, **options)
    return choose(call.request, impl), candidates(call.request)


scaled_dot_product_attention._choice = _choice


def attention_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    sinks: Tensor | None = None,
    average_weights: bool = True,
    impl: str = "auto",
    **options,
) -> tuple[Tensor, Tensor]:
    """:func:`scaled_dot_product_attention` and the weights it summed the values with, after dropout.

    Averaged over heads, nothing of size (B, H, L, S) is held, unless a gradient flows back into the weights.
    Sinks take their part of the probability and have no weight in the result. ``options`` are window_size,
    softcap and causal_alignment.

    Returns:
        out (..., H, L, Dv), and the weights in the query's dtype: their mean over heads (..., L, S), or (...,
        H, L, S) with ``average_weights=False``. Rows that see nothing have zero weights. Both are
        differentiable.

    Example:
        >>> out, weights = attention_with_weights(q, k, v, is_causal=True)
    """
    if (
        (impl == "auto" or impl == "cpu")
        and sinks is None
        and not options
        and average_weights.__class__ is bool
        and (
            factor := common_scale(
                query, key, value, attn_mask, key_padding_mask, dropout_p, is_causal, scale, enable_gqa
            )
        )
        is not None
        and not wants_gradient(query, key, value, attn_mask)
    ):
        numbers = (factor, 0.0, -1, 0 if is_causal else -1, False, dropout_p)
        seed = draw_seed(dropout_p, "cpu")
        try:
            out, _, weights = _forward_with_weights_on_cpu(
                CPU_KEYS, query, key, value, attn_mask, key_padding_mask, None, None, seed, *numbers,
                average_weights,
            )  # fmt: skip
            return out, weights
        except RuntimeError:
            pass  # takes the long way, see scaled_dot_product_attention

    tensors = (query, key, value, attn_mask, key_padding_mask, None, sinks)
    call = prepare(tensors, dropout_p, is_causal, scale, enable_gqa, return_lse=True, **options)
    implementation = choose(call.request, impl)
    seed = draw_seed(call.options[-1], query.device)
    tensors = call[:7]
    if implementation != "reference" and not needs_function(tensors):
        out, _, weights = call_op(forward_with_weights_op, *tensors, seed, *call.options, average_weights)
    else:
        out, lse = _run(call, seed, implementation)
        args = (call.query, call.key, lse, *tensors[3:], seed, *call.options, average_weights)
        if implementation == "reference":
            weights = reference.attention_weights(*args)
        else:
            weights = apply_function(AttentionWeights, *args)
    weights = restore(weights.unsqueeze(1) if average_weights else weights, call)
    if average_weights and call.head_dims == 1:
        weights = weights.squeeze(-3)
    return restore(out, call), weights
