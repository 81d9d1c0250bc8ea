"""The rules of aggregation: ties, NaN, empty rows, degrees, repeatability, balance, arguments, the choice."""

import itertools
import math

import aggregation_cases
import operator_checks
import pytest
import torch
from aggregation_cases import (
    DTYPES,
    REDUCES,
    call,
    check,
    exact,
    hub_graph,
    make_case,
    random_edges,
    require_kernels,
)
from attention_cases import choices
from operator_checks import assert_same, fewer

import fastattn
from fastattn import Graph
from fastattn.graph import Compressed, _make

impl, poisoned = aggregation_cases.impl, operator_checks.poisoned

aggregate = fastattn.aggregate


# Ties and NaN


@choices(DTYPES, (torch.float32,))
def test_ties_go_to_the_first_edge_of_the_caller(impl, dtype):
    """Whatever the edges are sorted by inside; to that edge goes the whole gradient."""
    edge_index = torch.tensor([[3, 1, 2, 1, 0], [0, 0, 0, 0, 2]])
    for reduce, F in itertools.product(("max", "min"), fewer(impl, (1, 5, 20), (5,))):
        for order in itertools.permutations(range(4)):
            edges = edge_index[:, [*order, 4]]
            x = torch.full((4, F), 2.0, dtype=dtype, requires_grad=True)
            weight = torch.ones(5, dtype=dtype, requires_grad=True)
            aggregate(x, edges, reduce, edge_weight=weight, impl=impl).sum().backward()
            expected = torch.zeros(4, F, dtype=dtype)
            expected[edges[0, 0]], expected[0] = 1, 1
            assert torch.equal(x.grad, expected)
            assert torch.equal(weight.grad, torch.tensor([2.0 * F, 0, 0, 0, 2.0 * F], dtype=dtype))


def test_ties_in_many_rows(impl):
    """Few values, many edges: every row has ties, against the loop over edges in the caller's order."""
    for dtype, order, H in itertools.product(
        (torch.float32, torch.float16), ("random", "by target", "by source"), (None, 2)
    ):
        for reduce in ("max", "min"):
            case = make_case(11, E=150, F=33, H=H, order=order, reduce=reduce, dtype=dtype)
            case.x = (case.x / 4).round().abs()
            if H:
                case.edge_weight = case.edge_weight.sign()
            check(call(case, impl), case)


@pytest.mark.parametrize("minimum", (False, True))
def test_ties_and_nan_in_long_rows(minimum):
    """Parts of a long row take turns, and yet its first extreme or first NaN is the one that counts."""
    require_kernels("cpu")
    generator = torch.Generator().manual_seed(0)
    for degree in (1, 15, 16, 31, 32, 33, 39, 64, 130, 3000):
        for F in (1, 3, 16, 17, 32, 40):
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                x = torch.randint(3, (degree, F), generator=generator).to(dtype)
                x[torch.rand(degree, F, generator=generator) < 0.5 / degree] = torch.nan
                edge_index = torch.stack([torch.arange(degree), torch.ones(degree, dtype=torch.int64)])
                csr = Graph(edge_index, size=(degree, 3)).csr
                out, arg = torch.ops.fastattn.aggregate_max(x[None, :, None], *csr, None, minimum, True)
                key = torch.where(x.isnan(), torch.inf, -x if minimum else x)
                first = (key == key.max(0).values).int().argmax(0)
                assert torch.equal(arg[0, 1, 0].long(), first)
                expected = x.gather(0, first[None])[0]
                assert torch.equal(out[0, 1, 0].nan_to_num(9), expected.nan_to_num(9))


def test_zeros_of_either_sign_are_equal(impl):
    edge_index = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 1]])
    values = torch.tensor([0.0, -0.0, -0.0, 0.0])
    for reduce in ("max", "min"):
        x = values.view(4, 1).expand(4, 18).clone().requires_grad_()
        aggregate(x, edge_index, reduce, impl=impl)[:2].sum().backward()
        assert torch.equal(x.grad[:, 0], torch.tensor([1.0, 0.0, 1.0, 0.0]))


@choices(DTYPES, (torch.float32,))
def test_ties_of_nan_go_to_the_first_nan(impl, dtype):
    inf, nan = math.inf, math.nan
    values = torch.tensor(
        [[1.0, nan, inf, nan], [nan, 2.0, nan, -inf], [-inf, -inf, -inf, -inf], [1, 2, 3, nan]]
    )
    edge_index = torch.stack([torch.arange(16), torch.arange(4).repeat_interleave(4)])
    for reduce, F in itertools.product(("max", "min"), (1, 7, 17)):
        x = values.view(16, 1).expand(16, F).to(dtype).clone().requires_grad_()
        out = aggregate(x, edge_index, reduce, impl=impl)[:4]
        assert out[[0, 1, 3]].isnan().all() and (out[2] == -inf).all()
        out.sum().backward()
        first = [1, 4, 8, 15]
        assert (x.grad[first] == 1).all() and x.grad.sum() == 4 * F
        weight = torch.ones(16, dtype=dtype, requires_grad=True)
        aggregate(x.detach(), edge_index, reduce, edge_weight=weight, impl=impl)[:4].sum().backward()
        others = [n for n in range(16) if n not in first]
        assert (weight.grad[others] == 0).all() and weight.grad[8] == -inf


def test_isolation_of_what_no_edge_reaches(impl):
    """NaN in a node without edges, and in gradients of rows without edges, changes no bit of anything."""
    dtypes = fewer(impl, (torch.float32, torch.bfloat16), (torch.bfloat16,))
    for reduce, dtype in itertools.product(REDUCES, dtypes):
        for options in ({}, {"weighted": True}, {"H": 2}):
            case = make_case(reduce=reduce, dtype=dtype, F=18, **options)
            expected = call(case, impl)
            lonely = [n for n in range(13) if n not in case.edge_index[0]]
            empty = [n for n in range(13) if n not in case.edge_index[1]]
            assert {0, 6, 12} <= {*lonely} & {*empty}
            assert (expected["out"][empty] == 0).all() and (expected["grad_x"][lonely] == 0).all()
            for poison in (math.nan, math.inf):
                case.x[lonely] = poison
                case.grad_out[empty] = poison
                assert_same(call(case, impl), expected)


def test_visible_nan_and_infinity_stay(impl):
    for reduce in ("sum", "mean", "both", "sym"):
        case = make_case(reduce=reduce, dtype=torch.float32, weighted=True)
        src, dst = case.edge_index[:, 0]
        case.edge_weight[1:][case.edge_index[0, 1:] == src] = 1.0
        for value in (math.nan, math.inf, -math.inf):
            case.x[src] = value
            out = call(case, impl, only=())["out"]
            reached = {int(n) for m, n in case.edge_index.T.tolist() if m == src for n in [n]}
            for n in range(13):
                assert bool(out[n].isfinite().all()) == (n not in reached)


def test_a_nan_weight_stays(impl):
    for reduce in REDUCES:
        case = make_case(reduce=reduce, dtype=torch.float32, weighted=True)
        case.edge_weight[7] = math.nan
        assert call(case, impl)["out"][case.edge_index[1, 7]].isnan().any()


# Degrees


def test_degrees_that_are_not_positive_count_as_none(impl):
    """Weights that cancel to a degree of zero, or to a negative one: factor 0, and finite gradients."""
    edge_index = torch.tensor([[0, 1, 2, 0, 2, 1], [1, 1, 0, 0, 2, 2]])
    weight = torch.tensor([1.0, -1.0, -2.0, 1.0, 4.0, 1.0], requires_grad=True)
    x = torch.randn(3, 4, requires_grad=True)
    out = aggregate(x, edge_index, "sym", edge_weight=weight, impl=impl)
    assert (out[:2] == 0).all()
    torch.testing.assert_close(out[2], 4 * x[2] / 5)
    out.sum().backward()
    assert x.grad.isfinite().all() and weight.grad.isfinite().all()


def test_mean_counts_edges_weighted_or_not(impl):
    edge_index = torch.tensor([[0, 1, 1], [0, 0, 0]])
    x, weight = torch.tensor([[3.0], [6.0]]), torch.tensor([1.0, 0.0, 2.0])
    assert aggregate(x, edge_index, "mean", impl=impl)[0] == 5
    assert aggregate(x, edge_index, "mean", edge_weight=weight, impl=impl)[0] == 5
    assert aggregate(x, edge_index, "mean", edge_weight=2 * weight, impl=impl)[0] == 10


# What does not matter


def test_order_of_edges_does_not_matter_but_to_ties(impl):
    """Edges shuffled among rows, each row keeping its order, change no bit; weights move along."""
    dtypes = fewer(impl, (torch.float32, torch.bfloat16), (torch.float32,))
    for reduce, dtype in itertools.product(REDUCES, dtypes):
        case = make_case(reduce=reduce, dtype=dtype, weighted=True, F=20)
        expected = call(case, impl)
        rows = case.edge_index[1]
        order = torch.argsort((rows * 5) % 13, stable=True)
        shuffled = make_case(reduce=reduce, dtype=dtype, weighted=True, F=20)
        shuffled.edge_index, shuffled.edge_weight = case.edge_index[:, order], case.edge_weight[order]
        results = call(shuffled, impl)
        assert torch.equal(results["out"], expected["out"])
        torch.testing.assert_close(results["grad_x"], expected["grad_x"])
        torch.testing.assert_close(results["grad_edge_weight"], expected["grad_edge_weight"][order])


@pytest.mark.parametrize("reduce", REDUCES)
def test_permutation_equivariance(impl, reduce):
    """Nodes renumbered: the results are, too."""
    case = make_case(reduce=reduce, weighted=True)
    expected = call(case, impl)
    renamed = make_case(reduce=reduce, weighted=True)
    new = torch.randperm(13)
    back = torch.argsort(new)
    renamed.edge_index = new[case.edge_index]
    renamed.x, renamed.grad_out = case.x[back], case.grad_out[back]
    results = call(renamed, impl)
    for name in ("out", "grad_x"):
        torch.testing.assert_close(results[name], expected[name][back])
    torch.testing.assert_close(results["grad_edge_weight"], expected["grad_edge_weight"])


def test_modes_give_the_same_bits(impl):
    """With and without gradients, under no_grad and inference mode, from a Graph or an edge_index."""
    for reduce in REDUCES:
        case = make_case(reduce=reduce, dtype=torch.float32, weighted=True)
        expected = call(case, impl)
        for only in ((), ("x",), ("edge_weight",)):
            assert_same(call(case, impl, only=only), expected)
        assert_same(call(case, impl, case.edge_index), expected)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                graph = case.graph()
                out = aggregate(case.x, graph, reduce, edge_weight=case.edge_weight, impl=impl)
            assert torch.equal(out, expected["out"])
            assert_same(call(case, impl, graph), expected)


def test_repeatable_for_any_number_of_threads(impl):
    N, E = fewer(impl, (3000, 40000), (100, 1500))
    edge_index = hub_graph(N, E)
    before = torch.get_num_threads()
    try:
        for reduce, dtype in itertools.product(("sum", "sym", "max"), (torch.float32, torch.bfloat16)):
            case = make_case(N, F=33, edge_index=edge_index, reduce=reduce, dtype=dtype, weighted=True)
            found = []
            for threads in (1, 2, 2, 3) if impl == "cpu" else (2, 2):
                torch.set_num_threads(threads)
                found.append(call(case, impl))
            for results in found[1:]:
                assert_same(results, found[0])
    finally:
        torch.set_num_threads(before)


def test_balance_of_the_work():
    """Half of the edges at one row or none: the busiest of 2, 4 and 16 threads gets 1.1 times its share."""
    require_kernels("cpu")
    generator = torch.Generator().manual_seed(0)
    E, N = 200_000, 20_000
    uniform = torch.randint(N, (E,), generator=generator)
    powers = (N * torch.rand(E, generator=generator) ** 4).long().clamp(max=N - 1)
    one_hub = torch.where(torch.rand(E, generator=generator) < 0.5, 4321, uniform)
    for dst in (uniform, powers, one_hub, torch.zeros_like(uniform), torch.full_like(uniform, N - 1)):
        for reverse in (False, True):
            graph = Graph(torch.stack([uniform.roll(1), dst]), N)
            rowptr = graph.reverse().rowptr if reverse else graph.rowptr
            for threads in (2, 4, 16):
                edges = torch.ops.fastattn.edges_per_worker(rowptr, threads)
                assert edges.shape == (threads,) and edges.sum() == E
                assert edges.max() <= 1.1 * E / threads


def test_wide_index(impl):
    """int64 columns, as graphs beyond 2^31 edges have them, give what int32 ones give."""
    for reduce, options in itertools.product(REDUCES, ({"weighted": True}, {"H": 2, "order": "by target"})):
        case = make_case(reduce=reduce, dtype=torch.float32, F=19, **options)
        graph = case.graph()
        wide = [
            Compressed(*(t if t is None else t.long() for t in e[:3]), 13) for e in (graph.csr, graph.csc)
        ]
        assert graph.col.dtype == torch.int32 and wide[0].index.dtype == torch.int64
        wide_graph = _make(13, 13, *wide)
        expected = call(case, impl)
        # The second has to make its transpose, also from wide edges.
        for given in (wide_graph, _make(13, 13, wide[0])):
            results = call(case, impl, given)
            assert torch.equal(results["out"], expected["out"])
            torch.testing.assert_close(results, expected)


# Arguments


WRONG = (
    ({"x": [1.0]}, TypeError, "x must be a Tensor, got list"),
    ({"x": torch.zeros(3)}, RuntimeError, r"x must be \(\.\.\., N, F\), got \(3,\)"),
    ({"x": torch.zeros(3, 2, dtype=torch.int64)}, RuntimeError, "x must be float32, .* got torch.int64"),
    ({"x": torch.zeros(3, 2, dtype=torch.complex64)}, RuntimeError, "x must be .* got torch.complex64"),
    ({"x": torch.zeros(3, 2).to_sparse()}, NotImplementedError, "x must be a dense tensor"),
    ({"x": torch.zeros(4, 2)}, RuntimeError, "x has 4 rows, the graph 3 source nodes"),
    ({"x": torch.zeros(3, 2, device="meta")}, RuntimeError, "the graph is on cpu, x on meta"),
    ({"reduce": "prod"}, ValueError, "reduce must be one of 'sum', .*, got 'prod'"),
    ({"reduce": None}, ValueError, "reduce must be one of .*, got None"),
    ({"edge_weight": [1.0, 1.0]}, TypeError, "edge_weight must be a Tensor, got list"),
    ({"edge_weight": torch.ones(3)}, RuntimeError, "edge_weight has 3 entries, the graph 2 edges"),
    ({"edge_weight": torch.ones(2).double()}, RuntimeError, "edge_weight is torch.float64, x torch.float32"),
    ({"edge_weight": torch.ones(2).long()}, RuntimeError, "edge_weight must be float32, .* got torch.int64"),
    ({"edge_weight": torch.ones(2, 1, 1)}, RuntimeError, r"edge_weight must be .* got \(2, 1, 1\)"),
    ({"edge_weight": torch.ones(2, 2)}, RuntimeError, r"x must be \(\.\.\., N, H, C\) beside edge_weight"),
    ({"x": torch.zeros(3, 3, 2), "edge_weight": torch.ones(2, 2)}, RuntimeError, "has 2 heads, x 3"),
    ({"graph": "edges"}, TypeError, "graph must be a Graph, an edge_index, .* got str"),
    ({"graph": torch.zeros(3, 2).long()}, RuntimeError, r"must be \(2, E\).*got \(3, 2\): transpose it"),
    ({"graph": torch.zeros(2, 2)}, RuntimeError, "edge_index must be int64 or int32, got torch.float32"),
    ({"graph": torch.tensor([[0], [3]])}, ValueError, r"\(targets\) holds 3, but there are only 3 "),
    ({"graph": torch.tensor([[-2], [0]])}, ValueError, r"\(sources\) holds -2"),
    ({"graph": Graph(torch.tensor([[0, 2], [1, 1]]), size=(3, 2)), "reduce": "sym"}, ValueError, "'both'"),
    ({"impl": "torch"}, NotImplementedError, "impl='torch' cannot run this call: torch has no kernel"),
    ({"impl": "fast"}, ValueError, "impl must be 'auto' or one of"),
)  # fmt: skip


@pytest.mark.parametrize("changed, error, message", WRONG)
def test_errors_name_the_argument_and_what_was_found(changed, error, message):
    graph = Graph(torch.tensor([[0, 2], [1, 1]]), 3)
    arguments = {"x": torch.zeros(3, 2), "graph": graph} | changed
    with pytest.raises(error, match=message):
        aggregate(**arguments)
    with pytest.raises(error, match=message):
        fastattn.explain(aggregate, **arguments)


@pytest.mark.parametrize("arguments, error, message", (
    ({}, ValueError, "give ptr or batch, got neither"),
    ({"ptr": torch.tensor([0, 3]), "batch": torch.zeros(3).long()}, ValueError, "got both"),
    ({"ptr": [0, 3]}, TypeError, "ptr must be a Tensor, got list"),
    ({"ptr": torch.tensor([0.0, 3.0])}, RuntimeError, "ptr must be int64 or int32 .* got torch.float32"),
    ({"ptr": torch.tensor([0, 2])}, ValueError, "ptr must go from 0 to 3, where x ends, got 0 to 2"),
    ({"ptr": torch.tensor([0, 2, 1, 3])}, ValueError, r"ptr must not decrease, got ptr\[2\] = 1 after 2"),
    ({"ptr": torch.tensor([0, 3]), "num_segments": 2}, ValueError, "num_segments is 2, ptr has 1 segments"),
    ({"batch": torch.zeros(4).long()}, RuntimeError, "batch has 4 entries, x 3 rows"),
    ({"batch": torch.tensor([0, -1, 0])}, ValueError, "batch holds -1"),
    ({"batch": torch.tensor([0, 5, 0]), "num_segments": 2}, ValueError, "holds 5, .* only 2 segments"),
    ({"batch": torch.zeros(3).long(), "num_segments": -1}, ValueError, "num_segments must not be .* got -1"),
    ({"batch": torch.zeros(3).long(), "num_segments": 1.0}, TypeError, "num_segments must be .* got 1.0"),
    ({"ptr": torch.tensor([0, 3]), "num_segments": True}, TypeError, "num_segments must be .* got True"),
    ({"ptr": torch.zeros(0).long()}, RuntimeError, "ptr must have one entry more .* got none"),
    ({"batch": torch.zeros(3, device="meta").long()}, RuntimeError, "batch is on meta, x on cpu"),
    ({"batch": torch.zeros(3).long(), "reduce": "sym"}, ValueError, "reduce must be one of .* got 'sym'"),
    ({"x": torch.zeros(3), "batch": torch.zeros(3).long()}, RuntimeError, r"x must be \(\.\.\., N, F\)"),
))  # fmt: skip
def test_errors_of_segments(arguments, error, message):
    arguments = {"x": torch.zeros(3, 2)} | arguments
    with pytest.raises(error, match=message):
        fastattn.segment_reduce(**arguments)
    with pytest.raises(error, match=message):
        fastattn.explain(fastattn.segment_reduce, **arguments)


def test_names_of_other_libraries():
    case = make_case()
    for name, other in (("sum", "add"), ("max", "amax"), ("min", "amin")):
        results = [aggregate(case.x, case.edge_index, reduce) for reduce in (name, other)]
        assert torch.equal(*results)


def test_explain():
    case = make_case(dtype=torch.float32)
    explained = fastattn.explain(aggregate, case.x, case.graph(), "max", impl="reference")
    assert explained.impl == "reference" and "torch has no kernel" in explained.reasons["torch"]
    require_kernels("cpu")
    for reduce in REDUCES:
        assert fastattn.explain(aggregate, case.x, case.edge_index, reduce).impl == "cpu"
    batch = torch.zeros(13, dtype=torch.int64)
    assert fastattn.explain(fastattn.segment_reduce, case.x, "mean", batch=batch).impl == "cpu"
    meta = fastattn.explain(aggregate, case.x.to("meta"), case.graph().to("meta"))
    assert meta.impl == "reference" and "these are on meta" in meta.reasons["cpu"]


# The registered ops


def op_arguments(**changes):
    graph = make_case().graph()
    return {
        "x": torch.randn(2, 13, 3, 5), "rowptr": graph.rowptr, "col": graph.col, "perm": graph.perm,
        "num_cols": 13, "edge_weight": torch.randn(60, 3), "row_scale": torch.rand(13),
        "col_scale": torch.rand(13), "arg": None, "arg_of_rows": False,
    } | changes  # fmt: skip


def test_registered_ops_refuse_what_does_not_fit():
    """What would make a kernel read memory that is not there, and dtypes it does not have."""
    require_kernels("cpu")
    good = op_arguments()
    rowptr, col = good["rowptr"], good["col"]
    wrong = {
        "num_cols": [12, 14, -1],
        "x": [
            torch.randn(13), torch.randn(1, 2, 13, 3, 5), torch.randn(2, 12, 3, 5),
            torch.zeros(2, 13, 3, 5, dtype=torch.int32),
        ],
        "rowptr": [
            rowptr[:0], rowptr.int(), rowptr + 1, rowptr[:-3], rowptr[None],
            torch.cat([rowptr, rowptr[-1:] + 1]),
        ],
        "col": [col[:-1], col.short(), col[None], col.float()],
        "perm": [good["perm"][:-1], good["perm"].long(), good["perm"].float()],
        "edge_weight": [torch.randn(60), torch.randn(59, 3), torch.randn(60, 2), torch.randn(60, 3).half()],
        "row_scale": [torch.rand(12), torch.rand(13, 1), torch.rand(13).double()],
        "col_scale": [torch.rand(14), torch.rand(13).half()],
        "arg": [torch.zeros(2, 12, 3, 5, dtype=torch.int32), torch.zeros(2, 13, 3, 5, dtype=torch.int64)],
    }  # fmt: skip
    torch.ops.fastattn.aggregate_sum(**good)
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(RuntimeError, match="must"):
                torch.ops.fastattn.aggregate_sum(**good | {name: value})
            arguments_of_max = ("x", "rowptr", "col", "perm", "num_cols", "edge_weight")
            if name in arguments_of_max:
                common = {n: good[n] for n in arguments_of_max} | {name: value}
                with pytest.raises(RuntimeError, match="must"):
                    torch.ops.fastattn.aggregate_max(**common, minimum=False, return_arg=True)
            if name in ("rowptr", "col", "perm", "num_cols", "row_scale", "col_scale"):
                common = {n: v for n, v in good.items() if n not in ("x", "edge_weight")} | {name: value}
                with pytest.raises(RuntimeError, match="must"):
                    torch.ops.fastattn.edge_dot(good["x"], good["x"], **common, per_head=True)


def test_calls_from_several_threads_at_once():
    require_kernels("cpu")
    from concurrent.futures import ThreadPoolExecutor

    case = make_case(3000, F=33, edge_index=hub_graph(3000, 40000), dtype=torch.float32, weighted=True)
    graph = case.graph()
    expected = call(case, "cpu", graph)
    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(lambda _: call(case, "cpu", graph), range(8)):
            assert_same(results, expected)


def test_no_array_per_edge_and_feature(run_python):
    """Forward and backward hold features, sums and numbers per edge: not messages."""
    require_kernels("cpu")
    code = """
import resource, torch, fastattn
N, E, F = 1000, 100_000, 256
graph = fastattn.Graph(torch.randint(N, (2, E)), N)
graph.csc
x, weight = torch.randn(N, F, requires_grad=True), torch.rand(E, requires_grad=True)
fastattn.aggregate(x[:, :8], graph, "sym", edge_weight=weight, impl="cpu").sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for reduce in ("sum", "mean", "sym", "max"):
    fastattn.aggregate(x, graph, reduce, edge_weight=weight, impl="cpu").sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / (E * F * 4))
"""
    assert float(run_python("-c", code).stdout) < 0.25


def test_oracle_and_cases_cover_isolated_nodes():
    case = make_case(reduce="sum")
    assert (exact(case)[0]["out"][[0, 6, 12]] == 0).all()
    generator = torch.Generator().manual_seed(0)
    edge_index = random_edges(13, 13, 60, generator)
    assert len({tuple(e) for e in edge_index.T.tolist()}) < 60 and (edge_index[0] == edge_index[1]).any()
