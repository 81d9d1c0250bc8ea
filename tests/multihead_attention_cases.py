"""Modules, inputs and masks for the tests of nn.MultiheadAttention, and how two calls are compared."""

import itertools
import warnings

import torch
from torch import nn

import fastattn

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
