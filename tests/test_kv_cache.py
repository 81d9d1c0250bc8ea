"""Attention over a cache against the float64 oracle: options, sizes, dtypes, layouts, pages, splits."""

import importlib
import math

import kv_cache_cases
import operator_checks
import pytest
import torch
from attention_cases import choices
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_cache_cases import OP, call, check, make_case
from operator_checks import LAYOUTS, NATIVE, fewer, require, running

import fastattn

poisoned, impl = operator_checks.poisoned, kv_cache_cases.impl

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


OPTIONS = {
    "decode": {},
    "many heads of a group": {"H": 12, "Hkv": 1},
    "prompt": {"L": 13, "lengths": (0, 0)},
    "chunk of a prompt": {"L": 13, "lengths": (5, 0, 30)},
    "read only": {"L": 3, "T": 0},
    "more queries than new tokens": {"L": 5, "T": 2},
    "fewer queries than new tokens": {"L": 2, "T": 7},
    "fewer keys than queries": {"L": 20, "T": 1},
    "not causal": {"L": 5, "is_causal": False},
    "window": {"L": 5, "window_size": (3, 1), "is_causal": False},
    "window, causal": {"L": 7, "window_size": (4, -1)},
    "decode in a window": {"window_size": (3, 0)},
    "window of itself": {"L": 4, "window_size": (0, 0)},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": -0.7},
    "alibi": {"alibi": "h"},
    "alibi per sequence": {"alibi": "bh", "L": 4},
    "sinks": {"sinks": True, "L": 12, "T": 1},
    "head dims": {"D": 5, "Dv": 11},
    "splits": {"num_splits": 3},
    "everything": {
        "L": 4, "T": 3, "D": 10, "Dv": 6, "window_size": (6, -1), "softcap": 2.0, "scale": 0.4, "alibi": "bh",
        "sinks": True, "num_splits": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("page_size", (None, 4))
@choices(DTYPES, (torch.float32,))
@pytest.mark.parametrize("name", OPTIONS)
def test_options(impl, name, dtype, page_size):
    case = make_case(**({"dtype": dtype, "page_size": page_size} | OPTIONS[name]))
    check(call(case, impl), case)


@pytest.mark.parametrize("page_size", (None, 1, 3, 16, 64, 128, 131))
@pytest.mark.parametrize("L", (1, 2, 40))
def test_lengths_around_the_blocks(impl, L, page_size):
    lengths = (0, 1, 15, 16, 17, 63, 64, 127, 128, 129, 255, 300)
    lengths = fewer(impl, lengths, (0, 1, 31, 32, 33, 65))
    case = make_case(lengths, H=2, Hkv=1, L=L, page_size=page_size)
    check(call(case, impl), case)


@pytest.mark.parametrize("page_size", (None, 1, 8, 16, 20, 64))
@pytest.mark.parametrize("window", (-1, 133))
def test_lengths_around_the_tiles(page_size, window):
    """Few rows of bfloat16, whose keys are read 16 at a time where they lie side by side."""
    impl = require("cpu", OP)
    for D, Dv, L in ((64, 64, 1), (40, 100, 4)):
        case = make_case(
            (62, 63, 64, 65, 78, 79, 80, 126, 127, 128, 300), H=8, Hkv=2, L=L, D=D, Dv=Dv,
            dtype=torch.bfloat16, page_size=page_size, window_size=(window, -1),
        )  # fmt: skip
        check(call(case, impl), case)


@pytest.mark.parametrize("lengths, H, Hkv, L, T, D, Dv", [
    ((), 2, 1, 1, 1, 4, 4), ((3, 0), 0, 0, 1, 1, 4, 4), ((3, 0), 2, 1, 0, 2, 4, 4),
    ((3, 0), 2, 1, 2, 0, 4, 0), ((0, 0), 2, 2, 3, 0, 4, 5), ((2, 1), 2, 2, 3, 1, 0, 5),
    ((3, 0), 0, 2, 2, 1, 4, 5), ((2, 1), 2, 2, 40, 1, 0, 0),
])  # fmt: skip
@pytest.mark.parametrize("page_size", (None, 2))
def test_empty_tensors(impl, lengths, H, Hkv, L, T, D, Dv, page_size):
    case = make_case(lengths, H, Hkv, L, T, D, Dv, page_size=page_size)
    results = call(case, impl)
    assert results["out"].shape == (len(lengths), H, L, Dv) and results["lse"].shape == (len(lengths), H, L)
    if D > 0 and H > 0:
        check(results, case)


@pytest.mark.parametrize("page_size", (None, 4))
def test_a_cache_without_room_or_pages(impl, page_size):
    """Nothing is there to be read, and nothing is."""
    case = make_case((0, 0), L=2, T=0, room=0, page_size=page_size, sinks=True)
    results = call(case, impl)
    assert (results["out"] == 0).all()
    torch.testing.assert_close(results["lse"], case.sinks.view(1, -1, 1).expand(2, -1, 2))


@pytest.mark.parametrize("index_dtype", (torch.int32, torch.int64), ids=str)
def test_index_dtypes(impl, index_dtype):
    case = make_case(L=3, page_size=4, index_dtype=index_dtype)
    check(call(case, impl), case)
    case.block_table = case.block_table.repeat_interleave(2, 1)[:, ::2]
    case.cache_seqlens = case.cache_seqlens.repeat_interleave(2)[::2]
    check(call(case, impl), case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("L", (1, 20))
@pytest.mark.parametrize("page_size", (None, 4))
def test_layouts(impl, layout, L, page_size):
    L = fewer(impl, L, min(L, 5))
    case = make_case(fewer(impl, (5, 0, 9), (5, 9)), L=L, page_size=page_size, alibi="bh", sinks=True)
    expected = call(case, impl)
    names = ["query", "key_cache", "value_cache", "key", "value", "alibi_slopes", "sinks"]
    names = [name for name in names if getattr(case, name).dim() > 1 or layout == "sliced"]
    for chosen in fewer(impl, [[name] for name in names], (names[::2], names[1::2])):
        arguments = {n: getattr(case, n).clone() for n in ("key_cache", "value_cache")}
        for name in chosen:
            arguments[name] = LAYOUTS[layout](arguments.get(name, getattr(case, name)))
        out, lse = fastattn.attention_with_kv_cache(
            **(case.arguments() | arguments), return_lse=True, impl=impl
        )
        results = {"out": out, "lse": lse, **{n: arguments[n] for n in ("key_cache", "value_cache")}}
        for n, result in results.items():
            torch.testing.assert_close(result, expected[n], equal_nan=True, msg=f"{n} with {layout} {chosen}")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@NATIVE
@given(data=st.data())
def test_random_calls(impl, data):
    draw = lambda strategy: data.draw(strategy)  # noqa: E731
    Hkv = draw(st.sampled_from((1, 2, 3)))
    case = make_case(
        tuple(draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))),
        H=Hkv * draw(st.sampled_from((1, 2, 4))), Hkv=Hkv,
        L=draw(st.integers(1, 20)), T=draw(st.integers(0, 20)),
        D=draw(st.sampled_from((1, 4, 8, 17))), Dv=draw(st.sampled_from((1, 8, 9))),
        dtype=draw(st.sampled_from(DTYPES)), page_size=draw(st.sampled_from((None, 1, 2, 5, 16))),
        alibi=draw(st.sampled_from((None, "h", "bh"))), sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
        is_causal=draw(st.booleans()), softcap=draw(st.sampled_from((0.0, 1.5))),
        window_size=draw(st.sampled_from(((-1, -1), (3, -1), (7, 0), (0, 4), (-1, 2)))),
        num_splits=draw(st.integers(0, 5)),
    )  # fmt: skip
    check(call(case, impl), case)


# What never changes a result


LONG = (3000, 511, 1025, 1)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("L", (1, 3, 17))
def test_splits_pages_and_threads_change_no_bit(L, dtype):
    impl = require("cpu", OP)
    options = {"H": 8, "Hkv": 2, "L": L, "D": 32, "dtype": dtype}
    expected = call(make_case(LONG, **options), impl)
    threads = torch.get_num_threads()
    every = (0, 1, 2, 3, 100)
    for n, page_size in enumerate((None, 1, 48, 64, 512, 4096)):
        for num_splits in (every[n % 5], every[(n + 2) % 5]):
            case = make_case(LONG, page_size=page_size, num_splits=num_splits, **options)
            try:
                torch.set_num_threads(1 + num_splits % 3)
                result = call(case, impl)
            finally:
                torch.set_num_threads(threads)
            for name in ("out", "lse"):
                assert torch.equal(result[name], expected[name]), (page_size, num_splits, name)


@pytest.mark.parametrize("H, L, page_size", ((2, 1, None), (2, 1, 32), (6, 1, 5), (6, 11, 64)))
def test_splits_change_nothing_but_rounding_in_triton(H, L, page_size):
    """Fewer keys than splits, one block for each, and several; a tile of rows, and more."""
    with running("triton", OP) as impl:
        for num_splits in (0, 1, 2, 3, 100 if L == 1 else 5):
            options = {"window_size": (70, -1), "softcap": 2.0} if num_splits == 3 else {}
            options |= {"T": 1} if num_splits == 2 else {}  # the first rows of the shortest then see nothing
            case = make_case(
                (0, 31, 130), H, 2, L, alibi="bh", sinks=num_splits != 2, page_size=page_size,
                num_splits=num_splits, **options,
            )  # fmt: skip
            check(call(case, impl), case)


def test_triton_divides_the_keys_of_long_caches_by_itself(monkeypatch):
    with running("triton", OP) as impl:
        case = make_case((600, 20), 4, 2)
        kernels = importlib.import_module("fastattn.kernels.kv_cache")
        joined = []
        monkeypatch.setattr(
            kernels, "launch", lambda kernel, *a, launch=kernels.launch, **k: (joined.append(kernel),
                                                                               launch(kernel, *a, **k))
        )  # fmt: skip
        check(call(case, impl), case)
        assert joined == [kernels.append_kernel, kernels.attend_kernel, kernels.join_kernel]


def test_long_sequences_are_exact():
    impl = require("cpu", OP)
    for L in (1, 20):
        case = make_case((3000, 511), H=2, Hkv=1, L=L, D=16)
        check(call(case, impl), case)


def test_a_prompt_in_chunks_is_the_whole_prompt(impl):
    """Appended in pieces of any size, and asked again at the end: as attention over the whole."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 50, 8), torch.randn(2, 2, 50, 8), torch.randn(2, 2, 50, 8)
    expected = fastattn.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    cache = [torch.full((2, 2, 60, 8), math.nan) for _ in range(2)]
    lengths = torch.zeros(2, dtype=torch.int32)
    for piece in ((0, 1), (1, 20), (20, 21), (21, 50)):
        part = slice(*piece)
        out = fastattn.attention_with_kv_cache(
            query[:, :, part], *cache, key[:, :, part], value[:, :, part], cache_seqlens=lengths, impl=impl
        )
        torch.testing.assert_close(out, expected[:, :, part])
        lengths += piece[1] - piece[0]
    out = fastattn.attention_with_kv_cache(query, *cache, cache_seqlens=lengths, impl=impl)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("page_size", (None, 4))
def test_one_number_is_the_length_of_every_sequence(impl, page_size):
    case = make_case((9, 9, 9), L=2, page_size=page_size)
    check(call(case, impl, cache_seqlens=9), case)


def test_sequences_share_pages_that_are_only_read(impl):
    """A common prefix of two full pages, then a page of each sequence."""
    case = make_case((8, 8), page_size=4, L=2)
    common = case.block_table[0, :2]
    case.block_table[1, :2] = common
    case.tokens[1] = torch.cat([case.tokens[0][:, :8], case.tokens[1][:, 8:]], 1)
    case.values[1] = torch.cat([case.values[0][:, :8], case.values[1][:, 8:]], 1)
    check(call(case, impl), case)


def test_keys_and_values_may_alternate_in_one_buffer(impl):
    case = make_case((5, 7), page_size=4, L=2, D=8, Dv=6)
    expected = call(case, impl)
    for joined in (
        lambda k, v: (lambda b: (b[..., :8], b[..., 8:]))(torch.cat([k, v], -1)),
        lambda k, v: torch.stack([k, torch.nn.functional.pad(v, (0, 2))], 1).unbind(1),
        lambda k, v: torch.stack([k, torch.nn.functional.pad(v, (0, 2))]).unbind(0),
    ):
        key_cache, value_cache = joined(case.key_cache, case.value_cache)
        out = fastattn.attention_with_kv_cache(
            **(case.arguments() | {"key_cache": key_cache, "value_cache": value_cache[..., :6]}), impl=impl
        )
        torch.testing.assert_close(out, expected["out"])


def test_a_visible_nan_is_not_hidden(impl):
    case = make_case((5, 7), L=1)
    case.key_cache[0, 0, 2, 1] = math.nan
    out = call(case, impl)["out"]
    assert out[0, :2].isnan().all() and out[0, 2:].isfinite().all() and out[1].isfinite().all()


def test_other_instruction_sets(other_isa, run_python):
    """Few rows and many, of every dtype: vectors differ in how many lanes a tile has."""
    program = "import sys; sys.path.insert(0, 'tests'); import torch; from kv_cache_cases import *\n"
    program += "for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):\n"
    program += "    for H, L in ((2, 1), (6, 1), (4, 3), (8, 2), (4, 20)):\n"
    program += "        case = make_case((40, 0, 9), H, 2, L, dtype=dtype, page_size=4)\n"
    program += "        check(call(case, 'cpu'), case)\n"
    run_python("-c", program, FASTATTN_CPU_ISA=other_isa)
