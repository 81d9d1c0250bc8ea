"""Modules with fastattn's operators inside."""

from fastattn.nn.favor import FavorFeatures
from fastattn.nn.graph_attention import GATConv, GATv2Conv, GraphTransformerConv
from fastattn.nn.graph_conv import GatedGraphConv, GCNConv, GINConv, SAGEConv
from fastattn.nn.linear_attention import LinearMultiheadAttention
from fastattn.nn.multihead_attention import MultiheadAttention

__all__ = [
    "FavorFeatures",
    "GATConv",
    "GATv2Conv",
    "GCNConv",
    "GINConv",
    "GatedGraphConv",
    "GraphTransformerConv",
    "LinearMultiheadAttention",
    "MultiheadAttention",
    "SAGEConv",
]
