"""The gradient of attention's masks: in their own shape, complete where keys are hidden, of no batch."""

import attention_cases
import operator_checks
import pytest
import torch
from attention_cases import call, check, make_case, thin
from operator_checks import NATIVE

import fastattn

impl, poisoned = attention_cases.impl, operator_checks.poisoned

attend = fastattn.scaled_dot_product_attention


def test_mask_gradient_has_the_shape_and_dtype_of_the_mask(impl):
    half, single = torch.bfloat16, torch.float32
    for dtype, mask_dtype in thin(impl, ((half, single), (single, single), (half, half))):
        for shape in ((), (7,), (5, 1), (3, 5, 7), (1, 3, 1, 7), (2, 1, 5, 7), (2, 3, 5, 7)):
            q, k = torch.randn(2, 3, 5, 8).to(dtype), torch.randn(2, 3, 7, 8).to(dtype)
            mask = torch.randn(shape).to(mask_dtype).requires_grad_()
            attend(q, k, k, mask, impl=impl).float().square().sum().backward()
            assert mask.grad.shape == shape and mask.grad.dtype == mask_dtype


@NATIVE
@pytest.mark.parametrize("options", (
    {"is_causal": True}, {"window_size": (40, 20)}, {"window_size": (0, 150)}, {"padding": True},
    {"is_causal": True, "causal_alignment": "lower_right"},
), ids=str)  # fmt: skip
def test_mask_gradient_where_keys_are_hidden(impl, options):
    """It is 0 there, in whole blocks of keys and in parts of them, before and behind those that are seen."""
    for L, S, mask_shape in ((70, 300, "hls"), (70, 300, "bhls"), (3, 300, "hls"), (300, 1300, "bhls")):
        for B, dtype in ((1, torch.float32), (2, torch.float32), (1, torch.bfloat16)):
            case = make_case(B, 2, 1, L, S, 8, dtype=dtype, mask="float", mask_shape=mask_shape, **options)
            if case.key_padding_mask is not None:  # one sees all, the other a few keys in the middle
                case.key_padding_mask[0], case.key_padding_mask[-1] = True, False
                case.key_padding_mask[-1, 140:150] = True
            check(call(case, impl), case)


@pytest.mark.parametrize("shape", ((1, 70), (70, 1), (1, 1)))
def test_mask_gradient_where_several_tiles_share_a_number(impl, shape):
    q, k = torch.randn(2, 1, 70, 8), torch.randn(2, 1, 70, 8)
    mask = torch.randn(shape).requires_grad_()
    masks = mask, mask.expand(70, 70).detach().clone().requires_grad_()
    own, whole = (torch.autograd.grad(attend(q, k, k, m, impl=impl).square().sum(), m)[0] for m in masks)
    assert torch.allclose(own, whole.sum_to_size(shape), rtol=1e-4, atol=1e-5)


@NATIVE
def test_gradients_without_a_sum_are_zero(impl):
    """What the batch shares has a gradient of its own size, though there is nothing to add up in it."""
    shared = {"dtype": torch.float32, "mask": "float", "alibi": "h", "sinks": True}
    for B, H, mask_shape in ((0, 2, "hls"), (0, 2, "s"), (0, 4, "ls"), (2, 0, "ls"), (0, 2, "l")):
        for L, S in ((3, 4), (40, 300)):
            case = make_case(B, H, H, L, S, 8, mask_shape=mask_shape, **shared)
            results = call(case, impl)
            for name, tensor in case.tensors().items():
                gradient = results[f"grad_{name}"]
                assert gradient.shape == tensor.shape and not gradient.any(), name


def test_rows_that_a_tile_lacks_do_not_reach_the_gradient_of_a_mask(impl):
    """Scratch memory that holds NaN from the call before, where the tile of this one has no rows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for length in (32, 8):  # the first call leaves its NaN behind
            shapes = [(1, 1, length, 8), (1, 1, 40, 8), (1, 1, 40, 8)]
            query, key, value = (torch.randn(shape) * (torch.nan if length == 32 else 1) for shape in shapes)
            query, key, value = (t.repeat(1, 2, 1, 1) for t in (query, key, value))
            mask = torch.zeros(1, 1, 1, 40, requires_grad=True)
            # dropout: without it the kernel has another way for so few rows
            out = attend(query, key, value, mask, dropout_p=0.1, impl=impl)
            (grad,) = torch.autograd.grad(out.square().sum(), mask)
        assert grad.isfinite().all() and grad.abs().max() > 0
    finally:
        torch.set_num_threads(threads)
