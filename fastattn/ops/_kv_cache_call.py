"""What a call of attention over a cache may look like: checks of its arguments, and the form of the op."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled
from torch.compiler import is_compiling

from fastattn._choose import Request
from fastattn.ops._attention_call import FAR, check_options
from fastattn.ops._common import autocast_dtype, check_dense, check_flags, integer, number

__all__ = ["Prepared", "check_values", "prepare"]

# Query and caches first: these three are always there, and of one dtype.
_NAMES = (
    "query", "key_cache", "value_cache", "key", "value", "cache_seqlens", "block_table", "alibi_slopes",
    "sinks",
)  # fmt: skip


class Prepared(NamedTuple):
    """A checked call: the arguments of the op, and the choice to make."""

    tensors: tuple[Tensor | None, ...]
    options: tuple[float, float, int, int, int]
    request: Request


def _cast(tensors):
    """Under autocast query and new tokens take the dtype of the caches, which are written to."""
    query, key_cache = tensors[:2]
    if autocast_dtype(query) is None or not isinstance(key_cache, Tensor):
        return tensors
    query, key, value = (
        t.to(key_cache.dtype) if isinstance(t, Tensor) and t.is_floating_point() else t
        for t in (query, tensors[3], tensors[4])
    )
    return (query, *tensors[1:3], key, value, *tensors[5:])


def _shapes(tensors) -> str:
    """For error messages; evaluated only where there is an error."""
    return ", ".join(f"{n} {tuple(t.shape)}" for n, t in zip(_NAMES, tensors, strict=True) if t is not None)


def _check_dtypes(tensors) -> None:
    query = tensors[0]
    wide = (torch.float32, torch.float64) if query.dtype == torch.float64 else (torch.float32,)
    integers = (torch.int32, torch.int64)
    allowed = ((query.dtype,), (query.dtype,), integers, integers, wide, (query.dtype, torch.float32))
    for name, tensor, dtypes in zip(_NAMES[3:], tensors[3:], allowed, strict=True):
        if tensor is not None and tensor.dtype not in dtypes:
            expected = " or ".join(dict.fromkeys([str(d) for d in dtypes]))
            raise RuntimeError(f"{name} must be {expected} beside a {query.dtype} query, got {tensor.dtype}")


def _check_shapes(tensors) -> None:
    query, key_cache, value_cache, key, value, cache_seqlens, block_table, alibi_slopes, sinks = tensors
    for name, tensor in zip(_NAMES[:5], tensors[:5], strict=True):
        if tensor is not None and tensor.dim() != 4:
            raise RuntimeError(f"{name} must have 4 dimensions, got {_shapes(tensors)}")
    (B, H, _, D), (pages, Hkv, page_size, _), Dv = query.shape, key_cache.shape, value_cache.shape[3]
    if key_cache.shape[3] != D:
        raise RuntimeError(f"query and key_cache must have the same head dim: {_shapes(tensors)}")
    if value_cache.shape[:3] != key_cache.shape[:3]:
        raise RuntimeError(
            f"value_cache must be {(pages, Hkv, page_size)} and its head dim: {_shapes(tensors)}"
        )
    if (H % Hkv != 0) if Hkv > 0 else H > 0:
        raise RuntimeError(f"the caches' heads must divide the query's: {_shapes(tensors)}")
    if block_table is None and pages != B:
        raise RuntimeError(
            f"without block_table key_cache must have room for each of the {B} sequences: {_shapes(tensors)}"
        )
    if (key is None) != (value is None):
        raise RuntimeError(f"key and value must be given together, got {_shapes(tensors)}")
    if key is not None:
        T = key.shape[2]
        for name, tensor, shape in (("key", key, (B, Hkv, T, D)), ("value", value, (B, Hkv, T, Dv))):
            if tensor.shape != shape:
                raise RuntimeError(f"{name} must be {shape}, got {_shapes(tensors)}")
    if cache_seqlens.shape != (B,):
        raise RuntimeError(f"cache_seqlens must be {(B,)}, got {_shapes(tensors)}")
    if block_table is not None and (block_table.dim() != 2 or block_table.shape[0] != B):
        raise RuntimeError(f"block_table must be ({B}, pages of a sequence), got {_shapes(tensors)}")
    if alibi_slopes is not None and alibi_slopes.shape not in ((H,), (B, H)):
        raise RuntimeError(f"alibi_slopes must be {(H,)} or {(B, H)}, got {_shapes(tensors)}")
    if sinks is not None and sinks.shape != (H,):
        raise RuntimeError(f"sinks must be {(H,)}, got {_shapes(tensors)}")


def prepare(
    query, key_cache, value_cache, key=None, value=None, *, cache_seqlens, block_table=None, is_causal=True,
    scale=None, window_size, softcap=0.0, alibi_slopes=None, sinks=None, num_splits=0, return_lse=False,
) -> Prepared:  # fmt: skip
    tensors = (
        query, key_cache, value_cache, key, value, cache_seqlens, block_table, alibi_slopes, sinks,
    )  # fmt: skip
    if _is_any_autocast_enabled():
        tensors = _cast(tensors)
    if cache_seqlens is None:
        raise TypeError("cache_seqlens must be a Tensor: the number of tokens in the cache of each sequence")
    if isinstance(cache_seqlens, (int, torch.SymInt)) and isinstance(query, Tensor) and query.dim() == 4:
        lengths = query.new_full(
            (query.shape[0],), integer("cache_seqlens", cache_seqlens), dtype=torch.int64
        )
        tensors = (*tensors[:5], lengths, *tensors[6:])
    check_dense(_NAMES, tensors)
    _check_dtypes(tensors)
    _check_shapes(tensors)
    softcap = number("softcap", softcap)
    check_flags(is_causal=is_causal, return_lse=return_lse)
    check_options(0.0, window_size, softcap, "lower_right")
    num_splits = min(integer("num_splits", num_splits), FAR)
    D = query.shape[-1]
    scale = (D**-0.5 if D else 1.0) if scale is None else number("scale", scale)
    window_left, window_right = (min(int(n), FAR) for n in window_size)
    used = {
        "key": key is not None, "block_table": block_table is not None, "is_causal": is_causal,
        "window_size": window_left >= 0 or window_right >= 0, "softcap": softcap > 0,
        "alibi_slopes": alibi_slopes is not None, "sinks": sinks is not None,
        "num_splits": num_splits > 0, "return_lse": return_lse,
    }  # fmt: skip
    if alibi_slopes is not None and query.dtype == torch.float64:
        tensors = (*tensors[:7], alibi_slopes.to(torch.float64), sinks)
    request = Request(
        query.device.type, query.dtype, tuple(name for name in used if used[name]),
        "fastattn::attention_with_kv_cache", max(D, value_cache.shape[3]),
    )  # fmt: skip
    options = (scale, softcap, window_left, 0 if is_causal else window_right, num_splits)
    return Prepared(tensors, options, request)


def check_values(call: Prepared) -> None:
    """What a call writes to and reads from lies in the caches; for the reference and Triton's interpreter.

    The CPU kernel checks the same by itself.
    """
    query, key_cache, value_cache, key, value, lengths, table, *_ = call.tensors
    pages, _, page_size, _ = key_cache.shape
    T = 0 if key is None else key.shape[2]
    capacity = (1 if table is None else table.shape[1]) * page_size
    if len(lengths) > 0 and T > capacity:
        holder = "key_cache" if table is None else "block_table"
        raise RuntimeError(f"{holder} has room for {capacity} tokens of a sequence, key has {T}")
    most = capacity - T
    _refuse(
        "cache_seqlens", lengths, (lengths < 0) | (lengths > most),
        lambda: f"must be from 0 to {most}, so that the cache holds it and {T} new tokens",
    )  # fmt: skip
    if T > 0 and not is_compiling():
        _check_memory(key_cache, value_cache, key, value, query)
    if table is None:
        return
    first = torch.arange(table.shape[1]) * page_size  # the first token of each page
    lengths = lengths.unsqueeze(1).to(torch.int64)
    used = first < lengths + T
    _refuse(
        "block_table", table, used & ((table < 0) | (table >= pages)),
        lambda: f"must name pages from 0 to {pages - 1} for the tokens in use",
    )  # fmt: skip
    if T > 0:
        page = torch.where(used, table, 0).to(torch.int64)
        uses = torch.zeros(pages, dtype=torch.int64)
        uses.index_add_(0, page.flatten(), used.flatten().to(torch.int64))
        written = used & (first + page_size > lengths)
        _refuse(
            "block_table", table, written & (uses[page] > 1),
            lambda: "must not repeat a page that new tokens are written to",
        )  # fmt: skip


def _refuse(name: str, values: Tensor, bad: Tensor, rule: Callable[[], str]) -> None:
    if is_compiling():
        # Numbers in the message would mean one compilation for each of them.
        torch._assert_async(~bad.any(), f"{name} holds a value that it must not hold")
    elif bad.any():
        at = bad.nonzero()[0].tolist()
        raise RuntimeError(f"{name} {rule()}, got {values[tuple(at)].item()} at {at}")


def _check_memory(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, query: Tensor) -> None:
    """What is written to shares no memory with anything."""
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    for name, cache in caches.items():
        if not cache.is_contiguous() and _elements(cache).unique().numel() < cache.numel():
            raise RuntimeError(f"{name} must not overlap itself where new tokens are written to it")
    read = {"key": key, "value": value, "query": query}
    for cache, other in itertools.chain(itertools.combinations(caches, 2), itertools.product(caches, read)):
        a, b = caches[cache], (caches | read)[other]
        if (
            a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
            and torch.isin(_elements(a), _elements(b)).any()
        ):
            raise RuntimeError(f"{other} must not share memory with {cache}, which is written to")


def _elements(tensor: Tensor) -> Tensor:
    """Where in its memory each element lies."""
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    return torch.arange(size).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten()
