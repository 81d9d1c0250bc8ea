"""Values and gradients of aggregation against the float64 oracle: options, sizes, dtypes and layouts."""

import itertools
from pathlib import Path

import aggregation_cases
import aggregation_oracle as oracle
import numpy as np
import operator_checks
import pytest
import torch
from aggregation_cases import DTYPES, REDUCES, call, check, make_case, require_kernels
from attention_cases import choices
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_checks import LAYOUTS, check_layout, fewer

import fastattn
from fastattn import Graph

impl, poisoned = aggregation_cases.impl, operator_checks.poisoned

FORMS = {
    "plain": {},
    "weighted": {"weighted": True},
    "one head": {"H": 1},
    "heads": {"H": 3},
    "heads that share weights": {"H": 3, "weight_heads": 1},
    "batch": {"batch": (3,)},
    "batch, weighted": {"batch": (2, 2), "weighted": True},
    "batch, heads": {"batch": (2,), "H": 2},
    "sorted by target": {"order": "by target", "weighted": True},
    "sorted by source": {"order": "by source", "weighted": True},
    "more targets": {"N": 7, "M": 19, "weighted": True},
    "more sources": {"N": 19, "M": 7, "H": 2},
}


def forms(reduce):
    return {n: f for n, f in FORMS.items() if reduce != "sym" or "M" not in f}


@choices(DTYPES, (torch.float32,))
@pytest.mark.parametrize("reduce", REDUCES)
def test_reduces(impl, reduce, dtype):
    for options in forms(reduce).values():
        case = make_case(reduce=reduce, dtype=dtype, **options)
        check(call(case, impl), case)


WIDTHS = (
    *range(1, 20),
    24,
    31,
    32,
    33,
    47,
    48,
    49,
    63,
    64,
    65,
    95,
    96,
    97,
    127,
    128,
    129,
    191,
    255,
    256,
    257,
)


@pytest.mark.parametrize("reduce, options", [("sum", {"weighted": True}), ("mean", {"H": 2}), ("max", {})])
def test_widths(impl, reduce, options):
    """Any number of features, around the vector and tile sizes of every instruction set."""
    for F, dtype in itertools.product(fewer(impl, WIDTHS, (1, 2, 8, 17, 63, 65, 257)), DTYPES):
        if dtype in (torch.float32, torch.bfloat16) or F in (1, 8, 9, 17, 65, 257):
            case = make_case(7, E=12, F=F, reduce=reduce, dtype=dtype, seed=F, **options)
            check(call(case, impl), case)


@pytest.mark.parametrize("reduce", REDUCES)
def test_degrees(impl, reduce):
    """Rows of 0 to 20 edges, one after another: around what a kernel looks ahead or takes at once."""
    dst = torch.repeat_interleave(torch.arange(21), torch.arange(21))
    generator = torch.Generator().manual_seed(1)
    edge_index = torch.stack([torch.randint(21, dst.shape, generator=generator), dst])
    for dtype, weighted in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        case = make_case(21, F=19, edge_index=edge_index, reduce=reduce, dtype=dtype, weighted=weighted)
        check(call(case, impl), case)


EMPTY = (
    {"E": 0}, {"E": 0, "weighted": True}, {"N": 0, "E": 0}, {"N": 0, "E": 0, "H": 2}, {"F": 0}, {"H": 0},
    {"batch": (0,)}, {"batch": (2, 0), "H": 2}, {"N": 1, "E": 1}, {"N": 1, "E": 9, "weighted": True},
)  # fmt: skip
EMPTY_BIPARTITE = ({"N": 0, "M": 4, "E": 0}, {"N": 4, "M": 0, "E": 0, "weighted": True})


@pytest.mark.parametrize("reduce", REDUCES)
def test_empty_tensors(impl, reduce):
    for options in EMPTY if reduce == "sym" else EMPTY + EMPTY_BIPARTITE:
        for dtype in (torch.float32, torch.bfloat16):
            case = make_case(reduce=reduce, dtype=dtype, **options)
            results = call(case, impl)
            assert results["out"].shape == case.grad_out.shape and results["grad_x"].shape == case.x.shape
            if case.edge_weight is not None:
                assert results["grad_edge_weight"].shape == case.edge_weight.shape
            if case.edge_index.shape[1] == 0:
                assert (results["out"] == 0).all() and (results["grad_x"] == 0).all()
            check(results, case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduce", ("sum", "sym", "max"))
def test_strides(impl, reduce, layout):
    """Transposed, sliced and strided inputs, weights and incoming gradients give the contiguous answer."""
    dtypes = fewer(impl, (torch.float32, torch.bfloat16), (torch.float32,))
    for dtype, options in itertools.product(dtypes, ({"weighted": True, "batch": (2,)}, {"H": 3})):
        case = make_case(reduce=reduce, dtype=dtype, F=19, **options)
        names = ("x", "edge_weight", "grad_out")
        check_layout(case, names, layout, lambda c: call(c, impl), exact=False, halves=impl == "triton")


@pytest.mark.parametrize("reduce", REDUCES)
def test_expanded(impl, reduce):
    """Stride 0: the gradient of a plain sum, one row for every node, one weight for every edge."""
    for dtype in (torch.float32, torch.float16):
        case = make_case(reduce=reduce, dtype=dtype, H=2, batch=(3,))
        case.grad_out = torch.ones((), dtype=dtype).expand(case.grad_out.shape)
        check(call(case, impl), case)
        case.x = case.x[:1, :1].expand(case.x.shape)
        case.edge_weight = case.edge_weight.abs()[:1].expand(case.edge_weight.shape)
        check(call(case, impl), case)


def test_edge_index_of_any_layout(impl):
    case = make_case(weighted=True, dtype=torch.float32)
    expected = call(case, impl)
    pairs = case.edge_index.T.contiguous()
    spread = torch.zeros(2, 2 * case.edge_index.shape[1], dtype=torch.int64)
    spread[:, ::2] = case.edge_index
    for edge_index in (pairs.T, spread[:, ::2], case.edge_index.int(), pairs.int().T):
        for graph in (edge_index, Graph(edge_index, case.num_dst)):
            results = call(case, impl, graph)
            assert all(torch.equal(results[n], expected[n]) for n in expected)


def hub_case(reduce, dtype, *, weighted=False, F=24, E=1500, **options):
    """Half of the edges enter one node, a quarter leave another; the rest is spread."""
    generator = torch.Generator().manual_seed(3)
    edge_index = torch.randint(150, (2, E), generator=generator)
    edge_index[1, torch.randperm(E, generator=generator)[: E // 2]] = 77
    edge_index[0, torch.randperm(E, generator=generator)[: E // 4]] = 11
    return make_case(
        200, F=F, edge_index=edge_index, reduce=reduce, dtype=dtype, weighted=weighted, **options
    )


@choices(DTYPES[1:], (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("reduce", REDUCES)
def test_precision_with_hubs(impl, reduce, dtype):
    """Strict: on long sums at most twice the error of plain PyTorch that sums in float32."""
    for options in ({"H": 2, "F": 12}, {"weighted": True})[: 2 if reduce in ("sum", "sym", "max") else 1]:
        case = hub_case(reduce, dtype, **options)
        check(call(case, impl), case, strict=True)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_half_precision_counts_beyond_2048(impl, dtype):
    """Where a count or a sum kept in half precision would stand still."""
    E = 5000
    edge_index = torch.stack([torch.arange(E) % 50, torch.zeros(E, dtype=torch.int64)])
    graph = Graph(edge_index, 50)
    x, weight = torch.ones(50, 20, dtype=dtype), torch.ones(E, dtype=dtype)
    for edge_weight in (None, weight):
        run = lambda reduce, w=edge_weight: fastattn.aggregate(x, graph, reduce, edge_weight=w, impl=impl)  # noqa: E731
        assert (run("sum")[0] == torch.tensor(float(E), dtype=dtype)).all()
        assert (run("mean")[0] == 1).all()
        assert (run("both")[0] == torch.tensor(E / (E * 100) ** 0.5, dtype=dtype)).all()
        loops = Graph(torch.cat([edge_index, torch.arange(1, 50).expand(2, 49)], 1), 50)
        w = None if edge_weight is None else torch.ones(E + 49, dtype=dtype)
        expected = 100 / E + 49 * 100 / E**0.5
        out = fastattn.aggregate(x, loops, "sym", edge_weight=w, impl=impl)
        assert abs(float(out[0, 0]) / expected - 1) < torch.finfo(dtype).eps


def test_gradient_of_a_node_with_many_targets_in_half_precision(impl):
    E = 5000
    edge_index = torch.stack([torch.zeros(E, dtype=torch.int64), torch.arange(E)])
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.ones(E, 3, dtype=dtype, requires_grad=True)
        fastattn.aggregate(x, edge_index, impl=impl).sum().backward()
        assert (x.grad[0] == torch.tensor(float(E), dtype=dtype)).all() and (x.grad[1:] == 0).all()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_multigraphs(impl, data):
    draw = data.draw
    reduce = draw(st.sampled_from(REDUCES))
    N = draw(st.integers(1, 9))
    M = N if reduce == "sym" else draw(st.integers(1, 9))
    E = draw(st.integers(0, 30))
    pair = st.tuples(st.integers(0, N - 1), st.integers(0, M - 1))
    edges = draw(st.lists(pair, min_size=E, max_size=E))
    edge_index = torch.tensor(edges, dtype=draw(st.sampled_from((torch.int64, torch.int32)))).reshape(-1, 2).T
    H = draw(st.sampled_from((None, 1, 2, 3)))
    case = make_case(
        N, M, F=draw(st.sampled_from((1, 2, 3, 5, 8, 17, 40))), H=H, edge_index=edge_index, reduce=reduce,
        batch=draw(st.sampled_from(((), (1,), (2,)))), weighted=draw(st.booleans()),
        weight_heads=draw(st.sampled_from((None, 1))), dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 1000)),
    )  # fmt: skip
    check(call(case, impl), case)


SEGMENTS = ("sum", "mean", "max", "min")


@choices(DTYPES, (torch.float32,))
@pytest.mark.parametrize("reduce", SEGMENTS)
def test_segments(impl, reduce, dtype):
    """By pointers and by a batch vector in any order, with empty segments at the start, middle and end."""
    counts = torch.tensor([0, 3, 1, 0, 0, 7, 2, 0])
    N, S = int(counts.sum()), len(counts)
    sorted_batch = torch.repeat_interleave(torch.arange(S), counts)
    ptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    for batch in (sorted_batch, sorted_batch[torch.randperm(N)]):
        for dims in ((), (2,)):
            edge_index = torch.stack([torch.arange(N), batch])
            case = make_case(N, S, F=18, batch=dims, edge_index=edge_index, reduce=reduce, dtype=dtype)
            calls = [{"batch": batch, "num_segments": S}, {"batch": batch.int(), "num_segments": S}]
            if batch is sorted_batch:
                calls += [{"ptr": ptr}, {"ptr": ptr.int(), "num_segments": S}]
            for arguments in calls:
                x = case.x.clone().requires_grad_()
                out = fastattn.segment_reduce(x, reduce, impl=impl, **arguments)
                (gradient,) = torch.autograd.grad(out, x, case.grad_out)
                check({"out": out.detach(), "grad_x": gradient}, case)
    x = torch.ones(0, 3)
    assert fastattn.segment_reduce(x, reduce, batch=torch.zeros(0, dtype=torch.int64), impl=impl).shape == (
        0,
        3,
    )
    assert (fastattn.segment_reduce(x, reduce, ptr=torch.zeros(3, dtype=torch.int64), impl=impl) == 0).all()


# The checker itself

WRONG = {
    "edges turned round": lambda c: setattr(c, "edge_index", c.edge_index.flip(0)),
    "weights in another order": lambda c: setattr(c, "edge_weight", c.edge_weight.flip(0)),
    "an edge lost": lambda c: c.edge_weight[7].zero_(),
    "heads exchanged": lambda c: setattr(c, "x", c.x.flip(-2)),
    "another reduction": lambda c: setattr(c, "reduce", "both" if c.reduce == "mean" else "mean"),
    "a gradient scaled": lambda c: c.grad_out.mul_(1.2),
}


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("name", WRONG)
def test_checker_catches(name, reduce):
    for dtype in (torch.float32, torch.bfloat16):
        right, wrong = (make_case(reduce=reduce, dtype=dtype, H=2) for _ in range(2))
        WRONG[name](wrong)
        with pytest.raises(AssertionError):
            check(call(wrong, "reference"), right)


@pytest.mark.parametrize("reduce", REDUCES)
def test_oracle_gradient_is_the_derivative_of_its_value(reduce):
    """The oracle's hand-written gradients against finite differences of its own values."""
    case = make_case(5, E=11, F=2, H=2, reduce=reduce)
    if reduce in ("max", "min"):  # away from ties
        case.x += torch.linspace(0, 0.2, case.x.numel(), dtype=torch.float64).view_as(case.x)
    x, weight, grad_out = case.x[None].numpy(), case.edge_weight.numpy(), case.grad_out[None].numpy()
    run = lambda: oracle.aggregate(x, *case.edge_index.numpy(), 5, reduce, weight, grad_out)[0]  # noqa: E731
    gradients = {"grad_x": x, "grad_edge_weight": weight}
    expected = run()
    for name, array in gradients.items():
        for place in np.ndindex(array.shape):
            kept, step, values = array[place], 1e-6, []
            for shift in (step, -step):
                array[place] = kept + shift
                values.append((run()["out"] * grad_out).sum())
            array[place] = kept
            numerical = (values[0] - values[1]) / (2 * step)
            assert np.isclose(expected[name][place], numerical, rtol=1e-5, atol=1e-7), name


def test_other_instruction_sets(other_isa, run_python):
    """The compact tests of this file and of the rules, once more under each of the other instruction sets."""
    require_kernels("cpu")
    compact = ("reduces", "widths", "degrees", "strides", "precision", "ties", "isolation", "wide_index")
    chosen = f"({' or '.join('test_' + name for name in compact)}) and cpu"
    files = [Path(__file__).with_name(name) for name in ("test_aggregation.py", "test_aggregation_rules.py")]
    run_python(
        "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", chosen, *files, FASTATTN_CPU_ISA=other_isa
    )


FLOAT16 = """
import torch, fastattn
half = torch.arange(65536).to(torch.int32).to(torch.int16).view(torch.float16)
x = torch.stack([half, half[torch.randperm(65536, generator=torch.Generator().manual_seed(0))]])
out = fastattn.aggregate(x, fastattn.Graph(torch.tensor([[0, 1], [0, 0]]), 2), impl="cpu")[0]
torch.testing.assert_close(out, x.float().sum(0).half(), rtol=0, atol=0, equal_nan=True)
"""


def test_every_float16_is_read_and_rounded_exactly(isa, run_python):
    require_kernels("cpu")
    run_python("-c", FLOAT16, FASTATTN_CPU_ISA=isa)
