"""Caches, calls and the checker that the tests of attention over a cache share."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import attention_oracle as oracle
import numpy as np
import pytest
import torch
from attention_cases import IMPLEMENTATIONS, Case, plain
from operator_checks import compare, on_device, running

import fastattn

OP = "fastattn::attention_with_kv_cache"


@pytest.fixture(params=IMPLEMENTATIONS)
def impl(request) -> Iterator[str]:
    with running(request.param, OP) as name:
        yield name


@dataclass
class CacheCase:
    """One call: ``tokens[b]`` and ``values[b]`` are what sequence b holds afterwards, (Hkv, S_b, D or Dv).

    The caches hold the first of them, and NaN everywhere else.
    """

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    cache_seqlens: torch.Tensor
    block_table: torch.Tensor | None
    tokens: list[torch.Tensor]
    values: list[torch.Tensor]
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    options: dict = field(default_factory=dict)

    def arguments(self) -> dict:
        names = ("query", "key_cache", "value_cache", "key", "value", "cache_seqlens", "block_table")
        return {name: getattr(self, name) for name in (*names, "alibi_slopes", "sinks")} | self.options


def make_case(
    lengths=(5, 0, 9), H=4, Hkv=2, L=1, T=None, D=8, Dv=None, dtype=torch.float32, *, page_size=None, room=3,
    alibi=None, sinks=False, seed=0, index_dtype=torch.int32, **options,
) -> CacheCase:  # fmt: skip
    """``lengths`` before the call; T new tokens, by default L; 0 gives none. ``alibi``: "h" or "bh"."""
    B, T, Dv = len(lengths), L if T is None else T, D if Dv is None else Dv
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    query = normal(B, H, L, D)
    tokens = [normal(Hkv, n + T, D) for n in lengths]
    values = [normal(Hkv, n + T, Dv) for n in lengths]
    capacity = max([n + T for n in lengths], default=0) + room
    table = None
    pages, size = B, capacity
    if page_size is not None:
        size, columns = page_size, -(-capacity // page_size)
        used = [-(-(n + T) // page_size) for n in lengths]
        pages = sum(used) + room
        free = torch.randperm(pages).tolist()
        # What is behind the pages in use is never looked at.
        table = torch.full((B, columns), -(2**31), dtype=index_dtype)
        for b, n in enumerate(used):
            table[b, :n] = torch.tensor([free.pop() for _ in range(n)], dtype=index_dtype)
    key_cache, value_cache = (torch.full((pages, Hkv, size, n), math.nan, dtype=dtype) for n in (D, Dv))
    for b, n in enumerate(lengths):
        for cache, held in ((key_cache, tokens), (value_cache, values)):
            for page, row, t in positions(table, size, b, 0, n):
                cache[page, :, row] = held[b][:, t]
    new = (
        [
            torch.stack([t[:, n:] for t, n in zip(held, lengths, strict=True)]) if B else None
            for held in (tokens, values)
        ]
        if T
        else [None, None]
    )
    if T and not B:
        new = [torch.empty(0, Hkv, T, n, dtype=dtype) for n in (D, Dv)]
    case = CacheCase(
        query, key_cache, value_cache, *new,
        torch.tensor(lengths, dtype=index_dtype), table, tokens, values, options=options,
    )  # fmt: skip
    if alibi:
        case.alibi_slopes = normal(*((B, H) if alibi == "bh" else (H,)), dtype=wide) / 4
    if sinks:
        case.sinks = normal(H)
    return case


def positions(table, page_size, b, begin, end):
    """(page, row, token) of tokens begin to end."""
    for t in range(begin, end):
        yield (b, t, t) if table is None else (int(table[b, t // page_size]), t % page_size, t)


@on_device
def call(case: CacheCase, impl: str, **changed) -> dict[str, torch.Tensor]:
    """out and lse, and the caches afterwards; those of the case stay as they are."""
    arguments = case.arguments() | changed
    caches = {n: arguments[n].clone() for n in ("key_cache", "value_cache")}
    out, lse = fastattn.attention_with_kv_cache(**(arguments | caches), return_lse=True, impl=impl)
    return {"out": out, "lse": lse} | caches


def check(actual: dict, case: CacheCase) -> None:
    """out and lse against the oracle, sequence by sequence; in the caches the new tokens and nothing else."""
    B, H, L, D = case.query.shape
    o = {"is_causal": True} | {n: v for n, v in case.options.items() if n != "num_splits"}
    for b in range(B):
        key, value = case.tokens[b][None], case.values[b][None]
        slopes = case.alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[b]
        arrays = [
            None if t is None else t.double().numpy()
            for t in (case.query[b : b + 1], key, value, None, None, slopes, case.sinks)
        ]
        scale = D**-0.5 if o.get("scale") is None else o["scale"]
        wide = actual["lse"].dtype
        expected, size = oracle.attention(
            *arrays, scale=scale, softcap=o.get("softcap", 0.0), window=o.get("window_size", (-1, -1)),
            is_causal=o["is_causal"], lower_right=True,
            score_rounding=torch.finfo(wide).eps / torch.finfo(case.query.dtype).eps,
        )  # fmt: skip
        yardstick = plain(
            Case(
                case.query[b : b + 1], key, value, torch.zeros(1, H, L, value.shape[3], dtype=value.dtype),
                torch.zeros(1, H, L), alibi_slopes=slopes, sinks=case.sinks,
                options=o | {"causal_alignment": "lower_right"},
            )
        )  # fmt: skip
        for name in ("out", "lse"):
            result = actual[name][b : b + 1]
            compare(f"{name}[{b}]", result, expected[name], size[name], yardstick[name], case.query.dtype)
    for name, new in (("key_cache", case.key), ("value_cache", case.value)):
        expected = getattr(case, name).clone()
        if new is not None:
            for b, n in enumerate(case.cache_seqlens.tolist()):
                for page, row, t in positions(case.block_table, expected.shape[2], b, n, n + new.shape[2]):
                    expected[page, :, row] = new[b, :, t - n]
        assert np.array_equal(actual[name].double().numpy(), expected.double().numpy(), equal_nan=True), name
