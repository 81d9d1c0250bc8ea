"""Inputs, calls and the checker that the tests of aggregation share."""

from collections.abc import Iterator
from dataclasses import dataclass

import aggregation_oracle as oracle
import numpy as np
import pytest
import torch
from operator_checks import compare, on_device, require, running

import fastattn
from fastattn import Graph

IMPLEMENTATIONS = ("reference", "cpu", "triton")
REDUCES = ("sum", "mean", "sym", "both", "max", "min")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def require_kernels(impl: str) -> str:
    for op in ("graph_csr", "aggregate_sum", "aggregate_max", "edge_dot"):
        require(impl, f"fastattn::{op}")
    return impl


@pytest.fixture(params=IMPLEMENTATIONS)
def impl(request) -> Iterator[str]:
    with running(request.param, "fastattn::aggregate_sum"):
        yield request.param if request.param == "triton" else require_kernels(request.param)


@pytest.fixture(params=("reference", "cpu"))
def native(request) -> str:
    """Those that what surrounds the kernels is tested with; Triton's interpreter would take its time."""
    return require_kernels(request.param)


@dataclass
class Case:
    """One call: x (*batch, N, F) or (*batch, N, H, C), weights (E,) or (E, H), and an incoming gradient."""

    x: torch.Tensor
    edge_index: torch.Tensor
    num_dst: int
    reduce: str
    edge_weight: torch.Tensor | None
    grad_out: torch.Tensor

    @property
    def heads(self) -> bool:
        return self.edge_weight is not None and self.edge_weight.dim() == 2

    @property
    def nodes(self) -> int:
        return -2 - self.heads

    def graph(self) -> Graph:
        return Graph(self.edge_index, size=(self.x.shape[self.nodes], self.num_dst))


def random_edges(N, M, E, generator, order="random") -> torch.Tensor:
    """Multigraphs with self-loops; the first, middle and last node are isolated where there are enough."""

    def ends(nodes):
        lively = [n for n in range(nodes) if nodes < 6 or n not in (0, nodes // 2, nodes - 1)]
        return torch.tensor(lively)[torch.randint(len(lively), (E,), generator=generator)]

    edge_index = torch.stack([ends(N), ends(M)]) if E else torch.zeros(2, 0, dtype=torch.int64)
    if E > 3 and min(N, M) >= 6:
        edge_index[:, 1] = edge_index[:, 0]
        edge_index[:, 2] = min(N, M) - 2
    if order == "by target":
        return edge_index[:, edge_index[1].argsort(stable=True)]
    return edge_index[:, edge_index[0].argsort(stable=True)] if order == "by source" else edge_index


def hub_graph(N, E):
    generator = torch.Generator().manual_seed(5)
    edge_index = torch.randint(N, (2, E), generator=generator)
    edge_index[:, torch.randperm(E, generator=generator)[: E // 2]] = torch.tensor([[1], [2]])
    edge_index[0, torch.randperm(E, generator=generator)[: E // 3]] = 7
    return edge_index


def make_case(
    N=13, M=None, E=60, F=5, *, H=None, weight_heads=None, batch=(), reduce="sum", dtype=torch.float64,
    weighted=False, order="random", edge_index=None, seed=0,
) -> Case:  # fmt: skip
    """``H`` heads make x (..., N, H, F) and weights (E, H), or (E, ``weight_heads``)."""
    generator = torch.Generator().manual_seed(seed)
    M = N if M is None else M
    if edge_index is None:
        edge_index = random_edges(N, M, E, generator, order)
    E = edge_index.shape[1]
    inner = (F,) if H is None else (H, F)
    x, grad_out = (
        torch.randn(*batch, nodes, *inner, generator=generator, dtype=torch.float64) for nodes in (N, M)
    )
    edge_weight = None
    if weighted or H is not None:
        shape = (E,) if H is None else (E, H if weight_heads is None else weight_heads)
        edge_weight = torch.randn(*shape, generator=generator, dtype=torch.float64)
        if reduce == "sym":
            edge_weight = edge_weight.abs() + 0.1
    if reduce in ("max", "min"):
        # Exact products, so that the oracle finds the same ties: small integers times powers of two.
        x = x.mul(2).round()
        if edge_weight is not None:
            edge_weight = edge_weight.sign() * 2.0 ** edge_weight.mul(2).round().clamp(-2, 2)
    x, grad_out, edge_weight = (t if t is None else t.to(dtype) for t in (x, grad_out, edge_weight))
    return Case(x, edge_index, M, reduce, edge_weight, grad_out)


@on_device
def call(case: Case, impl: str, graph=None, only=("x", "edge_weight")) -> dict[str, torch.Tensor]:
    """Runs the public function and its backward: out, grad_x and grad_edge_weight."""
    leaves = {name: getattr(case, name) for name in ("x", "edge_weight")}
    leaves = {n: t if t is None else t.detach().requires_grad_(n in only) for n, t in leaves.items()}
    graph = case.graph() if graph is None else graph
    out = fastattn.aggregate(leaves["x"], graph, case.reduce, edge_weight=leaves["edge_weight"], impl=impl)
    results = {"out": out.detach()}
    wanted = {n: t for n, t in leaves.items() if t is not None and t.requires_grad}
    if wanted:
        gradients = torch.autograd.grad(out, list(wanted.values()), case.grad_out)
        results |= {f"grad_{n}": g for n, g in zip(wanted, gradients, strict=True)}
    return results


def folded(case: Case, t: torch.Tensor) -> torch.Tensor:
    """Features as (B, N, H, F)."""
    inner = t.shape[case.nodes :] if case.heads else (t.shape[-2], 1, t.shape[-1])
    return t.reshape(-1, *inner) if 0 not in t.shape else t.reshape(t.shape[: case.nodes].numel(), *inner)


def exact(case: Case) -> tuple[dict, dict]:
    """Results and magnitudes from the float64 oracle, in the caller's shapes."""
    weight = case.edge_weight
    if weight is not None:
        weight = (weight if case.heads else weight.unsqueeze(1)).double().numpy()
    x, grad_out = (folded(case, t.double()).numpy() for t in (case.x, case.grad_out))
    found = oracle.aggregate(x, *case.edge_index.numpy(), case.num_dst, case.reduce, weight, grad_out)
    for results in found:
        for name, like in (
            ("out", case.grad_out),
            ("grad_x", case.x),
            ("grad_edge_weight", case.edge_weight),
        ):
            if like is not None:
                results[name] = results[name].reshape(like.shape)
    return found


def plain(case: Case, arg: np.ndarray | None) -> dict[str, torch.Tensor]:
    """What a careful user would write in PyTorch: half precision is summed in float32 and rounded once."""
    leaves = {n: getattr(case, n) for n in ("x", "edge_weight")}
    leaves = {n: t.detach().clone().requires_grad_() for n, t in leaves.items() if t is not None}
    wide = torch.float64 if case.x.dtype == torch.float64 else torch.float32
    x = folded(case, leaves["x"].to(wide))
    (src, dst), (B, N, H, F) = case.edge_index, x.shape
    E = src.shape[0]
    weight = leaves["edge_weight"].to(wide) if case.edge_weight is not None else None
    weight = weight if weight is None or case.heads else weight.unsqueeze(1)
    message = x[:, src] if weight is None else x[:, src] * weight.unsqueeze(-1)
    count = torch.bincount(dst, minlength=case.num_dst).to(wide)
    if case.reduce in ("max", "min"):
        message = torch.cat([message, message.new_zeros(B, 1, H, F)], 1)
        out = message.gather(1, torch.from_numpy(np.where(arg < 0, E, arg)))
    else:
        if case.reduce == "mean":
            message = message / count[dst].view(1, E, 1, 1)
        elif case.reduce == "both":
            out_count = torch.bincount(src, minlength=N).to(wide)
            message = message / (count[dst] * out_count[src]).sqrt().view(1, E, 1, 1)
        elif case.reduce == "sym":
            ones = torch.ones(E, 1, dtype=wide) if weight is None else weight
            degree = ones.new_zeros(N, ones.shape[1]).index_add(0, dst, ones)
            root = torch.where(degree > 0, torch.where(degree > 0, degree, 1.0).rsqrt(), 0.0)
            message = message * (root[dst] * root[src]).unsqueeze(-1)
        out = message.new_zeros(B, case.num_dst, H, F).index_add(1, dst, message)
    out = out.to(case.x.dtype).reshape(case.grad_out.shape)
    gradients = torch.autograd.grad(out, list(leaves.values()), case.grad_out, allow_unused=True)
    results = {"out": out.detach()}
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        results[f"grad_{name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return results


def check(actual: dict, case: Case, strict: bool = False) -> None:
    """The error to float64 is at most twice that of plain PyTorch, plus one rounding, per tensor."""
    expected, size = exact(case)
    yardstick = plain(case, expected.get("arg"))
    for name, result in actual.items():
        assert result.dtype == case.x.dtype, name
        compare(name, result, expected[name], size[name], yardstick[name], case.x.dtype, strict)
    if case.reduce in ("max", "min"):
        assert np.array_equal(actual["out"].double().numpy(), expected["out"]), (
            "an extreme is one of its terms"
        )
