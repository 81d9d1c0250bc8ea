"""Graph: sorting, permutations, every form of a graph that one is made of, errors, and what keeps one."""

import copy
import io
import pickle
import shutil
from pathlib import Path

import numpy as np
import operator_checks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

import fastattn
from fastattn import Graph
from fastattn.graph import _checked_on_any_device, _ends_on_any_device, as_graph

poisoned = operator_checks.poisoned

EDGES = torch.tensor([[0, 1, 1, 3, 1, 4, 3], [2, 1, 0, 2, 1, 4, 2]])


def assert_describes(graph: Graph, src, dst, num_src: int, num_dst: int) -> None:
    """Both orders hold exactly these edges, each with its number, stably sorted; checked one by one."""
    src, dst = np.asarray(src), np.asarray(dst)
    assert (graph.num_src, graph.num_dst, graph.num_edges) == (num_src, num_dst, len(src))
    for (ptr, index, perm), row, col, num_rows in (
        ((graph.rowptr, graph.col, graph.perm), dst, src, num_dst),
        ((graph.colptr, graph.row, graph.perm_t), src, dst, num_src),
    ):
        order = np.argsort(row, kind="stable")
        assert ptr.dtype == torch.int64 and index.dtype == torch.int32
        assert np.array_equal(ptr.numpy(), np.searchsorted(row[order], np.arange(num_rows + 1)))
        assert np.array_equal(index.numpy(), col[order])
        if perm is not None:
            assert perm.dtype == torch.int32
        assert np.array_equal(np.arange(len(row)) if perm is None else perm.numpy(), order)


@pytest.mark.parametrize("dtype", (torch.int64, torch.int32), ids=str)
def test_from_edge_index(dtype):
    edge_index = EDGES.to(dtype)
    assert_describes(Graph(edge_index), *EDGES, 5, 5)
    assert_describes(Graph(edge_index, 9), *EDGES, 9, 9)
    assert_describes(Graph(edge_index, num_nodes=np.int64(7)), *EDGES, 7, 7)
    assert_describes(Graph(edge_index, size=(6, 8)), *EDGES, 6, 8)
    assert_describes(Graph(edge_index[:, :4], size=(None, 8)), *EDGES[:, :4], 4, 8)
    assert_describes(Graph(edge_index[:, :4], size=[8, None]), *EDGES[:, :4], 8, 3)
    assert_describes(Graph(edge_index[:, :0]), *EDGES[:, :0], 0, 0)
    assert_describes(Graph(edge_index[:, :0], 3), *EDGES[:, :0], 3, 3)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_sorting(data):
    N, M = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    E = data.draw(st.integers(0, 200))
    src, dst = (data.draw(st.lists(st.integers(0, n - 1), min_size=E, max_size=E)) for n in (N, M))
    edge_index = torch.tensor([src, dst], dtype=torch.int64)
    graph = Graph(edge_index, size=(N, M))
    assert_describes(graph, src, dst, N, M)
    assert torch.equal(graph.edge_index(), edge_index)
    assert graph.in_degrees().tolist() == [dst.count(n) for n in range(M)]
    assert graph.out_degrees().tolist() == [src.count(n) for n in range(N)]
    assert_describes(graph.reverse(), dst, src, M, N)


def test_sorting_of_many_edges():
    """More than one thread sorts: hubs, sorted edges, and both at once."""
    generator = torch.Generator().manual_seed(0)
    E, N = 300_000, 5000
    spread = torch.randint(N, (2, E), generator=generator)
    hub = torch.where(torch.rand(2, E, generator=generator) < 0.5, 17, spread)
    for edge_index in (spread, hub, hub[:, hub[1].argsort(stable=True)], hub[:, hub[0].argsort(stable=True)]):
        assert_describes(Graph(edge_index, N), *edge_index.numpy(), N, N)


def test_edges_in_order_need_no_permutation():
    graph = Graph(EDGES[:, EDGES[1].argsort(stable=True)])
    assert graph.perm is None and graph.perm_t is not None
    graph = Graph(EDGES[:, EDGES[0].argsort(stable=True)])
    assert graph.perm is not None and graph.perm_t is None


def test_reverse_shares_tensors():
    graph = Graph(EDGES, size=(5, 6))
    back = graph.reverse()
    assert (back.num_src, back.num_dst) == (6, 5)
    assert back.rowptr is graph.colptr and back.col is graph.row and back.perm_t is graph.perm
    assert back.reverse().rowptr is graph.rowptr


def test_the_callers_tensors_are_not_kept():
    """What is checked once must not be changed afterwards."""
    edges, rowptr, col = (
        EDGES.int().clone(),
        torch.tensor([0, 1, 3]),
        torch.tensor([1, 0, 1], dtype=torch.int32),
    )
    graphs = Graph(edges), Graph.from_csr(rowptr, col)
    ordered = EDGES[:, EDGES[1].argsort(stable=True)].int()
    graphs += (Graph(ordered),)
    before = [t.clone() for g in graphs for t in (g.rowptr, g.col)]
    for tensor in (edges, rowptr, col, ordered):
        tensor.fill_(99)
    assert all(
        torch.equal(a, b) for a, b in zip(before, [t for g in graphs for t in (g.rowptr, g.col)], strict=True)
    )


# Other libraries' forms


def matrix(num_dst=4, num_src=5):
    """Rows are targets; unsorted columns, an empty row, a duplicate, in COO form with values."""
    row = torch.tensor([2, 0, 3, 2, 0, 2, 2])
    col = torch.tensor([4, 1, 0, 1, 3, 4, 0])
    return row, col, torch.arange(1.0, 8.0), (num_dst, num_src)


def assert_multiplies(graph, values, dense):
    """aggregate(x) is A @ x, and the values of the matrix are the weights, in their own order."""
    x = torch.randn(dense.shape[1], 3, dtype=torch.float64)
    out = fastattn.aggregate(x, graph, edge_weight=values.double())
    torch.testing.assert_close(out, dense.double() @ x)


@pytest.mark.parametrize("coalesced", (False, True))
def test_from_torch_coo(coalesced):
    row, col, values, size = matrix()
    A = torch.sparse_coo_tensor(torch.stack([row, col]), values, size)
    A = A.coalesce() if coalesced else A
    graph = Graph.from_sparse(A)
    assert graph.num_edges == 7 - coalesced
    if not coalesced:
        assert_describes(graph, col, row, 5, 4)
    assert_multiplies(graph, A._values(), A.to_dense())
    assert_multiplies(A, A._values(), A.to_dense())


@pytest.mark.parametrize("index", (torch.int64, torch.int32), ids=str)
@pytest.mark.parametrize("layout", ("csr", "csc"))
def test_from_torch_compressed(layout, index):
    row, col, values, size = matrix()
    make = torch.sparse_csr_tensor if layout == "csr" else torch.sparse_csc_tensor
    major, minor, rows = (row, col, size[0]) if layout == "csr" else (col, row, size[1])
    order = major.argsort(stable=True)
    ptr = torch.searchsorted(major[order], torch.arange(rows + 1))
    # Columns out of order and a duplicate, which these layouts can hold where nobody checks.
    A = make(ptr.to(index), minor[order].to(index), values[order], size, check_invariants=False)
    dense = torch.zeros(size).index_put((row, col), values, accumulate=True)
    assert_describes(Graph.from_sparse(A), col[order], row[order], 5, 4)
    assert_multiplies(Graph.from_sparse(A), A.values(), dense)
    assert_multiplies(A, A.values(), dense)


def test_weights_of_several_heads_in_a_sparse_matrix():
    row, col, values, size = matrix()
    A = torch.sparse_coo_tensor(torch.stack([row, col]), torch.randn(7, 2), (*size, 2))
    x = torch.randn(5, 2, 3)
    out = fastattn.aggregate(x, A, edge_weight=A._values())
    torch.testing.assert_close(out, torch.einsum("nmh,mhf->nhf", A.to_dense(), x))


@pytest.mark.parametrize("kind", ("matrix", "array"))
@pytest.mark.parametrize("layout", ("csr", "csc", "coo"))
def test_from_scipy(layout, kind):
    sparse = pytest.importorskip("scipy.sparse")
    row, col, values, size = (t.numpy() if isinstance(t, torch.Tensor) else t for t in matrix())
    A = getattr(sparse, f"coo_{kind}")((values, (row, col)), shape=size)
    A.row.flags.writeable = False
    if layout != "coo":
        major, minor, rows = (row, col, size[0]) if layout == "csr" else (col, row, size[1])
        order = major.argsort(kind="stable")
        ptr = np.searchsorted(major[order], np.arange(rows + 1))
        A = getattr(sparse, f"{layout}_{kind}")((values[order], minor[order], ptr), shape=size)
        row, col = row[order], col[order]
    assert_describes(Graph.from_sparse(A), col, row, 5, 4)
    assert_multiplies(A, torch.from_numpy(A.data), torch.from_numpy(A.toarray()))
    if layout != "coo":
        short = A.copy()
        short.indptr = short.indptr[:2]
        with pytest.raises(ValueError, match=f"row pointers must have {len(ptr)} entries, got 2"):
            Graph.from_sparse(short)
    with pytest.raises(RuntimeError, match="csr, csc or coo format, .* got lil: convert it with .tocsr()"):
        Graph.from_sparse(A.tolil())


class FakeStorage:
    """The storage of torch_sparse.SparseTensor, by the names that are read."""

    def __init__(self, row, colptr, csr2csc):
        self._row, self._colptr, self._csr2csc = row, colptr, csr2csc

    def row(self):
        return self._row


class FakeSparseTensor:
    def __init__(self, row, col, values, size, cached):
        order = row.argsort(stable=True)
        self._row, self._col, self._values, self._size = row[order], col[order], values[order], size
        csr2csc = self._col.argsort(stable=True) if cached else None
        colptr = torch.searchsorted(self._col.sort().values, torch.arange(size[1] + 1)) if cached else None
        self.storage = FakeStorage(self._row, colptr, csr2csc)

    def sparse_sizes(self):
        return self._size

    def csr(self):
        ptr = torch.searchsorted(self._row, torch.arange(self._size[0] + 1))
        return ptr, self._col, self._values


@pytest.mark.parametrize("cached", (False, True))
def test_from_sparse_tensor(cached):
    A = FakeSparseTensor(*matrix(), cached)
    graph = Graph.from_sparse(A)
    assert (graph._csc is not None) == cached
    assert_describes(graph, A._col, A._row, 5, 4)
    assert as_graph(A, 5).num_dst == 4


class FakeDGLGraph:
    """A DGL graph of one edge type, by the names that are read."""

    canonical_etypes = [("item", "to", "user")]

    def __init__(self, edge_index, num_src, num_dst):
        self._edges, self._sizes = edge_index, (num_src, num_dst)

    def edges(self, form, order):
        assert (form, order) == ("uv", "eid")
        return tuple(self._edges)

    def num_src_nodes(self):
        return self._sizes[0]

    def num_dst_nodes(self):
        return self._sizes[1]


def test_from_dgl():
    given = FakeDGLGraph(EDGES, 6, 7)
    assert_describes(Graph.from_sparse(given), *EDGES, 6, 7)
    assert fastattn.aggregate(torch.ones(6, 2), given).shape == (7, 2)
    given.canonical_etypes = given.canonical_etypes * 2
    with pytest.raises(RuntimeError, match="one edge type, got .*item"):
        Graph.from_sparse(given)


@pytest.mark.parametrize("filled", (False, True))
@pytest.mark.parametrize("order", (None, "row", "col"))
def test_from_pyg_edge_index(order, filled):
    EdgeIndex = pytest.importorskip("torch_geometric").EdgeIndex
    edges = EDGES if order is None else EDGES[:, EDGES[int(order == "col")].argsort(stable=True)]
    edge_index = EdgeIndex(edges, sparse_size=(6, 7), sort_order=order)
    if filled and order:
        edge_index.fill_cache_()
    graph = Graph(edge_index)
    assert_describes(graph, *edges, 6, 7)
    assert_describes(Graph.from_sparse(edge_index), *edges, 6, 7)
    assert as_graph(edge_index, 6).num_dst == 7
    assert fastattn.aggregate(torch.ones(6, 2), edge_index).shape == (7, 2)
    with pytest.raises(ValueError, match="edge_index is for 6 source nodes, the graph shall have 9"):
        Graph(edge_index, 9)
    with pytest.raises(RuntimeError, match="x has 9 rows, the graph 6 source nodes"):
        fastattn.aggregate(torch.ones(9, 2), edge_index)
    unsized = EdgeIndex(edges, sort_order=order)
    assert_describes(Graph(unsized, size=(6, 7)), *edges, 6, 7)
    assert fastattn.aggregate(torch.ones(8, 2), unsized).shape == (8, 2)


def test_caches_of_pyg_edge_index_are_used():
    EdgeIndex = pytest.importorskip("torch_geometric").EdgeIndex
    for order in ("row", "col"):
        edges = EDGES[:, EDGES[int(order == "col")].argsort(stable=True)]
        edge_index = EdgeIndex(edges, sparse_size=(6, 7), sort_order=order).fill_cache_()
        assert Graph(edge_index)._csc is not None
    # Its sort need not keep the order of parallel ends: then ours is taken.
    perm = edge_index._T_perm
    row = edges[0][perm]
    same = (row[1:] == row[:-1]).nonzero()[0, 0]
    perm[same], perm[same + 1] = perm[same + 1].clone(), perm[same].clone()
    graph = Graph(edge_index)
    assert graph._csc is None
    assert_describes(graph, *edges, 6, 7)


# Errors


NESTED = torch.nested.nested_tensor([EDGES[0], EDGES[1]], layout=torch.jagged)


@pytest.mark.parametrize("arguments, error, message", (
    (([[0], [1]],), TypeError, "edge_index must be a Tensor, got list"),
    ((EDGES.float(),), RuntimeError, "edge_index must be int64 or int32, got torch.float32"),
    ((EDGES.bool(),), RuntimeError, "edge_index must be int64 or int32, got torch.bool"),
    ((EDGES.T,), RuntimeError, r"edge_index must be \(2, E\), .* got \(7, 2\): transpose it"),
    ((EDGES[0],), RuntimeError, r"edge_index must have 2 dimensions, got \(7,\)"),
    ((EDGES.float().to_sparse(),), RuntimeError, "got layout torch.sparse_coo: use Graph.from_sparse"),
    ((EDGES, 4), ValueError, r"edge_index\[0\] \(sources\) holds 4, but there are only 4 source nodes"),
    ((EDGES.flip(0), 4), ValueError, r"edge_index\[0\] \(sources\) holds 4"),
    ((EDGES - 1,), ValueError, r"edge_index\[0\] \(sources\) holds -1: source nodes are numbered from 0"),
    ((EDGES - 1, 5), ValueError, r"holds -1"),
    ((EDGES + 2**32, 5), ValueError, r"holds 4294967300"),
    ((EDGES.to("meta"),), RuntimeError, "cannot be read from a meta tensor: give num_nodes or size"),
    ((NESTED,), RuntimeError, "edge_index must be a dense tensor, got a nested one"),
    ((EDGES + (2**63 - 5),), ValueError, rf"\(sources\) plus one must be at most {2**60 - 2}, got {2**63}"),
    ((EDGES, 2**45), RuntimeError, "no memory for a tensor of shape|allocate memory"),
    ((EDGES, 2**64), ValueError, f"num_nodes must be at most {2**60 - 2}, got {2**64}"),
    ((EDGES, torch.tensor(4.5)), TypeError, r"num_nodes must be an integer, got tensor\(4.5"),
    ((EDGES, -1), ValueError, "num_nodes must not be negative, got -1"),
    ((EDGES, 5.0), TypeError, "num_nodes must be an integer, got 5.0"),
    ((EDGES, True), TypeError, "num_nodes must be an integer, got True"),
))  # fmt: skip
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        Graph(*arguments)


def test_errors_of_sizes():
    for size, error, message in (
        ((5, 4), ValueError, r"edge_index\[1\] \(targets\) holds 4, but there are only 4 target nodes"),
        ((5,), TypeError, r"size must be a pair \(num_src, num_dst\), got \(5,\)"),
        (5, TypeError, "size must be a pair"),
        ((5, -2), ValueError, r"size\[1\] must not be negative, got -2"),
    ):
        with pytest.raises(error, match=message):
            Graph(EDGES, size=size)
    with pytest.raises(ValueError, match="num_nodes or size, not both: got num_nodes=5"):
        Graph(EDGES, 5, size=(5, 5))


@pytest.mark.parametrize("rowptr, col, num_src, error, message", (
    ([0, 1, 3], [0, 1, 2], None, ValueError, "col holds 2, but there are only 2 source nodes"),
    ([0, 1, 3], [0, -1, 1], None, ValueError, "col holds -1: source nodes are numbered from 0"),
    ([1, 1, 3], [0, 1, 1], None, ValueError, "rowptr must go from 0 to 3, where col ends, got 1 to 3"),
    ([0, 1, 4], [0, 1, 1], None, ValueError, "got 0 to 4"),
    ([0, 5, 1, 3], [0, 1, 1], None, ValueError, r"rowptr must not decrease, got rowptr\[2\] = 1 after 5"),
    ([], [], None, RuntimeError, "rowptr must have one entry more than there are rows, got none"),
    ([0, 1], [[0]], None, RuntimeError, r"col must have 1 dimension, got \(1, 1\)"),
    ([0, 1], [0], -3, ValueError, "num_src must not be negative, got -3"),
))  # fmt: skip
def test_errors_of_csr(rowptr, col, num_src, error, message):
    rowptr, col = (torch.tensor(t, dtype=torch.int64) for t in (rowptr, col))
    with pytest.raises(error, match=message):
        Graph.from_csr(rowptr, col, num_src=num_src)


def test_errors_of_sparse_matrices():
    A = torch.eye(4)
    batch = torch.eye(4).expand(2, 4, 4).contiguous()
    for wrong, error, message in (
        (A, RuntimeError, "CSR, CSC or COO layout, got torch.strided: an edge_index goes to Graph"),
        (A.to_sparse_bsr((2, 2)), RuntimeError, "CSR, CSC or COO layout, got torch.sparse_bsr"),
        (batch.to_sparse(), RuntimeError, r"two sparse dimensions, got \(2, 4, 4\)"),
        (batch.to_sparse_csr(), RuntimeError, r"two sparse dimensions, got \(2, 4, 4\)"),
        ([1, 2], TypeError, "matrix must be a sparse matrix of torch, .* got list"),
    ):
        with pytest.raises(error, match=message):
            Graph.from_sparse(wrong)
    torch.sparse.check_sparse_tensor_invariants.disable()
    bad = torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 7]), torch.ones(2), (2, 2))
    with pytest.raises(ValueError, match="col holds 7, but there are only 2 source nodes"):
        Graph.from_sparse(bad)


# What a graph goes through


def test_from_csr():
    graph = Graph.from_csr(torch.tensor([0, 1, 1, 3]), torch.tensor([3, 0, 3]), num_src=4)
    assert_describes(graph, [3, 0, 3], [0, 2, 2], 4, 3)
    assert graph.perm is None
    assert_describes(Graph.from_csr(torch.tensor([0]), torch.tensor([], dtype=torch.int32)), [], [], 0, 0)


@pytest.mark.parametrize("built", (False, True))
def test_copies(built):
    graph = Graph(EDGES, size=(5, 6))
    if built:
        graph.csc, graph._vector("in", torch.float32)
    meta = graph.to("meta")
    assert meta.device.type == meta.col.device.type == "meta" and meta.num_dst == 6
    assert (meta._csc is not None) == built
    saved = io.BytesIO()
    torch.save(graph, saved)
    saved.seek(0)
    for twin in (
        pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph), copy.copy(graph),
        torch.load(saved, weights_only=False), graph.to("cpu"),
    ):  # fmt: skip
        assert_describes(twin, *EDGES, 5, 6)
    assert copy.deepcopy(graph).rowptr is not graph.rowptr and graph.to("cpu") is graph
    assert len({graph, copy.copy(graph)}) == 2  # by identity: comparing edges would hide their cost


def test_repr():
    assert repr(Graph(EDGES, size=(5, 6))) == "Graph(num_src=5, num_dst=6, num_edges=7)"
    assert "device='meta'" in repr(Graph(EDGES).to("meta"))


def test_works_without_the_native_library(run_python, tmp_path):
    """The sort falls back to torch's own, with the same results and errors."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "_native_missing.txt")
    shutil.copytree(Path(fastattn.__file__).parent, tmp_path / "fastattn", ignore=ignored)
    code = f"""
import torch, fastattn
edges = torch.tensor({EDGES.tolist()})
graph = fastattn.Graph(edges, 5)
print([graph.rowptr.tolist(), graph.col.tolist(), graph.perm.tolist(), graph.row.tolist()])
print(fastattn.aggregate(torch.eye(5), graph, "max").tolist())
try:
    fastattn.Graph(edges, 4)
except ValueError as error:
    print(error)
"""
    printed = run_python("-W", "ignore", "-c", code, path=tmp_path, cwd=tmp_path).stdout.splitlines()
    graph = Graph(EDGES, 5)
    tensors = graph.rowptr, graph.col, graph.perm, graph.row
    assert printed[0] == str([t.tolist() for t in tensors])
    assert printed[1] == str(fastattn.aggregate(torch.eye(5), graph, "max").tolist())
    assert "(sources) holds 4" in printed[2]


def test_as_graph_of_what_is_one_already():
    graph = Graph(EDGES)
    assert as_graph(graph, 5) is graph
    with pytest.raises(RuntimeError, match="query has 6 rows, the graph 5 source nodes"):
        as_graph(graph, 6, name="query")
    with pytest.raises(RuntimeError, match="features of 6 targets, the graph has 5"):
        as_graph(graph, 5, 6)
    assert_describes(as_graph(EDGES, 6, 7), *EDGES, 6, 7)
    assert_describes(as_graph(EDGES, 6), *EDGES, 6, 6)


def test_inference_mode_leaves_no_trace():
    """A graph made, and its transpose asked for, under inference mode serves training."""
    with torch.inference_mode():
        edges = EDGES.clone()
        graph = Graph(edges)
        graph.csc, graph._vector("in", torch.float32)
    for tensor in (*graph.csr[:3], *graph.csc[:3], graph._vector("in", torch.float32)):
        assert tensor is None or not tensor.is_inference()


def test_transforms_leave_no_trace():
    graph = Graph(EDGES)
    torch.func.grad(lambda x: fastattn.aggregate(x, graph, "mean").sum())(torch.randn(5, 2))
    torch.vmap(lambda x: fastattn.aggregate(x, graph, "both"))(torch.randn(3, 5, 2))
    for tensor in (*graph.csc[:3], *graph._vectors.values()):
        assert tensor is None or not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    assert_describes(pickle.loads(pickle.dumps(graph)), *EDGES, 5, 5)


# torch.compile


def degrees(x, graph):
    return x + graph.in_degrees().sum() + graph.colptr.sum() + graph.num_edges


class Weighing(torch.nn.Module):
    """Two layers on a graph of their own, which makes everything that a graph may keep."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.first = fastattn.nn.GCNConv(3, 4)
        self.second = fastattn.nn.GATConv(4, 3, edge_dim=2)

    def forward(self, x, edge_attr):
        x = fastattn.aggregate(self.first(x, self.graph), self.graph, "both")
        return self.second(x, self.graph, edge_attr)


def test_tracers_leave_no_trace():
    """What a graph keeps is real, although fake tensors asked for it."""
    edges = torch.cat([EDGES, torch.tensor([[3], [3]])], 1)
    module = Weighing(Graph(edges, 5))
    args = torch.randn(5, 3), torch.randn(8, 2)
    exported = torch.export.export(module, args, strict=False).module()
    parameters = dict(module.named_parameters())
    expected = torch.func.functional_call(Weighing(Graph(edges, 5)), parameters, args)
    for found in (exported(*args), module(*args)):
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, expected)
    expected.sum().backward()


def test_compiled_code_takes_graphs_and_makes_them():
    """One compilation for graphs of any size; what a graph builds in compiled code it keeps."""

    def make_and_use(x, edges):
        return degrees(x, Graph(edges, x.shape[0]))

    for function, prepare in ((make_and_use, lambda edges, N: edges), (degrees, Graph)):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(function, fullgraph=True, backend=counter)
        for N, edges in ((6, EDGES), (7, EDGES[:, :3]), (9, EDGES.repeat(1, 3))):
            x, given = torch.randn(N, 2), prepare(edges, N)
            torch.testing.assert_close(compiled(x, given), degrees(x, Graph(edges, N)))
            if function is degrees:
                assert_describes(given, *edges, N, N)
        assert counter.frame_count <= 3
        if function is make_and_use:
            with pytest.raises((ValueError, RuntimeError), match="9"):
                compiled(torch.randn(9, 2), EDGES + 5)


@pytest.mark.parametrize("E", (0, 7))
def test_op_passes_opcheck(E):
    row, col = EDGES[:, :E]
    torch.library.opcheck(torch.ops.fastattn.graph_csr, (row, col, 5, 5))
    rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(row, minlength=5).cumsum(0)])
    torch.library.opcheck(torch.ops.fastattn.graph_checked_csr, (rowptr, col, 5))


def test_ends_and_order_of_edges_are_those_of_plain_pytorch():
    """The native ops against what every other device runs, and against graphs that are none."""
    operator_checks.require("cpu", "fastattn::aggregate_sum")
    graph = Graph(EDGES, size=(5, 6))
    for edges in (graph.csr, graph.csc):
        for perm in (edges.perm, None):
            for dtype in (torch.int32, torch.int64):
                args = edges.ptr, edges.index.to(dtype), None if perm is None else perm.to(dtype)
                torch.library.opcheck(torch.ops.fastattn.graph_ends, args)
                found = torch.ops.fastattn.graph_ends(*args)
                for mine, theirs in zip(found, _ends_on_any_device(*args), strict=True):
                    assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    ptr, index, perm, _ = graph.csr
    falling = ptr.clone()
    falling[1] = 100
    for wrong in ((falling, index, perm), (ptr, index, perm + 1), (ptr[1:], index, perm)):
        with pytest.raises(RuntimeError, match="must"):
            torch.ops.fastattn.graph_ends(*wrong)
    for values, ascending in (([], True), ([3], True), ([1, 1, 2], True), ([1, 0, 2], False)):
        for index in (torch.tensor(values, dtype=torch.int32), torch.tensor(values).long()):
            assert torch.ops.fastattn.is_ascending(index) == ascending
    assert not torch.ops.fastattn.is_ascending(torch.tensor([[0, 9], [1, 0]])[:, 1].contiguous())
    assert torch.ops.fastattn.is_ascending(torch.tensor([[0, 9], [1, 0]])[:, 0])


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_checked_csr_is_that_of_plain_pytorch(dtype):
    """The native op against what every other device runs: copies, dtypes and what is found wrong."""
    rowptr, col = (torch.tensor(t, dtype=dtype) for t in ([0, 2, 2, 5], [4, 0, 1, 1, 3]))
    strided = torch.stack([rowptr, rowptr + 9], 1)[:, 0]
    for args in (
        (rowptr, col, 5),
        (strided, col, 2**31),
        (rowptr[:1], col[:0], 0),
        (rowptr[1:3] - 2, col[:0], 3),
    ):
        found = torch.ops.fastattn.graph_checked_csr(*args)
        for mine, theirs, source in zip(found, _checked_on_any_device(*args), args[:2], strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
            assert mine.numel() == 0 or mine.data_ptr() != source.data_ptr()
    for wrong in (
        (rowptr + 1, col, 5), (rowptr[:-1], col, 5), (torch.tensor([0, 3, 2, 5], dtype=dtype), col, 5),
        (rowptr, col, 4), (rowptr, col, 0), (rowptr, col - 1, 2),
    ):  # fmt: skip
        with pytest.raises(ValueError) as expected:
            _checked_on_any_device(*wrong)
        with pytest.raises(ValueError) as error:
            torch.ops.fastattn.graph_checked_csr(*wrong)
        assert str(error.value) == str(expected.value)


def test_meta_tensors_have_sizes_only():
    graph = Graph(EDGES.to("meta"), 5)
    assert graph.num_edges == EDGES.shape[1] and graph.colptr.shape == (6,) and graph.col.is_meta
    x = torch.zeros(5, 3, device="meta", requires_grad=True)
    for edges in (graph, EDGES.to("meta")):
        out = fastattn.aggregate(x, edges, "max")
        assert out.is_meta and out.shape == (5, 3)
        assert torch.autograd.grad(out.sum(), x)[0].shape == (5, 3)


def test_freed_memory_is_refused():
    """No op reads through an index tensor, or a seed, whose storage is gone."""
    operator_checks.require("cpu")
    ops = torch.ops.fastattn
    rowptr, col, perm = torch.tensor([0, 2, 3]), *torch.tensor([[0, 1, 1], [0, 2, 1]], dtype=torch.int32)
    x, arg, seed = torch.randn(2, 4), torch.zeros(2, 4, dtype=torch.int32), torch.ones(1, dtype=torch.int64)
    alpha, heads = torch.randn(2, 1), torch.randn(1, 1, 2, 4)
    calls = (
        (ops.is_ascending, (col,)),
        (ops.edges_per_worker, (rowptr, 2)),
        (ops.graph_csr, (col, perm, 3, 3)),
        (ops.graph_checked_csr, (rowptr, col, 2)),
        (ops.graph_ends, (rowptr, col, perm)),
        (ops.aggregate_sum, (x, rowptr, col, perm, 2, None, None, None, arg, True)),
        (
            ops.graph_attention_forward,
            ("additive", None, None, x[:, None], alpha, alpha, None, None, None, rowptr, col, perm, 2, seed)
            + (1.0, 0.2, 0.5, False),
        ),
        (
            ops.attention_forward,
            (heads, heads, heads, None, None, None, None, seed, 1.0, 0.0, -1, -1, False, 0.5),
        ),
    )
    for op, args in calls:
        op(*args)
        for i, tensor in enumerate(args):
            if isinstance(tensor, torch.Tensor):
                freed = tensor.clone()
                freed.untyped_storage().resize_(0)
                with pytest.raises(RuntimeError, match="memory of its own"):
                    op(*args[:i], freed, *args[i + 1 :])
