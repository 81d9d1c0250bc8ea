"""Values and gradients of linear attention against the float64 oracle: options, sizes, dtypes and layouts."""

import itertools
import math
from pathlib import Path

import linear_attention_cases
import numpy as np
import operator_checks
import pytest
import torch
from attention_cases import IMPLEMENTATIONS, choices
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from linear_attention_cases import INPUTS, OUTPUTS, call, check, exact, leaves_of, make_case, require
from operator_checks import LAYOUTS, NATIVE, check_layout, fewer

import fastattn
from fastattn import LinearAttentionState

dispatched, impl = linear_attention_cases.dispatched, linear_attention_cases.impl
poisoned = operator_checks.poisoned

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

CAUSAL = {"is_causal": True}
OPTIONS = {
    "plain": {},
    "L < S": {"S": 23},
    "L > S": {"S": 6},
    "causal": CAUSAL,
    "initial state": {"initial": True},
    "causal, initial state": {**CAUSAL, "initial": True},
    "relu": {"feature_map": "relu", **CAUSAL},
    "exp": {"feature_map": "exp", "initial": True},
    "identity": {"feature_map": "identity", **CAUSAL},
    "not normalized": {"normalize": False, "scale": 0.3},
    "not normalized, causal": {"normalize": False, "feature_map": "identity", "initial": True, **CAUSAL},
    "negative scale": {"normalize": False, "scale": -1.7, "feature_map": "relu", **CAUSAL},
    "scale of a quotient": {"scale": 3.0},
    "large eps": {"eps": 2.5, **CAUSAL},
    "no eps": {"eps": 0.0, **CAUSAL},
    "decay per head": {"decay": "head", **CAUSAL},
    "decay per token": {"decay": "token", "initial": True, **CAUSAL},
    "decay of the query's dtype": {"decay": "token", "decay_dtype": "query", **CAUSAL},
    "resets": {"decay": "reset", "initial": True, "feature_map": "exp", **CAUSAL},
    "resets, not normalized": {"decay": "reset", "normalize": False, **CAUSAL},
    "padding": {"padding": "random", "S": 20},
    "padding right, causal": {"padding": "right", **CAUSAL},
    "padding left, causal": {"padding": "left", "initial": True, **CAUSAL},
    "padding and decay": {"padding": "random", "decay": "token", **CAUSAL},
    "padding and decay per head": {"padding": "left", "decay": "head", "H": 4, "Hkv": 2, **CAUSAL},
    "packed": {"lengths": [5, 0, 17, 1, 0], **CAUSAL},
    "packed, decay": {"lengths": [0, 3, 19], "decay": "token", "initial": True, **CAUSAL},
    "packed, decay per head": {"lengths": [8, 8], "decay": "head", "H": 4, "Hkv": 1, **CAUSAL},
    "packed, not causal": {"lengths": [4, 0, 20], "initial": True},
    "grouped heads": {"H": 6, "Hkv": 2, **CAUSAL},
    "one key head": {"H": 4, "Hkv": 1, "padding": "random", "initial": True},
    "value dim": {"D": 8, "Dv": 5, **CAUSAL},
    "value dim wider": {"D": 7, "Dv": 19, "decay": "token", **CAUSAL},
    "one token": {"L": 1, "decay": "token", "initial": True, "H": 4, "Hkv": 2, **CAUSAL},
    "everything": {
        "H": 4, "Hkv": 2, "L": 70, "D": 10, "Dv": 6, "decay": "reset", "padding": "random", "initial": True,
        "feature_map": "exp", "eps": 0.1, **CAUSAL,
    },
}  # fmt: skip


def case_of(name, dtype, **changed):
    options = {"L": 13, "dtype": dtype} | OPTIONS[name] | changed
    if options.get("decay_dtype") == "query":
        options["decay_dtype"] = dtype
    return make_case(**options)


@choices(DTYPES, (torch.float64,))
@pytest.mark.parametrize("name", OPTIONS)
def test_options(impl, name, dtype):
    # In the interpreter two segments of a sequence, of several chunks.
    few = {"B": 1, "H": OPTIONS[name].get("H", 1), "L": OPTIONS[name].get("L", 37)}
    case = case_of(name, dtype, **fewer(impl, {}, few))
    check(call(case, impl), case)


@pytest.mark.parametrize("name", [name for name, options in OPTIONS.items() if options.get("is_causal")])
def test_options_of_few_tokens(impl, name):
    """Which Triton takes one by one, forward; backward they are as others."""
    changed = {"L": min(OPTIONS[name].get("L", 11), 11)}
    if "lengths" in OPTIONS[name]:
        changed = {"lengths": [min(n, 6) for n in OPTIONS[name]["lengths"]]}
    dtype = torch.float32 if name == "everything" else torch.float64
    case = case_of(name, dtype, **changed)
    check(call(case, impl, only=()), case)


@choices((torch.float32, torch.bfloat16), (torch.bfloat16,))
@pytest.mark.parametrize("options", (
    CAUSAL, {}, {"decay": "token", "padding": "random", "initial": True, **CAUSAL},
), ids=("causal", "plain", "decay"))  # fmt: skip
def test_lengths(impl, options, dtype):
    """Around every block size a kernel may have, also zero."""
    for L in fewer(
        impl, (*range(18), 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129), (0, 1, 15, 16, 17, 32, 33)
    ):
        case = make_case(1, 2, 1, L, D=8, dtype=dtype, seed=L, **options)
        check(call(case, impl), case)


def test_elu_where_its_exponential_ends(dispatched):
    """elu(x) + 1 as it is left in z: exactly 0 below the smallest normal number, NaN as it is, 1 at zero."""
    edges = [-math.inf, -1e30, -1e4, -104.0, -88.0, -87.34, -87.33, -80.0, -1.0, -0.35, -1e-8, -0.0, 0.0, 2.5]
    for dtype, D in ((torch.float32, 64), (torch.float32, 14), (torch.float64, 40)):
        x = torch.tensor(edges + [math.nan] * (D > 14), dtype=dtype)
        x = torch.cat((x, torch.linspace(-87, 1, D - len(x), dtype=dtype))).expand(1, 1, 1, D)
        state = fastattn.linear_attention(x, x, x, return_state=True, impl=dispatched)[1]
        want = torch.where(x > 0, x.double() + 1, x.double().exp())
        smallest = torch.finfo(dtype).tiny
        have = state.z.double()
        assert (have.isnan() == x.isnan().squeeze(2)).all()
        near = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(have, want.squeeze(2), rtol=near, atol=smallest, equal_nan=True)
        assert (have[want.squeeze(2) < 0.99 * smallest] == 0).all() or dispatched == "reference"


@pytest.mark.parametrize("options", (
    CAUSAL, {"lengths": [70, 31, 16, 17], **CAUSAL}, {"padding": "random", "decay": "token", **CAUSAL},
), ids=("plain", "packed", "decay"))  # fmt: skip
def test_many_chunks_of_large_states(dispatched, options):
    """Rows far enough apart, or dense enough, that the next ones are brought by other means."""
    case = make_case(2, 2, fewer(dispatched, 2, 1), 131, D=64, dtype=torch.float32, initial=True, **options)
    check(call(case, dispatched), case)
    for name in ("query", "key", "value"):
        setattr(case, name, getattr(case, name).transpose(1, 2).contiguous().transpose(1, 2))
    check(call(case, dispatched), case)


@pytest.mark.parametrize("options", (
    CAUSAL, {}, {"decay": "token", "padding": "left", "initial": True, **CAUSAL},
    {"padding": "random", "initial": True}, {"lengths": [129, 0, 65, 64, 3], "decay": "head", **CAUSAL},
), ids=("causal", "plain", "decay", "cross", "packed"))  # fmt: skip
def test_neighbouring_heads(dispatched, options):
    """Heads may be walked in turn, some tokens each, by any number of threads: none takes another's state."""
    threads = torch.get_num_threads()
    try:
        for n, Hkv, group, L, dtype in (
            (1, 4, 1, 65, torch.bfloat16), (1, 6, 2, 64, torch.float32), (2, 4, 1, 200, torch.float32),
            (2, 6, 1, 129, torch.bfloat16), (3, 6, 1, 63, torch.float64), (1, 2, 1, 130, torch.float16),
        ):  # fmt: skip
            torch.set_num_threads(n)
            case = make_case(1, Hkv * group, Hkv, L, D=16, Dv=24, dtype=dtype, seed=L, **options)
            results = call(case, dispatched, only=())
            check(results, case)
            # Without a state to return, the last tokens are not added to it.
            alone = fastattn.linear_attention(
                **linear_attention_cases.arguments(case, leaves_of(case, ())), impl=dispatched
            )
            alone = alone if case.cu_seqlens is None else alone.transpose(0, 1).unsqueeze(0)
            assert torch.equal(alone, results["out"])
    finally:
        torch.set_num_threads(threads)


@choices((torch.float32, torch.bfloat16), (torch.float32,))
def test_head_dims(impl, dtype):
    every = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 128, 129, 256)
    dims = fewer(impl, every, (1, 16, 33, 65))
    for n, D in enumerate(dims):
        case = make_case(1, 2, 1, 37, D=D, Dv=dims[-1 - n], dtype=dtype, initial=True, **CAUSAL)
        check(call(case, impl), case)


@pytest.mark.parametrize("B, H, Hkv, L, S, D, Dv", [
    (0, 2, 2, 3, 4, 5, 6), (2, 0, 0, 3, 4, 5, 6), (2, 4, 2, 0, 4, 5, 6), (2, 4, 2, 3, 0, 5, 6),
    (2, 2, 1, 3, 4, 5, 0), (2, 2, 2, 3, 4, 0, 5), (2, 2, 2, 0, 0, 5, 5), (0, 0, 0, 0, 0, 0, 0),
    (2, 0, 2, 3, 4, 5, 6),
])  # fmt: skip
@pytest.mark.parametrize("extra", (
    {}, CAUSAL, {"decay": "token", "padding": "random", "initial": True, **CAUSAL}, {"initial": True},
))  # fmt: skip
def test_empty_tensors(impl, B, H, Hkv, L, S, D, Dv, extra):
    S = L if extra.get("is_causal") else S
    case = make_case(B, H, Hkv, L, S, D, Dv, torch.float32, **extra)
    results = call(case, impl)
    for name, tensor in case.tensors().items():
        gradient = results[f"grad_{name}"]
        assert gradient.shape == tensor.shape and not gradient.isnan().any()
    assert results["out"].shape == (B, H, L, Dv) and not results["out"].isnan().any()
    if S == 0 and not extra.get("initial"):
        assert (results["out"] == 0).all() and (results["kv"] == 0).all()
    if S == 0 and extra.get("initial"):
        torch.testing.assert_close(results["kv"], case.initial_kv)
    for name, expected in call(case, "reference").items():
        torch.testing.assert_close(
            results[name], expected, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@choices((torch.float32, torch.bfloat16, torch.float16), (torch.float16,))
@pytest.mark.parametrize("name, options", (
    ("causal", CAUSAL), ("plain", {"S": 190}), ("decay", {"decay": "token", "initial": True, **CAUSAL}),
    ("exp", {"feature_map": "exp", "normalize": False, **CAUSAL}),
), ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_precision(impl, name, options, dtype):
    """The strict measure, without an allowance for cancellation, on inputs with statistics."""
    H, L, D, Dv = fewer(impl, (2, 150, 32, 24), (1, 70, 32, 20))
    case = make_case(1, H, 1, L, D=D, Dv=Dv, dtype=dtype, **options)
    check(call(case, impl), case, strict=True)


@NATIVE
def test_a_thousand_steps_in_bfloat16(impl):
    """States and sums in bfloat16 would stop growing after 256 tokens."""
    case = make_case(1, 1, L=1000, D=8, dtype=torch.bfloat16, **CAUSAL)
    expected, _ = exact(case)
    state = LinearAttentionState.zeros(1, 1, 8, 8)
    for t in range(1000):
        out, state = fastattn.linear_attention_step(
            case.query[:, :, t], case.key[:, :, t], case.value[:, :, t], state, impl=impl
        )
        if t % 100 == 99:
            error = np.abs(out.double().numpy() - expected["out"][:, :, t]).max()
            assert error < 2**-8 * np.abs(expected["out"][:, :, t]).max() + 1e-4, t
    # One call may round features to bfloat16, as products of bfloat16 matrices do; a step has no reason to.
    whole = call(case, impl, only=())
    for name, one_by_one in (("kv", state.kv), ("z", state.z)):
        largest = np.abs(expected[name]).max()
        for have, tolerance in ((one_by_one, 1e-4), (whole[name], 2**-8)):
            assert np.abs(have.double().numpy() - expected[name]).max() < tolerance * largest


@NATIVE
def test_half_precision_over_32k_positions(impl):
    """Sums beyond 65504, the largest float16; the output is a mean of values again."""
    L = 32768
    q, k, v = torch.full((1, 1, L, 4), 1.5), torch.full((1, 1, L, 4), 2.0), torch.ones(1, 1, L, 3)
    v[:, :, ::2] = 0.5
    for options in (CAUSAL, {}):
        q16, k16, v16 = (t.half().requires_grad_() for t in (q, k, v))
        out, state = fastattn.linear_attention(q16, k16, v16, return_state=True, impl=impl, **options)
        last = out[0, 0, -1].float()
        torch.testing.assert_close(last, torch.full((3,), 0.75), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(state.z, torch.full((1, 1, 4), 3.0 * L))
        out.float().sum().backward()
        assert all(t.grad.isfinite().all() for t in (q16, k16, v16))


def test_strong_decays_keep_their_precision(impl):
    """Decays that erase nearly everything, infinite ones and the most negative finite number among mild ones:
    what is left of a token depends on the decays after it alone."""
    L = fewer(impl, 150, 40)
    case = make_case(1, 2, L=L, D=16, dtype=torch.float32, decay="token", initial=True, **CAUSAL)
    decays = (-20.0, -90.0, -300.0, -1e4, torch.finfo(torch.float32).min, -math.inf)
    for n, strong in enumerate(fewer(impl, decays, (-90.0, -math.inf))):
        case.decay[:, :, n::11] = strong
        check(call(case, impl), case)


def test_decays_cost_those_behind_them_no_precision(impl):
    """Their sums grow to some hundreds, and what is left of a token is a difference of two of them."""
    case = make_case(1, 2, L=32, dtype=torch.float32, decay="token", **CAUSAL)
    case.decay[:, :, ::2] = -80.0
    expected, _ = exact(case)
    for name, result in call(case, impl).items():
        error = np.abs(result.double().numpy() - expected[name]).max()
        assert error < 3e-6 * np.abs(expected[name]).max(), name


def test_growing_states(impl):
    case = make_case(1, 2, L=40, dtype=torch.float64, decay="token", **CAUSAL)
    case.decay = -case.decay / 4
    check(call(case, impl), case)


@st.composite
def cases(draw):
    H = draw(st.sampled_from((1, 2, 4, 6)))
    causal, L = draw(st.booleans()), draw(st.integers(1, 90))
    form = draw(st.sampled_from((None, "padding", "packed")))
    options = {
        "is_causal": causal,
        "feature_map": draw(st.sampled_from(("elu", "relu", "exp", "identity"))),
        "normalize": draw(st.booleans()),
        "scale": draw(st.sampled_from((None, 0.7, -0.4))),
        "eps": draw(st.sampled_from((1e-6, 0.5))),
    }
    if form == "packed":
        options["lengths"] = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    elif form == "padding":
        options["padding"] = draw(st.sampled_from(("left", "right", "random")))
    return make_case(
        draw(st.integers(1, 3)), H, draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if H % n == 0])),
        L, None if causal or form == "packed" else draw(st.integers(1, 70)), draw(st.integers(1, 20)),
        draw(st.integers(1, 20)), draw(st.sampled_from((torch.float64, torch.float32))),
        decay=draw(st.sampled_from((None, "head", "token", "reset"))) if causal else None,
        initial=draw(st.booleans()), seed=draw(st.integers(0, 1000)), **options,
    )  # fmt: skip


@NATIVE
@settings(
    max_examples=60, derandomize=True, deadline=None, database=None,
    suppress_health_check=(HealthCheck.function_scoped_fixture, HealthCheck.too_slow),
)  # fmt: skip
@given(case=cases())
def test_random_combinations(impl, case):
    check(call(case, impl), case)


ALL = "everything"


SUBSETS = (ALL, "packed, decay", "plain", "not normalized, causal")
PAIRS = [(i, name) for i in IMPLEMENTATIONS for name in fewer(i, SUBSETS, (ALL,))]


@pytest.mark.parametrize("impl, name", PAIRS, indirect=["impl"])
def test_every_subset_of_gradients(impl, name):
    """Each subset of the inputs that require gradients, through each output and all: as all together."""
    case = case_of(name, torch.float64, **fewer(impl, {"L": 13}, {"L": 13, "H": 2, "Hkv": 1}))
    for used in fewer(impl, (OUTPUTS, ("out",), ("kv",), ("z",), ("kv", "z")), (("out", "z"),)):
        together = call(case, impl, used=used)
        check(together, case, used=used)
        names = list(case.tensors())
        for n in fewer(impl, range(1, len(names) + 1), (1,)):
            for subset in itertools.combinations(names, n):
                for key, result in call(case, impl, only=subset, used=used).items():
                    torch.testing.assert_close(
                        result, together[key], rtol=1e-10, atol=1e-12,
                        msg=lambda m, k=key, s=subset: f"{k} of {s}: {m}",
                    )  # fmt: skip


def differentiable(case, names, impl, used=OUTPUTS):
    """The call as a function of the tensors ``names``."""
    fixed = leaves_of(case, ())

    def attend(*tensors):
        leaves = fixed | dict(zip(names, tensors, strict=True))
        given = linear_attention_cases.arguments(case, leaves)
        out, state = fastattn.linear_attention(**given, return_state=True, impl=impl)
        outputs = {"out": out, "kv": state.kv, "z": state.z}
        return tuple(outputs[n] for n in used)

    return attend


def finite(case):
    """Finite differences need decays that are finite."""
    if case.decay is not None:
        case.decay = case.decay.clamp(min=-1.5)
    return case


SMALL = {"B": 1, "L": 4, "D": 2, "Dv": 2}


@NATIVE
@pytest.mark.parametrize("name", OPTIONS)
def test_first_and_second_derivatives(impl, name):
    small = {k: v for k, v in SMALL.items() if k != "L" or "lengths" not in OPTIONS[name]}
    if "S" in OPTIONS[name]:
        small["S"] = 3
    if "lengths" in OPTIONS[name]:
        small["lengths"] = [2, 0, 3]
    case = finite(case_of(name, torch.float64, **small))
    tensors = {n: t.clone().requires_grad_() for n, t in case.tensors().items()}
    attend = differentiable(case, list(tensors), impl)
    assert torch.autograd.gradcheck(attend, tuple(tensors.values()), fast_mode=True)
    assert torch.autograd.gradgradcheck(attend, tuple(tensors.values()), fast_mode=True)


def second_order(case, subset, impl, used):
    """The gradient of the squared gradient; zeros where there is none."""
    leaves = [getattr(case, name).clone().requires_grad_() for name in subset]
    outputs = [t.sin().sum() for t in differentiable(case, subset, impl, used)(*leaves) if t.requires_grad]
    options = {"allow_unused": True, "materialize_grads": True}
    if not outputs:
        return [torch.zeros_like(t) for t in leaves]
    first = torch.autograd.grad(sum(outputs), leaves, create_graph=True, **options)
    penalty = sum(g.square().sum() for g in first) + sum(0 * t.sum() for t in leaves)
    return torch.autograd.grad(penalty, leaves, **options)


@NATIVE
def test_second_derivatives_of_every_subset(impl):
    """A gradient penalty with each subset of the inputs: the derivative of gradients through each output."""
    case = finite(case_of(ALL, torch.float64, **SMALL))
    for used in (OUTPUTS, ("out",), ("kv", "z")):
        for n in range(1, 7):
            for subset in itertools.combinations(INPUTS, n):
                results = [second_order(case, subset, i, used) for i in (impl, "reference")]
                torch.testing.assert_close(*results)


TENSORS = (*INPUTS, "key_padding_mask", "grad_out", "grad_kv", "grad_z")


@pytest.mark.parametrize("layout", LAYOUTS)
@choices((torch.float32, torch.bfloat16), (torch.float32,))
def test_strides(impl, layout, dtype):
    """Any strides of any one tensor give the contiguous result; nothing given is written to."""
    sizes = fewer(impl, (2, 4, 2, 71), (1, 2, 1, 18))
    case = make_case(
        *sizes, D=12, Dv=10, dtype=dtype, decay="token", padding="random", initial=True, **CAUSAL
    )
    exact = impl != "reference"
    check_layout(case, TENSORS, layout, lambda c: call(c, impl), exact, halves=impl == "triton")


def test_expanded_inputs_and_gradients(impl):
    case = make_case(3, 4, 2, 17, D=8, dtype=torch.float32, decay="token", initial=True, **CAUSAL)
    for name, dims in (
        ("query", (0,)), ("key", (0, 1)), ("value", (1,)), ("decay", (0, 2)), ("initial_kv", (0, 1, 3)),
        ("initial_z", (0,)), ("grad_out", (0, 1, 2, 3)), ("grad_kv", (0, 2)), ("grad_z", (0, 1, 2)),
    ):  # fmt: skip
        tensor = getattr(case, name)
        for dim in dims:
            tensor = tensor.select(dim, 0).unsqueeze(dim)
        setattr(case, name, tensor.expand(getattr(case, name).shape))
    check(call(case, impl), case)


def test_heads_beside_channels_in_the_output(impl):
    """Joining the heads of the output is a view; packed output is contiguous."""
    if impl != "reference":
        case = make_case(2, 3, L=4, dtype=torch.float32)
        assert call(case, impl)["out"].transpose(1, 2).is_contiguous()


def test_repeatable_and_independent_of_threads(impl):
    L = fewer(impl, 700, 40)
    case = make_case(1, 2, 1, L, D=16, dtype=torch.float32, decay="token", initial=True, **CAUSAL)
    first = call(case, impl)
    threads = torch.get_num_threads()
    try:
        for n in fewer(impl, (threads, 1, 2, 3), (threads,)):
            torch.set_num_threads(n)
            results = call(case, impl)
            assert all(torch.equal(t, results[key]) for key, t in call(case, impl).items()), n
            if n == threads:
                assert all(torch.equal(t, results[key]) for key, t in first.items())
            check(results, case)
    finally:
        torch.set_num_threads(threads)


def test_gradient_mode_does_not_change_the_result(impl):
    sizes = fewer(impl, (2, 4, 2, 33), (1, 2, 1, 20))
    case = make_case(*sizes, D=16, dtype=torch.float32, decay="head", **CAUSAL)
    trained = call(case, impl)["out"]
    assert torch.equal(call(case, impl, only=())["out"], trained)
    with torch.no_grad():
        assert torch.equal(call(case, impl, only=())["out"], trained)
    with torch.inference_mode():
        assert torch.equal(call(case, impl, only=())["out"], trained)


def test_implementations_agree_on_larger_inputs():
    require("cpu")
    for dtype in (torch.float32, torch.float64):
        for options in ({"decay": "token", "padding": "left", **CAUSAL}, {"S": 900}, CAUSAL):
            case = make_case(2, 4, 2, 517, D=64, Dv=48, dtype=dtype, initial=True, **options)
            expected = call(case, "reference")
            for key, result in call(case, "cpu").items():
                torch.testing.assert_close(
                    result, expected[key], rtol=1e-3, atol=2e-4, msg=lambda m, k=key: f"{k}: {m}"
                )


WRONG = {
    "causal ignored": (CAUSAL, lambda c: c.options.update(is_causal=False)),
    "normalizer ignored": ({}, lambda c: c.options.update(normalize=False)),
    "scale ignored": ({"normalize": False, "scale": 0.5}, lambda c: c.options.update(scale=None)),
    "eps slightly off": ({"eps": 0.5}, lambda c: c.options.update(eps=0.52)),
    "other feature map": ({}, lambda c: c.options.update(feature_map="exp")),
    "decay ignored": ({"decay": "token", **CAUSAL}, lambda c: c.decay.zero_()),
    "decay slightly off": ({"decay": "head", **CAUSAL}, lambda c: c.decay.mul_(1.02)),
    "decay one token late": ({"decay": "token", **CAUSAL}, lambda c: c.decay.copy_(c.decay.roll(1, 2))),
    "padding ignored": ({"padding": "random"}, lambda c: setattr(c, "key_padding_mask", None)),
    "padding inverted": ({"padding": "random"}, lambda c: c.key_padding_mask.logical_not_()),
    "padded token decays": (
        {"padding": "left", "decay": "token", "initial": True, "seed": 1, **CAUSAL},
        lambda c: (
            setattr(c, "key", torch.where(c.key_padding_mask[:, None, :, None], c.key, -1e4)),
            setattr(c, "key_padding_mask", None),
        ),
    ),
    "initial state ignored": (
        {"initial": True, **CAUSAL}, lambda c: (c.initial_kv.zero_(), c.initial_z.zero_()),
    ),
    "normalizer of the initial state ignored": ({"initial": True}, lambda c: c.initial_z.zero_()),
    "sequences run into each other": (
        {"lengths": [6, 7], **CAUSAL}, lambda c: setattr(c, "cu_seqlens", torch.tensor([0, 7, 13])),
    ),
    "heads shared in the wrong order": (
        {"H": 4, "Hkv": 2, **CAUSAL},
        lambda c: (setattr(c, "key", c.key.flip(1)), setattr(c, "value", c.value.flip(1))),
    ),
    "gradient of the state forgotten": ({}, lambda c: (c.grad_kv.zero_(), c.grad_z.zero_())),
}  # fmt: skip


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_checker_catches(name, dtype):
    options, spoil = WRONG[name]
    right, wrong = (make_case(**({"L": 13, "dtype": dtype} | options)) for _ in range(2))
    check(call(right, "reference"), right)
    spoil(wrong)
    if dtype == torch.bfloat16 and "slightly" in name:
        return
    with pytest.raises(AssertionError):
        check(call(wrong, "reference"), right)


@pytest.mark.parametrize("spoil", (
    lambda r: r["out"].mul_(0.9), lambda r: r["kv"].mul_(1.02), lambda r: r["z"].mul_(0.98),
    lambda r: r["grad_query"].mul_(2), lambda r: r["grad_key"].neg_(), lambda r: r["grad_value"].mul_(0.6),
    lambda r: r["grad_decay"].mul_(1.1), lambda r: r["grad_decay"].copy_(r["grad_decay"].roll(1, 2)),
    lambda r: r["grad_initial_kv"].zero_(), lambda r: r["grad_initial_z"].mul_(0.5),
    lambda r: r["out"][0, 0, 0].zero_(), lambda r: r["grad_decay"][0, 0, 0].zero_(),
))  # fmt: skip
def test_checker_catches_spoilt_results(spoil):
    case = make_case(L=13, dtype=torch.float32, decay="token", initial=True, **CAUSAL)
    results = call(case, "reference")
    check(results, case)
    spoil(results)
    with pytest.raises(AssertionError):
        check(results, case)


@pytest.mark.parametrize(
    "name", (ALL, "packed, decay", "padding", "not normalized, causal", "decay per head")
)
def test_oracle_gradient_is_the_derivative_of_its_value(name):
    """The oracle's hand-written gradient against finite differences of its own forward."""
    case = finite(case_of(name, torch.float64, **(SMALL | {"L": 5})))
    expected, _ = exact(case)

    def weigh(result):
        return sum((result[n] * getattr(case, f"grad_{n}").numpy()).sum() for n in OUTPUTS)

    for tensor_name, tensor in case.tensors().items():
        flat = tensor.view(-1)
        for n in range(0, flat.numel(), 3):
            value = flat[n].item()
            sides = []
            for step in (1e-5, -1e-5):
                flat[n] = value + step
                sides.append(weigh(exact(case)[0]))
            flat[n] = value
            numerical = (sides[0] - sides[1]) / 2e-5
            written = expected[f"grad_{tensor_name}"].reshape(-1)[n]
            assert np.isclose(written, numerical, rtol=1e-5, atol=1e-7), tensor_name


def test_other_instruction_sets(other_isa, run_python):
    """The compact tests of this file and of the rules, once more under each of the other instruction sets."""
    require("cpu")
    compact = ("options", "lengths", "head_dims", "precision", "strong", "half", "isolation", "zero", "loop")
    chosen = f"({' or '.join('test_' + name for name in compact)}) and cpu"
    files = [Path(__file__).with_name(f"test_linear_attention{part}.py") for part in ("", "_rules")]
    run_python(
        "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", chosen, *files, FASTATTN_CPU_ISA=other_isa
    )
