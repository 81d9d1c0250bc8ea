"""What the tests of every operator share: poisoned memory, layouts, compilation, the measure of errors."""

import functools
import inspect
import math
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastattn import Graph, _choose, _triton
from fastattn.ops import _attention_call, linear_attention

CPU = torch.device("cpu")
device = CPU  # that of what runs now


def moved(value, to: torch.device):
    """A tensor, or what a dictionary, a case or a graph holds of them, on a device, as it lies in memory."""
    if isinstance(value, torch.Tensor):
        if value.device == to:
            return value
        # All of its memory: what is between its elements, or before them, is a part of some tests.
        memory = value.detach().as_strided((value.untyped_storage().nbytes() // value.itemsize,), (1,), 0)
        there = memory.to(to).as_strided(value.shape, value.stride(), value.storage_offset())
        return there.requires_grad_(value.requires_grad)
    if isinstance(value, Graph):
        return value.to(to)
    if isinstance(value, dict):
        return {name: moved(v, to) for name, v in value.items()}
    if is_dataclass(value):
        return replace(value, **{f.name: moved(getattr(value, f.name), to) for f in fields(value)})
    return value


def on_device(call):
    """call(case, ...) of a case on the CPU, computed on the device of what runs now."""

    @functools.wraps(call)
    def run(case, *args, **kwargs):
        if device == CPU:
            return call(case, *args, **kwargs)
        args = [moved(a, device) for a in args]
        return moved(call(moved(case, device), *args, **moved(kwargs, device)), CPU)

    return run


def require(impl: str, op: str = "fastattn::attention_forward") -> str:
    """The kernel may only be absent where it cannot be built; anywhere else its absence is a failure."""
    reason = _choose.candidates(_choose.Request(device.type, torch.float32, (), op))[impl]
    if reason is not None:
        if not any(shutil.which(c) for c in ("c++", "g++", "clang++")):
            pytest.skip(reason)
        pytest.fail(f"{impl}: {reason}")
    return impl


@functools.cache
def quicken_interpreter() -> None:
    """At each call of a device function it searches Triton's language for what it replaces: a quarter of its
    time, for what never changes."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    builtins = functools.cache(lambda module: inspect.getmembers(module, is_builtin))
    interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": builtins})


@contextmanager
def running(impl: str, op: str = "fastattn::attention_forward") -> Iterator[str]:
    """Inside, the implementation runs on the CPU: Triton's kernels in its interpreter, whoever calls ops.

    Where there is a GPU, Triton's kernels run on that instead, for calls that :func:`on_device` takes there.
    """
    global device
    if impl == "triton" and torch.accelerator.is_available():
        device = torch.device(torch.accelerator.current_accelerator().type, 0)
        try:
            yield require(impl, op)
        finally:
            device = CPU
        return
    if impl == "triton":
        reason = _triton.cannot_interpret()
        # On Linux Triton comes with what the tests require.
        if reason is not None and sys.platform != "linux":
            pytest.skip(reason)
        assert reason is None, reason
        quicken_interpreter()
        # Calls that were seen to take the native kernel.
        _attention_call._common_dtypes.clear()
        linear_attention._plain_dtypes.clear()
    with _triton.interpreter() if impl == "triton" else nullcontext():
        yield require(impl, op)


# For what surrounds the kernels, or calls them so often that Triton's interpreter would take its time.
NATIVE = pytest.mark.parametrize("impl", ("reference", "cpu"), indirect=True)


def fewer(impl: str, all_of_them, interpreted):
    """What a test goes through: in Triton's interpreter, which takes its time, less."""
    return interpreted if impl == "triton" else all_of_them


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that PyTorch hands out uninitialised holds NaN, so that reading it before writing shows."""
    before = torch.are_deterministic_algorithms_enabled()
    # On GPUs some functions of PyTorch, which the references use, have no deterministic form.
    torch.use_deterministic_algorithms(True, warn_only=torch.accelerator.is_available())
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


def assert_same(results: dict, expected: dict, exact: bool = True, what: str = "") -> None:
    for name, result in results.items():
        if exact:
            assert torch.equal(result, expected[name]), f"{name} {what}"
        else:
            torch.testing.assert_close(result, expected[name], msg=lambda m, n=name: f"{n} {what}: {m}")


LAYOUTS = {
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "heads last": lambda t: t.transpose(0, -2).contiguous().transpose(0, -2),
    "reversed": lambda t: (
        t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim())))
    ),
    "sliced": lambda t: torch.stack((t, t * math.nan if t.is_floating_point() else ~t), -1)[..., 0],
    "padded": lambda t: torch.nn.functional.pad(t, (1, 2), value=True)[..., 1:-2],
}


def check_layout(case, names, layout: str, call, exact: bool, halves: bool = False) -> None:
    """Each of the named tensors in another layout gives the same results; nothing given is written to.

    ``halves``: every other one at once, then the rest, so that one is never mistaken for its neighbour.
    """
    expected = call(case)
    names = [n for n in names if getattr(case, n).dim() > 1 or layout == "sliced"]
    for chosen in (names[::2], names[1::2]) if halves else ([n] for n in names):
        tensors = {name: getattr(case, name) for name in chosen}
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            setattr(case, name, LAYOUTS[layout](tensor))
        assert_same(call(case), expected, exact, f"with {layout} {', '.join(chosen)}")
        for name, tensor in tensors.items():
            assert getattr(case, name).equal(before[name])
            setattr(case, name, tensor)


def with_each(tensors, make):
    """Argument lists with one tensor, and with all, passed through ``make``."""
    for chosen in (*[[n] for n in range(len(tensors))], range(len(tensors))):
        yield [make(t) if n in chosen else t for n, t in enumerate(tensors)], chosen


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers as a negation that is still to be done."""
    twin = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert twin.is_neg() and torch.equal(twin, tensor)
    return twin


def check_compiled(
    function, inputs, *fixed, dynamic=None, sizes=(5, 8, 1, 33, 64), gradients=(False, True)
) -> None:
    """function(*inputs(size), *fixed) in one graph: the eager numbers, and at most three compilations."""
    from torch._dynamo.testing import CompileCounterWithBackend  # takes as long as torch itself

    for wanted in gradients:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=counter)
        for size in sizes:
            given = inputs(size)
            results = []
            for run in (compiled, function):
                leaves = [t.clone().requires_grad_(wanted and t.is_floating_point()) for t in given]
                torch.manual_seed(0)
                outputs = run(*leaves, *fixed)
                if wanted:
                    sum(t.sin().sum() for t in outputs).backward()
                results.append([*outputs, *(t.grad for t in leaves)])
            torch.testing.assert_close(*results)
        assert counter.frame_count <= 3


def check_compiled_of_parts(function, inputs, *fixed) -> None:
    """Gradients reach what one input, or each, was put together from by copies within the compiled code."""

    def assembled(tensor):
        whole = torch.empty_like(tensor)
        half = max(1, tensor.shape[-1] // 2)
        whole[..., :half].copy_(tensor[..., :half])
        whole[..., half:].copy_(tensor[..., half:])
        return whole

    floating = [n for n, t in enumerate(inputs) if t.is_floating_point()]
    for chosen in (*([n] for n in floating), floating):

        def put_together(*given, chosen=chosen):
            given = [assembled(t) if n in chosen else t for n, t in enumerate(given)]
            return function(*given, *fixed)

        results = []
        torch._dynamo.reset()
        for run in (torch.compile(put_together, fullgraph=True, backend="eager"), put_together):
            leaves = [t.clone().requires_grad_(n in floating) for n, t in enumerate(inputs)]
            torch.manual_seed(0)
            sum(t.sin().sum() for t in run(*leaves)).backward()
            results.append([t.grad for t in leaves])
        torch.testing.assert_close(*results)
