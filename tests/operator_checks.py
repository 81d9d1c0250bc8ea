"""What the tests of every operator share: its implementations, poisoned memory, and the measure of errors."""

import shutil

import numpy as np
import pytest
import torch

from fastattn import _choose


def require(impl: str, op: str = "fastattn::attention_forward") -> str:
    """The kernel may only be absent where it cannot be built; anywhere else its absence is a failure."""
    reason = _choose.candidates(_choose.Request("cpu", torch.float32, (), op))[impl]
    if reason is not None:
        if not any(shutil.which(c) for c in ("c++", "g++", "clang++")):
            pytest.skip(reason)
        pytest.fail(f"{impl}: {reason}")
    return impl


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that PyTorch hands out uninitialised holds NaN, so that reading it before writing shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def compare(
    name: str,
    result: torch.Tensor,
    exact: np.ndarray,
    size: np.ndarray,
    plain: torch.Tensor,
    dtype: torch.dtype,
    strict: bool = False,
) -> None:
    """The error to float64 is at most twice that of plain PyTorch in the same dtype, plus one rounding.

    As a root mean square over the tensor. Where there are too few numbers or keys for such statistics, which
    is everywhere but in ``strict`` checks of larger inputs, one rounding more is granted of ``size``, the
    magnitude of the terms that a result is summed from: those of a gradient may cancel down to zero.
    """
    have, naive = result.double().numpy(), plain.double().numpy()
    assert have.shape == exact.shape, f"{name}: shape {have.shape}, not {exact.shape}"
    # Infinities (lse of empty rows) have to be equal; errors are taken over the rest.
    finite = np.isfinite(exact)
    assert np.array_equal(have[~finite], exact[~finite]), (
        f"{name}: infinite where the oracle is not, or not where it is"
    )
    error, naive_error = rms(have[finite] - exact[finite]), rms(naive[finite] - exact[finite])
    bound = 2 * naive_error + torch.finfo(result.dtype).eps * rms(exact[finite])
    if not strict or exact.size < 100:
        bound += 3 * torch.finfo(dtype).eps * rms(size[finite])
    assert error <= bound, f"{name}: error {error:.3e}, allowed {bound:.3e}, plain PyTorch {naive_error:.3e}"
