"""fastattn.nn.MultiheadAttention behaves like torch.nn.MultiheadAttention, save for rows that see nothing."""

import copy
import doctest
import io
import itertools
import math
import pickle
import warnings

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fastattn
import fastattn.nn.multihead_attention as implementation

N, L, S, E, H = 3, 5, 7, 12, 3
INF = float("inf")

CONSTRUCTORS = {
    "plain": {},
    "no bias": {"bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "bias_kv and zero_attn": {"add_bias_kv": True, "add_zero_attn": True},
    "kdim and vdim": {"kdim": 8, "vdim": 10},
    "vdim, no bias, bias_kv": {"vdim": 6, "bias": False, "add_bias_kv": True},
    "kdim, zero_attn": {"kdim": E + 1, "add_zero_attn": True},
}


def make_pair(dtype=torch.float64, seed=0, **kwargs):
    """torch's module and ours with the same parameters, none of them trivial."""
    torch.manual_seed(seed)
    theirs = nn.MultiheadAttention(E, H, dtype=dtype, **kwargs)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    ours = fastattn.nn.MultiheadAttention(E, H, dtype=dtype, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def make_inputs(module, form, dtype=torch.float64, keys="other", seed=1):
    """query, key, value; form is "unbatched", "sequence first" or "batch first"."""
    torch.manual_seed(seed)

    def draw(length, width):
        shape = {"unbatched": (length, width), "sequence first": (length, N, width)}.get(
            form, (N, length, width)
        )
        return torch.randn(shape, dtype=dtype, requires_grad=True)

    query = draw(L, E)
    if keys == "self":
        return query, query, query
    key = draw(S, module.kdim)
    return query, key, key if keys == "shared" else draw(S, module.vdim)


def make_masks(form, source, dtype=torch.float64):
    """(key_padding_mask, attn_mask) of every kind; each query sees a key under all of them."""
    torch.manual_seed(2)
    batch = 1 if form == "unbatched" else N
    padding = torch.zeros(batch, source, dtype=torch.bool)
    padding[-1, -2:] = True
    padding[0, 1] = True
    hidden = torch.rand(L, source) < 0.4
    hidden[:, 0] = False
    per_head = torch.rand(batch * H, L, source) < 0.4
    per_head[:, :, 0] = False

    def additive(mask):
        return torch.randn(mask.shape, dtype=dtype).masked_fill(mask, -INF)

    paddings = [
        None,
        padding,
        torch.zeros(padding.shape, dtype=dtype).masked_fill(padding, -INF),
        additive(padding),
    ]
    if form == "unbatched":
        paddings = [p if p is None else p[0] for p in paddings]
    attn_masks = [None, hidden, additive(hidden), per_head, additive(per_head)]
    return itertools.product(paddings, attn_masks)


def call(module, inputs, **kwargs):
    """Output, weights, and the gradients of all inputs and parameters for a fixed loss over both."""
    module.zero_grad()
    for x in inputs:
        x.grad = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        out, weights = module(*inputs, **kwargs)
    torch.manual_seed(3)
    loss = (out * torch.randn(out.shape, dtype=out.dtype)).sum()
    if weights is not None:
        loss = loss + (weights * torch.randn(weights.shape, dtype=weights.dtype)).sum()
    loss.backward()
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    grads |= {f"input {n}": x.grad.clone() for n, x in enumerate(inputs)}
    return {"out": out.detach(), "weights": weights if weights is None else weights.detach()} | grads


def assert_same(ours, theirs, **tolerance):
    assert ours.keys() == theirs.keys()
    for name, want in theirs.items():
        if want is None:
            assert ours[name] is None, name
        else:
            torch.testing.assert_close(ours[name], want, msg=lambda m, name=name: f"{name}: {m}", **tolerance)


# ---------------------------------------------------------------------------------- construction and state


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kwargs", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_same_seed_gives_the_same_parameters_and_attributes(kwargs, batch_first):
    modules = []
    for cls in (nn.MultiheadAttention, fastattn.nn.MultiheadAttention):
        torch.manual_seed(11)
        modules.append(cls(E, H, dropout=0.1, batch_first=batch_first, **kwargs))
    theirs, ours = modules
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    assert {n for n, _ in ours.named_parameters()} == {n for n, _ in theirs.named_parameters()}
    for name in (
        "embed_dim kdim vdim _qkv_same_embed_dim num_heads dropout batch_first head_dim add_zero_attn"
    ).split():
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in "in_proj_weight q_proj_weight k_proj_weight v_proj_weight in_proj_bias bias_k bias_v".split():
        assert (getattr(ours, name) is None) == (getattr(theirs, name) is None), name
    assert type(ours.out_proj) is type(theirs.out_proj)
    assert ours.__constants__ == ["batch_first"]
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert isinstance(ours, nn.MultiheadAttention)


def test_positional_constructor_arguments_mean_what_they_mean_in_torch():
    args = (8, 2, 0.25, False, True, True, 6, 4, True, "meta", torch.bfloat16)
    theirs, ours = nn.MultiheadAttention(*args), fastattn.nn.MultiheadAttention(*args)
    for name in "embed_dim num_heads dropout kdim vdim batch_first add_zero_attn".split():
        assert getattr(ours, name) == getattr(theirs, name)
    described = {n: (p.shape, p.dtype, p.device) for n, p in theirs.named_parameters()}
    assert described == {n: (p.shape, p.dtype, p.device) for n, p in ours.named_parameters()}


@pytest.mark.parametrize("args", [(0, 1), (4, 0), (-4, 2), (4, -2), (5, 2)])
def test_constructor_errors(args):
    with pytest.raises((ValueError, AssertionError)) as theirs:
        nn.MultiheadAttention(*args)
    with pytest.raises(theirs.type):
        fastattn.nn.MultiheadAttention(*args)


def test_pickles_without_the_attribute_of_later_versions_load():
    _, module = make_pair()
    state = module.__getstate__() if hasattr(module, "__getstate__") else module.__dict__
    state = dict(state)
    del state["_qkv_same_embed_dim"]
    old = fastattn.nn.MultiheadAttention.__new__(fastattn.nn.MultiheadAttention)
    old.__setstate__(state)
    assert old._qkv_same_embed_dim is True


def test_copies_and_pickles_compute_the_same():
    _, module = make_pair(batch_first=True)
    inputs = make_inputs(module, "batch first")
    want = module(*inputs)[0]
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(file, weights_only=False),
    ):
        assert type(other) is fastattn.nn.MultiheadAttention
        assert torch.equal(other(*inputs)[0], want)
        assert other.in_proj_weight is not module.in_proj_weight


def test_meta_device_and_dtype_moves():
    with torch.device("meta"):
        module = fastattn.nn.MultiheadAttention(E, H)
    out, weights = module(*(torch.randn(L, N, E, device="meta") for _ in range(3)))
    assert out.shape == (L, N, E) and weights.shape == (N, L, L) and out.is_meta
    module = module.to_empty(device="cpu")
    module._reset_parameters()
    for dtype in (torch.bfloat16, torch.float64, torch.float16):
        x = torch.randn(L, N, E, dtype=dtype)
        out, weights = module.to(dtype)(x, x, x)
        assert out.dtype == weights.dtype == dtype


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


def causal_masks(rows, columns):
    hidden = torch.ones(rows, columns, dtype=torch.bool).triu(1)
    return {
        "boolean": hidden,
        "float": torch.zeros(rows, columns, dtype=torch.float64).masked_fill(hidden, -INF),
        "biased": torch.randn(rows, columns, dtype=torch.float64).masked_fill(hidden, -INF),
        "per head": hidden.expand(N * H, rows, columns),
        "not causal": ~hidden.flip(0, 1),
        "all visible": torch.zeros(rows, columns, dtype=torch.bool),
        "stricter": hidden | (torch.arange(columns) == 1),
    }


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


# ----------------------------------------------------------------------------------------------------- errors


def batched(*shape, **kwargs):
    return torch.randn(*shape, **kwargs)


q, k = batched(N, L, E), batched(N, S, E)
BAD_CALLS = {
    "1-D query": (q[0, 0], k, k),
    "4-D query": (q[None], k, k),
    "2-D key": (q, k[0], k),
    "2-D value": (q, k, k[0]),
    "unbatched query": (q[0], k, k),
    "unbatched query, batched key": (q[0], k, k[0]),
    "query width": (q[..., :-1], k, k),
    "key width": (q, k[..., :-1], k[..., :-1]),
    "value width": (q, k, k[..., :-1]),
    "key and value length": (q, k, k[:, :-1]),
    "batch": (q, k[:-1], k[:-1]),
    "batch of one": (q, k[:1], k[:1]),
    "dtype": (q.double(), k.double(), k.double()),
    "dtype of key": (q, k.double(), k.double()),
    "integer attn_mask": (q, k, k, None, torch.zeros(L, S, dtype=torch.long)),
    "uint8 attn_mask": (q, k, k, None, torch.zeros(L, S, dtype=torch.uint8)),
    "complex attn_mask": (q, k, k, None, torch.zeros(L, S, dtype=torch.complex64)),
    "double attn_mask": (q, k, k, None, torch.zeros(L, S, dtype=torch.double)),
    "half attn_mask": (q, k, k, None, torch.zeros(L, S, dtype=torch.half)),
    "1-D attn_mask": (q, k, k, None, torch.zeros(S)),
    "4-D attn_mask": (q, k, k, None, torch.zeros(N, H, L, S)),
    "2-D attn_mask size": (q, k, k, None, torch.zeros(S, L)),
    "2-D attn_mask broadcast": (q, k, k, None, torch.zeros(1, S)),
    "3-D attn_mask size": (q, k, k, None, torch.zeros(N, L, S)),
    "3-D attn_mask broadcast": (q, k, k, None, torch.zeros(1, L, S)),
    "integer key_padding_mask": (q, k, k, torch.zeros(N, S, dtype=torch.long)),
    "1-D key_padding_mask": (q, k, k, torch.zeros(S, dtype=torch.bool)),
    "3-D key_padding_mask": (q, k, k, torch.zeros(N, 1, S, dtype=torch.bool)),
    "key_padding_mask length": (q, k, k, torch.zeros(N, S + 1, dtype=torch.bool)),
    "key_padding_mask batch": (q, k, k, torch.zeros(1, S, dtype=torch.bool)),
    "key_padding_mask transposed": (q, k, k, torch.zeros(S, N, dtype=torch.bool)),
    "double key_padding_mask": (q, k, k, torch.zeros(N, S, dtype=torch.double) + 1),
    "unbatched, 2-D key_padding_mask": (q[0], k[0], k[0], torch.zeros(1, S, dtype=torch.bool)),
    "unbatched, 1-D attn_mask": (q[0], k[0], k[0], None, torch.zeros(S)),
    "unbatched, 3-D attn_mask size": (q[0], k[0], k[0], None, torch.zeros(H + 1, L, S)),
    "unbatched, 2-D attn_mask size": (q[0], k[0], k[0], None, torch.zeros(L, L)),
    "unbatched, key_padding_mask length": (q[0], k[0], k[0], torch.zeros(S - 1, dtype=torch.bool)),
    "list for attn_mask": (q, k, k, None, [[0.0] * S] * L),
    "list for key_padding_mask": (q, k, k, [[False] * S] * N),
}


@pytest.mark.parametrize("case", BAD_CALLS)
@pytest.mark.parametrize("kwargs", [{}, {"kdim": E, "vdim": E - 1}], ids=["packed", "separate"])
def test_errors_are_those_of_torch_in_every_mode(case, kwargs):
    theirs, ours = make_pair(torch.float32, batch_first=True, **kwargs)
    query, key, value, *masks = BAD_CALLS[case]
    if kwargs:
        value = value[..., : E - 1] if case != "value width" else value[..., : E - 2]
    arguments = dict(zip(("key_padding_mask", "attn_mask"), masks, strict=False))
    with pytest.raises((AssertionError, RuntimeError, TypeError)) as want:
        theirs(query, key, value, **arguments)
    for training, grad, need_weights in itertools.product((True, False), repeat=3):
        ours.train(training)
        with torch.set_grad_enabled(grad), pytest.raises(want.type) as got:
            ours(query, key, value, **arguments, need_weights=need_weights)
        assert got.type is want.type


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((q, k[0], k), r"expected `key` and `value` to be 3-D but found 2-D and 3-D tensors respectively"),
        ((q[0], k, k), r"expected `key` and `value` to be 2-D but found 3-D and 3-D tensors respectively"),
        ((q, k, k, k[0, :, 0] > 0), r"expected `key_padding_mask` to be `None` or 2-D but found 1-D"),
        ((q[0], k[0], k[0], k[..., 0] > 0), r"expected `key_padding_mask` to be `None` or 1-D but found 2-D"),
        ((q, k, k, None, True, k[0, 0]), r"expected `attn_mask` to be `None`, 2-D or 3-D but found 1-D"),
        ((q[0], k[0], k[0], None, True, k), rf"Expected `attn_mask` shape to be \({H}, {L}, {S}\)"),
        ((q, k, k, None, True, q[0]), r"The shape of the 2D attn_mask is \S+ \S+, but should be"),
        ((q, k, k, None, True, k), r"The shape of the 3D attn_mask is"),
        ((q[..., 1:], k, k), r"was expecting embedding dimension of"),
    ],
)
def test_messages_say_what_was_expected(arguments, message):
    for module in make_pair(torch.float32, batch_first=True):
        with pytest.raises((AssertionError, RuntimeError), match=message.replace(r"\S+ \S+", r".*")):
            module(*arguments)


def test_mask_dtypes_that_differ_warn_as_in_torch():
    for module in make_pair(torch.float32, batch_first=True):
        with pytest.warns(UserWarning, match="mismatched key_padding_mask and attn_mask is deprecated"):
            module(q, k, k, torch.zeros(N, S, dtype=torch.bool), attn_mask=torch.zeros(L, S))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            module(q, k, k, torch.zeros(N, S), attn_mask=torch.zeros(L, S))


def test_merge_masks_is_that_of_torch():
    theirs, ours = make_pair()
    query = torch.randn(N, L, E)
    padding = torch.zeros(N, L).masked_fill(torch.arange(L) > 2, -INF)
    for mask, kpm in itertools.product((None, torch.randn(L, L), torch.randn(N * H, L, L)), (None, padding)):
        want, want_type = theirs.merge_masks(mask, kpm, query)
        got, got_type = ours.merge_masks(mask, kpm, query)
        assert got_type == want_type
        assert got is None if want is None else torch.equal(got, want)


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


# ------------------------------------------------------------------- hooks, parametrizations, other out_proj


def test_hooks_act():
    _, ours = make_pair(batch_first=True)
    seen = []
    ours.register_forward_pre_hook(lambda m, a: seen.append("pre"))
    ours.register_forward_hook(lambda m, a, o: seen.append("post"))
    ours.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    ours.out_proj.register_forward_pre_hook(lambda m, a: seen.append("out_proj pre"))
    ours.out_proj.register_forward_hook(lambda m, a, o: o * 2)
    inputs = make_inputs(ours, "batch first")
    out = ours(*inputs)[0]
    _, plain = make_pair(batch_first=True)
    torch.testing.assert_close(out, plain(*inputs)[0] * 2)
    out.sum().backward()
    assert seen == ["pre", "out_proj pre", "post", "backward"]


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


def test_parametrizations_of_every_weight_act():
    _, ours = make_pair(batch_first=True)
    inputs = make_inputs(ours, "batch first")
    changed = copy.deepcopy(ours)
    with torch.no_grad():
        changed.in_proj_weight.mul_(2)
        changed.out_proj.weight.mul_(2)
    want = changed(*inputs)[0]
    parametrize.register_parametrization(ours, "in_proj_weight", Double())
    parametrize.register_parametrization(ours.out_proj, "weight", Double())
    assert isinstance(ours, fastattn.nn.MultiheadAttention)
    torch.testing.assert_close(ours(*inputs)[0], want)
    ours(*inputs)[0].sum().backward()
    assert ours.parametrizations.in_proj_weight.original.grad.abs().sum() > 0


def test_weight_norm_acts():
    _, ours = make_pair(batch_first=True)
    inputs = make_inputs(ours, "batch first")
    want = ours(*inputs)[0]
    parametrizations.weight_norm(ours, "in_proj_weight")
    parametrizations.weight_norm(ours.out_proj, "weight")
    torch.testing.assert_close(ours(*inputs)[0], want)
    with torch.no_grad():
        ours.out_proj.parametrizations.weight.original0.mul_(2)
    torch.testing.assert_close(
        ours(*inputs)[0] - ours.out_proj.bias, 2 * (want - ours.out_proj.bias), rtol=1e-6, atol=1e-8
    )


class LoRA(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features, dtype=base.weight.dtype))
        self.up = nn.Parameter(torch.randn(base.out_features, rank, dtype=base.weight.dtype))

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


def test_another_module_as_out_proj_is_called():
    _, ours = make_pair(batch_first=True)
    inputs = make_inputs(ours, "batch first")
    merged = copy.deepcopy(ours)
    ours.out_proj = LoRA(ours.out_proj)
    with torch.no_grad():
        merged.out_proj.weight += ours.out_proj.up @ ours.out_proj.down
    torch.testing.assert_close(ours(*inputs)[0], merged(*inputs)[0])
    ours(*inputs)[0].sum().backward()
    assert ours.out_proj.up.grad.abs().sum() > 0


def test_shared_parameters_collect_both_gradients():
    _, first = make_pair(batch_first=True)
    _, second = make_pair(batch_first=True)
    second.in_proj_weight = first.in_proj_weight
    inputs = make_inputs(first, "batch first")
    first(*inputs)[0].sum().backward()
    single = first.in_proj_weight.grad.clone()
    first.in_proj_weight.grad = None
    (first(*inputs)[0].sum() + second(*inputs)[0].sum()).backward()
    torch.testing.assert_close(first.in_proj_weight.grad, 2 * single)


# ---------------------------------------------------------------------------------------------------- memory


class Sizes(TorchDispatchMode):
    """Records the number of elements of everything that operators return."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.largest = max(self.largest, leaf.numel())
        return result


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_no_weights_per_head_unless_asked_for(dropout, masked):
    heads, length, width = 8, 64, 16
    module = fastattn.nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
    x = torch.randn(2, length, width, requires_grad=True)
    masks = {}
    if masked:
        masks["attn_mask"] = torch.ones(length, length, dtype=torch.bool).triu(1)
        masks["key_padding_mask"] = torch.arange(length) > torch.tensor([[length], [40]])
    per_head = 2 * heads * length * length
    for need_weights, average in ((False, True), (True, True), (True, False)):
        with Sizes() as sizes:
            out, _ = module(x, x, x, need_weights=need_weights, average_attn_weights=average, **masks)
            out.sum().backward()
        assert (sizes.largest >= per_head) == (not average)


# ---------------------------------------------------------------------- transforms, compilers, nested tensors


COMPILED_CALLS = {
    "plain": {},
    "no weights": {"need_weights": False},
    "causal": {"attn_mask": causal_masks(L, L)["float"], "is_causal": True, "need_weights": False},
    "padding": {"key_padding_mask": torch.zeros(N, L, dtype=torch.bool)},
    "mixed masks": {
        "key_padding_mask": torch.zeros(N, L, dtype=torch.bool),
        "attn_mask": torch.zeros(L, L, dtype=torch.float64),
    },
    "float masks": {
        "key_padding_mask": torch.ones(N, L, dtype=torch.float64),
        "attn_mask": torch.zeros(L, L, dtype=torch.float64),
    },
}


@pytest.mark.parametrize("kwargs", COMPILED_CALLS.values(), ids=COMPILED_CALLS)
def test_compile_without_graph_breaks(kwargs):
    torch.compiler.reset()
    _, ours = make_pair(batch_first=True)
    x = make_inputs(ours, "batch first", keys="self")[0]
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    want, got = call(ours, (x, x, x), **kwargs), call(compiled, (x, x, x), **kwargs)
    assert_same({k.removeprefix("_orig_mod."): v for k, v in got.items()}, want, rtol=1e-9, atol=1e-11)


def test_one_dynamic_compilation_serves_every_length():
    torch.compiler.reset()
    _, ours = make_pair(batch_first=True)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, fullgraph=True, backend=counter)
    for length in (5, 6, 8, 13, 40):
        x = torch.randn(N, length, E, dtype=torch.float64)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        torch.testing.assert_close(compiled(x, x, x, attn_mask=mask), ours(x, x, x, attn_mask=mask))
    assert counter.frame_count <= 3


def test_export():
    _, ours = make_pair(batch_first=True)
    x = torch.randn(N, L, E, dtype=torch.float64)
    program = torch.export.export(ours.eval(), (x, x, x))
    torch.testing.assert_close(program.module()(x, x, x), ours(x, x, x))


def test_functional_call_and_vmap():
    _, ours = make_pair(batch_first=True)
    x = torch.randn(4, N, L, E, dtype=torch.float64)
    doubled = {name: p.detach() * 2 for name, p in ours.named_parameters()}
    changed = copy.deepcopy(ours)
    changed.load_state_dict(doubled)
    torch.testing.assert_close(
        torch.func.functional_call(ours, doubled, (x[0],) * 3), changed(x[0], x[0], x[0])
    )

    def loss(parameters, x, padding):
        out, weights = torch.func.functional_call(ours, parameters, (x, x, x, padding))
        return out.square().sum() + weights.square().sum()

    padding = torch.zeros(4, N, L, dtype=torch.float64).masked_fill(torch.arange(L) == 3, -INF)
    grads = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(doubled, x, padding)
    for n in range(4):
        for name, grad in torch.func.grad(loss)(doubled, x[n], padding[n]).items():
            torch.testing.assert_close(grads[name][n], grad)


def test_scripting_is_refused_in_words():
    _, ours = make_pair()
    with warnings.catch_warnings(), pytest.raises(NotImplementedError, match="torch.jit.script"):
        warnings.simplefilter("ignore")
        torch.jit.script(ours)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("average", [True, False])
def test_nested_self_attention(average):
    theirs, ours = (m.eval() for m in make_pair(batch_first=True))
    sequences = [torch.randn(n, E, dtype=torch.float64) for n in (3, 5, 1)]
    x = torch.nested.nested_tensor(sequences)
    for training in (False, True):
        with torch.no_grad():
            out, weights = ours.train(training)(x, x, x, average_attn_weights=average)
            for sequence, o, w in zip(sequences, out.unbind(), weights, strict=True):
                n = len(sequence)
                want, want_weights = theirs(sequence, sequence, sequence, average_attn_weights=average)
                torch.testing.assert_close(o, want)
                torch.testing.assert_close(w[..., :n, :n], want_weights)
                assert w.sum() == pytest.approx(n * (1 if average else H))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_nested_tensors_are_refused():
    _, ours = make_pair(batch_first=True)
    sequences = [torch.randn(n, E, dtype=torch.float64) for n in (3, 5)]
    strided = torch.nested.nested_tensor(sequences)
    jagged = torch.nested.nested_tensor(sequences, layout=torch.jagged)
    mask = torch.zeros(5, 5, dtype=torch.bool)
    for args, kwargs in (
        ((jagged, jagged, jagged), {}),
        ((strided, strided, torch.nested.nested_tensor(sequences)), {}),
        ((strided, strided, strided), {"attn_mask": mask}),
        ((strided, strided, strided), {"key_padding_mask": mask[:2]}),
    ):
        with pytest.raises(AssertionError, match="nested"):
            ours(*args, **kwargs)


def test_documented_examples():
    results = doctest.testmod(implementation)
    assert results.attempted > 10 and results.failed == 0
