"""Attention of packed sequences, held against the dense operator sequence by sequence."""

import functools
import math
from dataclasses import replace
from pathlib import Path

import attention_cases
import attention_oracle as oracle
import numpy as np
import operator_checks
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_checks import NATIVE, fewer, require, running
from varlen_attention_cases import (
    KEYS,
    OPTIONS,
    QUERIES,
    attend,
    bounds_of,
    call,
    check,
    lengths_for,
    make_case,
)

import fastattn

impl, poisoned = attention_cases.impl, operator_checks.poisoned


@attention_cases.choices((torch.float64, torch.float32, torch.bfloat16, torch.float16), (torch.float32,))
@pytest.mark.parametrize("name", OPTIONS)
def test_options(impl, name, dtype):
    case = make_case(*lengths_for(impl), dtype=dtype, **OPTIONS[name])
    check(call(case, impl), case)


@pytest.mark.parametrize("queries, keys", (
    ((), ()), ((0,), (0,)), ((0, 0), (3, 0)), ((3, 2), (0, 0)), ((0, 4, 0), (0, 4, 0)), ((1,), (1,)),
    ((200,), (3000,)), ((1, 0, 1, 1), (2000, 1500, 1, 900)), ((1, 1, 1), (70, 1, 31)),
), ids=str)  # fmt: skip
@pytest.mark.parametrize(
    "extra", ({}, {"sinks": True, "alibi": "nh", "is_causal": True}), ids=("plain", "more")
)
def test_lengths(impl, queries, keys, extra):
    if sum(keys) > 500 and impl == "triton":
        queries, keys = (32, 33), (33, 64)
    case = make_case(queries, keys, dtype=torch.float32, **extra)
    results = call(case, impl)
    if queries:
        check(results, case)
    else:
        assert results["out"].shape == (0, 2, 8) and results["lse"].shape == (2, 0)
        assert all(not t.any() for t in results.values())


def test_rows_of_sequences_without_keys(impl):
    case = make_case((3, 2), (0, 4), sinks=True, dtype=torch.float32)
    results = call(case, impl)
    assert not results["out"][:3].any() and not results["grad_query"][:3].any()
    torch.testing.assert_close(results["lse"][:, :3], case.sinks[:, None].expand(2, 3))
    case.sinks = None
    assert torch.equal(call(case, impl)["lse"][:, :3], torch.full((2, 3), -math.inf))


@pytest.mark.parametrize("name", ("query", "key", "value", "grad_out", "alibi_slopes"))
@pytest.mark.parametrize("bad", (math.nan, math.inf))
def test_isolation_of_other_sequences(impl, name, bad):
    lengths = fewer(impl, (QUERIES, KEYS), ((3, 2, 5, 1), (5, 4, 33, 2)))
    case = make_case(*lengths, alibi="nh", dtype=torch.float32, window_size=(50, 50))
    clean = call(case, impl)
    victim = 2
    spoilt = replace(case, **{name: getattr(case, name).clone()})
    rows = [slice(*bounds_of(lengths)[victim : victim + 2].tolist()) for lengths in (case.queries, case.keys)]
    at = {"key": rows[1], "value": rows[1], "alibi_slopes": victim}.get(name, rows[0])
    getattr(spoilt, name)[at] = bad
    results = call(spoilt, impl)
    assert not all(
        r.isfinite().all() for n, r in results.items() if n != "lse"
    )  # the change does reach its own
    others = {"out": rows[0], "grad_query": rows[0], "grad_key": rows[1], "grad_value": rows[1]}
    others["grad_alibi_slopes"] = victim
    for what, own in others.items():
        apart = torch.ones(len(clean[what]), dtype=torch.bool)
        apart[own] = False
        assert torch.equal(results[what][apart], clean[what][apart]), what
    apart = torch.ones(clean["lse"].shape[1], dtype=torch.bool)
    apart[rows[0]] = False
    assert torch.equal(results["lse"][:, apart], clean["lse"][:, apart])


def test_bounds_of_any_integer_dtype_and_stride(impl):
    case = make_case(*lengths_for(impl), dtype=torch.float32, is_causal=True)
    expected = call(case, impl)
    operator_checks.assert_same(call(case, impl, torch.int64), expected)
    spread = [torch.stack((b, b + 7), 1)[:, 0] for b in case.bounds()]
    out = attend(case.query, case.key, case.value, *spread, is_causal=True, impl=impl)
    assert torch.equal(out, expected["out"])


@pytest.mark.parametrize("longest", (40, 2**70, np.int64(40), torch.tensor(40)), ids=repr)
def test_the_longest_sequence_of_any_integer_type(impl, longest):
    case = make_case(dtype=torch.float32)
    arguments = (case.query, case.key, case.value, *case.bounds())
    assert torch.equal(attend(*arguments, longest, impl=impl), attend(*arguments, impl=impl))


def test_slices_of_one_projection(impl):
    """query, key and value as slices of (total, 3, H, D), and tensors in other layouts."""
    lengths = fewer(impl, (7, 0, 33, 20), (7, 0, 4))
    bounds = bounds_of(lengths)
    packed = torch.randn(sum(lengths), 3, 4, 16)
    apart = [t.contiguous().requires_grad_() for t in packed.unbind(1)]
    expected = attend(*apart, bounds, bounds, is_causal=True, impl=impl)
    grad = torch.randn_like(expected)
    gradients = torch.stack(torch.autograd.grad(expected, apart, grad), 1)
    packed.requires_grad_()
    out = attend(*packed.unbind(1), bounds, bounds, is_causal=True, impl=impl)
    operator_checks.assert_same({"out": out}, {"out": expected}, exact=impl == "cpu")
    assert out.is_contiguous() or impl == "reference"
    out.backward(grad.transpose(0, 2).contiguous().transpose(0, 2))
    operator_checks.assert_same({"gradients": packed.grad}, {"gradients": gradients}, exact=impl == "cpu")


@pytest.mark.parametrize("layout", operator_checks.LAYOUTS)
def test_strides(impl, layout):
    case = make_case(
        *fewer(impl, (QUERIES, KEYS), ((2, 0, 3), (4, 1, 5))), dtype=torch.float32, alibi="nh", sinks=True
    )
    names = ("query", "key", "value", "grad_out", "grad_lse", "alibi_slopes", "sinks")
    exact, halves = impl == "cpu", impl == "triton"
    operator_checks.check_layout(case, names, layout, lambda c: call(c, impl), exact, halves)


@pytest.mark.parametrize("dropout_p", (0.0, 0.3))
def test_repeatable_and_independent_of_threads(impl, dropout_p):
    lengths = fewer(impl, ((1, 200, 7, 90), (1500, 200, 9, 1100)), ((1, 40, 7), (70, 20, 9)))
    case = make_case(*lengths, dtype=torch.float32, dropout_p=dropout_p, alibi="nh")
    before = torch.get_num_threads()
    forward = None
    try:
        for threads in fewer(impl, (1, 2, 4), (1,)):
            torch.set_num_threads(threads)
            first, second = call(case, impl), call(case, impl)
            operator_checks.assert_same(second, first)
            if forward is not None and impl == "cpu":
                assert torch.equal(first["out"], forward["out"]) and torch.equal(first["lse"], forward["lse"])
            forward = first
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("p", (0.3, 1.0))
def test_dropout_patterns_are_those_of_the_oracle(impl, p):
    """Rows are numbered through the packed tensor as in lse, keys within their sequence."""
    queries, keys, H = (3, 0, 5), (4, 2, 40), 2
    case = make_case(queries, keys, H=H, D=4, Dv=40, scale=0.0, dropout_p=p)
    case.value = torch.cat([torch.eye(40, dtype=torch.float64)[:n] for n in keys])[:, None].expand(-1, H, -1)
    out = call(case, impl)["out"]
    torch.manual_seed(0)
    seed = int(torch.randint(0, 2**63 - 1, (1,)))
    kept = torch.from_numpy(oracle.keep_mask(seed, p, 1, H, sum(queries), max(keys)))[0]
    for n, first in enumerate(bounds_of(queries).tolist()[:-1]):
        rows = slice(first, first + queries[n])
        expected = kept[:, rows, : keys[n]].transpose(0, 1) / (keys[n] * (1 - p) if p < 1 else 1)
        torch.testing.assert_close(out[rows, :, : keys[n]], expected.double())


def test_dropout_of_both_implementations_and_its_gradients():
    require("cpu")
    case = make_case(dropout_p=0.3, is_causal=True, sinks=True)
    operator_checks.assert_same(call(case, "cpu"), call(case, "reference"), exact=False)


@st.composite
def cases(draw):
    H = draw(st.sampled_from((1, 2, 4)))
    N = draw(st.integers(1, 6))
    lengths = st.lists(
        st.one_of(st.integers(0, 40), st.sampled_from((0, 1, 128, 600))), min_size=N, max_size=N
    )
    options = {
        "is_causal": draw(st.booleans()),
        "causal_alignment": draw(st.sampled_from(("upper_left", "lower_right"))),
        "window_size": (draw(st.sampled_from((-1, 0, 3, 20))), draw(st.sampled_from((-1, 0, 2, 20)))),
        "softcap": draw(st.sampled_from((0.0, 1.3))),
        "scale": draw(st.sampled_from((None, 0.0, 0.7, -0.4))),
    }
    return make_case(
        draw(lengths), draw(lengths), H, draw(st.sampled_from([n for n in (1, 2, 4) if H % n == 0])),
        draw(st.integers(1, 20)), draw(st.integers(1, 20)),
        draw(st.sampled_from((torch.float64, torch.float32))),
        alibi=draw(st.sampled_from((None, "h", "nh"))), sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)), **options,
    )  # fmt: skip


@settings(
    max_examples=30, derandomize=True, deadline=None, database=None,
    suppress_health_check=(HealthCheck.function_scoped_fixture, HealthCheck.too_slow),
)  # fmt: skip
@NATIVE
@given(case=cases())
def test_random_combinations(impl, case):
    check(call(case, impl), case)


WRONG = {
    "bounds of queries": ({}, lambda c: setattr(c, "queries", (4, 0, 39, *c.queries[3:]))),
    "bounds of keys": ({}, lambda c: setattr(c, "keys", (6, 3, *c.keys[2:]))),
    "sequences joined": (
        {},
        lambda c: (setattr(c, "queries", (43, *c.queries[3:])), setattr(c, "keys", (42, *c.keys[3:]))),
    ),
    "corner": ({"is_causal": True}, lambda c: c.options.update(causal_alignment="upper_left")),
    "slopes of another sequence": (
        {"alibi": "nh"}, lambda c: setattr(c, "alibi_slopes", c.alibi_slopes.roll(1, 0)),
    ),
    "gradient of lse forgotten": ({}, lambda c: setattr(c, "grad_lse", c.grad_lse * 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_checker_catches(name):
    options, spoil = WRONG[name]
    right, wrong = (make_case(dtype=torch.float32, **options) for _ in range(2))
    spoil(wrong)
    with pytest.raises(AssertionError):
        check(call(wrong, "reference"), right)


Q, B2 = torch.randn(6, 2, 4), torch.tensor([0, 2, 6])


def refused(error, message, *given, **options):
    arguments = dict(
        zip(("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k"), (Q, Q, Q, B2, B2), strict=True)
    )
    return error, message, arguments | options


REFUSED = {
    "not from 0": refused(RuntimeError, "cu_seqlens_q must start at 0", cu_seqlens_q=torch.tensor([1, 2, 6])),
    "decreasing": refused(RuntimeError, "cu_seqlens_k must (.*never|not) decrease.*got (2 after 4|.0, 4, 2)",
                          cu_seqlens_k=torch.tensor([0, 4, 2]).int()),
    "too far": refused(RuntimeError, "cu_seqlens_q must.*7", cu_seqlens_q=torch.tensor([0, 2, 7])),
    "not far enough": refused(RuntimeError, "cu_seqlens_k must.*5", cu_seqlens_k=torch.tensor([0, 2, 5])),
    "far and back": refused(RuntimeError, "cu_seqlens_k must", cu_seqlens_k=torch.tensor([0, 2**40, 6])),
    "negative": refused(RuntimeError, "cu_seqlens_q must", cu_seqlens_q=torch.tensor([0, -2, 6])),
    "longest": refused(RuntimeError, "max_seqlen_q is 3", max_seqlen_q=3),
    "longest key": refused(RuntimeError, "max_seqlen_k is 0", max_seqlen_k=0),
    "longest as a float": refused(TypeError, "max_seqlen_q must be an integer, got 4.0", max_seqlen_q=4.0),
    "longest as a flag": refused(TypeError, "max_seqlen_k must be an integer, got True", max_seqlen_k=True),
    "negative longest": refused(ValueError, "max_seqlen_k must be .* at least 0, got -1", max_seqlen_k=-1),
    "bounds as a list": refused(TypeError, "cu_seqlens_q must be a Tensor, got list", cu_seqlens_q=[0, 2, 6]),
    "bounds as floats": refused(RuntimeError, "cu_seqlens_q must be torch.int32.*float",
                                cu_seqlens_q=B2.float()),
    "bounds in two dimensions": refused(RuntimeError, r"cu_seqlens_k.*\(1, 3\)", cu_seqlens_k=B2[None]),
    "no bounds": refused(RuntimeError, r"cu_seqlens_k.*\(0,\)", cu_seqlens_k=B2[:0]),
    "other numbers of sequences": refused(RuntimeError, "as many elements, got 3 and 4",
                                          cu_seqlens_k=torch.tensor([0, 2, 4, 6])),
    "four dimensions": refused(RuntimeError, r"query must be \(total, heads, head dim\)", query=Q[None]),
    "head dims": refused(RuntimeError, "same head dim", key=Q[..., :2]),
    "tokens": refused(RuntimeError, "same tokens and heads", value=Q[:5]),
    "heads": refused(RuntimeError, "heads must divide", query=torch.randn(6, 3, 4)),
    "slopes": refused(RuntimeError, r"alibi_slopes must be \(2,\) or \(2, 2\)", alibi_slopes=torch.rand(3)),
    "sinks": refused(RuntimeError, r"sinks must be \(2,\)", sinks=torch.rand(2, 2)),
    "dtypes": refused(RuntimeError, "key is torch.float64", key=Q.double()),
    "devices": refused(RuntimeError, "cu_seqlens_k is on meta", cu_seqlens_k=B2.to("meta")),
    "alignment": refused(ValueError, "causal_alignment", causal_alignment="left"),
    "window": refused(ValueError, "window_size", window_size=(1, -2)),
    "dropout": refused(ValueError, "dropout_p", dropout_p=1.5),
    "of torch": refused(NotImplementedError, "cu_seqlens_q", impl="torch"),
}  # fmt: skip


@NATIVE
@pytest.mark.parametrize("mistake", REFUSED)
def test_refused(impl, mistake):
    error, message, arguments = REFUSED[mistake]
    with pytest.raises(error, match=message):
        attend(**({"impl": impl} | arguments))


def test_operator_refuses_what_would_read_outside():
    """The ops trust nobody with memory, not even bounds."""
    require("cpu")
    q = torch.randn(1, 2, 6, 4)
    options = (*[None] * 5, 1.0, 0.0, -1, -1, False, 0.0)
    forward = torch.ops.fastattn.attention_forward
    out, lse = forward(q, q, q, *options, B2, B2)

    def backward(*packed):
        return torch.ops.fastattn.attention_backward(
            out, None, q, q, q, out, lse, *options, *[False] * 3, *packed
        )

    backward(B2, B2)
    for run in (functools.partial(forward, q, q, q, *options), backward):
        for packed in (
            (B2, None), (None, B2), (B2, B2[:2]), (B2 + 1, B2), (B2, B2 * 2), (B2, torch.tensor([0, 9, 6])),
            (B2, torch.tensor([0, -9, 6])), (B2, B2[:0]), (B2.float(), B2), (B2, B2[None]),
            (B2, B2, 3), (B2, B2, 4, 3),
            (torch.tensor([0, 2**62, 6]), B2),
        ):  # fmt: skip
            with pytest.raises(RuntimeError):
                run(*packed)
    two = q.expand(2, -1, -1, -1)
    mask = torch.zeros(1, 1, 6, 6)
    for wrong in (
        (two, two, two, *options),
        (q, q, q, mask, *options[1:]),
        (q, q, q, None, mask[0, 0, :1] == 0, *options[2:]),
    ):
        with pytest.raises(RuntimeError):
            forward(*wrong, B2, B2)


def test_tokens_of_no_sequence_see_nothing():
    """On a GPU nobody reads the bounds first: tokens in front of the first sequence and behind the last."""
    first, last, total = 3, 70, 90
    query, key, value, grad_out = (torch.randn(1, 2, total, 4) for _ in range(4))
    alibi, sinks = torch.rand(2, 2), torch.randn(2)
    bounds = torch.tensor([first, 40, last], dtype=torch.int32)

    def run(query, key, value, grad_out, bounds):
        options = (None, None, alibi, sinks, None, 1.0, 0.0, -1, 0, False, 0.0)
        out, lse = torch.ops.fastattn.attention_forward(query, key, value, *options, bounds, bounds)
        grads = torch.ops.fastattn.attention_backward(
            grad_out, None, query, key, value, out, lse, *options, False, True, True, bounds, bounds
        )
        return [out, lse.unsqueeze(3), *grads[:3]], grads[4:]

    with running("triton"):
        rows, sums = run(query, key, value, grad_out, bounds)
        inside = [t[:, :, first:last] for t in (query, key, value, grad_out)]
        expected, expected_sums = run(*inside, bounds - first)
    for found, wanted in zip(rows, expected, strict=True):
        assert torch.allclose(found[:, :, first:last], wanted, atol=1e-5)
    for found, wanted in zip(sums, expected_sums, strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)
    rows[1] -= sinks[:, None, None]  # the lse of what sees nothing else
    for found in rows:
        for left_out in (found[:, :, :first], found[:, :, last:]):
            assert torch.allclose(left_out, torch.zeros(()), atol=1e-6)


def test_explain():
    require("cpu")
    found = fastattn.explain(attend, Q, Q, Q, B2, B2, is_causal=True)
    assert found.impl == "cpu" and "cu_seqlens_q" in found.reasons["torch"]


def test_other_instruction_sets(other_isa, run_python):
    """The compact tests of this file once more under each of the other instruction sets."""
    require("cpu")
    run_python(
        "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", "test_options and cpu and not float64",
        Path(__file__), FASTATTN_CPU_ISA=other_isa,
    )  # fmt: skip
