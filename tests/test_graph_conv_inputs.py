"""The graph layers: every form of a graph, what is kept between calls, what is refused."""

import copy
import io
import pickle

import pytest
import torch
from graph_layers import (
    EDGES,
    F_IN,
    F_OUT,
    SQUARE_LAYERS,
    THEIRS,
    E,
    N,
    assert_same,
    features,
    layers,
    mlp,
    outputs_and_gradients,
    pyg,
    square,
)  # fmt: skip
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch_geometric import EdgeIndex

import fastattn
from fastattn.nn import _graph_layer
from fastattn.nn._graph_layer import self_loops

# Graphs in every form


def matrices(weights=None):
    """The edges as torch.sparse matrices, targets as rows; parallel edges merged, as their formats want."""
    values = torch.ones(E, dtype=torch.float64) if weights is None else weights
    coo = torch.sparse_coo_tensor(EDGES.flip(0), values, (N, N)).coalesce()
    return {"csr": coo.to_sparse_csr(), "coo": coo, "csc": coo.to_sparse_csc()}


@square
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("layout", ["csr", "coo"])
@pytest.mark.filterwarnings("ignore")  # about the beta state of CSR, and about converting to it
def test_sparse_matrix(name, args, options, layout, weighted):
    ours, theirs = layers(name, *args, **options)
    matrix = matrices(torch.rand(E, dtype=torch.float64) + 0.5 if weighted else None)[layout]
    x = features(N, F_IN)
    torch.testing.assert_close(ours(x, matrix), theirs(x, matrix))


@square
@pytest.mark.filterwarnings("ignore")
def test_every_form_of_a_graph_gives_the_same(name, args, options):
    ours, _ = layers(name, *args, **options)
    # Without self-loops: beside those, a GCN treats a matrix otherwise.
    edges = torch.unique(EDGES[:, EDGES[0] != EDGES[1]], dim=1).contiguous()
    x, ones = features(N, F_IN), torch.ones(edges.shape[1], dtype=torch.float64)
    coo = torch.sparse_coo_tensor(edges.flip(0), ones, (N, N)).coalesce()
    if options.get("improved"):
        ones = None  # acts on weights only, which these forms do not have
    forms = [
        fastattn.Graph(edges, num_nodes=N),
        edges.int(),
        edges[:, torch.randperm(edges.shape[1])],
        EdgeIndex(edges, sparse_size=(N, N)),
        EdgeIndex(edges),
        EdgeIndex(edges, sparse_size=(N, N)).sort_by("col")[0],
        fastattn.Graph.from_sparse(coo),
    ]
    if ones is not None:
        forms += [coo, coo.to_sparse_csr(), coo.to_sparse_csc()]
    expected = ours(x, edges)
    for form in forms:
        torch.testing.assert_close(ours(x, form), expected)


class SparseTensor:
    """Offers what torch_sparse's class of this name does."""

    def __init__(self, matrix, values):
        self.matrix, self.storage, self._values = matrix, self, values
        self._colptr = self._csr2csc = None

    def sparse_sizes(self):
        return tuple(self.matrix.shape)

    def csr(self):
        return self.matrix.crow_indices(), self.matrix.col_indices(), self._values


@pytest.mark.filterwarnings("ignore")
def test_sparse_tensor_replaces_self_loops_and_its_values_are_weights_or_attributes():
    values = torch.rand(E, dtype=torch.float64) + 0.5
    matrix = matrices(values)["csr"]
    given = SparseTensor(matrix, matrix.values())
    coo = matrix.to_sparse_coo()
    src, dst = coo.indices().flip(0)
    edges, weights = torch.stack([src, dst]), coo.values()
    x, other = features(N, F_IN), src != dst

    gcn = fastattn.nn.GCNConv(F_IN, F_OUT, improved=True).double()
    torch.testing.assert_close(gcn(x, given), gcn(x, edges[:, other], weights[other]))
    without = SparseTensor(matrix, None)
    torch.testing.assert_close(
        gcn(x, without), gcn(x, edges[:, other], torch.ones(int(other.sum()), dtype=torch.float64))
    )
    plain = fastattn.nn.GCNConv(F_IN, F_OUT, normalize=False).double()
    torch.testing.assert_close(plain(x, given), plain(x, edges, weights))
    sage = fastattn.nn.SAGEConv(F_IN, F_OUT).double()
    torch.testing.assert_close(sage(x, given), sage(x, edges))
    for gat in (
        fastattn.nn.GATConv(F_IN, F_OUT, edge_dim=1).double(),
        fastattn.nn.GATv2Conv(F_IN, F_OUT, edge_dim=1).double(),
    ):
        vectors = SparseTensor(matrix, matrix.values()[:, None])
        torch.testing.assert_close(gat(x, vectors), gat(x, edges, weights))
        torch.testing.assert_close(gat(x, given), gat(x, edges))
    transformer = fastattn.nn.GraphTransformerConv(F_IN, F_OUT, edge_dim=1).double()
    with pytest.raises(ValueError, match="edge_attr is missing"):
        transformer(x, given)


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv"])
@pytest.mark.parametrize("values_dim", (1, 2))
def test_values_of_a_sparse_tensor_are_attributes_where_they_are_in_torch_geometric(name, values_dim):
    torch_sparse = pytest.importorskip("torch_sparse")
    ours, theirs = layers(name, F_IN, F_OUT, edge_dim=1, add_self_loops=False)
    values = torch.rand(E, dtype=torch.float64).reshape(E, *[1] * (values_dim - 1))
    given = torch_sparse.SparseTensor(row=EDGES[1], col=EDGES[0], value=values, sparse_sizes=(N, N))
    x = features(N, F_IN)
    torch.testing.assert_close(ours(x, given), theirs(x, given))


def test_values_of_a_matrix_have_a_gradient():
    ours, theirs = layers("GCNConv", F_IN, F_OUT)
    weights = torch.rand(E, dtype=torch.float64) + 0.5

    def call(layer, x, weights):
        # Each parallel edge on its own: what the matrix merges has one gradient.
        edges = torch.unique(EDGES, dim=1)
        matrix = torch.sparse_coo_tensor(edges.flip(0), weights[: edges.shape[1]], (N, N)).coalesce()
        return layer(x, matrix)

    found = outputs_and_gradients(ours, [features(N, F_IN), weights], call)
    assert found[-1].abs().min() >= 0 and found[-1].count_nonzero() > 0
    numeric = torch.autograd.gradcheck(
        lambda w: call(ours, torch.ones(N, F_IN, dtype=torch.float64), w), weights.clone().requires_grad_()
    )
    assert numeric


def test_uncoalesced_matrix_with_gradient_is_refused():
    values = torch.ones(E, dtype=torch.float64, requires_grad=True)
    matrix = torch.sparse_coo_tensor(EDGES.flip(0), values, (N, N))
    with pytest.raises(NotImplementedError, match="coalesce"):
        fastattn.nn.GCNConv(F_IN, F_OUT).double()(features(N, F_IN), matrix)


# What is kept between calls


def test_a_graph_keeps_its_self_loops(monkeypatch):
    graph, x = fastattn.Graph(EDGES, num_nodes=N), features(N, F_IN)
    ours = [fastattn.nn.GCNConv(F_IN, F_OUT).double(), fastattn.nn.GATConv(F_IN, F_OUT, edge_dim=3).double()]
    attr = features(E, 3)
    expected = [ours[0](x, graph), ours[1](x, graph, attr)]

    def never(*args, **kwargs):
        raise AssertionError("sorted again")

    with monkeypatch.context() as patched:
        patched.setattr("fastattn.graph.compress", never)
        for layer, args, out in zip(ours, [(x, graph), (x, graph, attr)], expected, strict=True):
            assert torch.equal(layer(*args), out)
    for again in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph)), graph.to("cpu")):
        assert torch.equal(ours[0](x, again), expected[0])


def test_the_same_edges_are_sorted_once_and_a_change_in_place_is_noticed(monkeypatch):
    built = []
    as_graph = _graph_layer.as_graph
    monkeypatch.setattr(_graph_layer, "as_graph", lambda *args: built.append(1) or as_graph(*args))
    conv, other = fastattn.nn.SAGEConv(F_IN, F_OUT).double(), fastattn.nn.GCNConv(F_IN, F_OUT).double()
    x, edges = features(N, F_IN), EDGES.clone()
    first = conv(x, edges)
    assert torch.equal(conv(x, edges), first)
    other(x, edges)
    assert len(built) == 1
    edges.numpy()[:] = edges.numpy()[::-1].copy()  # behind torch's back
    changed = conv(x, edges)
    assert len(built) == 2
    assert torch.equal(changed, conv(x, edges.clone())) and not torch.equal(changed, first)
    count = len(_graph_layer._remembered)
    del edges
    assert len(_graph_layer._remembered) < count


def test_gcn_cached_keeps_its_first_graph_until_reset():
    ours, theirs = layers("GCNConv", F_IN, F_OUT, cached=True)
    x, weights = features(N, F_IN), torch.rand(E, dtype=torch.float64)
    first = ours(x, EDGES, weights)
    torch.testing.assert_close(first, theirs(x, EDGES, weights))
    assert torch.equal(ours(x, EDGES[:, :3]), first)
    torch.testing.assert_close(theirs(x, EDGES[:, :3]), first)
    ours.reset_parameters()
    assert torch.equal(ours(x, EDGES[:, :3]), fastattn_copy(ours)(x, EDGES[:, :3]))
    assert not torch.equal(ours(x, EDGES[:, :3]), first)


def test_gcn_cached_keeps_nothing_of_a_transform():
    """The weights that vmap maps over belong to it alone."""
    conv = fastattn.nn.GCNConv(F_IN, F_OUT, cached=True).double()
    x, weights = features(N, F_IN), torch.rand(3, E, dtype=torch.float64)
    mapped = torch.vmap(lambda w: conv(x, EDGES, w))(weights)
    for n in (2, 0):
        torch.testing.assert_close(fastattn_copy(conv)(x, EDGES, weights[n]), mapped[n])
    torch.testing.assert_close(conv(x, EDGES, weights[1]), mapped[1])


def fastattn_copy(layer):
    fresh = fastattn.nn.GCNConv(F_IN, F_OUT).double()
    fresh.load_state_dict(layer.state_dict())
    return fresh


@pytest.mark.parametrize("count", [N, N - 3])
@pytest.mark.parametrize("keep_own", [False, True])
def test_self_loops_of_a_graph(count, keep_own):
    graph = fastattn.Graph(EDGES, num_nodes=N)
    loops = self_loops(graph, count, keep_own=keep_own)
    assert self_loops(graph, count, keep_own=keep_own) is loops
    kept = EDGES if keep_own else EDGES[:, EDGES[0] != EDGES[1]]
    ends = torch.cat([kept, torch.arange(count).expand(2, -1)], dim=1)
    assert torch.equal(loops.graph.edge_index(), ends)
    weights = torch.rand(E, requires_grad=True)
    of_loops = torch.full((count,), 2.0)
    if not keep_own:
        for e in range(E):
            if EDGES[0, e] == EDGES[1, e] and EDGES[0, e] < count:
                of_loops[EDGES[0, e]] = weights[e].detach()
    own = weights.detach() if keep_own else weights.detach()[EDGES[0] != EDGES[1]]
    assert torch.equal(loops.weights(weights, 2.0, own=True), torch.cat([own, of_loops]))


# Modules like others


@square
def test_same_seed_same_initial_parameters(name, args, options):
    made = []
    for module, kind in ((fastattn.nn, name), (pyg, THEIRS.get(name, name))):
        torch.manual_seed(11)
        fresh = (mlp(),) if isinstance(args[0], nn.Module) else args
        made.append(getattr(module, kind)(*fresh, **options).state_dict())
    for key, value in made[1].items():
        torch.testing.assert_close(made[0][key], value, rtol=1e-6, atol=0)


@square
def test_no_edges_and_no_nodes(name, args, options):
    ours, theirs = layers(name, *args, **options)
    none = torch.empty(2, 0, dtype=torch.long)
    assert_same(ours, theirs, [features(N, F_IN)], lambda layer, x: layer(x, none))
    x = features(0, F_IN).requires_grad_()
    out = ours(x, none)
    assert out.shape[0] == 0
    out.sum().backward()
    assert x.grad.shape == x.shape


@square
def test_saved_and_loaded(name, args, options):
    ours, _ = layers(name, *args, **options)
    x = features(N, F_IN)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x, EDGES), ours(x, EDGES))
    assert torch.equal(copy.deepcopy(ours)(x, EDGES), ours(x, EDGES))
    assert name in repr(ours)


@pytest.mark.parametrize("name", ["GATConv", "GraphTransformerConv"])
def test_hooks_of_the_edges_layer_run(name):
    ours, theirs = layers(name, F_IN, F_OUT, heads=2, edge_dim=3)
    x, attr = features(N, F_IN), features(E, 3)
    expected = ours(x, EDGES, attr)
    calls = []
    ours.lin_edge.register_forward_hook(lambda *call: calls.append(call))
    torch.testing.assert_close(ours(x, EDGES, attr), expected)
    assert calls


@square
def test_half_precision_is_as_close_as_theirs(name, args, options):
    """The error to float64 is at most twice that of torch_geometric in bfloat16, and one rounding."""
    ours, theirs = layers(name, *args, **options)
    x = features(N, F_IN)
    exact = theirs(x, EDGES)
    ours, theirs = ours.bfloat16(), theirs.bfloat16()
    other = theirs.double()(x.bfloat16().double(), EDGES)  # the same rounded parameters and features
    theirs = theirs.bfloat16()
    error = (ours(x.bfloat16(), EDGES).double() - other).norm()
    theirs_error = (theirs(x.bfloat16(), EDGES).double() - other).norm()
    assert error <= 2 * theirs_error + 2**-8 * exact.norm()


@square
def test_autocast(name, args, options):
    ours, theirs = layers(name, *args, dtype=torch.float32, **options)
    x = features(N, F_IN, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ours(x, EDGES)
    torch.testing.assert_close(out.float(), theirs(x, EDGES), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", ("GATConv", "GATv2Conv", "GraphTransformerConv"))
def test_autocast_with_edge_attributes(name):
    ours, theirs = layers(name, F_IN, F_OUT, heads=2, edge_dim=3, dtype=torch.float32)
    x, attr = features(N, F_IN, dtype=torch.float32), features(E, 3, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ours(x, EDGES, attr)
    torch.testing.assert_close(out.float(), theirs(x, EDGES, attr), rtol=0.05, atol=0.05)
    assert torch.autograd.grad(out.float().square().sum(), attr)[0].dtype == torch.float32


def test_shapes_on_the_meta_device():
    """Where nothing has to be known of the edges but their number."""
    conv = fastattn.nn.GraphTransformerConv(F_IN, F_OUT, heads=2, edge_dim=3, device="meta")
    x, attr = features(N, F_IN, dtype=torch.float32).to("meta"), torch.ones(E, 3, device="meta")
    assert conv(x, EDGES.to("meta"), attr).shape == (N, 2 * F_OUT)


@square
def test_compiled(name, args, options):
    ours, _ = layers(name, *args, **options)
    graph, x = fastattn.Graph(EDGES, num_nodes=N), features(N, F_IN).requires_grad_()
    expected = ours(x, graph)  # the first call makes what the graph keeps
    expected.sum().backward()
    gradient, x.grad = x.grad, None
    torch.compiler.reset()
    out = torch.compile(ours, fullgraph=True, backend="aot_eager")(x, graph)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    torch.testing.assert_close(x.grad, gradient)


EDGE_LAYERS = [
    *((name, args, options, 0) for name, args, options in SQUARE_LAYERS),
    ("GCNConv", (F_IN, F_OUT), {"improved": True}, 1),
    ("GATConv", (F_IN, F_OUT, 2), {"edge_dim": 3}, 3),
    ("GATConv", (F_IN, F_OUT, 2), {"edge_dim": 3, "fill_value": 0.5}, 3),
    ("GATv2Conv", (F_IN, F_OUT, 2), {"edge_dim": 3, "fill_value": "max"}, 3),
    ("GraphTransformerConv", (F_IN, F_OUT, 2), {"edge_dim": 3}, 3),
]
with_edges = pytest.mark.parametrize(
    "name, args, options, width", EDGE_LAYERS, ids=lambda value: str(value)[:30]
)


def inputs_of_call(num_nodes, num_edges, width, loops):
    """Inputs of a layer: features, random edges with or without self-loops, values of the edges."""
    edges = torch.randint(num_nodes, (2, num_edges))
    if not loops:
        edges[1] = (edges[0] + torch.randint(1, num_nodes, (num_edges,))) % num_nodes
    values = {0: (), 1: (torch.rand(num_edges, dtype=torch.float64),)}.get(
        width, (features(num_edges, width),)
    )
    return features(num_nodes, F_IN), edges, *values


# Sizes, and whether there are self-loops: what a compiled layer must not depend on.
CALLS = ((5, 9, True), (6, 20, False), (12, 7, True), (31, 90, False))


@with_edges
def test_compiled_with_edges(name, args, options, width):
    """fullgraph, with gradients: three compilations at most for any edges."""
    ours, _ = layers(name, *args, **options)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, fullgraph=True, backend=counter)
    for call in CALLS:
        x, edges, *values = inputs_of_call(*call[:2], width, call[2])
        inputs = [x, *values]
        found, expected = (
            outputs_and_gradients(ours, inputs, lambda _, x, *v, run=run, edges=edges: run(x, edges, *v))
            for run in (compiled, ours)
        )
        torch.testing.assert_close(found, expected)
    assert counter.frame_count <= 3


@with_edges
def test_exported_with_edges(name, args, options, width):
    ours, _ = layers(name, *args, **options)
    torch.compiler.reset()
    nodes, number = torch.export.Dim("nodes", min=2, max=9999), torch.export.Dim("edges", min=2, max=9999)
    inputs = inputs_of_call(7, 20, width, True)
    sizes = ({0: nodes}, {1: number}, {0: number})[: len(inputs)]
    exported = torch.export.export(ours, inputs, dynamic_shapes=sizes, strict=name == "GATConv").module()
    for call in CALLS:
        inputs = inputs_of_call(*call[:2], width, call[2])
        torch.testing.assert_close(exported(*inputs), ours(*inputs))


@pytest.mark.parametrize("name", ["GCNConv", "GATConv"])
def test_compiled_with_a_graph_not_seen_before(name):
    """The self-loops that compiled code makes of a Graph are kept with it as those of eager code are."""
    ours, _ = layers(name, F_IN, F_OUT)
    graph, x = fastattn.Graph(EDGES, num_nodes=N), features(N, F_IN)
    torch.compiler.reset()
    out = torch.compile(ours, fullgraph=True, backend="aot_eager")(x, graph)
    torch.testing.assert_close(out, ours(x, EDGES))
    (kept,) = graph._derived["self_loops"]
    expected = self_loops(fastattn.Graph(EDGES, num_nodes=N), N).graph
    assert torch.equal(kept.graph.edge_index(), expected.edge_index())
    torch.testing.assert_close(ours(x, graph), out)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traced_for_one_number_of_nodes():
    """torch.jit.trace writes sizes down as constants, and the code that it makes refuses others."""
    for name in ("GCNConv", "GATConv"):
        ours, _ = layers(name, F_IN, F_OUT)
        traced = torch.jit.trace(ours, (features(N, F_IN), EDGES))
        for edges in (EDGES[:, EDGES[0] != EDGES[1]], torch.randint(N, (2, 30))):
            x = features(N, F_IN)
            torch.testing.assert_close(traced(x, edges), ours(x, edges))
        with pytest.raises(RuntimeError, match=f"holds {N}"):
            traced(features(N + 1, F_IN), torch.full((2, 4), N))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["GCNConv", "GATConv", "GATv2Conv", "GraphTransformerConv"])
def test_trace_of_a_layer_that_trains(name, tmp_path):
    """A trace holds ops, which bring their derivative along: the same without gradients, and to be saved."""
    ours, _ = layers(name, F_IN, 2)
    traced = torch.jit.trace(ours, (features(N, F_IN), EDGES))  # compares with a trace under no_grad()
    x = features(N, F_IN)
    results = []
    for layer in (ours, traced):
        out = layer(x, EDGES)
        results.append((out, *torch.autograd.grad(out.sin().sum(), list(ours.parameters()))))
    torch.testing.assert_close(*results)
    torch.jit.save(traced, tmp_path / "traced.pt")
    torch.testing.assert_close(torch.jit.load(tmp_path / "traced.pt")(x, EDGES), results[0][0])


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "GraphTransformerConv"])
def test_output_may_be_changed_in_place(name):
    """As torch_geometric's may: what the derivative needs of the output is kept apart from it."""
    bare = {"root_weight": False} if name == "GraphTransformerConv" else {"bias": False}
    ours, theirs = layers(name, F_IN, F_OUT, 2, **bare)
    assert_same(ours, theirs, [features(N, F_IN)], lambda layer, x: layer(x, EDGES).relu_())


# What is refused


@pytest.mark.parametrize(
    "make, error, match",
    [
        (lambda: fastattn.nn.GCNConv(-1, 4), ValueError, "in_channels must be positive, got -1"),
        (lambda: fastattn.nn.GCNConv(4, 2.5), TypeError, "out_channels must be an integer, got 2.5"),
        (lambda: fastattn.nn.GCNConv(4, 4, add_self_loops=True, normalize=False), ValueError, "normalize"),
        (lambda: fastattn.nn.GCNConv(4, 4, aggr="max"), NotImplementedError, "aggr = 'add' or 'sum'"),
        (
            lambda: fastattn.nn.SAGEConv(4, 4, flow="target_to_source"),
            NotImplementedError,
            r"graph.reverse\(\)",
        ),
        (lambda: fastattn.nn.SAGEConv(4, 4, aggr="lstm"), NotImplementedError, "lstm"),
        (lambda: fastattn.nn.SAGEConv(4, 4, aggr=["mean", "max"]), NotImplementedError, "aggr"),
        (lambda: fastattn.nn.SAGEConv(4, 4, colour=3), TypeError, "colour"),
        (lambda: fastattn.nn.GATConv(4, 4, fill_value="mul", edge_dim=2), NotImplementedError, "'mul'"),
        (lambda: fastattn.nn.GATConv(4, 4, dropout=1.5), ValueError, "dropout"),
        (lambda: fastattn.nn.GATConv(4, 4, dropout="0.5"), TypeError, "dropout must be a number"),
        (lambda: fastattn.nn.GATConv(4, 4, heads=0), ValueError, "heads must be positive"),
    ],
)
def test_constructor_refuses(make, error, match):
    with pytest.raises(error, match=match):
        make()


X = torch.ones(N, F_IN)


@pytest.mark.parametrize(
    "call, error, match",
    [
        (lambda gcn, gat, tr: gcn((X, X), EDGES), ValueError, "SAGEConv"),
        (
            lambda gcn, gat, tr: gcn(X, EDGES, torch.ones(3)),
            ValueError,
            r"edge_weight must be \(13,\).*\(3,\)",
        ),
        (lambda gcn, gat, tr: gcn(None, EDGES), TypeError, "GCNConv: x must be a Tensor, got NoneType"),
        (lambda gcn, gat, tr: gcn(X[0], EDGES), ValueError, r"x must be \(\.\.\., N, F\), got \(5,\)"),
        (lambda gcn, gat, tr: gcn(X, EDGES, [1.0] * E), TypeError, "edge_weight must be a Tensor, got list"),
        (lambda gcn, gat, tr: tr(X, EDGES, [[1.0]]), TypeError, "edge_attr must be a Tensor, got list"),
        (lambda gcn, gat, tr: tr(X, EDGES, torch.ones(E, 3)), ValueError, r"edge_attr must be \(13, 2\)"),
        (lambda gcn, gat, tr: gat((X, None), EDGES, size=N), TypeError, "size must be a pair"),
        (lambda gcn, gat, tr: gat((X, None), EDGES, size=(N,)), TypeError, "size must be a pair"),
        (lambda gcn, gat, tr: gcn(X[:6], EDGES), ValueError, "holds 7"),
        (lambda gcn, gat, tr: gcn(X, fastattn.Graph(EDGES, num_nodes=10)), RuntimeError, "10"),
        (lambda gcn, gat, tr: gcn(X, EDGES.tolist()), TypeError, "edge_index must be"),
        (lambda gcn, gat, tr: gcn(X, EDGES.float()), RuntimeError, "int64 or int32"),
        (lambda gcn, gat, tr: gat(X, EDGES, torch.ones(E, 2)), ValueError, "without edge_dim"),
        (lambda gcn, gat, tr: gat(X[None], EDGES), ValueError, r"\(N, F\)"),
        (lambda gcn, gat, tr: gat((X, X), EDGES, size=(N, 5)), ValueError, "5 target nodes, x has 9"),
        (lambda gcn, gat, tr: gat(X, EDGES, size=9), TypeError, "size must be a pair .*, got 9"),
        (lambda gcn, gat, tr: gat(X, EDGES, size=(N, N, 1)), TypeError, "size must be a pair"),
        (
            lambda gcn, gat, tr: gat(X, EDGES, size=(9.0, 9.0)),
            TypeError,
            r"size\[0\] must be an integer, got 9.0",
        ),
        (lambda gcn, gat, tr: gat("x", EDGES), TypeError, "x must be a Tensor or a pair"),
        (lambda gcn, gat, tr: tr(X, EDGES), ValueError, "edge_attr is missing"),
        (lambda gcn, gat, tr: tr((X, None), EDGES), ValueError, "features of the targets"),
        (lambda gcn, gat, tr: tr(X, EDGES, torch.ones(4, 2)), ValueError, r"edge_attr must be \(13, 2\)"),
        (lambda gcn, gat, tr: tr(X, EDGES, torch.ones(E, 3)), ValueError, r"edge_attr must be \(13, 2\)"),
        (lambda gcn, gat, tr: tr(X, EDGES, [1.0]), TypeError, "edge_attr must be a Tensor, got list"),
        (lambda gcn, gat, tr: tr(X, EDGES, torch.ones(E, 2).long()), RuntimeError, "edge_attr .* floating"),
        (lambda gcn, gat, tr: tr(X, EDGES, torch.ones(E, 2).to_sparse()), RuntimeError, "edge_attr .* dense"),
        (
            lambda gcn, gat, tr: tr(X, EDGES, torch.ones(E, 2).double()),
            RuntimeError,
            "edge_attr is torch.float64",
        ),
        (
            lambda gcn, gat, tr: tr(X, EDGES, torch.ones(E, 2, device="meta")),
            RuntimeError,
            "edge_attr is on meta",
        ),
        (
            lambda gcn, gat, tr: fastattn.nn.GATv2Conv(F_IN, 4, edge_dim=3, fill_value=torch.ones(2))(
                X, EDGES, torch.ones(E, 3)
            ),
            ValueError,
            "fill_value must have one entry or 3",
        ),
        (
            lambda gcn, gat, tr: gcn(X, torch.eye(N).to_sparse(), torch.ones(N)),
            ValueError,
            "its own values",
        ),
        (
            lambda gcn, gat, tr: gat(X, torch.eye(N).to_sparse(), return_attention_weights=True),
            NotImplementedError,
            "return_attention_weights",
        ),
    ],
)
def test_call_refuses(call, error, match):
    made = (
        fastattn.nn.GCNConv(F_IN, F_OUT),
        fastattn.nn.GATConv(F_IN, F_OUT),
        fastattn.nn.GraphTransformerConv(F_IN, F_OUT, edge_dim=2),
    )
    with pytest.raises(error, match=match):
        call(*made)
