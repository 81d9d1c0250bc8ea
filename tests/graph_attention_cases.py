"""Inputs, calls and the checker that the tests of attention on graphs share."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import graph_attention_oracle as oracle
import numpy as np
import operator_checks
import pytest
import torch
from operator_checks import compare, on_device, running
from operator_checks import require as require_op

import fastattn
from fastattn.reference.attention import dropout_keep

IMPLEMENTATIONS = ("reference", "cpu", "triton")
FORMS = tuple(oracle.TENSORS)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def require(impl: str) -> str:
    return require_op(impl, "fastattn::graph_attention_forward")


@pytest.fixture(params=IMPLEMENTATIONS)
def impl(request) -> Iterator[str]:
    with running(request.param, "fastattn::graph_attention_forward") as name:
        yield name


@dataclass
class Case:
    """One call: its tensors by the names of the public arguments, edges, options and incoming gradients."""

    form: str
    tensors: dict[str, torch.Tensor]
    edge_index: torch.Tensor
    size: tuple[int, int]
    grad_out: torch.Tensor
    grad_attention: torch.Tensor
    options: dict = field(default_factory=dict)
    graph: fastattn.Graph = None

    def __post_init__(self):
        if self.graph is None:
            self.graph = fastattn.Graph(self.edge_index, size=self.size)

    @property
    def value(self) -> torch.Tensor:
        return self.tensors[oracle.VALUE[self.form]]


def random_edges(N_src, N_dst, E, generator) -> torch.Tensor:
    """Unsorted, with duplicates; first, last and a middle node are isolated where there are enough."""
    ends = []
    for n in (N_src, N_dst):
        nodes = torch.arange(n)
        nodes = nodes[(nodes != 0) & (nodes != n - 1) & (nodes != n // 2)] if n > 4 else nodes
        ends.append(nodes[torch.randint(0, max(len(nodes), 1), (E,), generator=generator)])
    return torch.stack(ends)


def make_case(
    form, N_src=7, N_dst=9, E=40, H=2, C=5, D=None, dtype=torch.float64, *, edge_terms=True, hidden=0.0,
    hub=False, edge_index=None, seed=0, **options,
) -> Case:  # fmt: skip
    """``hidden``: share of the edge terms that are -inf; ``hub``: half of the edges enter one node."""
    generator = torch.Generator().manual_seed(seed)
    D = C if D is None or form == "gatv2_attention" else D

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    if edge_index is None:
        edge_index = random_edges(N_src, N_dst, E, generator)
        if hub:
            edge_index[1, torch.rand(E, generator=generator) < 0.5] = min(2, N_dst - 1)
            edge_index[0, torch.rand(E, generator=generator) < 0.4] = min(3, N_src - 1)
    E = edge_index.shape[1]
    if form == "gat_attention":
        tensors = {"x": normal(N_src, H, C), "alpha_src": normal(N_src, H), "alpha_dst": normal(N_dst, H)}
    elif form == "graph_attention":
        tensors = {"query": normal(N_dst, H, D), "key": normal(N_src, H, D), "value": normal(N_src, H, C)}
    else:
        tensors = {"x_src": normal(N_src, H, C), "x_dst": normal(N_dst, H, C), "att": normal(H, C)}
    if edge_terms:
        name = oracle.TENSORS[form][-1]
        tensors[name] = normal(E, H, C) if name == "edge" else normal(E, H)
        if name != "edge":
            tensors[name].masked_fill_(torch.rand(E, H, generator=generator) < hidden, -torch.inf)
    return Case(form, tensors, edge_index, (N_src, N_dst), normal(N_dst, H, C), normal(E, H), options)


def function_of(case: Case, impl: str):
    """The public function of the case as one of its tensors by name: (out, attention)."""

    def run(leaves):
        given = [leaves[name] for name in oracle.TENSORS[case.form][:3]]
        name = oracle.TENSORS[case.form][3]
        return getattr(fastattn, case.form)(
            *given, case.graph, **{name: leaves.get(name)}, return_attention=True, impl=impl, **case.options
        )

    return run


@on_device
def call(case: Case, impl: str, *, only=None, attention=True, seed=1, **changed) -> dict[str, torch.Tensor]:
    """Runs the public function and its backward: out, attention and grad_<input> (or those of ``only``)."""
    wanted = list(case.tensors) if only is None else list(only)
    tensors = case.tensors | changed
    leaves = {n: t.detach().requires_grad_(n in wanted) for n, t in tensors.items()}
    torch.manual_seed(seed)
    out, weights = function_of(case, impl)(leaves)
    outputs, incoming = [out], [case.grad_out.to(out.dtype)]
    if attention:
        outputs, incoming = [out, weights], [*incoming, case.grad_attention.to(out.dtype)]
    kept = [n for n, t in enumerate(outputs) if t.requires_grad]
    grads = torch.autograd.grad(
        [outputs[n] for n in kept],
        [leaves[n] for n in wanted],
        [incoming[n] for n in kept],
        allow_unused=True,
    )
    grads = {
        f"grad_{n}": torch.zeros_like(leaves[n]) if g is None else g
        for n, g in zip(wanted, grads, strict=True)
    }
    return {"out": out.detach(), "attention": weights.detach()} | grads


def keep_of(case: Case, seed=1) -> torch.Tensor:
    (E, H), p = case.grad_attention.shape, case.options.get("dropout_p", 0.0)
    if p == 0.0:
        return torch.ones(E, H)
    torch.manual_seed(seed)
    drawn = torch.randint(0, 2**63 - 1, (1,), device=operator_checks.device).cpu()
    return dropout_keep(drawn, p, 1, H, 1, E).view(H, E).T / (1 - p if p < 1 else 1)


def options_of(case: Case) -> tuple[float, float]:
    """scale and negative_slope"""
    D = case.tensors["key"].shape[2] if case.form == "graph_attention" else 1
    default = D**-0.5 if D else 1.0
    return case.options.get("scale", default), case.options.get("negative_slope", 0.2)


def exact(case: Case, attention=True, seed=1):
    tensors = {n: t.detach().double().numpy() for n, t in case.tensors.items()}
    grad_attention = case.grad_attention.double().numpy() * attention
    src, dst = case.edge_index.numpy()
    return oracle.attend(
        case.form, tensors, src, dst, case.size[1], case.grad_out.double().numpy(), grad_attention,
        keep_of(case, seed).double().numpy(), *options_of(case),
    )  # fmt: skip


def plain(case: Case, attention=True, seed=1) -> dict[str, torch.Tensor]:
    """The composition that users write, with a message for every edge, in the dtype of the case."""
    t = {n: v.detach().requires_grad_() for n, v in case.tensors.items()}
    (src, dst), num_dst = case.edge_index, case.size[1]
    scale, slope = options_of(case)
    value = t[oracle.VALUE[case.form]]
    if case.form == "gat_attention":
        score = t["alpha_src"][src] + t["alpha_dst"][dst]
        score = score + t["alpha_edge"] if "alpha_edge" in t else score
        score = torch.nn.functional.leaky_relu(score, slope)
    elif case.form == "graph_attention":
        score = (t["query"][dst] * t["key"][src]).sum(-1) * scale
        score = score + t["edge_bias"] if "edge_bias" in t else score
    else:
        total = t["x_src"][src] + t["x_dst"][dst]
        total = total + t["edge"] if "edge" in t else total
        score = (torch.nn.functional.leaky_relu(total, slope) * t["att"]).sum(-1)
    index = dst.unsqueeze(1).expand_as(score)
    top = score.detach().new_full((num_dst, score.shape[1]), -1e4)
    top = top.scatter_reduce(0, index, score.detach(), "amax")
    weights = torch.exp(score - top[dst])
    total = weights.new_zeros(num_dst, score.shape[1]).index_add(0, dst, weights)
    weights = weights / (total[dst] + 1e-7) * keep_of(case, seed).to(weights.dtype)
    out = value.new_zeros(case.grad_out.shape).index_add(0, dst, weights.unsqueeze(-1) * value[src])
    outputs, incoming = [out], [case.grad_out]
    if attention:
        outputs, incoming = [out, weights], [case.grad_out, case.grad_attention]
    grads = torch.autograd.grad(outputs, list(t.values()), incoming)
    return {"out": out.detach(), "attention": weights.detach()} | {
        f"grad_{n}": g for n, g in zip(t, grads, strict=True)
    }


def check(results: dict[str, torch.Tensor], case: Case, *, attention=True, seed=1, strict=False) -> None:
    right, sizes = exact(case, attention, seed)
    naive = plain(case, attention, seed)
    for name, result in results.items():
        compare(name, result, right[name], sizes[name], naive[name], case.value.dtype, strict)
    assert set(results) <= set(right)


def finite(results: dict[str, torch.Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in results.values())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(np.array_equal(a[n].double().numpy(), b[n].double().numpy(), equal_nan=True) for n in a)
