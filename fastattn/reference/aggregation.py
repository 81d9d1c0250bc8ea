"""Neighbour aggregation in plain PyTorch: what every other implementation has to reproduce.

The functions have the signatures of the registered ops: features x (B, N, H, F); edges grouped by row as
rowptr (R + 1,), col (E,) and perm (E,), the number of each edge in the caller's order (None: its position),
and num_cols, which is N;
edge_weight (E, H) or (E, 1) in the caller's order; scales (R,) and (N,). They are differentiable any number
of times, also in forward mode, and run under ``torch.func`` and ``torch.compile``. They hold one number per
edge and feature.
"""

import torch
from torch import Tensor

from fastattn.reference._common import wide_dtype, without_autocast

__all__ = ["aggregate_max", "aggregate_sum", "edge_dot"]


def _row_of_edges(rowptr: Tensor, col: Tensor) -> Tensor:
    rows = torch.arange(rowptr.shape[0] - 1, dtype=col.dtype, device=col.device)
    return torch.repeat_interleave(rows, rowptr.diff(), output_size=col.shape[0])


def _edge_numbers(col: Tensor, perm: Tensor | None) -> Tensor:
    return torch.arange(col.shape[0], dtype=col.dtype, device=col.device) if perm is None else perm


def _gather(x: Tensor, index: Tensor, scale: Tensor | None) -> Tensor:
    """(B, E, H, F) rows of x times their scale, in the dtype of sums."""
    # Widened before it is gathered, so that the gradient, a sum over edges, is rounded only once.
    gathered = x.to(wide_dtype(x.dtype)).index_select(1, index)
    return gathered if scale is None else gathered * scale.index_select(0, index).view(1, -1, 1, 1)


def _messages(x, col, perm, edge_weight, col_scale) -> Tensor:
    message = _gather(x, col, col_scale)
    if edge_weight is None:
        return message
    weight = edge_weight.to(message.dtype)
    weight = weight if perm is None else weight.index_select(0, perm)
    return message * weight.unsqueeze(-1)


def _selected(value, row, col, perm, arg, arg_of_rows) -> Tensor:
    """The values of edges where ``arg`` names them, 0 where it names another edge: even if they are NaN."""
    if arg is None:
        return value
    named = arg.index_select(1, row if arg_of_rows else col)
    return torch.where(named == _edge_numbers(col, perm).view(1, -1, 1, 1), value, 0.0)


def aggregate_sum(
    x: Tensor,
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    num_cols: int,
    edge_weight: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    arg: Tensor | None,
    arg_of_rows: bool,
) -> Tensor:
    """``out[b, n, h, f] = row_scale[n] * sum of w[e, h] * col_scale[m] * x[b, m, h, f]`` over the edges e of
    row n, m being the other end of e.

    With ``arg`` only those edges count that it names: ``arg[b, n or m, h, f] == e``, n for ``arg_of_rows``.
    """
    with without_autocast(x):
        (B, _, H, F), N = x.shape, rowptr.shape[0] - 1
        row = _row_of_edges(rowptr, col)
        message = _messages(x, col, perm, edge_weight, col_scale)
        message = _selected(message, row, col, perm, arg, arg_of_rows)
        out = message.new_zeros(B, N, H, F).index_add(1, row, message)
        if row_scale is not None:
            out = out * row_scale.view(1, N, 1, 1)
        return out.to(x.dtype)


def aggregate_max(
    x: Tensor,
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    num_cols: int,
    edge_weight: Tensor | None,
    minimum: bool,
) -> tuple[Tensor, Tensor]:
    """The largest (or smallest) ``w[e, h] * x[b, m, h, f]`` among the edges of each row, and its edge.

    Of equal ones the first edge counts, of a row with NaNs the first NaN. Rows without edges give 0 and the
    edge -1.
    """
    with without_autocast(x):
        (B, M, H, F), N, E = x.shape, rowptr.shape[0] - 1, col.shape[0]
        value = _messages(x, col, perm, edge_weight, None).detach()
        row = _row_of_edges(rowptr, col).long().view(1, E, 1, 1).expand(B, E, H, F)
        extreme, bound = ("amin", torch.inf) if minimum else ("amax", -torch.inf)
        best = value.new_full((B, N, H, F), bound).scatter_reduce(1, row, value, extreme)
        # A row with a NaN has that for its extreme, and nothing equals it but, by this definition, a NaN.
        attains = (value == best.gather(1, row)) | value.isnan()
        position = torch.where(attains, torch.arange(E, device=x.device).view(1, E, 1, 1), E)
        first = torch.full((B, N, H, F), E, device=x.device).scatter_reduce(1, row, position, "amin")

        # The winners are fetched by themselves, so that no NaN of another edge meets their gradient. One
        # more entry at the end stands for no edge, and for its node and weight.
        def at_first(entries: Tensor, nothing: int) -> Tensor:
            padded = torch.cat([entries, entries.new_full((1, *entries.shape[1:]), nothing)])
            return padded.index_select(0, first.flatten()).view(first.shape)

        node = at_first(col, M).long()
        x = torch.cat([x, x.new_zeros(B, 1, H, F)], 1)
        out = x.to(wide_dtype(x.dtype)).gather(1, node)
        arg = at_first(_edge_numbers(col, perm), -1)
        if edge_weight is not None:
            weight = torch.cat([edge_weight, edge_weight.new_ones(1, edge_weight.shape[1])]).to(out.dtype)
            edge = torch.where(arg < 0, E, arg).long()
            out = out * weight.view(1, E + 1, -1, 1).expand(B, E + 1, H, F).gather(1, edge)
        return out.to(x.dtype), arg


def edge_dot(
    a: Tensor,
    b: Tensor,
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    num_cols: int,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    arg: Tensor | None,
    arg_of_rows: bool,
    per_head: bool,
) -> Tensor:
    """``dot[e, h] = row_scale[n] * col_scale[m] * <a[:, n, h], b[:, m, h]>`` for each edge from m to n.

    In the caller's order and in float32 (float64 for float64): (E, H), or (E, 1) summed over heads.

    With ``arg`` only those products count that it names, as in :func:`aggregate_sum`.
    """
    with without_autocast(a):
        row = _row_of_edges(rowptr, col)
        product = _gather(a, row, row_scale) * _gather(b, col, col_scale)
        product = _selected(product, row, col, perm, arg, arg_of_rows)
        dot = product.sum((0, 3)) if per_head else product.sum((0, 2, 3)).unsqueeze(1)
        return dot if perm is None else torch.zeros_like(dot).index_copy(0, perm.long(), dot)
