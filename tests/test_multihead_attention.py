"""fastattn.nn.MultiheadAttention computes what torch's does, save for rows that see nothing."""

import doctest
import itertools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from multihead_attention_cases import (
    CONSTRUCTORS,
    INF,
    E,
    H,
    L,
    N,
    S,
    assert_same,
    call,
    causal_masks,
    make_inputs,
    make_masks,
    make_pair,
)
from torch.utils.checkpoint import checkpoint

import fastattn
import fastattn.nn.multihead_attention as implementation

# --------------------------------------------------------------------------------- the same numbers as torch


@pytest.mark.parametrize("form", ["unbatched", "sequence first", "batch first"])
@pytest.mark.parametrize("kwargs", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_outputs_weights_and_gradients_with_every_mask(kwargs, form):
    theirs, ours = make_pair(batch_first=form == "batch first", **kwargs)
    for key_padding_mask, attn_mask in make_masks(form, S):
        for need_weights, average in ((True, True), (True, False), (False, True)):
            arguments = {
                "key_padding_mask": key_padding_mask,
                "attn_mask": attn_mask,
                "need_weights": need_weights,
                "average_attn_weights": average,
            }
            want = call(theirs, make_inputs(theirs, form), **arguments)
            got = call(ours, make_inputs(ours, form), **arguments)
            assert_same(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("keys", ["self", "shared", "other"])
@pytest.mark.parametrize("form", ["unbatched", "sequence first", "batch first"])
def test_projections_of_shared_inputs(form, keys, training):
    theirs, ours = (m.train(training) for m in make_pair(batch_first=form == "batch first"))
    for need_weights in (True, False):
        want = call(theirs, make_inputs(theirs, form, keys=keys), need_weights=need_weights)
        got = call(ours, make_inputs(ours, form, keys=keys), need_weights=need_weights)
        assert_same(got, want, rtol=1e-9, atol=1e-11)


def rms(x):
    return x.double().square().mean().sqrt().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("need_weights", [True, False])
def test_precision_is_that_of_torch(dtype, need_weights):
    exact, _ = make_pair(batch_first=True)
    theirs, ours = (m.to(dtype) for m in make_pair(batch_first=True))
    exact.load_state_dict(theirs.state_dict())
    mask = torch.ones(L, S, dtype=torch.bool).triu(1)
    results = []
    for module, kind in ((exact, torch.float64), (theirs, dtype), (ours, dtype)):
        inputs = [x.detach().to(dtype).to(kind).requires_grad_() for x in make_inputs(module, "batch first")]
        results.append(call_rounded(module, inputs, dtype, attn_mask=mask, need_weights=need_weights))
    want, torch_result, result = results
    for name, reference in want.items():
        if reference is None:
            continue
        rounding = torch.finfo(dtype).eps * rms(reference)
        bar = 2 * rms(torch_result[name].double() - reference) + rounding
        assert rms(result[name].double() - reference) <= bar, name


def call_rounded(module, inputs, dtype, **kwargs):
    """As `call`, with incoming gradients that are the same numbers in every dtype."""
    out, weights = module(*inputs, **kwargs)
    torch.manual_seed(4)
    out.backward(torch.randn(out.shape).to(dtype).to(out.dtype))
    grads = {name: p.grad for name, p in module.named_parameters()}
    grads |= {f"input {n}": x.grad for n, x in enumerate(inputs)}
    return {"out": out.detach(), "weights": weights if weights is None else weights.detach()} | grads


@pytest.mark.parametrize("kwargs", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_modes_agree(kwargs):
    _, ours = make_pair(batch_first=True, **kwargs)
    inputs = make_inputs(ours, "batch first")
    for key_padding_mask, attn_mask in make_masks("batch first", S):
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            want = ours.train()(*inputs, **masks)[0]
            for training, grad, need_weights in itertools.product((True, False), repeat=3):
                with torch.set_grad_enabled(grad):
                    got = ours.train(training)(*inputs, **masks, need_weights=need_weights)[0]
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("add_bias_kv", [False, True])
@pytest.mark.parametrize("kind", [None, "boolean", "float"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_autocast(need_weights, kind, add_bias_kv):
    theirs, ours = make_pair(torch.float32, batch_first=True, add_bias_kv=add_bias_kv)
    x = torch.randn(N, L, E)
    mask = None if kind is None else torch.ones(L, L, dtype=torch.bool).triu(1)
    if kind == "float":
        mask = torch.zeros(L, L).masked_fill(mask, -INF)
    with torch.autocast("cpu", torch.bfloat16):
        want = theirs(x, x, x, attn_mask=mask, need_weights=need_weights)
        got = ours(x, x, x, attn_mask=mask, need_weights=need_weights)
    torch.testing.assert_close(got[0], want[0], rtol=0.03, atol=0.03)
    if need_weights:
        torch.testing.assert_close(got[1], want[1], rtol=0.03, atol=0.03)


def test_float32_mask_beside_half_precision_in_every_mode():
    _, ours = make_pair(torch.bfloat16)
    x = torch.randn(L, N, E, dtype=torch.bfloat16)
    bias = torch.randn(L, L)
    with_weights = ours(x, x, x, attn_mask=bias)[0]
    torch.testing.assert_close(ours(x, x, x, attn_mask=bias, need_weights=False)[0], with_weights)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("value", [-INF, -1.5])
def test_mask_dtypes_are_accepted_as_in_torch_whatever_the_masks_hold(value, need_weights):
    theirs, ours = make_pair(torch.float32)
    x = torch.randn(L, N, E)
    hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
    padding = torch.zeros(N, L)
    padding[1, -1] = value
    bias = torch.randn(L, L)
    dtypes = (None, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64)
    accepted = 0
    for mask_dtype, padding_dtype in itertools.product(dtypes, repeat=2):
        masks = {
            "attn_mask": None if mask_dtype is None else (hidden if mask_dtype == torch.bool else bias),
            "key_padding_mask": None if padding_dtype is None else padding,
        }
        masks = {
            name: m if m is None else m.to(dtype)
            for (name, m), dtype in zip(masks.items(), (mask_dtype, padding_dtype), strict=True)
        }
        results = []
        for module in (theirs, ours):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                try:
                    results.append(module(x, x, x, need_weights=need_weights, **masks)[0])
                except RuntimeError as error:
                    results.append(type(error))
        want, got = results
        if isinstance(want, type):
            assert got is want, masks
        else:
            torch.testing.assert_close(got, want)
            accepted += 1
    assert accepted > 10


def test_any_strides():
    _, ours = make_pair(batch_first=True)
    query, key, value = (x.detach() for x in make_inputs(ours, "batch first"))
    masks = {
        "attn_mask": torch.randn(L, S, 2, dtype=torch.float64)[:, :, 0],
        "key_padding_mask": torch.randn(S, N, dtype=torch.float64).t(),
    }
    want = ours(query, key, value, **{name: m.contiguous() for name, m in masks.items()})
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (query, key)]
    strided.append(torch.stack([value, value], -1)[..., 0])
    for got, expected in zip(ours(*strided, **masks), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("form", ["unbatched", "sequence first", "batch first"])
def test_output_is_contiguous_in_every_mode(form):
    _, ours = make_pair(batch_first=form == "batch first")
    inputs = make_inputs(ours, form)
    for training, grad, need_weights in itertools.product((True, False), repeat=3):
        with torch.set_grad_enabled(grad):
            out, weights = ours.train(training)(*inputs, need_weights=need_weights)
        assert out.is_contiguous() and (weights is None or weights.is_contiguous())


@pytest.mark.parametrize("kwargs", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
@pytest.mark.parametrize("sizes", [(0, 5, 7), (3, 0, 7), (3, 5, 0), (0, 0, 0), (1, 1, 1)])
def test_empty_sizes(sizes, kwargs):
    n, queries, keys = sizes
    _, ours = make_pair(batch_first=True, **kwargs)
    query = torch.randn(n, queries, E, dtype=torch.float64, requires_grad=True)
    key = torch.randn(n, keys, ours.kdim, dtype=torch.float64, requires_grad=True)
    value = torch.randn(n, keys, ours.vdim, dtype=torch.float64, requires_grad=True)
    appended = bool(ours.add_zero_attn) + (ours.bias_k is not None)
    for need_weights in (True, False):
        out, weights = ours(query, key, value, need_weights=need_weights)
        assert out.shape == (n, queries, E)
        assert weights is None or weights.shape == (n, queries, keys + appended)
        out.sum().backward()
        assert query.grad.shape == query.shape and key.grad.isfinite().all()
        if keys + appended == 0 and out.numel():
            bias = torch.zeros(E, dtype=torch.float64) if ours.out_proj.bias is None else ours.out_proj.bias
            assert torch.equal(out, bias.expand_as(out))


# ------------------------------------------------------------------------------------------------- causality


@pytest.mark.parametrize("kwargs", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
@pytest.mark.parametrize("padded", [None, "boolean", "float"])
def test_the_mask_decides_whatever_the_hint_says(kwargs, padded):
    theirs, ours = make_pair(batch_first=True, **kwargs)
    padding = None
    if padded:
        padding = torch.arange(S) >= torch.tensor([[S], [S - 2], [1]])
        padding = (
            padding
            if padded == "boolean"
            else torch.zeros(N, S, dtype=torch.float64).masked_fill(padding, -INF)
        )
    for name, mask in causal_masks(L, S).items():
        arguments = {"attn_mask": mask, "key_padding_mask": padding}
        want = call(theirs, make_inputs(theirs, "batch first"), **arguments)
        got = call(ours, make_inputs(ours, "batch first"), **arguments, is_causal=True)
        if name == "not causal":
            got = {k: v for k, v in got.items() if want[k] is None or want[k].isfinite().all()}
            want = {k: want[k] for k in got}
        assert_same(got, want, rtol=1e-9, atol=1e-11)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            out = ours(*make_inputs(ours, "batch first"), **arguments, is_causal=True, need_weights=False)[0]
        if "out" in got:
            torch.testing.assert_close(out, want["out"], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["boolean", "float", "biased", "not causal", "all visible"])
def test_a_true_hint_reaches_the_kernel(kind, monkeypatch):
    _, ours = make_pair(batch_first=True)
    seen = []

    def spy(query, key, value, attn_mask, dropout_p, is_causal, **kwargs):
        seen.append((attn_mask is None, is_causal))
        return torch.zeros_like(query)

    monkeypatch.setattr(implementation, "scaled_dot_product_attention", spy)
    mask = causal_masks(L, S)[kind]
    ours(*make_inputs(ours, "batch first"), attn_mask=mask, is_causal=True, need_weights=False)
    ours(*make_inputs(ours, "batch first"), attn_mask=mask, need_weights=False)
    assert seen == [(kind in ("boolean", "float"), kind in ("boolean", "float", "biased")), (False, False)]


def test_gradient_of_a_causal_bias():
    theirs, ours = make_pair(batch_first=True)
    grads = []
    for module in (theirs, ours):
        bias = causal_masks(L, S)["float"].requires_grad_()
        module(*make_inputs(module, "batch first"), attn_mask=bias, is_causal=module is ours)[
            0
        ].sum().backward()
        grads.append(bias.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-11)


def test_causal_hint_without_a_mask_is_an_error_in_every_mode():
    for module in make_pair(batch_first=True):
        x = torch.randn(N, L, E, dtype=torch.float64)
        for training, need_weights in itertools.product((True, False), repeat=2):
            if module.training != training:
                module.train(training)
            with pytest.raises(RuntimeError, match="attn_mask"):
                module(x, x, x, is_causal=True, need_weights=need_weights)


# ------------------------------------------------------------------------------------- rows that see nothing


EMPTY_MASKS = {
    "padding, boolean": lambda: {"key_padding_mask": torch.tensor([[True] * L, [False] * L, [False] * L])},
    "padding, float": lambda: {
        "key_padding_mask": torch.tensor([[-INF] * L, [0.0] * L, [0.0] * L], dtype=torch.float64)
    },
    "boolean": lambda: {"attn_mask": torch.arange(L).view(L, 1).expand(L, L) == 2},
    "float": lambda: {
        "attn_mask": torch.zeros(L, L, dtype=torch.float64).index_fill(0, torch.tensor(2), -INF)
    },
    "together": lambda: {
        "attn_mask": torch.ones(L, L, dtype=torch.bool).triu(1),
        "key_padding_mask": torch.tensor([[True] + [False] * (L - 1)]).expand(N, L),
    },
    "per head": lambda: {"attn_mask": (torch.arange(N * H) == 4).view(-1, 1, 1).expand(N * H, L, L)},
}


def visible(masks):
    """(N, H, L, L) from the masks, written independently of the module."""
    seen = torch.ones(N, H, L, L, dtype=torch.bool)
    for name, mask in masks.items():
        hidden = mask if mask.dtype == torch.bool else mask == -INF
        if name == "key_padding_mask":
            hidden = hidden.view(N, 1, 1, L)
        elif mask.dim() == 3:
            hidden = hidden.reshape(N, H, L, L)
        seen &= ~hidden
    return seen


@pytest.mark.parametrize("masks", EMPTY_MASKS.values(), ids=EMPTY_MASKS)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_empty_rows_give_zero_attention(masks, need_weights, training):
    _, ours = make_pair(batch_first=True)
    ours.train(training)
    masks = masks()
    x = torch.randn(N, L, E, dtype=torch.float64, requires_grad=True)
    attended = []
    ours.out_proj.register_forward_pre_hook(lambda module, args: attended.append(args[0]))
    out, weights = ours(x, x, x, **masks, need_weights=need_weights, average_attn_weights=False)
    empty = ~visible(masks).any(-1)
    heads = attended[0].view(N, L, H, -1).transpose(1, 2)
    assert (heads[empty] == 0).all() and (heads[~empty] != 0).any(-1).all()
    nothing = empty.all(1)
    assert torch.equal(out[nothing], ours.out_proj.bias.expand_as(out[nothing]))
    if need_weights:
        assert (weights[empty] == 0).all()
        torch.testing.assert_close(
            weights[~empty].sum(-1), torch.ones(int((~empty).sum()), dtype=torch.float64)
        )
    out.sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in ours.parameters())


def test_finfo_min_does_not_hide():
    theirs, ours = make_pair(torch.float32)
    x = torch.randn(L, N, E)
    mask = torch.full((L, L), torch.finfo(torch.float32).min)
    for need_weights in (True, False):
        out, weights = ours(x, x, x, attn_mask=mask, need_weights=need_weights)
        torch.testing.assert_close(out, theirs(x, x, x, attn_mask=mask)[0])
        if need_weights:
            torch.testing.assert_close(weights, torch.full((N, L, L), 1 / L))


def test_padding_has_no_influence():
    _, ours = make_pair(batch_first=True)
    padding = torch.arange(S) >= torch.tensor([[S], [4], [2]])
    query, key, value = make_inputs(ours, "batch first")
    want = ours(query, key, value, key_padding_mask=padding)
    spoiled = [x.detach().masked_fill(padding.unsqueeze(-1), math.nan).requires_grad_() for x in (key, value)]
    for mask in (padding, torch.zeros(N, S, dtype=torch.float64).masked_fill(padding, -INF)):
        got = ours(query, *spoiled, key_padding_mask=mask)
        torch.testing.assert_close(got, want)


# ---------------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_only_in_training(need_weights):
    _, ours = make_pair(dropout=0.5, batch_first=True)
    inputs = make_inputs(ours, "batch first")
    plain = ours.eval()(*inputs, need_weights=need_weights)[0]
    assert torch.equal(ours(*inputs, need_weights=need_weights)[0], plain)
    ours.train()
    torch.manual_seed(5)
    first = ours(*inputs, need_weights=need_weights)[0]
    second = ours(*inputs, need_weights=need_weights)[0]
    torch.manual_seed(5)
    again = ours(*inputs, need_weights=need_weights)[0]
    assert torch.equal(first, again) and not torch.equal(first, second) and not torch.equal(first, plain)


def test_returned_weights_are_the_ones_applied():
    _, ours = make_pair(dropout=0.4, batch_first=True)
    query, key, value = make_inputs(ours, "batch first")
    attended = []
    ours.out_proj.register_forward_pre_hook(lambda module, args: attended.append(args[0]))
    _, weights = ours(query, key, value, average_attn_weights=False)
    w, b = ours.in_proj_weight[2 * E :], ours.in_proj_bias[2 * E :]
    v = F.linear(value, w, b).view(N, S, H, -1).transpose(1, 2)
    torch.testing.assert_close((weights @ v).transpose(1, 2).flatten(-2), attended[0])
    plain = ours.eval()(query, key, value, average_attn_weights=False)[1]
    kept = weights != 0
    assert 0 < kept.double().mean() < 1
    torch.testing.assert_close(weights[kept], plain[kept] / 0.6)


def test_dropout_rate_and_everything_dropped():
    module = fastattn.nn.MultiheadAttention(4, 2, dropout=0.3)
    x = torch.randn(128, 4, 4)
    kept = (module(x, x, x, average_attn_weights=False)[1] != 0).double().mean()
    assert abs(kept - 0.7) < 0.01
    module.dropout = 1.0
    out, weights = module(x, x, x)
    assert (weights == 0).all() and torch.equal(out, module.out_proj.bias.expand_as(out))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_repeats_the_dropout(use_reentrant):
    _, ours = make_pair(dropout=0.5, batch_first=True)
    x = make_inputs(ours, "batch first", keys="self")[0]
    grads = []
    for run in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=use_reentrant)):
        torch.manual_seed(6)
        x.grad = None
        run(lambda x: ours(x, x, x)[0], x).square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_documented_examples():
    results = doctest.testmod(implementation)
    assert results.attempted > 10 and results.failed == 0
