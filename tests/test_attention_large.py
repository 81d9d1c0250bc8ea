"""Attention of so many rows, keys and columns that CPUs with matrix tiles form float32 products on them."""

import math

import kv_cache_cases
import pytest
import torch
from attention_cases import INPUTS, call, check, make_case
from operator_checks import LAYOUTS, check_layout, require
from test_attention import OPTIONS

import fastattn
from fastattn import _native

LARGE = {
    name: options
    for name, options in OPTIONS.items()
    if name not in ("one query", "value dim", "value dim wider", "window of one", "dropout of everything")
} | {
    "value dim": {"D": 100, "Dv": 129},
    "value dim of less than a tile": {"Dv": 5, "is_causal": True},
    "window": {"window_size": (130, 90)},
    "window left, L < S": {"window_size": (150, -1), "causal_alignment": "lower_right", "S": 20},
    "window, causal": {"window_size": (200, 5), "is_causal": True},
    "few keys a head": {"H": 8, "Hkv": 1, "L": 33, "S": 23},
}


def large(name, dtype, **changed):
    """An option's case in large; lengths that are less or more than the others' stay so."""
    options = LARGE[name] | changed
    length, keys = options.get("L", 258), options.get("S", 258)
    options |= {"B": 1, "L": length, "S": 97 if keys < 13 else 301 if keys < 258 else keys, "dtype": dtype}
    if "window_size" in options and max(options["window_size"]) < 10:
        options["window_size"] = tuple(w if w < 0 else 30 * w for w in options["window_size"])
    wide = {"D": 128} if options.get("D", 0) < 100 else {}
    return make_case(**options | wide | ({"Dv": 128} if options.get("Dv") in (6, 19) else {}))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_options_in_large(name, dtype):
    case = large(name, dtype)
    check(call(case, require("cpu")), case)


@pytest.mark.parametrize("D", (33, 64, 96, 127, 160, 256))
@pytest.mark.parametrize("L, S", ((256, 257), (319, 288), (130, 640)))
def test_sizes_in_large(L, S, D):
    case = make_case(B=1, H=3, L=L, S=S, D=D, dtype=torch.float32, window_size=(S, L // 2))
    check(call(case, require("cpu")), case)


def test_errors_are_smaller_on_matrix_tiles():
    """Sums are shorter there: two thirds of the error of plain PyTorch, which vectors exceed a little."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 4, 512, 64) for _ in range(3))

    def plain(query, key, value):
        return (query @ key.mT / 8).softmax(-1) @ value

    exact = plain(query.double(), key.double(), value.double())
    out = fastattn.scaled_dot_product_attention(query, key, value, impl=require("cpu"))
    error, of_plain = (((x - exact).norm() / exact.norm()).item() for x in (out, plain(query, key, value)))
    assert 0 < error < (0.75 if _native.isa() == "amx" else 2) * of_plain, (error, of_plain)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_in_large(layout):
    impl, case = require("cpu"), large("everything", torch.float32, L=258, S=258)
    names = (*INPUTS, "key_padding_mask", "grad_out", "grad_lse")
    check_layout(case, names, layout, lambda c: call(c, impl), exact=True)


def outcome(impl, query, key, value, grad, **options):
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    out = fastattn.scaled_dot_product_attention(*leaves, impl=impl, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("D", (100, 128))
def test_what_is_not_finite_in_large(D, bad, place):
    """Where it is seen it stays as it is: a NaN, an infinity of its sign, and nothing beside it."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, 256, D) for _ in range(4)]
    tensors[place][0, 1, 77, 5] = bad
    tensors[place][0, 1, 200, 64] = bad
    query, key, value, grad = tensors
    expected = outcome("reference", *tensors)
    for name, got, right in zip("oqkv", outcome(require("cpu"), *tensors), expected, strict=True):
        assert got[:, 0].isfinite().all()
        same = (
            right.isfinite() if name == "o" or bad != bad or place == 3 else right.isfinite() & got.isfinite()
        )
        torch.testing.assert_close(got[same], right[same], rtol=2e-4, atol=2e-5)
    out, right = outcome(require("cpu"), *tensors)[0], expected[0]
    assert torch.equal(out.isnan(), right.isnan())
    assert torch.equal(out.isposinf(), right.isposinf()) and torch.equal(out.isneginf(), right.isneginf())


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
def test_gradients_that_are_not_finite_in_large(bad):
    """An infinity times a weight that is a bf16, whose other parts are zero, stays an infinity."""
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(1, 2, 256, 128) for _ in range(4))
    grad[0, 1, 77, 5] = bad
    grad_value = outcome(require("cpu"), torch.zeros_like(query), key, value, grad)[3]
    expected = (grad.double().sum(2, keepdim=True) / 256).expand(1, 2, 256, 128)
    torch.testing.assert_close(grad_value.double(), expected, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_nan_in_the_last_bits_in_large():
    """A NaN whose upper half is that of an infinity stays one."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 256, 128) for _ in range(3))
    value.view(torch.int32)[0, 1, 77, 5] = 0x7F800001
    out = fastattn.scaled_dot_product_attention(query, key, value, impl=require("cpu"))
    assert out[0, 1, :, 5].isnan().all() and out.isnan().sum() == 256


@pytest.mark.parametrize("power", (-40, -20, 20, 50))
def test_magnitudes_in_large(power):
    """No bit is lost in numbers far from one, as long as their products are far from the smallest."""
    case = make_case(B=1, L=256, D=128, dtype=torch.float32, scale=2.0 ** (-2 * power) / 11)
    case.query *= 2.0**power
    case.key *= 2.0**power
    case.value *= 2.0**power
    check(call(case, require("cpu"), only=("value",)), case)


@pytest.mark.parametrize("softcap", (0.0, 20.0))
@pytest.mark.parametrize("bad", (math.nan, math.inf, 3e38))
def test_hidden_values_in_large(bad, softcap):
    """What no query sees influences nothing, whatever it holds: 3e38 makes scores that are inf - inf."""
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(1, 2, 256, 128) for _ in range(4))
    shown = torch.rand(1, 256) < 0.7
    options = {"key_padding_mask": shown, "softcap": softcap}
    clean = outcome(require("cpu"), query, key, value, grad, **options)
    spoilt = [t.masked_fill(~shown.view(1, 1, 256, 1), bad) for t in (key, value)]
    for got, right in zip(outcome("cpu", query, *spoilt, grad, **options), clean, strict=True):
        assert torch.equal(got, right)


def test_weights_beside_the_output_in_large():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 8, 256, 128) for _ in range(3))
    out, lse, weights = torch.ops.fastattn.attention_forward_with_weights(
        query, key, value, None, None, None, None, None, 0.125, 0.0, -1, 0, False, 0.0, True
    )
    alone = torch.ops.fastattn.attention_forward(
        query, key, value, None, None, None, None, None, 0.125, window_right=0
    )
    assert torch.equal(out, alone[0]) and torch.equal(lse, alone[1])
    score = (query.double() @ key.double().mT * 0.125).masked_fill(
        torch.ones(256, 256, dtype=torch.bool).triu(1), -math.inf
    )
    expected = score.softmax(-1).mean(1)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)
    later = torch.ops.fastattn.attention_weights(
        query, key, lse, None, None, None, None, None, 0.125, 0.0, -1, 0, False, 0.0, True
    )
    torch.testing.assert_close(later.double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("average", (False, True))
def test_weights_beside_a_biased_output_in_large(average):
    """Scores are formed in several places, and rounded in one way in all of them."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 16, 256, 64) for _ in range(3))
    options = (torch.randn(1, 1, 256, 256), None, None, None, None, 0.7)
    beside = torch.ops.fastattn.attention_forward_with_weights(
        query, key, value, *options, 0.0, -1, -1, False, 0.0, average
    )
    alone = torch.ops.fastattn.attention_forward(query, key, value, *options)
    assert torch.equal(beside[0], alone[0]) and torch.equal(beside[1], alone[1])


def test_pages_in_large():
    """Of whatever size they are, a call is worth as much, and formed of the same products."""
    results = []
    for page_size in (None, 16, 48, 256):
        case = kv_cache_cases.make_case((300, 0, 70), L=130, D=128, page_size=page_size, is_causal=True)
        results.append(kv_cache_cases.call(case, require("cpu")))
    kv_cache_cases.check(results[-1], case)
    for result in results[:-1]:
        for name in ("out", "lse"):
            assert torch.equal(result[name], results[-1][name])
