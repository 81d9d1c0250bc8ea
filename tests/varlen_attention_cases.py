"""Packed sequences for the tests, and the dense operator sequence by sequence that they are held against."""

from dataclasses import dataclass, field, replace

import operator_checks
import torch
from operator_checks import compare, fewer

import fastattn

attend = fastattn.varlen_attention
INPUTS = ("query", "key", "value", "alibi_slopes", "sinks")
# Rows of a tile and blocks of keys, one more and one less; few rows beside many keys; nothing on either side.
QUERIES = (3, 0, 40, 17, 5, 1, 16, 33)
KEYS = (5, 4, 33, 0, 130, 700, 128, 127)
INTERPRETED = (3, 0, 40, 17, 32), (5, 4, 33, 0, 65)


def bounds_of(lengths, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


@dataclass
class Case:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_out: torch.Tensor
    grad_lse: torch.Tensor
    queries: tuple
    keys: tuple
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    options: dict = field(default_factory=dict)

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {name: getattr(self, name) for name in INPUTS}
        return {name: t for name, t in named.items() if t is not None}

    def bounds(self, dtype=torch.int32):
        return bounds_of(self.queries, dtype), bounds_of(self.keys, dtype)


def make_case(
    queries=QUERIES, keys=KEYS, H=2, Hkv=None, D=8, Dv=None, dtype=torch.float64, *, alibi=None, sinks=False,
    seed=0, **options,
) -> Case:  # fmt: skip
    Hkv, Dv, L, S, N = Hkv or H, Dv or D, sum(queries), sum(keys), len(queries)
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return Case(
        normal(L, H, D), normal(S, Hkv, D), normal(S, Hkv, Dv), normal(L, H, Dv), normal(H, L, dtype=wide),
        tuple(queries), tuple(keys),
        normal(*((N, H) if alibi == "nh" else (H,)), dtype=wide).abs() / 16 if alibi else None,
        normal(H) if sinks else None, options,
    )  # fmt: skip


def differentiate(case: Case, forward) -> dict[str, torch.Tensor]:
    """out, lse and grad_<input> of forward(leaves, options) -> (out, lse)."""
    leaves = {name: t.detach().requires_grad_() for name, t in case.tensors().items()}
    out, lse = forward(leaves, case.options)
    used = [(o, g) for o, g in ((out, case.grad_out), (lse, case.grad_lse.to(lse.dtype))) if o.requires_grad]
    # Rows that see nothing have a constant lse.
    outputs, incoming = zip(*used, strict=True)
    gradients = torch.autograd.grad(outputs, [*leaves.values()], incoming, allow_unused=True)
    results = {"out": out.detach(), "lse": lse.detach()}
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        results[f"grad_{name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return results


@operator_checks.on_device
def call(case: Case, impl: str, dtype=torch.int32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    bounds = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), case.bounds(dtype), strict=True))

    def forward(leaves, options):
        return attend(**leaves, **bounds, return_lse=True, impl=impl, **options)

    return differentiate(case, forward)


def one_by_one(case: Case) -> dict[str, torch.Tensor]:
    """The same from the dense operator: one call for each sequence, in plain PyTorch."""

    def forward(leaves, options):
        rows, columns = bounds_of(case.queries).tolist(), bounds_of(case.keys).tolist()
        slopes, sinks = leaves.get("alibi_slopes"), leaves.get("sinks")
        # Gradients of what sequences share are summed in the precision of sums.
        sinks = None if sinks is None else sinks.to(case.grad_lse.dtype)
        parts = []
        for n in range(len(case.queries)):
            q = leaves["query"][rows[n] : rows[n + 1]]
            k, v = (leaves[name][columns[n] : columns[n + 1]] for name in ("key", "value"))
            each = slopes[n] if slopes is not None and slopes.dim() == 2 else slopes
            parts.append(
                fastattn.scaled_dot_product_attention(
                    *(t.transpose(0, 1) for t in (q, k, v)), alibi_slopes=each, enable_gqa=True,
                    sinks=sinks, return_lse=True, impl="reference",
                    **({"causal_alignment": "lower_right"} | options),
                )
            )  # fmt: skip
        out, lse = (torch.cat(p, 1) for p in zip(*parts, strict=True))
        return out.transpose(0, 1), lse

    return differentiate(case, forward)


def in_float64(case: Case) -> Case:
    wide = {n: t.double() for n, t in case.tensors().items()}
    return replace(case, **wide, grad_out=case.grad_out.double(), grad_lse=case.grad_lse.double())


def check(results: dict, case: Case) -> None:
    expected, plain = one_by_one(in_float64(case)), one_by_one(case)
    for name, result in results.items():
        exact = expected[name].numpy()
        assert result.dtype == plain[name].dtype
        # What numbers are summed from: about 1, and in the gradients of slopes distances, which cancel.
        size = abs(exact) + (max(case.queries + case.keys) if name == "grad_alibi_slopes" else 1.0)
        if name.startswith("grad") and name != "grad_query":  # sums over queries: of an only key they cancel
            size = size * max(case.queries, default=1) ** 0.5
        if name.startswith("grad") and result.dtype == torch.float64:
            # The oracle has no error here to measure by. Weights are exponentials of differences to
            # lse, and as exact as lse is; what they are multiplied with are sums over channels, which cancel.
            lse = expected["lse"]
            size = size * (1 + max(lse[lse.isfinite()].abs().tolist(), default=0.0) + case.value.shape[-1])
        compare(name, result, exact, size, plain[name], case.query.dtype)


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal from the upper left": {"is_causal": True, "causal_alignment": "upper_left"},
    "window": {"window_size": (9, 3)},
    "scale": {"scale": -0.3},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": "h", "is_causal": True},
    "alibi of each sequence": {"alibi": "nh"},
    "sinks": {"sinks": True},
    "grouped heads": {"H": 6, "Hkv": 2, "Dv": 5},
    "everything": {
        "H": 4, "Hkv": 2, "D": 12, "Dv": 7, "alibi": "nh", "sinks": True, "softcap": 2.0,
        "window_size": (30, 20), "scale": 0.4,
    },
}  # fmt: skip


def lengths_for(impl: str) -> tuple[tuple, tuple]:
    return fewer(impl, (QUERIES, KEYS), INTERPRETED)
