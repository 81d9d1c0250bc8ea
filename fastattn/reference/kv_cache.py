"""Attention over a cache of keys and values in plain PyTorch, as ``fastattn::attention_with_kv_cache``."""

import torch
from torch import Tensor

from fastattn.reference._common import wide_dtype
from fastattn.reference.attention import attention

__all__ = ["attention_with_kv_cache"]


def _append(cache: Tensor, new: Tensor, table: Tensor, position: Tensor) -> None:
    page_size = cache.shape[2]
    page = table.gather(1, position // page_size)
    cache[page, :, position % page_size] = new.transpose(1, 2)


def _gather(cache: Tensor, table: Tensor) -> Tensor:
    """(B, Hkv, table's pages * page size, D): each sequence's pages in a row, whatever unused ones hold."""
    if cache.shape[0] == 0:
        return cache.new_empty((table.shape[0], cache.shape[1], 0, cache.shape[3]))
    return cache[table.clamp(0, cache.shape[0] - 1)].transpose(1, 2).flatten(2, 3)


def attention_with_kv_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    window_left: int,
    window_right: int,
) -> tuple[Tensor, Tensor]:
    """Writes key and value behind the tokens of the caches, in place, then attends to all of them.

    A contiguous cache is a paged one where each sequence has one page of its own.
    """
    B, L = query.shape[0], query.shape[2]
    lengths = cache_seqlens.to(torch.int64)
    if block_table is None:
        table = torch.arange(B, device=query.device).unsqueeze(1)
    else:
        table = block_table.to(torch.int64)
    if key is not None:
        T = key.shape[2]
        if T > 0:
            position = lengths.unsqueeze(1) + torch.arange(T, device=query.device)
            _append(key_cache, key, table, position)
            _append(value_cache, value, table, position)
        lengths = lengths + T
    keys, values = _gather(key_cache, table), _gather(value_cache, table)

    i = torch.arange(L, device=query.device).view(L, 1) + (lengths - L).view(B, 1, 1)
    j = torch.arange(keys.shape[2], device=query.device)
    visible = j < lengths.view(B, 1, 1)
    if window_left >= 0:
        visible = visible & (j >= i - window_left)
    if window_right >= 0:
        visible = visible & (j <= i + window_right)
    mask = visible.expand(B, L, keys.shape[2]).unsqueeze(1)
    if alibi_slopes is not None:
        wide = wide_dtype(query.dtype)
        bias = alibi_slopes.to(wide)[..., None, None] * -(i - j).abs().unsqueeze(1).to(wide)
        mask = torch.where(mask, bias, -torch.inf)
    return attention(query, keys, values, mask, None, None, sinks, None, scale, softcap, -1, -1, False, 0.0)
