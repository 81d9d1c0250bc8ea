"""Attention of packed sequences, held against the dense operator sequence by sequence."""

import functools
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import attention_cases
import attention_oracle as oracle
import numpy as np
import operator_checks
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_checks import NATIVE, check_compiled, compare, fewer, require
from torch._subclasses import FakeTensorMode

import fastattn

impl, poisoned = attention_cases.impl, operator_checks.poisoned

attend = fastattn.varlen_attention
INPUTS = ("query", "key", "value", "alibi_slopes", "sinks")
# Rows of a tile and blocks of keys, one more and one less; few rows beside many keys; nothing on either side.
QUERIES = (3, 0, 40, 17, 5, 1, 16, 33)
KEYS = (5, 4, 33, 0, 130, 700, 128, 127)
INTERPRETED = (3, 0, 40, 17, 32), (5, 4, 33, 0, 65)


def bounds_of(lengths, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


@dataclass
class Case:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_out: torch.Tensor
    grad_lse: torch.Tensor
    queries: tuple
    keys: tuple
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    options: dict = field(default_factory=dict)

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {name: getattr(self, name) for name in INPUTS}
        return {name: t for name, t in named.items() if t is not None}

    def bounds(self, dtype=torch.int32):
        return bounds_of(self.queries, dtype), bounds_of(self.keys, dtype)


def make_case(
    queries=QUERIES, keys=KEYS, H=2, Hkv=None, D=8, Dv=None, dtype=torch.float64, *, alibi=None, sinks=False,
    seed=0, **options,
) -> Case:  # fmt: skip
    Hkv, Dv, L, S, N = Hkv or H, Dv or D, sum(queries), sum(keys), len(queries)
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return Case(
        normal(L, H, D), normal(S, Hkv, D), normal(S, Hkv, Dv), normal(L, H, Dv), normal(H, L, dtype=wide),
        tuple(queries), tuple(keys),
        normal(*((N, H) if alibi == "nh" else (H,)), dtype=wide).abs() / 16 if alibi else None,
        normal(H) if sinks else None, options,
    )  # fmt: skip


def differentiate(case: Case, forward) -> dict[str, torch.Tensor]:
    """out, lse and grad_<input> of forward(leaves, options) -> (out, lse)."""
    leaves = {name: t.detach().requires_grad_() for name, t in case.tensors().items()}
    out, lse = forward(leaves, case.options)
    used = [(o, g) for o, g in ((out, case.grad_out), (lse, case.grad_lse.to(lse.dtype))) if o.requires_grad]
    # Rows that see nothing have a constant lse.
    outputs, incoming = zip(*used, strict=True)
    gradients = torch.autograd.grad(outputs, [*leaves.values()], incoming, allow_unused=True)
    results = {"out": out.detach(), "lse": lse.detach()}
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        results[f"grad_{name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return results


@operator_checks.on_device
def call(case: Case, impl: str, dtype=torch.int32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    bounds = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), case.bounds(dtype), strict=True))

    def forward(leaves, options):
        return attend(**leaves, **bounds, return_lse=True, impl=impl, **options)

    return differentiate(case, forward)


def one_by_one(case: Case) -> dict[str, torch.Tensor]:
    """The same from the dense operator: one call for each sequence, in plain PyTorch."""

    def forward(leaves, options):
        rows, columns = bounds_of(case.queries).tolist(), bounds_of(case.keys).tolist()
        slopes, sinks = leaves.get("alibi_slopes"), leaves.get("sinks")
        # Gradients of what sequences share are summed in the precision of sums.
        sinks = None if sinks is None else sinks.to(case.grad_lse.dtype)
        parts = []
        for n in range(len(case.queries)):
            q = leaves["query"][rows[n] : rows[n + 1]]
            k, v = (leaves[name][columns[n] : columns[n + 1]] for name in ("key", "value"))
            each = slopes[n] if slopes is not None and slopes.dim() == 2 else slopes
            parts.append(
                fastattn.scaled_dot_product_attention(
                    *(t.transpose(0, 1) for t in (q, k, v)), alibi_slopes=each, enable_gqa=True,
                    sinks=sinks, return_lse=True, impl="reference",
                    **({"causal_alignment": "lower_right"} | options),
                )
            )  # fmt: skip
        out, lse = (torch.cat(p, 1) for p in zip(*parts, strict=True))
        return out.transpose(0, 1), lse

    return differentiate(case, forward)


def in_float64(case: Case) -> Case:
    wide = {n: t.double() for n, t in case.tensors().items()}
    return replace(case, **wide, grad_out=case.grad_out.double(), grad_lse=case.grad_lse.double())


def check(results: dict, case: Case) -> None:
    expected, plain = one_by_one(in_float64(case)), one_by_one(case)
    for name, result in results.items():
        exact = expected[name].numpy()
        assert result.dtype == plain[name].dtype
        # What numbers are summed from: about 1, and in the gradients of slopes distances, which cancel.
        size = abs(exact) + (max(case.queries + case.keys) if name == "grad_alibi_slopes" else 1.0)
        if name.startswith("grad") and name != "grad_query":  # sums over queries: of an only key they cancel
            size = size * max(case.queries, default=1) ** 0.5
        if name.startswith("grad") and result.dtype == torch.float64:
            # The oracle has no error here to measure by. Weights are exponentials of differences to
            # lse, and as exact as lse is; what they are multiplied with are sums over channels, which cancel.
            lse = expected["lse"]
            size = size * (1 + max(lse[lse.isfinite()].abs().tolist(), default=0.0) + case.value.shape[-1])
        compare(name, result, exact, size, plain[name], case.query.dtype)


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal from the upper left": {"is_causal": True, "causal_alignment": "upper_left"},
    "window": {"window_size": (9, 3)},
    "scale": {"scale": -0.3},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": "h", "is_causal": True},
    "alibi of each sequence": {"alibi": "nh"},
    "sinks": {"sinks": True},
    "grouped heads": {"H": 6, "Hkv": 2, "Dv": 5},
    "everything": {
        "H": 4, "Hkv": 2, "D": 12, "Dv": 7, "alibi": "nh", "sinks": True, "softcap": 2.0,
        "window_size": (30, 20), "scale": 0.4,
    },
}  # fmt: skip


def lengths_for(impl: str) -> tuple[tuple, tuple]:
    return fewer(impl, (QUERIES, KEYS), INTERPRETED)


@attention_cases.choices((torch.float64, torch.float32, torch.bfloat16, torch.float16), (torch.float32,))
@pytest.mark.parametrize("name", OPTIONS)
def test_options(impl, name, dtype):
    case = make_case(*lengths_for(impl), dtype=dtype, **OPTIONS[name])
    check(call(case, impl), case)


@pytest.mark.parametrize("queries, keys", (
    ((), ()), ((0,), (0,)), ((0, 0), (3, 0)), ((3, 2), (0, 0)), ((0, 4, 0), (0, 4, 0)), ((1,), (1,)),
    ((200,), (3000,)), ((1, 1, 1), (2000, 1, 900)), ((1, 1, 1), (70, 1, 31)),
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
    operator_checks.check_layout(case, names, layout, lambda c: call(c, impl), impl == "cpu")


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


# PyTorch's own machinery


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


def test_explain():
    require("cpu")
    found = fastattn.explain(attend, Q, Q, Q, B2, B2, is_causal=True)
    assert found.impl == "cpu" and "cu_seqlens_q" in found.reasons["torch"]


def test_every_instruction_set(isa, run_python):
    """The compact tests of this file once more under each instruction set."""
    require("cpu")
    run_python(
        "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", "test_options and cpu and not float64",
        Path(__file__), FASTATTN_CPU_ISA=isa,
    )  # fmt: skip
