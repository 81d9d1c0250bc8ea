"""Attention of packed sequences under autograd, torch.func, compilers, fake tensors and autocast."""

import attention_cases
import operator_checks
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from operator_checks import NATIVE, check_compiled, require
from torch._subclasses import FakeTensorMode
from varlen_attention_cases import attend, bounds_of, lengths_for, make_case

impl, poisoned = attention_cases.impl, operator_checks.poisoned


@NATIVE
def test_second_order(impl):
    bounds = bounds_of((3, 0, 2)), bounds_of((2, 1, 4))
    q, k, v, slopes, sinks = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((5, 2, 3), (7, 1, 3), (7, 1, 2), (3, 2), (2,))
    )

    def function(q, k, v, slopes, sinks):
        return attend(
            q, k, v, *bounds, alibi_slopes=slopes, sinks=sinks, softcap=2.0, return_lse=True, impl=impl
        )

    assert torch.autograd.gradcheck(function, (q, k, v, slopes, sinks))
    assert torch.autograd.gradgradcheck(function, (q, k, v, slopes, sinks))


VMAPPED = {
    "query": (0, None, None, None, None), "everything": (1, 0, 2, 1, 0), "sinks": (None, None, None, None, 0),
    "slopes": (None, None, None, 0, None),
}  # fmt: skip


@NATIVE
@pytest.mark.parametrize("dropout_p", (0.0, 0.4))
@pytest.mark.parametrize("name", VMAPPED)
@pytest.mark.parametrize("each", (False, True))
def test_vmap(impl, name, each, dropout_p):
    bounds = bounds_of((3, 0, 2)), bounds_of((2, 1, 4))
    shapes = ((5, 4, 3), (7, 2, 3), (7, 2, 2), (3, 4) if each else (4,), (4,))
    in_dims = VMAPPED[name]
    inputs = [torch.randn(s if d is None else (*s[:d], 3, *s[d:]), dtype=torch.float64)
              for s, d in zip(shapes, in_dims, strict=True)]  # fmt: skip

    def function(q, k, v, slopes, sinks):
        torch.manual_seed(3)
        return attend(
            q,
            k,
            v,
            *bounds,
            alibi_slopes=slopes,
            sinks=sinks,
            dropout_p=dropout_p,
            return_lse=True,
            impl=impl,
        )

    def gradients(*args):
        return torch.func.grad(lambda *a: sum(t.sin().sum() for t in function(*a)), tuple(range(5)))(*args)

    for f in (function, gradients):
        mapped = torch.vmap(f, in_dims, randomness="same")(*inputs)
        for n in range(3):
            single = [t if d is None else t.select(d, n) for t, d in zip(inputs, in_dims, strict=True)]
            torch.testing.assert_close(tuple(t[n] for t in mapped), tuple(f(*single)))


def test_vmap_over_bounds():
    require("cpu")
    q = torch.randn(6, 2, 4)
    bounds = torch.tensor([[0, 2, 6], [0, 5, 6]])
    mapped = torch.vmap(lambda b: attend(q, q, q, b, b))(bounds)
    torch.testing.assert_close(mapped, torch.stack([attend(q, q, q, b, b) for b in bounds]))


def test_forward_mode_is_refused_not_zero():
    require("cpu")
    q, bounds = torch.randn(4, 1, 3), bounds_of((4,))
    with forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError)):
        attend(forward_ad.make_dual(q, q), q, q, bounds, bounds)


def packed_inputs(L):
    total = 3 * L + 2
    return [*(torch.randn(total, 2, 8) for _ in range(3)), bounds_of((L, 2, 2 * L)), torch.rand(2)]


@pytest.mark.parametrize("options", ({}, {"dropout_p": 0.3}), ids=str)
def test_compile_once_for_all_lengths(options):
    require("cpu")

    def function(q, k, v, bounds, slopes):
        return attend(
            q, k, v, bounds, bounds, alibi_slopes=slopes, is_causal=True, return_lse=True, **options
        )

    check_compiled(function, packed_inputs, sizes=(5, 8, 1, 33))


def test_compile_with_changing_numbers_of_sequences_and_longest():
    require("cpu")
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for lengths in ((3, 4), (5, 1, 7), (2, 2, 2, 9), (30, 20), (4,) * 7):
        q, bounds = torch.randn(sum(lengths), 2, 8, requires_grad=True), bounds_of(lengths)
        longest = max(lengths)
        results = []
        for run in (compiled, attend):
            out = run(q, q, q, bounds, bounds, longest, longest)
            results.append((out, *torch.autograd.grad(out.sin().sum(), q)))
        torch.testing.assert_close(*results)
    assert counter.frame_count <= 3
    with pytest.raises(RuntimeError, match="max_seqlen_k is 3"):
        compiled(q, q, q, bounds, bounds, 4, 3)


class Packed(torch.nn.Module):
    def forward(self, query, key, value, bounds):
        return attend(query, key, value, bounds, bounds, is_causal=True)


def test_export():
    require("cpu")
    total, count = torch.export.Dim("total", min=2, max=1000), torch.export.Dim("count", min=2, max=100)
    inputs = tuple(packed_inputs(4)[:4])
    exported = torch.export.export(Packed(), inputs, dynamic_shapes=({0: total},) * 3 + ({0: count},))
    assert "fastattn.attention_forward.default" in [str(node.target) for node in exported.graph.nodes]
    longer = packed_inputs(9)[:4]
    torch.testing.assert_close(exported.module()(*longer), Packed()(*longer))


def test_meta_and_fake_tensors():
    q = torch.empty(5, 4, 8, device="meta", requires_grad=True)
    k, v = torch.empty(7, 2, 8, device="meta"), torch.empty(7, 2, 6, device="meta")
    bounds = torch.empty(3, dtype=torch.int32, device="meta")
    out, lse = attend(q, k, v, bounds, bounds, return_lse=True)
    assert out.shape == (5, 4, 6) and lse.shape == (4, 5) and out.is_contiguous()
    out.sum().backward()
    assert q.grad.shape == q.shape
    with FakeTensorMode():
        assert attend(*(torch.empty(5, 2, 3),) * 3, *(torch.empty(3).int(),) * 2).shape == (5, 2, 3)


@pytest.mark.parametrize("gradients", (False, True))
def test_opcheck(gradients):
    require("cpu")
    ops = torch.ops.fastattn
    case = make_case((3, 0, 5), (4, 2, 6), alibi="nh", sinks=True, H=4, Hkv=2)
    q, k, v = (t.transpose(0, 1)[None] for t in (case.query, case.key, case.value))
    options, seed = (0.5, 1.0, 2, 3, True, 0.3), torch.tensor([3])
    packed = (*case.bounds(), 5, None)
    out, lse = ops.attention_forward(
        q, k, v, None, None, case.alibi_slopes, case.sinks, seed, *options, *packed
    )
    grad_out, grad_lse = case.grad_out.transpose(0, 1)[None], case.grad_lse[None]
    for tensor in (q, k, v, case.alibi_slopes, case.sinks, grad_out, grad_lse):
        tensor.requires_grad_(gradients)
    biases = (None, None, case.alibi_slopes, case.sinks)
    torch.library.opcheck(ops.attention_forward.default, (q, k, v, *biases, seed, *options, *packed))
    given = (
        grad_out,
        grad_lse,
        q,
        k,
        v,
        out.detach(),
        lse.detach(),
        *biases,
        seed,
        *options,
        False,
        True,
        True,
    )
    # The second derivative is that of the reference, which reads the bounds and so cannot be traced.
    untraced = {"test_utils": ("test_schema", "test_autograd_registration", "test_faketensor")}
    torch.library.opcheck(
        ops.attention_backward.default, (*given, *packed), **(untraced if gradients else {})
    )


def test_autocast(impl):
    case = make_case(*lengths_for(impl), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(case.query, case.key, case.value, *case.bounds(), impl=impl)
    lower = (t.bfloat16() for t in (case.query, case.key, case.value))
    assert torch.equal(out, attend(*lower, *case.bounds(), impl=impl))
