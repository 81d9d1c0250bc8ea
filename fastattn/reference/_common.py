"""What the references share."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["wide_dtype", "without_autocast"]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, statistics and states beside inputs of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(tensor: Tensor) -> AbstractContextManager:
    # The meta device has no autocast, and asking torch to turn it off there is an error.
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)
