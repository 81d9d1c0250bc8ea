"""The state of linear attention: pieces, steps, and what can be done with it."""

import copy
import io
import pickle

import linear_attention_cases
import operator_checks
import pytest
import torch
import torch.nn.functional as F
from attention_cases import choices
from linear_attention_cases import INPUTS, call, make_case, require
from operator_checks import fewer

import fastattn
from fastattn import LinearAttentionState

dispatched, impl = linear_attention_cases.dispatched, linear_attention_cases.impl
poisoned = operator_checks.poisoned

attend, step = fastattn.linear_attention, fastattn.linear_attention_step
CAUSAL = {"is_causal": True}


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


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
    case = make_case(**({"L": fewer(impl, 21, 3), "initial": True} | CAUSAL | RECURRENT[name]))
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
    for lengths in fewer(impl, ((1, 20), (0, 7, 0, 14), (64, 65, 1)), ((0, 7, 18),)):
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


@choices((torch.float32, torch.bfloat16, torch.float16), (torch.float16,))
@pytest.mark.parametrize(
    "H, Hkv, D, Dv, decay", (
        (2, 2, 8, 8, "token"), (6, 2, 7, 19, "token"), (1, 1, 1, 1, "token"), (8, 8, 64, 64, "token"),
        (4, 1, 33, 128, "token"), (2, 2, 8, 8, None), (8, 8, 64, 64, None), (2, 1, 5, 80, None),
        (2, 1, 5, 79, None),
    ),
)  # fmt: skip
def test_loop_of_steps_in_every_dtype(impl, dtype, H, Hkv, D, Dv, decay):
    """The short way of steps that need no gradient, against one call."""
    L = fewer(impl, 5, 1)
    case = make_case(
        fewer(impl, 3, 1), H, Hkv, L, D=D, Dv=Dv, dtype=dtype, initial=True, decay=decay, **CAUSAL
    )
    expected = call(case, impl, only=())
    state = LinearAttentionState(case.initial_kv, case.initial_z)
    for t in range(L):
        q, k, v = (x[:, :, t] for x in (case.query, case.key, case.value))
        out, state = step(q, k, v, state, decay=None if decay is None else case.decay[:, :, t], impl=impl)
        assert (
            out.dtype == dtype
            and out.shape == (case.query.shape[0], H, Dv)
            and type(state) is LinearAttentionState
        )
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(out, expected["out"][:, :, t], rtol=8 * eps, atol=8 * eps)
    # One call may round features to bfloat16 before it multiplies them, or those of float16 inputs to TF32.
    rounding = {torch.bfloat16: 2**-7} | ({torch.float16: 2**-10} if impl == "triton" else {})
    for have, want in zip(state, (expected["kv"], expected["z"]), strict=True):
        tolerance = (
            {"rtol": 0, "atol": rounding[dtype] * want.abs().max().item()} if dtype in rounding else {}
        )
        torch.testing.assert_close(have, want, **tolerance)


@pytest.mark.parametrize("decay", (None, -0.5, float("-inf")))
def test_step_reads_states_of_any_strides(dispatched, decay):
    """Whole vectors, single columns, rows from the end of a larger tensor; a reset erases even NaN."""
    q, k, v = (normal(2, 3, 64, dtype=torch.float32) for _ in range(3))
    kv, z = normal(2, 3, 64, 64, dtype=torch.float32), normal(2, 3, 64, dtype=torch.float32).abs()
    if decay == float("-inf"):
        kv[0, 1, 2, 3] = z[1, 2, 0] = float("nan")
    decays = None if decay is None else torch.full((3,), decay)
    want, after = step(q, k, v, LinearAttentionState(kv, z), decay=decays, impl="reference")
    assert want.isfinite().all()
    turned = kv.mT.contiguous().mT
    apart = torch.zeros(2, 3, 64, 80)[..., 16:].copy_(kv)
    for state in (kv, turned, apart):
        out, new = step(q, k, v, LinearAttentionState(state, z), decay=decays, impl=dispatched)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(new.kv, after.kv)
        torch.testing.assert_close(new.z, after.z)


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
    L = fewer(impl, 75, 20)
    for side in ("left", "right"):
        case = make_case(2, 2, L=L, decay="token", initial=True, **CAUSAL)
        case.key_padding_mask = torch.ones(2, L, dtype=torch.bool)
        rows = slice(6, L) if side == "left" else slice(0, L - 6)
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


@pytest.mark.parametrize("inplace", [False, True])
def test_steps_that_the_short_way_does_not_take(inplace):
    """Later steps of a process skip what the first one looked at; what does not fit has to be seen anyway."""
    q, k, v = (torch.randn(2, 3, 4) for _ in range(3))
    state = LinearAttentionState.zeros(2, 3, 4, 4)
    step(q, k, v, state)
    nothing = torch.randn(2, 0, 4)
    out, after = step(nothing, nothing, nothing, LinearAttentionState.zeros(2, 0, 4, 4), inplace=inplace)
    assert out.shape == (2, 0, 4)
    assert after.kv.shape == (2, 0, 4, 4)
    for wrong, name in [((q[:, :2], k, v), "query"), ((q, k[..., :3], v), "key"), ((q, k, v[:1]), "value")]:
        with pytest.raises(RuntimeError, match=name):
            step(*wrong, state, inplace=inplace)
    with pytest.raises(RuntimeError, match="state"):
        step(q, k, v, LinearAttentionState.zeros(2, 3, 4, 5), inplace=inplace)
    with pytest.raises(ValueError, match="eps"):
        step(q, k, v, state, eps=-1.0, inplace=inplace)
    with pytest.raises(ValueError, match="feature_map"):
        step(q, k, v, state, feature_map="tanh", inplace=inplace)
    given = {"query": q, "key": k, "value": v, "kv": state.kv, "z": state.z, "decay": torch.zeros(2, 3)}
    for name, tensor in given.items():
        nested = torch.nested.nested_tensor([*tensor])
        for other in (tensor.to_sparse(), tensor.flatten(0, -2).to_sparse_csr(), nested, tensor.to("meta")):
            query, key, value, kv, z, decay = (given | {name: other}).values()
            with pytest.raises(RuntimeError, match=f"{name}.*(dense|meta)"):
                step(query, key, value, LinearAttentionState(kv, z), decay=decay, inplace=inplace)
    assert all(not t.any() for t in state), "refused calls write nothing"


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
    for dtype, D, Dv in ((torch.float64, 8, 6), (torch.float32, 64, 40), (torch.bfloat16, 8, 6)):
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                state = LinearAttentionState.zeros(2, 4, D, Dv, dtype=dtype)
                other, memory = state.clone(), state
                for _ in range(3):
                    q, k, v = (normal(*s).to(dtype) for s in ((2, 4, D), (2, 2, D), (2, 2, Dv)))
                    decay = -torch.rand(4)
                    out, state = step(q, k, v, state, decay=decay, inplace=True, impl=impl)
                    expected, other = step(q, k, v, other, decay=decay, impl=impl)
                    assert torch.equal(out, expected)
                    assert state.kv is memory.kv and state.z is memory.z
                    assert torch.equal(state.kv, other.kv) and torch.equal(state.z, other.z)


def test_steps_in_place_take_each_head_once_on_any_number_of_threads(impl):
    heads = fewer(impl, 125, 3)  # enough for three threads
    q, k, v = (normal(1, heads, 64, dtype=torch.float32) for _ in range(3))
    threads = torch.get_num_threads()
    results = []
    try:
        for n in fewer(impl, (1, 2, 3), (threads,)):
            torch.set_num_threads(n)
            state = LinearAttentionState.zeros(1, heads, 64, 64)
            outs = [step(q, k, v, state, inplace=True, impl=impl)[0] for _ in range(3)]
            results.append((*outs, *state))
    finally:
        torch.set_num_threads(threads)
    for result in results:
        torch.testing.assert_close(result[3], 3 * torch.einsum("bhd,bhe->bhde", F.elu(k) + 1, v))
        assert all(map(torch.equal, result, results[0]))


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
