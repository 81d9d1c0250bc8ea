"""What the tests of the graph layers share: a graph with everything in it, and comparisons of two layers."""

import copy

import pytest
import torch
from torch import nn

import fastattn

pyg = pytest.importorskip("torch_geometric.nn")

N, F_IN, F_OUT = 9, 5, 4
# Unsorted; parallel edges, several self-loops at node 4, one at 6; nodes 0, 5 and 8 have no edges.
EDGES = torch.tensor([[7, 1, 3, 4, 4, 2, 6, 1, 1, 4, 7, 3, 6], [2, 3, 2, 4, 4, 1, 6, 3, 7, 2, 1, 4, 7]])
E = EDGES.shape[1]
# Of several self-loops of a node only the last one's weight counts, yet theirs gives each its gradient.
ONE_LOOP = torch.cat([EDGES[:, :3], EDGES[:, 4:]], dim=1)
BIPARTITE = torch.tensor([[0, 2, 2, 5, 1, 4, 5, 3], [1, 1, 3, 0, 1, 2, 2, 3]])  # 6 sources, 5 targets
THEIRS = {"GraphTransformerConv": "TransformerConv"}
BITS = {torch.float64: 2**-52, torch.float32: 2**-23}


def layers(name, *args, dtype=torch.float64, **kwargs):
    """Ours and torch_geometric's with the same parameters, none of them at a special value."""
    theirs = getattr(pyg, THEIRS.get(name, name))(*args, **kwargs).to(dtype)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    if args and isinstance(args[0], nn.Module):
        args = (copy.deepcopy(args[0]), *args[1:])
    ours = getattr(fastattn.nn, name)(*args, **kwargs).to(dtype)
    assert str(ours.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    assert list(ours.state_dict()) == list(theirs.state_dict()) or set(ours.state_dict()) == set(
        theirs.state_dict()
    )
    return ours, theirs


def outputs_and_gradients(layer, inputs, call):
    """What a layer returns, and the gradients of all parameters and inputs for one incoming gradient."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    out = call(layer, *inputs)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = [*dict(layer.named_parameters()).values(), *inputs]
    grads = torch.autograd.grad(out, wanted, grad.to(out.dtype), allow_unused=True)
    return [out, *grads]


def assert_same(ours, theirs, inputs, call, dtype=torch.float64):
    """Both within rounding: some tens of roundings of terms of the size of the tensor's largest."""
    found = outputs_and_gradients(ours, inputs, call)
    expected = outputs_and_gradients(theirs, inputs, call)
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            bound = 64 * BITS[dtype] * max(1.0, other.abs().max().item())
            assert mine.shape == other.shape and mine.dtype == other.dtype
            assert (mine - other).abs().max().item() <= bound


def features(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def mlp():
    return nn.Sequential(nn.Linear(F_IN, 7), nn.ReLU(), nn.Linear(7, F_OUT))


SQUARE_LAYERS = [
    ("GCNConv", (F_IN, F_OUT), {}),
    ("GCNConv", (F_IN, 8), {"improved": True}),
    ("GCNConv", (F_IN, 8), {"normalize": False}),
    ("SAGEConv", (F_IN, F_OUT), {}),
    ("SAGEConv", (F_IN, 8), {"aggr": "max"}),
    ("GINConv", (mlp(),), {}),
    ("GatedGraphConv", (F_IN, 2), {}),
    ("GATConv", (F_IN, F_OUT, 2), {}),
    ("GATv2Conv", (F_IN, F_OUT, 2), {}),
    ("GraphTransformerConv", (F_IN, F_OUT, 2), {}),
]
square = pytest.mark.parametrize("name, args, options", SQUARE_LAYERS, ids=lambda value: str(value)[:30])
