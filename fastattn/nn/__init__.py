"""Modules with fastattn's operators inside."""

from fastattn.nn.favor import FavorFeatures
from fastattn.nn.linear_attention import LinearMultiheadAttention
from fastattn.nn.multihead_attention import MultiheadAttention

__all__ = ["FavorFeatures", "LinearMultiheadAttention", "MultiheadAttention"]
