"""Converting torch_geometric models: the same parameters and numbers, and what is left alone."""

import copy
import gc
import io
import pickle
import re
import weakref
from unittest import mock

import pytest
import torch
from torch import nn

import fastattn

pyg = pytest.importorskip("torch_geometric.nn")
from torch_geometric import EdgeIndex  # noqa: E402
from torch_geometric.nn.aggr import MaxAggregation  # noqa: E402

from fastattn.integrations import torch_geometric as integration  # noqa: E402
from fastattn.integrations.torch_geometric import convert, converted  # noqa: E402

N, F_IN = 12, 6
EDGES = torch.randint(N - 1, (2, 40), generator=torch.Generator().manual_seed(0))
LAYERS = {
    "GCNConv": lambda: pyg.GCNConv(F_IN, 4),
    "SAGEConv": lambda: pyg.SAGEConv(F_IN, 4),
    "GINConv": lambda: pyg.GINConv(nn.Linear(F_IN, 4), train_eps=True),
    "GATConv": lambda: pyg.GATConv(F_IN, 4, heads=2),
    "GATv2Conv": lambda: pyg.GATv2Conv(F_IN, 4, heads=2),
    "TransformerConv": lambda: pyg.TransformerConv(F_IN, 4, heads=2),
    "GatedGraphConv": lambda: pyg.GatedGraphConv(F_IN, 2),
}
every_layer = pytest.mark.parametrize("kind", LAYERS)


def features(*shape):
    return torch.randn(*shape, dtype=torch.float64)


class Calls:
    """Counts how often a layer really runs on fastattn."""

    def __init__(self):
        self.count = 0

    def __enter__(self):
        def counted(function):
            def call(*args, **kwargs):
                self.count += 1
                return function(*args, **kwargs)

            return call

        self.patches = [
            mock.patch(f"fastattn.nn.graph_conv.{name}", counted(getattr(fastattn.nn.graph_conv, name)))
            for name in ("aggregate",)
        ] + [
            mock.patch(f"fastattn.nn.graph_attention.{name}", counted(getattr(module, name)))
            for module in (fastattn.nn.graph_attention,)
            for name in ("gat_attention", "gatv2_attention", "graph_attention")
        ]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self.patches:
            patch.stop()


@every_layer
def test_a_layer_keeps_parameters_and_numbers(kind):
    layer = LAYERS[kind]().double()
    before = dict(layer.named_parameters())
    x = features(N, F_IN).requires_grad_()
    expected = layer(x, EDGES)
    expected.square().sum().backward()
    expected_grads = [p.grad for p in (x, *layer.parameters())]
    for parameter in (x, *layer.parameters()):
        parameter.grad = None

    report = convert(layer)
    assert report.replaced == {"(model)": kind} and report.left == {}
    assert isinstance(layer, getattr(pyg, kind))
    assert isinstance(layer, integration._COUNTERPARTS[kind])
    assert all(p is before[name] for name, p in layer.named_parameters())
    with Calls() as calls:
        out = layer(x, EDGES)
    assert calls.count
    out.square().sum().backward()
    torch.testing.assert_close(out, expected)
    for parameter, grad in zip((x, *layer.parameters()), expected_grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
    assert str(layer) == str(LAYERS[kind]())


MODELS = {
    "GCN": lambda: pyg.GCN(F_IN, 8, num_layers=3, out_channels=4),
    "GraphSAGE": lambda: pyg.GraphSAGE(F_IN, 8, num_layers=2, out_channels=4, jk="cat"),
    "GIN": lambda: pyg.GIN(F_IN, 8, num_layers=2, norm=None),
    "GAT": lambda: pyg.GAT(F_IN, 8, num_layers=2, out_channels=4, heads=2),
    "GATv2": lambda: pyg.GAT(F_IN, 8, num_layers=2, out_channels=4, heads=2, v2=True),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_trains_on_as_before(kind):
    """A step of the optimizer before, the conversion, two steps after: as three steps without it."""
    results = []
    x = features(N, F_IN)
    model = MODELS[kind]().double()
    for change in (False, True):
        trained = copy.deepcopy(model)
        optimizer = torch.optim.Adam(trained.parameters(), lr=0.01)
        for step in range(3):
            if change and step == 1:
                report = convert(trained)
                assert report.replaced and not report.left
                assert set(report.replaced) == {
                    n for n, m in trained.named_modules() if "Conv" in type(m).__name__
                }
            optimizer.zero_grad()
            trained(x, EDGES).square().mean().backward()
            optimizer.step()
        results.append(trained)
    for ours, theirs in zip(results[1].parameters(), results[0].parameters(), strict=True):
        # Adam divides by gradients that may be rounding and nothing else.
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(results[1](x, EDGES), results[0](x, EDGES), rtol=1e-6, atol=1e-6)


@every_layer
def test_every_form_of_a_graph(kind):
    layer = LAYERS[kind]().double()
    x = features(N, F_IN)
    edges = torch.unique(EDGES[:, EDGES[0] != EDGES[1]], dim=1).contiguous()
    ones = torch.ones(edges.shape[1], dtype=torch.float64)
    expected = layer(x, edges)
    convert(layer)
    csr = torch.sparse_coo_tensor(edges.flip(0), ones, (N, N)).to_sparse_csr()
    for form in (edges, EdgeIndex(edges, sparse_size=(N, N)), csr, fastattn.Graph(edges, num_nodes=N)):
        with Calls() as calls:
            torch.testing.assert_close(layer(x, form), expected)
        assert calls.count


def test_bipartite_and_heterogeneous_models():
    torch.manual_seed(1)
    model = pyg.HeteroConv(
        {
            ("a", "to", "b"): pyg.SAGEConv((5, 3), 4),
            ("b", "to", "a"): pyg.GATConv((3, 5), 4, add_self_loops=False),
            ("a", "to", "a"): pyg.GCNConv(5, 4),
        }
    ).double()
    x = {"a": features(6, 5), "b": features(4, 3)}
    edges = {
        ("a", "to", "b"): torch.tensor([[0, 1, 5], [3, 3, 0]]),
        ("b", "to", "a"): torch.tensor([[3, 2, 0], [0, 1, 1]]),
        ("a", "to", "a"): torch.tensor([[0, 1, 5], [3, 3, 0]]),
    }
    expected = model(x, edges)
    assert len(convert(model).replaced) == 3
    for name, out in model(x, edges).items():
        torch.testing.assert_close(out, expected[name])


# What is left alone


class OwnMessage(pyg.GCNConv):
    def message(self, x_j, edge_weight):
        return 2 * x_j


class OwnForward(pyg.SAGEConv):
    def forward(self, x, edge_index, size=None):
        return super().forward(x, edge_index, size) + 1


class OwnAggregate(pyg.GINConv):
    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        return super().aggregate(inputs, index, ptr, dim_size) * 2


class OwnPropagate(pyg.GCNConv):
    def propagate(self, edge_index, size=None, **kwargs):
        return kwargs["x"]


class OwnConstructor(pyg.GATConv):
    """Not its own way to compute anything."""

    def __init__(self, channels):
        super().__init__(channels, channels, heads=2)
        self.channels = channels


def explained():
    layer = pyg.GCNConv(F_IN, 4)
    layer.explain = True
    return layer


def hooked(stage):
    layer = pyg.GATConv(F_IN, 4)
    getattr(layer, f"register_{stage}_hook")(lambda *args: None)
    return layer


def assigned():
    layer = pyg.GCNConv(F_IN, 4)
    layer.message = lambda x_j, edge_weight: x_j
    return layer


def parametrized():
    layer = pyg.GATConv(F_IN, 4)
    nn.utils.parametrize.register_parametrization(layer, "att_src", nn.Identity())
    return layer


LEFT = [
    (lambda: pyg.GraphConv(F_IN, 4), "GraphConv: fastattn has no layer of this kind"),
    (lambda: pyg.GINEConv(nn.Linear(F_IN, 4)), "GINEConv: fastattn has no layer of this kind"),
    (lambda: OwnMessage(F_IN, 4), r"OwnMessage: it has its own message\(\)"),
    (lambda: OwnForward(F_IN, 4), r"its own forward\(\)"),
    (lambda: OwnAggregate(nn.Linear(F_IN, 4)), r"its own aggregate\(\)"),
    (lambda: OwnPropagate(F_IN, 4), r"its own propagate\(\)"),
    (assigned, r"its own message\(\)"),
    (explained, "explain mode is on"),
    (lambda: hooked("message_forward"), r"hooks on message\(\)"),
    (lambda: hooked("propagate_forward_pre"), r"hooks on propagate\(\)"),
    (lambda: hooked("edge_update_forward"), r"hooks on edge_update\(\)"),
    (lambda: hooked("message_and_aggregate_forward"), r"hooks on message_and_aggregate\(\)"),
    (parametrized, "parametrized itself"),
    (lambda: pyg.SAGEConv(F_IN, 4, aggr="lstm"), "aggr='lstm'"),
    (lambda: pyg.SAGEConv(F_IN, 4, aggr=["mean", "max"]), r"aggr=\['mean', 'max'\]"),
    (lambda: pyg.SAGEConv(F_IN, 4, aggr=MaxAggregation()), r"aggr='MaxAggregation\(\)'"),
    (lambda: pyg.GCNConv(F_IN, 4, aggr="max"), "aggr='max'"),
    (lambda: pyg.GCNConv(F_IN, 4, flow="target_to_source"), "flow='target_to_source'"),
    (lambda: pyg.GCNConv(F_IN, 4, node_dim=0), "node_dim=0"),
    (lambda: pyg.GCNConv(F_IN, 4, decomposed_layers=2), "decomposed_layers=2"),
    (lambda: pyg.GATConv(F_IN, 4, edge_dim=2, fill_value="mul"), "fill_value='mul'"),
]


@pytest.mark.parametrize("make, reason", LEFT, ids=[reason for _, reason in LEFT])
def test_left_alone(make, reason):
    model = nn.ModuleDict({"inner": make()})
    kind = type(model["inner"])
    report = convert(model)
    assert report.replaced == {} and list(report.left) == ["inner"]
    assert re.search(reason, report.left["inner"])
    assert type(model["inner"]) is kind
    assert str(report).startswith("0 layers converted\n1 layer left alone\n  inner: ")


def test_a_subclass_with_inherited_methods_is_converted_and_stays_itself():
    layer = OwnConstructor(F_IN)
    x = torch.randn(N, F_IN)
    expected = layer(x, EDGES)
    assert convert(layer).replaced == {"(model)": "OwnConstructor"}
    assert isinstance(layer, OwnConstructor) and isinstance(layer, fastattn.nn.GATConv)
    torch.testing.assert_close(layer(x, EDGES), expected)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(again, OwnConstructor)
        with Calls() as calls:
            torch.testing.assert_close(again(x, EDGES), expected)
        assert calls.count


@every_layer
def test_copied_and_saved(kind):
    layer = LAYERS[kind]()
    convert(layer)
    x = torch.randn(N, F_IN)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for again in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert type(again) is type(layer)
        assert torch.equal(again(x, EDGES), layer(x, EDGES))
        fresh = LAYERS[kind]()
        fresh.load_state_dict(again.state_dict())
        torch.testing.assert_close(fresh(x, EDGES), layer(x, EDGES))


def test_a_second_call_finds_nothing_to_do_and_shared_layers_count_once():
    layer = pyg.GCNConv(F_IN, F_IN)
    model = nn.ModuleList([layer, nn.Sequential(layer)])
    assert convert(model).replaced == {"0": "GCNConv"}
    report = convert(model)
    assert report.replaced == {} and report.left == {}


def test_module_hooks_stay():
    layer = pyg.GCNConv(F_IN, 4)
    seen = []
    layer.register_forward_hook(lambda module, args, out: seen.append(out))
    layer.register_forward_pre_hook(lambda module, args: seen.append(args))
    convert(layer)
    out = layer(torch.randn(N, F_IN), EDGES)
    assert len(seen) == 2 and seen[1] is out


def test_lazy_layers_take_their_size_from_the_first_input():
    for layer in (pyg.GCNConv(-1, 4), pyg.SAGEConv((-1, -1), 4), pyg.GATConv(-1, 4, edge_dim=-1)):
        convert(layer)
        attributes = (torch.randn(EDGES.shape[1], 3),) if isinstance(layer, pyg.GATConv) else ()
        out = layer(torch.randn(N, F_IN), EDGES, *attributes)
        fresh = copy.deepcopy(layer)
        fresh.__class__ = type(layer).__mro__[1]
        x = torch.randn(N, F_IN)
        torch.testing.assert_close(layer(x, EDGES, *attributes), fresh(x, EDGES, *attributes))
        assert out.shape == (N, 4)


# What happens to a converted layer later


def test_a_layer_that_is_explained_later_passes_messages_again():
    layer = pyg.GATConv(F_IN, 4).double()
    x = features(N, F_IN)
    expected = layer(x, EDGES)
    convert(layer)
    layer.explain = True
    layer._edge_mask = torch.full((EDGES.shape[1],), -30.0, dtype=torch.float64)
    layer._loop_mask = EDGES[0] != EDGES[1]
    with Calls() as calls:
        masked = layer(x, EDGES)
    assert not calls.count and not torch.allclose(masked, expected)
    layer.explain = False
    with Calls() as calls:
        torch.testing.assert_close(layer(x, EDGES), expected)
    assert calls.count


def test_hooks_on_messages_that_come_later_are_run():
    layer = pyg.SAGEConv(F_IN, 4).double()
    convert(layer)
    x, seen = features(N, F_IN), []
    expected = layer(x, EDGES)
    handle = layer.register_message_forward_hook(lambda module, args, out: seen.append(out))
    torch.testing.assert_close(layer(x, EDGES), expected)
    assert len(seen) == 1 and seen[0].shape == (EDGES.shape[1], F_IN)
    handle.remove()
    layer(x, EDGES)
    assert len(seen) == 1


@pytest.mark.filterwarnings("ignore")
def test_calls_that_fastattn_answers_otherwise_run_as_before():
    x = features(N, F_IN)
    edges = torch.unique(EDGES, dim=1)
    csr = torch.sparse_coo_tensor(edges.flip(0), torch.ones(edges.shape[1], dtype=torch.float64), (N, N))
    csr = csr.to_sparse_csr()
    gat = pyg.GATConv(F_IN, 4, add_self_loops=False).double()
    expected = gat(x, csr, return_attention_weights=True)
    attributes = features(EDGES.shape[1], 2)
    ignored = gat(x, EDGES, attributes)
    transformer = pyg.TransformerConv(F_IN, 4, dropout=0.5).double()
    torch.manual_seed(2)
    dropped = transformer(x, EDGES, None, True)
    convert(nn.ModuleList([gat, transformer]))
    out, (matrix, weights) = gat(x, csr, return_attention_weights=True)
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(weights, expected[1][1])
    assert matrix.layout == torch.sparse_csr
    torch.testing.assert_close(gat(x, EDGES, attributes), ignored)
    torch.manual_seed(2)
    out, (_, weights) = transformer(x, EDGES, None, True)
    assert torch.equal(out, dropped[0]) and torch.equal(weights, dropped[1][1])


@pytest.mark.parametrize("kind", ["GATConv", "GATv2Conv", "TransformerConv"])
@pytest.mark.parametrize("asked", [True, False, None])
def test_attention_weights_as_before(kind, asked):
    layer = LAYERS[kind]().double()
    x = features(N, F_IN)
    expected = layer(x, EDGES, return_attention_weights=asked)
    convert(layer)
    with Calls() as calls:
        found = layer(x, EDGES, return_attention_weights=asked)
    assert calls.count and type(found) is type(expected)
    if isinstance(expected, tuple):
        assert torch.equal(found[1][0], expected[1][0])
        torch.testing.assert_close(found[1][1], expected[1][1])


def test_reset_parameters_forgets_the_cached_graph():
    layer = pyg.GCNConv(F_IN, 4, cached=True).double()
    convert(layer)
    x = features(N, F_IN)
    first = layer(x, EDGES)
    assert torch.equal(layer(x, EDGES[:, :2]), first)
    layer.reset_parameters()
    fresh = pyg.GCNConv(F_IN, 4).double()
    fresh.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x, EDGES[:, :2]), fresh(x, EDGES[:, :2]))


def test_converted_models_and_graphs_are_not_kept_alive():
    layer = pyg.GCNConv(F_IN, 4)
    convert(layer)
    edges = EDGES.clone()
    layer(torch.randn(N, F_IN), edges)
    references = [weakref.ref(layer), weakref.ref(edges)]
    del layer, edges
    gc.collect()
    assert all(reference() is None for reference in references)


# The context manager


def test_converted_is_reversible():
    model = pyg.GCN(F_IN, 8, num_layers=2, cached=True).double()
    kinds = [type(module) for module in model.modules()]
    x = features(N, F_IN)
    before = model(x, EDGES)
    model.reset_parameters()
    expected = model(x, EDGES)
    assert not torch.allclose(before, expected)
    with converted(model) as report:
        assert len(report.replaced) == 2
        with Calls() as calls:
            torch.testing.assert_close(model(x, EDGES), expected)
        assert calls.count == 2
    assert [type(module) for module in model.modules()] == kinds
    assert "_normalized" not in vars(model.convs[0])
    with Calls() as calls:
        torch.testing.assert_close(model(x, EDGES), expected)
    assert not calls.count


def test_converted_reverts_after_an_error_and_only_its_own():
    model = nn.ModuleList([pyg.GCNConv(F_IN, 4), pyg.SAGEConv(F_IN, 4)])
    convert(model[0])
    with pytest.raises(KeyError), converted(model) as report:
        assert list(report.replaced) == ["1"]
        raise KeyError
    assert isinstance(model[0], fastattn.nn.GCNConv) and type(model[1]) is pyg.SAGEConv


def test_converted_reverts_a_layer_that_was_parametrized_since():
    layer = pyg.GCNConv(F_IN, 4).double()
    x = features(N, F_IN)
    with converted(layer):
        torch.nn.utils.parametrize.register_parametrization(layer, "bias", nn.Softplus())
        expected = layer(x, EDGES)
    assert isinstance(layer, pyg.GCNConv) and not isinstance(layer, fastattn.nn.GCNConv)
    torch.testing.assert_close(layer(x, EDGES), expected)
    torch.nn.utils.parametrize.remove_parametrizations(layer, "bias")
    assert type(layer) is pyg.GCNConv


def test_convert_refuses_what_is_no_module():
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, not dict"):
        convert({})


def test_not_imported_before_it_is_needed(run_python):
    code = "import sys, fastattn, fastattn.nn; print('torch_geometric' in sys.modules)"
    assert run_python("-c", code).stdout.strip() == "False"
