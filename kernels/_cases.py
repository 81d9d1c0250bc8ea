"""Calls that between them launch every kernel in every configuration of the launch tables.

Their tensors have no memory: they are for ``record_launches``.
"""

from typing import NamedTuple

import torch
from fastattn.kernels import aggregation, attention, graph_attention, kv_cache, linear_attention

__all__ = ["CALLS", "COMMON", "EVERYTHING", "MAIN", "Case", "call"]


class Case(NamedTuple):
    """One call, forward and backward, by dtype, channels of a head and options."""

    dtype: torch.dtype
    D: int
    options: str = "causal"
    family: str = "attention"

    def __str__(self) -> str:
        return f"{self.family}, {str(self.dtype).removeprefix('torch.')} {self.D} {self.options}"


HALF = (torch.bfloat16, torch.float16)
DTYPES = (*HALF, torch.float32, torch.float64)
# What the tests compile, whatever the record says.
MAIN = [
    Case(torch.float16, 64, "plain"),
    Case(torch.bfloat16, 128, "causal"),
    Case(torch.float64, 64, "boolean mask"),
    Case(torch.float16, 128, "pages", "attention over a cache"),
    Case(torch.float32, 128, "weighted, divided rows", "aggregation"),
    Case(torch.bfloat16, 64, "gatv2", "graph attention"),
    Case(torch.float32, 256, "dot, divided rows", "graph attention"),
    Case(torch.bfloat16, 64, "causal", "linear attention"),
]
GIVEN = {
    "attention": ("causal", "plain", "window", "boolean mask", "packed", "everything"),
    "attention over a cache": ("contiguous", "pages", "small pages", "everything"),
    "aggregation": ("plain, divided rows", "weighted, divided rows", "everything, divided rows"),
    "graph attention": (
        "additive, divided rows", "dot, divided rows", "gatv2, divided rows",
        "dot with everything, divided rows",
    ),
    "linear attention": ("causal", "not causal", "packed", "everything"),
}  # fmt: skip
# Of these every kernel counts, of the others the first with the same tile.
COMMON = [
    *MAIN,
    *(Case(dtype, D, given) for dtype in HALF for D in (64, 128) for given in GIVEN["attention"][:-1]),
    *(Case(dtype, D, "causal", "linear attention") for dtype in HALF for D in (64, 128)),
    *(Case(torch.bfloat16, 128, given, family) for family in GIVEN for given in GIVEN[family]),
]
# The widest calls first that an entry of a launch table serves. To these bfloat16 is any element of 16 bits,
# but not in linear attention, where products of float16 are other ones. Graphs have a tile for each power of
# two, whose widest is a whole load of a warp, and nothing else depends on it: some of them.
WIDE = (torch.bfloat16, torch.float32, torch.float64)
EVERYTHING = [
    *COMMON,
    *(
        Case(dtype, D, given, family)
        for family in ("attention", "attention over a cache", "linear attention")
        for dtype in (WIDE if family != "linear attention" else (*WIDE, torch.float16))
        for given in (GIVEN[family][0], GIVEN[family][-1])
        for D in (512, 256, 128, 64)
    ),
    *(
        Case(dtype, F, given, family)
        for dtype in WIDE
        for family in ("aggregation", "graph attention")
        for given in GIVEN[family]
        for F in ((1, 32, 256, 512) if dtype == torch.bfloat16 else (256,))
    ),
]  # fmt: skip


def _attention(case: Case) -> None:
    """The forward, the backward and the weights of a call of attention, on tensors without memory."""
    dtype, wide = case.dtype, torch.float64 if case.dtype == torch.float64 else torch.float32
    empty = lambda *shape, dtype=dtype: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    B, H, Hkv, L, S = 2, 8, 2, 1000, 2000
    query, out = empty(B, L, H, case.D).transpose(1, 2), empty(B, L, H, case.D).transpose(1, 2)
    key, value = (empty(B, S, Hkv, case.D).transpose(1, 2) for _ in range(2))
    mask = padding = alibi = sinks = seed = None
    left, right, softcap, dropout_p = -1, -1 if case.options in ("plain", "boolean mask") else 0, 0.0, 0.0
    if case.options in ("window", "everything"):
        left = 256
    if case.options == "boolean mask":
        mask = empty(B, 1, L, S, dtype=torch.bool)
    if case.options == "everything":
        mask, padding = empty(B, H, L, S), empty(B, S, dtype=torch.bool)
        alibi, sinks, seed = empty(H, dtype=wide), empty(H), empty(1, dtype=torch.int64)
        softcap, dropout_p = 30.0, 0.1
    packed = ()
    if case.options == "packed":
        query, out, key, value = query[:1], out[:1], key[:1], value[:1]
        B, alibi, packed = 1, empty(9, H, dtype=wide), (empty(10, dtype=torch.int32),) * 2
    biases, options = (mask, padding, alibi), (case.D**-0.5, softcap, left, right, True, dropout_p)
    lse, everything = empty(B, H, L, dtype=wide), case.options == "everything"
    grads = everything, everything or bool(packed), everything
    attention.attention_forward(query, key, value, *biases, sinks, seed, *options, *packed)
    attention.attention_backward(
        out, None, query, key, value, out, lse, *biases, sinks, seed, *options, *grads, *packed
    )
    if case.options not in ("plain", "packed"):
        attention.attention_weights(query, key, lse, *biases, sinks, seed, *options, True)


def _kv_cache(case: Case) -> None:
    """Decoding, which divides the keys, and a prompt that is its own part."""
    empty = lambda *shape, dtype=case.dtype: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    B, H, Hkv, capacity = 4, 32, 8, 8192
    alibi = sinks = table = None
    left, softcap = -1, 0.0
    pages = {"pages": 256, "small pages": 16}.get(case.options.partition(",")[0])
    if "everything" in case.options:
        wide = torch.float64 if case.dtype == torch.float64 else torch.float32
        alibi, sinks, left, softcap, pages = empty(H, dtype=wide), empty(H), 256, 30.0, 16
    if pages is None:
        cache = empty(B, Hkv, capacity, case.D)
    else:
        cache = empty(B * capacity // pages, Hkv, pages, case.D)
        table = empty(B, capacity // pages, dtype=torch.int32)
    for L in (1, 128):
        new = empty(B, Hkv, L, case.D)
        kv_cache.attention_with_kv_cache(
            empty(B, H, L, case.D), cache, cache, new, new, empty(B, dtype=torch.int32), table, alibi, sinks,
            case.D**-0.5, softcap, left, 0, 0,
        )  # fmt: skip


def _edges_of(case: Case) -> tuple[int, int, tuple, tuple]:
    """Numbers of nodes and edges, and the edges by either end; few enough that no row is divided, or not."""
    N, E = 1000, 50000 if "divided" in case.options else 500
    index = lambda size, dtype=torch.int32: torch.empty(size, dtype=dtype, device="meta")  # noqa: E731
    by_target, by_source = ((index(N + 1, torch.int64), index(E), index(E)) for _ in range(2))
    return N, E, (*by_target, N), by_source


def _aggregation(case: Case) -> None:
    """Sums, extremes and products of edges, with what their derivatives need."""
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    empty = lambda *shape, dtype=case.dtype: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    N, E, edges, _ = _edges_of(case)
    H = 1 if case.options.startswith("plain") else 8
    x, weight, scale, args = empty(1, N, H, case.D), None, None, (None,)
    if H > 1:
        weight = empty(E, H)
    if case.options.startswith("everything"):
        scale, args = empty(N, dtype=wide), (None, empty(1, N, H, case.D, dtype=torch.int32))
    for arg in args:
        for of_rows in (False, True)[: 1 if arg is None else 2]:
            aggregation.aggregate_sum(x, *edges, weight, scale, scale, arg, of_rows)
            aggregation.edge_dot(x, x, *edges, scale, scale, arg, of_rows, H > 1)
    for minimum in (False, True):
        aggregation.aggregate_max(x, *edges, weight, minimum, return_arg=not minimum)


def _graph_attention(case: Case) -> None:
    """Forward and backward of a form of the score, and the softmax alone."""
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    empty = lambda *shape, dtype=case.dtype: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    N, E, by_target, by_source = _edges_of(case)
    H, score = 8, case.options.partition(",")[0].partition(" ")[0]
    value, out, per_edge = empty(N, H, case.D), empty(N, H, case.D), empty(E, H)
    query = key = alpha = term = edge = att = seed = grad_attention = None
    if score == "additive":
        alpha, term = empty(N, H, dtype=wide), empty(E, H, dtype=wide)
    else:
        query = empty(N, H, case.D)
    if score == "dot":
        key = empty(N, H, case.D)
    if score == "gatv2":
        edge, att = empty(E, H, case.D), empty(H, case.D)
    full = "everything" in case.options
    if full:
        term, seed, grad_attention = empty(E, H), empty(1, dtype=torch.int64), per_edge
    tensors = (score, query, key, value, alpha, alpha, term, edge, att)
    options = (seed, 1.0, 0.2, 0.1 if full else 0.0)
    _, stats, _ = graph_attention.graph_attention_forward(*tensors, *by_target, *options, full)
    graph_attention.graph_attention_backward(
        out,
        grad_attention,
        out,
        stats,
        per_edge,
        *tensors,
        *by_target,
        *by_source,
        *options,
        edge is not None,
    )
    if full:
        graph_attention.edge_softmax_backward(per_edge, per_edge, per_edge, *by_target[:3])


def _linear_attention(case: Case) -> None:
    """Forward, backward and step of a call of linear attention, in one segment or in several, and the forward
    of a few tokens."""
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    empty = lambda *shape, dtype=case.dtype: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    B, H, L, D = 64 if case.options == "causal" else 1, 8, 4096, case.D
    query, key, value, out = (empty(B, L, H, D).transpose(1, 2) for _ in range(4))
    den, decay, padding, bounds, kv, z = empty(B, H, L, dtype=wide), None, None, None, None, None
    full = case.options == "everything"
    if full:
        decay, kv, z = empty(B, H, L, dtype=wide), empty(B, H, D, D, dtype=wide), empty(B, H, D, dtype=wide)
        padding = empty(B, L, dtype=torch.bool)
    if case.options == "packed":
        bounds = empty(10, dtype=torch.int32)
    tensors = (decay, padding, bounds, kv, z)
    options = ("elu", case.options != "not causal", True, 1e-6, 1.0)
    linear_attention.linear_attention_forward(query, key, value, *tensors, *options, full)
    linear_attention.linear_attention_backward(
        out, kv, z, query, key, value, out, den, *tensors, *options, full, full
    )
    if options[1]:
        first = slice(linear_attention.SHORT)
        few = [None if t is None else t[:, :, first] for t in (query, key, value, decay)]
        state = empty(B, H, D, D, dtype=wide), empty(B, H, D, dtype=wide)
        if bounds is not None:
            state = empty(9, H, D, D, dtype=wide), empty(9, H, D, dtype=wide)
        few_shown = None if padding is None else padding[:, first]
        linear_attention.linear_attention_forward(*few, few_shown, bounds, *state, *options, True)
    if full:
        one = (query[:, :, 0], key[:, :, 0], value[:, :, 0], kv, z, decay[:, :, 0], "elu", *options[2:])
        linear_attention.linear_attention_step(*one)
        linear_attention.linear_attention_step_(*one)


CALLS = {
    "attention": _attention, "attention over a cache": _kv_cache, "aggregation": _aggregation,
    "graph attention": _graph_attention, "linear attention": _linear_attention,
}  # fmt: skip


def call(case: Case) -> None:
    CALLS[case.family](case)
