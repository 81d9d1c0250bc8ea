"""What the references share."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["read_bounds", "wide_dtype", "without_autocast"]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, statistics and states beside inputs of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(tensor: Tensor) -> AbstractContextManager:
    # The meta device has no autocast, and asking torch to turn it off there is an error.
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)


def read_bounds(name: str, cu_seqlens: Tensor, total: int, longest: int | None = None) -> list[int]:
    """The bounds of packed sequences as numbers, checked."""
    bounds = cu_seqlens.tolist()
    lengths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    if bounds[0] != 0 or bounds[-1] != total or min(lengths, default=0) < 0:
        raise RuntimeError(
            f"{name} must start at 0, never decrease and end at the total length {total}, got {bounds}"
        )
    if longest is not None and max(lengths, default=0) > longest:
        raise RuntimeError(
            f"{name.replace('cu', 'max').replace('seqlens', 'seqlen')} is {longest}, but {name} is {bounds}"
        )
    return bounds
