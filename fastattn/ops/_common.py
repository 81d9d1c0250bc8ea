"""What the operators share: how an op is registered, called, mapped and put under autograd, and how arguments
are checked."""

import functools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _dispatch_keys,
    _get_tracing_state,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
)
from torch._C._autograd import _profiler_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from fastattn._choose import KERNEL_DTYPES
from fastattn.reference._common import wide_dtype

__all__ = [
    "CPU_KEYS", "apply_function", "are_plain", "autocast_dtype", "call_in_backward", "call_op", "check_dense",
    "check_flags", "integer", "is_plain", "is_watched", "library", "logical_dim", "logical_size", "map_each",
    "may_skip_dispatcher", "needs_function", "number", "register_autograd", "wide_dtype",
]  # fmt: skip

library = torch.library.Library("fastattn", "FRAGMENT")

CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_SCALARS = frozenset((float, int, bool, str))


def is_watched() -> bool:
    """Whether a transform, mode, tracer or profiler wants to see each op pass through the dispatcher."""
    return (
        _are_functorch_transforms_active()
        or _len_torch_dispatch_stack() > 0
        or _get_tracing_state() is not None
        or _profiler_enabled()
    )


def _plain_keys() -> frozenset[int]:
    with torch.inference_mode():
        inference = torch.empty(0, device="cpu")
    return frozenset(_dispatch_keys(t).raw_repr() for t in (torch.empty(0, device="cpu"), inference))


_PLAIN_KEYS = _plain_keys()


def is_plain(tensor: Tensor) -> bool:
    """Whether this is a dense CPU tensor and nothing more, so that the dispatcher has nothing to do."""
    return _dispatch_keys(tensor).raw_repr() in _PLAIN_KEYS


def may_skip_dispatcher(*tensors: Tensor | None) -> bool:
    """Whether a CPU kernel may be called with these directly: nothing to convert, to differentiate or to
    resolve. In few steps: on tiny inputs the dispatcher, and a closer look, take longer than the kernel. What
    else is no plain tensor in memory the kernel refuses itself."""
    recording = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None and (
            tensor.__class__ is not Tensor
            or not tensor.is_cpu
            or tensor.is_nested
            or tensor.is_neg()
            or (recording and tensor.requires_grad)
        ):
            return False
    return forward_ad._current_level < 0 and not _is_any_autocast_enabled() and not is_watched()


def call_op(op, *args):
    """The op without its derivative: that is the business of whoever calls."""
    if is_compiling():
        return op(*args)
    if not is_watched() and are_plain(args):
        # Straight to the CPU kernel where nothing between could matter: a small call costs a third less.
        return op._handle.redispatch_boxed(CPU_KEYS, *args)
    if _get_tracing_state() is not None:
        return op(*args)  # with its derivative, see needs_function
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def call_in_backward(op, *args):
    """The op where no derivative is wanted, in a backward pass.

    autograd.grad(is_grads_batched=True) maps over it without telling anyone but the dispatcher, which so has
    to see whatever is not plain.
    """
    if not is_compiling() and not is_watched() and are_plain(args):
        return op._handle.redispatch_boxed(CPU_KEYS, *args)
    return op(*args)


def are_plain(args: Sequence) -> bool:
    for arg in args:
        if arg is None:
            continue
        kind = arg.__class__
        if kind is Tensor or kind is torch.nn.Parameter:
            # Negations that are still to be done, zeros without memory, and the wrappers of
            # autograd.grad(is_grads_batched=True) are resolved by the dispatcher. Modes like accelerate()
            # look at each attribute of a tensor that is asked for, but not at this.
            if _dispatch_keys(arg).raw_repr() not in _PLAIN_KEYS:
                return False
        elif kind not in _SCALARS:  # a subclass of Tensor
            return False
    return True


def needs_function(tensors: Sequence[Tensor | None]) -> bool:
    """Whether autograd has to see the call: for a gradient, a transform, or a clear error in forward mode.

    Not where torch.jit.trace writes the call down: an op brings its derivative along, and a Function could
    neither be saved nor be found again without gradients.
    """
    return (
        _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or (
            torch.is_grad_enabled()
            and any(t is not None and t.requires_grad for t in tensors)
            and _get_tracing_state() is None
        )
    )


def apply_function(function, *args):
    if is_compiling():
        # Tracing refuses one tensor as two arguments, and does not notice that a tensor requires a gradient
        # since parts of it were written to. A view is another tensor, and it is noticed there.
        args = [a.view_as(a) if isinstance(a, Tensor) else a for a in args]
        return function.apply(*args)
    if _are_functorch_transforms_active():
        return function.apply(*args)
    return _in_one_call(function)(*args)


@functools.cache
def _in_one_call(function):
    """The apply of the same function as autograd alone needs it, without a transform or a tracer.

    Where setup_context is on its own, torch binds the arguments by the signature of forward at each call, in
    Python (2.13) or from C++ (2.14): that takes longer than a small kernel.
    """

    def forward(ctx, *args):
        output = function.forward(*args)
        function.setup_context(ctx, args, output)
        return output

    names = {"forward": staticmethod(forward), "backward": staticmethod(function.backward)}
    joined = type(function.__name__, (torch.autograd.Function,), names)
    # What Function.apply calls in the end: it would look for transforms first.
    return super(torch.autograd.Function, joined).apply


def register_autograd(name: str, op, function, *more) -> None:
    """Gives the bare op its derivative too: called directly, it must not lose a gradient silently.

    ``more`` are arguments of the function that the op does not have.
    """
    defaults = [argument.default_value for argument in op._schema.arguments]

    def kernel(*args):
        if needs_function([a for a in args if isinstance(a, Tensor)]):
            # Arguments that have their default are not among those that arrive here.
            return apply_function(function, *args, *defaults[len(args) :], *more)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    library.impl(name, kernel, "Autograd")


def map_each(function, info, in_dims, args):
    results = []
    for n in range(info.batch_size):
        element = (a if d is None else a.select(d, n) for a, d in zip(args, in_dims, strict=True))
        results.append(function.apply(*element))
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(torch.stack(r) for r in zip(*results, strict=True)), (0,) * len(results[0])


def logical_size(tensor: Tensor, mapped: int | None, dim: int) -> int:
    return tensor.shape[dim] if mapped is None else tensor.movedim(mapped, 0).shape[dim + 1]


def logical_dim(tensor: Tensor, mapped: int | None) -> int:
    return tensor.dim() - (mapped is not None)


def check_dense(names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    """Dense tensors on one device; the first three, query, key and value, are there and of one dtype."""
    query = tensors[0]
    for n, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
        if tensor is None and n >= 3:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(tensor).__name__}")
        if tensor.is_nested or tensor.layout != torch.strided:
            raise NotImplementedError(
                f"{name} must be a dense tensor; nested and sparse ones are not supported"
            )
        if tensor.device != query.device:
            raise RuntimeError(
                f"{name} is on {tensor.device}, query on {query.device}: all must be on one device"
            )
    for name, tensor in zip(names[:3], tensors[:3], strict=True):
        if tensor.dtype not in KERNEL_DTYPES:
            raise RuntimeError(f"{name} must be float32, float64, bfloat16 or float16, got {tensor.dtype}")
        if tensor.dtype != query.dtype:
            raise RuntimeError(
                f"{name} is {tensor.dtype}, query {query.dtype}: query, key and value must agree"
            )


def number(name: str, given) -> float:
    if isinstance(given, (float, int)) and not isinstance(given, bool):
        try:
            return float(given)
        except OverflowError:
            raise ValueError(f"{name} is too large: {given}") from None
    if isinstance(given, Tensor) and given.requires_grad:
        raise TypeError(
            f"{name} must be a number, got a tensor that requires a gradient, which it cannot have"
        )
    if isinstance(given, (str, bytes, bytearray)):
        raise TypeError(f"{name} must be a number, got {given!r}")
    try:
        return float(given)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a number, got {given!r}") from None


def integer(name: str, given, least: float = 0) -> int:
    """The integer that is given, also as one of numpy's or as a tensor of one element; no boolean."""
    if isinstance(given, bool) or not isinstance(given, (int, torch.SymInt)):
        try:
            if isinstance(given, bool) or str(getattr(given, "dtype", "")).endswith("bool"):
                raise TypeError
            given = operator.index(given)
        except TypeError:
            raise TypeError(f"{name} must be an integer, got {given!r}") from None
    if given < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {given}")
    return given


def check_flags(**flags) -> None:
    for name, given in flags.items():
        if not isinstance(given, (int, torch.SymBool)):
            raise TypeError(f"{name} must be a bool, got {given!r}")


def autocast_dtype(tensor) -> torch.dtype | None:
    """The dtype that autocast asks for on the tensor's device; None where it is off."""
    if not isinstance(tensor, Tensor):
        return None
    kind = tensor.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)
