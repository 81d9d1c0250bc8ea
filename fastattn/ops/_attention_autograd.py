"""The registered ops of softmax attention, and their derivatives under autograd and torch.func."""

import re
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active

from fastattn import _triton
from fastattn.ops._common import (
    CPU_KEYS,
    call_op,
    library,
    logical_dim,
    logical_size,
    map_each,
    needs_function,
    register_autograd,
    wide_dtype,
)
from fastattn.reference import attention as reference

__all__ = [
    "Attention", "AttentionWeights", "apply_plain_attention", "causality_op", "forward_op",
    "forward_with_weights_op", "weights_op",
]  # fmt: skip

# Everything is four-dimensional here: query (B, H, L, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv),
# attn_mask with dimensions that are full or 1 (outside of vmap they may also be missing in front),
# key_padding_mask (B, S), alibi_slopes (H,) or (B, H), sinks (H,). -1 is an unlimited window, causal is
# window_right = 0.
# Packed sequences are a batch of 1, (1, H, total, D), that cu_seqlens (N + 1,) cut into N; alibi_slopes are
# then (H,) or (N, H), and there are no masks. These arguments come last, so that other calls go without them.

# What a call leaves out need not be converted for it.
_DEFAULTED_OPTIONS = (
    "float scale, float softcap=0.0, int window_left=-1, int window_right=-1, bool lower_right=False, "
    "float dropout_p=0.0"
)
_OPTIONS = re.sub("=[^,]*", "", _DEFAULTED_OPTIONS)  # where others follow
_PACKED = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None"
)
_BIASES = "Tensor? attn_mask, Tensor? key_padding_mask, Tensor? alibi_slopes"

library.define(
    f"attention_forward(Tensor query, Tensor key, Tensor value, {_BIASES}, Tensor? sinks, "
    f"Tensor? dropout_seed, {_DEFAULTED_OPTIONS}, {_PACKED}) -> (Tensor out, Tensor lse)"
)
library.define(
    "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
    f"Tensor out, Tensor lse, {_BIASES}, Tensor? sinks, Tensor? dropout_seed, {_OPTIONS}, "
    f"bool mask_grad, bool alibi_grad, bool sinks_grad, {_PACKED}) -> (Tensor grad_query, "
    "Tensor grad_key, Tensor grad_value, Tensor grad_mask, Tensor grad_alibi, Tensor grad_sinks)"
)
library.define(
    f"attention_weights(Tensor query, Tensor key, Tensor lse, {_BIASES}, Tensor? sinks, "
    f"Tensor? dropout_seed, {_OPTIONS}, bool average_heads) -> Tensor"
)
# Both, which one pass over the scores may find together.
library.define(
    f"attention_forward_with_weights(Tensor query, Tensor key, Tensor value, {_BIASES}, Tensor? sinks, "
    f"Tensor? dropout_seed, {_OPTIONS}, bool average_heads) -> (Tensor out, Tensor lse, Tensor weights)"
)
# Of a mask in the sense of nn.MultiheadAttention, where True or -inf hides. 0: a key right of the diagonal is
# visible somewhere; 1: none is; 2: none is, and all other elements are 0.
library.define("attention_causality(Tensor mask) -> int")
forward_op = torch.ops.fastattn.attention_forward.default
backward_op = torch.ops.fastattn.attention_backward.default
weights_op = torch.ops.fastattn.attention_weights.default
forward_with_weights_op = torch.ops.fastattn.attention_forward_with_weights.default
causality_op = torch.ops.fastattn.attention_causality.default


@torch.library.register_fake("fastattn::attention_forward", lib=library)
def _(query, key, value, *args):
    (B, H, L, _), Dv = query.shape, value.shape[3]
    # Heads beside channels in memory: joining them afterwards is then a view.
    out = query.new_empty((B, L, H, Dv)).transpose(1, 2)
    return out, query.new_empty((B, H, L), dtype=wide_dtype(query.dtype))


@torch.library.register_fake("fastattn::attention_backward", lib=library)
def _(
    grad_out, grad_lse, query, key, value, out, lse, attn_mask, key_padding_mask, alibi_slopes, sinks, *args
):
    optional = zip((attn_mask, alibi_slopes, sinks), args[7:10], strict=True)
    return (
        *(torch.empty_like(t) for t in (query, key, value)),
        *(t.new_empty(t.shape) if wanted else query.new_empty(0) for t, wanted in optional),
    )


@torch.library.register_fake("fastattn::attention_weights", lib=library)
def _(query, key, lse, *args):
    (B, H, L, _), S = query.shape, key.shape[2]
    return query.new_empty((B, L, S) if args[-1] else (B, H, L, S))


@torch.library.register_fake("fastattn::attention_forward_with_weights", lib=library)
def _(query, key, value, *args):
    out, lse = forward_op(query, key, value, *args[:-1])
    return out, lse, weights_op(query, key, lse, *args)


def _differentiable_forward_with_weights(query, key, value, *args):
    if not needs_function([a for a in (query, key, value, *args) if isinstance(a, Tensor)]):
        with torch._C._AutoDispatchBelowAutograd():
            return forward_with_weights_op(query, key, value, *args)
    out, lse = forward_op(query, key, value, *args[:-1])
    return out, lse, weights_op(query, key, lse, *args)


library.impl("attention_forward_with_weights", _differentiable_forward_with_weights, "Autograd")


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        query, key, value, attn_mask, key_padding_mask, alibi_slopes, sinks, dropout_seed,
        scale, softcap, window_left, window_right, lower_right, dropout_p, *packed,
    ):  # fmt: skip
        return call_op(
            forward_op, query, key, value, attn_mask, key_padding_mask, alibi_slopes, sinks, dropout_seed,
            scale, softcap, window_left, window_right, lower_right, dropout_p, *packed,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:3], *output, *inputs[3:8], *inputs[14:16])
        ctx.options = inputs[8:14]
        ctx.longest = inputs[16:]

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        # Spelled out: on small inputs these lines take as long as the kernel.
        if grad_out is None and grad_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad
        if grad_out is None:
            out = saved[3]
            grad_out = out.new_zeros(()).expand(out.shape)
        args = (grad_out, grad_lse, *saved[:10], *ctx.options, needs[3], needs[5], needs[6])
        args = (*args, *saved[10:], *ctx.longest)
        # The Function is only needed where this result is differentiated or mapped in turn.
        if torch.is_grad_enabled() or _are_functorch_transforms_active():
            grads = AttentionBackward.apply(*args)
        else:
            grads = call_op(backward_op, *args)
        return (
            grads[0] if needs[0] else None,
            grads[1] if needs[1] else None,
            grads[2] if needs[2] else None,
            grads[3] if needs[3] else None,
            None,
            grads[4] if needs[5] else None,
            grads[5] if needs[6] else None,
            *(None,) * (len(needs) - 7),
        )  # fmt: skip

    @staticmethod
    def vmap(info, in_dims, *args):
        # Sinks have no batch dimension, and a dropout pattern depends on the position in the batch: one call
        # each.
        if args[14:15] not in ((), (None,)):
            return _map_packed(Attention, info, in_dims, args)
        if in_dims[6] is not None or args[7] is not None:
            return map_each(Attention, info, in_dims, args)
        B = logical_size(args[0], in_dims[0], 0)
        fold = _Fold(info.batch_size, B)
        query, key, value, padding = (fold.batched(args[n], in_dims[n]) for n in (0, 1, 2, 4))
        attn_mask = fold.mask(args[3], in_dims[3])
        alibi_slopes = fold.slopes(args[5], in_dims[5])
        outputs = Attention.apply(query, key, value, attn_mask, padding, alibi_slopes, *args[6:])
        return tuple(fold.unfold(t) for t in outputs), (0, 0)


_forward_boxed = forward_op._handle.redispatch_boxed


class PlainAttention(torch.autograd.Function):
    """The same for tensors known to be plain, where nothing but autograd has to see the call: in as few steps
    as possible, which on tiny inputs take longer than the kernel. No setup_context, see apply_function."""

    @staticmethod
    def forward(ctx, *args):
        out, lse = _forward_boxed(CPU_KEYS, *args)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*args[:3], out, lse, *args[3:8])
        ctx.options, ctx.longest = args[8:], ()
        return out, lse

    backward = Attention.backward


# As in apply_function, without looking for what is known to be absent.
apply_plain_attention = super(torch.autograd.Function, PlainAttention).apply


class AttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        grad_out, grad_lse, query, key, value, out, lse, attn_mask, key_padding_mask, alibi_slopes, sinks,
        dropout_seed, scale, softcap, window_left, window_right, lower_right, dropout_p,
        mask_grad, alibi_grad, sinks_grad, *packed,
    ):  # fmt: skip
        return call_op(
            backward_op, grad_out, grad_lse, query, key, value, out, lse, attn_mask, key_padding_mask,
            alibi_slopes, sinks, dropout_seed, scale, softcap, window_left, window_right, lower_right,
            dropout_p, mask_grad, alibi_grad, sinks_grad, *packed,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:5], inputs[6], *inputs[7:12], *inputs[21:23])
        ctx.options = inputs[12:18]
        ctx.wanted = inputs[18:21]

    @staticmethod
    def backward(ctx, *grads):
        """Second order: the derivative of the reference's derivative, as a function of the inputs alone.

        out and lse are recomputed from the inputs, so they need no gradient of their own.
        """
        grad_out, grad_lse, query, key, value, lse, attn_mask, padding, alibi_slopes, sinks, seed, *bounds = (
            ctx.saved_tensors
        )
        optional = (attn_mask, alibi_slopes, sinks)
        primals = (query, key, value, *(t for t, wanted in zip(optional, ctx.wanted, strict=True) if wanted))
        cotangents = (*grads[:3], *(g for g, wanted in zip(grads[3:], ctx.wanted, strict=True) if wanted))

        def attend(query, key, value, *rest):
            rest = iter(rest)
            mask, slopes, sink = (next(rest) if w else t for t, w in zip(optional, ctx.wanted, strict=True))
            args = (query, key, value, mask, padding, slopes, sink, seed, *ctx.options, *bounds)
            return reference.attention(*args)

        def first_order(grad_out, grad_lse, *primals):
            return torch.func.vjp(attend, *primals)[1]((grad_out, grad_lse))

        no_grad_lse = grad_lse is None
        if no_grad_lse:
            grad_lse = torch.zeros_like(lse)
        second = torch.func.vjp(first_order, grad_out, grad_lse, *primals)[1](cotangents)
        rest = iter(second[5:])
        grad_mask, grad_alibi, grad_sinks = (next(rest) if wanted else None for wanted in ctx.wanted)
        return (
            second[0], None if no_grad_lse else second[1], *second[2:5], None, None,
            grad_mask, None, grad_alibi, grad_sinks, *(None,) * (len(ctx.needs_input_grad) - 11),
        )  # fmt: skip

    @staticmethod
    def vmap(info, in_dims, *args):
        mask_grad, alibi_grad, sinks_grad = args[18:21]
        if args[21:22] not in ((), (None,)):
            return _map_packed_backward(info, in_dims, args)
        if in_dims[10] is not None or sinks_grad or args[11] is not None:
            return map_each(AttentionBackward, info, in_dims, args)
        attn_mask, alibi_slopes = args[7], args[9]
        B = logical_size(args[2], in_dims[2], 0)
        fold = _Fold(info.batch_size, B)
        batched = [fold.batched(args[n], in_dims[n]) for n in range(7)]
        grads = AttentionBackward.apply(
            *batched,
            fold.mask(attn_mask, in_dims[7], expand=mask_grad),
            fold.batched(args[8], in_dims[8]),
            fold.slopes(alibi_slopes, in_dims[9], expand=alibi_grad),
            *args[10:],
        )
        outputs = [fold.unfold(g) for g in grads[:3]]
        for grad, wanted, shared in (
            (grads[3], mask_grad, mask_grad and logical_size(attn_mask, in_dims[7], 0) == 1),
            (grads[4], alibi_grad, alibi_grad and logical_dim(alibi_slopes, in_dims[9]) == 1),
        ):
            if wanted:
                grad = fold.unfold(grad)
                if shared:
                    grad = grad.sum(1, keepdim=grad.dim() > 3)
            outputs.append(grad)
        return (*outputs, grads[5]), (0, 0, 0, 0 if mask_grad else None, 0 if alibi_grad else None, None)


class AttentionWeights(torch.autograd.Function):
    @staticmethod
    def forward(
        query, key, lse, attn_mask, key_padding_mask, alibi_slopes, sinks, dropout_seed,
        scale, softcap, window_left, window_right, lower_right, dropout_p, average_heads,
    ):  # fmt: skip
        return call_op(
            weights_op, query, key, lse, attn_mask, key_padding_mask, alibi_slopes, sinks, dropout_seed,
            scale, softcap, window_left, window_right, lower_right, dropout_p, average_heads,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:8])
        ctx.options = inputs[8:]

    @staticmethod
    def backward(ctx, grad):
        query, key, lse, attn_mask, padding, alibi_slopes, sinks, seed = ctx.saved_tensors
        mask_grad, alibi_grad = ctx.needs_input_grad[3], ctx.needs_input_grad[5]

        def weigh(query, key, lse, *rest):
            rest = iter(rest)
            mask = next(rest) if mask_grad else attn_mask
            slopes = next(rest) if alibi_grad else alibi_slopes
            others = (mask, padding, slopes, sinks, seed)
            return reference.attention_weights(query, key, lse, *others, *ctx.options)

        rest = (attn_mask,) * mask_grad + (alibi_slopes,) * alibi_grad
        grads = torch.func.vjp(weigh, query, key, lse, *rest)[1](grad)
        rest = iter(grads[3:])
        grad_mask = next(rest) if mask_grad else None
        grad_alibi = next(rest) if alibi_grad else None
        return *grads[:3], grad_mask, None, grad_alibi, *(None,) * 9  # that of sinks goes through lse

    @staticmethod
    def vmap(info, in_dims, *args):
        if in_dims[6] is not None or args[7] is not None:  # see Attention
            return map_each(AttentionWeights, info, in_dims, args)
        fold = _Fold(info.batch_size, logical_size(args[0], in_dims[0], 0))
        query, key, lse, padding = (fold.batched(args[n], in_dims[n]) for n in (0, 1, 2, 4))
        attn_mask, alibi_slopes = fold.mask(args[3], in_dims[3]), fold.slopes(args[5], in_dims[5])
        weights = AttentionWeights.apply(query, key, lse, attn_mask, padding, alibi_slopes, *args[6:])
        return fold.unfold(weights), 0


class _Fold(NamedTuple):
    """Folds a mapped dimension of size N into the batch dimension of size B, in front of it."""

    N: int
    B: int

    def batched(self, tensor: Tensor | None, mapped: int | None) -> Tensor | None:
        if tensor is None:
            return None
        tensor = tensor.expand(self.N, *tensor.shape) if mapped is None else tensor.movedim(mapped, 0)
        return tensor.flatten(0, 1)

    def mask(self, mask: Tensor | None, mapped: int | None, expand: bool = False) -> Tensor | None:
        """A mask that is shared stays shared, unless each element wants its own gradient (``expand``)."""
        if mask is None or (mapped is None and mask.shape[0] == 1 and not expand):
            return mask
        mask = mask.unsqueeze(0) if mapped is None else mask.movedim(mapped, 0)
        return mask.expand(self.N, self.B, *mask.shape[2:]).flatten(0, 1)

    def slopes(self, slopes: Tensor | None, mapped: int | None, expand: bool = False) -> Tensor | None:
        if slopes is None or (mapped is None and slopes.dim() == 1 and not expand):
            return slopes
        slopes = slopes.unsqueeze(0) if mapped is None else slopes.movedim(mapped, 0)
        slopes = slopes.unsqueeze(1) if slopes.dim() == 2 else slopes
        return slopes.expand(self.N, self.B, slopes.shape[2]).flatten(0, 1)

    def unfold(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (self.N, self.B))


class _FoldHeads(NamedTuple):
    """Folds a mapped dimension of size N into the heads of packed tensors, in front of them."""

    N: int

    def heads(self, tensor: Tensor | None, mapped: int | None, dim: int) -> Tensor | None:
        if tensor is None:
            return None
        tensor = tensor.expand(self.N, *tensor.shape) if mapped is None else tensor.movedim(mapped, 0)
        return tensor.movedim(0, dim).flatten(dim, dim + 1)

    def unfold(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.unflatten(dim, (self.N, -1)).movedim(dim, 0)

    def arguments(self, args, in_dims, slopes: int, sinks: int) -> list:
        """Those of the tensors and biases; the others as they are."""
        folded = list(args)
        for n in range(sinks + 1):
            if n in (slopes, sinks):
                dim = 0 if args[n] is None else logical_dim(args[n], in_dims[n]) - 1
            else:
                dim = 1
            folded[n] = self.heads(args[n], in_dims[n], dim)
        return folded


def _map_packed(function, info, in_dims, args):
    # Sequences that differ from element to element are a call each, and so is a dropout pattern that depends
    # on the head.
    if args[7] is not None or any(d is not None for d in in_dims[14:16]):
        return map_each(function, info, in_dims, args)
    fold = _FoldHeads(info.batch_size)
    outputs = function.apply(*fold.arguments(args, in_dims, 5, 6))
    return tuple(fold.unfold(t, 1) for t in outputs), (0, 0)


def _map_packed_backward(info, in_dims, args):
    if args[11] is not None or any(d is not None for d in in_dims[21:23]):
        return map_each(AttentionBackward, info, in_dims, args)
    fold = _FoldHeads(info.batch_size)
    grads = AttentionBackward.apply(*fold.arguments(args, in_dims, 9, 10))
    _, alibi_grad, sinks_grad = args[18:21]
    outputs = [fold.unfold(g, 1) for g in grads[:3]]
    outputs.append(grads[3])
    outputs.append(fold.unfold(grads[4], grads[4].dim() - 1) if alibi_grad else grads[4])
    outputs.append(fold.unfold(grads[5], 0) if sinks_grad else grads[5])
    return tuple(outputs), (0, 0, 0, None, 0 if alibi_grad else None, 0 if sinks_grad else None)


register_autograd("attention_forward", forward_op, Attention)
register_autograd("attention_backward", backward_op, AttentionBackward)
register_autograd("attention_weights", weights_op, AttentionWeights)
_triton.register(
    library, "attention", "attention_forward", "attention_backward", "attention_weights",
    "attention_forward_with_weights",
)  # fmt: skip
