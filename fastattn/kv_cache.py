"""The keys and values of the tokens so far, for generation: in pages that sequences may share."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fastattn._choose import KERNEL_DTYPES
from fastattn.ops._common import integer
from fastattn.ops.kv_cache import attention_with_kv_cache

__all__ = ["KVCache"]

# A tensor made in inference mode could not be written to outside of it, and a cache is.
_outlives_inference_mode = torch.inference_mode(False)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in KERNEL_DTYPES:
        raise ValueError(f"dtype must be float32, float64, bfloat16 or float16, got {dtype}")


def _integers(name: str, given: Iterable) -> list[int]:
    given = given.tolist() if isinstance(given, Tensor) else given
    if not isinstance(given, Iterable):
        raise TypeError(f"{name} must be integers, got {given!r}")
    return [integer(name, n, -math.inf) for n in given]


class KVCache:
    """What the layers of a model keep of a batch of sequences, which may differ in length.

    Each layer appends its new keys and values and attends to all of them in one call::

        for layer, block in enumerate(model.blocks):
            out = cache.attend(query, key, value, layer=layer)

    Prompts of different lengths are padded on the right, appended together and cut: :meth:`truncate`. Beams
    and sequences that end are a matter of :meth:`reorder`.

    Args:
        batch_size: number of sequences.
        kv_heads, head_dim: heads and dimension of the keys. value_dim: that of the values, by default the
            same.
        max_length: the most tokens of a sequence; may be None with ``page_size``.
        layers: number of layers.
        page_size: None gives every sequence room for ``max_length`` tokens at once. Otherwise the cache grows
            by pages of so many tokens as they are needed, and sequences with a common past share its pages
            until one of them writes.
        dtype, device: of keys and values; by default torch's.

    Nothing here has a gradient, and it does not matter in which inference mode a cache is made and used. The
    object can be pickled, copied by ``copy.deepcopy`` and moved by :meth:`to`.

    Raises:
        ValueError: a size, index, length or dtype outside its range. TypeError: a float, a boolean or
            something else in place of an integer.

    Example:
        >>> cache = fastattn.KVCache(2, 4, 64, page_size=16)
        >>> q, k, v = torch.randn(2, 8, 100, 64), torch.randn(2, 4, 100, 64), torch.randn(2, 4, 100, 64)
        >>> out = cache.attend(q, k, v)
        >>> cache.truncate([100, 70])  # the second prompt was shorter
        >>> cache.lengths
        tensor([100,  70], dtype=torch.int32)
    """

    @_outlives_inference_mode
    def __init__(
        self,
        batch_size: int,
        kv_heads: int,
        head_dim: int,
        max_length: int | None = None,
        *,
        value_dim: int | None = None,
        layers: int = 1,
        page_size: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"batch_size": batch_size, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}
        batch_size, kv_heads, head_dim, value_dim = (integer(*size) for size in sizes.items())
        layers = integer("layers", layers, 1)
        max_length = None if max_length is None else integer("max_length", max_length, 1)
        page_size = None if page_size is None else integer("page_size", page_size, 1)
        if max_length is None and page_size is None:
            raise ValueError("max_length may only be None with page_size: a cache without pages cannot grow")
        _check_dtype(torch.get_default_dtype() if dtype is None else dtype)
        self.max_length = max_length
        self.page_size = max_length if page_size is None else page_size
        # Of each layer (pages, Hkv, page size, D or Dv).
        empty = [
            torch.empty(0, kv_heads, self.page_size, n, dtype=dtype, device=device)
            for n in (head_dim, value_dim)
        ]
        self._keys, self._values = [empty[0]] * layers, [empty[1]] * layers
        # The pages of each sequence, shared by all layers; how many sequences use a page; those nobody uses.
        self._pages: list[list[int]] = [[] for _ in range(batch_size)]
        self._uses: list[int] = []
        self._free: list[int] = []
        # Tokens of each sequence in each layer: layers take turns, so one may be ahead of the next.
        self._lengths = [[0] * batch_size for _ in range(layers)]
        # The same for the operator.
        self._table = torch.empty(batch_size, 0, dtype=torch.int32, device=device)
        self._seqlens = [torch.zeros(batch_size, dtype=torch.int32, device=device) for _ in range(layers)]
        if page_size is None:
            self._grow(batch_size)

    @property
    def batch_size(self) -> int:
        return len(self._pages)

    @property
    def layers(self) -> int:
        return len(self._keys)

    @property
    def num_pages(self) -> int:
        """Pages that memory is held for, used or not."""
        return len(self._uses)

    @property
    def lengths(self) -> Tensor:
        """(B,) int32, the tokens that all layers hold of each sequence; a copy."""
        held = [min(of_layers) for of_layers in zip(*self._lengths, strict=True)]
        return torch.tensor(held, dtype=torch.int32, device=self._table.device)

    def __repr__(self) -> str:
        _, Hkv, page_size, D = self._keys[0].shape
        return (
            f"KVCache(batch_size={self.batch_size}, kv_heads={Hkv}, head_dim={D}, layers={self.layers}, "
            f"max_length={self.max_length}, page_size={page_size}, num_pages={self.num_pages}, "
            f"dtype={self._keys[0].dtype}, device={self._keys[0].device})"
        )

    def arguments(self, layer: int = 0) -> dict[str, Tensor]:
        """What :func:`attention_with_kv_cache` takes for this layer; valid until the cache changes."""
        self._check_layer(layer)
        return {
            "key_cache": self._keys[layer], "value_cache": self._values[layer],
            "cache_seqlens": self._seqlens[layer], "block_table": self._table,
        }  # fmt: skip

    def sequence(self, index: int, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Copies of one sequence's keys (Hkv, length, D) and values (Hkv, length, Dv)."""
        self._check_layer(layer)
        if not 0 <= integer("index", index, -math.inf) < self.batch_size:
            raise ValueError(f"index must be from 0 to {self.batch_size - 1}, got {index}")
        length = self._lengths[layer][index]
        pages = self._pages[index]
        return tuple(
            pool[layer][pages].transpose(0, 1).flatten(1, 2)[:, :length]
            for pool in (self._keys, self._values)
        )

    def attend(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        layer: int = 0,
        **options,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """:func:`attention_with_kv_cache` on this cache: appends key and value, if given, and attends.

        ``options`` are the operator's: ``is_causal``, ``scale``, ``window_size``, ``softcap``,
        ``alibi_slopes``, ``sinks``, ``num_splits``, ``return_lse``, ``impl``.

        Raises:
            RuntimeError: a sequence would have more than ``max_length`` tokens; nothing is appended then.
        """
        self._check_layer(layer)
        if isinstance(query, Tensor) and query.dim() == 4 and query.shape[0] != self.batch_size:
            raise RuntimeError(
                f"the cache holds {self.batch_size} sequences, query {tuple(query.shape)} {query.shape[0]}"
            )
        new = 0
        if key is not None:
            if not isinstance(key, Tensor) or key.dim() != 4:
                found = tuple(key.shape) if isinstance(key, Tensor) else type(key).__name__
                raise RuntimeError(f"key must be a tensor of 4 dimensions, got {found}")
            new = key.shape[2]
            self._reserve(layer, new)
        result = attention_with_kv_cache(
            query, self._keys[layer], self._values[layer], key, value, cache_seqlens=self._seqlens[layer],
            block_table=self._table, **options,
        )  # fmt: skip
        if new > 0:
            self._lengths[layer] = [n + new for n in self._lengths[layer]]
            self._seqlens[layer] = self._seqlens[layer] + new
        return result

    def truncate(self, lengths: int | Sequence[int] | Tensor) -> None:
        """Keeps the first tokens of each sequence: (B,), or one number for all."""
        one = lengths.dim() == 0 if isinstance(lengths, Tensor) else not isinstance(lengths, Iterable)
        lengths = _integers("lengths", [lengths] * self.batch_size if one else lengths)
        held = self.lengths.tolist()
        if len(lengths) != len(held) or not all(
            0 <= n <= most for n, most in zip(lengths, held, strict=True)
        ):
            raise ValueError(f"lengths must be from 0 to {held}, what the cache holds, got {lengths}")
        for pages, length in zip(self._pages, lengths, strict=True):
            kept = -(-length // self.page_size)
            self._release(pages[kept:])
            del pages[kept:]
        self._set_lengths([list(lengths) for _ in range(self.layers)])

    def reset(self) -> None:
        """Forgets all tokens and keeps the memory."""
        self._release([page for pages in self._pages for page in pages])
        self._pages = [[] for _ in self._pages]
        self._set_lengths([[0] * self.batch_size for _ in range(self.layers)])

    @_outlives_inference_mode
    def reorder(self, index: Sequence[int] | Tensor) -> None:
        """Sequence n becomes what sequence ``index[n]`` was: the beams that survive, sequences that go on.

        ``index`` may name a sequence several times, or not at all, and may be shorter or longer than the
        batch. Nothing is copied before one of several twins is written to.
        """
        index = _integers("index", index)
        for n in index:
            if not 0 <= n < self.batch_size:
                raise ValueError(f"index must name sequences from 0 to {self.batch_size - 1}, got {index}")
        pages = [list(self._pages[n]) for n in index]
        for page in (page for of_sequence in pages for page in of_sequence):
            self._uses[page] += 1
        self._release([page for of_sequence in self._pages for page in of_sequence])
        self._pages = pages
        self._table = self._table[index]
        self._set_lengths([[of_layer[n] for n in index] for of_layer in self._lengths])

    @_outlives_inference_mode
    def to(self, *args, **kwargs) -> KVCache:
        """A copy with keys and values as by ``Tensor.to``."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None:
            _check_dtype(dtype)
        other = copy.deepcopy(self)
        for pool in (other._keys, other._values):
            pool[:] = [t.to(device=device, dtype=dtype, non_blocking=non_blocking) for t in pool]
        other._table = other._table.to(device=device)
        other._seqlens = [t.to(device=device) for t in other._seqlens]
        return other

    @_outlives_inference_mode
    def __deepcopy__(self, memo: dict) -> KVCache:
        other = memo[id(self)] = object.__new__(type(self))
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    @_outlives_inference_mode
    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(copy.deepcopy(state) if state["_table"].is_inference() else state)

    def _check_layer(self, layer: int) -> None:
        if not 0 <= integer("layer", layer, -math.inf) < self.layers:
            raise ValueError(f"layer must be from 0 to {self.layers - 1}, got {layer}")

    @_outlives_inference_mode
    def _set_lengths(self, lengths: list[list[int]]) -> None:
        self._lengths = lengths
        self._seqlens = [torch.tensor(n, dtype=torch.int32, device=self._table.device) for n in lengths]

    def _release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._uses[page] -= 1
            if self._uses[page] == 0:
                self._free.append(page)

    def _reserve(self, layer: int, new: int) -> None:
        """Gives every sequence pages of its own for the tokens that come next."""
        lengths, size = self._lengths[layer], self.page_size
        if self.max_length is not None:
            for n, length in enumerate(lengths):
                if length + new > self.max_length:
                    raise RuntimeError(
                        f"the cache is full: sequence {n} has {length} tokens, {new} more are more than "
                        f"max_length={self.max_length}"
                    )
        if new == 0:
            return
        for n, (pages, length) in enumerate(zip(self._pages, lengths, strict=True)):
            for at in range(length // size, -(-(length + new) // size)):
                if at == len(pages):
                    pages.append(self._take())
                elif self._uses[pages[at]] > 1:
                    filled = max(of_layer[n] for of_layer in self._lengths) - at * size
                    pages[at] = self._own(pages[at], max(filled, 0))
                else:
                    continue
                self._set_page(n, at, pages[at])

    def _own(self, page: int, rows: int) -> int:
        """A page with the same first rows, for a sequence that shared it and is about to write to it."""
        other = self._take()
        for pool in (self._keys, self._values):
            for cache in pool:
                cache[other, :, :rows] = cache[page, :, :rows]
        self._release([page])
        return other

    def _set_page(self, sequence: int, at: int, page: int) -> None:
        if at >= self._table.shape[1]:
            self._widen_table(at + 1)
        self._table[sequence, at] = page

    @_outlives_inference_mode
    def _widen_table(self, columns: int) -> None:
        held = self._table.shape[1]
        self._table = torch.nn.functional.pad(self._table, (0, max(columns - held, held)), value=-1)

    def _take(self) -> int:
        if not self._free:
            self._grow(max(1, self.num_pages // 2))
        page = self._free.pop()
        self._uses[page] = 1
        return page

    @_outlives_inference_mode
    def _grow(self, more: int) -> None:
        """More pages; never more than all sequences can use."""
        pages = self.num_pages
        if self.max_length is not None:
            most = self.batch_size * -(-self.max_length // self.page_size)
            more = max(1, min(more, most - pages))
        for pool in (self._keys, self._values):
            for layer, cache in enumerate(pool):
                if len(cache) >= pages + more:  # from an attempt that memory did not suffice for
                    continue
                pool[layer] = cache.new_empty((pages + more, *cache.shape[1:]))
                pool[layer][:pages] = cache[:pages]
        self._uses += [0] * more
        self._free += reversed(range(pages, pages + more))


torch.serialization.add_safe_globals([KVCache])
