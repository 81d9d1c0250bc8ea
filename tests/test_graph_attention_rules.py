"""What holds for attention on graphs whatever the numbers: empty rows, isolation, transforms, errors."""

import copy
import dataclasses

import graph_attention_cases as cases
import graph_attention_oracle as oracle
import operator_checks
import pytest
import torch
import torch._dynamo.testing
from graph_attention_cases import FORMS, call, check, finite, function_of, make_case, require, same
from operator_checks import NATIVE, check_compiled_of_parts

import fastattn
from fastattn.ops import _graph_attention_autograd as fused

impl, poisoned = cases.impl, operator_checks.poisoned
SOURCES = {
    "gat_attention": ("x", "alpha_src"),
    "graph_attention": ("key", "value"),
    "gatv2_attention": ("x_src",),
}
VALUES = ("x", "value", "x_src")
TARGETS = {"gat_attention": "alpha_dst", "graph_attention": "query", "gatv2_attention": "x_dst"}


# --- rows that see nothing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_no_edges_no_nodes_no_heads_no_channels(impl, form):
    for N_src, N_dst, E, H, C in (
        (3, 4, 0, 2, 5), (0, 4, 0, 2, 5), (3, 0, 0, 2, 5), (0, 0, 0, 1, 1), (3, 4, 6, 0, 5), (3, 4, 6, 2, 0),
    ):  # fmt: skip
        case = make_case(form, N_src, N_dst, E, H, C, dtype=torch.float32)
        results = call(case, impl)
        assert results["out"].shape == (N_dst, H, C) and results["attention"].shape == (E, H)
        assert not results["out"].any() and finite(results)


@pytest.mark.parametrize("form", FORMS)
def test_isolated_nodes_give_zero_and_no_gradient(impl, form):
    """Nodes 0, 4 and 8 have no edges; NaN in them, and in the gradient that comes back, stays there."""
    case = make_case(form, 9, 9, 50, dtype=torch.float32)
    expected = call(case, impl)
    lonely = [0, 4, 8]
    assert not expected["out"][lonely].any()
    for name in (*SOURCES[form], TARGETS[form]):
        assert not expected[f"grad_{name}"][lonely].any()
        case.tensors[name][lonely] = torch.nan
    case.grad_out[lonely] = torch.nan
    assert same(expected, call(case, impl))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("options", ({}, {"dropout_p": 0.4}))
@pytest.mark.parametrize("form", FORMS)
def test_the_only_edge_of_a_node_has_a_gradient_of_exactly_zero(impl, form, options, dtype):
    """Its weight is 1 whatever its score is. A NaN that comes back is not hidden by that."""
    edge_index = torch.stack([torch.arange(12) % 7, torch.arange(12)])
    case = make_case(form, 7, 12, edge_index=edge_index, C=37, dtype=dtype, **options)
    found = call(case, impl)
    scores = [f"grad_{name}" for name in oracle.TENSORS[form] if name in case.tensors and name not in VALUES]
    assert scores and not any(found[name].any() for name in scores)
    case.grad_attention[3] = torch.nan
    score = scores[-1]  # of the edge's term, or of what scores by edges are made with
    assert call(case, impl)[score].isnan().any()


@pytest.mark.parametrize("form", ("gat_attention", "graph_attention"))
def test_hidden_edges_are_as_if_they_were_not_there(impl, form):
    name = oracle.TENSORS[form][3]
    case = make_case(form, hidden=0.0, dtype=torch.float64)
    hidden = torch.arange(40) % 3 == 0
    fewer = copy.copy(case)
    fewer.tensors = case.tensors | {name: case.tensors[name][~hidden]}
    fewer.edge_index, fewer.grad_attention = case.edge_index[:, ~hidden], case.grad_attention[~hidden]
    fewer.graph = fastattn.Graph(fewer.edge_index, size=case.size)
    case.tensors[name][hidden] = -torch.inf
    some, none = call(case, impl), call(fewer, impl)
    for key, result in some.items():
        edges = key in ("attention", f"grad_{name}")
        assert not edges or not result[hidden].any()
        torch.testing.assert_close(result[~hidden] if edges else result, none[key], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("form", ("gat_attention", "graph_attention"))
def test_what_only_hidden_edges_reach_never_matters(impl, form):
    """All edges of target 2 and of source 3 are hidden."""
    name = oracle.TENSORS[form][3]
    case = make_case(form, dtype=torch.float32, E=60)
    src, dst = case.edge_index
    case.tensors[name][(src == 4) | (dst == 2)] = -torch.inf
    expected = call(case, impl)
    assert not expected["out"][2].any() and finite(expected)
    for source in SOURCES[form]:
        case.tensors[source][4] = torch.nan
    case.tensors[TARGETS[form]][2] = torch.nan
    case.grad_out[2] = torch.inf
    assert same(expected, call(case, impl))


def test_terms_of_minus_infinity_hide_nodes(impl):
    case = make_case("gat_attention", dtype=torch.float32)
    case.tensors["alpha_src"][2] = -torch.inf
    case.tensors["alpha_dst"][3] = -torch.inf
    case.tensors["x"][2] = torch.nan
    for slope in (0.2, 0.0, -1.0):
        case.options = {"negative_slope": slope}
        results = call(case, impl)
        assert finite(results) and not results["out"][3].any() and not results["grad_x"][2].any()
        assert not results["attention"][case.edge_index[0] == 2].any()


def test_scores_of_minus_infinity_hide_edges_of_gatv2(impl):
    """There is no other way to hide one; what such a source would add is not even zero times infinity."""
    case = make_case("gatv2_attention", edge_terms=False)
    case.tensors["att"] = -case.tensors["att"].abs()
    hidden = case.edge_index[0] == case.edge_index[0, 0]
    case.tensors["x_src"][case.edge_index[0, 0], :, 0] = torch.inf
    results = call(case, impl)
    assert not results["attention"][hidden].any()
    seen = {"edge_index": case.edge_index[:, ~hidden], "grad_attention": case.grad_attention[~hidden]}
    without = call(dataclasses.replace(case, **seen, graph=None), impl)
    for name in ("out", "grad_x_src", "grad_x_dst", "grad_att"):
        torch.testing.assert_close(results[name], without[name], msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_a_visible_nan_or_infinity_is_never_hidden(impl, form):
    for bad in (torch.nan, torch.inf):
        case = make_case(form, dtype=torch.float32)
        source = int(case.edge_index[0, 0])
        case.tensors[SOURCES[form][-1]][source] = bad
        reached = torch.zeros(case.size[1], dtype=torch.bool)
        reached[case.edge_index[1, case.edge_index[0] == source]] = True
        out = call(case, impl)["out"]
        assert not out[reached].isfinite().any() and out[~reached].isfinite().all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_scores_of_any_size(impl, dtype):
    """Rows whose scores are all huge, alike or not, have the weights of their differences."""
    case = make_case("graph_attention", dtype=dtype)
    largest = torch.finfo(dtype).max
    for shift, spread in ((largest / 2, 0.0), (-largest / 2, 0.0), (1e4, 1.0), (-1e4, 1.0)):
        case.tensors["query"] = torch.zeros_like(case.tensors["query"])
        case.tensors["edge_bias"] = (torch.randn(40, 2) * spread).round().to(dtype) + shift
        check(call(case, impl), case)


# --- what does not change the result ------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_order_of_edges_and_nodes(impl, form):
    case = make_case(form, 9, 9, 50)
    expected = call(case, impl)
    order, nodes = torch.randperm(50), torch.randperm(9)
    moved = copy.copy(case)
    edge_name = oracle.TENSORS[form][3]
    inverse = nodes.argsort()  # node n is called inverse[n] now
    moved.edge_index = inverse[case.edge_index[:, order]]
    moved.graph = fastattn.Graph(moved.edge_index, size=case.size)
    moved.tensors = {
        n: t if n == "att" else t[order] if n == edge_name else t[nodes] for n, t in case.tensors.items()
    }
    moved.grad_out, moved.grad_attention = case.grad_out[nodes], case.grad_attention[order]
    for name, result in call(moved, impl).items():
        full = expected[name]
        if name != "grad_att":
            full = full[order] if name in ("attention", f"grad_{edge_name}") else full[nodes]
        torch.testing.assert_close(result, full, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("form", FORMS)
def test_sorted_edges_and_every_form_of_a_graph(impl, form):
    case = make_case(form, dtype=torch.float32)
    order = case.edge_index[1].argsort(stable=True)
    case.edge_index = case.edge_index[:, order]
    case.graph = fastattn.Graph(case.edge_index, size=case.size)
    assert case.graph.perm is None
    expected = call(case, impl)
    check(expected, case)
    if case.size == (9, 9):
        case.graph = case.edge_index
        assert same(expected, call(case, impl))
    matrix = torch.sparse_coo_tensor(case.edge_index.flip(0), torch.ones(40), case.size[::-1])
    case.graph = fastattn.Graph.from_sparse(matrix)
    assert same(expected, call(case, impl))


@pytest.mark.parametrize("form", FORMS)
def test_modes(impl, form):
    """no_grad, inference mode and the weights being asked for do not change the result."""
    case = make_case(form, dtype=torch.float32, dropout_p=0.3)
    expected = call(case, impl)
    run = function_of(case, impl)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.manual_seed(1)
            out, attention = run(case.tensors)
        assert torch.equal(out, expected["out"]) and torch.equal(attention, expected["attention"])
    torch.manual_seed(1)
    given = [case.tensors[n] for n in oracle.TENSORS[form][:3]]
    name = oracle.TENSORS[form][3]
    options = {name: case.tensors[name], "impl": impl, **case.options}
    out = getattr(fastattn, form)(*given, case.graph, **options)
    assert torch.equal(out, expected["out"])


def test_raw_edge_index():
    case = make_case("gat_attention", 9, 9)
    x, alpha_src, alpha_dst, _ = case.tensors.values()
    results = [fastattn.gat_attention(x, alpha_src, alpha_dst, g) for g in (case.graph, case.edge_index)]
    assert torch.equal(*results)
    q, k, v, _ = make_case("graph_attention", 9, 9).tensors.values()
    assert torch.equal(*(fastattn.graph_attention(q, k, v, g) for g in (case.graph, case.edge_index)))


# --- dropout ------------------------------------------------------------------------------------------------


@NATIVE
@pytest.mark.parametrize("p", (0.1, 0.5, 0.9))
def test_dropout_keeps_the_share_it_says(impl, p):
    N, E, H = 20, 4000, 3
    case = make_case("gat_attention", N, N, E, H, 1, dtype=torch.float64, dropout_p=p)
    results = call(case, impl)
    kept = results["attention"] != 0
    for share in (kept.double().mean(), *kept.double().mean(0)):
        assert abs(float(share) - (1 - p)) < 5 * (p * (1 - p) / E) ** 0.5
    case.options = {}
    full = call(case, impl)["attention"]
    torch.testing.assert_close(results["attention"][kept], full[kept] / (1 - p))
    # Heads, edges and calls draw independently of one another.
    for other in (kept.roll(1, 1), kept.roll(1, 0)):
        assert abs(float((kept == other).double().mean()) - (p * p + (1 - p) ** 2)) < 0.05


def test_dropout_is_the_same_on_every_implementation():
    case = make_case("graph_attention", dropout_p=0.5)
    a, b = (call(case, i)["attention"] != 0 for i in ("reference", require("cpu")))
    assert torch.equal(a, b) and not torch.equal(a, call(case, "reference", seed=2)["attention"] != 0)


# --- derivatives and transforms -----------------------------------------------------------------------------


@NATIVE
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", ({}, {"dropout_p": 0.4}, {"hidden": 0.3}), ids=str)
def test_gradients_of_first_and_second_order(impl, form, options):
    case = make_case(form, 4, 3, 8, 2, 2, **options)
    names = list(case.tensors)
    hidden = {n: t == -torch.inf for n, t in case.tensors.items()}

    def run(*tensors):
        torch.manual_seed(3)
        leaves = dict(zip(names, tensors, strict=True))
        # Differences cannot be taken of what is infinite.
        leaves = {n: torch.where(hidden[n], -torch.inf, t) for n, t in leaves.items()}
        return function_of(case, impl)(leaves)

    tensors = [torch.where(hidden[n], 0.0, t).requires_grad_() for n, t in case.tensors.items()]
    assert torch.autograd.gradcheck(run, tensors)
    assert torch.autograd.gradgradcheck(run, tensors)


@NATIVE
def test_edge_softmax_derivatives(impl):
    graph = fastattn.Graph(torch.tensor([[0, 1, 2, 0, 1], [1, 1, 0, 1, 0]]), num_nodes=4)
    score = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    function = lambda s: fastattn.edge_softmax(s, graph, impl=impl)  # noqa: E731
    assert torch.autograd.gradcheck(function, score) and torch.autograd.gradgradcheck(function, score)
    batch = torch.randn(3, 5, 2, dtype=torch.float64)
    each = torch.stack([function(b) for b in batch])
    torch.testing.assert_close(torch.func.vmap(function)(batch), each)
    loss = lambda s: (function(s) ** 2).sum()  # noqa: E731
    grads = torch.stack([torch.func.grad(loss)(b) for b in batch])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(batch), grads)


@pytest.mark.parametrize("form", FORMS)
def test_vmap_and_func_grad(impl, form):
    case = make_case(form, 4, 3, 8, 2, 2)
    run = function_of(case, impl)

    def loss(tensors):
        out, attention = run(tensors)
        return (out * case.grad_out).sum() + (attention * case.grad_attention).sum()

    first = next(iter(case.tensors))
    batches = [{first: torch.randn(3, *case.tensors[first].shape, dtype=torch.float64)}]
    batches.append({n: torch.randn(3, *t.shape, dtype=torch.float64) for n, t in case.tensors.items()})
    for batch in batches:
        dims = ({n: 0 if n in batch else None for n in case.tensors},)
        each = [case.tensors | {n: t[i] for n, t in batch.items()} for i in range(3)]
        out, attention = torch.func.vmap(run, in_dims=dims)(case.tensors | batch)
        for i in range(3):
            for a, b in zip((out[i], attention[i]), run(each[i]), strict=True):
                torch.testing.assert_close(a, b)
        grads = torch.func.vmap(torch.func.grad(loss), in_dims=dims)(case.tensors | batch)
        for i in range(3):
            for n, g in torch.func.grad(loss)(each[i]).items():
                torch.testing.assert_close(grads[n][i], g)


@pytest.mark.parametrize("form", FORMS)
def test_compile_with_dynamic_shapes(form):
    require("cpu")
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def program(leaves, graph, options):
        given = [leaves[n] for n in oracle.TENSORS[form][:3]]
        name = oracle.TENSORS[form][3]
        out, weights = getattr(fastattn, form)(
            *given, graph, **{name: leaves[name]}, return_attention=True, **options
        )
        return out * 2, weights

    compiled = torch.compile(program, backend=counter, fullgraph=True, dynamic=True)
    for size in ((7, 9, 40), (20, 15, 90), (30, 40, 150), (12, 13, 60), (21, 5, 61)):
        case = make_case(form, *size, dtype=torch.float32)
        case.graph.csc  # noqa: B018 -- built once per graph, outside of what is compiled
        results = []
        for function in (program, compiled):
            leaves = {n: t.clone().requires_grad_() for n, t in case.tensors.items()}
            outputs = function(leaves, case.graph, case.options)
            grads = torch.autograd.grad(outputs, list(leaves.values()), [case.grad_out, case.grad_attention])
            results.append((*outputs, *grads))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count <= 3


@pytest.mark.parametrize("form", FORMS)
def test_compiled_gradients_of_tensors_put_together_from_parts(form):
    require("cpu")
    case = make_case(form, 7, 9, 40, dtype=torch.float32)
    names = oracle.TENSORS[form]

    def program(*given):
        return getattr(fastattn, form)(
            *given[:3], case.graph, **{names[3]: given[3]}, return_attention=True, **case.options
        )

    check_compiled_of_parts(program, [case.tensors[n] for n in names[:4]])


def test_export():
    case = make_case("gat_attention", 9, 9, dtype=torch.float32)

    class Layer(torch.nn.Module):
        def forward(self, x, alpha_src, alpha_dst, edge_index):
            return fastattn.gat_attention(x, alpha_src, alpha_dst, edge_index)

    args = (*list(case.tensors.values())[:3], case.edge_index)
    exported = torch.export.export(Layer(), args)
    torch.testing.assert_close(exported.module()(*args), Layer()(*args))


@pytest.mark.parametrize("form", FORMS)
def test_opcheck(form):
    require("cpu")
    case = make_case(form, dtype=torch.float32)
    score = {"gat_attention": "additive", "graph_attention": "dot", "gatv2_attention": "gatv2"}[form]
    order = {
        "gat_attention": (None, None, "x", "alpha_src", "alpha_dst", "alpha_edge", None, None),
        "graph_attention": ("query", "key", "value", None, None, "edge_bias", None, None),
        "gatv2_attention": ("x_dst", None, "x_src", None, None, None, "edge", "att"),
    }[form]
    leaves = {n: t.clone().requires_grad_() for n, t in case.tensors.items()}
    inputs = [leaves[n] if n else None for n in order]
    args = (score, *inputs, *case.graph.csr, None, 0.5, 0.2, 0.0)
    torch.library.opcheck(fused.forward_op, (*args, form == "gat_attention"))
    out, stats, weights = fused.forward_op(*args, True)
    inputs = [None if t is None else t.detach() for t in inputs]
    args = (
        case.grad_out, case.grad_attention, out.detach(), stats, weights.detach(), score, *inputs,
        *case.graph.csr, *case.graph.csc[:3], None, 0.5, 0.2, 0.0, True,
    )  # fmt: skip
    torch.library.opcheck(fused.backward_op, args)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("form", FORMS)
def test_traced_calls_refuse_other_numbers_of_sources(impl, form):
    """A trace keeps the graph and forgets what was checked against it: the op has to see it again."""
    case = make_case(form, dtype=torch.float32)
    names, inputs = tuple(case.tensors), tuple(case.tensors.values())

    def attend(*tensors):
        return getattr(fastattn, form)(**dict(zip(names, tensors, strict=True)), graph=case.graph, impl=impl)

    traced = torch.jit.trace(attend, inputs)
    torch.testing.assert_close(traced(*inputs), attend(*inputs))
    sources = {"x", "alpha_src", "key", "value", "x_src"}
    fewer = [t[:2] if name in sources else t for name, t in case.tensors.items()]
    with pytest.raises((RuntimeError, IndexError), match="must|out of (range|DATA bounds)"):
        traced(*fewer)


@pytest.mark.parametrize("form", FORMS)
def test_autocast(impl, form):
    case = make_case(form, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = function_of(case, impl)(case.tensors)
        assert out.dtype == (torch.bfloat16 if form == "graph_attention" else torch.float32)
        half = {n: t.bfloat16() if n == SOURCES[form][0] else t for n, t in case.tensors.items()}
        mixed, _ = function_of(case, impl)(half)
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.float(), call(case, impl)["out"], rtol=5e-2, atol=5e-2)


def test_forward_mode():
    case = make_case("gat_attention")
    for impl in ("reference", require("cpu")):
        run = function_of(case, impl)
        with torch.autograd.forward_ad.dual_level():
            leaves = case.tensors | {"x": torch.autograd.forward_ad.make_dual(case.value, case.value)}
            if impl == "cpu":
                with pytest.raises((RuntimeError, NotImplementedError), match="[Ff]orward"):
                    run(leaves)
            else:
                tangent = torch.autograd.forward_ad.unpack_dual(run(leaves)[0]).tangent
                torch.testing.assert_close(tangent, call(case, impl)["out"])


@pytest.mark.parametrize("form", FORMS)
def test_activation_checkpointing(form):
    case = make_case(form, dtype=torch.float32, dropout_p=0.5)
    leaves = {n: t.clone().requires_grad_() for n, t in case.tensors.items()}
    run = function_of(case, require("cpu"))
    grads = []
    for function in (run, lambda t: torch.utils.checkpoint.checkpoint(run, t, use_reentrant=False)):
        torch.manual_seed(1)
        grads.append(torch.autograd.grad(function(leaves)[0].sum(), list(leaves.values())))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


# --- memory -------------------------------------------------------------------------------------------------


def test_no_message_is_ever_made(run_python):
    """Forward and backward at 400k edges of 64 channels stay far below one (E, H, C) tensor, 102 MB."""
    require("cpu")
    code = """
import resource, torch, fastattn
N, E, H, C = 5000, 400_000, 2, 32
graph = fastattn.Graph(torch.randint(0, N, (2, E)), num_nodes=N)
x, a, b = (torch.randn(*s, requires_grad=True) for s in ((N, H, C), (N, H), (N, H)))
graph.csc
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
fastattn.gat_attention(x, a, b, graph).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    grown = int(run_python("-c", code).stdout.split()[-1]) * 1024
    assert grown < 35e6, grown


# --- errors -------------------------------------------------------------------------------------------------

GAT = make_case("gat_attention", 9, 9, dtype=torch.float32)
DOT = make_case("graph_attention", 9, 9, dtype=torch.float32)
V2 = make_case("gatv2_attention", 9, 9, dtype=torch.float32)


@pytest.mark.parametrize(
    "case,changed,error,match",
    (
        (GAT, {"x": torch.ones(9, 10)}, RuntimeError, r"x must be \(N_src, H, C\), got \(9, 10\)"),
        (GAT, {"x": None}, TypeError, "x must be a Tensor, got NoneType"),
        (GAT, {"x": torch.ones(9, 2, 5, dtype=torch.int32)}, RuntimeError, "x must be float32"),
        (GAT, {"alpha_src": torch.ones(8, 2)}, RuntimeError, r"alpha_src \(8, 2\) must have 9 sources"),
        (GAT, {"alpha_src": torch.ones(9, 3)}, RuntimeError, r"alpha_src \(9, 3\) must have 2 heads"),
        (
            GAT,
            {"alpha_src": torch.ones(9, 2).double()},
            RuntimeError,
            "alpha_src must be torch.float32 beside",
        ),
        (GAT, {"alpha_dst": torch.ones(8, 2)}, RuntimeError, "features of 8 targets, the graph has 9"),
        (GAT, {"alpha_dst": torch.ones(9)}, RuntimeError, r"alpha_dst must be \(N_dst, H\), got \(9,\)"),
        (GAT, {"alpha_edge": torch.ones(39, 2)}, RuntimeError, r"alpha_edge \(39, 2\) must have 40 edges"),
        (GAT, {"alpha_edge": torch.ones(40, 1)}, RuntimeError, r"alpha_edge \(40, 1\) must have 2 heads"),
        (GAT, {"negative_slope": float("nan")}, ValueError, "negative_slope must be finite, got nan"),
        (GAT, {"negative_slope": "0.2"}, TypeError, "negative_slope must be a number, got '0.2'"),
        (GAT, {"dropout_p": b"1"}, TypeError, "dropout_p must be a number"),
        (
            GAT,
            {"negative_slope": torch.tensor(0.2, requires_grad=True)},
            TypeError,
            "negative_slope .* requires a gradient",
        ),
        (GAT, {"dropout_p": 1.5}, ValueError, "dropout_p must be between 0 and 1, got 1.5"),
        (GAT, {"return_attention": "no"}, TypeError, "return_attention must be a bool, got 'no'"),
        (GAT, {"impl": "fast"}, ValueError, "impl must be 'auto' or one of .*, got 'fast'"),
        (GAT, {"impl": "cuda"}, NotImplementedError, "impl='cuda' cannot run this call"),
        (GAT, {"graph": torch.tensor([[0, 9], [1, 1]])}, ValueError, "holds 9"),
        (GAT, {"graph": fastattn.Graph(torch.tensor([[0], [1]]))}, RuntimeError, "x has 9 rows, the graph 2"),
        (DOT, {"key": torch.ones(9, 2, 4)}, RuntimeError, r"key \(9, 2, 4\) must have 5 channels"),
        (DOT, {"key": torch.ones(9, 1, 5)}, RuntimeError, r"key \(9, 1, 5\) must have 2 heads"),
        (DOT, {"value": torch.ones(8, 2, 5)}, RuntimeError, r"value \(8, 2, 5\) must have 9 sources"),
        (DOT, {"value": torch.ones(9, 2, 5).bfloat16()}, RuntimeError, "value must be torch.float32"),
        (DOT, {"query": torch.ones(8, 2, 5)}, RuntimeError, "features of 8 targets"),
        (DOT, {"edge_bias": torch.ones(40)}, RuntimeError, r"edge_bias must be \(E, H\), got \(40,\)"),
        (DOT, {"scale": "large"}, TypeError, "scale must be a number"),
        (DOT, {"scale": torch.nn.Parameter(torch.ones(1))}, TypeError, "scale .* requires a gradient"),
        (V2, {"att": torch.ones(2, 4)}, RuntimeError, r"att \(2, 4\) must have 5 channels"),
        (V2, {"x_dst": torch.ones(9, 2, 4)}, RuntimeError, r"x_dst \(9, 2, 4\) must have 5 channels"),
        (V2, {"edge": torch.ones(40, 10)}, RuntimeError, r"edge must be \(E, H, C\), got \(40, 10\)"),
        (V2, {"edge": torch.ones(41, 2, 5)}, RuntimeError, r"edge \(41, 2, 5\) must have 40 edges"),
        (V2, {"x_src": torch.ones(9, 2, 5).to_sparse()}, NotImplementedError, "x_src must be a dense tensor"),
    ),
)
def test_errors_name_the_argument(case, changed, error, match):
    given = case.tensors | {"graph": case.graph} | changed
    first = [given.pop(n) for n in (*oracle.TENSORS[case.form][:3], "graph")]
    with pytest.raises(error, match=match):
        getattr(fastattn, case.form)(*first, **given)


def test_errors_of_edge_softmax():
    for score, graph, error, match in (
        (
            torch.ones(3),
            torch.zeros(2, 4, dtype=torch.int64),
            RuntimeError,
            r"score \(3,\) must have 4 edges",
        ),
        (torch.tensor(1.0), torch.zeros(2, 1, dtype=torch.int64), RuntimeError, "got ()"),
        ([1.0], torch.zeros(2, 1, dtype=torch.int64), TypeError, "score must be a Tensor, got list"),
        (torch.ones(1, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64), RuntimeError, "float32"),
    ):
        with pytest.raises(error, match=match):
            fastattn.edge_softmax(score, graph)


def test_ops_refuse_what_would_be_read_out_of_bounds():
    """Called directly, the op checks all sizes against each other."""
    require("cpu")
    case = make_case("gat_attention", dtype=torch.float32)
    x, alpha_src, alpha_dst, alpha_edge = case.tensors.values()
    rowptr, col, perm, num_src = case.graph.csr

    def run(
        x=x, alpha_src=alpha_src, alpha_dst=alpha_dst, term=alpha_edge, rowptr=rowptr, col=col, perm=perm,
        num_src=num_src,
    ):  # fmt: skip
        args = ("additive", None, None, x, alpha_src, alpha_dst, term, None, None, rowptr, col, perm)
        return fused.forward_op(*args, num_src, None, 1.0, 0.2, 0.0, False)

    run()
    for changed in (
        {"alpha_src": alpha_src[1:]}, {"alpha_dst": alpha_dst[:, :1]}, {"term": alpha_edge[2:]},
        {"rowptr": rowptr[:-1]}, {"rowptr": rowptr + 1}, {"col": col[1:]}, {"perm": perm[1:]},
        {"x": x[0]}, {"num_src": num_src + 1}, {"x": x[1:], "alpha_src": alpha_src[1:]},
        {"perm": perm.long()}, {"x": x.bfloat16(), "alpha_src": alpha_src.double()},
    ):  # fmt: skip
        with pytest.raises(RuntimeError):
            run(**changed)


@pytest.mark.parametrize("form", FORMS)
def test_indices_of_either_width(form):
    """int64 indices, which a graph has only if int32 does not hold them, give the same bits."""
    require("cpu")
    case = make_case(form, dtype=torch.float32)
    expected = call(case, "cpu")
    parts = [
        fastattn.graph.Compressed(e.ptr, e.index.long(), e.perm.long(), e.num_cols)
        for e in (case.graph.csr, case.graph.csc)
    ]
    assert case.graph.col.dtype == torch.int32
    case.graph._set(*case.size, *parts)
    assert case.graph.col.dtype == torch.int64 and same(expected, call(case, "cpu"))


def test_explain():
    require("cpu")
    case = GAT
    x, alpha_src, alpha_dst, _ = case.tensors.values()
    assert fastattn.explain(fastattn.gat_attention, x, alpha_src, alpha_dst, case.graph).impl == "cpu"
    assert fastattn.explain(fastattn.graph_attention, x, x, x, case.graph).impl == "cpu"
    assert fastattn.explain(fastattn.gatv2_attention, x, x, x[0], case.graph).impl == "cpu"
    chosen = fastattn.explain(fastattn.edge_softmax, torch.ones(40), case.graph, impl="reference")
    assert chosen.impl == "reference" and "asked for" in chosen.reasons["cpu"]


@pytest.mark.parametrize(
    "fault", ("a weight too much", "another edge", "slope", "no gradient of the softmax")
)
def test_the_checker_catches_wrong_results(fault):
    case = make_case("gat_attention", dtype=torch.float32)
    results = call(case, "reference")
    if fault == "a weight too much":
        results["attention"][3] *= 1.0001
    elif fault == "another edge":
        results["grad_alpha_edge"] = results["grad_alpha_edge"].roll(1, 0)
    elif fault == "slope":
        results["grad_alpha_src"] *= 0.999
    else:
        results["grad_alpha_dst"] += results["grad_alpha_edge"].mean()
    with pytest.raises(AssertionError, match="error"):
        check(results, case)
