"""The registered ops of linear attention, and their derivatives under autograd and torch.func."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active

from fastattn import _triton
from fastattn.ops._common import (
    apply_function,
    call_op,
    library,
    logical_size,
    map_each,
    needs_function,
    register_autograd,
    wide_dtype,
)
from fastattn.reference import linear_attention as reference

__all__ = ["LinearAttention", "forward_op", "step_by_function", "step_op", "step_op_"]

# Everything is four-dimensional here: query (B, H, L, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv),
# decay (H,) or (B, H, L), key_padding_mask (B, S), initial_kv (N, H, D, Dv) and initial_z (N, H, D). N is B,
# or the number of sequences with cu_seqlens (N + 1,); then B is 1. A step has the same without L and S.

_INPUTS = (
    "Tensor? decay, Tensor? key_padding_mask, Tensor? cu_seqlens, Tensor? initial_kv, Tensor? initial_z, "
    "str feature_map, bool causal, bool normalize, float eps, float scale"
)
_STEP = "Tensor? decay, str feature_map, bool normalize, float eps, float scale"

library.define(
    f"linear_attention_forward(Tensor query, Tensor key, Tensor value, {_INPUTS}, bool return_state) "
    "-> (Tensor out, Tensor den, Tensor final_kv, Tensor final_z)"
)
library.define(
    "linear_attention_backward(Tensor? grad_out, Tensor? grad_kv, Tensor? grad_z, Tensor query, Tensor key, "
    f"Tensor value, Tensor out, Tensor den, {_INPUTS}, bool decay_grad, bool state_grad) -> "
    "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_decay, Tensor grad_initial_kv, "
    "Tensor grad_initial_z)"
)
library.define(
    f"linear_attention_step(Tensor query, Tensor key, Tensor value, Tensor kv, Tensor z, {_STEP}) "
    "-> (Tensor out, Tensor kv, Tensor z)"
)
library.define(
    "linear_attention_step_(Tensor query, Tensor key, Tensor value, Tensor(a!) kv, Tensor(b!) z, "
    f"{_STEP}) -> Tensor"
)
forward_op = torch.ops.fastattn.linear_attention_forward.default
backward_op = torch.ops.fastattn.linear_attention_backward.default
step_op = torch.ops.fastattn.linear_attention_step.default
step_op_ = torch.ops.fastattn.linear_attention_step_.default


@torch.library.register_fake("fastattn::linear_attention_forward", lib=library)
def _(query, key, value, decay, padding, cu_seqlens, kv, z, feature_map, causal, normalize, *args):
    (B, H, L, D), Dv = query.shape, value.shape[3]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    # Heads beside channels in memory: joining them afterwards is then a view.
    out = query.new_empty((B, L, H, Dv)).transpose(1, 2)
    den, final_kv, final_z = (
        query.new_empty(shape if wanted else (0,), dtype=wide_dtype(query.dtype))
        for shape, wanted in (((B, H, L), normalize), ((N, H, D, Dv), args[-1]), ((N, H, D), args[-1]))
    )
    return out, den, final_kv, final_z


@torch.library.register_fake("fastattn::linear_attention_backward", lib=library)
def _(grad_out, grad_kv, grad_z, query, key, value, out, den, decay, padding, cu_seqlens, kv, z, *args):
    decay_grad, state_grad = args[-2:]
    optional = ((decay, decay_grad), (kv, state_grad), (z, state_grad))
    return (
        *(torch.empty_like(t) for t in (query, key, value)),
        *(t.new_empty(t.shape) if wanted else query.new_empty(0) for t, wanted in optional),
    )


@torch.library.register_fake("fastattn::linear_attention_step", lib=library)
def _(query, key, value, kv, z, *args):
    out = query.new_empty((*query.shape[:2], value.shape[2]))
    return out, kv.new_empty(kv.shape), z.new_empty(z.shape)


@torch.library.register_fake("fastattn::linear_attention_step_", lib=library)
def _(query, key, value, kv, z, *args):
    return query.new_empty((*query.shape[:2], value.shape[2]))


class LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        query, key, value, decay, key_padding_mask, cu_seqlens, initial_kv, initial_z,
        feature_map, causal, normalize, eps, scale, return_state,
    ):  # fmt: skip
        return call_op(
            forward_op, query, key, value, decay, key_padding_mask, cu_seqlens, initial_kv, initial_z,
            feature_map, causal, normalize, eps, scale, return_state,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        out, den, *state = output
        ctx.return_state = inputs[13]
        ctx.mark_non_differentiable(den, *([] if ctx.return_state else state))
        ctx.save_for_backward(*inputs[:3], out, den, *inputs[3:8])
        ctx.options = inputs[8:13]

    @staticmethod
    def backward(ctx, grad_out, grad_den, grad_kv, grad_z):
        needs = ctx.needs_input_grad
        if not ctx.return_state:
            grad_kv = grad_z = None  # compiled code gives zeros here
        if grad_out is None and grad_kv is None and grad_z is None:
            return (None,) * 14
        wanted = needs[3], needs[6] or needs[7]
        args = (grad_out, grad_kv, grad_z, *ctx.saved_tensors, *ctx.options, *wanted)
        # The Function is only needed where this result is differentiated or mapped in turn.
        if torch.is_grad_enabled() or _are_functorch_transforms_active():
            grads = LinearAttentionBackward.apply(*args)
        else:
            # Through the dispatcher: autograd.grad(is_grads_batched=True) maps over it without telling
            # anyone.
            grads = backward_op(*args)
        grads = (*grads[:4], None, None, *grads[4:])
        return *(g if n else None for g, n in zip(grads, needs[:8], strict=True)), *(None,) * 6

    @staticmethod
    def vmap(info, in_dims, *args):
        if not _folds(in_dims[4:6]):
            return map_each(LinearAttention, info, in_dims, args)
        normalize, return_state = args[10], args[13]
        N = info.batch_size
        H = logical_size(args[0], in_dims[0], 1)
        tensors = [_fold(N, t, d) for t, d in zip(args[:8], in_dims[:8], strict=True)]
        outputs = LinearAttention.apply(*tensors[:4], *args[4:6], *tensors[6:], *args[8:])
        present = (True, normalize, return_state, return_state)
        return _unfold(outputs, present, (N, H))


class LinearAttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        grad_out, grad_kv, grad_z, query, key, value, out, den, decay, key_padding_mask, cu_seqlens,
        initial_kv, initial_z, feature_map, causal, normalize, eps, scale, decay_grad, state_grad,
    ):  # fmt: skip
        return call_op(
            backward_op, grad_out, grad_kv, grad_z, query, key, value, out, den, decay, key_padding_mask,
            cu_seqlens, initial_kv, initial_z, feature_map, causal, normalize, eps, scale,
            decay_grad, state_grad,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:6], *inputs[8:13])
        ctx.options = inputs[13:18]
        ctx.wanted = inputs[18:]

    @staticmethod
    def backward(ctx, *grads):
        """Second order: the derivative of the reference's derivative, as a function of the inputs alone.

        out and den are recomputed from the inputs, so they need no gradient of their own.
        """
        *incoming, query, key, value, decay, padding, cu_seqlens, kv, z = ctx.saved_tensors
        decay_grad, state_grad = ctx.wanted
        used = (True, True, True, decay_grad, state_grad, state_grad)
        inputs = (query, key, value, decay, kv, z)

        def attend(*primals):
            given = iter(primals)
            query, key, value, d, s, n = (next(given) if u else t for u, t in zip(used, inputs, strict=True))
            out, _, kv, z = reference.linear_attention(
                query, key, value, d, padding, cu_seqlens, s, n, *ctx.options, True
            )
            return tuple(t for t, g in zip((out, kv, z), incoming, strict=True) if g is not None)

        def first_order(incoming, *primals):
            return torch.func.vjp(attend, *primals)[1](incoming)

        given = tuple(g for g in incoming if g is not None)
        primals = _where(used, inputs)
        second = torch.func.vjp(first_order, given, *primals)[1](_where(used, grads))
        of_incoming, of_primals = iter(second[0]), iter(second[1:])
        grad_out, grad_kv, grad_z = (None if g is None else next(of_incoming) for g in incoming)
        grad_inputs = [next(of_primals) if u else None for u in used]
        return (
            grad_out, grad_kv, grad_z, *grad_inputs[:3], None, None, grad_inputs[3], None, None,
            *grad_inputs[4:], *(None,) * 7,
        )  # fmt: skip

    @staticmethod
    def vmap(info, in_dims, *args):
        if not _folds(in_dims[9:11]):
            return map_each(LinearAttentionBackward, info, in_dims, args)
        decay_grad, state_grad = args[18:]
        N = info.batch_size
        H, Hkv = (logical_size(args[n], in_dims[n], 1) for n in (3, 4))
        tensors = [_fold(N, t, d) for t, d in zip(args[:13], in_dims[:13], strict=True)]
        grads = LinearAttentionBackward.apply(*tensors[:9], *args[9:11], *tensors[11:], *args[13:])
        query, *keys = grads[0], grads[1], grads[2]
        (query,), (query_dim,) = _unfold((query,), (True,), (N, H))
        keys, key_dims = _unfold(keys, (True, True), (N, Hkv))
        rest, rest_dims = _unfold(grads[3:], (decay_grad, state_grad, state_grad), (N, H))
        return (query, *keys, *rest), (query_dim, *key_dims, *rest_dims)


def _where(used: Sequence[bool], tensors: Sequence) -> tuple:
    return tuple(t for u, t in zip(used, tensors, strict=True) if u)


def _folds(mapped: Sequence[int | None]) -> bool:
    """A mapped dimension becomes more heads, which need one padding and one set of sequences."""
    return all(d is None for d in mapped)


def _fold(N: int, tensor: Tensor | None, mapped: int | None) -> Tensor | None:
    """Joins a mapped dimension of size N to the heads, in front of them. Absent outputs stay absent."""
    if tensor is None or (mapped is None and tensor.dim() == 1 and tensor.numel() == 0):
        return tensor
    tensor = tensor.unsqueeze(0) if mapped is None else tensor.movedim(mapped, 0)
    heads = 0 if tensor.dim() == 2 else 1
    return tensor.expand(N, *tensor.shape[1:]).movedim(0, heads).flatten(heads, heads + 1)


def _unfold(tensors: Sequence[Tensor], present: Sequence[bool], sizes: tuple[int, int]):
    """The results of folded inputs, and where their mapped dimension is."""
    dims = [(0 if t.dim() == 1 else 1) if there else None for t, there in zip(tensors, present, strict=True)]
    results = [t if d is None else t.unflatten(d, sizes) for t, d in zip(tensors, dims, strict=True)]
    return tuple(results), tuple(dims)


def step_by_function(query, key, value, kv, z, decay, feature_map, normalize, eps, scale):
    """A step with its derivative: that of a sequence of one token."""
    if decay is not None and decay.dim() == 2:
        decay = decay.unsqueeze(2)
    query, key, value = (t.unsqueeze(2) for t in (query, key, value))
    options = (feature_map, True, normalize, eps, scale, True)
    out, _, kv, z = apply_function(LinearAttention, query, key, value, decay, None, None, kv, z, *options)
    return out.squeeze(2), kv, z


register_autograd("linear_attention_forward", forward_op, LinearAttention)
register_autograd("linear_attention_backward", backward_op, LinearAttentionBackward)


def _step(*args):
    if needs_function(args[:6]):
        return step_by_function(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return step_op(*args)


def _step_in_place(*args):
    if needs_function(args[:6]):
        raise RuntimeError(
            "linear_attention_step_ would overwrite the state that a gradient needs: use torch.no_grad()"
        )
    with torch._C._AutoDispatchBelowAutograd():
        return step_op_(*args)


def _step_in_place_counted(keys, *args):
    # What was saved for a backward before has changed now, and autograd is to know.
    torch.autograd.graph.increment_version(args[3:5])
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return step_op_.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args)


library.impl("linear_attention_step", _step, "Autograd")
library.impl("linear_attention_step_", _step_in_place, "Autograd")
library.impl("linear_attention_step_", _step_in_place_counted, "ADInplaceOrView", with_keyset=True)
_triton.register(
    library, "linear_attention", "linear_attention_forward", "linear_attention_backward",
    "linear_attention_step", "linear_attention_step_",
)  # fmt: skip
