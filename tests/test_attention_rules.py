"""The rules of attention: empty, hidden and NaN; dropout; arguments and shapes; the choice."""

import math

import attention_cases
import attention_oracle
import numpy as np
import operator_checks
import pytest
import torch
import torch.nn.functional as F
from attention_cases import (
    IMPLEMENTATIONS,
    INPUTS,
    call,
    check,
    dropout_seed,
    make_case,
    thin,
)
from operator_checks import NATIVE, assert_same, fewer, require
from torch.nn.attention.bias import CausalBias, CausalVariant, causal_lower_right, causal_upper_left

import fastattn

impl, poisoned = attention_cases.impl, operator_checks.poisoned

attend = fastattn.scaled_dot_product_attention


def hide(case, keys=(), rows=()):
    """Makes ``keys`` invisible to everyone by padding and ``rows`` see nothing by a boolean mask."""
    (B, _, L, _), S = case.query.shape, case.key.shape[2]
    case.key_padding_mask = torch.ones(B, S, dtype=torch.bool)
    case.key_padding_mask[:, list(keys)] = False
    if rows:
        case.attn_mask = torch.ones(1, 1, L, S, dtype=torch.bool)
        case.attn_mask[:, :, list(rows)] = False
    return case


def test_isolation_hidden_keys(impl):
    """NaN and inf in keys and values that no query sees change no bit of any result."""
    hiding = (
        ({"S": 40}, lambda c: hide(c, keys=(3, 17, 38, 39)), (3, 17, 38, 39)),
        ({"S": 40, "is_causal": True}, lambda c: c, range(20, 40)),
        ({"S": 40, "window_size": (2, 1), "causal_alignment": "lower_right"}, lambda c: c, range(0, 18)),
        ({"S": 40, "mask": "float", "mask_shape": "bs"}, None, None),
        (
            {"S": 40, "Hkv": 1, "is_causal": True, "softcap": 2.0, "sinks": True, "alibi": "h"},
            lambda c: c,
            range(20, 40),
        ),
        ({"S": 16, "L": 67, "D": 32}, lambda c: hide(c, keys=(0, 5, 15)), (0, 5, 15)),
        ({"S": 60, "L": 20, "D": 32, "H": 4, "Hkv": 1, "is_causal": True}, lambda c: c, range(20, 60)),
    )
    for dtype in thin(impl, (torch.float32, torch.bfloat16, torch.float64)):
        for options, prepare, keys in hiding:
            for poison in thin(impl, (math.nan, math.inf, -math.inf)):
                case = make_case(**({"B": fewer(impl, 2, 1), "L": 20, "dtype": dtype} | options))
                if prepare is None:
                    keys = [5, 6, 31]
                    case.attn_mask[..., keys] = -math.inf
                else:
                    case = prepare(case)
                expected = call(case, impl)
                check(expected, case)
                case.key[:, :, list(keys)] = poison
                case.value[:, :, list(keys)] = poison
                assert_same(call(case, impl), expected)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("form", ("padding", "mask", "mask of each row", "numbers", "padding and mask"))
def test_isolation_of_few_queries_behind_padding(dtype, form):
    """Keys that nobody sees in front of the others and among them, whole blocks or less, hold NaN."""
    impl = require("cpu")
    for n, (L, S, hidden) in enumerate((
        (1, 300, [(0, 1)]), (2, 300, [(0, 127)]), (1, 300, [(0, 128), (140, 150)]), (3, 300, [(0, 129)]),
        (1, 400, [(0, 255), (256, 399)]), (1, 400, [(128, 256), (400, 400)]), (1, 130, [(0, 130)]),
        (2, 1100, [(0, 600)]), (1, 1100, [(300, 1040), (1099, 1100)]), (1, 1100, [(0, 1100)]),
        (1, 17, [(0, 16)]), (2, 257, [(100, 257)]),
    )):  # fmt: skip
        case = make_case(2, 4, 2, L, S, 32, 40, dtype=dtype, seed=n, sinks=n % 2 == 1)
        shown = torch.ones(2, S, dtype=torch.bool)
        for begin, end in hidden:
            shown[1, begin:end] = False  # the other sequence sees all
        if form.startswith("padding"):
            case.key_padding_mask = shown
        if form == "padding and mask":
            case.attn_mask = torch.arange(S).ne(S // 2)[None, None, None]
        elif form == "mask":
            case.attn_mask = shown[:, None, None].contiguous()
        elif form == "mask of each row":
            case.attn_mask = shown[:, None, None].repeat(1, 4, L, 1)
            case.attn_mask[:, 0, 0, ::2] = False
        elif form == "numbers":
            case.attn_mask = torch.randn(2, 1, 1, S).to(dtype).masked_fill(~shown[:, None, None], -math.inf)
        expected = call(case, impl)
        check(expected, case)
        case.key.transpose(1, 2)[~shown] = math.nan
        case.value.transpose(1, 2)[~shown] = math.nan
        assert_same(call(case, impl), expected)


def test_isolation_of_keys_that_mask_and_window_hide_together(impl):
    """Each query is kept from a key by its mask or by its window, few queries and many, and grouped heads."""
    for dtype in thin(impl, (torch.float32, torch.bfloat16)):
        for H, L in fewer(impl, ((2, 2), (4, 4), (4, 40)), ((4, 4), (2, 40))):
            window = {"window_size": (2, 0), "causal_alignment": "lower_right"}
            case = make_case(2, H, 2, L, 50, dtype=dtype, mask="bool", **window)
            diagonal = 50 - L
            # The first query reaches this key and does not see it; the others would, but do not reach it.
            case.attn_mask[..., diagonal - 2] = torch.arange(L) > 0
            expected = call(case, impl)
            check(expected, case)
            case.key[:, :, diagonal - 2] = math.nan
            case.value[:, :, diagonal - 2] = math.nan
            assert_same(call(case, impl), expected)


def test_isolation_rows_that_see_nothing(impl):
    """A row without visible keys may hold NaN, in its query and incoming gradients, and matters nowhere."""
    for dtype in thin(impl, (torch.float32, torch.bfloat16, torch.float64)):
        for options in (
            {}, {"alibi": "bh", "softcap": 1.0}, {"sinks": True}, {"Hkv": 1, "dropout_p": 0.3},
            {"L": 67, "S": 16, "D": 32},
        ):  # fmt: skip
            rows = (0, 7, 18, 19)
            case = hide(make_case(**({"L": 20, "S": 35, "dtype": dtype} | options)), rows=rows)
            expected = call(case, impl)
            check(expected, case)
            assert (expected["out"][:, :, list(rows)] == 0).all()
            assert (expected["grad_query"][:, :, list(rows)] == 0).all()
            if not options.get("sinks"):
                assert (expected["lse"][:, :, list(rows)] == -math.inf).all()
                case.grad_lse[:, :, list(rows)] = math.nan
            case.query[:, :, list(rows)] = math.nan
            case.grad_out[:, :, list(rows)] = math.nan
            assert_same(call(case, impl), expected)


def test_isolation_nothing_is_visible(impl):
    for options in ({"mask": "bool"}, {"mask": "float"}, {"mask": "float", "sinks": True, "alibi": "h"}):
        case = make_case(L=5, S=18, dtype=torch.float32, **options)
        case.attn_mask = torch.full_like(case.attn_mask, False if options["mask"] == "bool" else -math.inf)
        for name in ("query", "key", "value", "grad_out"):
            getattr(case, name).fill_(math.nan)
        results = call(case, impl)
        assert (results["out"] == 0).all()
        for name in case.tensors():
            if name != "sinks":
                assert (results[f"grad_{name}"] == 0).all(), name
        if "sinks" in options:
            torch.testing.assert_close(results["lse"], case.sinks.view(1, 2, 1).expand(2, 2, 5))
            torch.testing.assert_close(results["grad_sinks"], case.grad_lse.sum((0, 2)))


def test_empty_rows_from_alignment_and_windows(impl):
    """Causal from the lower right with more queries than keys: the first queries see nothing."""
    case = make_case(L=20, S=6, is_causal=True, causal_alignment="lower_right")
    results = call(case, impl)
    assert (results["out"][:, :, :14] == 0).all() and (results["lse"][:, :, :14] == -math.inf).all()
    assert (results["out"][:, :, 14:] != 0).all()
    case = make_case(L=20, S=6, window_size=(2, 2))
    results = call(case, impl)
    assert (results["out"][:, :, 8:] == 0).all() and (results["out"][:, :, :8] != 0).any(-1).all()


def test_isolation_biases_at_hidden_places(impl):
    """A bias that another mask hides, and the bias of a row that sees nothing, may hold anything."""
    for dtype in thin(impl, (torch.float32, torch.bfloat16, torch.float64)):
        case = hide(make_case(L=18, S=40, dtype=dtype, mask="float"), keys=(0, 11, 39))
        case.options["is_causal"] = True
        case.attn_mask[0, 1, 4] = -math.inf
        expected = call(case, impl)
        check(expected, case)
        for poison in thin(impl, (math.nan, math.inf)):
            case.attn_mask[..., [0, 11, 39]] = poison
            case.attn_mask[:, :, :, 20:] = poison
            assert_same(call(case, impl), expected)


def test_isolation_of_grouped_heads(impl):
    """A key that different masks hide from every query head of its group reaches none of them."""
    case = make_case(2, 4, 2, 9, 40, 8, dtype=torch.float32, mask="bool")
    case.attn_mask[:, :2, :, 5] = False
    case.attn_mask[:, 2:, :, 6] = False
    expected = call(case, impl)
    for name in ("key", "value"):
        getattr(case, name)[:, 0, 5] = math.nan
        getattr(case, name)[:, 1, 6] = math.nan
    assert_same(call(case, impl), expected)


def test_windows_of_any_size(impl):
    q, k = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 11, 8)
    for huge in thin(impl, (2**63 - 1, 1000, 2**31, 2**62)):
        for alignment in ("upper_left", "lower_right"):
            options = {"causal_alignment": alignment, "impl": impl}
            everything = attend(q, k, k, window_size=(huge, huge), **options)
            torch.testing.assert_close(everything, attend(q, k, k, impl=impl))
            causal = attend(q, k, k, window_size=(huge, 0), **options)
            torch.testing.assert_close(causal, attend(q, k, k, is_causal=True, **options))


def test_sink_of_minus_infinity_is_no_sink(impl):
    for dtype in thin(impl, (torch.float32, torch.float64)):
        case = hide(make_case(L=5, S=20, dtype=dtype), rows=(0, 3))
        expected = call(case, impl)
        case.sinks = torch.full((2,), -math.inf, dtype=dtype)
        results = call(case, impl)
        assert (results.pop("grad_sinks") == 0).all()
        assert_same(results, expected, exact=False)


def test_causal_hides_a_nan_key_from_earlier_rows(impl):
    for dtype in thin(impl, (torch.float32, torch.bfloat16)):
        case = make_case(1, 2, L=40, dtype=dtype, is_causal=True)
        expected = call(case, impl)["out"]
        case.key[:, :, 23] = math.nan
        out = call(case, impl)["out"]
        assert torch.equal(out[:, :, :23], expected[:, :, :23])
        assert out[:, :, 23:].isnan().all()


def test_visible_nan_is_never_hidden(impl):
    for dtype in thin(impl, (torch.float32, torch.bfloat16, torch.float64)):
        for name, row in (("query", (0, 1, 4)), ("key", (0, 1)), ("value", (0, 1))):
            case = make_case(1, 2, L=9, S=34, dtype=dtype)
            getattr(case, name)[0, 1, 4] = math.nan
            out = call(case, impl)["out"]
            assert out[row].isnan().all() and not out[0, 0].isnan().any(), name
        case = make_case(1, 1, L=9, S=34, dtype=dtype, mask="float")
        case.attn_mask = torch.zeros(1, 1, 9, 34, dtype=dtype)
        for value in (math.nan, math.inf):
            case.attn_mask[0, 0, 3, 20] = value
            out = call(case, impl)["out"]
            assert out[0, 0, 3].isnan().all() and not out[0, 0, [2, 4]].isnan().any()
        case = make_case(1, 1, L=9, S=34, dtype=dtype)
        case.value[0, 0, 3, 2] = math.inf
        assert (call(case, impl)["out"][0, 0, :, 2] == math.inf).all()


@pytest.mark.parametrize("D, Dv", ((64, 64), (40, 33)))
def test_what_is_not_finite_stays_in_its_column(D, Dv):
    """Few queries of matrix tiles, whose columns come in pairs and overlap."""
    for value in (math.nan, math.inf, -math.inf):
        for column in (0, 5, Dv - 2, Dv - 1):
            case = make_case(1, 4, 1, 2, 200, D, Dv, torch.bfloat16)
            expected = call(case, require("cpu"))["out"]
            expected[..., column] = value
            case.value[0, 0, 17, column] = value
            out = call(case, "cpu")["out"]
            torch.testing.assert_close(out, expected, rtol=0.02, atol=2e-3, equal_nan=True)
    for column in (0, 11, D - 1):
        case = make_case(1, 4, 1, 2, 200, D, Dv, torch.bfloat16)
        case.query[..., column] = 1.0
        case.key[0, 0, 17, column] = -math.inf
        out = call(case, "cpu")
        case.key_padding_mask = torch.arange(200)[None] != 17
        hidden = call(case, "cpu")
        torch.testing.assert_close(out["out"], hidden["out"], rtol=0.02, atol=2e-3)
        torch.testing.assert_close(out["lse"], hidden["lse"], rtol=1e-5, atol=1e-4)


def test_scores_of_minus_infinity_do_not_hide(impl):
    """Only masks empty a row: scores that are all -inf by value give NaN, some -inf are weights of zero."""
    case = make_case(1, 1, L=3, S=20, D=2, dtype=torch.float32)
    case.query[:], case.key[:] = 1.0, -math.inf
    case.query[..., 1], case.key[..., 1] = 0.5, 0.25
    assert call(case, impl)["out"].isnan().all()
    case.key[:, :, 4] = 1.0
    out = call(case, impl)["out"]
    torch.testing.assert_close(out, case.value[:, :, 4:5].expand_as(out))


def test_gradient_of_a_visible_nan_is_nan(impl):
    case = make_case(1, 1, L=9, S=34, dtype=torch.float32)
    case.grad_out[0, 0, 4] = math.nan
    results = call(case, impl)
    assert results["grad_query"][0, 0, 4].isnan().all() and not results["grad_query"][0, 0, 5].isnan().any()
    assert results["grad_key"].isnan().all() and results["grad_value"].isnan().all()


# Dropout


def test_dropout_patterns_are_those_of_the_oracle(impl):
    for p in thin(impl, (0.1, 0.5, 0.97)):
        # Values that name their key: the output is the dropped weight matrix itself.
        case = make_case(2, 3, 1, 17, 45, 4, 45, torch.float64, dropout_p=p, seed=int(p * 100))
        case.value = torch.eye(45, dtype=torch.float64).expand(2, 1, 45, 45)
        kept = torch.from_numpy(attention_oracle.keep_mask(dropout_seed(case), p, 2, 3, 17, 45))
        results = call(case, impl)
        assert torch.equal(results["out"] != 0, kept)
        del case.options["dropout_p"]
        undropped = call(case, impl)
        torch.testing.assert_close(results["out"], torch.where(kept, undropped["out"] / (1 - p), 0.0))
        torch.testing.assert_close(results["lse"], undropped["lse"])


@pytest.mark.parametrize("impl", ("reference", "cpu"))
def test_dropout_statistics(impl):
    """Rates, and correlations of neighbours and of calls, are within five standard errors."""
    p, (B, H, L, S) = 0.3, (2, 3, 64, 256)
    v = torch.eye(S).expand(B, H, S, S)
    q, k = torch.zeros(B, H, L, 8), torch.zeros(B, H, S, 8)
    torch.manual_seed(5)
    kept, again = ((attend(q, k, v, dropout_p=p, impl=impl) != 0).float() for _ in range(2))
    deviation = (kept - (1 - p)) / math.sqrt(p * (1 - p))
    assert abs(deviation.mean()) * math.sqrt(kept.numel()) < 5
    for dim in range(4):
        rate = deviation.mean([d for d in range(4) if d != dim]) * math.sqrt(kept.numel() / kept.shape[dim])
        assert rate.abs().max() < 5
        neighbours = deviation.narrow(dim, 1, kept.shape[dim] - 1) * deviation.narrow(
            dim, 0, kept.shape[dim] - 1
        )
        assert abs(neighbours.mean()) * math.sqrt(neighbours.numel()) < 5
    fresh = deviation * (again - (1 - p)) / math.sqrt(p * (1 - p))
    assert abs(fresh.mean()) * math.sqrt(kept.numel()) < 5


def test_dropout_follows_the_generator_alone(impl):
    case = make_case(2, 2, L=30, S=40, D=16, dtype=torch.float32, dropout_p=0.4)
    first = call(case, impl)["out"]
    transposed = case.query.transpose(1, 2).contiguous().transpose(1, 2)
    torch.manual_seed(case.seed)
    assert torch.equal(attend(transposed, case.key, case.value, dropout_p=0.4, impl=impl), first)
    other = attend(case.query, case.key, case.value, dropout_p=0.4, impl=impl)
    assert not torch.equal(other, first)
    state = torch.get_rng_state()
    attend(case.query, case.key, case.value, impl=impl)
    assert torch.equal(torch.get_rng_state(), state), "a call without dropout draws nothing"


# Arguments and shapes


SHAPES = [
    ((5, 8), (7, 8), (7, 4), (5, 7)),
    ((3, 5, 8), (3, 7, 8), (3, 7, 4), (7,)),
    ((3, 5, 8), (3, 7, 8), (3, 7, 4), (3, 1, 7)),
    ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4), (3, 5, 1)),
    ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4), ()),
    ((4, 2, 3, 5, 8), (4, 2, 3, 7, 8), (4, 2, 3, 7, 4), (4, 1, 1, 5, 7)),
    ((4, 2, 3, 5, 8), (4, 2, 3, 7, 8), (4, 2, 3, 7, 4), (2, 3, 5, 7)),
    ((2, 2, 2, 2, 5, 8), (2, 2, 2, 2, 7, 8), (2, 2, 2, 2, 7, 4), (5, 7)),
    ((2, 3, 5, 8), (1, 3, 7, 8), (2, 1, 7, 4), (5, 7)),
    ((2, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4), (2, 3, 5, 7)),
    ((2, 3, 5, 8), (2, 1, 7, 8), (2, 1, 7, 4), (2, 1, 5, 7)),
    ((2, 3, 5, 8), (7, 8), (3, 7, 4), (5, 7)),
    ((2, 1, 3, 5, 8), (1, 4, 3, 7, 8), (2, 4, 1, 7, 4), (4, 3, 5, 7)),
]  # fmt: skip
# Triton has these strides of its own: a mask of fewer dimensions, heads and batches that are shared.
PAIRS = [(i, *shapes) for i in IMPLEMENTATIONS for shapes in fewer(i, SHAPES, (SHAPES[2], *SHAPES[8:11]))]


@pytest.mark.parametrize("impl, query, key, value, mask", PAIRS, indirect=["impl"])
def test_leading_dimensions_broadcast_as_in_torch(impl, query, key, value, mask):
    generator = torch.Generator().manual_seed(0)
    shapes = (query, key, value, mask)
    leaves = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    results = []
    for function in (lambda *a: attend(*a, impl=impl), F.scaled_dot_product_attention):
        out = function(*leaves)
        generator.manual_seed(1)
        gradient = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        results.append((out, *torch.autograd.grad(out, leaves, gradient)))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)
    out, lse = attend(*leaves, impl=impl, return_lse=True)
    assert lse.shape == out.shape[:-1] and lse.dtype == torch.float64


def test_grouped_heads_as_in_torch(impl):
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 2, 7, 8)
    for key, value in ((k, k), (k, v), (v, k), (k[:, :1], v)):
        repeated = (t.repeat_interleave(6 // t.shape[1], 1) for t in (key, value))
        expected = F.scaled_dot_product_attention(q, *repeated)
        torch.testing.assert_close(attend(q, key, value, enable_gqa=True, impl=impl), expected)
    three = attend(q[0], k[0], k[0], enable_gqa=True, impl=impl)
    torch.testing.assert_close(three, attend(q, k, k, enable_gqa=True, impl=impl)[0])
    for key, value in ((k, k), (k, v)):
        with pytest.raises(RuntimeError, match="enable_gqa"):
            attend(q, key, value, impl=impl)
    with pytest.raises(RuntimeError, match="divide"):
        attend(q, torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 8), enable_gqa=True, impl=impl)


def test_padding_mask_shapes(impl):
    q, k, v = torch.randn(4, 5, 8), torch.randn(4, 7, 8), torch.randn(4, 7, 6)
    padding = torch.rand(4, 7) < 0.6
    per_batch = attend(q, k, v, key_padding_mask=padding, impl=impl, return_lse=True)
    as_batch = attend(
        *(t.unsqueeze(1) for t in (q, k, v)), key_padding_mask=padding, impl=impl, return_lse=True
    )
    assert_same(
        {"out": per_batch[0], "lse": per_batch[1]},
        {"out": as_batch[0].squeeze(1), "lse": as_batch[1].squeeze(1)},
    )
    shared = attend(q, k, v, key_padding_mask=padding[0], impl=impl)
    assert torch.equal(shared, attend(q, k, v, key_padding_mask=padding[:1], impl=impl))
    torch.testing.assert_close(shared, attend(q, k, v, padding[0].expand(5, 7), impl=impl))
    assert attend(q[0], k[0], v[0], key_padding_mask=padding[0], impl=impl).shape == (5, 6)
    five = [t.expand(3, 2, *t.shape) for t in (q, k, v)]
    padding = torch.rand(3, 2, 7) < 0.6
    torch.testing.assert_close(
        attend(*five, key_padding_mask=padding, impl=impl),
        attend(*five, padding[:, :, None, None], impl=impl),
    )


@pytest.mark.parametrize(
    "impl, options, keys",
    [
        (impl, options, keys)
        for impl in attention_cases.IMPLEMENTATIONS
        for options in ({}, {"is_causal": True}, {"softcap": 2.0}, {"scale": -0.4})
        for keys in (1, 31, 33, 64, 130, 257)
        if impl != "triton" or (keys == 33 and not options)
    ],
    ids=str,
    indirect=["impl"],
)
def test_boolean_masks_hide_what_infinities_hide(impl, options, keys):
    """Whatever the number of keys and the shape, strides and bytes of the masks."""
    torch.manual_seed(keys)
    rows = 3 if impl == "triton" else 35
    query, key, value = (torch.randn(2, 2, n, 8, requires_grad=True) for n in (rows, keys, keys))
    bytes_ = torch.randint(0, 256, (keys, 2, 2 * rows), dtype=torch.uint8)
    bytes_[torch.rand(bytes_.shape) < 0.5] = 0  # about half of the keys
    masks = {
        "of each row": bytes_.view(torch.bool)[..., ::2].permute(1, 2, 0)[:, None],
        "of each head": bytes_.view(torch.bool)[:, :, :1].permute(1, 2, 0)[None],
        "of the batch": bytes_[:, 0, :rows].t().contiguous().view(torch.bool),
    }
    padding = torch.rand(2, keys) < 0.8
    for name, mask in masks.items():
        shown = mask.clone().view(torch.uint8) != 0
        hidden = shown.logical_not() | padding.logical_not()[:, None, None]
        for given in ({}, {"key_padding_mask": padding}):
            infinite = torch.zeros(hidden.shape if given else shown.shape)
            infinite.masked_fill_(hidden if given else ~shown, -math.inf)
            out = attend(query, key, value, attn_mask=mask, impl=impl, **given, **options)
            expected = attend(query, key, value, attn_mask=infinite, impl=impl, **options)
            what = f"mask {name}, {[*given]}: "
            torch.testing.assert_close(out, expected, msg=what.__add__)
            grads = (torch.autograd.grad(o.square().sum(), (query, key, value)) for o in (out, expected))
            for ours, theirs in zip(*grads, strict=True):
                torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("scale", [1e-50, 1e-40, 0.0, -1e-50])
def test_a_scale_that_vanishes_in_the_dtype_hides_as_any_other(impl, scale):
    query, key, value = torch.randn(3, 1, 1, 20, 8).unbind()
    mask = torch.rand(20, 20) < 0.5
    mask.fill_diagonal_(True)
    for options in ({"attn_mask": mask}, {"is_causal": True}):
        shown = (mask if "attn_mask" in options else torch.ones(20, 20).tril()).float()
        out = attend(query, key, value, scale=scale, impl=impl, **options)
        torch.testing.assert_close(out, shown / shown.sum(-1, keepdim=True) @ value)


def test_alibi_and_sinks_in_other_shapes(impl):
    q, k = torch.randn(3, 5, 8), torch.randn(3, 7, 8)
    slopes, sinks = torch.rand(3), torch.randn(3)
    out = attend(q, k, k, alibi_slopes=slopes, sinks=sinks, impl=impl)
    batched = attend(q[None], k[None], k[None], alibi_slopes=slopes[None], sinks=sinks, impl=impl)
    assert torch.equal(out, batched[0])
    doubles = [t.double() for t in (q, k, k)]
    assert attend(*doubles, alibi_slopes=slopes, sinks=sinks, impl=impl).dtype == torch.float64


@pytest.mark.parametrize("shape", ((1, 5, 7), (3, 5, 7), (2, 1, 5, 7), (2, 3, 5, 7), (4, 1, 1, 5, 7)))
def test_mask_with_more_dimensions_than_the_query(impl, shape):
    q, k, v, mask = torch.randn(5, 8), torch.randn(7, 8), torch.randn(7, 6), torch.randn(shape)
    expected = (q @ k.mT * 8**-0.5 + mask).softmax(-1) @ v
    torch.testing.assert_close(attend(q, k, v, mask, impl=impl), expected)


@NATIVE
def test_causal_masks_of_torch(impl):
    """torch.nn.attention.bias holds no numbers: its size and its kind are what counts."""
    for L, S in ((5, 5), (5, 7), (7, 5)):
        q, k = torch.randn(2, 2, L, 8), torch.randn(2, 2, S, 8)
        slopes = torch.rand(2)
        for diagonal, bias in ((0, causal_upper_left(L, S)), (S - L, causal_lower_right(L, S))):
            mask = torch.ones(L, S, dtype=torch.bool).tril(diagonal)
            for options in ({}, {"is_causal": True}, {"alibi_slopes": slopes}, {"window_size": (2, 3)}):
                for alignment in ("upper_left", "lower_right"):
                    options = options | {"causal_alignment": alignment, "impl": impl}
                    torch.testing.assert_close(
                        attend(q, k, k, bias, **options), attend(q, k, k, mask, **options)
                    )
        with pytest.raises(RuntimeError, match="attn_mask is a causal bias of"):
            attend(q, k, k, causal_upper_left(L, S + 1), impl=impl)


def test_causal_masks_of_a_subclass(impl):
    class Own(CausalBias):
        pass

    q = torch.randn(2, 2, 5, 8)
    expected = attend(q, q, q, is_causal=True, impl=impl)
    torch.testing.assert_close(attend(q, q, q, Own(CausalVariant.UPPER_LEFT, 5, 5), impl=impl), expected)


def test_numbers_of_other_types(impl):
    """Tensors and NumPy scalars of one number are taken as that number."""
    q = torch.randn(1, 2, 9, 8)
    options = {"is_causal": True, "impl": impl}
    expected = attend(q, q, q, scale=0.5, softcap=2.0, window_size=(3, 0), **options)
    for number, integer in ((torch.tensor, torch.tensor), (np.float32, np.int64)):
        out = attend(
            q, q, q, scale=number(0.5), softcap=number(2.0), window_size=(integer(3), integer(0)), **options
        )
        assert torch.equal(out, expected)


Q, K = torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 7, 8)


def padded(mask):
    return attend(Q, K, K, key_padding_mask=mask)


def sloped(slopes):
    return attend(Q, K, K, alibi_slopes=slopes)


REFUSED = {
    "query is a list": (TypeError, "query", lambda: attend([1.0], K, K)),
    "integer query": (RuntimeError, "query.*int64", lambda: attend(Q.long(), K.long(), K.long())),
    "complex query": (RuntimeError, "query.*complex", lambda: attend(*[Q.to(torch.complex64)] * 3)),
    "mixed dtypes": (RuntimeError, "key.*float64", lambda: attend(Q, K.double(), K)),
    "1-D query": (RuntimeError, "query", lambda: attend(Q[0, 0, 0], K, K)),
    "head dims": (RuntimeError, r"head dim.*\(2, 4, 7, 6\)", lambda: attend(Q, K[..., :6], K)),
    "lengths": (RuntimeError, r"length.*\(2, 4, 3, 8\)", lambda: attend(Q, K, K[:, :, :3])),
    "batches": (RuntimeError, r"batch.*\(3, 4, 7, 8\)", lambda: attend(Q, *[torch.zeros(3, 4, 7, 8)] * 2)),
    "heads": (RuntimeError, r"enable_gqa.*\(2, 2, 7, 8\)", lambda: attend(Q, K[:, :2], K[:, :2])),
    "mask shape": (RuntimeError, r"attn_mask.*\(5, 6\)", lambda: attend(Q, K, K, torch.zeros(5, 6))),
    "mask heads": (RuntimeError, r"attn_mask \(3, 5, 7\)", lambda: attend(Q, K, K, torch.zeros(3, 5, 7))),
    "integer mask": (RuntimeError, "attn_mask.*int64", lambda: attend(Q, K, K, torch.ones(5, 7).long())),
    "uint8 mask": (RuntimeError, "attn_mask.*uint8", lambda: attend(Q, K, K, torch.ones(5, 7).byte())),
    "half mask": (RuntimeError, "attn_mask.*float16", lambda: attend(Q, K, K, torch.ones(5, 7).half())),
    "mask is a list": (TypeError, "attn_mask", lambda: attend(Q, K, K, [[True]])),
    "float padding": (RuntimeError, "key_padding.*float32", lambda: padded(torch.ones(2, 7))),
    "padding shape": (
        RuntimeError, r"key_padding_mask \(2, 5\)", lambda: padded(torch.ones(2, 5).bool()),
    ),
    "slopes shape": (RuntimeError, r"alibi_slopes \(3,\)", lambda: sloped(torch.ones(3))),
    "slopes dtype": (RuntimeError, "alibi.*float16", lambda: sloped(torch.ones(4).half())),
    "sinks shape": (RuntimeError, r"sinks \(2, 4\)", lambda: attend(Q, K, K, sinks=torch.ones(2, 4))),
    "sinks dtype": (RuntimeError, "sinks.*int64", lambda: attend(Q, K, K, sinks=torch.ones(4).long())),
    "dropout": (ValueError, "dropout_p.*1.5", lambda: attend(Q, K, K, dropout_p=1.5)),
    "negative dropout": (ValueError, "dropout_p.*-0.1", lambda: attend(Q, K, K, dropout_p=-0.1)),
    "NaN dropout": (ValueError, "dropout_p.*nan", lambda: attend(Q, K, K, dropout_p=math.nan)),
    "window": (ValueError, "window_size.*-2", lambda: attend(Q, K, K, window_size=(-2, 0))),
    "window of one number": (ValueError, "window_size.*3", lambda: attend(Q, K, K, window_size=3)),
    "softcap": (ValueError, "softcap.*-1", lambda: attend(Q, K, K, softcap=-1.0)),
    "infinite softcap": (ValueError, "softcap.*inf", lambda: attend(Q, K, K, softcap=math.inf)),
    "text as scale": (TypeError, "scale.*'x'", lambda: attend(Q, K, K, scale="x")),
    "scale beyond float": (ValueError, "scale", lambda: attend(Q, K, K, scale=10**400)),
    "scales": (TypeError, "scale.*tensor", lambda: attend(Q, K, K, scale=torch.ones(2))),
    "no dropout": (TypeError, "dropout_p.*None", lambda: attend(Q, K, K, dropout_p=None)),
    "softcaps": (TypeError, "softcap.*tensor", lambda: attend(Q, K, K, softcap=torch.ones(4))),
    "text as causal": (TypeError, "is_causal.*'no'", lambda: attend(Q, K, K, is_causal="no")),
    "mask as causal": (TypeError, "is_causal.*tensor", lambda: attend(Q, K, K, is_causal=torch.ones(5, 7))),
    "text as gqa": (TypeError, "enable_gqa.*'no'", lambda: attend(Q, K, K, enable_gqa="no")),
    "text as lse": (TypeError, "return_lse.*'no'", lambda: attend(Q, K, K, return_lse="no")),
    "window of reals": (ValueError, "window_size.*1.5", lambda: attend(Q, K, K, window_size=(1.5, 0))),
    "alignment": (ValueError, "causal_alignment.*middle", lambda: attend(Q, K, K, causal_alignment="middle")),
    "impl": (ValueError, "impl.*fast", lambda: attend(Q, K, K, impl="fast")),
    "triton, wide heads": (
        NotImplementedError, "triton.*512.*513", lambda: attend(*[torch.ones(2, 513)] * 3, impl="triton"),
    ),
    "torch, scaled": (NotImplementedError, "softcap", lambda: attend(Q, K, K, softcap=1.0, impl="torch")),
    "sparse": (NotImplementedError, "query.*dense", lambda: attend(Q[0, 0].to_sparse(), K, K)),
    "mkldnn": (NotImplementedError, "key.*dense", lambda: attend(K, K.to_mkldnn(), K)),
    "sparse, 4-D": (NotImplementedError, "value.*dense", lambda: attend(K, K, K.to_sparse())),
    "nested": (NotImplementedError, "query.*dense", lambda: attend(torch.nested.nested_tensor([*K]), K, K)),
    "device": (RuntimeError, "key is on meta", lambda: attend(Q, K.to("meta"), K)),
}  # fmt: skip


@pytest.mark.parametrize("mistake", REFUSED)
def test_refused(mistake):
    error, message, run = REFUSED[mistake]
    attend(Q, K, K)  # from now on there is a short way
    with pytest.raises(error, match=message):
        run()


def test_torch_implementation_keeps_a_visible_nan():
    q, k, v = (torch.randn(2, 3, 9, 8) for _ in range(3))
    torch.testing.assert_close(attend(q, k, v, impl="torch"), F.scaled_dot_product_attention(q, k, v))
    grouped = attend(q, k[:, :1], v[:, :1], enable_gqa=True, impl="torch")
    torch.testing.assert_close(grouped, attend(q, k[:, :1], v[:, :1], enable_gqa=True, impl="reference"))
    q[0, 0, 4] = math.nan
    assert attend(q, k, v, impl="torch")[0, 0, 4].isnan().all()


def test_plain_calls_equal_torch():
    """The short way of plain calls takes every form of them, and leaves alone what it does not understand."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        tolerance = {"rtol": 0.02, "atol": 0.02} if dtype.itemsize == 2 else {}
        q, k, v = (torch.randn(2, 3, n, 8).to(dtype) for n in (5, 7, 7))
        for options in ({}, {"is_causal": True}, {"scale": 0.3}, {"scale": 1}):
            mine, theirs = attend(q, k, v, **options), F.scaled_dot_product_attention(q, k, v, **options)
            torch.testing.assert_close(mine, theirs, **tolerance)
            out, lse = attend(q, k, v, return_lse=True, **options)
            assert torch.equal(out, mine) and lse.shape == (2, 3, 5)
    assert attend(q[:, :, :, :0], k[:, :, :, :0], v).shape == (2, 3, 5, 8)


# The choice


def test_explain():
    require("cpu")
    q = torch.randn(1, 2, 8, 4)
    found = fastattn.explain(attend, q, q, q, is_causal=True)
    assert found.impl == "cpu" and set(found.reasons) == {"triton", "cuda", "torch", "reference"}
    assert "is_causal" in found.reasons["torch"] and "preferred" in found.reasons["reference"]
    assert str(found).startswith("scaled_dot_product_attention runs on: cpu\n")
    asked = fastattn.explain(attend, q, q, q, impl="reference")
    assert asked.impl == "reference" and "asked for" in asked.reasons["cpu"]
    elsewhere = [t.to("meta") for t in (q, q, q)]
    assert "meta" in fastattn.explain(attend, *elsewhere).reasons["cpu"]
    with pytest.raises(NotImplementedError, match="no cuda kernel"):
        fastattn.explain(attend, q, q, q, impl="cuda")
    with pytest.raises(RuntimeError, match="head dim"):
        fastattn.explain(attend, q, q[..., :3], q)
    with pytest.raises(TypeError, match="operator"):
        fastattn.explain(F.softmax, q)


def test_triton_on_the_cpu_is_its_interpreter(run_python):
    """For whoever calls the ops: autograd, transforms and the bare ones; nothing of it stays behind."""
    q = torch.randn(3, 1, 1, 5, 8)
    expected = [attend(x, x, x, impl="reference") for x in q]
    with pytest.raises(NotImplementedError, match="triton.*interpreter"):
        attend(q[0], q[0], q[0], impl="triton")
    with operator_checks.running("triton"):
        mapped = torch.func.vmap(lambda x: attend(x, x, x, impl="triton"))(q)
        torch.testing.assert_close(mapped, torch.stack(expected))
        found = fastattn.explain(attend, q[0], q[0], q[0])
        assert found.impl == "reference" and "interpreter" in found.reasons["cpu"]
        with pytest.raises(NotImplementedError, match="cpu.*interpreter"):
            attend(q[0], q[0], q[0], impl="cpu")
    require("cpu")
    torch.testing.assert_close(attend(q[0], q[0], q[0], impl="cpu"), expected[0])
    code = "from fastattn import _triton; print(_triton.cannot_interpret())"
    assert "TRITON_INTERPRET" in run_python("-c", code, TRITON_INTERPRET="0").stdout


def test_inputs_are_never_written_to(impl):
    case = make_case(2, 4, 2, 19, 21, 8, mask="float", padding=True, alibi="h", sinks=True, dropout_p=0.1)
    names = (*INPUTS, "key_padding_mask", "grad_out", "grad_lse")
    before = {n: getattr(case, n).clone() for n in names}
    call(case, impl)
    for name in names:
        assert torch.equal(getattr(case, name), before[name]), name
