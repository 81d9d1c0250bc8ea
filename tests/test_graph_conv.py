"""The graph layers against torch_geometric's of the same name, and against dense formulas."""

import pytest
import torch
from graph_layers import (
    BIPARTITE,
    EDGES,
    F_IN,
    F_OUT,
    ONE_LOOP,
    E,
    N,
    assert_same,
    features,
    layers,
    mlp,
)  # fmt: skip

import fastattn

# Every layer, every option


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("out_channels", [F_OUT, 8])
@pytest.mark.parametrize(
    "options",
    [{}, {"improved": True}, {"bias": False}, {"add_self_loops": False}, {"normalize": False}],
    ids=str,
)
def test_gcn(options, out_channels, weighted, dtype):
    ours, theirs = layers("GCNConv", F_IN, out_channels, dtype=dtype, **options)
    inputs = [features(N, F_IN, dtype=dtype)]
    if weighted:
        inputs.append(torch.rand(E - 1, dtype=dtype) + 0.1)
    edges = ONE_LOOP if weighted else EDGES
    assert_same(ours, theirs, inputs, lambda layer, x, *w: layer(x, edges, *w), dtype)


def test_gcn_takes_the_weight_of_the_last_self_loop():
    ours, theirs = layers("GCNConv", F_IN, F_OUT)
    x, weights = features(N, F_IN), torch.rand(E, dtype=torch.float64, requires_grad=True)
    out = ours(x, EDGES, weights)
    torch.testing.assert_close(out, theirs(x, EDGES, weights))
    (gradient,) = torch.autograd.grad(out.square().sum(), weights)
    assert gradient[3] == 0 and gradient[4] != 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("aggr", ["mean", "sum", "add", "max", "min"])
@pytest.mark.parametrize("out_channels", [F_OUT, 8])
@pytest.mark.parametrize(
    "options", [{}, {"normalize": True}, {"root_weight": False}, {"project": True}, {"bias": False}], ids=str
)
def test_sage(options, out_channels, aggr, dtype):
    ours, theirs = layers("SAGEConv", F_IN, out_channels, aggr=aggr, dtype=dtype, **options)
    # relu makes equal values, of which maxima choose differently
    edges = EDGES if aggr not in ("max", "min") else torch.unique(EDGES, dim=1)
    if aggr in ("max", "min") and options.get("project"):
        with torch.no_grad():
            theirs.lin.bias.fill_(9.0)
        ours.load_state_dict(theirs.state_dict())
    assert_same(ours, theirs, [features(N, F_IN, dtype=dtype)], lambda layer, x: layer(x, edges), dtype)


@pytest.mark.parametrize("train_eps", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gin(dtype, train_eps):
    ours, theirs = layers("GINConv", mlp(), eps=0.3, train_eps=train_eps, dtype=dtype)
    assert_same(ours, theirs, [features(N, F_IN, dtype=dtype)], lambda layer, x: layer(x, EDGES), dtype)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("aggr", ["add", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gated_graph(dtype, aggr, weighted):
    ours, theirs = layers("GatedGraphConv", F_IN + 2, 3, aggr=aggr, dtype=dtype)
    inputs = [features(N, F_IN, dtype=dtype)]
    if weighted:
        inputs.append(torch.rand(E, dtype=dtype) + 0.1)
    edges = EDGES
    if aggr == "max" and not weighted:
        edges = torch.unique(EDGES, dim=1)  # parallel edges tie
    assert_same(ours, theirs, inputs, lambda layer, x, *w: layer(x, edges, *w), dtype)


ATTENTION = [
    {},
    {"heads": 3},
    {"heads": 3, "concat": False},
    {"heads": 2, "bias": False},
]
FILLS = ["mean", "add", "max", "min", 0.5, torch.tensor([0.1, -0.2, 0.3])]


@pytest.mark.parametrize("attributes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "options", [*ATTENTION, {"add_self_loops": False}, {"heads": 2, "residual": True}], ids=str
)
@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv"])
def test_gat(name, options, dtype, attributes):
    edge_dim = 3 if attributes else None
    ours, theirs = layers(name, F_IN, F_OUT, edge_dim=edge_dim, dtype=dtype, **options)
    inputs = [features(N, F_IN, dtype=dtype)] + [features(E, 3, dtype=dtype)] * attributes
    assert_same(ours, theirs, inputs, lambda layer, x, *attr: layer(x, EDGES, *attr), dtype)


@pytest.mark.parametrize("fill_value", FILLS, ids=str)
@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv"])
def test_edge_attributes_of_self_loops(name, fill_value):
    ours, theirs = layers(name, F_IN, F_OUT, heads=2, edge_dim=3, fill_value=fill_value)
    edges = torch.unique(EDGES, dim=1)
    inputs = [features(N, F_IN), features(edges.shape[1], 3)]
    assert_same(ours, theirs, inputs, lambda layer, x, attr: layer(x, edges, attr))


def test_gatv2_with_one_matrix_for_both_ends():
    ours, theirs = layers("GATv2Conv", F_IN, F_OUT, heads=2, share_weights=True)
    assert ours.lin_l is ours.lin_r
    assert_same(ours, theirs, [features(N, F_IN)], lambda layer, x: layer(x, EDGES))


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "GraphTransformerConv"])
def test_one_edge_attribute_may_be_a_vector(name):
    ours, theirs = layers(name, F_IN, F_OUT, heads=2, edge_dim=1)
    attr = features(E)
    shaped = attr if name != "GraphTransformerConv" else attr.unsqueeze(1)  # theirs takes no vector here
    x = features(N, F_IN)
    torch.testing.assert_close(ours(x, EDGES, attr), theirs(x, EDGES, shaped))


@pytest.mark.parametrize("attributes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "options",
    [*ATTENTION, {"beta": True, "heads": 2}, {"beta": True, "concat": False}, {"root_weight": False}],
    ids=str,
)
def test_graph_transformer(options, dtype, attributes):
    edge_dim = 3 if attributes else None
    ours, theirs = layers("GraphTransformerConv", F_IN, F_OUT, edge_dim=edge_dim, dtype=dtype, **options)
    inputs = [features(N, F_IN, dtype=dtype)] + [features(E, 3, dtype=dtype)] * attributes
    assert_same(ours, theirs, inputs, lambda layer, x, *attr: layer(x, EDGES, *attr), dtype)


# Bipartite graphs

BIPARTITE_LAYERS = [
    ("SAGEConv", ((F_IN, 3), F_OUT), {}),
    ("SAGEConv", ((F_IN, 3), 8), {"aggr": "sum"}),
    ("GINConv", (mlp(),), {}),
    ("GATConv", ((F_IN, 3), F_OUT), {"heads": 2}),
    ("GATConv", ((F_IN, 3), F_OUT), {"add_self_loops": False, "residual": True}),
    ("GATConv", (F_IN, F_OUT), {"heads": 2}),
    ("GATv2Conv", ((F_IN, 3), F_OUT), {"heads": 2, "residual": True}),
    ("GraphTransformerConv", ((F_IN, 3), F_OUT), {"heads": 2, "beta": True}),
]


@pytest.mark.parametrize("name, args, options", BIPARTITE_LAYERS, ids=lambda value: str(value)[:30])
def test_bipartite(name, args, options):
    ours, theirs = layers(name, *args, **options)
    shared = not isinstance(args[0], tuple)
    inputs = [features(6, F_IN), features(5, F_IN if shared else 3)]
    assert_same(ours, theirs, inputs, lambda layer, *x: layer(x, BIPARTITE))


@pytest.mark.parametrize("name", ["SAGEConv", "GINConv", "GATConv"])
def test_targets_without_features(name):
    args = {"SAGEConv": (F_IN, F_OUT), "GINConv": (mlp(),), "GATConv": (F_IN, F_OUT, 2)}[name]
    options = {"add_self_loops": False} if name == "GATConv" else {}
    ours, theirs = layers(name, *args, **options)
    assert_same(ours, theirs, [features(6, F_IN)], lambda layer, x: layer((x, None), BIPARTITE, size=(6, 5)))
    graph = fastattn.Graph(BIPARTITE, size=(6, 5))
    x = features(6, F_IN)
    torch.testing.assert_close(ours((x, None), graph), ours((x, None), BIPARTITE, size=(6, 5)))


def test_sage_and_gin_and_gcn_take_leading_dimensions():
    x = features(2, N, F_IN)
    for ours, theirs in (
        layers("GCNConv", F_IN, F_OUT),
        layers("GCNConv", F_IN, 8),
        layers("SAGEConv", F_IN, F_OUT),
        layers("GINConv", mlp()),
    ):
        assert_same(ours, theirs, [x], lambda layer, x: layer(x, EDGES))


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "GraphTransformerConv"])
def test_attention_weights(name):
    ours, theirs = layers(name, F_IN, F_OUT, heads=2)
    x = features(N, F_IN)
    out, (edges, weights) = ours(x, EDGES, return_attention_weights=True)
    expected, (their_edges, their_weights) = theirs(x, EDGES, return_attention_weights=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(out, ours(x, EDGES))
    assert torch.equal(edges, their_edges)
    torch.testing.assert_close(weights, their_weights)
    out, (graph, weights) = ours(x, fastattn.Graph(EDGES, num_nodes=N), return_attention_weights=True)
    assert torch.equal(graph.edge_index(), edges)
    torch.testing.assert_close(weights, their_weights)
    (gradient,) = torch.autograd.grad(weights.square().sum(), ours.parameters().__next__())
    assert gradient.count_nonzero() > 0


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "GraphTransformerConv"])
def test_dropout(name):
    ours, theirs = layers(name, F_IN, F_OUT, heads=2, dropout=0.5)
    x = features(N, F_IN)
    torch.testing.assert_close(ours.eval()(x, EDGES), theirs.eval()(x, EDGES))
    ours.train()
    out, (_, weights) = ours(x, EDGES, return_attention_weights=True)
    assert (weights == 0).any() and (weights > 0).any()
    torch.manual_seed(3)
    first = ours(x, EDGES)
    torch.manual_seed(3)
    assert torch.equal(ours(x, EDGES), first)
    assert not torch.equal(ours(x, EDGES), first)


# Dense formulas, independent of torch_geometric


def dense(edges=EDGES, weights=None):
    """A[n, m]: the sum of the weights of the edges from m to n."""
    weights = torch.ones(edges.shape[1], dtype=torch.float64) if weights is None else weights
    return torch.zeros(N, N, dtype=torch.float64).index_put((edges[1], edges[0]), weights, accumulate=True)


def test_gcn_is_the_published_formula():
    edges = EDGES[:, EDGES[0] != EDGES[1]]
    weights = torch.rand(edges.shape[1], dtype=torch.float64)
    A = dense(edges, weights) + torch.eye(N)
    root = A.sum(1).rsqrt()
    conv = fastattn.nn.GCNConv(F_IN, F_OUT).double()
    x = features(N, F_IN)
    expected = root[:, None] * A * root @ x @ conv.lin.weight.T + conv.bias
    torch.testing.assert_close(conv(x, edges, weights), expected)


def test_graph_transformer_is_masked_attention():
    edges = torch.unique(EDGES, dim=1)
    conv = fastattn.nn.GraphTransformerConv(F_IN, F_OUT, root_weight=False).double()
    x = features(N, F_IN)
    score = conv.lin_query(x) @ conv.lin_key(x).T / F_OUT**0.5
    mask = dense(edges) == 0
    weights = torch.softmax(score.masked_fill(mask, -torch.inf), dim=1).nan_to_num()
    torch.testing.assert_close(conv(x, edges), weights @ conv.lin_value(x))
