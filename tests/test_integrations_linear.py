"""The functions of fast-transformers and flash-linear-attention: their shapes, defaults and numbers."""

import inspect

import pytest
import torch

import fastattn
from fastattn.integrations import fla
from fastattn.integrations.fast_transformers import causal_dot_product


def inputs(*shape, values=None, dtype=torch.float64, requires_grad=False):
    """Positive queries and keys, as feature maps give them, and values."""
    q, k = (torch.rand(shape, dtype=dtype) for _ in range(2))
    v = torch.randn(*shape[:-1], shape[-1] if values is None else values, dtype=dtype)
    return tuple(t.requires_grad_(requires_grad) for t in (q, k, v))


# fast-transformers


def test_causal_dot_product_is_the_formula_in_values_and_gradients():
    Q, K, V = inputs(2, 3, 70, 5, values=7, requires_grad=True)
    out = causal_dot_product(Q, K, V)
    rows, state = [], 0
    for i in range(70):
        state = state + K[:, :, i, :, None] * V[:, :, i, None, :]
        rows.append((Q[:, :, i, :, None] * state).sum(-2))
    expected = torch.stack(rows, 2)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(x, (Q, K, V), grad) for x in (out, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_causal_dot_product_takes_positional_arguments_and_half_precision():
    assert list(inspect.signature(causal_dot_product).parameters) == ["Q", "K", "V"]
    Q, K, V = inputs(1, 2, 9, 4, dtype=torch.bfloat16)
    out = causal_dot_product(Q, K, V)
    exact = causal_dot_product(Q.double(), K.double(), V.double())
    assert out.dtype == torch.bfloat16 and out.shape == (1, 2, 9, 4)
    assert (out.double() - exact).norm() < 2**-7 * exact.norm()


def test_causal_dot_product_has_the_numbers_of_fast_transformers():
    theirs = pytest.importorskip("fast_transformers.causal_product").causal_dot_product
    Q, K, V = inputs(2, 3, 130, 32, values=17, dtype=torch.float32, requires_grad=True)
    results = []
    for function in (causal_dot_product, theirs):
        out = function(Q, K, V)
        assert out.shape == (2, 3, 130, 17)
        results.append((out, *torch.autograd.grad(out, (Q, K, V), torch.ones_like(out))))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_fast_transformers_normalizer_around_the_product_is_the_whole_operator():
    q, k, v = (torch.randn(2, 3, 20, 8, dtype=torch.float64) for _ in range(3))
    Q, K = torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1
    normalizer = 1 / (torch.einsum("nhli,nhli->nhl", Q, K.cumsum(2)) + 1e-6)
    out = causal_dot_product(Q, K, v) * normalizer.unsqueeze(-1)
    torch.testing.assert_close(out, fastattn.linear_attention(q, k, v, is_causal=True))


# flash-linear-attention


def naive(q, k, v, scale=None, kv=None, z=None, normalize=False, reverse=False):
    """fla's functions token by token on (B, T, H, K): o, S, and z as (B, 1, H, K)."""
    B, T, H, K = q.shape
    scale = K**-0.5 if scale is None else scale
    kv = q.new_zeros(B, H, K, v.shape[-1]) if kv is None else kv
    z = q.new_zeros(B, 1, H, K) if z is None else z
    out = [None] * T
    for t in reversed(range(T)) if reverse else range(T):
        kv = kv + k[:, t, :, :, None] * v[:, t, :, None, :]
        z = z + k[:, t : t + 1]
        out[t] = scale * (q[:, t, :, :, None] * kv).sum(-2)
        if normalize:
            out[t] = out[t] / ((scale * q[:, t] * z[:, 0]).sum(-1, keepdim=True) + 1e-10)
    return torch.stack(out, 1), kv, z


FUNCTIONS = {"chunk": fla.chunk_linear_attn, "recurrent": fla.fused_recurrent_linear_attn}


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_fla_functions_are_the_formula_in_values_gradients_and_states(name, normalize, scale):
    q, k, v = inputs(2, 9, 3, 4, values=5, requires_grad=True)
    kv, z = torch.randn(2, 3, 4, 5, dtype=q.dtype), torch.rand(2, 1, 3, 4, dtype=q.dtype)
    given = (q, k, v, kv.requires_grad_(), *([z.requires_grad_()] if normalize else []))
    state = (kv, z) if normalize else kv
    out, final = FUNCTIONS[name](q, k, v, scale, state, True, normalize=normalize)
    expected, *expected_final = naive(q, k, v, scale, kv, z if normalize else None, normalize)
    ours = (out, *final) if normalize else (out, final)
    theirs = (expected, *expected_final[: 1 + normalize])
    grads = [torch.randn_like(t) for t in ours]
    results = (torch.autograd.grad(tensors, given, grads) for tensors in (ours, theirs))
    for a, b in zip(ours + next(results), theirs + next(results), strict=True):
        torch.testing.assert_close(a, b)


def test_fla_defaults_are_those_of_the_library():
    chunk = inspect.signature(fla.chunk_linear_attn)
    recurrent = inspect.signature(fla.fused_recurrent_linear_attn)
    names = ["q", "k", "v", "scale", "initial_state", "output_final_state", "normalize", "cu_seqlens"]
    assert list(chunk.parameters) == names
    assert list(recurrent.parameters) == [*names[:6], "reverse", *names[6:]]
    q, k, v = inputs(1, 6, 2, 4)
    for function, normalize in ((fla.chunk_linear_attn, True), (fla.fused_recurrent_linear_attn, False)):
        out, state = function(q, k, v)
        assert state is None
        torch.testing.assert_close(out, naive(q, k, v, normalize=normalize)[0])


@pytest.mark.parametrize("normalize", [False, True])
def test_fla_reverse_reads_from_the_end(normalize):
    q, k, v = inputs(2, 9, 3, 4)
    options = {"normalize": normalize, "reverse": True}
    out, final = fla.fused_recurrent_linear_attn(q, k, v, output_final_state=True, **options)
    expected, *state = naive(q, k, v, **options)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(final, tuple(state) if normalize else state[0])
    # The sequence in two halves, the second one first.
    late, state = fla.fused_recurrent_linear_attn(
        *(t[:, 4:] for t in (q, k, v)), output_final_state=True, **options
    )
    early, _ = fla.fused_recurrent_linear_attn(*(t[:, :4] for t in (q, k, v)), initial_state=state, **options)
    torch.testing.assert_close(torch.cat([early, late], 1), expected)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_fla_packed_sequences_are_those_sequences_alone(normalize, reverse):
    q, k, v = inputs(1, 12, 3, 4)
    bounds = [0, 5, 5, 6, 12]
    kv, z = torch.randn(4, 3, 4, 4, dtype=q.dtype), torch.rand(4, 1, 3, 4, dtype=q.dtype)
    options = {"normalize": normalize, "reverse": reverse}
    out, final = fla.fused_recurrent_linear_attn(
        q, k, v, None, (kv, z) if normalize else kv, True, cu_seqlens=torch.tensor(bounds), **options
    )
    assert out.shape == q.shape
    for n, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        alone = [t[:, start:end] for t in (q, k, v)]
        states = kv[n : n + 1], z[n : n + 1] if normalize else None
        expected, *state = naive(*alone, None, *states, **options) if end > start else (alone[0], *states)
        torch.testing.assert_close(out[:, start:end], expected)
        for ours, theirs in zip(final if normalize else (final,), state, strict=False):
            torch.testing.assert_close(ours[n : n + 1], theirs)


def test_fla_states_are_float32_and_those_in_half_precision_are_taken():
    q, k, v = inputs(1, 6, 2, 4, dtype=torch.bfloat16)
    out, (kv, z) = fla.chunk_linear_attn(q, k, v, output_final_state=True)
    assert out.dtype == torch.bfloat16 and kv.dtype == z.dtype == torch.float32
    assert kv.shape == (1, 2, 4, 4) and z.shape == (1, 1, 2, 4)
    more, _ = fla.chunk_linear_attn(q, k, v, initial_state=(kv, z.bfloat16()))
    assert more.dtype == torch.bfloat16
    # A state without z starts the denominator at 0, as in fla.
    alone, _ = fla.chunk_linear_attn(q, k, v, initial_state=kv)
    expected, *_ = naive(q.double(), k.double(), v.double(), None, kv.double(), None, True)
    assert (alone.double() - expected).norm() < 2**-7 * expected.norm()


def test_fla_refusals():
    q, k, v = inputs(2, 6, 2, 4)
    with pytest.raises(ValueError, match="cu_seqlens needs one row of tokens"):
        fla.chunk_linear_attn(q, k, v, cu_seqlens=torch.tensor([0, 6]))
    with pytest.raises(ValueError, match=r"scale must be positive with normalize=True, got -1\.0"):
        fla.chunk_linear_attn(q, k, v, -1.0)
    kv, z = torch.zeros(2, 2, 4, 4), torch.zeros(2, 1, 2, 4)
    with pytest.raises(TypeError, match="must be a tensor"):
        fla.fused_recurrent_linear_attn(q, k, v, initial_state=(kv, z))
    with pytest.raises(ValueError, match=r"must be \(N, 1, H, K\), got \(2, 2, 4\)"):
        fla.chunk_linear_attn(q, k, v, initial_state=(kv, z[:, 0]))
    with pytest.raises(RuntimeError, match="state's kv must be"):
        fla.chunk_linear_attn(q, k, v, initial_state=(kv[:1], z[:1]))
    for function in (fla.chunk_linear_attn, fla.fused_recurrent_linear_attn):
        for options, error, message in (
            ({"q": [1.0]}, TypeError, "q must be a Tensor, got list"),
            ({"k": None}, TypeError, "k must be a Tensor, got NoneType"),
            ({"v": v[0]}, ValueError, r"v must be \(batch, tokens, heads, channels\), got \(6, 2, 4\)"),
            ({"scale": "a"}, TypeError, "scale must be a number, got 'a'"),
            ({"output_final_state": "x"}, TypeError, "output_final_state must be a bool, got 'x'"),
            ({"normalize": None}, TypeError, "normalize must be a bool, got None"),
            ({"initial_state": 3}, TypeError, "initial_state must be a tensor .* got int"),
            ({"initial_state": kv[0]}, ValueError, r"initial_state must be \(N, H, K, V\), got \(2, 4, 4\)"),
            ({"cu_seqlens": [0, 6]}, ValueError, "cu_seqlens needs one row of tokens"),
        ):
            with pytest.raises(error, match=message):
                function(**{"q": q, "k": k, "v": v} | options)
    with pytest.raises(TypeError, match="reverse must be a bool, got 'no'"):
        fla.fused_recurrent_linear_attn(q, k, v, reverse="no")
    row = [x[:1] for x in (q, k, v)]
    for reverse in (False, True):
        for wrong in ([2, 8], [1, 6], [0, 5]):  # in reverse, too, bounds are those of the given order
            with pytest.raises(RuntimeError, match="cu_seqlens must"):
                fla.fused_recurrent_linear_attn(*row, reverse=reverse, cu_seqlens=torch.tensor(wrong))
        with pytest.raises(TypeError, match="cu_seqlens must be a Tensor, got list"):
            fla.fused_recurrent_linear_attn(*row, reverse=reverse, cu_seqlens=[0, 6])
        with pytest.raises(ValueError, match=r"cu_seqlens must be \(sequences \+ 1,\), got \(0,\)"):
            fla.fused_recurrent_linear_attn(*row, reverse=reverse, cu_seqlens=torch.tensor([]))
