"""Feature maps that are functions, and the arguments of linear attention."""

import math

import linear_attention_cases
import numpy as np
import operator_checks
import pytest
import torch
from linear_attention_cases import call, make_case, require
from operator_checks import NATIVE, assert_same, fewer, running

import fastattn
from fastattn import LinearAttentionState

impl, poisoned = linear_attention_cases.impl, operator_checks.poisoned

attend, step = fastattn.linear_attention, fastattn.linear_attention_step
CAUSAL = {"is_causal": True}


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


# Feature maps that are functions


def test_callable_feature_maps_equal_named_ones(impl):
    for name in fewer(impl, tuple(linear_attention_cases.FEATURES), ("exp",)):
        for options in (CAUSAL, {"padding": "random"}, {"lengths": [4, 9], **CAUSAL}):
            case = make_case(L=13, feature_map=name, **options)
            expected = call(case, impl)
            case.options["feature_map"] = linear_attention_cases.FEATURES[name]
            assert_same(call(case, impl), expected, exact=False)


class Projected(torch.nn.Module):
    """Learned features, more of them than the head has channels."""

    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(4, 7, dtype=torch.float64)
        self.seen = []

    def forward(self, x):
        self.seen.append((x.shape, x.dtype))
        return torch.nn.functional.softplus(self.projection(x))


def test_module_as_feature_map(impl):
    phi = Projected()
    q, k, v = normal(2, 4, 6, 4), normal(2, 2, 6, 4), normal(2, 2, 6, 3).requires_grad_()
    out, state = attend(q, k, v, feature_map=phi, is_causal=True, return_state=True, impl=impl)
    assert phi.seen == [((2, 4, 6, 4), torch.float64), ((2, 2, 6, 4), torch.float64)]
    assert state.kv.shape == (2, 4, 7, 3)
    fq, fk = phi(q), phi(k)
    torch.testing.assert_close(out, attend(fq, fk, v, feature_map="identity", is_causal=True, impl=impl))
    out.sum().backward()
    assert phi.projection.weight.grad.abs().sum() > 0 and v.grad is not None
    past = LinearAttentionState.zeros(2, 4, 7, 3, dtype=torch.float64)
    for t in range(6):
        last, past = step(q[:, :, t], k[:, :, t], v[:, :, t], past, feature_map=phi, impl=impl)
    torch.testing.assert_close(last, out[:, :, -1])


def test_feature_map_sees_zeros_for_padding(impl):
    q, k, v = normal(1, 1, 5, 4), normal(1, 1, 6, 4), normal(1, 1, 6, 4)
    padding = torch.tensor([[True, True, False, True, False, True]])
    k[:, :, [2, 4]] = math.nan
    k.requires_grad_()
    seen = []

    def phi(x):
        seen.append(x)
        return x.exp()

    attend(q, k, v, feature_map=phi, key_padding_mask=padding, impl=impl).sum().backward()
    assert (seen[1][:, :, [2, 4]] == 0).all() and torch.equal(seen[1][:, :, 0], k[:, :, 0])
    assert k.grad.isfinite().all() and (k.grad[:, :, [2, 4]] == 0).all()


def test_features_of_a_wider_dtype_are_rounded(impl):
    q = normal(1, 1, 5, 4).bfloat16()
    out = attend(q, q, q, feature_map=lambda x: x.float().exp(), impl=impl)
    assert out.dtype == torch.bfloat16


# Arguments


def test_decay_dtypes_and_shapes(impl):
    q = normal(2, 3, 9, 4)
    dtypes = (
        (torch.float64, (torch.float64, torch.float32)), (torch.float32, (torch.float32,)),
        (torch.bfloat16, (torch.float32, torch.bfloat16)), (torch.float16, (torch.float32, torch.float16)),
    )  # fmt: skip
    for dtype, decay_dtypes in fewer(impl, dtypes, dtypes[2:3]):
        x = q.to(dtype)
        for decay_dtype in decay_dtypes:
            decay = -torch.rand(3).to(decay_dtype)
            decay.requires_grad_()
            out = attend(x, x, x, decay=decay, is_causal=True, impl=impl)
            every = decay.detach().view(1, 3, 1).expand(2, 3, 9)
            torch.testing.assert_close(attend(x, x, x, decay=every, is_causal=True, impl=impl), out)
            out.sum().backward()
            assert decay.grad.dtype == decay_dtype and decay.grad.shape == (3,)
            state = LinearAttentionState.zeros(2, 3, 4, 4, dtype=dtype)
            one = step(x[:, :, 0], x[:, :, 0], x[:, :, 0], state, decay=decay.detach(), impl=impl)
            two = step(
                x[:, :, 0], x[:, :, 0], x[:, :, 0], state, decay=decay.detach().expand(2, 3), impl=impl
            )
            assert torch.equal(one[0], two[0])


def test_numbers_of_other_types(impl):
    q = normal(1, 2, 9, 4)
    expected = attend(q, q, q, eps=0.25, scale=2.0, normalize=False, impl=impl)
    for number in (torch.tensor, np.float64):
        other = attend(q, q, q, eps=number(0.25), scale=number(2.0), normalize=False, impl=impl)
        assert torch.equal(other, expected)
    assert torch.equal(attend(q, q, q, eps=1, impl=impl), attend(q, q, q, eps=1.0, impl=impl))


def test_cu_seqlens_dtypes_and_strides(impl):
    q = normal(9, 2, 4)
    expected = attend(q, q, q, cu_seqlens=torch.tensor([0, 4, 9]), impl=impl)
    bounds = torch.tensor([[0, 0], [4, 4], [9, 9]])[:, 0]
    assert expected.shape == (9, 2, 4)
    for cu_seqlens in (bounds, bounds.int(), torch.tensor([0, 4, 9], dtype=torch.int32)):
        assert torch.equal(attend(q, q, q, cu_seqlens=cu_seqlens, impl=impl), expected)
    nothing = attend(q[:0], q[:0], q[:0], cu_seqlens=torch.tensor([0]), return_state=True, impl=impl)
    assert nothing[0].shape == (0, 2, 4) and nothing[1].kv.shape == (0, 2, 4, 4)


@NATIVE
@pytest.mark.parametrize("bounds", ([0, 4], [1, 9], [0, 5, 4, 9], [0, 10, 9], [0, -1, 9], [0, 2**40, 9], [9]))
def test_cu_seqlens_that_are_no_bounds(impl, bounds):
    q = normal(9, 2, 4)
    with pytest.raises(RuntimeError, match="cu_seqlens"):
        attend(q, q, q, cu_seqlens=torch.tensor(bounds), impl=impl)


Q, K, V = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 6)
PACKED = torch.zeros(9, 4, 8)
STATE = LinearAttentionState.zeros(2, 4, 8, 6)
ONE = (Q[:, :, 0], K[:, :, 0], V[:, :, 0])


def decayed(decay, **options):
    return attend(Q, K, V, decay=decay, **({"is_causal": True} | options))


def padded(mask, **options):
    return attend(Q, K, V, key_padding_mask=mask, **options)


def packed(cu_seqlens, **options):
    return attend(PACKED, PACKED, PACKED, cu_seqlens=cu_seqlens, **options)


def started(kv, z):
    return attend(Q, K, V, initial_state=LinearAttentionState(kv, z))


BOUNDS = torch.tensor([0, 4, 9])
REFUSED = {
    "query is a list": (TypeError, "query", lambda: attend([1.0], K, V)),
    "no key": (TypeError, "key.*NoneType", lambda: attend(Q, None, V)),
    "integer query": (RuntimeError, "query.*int64", lambda: attend(Q.long(), K.long(), V.long())),
    "complex query": (RuntimeError, "query.*complex", lambda: attend(*[Q.to(torch.complex64)] * 3)),
    "mixed dtypes": (RuntimeError, "key.*bfloat16", lambda: attend(Q, K.bfloat16(), V)),
    "3-D query": (RuntimeError, r"query.*\(4, 5, 8\)", lambda: attend(Q[0], K[0], V[0])),
    "batches": (RuntimeError, r"batch.*\(1, 2, 5, 8\)", lambda: attend(Q, K[:1], V)),
    "head dims": (RuntimeError, r"head dim.*\(2, 2, 5, 6\)", lambda: attend(Q, V, V)),
    "lengths": (RuntimeError, r"length.*\(2, 2, 3, 6\)", lambda: attend(Q, K, V[:, :, :3])),
    "heads that do not divide": (RuntimeError, "heads", lambda: attend(Q, Q[:, :3], Q[:, :3])),
    "heads of key and value": (RuntimeError, "heads", lambda: attend(Q, K, Q)),
    "no key heads": (RuntimeError, "heads", lambda: attend(Q, K[:, :0], V[:, :0])),
    "causal lengths": (
        RuntimeError, "is_causal needs", lambda: attend(Q[:, :, :4], K, V, is_causal=True),
    ),
    "sparse": (NotImplementedError, "key.*dense", lambda: attend(Q, K.to_sparse(), V)),
    "nested": (NotImplementedError, "query.*dense", lambda: attend(torch.nested.nested_tensor([*Q]), K, V)),
    "device": (RuntimeError, "key is on meta", lambda: attend(Q, K.to("meta"), V)),
    "feature map": (
        ValueError, "feature_map.*'elu'.*'silu'", lambda: attend(Q, K, V, feature_map="silu"),
    ),
    "no feature map": (TypeError, "feature_map.*None", lambda: attend(Q, K, V, feature_map=None)),
    "features of another length": (
        RuntimeError, "feature_map.*(2, 4, 3, 8)", lambda: attend(Q, K, V, feature_map=lambda x: x[:, :, :3]),
    ),
    "features that are none": (
        RuntimeError, "feature_map.*NoneType", lambda: attend(Q, K, V, feature_map=lambda x: None),
    ),
    "different features": (
        RuntimeError, "feature_map.*[8, 3]",
        lambda: attend(Q, K, V, feature_map=lambda x: x if x.shape[1] == 4 else x[..., :3]),
    ),
    "decay without order": (ValueError, "decay.*is_causal", lambda: decayed(torch.zeros(4), is_causal=False)),
    "decay shape": (RuntimeError, r"decay.*\(2, 4\)", lambda: decayed(torch.zeros(2, 4))),
    "decay heads": (RuntimeError, r"decay.*\(2,\)", lambda: decayed(torch.zeros(2))),
    "decay dtype": (RuntimeError, "decay.*float16", lambda: decayed(torch.zeros(4).half())),
    "integer decay": (RuntimeError, "decay.*int64", lambda: decayed(torch.zeros(4).long())),
    "decay is a number": (TypeError, "decay.*float", lambda: decayed(-0.1)),
    "float padding": (RuntimeError, "key_padding_mask.*float32", lambda: padded(torch.ones(2, 5))),
    "padding shape": (RuntimeError, r"key_padding_mask \(2, 6\)", lambda: padded(torch.ones(2, 6).bool())),
    "1-D padding": (RuntimeError, r"key_padding_mask \(5,\)", lambda: padded(torch.ones(5).bool())),
    "packed 4-D": (RuntimeError, "query.*cu_seqlens", lambda: attend(Q, K, V, cu_seqlens=BOUNDS)),
    "packed and padded": (
        ValueError, "key_padding_mask.*cu_seqlens",
        lambda: packed(BOUNDS, key_padding_mask=torch.ones(1, 9).bool()),
    ),
    "packed lengths": (
        RuntimeError, "cu_seqlens needs", lambda: attend(PACKED[:8], PACKED, PACKED, cu_seqlens=BOUNDS),
    ),
    "float bounds": (RuntimeError, "cu_seqlens.*float32", lambda: packed(BOUNDS.float())),
    "2-D bounds": (RuntimeError, r"cu_seqlens.*\(1, 3\)", lambda: packed(BOUNDS[None])),
    "no bounds": (RuntimeError, r"cu_seqlens.*\(0,\)", lambda: packed(BOUNDS[:0])),
    "bounds are a list": (TypeError, "cu_seqlens.*list", lambda: packed([0, 4, 9])),
    "packed decay": (
        RuntimeError, r"decay.*\(4, 9\)", lambda: packed(BOUNDS, decay=torch.zeros(4, 9), is_causal=True),
    ),
    "state is a tensor": (
        TypeError, "initial_state.*Tensor", lambda: attend(Q, K, V, initial_state=STATE.kv),
    ),
    "state without sums": (TypeError, "initial_state.kv.*NoneType", lambda: started(None, STATE.z)),
    "state without normalizer": (TypeError, "initial_state.z.*NoneType", lambda: started(STATE.kv, None)),
    "state dtype": (RuntimeError, "state kv.*bfloat16", lambda: started(STATE.kv.bfloat16(), STATE.z)),
    "wide state": (RuntimeError, "state z.*float64", lambda: started(STATE.kv, STATE.z.double())),
    "state shape": (RuntimeError, r"kv.*\(2, 4, 8, 5\)", lambda: started(STATE.kv[..., :5], STATE.z)),
    "normalizer shape": (RuntimeError, r"z.*\(2, 4, 7\)", lambda: started(STATE.kv, STATE.z[..., :7])),
    "states of packed sequences": (
        RuntimeError, r"kv must be \(3, 4, 8, 8\)",
        lambda: packed(torch.tensor([0, 4, 4, 9]), initial_state=LinearAttentionState.zeros(2, 4, 8, 8)),
    ),
    "eps": (ValueError, "eps.*-1", lambda: attend(Q, K, V, eps=-1.0)),
    "NaN eps": (ValueError, "eps.*nan", lambda: attend(Q, K, V, eps=math.nan)),
    "no eps": (TypeError, "eps.*None", lambda: attend(Q, K, V, eps=None)),
    "text as scale": (TypeError, "scale.*'x'", lambda: attend(Q, K, V, scale="x")),
    "text as causal": (TypeError, "is_causal.*'no'", lambda: attend(Q, K, V, is_causal="no")),
    "text as normalize": (TypeError, "normalize.*'no'", lambda: attend(Q, K, V, normalize="no")),
    "text as state": (TypeError, "return_state.*'no'", lambda: attend(Q, K, V, return_state="no")),
    "impl": (ValueError, "impl.*fast", lambda: attend(Q, K, V, impl="fast")),
    "triton": (NotImplementedError, "triton.*interpreter", lambda: attend(Q, K, V, impl="triton")),
    "triton, wide heads": (
        NotImplementedError, "triton.*512.*513",
        lambda: attend(*[torch.ones(1, 1, 2, 513)] * 3, impl="triton"),
    ),
    "triton, many features": (
        NotImplementedError, "triton.*512.*600", lambda: attend(
            Q, K, V, feature_map=lambda x: x.new_ones(*x.shape[:-1], 600), impl="triton"
        ),
    ),
    "torch": (NotImplementedError, "torch has no kernel", lambda: attend(Q, K, V, impl="torch")),
    "step without a state": (TypeError, "state.*zeros", lambda: step(*ONE, None)),
    "step from a list": (TypeError, "state.*list", lambda: step(*ONE, [*STATE])),
    "4-D step": (RuntimeError, "query.*step", lambda: step(Q, K, V, STATE)),
    "step of another batch": (RuntimeError, "batch", lambda: step(ONE[0][:1], *ONE[1:], STATE)),
    "step of other heads": (RuntimeError, "heads", lambda: step(ONE[0][:, :3], *ONE[1:], STATE)),
    "step of another head dim": (RuntimeError, "head dim", lambda: step(ONE[0][..., :3], *ONE[1:], STATE)),
    "step of mixed dtypes": (
        RuntimeError, "value.*bfloat16", lambda: step(*ONE[:2], ONE[2].bfloat16(), STATE),
    ),
    "step from another state": (
        RuntimeError, r"kv must be \(2, 4, 8, 6\)",
        lambda: step(*ONE, LinearAttentionState.zeros(2, 4, 6, 8)),
    ),
    "step from a wide state": (
        RuntimeError, "state kv.*float64", lambda: step(*ONE, STATE.to(torch.float64)),
    ),
    "step from a grouped state": (
        RuntimeError, r"kv must be \(2, 4, 8, 6\)",
        lambda: step(*ONE, LinearAttentionState.zeros(2, 2, 8, 6)),
    ),
    "decay of a step": (
        RuntimeError, r"decay.*\(2, 4, 1\)", lambda: step(*ONE, STATE, decay=torch.zeros(2, 4, 1)),
    ),
    "feature map of a step": (ValueError, "feature_map", lambda: step(*ONE, STATE, feature_map="softplus")),
    "eps of a step": (ValueError, "eps.*-1", lambda: step(*ONE, STATE, eps=-1.0)),
    "inplace of a step": (TypeError, "inplace.*'no'", lambda: step(*ONE, STATE, inplace="no")),
    "impl of a step": (ValueError, "impl.*fast", lambda: step(*ONE, STATE, impl="fast")),
}  # fmt: skip


@pytest.mark.parametrize("mistake", REFUSED)
def test_refused(mistake):
    error, message, run = REFUSED[mistake]
    step(*ONE, STATE)  # from now on there is a short way
    with pytest.raises(error, match=message):
        run()


def test_explain():
    q = torch.randn(1, 2, 8, 4)
    found = fastattn.explain(attend, q, q, q, is_causal=True)
    assert set(found.reasons) | {found.impl} == {"cpu", "triton", "cuda", "torch", "reference"}
    assert "torch has no kernel" in found.reasons["torch"]
    assert str(found).startswith("linear_attention runs on: ")
    asked = fastattn.explain(attend, q, q, q, impl="reference")
    assert asked.impl == "reference"
    called = []
    fastattn.explain(attend, q, q, q, feature_map=called.append)
    assert not called, "nothing is computed"
    state = LinearAttentionState.zeros(1, 2, 4, 4)
    assert fastattn.explain(step, *[q[:, :, 0]] * 3, state, inplace=True).operator == "linear_attention_step"
    assert "meta" in fastattn.explain(attend, *[q.to("meta")] * 3).reasons["cpu"]
    with running("triton", "fastattn::linear_attention_forward"):
        assert fastattn.explain(attend, q, q, q, is_causal=True, impl="triton").impl == "triton"
    with pytest.raises(TypeError, match="heads"):
        fastattn.explain(attend, q, q, q, heads=3)
    with pytest.raises(RuntimeError, match="head dim"):
        fastattn.explain(attend, q, q[..., :3], q)


def test_the_kernel_is_preferred():
    require("cpu")
    q = torch.randn(1, 2, 8, 4)
    state = LinearAttentionState.zeros(1, 2, 4, 4)
    assert fastattn.explain(attend, q, q, q).impl == "cpu"
    assert fastattn.explain(step, *[q[:, :, 0]] * 3, state).impl == "cpu"
