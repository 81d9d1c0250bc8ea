"""Let code that calls PyTorch's attention run on fastattn, without a change to it."""

import functools
import inspect
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor, autograd
from torch._C import (
    _are_functorch_transforms_active,
    _get_tracing_state,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
)
from torch._C._functorch import TransformType, get_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.autograd.graph import _engine_run_backward
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from fastattn._choose import Request, choose, is_worthwhile
from fastattn.ops._attention_call import common_scale, wants_gradient
from fastattn.ops._common import autocast_dtype
from fastattn.ops.attention import scaled_dot_product_attention

__all__ = ["accelerate"]

_torch_attention = torch._C._nn.scaled_dot_product_attention
_torch_multi_head_attention = F.multi_head_attention_forward
# Other subclasses of Tensor decide themselves what attention of them is. The last two stand for plain tensors
# while torch.compile and torch.export trace.
_PLAIN = frozenset((Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor))


class accelerate(TorchFunctionMode):
    r"""Run ``torch.nn.functional.scaled_dot_product_attention`` on fastattn, within a ``with`` block.

    Takes over the calls that fastattn has its own kernel for: four-dimensional query, key and value of one
    floating dtype, with or without a mask, causality, grouped heads and dropout. All others go to PyTorch as
    before, and so do errors, and calls too small to be faster than PyTorch's. It does not matter by which
    name the function is called, or when that name was imported; calls by ``nn.MultiheadAttention`` (with
    ``need_weights=False``) and by ``nn.TransformerEncoderLayer`` are among them, also where PyTorch would
    take its fused fast path.

    Same results up to rounding, except that

    * a NaN or infinity that a mask hides has no influence, where PyTorch's lets it through;
    * dropout draws another pattern from the same generator.

    The block is local to its thread: threads started inside it do not belong to it, and need a block of their
    own, as with ``torch.no_grad()``. Blocks nest and the same object can be entered again. Works
    around and inside of ``torch.compile(fullgraph=True)``, under autocast, and with ``torch.func``; forward
    mode, ``torch.jit.trace`` and code that watches operators (``TorchDispatchMode``) get PyTorch's. With
    ``torch.utils.checkpoint``, the backward pass has to be in the block as the forward pass is.

    Every call of a torch function inside the block takes a few microseconds longer, which is the price of
    looking at it; :func:`fastattn.replace_attention` and ``fastattn.integrations.transformers`` have none.

    As a decorator, ``@fastattn.accelerate`` or ``@fastattn.accelerate()``, it covers each call of a function.

    Raises:
        TypeError: what is decorated is a class, a generator or a coroutine.

    Example:
        >>> import torch.nn.functional as F
        >>> q = torch.randn(2, 8, 128, 64)
        >>> with fastattn.accelerate():
        ...     out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is _torch_attention:
            func = _attention if _PLAIN.issuperset(types) else func
        elif func is _torch_multi_head_attention:
            func = _multi_head_attention if _PLAIN.issuperset(types) else func
        elif func in _BACKWARD and _PLAIN.issuperset(types):
            func = _BACKWARD[func]
        return func(*args, **kwargs) if kwargs else func(*args)

    def __new__(cls, function=None):
        return super().__new__(cls) if function is None else cls()(function)

    def __call__(self, function):
        if (
            inspect.isgeneratorfunction(function)
            or inspect.iscoroutinefunction(function)
            or inspect.isasyncgenfunction(function)
            or inspect.isclass(function)
        ):
            raise TypeError(
                f"accelerate() as a decorator takes a function that returns when it is done, {function!r} "
                "does not: use a with block inside it"
            )

        @functools.wraps(function)
        def accelerated(*args, **kwargs):
            with self:
                return function(*args, **kwargs)

        return accelerated


def _attention(*args, **kwargs):
    try:
        ours = _is_ours(*args, **kwargs)
    except TypeError:  # arguments that torch does not have: its error speaks of them
        ours = False
    return (scaled_dot_product_attention if ours else _torch_attention)(*args, **kwargs)


def _is_ours(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
) -> bool:
    """Whether torch accepts this call and fastattn has a kernel for it that is at least as fast."""
    # Compiled code has no steps in Python that take their time, and would be compiled once for each answer;
    # under transforms sizes are those of a part, and torch may take the parts one by one.
    if not (is_compiling() or _are_functorch_transforms_active()) and _is_small(
        query, key, value, attn_mask, dropout_p, is_causal
    ):
        return False
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if not all(
        type(t) in _PLAIN and t.layout is torch.strided and not t.is_nested and t.device == query.device
        for t in tensors
    ):
        return False
    # Common calls on the CPU: checked as the function itself checks them, which is short.
    if (
        (attn_mask is None or (not is_causal and attn_mask.dtype is torch.bool))
        and common_scale(query, key, value, attn_mask, None, dropout_p, is_causal, scale, enable_gqa)
        is not None
        and dropout_p < 1
    ):
        return True
    if not (
        isinstance(dropout_p, (float, int))
        and 0 <= dropout_p < 1
        and isinstance(is_causal, bool)
        and isinstance(enable_gqa, bool)
        and not (is_causal and attn_mask is not None)
        and (scale is None or isinstance(scale, (float, int)))
        and forward_ad._current_level < 0
        and (is_compiling() or not _is_traced())
    ):
        return False
    shape, key_shape, value_shape = query.shape, key.shape, value.shape
    if not (
        len(shape) == len(key_shape) == len(value_shape) == 4
        and shape[0] == key_shape[0]
        and shape[3] == key_shape[3] > 0
        and key_shape[:3] == value_shape[:3]
        and (shape[1] == key_shape[1] or (enable_gqa and key_shape[1] > 0 and shape[1] % key_shape[1] == 0))
    ):
        return False
    dtype = query.dtype
    lower = autocast_dtype(query)
    if lower is None or torch.float64 in (dtype, key.dtype, value.dtype):
        if key.dtype is not dtype or value.dtype is not dtype:
            return False
    elif all(t.is_floating_point() for t in tensors[:3]):
        dtype = lower
    options = []
    if attn_mask is not None:
        scores = (key_shape[2], shape[2], shape[1], shape[0])
        if not (
            (attn_mask.dtype in (torch.bool, dtype) or (lower and attn_mask.is_floating_point()))
            and 2 <= attn_mask.dim() <= 4
            and all(n == 1 or n == m for n, m in zip(attn_mask.shape[::-1], scores, strict=False))
        ):
            return False
        options.append("attn_mask")
    if is_causal:
        options.append("is_causal")
    if dropout_p > 0:
        options.append("dropout_p")
    chosen = choose(Request(query.device.type, dtype, tuple(options)), "auto")
    return chosen not in ("torch", "reference")


def _is_small(query, key, value, attn_mask, dropout_p, is_causal) -> bool:
    masked = attn_mask is not None
    if (
        query.__class__ not in _PLAIN
        or key.__class__ not in _PLAIN
        or value.__class__ not in _PLAIN
        or (masked and attn_mask.__class__ not in _PLAIN)
        or query.is_nested
        or key.is_nested
        or key.dim() != 4
    ):
        return False  # which is not for the size to decide
    dtype = query.dtype if not _is_any_autocast_enabled() else autocast_dtype(query) or query.dtype
    return not is_worthwhile(
        query.numel() * key.shape[2], dtype, masked, bool(is_causal), dropout_p != 0,
        wants_gradient(query, key, value, attn_mask),
    )  # fmt: skip


def _is_traced() -> bool:
    return (
        _len_torch_dispatch_stack() > 0
        or _get_tracing_state() is not None
        # torch.func.functionalize has no rule for functions with a derivative of their own.
        or (
            _are_functorch_transforms_active()
            and any(layer.key() == TransformType.Functionalize for layer in get_interpreter_stack())
        )
    )


def _with_globals(function, **names) -> FunctionType:
    """torch's own code, which finds other functions by some of the names that it calls."""
    copy = FunctionType(function.__code__, {**function.__globals__, **names}, argdefs=function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# While a mode looks at a call it is off, and does not see what the call calls in turn: the attention of
# nn.MultiheadAttention, and that of hooks and recomputation in a backward.
_multi_head_attention = _with_globals(
    _torch_multi_head_attention,
    scaled_dot_product_attention=_attention,
    has_torch_function=lambda tensors: False,
)


def _run_backward(*args, **kwargs):
    with accelerate():
        return _engine_run_backward(*args, **kwargs)


def _backward_of_tensor(tensor, gradient=None, retain_graph=None, create_graph=False, inputs=None):
    _BACKWARD[autograd.backward](tensor, gradient, retain_graph, create_graph, inputs=inputs)


_BACKWARD = {
    f: _with_globals(f, _engine_run_backward=_run_backward) for f in (autograd.backward, autograd.grad)
}
_BACKWARD[Tensor.backward] = _backward_of_tensor
