"""DGL's functions on an object that offers what a DGL graph does, against a loop over its edges."""

import pytest
import torch

from fastattn.integrations import dgl
from fastattn.nn import _graph_layer


class DGLGraph:
    """The methods of ``dgl.DGLGraph`` that are used."""

    def __init__(self, src, dst, num_src, num_dst, types=1):
        self.ends = torch.tensor(src), torch.tensor(dst)
        self.sizes = num_src, num_dst
        self.canonical_etypes = [("_N", f"_E{n}", "_N") for n in range(types)]

    def edges(self, form="uv", order="eid"):
        assert (form, order) == ("uv", "eid")
        return self.ends

    def num_src_nodes(self):
        return self.sizes[0]

    def num_dst_nodes(self):
        return self.sizes[1]


@pytest.fixture
def g():
    # 5 sources, 4 targets; parallel edges, target 2 has none
    return DGLGraph([4, 0, 1, 1, 3, 0, 4], [0, 3, 0, 0, 1, 3, 3], 5, 4)


def messages(g, x, e=None):
    """For each target the list of its messages."""
    found = [[] for _ in range(g.sizes[1])]
    for number, (m, n) in enumerate(zip(*g.ends, strict=True)):
        found[n].append(x[m] if e is None else x[m] * e[number])
    return found


REDUCES = {
    "copy_u_sum": lambda rows: rows.sum(0),
    "copy_u_mean": lambda rows: rows.mean(0),
    "copy_u_max": lambda rows: rows.amax(0),
    "copy_u_min": lambda rows: rows.amin(0),
}


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("name", REDUCES)
def test_copy_u(g, name, shape):
    x = torch.randn(5, *shape, dtype=torch.float64, requires_grad=True)
    rows = messages(g, x)
    expected = torch.stack([REDUCES[name](torch.stack(r)) if r else torch.zeros_like(x[0]) for r in rows])
    out = getattr(dgl, name)(g, x)
    torch.testing.assert_close(out, expected)
    torch.autograd.gradcheck(lambda x: getattr(dgl, name)(g, x), x)


SHAPES = [
    ((), ()),
    ((3,), ()),
    ((3,), (1,)),
    ((), (3,)),
    ((3,), (3,)),
    ((2, 3), (2, 1)),
    ((2, 3), (2, 3)),
    ((2, 3), (1, 3)),
    ((2, 3), (3,)),
    ((3,), (2, 1)),
    ((1, 3), (2, 1)),
    ((2, 2, 3), (2, 1, 1)),
]


@pytest.mark.parametrize("x_shape, e_shape", SHAPES)
def test_u_mul_e_sum(g, x_shape, e_shape):
    x = torch.randn(5, *x_shape, dtype=torch.float64, requires_grad=True)
    e = torch.randn(7, *e_shape, dtype=torch.float64, requires_grad=True)
    shape = torch.broadcast_shapes(x_shape, e_shape)
    zero = torch.zeros(shape, dtype=torch.float64)
    expected = torch.stack([sum(rows, zero) for rows in messages(g, x, e)])
    torch.testing.assert_close(dgl.u_mul_e_sum(g, x, e), expected)
    torch.autograd.gradcheck(lambda x, e: dgl.u_mul_e_sum(g, x, e), (x, e))


def test_a_graph_is_sorted_once_until_it_changes(g, monkeypatch):
    built = []
    as_graph = _graph_layer.as_graph
    monkeypatch.setattr(_graph_layer, "as_graph", lambda *args: built.append(1) or as_graph(*args))
    x = torch.randn(5, 3)
    first = dgl.copy_u_sum(g, x)
    assert torch.equal(dgl.copy_u_sum(g, x), first) and len(built) == 1
    g.ends = g.ends[0], g.ends[1].flip(0)
    assert not torch.equal(dgl.copy_u_sum(g, x), first) and len(built) == 2


def test_what_does_not_fit_is_refused(g):
    with pytest.raises(TypeError, match="DGL graph, got Tensor"):
        dgl.copy_u_sum(torch.ones(2, 3), torch.ones(5, 2))
    with pytest.raises(RuntimeError, match="x has 4 rows, the graph 5"):
        dgl.copy_u_sum(g, torch.ones(4, 2))
    with pytest.raises(RuntimeError, match="e has 6 rows, the graph 7 edges"):
        dgl.u_mul_e_sum(g, torch.ones(5, 2), torch.ones(6))
    with pytest.raises(RuntimeError, match="one edge type"):
        dgl.copy_u_sum(DGLGraph([0], [0], 1, 1, types=2), torch.ones(1, 2))
    x, e = torch.ones(5, 2), torch.ones(7, 3)
    with pytest.raises(RuntimeError, match=r"x \(5, 2\) and e \(7, 3\)"):
        dgl.u_mul_e_sum(g, x, e)
    for name, arguments in {"x": lambda given: (given, e), "e": lambda given: (x, given)}.items():
        with pytest.raises(TypeError, match=f"{name} must be a Tensor, got list"):
            dgl.u_mul_e_sum(g, *arguments([1.0]))
        with pytest.raises(RuntimeError, match=rf"{name} must have a row .*, got shape \(\)"):
            dgl.u_mul_e_sum(g, *arguments(torch.tensor(1.0)))
    with pytest.raises(TypeError, match="x must be a Tensor, got list"):
        dgl.copy_u_mean(g, [1.0])
