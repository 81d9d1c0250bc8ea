"""Nested tensors of layout=torch.jagged as packed sequences, and back."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Packed", "pack"]


class Packed(NamedTuple):
    """The tokens of a nested tensor (N, ragged, ...), one sequence behind the other.

    ``rows`` is None where these are the tensor's own values; where it has gaps between its sequences it tells
    where in its values each token lies.
    """

    tokens: Tensor  # (total, ...)
    bounds: Tensor  # (N + 1,)
    rows: Tensor | None
    nested: Tensor

    def restore(self, tokens: Tensor) -> Tensor:
        """A nested tensor of these tokens (total, ...), with the structure of this one; 0 in its gaps."""
        nested = self.nested
        if self.rows is not None:
            gaps = tokens.new_zeros((nested.values().shape[0], *tokens.shape[1:]))
            tokens = gaps.index_copy(0, self.rows, tokens)
        return torch.nested.nested_tensor_from_jagged(tokens, nested.offsets(), nested.lengths())


def pack(nested: Tensor) -> Packed:
    values, offsets, lengths = nested.values(), nested.offsets(), nested.lengths()
    if lengths is None:
        return Packed(values, offsets, None, nested)
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    moved = torch.repeat_interleave(offsets[:-1] - bounds[:-1], lengths)
    rows = torch.arange(moved.shape[0], device=moved.device) + moved
    return Packed(values.index_select(0, rows), bounds, rows, nested)
