"""Values and gradients of attention on graphs against a float64 loop: forms, sizes, dtypes, layouts."""

from pathlib import Path

import graph_attention_cases as cases
import graph_attention_oracle as oracle
import operator_checks
import pytest
import torch
from attention_cases import choices
from graph_attention_cases import DTYPES, FORMS, call, check, finite, make_case, require, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastattn

impl, poisoned = cases.impl, operator_checks.poisoned

OPTIONS = {
    "plain": {"edge_terms": False},
    "edge terms": {},
    "hidden edges": {"hidden": 0.4},
    "dropout": {"dropout_p": 0.3},
    "dropout of everything": {"dropout_p": 1.0},
    "hub": {"hub": True, "E": 150, "edge_terms": False},
    "value dim": {"D": 3, "C": 8},
    "narrow heads": {"H": 8, "C": 8, "E": 60},
}


@choices(DTYPES, (torch.float64, torch.bfloat16))
@pytest.mark.parametrize("form", FORMS)
def test_options(impl, form, dtype):
    for options in OPTIONS.values():
        case = make_case(form, dtype=dtype, **options)
        check(call(case, impl), case)


@pytest.mark.parametrize("form", FORMS)
def test_scores_of_any_slope_and_scale(impl, form):
    name, given = (
        ("scale", (0.0, -1.5)) if form == "graph_attention" else ("negative_slope", (0.0, 1.7, -0.3))
    )
    for number in given:
        case = make_case(form, **{name: number})
        check(call(case, impl), case)


@pytest.mark.parametrize("form", FORMS)
def test_heads_and_channels(impl, form):
    """Around the widths of vectors, and groups of heads that fill part of one or several."""
    sizes = [(1, 1), (1, 3), (2, 15), (3, 16), (4, 17), (5, 1), (8, 4), (16, 2), (17, 3), (33, 1)]
    for H, C in [*sizes, (1, 127), (1, 128), (2, 257)]:
        case = make_case(form, 5, 4, 12, H, C, dtype=torch.float32, seed=H)
        check(call(case, impl), case)


@pytest.mark.parametrize("form", FORMS)
def test_degrees_around_the_size_of_a_block(form):
    for degree in (1, 2, 15, 16, 17, 63, 64, 65, 128, 129, 200):
        edge_index = torch.stack([torch.arange(degree) % 3, torch.ones(degree, dtype=torch.int64)])
        case = make_case(form, 3, 2, H=1, C=4, dtype=torch.float32, edge_index=edge_index, hidden=0.1)
        check(call(case, require("cpu")), case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_errors_of_larger_inputs_are_those_of_pytorch(form, dtype):
    case = make_case(form, 60, 50, 900, 2, 24, dtype=dtype, hub=True)
    check(call(case, require("cpu")), case, strict=True)


def big_case(form, dtype=torch.float32, **options):
    """Enough edges for many tasks; half of them enter one node, many leave one."""
    return make_case(form, 400, 300, 20000, 2, 9, dtype=dtype, hub=True, **options)


@pytest.mark.parametrize("form", FORMS)
def test_rows_divided_among_tasks(form):
    case = big_case(form, torch.float64, hidden=0.1, dropout_p=0.2)
    kernel, reference = call(case, require("cpu")), call(case, "reference")
    for name, result in kernel.items():
        torch.testing.assert_close(
            result, reference[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("form", FORMS)
def test_results_repeat_for_any_number_of_threads(form):
    case = big_case(form, dropout_p=0.2)
    require("cpu")
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            results.append(call(case, "cpu"))
    finally:
        torch.set_num_threads(before)
    assert all(same(results[0], other) for other in results[1:])


def strided(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "sliced":
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), torch.nan, dtype=tensor.dtype)
        wide[..., 1::2] = tensor
        return wide[..., 1::2]
    wide = torch.full((2 * tensor.shape[0], *tensor.shape[1:]), torch.nan, dtype=tensor.dtype)
    wide[::2] = tensor
    return wide[::2]


@pytest.mark.parametrize("kind", ("transposed", "sliced", "rows apart"))
@pytest.mark.parametrize("form", FORMS)
def test_strides(impl, form, kind):
    case = make_case(form, dtype=torch.float32)
    expected = call(case, impl)
    changed = {n: strided(t, kind) for n, t in case.tensors.items()}
    case.grad_out, case.grad_attention = (strided(t, kind) for t in (case.grad_out, case.grad_attention))
    assert same(expected, call(case, impl, **changed))


@pytest.mark.parametrize("form", FORMS)
def test_expanded_gradients(impl, form):
    case = make_case(form, dtype=torch.float32)
    case.grad_out = torch.ones(()).expand_as(case.grad_out)
    case.grad_attention = torch.full((1, 2), 0.5).expand_as(case.grad_attention)
    check(call(case, impl), case)


@pytest.mark.parametrize("form", FORMS)
def test_each_input_alone(impl, form):
    case = make_case(form)
    expected = call(case, impl)
    for name in case.tensors:
        assert same(call(case, impl, only=[name]), expected)


@pytest.mark.parametrize("form", FORMS)
def test_gradient_of_one_output_alone(impl, form):
    case = make_case(form)
    check(call(case, impl, attention=False), case, attention=False)
    case.grad_out.zero_()
    tensors = {n: t.detach().requires_grad_() for n, t in case.tensors.items()}
    _, weights = cases.function_of(case, impl)(tensors)
    grads = torch.autograd.grad(weights, list(tensors.values()), case.grad_attention, allow_unused=True)
    right, sizes = cases.exact(case)
    for name, grad in zip(tensors, grads, strict=True):
        result = torch.zeros_like(tensors[name]) if grad is None else grad
        operator_checks.compare(
            name, result, right[f"grad_{name}"], sizes[f"grad_{name}"], result, torch.float64
        )


def test_optional_terms_may_be_absent(impl):
    case = make_case("gat_attention", dtype=torch.float32)
    x, alpha_src, alpha_dst, alpha_edge = case.tensors.values()
    zeros = torch.zeros_like
    for some, full in (
        ((alpha_src, None, None), (alpha_src, zeros(alpha_dst), zeros(alpha_edge))),
        ((alpha_src, None, alpha_edge), (alpha_src, zeros(alpha_dst), alpha_edge)),
        ((alpha_src, alpha_dst, None), (alpha_src, alpha_dst, zeros(alpha_edge))),
    ):
        results = [
            fastattn.gat_attention(x, *t[:2], case.graph, alpha_edge=t[2], impl=impl) for t in (some, full)
        ]
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_terms_of_float32_beside_half_precision(impl, dtype):
    case = make_case("gat_attention", dtype=dtype)
    leaves = {n: (t if n == "x" else t.float()).requires_grad_() for n, t in case.tensors.items()}
    out, attention = cases.function_of(case, impl)(leaves)
    grads = torch.autograd.grad(out.float().sum(), list(leaves.values()))
    assert out.dtype == attention.dtype == grads[0].dtype == dtype
    assert all(g.dtype == torch.float32 for g in grads[1:])
    torch.testing.assert_close(out, call(case, impl)["out"])


@pytest.mark.parametrize("H,D", ((1, 4), (2, 32), (3, 17)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_a_complete_graph_gives_dense_attention(impl, dtype, H, D):
    L, S = 11, 13
    edge_index = torch.cartesian_prod(torch.arange(S), torch.arange(L)).T
    edge_index = edge_index[:, torch.randperm(L * S)]
    query, key, value = (torch.randn(n, H, D, dtype=dtype).requires_grad_() for n in (L, S, S))
    bias = torch.randn(L * S, H, dtype=dtype).requires_grad_()
    mask = torch.zeros(H, L, S, dtype=dtype).index_put(
        (torch.arange(H).view(1, H), edge_index[1].unsqueeze(1), edge_index[0].unsqueeze(1)), bias
    )
    grad = torch.randn(L, H, D, dtype=dtype)
    graph = fastattn.Graph(edge_index, size=(S, L))
    sparse = fastattn.graph_attention(query, key, value, graph, edge_bias=bias, impl=impl)
    dense = fastattn.scaled_dot_product_attention(
        *(t.transpose(0, 1).unsqueeze(0) for t in (query, key, value)), mask.unsqueeze(0), impl=impl
    )
    dense = dense.squeeze(0).transpose(0, 1)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(sparse, dense, **tolerance)
    inputs = (query, key, value, bias)
    for a, b in zip(*(torch.autograd.grad(t, inputs, grad) for t in (sparse, dense)), strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edge_softmax(impl, dtype):
    case = make_case("gat_attention", E=60, H=3, dtype=dtype, hidden=0.3)
    score = case.tensors["alpha_edge"].requires_grad_()
    weights = fastattn.edge_softmax(score, case.graph, impl=impl)
    right = oracle.softmax(score.detach().double().numpy(), case.edge_index[1].numpy(), case.size[1])
    operator_checks.compare(
        "weights", weights.detach(), right, right, torch.as_tensor(right).to(dtype), dtype
    )
    (grad,) = torch.autograd.grad(weights, score, case.grad_attention)
    incoming, a = case.grad_attention.double(), torch.as_tensor(right)
    mean = torch.zeros(case.size[1], 3, dtype=torch.float64).index_add(0, case.edge_index[1], a * incoming)
    exact = (a * (incoming - mean[case.edge_index[1]])).numpy()
    size = (a * (incoming.abs() + 1)).numpy()
    operator_checks.compare("grad", grad, exact, size, torch.as_tensor(exact).to(dtype), dtype)


def test_edge_softmax_of_hidden_edges(impl):
    """What comes back for their weights never matters."""
    case = make_case("gat_attention", E=60, H=3, hidden=0.3)
    score = case.tensors["alpha_edge"].requires_grad_()
    weights, hidden = fastattn.edge_softmax(score, case.graph, impl=impl), score == -torch.inf
    incoming = (case.grad_attention.masked_fill(hidden, bad) for bad in (0.0, torch.nan))
    expected, grad = (torch.autograd.grad(weights, score, g, retain_graph=True)[0] for g in incoming)
    assert torch.equal(grad, expected) and (grad[hidden] == 0).all() and hidden.any()


def test_edge_softmax_of_any_shape(impl):
    case = make_case("gat_attention", E=30)
    score = torch.randn(30, 2, 3, 2, dtype=torch.float64)
    flat = fastattn.edge_softmax(score.view(30, 12), case.graph, impl=impl)
    assert torch.equal(fastattn.edge_softmax(score, case.graph, impl=impl), flat.view(30, 2, 3, 2))
    one = fastattn.edge_softmax(score[:, 0, 0, 0], case.edge_index, impl=impl)
    torch.testing.assert_close(one, flat[:, 0])


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data(), form=st.sampled_from(FORMS))
def test_random_multigraphs(data, form):
    N_src, N_dst = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    ends = st.tuples(st.integers(0, N_src - 1), st.integers(0, N_dst - 1))
    edges = data.draw(st.lists(ends, max_size=20))
    edge_index = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T
    H, C = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    case = make_case(
        form, N_src, N_dst, H=H, C=C, dtype=torch.float32, edge_index=edge_index,
        hidden=data.draw(st.sampled_from((0.0, 0.5, 1.0))), dropout_p=data.draw(st.sampled_from((0.0, 0.4))),
    )  # fmt: skip
    results = call(case, require("cpu"))
    assert finite(results)
    check(results, case)


def test_other_instruction_sets(other_isa, run_python):
    """Everything that concerns the kernels once more, on each of their variants."""
    chosen = "(options and (float32 or bfloat16)) or heads or degrees or divided or (softmax and float)"
    chosen = f"({chosen}) and not reference and not triton"
    command = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", chosen)
    run_python(*command, Path(__file__), FASTATTN_CPU_ISA=other_isa)
