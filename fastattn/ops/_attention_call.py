"""What a call of softmax attention may look like: checks of its arguments, and the form that the ops take."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from fastattn._choose import KERNEL_DTYPES, Request
from fastattn.ops._common import autocast_dtype, check_dense, check_flags, is_watched, number

__all__ = [
    "FAR", "UNLIMITED", "Prepared", "allow_common", "autocast_tensors", "check_options", "check_tensors",
    "common_scale", "prepare", "restore", "shapes_found", "wants_gradient",
]  # fmt: skip

UNLIMITED = (-1, -1)
FAR = 2**60  # windows are capped far beyond any length, so that adding positions to them cannot overflow
# The dtypes of common calls that need no choice any more: none until the CPU library was found.
_common_dtypes: set[torch.dtype] = set()


class Prepared(NamedTuple):
    """A checked call: tensors in the four-dimensional form of the ops, and how to undo that form.

    ``batch`` are the caller's dimensions before the heads; ``head_dims`` is 1, or 0 where (L, D) has no
    dimension of heads, or -1 where one was inserted behind the batch.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    key_padding_mask: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    options: tuple[float, float, int, int, bool, float]
    batch: tuple[int, ...]
    head_dims: int
    request: Request


_NAMES = ("query", "key", "value", "attn_mask", "key_padding_mask", "alibi_slopes", "sinks")


def shapes_found(tensors: Sequence[Tensor | None]) -> str:
    """The shapes of the arguments, for error messages; evaluated only where there is an error."""
    shapes = [f"{n} {tuple(t.shape)}" for n, t in zip(_NAMES, tensors, strict=False) if t is not None]
    return ", ".join(shapes)


def _broadcast(
    what: str, shapes: Sequence[Sequence[int]], tensors: Sequence[Tensor | None]
) -> tuple[int, ...]:
    result: list[int] = []
    for shape in shapes:
        result = [1] * (len(shape) - len(result)) + result
        for n in range(1, len(shape) + 1):
            if shape[-n] != 1:
                if result[-n] != 1 and result[-n] != shape[-n]:
                    raise RuntimeError(f"{what} do not broadcast: {shapes_found(tensors)}")
                result[-n] = shape[-n]
    return tuple(result)


def check_tensors(tensors: Sequence[Tensor | None]) -> None:
    query = tensors[0]
    check_dense(_NAMES, tensors)
    for name, tensor in zip(_NAMES, tensors[:3], strict=False):
        if tensor.dim() < 2:
            raise RuntimeError(f"{name} must be (..., length, head dim), got {shapes_found(tensors)}")
    _, _, _, attn_mask, key_padding_mask, alibi_slopes, sinks = tensors
    wide = (torch.float32, torch.float64) if query.dtype == torch.float64 else (torch.float32,)
    for name, tensor, dtypes in (
        ("attn_mask", attn_mask, (torch.bool, query.dtype, torch.float32)),
        ("key_padding_mask", key_padding_mask, (torch.bool,)),
        ("alibi_slopes", alibi_slopes, wide),
        ("sinks", sinks, (query.dtype, torch.float32)),
    ):
        if tensor is not None and tensor.dtype not in dtypes:
            allowed = " or ".join(dict.fromkeys([str(d) for d in dtypes]))
            raise RuntimeError(f"{name} must be {allowed} beside a {query.dtype} query, got {tensor.dtype}")


def check_options(dropout_p, window_size, softcap, causal_alignment) -> None:
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be between 0 and 1, got {dropout_p}")
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap must be finite and not negative, got {softcap}")
    if causal_alignment not in ("upper_left", "lower_right"):
        raise ValueError(f"causal_alignment must be 'upper_left' or 'lower_right', got {causal_alignment!r}")
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size must be a pair (left, right), got {window_size!r}")
    if not all((isinstance(n, int) or hasattr(n, "__index__")) and n >= -1 for n in window_size):
        raise ValueError(
            f"window_size must hold two integers of at least -1 (unlimited), got {window_size!r}"
        )


def _is_causal_bias(mask) -> bool:
    # Known by its name: the module of the class imports torch._dynamo, which takes as long as torch itself.
    kinds = () if mask is None or type(mask) is Tensor else type(mask).__mro__
    return any(kind.__module__ == "torch.nn.attention.bias" for kind in kinds)


def _of_causal_bias(bias: Tensor, L: int, S: int, is_causal: bool, alignment: str, anchored: bool):
    """attn_mask, is_causal and causal_alignment that mean the same as torch's object for a causal mask.

    ``anchored`` says that other options depend on the alignment, which then has to stay as it is.
    """
    if (bias.seq_len_q, bias.seq_len_kv) != (L, S):
        raise RuntimeError(
            f"attn_mask is a causal bias of ({bias.seq_len_q}, {bias.seq_len_kv}), the scores are ({L}, {S})"
        )
    lower_right = bias.variant.name == "LOWER_RIGHT"
    if L == S or lower_right == (alignment == "lower_right"):
        return None, True, alignment
    if not (is_causal or anchored):
        return None, True, "lower_right" if lower_right else "upper_left"
    return torch.ones(L, S, dtype=torch.bool).tril(S - L if lower_right else 0), is_causal, alignment


def autocast_tensors(tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    # As torch's autocast of its own function, except that float32 masks stay float32: a finite float32
    # minimum rounded to float16 would become -inf, and hide what was only discouraged.
    dtype = autocast_dtype(tensors[0])
    if dtype is None:
        return tensors

    def cast(tensor, *keep):
        lower = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype not in keep
        return tensor.to(dtype) if lower else tensor

    query, key, value = (cast(t, torch.float64) for t in tensors[:3])
    attn_mask, sinks = (cast(t, torch.float64, torch.float32) for t in (tensors[3], tensors[6]))
    return query, key, value, attn_mask, tensors[4], tensors[5], sinks


def prepare(
    tensors: Sequence[Tensor | None], dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
    window_size=UNLIMITED, softcap=0.0, causal_alignment="upper_left", return_lse=False,
) -> Prepared:  # fmt: skip
    if _is_any_autocast_enabled():
        tensors = autocast_tensors(tensors)
    causal_bias = tensors[3] if _is_causal_bias(tensors[3]) else None
    if causal_bias is not None:
        tensors = (*tensors[:3], None, *tensors[4:])
    check_tensors(tensors)
    dropout_p, softcap = number("dropout_p", dropout_p), number("softcap", softcap)
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa, return_lse=return_lse)
    check_options(dropout_p, window_size, softcap, causal_alignment)
    query, key, value, attn_mask, key_padding_mask, alibi_slopes, sinks = tensors
    window_left, window_right = [n if isinstance(n, int) else n.__index__() for n in window_size]
    if causal_bias is not None:
        L, S = query.shape[-2], key.shape[-2]
        anchored = alibi_slopes is not None or window_left >= 0 or window_right >= 0
        attn_mask, is_causal, causal_alignment = _of_causal_bias(
            causal_bias, L, S, is_causal, causal_alignment, anchored
        )
        if attn_mask is not None:
            attn_mask = attn_mask.to(query.device)
            tensors = (*tensors[:3], attn_mask, *tensors[4:])
    D = query.shape[-1]
    if key.shape[-1] != D:
        raise RuntimeError(f"query and key must have the same head dim: {shapes_found(tensors)}")
    if value.shape[-2] != key.shape[-2]:
        raise RuntimeError(f"key and value must have the same length: {shapes_found(tensors)}")
    if alibi_slopes is not None and query.dtype == torch.float64:
        tensors = (*tensors[:5], alibi_slopes.to(torch.float64), sinks)

    shape, arranged = query.shape, tensors
    if attn_mask is not None and attn_mask.dim() < 4:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        arranged = (*tensors[:3], attn_mask, *tensors[4:])
    if len(shape) == 4 and _is_arranged(arranged, enable_gqa):
        tensors, batch, head_dims = arranged, shape[:1], 1
    else:
        tensors, batch, head_dims = _arrange(tensors, enable_gqa)
    used = []
    if is_causal:
        used.append("is_causal")
    if window_left >= 0 or window_right >= 0:
        used.append("window_size")
    if softcap > 0:
        used.append("softcap")
    if dropout_p > 0:
        used.append("dropout_p")
    if return_lse:
        used.append("return_lse")
    for name, tensor in zip(_NAMES[3:], tensors[3:], strict=True):
        if tensor is not None:
            used.append(name)
    scale = (D**-0.5 if D else 1.0) if scale is None else number("scale", scale)
    window_left, window_right = min(window_left, FAR), 0 if is_causal else min(window_right, FAR)
    options = (scale, softcap, window_left, window_right, causal_alignment == "lower_right", dropout_p)
    head_dim = max(D, value.shape[-1])
    request = Request(query.device.type, query.dtype, tuple(used), head_dim=head_dim)
    return Prepared(*tensors, options, batch, head_dims, request)


def _is_arranged(tensors: Sequence[Tensor | None], enable_gqa: bool) -> bool:
    """Whether the tensors are in the form of the ops already, as they nearly always are."""
    query, key, value, attn_mask, key_padding_mask, alibi_slopes, sinks = tensors
    if key.dim() != 4 or value.dim() != 4:
        return False
    (B, H, L, _), (key_batch, Hkv, S, _), value_shape = query.shape, key.shape, value.shape
    return (
        B == key_batch == value_shape[0]
        and Hkv == value_shape[1]
        and (H == Hkv or (enable_gqa and Hkv > 0 and H % Hkv == 0))
        and (
            attn_mask is None
            or (
                attn_mask.dim() == 4
                and all(n == 1 or n == m for n, m in zip(attn_mask.shape, (B, H, L, S), strict=True))
            )
        )
        and (key_padding_mask is None or key_padding_mask.shape == (B, S))
        and (alibi_slopes is None or alibi_slopes.shape == (H,) or alibi_slopes.shape == (B, H))
        and (sinks is None or sinks.shape == (H,))
    )


def _arrange(
    tensors: Sequence[Tensor | None], enable_gqa: bool
) -> tuple[Sequence[Tensor | None], tuple[int, ...], int]:
    """Any number of leading dimensions, broadcasting as in a matrix product, to the four of the ops."""
    given = tensors
    query, key, value, attn_mask, key_padding_mask, alibi_slopes, sinks = tensors
    L, S = query.shape[-2], key.shape[-2]
    dims = max(query.dim(), key.dim(), value.dim()) - 2
    # A mask that has heads gives them to the result, too.
    head_dims = min(max(dims, 0 if attn_mask is None else attn_mask.dim() - 2), 1)
    if (
        dims == 1
        and key_padding_mask is not None
        and key_padding_mask.dim() == 2
        and key_padding_mask.shape[0] != 1
    ):
        # (N, L, D) with one padding mask per leading index: that index is a batch of one head, not heads.
        query, key, value = query.unsqueeze(-3), key.unsqueeze(-3), value.unsqueeze(-3)
        if attn_mask is not None and attn_mask.dim() >= 3:
            attn_mask = attn_mask.unsqueeze(-3)
        head_dims = -1
    elif dims <= 1:
        if key_padding_mask is not None and key_padding_mask.dim() == 2 and key_padding_mask.shape[0] == 1:
            key_padding_mask = key_padding_mask[0]
        if alibi_slopes is not None and alibi_slopes.dim() == 2 and alibi_slopes.shape[0] == 1:
            alibi_slopes = alibi_slopes[0]

    leads = [t.shape[:-2] for t in (query, key, value)]
    if attn_mask is not None:
        while attn_mask.dim() < 2:
            attn_mask = attn_mask.unsqueeze(0)
        if attn_mask.shape[-1] not in (1, S) or attn_mask.shape[-2] not in (1, L):
            raise RuntimeError(f"attn_mask must broadcast to (..., {L}, {S}), got {shapes_found(given)}")
        leads.append(attn_mask.shape[:-2])
    batches = [lead[:-1] for lead in leads]
    batch_dims = max([len(b) for b in batches])
    if key_padding_mask is not None:
        if not 1 <= key_padding_mask.dim() <= batch_dims + 1 or key_padding_mask.shape[-1] != S:
            raise RuntimeError(f"key_padding_mask must be (batch, {S}), got {shapes_found(given)}")
        batches.append(key_padding_mask.shape[:-1])
    if alibi_slopes is not None:
        if not 1 <= alibi_slopes.dim() <= batch_dims + 1:
            raise RuntimeError(f"alibi_slopes must be (heads,) or (batch, heads), got {shapes_found(given)}")
        batches.append(alibi_slopes.shape[:-1])
    batch = _broadcast("batch dimensions", batches, given)

    heads = [lead[-1] if lead else 1 for lead in leads]
    H, key_heads, value_heads = heads[:3]
    if enable_gqa:
        for n in (key_heads, value_heads):
            if (H % n != 0) if n > 0 else H > 0:
                raise RuntimeError(
                    f"with enable_gqa=True key and value heads must divide the query's: {shapes_found(given)}"
                )
        if attn_mask is not None:
            (H,) = _broadcast("heads of query and attn_mask", [(H,), (heads[3],)], given)
    else:
        what = "heads (enable_gqa=True lets query heads share key and value heads)"
        (H,) = _broadcast(what, [(h,) for h in heads], given)
    for name, tensor in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if tensor is not None and (
            tensor.dim() == 0 or tensor.shape[-1] != H or (name == "sinks" and tensor.dim() > 1)
        ):
            raise RuntimeError(
                f"{name} must have one entry for each of the {H} heads, got {shapes_found(given)}"
            )

    Hkv = key_heads
    if key_heads != value_heads:
        # Heads that key and value share differently are written out; equal sharing is the kernel's business.
        Hkv = H
        key = key.repeat_interleave(H // key_heads, -3) if 1 < key_heads < H else key
        value = value.repeat_interleave(H // value_heads, -3) if 1 < value_heads < H else value

    if attn_mask is not None:
        inner = (*(1,) * (3 - attn_mask.dim()), *attn_mask.shape)[-3:]
        if all(n == 1 for n in attn_mask.shape[:-3]):
            attn_mask = attn_mask.reshape(1, *inner)
        else:
            attn_mask = _join(attn_mask, batch, inner)
    if key_padding_mask is not None:
        key_padding_mask = _join(key_padding_mask, batch, (S,))
    if alibi_slopes is not None and alibi_slopes.dim() > 1:
        alibi_slopes = _join(alibi_slopes, batch, (H,))
    arranged = (
        _join(query, batch, (H, L, query.shape[-1])),
        _join(key, batch, (Hkv, S, key.shape[-1])),
        _join(value, batch, (Hkv, S, value.shape[-1])),
        attn_mask,
        key_padding_mask,
        alibi_slopes,
        sinks,
    )
    return arranged, batch, head_dims


def _join(tensor: Tensor, batch: tuple[int, ...], inner: Sequence[int]) -> Tensor:
    """Broadcasts to (*batch, *inner) and joins the batch dimensions into one; a view where strides allow."""
    tensor = tensor.expand(*batch, *inner)
    if len(batch) == 0:
        return tensor.unsqueeze(0)
    return tensor if len(batch) == 1 else tensor.flatten(0, len(batch) - 1)


def restore(tensor: Tensor, call: Prepared) -> Tensor:
    """(B, H, ...) back to the caller's leading dimensions."""
    if call.head_dims < 1:
        tensor = tensor.squeeze(1)
    if len(call.batch) > 1:
        return tensor.unflatten(0, call.batch)
    return tensor if call.batch else tensor.squeeze(0)


def common_scale(
    query, key, value, attn_mask, key_padding_mask, dropout_p, is_causal, scale, enable_gqa
) -> float | None:
    """The scale if the CPU op may have these arguments as they are, else None: nothing to convert, or to
    leave to the dispatcher. In as few steps as possible: on tiny inputs they are most of the time. So what
    the kernel refuses itself is not looked for here: tensors without memory, sparse or on another device."""
    if not (
        query.__class__ is key.__class__ is value.__class__ is Tensor
        and not is_compiling()
        and query.is_cpu
        and not (query.is_neg() or key.is_neg() or value.is_neg())
        and is_causal.__class__ is enable_gqa.__class__ is bool
        and dropout_p.__class__ is float
        and 0.0 <= dropout_p <= 1.0
        and (scale is None or scale.__class__ is float)
        and forward_ad._current_level < 0
        and not _is_any_autocast_enabled()
        and not is_watched()
    ):
        return None
    try:
        shape, key_shape, value_shape, dtype = query.shape, key.shape, value.shape, query.dtype
    except RuntimeError:  # nested tensors have none
        return None
    if not (
        (shape == key_shape or _scores_fit(shape, key_shape, enable_gqa))
        and len(shape) == 4
        and shape[3] > 0
        and (value_shape == key_shape or value_shape[:3] == key_shape[:3])
        and dtype is key.dtype is value.dtype
        and dtype in _common_dtypes
    ):
        return None
    if attn_mask is not None and not _is_common_mask(attn_mask, *shape[:3], key_shape[2], dtype):
        return None
    if key_padding_mask is not None and not (
        key_padding_mask.__class__ is Tensor
        and key_padding_mask.is_cpu
        and not key_padding_mask.is_nested
        and key_padding_mask.layout is torch.strided
        and key_padding_mask.dtype is torch.bool
        and key_padding_mask.shape == (shape[0], key_shape[2])
    ):
        return None
    return shape[3] ** -0.5 if scale is None else scale


def _scores_fit(shape, key_shape, enable_gqa: bool) -> bool:
    if not (len(shape) == len(key_shape) and shape[0] == key_shape[0] and shape[-1] == key_shape[-1]):
        return False
    H, Hkv = shape[1], key_shape[1]
    return H == Hkv or (enable_gqa and Hkv > 0 and H % Hkv == 0)


def _is_common_mask(mask, B: int, H: int, L: int, S: int, dtype: torch.dtype) -> bool:
    if not (
        mask.__class__ is Tensor
        and mask.is_cpu
        and not mask.is_nested
        and mask.layout is torch.strided
        and not mask.is_neg()
        and ((mask_dtype := mask.dtype) is torch.bool or mask_dtype is dtype or mask_dtype is torch.float32)
    ):
        return False
    shape = mask.shape
    if len(shape) == 2:
        return shape == (L, S)
    return (
        len(shape) == 4
        and (shape[3] == S or shape[3] == 1)
        and (shape[2] == L or shape[2] == 1)
        and (shape[1] == H or shape[1] == 1)
        and (shape[0] == B or shape[0] == 1)
    )


def wants_gradient(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> bool:
    return (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (attn_mask is not None and attn_mask.requires_grad)
    ) and torch.is_grad_enabled()


def allow_common() -> None:
    """From now on: a call that would take the CPU kernel need not be prepared to find that out."""
    _common_dtypes.update(KERNEL_DTYPES)
