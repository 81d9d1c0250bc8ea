"""fastattn.nn.MultiheadAttention refuses what torch.nn.MultiheadAttention refuses, in every mode."""

import itertools
import warnings

import pytest
import torch
from multihead_attention_cases import INF, E, H, L, N, S, make_pair


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
