"""What only the Triton kernels of graphs do: dividing long rows, wide tiles, refusing what does not fit."""

import aggregation_cases
import graph_attention_cases
import operator_checks
import pytest
import torch
from operator_checks import running

import fastattn
from fastattn import graph as graphs

poisoned = operator_checks.poisoned

# Rows are divided where 64 divides the position of an edge, if they have more than 64: degrees around that,
# rows that begin and end at a cut, one with many cuts, rows without edges between them.
DEGREES = (0, 64, 65, 63, 128, 0, 1, 300, 62, 64, 0, 129)


@pytest.fixture(autouse=True)
def triton():
    with running("triton", "fastattn::aggregate_sum"):
        yield


def edges_of_degrees(shuffled=True) -> torch.Tensor:
    dst = torch.repeat_interleave(torch.arange(len(DEGREES)), torch.tensor(DEGREES))
    edge_index = torch.stack([torch.randint(9, dst.shape), dst])
    return edge_index[:, torch.randperm(len(dst))] if shuffled else edge_index


@pytest.mark.parametrize("reverse", (False, True))
@pytest.mark.parametrize("reduce", ("sum", "mean", "max", "min"))
def test_divided_rows(reduce, reverse):
    """In both directions: the gradient of a sum is one over the reversed edges."""
    edge_index = edges_of_degrees(shuffled=reverse)
    N, M = (len(DEGREES), 9) if reverse else (9, len(DEGREES))
    edge_index = edge_index.flip(0) if reverse else edge_index
    for options in ({"weighted": True, "batch": (2,)}, {"H": 2}):
        case = aggregation_cases.make_case(N, M, F=3, edge_index=edge_index, reduce=reduce, **options)
        aggregation_cases.check(aggregation_cases.call(case, "triton"), case)


def test_ties_and_nan_in_divided_rows():
    edge_index = edges_of_degrees(shuffled=False)
    E = edge_index.shape[1]
    for first in (0, 200, E - 1):
        for value in (1.0, torch.nan):
            weight = torch.zeros(E)
            weight[first:] = value
            weight.requires_grad_()
            x = torch.ones(9, 2, requires_grad=True)
            out = fastattn.aggregate(
                x,
                fastattn.Graph(edge_index, size=(9, len(DEGREES))),
                "max",
                edge_weight=weight,
                impl="triton",
            )
            (grad,) = torch.autograd.grad(out, weight, torch.ones_like(out))
            expected, begin = torch.zeros(E), 0
            for degree in DEGREES:
                if degree:
                    expected[
                        min(max(begin, first), begin + degree - 1) if begin + degree > first else begin
                    ] = 2
                begin += degree
            assert torch.equal(grad, expected)


@pytest.mark.parametrize("reduce", ("sym", "max"))
def test_derivatives_of_second_order(reduce):
    """Nothing else selects by the rows of a sum."""
    case = aggregation_cases.make_case(7, E=20, F=3, reduce=reduce, dtype=torch.float64, weighted=True)
    weight = case.edge_weight.abs() + 0.5  # degrees that have a root
    found = []
    for impl in ("triton", "reference"):
        leaves = [t.clone().requires_grad_() for t in (case.x, weight)]
        value = fastattn.aggregate(leaves[0], case.graph(), reduce, edge_weight=leaves[1], impl=impl)
        grads = torch.autograd.grad(value.sin().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.sin().sum() for g in grads), leaves))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("reverse", (False, True))
@pytest.mark.parametrize("form", graph_attention_cases.FORMS)
def test_attention_of_divided_rows(form, reverse):
    edge_index = edges_of_degrees()
    edge_index = edge_index.flip(0) if reverse else edge_index
    size = (len(DEGREES), 9) if reverse else (9, len(DEGREES))
    case = graph_attention_cases.make_case(form, *size, edge_index=edge_index, C=3, hidden=0.2, dropout_p=0.2)
    graph_attention_cases.check(graph_attention_cases.call(case, "triton"), case)


def test_a_row_that_sees_nothing_in_some_of_its_parts():
    """Parts without a visible edge, in front of one with, and a row of nothing else."""
    E = 400
    edge_index = torch.stack([torch.arange(E) % 5, torch.arange(E) // 200])
    case = graph_attention_cases.make_case("graph_attention", 5, 2, edge_index=edge_index)
    case.tensors["edge_bias"][:150] = -torch.inf
    case.tensors["edge_bias"][200:] = -torch.inf
    results = graph_attention_cases.call(case, "triton")
    graph_attention_cases.check(results, case)
    assert (results["out"][1] == 0).all()


@pytest.mark.parametrize("form", graph_attention_cases.FORMS)
def test_several_tiles_of_channels(form):
    """Of values, of keys, and of both, with rows that are divided."""
    for C, D in ((70, 5), (5, 70)) if form == "graph_attention" else ((70, 70),):
        case = graph_attention_cases.make_case(form, 4, 3, 150, 1, C, D, dtype=torch.float32, hub=True)
        graph_attention_cases.check(graph_attention_cases.call(case, "triton"), case)


def test_edge_softmax_of_divided_rows():
    edge_index = edges_of_degrees()
    graph = fastattn.Graph(edge_index, size=(9, len(DEGREES)))
    few = fastattn.Graph(torch.randint(4, (2, 9)), 4)
    for edges, heads in ((graph, 2), (few, 40)):
        score = torch.randn(edges.num_edges, heads, dtype=torch.float64, requires_grad=True)
        grad = torch.randn_like(score)
        results = [fastattn.edge_softmax(score, edges, impl=impl) for impl in ("triton", "reference")]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(r, score, grad) for r in results))


def test_bare_ops_and_transforms_run_on_the_kernels():
    """As every caller of the op meets them; nothing else computes aggregation here."""
    x, edge_index = torch.randn(5, 3), torch.tensor([[0, 1, 2, 4], [1, 1, 3, 0]])
    graph = fastattn.Graph(edge_index, 5)
    expected = fastattn.aggregate(x, graph, impl="reference")
    bare = torch.ops.fastattn.aggregate_sum(x.view(1, 5, 1, 3), *graph.csr, None, None, None, None, False)
    torch.testing.assert_close(bare.view(5, 3), expected)
    mapped = torch.func.vmap(lambda x: fastattn.aggregate(x, graph, impl="triton"))(torch.stack([x, 2 * x]))
    torch.testing.assert_close(mapped, torch.stack([expected, 2 * expected]))
    explained = fastattn.explain(fastattn.aggregate, x, graph)
    assert explained.impl == "reference" and "interpreter" in explained.reasons["cpu"]
    with pytest.raises(NotImplementedError, match="cpu.*interpreter"):
        fastattn.aggregate(x, graph, impl="cpu")


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
@pytest.mark.parametrize("rows, cols, E", ((1, 1, 0), (5, 7, 40), (300, 2, 1000), (0, 4, 0)))
def test_edges_are_sorted_on_every_device_as_on_the_cpu(rows, cols, E, dtype):
    """In plain PyTorch, which is what GPUs run, to the same arrays as by the native library."""
    row, col = (torch.randint(max(n, 1), (E,), dtype=dtype) for n in (rows, cols))
    native = torch.ops.fastattn.graph_csr(row, col, rows, cols)
    for mine, theirs in zip(graphs._sorted_on_any_device(row, col, rows, cols), native, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
