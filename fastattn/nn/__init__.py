"""Modules with fastattn's operators inside."""

from fastattn.nn.multihead_attention import MultiheadAttention

__all__ = ["MultiheadAttention"]
