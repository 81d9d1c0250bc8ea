"""Values and gradients of attention against the float64 oracle, for every option, size, dtype and layout."""

import math
from pathlib import Path

import attention_cases
import numpy as np
import operator_checks
import pytest
import torch
from attention_cases import IMPLEMENTATIONS, INPUTS, call, check, choices, exact, make_case, thin
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_checks import LAYOUTS, check_layout, fewer, require

import fastattn

impl, poisoned = attention_cases.impl, operator_checks.poisoned

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

LOWER_RIGHT = {"is_causal": True, "causal_alignment": "lower_right"}
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal, L < S": {"is_causal": True, "S": 23},
    "causal, L > S": {"is_causal": True, "S": 6},
    "lower right, L < S": {**LOWER_RIGHT, "S": 23},
    "lower right, L > S": {**LOWER_RIGHT, "S": 6},
    "window": {"window_size": (3, 2), "S": 20},
    "window left": {"window_size": (4, -1), "causal_alignment": "lower_right", "S": 20},
    "window right": {"window_size": (-1, 1)},
    "window of one": {"window_size": (0, 0)},
    "window and causal": {"window_size": (2, 5), "is_causal": True},
    "boolean mask": {"mask": "bool"},
    "boolean mask of keys": {"mask": "bool", "mask_shape": "bs"},
    "boolean mask of queries": {"mask": "bool", "mask_shape": "l"},
    "float mask": {"mask": "float"},
    "float mask (1, H, L, S)": {"mask": "float", "mask_shape": "hls"},
    "float mask (1, 1, L, S)": {"mask": "float", "mask_shape": "ls"},
    "float mask (B, 1, 1, S)": {"mask": "float", "mask_shape": "bs"},
    "float mask (B, H, L, 1)": {"mask": "float", "mask_shape": "bhl"},
    "float mask (1, 1, 1, 1)": {"mask": "float", "mask_shape": "", "seed": 3},
    "float32 mask": {"mask": "float", "mask_dtype": torch.float32},
    "mask and causal": {"mask": "float", "mask_shape": "hls", "is_causal": True},
    "padding": {"padding": True},
    "padding and mask": {"padding": True, "mask": "bool", "mask_shape": "ls"},
    "scale": {"scale": 1.7},
    "negative scale, causal": {"scale": -0.9, "is_causal": True},
    "zero scale": {"scale": 0.0, "padding": True},
    "softcap": {"softcap": 1.5},
    "softcap, large scores": {"softcap": 2.0, "scale": 3.0, "is_causal": True},
    "alibi": {"alibi": "h", "S": 20},
    "alibi per batch, lower right": {**LOWER_RIGHT, "alibi": "bh", "S": 20},
    "sinks": {"sinks": True},
    "float32 sinks": {"sinks": True, "sinks_dtype": torch.float32, "is_causal": True},
    "sinks and empty rows": {"sinks": True, "mask": "bool", "padding": True},
    "GQA": {"H": 6, "Hkv": 2},
    "MQA, causal": {"H": 4, "Hkv": 1, "is_causal": True},
    "value dim": {"D": 8, "Dv": 5},
    "value dim wider": {"D": 7, "Dv": 19, "is_causal": True},
    "dropout": {"dropout_p": 0.4},
    "dropout of everything": {"dropout_p": 1.0},
    "one query": {"L": 1, "S": 37, "H": 8, "Hkv": 2},
    "everything": {
        "H": 4, "Hkv": 2, "S": 21, "D": 10, "Dv": 6, "mask": "float", "mask_shape": "bls", "padding": True,
        "alibi": "bh", "sinks": True, "softcap": 2.5, "scale": 0.6, "window_size": (7, 3),
        "causal_alignment": "lower_right", "dropout_p": 0.25,
    },
    "everything, causal": {
        "H": 4, "Hkv": 1, "S": 9, "mask": "float", "mask_shape": "hs", "padding": True, "alibi": "h",
        "sinks": True, "softcap": 1.0, "window_size": (5, -1), "is_causal": True, "dropout_p": 0.1,
    },
}  # fmt: skip


@choices(DTYPES, (torch.float32,))
@pytest.mark.parametrize("name", OPTIONS)
def test_options(impl, name, dtype):
    case = make_case(**({"L": 13, "dtype": dtype} | OPTIONS[name]))
    check(call(case, impl), case)


# Where Triton's kernels convert to or from a dtype of their own, or sum what is rounded once.
ROUNDED = ("plain", "causal, L < S", "float mask", "float32 mask", "float mask (B, 1, 1, S)", "sinks")
ROUNDED += (
    "softcap, large scores",
    "float32 sinks",
    "MQA, causal",
    "value dim wider",
    "dropout",
    "one query",
)
ROUNDED += ("everything", "everything, causal")


@pytest.mark.parametrize("impl", ("triton",), indirect=True)
@pytest.mark.parametrize("name", ROUNDED)
def test_options_in_half_precision_interpreted(impl, name):
    test_options(impl, name, torch.bfloat16)


SIZES = (0, 1, 2, 7, 15, 16, 17, 31, 33, 64, 65)


INTERPRETED_SIZES = (0, 1, 33, 64)


@pytest.mark.parametrize("causal", (False, True))
@choices((torch.float32, torch.bfloat16), (torch.float32,))
def test_sizes(impl, dtype, causal):
    """Lengths around the block sizes, also zero, in every pairing."""
    sizes = INTERPRETED_SIZES if impl == "triton" else SIZES
    for L in sizes:
        for S in sizes:
            case = make_case(1, 2, 1, L, S, 8, dtype=dtype, is_causal=causal, seed=L + S)
            check(call(case, impl), case)


@choices((torch.float32, torch.float64, torch.bfloat16, torch.float16), (torch.float32,))
@pytest.mark.parametrize("options", (
    {}, {"mask": "float", "mask_shape": "hls"}, {"mask": "float", "mask_shape": "bhls", "scale": 20.0},
    {
        "mask": "float", "mask_shape": "ls", "padding": True, "alibi": "bh", "sinks": True, "softcap": 2.5,
        "window_size": (140, 3), "causal_alignment": "lower_right",
    },
), ids=str)  # fmt: skip
def test_few_queries(impl, dtype, options):
    """One row to some more than have kernels of their own, against one key and several blocks of them."""
    for L, S in thin(impl, ((1, 1), (1, 1100), (2, 3), (3, 130), (4, 300), (5, 17), (8, 40), (9, 257))):
        case = make_case(**({"B": 2, "H": 4, "Hkv": 2, "L": L, "S": S, "D": 21, "dtype": dtype} | options))
        check(call(case, impl), case)


ROW_OPTIONS = {
    "plain": {},
    "float mask": {"mask": "float"},
    "everything": {
        "mask": "bool", "mask_shape": "ls", "padding": True, "alibi": "bh", "sinks": True, "softcap": 2.5,
        "window_size": (140, 3), "causal_alignment": "lower_right",
    },
}  # fmt: skip


@choices((torch.bfloat16, torch.float16), ())
@pytest.mark.parametrize("name", ROW_OPTIONS)
def test_few_queries_by_the_width_of_vectors_and_tiles(impl, name, dtype):
    """Head dims around those that matrix tiles are cut into, rows and keys around those they pay for."""
    sizes = (  # H, L, S, D, Dv
        (2, 1, 127, 64, 64), (2, 1, 128, 64, 64), (8, 1, 31, 31, 33), (8, 1, 32, 32, 31), (8, 1, 33, 33, 32),
        (4, 2, 145, 40, 130), (1, 15, 17, 96, 97), (4, 4, 257, 128, 161), (16, 1, 129, 129, 256),
        (1, 17, 130, 65, 63), (3, 3, 1100, 64, 128), (2, 7, 700, 80, 40),
        (3, 1, 100, 112, 96), (5, 1, 129, 97, 65), (6, 1, 90, 127, 224), (1, 7, 64, 100, 80),
        (8, 1, 65, 65, 48), (2, 2, 1100, 80, 97), (2, 3, 140, 129, 256), (4, 1, 300, 160, 161),
    )  # fmt: skip
    for n, (H, L, S, D, Dv) in enumerate(sizes):
        case = make_case(2, 2 * H, 2, L, S, D, Dv, dtype, seed=n, **ROW_OPTIONS[name])
        check(call(case, impl), case)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_few_queries(layout):
    impl = require("cpu")
    case = make_case(2, 4, 2, 3, 90, 48, 40, torch.bfloat16, mask="float", padding=True)
    names = ("query", "key", "value", "attn_mask", "key_padding_mask", "grad_out")
    check_layout(case, names, layout, lambda c: call(c, impl), exact=True)


FEW_KEYS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window_size": (9, 20), "causal_alignment": "lower_right"},
    "boolean mask": {"mask": "bool", "softcap": 1.5},
    "boolean mask of keys": {"mask": "bool", "mask_shape": "bs", **LOWER_RIGHT},
    "padding": {"padding": True, "scale": 3.0},
    "padding and mask": {"padding": True, "mask": "bool", "mask_shape": "ls"},
    "float mask": {"mask": "float", "mask_shape": "hls", "padding": True},
    "zero scale": {"scale": 0.0, "padding": True},
    "alibi and sinks": {"alibi": "bh", "sinks": True, "window_size": (30, 12)},
}  # fmt: skip
# Queries, keys, and the head dims of keys and values: as few queries as make keys few, and one less; as many
# keys as are few, and one more; one vector of keys and the next; rows in whole vectors, and not.
FEW_KEYS_SIZES = (
    (65, 16, 64, 64), (40, 3, 64, 40), (70, 4, 32, 32), (63, 16, 33, 64), (64, 16, 16, 7), (80, 15, 48, 21),
    (137, 33, 128, 30), (256, 64, 64, 64), (256, 63, 40, 48), (260, 65, 64, 64), (64, 1, 32, 128),
)  # fmt: skip


@choices((torch.float32, torch.float64, torch.bfloat16, torch.float16), (torch.float32,))
@pytest.mark.parametrize("name", FEW_KEYS)
def test_few_keys(impl, dtype, name):
    """Many queries to each key, which have kernels of their own, and not quite as many."""
    for L, S, D, Dv in thin(impl, FEW_KEYS_SIZES):
        case = make_case(**({"H": 2, "L": L, "S": S, "D": D, "Dv": Dv, "dtype": dtype} | FEW_KEYS[name]))
        check(call(case, impl), case)


@choices((torch.float32, torch.bfloat16, torch.float16), (torch.float32,))
def test_few_keys_of_grouped_heads(impl, dtype):
    """Short queries: a tile has rows of several heads, which lie in one piece, or do not."""
    sizes = ((20, 7, {}), (17, 9, {"mask": "bool"}), (1, 2, {}), (600, 16, {}), (20, 7, {"sinks": True}))
    for L, S, options in thin(impl, sizes):
        case = make_case(
            **({"B": 1, "H": 8, "Hkv": 1 + (L > 1), "L": L, "S": S, "D": 64, "dtype": dtype} | options)
        )
        check(call(case, impl), case)
        for name in ("query", "grad_out"):
            setattr(case, name, getattr(case, name).transpose(1, 2).contiguous().transpose(1, 2))
        check(call(case, impl), case)


def test_few_keys_shared_out_unevenly():
    """Each task is done once, whatever the number of threads that its place depends on."""
    impl, threads = require("cpu"), torch.get_num_threads()
    case = make_case(1, 7, L=600, S=16, D=64, dtype=torch.float32)
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            check(call(case, impl), case)
    finally:
        torch.set_num_threads(threads)


def test_few_keys_of_rows_that_see_nothing():
    """Such a row stays 0 beside others that see a NaN."""
    case = make_case(1, 2, L=67, S=16, D=32, dtype=torch.float32)
    case.attn_mask = (torch.arange(67) % 9 != 4).view(1, 1, 67, 1).expand(1, 1, 67, 16)
    case.value[:, :, 5] = math.nan
    out = call(case, require("cpu"))["out"]
    assert (out[:, :, 4::9] == 0).all() and out[:, :, 5::9].isnan().all()


@pytest.mark.parametrize("options, seen", [
    ({"is_causal": True}, slice(0, 20)),
    ({"is_causal": True, "causal_alignment": "lower_right", "window_size": (10, 0)}, slice(70, 100)),
])  # fmt: skip
def test_few_keys_among_many(impl, options, seen):
    """Keys before and behind all bands have no gradient, whatever was in its memory."""
    case = make_case(1, 8, 1, 20, 100, 32, dtype=torch.float32, **options)
    stale = [torch.full((1, 1, 100, 32), math.nan) for _ in range(16)]
    del stale
    results = call(case, impl)
    check(results, case)
    for name in ("grad_key", "grad_value"):
        hidden = results[name].clone()
        assert hidden[:, :, seen].any()
        hidden[:, :, seen] = 0
        assert (hidden == 0).all(), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_few_keys(impl, layout):
    for D in thin(impl, (32, 20)):
        case = make_case(1, 2, 1, 70, 8, D, D, torch.float32, mask="bool", padding=True)
        names = ("query", "key", "value", "attn_mask", "key_padding_mask", "grad_out", "grad_lse")
        exact = impl != "reference"
        check_layout(case, names, layout, lambda c: call(c, impl), exact, halves=impl == "triton")


@pytest.mark.parametrize("B, H, Hkv, L, S, D, Dv", [
    (0, 2, 2, 3, 4, 5, 6), (2, 0, 0, 3, 4, 5, 6), (2, 4, 2, 0, 4, 5, 6), (2, 4, 2, 3, 0, 5, 6),
    (2, 2, 1, 3, 4, 5, 0), (2, 2, 2, 0, 0, 5, 5), (0, 0, 0, 0, 0, 1, 0), (2, 0, 2, 3, 4, 5, 6),
    (2, 2, 2, 40, 4, 0, 5), (2, 2, 2, 40, 4, 0, 0),
])  # fmt: skip
@pytest.mark.parametrize(
    "extra", ({}, {"mask": "float", "padding": True, "alibi": "h", "sinks": True, "dropout_p": 0.5})
)
def test_empty_tensors(impl, B, H, Hkv, L, S, D, Dv, extra):
    case = make_case(B, H, Hkv, L, S, D, Dv, torch.float32, **extra)
    results = call(case, impl)
    for name, tensor in case.tensors().items():
        assert results[f"grad_{name}"].shape == tensor.shape
    assert results["out"].shape == (B, H, L, Dv) and not results["out"].isnan().any()
    if S == 0:
        assert (results["out"] == 0).all() and (extra or (results["lse"] == -math.inf).all())
    for name, expected in call(case, "reference").items():
        torch.testing.assert_close(
            results[name], expected, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


HEAD_DIMS = (1, 2, 3, 5, 8, 15, 16, 17, 24, 31, 32, 40, 63, 64, 65, 80, 96, 128, 129, 160, 256, 257, 512)
INTERPRETED_HEAD_DIMS = (1, 5, 16, 17, 40, 64, 65, 128, 129, 257, 512)
PAIRS = [(i, D) for i in IMPLEMENTATIONS for D in fewer(i, HEAD_DIMS, INTERPRETED_HEAD_DIMS)]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("impl, D", PAIRS, indirect=["impl"])
def test_head_dims(impl, D, dtype):
    case = make_case(1, 2, 1, 18, 35, D, dtype=dtype, is_causal=True, causal_alignment="lower_right")
    check(call(case, impl), case)


@pytest.mark.parametrize("D, Dv", ((64, 1), (1, 64), (16, 33), (33, 16), (192, 128), (64, 512)))
def test_value_dims(impl, D, Dv):
    case = make_case(1, 2, 2, 18, 35, D, Dv, torch.float32)
    check(call(case, impl), case)


@choices(DTYPES, (torch.float32,))
@pytest.mark.parametrize("options", (
    {}, {"is_causal": True}, {"mask": "float", "mask_shape": "hls"}, {"window_size": (60, 10)},
    {"padding": True, "sinks": True, "softcap": 5.0}, {"Hkv": 1, "dropout_p": 0.2},
), ids=str)  # fmt: skip
def test_precision_over_many_keys(impl, dtype, options):
    """Sums over several blocks of keys and queries are no worse than plain PyTorch's."""
    L, S = fewer(impl, (140, 301), (70, 100))
    case = make_case(**({"B": 1, "H": 2, "L": L, "S": S, "D": 32, "dtype": dtype} | options))
    check(call(case, impl), case, strict=True)


def test_large_scores_do_not_overflow(impl):
    case = make_case(1, 2, L=20, S=90, D=16, dtype=torch.float32, scale=40.0)
    check(call(case, impl), case)
    offset = make_case(1, 2, L=20, S=90, D=16, dtype=torch.float32)
    offset.attn_mask = torch.full((1, 1, 20, 90), -1e30)
    assert torch.allclose(
        call(offset, impl)["out"], offset.value.mean(2, keepdim=True).expand(-1, -1, 20, -1), atol=1e-5
    )


def test_minimum_of_the_dtype_is_visible(impl):
    """Only -inf hides: a row that is finfo.min everywhere has uniform weights, it absorbs the scores."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        case = make_case(1, 1, L=3, S=40, dtype=dtype)
        case.attn_mask = torch.full((1, 1, 3, 40), torch.finfo(dtype).min, dtype=dtype)
        results = call(case, impl)
        want, eps = case.value.double().mean(2, keepdim=True), torch.finfo(dtype).eps
        torch.testing.assert_close(results["out"].double(), want.expand(1, 1, 3, 8), rtol=0, atol=4 * eps)
        lse = results["lse"].double()
        assert torch.allclose(lse, torch.tensor(torch.finfo(dtype).min, dtype=torch.float64), rtol=4 * eps)
        grad = results["grad_value"].double()
        want = case.grad_out.double().sum(2, keepdim=True) / 40
        torch.testing.assert_close(grad, want.expand(1, 1, 40, 8), rtol=0, atol=eps)


@st.composite
def cases(draw):
    H = draw(st.sampled_from((1, 2, 4, 6)))
    mask = draw(st.sampled_from((None, None, "bool", "float")))
    options = {
        "is_causal": draw(st.booleans()),
        "causal_alignment": draw(st.sampled_from(("upper_left", "lower_right"))),
        "window_size": (draw(st.sampled_from((-1, -1, 0, 3, 20))), draw(st.sampled_from((-1, -1, 0, 2, 20)))),
        "softcap": draw(st.sampled_from((0.0, 0.0, 1.3))),
        "scale": draw(st.sampled_from((None, None, 0.0, 0.7, -0.4))),
        "dropout_p": draw(st.sampled_from((0.0, 0.0, 0.3))),
    }
    return make_case(
        draw(st.integers(1, 3)), H, draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if H % n == 0])),
        draw(st.integers(1, 40)), draw(st.integers(1, 70)), draw(st.integers(1, 20)),
        draw(st.integers(1, 20)), draw(st.sampled_from((torch.float64, torch.float32))), mask=mask,
        mask_shape=draw(st.sampled_from(("bhls", "ls", "bs", "hls", "bl", "", "s", "hs"))),
        padding=draw(st.booleans()), alibi=draw(st.sampled_from((None, None, "h", "bh"))),
        sinks=draw(st.booleans()), seed=draw(st.integers(0, 1000)), **options,
    )  # fmt: skip


def test_random_combinations(impl):
    @settings(
        max_examples=8 if impl == "triton" else 60, derandomize=True, deadline=None, database=None,
        suppress_health_check=(HealthCheck.too_slow,),
    )  # fmt: skip
    @given(case=cases())
    def check_one(case):
        check(call(case, impl), case)

    check_one()


ALONE = ("plain", "everything", "everything, causal", "one query")
PAIRS = [(i, name) for i in IMPLEMENTATIONS for name in fewer(i, ALONE, ("everything",))]


@pytest.mark.parametrize("impl, name", PAIRS, indirect=["impl"])
def test_each_gradient_alone_and_through_each_output(impl, name):
    case = make_case(**({"L": 13} | OPTIONS[name]))
    for lse, out in thin(impl, ((True, True), (True, False), (False, True))):
        together = call(case, impl, lse=lse, out=out)
        check(together, case, lse=lse, out=out)
        for tensor in case.tensors():
            alone = call(case, impl, only=[tensor], lse=lse, out=out)
            assert torch.equal(alone[f"grad_{tensor}"], together[f"grad_{tensor}"]), tensor


@pytest.mark.parametrize("layout", LAYOUTS)
@choices((torch.float32, torch.bfloat16), (torch.float32,))
def test_strides(impl, layout, dtype):
    """Any strides of any one tensor give bitwise the contiguous result; nothing given is written to."""
    heads = (1, 2, 1) if impl == "triton" else (2, 4, 2)
    case = make_case(
        *heads, 19, 35, 12, 10, dtype, mask="float", padding=True, alibi="bh", sinks=True, is_causal=True
    )
    names = (*INPUTS, "key_padding_mask", "grad_out", "grad_lse")
    exact = impl != "reference"
    check_layout(case, names, layout, lambda c: call(c, impl), exact, halves=impl == "triton")


def test_expanded_inputs_and_gradients(impl):
    case = make_case(3, 4, 4, 9, 14, 8, dtype=torch.float32, mask="float", is_causal=True)
    for name, dims in (
        ("query", (0,)),
        ("key", (0, 1)),
        ("value", (1,)),
        ("grad_out", (0, 1, 2, 3)),
        ("grad_lse", (0, 2)),
    ):
        tensor = getattr(case, name)
        for dim in dims:
            tensor = tensor.select(dim, 0).unsqueeze(dim)
        setattr(case, name, tensor.expand(getattr(case, name).shape))
    check(call(case, impl), case)


def test_head_beside_channel_layout_of_the_output(impl):
    """Joining the heads of the output is a view, as after PyTorch's own kernel."""
    if impl == "cpu":
        case = make_case(2, 3, L=4, dtype=torch.float32)
        assert call(case, impl)["out"].transpose(1, 2).is_contiguous()


def test_gradients_in_float64(impl):
    """gradcheck and gradgradcheck over the options, to every floating input and through both outputs."""
    names = (
        "plain",
        "lower right, L < S",
        "window",
        "float mask (B, 1, 1, S)",
        "everything",
        "everything, causal",
    )
    names = (*names, "softcap", "sinks and empty rows", "negative scale, causal")
    for name in fewer(impl, names, ("everything", "causal")):
        small = fewer(impl, {}, {"H": 2, "Hkv": 1})
        case = make_case(**(OPTIONS[name] | {"B": 1, "L": 3, "S": 4, "D": 2, "Dv": 3} | small))
        wanted = case.tensors()

        def attend(*tensors, case=case, names=tuple(wanted)):
            torch.manual_seed(case.seed)
            arguments = {
                n: getattr(case, n) for n in ("attn_mask", "key_padding_mask", "alibi_slopes", "sinks")
            }
            gqa = case.key.shape[1] != case.query.shape[1]
            out, lse = fastattn.scaled_dot_product_attention(
                **(arguments | dict(zip(names, tensors, strict=True))), enable_gqa=gqa, return_lse=True,
                impl=impl, **case.options,
            )  # fmt: skip
            # gradcheck subtracts numerically: infinities of empty rows would give NaN there.
            return out, torch.where(lse.isinf(), 0.0, lse)

        # Finite differences of -inf are NaN: the mask is kept finite instead.
        inputs = [t.clone().nan_to_num(neginf=-1.0).requires_grad_() for t in wanted.values()]
        assert torch.autograd.gradcheck(attend, inputs, fast_mode=True), name
        # Derivatives of the gradient come from the reference, whatever the options.
        if impl != "triton" or name == "causal":
            assert torch.autograd.gradgradcheck(attend, inputs, fast_mode=True), name


def test_repeatable_and_independent_of_threads(impl):
    sizes = fewer(impl, (2, 4, 2, 70, 90, 16), (1, 2, 1, 40, 70, 16))
    case = make_case(*sizes, dtype=torch.float32, mask="float", mask_shape="hls", sinks=True, dropout_p=0.2)
    check_repeatable(case, impl)
    sizes = fewer(impl, (1, 4, 2, 2, 1100, 64), (1, 2, 1, 2, 70, 64))
    check_repeatable(make_case(*sizes, dtype=torch.float32, alibi="bh", sinks=True), impl)
    sizes = fewer(impl, (1, 2, 1, 530, 16, 32), (1, 2, 1, 40, 7, 16))
    check_repeatable(make_case(*sizes, dtype=torch.float32, mask="bool"), impl)


def check_repeatable(case, impl):
    first = call(case, impl)
    threads = torch.get_num_threads()
    try:
        for n in thin(impl, (threads, 1, 2, 3)):
            torch.set_num_threads(n)
            for key, result in call(case, impl).items():
                if impl == "cpu" or n == threads:
                    assert torch.equal(result, first[key]), f"{key} with {n} threads"
    finally:
        torch.set_num_threads(threads)


def test_gradient_mode_does_not_change_the_result(impl):
    sizes = fewer(impl, (2, 4, 2), (1, 2, 1))
    case = make_case(*sizes, 33, 50, 16, dtype=torch.float32, is_causal=True, dropout_p=0.2)
    trained = call(case, impl)["out"]
    assert torch.equal(call(case, impl, only=())["out"], trained)
    with torch.no_grad():
        assert torch.equal(call(case, impl, only=())["out"], trained)
    with torch.inference_mode():
        assert torch.equal(call(case, impl, only=())["out"], trained)


def test_properties(impl):
    B, H, Hkv = fewer(impl, (2, 4, 2), (1, 2, 1))
    case = make_case(B, H, Hkv, 33, 50, 16, dtype=torch.float64)

    def run(**changed):
        arguments = {
            "query": case.query,
            "key": case.key,
            "value": case.value,
            "enable_gqa": True,
            "impl": impl,
        }
        return fastattn.scaled_dot_product_attention(**(arguments | changed))

    out = run()
    ones = run(value=torch.ones_like(case.value))
    torch.testing.assert_close(ones, torch.ones_like(ones))
    order = torch.randperm(50)
    torch.testing.assert_close(run(key=case.key[:, :, order], value=case.value[:, :, order]), out)
    rows = torch.randperm(33)
    torch.testing.assert_close(run(query=case.query[:, :, rows]), out[:, :, rows])
    shift = torch.randn(B, H, 33, 1, dtype=torch.float64)
    torch.testing.assert_close(run(attn_mask=shift), out)
    causal = run(is_causal=True)
    prefix = run(
        query=case.query[:, :, :20], key=case.key[:, :, :20], value=case.value[:, :, :20], is_causal=True
    )
    torch.testing.assert_close(causal[:, :, :20], prefix)
    # Two halves of the keys, merged by their log-sum-exp, are the whole.
    halves = [
        run(key=k, value=v, return_lse=True)
        for k, v in zip(case.key.chunk(2, 2), case.value.chunk(2, 2), strict=True)
    ]
    weights = torch.softmax(torch.stack([lse for _, lse in halves]), 0).unsqueeze(-1)
    torch.testing.assert_close(sum(w * o for w, (o, _) in zip(weights, halves, strict=True)), out)


def test_implementations_agree_on_larger_inputs():
    require("cpu")
    options = {
        "mask": "float",
        "mask_shape": "hls",
        "padding": True,
        "alibi": "h",
        "sinks": True,
        "dropout_p": 0.1,
    }
    case = make_case(
        2, 4, 2, 300, 517, 64, 48, torch.float32, is_causal=True, causal_alignment="lower_right", **options
    )
    expected = call(case, "reference")
    for key, result in call(case, "cpu").items():
        torch.testing.assert_close(
            result, expected[key], rtol=1e-3, atol=2e-4, msg=lambda m, k=key: f"{k}: {m}"
        )


WRONG = {
    "mask ignored": ({"mask": "float"}, lambda c: setattr(c, "attn_mask", None)),
    "boolean mask inverted": ({"mask": "bool"}, lambda c: setattr(c, "attn_mask", ~c.attn_mask)),
    "padding ignored": ({"padding": True}, lambda c: setattr(c, "key_padding_mask", None)),
    "causal ignored": ({"is_causal": True}, lambda c: c.options.update(is_causal=False)),
    "causal off by one": (
        {"is_causal": True},
        lambda c: c.options.update(is_causal=False, window_size=(-1, 1)),
    ),
    "other alignment": (
        {"is_causal": True, "S": 15},
        lambda c: c.options.update(causal_alignment="lower_right"),
    ),
    "window off by one": ({"window_size": (3, 2)}, lambda c: c.options.update(window_size=(3, 3))),
    "scale missing": ({}, lambda c: c.options.update(scale=1.0)),
    "scale slightly off": ({"D": 8}, lambda c: c.options.update(scale=8**-0.5 * 1.01)),
    "softcap ignored": ({"softcap": 1.0}, lambda c: c.options.update(softcap=0.0)),
    "alibi ignored": ({"alibi": "h"}, lambda c: setattr(c, "alibi_slopes", c.alibi_slopes * 0)),
    "sinks ignored": ({"sinks": True}, lambda c: setattr(c, "sinks", torch.full_like(c.sinks, -math.inf))),
    "dropout of other weights": ({"dropout_p": 0.3}, lambda c: setattr(c, "seed", 17)),
    "heads shared in the wrong order": (
        {"H": 4, "Hkv": 2},
        lambda c: (setattr(c, "key", c.key.flip(1)), setattr(c, "value", c.value.flip(1))),
    ),
    "gradient of lse forgotten": ({}, lambda c: setattr(c, "grad_lse", c.grad_lse * 0)),
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_checker_catches(name, dtype):
    options, spoil = WRONG[name]
    right, wrong = (make_case(**({"L": 13, "dtype": dtype} | options)) for _ in range(2))
    spoil(wrong)
    if dtype == torch.bfloat16 and "slightly" in name:
        return
    with pytest.raises(AssertionError):
        check(call(wrong, "reference"), right)


@pytest.mark.parametrize("spoil", (
    lambda r: r["out"].mul_(0.9), lambda r: r["lse"].mul_(math.log2(math.e)),
    lambda r: r["grad_query"].mul_(2),
    lambda r: r["grad_key"].neg_(), lambda r: r["grad_value"].mul_(0.6),
    lambda r: r["grad_attn_mask"].zero_(),
    lambda r: r["out"][0, 0, 0].zero_(),
    lambda r: r["grad_sinks"].mul_(1.5), lambda r: r["lse"][0, 0, 1].fill_(0.0),
))  # fmt: skip
def test_checker_catches_spoilt_results(spoil):
    case = make_case(L=13, dtype=torch.float32, mask="float", mask_shape="ls", sinks=True)
    case.attn_mask[:, :, 1] = -math.inf
    results = call(case, "reference")
    check(results, case)
    spoil(results)
    with pytest.raises(AssertionError):
        check(results, case)


def test_oracle_gradient_is_the_derivative_of_its_value():
    """The oracle's hand-written gradient against finite differences of its own forward."""
    case = make_case(**(OPTIONS["everything"] | {"B": 1, "L": 3, "S": 5, "D": 2, "Dv": 2}))
    case.attn_mask = case.attn_mask.nan_to_num(neginf=-1.0)
    case.key_padding_mask[:] = True
    expected, _ = exact(case)

    def weigh(result):
        return (result["out"] * case.grad_out.numpy()).sum() + (result["lse"] * case.grad_lse.numpy()).sum()

    for name, tensor in case.tensors().items():
        flat = tensor.view(-1)
        for n in range(0, flat.numel(), 3):
            value = flat[n].item()
            sides = []
            for step in (1e-5, -1e-5):
                flat[n] = value + step
                sides.append(weigh(exact(case)[0]))
            flat[n] = value
            numerical = (sides[0] - sides[1]) / 2e-5
            assert np.isclose(expected[f"grad_{name}"].reshape(-1)[n], numerical, rtol=1e-5, atol=1e-7), name


def test_other_instruction_sets(other_isa, run_python):
    """Compact tests of attention, once more under each of the other instruction sets."""
    require("cpu")
    compact = ["options", "sizes", "few_keys", "head_dims", "value_dims", "precision", "minimum", "weights"]
    compact += ["isolation", "boolean", "a_scale"]
    chosen = f"({' or '.join('test_' + name for name in compact)}) and cpu"
    files = [Path(__file__).with_name(f"test_attention{part}.py") for part in ("", "_rules", "_weights")]
    run_python(
        "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", chosen, *files, FASTATTN_CPU_ISA=other_isa
    )


@pytest.mark.parametrize("L", (1, 33))
def test_gradients_where_whole_blocks_make_fewer_chunks_of_keys(L):
    """Keys are cut into as many chunks as threads want, and then into whole blocks, which are fewer."""
    threads = torch.get_num_threads()
    inputs = [torch.randn(1, 1, n, 4, dtype=torch.float64) for n in (L, 3100, 3100)]
    results = []
    try:
        for impl, count in (("reference", 1), (require("cpu"), 2), ("cpu", 4)):
            torch.set_num_threads(count)
            leaves = [t.clone().requires_grad_() for t in inputs]
            out = fastattn.scaled_dot_product_attention(*leaves, impl=impl)
            results.append(torch.autograd.grad(out.square().sum(), leaves))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])
