"""Fast attention for PyTorch: one function per operator, with the numbers of the plain formula."""

import importlib

from fastattn._accelerate import accelerate
from fastattn._explain import Explanation, explain
from fastattn.graph import Graph
from fastattn.kv_cache import KVCache
from fastattn.ops.aggregation import aggregate, segment_reduce
from fastattn.ops.attention import scaled_dot_product_attention
from fastattn.ops.graph_attention import edge_softmax, gat_attention, gatv2_attention, graph_attention
from fastattn.ops.kv_cache import attention_with_kv_cache
from fastattn.ops.linear_attention import LinearAttentionState, linear_attention, linear_attention_step
from fastattn.ops.varlen_attention import varlen_attention

__all__ = [
    "Explanation", "Graph", "KVCache", "LinearAttentionState", "accelerate", "aggregate",
    "attention_with_kv_cache", "edge_softmax", "explain", "gat_attention", "gatv2_attention",
    "graph_attention", "linear_attention", "linear_attention_step", "nn", "replace_attention",
    "scaled_dot_product_attention", "segment_reduce", "varlen_attention",
]  # fmt: skip
__version__ = "0.1.0"


def __getattr__(name: str):
    # Modules and conversion are loaded when first used, so that importing the operators stays light.
    if name == "nn":
        return importlib.import_module("fastattn.nn")
    if name == "replace_attention":
        return importlib.import_module("fastattn.integrations.convert").replace_attention
    raise AttributeError(f"module 'fastattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
