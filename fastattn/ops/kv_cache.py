"""Attention over a cache of keys and values: validates a call, chooses an implementation and runs it."""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fastattn import _triton
from fastattn._choose import candidates, choose
from fastattn.ops._attention_call import UNLIMITED
from fastattn.ops._common import (
    CPU_KEYS,
    call_op,
    library,
    may_skip_dispatcher,
    needs_function,
    wide_dtype,
)
from fastattn.ops._kv_cache_call import check_values, prepare
from fastattn.reference import kv_cache as reference

__all__ = ["attention_with_kv_cache"]

# Without key and value nothing is written to. window_right = 0 is causal, -1 an unlimited window.
library.define(
    "attention_with_kv_cache(Tensor query, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor? key, "
    "Tensor? value, Tensor cache_seqlens, Tensor? block_table, Tensor? alibi_slopes, Tensor? sinks, "
    "float scale, float softcap, int window_left, int window_right, int num_splits) -> "
    "(Tensor out, Tensor lse)"
)
_op = torch.ops.fastattn.attention_with_kv_cache.default
_on_cpu = _op._handle.redispatch_boxed
# What common calls run on, without a choice: nothing until the CPU library was found.
_chosen: set[str] = set()


@torch.library.register_fake("fastattn::attention_with_kv_cache", lib=library)
def _(query, key_cache, value_cache, *args):
    (B, H, L, _), Dv = query.shape, value_cache.shape[3]
    # Heads beside channels in memory: joining them afterwards is then a view.
    out = query.new_empty((B, L, H, Dv)).transpose(1, 2)
    return out, query.new_empty((B, H, L), dtype=wide_dtype(query.dtype))


def _refuse_gradients(tensors) -> None:
    if needs_function([t for t in tensors if t is not None and t.is_floating_point()]):
        raise RuntimeError(
            "attention_with_kv_cache is for inference and has no derivative: use it under torch.no_grad(), "
            "or detach its inputs; torch.func cannot transform it"
        )


def _without_gradients(*args):
    _refuse_gradients(args[:9])
    with torch._C._AutoDispatchBelowAutograd():
        return _op(*args)


def _count(tensors) -> None:
    """What was saved of the caches for a backward before has changed, and autograd is to know."""
    if tensors[3] is not None:
        torch.autograd.graph.increment_version(tensors[1:3])


def _counted(keys, *args):
    _count(args)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return _op.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args)


_triton.register(library, "kv_cache", "attention_with_kv_cache")
library.impl("attention_with_kv_cache", _without_gradients, "Autograd")
library.impl("attention_with_kv_cache", _counted, "ADInplaceOrView", with_keyset=True)


def attention_with_kv_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    cache_seqlens: Tensor | int,
    block_table: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Appends new tokens to a cache, in place, and attends to all that it then holds.

    .. math::
        S_b &= \mathrm{cache\_seqlens}_b + T, \qquad
        \mathrm{cache}_{b,\,\mathrm{cache\_seqlens}_b + t} \leftarrow (k_{b,t}, v_{b,t}) \\
        s_{ij} &= \mathrm{cap}(\mathrm{scale} \cdot q_i \cdot k_j) - \mathrm{slope}\,|i + S_b - L - j|, \qquad
        \mathrm{out}_i = \frac{\sum_j e^{s_{ij}} v_j}{e^{\mathrm{sink}} + \sum_j e^{s_{ij}}}

    over the keys ``j < S_b`` that causality and window leave: the last query sees the last token. L and T
    need not agree: without key and value the cache is only read, and with L < T only the last L of the new
    tokens ask. This is decoding (L = T = 1) as well as a prompt, whole or in chunks.

    Args:
        query: (B, H, L, D), any strides.
        key_cache: (B, Hkv, S, D), room for S tokens of each sequence; or with ``block_table`` a pool of pages
            (num_pages, Hkv, page_size, D). Any strides. Hkv divides H; query head h reads key head
            ``h // (H // Hkv)``.
        value_cache: the same with head dim Dv.
        key: (B, Hkv, T, D) and value: (B, Hkv, T, Dv), new tokens of every sequence; or neither.
        cache_seqlens: (B,) int32 or int64, the tokens in the cache of each sequence before this call, or one
            number for all of them. A tensor is left as it is.
        block_table: (B, pages of a sequence) int32 or int64. Token t of sequence b is row ``t % page_size``
            of page ``block_table[b, t // page_size]``. Sequences may share pages, except those written to.
            Entries behind the last token are never looked at.
        is_causal: query i sees keys up to ``i + S_b - L``.
        scale, window_size, softcap, alibi_slopes, sinks: as in :func:`scaled_dot_product_attention`.
        num_splits: into how many parts, at most, the keys of a head may be dealt to threads, or to programs
            of a GPU; 0 leaves it to the kernel. On the CPU it never changes a result, not in a single bit,
            and neither does paging; with Triton by rounding.
        return_lse: also return the log-sum-exp.
        impl: "auto" or exactly one of "cpu", "reference", "triton", "cuda"; :func:`fastattn.explain` tells
            which one runs.

    Precision: as :func:`scaled_dot_product_attention`. Under autocast query, key and value are cast to the
    dtype of the caches. For inference: there is no derivative, and a call that would need one is refused.

    Empty rows: a query that sees no key gives 0 and lse = -inf (the sink if there is one). What is not part
    of a sequence, like the rest of a cache or of a page and pages nobody uses, never matters, even if NaN.

    Returns:
        out (B, H, L, Dv) of the query's dtype; with ``return_lse`` also lse (B, H, L), float32 (float64 for
        float64 inputs), natural logarithm.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit together; on the CPU also lengths that the
            cache has no room for, pages that do not exist or that are written to and named twice, memory that
            is written to and shared; a gradient that would be lost. A refused call has written nothing.
        ValueError: an option outside its range. TypeError: something else in place of a tensor.
        NotImplementedError: ``impl`` names an implementation that cannot run this call; the message says why.

    Source: Dao et al., Flash-Decoding (2023), for the splits; Kwon et al., arXiv:2309.06180, for pages. The
    arguments are those of flash-attn's ``flash_attn_with_kvcache``, heads before tokens.

    Example:
        >>> cache = [torch.empty(2, 8, 1024, 64) for _ in range(2)]
        >>> lengths = torch.zeros(2, dtype=torch.int32)
        >>> q, k, v = (torch.randn(2, 8, 100, 64) for _ in range(3))
        >>> out = fastattn.attention_with_kv_cache(q, *cache, k, v, cache_seqlens=lengths)
        >>> lengths += 100
        >>> q, k, v = (torch.randn(2, 8, 1, 64) for _ in range(3))
        >>> out = fastattn.attention_with_kv_cache(q, *cache, k, v, cache_seqlens=lengths)
    """
    if (
        not is_compiling()
        and _chosen
        and (impl == "auto" or impl == "cpu")
        and window_size is UNLIMITED
        and softcap.__class__ is float
        and softcap == 0.0
        and is_causal.__class__ is return_lse.__class__ is bool
        and num_splits.__class__ is int
        and (scale is None or scale.__class__ is float)
        and query.__class__ is key_cache.__class__ is value_cache.__class__ is Tensor
        and cache_seqlens.__class__ is Tensor
        and may_skip_dispatcher(
            query, key_cache, value_cache, cache_seqlens, key, value, block_table, alibi_slopes, sinks
        )
        and query.dim() > 0
        and query.shape[-1] > 0
    ):
        try:
            out, lse = _on_cpu(
                CPU_KEYS, query, key_cache, value_cache, key, value, cache_seqlens, block_table, alibi_slopes,
                sinks, query.shape[-1] ** -0.5 if scale is None else scale, 0.0, -1, 0 if is_causal else -1,
                num_splits,
            )  # fmt: skip
        except RuntimeError:
            pass  # nothing has been written; the long way says what is wrong by the names of the arguments
        else:
            if key is not None:
                torch._C._increment_version((key_cache, value_cache))
            return (out, lse) if return_lse else out
    call = prepare(
        query, key_cache, value_cache, key, value, cache_seqlens=cache_seqlens, block_table=block_table,
        is_causal=is_causal, scale=scale, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
        sinks=sinks, num_splits=num_splits, return_lse=return_lse,
    )  # fmt: skip
    implementation = choose(call.request, impl)
    _refuse_gradients(call.tensors)
    if implementation != "cpu" and query.device.type == "cpu":
        check_values(call)
    if implementation in ("cpu", "triton"):
        if not is_compiling() and any(cache.is_neg() for cache in call.tensors[1:3]):
            raise NotImplementedError(
                "key_cache and value_cache must not be negations that are still to be done: resolve_neg() "
                "gives a tensor that new tokens can be written to"
            )
        out, lse = call_op(_op, *call.tensors, *call.options)
        if not is_compiling():
            _count(call.tensors)
            if implementation == "cpu":
                _chosen.add("cpu")
    else:
        out, lse = reference.attention_with_kv_cache(*call.tensors, *call.options[:-1])
    return (out, lse) if return_lse else out


def _choice(
    query, key_cache, value_cache, key=None, value=None, *, impl="auto", window_size=UNLIMITED, **options
):
    request = prepare(query, key_cache, value_cache, key, value, window_size=window_size, **options).request
    return choose(request, impl), candidates(request)


attention_with_kv_cache._choice = _choice
