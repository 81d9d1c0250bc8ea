"""Bridges between fastattn and other code."""

from fastattn.integrations.convert import replace_attention

__all__ = ["replace_attention"]
