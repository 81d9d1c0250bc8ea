"""Which implementation computes a call, and why another one would not."""

from typing import NamedTuple

import torch

from fastattn import _native, _triton

__all__ = ["IMPLEMENTATIONS", "Request", "availability", "candidates", "choose", "is_worthwhile"]

IMPLEMENTATIONS = ("cpu", "triton", "cuda", "torch", "reference")

# What "auto" tries, in this order, by device type; the last one runs everything.
# - cpu: our kernel was faster than torch's at every size measured; where it is not built, torch's own CPU
#   kernel is no substitute, because it hides NaNs and lets masked ones through (see `_torch_cannot`).
# - elsewhere: torch's fused kernel where it computes the same function, plain PyTorch otherwise. Triton's
#   kernels have to be asked for until a GPU has measured them.
AUTO = {"cpu": ("cpu", "reference")}
AUTO_ELSEWHERE = ("torch", "reference")

# What accelerate() takes from torch: calls of at least so many products of a query's and a key's numbers,
# B H L S D. In smaller ones the steps in Python take longer than the kernel saves; a mask is read head by
# head, where torch adds it in one pass; of gradients in half precision torch has a slow kernel only, and of
# dropout none. Measured beside torch 2.13 on two cores of an AMX Xeon, 800 kinds of calls, 1 to 512 queries.
WORTHWHILE = {"plain": 2**21, "is_causal": 2**20, "attn_mask": 2**24, "half_gradients": 2**14}

TRITON_HEAD_DIM = 512
KERNEL_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Request(NamedTuple):
    """What decides the choice: device, dtype, and the names of the options that are not at their default.

    ``op`` is the registered op that a kernel has to implement for it, ``head_dim`` the widest of attention.
    """

    device: str
    dtype: torch.dtype
    options: tuple[str, ...]
    op: str = "fastattn::attention_forward"
    head_dim: int = 0


def _cpu_cannot(request: Request) -> str | None:
    if request.device != "cpu":
        return f"its tensors must be on the CPU, these are on {request.device}"
    if request.dtype not in KERNEL_DTYPES:
        return f"it has no {request.dtype} kernel"
    if _triton.replaces_native(request.op):
        return "Triton's interpreter stands in its place"
    reason = _native.missing()
    if reason is None and not _native.has_kernel(request.op):
        return "the CPU library that was built has no kernel of this operator"
    return reason


def _triton_cannot(request: Request) -> str | None:
    if request.dtype not in KERNEL_DTYPES:
        return f"it has no {request.dtype} kernel"
    if request.head_dim > TRITON_HEAD_DIM:
        return f"its tiles hold at most {TRITON_HEAD_DIM} channels of a head, these have {request.head_dim}"
    return _triton.missing(request.op, request.device)


def _torch_cannot(request: Request) -> str | None:
    if request.op != "fastattn::attention_forward":
        return "torch has no kernel that computes this operator"
    # torch masks by adding -inf, and NaN + -inf is NaN: what a mask hides would still reach the result. Empty
    # rows, log-sum-exp of them and every option torch lacks also differ; only the dense, unmasked call is the
    # same function.
    if request.options:
        return f"torch's kernels do not compute the same function with {', '.join(request.options)}"
    return None


def _absent(name: str):
    return lambda request: f"this version has no {name} kernel of this operator"


_CANNOT = {
    "cpu": _cpu_cannot,
    "triton": _triton_cannot,
    "cuda": _absent("cuda"),
    "torch": _torch_cannot,
    "reference": lambda request: None,
}


def candidates(request: Request) -> dict[str, str | None]:
    """For each implementation None if it can run the request, or the reason why not."""
    return {name: _CANNOT[name](request) for name in IMPLEMENTATIONS}


def availability() -> dict[str, str | None]:
    """For each implementation None if it can run a plain call on the CPU, or the reason why not."""
    return candidates(Request("cpu", torch.float32, ()))


def choose(request: Request, impl: str) -> str:
    """The implementation that runs: the first of AUTO that can, or exactly the one asked for."""
    if impl == "auto":
        for name in AUTO.get(request.device, AUTO_ELSEWHERE):
            if _CANNOT[name](request) is None:
                return name
    if impl not in IMPLEMENTATIONS:
        raise ValueError(
            f"impl must be 'auto' or one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {impl!r}"
        )
    reason = _CANNOT[impl](request)
    if reason is not None:
        raise NotImplementedError(f"impl={impl!r} cannot run this call: {reason}")
    return impl


def is_worthwhile(
    products: int, dtype: torch.dtype, masked: bool, causal: bool, dropout: bool, gradients: bool
) -> bool:
    """Whether attention of this size is at least as fast as torch's, all steps in Python included."""
    if gradients and dtype in (torch.bfloat16, torch.float16):
        kind = "half_gradients"
    else:
        kind = "attn_mask" if masked else "is_causal" if causal else "plain"
    return dropout or products >= WORTHWHILE[kind]
