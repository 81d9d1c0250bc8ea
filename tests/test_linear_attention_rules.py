"""The rules of linear attention: states and steps; empty, hidden and NaN; zero denominators; arguments."""

import copy
import io
import math
import pickle

import linear_attention_cases
import numpy as np
import operator_checks
import pytest
import torch
from linear_attention_cases import INPUTS, call, check, make_case, require
from operator_checks import assert_same

import fastattn
from fastattn import LinearAttentionState

impl, poisoned = linear_attention_cases.impl, operator_checks.poisoned

attend, step = fastattn.linear_attention, fastattn.linear_attention_step
CAUSAL = {"is_causal": True}


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


# The state: pieces, steps, and what can be done with it


RECURRENT = {
    "plain": {},
    "relu": {"feature_map": "relu"},
    "decay per head": {"decay": "head", "feature_map": "exp"},
    "decay per token": {"decay": "token", "eps": 0.0},
    "resets": {"decay": "reset", "normalize": False, "scale": 0.4},
    "grouped heads": {"H": 4, "Hkv": 2, "decay": "token", "Dv": 5},
}


def leaves_of(case):
    """query, key, value, decay, initial state kv and z, each of which requires a gradient if it is there."""
    return [None if (t := getattr(case, n)) is None else t.clone().requires_grad_() for n in INPUTS]


def derivatives(out, state, leaves, case):
    wanted = [t for t in leaves if t is not None]
    return torch.autograd.grad((out, *state), wanted, (case.grad_out, case.grad_kv, case.grad_z))


def compare_with_whole(case, impl, run):
    """run(query, key, value, decay, state) against one call, in values and gradients."""
    results = []
    for function in (run, lambda q, k, v, d, s: attend(
        q, k, v, decay=d, initial_state=s, return_state=True, impl=impl, **case.options,
    )):  # fmt: skip
        query, key, value, decay, kv, z = leaves = leaves_of(case)
        out, state = function(query, key, value, decay, LinearAttentionState(kv, z))
        results.append((out, *state, *derivatives(out, state, leaves, case)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", RECURRENT)
def test_loop_of_steps_equals_the_whole(impl, name):
    case = make_case(**({"L": 21, "initial": True} | CAUSAL | RECURRENT[name]))
    options = {k: v for k, v in case.options.items() if k != "is_causal"}

    def run(query, key, value, decay, state):
        outputs = []
        for t in range(query.shape[2]):
            d = decay[:, :, t] if decay is not None and decay.dim() == 3 else decay
            out, state = step(
                query[:, :, t], key[:, :, t], value[:, :, t], state, decay=d, impl=impl, **options
            )
            outputs.append(out)
        return torch.stack(outputs, 2), state

    compare_with_whole(case, impl, run)


@pytest.mark.parametrize("name", RECURRENT)
def test_pieces_equal_the_whole(impl, name):
    for lengths in ((1, 20), (0, 7, 0, 14), (64, 65, 1)):
        case = make_case(**({"L": sum(lengths), "initial": True} | CAUSAL | RECURRENT[name]))

        def run(query, key, value, decay, state, lengths=lengths, options=case.options):
            outputs = []
            per_token = decay is not None and decay.dim() == 3
            decays = decay.split(lengths, 2) if per_token else [decay] * len(lengths)
            pieces = zip(*(t.split(lengths, 2) for t in (query, key, value)), decays, strict=True)
            for q, k, v, d in pieces:
                out, state = attend(
                    q, k, v, decay=d, initial_state=state, return_state=True, impl=impl, **options
                )
                outputs.append(out)
            return torch.cat(outputs, 2), state

        compare_with_whole(case, impl, run)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize(
    "H, Hkv, D, Dv", ((2, 2, 8, 8), (6, 2, 7, 19), (1, 1, 1, 1), (8, 8, 64, 64), (4, 1, 33, 128))
)
def test_loop_of_steps_in_every_dtype(impl, dtype, H, Hkv, D, Dv):
    """The short way of steps that need no gradient, against one call."""
    case = make_case(3, H, Hkv, 5, D=D, Dv=Dv, dtype=dtype, initial=True, decay="token", **CAUSAL)
    expected = call(case, impl, only=())
    state = LinearAttentionState(case.initial_kv, case.initial_z)
    for t in range(5):
        q, k, v, d = (x[:, :, t] for x in (case.query, case.key, case.value, case.decay))
        out, state = step(q, k, v, state, decay=d, impl=impl)
        assert out.dtype == dtype and out.shape == (3, H, Dv) and type(state) is LinearAttentionState
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(out, expected["out"][:, :, t], rtol=8 * eps, atol=8 * eps)
    # One call may round features to bfloat16 before it multiplies them.
    for have, want in zip(state, (expected["kv"], expected["z"]), strict=True):
        tolerance = {"rtol": 0, "atol": 2**-7 * want.abs().max().item()} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(have, want, **tolerance)


def test_packed_sequences_equal_single_ones(impl):
    for options in (CAUSAL, {}, {"decay": "token", "Hkv": 1, **CAUSAL}):
        lengths = [5, 0, 70, 1]
        case = make_case(lengths=lengths, initial=True, **options)
        expected = call(case, impl, only=())
        start = 0
        for n, length in enumerate(lengths):
            rows = slice(start, start + length)
            state = LinearAttentionState(case.initial_kv[n : n + 1], case.initial_z[n : n + 1])
            decay = None if case.decay is None else case.decay[:, :, rows]
            out, state = attend(
                case.query[:, :, rows], case.key[:, :, rows], case.value[:, :, rows], decay=decay,
                initial_state=state, return_state=True, impl=impl, **case.options,
            )  # fmt: skip
            torch.testing.assert_close(out, expected["out"][:, :, rows])
            torch.testing.assert_close(state.kv[0], expected["kv"][n])
            torch.testing.assert_close(state.z[0], expected["z"][n])
            start += length


def test_padding_equals_shorter_sequences(impl):
    """Left and right padding: outputs, states and gradients are those of the tokens alone."""
    for side in ("left", "right"):
        case = make_case(2, 2, L=75, decay="token", initial=True, **CAUSAL)
        case.key_padding_mask = torch.ones(2, 75, dtype=torch.bool)
        rows = slice(6, 75) if side == "left" else slice(0, 69)
        case.key_padding_mask[:, : 6 if side == "left" else None] = False
        case.key_padding_mask[:, rows] = True
        case.grad_out[:, :, ~case.key_padding_mask[0]] = 0
        padded = call(case, impl)
        short = copy.copy(case)
        short.key_padding_mask = None
        for name in ("query", "key", "value", "decay", "grad_out"):
            setattr(short, name, getattr(case, name)[:, :, rows])
        for name, result in call(short, impl).items():
            whole = padded[name]
            if name in ("out", "grad_query", "grad_key", "grad_value", "grad_decay"):
                whole = whole[:, :, rows]
            torch.testing.assert_close(result, whole, msg=lambda m, n=name: f"{n}: {m}")


def test_a_step_leaves_its_state_alone(impl):
    """Unless asked: forks of a state go separate ways."""
    q, k, v = normal(2, 4, 8), normal(2, 2, 8), normal(2, 2, 6)
    for dtype in (torch.float64, torch.float32):
        q, k, v = (t.to(dtype) for t in (q, k, v))
        state = LinearAttentionState.zeros(2, 4, 8, 6, dtype=dtype)
        _, state = step(q, k, v, state, impl=impl)
        before = state.clone()
        first, one = step(q, k, v, state, impl=impl)
        second, two = step(q, k, 2 * v, state, impl=impl)
        again, three = step(q, k, v, state, impl=impl)
        assert torch.equal(first, again) and torch.equal(one.kv, three.kv) and not torch.equal(one.kv, two.kv)
        assert torch.equal(state.kv, before.kv) and torch.equal(state.z, before.z)


def test_steps_in_place(impl):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                state = LinearAttentionState.zeros(2, 4, 8, 6, dtype=dtype)
                other, memory = state.clone(), state
                for _ in range(3):
                    q, k, v = (normal(*s).to(dtype) for s in ((2, 4, 8), (2, 2, 8), (2, 2, 6)))
                    decay = -torch.rand(4)
                    out, state = step(q, k, v, state, decay=decay, inplace=True, impl=impl)
                    expected, other = step(q, k, v, other, decay=decay, impl=impl)
                    assert torch.equal(out, expected)
                    assert state.kv is memory.kv and state.z is memory.z
                    assert torch.equal(state.kv, other.kv) and torch.equal(state.z, other.z)


def test_steps_in_place_on_parts_of_larger_states(impl):
    """The state's memory may be a view: slots of a server, or any strides."""
    q, k, v = normal(2, 4, 8), normal(2, 2, 8), normal(2, 2, 6)
    expected, after = step(q, k, v, LinearAttentionState.zeros(2, 4, 8, 6, dtype=torch.float64), impl=impl)
    for make, view in (
        (lambda *s: torch.zeros(5, *s[1:]), lambda t: t[1:3]),
        (lambda *s: torch.zeros(*s[:2], 2, *s[2:]), lambda t: t[:, :, 1]),
        (lambda *s: torch.zeros(*s[:2], *s[:1:-1]), lambda t: t.mT if t.dim() == 4 else t),
    ):
        pool = [make(*t.shape).double() for t in after]
        state = LinearAttentionState(*map(view, pool))
        out, state = step(q, k, v, state, inplace=True, impl=impl)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(tuple(map(view, pool)), tuple(after))
        assert sum(t.count_nonzero() for t in pool) == sum(t.count_nonzero() for t in after)
    state = LinearAttentionState(torch.zeros(1, 4, 8, 6).double().expand(2, 4, 8, 6), after.z)
    with pytest.raises(RuntimeError, match="memory"):
        step(q, k, v, state, inplace=True, impl=impl)


def test_steps_in_place_are_refused_with_gradients(impl):
    tensors = [
        normal(2, 4, 8),
        normal(2, 2, 8),
        normal(2, 2, 6),
        normal(2, 4, 8, 6),
        normal(2, 4, 8),
        normal(4),
    ]
    for n in range(6):
        q, k, v, kv, z, decay = [t.clone().requires_grad_(i == n) for i, t in enumerate(tensors)]
        state = LinearAttentionState(kv, z)
        with pytest.raises(RuntimeError, match="inplace=True"):
            step(q, k, v, state, decay=decay, inplace=True, impl=impl)
        assert torch.equal(kv, tensors[3])
        with torch.no_grad():
            step(q, k, v, state, decay=decay, inplace=True, impl=impl)
        assert not torch.equal(kv, tensors[3])


def test_overwriting_a_state_that_a_gradient_needs_is_noticed():
    """As after every change in place: the backward of an earlier use raises, it does not use new numbers."""
    require("cpu")
    q, k, v = normal(1, 1, 4).requires_grad_(), normal(1, 1, 4), normal(1, 1, 4)
    overwrite = torch.ops.fastattn.linear_attention_step_
    for run in (
        lambda state: step(q, k, v, state, inplace=True),
        lambda state: step(q, k, v, state, inplace=True, feature_map=torch.exp),
        lambda state: overwrite(q, k, v, *state, None, "elu", True, 1e-6, 1.0),
    ):
        state = LinearAttentionState(normal(1, 1, 4, 4), normal(1, 1, 4))
        for _ in range(2):
            out, _ = step(q, k, v, state)
            with torch.no_grad():
                run(state)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()


def test_state_object():
    state = LinearAttentionState.zeros(3, 4, 8, 6)
    assert state.kv.shape == (3, 4, 8, 6) and state.z.shape == (3, 4, 8)
    assert state.kv.dtype == state.z.dtype == torch.float32
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64,) * 2,
    ):
        other = LinearAttentionState.zeros(3, 4, 8, 6, dtype=dtype)
        assert other.kv.dtype == other.z.dtype == wide == state.to(dtype).kv.dtype == state.to(dtype).z.dtype
    meta = LinearAttentionState.zeros(3, 4, 8, 6, device="meta")
    assert meta.kv.is_meta and state.to("meta").z.is_meta and state.to(device="meta").kv.is_meta
    assert state.to("cpu").kv is state.kv
    for dtype in (torch.int64, torch.complex64):
        for make in (lambda d: LinearAttentionState.zeros(3, 4, 8, 6, dtype=d), state.to):
            with pytest.raises(TypeError, match=f"dtype must be float32, .* got {dtype}"):
                make(dtype)

    state = LinearAttentionState(normal(3, 4, 8, 6).requires_grad_(), normal(3, 4, 8).requires_grad_())
    chosen = state.index_select(torch.tensor([2, 2, 0, 1]))
    assert torch.equal(chosen.kv, state.kv[[2, 2, 0, 1]]) and torch.equal(chosen.z, state.z[[2, 2, 0, 1]])
    all_of_them = state.detach().index_select(torch.arange(3))
    all_of_them.kv.zero_()
    assert state.kv.count_nonzero() == state.kv.numel(), "index_select copies"
    assert state.detach().kv.data_ptr() == state.kv.data_ptr() and not state.detach().z.requires_grad
    assert state.clone().kv.data_ptr() != state.kv.data_ptr() and state.clone().kv.requires_grad
    sum(t.sum() for t in chosen).backward()
    assert state.kv.grad[2].eq(2).all() and state.z.grad[1].eq(1).all()


def test_state_is_copied_pickled_and_mapped():
    state = LinearAttentionState(normal(2, 1, 3, 4), normal(2, 1, 3))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for twin in (copy.deepcopy(state), pickle.loads(pickle.dumps(state)), loaded, state.clone()):
        assert type(twin) is LinearAttentionState and twin.kv.data_ptr() != state.kv.data_ptr()
        assert torch.equal(twin.kv, state.kv) and torch.equal(twin.z, state.z)
    layers = [state, state.clone()]
    doubled = torch.utils._pytree.tree_map(lambda t: 2 * t, layers)
    assert type(doubled[1]) is LinearAttentionState and torch.equal(doubled[1].z, 2 * state.z)


def test_beams_are_reordered(impl):
    """Copies of a sequence that follow one of their number: index_select in the middle of generation."""
    q, k, v = normal(3, 2, 6, 4), normal(3, 2, 6, 4), normal(3, 2, 6, 4)
    order = torch.tensor([2, 2, 0])
    state = LinearAttentionState.zeros(3, 2, 4, 4, dtype=torch.float64)
    for t in range(6):
        if t == 3:
            state = state.index_select(order)
        out, state = step(q[:, :, t], k[:, :, t], v[:, :, t], state, impl=impl)
    mixed = [torch.cat([x[order, :, :3], x[:, :, 3:]], 2) for x in (q, k, v)]
    torch.testing.assert_close(out, attend(*mixed, is_causal=True, impl=impl)[:, :, -1])


# What sees nothing, and what nothing sees


HIDING = {
    "plain": {"S": 40},
    "causal": CAUSAL,
    "initial state": {"initial": True, **CAUSAL},
    "decay": {"decay": "token", "feature_map": "exp", **CAUSAL},
    "decay per head, grouped": {"decay": "head", "Hkv": 1, "normalize": False, **CAUSAL},
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=str)
@pytest.mark.parametrize("name", HIDING)
def test_isolation_of_padding(impl, name, dtype):
    """NaN and inf in keys, values and decays of padded tokens change no bit of any result."""
    for keys in ((0, 1, 2), (3, 17, 38, 39), range(40), range(8, 40)):
        keys = list(keys)
        case = make_case(**({"L": 40, "dtype": dtype} | HIDING[name]))
        case.key_padding_mask = torch.ones(2, 40, dtype=torch.bool)
        case.key_padding_mask[:, keys] = False
        expected = call(case, impl)
        check(expected, case)
        for gradient in ("grad_key", "grad_value"):
            assert (expected[gradient][:, :, keys] == 0).all()
        if case.decay is not None and case.decay.dim() == 3:
            assert (expected["grad_decay"][:, :, keys] == 0).all()
        for poison in (math.nan, math.inf, -math.inf):
            case.key[:, :, keys] = poison
            case.value[:, :, keys] = poison
            if case.decay is not None and case.decay.dim() == 3:
                case.decay[:, :, keys] = poison
            assert_same(call(case, impl), expected)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=str)
@pytest.mark.parametrize("normalize", (True, False))
def test_isolation_of_rows_that_see_nothing(impl, normalize, dtype):
    """A query before the first key, or of a batch without keys, may be NaN, as may its incoming gradient."""
    for options in (CAUSAL, {}):
        case = make_case(3, 2, L=70, dtype=dtype, normalize=normalize, **options)
        case.key_padding_mask = torch.arange(70) >= torch.tensor([[0], [66], [70]])
        blind = [(1, slice(0, 66)), (2, slice(0, 70))] if options else [(2, slice(0, 70))]
        expected = call(case, impl)
        check(expected, case)
        for b, rows in blind:
            assert (expected["out"][b, :, rows] == 0).all() and (
                expected["grad_query"][b, :, rows] == 0
            ).all()
            case.query[b, :, rows] = math.nan
            case.grad_out[b, :, rows] = math.nan
        assert_same(call(case, impl), expected)


def test_rows_without_keys_see_the_initial_state(impl):
    case = make_case(L=5, S=20, initial=True)
    case.key_padding_mask = torch.zeros(2, 20, dtype=torch.bool)
    results = call(case, impl)
    check(results, case)
    assert (results["out"] != 0).all()
    case.query[0, 0, 1] = math.nan
    assert call(case, impl)["out"][0, 0, 1].isnan().all(), "a visible NaN is not hidden"


def test_visible_nan_is_never_hidden(impl):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for options, later in ((CAUSAL, slice(4, 9)), ({}, slice(0, 9))):
            for name in ("key", "value"):
                case = make_case(1, 2, L=9, dtype=dtype, **options)
                getattr(case, name)[0, 1, 4] = math.nan
                out = call(case, impl)["out"]
                assert out[0, 1, later].isnan().all() and not out[0, 0].isnan().any(), name
            case = make_case(1, 2, L=9, dtype=dtype, **options)
            case.query[0, 1, 4] = math.nan
            out = call(case, impl)["out"]
            assert out[0, 1, 4].isnan().all() and not out[0, 1, [3, 5]].isnan().any()
        case = make_case(1, 2, L=9, dtype=dtype, initial=True, **CAUSAL)
        case.initial_z[0, 1, 3] = math.nan
        assert call(case, impl)["out"][0, 1].isnan().all()


def test_infinite_sums_are_never_hidden(impl):
    """Features whose sums overflow: infinity by infinity is not the 0 of a row that sees nothing."""
    for dtype, large in ((torch.float32, 60.0), (torch.bfloat16, 60.0), (torch.float64, 500.0)):
        q, k, v = (torch.full((1, 1, 3, 2), x, dtype=dtype, requires_grad=True) for x in (large, large, 1.0))
        for is_causal in (False, True):
            out = fastattn.linear_attention(q, k, v, feature_map="exp", is_causal=is_causal, impl=impl)
            assert out.isnan().all()
            assert torch.autograd.grad(out.sum(), q)[0].isnan().all()
            # What is finite divided by infinity is 0.
            assert (fastattn.linear_attention(q, k, v * 0, feature_map="exp", impl=impl) == 0).all()
        with torch.no_grad():
            state = LinearAttentionState.zeros(1, 1, 2, 2, dtype=dtype)
            token = (t[:, :, 0] for t in (q, k, v))
            out, _ = fastattn.linear_attention_step(*token, state, feature_map="exp", impl=impl)
            assert out.isnan().all()


def test_isolation_of_earlier_rows_from_later_tokens(impl):
    """A NaN in a key reaches no row before its chunk of tokens, in results and gradients; states neither."""
    for dtype in (torch.float32, torch.bfloat16):
        for options in ({}, {"decay": "token"}):
            case = make_case(1, 2, L=400, dtype=dtype, **options, **CAUSAL)
            expected = call(case, impl, only=())["out"]
            case.key[:, :, 300:] = math.nan
            case.value[:, :, 350:] = math.nan
            out = call(case, impl, only=())["out"]
            assert torch.equal(out[:, :, :128], expected[:, :, :128])
            assert out[:, :, 300:].isnan().all()


def test_reset_forgets_even_nan(impl):
    """Across chunks: after a decay of -inf nothing before matters, whatever it was."""
    for strong in (-math.inf, torch.finfo(torch.float32).min):
        case = make_case(1, 2, L=300, dtype=torch.float32, decay="token", initial=True, **CAUSAL)
        case.decay[:, :, 0] = strong
        case.decay[:, :, 160] = strong
        expected = call(case, impl, only=())
        check(expected, case)
        case.initial_kv.fill_(math.nan)
        case.initial_z.fill_(math.inf)
        assert_same(call(case, impl, only=()), expected)
        case.value[:, :, :20] = math.nan
        changed = call(case, impl, only=())
        assert torch.equal(changed["out"][:, :, 256:], expected["out"][:, :, 256:])
        assert torch.equal(changed["kv"], expected["kv"]) and torch.equal(changed["z"], expected["z"])
        state = LinearAttentionState(
            *(torch.full_like(t, math.nan) for t in (case.initial_kv, case.initial_z))
        )
        q, k, v = (t[:, :, 0] for t in (case.query, case.key, case.value.nan_to_num()))
        out, state = step(q, k, v, state, decay=torch.full((2,), strong), impl=impl)
        assert out.isfinite().all() and state.kv.isfinite().all()


def test_zero_denominators(impl):
    """Rectified features of a query and all keys need not meet: 0 and no gradient, whatever eps is."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for eps in (0.0, 1e-6):
            for options in (CAUSAL, {}):
                case = make_case(2, 2, L=70, D=4, dtype=dtype, feature_map="relu", eps=eps, **options)
                case.query, case.key = case.query.abs() + 0.1, case.key.abs() + 0.1
                case.query[0, 0, ::7, 2:] = -1.0
                case.key[0, 0, :, :2] = -1.0
                results = call(case, impl)
                check(results, case)
                assert (results["out"][0, 0, ::7] == 0).all()
                assert (results["grad_query"][0, 0, ::7] == 0).all()
                assert all(t.isfinite().all() for t in results.values())
                case.grad_out[0, 0, ::7] = math.nan
                again = call(case, impl)
                if dtype == torch.float64:
                    assert_same(again, results, exact=False)


def test_denominators_too_small_to_divide_by(impl):
    """No quotient is infinite because its denominator is next to nothing, or cancels eps exactly."""
    ones = torch.ones(1, 1, 2, 1)
    for denominator, eps in ((1e-42, 0.0), (-0.5, 0.5), (0.0, 0.5)):
        key = torch.tensor([denominator / 2, denominator / 2]).view(1, 1, 2, 1).requires_grad_()
        value = ones.clone().requires_grad_()
        out = attend(ones, key, value, feature_map="identity", eps=eps, impl=impl)
        assert (out == 0).all()
        gradients = torch.autograd.grad(out.sum(), (key, value))
        assert all((g == 0).all() for g in gradients)


def test_negative_features_give_the_quotient(impl):
    """Denominators of either sign, as documented; plain sums with normalize=False."""
    q, k, v = normal(1, 2, 20, 5), normal(1, 2, 20, 5), normal(1, 2, 20, 3)
    weights = (q @ k.mT).tril()
    expected = weights @ v / (weights.sum(-1, keepdim=True) + 1e-6)
    options = {"feature_map": "identity", "is_causal": True, "impl": impl}
    torch.testing.assert_close(attend(q, k, v, **options), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(attend(q, k, v, normalize=False, **options), weights @ v)


def test_properties(impl):
    case = make_case(2, 4, 2, 33, 50, 16, dtype=torch.float64)

    def run(**changed):
        arguments = {"query": case.query, "key": case.key, "value": case.value, "eps": 0.0, "impl": impl}
        return attend(**(arguments | changed))

    out = run()
    ones = run(value=torch.ones_like(case.value))
    torch.testing.assert_close(ones, torch.ones_like(ones))
    order = torch.randperm(50)
    torch.testing.assert_close(run(key=case.key[:, :, order], value=case.value[:, :, order]), out)
    rows = torch.randperm(33)
    torch.testing.assert_close(run(query=case.query[:, :, rows]), out[:, :, rows])
    q, k, v = case.query, case.key[:, :, :33], case.value[:, :, :33]
    causal = run(key=k, value=v, is_causal=True)
    prefix = run(query=q[:, :, :20], key=k[:, :, :20], value=v[:, :, :20], is_causal=True)
    torch.testing.assert_close(causal[:, :, :20], prefix)
    torch.testing.assert_close(causal[:, :, -1:], run(query=q[:, :, -1:], key=k, value=v))
    decayed = run(key=k, value=v, is_causal=True, decay=torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(decayed, causal)
    alone = run(key=k, value=v, is_causal=True, decay=torch.full((4,), -math.inf, dtype=torch.float64))
    torch.testing.assert_close(alone, v.repeat_interleave(2, 1))
    unscaled = run(normalize=False, scale=2.0)
    torch.testing.assert_close(unscaled, 2 * run(normalize=False))
    assert torch.equal(run(scale=5.0), out)


def test_scale_never_enters_the_state(impl):
    case = make_case(1, 2, L=9, dtype=torch.float32, normalize=False, **CAUSAL)
    plain, scaled = call(case, impl, only=()), call(case, impl, only=(), scale=3.0)
    torch.testing.assert_close(scaled["out"], 3 * plain["out"])
    assert torch.equal(scaled["kv"], plain["kv"]) and torch.equal(scaled["z"], plain["z"])


# Feature maps that are functions


def test_callable_feature_maps_equal_named_ones(impl):
    for name, function in linear_attention_cases.FEATURES.items():
        for options in (CAUSAL, {"padding": "random"}, {"lengths": [4, 9], **CAUSAL}):
            case = make_case(L=13, feature_map=name, **options)
            expected = call(case, impl)
            case.options["feature_map"] = function
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
    for dtype, decay_dtypes in (
        (torch.float64, (torch.float64, torch.float32)), (torch.float32, (torch.float32,)),
        (torch.bfloat16, (torch.float32, torch.bfloat16)), (torch.float16, (torch.float32, torch.float16)),
    ):  # fmt: skip
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
    "triton": (NotImplementedError, "triton.*no triton kernel", lambda: attend(Q, K, V, impl="triton")),
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


def test_inputs_are_never_written_to(impl):
    case = make_case(2, 4, 2, 70, D=8, decay="token", padding="random", initial=True, **CAUSAL)
    names = (*INPUTS, "key_padding_mask", "grad_out", "grad_kv", "grad_z")
    before = {n: getattr(case, n).clone() for n in names}
    call(case, impl)
    for name in names:
        assert torch.equal(getattr(case, name), before[name]), name


def test_memory_grows_with_the_length_alone(impl):
    """No tensor of the size of the square of the length, forward or backward."""
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            result = op(*args, **(kwargs or {}))
            leaves = torch.utils._pytree.tree_leaves(result)
            sizes.extend(t.numel() for t in leaves if isinstance(t, torch.Tensor))
            return result

    q, k = torch.randn(1, 2, 4096, 4, requires_grad=True), torch.randn(1, 2, 4096, 4)
    with Watch():
        attend(q, k, k, is_causal=True, decay=-torch.rand(1, 2, 4096), impl=impl).sum().backward()
    assert max(sizes) < 4096 * 4096 // 16
