"""The rules of linear attention: empty, hidden, NaN and infinite; zero denominators; memory."""

import math

import linear_attention_cases
import operator_checks
import pytest
import torch
from attention_cases import choices
from linear_attention_cases import INPUTS, call, check, make_case, require
from operator_checks import assert_same, fewer

import fastattn
from fastattn import LinearAttentionState

impl, poisoned = linear_attention_cases.impl, operator_checks.poisoned

attend, step = fastattn.linear_attention, fastattn.linear_attention_step
CAUSAL = {"is_causal": True}


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


HIDING = {
    "plain": {"S": 40},
    "causal": CAUSAL,
    "initial state": {"initial": True, **CAUSAL},
    "decay": {"decay": "token", "feature_map": "exp", **CAUSAL},
    "decay per head, grouped": {"decay": "head", "Hkv": 1, "normalize": False, **CAUSAL},
}


@choices((torch.float32, torch.bfloat16, torch.float64), (torch.float32,))
@pytest.mark.parametrize("name", HIDING)
def test_isolation_of_padding(impl, name, dtype):
    """NaN and inf in keys, values and decays of padded tokens change no bit of any result."""
    L = fewer(impl, 40, 20)
    for keys in fewer(impl, ((0, 1, 2), (3, 17, 38, 39), range(40), range(8, 40)), ((0, 3, 17, 18, 19),)):
        keys = list(keys)
        case = make_case(**({"B": fewer(impl, 2, 1), "L": L, "dtype": dtype} | HIDING[name]))
        case.key_padding_mask = torch.ones(case.query.shape[0], case.key.shape[2], dtype=torch.bool)
        case.key_padding_mask[:, keys] = False
        expected = call(case, impl)
        check(expected, case)
        for gradient in ("grad_key", "grad_value"):
            assert (expected[gradient][:, :, keys] == 0).all()
        if case.decay is not None and case.decay.dim() == 3:
            assert (expected["grad_decay"][:, :, keys] == 0).all()
        for poison in fewer(impl, (math.nan, math.inf, -math.inf), (math.nan,)):
            case.key[:, :, keys] = poison
            case.value[:, :, keys] = poison
            if case.decay is not None and case.decay.dim() == 3:
                case.decay[:, :, keys] = poison
            assert_same(call(case, impl), expected)


@choices((torch.float32, torch.bfloat16, torch.float64), (torch.bfloat16,))
@pytest.mark.parametrize("normalize", (True, False))
def test_isolation_of_rows_that_see_nothing(impl, normalize, dtype):
    """A query before the first key, or of a batch without keys, may be NaN, as may its incoming gradient."""
    for options in (CAUSAL, {}):
        L = fewer(impl, 70, 20)
        case = make_case(3, fewer(impl, 2, 1), L=L, dtype=dtype, normalize=normalize, **options)
        case.key_padding_mask = torch.arange(L) >= torch.tensor([[0], [L - 4], [L]])
        blind = [(1, slice(0, L - 4)), (2, slice(0, L))] if options else [(2, slice(0, L))]
        expected = call(case, impl)
        check(expected, case)
        for b, rows in blind:
            assert (expected["out"][b, :, rows] == 0).all() and (
                expected["grad_query"][b, :, rows] == 0
            ).all()
            case.query[b, :, rows] = math.nan
            case.grad_out[b, :, rows] = math.nan
        assert_same(call(case, impl), expected)


def test_isolation_among_few_tokens(impl):
    """Padded tokens, a query before the first key, and a state before a reset, where Triton goes token by
    token."""
    for options in ({}, {"decay": "token"}, {"decay": "token", "initial": True}):
        case = make_case(2, 2, L=9, dtype=torch.float32, feature_map="exp", **options, **CAUSAL)
        case.key_padding_mask = torch.ones(2, 9, dtype=torch.bool)
        case.key_padding_mask[:, [0, 1, 5]] = False
        case.key_padding_mask[1, 6:] = False
        if "initial" in options:
            case.decay[:, :, 2] = -math.inf
        expected = call(case, impl, only=())
        check(expected, case)
        hidden = ~case.key_padding_mask[:, None].expand(2, 2, 9)
        case.key[hidden] = case.value[hidden] = math.nan
        if "decay" in options:
            case.decay[hidden] = math.nan
        if "initial" in options:
            case.initial_kv.fill_(math.nan)
            case.initial_z.fill_(math.inf)
        else:
            case.query[:, :, :2] = math.nan
        changed = call(case, impl, only=())
        if "initial" in options:
            assert changed["out"][:, :, :2].isnan().all(), "a visible NaN is not hidden"
            changed["out"][:, :, :2] = expected["out"][:, :, :2]
        assert_same(changed, expected)


def test_rows_without_keys_see_the_initial_state(impl):
    case = make_case(L=5, S=20, initial=True)
    case.key_padding_mask = torch.zeros(2, 20, dtype=torch.bool)
    results = call(case, impl)
    check(results, case)
    assert (results["out"] != 0).all()
    case.query[0, 0, 1] = math.nan
    assert call(case, impl)["out"][0, 0, 1].isnan().all(), "a visible NaN is not hidden"


def test_visible_nan_is_never_hidden(impl):
    for dtype in fewer(impl, (torch.float32, torch.bfloat16, torch.float64), (torch.float32,)):
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


def test_infinite_values_stay_infinite(impl):
    """Positive weights times infinity: in every row that sees it, near it or chunks behind, and never NaN."""
    L = fewer(impl, 200, 40)
    for dtype in fewer(impl, (torch.float32, torch.bfloat16, torch.float64), (torch.bfloat16,)):
        for options, later in (
            (CAUSAL, slice(5, L)),
            ({"D": 5, "Dv": 3, **CAUSAL}, slice(5, L)),  # padded to whole vectors inside
            ({"D": 5}, slice(0, L)),
            ({"decay": "token", **CAUSAL}, slice(5, 9)),
            ({"L": 9, "D": 5, "Dv": 3, **CAUSAL}, slice(5, 9)),
        ):
            case = make_case(**{"B": 1, "H": 2, "L": L, "dtype": dtype} | options)
            expected = call(case, impl, only=())
            for value in (math.inf, -math.inf):
                case.value[0, 1, 5, 2] = value
                changed = call(case, impl, only=())
                assert (changed["out"][0, 1, later, 2] == value).all()
                # A token before, in the same chunk, may meet it with a weight of 0.
                changed["out"][0, 1, :5, 2] = expected["out"][0, 1, :5, 2]
                changed["out"][0, 1, 5:, 2] = expected["out"][0, 1, 5:, 2]
                assert torch.equal(changed["out"], expected["out"])
                if "decay" not in options:
                    assert (changed["kv"][0, 1, :, 2] == value).all()
                token = (getattr(case, name)[:, :, 5] for name in ("query", "key", "value"))
                start = LinearAttentionState.zeros(1, 2, *expected["kv"].shape[2:], dtype=dtype)
                out, _ = step(*token, start, impl=impl)
                assert (out[0, 1, 2] == value).all() and not out.isnan().any()


def test_infinite_gradients_stay_infinite(impl):
    """Those of the values are positive weights times infinity, chunks behind, and of one channel only."""
    L = fewer(impl, 200, 50)
    for dtype in (torch.float32, torch.bfloat16):
        case = make_case(1, 2, L=L, D=5, Dv=3, dtype=dtype, **CAUSAL)
        expected = call(case, impl, only=("value",))["grad_value"]
        case.grad_out[0, 1, L - 10, 2] = math.inf
        grad = call(case, impl, only=("value",))["grad_value"]
        assert (grad[0, 1, : L - 9, 2] == math.inf).all()
        grad[0, 1, :, 2] = expected[0, 1, :, 2]
        assert torch.equal(grad, expected)


def test_isolation_of_earlier_rows_from_later_tokens(impl):
    """A NaN in a key reaches no row before its chunk of tokens, in results and gradients; states neither."""
    L, before = fewer(impl, (400, 128), (60, 32))
    for dtype in fewer(impl, (torch.float32, torch.bfloat16), (torch.float32,)):
        for options in ({}, {"decay": "token"}):
            case = make_case(1, 2, L=L, dtype=dtype, **options, **CAUSAL)
            expected = call(case, impl, only=())["out"]
            case.key[:, :, 3 * L // 4 :] = math.nan
            case.value[:, :, 7 * L // 8 :] = math.nan
            out = call(case, impl, only=())["out"]
            assert torch.equal(out[:, :, :before], expected[:, :, :before])
            assert out[:, :, 3 * L // 4 :].isnan().all()


def test_reset_forgets_even_nan(impl):
    """Across chunks: after a decay of -inf nothing before matters, whatever it was."""
    L, reset, behind = fewer(impl, (300, 160, 256), (60, 20, 48))
    for strong in fewer(impl, (-math.inf, torch.finfo(torch.float32).min), (-math.inf,)):
        case = make_case(1, 2, L=L, dtype=torch.float32, decay="token", initial=True, **CAUSAL)
        case.decay[:, :, 0] = strong
        case.decay[:, :, reset] = strong
        expected = call(case, impl, only=())
        check(expected, case)
        case.initial_kv.fill_(math.nan)
        case.initial_z.fill_(math.inf)
        assert_same(call(case, impl, only=()), expected)
        case.value[:, :, :15] = math.nan
        changed = call(case, impl, only=())
        assert torch.equal(changed["out"][:, :, behind:], expected["out"][:, :, behind:])
        assert torch.equal(changed["kv"], expected["kv"]) and torch.equal(changed["z"], expected["z"])
        state = LinearAttentionState(
            *(torch.full_like(t, math.nan) for t in (case.initial_kv, case.initial_z))
        )
        q, k, v = (t[:, :, 0] for t in (case.query, case.key, case.value.nan_to_num()))
        out, state = step(q, k, v, state, decay=torch.full((2,), strong), impl=impl)
        assert out.isfinite().all() and state.kv.isfinite().all()


def test_zero_denominators(impl):
    """Rectified features of a query and all keys need not meet: 0 and no gradient, whatever eps is."""
    for dtype in fewer(impl, (torch.float32, torch.bfloat16, torch.float64), (torch.float64,)):
        for eps in fewer(impl, (0.0, 1e-6), (0.0,)):
            for options in (CAUSAL, {}):
                L = fewer(impl, 70, 20)
                case = make_case(1, 2, L=L, D=4, dtype=dtype, feature_map="relu", eps=eps, **options)
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
    case = make_case(*fewer(impl, (2, 4, 2), (1, 4, 2)), 33, 50, 16, dtype=torch.float64)

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


def test_inputs_are_never_written_to(impl):
    sizes = fewer(impl, (2, 4, 2, 70), (1, 2, 1, 20))
    case = make_case(*sizes, D=8, decay="token", padding="random", initial=True, **CAUSAL)
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

    H, L = fewer(impl, (2, 4096), (1, 160))
    q, k = torch.randn(1, H, L, 4, requires_grad=True), torch.randn(1, H, L, 4)
    with Watch():
        attend(q, k, k, is_causal=True, decay=-torch.rand(1, H, L), impl=impl).sum().backward()
    assert max(sizes) < L * L // 16


def test_many_short_sequences_need_no_state_each(run_python):
    """Beside a long one that is cut for the threads: a state each would take 320 MiB here."""
    require("cpu")
    program = """
import resource, torch, fastattn
torch.set_num_threads(2)
bounds = torch.cat([torch.arange(20001), torch.tensor([40000])])
q, k, v = (torch.randn(40000, 1, 64).requires_grad_() for _ in range(3))
def run(n):
    x = [t[:n] for t in (q, k, v)]
    cut = bounds.clamp(max=n)
    for causal in (True, False):
        out = fastattn.linear_attention(*x, cu_seqlens=cut, is_causal=causal, impl="cpu")
        torch.autograd.grad(out.sum(), x)
run(20000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(40000)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    assert int(run_python("-c", program).stdout) < 150
