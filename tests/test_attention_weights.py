"""The weights of attention beside its output: `attention_with_weights`."""

import math

import attention_cases
import operator_checks
import pytest
import torch
from attention_cases import call, choices, exact, make_case, thin
from operator_checks import fewer, require

from fastattn.ops.attention import attention_with_weights

impl, poisoned = attention_cases.impl, operator_checks.poisoned


@choices((torch.float64, torch.float32, torch.bfloat16), (torch.bfloat16,))
@pytest.mark.parametrize("options", (
    {}, {"is_causal": True}, {"mask": "float", "mask_shape": "ls", "padding": True, "scale": 0.7},
    {"mask": "bool", "dropout_p": 0.3}, {"dropout_p": 1.0}, {
        "H": 4, "Hkv": 2, "window_size": (9, 2), "causal_alignment": "lower_right", "softcap": 1.5,
        "sinks": True,
    },
), ids=str)  # fmt: skip
def test_weights(impl, options, dtype):
    B = fewer(impl, 2, 1)
    case = make_case(**({"B": B, "H": 3, "L": 18, "S": 37, "D": 8, "dtype": dtype} | options))
    arguments = {name: getattr(case, name) for name in ("attn_mask", "key_padding_mask", "sinks")}
    arguments |= case.options | {"enable_gqa": "Hkv" in options}
    expected, _ = exact(case)
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps ** 0.9, "atol": 4 * torch.finfo(dtype).eps}
    for average in (True, False):
        torch.manual_seed(case.seed)
        out, weights = attention_with_weights(
            case.query, case.key, case.value, **arguments, average_weights=average, impl=impl
        )
        assert torch.equal(out, call(case, impl, only=())["out"])
        want = torch.from_numpy(expected["weights"].mean(1) if average else expected["weights"])
        assert weights.dtype == dtype
        torch.testing.assert_close(weights.double(), want, **tolerance)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("options", (
    {"is_causal": True, "mask": "bool", "padding": True}, {"sinks": True, "window_size": (150, 20)},
    {"mask": "float", "softcap": 20.0, "dropout_p": 0.2},
), ids=str)  # fmt: skip
def test_weights_of_many_rows(options, dtype):
    """Several tiles of rows and blocks of keys, later ones with larger scores; few enough keys that one pass
    over them finds output and weights, and more."""
    impl = require("cpu")
    for S in (300, 4200) if "dropout_p" not in options else (200,):  # the pattern takes the oracle its time
        case = make_case(4, 4, 2, L=70, S=S, D=16, Dv=24, dtype=dtype, **options)
        case.key *= torch.linspace(0.5, 8, S, dtype=dtype).unsqueeze(-1)
        expected, _ = exact(case)
        arguments = {n: getattr(case, n) for n in ("attn_mask", "key_padding_mask", "sinks")} | case.options
        tolerance = {"rtol": 64 * torch.finfo(dtype).eps ** 0.9, "atol": 4 * torch.finfo(dtype).eps}
        for average in (True, False):
            torch.manual_seed(case.seed)
            out, weights = attention_with_weights(
                case.query, case.key, case.value, enable_gqa=True, average_weights=average, impl=impl,
                **arguments,
            )  # fmt: skip
            assert torch.equal(out, call(case, impl, only=())["out"])
            want = torch.from_numpy(expected["weights"].mean(1) if average else expected["weights"])
            torch.testing.assert_close(weights.double(), want, **tolerance)


def test_weights_beside_scores_too_large_for_their_sum(impl):
    """A log-sum-exp that cannot hold the logarithm of how many keys share a weight, and sinks beside it; with
    and without a gradient, few rows and many."""
    least = torch.finfo(torch.float32).min
    for B, L in fewer(impl, ((1, 3), (8, 3), (8, 40)), ((1, 3),)):
        for requires_grad in (False, True):
            query = torch.full((B, 2, L, 8), 100.0, requires_grad=requires_grad)
            key, value = torch.ones(1, 2, 5, 8).expand(B, 2, 5, 8), torch.randn(B, 2, 5, 8)
            hidden = torch.full((L, 5), least)
            _, weights = attention_with_weights(query, key, value, hidden, impl=impl)
            torch.testing.assert_close(weights, torch.full((B, L, 5), 0.2))
            score = 100 * 8**0.5
            sinks = torch.tensor([score + math.log(5), -1000.0])
            for mask in (None, torch.zeros(L, 5)):
                _, weights = attention_with_weights(
                    query, key, value, mask, sinks=sinks, average_weights=False, impl=impl
                )
                expected = torch.tensor([0.1, 0.2]).view(2, 1, 1).expand(B, 2, L, 5)
                torch.testing.assert_close(weights, expected, rtol=2e-4, atol=0)


def test_weights_beside_a_bias_of_all_keys(impl):
    """A log-sum-exp that holds that logarithm, but to fewer digits than a weight has."""
    query, value = torch.zeros(1, 1, 2, 4), torch.randn(1, 1, 5, 4, requires_grad=True)
    bias = torch.full((2, 5), -30000.0)
    out, weights = attention_with_weights(query, query.new_ones(1, 1, 5, 4), value, bias, impl=impl)
    torch.testing.assert_close(weights, torch.full((1, 2, 5), 0.2))
    (grad,) = torch.autograd.grad(out.sum(), value)
    torch.testing.assert_close(grad, torch.full_like(value, 0.4))


def test_weights_of_rows_that_see_nothing_of_a_block():
    """Which other rows of their tile see, and whose scores elsewhere are far below zero."""
    mask, expected = torch.zeros(40, 300), torch.full((40, 300), 1 / 300)
    mask[0], mask[0, :256] = -1000, -math.inf
    expected[0], expected[0, :256] = 1 / 44, 0
    query, key = torch.zeros(8, 1, 40, 8), torch.randn(8, 1, 300, 8)
    _, weights = attention_with_weights(query, key, key, mask, impl=require("cpu"))
    torch.testing.assert_close(weights, expected.expand(8, 40, 300))


def test_weights_have_gradients(impl):
    for average in (True,) if impl == "triton" else (True, False):  # a case takes the interpreter 9 s
        choices = ({"mask": "float", "padding": True, "dropout_p": 0.3}, {"is_causal": True})
        for options in thin(impl, choices):
            case = make_case(1, 2, L=4, S=5, D=3, **options)
            inputs = {n: t.nan_to_num(neginf=-1.0).requires_grad_() for n, t in case.tensors().items()}

            def weigh(*tensors, case=case, names=tuple(inputs), average=average):
                torch.manual_seed(0)
                return attention_with_weights(
                    **dict(zip(names, tensors, strict=True)), key_padding_mask=case.key_padding_mask,
                    average_weights=average, impl=impl, **case.options,
                )  # fmt: skip

            assert torch.autograd.gradcheck(weigh, tuple(inputs.values()), fast_mode=True)
            if impl != "triton":  # those come from the reference
                assert torch.autograd.gradgradcheck(weigh, tuple(inputs.values()), fast_mode=True)


def test_weights_hold_no_square_per_head(impl):
    """Averaged weights of many heads: nothing as large as all heads' weights is allocated (kernel only)."""
    if impl == "cpu":
        q, k = torch.randn(1, 64, 128, 8, requires_grad=True), torch.randn(1, 64, 128, 8)
        sizes = []

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, op, types, args=(), kwargs=None):
                result = op(*args, **(kwargs or {}))
                sizes.extend(
                    t.numel() for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)
                )
                return result

        with Watch():
            out, _ = attention_with_weights(q, k, k, dropout_p=0.1)
            out.sum().backward()
        assert max(sizes) < 64 * 128 * 128


@pytest.mark.parametrize("shape", ((9, 8), (4, 9, 8), (3, 2, 4, 9, 8)))
def test_weights_in_the_leading_dimensions_of_the_caller(impl, shape):
    x = torch.randn(shape)
    batch = shape[:-3]
    for average, expected in ((True, (*batch, 9, 9)), (False, (*shape[:-2], 9, 9))):
        out, weights = attention_with_weights(x, x, x, average_weights=average, impl=impl)
        assert out.shape == shape and weights.shape == expected
        torch.testing.assert_close(weights.sum(-1), torch.ones(expected[:-1]))


def test_weights_of_nothing(impl):
    """No heads, batch, queries or keys; a mean over no heads is NaN, as torch's is."""
    for shape, keys in (((8, 0, 3, 8), 3), ((0, 2, 3, 8), 3), ((2, 2, 0, 8), 3), ((8, 2, 3, 8), 0)):
        query, key = torch.randn(shape), torch.randn(*shape[:2], keys, 8)
        for requires_grad in (False, True):
            query.requires_grad_(requires_grad)
            for average in (True, False):
                out, weights = attention_with_weights(query, key, key, average_weights=average, impl=impl)
                assert out.shape == shape and not out.any()
                assert weights.shape == (*shape[: 1 if average else 2], shape[2], keys)
                assert weights.isnan().all() if average else weights.numel() == 0


def test_output_beside_weights_of_short_queries_of_grouped_heads():
    """Rows of several heads in one tile, some of which have scores far beyond those of the first keys."""
    require("cpu")
    case = make_case(2, 6, 2, 16, 64, 129, 80, torch.float32, seed=707371)
    inputs = (case.query, case.key, case.value, None, None, None, None, None)
    args = (*inputs, -0.7, 0.0, -1, -1, False, 0.0)
    beside = torch.ops.fastattn.attention_forward_with_weights(*args, False)
    alone = torch.ops.fastattn.attention_forward(*args)
    assert torch.equal(beside[0], alone[0]) and torch.equal(beside[1], alone[1])
