"""Inputs, calls and the checker that the attention tests share."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import attention_oracle as oracle
import operator_checks
import pytest
import torch
from operator_checks import compare, on_device, require, running

import fastattn

IMPLEMENTATIONS = ("reference", "cpu", "triton")
INPUTS = ("query", "key", "value", "attn_mask", "alibi_slopes", "sinks")


@pytest.fixture(params=IMPLEMENTATIONS)
def impl(request) -> Iterator[str]:
    with running(request.param) as name:
        yield name


@pytest.fixture(params=("reference", "cpu"))
def dispatched(request) -> str:
    """Those that what surrounds the kernels is tested with; Triton's interpreter would take its time."""
    return require(request.param)


def thin(impl: str, cases: tuple) -> tuple:
    """The first of a test's cases where each takes the interpreter a second."""
    return cases[:1] if impl == "triton" else cases


def choices(dtypes, interpreted):
    """Every implementation with every dtype; in Triton's interpreter, which takes its time, with fewer."""
    pairs = [(i, d) for i in IMPLEMENTATIONS for d in (interpreted if i == "triton" else dtypes)]
    return pytest.mark.parametrize("impl, dtype", pairs, ids=str, indirect=["impl"])


@dataclass
class Case:
    """One call: tensors in four dimensions, options, incoming gradients, the seed of torch's generator."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_out: torch.Tensor
    grad_lse: torch.Tensor
    attn_mask: torch.Tensor | None = None
    key_padding_mask: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    options: dict = field(default_factory=dict)
    seed: int = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {name: getattr(self, name) for name in INPUTS}
        return {name: t for name, t in named.items() if t is not None and t.dtype != torch.bool}


def make_case(
    B=2, H=2, Hkv=None, L=5, S=None, D=8, Dv=None, dtype=torch.float64, *, mask=None, mask_shape="bhls",
    mask_dtype=None, padding=False, alibi=None, sinks=False, sinks_dtype=None, seed=0, **options,
) -> Case:  # fmt: skip
    """``mask``: None, "bool" or "float", full in the dimensions of ``mask_shape``; ``alibi``: "h" or "bh"."""
    Hkv, S, Dv = Hkv or H, L if S is None else S, D if Dv is None else Dv
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def chance(p, *shape):
        return torch.rand(*shape, generator=generator) < p

    case = Case(
        normal(B, H, L, D), normal(B, Hkv, S, D), normal(B, Hkv, S, Dv), normal(B, H, L, Dv),
        normal(B, H, L, dtype=wide), options=options, seed=seed,
    )  # fmt: skip
    if mask:
        shape = [n if letter in mask_shape else 1 for letter, n in zip("bhls", (B, H, L, S), strict=True)]
        hidden = chance(0.3, *shape)
        if "l" in mask_shape and L > 2:
            hidden[:, :, 1] = True
        case.attn_mask = ~hidden if mask == "bool" else normal(*shape, dtype=mask_dtype or dtype)
        if mask == "float":
            case.attn_mask.masked_fill_(hidden, -math.inf)
    if padding:
        case.key_padding_mask = chance(0.7, B, S)
    if alibi:
        case.alibi_slopes = normal(*((B, H) if alibi == "bh" else (H,)), dtype=wide) / 4
    if sinks:
        case.sinks = normal(H, dtype=sinks_dtype or dtype)
    return case


@on_device
def call(case: Case, impl: str, *, only=None, lse=True, out=True, **changed) -> dict[str, torch.Tensor]:
    """Runs the public function and its backward: out, lse and grad_<input> of each input (or of ``only``)."""
    torch.manual_seed(case.seed)
    leaves = {name: getattr(case, name) for name in (*INPUTS, "key_padding_mask")}
    wanted = case.tensors() if only is None else only
    # detach keeps strides, and turns views of other leaves into leaves.
    leaves = {n: t if t is None else t.detach().requires_grad_(n in wanted) for n, t in leaves.items()}
    gqa = case.key.shape[1] != case.query.shape[1]
    result = fastattn.scaled_dot_product_attention(
        **leaves, enable_gqa=gqa, return_lse=True, impl=impl, **(case.options | changed)
    )
    outputs, incoming = [], []
    for output, gradient, used in zip(result, (case.grad_out, case.grad_lse), (out, lse), strict=True):
        # The reference knows that lse does not depend on the values.
        if used and output.requires_grad:
            outputs.append(output)
            incoming.append(gradient)
    results = {"out": result[0].detach(), "lse": result[1].detach()}
    if wanted:
        wanted_leaves = [leaves[n] for n in wanted]
        gradients = [None] * len(wanted_leaves)
        if outputs:
            gradients = torch.autograd.grad(outputs, wanted_leaves, incoming, allow_unused=True)
        for name, gradient in zip(wanted, gradients, strict=True):
            results[f"grad_{name}"] = torch.zeros_like(leaves[name]) if gradient is None else gradient
    return results


def dropout_seed(case: Case) -> int:
    torch.manual_seed(case.seed)
    return int(torch.randint(0, 2**63 - 1, (1,), device=operator_checks.device))


def exact(case: Case, *, lse=True, out=True) -> tuple[dict, dict]:
    """Results and magnitudes from the float64 oracle."""

    def array(t):
        return (
            None
            if t is None
            else t.detach().numpy()
            if t.dtype == torch.bool
            else t.detach().double().numpy()
        )

    options = dict(case.options)
    (B, H, L, D), S = case.query.shape, case.key.shape[2]
    dropout_p = options.pop("dropout_p", 0.0)
    scale = options.pop("scale", None)
    return oracle.attention(
        *map(array, (case.query, case.key, case.value, case.attn_mask, case.key_padding_mask)),
        *map(array, (case.alibi_slopes, case.sinks)),
        scale=D**-0.5 if scale is None else scale,
        window=options.pop("window_size", (-1, -1)),
        lower_right=options.pop("causal_alignment", "upper_left") == "lower_right",
        keep=oracle.keep_mask(dropout_seed(case), dropout_p, B, H, L, S) if dropout_p else None,
        dropout_p=dropout_p,
        score_rounding=torch.finfo(case.grad_lse.dtype).eps / torch.finfo(case.query.dtype).eps,
        grad_out=array(case.grad_out) * out,
        grad_lse=array(case.grad_lse) * lse,
        **options,
    )


def plain(case: Case, *, lse=True, out=True) -> dict[str, torch.Tensor]:
    """What a user would write in PyTorch, every step in the case's own dtype: the yardstick of precision."""
    leaves = {n: getattr(case, n) for n in INPUTS}
    leaves = {
        n: t.detach().clone().requires_grad_(t.dtype != torch.bool)
        for n, t in leaves.items()
        if t is not None
    }
    query, key, value = leaves["query"], leaves["key"], leaves["value"]
    (B, H, L, D), (Hkv, S), o = query.shape, key.shape[1:3], case.options
    right = o.get("causal_alignment", "upper_left") == "lower_right"
    left_window, right_window = o.get("window_size", (-1, -1))
    key, value = (t.repeat_interleave(H // Hkv, 1) for t in (key, value))
    scale = o.get("scale")
    score = query @ key.mT * (D**-0.5 if scale is None else scale)
    if o.get("softcap"):
        score = o["softcap"] * torch.tanh(score / o["softcap"])
    distance = torch.arange(L).view(L, 1) + (S - L if right else 0) - torch.arange(S)
    hidden = torch.zeros(L, S, dtype=torch.bool)
    if left_window >= 0:
        hidden |= distance > left_window
    if right_window >= 0:
        hidden |= -distance > right_window
    if o.get("is_causal"):
        hidden |= distance < 0
    hidden = hidden.expand(B, H, L, S)
    if case.attn_mask is not None:
        mask = leaves["attn_mask"]
        if mask.dtype == torch.bool:
            hidden = hidden | ~mask
        else:
            hidden = hidden | (mask == -math.inf)
            score = score + mask.masked_fill(mask == -math.inf, 0.0).to(score.dtype)
    if case.alibi_slopes is not None:
        score = score - (leaves["alibi_slopes"].view(-1, H, 1, 1) * distance.abs()).to(score.dtype)
    if case.key_padding_mask is not None:
        hidden = hidden | ~case.key_padding_mask.view(B, 1, 1, S)
    empty = hidden.all(-1, keepdim=True)
    score = score.masked_fill(hidden, -math.inf)
    logits = score
    if case.sinks is not None:
        logits = torch.cat([score, leaves["sinks"].to(score.dtype).view(1, H, 1, 1).expand(B, H, L, 1)], -1)
        weights = torch.softmax(logits, -1)[..., :S]
        result_lse = torch.logsumexp(logits, -1)
    else:
        logits = logits.masked_fill(empty, 0.0)
        weights = torch.softmax(logits, -1).masked_fill(hidden, 0.0)
        result_lse = torch.logsumexp(logits, -1).masked_fill(empty.squeeze(-1), -math.inf)
    if o.get("dropout_p"):
        p = o["dropout_p"]
        keep = torch.from_numpy(oracle.keep_mask(dropout_seed(case), p, B, H, L, S))
        weights = weights * keep * (1 / (1 - p) if p < 1 else 0.0)
    result = weights @ value
    outputs = ([result] if out else []) + ([result_lse] if lse else [])
    incoming = ([case.grad_out] if out else []) + ([case.grad_lse.to(result_lse.dtype)] if lse else [])
    names = list(case.tensors())
    gradients = torch.autograd.grad(outputs, [leaves[n] for n in names], incoming, allow_unused=True)
    results = {"out": result.detach(), "lse": result_lse.detach()}
    for name, gradient in zip(names, gradients, strict=True):
        results[f"grad_{name}"] = torch.zeros_like(leaves[name]) if gradient is None else gradient
    return results


def check(actual: dict, case: Case, strict: bool = False, **used) -> None:
    """Every result against the oracle, in the measure of :func:`operator_checks.compare`."""
    expected, size = exact(case, **used)
    yardstick = plain(case, **used)
    for name, result in actual.items():
        compare(name, result, expected[name], size[name], yardstick[name], case.query.dtype, strict)
