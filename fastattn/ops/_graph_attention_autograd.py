"""The registered ops of attention on graphs, and their derivatives under autograd and torch.func."""

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active

from fastattn import _triton
from fastattn.graph import Compressed, transposed
from fastattn.ops._common import (
    call_in_backward,
    call_op,
    library,
    logical_size,
    map_each,
    register_autograd,
    wide_dtype,
)
from fastattn.reference import graph_attention as reference

__all__ = ["EdgeSoftmax", "GraphAttention", "edge_softmax", "forward_op"]

# One op for the three forms of the score (see the reference), which differ in the tensors they take:
#   "additive"  value (N_src, H, C), alpha_src (N_src, H), alpha_dst (N_dst, H), score_term (E, H)
#   "dot"       query (N_dst, H, D), key (N_src, H, D), value, score_term
#   "gatv2"     query (N_dst, H, C), value, edge (E, H, C), att (H, C)
# rowptr, col, perm are the edges by target; colptr, row, perm_t the same by source, for the derivative.
# num_src is what the numbers in col were checked against, and how many rows there must be of what belongs to
# sources; a call that was traced with other features does not know it by itself. stats
# (N_dst, 2, H), the largest score and the reciprocal of the sum of exponentials, is what the backward turns
# scores back into weights with. attention (E, H) is empty, (0,), unless it is asked for, and so are gradients
# of what is absent.
_FEATURES = (
    "str score, Tensor? query, Tensor? key, Tensor value, Tensor? alpha_src, Tensor? alpha_dst, "
    "Tensor? score_term, Tensor? edge, Tensor? att"
)
_BY_TARGET = "Tensor rowptr, Tensor col, Tensor? perm"
_SOURCES = "SymInt num_src"
_OPTIONS = "Tensor? dropout_seed, float scale, float negative_slope, float dropout_p"
_GRADS = ("query", "key", "value", "alpha_src", "alpha_dst", "score_term", "edge", "att")

library.define(
    f"graph_attention_forward({_FEATURES}, {_BY_TARGET}, {_SOURCES}, {_OPTIONS}, bool return_attention) "
    "-> (Tensor out, Tensor stats, Tensor attention)"
)
library.define(
    "graph_attention_backward(Tensor grad_out, Tensor? grad_attention, Tensor out, Tensor stats, "
    f"Tensor attention, {_FEATURES}, {_BY_TARGET}, {_SOURCES}, Tensor colptr, Tensor row, Tensor? perm_t, "
    f"{_OPTIONS}, bool edge_grad) -> ({', '.join(f'Tensor grad_{name}' for name in _GRADS)})"
)
library.define(f"edge_softmax_backward(Tensor grad, Tensor score, Tensor attention, {_BY_TARGET}) -> Tensor")
forward_op = torch.ops.fastattn.graph_attention_forward.default
backward_op = torch.ops.fastattn.graph_attention_backward.default
softmax_backward_op = torch.ops.fastattn.edge_softmax_backward.default


@torch.library.register_fake("fastattn::graph_attention_forward", lib=library)
def _(score, query, key, value, *args):
    rowptr, col, return_attention = args[5], args[6], args[-1]
    num_dst, (_, H, C) = rowptr.shape[0] - 1, value.shape
    stats = value.new_empty((num_dst, 2, H), dtype=wide_dtype(value.dtype))
    attention = value.new_empty((col.shape[0], H) if return_attention else (0,))
    return value.new_empty((num_dst, H, C)), stats, attention


@torch.library.register_fake("fastattn::graph_attention_backward", lib=library)
def _(grad_out, grad_attention, out, stats, attention, score, *args):
    wanted = [t is not None for t in args[:8]]
    wanted[6] = wanted[6] and args[-1]
    return tuple(
        args[2].new_empty(0) if not w else t.new_empty(t.shape) for w, t in zip(wanted, args[:8], strict=True)
    )


@torch.library.register_fake("fastattn::edge_softmax_backward", lib=library)
def _(grad, score, *args):
    return score.new_empty(score.shape)


class GraphAttention(torch.autograd.Function):
    """The arguments of forward_op, then colptr, row and perm_t, or None: made if a gradient is asked for."""

    @staticmethod
    def forward(*args):
        return call_op(forward_op, *args[:18])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        out, stats, attention = output
        ctx.mark_non_differentiable(*((stats,) if inputs[17] else (stats, attention)))
        ctx.save_for_backward(out, stats, attention, *inputs[1:12], inputs[13], *inputs[18:])
        ctx.score, ctx.num_src = inputs[0], inputs[12]
        ctx.options, ctx.return_attention = inputs[14:17], inputs[17]

    @staticmethod
    def backward(ctx, grad_out, grad_stats, grad_attention):
        if not ctx.return_attention:
            grad_attention = None
        if grad_out is None and grad_attention is None:
            return (None,) * 21
        out, stats, attention, *tensors = ctx.saved_tensors
        if grad_out is None:
            grad_out = out.new_zeros(()).expand(out.shape)
        inputs, seed, by_source = tensors[:8], tensors[11], tensors[12:]
        by_target = Compressed(*tensors[8:11], ctx.num_src)
        if by_source[0] is None:
            by_source = transposed(by_target)[:3]
        needs = ctx.needs_input_grad[1:9]
        args = (
            grad_out, grad_attention, out, stats, attention, ctx.score, *inputs, *by_target, *by_source,
            seed, *ctx.options, needs[6],
        )  # fmt: skip
        # The Function is only needed where this result is differentiated or mapped in turn.
        if torch.is_grad_enabled() or _are_functorch_transforms_active():
            grads = GraphAttentionBackward.apply(*args)
        else:
            grads = call_in_backward(backward_op, *args)
        return None, *(g if n else None for g, n in zip(grads, needs, strict=True)), *(None,) * 12

    @staticmethod
    def vmap(info, in_dims, *args):
        if args[13] is not None or not _shared(in_dims[9:]):
            return map_each(GraphAttention, info, in_dims, args)
        H = logical_size(args[3], in_dims[3], 1)
        inputs = _fold(info.batch_size, args[1:9], in_dims[1:9])
        outputs = GraphAttention.apply(args[0], *inputs, *args[9:])
        return _unfold(outputs, (True, True, args[17]), info.batch_size, H)


class GraphAttentionBackward(torch.autograd.Function):
    """(grad_out, grad_attention, out, stats, attention, then as GraphAttention, edge_grad)."""

    @staticmethod
    def forward(*args):
        return call_op(backward_op, *args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2], *inputs[6:17], inputs[21])
        ctx.score, ctx.num_src = inputs[5], inputs[17]
        ctx.options, ctx.edge_grad = inputs[22:25], inputs[25]

    @staticmethod
    def backward(ctx, *grads):
        """Second order: the derivative of the reference's derivative, as a function of the inputs alone.

        out, stats and attention are recomputed from the inputs, so they need no gradient of their own.
        """
        grad_out, grad_attention, *tensors, seed = ctx.saved_tensors
        inputs, by_target = tensors[:8], Compressed(*tensors[8:], ctx.num_src)
        used = [t is not None for t in inputs]
        used[6] = used[6] and ctx.edge_grad

        def attend(*primals):
            given = iter(primals)
            merged = [next(given) if u else t for u, t in zip(used, inputs, strict=True)]
            out, _, attention = reference.graph_attention(ctx.score, *merged, *by_target, seed, *ctx.options)
            return (out,) if grad_attention is None else (out, attention)

        def first_order(incoming, *primals):
            return torch.func.vjp(attend, *primals)[1](incoming)

        incoming = (grad_out,) if grad_attention is None else (grad_out, grad_attention)
        primals = tuple(t for u, t in zip(used, inputs, strict=True) if u)
        cotangents = tuple(g for u, g in zip(used, grads, strict=True) if u)
        of_incoming, *of_inputs = torch.func.vjp(first_order, incoming, *primals)[1](cotangents)
        rest = iter(of_inputs)
        of_inputs = (next(rest) if u else None for u in used)
        of_attention = None if grad_attention is None else of_incoming[1]
        return of_incoming[0], of_attention, *(None,) * 4, *of_inputs, *(None,) * 12

    @staticmethod
    def vmap(info, in_dims, *args):
        if args[21] is not None or not _shared(in_dims[14:]):
            return map_each(GraphAttentionBackward, info, in_dims, args)
        N, H = info.batch_size, logical_size(args[8], in_dims[8], 1)
        before = _fold(N, args[:5], in_dims[:5], (1, 1, 1, 2, 1))
        inputs = _fold(N, args[6:14], in_dims[6:14])
        grads = GraphAttentionBackward.apply(*before, args[5], *inputs, *args[14:])
        present = [t is not None for t in inputs]
        present[6] = present[6] and args[25]
        return _unfold(grads, present, N, H, (1, 1, 1, 1, 1, 1, 1, 0))


class EdgeSoftmax(torch.autograd.Function):
    """(score (E, H), rowptr, col, perm, number of sources)"""

    @staticmethod
    def forward(score, rowptr, col, perm, num_src):
        return edge_softmax(score, rowptr, col, perm, num_src)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output, *inputs[1:4])

    @staticmethod
    def backward(ctx, grad):
        score, attention, *by_target = ctx.saved_tensors
        if torch.is_grad_enabled() or _are_functorch_transforms_active():
            return EdgeSoftmaxBackward.apply(grad, score, attention, *by_target), *(None,) * 4
        return call_in_backward(softmax_backward_op, grad, score, attention, *by_target), *(None,) * 4

    @staticmethod
    def vmap(info, in_dims, *args):
        if not _shared(in_dims[1:]):
            return map_each(EdgeSoftmax, info, in_dims, args)
        H = logical_size(args[0], in_dims[0], 1)
        outputs = (EdgeSoftmax.apply(*_fold(info.batch_size, args[:1], in_dims[:1], (1,)), *args[1:]),)
        (out,), (dim,) = _unfold(outputs, (True,), info.batch_size, H)
        return out, dim


class EdgeSoftmaxBackward(torch.autograd.Function):
    @staticmethod
    def forward(grad, score, attention, rowptr, col, perm):
        return call_op(softmax_backward_op, grad, score, attention, rowptr, col, perm)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2], *inputs[3:])

    @staticmethod
    def backward(ctx, cotangent):
        grad, score, *by_target = ctx.saved_tensors

        def first_order(grad, score):
            return torch.func.vjp(lambda s: reference.edge_softmax(s, *by_target), score)[1](grad)

        return *torch.func.vjp(first_order, grad, score)[1]((cotangent,)), *(None,) * 4

    @staticmethod
    def vmap(info, in_dims, *args):
        if not _shared(in_dims[3:]):
            return map_each(EdgeSoftmaxBackward, info, in_dims, args)
        H = logical_size(args[1], in_dims[1], 1)
        tensors = _fold(info.batch_size, args[:3], in_dims[:3], (1, 1, 1))
        (out,), (dim,) = _unfold(
            (EdgeSoftmaxBackward.apply(*tensors, *args[3:]),), (True,), info.batch_size, H
        )
        return out, dim


def edge_softmax(score: Tensor, rowptr: Tensor, col: Tensor, perm: Tensor | None, num_src: int) -> Tensor:
    """The attention of sources without features, scored by nothing but the term of each edge."""
    value = score.new_empty(num_src, score.shape[1], 0)
    return call_op(
        forward_op, "additive", None, None, value, None, None, score, None, None, rowptr, col, perm,
        num_src, None, 1.0, 1.0, 0.0, True,
    )[2]  # fmt: skip


def _shared(in_dims) -> bool:
    """A mapped dimension becomes more heads, which share one graph (and would share a pattern of dropout)."""
    return all(d is None for d in in_dims)


def _fold(N: int, tensors, in_dims, heads=(1, 1, 1, 1, 1, 1, 1, 0)) -> list[Tensor | None]:
    """Joins a mapped dimension of size N to the heads, in front of them. Absent tensors stay absent."""

    def fold(tensor, mapped, dim):
        if tensor is None or (mapped is None and tensor.dim() == 1):
            return tensor
        tensor = tensor.unsqueeze(0) if mapped is None else tensor.movedim(mapped, 0)
        return tensor.expand(N, *tensor.shape[1:]).movedim(0, dim).flatten(dim, dim + 1)

    return [fold(t, d, h) for t, d, h in zip(tensors, in_dims, heads, strict=True)]


def _unfold(tensors, present, N: int, H: int, heads=(1, 2, 1)):
    """The results of folded inputs, and where their mapped dimension is."""
    dims = [h if p else None for p, h in zip(present, heads, strict=False)]
    return tuple(
        t if d is None else t.unflatten(d, (N, H)) for t, d in zip(tensors, dims, strict=True)
    ), tuple(dims)


register_autograd("graph_attention_forward", forward_op, GraphAttention, None, None, None)
register_autograd("graph_attention_backward", backward_op, GraphAttentionBackward)
register_autograd("edge_softmax_backward", softmax_backward_op, EdgeSoftmaxBackward)
_triton.register(
    library, "graph_attention", "graph_attention_forward", "graph_attention_backward", "edge_softmax_backward"
)
