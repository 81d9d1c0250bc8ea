"""Aggregation under PyTorch's own machinery: every order of derivative, compile, export, func, autocast."""

import itertools
import pickle

import aggregation_cases
import operator_checks
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.utils.checkpoint
from aggregation_cases import REDUCES, call, hub_graph, make_case, require_kernels
from operator_checks import assert_same, check_compiled_of_parts, negated
from torch._dynamo.testing import CompileCounterWithBackend

import fastattn
from fastattn import Graph

impl, poisoned = aggregation_cases.native, operator_checks.poisoned

aggregate = fastattn.aggregate
FORMS = ({}, {"weighted": True}, {"H": 2}, {"H": 2, "weight_heads": 1, "batch": (2,)})


def small(reduce, **options):
    """Inputs for numerical derivatives: no ties and no kinks nearby, weights of any sign."""
    case = make_case(5, E=9, F=2, reduce=reduce, **options)
    case.x = torch.randn(case.x.shape, dtype=torch.float64)
    if case.edge_weight is not None:
        case.edge_weight = torch.rand(case.edge_weight.shape, dtype=torch.float64) + 0.5
    return case


@pytest.mark.parametrize("reduce", REDUCES)
def test_gradients_of_first_and_second_order(impl, reduce):
    """Each subset of the inputs that may want one."""
    for options in FORMS:
        case = small(reduce, **options)
        graph = case.graph()
        inputs = [t for t in (case.x, case.edge_weight) if t is not None]
        for wanted in itertools.product((False, True), repeat=len(inputs)):
            if not any(wanted):
                continue
            leaves = [t.clone().requires_grad_(w) for t, w in zip(inputs, wanted, strict=True)]
            run = lambda x, w=None: aggregate(x, graph, reduce, edge_weight=w, impl=impl)  # noqa: B023, E731
            assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
            assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


def test_derivatives_of_third_order(impl):
    for reduce in ("sym", "max"):
        case = small(reduce, weighted=True)
        found = []
        for implementation in (impl, "reference"):
            x, w = (t.clone().requires_grad_() for t in (case.x, case.edge_weight))
            value = aggregate(x, case.graph(), reduce, edge_weight=w, impl=implementation).sin().sum()
            for _ in range(3):
                gradients = torch.autograd.grad(value, (x, w), create_graph=True)
                value = sum(g.sin().sum() for g in gradients)
            found.append(gradients)
        torch.testing.assert_close(*found)


def test_scales_of_the_op_have_gradients():
    """Vectors at both ends, and a selection: the bare ops, which make the transpose by themselves."""
    require_kernels("cpu")
    graph = make_case(5, 6, E=9).graph()
    x, w = torch.randn(2, 5, 3, 2, dtype=torch.float64), torch.randn(9, 3, dtype=torch.float64)
    rows, cols = torch.rand(6, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    a = torch.randn(2, 6, 3, 2, dtype=torch.float64)
    _, arg = torch.ops.fastattn.aggregate_max(x, *graph.csr, None, False, True)
    for wanted in itertools.product((False, True), repeat=4):
        if not any(wanted):
            continue
        leaves = [t.clone().requires_grad_(n) for t, n in zip((x, w, rows, cols), wanted, strict=True)]
        for selection in ((None, False), (arg, True)):
            run = lambda x, w, r, c, s=selection: torch.ops.fastattn.aggregate_sum(x, *graph.csr, w, r, c, *s)  # noqa: E731
            assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
            assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)
            leaves_of_dot = [
                t.detach().requires_grad_(t.requires_grad) for t in (a, *leaves[:1], *leaves[2:])
            ]
            leaves_of_dot[0].requires_grad_(wanted[1])
            if not any(t.requires_grad for t in leaves_of_dot):
                continue
            for per_head in (False, True):
                dot = lambda a, b, r, c, s=selection, h=per_head: torch.ops.fastattn.edge_dot(  # noqa: E731
                    a, b, *graph.csr, r, c, *s, h
                )
                assert torch.autograd.gradcheck(dot, leaves_of_dot, fast_mode=True)
                assert torch.autograd.gradgradcheck(dot, leaves_of_dot, fast_mode=True)


def test_gradient_is_not_needed_where_none_is_asked_for(impl):
    """The transpose is sorted only for a gradient of the features."""
    case = make_case(weighted=True)
    for only, built in ((), False), (("edge_weight",), False), (("x",), True):
        graph = case.graph()
        call(case, impl, graph, only=only)
        assert (graph._csc is not None) == (built and impl == "cpu")


@pytest.mark.parametrize("form", ("(N, F)", "(B, N, F)", "(E,)", "(B, N, F), (E,)", "(E, H)", "(E, 1)"))
@pytest.mark.parametrize("reduce", ("sum", "mean", "sym", "both", "max", "min"))
def test_the_short_way_is_differentiated_like_the_reference(reduce, form):
    """Dense tensors on the CPU have a shorter way to the kernels and back."""
    require_kernels("cpu")
    graph = make_case(7, E=20).graph()
    shape = (3, 4, 7) if "H" in form or "1" in form else (4, 7, 2) if "B" in form else (4, 7)
    x = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64).transpose(-1, 0))
    weight = torch.rand(20, 4 if "H" in form else 1, dtype=torch.float64)
    weight = None if "E" not in form else weight.requires_grad_() if "E, " in form else weight[:, 0]
    inputs = (x,) if weight is None else (x, weight.requires_grad_())
    run = lambda x, weight=None, impl="cpu": aggregate(x, graph, reduce, edge_weight=weight, impl=impl)  # noqa: E731
    assert torch.autograd.gradcheck(run, inputs, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, inputs, check_batched_grad=True)
    expected_out = run(*inputs, impl="reference")
    expected = torch.autograd.grad(expected_out.relu().square().sum(), inputs)
    out = run(*inputs)
    torch.testing.assert_close(out, expected_out)
    before = out.detach().clone()
    grads = torch.autograd.grad(out.relu_().square().sum(), inputs)  # the output may be changed in place
    torch.testing.assert_close(grads, expected)
    for n, leaf in enumerate(inputs):  # one of them alone
        alone = [t if t is leaf else t.detach() for t in inputs]
        (grad,) = torch.autograd.grad(run(*alone).relu().square().sum(), leaf)
        assert torch.equal(grad, grads[n])
    expanded = torch.autograd.grad(run(*inputs).sum(), inputs)  # a gradient without memory of its own
    torch.testing.assert_close(expanded, torch.autograd.grad(run(*inputs, impl="reference").sum(), inputs))
    with torch.no_grad():
        assert torch.equal(run(*inputs), before)
    with torch.inference_mode():
        assert torch.equal(run(*inputs), before)
    assert bool(graph._forms) == (reduce != "sym" or weight is None)  # that way was taken
    moved = Graph(graph.edge_index(), size=(7, 7))
    assert moved.is_plain and not moved.to("meta").is_plain
    assert pickle.loads(pickle.dumps(graph))._forms == {}


@pytest.mark.parametrize("options", ({}, {"weighted": True}, {"H": 3}), ids=str)
@pytest.mark.parametrize("reduce", ("max", "min"))
def test_extremes_without_their_edges(impl, reduce, options):
    """What no gradient needs is not written, and the values are the same bits."""
    for F in (1, 3, 16, 20, 33, 64, 130) if impl == "cpu" else (3,):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            case = make_case(300, F=F, edge_index=hub_graph(300, 1500), dtype=dtype, reduce=reduce, **options)
            x = (case.x * 2).round()
            x[5], x[7, ..., :1] = torch.nan, -0.0
            arguments = x, case.graph(), reduce
            weight = case.edge_weight
            with torch.no_grad():
                bare = aggregate(*arguments, edge_weight=weight, impl=impl)
            kept = aggregate(x.clone().requires_grad_(), *arguments[1:], edge_weight=weight, impl=impl)
            assert torch.equal(bare.view(torch.uint8), kept.detach().view(torch.uint8))
    if impl == "reference":
        return
    graph = case.graph()
    x = torch.randn(1, 300, 1, 4, requires_grad=True)
    out, arg = torch.ops.fastattn.aggregate_max(x, *graph.csr, None, reduce == "min", False)
    assert arg.shape == (0,) and arg.dtype == graph.col.dtype
    both = torch.ops.fastattn.aggregate_max(x, *graph.csr, None, reduce == "min", True)
    assert torch.equal(out, both[0]) and both[1].shape == out.shape
    grad = torch.randn_like(out)
    assert torch.equal(*(torch.autograd.grad(o, x, grad)[0] for o in (out, both[0])))


# torch.func


def test_func_and_vmap(impl):
    """vmap over each combination of inputs, outside and inside of gradients; jacobians, batched gradients."""
    for reduce, options in itertools.product(("sum", "sym", "max"), FORMS[1:3]):
        case = small(reduce, **options)
        graph = case.graph()
        run = lambda x, w: aggregate(x, graph, reduce, edge_weight=w, impl=impl)  # noqa: B023, E731
        gradient = torch.func.grad(lambda x, w: run(x, w).sin().sum(), (0, 1))  # noqa: B023
        single, N = (case.x, case.edge_weight), 3
        leaves = [t.clone().requires_grad_() for t in single]
        expected = torch.autograd.grad(run(*leaves).sin().sum(), leaves)
        torch.testing.assert_close(gradient(*single), expected)
        many = [torch.rand(N, *t.shape, dtype=torch.float64) for t in single]
        for mapped in ((True, False), (False, True), (True, True)):
            for d in (0, 1):
                args = [m if on else s for on, m, s in zip(mapped, many, single, strict=True)]
                dims = tuple(d if on else None for on in mapped)
                moved = [a.movedim(0, d) if on else a for on, a in zip(mapped, args, strict=True)]
                each = [[a[n] if on else a for on, a in zip(mapped, args, strict=True)] for n in range(N)]
                out = torch.vmap(run, dims)(*moved)
                torch.testing.assert_close(out, torch.stack([run(*e) for e in each]))
                results = torch.vmap(gradient, dims)(*moved)
                wanted = zip(*[gradient(*e) for e in each], strict=True)
                torch.testing.assert_close(results, tuple(map(torch.stack, wanted)))
        total = lambda x, w: torch.vmap(run)(x, w).sin().sum()  # noqa: B023, E731
        each = zip(*[gradient(*(m[n] for m in many)) for n in range(N)], strict=True)
        torch.testing.assert_close(torch.func.grad(total, (0, 1))(*many), tuple(map(torch.stack, each)))
        looped = torch.autograd.functional.jacobian(run, single)
        torch.testing.assert_close(torch.autograd.functional.jacobian(run, single, vectorize=True), looped)
        torch.testing.assert_close(torch.func.jacrev(run, (0, 1))(*single), looped)


def test_vmap_over_graphs_and_scales():
    """What cannot be folded is mapped one by one."""
    require_kernels("cpu")
    graph = make_case(5, E=9).graph()
    x, rows = torch.randn(2, 5, 1, 3, dtype=torch.float64), torch.rand(3, 5, dtype=torch.float64)
    many = [torch.stack([t, t.flip(0)]) for t in (graph.col, graph.perm)]

    def scaled(r):
        return torch.ops.fastattn.aggregate_sum(x, *graph.csr, None, r, None, None, False)

    torch.testing.assert_close(torch.vmap(scaled)(rows), torch.stack([scaled(r) for r in rows]))

    def on_graph(col, perm):
        return torch.ops.fastattn.aggregate_max(x, graph.rowptr, col, perm, 5, None, False, True)

    each = zip(*[on_graph(*(t[n] for t in many)) for n in range(2)], strict=True)
    torch.testing.assert_close(torch.vmap(on_graph)(*many), tuple(map(torch.stack, each)))


def test_forward_mode_is_refused_not_zero():
    require_kernels("cpu")
    case = make_case(5, E=9, weighted=True)
    for reduce in ("sum", "max", "sym"):

        def run(x, impl="cpu", reduce=reduce):
            return aggregate(x, case.graph(), reduce, edge_weight=case.edge_weight.abs(), impl=impl)

        with pytest.raises(NotImplementedError, match="jvp"):
            torch.func.jvp(run, (case.x,), (case.x,))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
            run(forward_ad.make_dual(case.x, case.x))
        _, tangent = torch.func.jvp(lambda x: run(x, "reference"), (case.x,), (case.x,))
        torch.testing.assert_close(tangent, run(case.x))


# torch.compile, torch.export, opcheck


@pytest.mark.parametrize("reduce, form", [("sym", "Graph"), ("max", "Graph"), ("mean", "edge_index")])
def test_compile_once_for_all_sizes(reduce, form):
    """fullgraph, with gradients: three compilations at most for any numbers of nodes and edges."""
    require_kernels("cpu")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = lambda x, graph, w: aggregate(x, graph, reduce, edge_weight=w, impl="cpu")  # noqa: E731
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for N, E in ((5, 9), (6, 20), (12, 7), (30, 100)):
        case = make_case(N, E=E, reduce=reduce, weighted=True)
        expected = call(case, "cpu")
        x, w = (t.clone().requires_grad_() for t in (case.x, case.edge_weight))
        out = compiled(x, case.edge_index if form == "edge_index" else case.graph(), w)
        torch.testing.assert_close(out, expected["out"])
        gradients = torch.autograd.grad(out, (x, w), case.grad_out)
        torch.testing.assert_close(gradients, (expected["grad_x"], expected["grad_edge_weight"]))
    assert counter.frame_count <= 3


@pytest.mark.parametrize("reduce", ("sum", "max"))
def test_compiled_gradients_of_tensors_put_together_from_parts(reduce):
    require_kernels("cpu")
    case = make_case(6, E=20, reduce=reduce, weighted=True)
    graph = case.graph()
    check_compiled_of_parts(
        lambda x, w: (aggregate(x, graph, reduce, edge_weight=w),), [case.x, case.edge_weight]
    )


def test_compile_segments():
    require_kernels("cpu")
    torch._dynamo.reset()
    x, batch, ptr = torch.randn(9, 4), torch.tensor([0, 0, 1, 3, 3, 3, 3, 4, 4]), torch.tensor([0, 4, 4, 9])
    by_batch = lambda x, b: fastattn.segment_reduce(x, "mean", batch=b, num_segments=6, impl="cpu")  # noqa: E731
    by_ptr = lambda x, p: fastattn.segment_reduce(x, "max", ptr=p, impl="cpu")  # noqa: E731
    for function, index in ((by_batch, batch), (by_ptr, ptr)):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        outputs = compiled(leaves[0], index), function(leaves[1], index)
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(
            *(torch.autograd.grad(o.sin().sum(), leaf)[0] for o, leaf in zip(outputs, leaves, strict=True))
        )
        with pytest.raises((ValueError, RuntimeError)):
            compiled(x, index * 2)


@pytest.mark.parametrize("function", ("edge_softmax", "segment_reduce", "aggregate"))
def test_compile_where_the_number_of_nodes_is_in_the_edges(function):
    """fullgraph, with gradients: the largest number in the edges says how many targets there are."""
    require_kernels("cpu")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = {
        "edge_softmax": lambda x, edges: fastattn.edge_softmax(x, edges),
        "segment_reduce": lambda x, edges: fastattn.segment_reduce(x, "max", batch=edges[1]),
        "aggregate": lambda x, edges: aggregate(x, fastattn.Graph(edges, size=(x.shape[0], None)), "mean"),
    }[function]
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for N, E in ((5, 9), (6, 20), (12, 17), (30, 100)):
        edges, x = torch.randint(N, (2, E)), torch.randn(E, 3, requires_grad=True)
        out, expected = compiled(x, edges), run(x, edges)
        torch.testing.assert_close(out, expected)
        grad_out = torch.randn_like(out)
        torch.testing.assert_close(
            *(torch.autograd.grad(o, x, grad_out)[0] for o in (out, expected)),
        )
    assert counter.frame_count <= 3
    with pytest.raises(RuntimeError, match="2147483646"):  # wider indices than were compiled
        compiled(torch.randn(9, 3), torch.full((2, 9), 2**31))


def test_compile_with_inductor():
    require_kernels("cpu")
    torch._dynamo.reset()
    case = make_case(reduce="mean", dtype=torch.float32)
    expected = call(case, "cpu")
    compiled = torch.compile(lambda x, g: aggregate(x, g, "mean") + 1, fullgraph=True)
    x = case.x.clone().requires_grad_()
    out = compiled(x, case.graph())
    torch.testing.assert_close(out, expected["out"] + 1)
    torch.testing.assert_close(torch.autograd.grad(out, x, case.grad_out)[0], expected["grad_x"])


class Convolution(torch.nn.Module):
    def forward(self, x, edge_index, weight):
        return aggregate(x, edge_index, "mean", edge_weight=weight).relu()


@pytest.mark.parametrize("strict", (False, True))
def test_export(strict):
    require_kernels("cpu")
    torch._dynamo.reset()
    nodes, edges = torch.export.Dim("nodes", min=2, max=9999), torch.export.Dim("edges", min=2, max=9999)
    inputs = lambda N, E: (torch.randn(N, 3), torch.randint(N, (2, E)), torch.rand(E))  # noqa: E731
    exported = torch.export.export(
        Convolution(), inputs(7, 20), dynamic_shapes=({0: nodes}, {1: edges}, {0: edges}), strict=strict
    )
    assert "fastattn.aggregate_sum.default" in [str(node.target) for node in exported.graph.nodes]
    given = inputs(5, 31)
    torch.testing.assert_close(exported.module()(*given), Convolution()(*given))


def test_traces_and_profiles_hold_the_operator():
    require_kernels("cpu")
    case = make_case(dtype=torch.float32)
    run = lambda x: aggregate(x, case.graph(), "max")  # noqa: E731
    graph = torch.fx.experimental.proxy_tensor.make_fx(run)(case.x).graph
    assert torch.ops.fastattn.aggregate_max.default in [node.target for node in graph.nodes]
    with torch.profiler.profile() as profile:
        run(case.x)
    assert "fastattn::aggregate_max" in [event.key for event in profile.key_averages()]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("reduce", ("mean", "max"))
def test_traced_calls_refuse_other_numbers_of_nodes(impl, reduce):
    """A trace keeps the graph and forgets what was checked against it: the op has to see it again."""
    graph, x = make_case().graph(), torch.randn(13, 4)
    run = lambda x: aggregate(x, graph, reduce, impl=impl)  # noqa: E731
    traced = torch.jit.trace(run, x, check_trace=False)
    torch.testing.assert_close(traced(2 * x), run(2 * x))
    with pytest.raises((RuntimeError, IndexError), match="must|out of (range|DATA bounds)"):
        traced(torch.randn(5, 4))


def test_opcheck():
    """Schemas, fakes, layouts and derivatives, with and without optional arguments."""
    require_kernels("cpu")
    graph = make_case(5, 6, E=9).graph()
    x = torch.randn(2, 3, 5, 4).transpose(1, 2).requires_grad_()
    a = torch.randn(2, 6, 3, 4, requires_grad=True)
    weight, shared = torch.randn(9, 3, requires_grad=True), torch.randn(1, 9).T.requires_grad_()
    rows, cols = torch.rand(6, requires_grad=True), torch.rand(5, requires_grad=True)
    ops, csr = torch.ops.fastattn, graph.csr
    arg = ops.aggregate_max(x.detach(), *csr, None, True, True)[1]
    for op, args in (
        (ops.aggregate_sum, (x, *csr, weight, rows, cols, None, False)),
        (ops.aggregate_sum, (x, csr.ptr, csr.index, None, 5, None, None, None, arg, True)),
        (ops.aggregate_max, (x, *csr, shared, False, True)),
        (ops.aggregate_max, (x, *csr, shared, False, False)),
        (ops.aggregate_max, (x.half().detach(), *csr, None, True, False)),
        (ops.edge_dot, (a, x, *csr, rows, cols, arg, True, True)),
        (ops.edge_dot, (a.bfloat16().detach(), x.bfloat16().detach(), *csr, None, None, None, False, False)),
    ):
        torch.library.opcheck(op, args)


# Precision and memory modes


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_autocast(impl, dtype):
    """Features keep the dtype that they come in, weights take it; sums stay in float32."""
    case = make_case(weighted=True, reduce="sym", dtype=torch.float32)
    graph = case.graph()
    layer = torch.nn.Linear(5, 5)
    weight = case.edge_weight.requires_grad_()
    with torch.autocast("cpu", dtype):
        hidden = layer(case.x)
        assert hidden.dtype == dtype
        out = aggregate(hidden, graph, "sym", edge_weight=weight, impl=impl)
        wide = aggregate(case.x, graph, "sym", edge_weight=weight.to(dtype), impl=impl)
        assert aggregate(case.x.double(), graph, "sym", edge_weight=weight, impl=impl).dtype == torch.float64
    assert out.dtype == dtype and wide.dtype == torch.float32
    with pytest.raises(RuntimeError, match="edge_weight is torch.float32"):
        aggregate(hidden, graph, edge_weight=weight, impl=impl)
    expected = aggregate(hidden, graph, "sym", edge_weight=weight.to(dtype), impl=impl)
    assert torch.equal(out, expected)
    out.float().square().sum().backward()
    assert weight.grad.dtype == torch.float32 and layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_activation_checkpointing(impl, use_reentrant):
    case = make_case(weighted=True, reduce="max")
    graph, found = case.graph(), []
    run = lambda x, w: aggregate(x, graph, "max", edge_weight=w, impl=impl)  # noqa: E731
    for checkpointed in (False, True):
        leaves = [t.clone().requires_grad_() for t in (case.x, case.edge_weight)]
        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(run, *leaves, use_reentrant=use_reentrant)
        else:
            out = run(*leaves)
        found.append(torch.autograd.grad(out.sum(), leaves) if not use_reentrant else None)
        if use_reentrant:
            out.sum().backward()
            found[-1] = [t.grad for t in leaves]
    torch.testing.assert_close(*found)


def test_features_are_kept_only_for_gradients_of_their_factors():
    """A plain sum saves no features: what they hold before the backward pass does not matter."""
    require_kernels("cpu")
    case = make_case(dtype=torch.float32)
    for case.reduce in ("sum", "mean", "both", "max"):
        expected = call(case, "cpu")["grad_x"]
        x = case.x.clone().requires_grad_()
        hidden = x * 1
        out = aggregate(hidden, case.graph(), case.reduce, impl="cpu")
        with torch.no_grad():
            hidden.zero_()  # autograd would complain, were it saved
        assert torch.equal(torch.autograd.grad(out, x, case.grad_out)[0], expected)


def test_subclasses_and_pending_negation(impl):
    case = make_case(dtype=torch.float32, weighted=True)
    expected = call(case, impl)
    case.x, case.grad_out = negated(case.x), negated(case.grad_out)
    assert_same(call(case, impl), expected)
    parameter = torch.nn.Parameter(case.edge_weight)
    out = aggregate(case.x, case.graph(), edge_weight=parameter, impl=impl)
    assert torch.equal(out, expected["out"]) and out.requires_grad


def test_a_graph_is_shared_by_calls_in_any_mode(impl):
    """Vectors that a graph keeps are of no call's autograd graph, mode or dtype."""
    case = make_case(dtype=torch.float32)
    graph = Graph(case.edge_index, 13)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for reduce in ("mean", "sym", "both"):
            fresh = aggregate(case.x.to(dtype), Graph(case.edge_index, 13), reduce, impl=impl)
            assert torch.equal(aggregate(case.x.to(dtype), graph, reduce, impl=impl), fresh)
    assert {dtype for _, dtype in graph._vectors} == {torch.float32, torch.float64}
