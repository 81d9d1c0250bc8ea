"""The registered ops of neighbour aggregation, and their derivatives under autograd and torch.func.

The ops are linear or bilinear in their arguments, and each other's derivatives: the gradient of a weighted
sum is a weighted sum over the reversed edges and, for the weights, a dot product per edge. So every
derivative of any order is made of the same three kernels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastattn import _triton
from fastattn.graph import Compressed, Graph, transposed
from fastattn.ops._common import (
    CPU_KEYS,
    apply_function,
    are_plain,
    call_in_backward,
    call_op,
    is_watched,
    library,
    logical_size,
    map_each,
    needs_function,
    register_autograd,
)
from fastattn.reference._common import wide_dtype

__all__ = ["Form", "aggregate_max", "aggregate_sum", "aggregate_rows", "edge_dot"]

# x is (B, N, H, F). The edges of row n are at positions rowptr[n] to rowptr[n + 1] of col, their other ends,
# and of perm, the caller's edge numbers (None: the positions). num_cols is what the numbers in col were
# checked against when the graph was built; x must have that many nodes, which a call that was traced with
# other features does not know by itself. edge_weight is (E, H) or (E, 1) in the
# caller's order; row_scale and col_scale are vectors over the rows and the other ends, in the dtype of sums.
# arg, of the shape of the result or of x, restricts the sum to the edges that it names. edge_dot gives the
# dtype of sums, and weights may be of it beside half precision: what is summed further is not rounded before.
# Without return_arg the arg of aggregate_max is empty, (0,): what no gradient needs is not written.
#
# Whoever calls the ops directly answers for the graph, as a Graph does: rowptr never decreases, col holds
# numbers below num_cols, perm every number below E once. Kernels check shapes, dtypes and both ends of rowptr
# alone: looking through the numbers at each call made sums over few features 3 to 17% slower.
_EDGES = "Tensor rowptr, Tensor col, Tensor? perm, SymInt num_cols"
_SELECTION = "Tensor? row_scale, Tensor? col_scale, Tensor? arg, bool arg_of_rows"

library.define(f"aggregate_sum(Tensor x, {_EDGES}, Tensor? edge_weight, {_SELECTION}) -> Tensor")
library.define(
    f"aggregate_max(Tensor x, {_EDGES}, Tensor? edge_weight, bool minimum, bool return_arg) "
    "-> (Tensor out, Tensor arg)"
)
library.define(f"edge_dot(Tensor a, Tensor b, {_EDGES}, {_SELECTION}, bool per_head) -> Tensor")
sum_op = torch.ops.fastattn.aggregate_sum.default
max_op = torch.ops.fastattn.aggregate_max.default
dot_op = torch.ops.fastattn.edge_dot.default


@torch.library.register_fake("fastattn::aggregate_sum", lib=library)
def _(x, rowptr, *args):
    B, _, H, F = x.shape
    return x.new_empty((B, rowptr.shape[0] - 1, H, F))


@torch.library.register_fake("fastattn::aggregate_max", lib=library)
def _(x, rowptr, col, *args):
    B, _, H, F = x.shape
    shape = B, rowptr.shape[0] - 1, H, F
    return x.new_empty(shape), col.new_empty(shape if args[-1] else 0)


@torch.library.register_fake("fastattn::edge_dot", lib=library)
def _(a, b, rowptr, col, perm, num_cols, row_scale, col_scale, arg, arg_of_rows, per_head):
    return a.new_empty((col.shape[0], a.shape[2] if per_head else 1), dtype=wide_dtype(a.dtype))


# What the derivatives are written with. ``csr`` are the edges by row; ``csc``, the same by their other end,
# may be None: whoever needs it then makes it.


def aggregate_sum(
    x: Tensor,
    csr: Compressed,
    csc: Compressed | None = None,
    edge_weight: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    arg: Tensor | None = None,
    arg_of_rows: bool = False,
    *,
    call=call_op,
) -> Tensor:
    """``fastattn::aggregate_sum`` with its derivative."""
    args = (x, *csr, edge_weight, row_scale, col_scale, arg, arg_of_rows)
    if needs_function((x, edge_weight, row_scale, col_scale)):
        return apply_function(AggregateSum, *args, *_parts(csc))
    return call(sum_op, *args)


def aggregate_max(
    x: Tensor, csr: Compressed, csc: Compressed | None, edge_weight: Tensor | None, minimum: bool
) -> Tensor:
    """The values of ``fastattn::aggregate_max`` with their derivative."""
    args = (x, *csr, edge_weight, minimum)
    if needs_function((x, edge_weight)):
        return apply_function(AggregateMax, *args, *_parts(csc))[0]
    return call_op(max_op, *args, False)[0]


def edge_dot(
    a: Tensor,
    b: Tensor,
    csr: Compressed,
    csc: Compressed | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    arg: Tensor | None,
    arg_of_rows: bool,
    per_head: bool,
    *,
    call=call_op,
) -> Tensor:
    """``fastattn::edge_dot`` with its derivative."""
    args = (a, b, *csr, row_scale, col_scale, arg, arg_of_rows, per_head)
    if needs_function((a, b, row_scale, col_scale)):
        return apply_function(EdgeDot, *args, *_parts(csc))
    return call(dot_op, *args)


def _parts(csc: Compressed | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return (None, None, None) if csc is None else csc[:3]


def _sum(*args) -> Tensor:
    return aggregate_sum(*args, call=call_in_backward)


def _dot(*args) -> Tensor:
    return edge_dot(*args, call=call_in_backward)


def _both_ways(edges, num_cols: int, needed: bool) -> tuple[Compressed, Compressed | None]:
    csr = Compressed(*edges[:3], num_cols)
    if edges[3] is not None:
        return csr, Compressed(*edges[3:], csr.ptr.shape[0] - 1)
    return csr, transposed(csr) if needed else None


def _sum_over_edges(
    value: Tensor, csr: Compressed, csc: Compressed | None, col_scale: Tensor | None
) -> Tensor:
    """For each row the sum of ``value * col_scale`` over its edges and heads; value is (E, H)."""
    ones = value.new_ones(()).expand(1, csr.num_cols, value.shape[1], 1)
    return _sum(ones, csr, csc, value, None, col_scale).sum((0, 2, 3))


def _scale_of_edges(row_scale, col_scale, csr, csc) -> Tensor:
    """(E, 1): the product of the scales at both ends of each edge."""
    one = (col_scale if row_scale is None else row_scale).new_ones(())
    rows = one.expand(csr.ptr.shape[0] - 1) if row_scale is None else row_scale
    cols = one.expand(csr.num_cols) if col_scale is None else col_scale
    return _dot(rows.view(1, -1, 1, 1), cols.view(1, -1, 1, 1), csr, csc, *(None,) * 3, False, False)


class AggregateSum(torch.autograd.Function):
    @staticmethod
    def forward(
        x, rowptr, col, perm, num_cols, edge_weight, row_scale, col_scale, arg, arg_of_rows, colptr, row,
        perm_t,
    ):  # fmt: skip
        return call_op(
            sum_op, x, rowptr, col, perm, num_cols, edge_weight, row_scale, col_scale, arg, arg_of_rows
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, *csr, num_cols, edge_weight, row_scale, col_scale, arg, arg_of_rows, colptr, row, perm_t = inputs
        scaled = any(t is not None and t.requires_grad for t in (edge_weight, row_scale, col_scale))
        # A sum does not need what it summed, unless its terms have factors with gradients.
        ctx.save_for_backward(
            x if scaled else None, edge_weight, row_scale, col_scale, arg, *csr, colptr, row, perm_t
        )
        ctx.arg_of_rows, ctx.num_cols = arg_of_rows, num_cols

    @staticmethod
    def backward(ctx, grad):
        x, weight, row_scale, col_scale, arg, *edges = ctx.saved_tensors
        wants_x, (wants_weight, wants_row, wants_col) = ctx.needs_input_grad[0], ctx.needs_input_grad[5:8]
        of_rows = ctx.arg_of_rows
        csr, csc = _both_ways(edges, ctx.num_cols, wants_x or wants_col)
        grad_x = grad_weight = grad_row = grad_col = None
        if wants_x:
            grad_x = _sum(grad, csc, csr, weight, col_scale, row_scale, arg, not of_rows)
        if wants_row or wants_col:
            # The products without scales give all three gradients.
            dot = _dot(grad, x, csr, csc, None, None, arg, of_rows, _is_per_head(weight))
            weighted = dot if weight is None else dot * weight.to(dot.dtype)
            if wants_row:
                grad_row = _sum_over_edges(weighted, csr, csc, col_scale)
            if wants_col:
                grad_col = _sum_over_edges(weighted, csc, csr, row_scale)
            if wants_weight:
                scale = _scale_of_edges(row_scale, col_scale, csr, csc)
                grad_weight = dot * scale
        elif wants_weight:
            grad_weight = _dot(grad, x, csr, csc, row_scale, col_scale, arg, of_rows, _is_per_head(weight))
        if wants_weight:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_x, *(None,) * 4, grad_weight, grad_row, grad_col, *(None,) * 5

    @staticmethod
    def vmap(info, in_dims, *args):
        x, *csr, weight, row_scale, col_scale, arg, arg_of_rows, colptr, row, perm_t = args
        if _any_mapped(in_dims[1:4], in_dims[6:8], in_dims[10:]):
            return map_each(AggregateSum, info, in_dims, args)
        fold = _Fold(info.batch_size, in_dims[5] is not None)
        H = logical_size(x, in_dims[0], 2)
        out = AggregateSum.apply(
            fold.features(x, in_dims[0]), *csr, fold.weight(weight, in_dims[5], H), row_scale, col_scale,
            fold.features(arg, in_dims[8]), arg_of_rows, colptr, row, perm_t,
        )  # fmt: skip
        return fold.unfold(out), fold.out_dim


class AggregateMax(torch.autograd.Function):
    @staticmethod
    def forward(x, rowptr, col, perm, num_cols, edge_weight, minimum, colptr, row, perm_t):
        return call_op(max_op, x, rowptr, col, perm, num_cols, edge_weight, minimum, True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, *csr, num_cols, edge_weight, _, colptr, row, perm_t = inputs
        arg = output[1]
        ctx.mark_non_differentiable(arg)
        weighted = edge_weight is not None and edge_weight.requires_grad
        ctx.save_for_backward(x if weighted else None, edge_weight, arg, *csr, colptr, row, perm_t)
        ctx.num_cols = num_cols

    @staticmethod
    def backward(ctx, grad, _):
        x, weight, arg, *edges = ctx.saved_tensors
        csr, csc = _both_ways(edges, ctx.num_cols, ctx.needs_input_grad[0])
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _sum(grad, csc, csr, weight, None, None, arg, False)
        if ctx.needs_input_grad[5]:
            dot = _dot(grad, x, csr, csc, None, None, arg, True, _is_per_head(weight))
            grad_weight = dot.to(weight.dtype)
        return grad_x, *(None,) * 4, grad_weight, *(None,) * 4

    @staticmethod
    def vmap(info, in_dims, *args):
        x, *csr, weight, minimum, colptr, row, perm_t = args
        if _any_mapped(in_dims[1:4], in_dims[7:]):
            return map_each(AggregateMax, info, in_dims, args)
        fold = _Fold(info.batch_size, in_dims[5] is not None)
        H = logical_size(x, in_dims[0], 2)
        outputs = AggregateMax.apply(
            fold.features(x, in_dims[0]), *csr, fold.weight(weight, in_dims[5], H), minimum, colptr, row,
            perm_t,
        )  # fmt: skip
        return tuple(map(fold.unfold, outputs)), (fold.out_dim,) * 2


class EdgeDot(torch.autograd.Function):
    @staticmethod
    def forward(
        a, b, rowptr, col, perm, num_cols, row_scale, col_scale, arg, arg_of_rows, per_head, colptr, row,
        perm_t,
    ):  # fmt: skip
        return call_op(
            dot_op, a, b, rowptr, col, perm, num_cols, row_scale, col_scale, arg, arg_of_rows, per_head
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        a, b, *csr, num_cols, row_scale, col_scale, arg, arg_of_rows, per_head, colptr, row, perm_t = inputs
        ctx.save_for_backward(a, b, row_scale, col_scale, arg, *csr, colptr, row, perm_t)
        ctx.options = arg_of_rows, per_head, num_cols

    @staticmethod
    def backward(ctx, grad):
        a, b, row_scale, col_scale, arg, *edges = ctx.saved_tensors
        wants_a, wants_b = ctx.needs_input_grad[:2]
        wants_row, wants_col = ctx.needs_input_grad[6:8]
        of_rows, per_head, num_cols = ctx.options
        csr, csc = _both_ways(edges, num_cols, wants_b or wants_col)
        grad_a = grad_b = grad_row = grad_col = None
        if wants_a:
            grad_a = _sum(b, csr, csc, grad, row_scale, col_scale, arg, of_rows)
        if wants_b:
            grad_b = _sum(a, csc, csr, grad, col_scale, row_scale, arg, not of_rows)
        if wants_row or wants_col:
            weighted = grad * _dot(a, b, csr, csc, None, None, arg, of_rows, per_head)
            if wants_row:
                grad_row = _sum_over_edges(weighted, csr, csc, col_scale)
            if wants_col:
                grad_col = _sum_over_edges(weighted, csc, csr, row_scale)
        return grad_a, grad_b, *(None,) * 4, grad_row, grad_col, *(None,) * 6

    @staticmethod
    def vmap(info, in_dims, *args):
        a, b, *csr, row_scale, col_scale, arg, arg_of_rows, per_head, colptr, row, perm_t = args
        if _any_mapped(in_dims[2:8], in_dims[11:]):
            return map_each(EdgeDot, info, in_dims, args)
        fold = _Fold(info.batch_size, True)
        H = logical_size(a, in_dims[0], 2)
        dot = EdgeDot.apply(
            fold.features(a, in_dims[0]), fold.features(b, in_dims[1]), *csr, row_scale, col_scale,
            fold.features(arg, in_dims[8]), arg_of_rows, True, colptr, row, perm_t,
        )  # fmt: skip
        dot = dot.unflatten(1, (info.batch_size, H))
        return dot if per_head else dot.sum(2, keepdim=True), 1


def _is_per_head(weight: Tensor | None) -> bool:
    return weight is not None and weight.shape[1] != 1


def _any_mapped(*dims) -> bool:
    return any(d is not None for group in dims for d in group)


class _Fold:
    """Folds a mapped dimension of size N into the batch, or into the heads where weights are mapped too."""

    def __init__(self, N: int, into_heads: bool) -> None:
        self.N, self.into_heads = N, into_heads
        self.out_dim = 2 if into_heads else 0

    def features(self, x: Tensor | None, mapped: int | None) -> Tensor | None:
        if x is None:
            return None
        d = self.out_dim
        if mapped is None:
            x = x.unsqueeze(d)
            x = x.expand(*x.shape[:d], self.N, *x.shape[d + 1 :])
        else:
            x = x.movedim(mapped, d)
        return x.flatten(d, d + 1)

    def weight(self, weight: Tensor | None, mapped: int | None, H: int) -> Tensor | None:
        if weight is None or (mapped is None and not self.into_heads):
            return weight
        weight = weight.unsqueeze(1) if mapped is None else weight.movedim(mapped, 1)
        return weight.expand(weight.shape[0], self.N, H).flatten(1, 2)

    def unfold(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(self.out_dim, (self.N, tensor.shape[self.out_dim] // self.N))


# The short way of what most calls are: dense tensors on the CPU, where nothing but autograd has to see the
# call. Kernels there take the dimensions that x has, without views around it that autograd would record, and
# the graph is handed over as it is: twelve arguments take longer than a small sum.

_sum_boxed = sum_op._handle.redispatch_boxed
_max_boxed = max_op._handle.redispatch_boxed


class Form(NamedTuple):
    """What a reduction is to the ops: a sum with scales or, where ``minimum`` is not None, an extreme."""

    row_scale: Tensor | None
    col_scale: Tensor | None
    minimum: bool | None


def _four(tensor: Tensor, heads: bool) -> Tensor:
    """(N, F), (B, N, F) or, beside weights of heads, (N, H, F) as the (B, N, H, F) that the ops are about."""
    if not heads:
        tensor = tensor.unsqueeze(-2)
    return tensor.unsqueeze(0) if tensor.dim() == 3 else tensor


class AggregateRows(torch.autograd.Function):
    """x (N, F) or (B, N, F), without weights or with (E,); or (N, H, F) with weights (E, H) or (E, 1)."""

    @staticmethod
    def forward(ctx, x, edge_weight, graph, form):
        row_scale, col_scale, minimum = form
        arg = None
        if minimum is None:
            out = _sum_boxed(CPU_KEYS, x, *graph.csr, edge_weight, row_scale, col_scale, None, False)
        else:
            out, arg = _max_boxed(CPU_KEYS, x, *graph.csr, edge_weight, minimum, True)
        ctx.graph, ctx.form, ctx.shape = graph, form, x.shape
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, edge_weight, arg)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, arg = ctx.saved_tensors
        graph, (row_scale, col_scale, _) = ctx.graph, ctx.form
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        grad_x = grad_weight = None
        if wants_x and not (torch.is_grad_enabled() or is_watched()) and are_plain((grad,)):
            grad_x = _sum_boxed(CPU_KEYS, grad, *graph.csc, weight, col_scale, row_scale, arg, False)
            wants_x = False
        if wants_x or wants_weight:
            heads = weight is not None and weight.dim() == 2
            grad, x, arg = (None if t is None else _four(t, heads) for t in (grad, x, arg))
            weights = weight if weight is None or heads else weight.unsqueeze(1)
        if wants_x:
            grad_x = _sum(grad, graph.csc, graph.csr, weights, col_scale, row_scale, arg)
            grad_x = grad_x.reshape(ctx.shape)
        if wants_weight:
            per_head = _is_per_head(weights)
            dot = _dot(grad, x, graph.csr, graph._csc, row_scale, col_scale, arg, True, per_head)
            grad_weight = dot.to(weight.dtype).reshape(weight.shape)
        return grad_x, grad_weight, None, None


# As in apply_function, without looking for what is known to be absent.
_apply_rows = super(torch.autograd.Function, AggregateRows).apply


def aggregate_rows(x: Tensor, edge_weight: Tensor | None, graph: Graph, form: Form) -> Tensor:
    if torch.is_grad_enabled() and (
        x.requires_grad or (edge_weight is not None and edge_weight.requires_grad)
    ):
        return _apply_rows(x, edge_weight, graph, form)
    row_scale, col_scale, minimum = form
    if minimum is None:
        return _sum_boxed(CPU_KEYS, x, *graph._csr, edge_weight, row_scale, col_scale, None, False)
    return _max_boxed(CPU_KEYS, x, *graph._csr, edge_weight, minimum, False)[0]


def _max_with_derivative(*args):
    """As register_autograd has it; the Function always has an arg."""
    if needs_function([a for a in args if isinstance(a, Tensor)]):
        *args, return_arg = args
        out, arg = apply_function(AggregateMax, *args, None, None, None)
        return out, arg if return_arg else arg.new_empty(0)
    with torch._C._AutoDispatchBelowAutograd():
        return max_op(*args)


register_autograd("aggregate_sum", sum_op, AggregateSum, None, None, None)
library.impl("aggregate_max", _max_with_derivative, "Autograd")
register_autograd("edge_dot", dot_op, EdgeDot, None, None, None)
_triton.register(library, "aggregation", "aggregate_sum", "aggregate_max", "edge_dot")
