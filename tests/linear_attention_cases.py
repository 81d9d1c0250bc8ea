"""Inputs, calls and the checker that the tests of linear attention share."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import linear_attention_oracle as oracle
import numpy as np
import pytest
import torch
from operator_checks import compare, on_device, running
from operator_checks import require as require_op

import fastattn
from fastattn import LinearAttentionState

IMPLEMENTATIONS = ("reference", "cpu", "triton")
INPUTS = ("query", "key", "value", "decay", "initial_kv", "initial_z")
OUTPUTS = ("out", "kv", "z")
FEATURES = {
    "elu": lambda x: torch.nn.functional.elu(x) + 1,
    "relu": torch.relu,
    "exp": torch.exp,
    "identity": lambda x: x,
}


def require(impl: str) -> str:
    return require_op(impl, "fastattn::linear_attention_forward")


@pytest.fixture(params=IMPLEMENTATIONS)
def impl(request) -> Iterator[str]:
    with running(request.param, "fastattn::linear_attention_forward") as name:
        yield name


@pytest.fixture(params=("reference", "cpu"))
def dispatched(request) -> str:
    """Those that what surrounds the kernels is tested with; Triton's interpreter would take its time."""
    return require(request.param)


@dataclass
class Case:
    """One call: tensors in the four dimensions of the ops, options, and the incoming gradients."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_out: torch.Tensor
    grad_kv: torch.Tensor
    grad_z: torch.Tensor
    decay: torch.Tensor | None = None
    key_padding_mask: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    initial_kv: torch.Tensor | None = None
    initial_z: torch.Tensor | None = None
    options: dict = field(default_factory=dict)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: t for name in INPUTS if (t := getattr(self, name)) is not None}


def make_case(
    B=2, H=2, Hkv=None, L=5, S=None, D=8, Dv=None, dtype=torch.float64, *, decay=None, decay_dtype=None,
    padding=None, lengths=None, initial=False, seed=0, **options,
) -> Case:  # fmt: skip
    """``decay``: None, "head" or "token", or "reset" per token with some -inf; ``padding``: None, "left",
    "right", "random"; ``lengths``: those of packed sequences."""
    if lengths is not None:
        B, L = 1, sum(lengths)
    Hkv, S, Dv = Hkv or H, L if S is None else S, D if Dv is None else Dv
    N = B if lengths is None else len(lengths)
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def uniform(*shape, dtype=wide):
        return torch.rand(*shape, generator=generator, dtype=torch.float64).to(dtype)

    case = Case(
        normal(B, H, L, D), normal(B, Hkv, S, D), normal(B, Hkv, S, Dv), normal(B, H, L, Dv),
        normal(N, H, D, Dv, dtype=wide), normal(N, H, D, dtype=wide), options=options,
    )  # fmt: skip
    if options.get("feature_map") == "identity" and options.get("normalize", True):
        # Weights of mixed sign may cancel in the denominator: no error bound holds there.
        case.query, case.key = case.query.abs() + 0.25, case.key.abs() + 0.25
    if decay is not None:
        case.decay = -uniform(*((H,) if decay == "head" else (B, H, L))).to(decay_dtype or wide)
        if decay == "reset":
            case.decay.masked_fill_(uniform(B, H, L) < 0.15, -math.inf)
    if padding == "random":
        case.key_padding_mask = uniform(B, S) < 0.7
    elif padding is not None:
        kept = torch.randint(0, S + 1, (B, 1), generator=generator)
        position = torch.arange(S)
        case.key_padding_mask = position < kept if padding == "right" else position >= S - kept
    if lengths is not None:
        case.cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    if initial:
        # The normaliser of positive features is positive.
        case.initial_kv, case.initial_z = normal(N, H, D, Dv, dtype=wide), uniform(N, H, D)
    return case


def arguments(case: Case, leaves: dict) -> dict:
    """The arguments of the public function: packed sequences have no dimension of batches there."""
    given = {name: leaves[name] for name in ("query", "key", "value", "decay")}
    if case.cu_seqlens is not None:
        for name, tensor in given.items():
            if tensor is not None and tensor.dim() > 1:
                given[name] = tensor.squeeze(0).transpose(0, 1)
    if leaves["initial_kv"] is not None:
        given["initial_state"] = LinearAttentionState(leaves["initial_kv"], leaves["initial_z"])
    return given | {"key_padding_mask": case.key_padding_mask, "cu_seqlens": case.cu_seqlens} | case.options


def leaves_of(case: Case, wanted) -> dict[str, torch.Tensor | None]:
    # detach keeps strides, and turns views of other leaves into leaves.
    named = {name: getattr(case, name) for name in INPUTS}
    return {n: t if t is None else t.detach().requires_grad_(n in wanted) for n, t in named.items()}


def gradients(outputs: dict, case: Case, leaves: dict, wanted, used) -> dict[str, torch.Tensor]:
    """grad_<input> of each input, from the incoming gradients of the case."""
    chosen = [n for n in used if outputs[n].requires_grad]
    results = [None] * len(wanted)
    if chosen and wanted:
        results = torch.autograd.grad(
            [outputs[n] for n in chosen], [leaves[n] for n in wanted],
            [getattr(case, f"grad_{n}").to(outputs[n].dtype) for n in chosen], allow_unused=True,
        )  # fmt: skip
    return {
        f"grad_{n}": torch.zeros_like(leaves[n]) if gradient is None else gradient
        for n, gradient in zip(wanted, results, strict=True)
    }


@on_device
def call(case: Case, impl: str, *, only=None, used=OUTPUTS, **changed) -> dict[str, torch.Tensor]:
    """Runs the public function and its backward: outputs and grad_<input> of each input (or of ``only``)."""
    wanted = list(case.tensors()) if only is None else list(only)
    leaves = leaves_of(case, wanted)
    given = arguments(case, leaves) | changed
    out, state = fastattn.linear_attention(**given, return_state=True, impl=impl)
    if case.cu_seqlens is not None:
        out = out.transpose(0, 1).unsqueeze(0)
    outputs = {"out": out, "kv": state.kv, "z": state.z}
    detached = {name: t.detach() for name, t in outputs.items()}
    return detached | gradients(outputs, case, leaves, wanted, used)


def exact(case: Case, used=OUTPUTS) -> tuple[dict, dict]:
    """Results and magnitudes from the float64 oracle."""

    def array(t):
        if t is None or not t.is_floating_point():
            return None if t is None else t.numpy()
        return t.detach().double().numpy()

    incoming = {f"grad_{n}": array(getattr(case, f"grad_{n}")) * (n in used) for n in OUTPUTS}
    names = ("query", "key", "value", "decay", "key_padding_mask", "cu_seqlens", "initial_kv", "initial_z")
    return oracle.linear_attention(*(array(getattr(case, n)) for n in names), **case.options, **incoming)


def plain(case: Case, used=OUTPUTS) -> dict[str, torch.Tensor]:
    """What a user would write in PyTorch, every step in the case's own dtype: the yardstick of precision."""
    o, wanted, dtype = case.options, list(case.tensors()), case.query.dtype
    leaves = leaves_of(case, wanted)
    normalize, eps = o.get("normalize", True), o.get("eps", 1e-6)
    scale = 1.0 if o.get("scale") is None else o["scale"]
    if case.cu_seqlens is None:
        pieces = [(slice(None), slice(None))]
    else:
        bounds = case.cu_seqlens.tolist()
        pieces = [
            (slice(a, b), slice(n, n + 1)) for n, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False))
        ]
    results = []
    for rows, at in pieces:
        piece = _plain_piece(
            case, leaves, rows, at, FEATURES[o.get("feature_map", "elu")], o.get("is_causal")
        )
        num, den, kv, z = piece
        if normalize:
            live = (den != 0) & (den + eps != 0)
            out = torch.where(live, num / torch.where(live, den + eps, 1.0), 0.0)
        else:
            out = num * scale
        results.append((out, kv, z))
    joined = [torch.cat(t, d) for t, d in zip(zip(*results, strict=True), (2, 0, 0), strict=True)]
    outputs = dict(zip(OUTPUTS, joined, strict=True))
    detached = {name: t.detach() for name, t in outputs.items()}
    assert detached["out"].dtype == dtype
    return detached | gradients(outputs, case, leaves, wanted, used)


def _plain_piece(case, leaves, rows, at, phi, is_causal):
    query, key, value = (leaves[n][:, :, rows] for n in ("query", "key", "value"))
    (B, H, L, _), (Hkv, S), dtype = query.shape, key.shape[1:3], query.dtype
    q, k = phi(query), phi(key)
    if case.key_padding_mask is not None:
        k = k * case.key_padding_mask.view(B, 1, S, 1)
        value = value * case.key_padding_mask.view(B, 1, S, 1)
    k, value = (t.repeat_interleave(H // Hkv, 1) for t in (k, value))
    weights = q @ k.mT
    end, start, whole = k, q, 1.0
    if is_causal:
        weights = weights * torch.ones(L, L, dtype=torch.bool).tril()
    if case.decay is not None and L > 0:
        decay = leaves["decay"]
        decay = decay.view(1, H, 1).expand(B, H, L) if decay.dim() == 1 else decay[:, :, rows]
        if case.key_padding_mask is not None:
            decay = torch.where(case.key_padding_mask.view(B, 1, S), decay, 0.0)
        if dtype != torch.float64:
            decay = decay.float()
        erased = decay.exp() == 0
        resets, total = erased.cumsum(-1), torch.where(erased, 0.0, decay).cumsum(-1)
        same = (resets.unsqueeze(-1) == resets.unsqueeze(-2)) & torch.ones(L, L, dtype=torch.bool).tril()
        logs = torch.where(same, total.unsqueeze(-1) - total.unsqueeze(-2), -math.inf)
        weights = weights * logs.exp().to(dtype)
        start = q * torch.where(resets == 0, total, -math.inf).exp().to(dtype).unsqueeze(-1)
        end = k * logs[:, :, -1].exp().to(dtype).unsqueeze(-1)
        whole = torch.where(resets[..., -1] == 0, total[..., -1], -math.inf).exp().to(dtype)
        whole = whole[..., None, None]
    num, den = weights @ value, weights.sum(-1, keepdim=True)
    kv, z = end.mT @ value, end.sum(2)
    if case.initial_kv is not None:
        kv0, z0 = leaves["initial_kv"][at].to(dtype), leaves["initial_z"][at].to(dtype).unsqueeze(-1)
        num, den = num + start @ kv0, den + start @ z0
        kv, z = kv + whole * kv0, z + (whole * z0).squeeze(-1)
    return num, den, kv, z


def check(actual: dict, case: Case, strict: bool = False, used=OUTPUTS) -> None:
    """Every result against the oracle, in the measure of :func:`operator_checks.compare`."""
    expected, size = exact(case, used)
    yardstick = plain(case, used)
    for name, result in actual.items():
        like = case.query if name == "out" else getattr(case, name.removeprefix("grad_"), case.grad_z)
        assert result.dtype == like.dtype, f"{name}: {result.dtype}, not {like.dtype}"
        compare(name, result, expected[name], size[name], yardstick[name], case.query.dtype, strict)
