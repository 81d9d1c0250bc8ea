"""Jagged nested tensors in scaled_dot_product_attention and MultiheadAttention, sequence by sequence."""

import math

import pytest
import torch
from operator_checks import require

import fastattn


def jagged(tensors):
    return torch.nested.nested_tensor(tensors, layout=torch.jagged)


@pytest.mark.parametrize("options", (
    {}, {"is_causal": True}, {"enable_gqa": True, "return_lse": True, "softcap": 2.0},
), ids=str)  # fmt: skip
def test_jagged_tensors(options):
    require("cpu")
    queries, keys = (5, 1, 9), (4, 7, 3)
    heads = 1 if options.get("enable_gqa") else 2
    q = [torch.randn(n, 2, 8, dtype=torch.float64) for n in queries]
    k, v = ([torch.randn(n, heads, 8, dtype=torch.float64) for n in keys] for _ in range(2))
    leaves = [jagged(t).requires_grad_() for t in (q, k, v)]
    results = fastattn.scaled_dot_product_attention(*(t.transpose(1, 2) for t in leaves), **options)
    results = results if isinstance(results, tuple) else (results,)
    sum(r.values().sin().sum() for r in results).backward()
    for n in range(3):
        dense = [t[n].clone().requires_grad_() for t in (q, k, v)]
        expected = fastattn.scaled_dot_product_attention(*(t.transpose(0, 1) for t in dense), **options)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for result, one in zip(results, expected, strict=True):
            torch.testing.assert_close(result.unbind()[n], one)
        sum(r.sin().sum() for r in expected).backward()
        for leaf, one in zip(leaves, dense, strict=True):
            torch.testing.assert_close(leaf.grad.unbind()[n], one.grad)


STARTS, LENGTHS = (1, 0, 5), (4, 9, 0)


def with_gaps(padded):
    """Of each row of (3, 9, ...) the tokens that STARTS and LENGTHS choose, as a view."""
    return torch.nested.narrow(padded, 1, torch.tensor(STARTS), torch.tensor(LENGTHS), layout=torch.jagged)


def chosen(padded):
    return [padded[n, start : start + L] for n, (start, L) in enumerate(zip(STARTS, LENGTHS, strict=True))]


@pytest.mark.parametrize("impl", ("cpu", "reference"))
def test_gaps_between_sequences(impl):
    """The result has the gaps too, and nothing of what is in them."""
    require(impl)
    sinks = torch.randn(2, dtype=torch.float64)

    def attend(x):
        return fastattn.scaled_dot_product_attention(
            x, x, x, is_causal=True, return_lse=True, sinks=sinks, impl=impl
        )

    padded = torch.full((3, 9, 2, 4), math.nan, dtype=torch.float64)
    for own in chosen(padded):
        own.normal_()
    padded.requires_grad_()
    x = with_gaps(padded).transpose(1, 2)
    out, lse = attend(x)
    assert out.shape == x.shape and lse.shape == x.shape[:3] and out.values().isfinite().all()
    assert (out + x).shape == x.shape
    (grad,) = torch.autograd.grad(out.values().sin().sum() + lse.values().sin().sum(), padded)
    loss = 0.0
    for n, own in enumerate(chosen(padded)):
        one = attend(own.transpose(0, 1))
        torch.testing.assert_close((out.unbind()[n], lse.unbind()[n]), one)
        loss = loss + one[0].sin().sum() + one[1].sin().sum()
    torch.testing.assert_close(grad, torch.autograd.grad(loss, padded)[0])


def test_results_go_together_with_the_queries():
    x = jagged([torch.randn(n, 2, 8) for n in (3, 0, 5)]).transpose(1, 2)
    for requires_grad in (False, True):
        x = x.detach().requires_grad_(requires_grad)
        assert (fastattn.scaled_dot_product_attention(x, x, x) + x).shape == x.shape


def test_explain():
    require("cpu")
    x = jagged([torch.randn(n, 2, 8) for n in (3, 5)]).transpose(1, 2)
    found = fastattn.explain(fastattn.scaled_dot_product_attention, x, x, x, is_causal=True)
    assert found.impl == "cpu" and "cu_seqlens_q" in found.reasons["torch"]
    with pytest.raises(NotImplementedError, match="attn_mask"):
        fastattn.explain(fastattn.scaled_dot_product_attention, x, x, x, torch.ones(5, 5))


def test_jagged_tensors_are_refused_by_name():
    x = jagged([torch.randn(n, 2, 8) for n in (3, 5)])
    other = jagged([torch.randn(n, 2, 8) for n in (5, 3)]).transpose(1, 2)
    heads = jagged([torch.randn(n, 4, 8) for n in (3, 5)]).transpose(1, 2)
    sdpa = fastattn.scaled_dot_product_attention
    y = x.transpose(1, 2)
    alone = jagged([torch.randn(3, 2, 8)]).transpose(1, 2)
    for error, message, run in (
        (NotImplementedError, "query must be a nested tensor", lambda: sdpa(x, y, y)),
        (NotImplementedError, "key must be a nested tensor", lambda: sdpa(y, torch.randn(2, 2, 5, 8), y)),
        (NotImplementedError, "attn_mask", lambda: sdpa(y, y, y, torch.ones(5, 5).bool())),
        (RuntimeError, "same lengths", lambda: sdpa(y, y, other)),
        (RuntimeError, "value has 1 sequences, query 2", lambda: sdpa(y, y, alone)),
        (RuntimeError, "enable_gqa", lambda: sdpa(heads, y, y)),
    ):
        with pytest.raises(error, match=message):
            run()


@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize("cross", (False, True))
def test_module_with_jagged_tensors(is_causal, cross):
    require("cpu")
    torch.manual_seed(1)
    module = fastattn.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    sequences = [torch.randn(n, 8, dtype=torch.float64) for n in (5, 1, 9)]
    memory = [torch.randn(n, 8, dtype=torch.float64) for n in (3, 4, 2)] if cross else sequences
    x = jagged(sequences).requires_grad_()
    y = jagged(memory).requires_grad_() if cross else x
    out, weights = module(x, y, y, need_weights=False, is_causal=is_causal)
    assert weights is None and out.is_nested
    out.values().sin().sum().backward()
    found = {n: p.grad.clone() for n, p in module.named_parameters()}
    module.zero_grad()
    for n, (own, other) in enumerate(zip(sequences, memory, strict=True)):
        own = own.clone().requires_grad_()
        other = other.clone().requires_grad_() if cross else own
        future = torch.ones(len(own), len(other), dtype=torch.bool).triu(1) if is_causal else None
        expected, _ = module(own, other, other, need_weights=False, attn_mask=future)
        torch.testing.assert_close(out.unbind()[n], expected)
        expected.sin().sum().backward()
        torch.testing.assert_close(x.grad.unbind()[n], own.grad)
    torch.testing.assert_close(found, {n: p.grad for n, p in module.named_parameters()})


def test_module_with_gaps_between_sequences():
    require("cpu")
    module = fastattn.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    padded = torch.randn(3, 9, 8, dtype=torch.float64, requires_grad=True)
    x = with_gaps(padded)
    out, _ = module(x, x, x, need_weights=False)
    (grad,) = torch.autograd.grad((out.unbind()[0] + x.unbind()[0]).sin().sum(), padded)
    for n, own in enumerate(chosen(padded)):
        torch.testing.assert_close(out.unbind()[n], module(own, own, own, need_weights=False)[0])
    own = chosen(padded)[0]
    loss = (module(own, own, own, need_weights=False)[0] + own).sin().sum()
    torch.testing.assert_close(grad, torch.autograd.grad(loss, padded)[0])


def test_module_refuses_other_jagged_tensors():
    x = jagged([torch.randn(n, 8) for n in (3, 5)])
    y, alone = jagged([torch.randn(n, 6) for n in (3, 5)]), jagged([torch.randn(3, 8)])
    module = fastattn.nn.MultiheadAttention(8, 2, batch_first=True)
    for run in (
        lambda: module(x, x, x), lambda: fastattn.nn.MultiheadAttention(8, 2)(x, x, x, need_weights=False),
        lambda: module(x, torch.randn(2, 5, 8), x, need_weights=False),
        lambda: module(x, y, x, need_weights=False), lambda: module(x, x, alone, need_weights=False),
        lambda: module(x, x, x, need_weights=False, key_padding_mask=torch.ones(2, 5).bool()),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match="nested"):
            run()
