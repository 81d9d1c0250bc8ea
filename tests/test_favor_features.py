"""FAVOR+ features: what they estimate, how well, and that nothing depends on other tokens or on the
moment."""

import copy
import math
import pickle

import pytest
import torch

import fastattn
from fastattn.nn import FavorFeatures


def relative_error(estimate, exact):
    return ((estimate - exact).norm() / exact.norm()).item()


def softmax_kernel(q, k):
    return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).exp()


def test_features_are_the_formula():
    favor = FavorFeatures(6, 10, dtype=torch.float64)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    expected = torch.empty(2, 3, 10, dtype=torch.float64)
    for i, w in enumerate(favor.projection):
        exponent = (w * x).sum(-1) / 6**0.25 - (x * x).sum(-1) / (2 * math.sqrt(6))
        expected[..., i] = torch.exp(exponent) / math.sqrt(10)
    torch.testing.assert_close(favor(x), expected)
    assert (favor(x) > 0).all()


def test_rows_are_orthogonal_in_blocks_and_as_long_as_normal_ones():
    favor = FavorFeatures(8, 8 * 500 + 3, dtype=torch.float64)
    assert favor.projection.shape == (4003, 8)
    for start in (0, 8, 8 * 499):
        block = favor.projection[start : start + 8]
        lengths = block.norm(dim=1)
        torch.testing.assert_close(block @ block.T, torch.diag(lengths.square()), atol=1e-10, rtol=0)
    rest = favor.projection[4000:]
    torch.testing.assert_close(rest @ rest.T, torch.diag(rest.norm(dim=1).square()), atol=1e-10, rtol=0)
    # E |w|^2 = D, Var |w|^2 = 2 D; the mean of 4003 of them has a standard deviation of 0.063.
    assert favor.projection.square().sum(1).mean().item() == pytest.approx(8.0, abs=0.4)
    assert favor.projection.mean(0).abs().max() < 0.1


def test_kernel_is_estimated_without_bias_and_the_error_falls_with_the_number_of_features():
    D = 16
    q, k = (0.5 * torch.randn(32, D, dtype=torch.float64) for _ in range(2))
    exact = softmax_kernel(q, k)
    errors = {}
    for features in (16, 64, 256, 1024, 4096):
        trials = []
        for seed in range(6):
            generator = torch.Generator().manual_seed(seed)
            favor = FavorFeatures(D, features, generator=generator, dtype=torch.float64)
            trials.append(favor(q) @ favor(k).T)
        errors[features] = sum(relative_error(trial, exact) for trial in trials) / len(trials)
    assert list(errors.values()) == sorted(errors.values(), reverse=True)
    assert errors[4096] < errors[16] / 8  # 256 times as many features: a sixteenth
    many = FavorFeatures(D, 1 << 18, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert relative_error(many(q) @ many(k).T, exact) < 0.01


def test_orthogonal_rows_estimate_better_than_independent_ones():
    D = 16
    q, k = (0.5 * torch.randn(64, D, dtype=torch.float64) for _ in range(2))
    exact, favor = softmax_kernel(q, k), FavorFeatures(D, D, dtype=torch.float64)
    orthogonal, independent = [], []
    for _ in range(200):
        favor.redraw()
        orthogonal.append((favor(q) @ favor(k).T - exact).square().mean().item())
        favor.projection.copy_(torch.randn(D, D))
        independent.append((favor(q) @ favor(k).T - exact).square().mean().item())
    assert sum(orthogonal) < 0.95 * sum(independent)


@pytest.mark.parametrize("is_causal", [False, True])
def test_linear_attention_with_favor_features_estimates_softmax_attention(is_causal):
    q, k, v = (torch.randn(2, 2, 40, 16) for _ in range(3))
    q, k = 0.5 * q, 0.5 * k
    exact = fastattn.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    def error(features):
        trials = []
        for seed in range(4):
            favor = FavorFeatures(16, features, generator=torch.Generator().manual_seed(seed))
            out = fastattn.linear_attention(q, k, v, feature_map=favor, is_causal=is_causal)
            trials.append(relative_error(out, exact))
        return sum(trials) / len(trials)

    errors = [error(features) for features in (16, 128, 1024, 8192)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.1 < errors[0]


def test_features_of_a_token_do_not_depend_on_other_tokens():
    favor = FavorFeatures(8, 32)
    x = torch.randn(1, 5, 8)
    alone = favor(x[:, :1])
    x[:, 1:] *= 1e3  # under a maximum over the sequence this would change the first token
    torch.testing.assert_close(favor(x)[:, :1], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [0.0, 1.0, 30.0, 1e4])
def test_features_and_causal_attention_are_finite_for_inputs_of_any_size(dtype, size):
    favor = FavorFeatures(128, 256)
    direction = favor.projection[0] / favor.projection[0].norm()
    worst = direction * favor.projection[0].norm() * 128**0.25  # where the exponent of feature 0 is largest
    x = torch.cat([worst.expand(1, 1, 4, 128), size * torch.randn(1, 1, 60, 128)], 2).to(dtype)
    features = favor(x)
    assert features.dtype == dtype and features.isfinite().all() and (features >= 0).all()
    v = torch.randn(1, 1, 64, 128, dtype=dtype)
    x.requires_grad_()
    out, state = fastattn.linear_attention(x, x, v, feature_map=favor, is_causal=True, return_state=True)
    out.float().sum().backward()
    assert all(t.isfinite().all() for t in (out, state.kv, state.z, x.grad))


def test_half_precision_is_rounded_once_and_autocast_changes_nothing():
    favor = FavorFeatures(64)
    x = torch.randn(50, 64, dtype=torch.bfloat16)
    exact = copy.deepcopy(favor).double()(x.double())
    assert relative_error(favor(x).double(), exact) < 2**-8
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(favor(x), favor(x.float()).to(torch.bfloat16))
        assert favor(x.float()).dtype == torch.float32


def test_projection_is_saved_and_never_drawn_again_by_itself():
    favor = FavorFeatures(8, generator=torch.Generator().manual_seed(1))
    assert favor.num_features == 32 and list(favor.state_dict()) == ["projection"]
    assert not list(favor.parameters())
    x = torch.randn(3, 8)
    before = favor(x)
    for mode in (True, False):
        favor.train(mode)
        assert torch.equal(favor(x), before)
    for twin in (copy.deepcopy(favor), pickle.loads(pickle.dumps(favor)), FavorFeatures(8)):
        twin.load_state_dict(favor.state_dict())
        assert torch.equal(twin(x), before)
    favor.redraw(torch.Generator().manual_seed(2))
    assert not torch.allclose(favor(x), before)
    favor.redraw(torch.Generator().manual_seed(1))
    assert torch.equal(favor(x), before)


def test_gradients():
    favor = FavorFeatures(4, 7, dtype=torch.float64)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(favor, x) and torch.autograd.gradgradcheck(favor, x)


def test_compiles_in_one_piece_and_maps():
    favor = FavorFeatures(8)
    x = torch.randn(2, 5, 8)
    compiled = torch.compile(favor, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), favor(x))
    torch.testing.assert_close(torch.func.vmap(favor)(x), favor(x))


def test_state_from_steps_is_that_of_the_sequence():
    favor = FavorFeatures(8)
    q, k, v = (torch.randn(2, 3, 9, 8) for _ in range(3))
    whole, state = fastattn.linear_attention(q, k, v, feature_map=favor, is_causal=True, return_state=True)
    stepped = fastattn.LinearAttentionState.zeros(2, 3, 32, 8)
    for t in range(9):
        out, stepped = fastattn.linear_attention_step(
            q[:, :, t], k[:, :, t], v[:, :, t], stepped, feature_map=favor
        )
        torch.testing.assert_close(out, whole[:, :, t], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(stepped.kv, state.kv, atol=1e-4, rtol=1e-4)


def test_errors_name_what_was_found():
    with pytest.raises(ValueError, match="head_dim must be an integer of at least 1, got 0"):
        FavorFeatures(0)
    with pytest.raises(ValueError, match="num_features must be an integer of at least 1, got -3"):
        FavorFeatures(8, -3)
    with pytest.raises(ValueError, match=r"expects inputs \(\.\.\., 8\), got \(2, 7\)"):
        FavorFeatures(8)(torch.zeros(2, 7))
    for args, found in (
        ((2.5,), "head_dim must be an integer, got 2.5"),
        ((True,), "head_dim must be an integer, got True"),
        ((4, True), "num_features must be an integer, got True"),
        ((8, "x"), "num_features .* got 'x'"),
    ):
        with pytest.raises(TypeError, match=found):
            FavorFeatures(*args)
    with pytest.raises(TypeError, match="dtype must be a floating point dtype, got torch.int64"):
        FavorFeatures(8, dtype=torch.int64)
    for wrong, found in ((torch.ones(2, 8, dtype=torch.int64), "torch.int64"), ([1.0], "list")):
        with pytest.raises(TypeError, match=f"floating point tensors, got {found}"):
            FavorFeatures(8)(wrong)
    assert "head_dim=8, num_features=32" in repr(FavorFeatures(8))


def test_meta_tensors():
    assert FavorFeatures(8, device="meta")(torch.empty(2, 3, 8, device="meta")).shape == (2, 3, 32)
