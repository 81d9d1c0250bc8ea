"""Linear attention: validates a call, chooses an implementation and runs it."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from fastattn._choose import KERNEL_DTYPES, candidates, choose
from fastattn.ops._common import (
    CPU_KEYS,
    apply_function,
    call_op,
    is_watched,
    may_skip_dispatcher,
    needs_function,
)
from fastattn.ops._linear_attention_autograd import (
    LinearAttention,
    forward_op,
    step_by_function,
    step_op,
    step_op_,
)
from fastattn.ops._linear_attention_call import LinearAttentionState, prepare, prepare_step
from fastattn.reference import linear_attention as reference

__all__ = ["LinearAttentionState", "linear_attention", "linear_attention_step"]

FeatureMap = str | Callable[[Tensor], Tensor]

_forward_on_cpu = forward_op._handle.redispatch_boxed
_step_on_cpu = step_op._handle.redispatch_boxed
_step_in_place_on_cpu = step_op_._handle.redispatch_boxed
# The dtypes of plain calls that need no choice any more: none until the CPU library was found.
_plain_dtypes: set[torch.dtype] = set()


def _is_common(tensors, flags, feature_map, eps, scale, impl) -> bool:
    """Whether the CPU op may have these as they are."""
    return (
        tensors[0].__class__ is tensors[1].__class__ is tensors[2].__class__ is Tensor
        and may_skip_dispatcher(*tensors)
        and tensors[0].dtype in _plain_dtypes
        and set(map(type, flags)) == {bool}
        and feature_map.__class__ is str
        and eps.__class__ is float
        and 0.0 <= eps < math.inf
        and (scale is None or scale.__class__ is float)
        and (impl == "auto" or impl == "cpu")
    )


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: FeatureMap = "elu",
    is_causal: bool = False,
    normalize: bool = True,
    eps: float = 1e-6,
    scale: float | None = None,
    decay: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: LinearAttentionState | None = None,
    return_state: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, LinearAttentionState]:
    r"""Linear attention: the softmax replaced by a product of features, its cost linear in the length.

    .. math::
        S_t &= e^{\mathrm{decay}_t} S_{t-1} + \phi(k_t)\, v_t^\top, \qquad
        z_t = e^{\mathrm{decay}_t} z_{t-1} + \phi(k_t) \\
        \mathrm{out}_t &= \frac{\phi(q_t)^\top S_t}{\phi(q_t) \cdot z_t + \mathrm{eps}}
        \quad\text{or, if not normalized,}\quad \mathrm{scale}\, \phi(q_t)^\top S_t

    Causal as written; otherwise every query sees the sums over all keys of its sequence. ``S_0, z_0`` are
    ``initial_state`` or zero. A sequence cut into pieces that hand the state on, or fed token by token to
    :func:`linear_attention_step`, gives the same results and gradients as the whole.

    Args:
        query: (B, H, L, D), any strides. With ``cu_seqlens``: (total, H, D).
        key: (B, Hkv, S, D). value: (B, Hkv, S, Dv). Hkv divides H; query head h reads key head
            ``h // (H // Hkv)``. With ``cu_seqlens``: (total, Hkv, D) and (total, Hkv, Dv).
        feature_map: phi, on the last dimension: "elu" (elu(x) + 1), "relu", "exp", "identity", or a callable
            (a module with parameters, say) that turns (..., D) of the inputs' dtype into (..., features);
            keys that are padding are zero there.
        is_causal: query t sees keys up to t; L must be S.
        normalize: divide by the sum of weights.
        eps: added to that sum.
        scale: factor of the output if not normalized, by default 1; it never enters the state, and has no
            effect on a normalized output.
        decay: logarithm of what the state is multiplied with before each token is added, (H,) or (B, H, L);
            (total, H) with ``cu_seqlens``. Of float32 or the query's dtype; needs ``is_causal``. -inf forgets
            everything before. Has a gradient, which is 0 where the decay's exponential is.
        key_padding_mask: (B, S) boolean, True = attend, padding left, right or anywhere. A padded token
            leaves the state as it is, without decay; its query still gets an output.
        cu_seqlens: (N + 1,) int32 or int64, the bounds of N sequences packed one behind the other, from 0 to
            total; sequences may be empty. The state is then one of N entries.
        initial_state: the state to start from, for each sequence. Has a gradient.
        return_state: also return the state after the last token.
        impl: "auto" or exactly one of "cpu", "reference", "triton", "cuda"; :func:`fastattn.explain` tells
            which one runs.

    Precision: state, denominators and sums are float32 (float64 for float64), and the output is rounded once
    to the query's dtype. Under autocast query, key and value are cast. All gradients exist to second
    order; forward mode only with ``impl="reference"``.

    Zero denominators: a query that sees no key and no state, or whose weights add up to exactly 0 (as with
    "relu"), gives 0 and no gradient, also with ``eps=0``. Features should not be negative: with "identity",
    or a callable whose features are, the weights of a query may nearly cancel, and its output is then large,
    of either sign and sensitive to rounding. There is never a division by zero; but use
    ``normalize=False`` for features of mixed sign. What no query sees, such as padding, never matters, even
    if it is NaN.

    Returns:
        out (B, H, L, Dv), or (total, H, Dv) with ``cu_seqlens``, of the query's dtype; with ``return_state``
        also the :class:`LinearAttentionState`.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit together; bounds that are none.
        ValueError: an option outside its range, or two that exclude each other. TypeError: something else in
        place of a tensor.
        NotImplementedError: ``impl`` names an implementation that cannot run this call; the message says why.

    Source: Katharopoulos et al., arXiv:2006.16236; decay per head: Sun et al. (RetNet), arXiv:2307.08621; per
    token: Dao and Gu (Mamba-2), arXiv:2405.21060; chunks: Hua et al., arXiv:2202.10447.

    Example:
        >>> q, k, v = (torch.randn(2, 8, 128, 64) for _ in range(3))
        >>> out, state = fastattn.linear_attention(q, k, v, is_causal=True, return_state=True)
        >>> more = fastattn.linear_attention(q, k, v, is_causal=True, initial_state=state)
    """
    if decay is None and key_padding_mask is None and cu_seqlens is None and not is_compiling():
        kv, z = initial_state if initial_state.__class__ is LinearAttentionState else (None, None)
        tensors = (query, key, value) if kv is None else (query, key, value, kv, z)
        flags = is_causal, normalize, return_state
        if (kv is not None or initial_state is None) and _is_common(
            tensors, flags, feature_map, eps, scale, impl
        ):
            try:
                out, _, kv, z = _forward_on_cpu(
                    CPU_KEYS, query, key, value, None, None, None, kv, z, feature_map, is_causal, normalize,
                    eps, 1.0 if scale is None else scale, return_state,
                )  # fmt: skip
                return (out, LinearAttentionState(kv, z)) if return_state else out
            except RuntimeError:
                pass  # what the kernel refuses takes the long way, which says why or knows a form it accepts

    call = prepare(
        query, key, value, feature_map, is_causal, normalize, eps, scale, decay, key_padding_mask, cu_seqlens,
        initial_state, return_state,
    )  # fmt: skip
    tensors, options = call.tensors, call.options
    implementation = choose(call.request, impl)
    if implementation == "cpu" and not is_compiling():
        _plain_dtypes.update(KERNEL_DTYPES)
    if implementation == "reference":
        out, _, kv, z = reference.linear_attention(*tensors, *options)
    elif needs_function(tensors):
        out, _, kv, z = apply_function(LinearAttention, *tensors, *options)
    else:
        out, _, kv, z = call_op(forward_op, *tensors, *options)
    if cu_seqlens is not None:
        out = out.squeeze(0).transpose(0, 1)
    return (out, LinearAttentionState(kv, z)) if return_state else out


def _choice(*args, impl="auto", **options):
    request = prepare(*args, **options, map_features=False).request
    return choose(request, impl), candidates(request)


linear_attention._choice = _choice


def linear_attention_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: LinearAttentionState,
    *,
    feature_map: FeatureMap = "elu",
    normalize: bool = True,
    eps: float = 1e-6,
    scale: float | None = None,
    decay: Tensor | None = None,
    inplace: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, LinearAttentionState]:
    r"""The next token of causal :func:`linear_attention`, at a cost that does not depend on the position.

    .. math::
        S' = e^{\mathrm{decay}} S + \phi(k)\, v^\top, \qquad z' = e^{\mathrm{decay}} z + \phi(k), \qquad
        \mathrm{out} = \frac{\phi(q)^\top S'}{\phi(q) \cdot z' + \mathrm{eps}}

    Args:
        query: (B, H, D), any strides. key: (B, Hkv, D). value: (B, Hkv, Dv).
        state: what the tokens before left behind; ``LinearAttentionState.zeros`` before the first one.
        decay: (H,) or (B, H).
        inplace: overwrite ``state`` and return it, instead of leaving it as it is and returning a new one;
            not while gradients are recorded.
        feature_map, normalize, eps, scale, impl: as in :func:`linear_attention`; precision and zero
            denominators too. A step has all gradients, to second order.

    Returns:
        out (B, H, Dv) of the query's dtype, and the new state.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit together; ``inplace`` with gradients.
        ValueError, TypeError, NotImplementedError: as :func:`linear_attention`.

    Source: Katharopoulos et al., arXiv:2006.16236, section 3.4.

    Example:
        >>> state = fastattn.LinearAttentionState.zeros(2, 8, 64, 64)
        >>> q, k, v = (torch.randn(2, 8, 64) for _ in range(3))
        >>> out, state = fastattn.linear_attention_step(q, k, v, state)
    """
    # The plain step, in as few steps as possible: generation takes millions of them. Everything it does not
    # recognise takes the long way below, and so does what the kernel refuses, which is told why there.
    if (
        not is_compiling()
        and query.__class__ is key.__class__ is value.__class__ is Tensor
        and state.__class__ is LinearAttentionState
        and feature_map.__class__ is str
        and normalize.__class__ is inplace.__class__ is bool
        and eps.__class__ is float
        and 0.0 <= eps < math.inf
        and (scale is None or scale.__class__ is float)
        and (decay is None or (decay.__class__ is Tensor and not decay.is_nested and not decay.is_neg()))
        and (impl == "auto" or impl == "cpu")
        and query.is_cpu
        and query.dtype in _plain_dtypes
    ):
        kv, z = state
        # What else is no plain tensor the kernel refuses.
        if (
            kv.__class__ is z.__class__ is Tensor
            and not (query.is_nested or key.is_nested or value.is_nested or kv.is_nested or z.is_nested)
            and not (query.is_neg() or key.is_neg() or value.is_neg() or kv.is_neg() or z.is_neg())
            and not (
                torch.is_grad_enabled()
                and (
                    query.requires_grad
                    or key.requires_grad
                    or value.requires_grad
                    or kv.requires_grad
                    or z.requires_grad
                    or (decay is not None and decay.requires_grad)
                )
            )
            and forward_ad._current_level < 0
            and not _is_any_autocast_enabled()
            and not is_watched()
        ):
            factor = 1.0 if scale is None else scale
            try:
                if not inplace:
                    out, kv, z = _step_on_cpu(
                        CPU_KEYS, query, key, value, kv, z, decay, feature_map, normalize, eps, factor
                    )
                    return out, LinearAttentionState(kv, z)
                if kv.is_contiguous() and z.is_contiguous():
                    out = _step_in_place_on_cpu(
                        CPU_KEYS, query, key, value, kv, z, decay, feature_map, normalize, eps, factor
                    )
                    # The kernel was called behind autograd's back: what it saved of the state has changed.
                    torch._C._increment_version(state)
                    return out, state
            except RuntimeError:
                pass

    call = prepare_step(query, key, value, state, feature_map, normalize, eps, scale, decay, inplace)
    tensors, options = call.tensors, call.options
    implementation = choose(call.request, impl)
    if implementation == "cpu" and not is_compiling():
        _plain_dtypes.update(KERNEL_DTYPES)
    if inplace and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            "inplace=True would overwrite the state that a gradient needs: "
            "use inplace=False, or torch.no_grad()"
        )
    if implementation == "reference":
        out, kv, z = reference.linear_attention_step(*tensors, *options)
    elif needs_function(tensors):
        out, kv, z = step_by_function(*tensors, *options)
    elif inplace and all(t.is_contiguous() and (is_compiling() or not t.is_neg()) for t in tensors[3:5]):
        return step_op_(*tensors, *options), LinearAttentionState(*state)
    else:
        out, kv, z = call_op(step_op, *tensors, *options)
    if inplace:
        kv, z = tensors[3].copy_(kv), tensors[4].copy_(z)
    return out, LinearAttentionState(kv, z)


def _step_choice(*args, impl="auto", **options):
    request = prepare_step(*args, **options, map_features=False).request
    return choose(request, impl), candidates(request)


linear_attention_step._choice = _step_choice
