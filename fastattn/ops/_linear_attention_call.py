"""What a call of linear attention may look like: its arguments are checked and brought into the ops' form."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled

from fastattn._choose import KERNEL_DTYPES, Request
from fastattn.ops._common import autocast_dtype, check_dense, check_flags, number, wide_dtype
from fastattn.reference.linear_attention import FEATURE_MAPS

__all__ = ["LinearAttentionState", "Prepared", "prepare", "prepare_step"]


class LinearAttentionState(NamedTuple):
    """What linear attention remembers of a sequence: as much after a million tokens as after one.

    ``kv``, the sum of ``phi(k_j) v_j^T``, is (B, H, D, Dv) and ``z``, the sum of ``phi(k_j)``, is (B, H, D),
    with H the heads of the query and D the number of features; float32, or float64 beside float64 inputs,
    never half precision. Differentiable. A named tuple: it may be unpacked, copied, pickled and held in lists
    like one, and ``torch.compile`` and ``torch.utils._pytree`` see its two tensors.

    Example:
        >>> state = LinearAttentionState.zeros(2, 8, 64, 64)
        >>> for q, k, v in torch.randn(10, 3, 2, 8, 64):
        ...     out, state = fastattn.linear_attention_step(q, k, v, state)
        >>> state = state.index_select(torch.tensor([1, 1]))  # both go on from the second one's past
    """

    kv: Tensor
    z: Tensor

    @classmethod
    def zeros(cls, B: int, H: int, D: int, Dv: int, *, device=None, dtype=None) -> "LinearAttentionState":
        """The state before the first token. ``dtype`` is that of the inputs; half precision gives float32."""
        dtype = _state_dtype(torch.get_default_dtype() if dtype is None else dtype)
        return cls(
            torch.zeros((B, H, D, Dv), device=device, dtype=dtype),
            torch.zeros((B, H, D), device=device, dtype=dtype),
        )

    def index_select(self, batch: Tensor) -> "LinearAttentionState":
        """The states of these batch entries, an integer vector; copies, so that they may go separate ways."""
        return LinearAttentionState(self.kv.index_select(0, batch), self.z.index_select(0, batch))

    def detach(self) -> "LinearAttentionState":
        """The same memory without the history that gradients flow back through."""
        return LinearAttentionState(self.kv.detach(), self.z.detach())

    def clone(self) -> "LinearAttentionState":
        return LinearAttentionState(self.kv.clone(), self.z.clone())

    def to(self, *args, **kwargs) -> "LinearAttentionState":
        """As ``Tensor.to``, except that half precision means float32 here, as in ``zeros``."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        dtype = self.kv.dtype if dtype is None else _state_dtype(dtype)
        return LinearAttentionState(
            *(t.to(device=device, dtype=dtype, non_blocking=non_blocking) for t in self)
        )


def _state_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype not in KERNEL_DTYPES:
        raise TypeError(
            f"dtype must be float32, float64, bfloat16 or float16, got {dtype}: it is that of the inputs"
        )
    return wide_dtype(dtype)


torch.serialization.add_safe_globals([LinearAttentionState])  # two tensors: torch.load may make one


class Prepared(NamedTuple):
    """A checked call: the arguments of the op, and the choice to make."""

    tensors: tuple[Tensor | None, ...]
    options: tuple
    request: Request


_NAMES = ("query", "key", "value", "decay", "key_padding_mask", "cu_seqlens", "state kv", "state z")


class _Given:
    """The tensors of a call under the names of its arguments, and what is true of every form of it."""

    def __init__(self, query, key, value, decay, key_padding_mask, cu_seqlens, name, state):
        if _is_any_autocast_enabled():
            query, key, value = _autocast(query, key, value)
        if state is not None:
            if not isinstance(state, tuple) or len(state) != 2:
                raise TypeError(f"{name} must be a LinearAttentionState, got {type(state).__name__}")
            for part, tensor in zip(LinearAttentionState._fields, state, strict=True):
                if not isinstance(tensor, Tensor):
                    raise TypeError(f"{name}.{part} must be a Tensor, got {type(tensor).__name__}")
        self.tensors = (query, key, value, decay, key_padding_mask, cu_seqlens, *(state or (None, None)))
        check_dense(_NAMES, self.tensors)
        wide = wide_dtype(query.dtype)
        for name, tensor, dtypes in (
            ("decay", decay, (torch.float32, wide, query.dtype)),
            ("key_padding_mask", key_padding_mask, (torch.bool,)),
            ("cu_seqlens", cu_seqlens, (torch.int32, torch.int64)),
            ("state kv", self.tensors[6], (wide,)),
            ("state z", self.tensors[7], (wide,)),
        ):
            if tensor is not None and tensor.dtype not in dtypes:
                allowed = " or ".join(dict.fromkeys([str(d) for d in dtypes]))
                raise RuntimeError(
                    f"{name} must be {allowed} beside a {query.dtype} query, got {tensor.dtype}"
                )

    def shapes(self) -> str:
        """For error messages; evaluated only where there is an error."""
        found = [f"{n} {tuple(t.shape)}" for n, t in zip(_NAMES, self.tensors, strict=True) if t is not None]
        return ", ".join(found)

    def check_shapes(self, dims: int, form: str, batch: int | None, heads: int) -> None:
        """query, key and value have ``dims`` dimensions, of which these two are batch and heads."""
        query, key, value = self.tensors[:3]
        for name, tensor in zip(_NAMES[:3], self.tensors[:3], strict=True):
            if tensor.dim() != dims:
                raise RuntimeError(f"{name} must be {form}, got {self.shapes()}")
        if batch is not None and not query.shape[batch] == key.shape[batch] == value.shape[batch]:
            raise RuntimeError(f"query, key and value must have the same batch size: {self.shapes()}")
        if query.shape[-1] != key.shape[-1]:
            raise RuntimeError(f"query and key must have the same head dim: {self.shapes()}")
        H, Hkv = query.shape[heads], key.shape[heads]
        if value.shape[heads] != Hkv or ((H % Hkv != 0) if Hkv > 0 else H > 0):
            raise RuntimeError(
                f"key and value must have equally many heads, a divisor of the query's: {self.shapes()}"
            )

    def decay_of(self, *shapes: tuple[int, ...]) -> Tensor | None:
        query, decay = self.tensors[0], self.tensors[3]
        if decay is None:
            return None
        if all(decay.shape != shape for shape in shapes):
            raise RuntimeError(f"decay must be {' or '.join(map(str, shapes))}, got {self.shapes()}")
        return decay.to(torch.float64) if query.dtype == torch.float64 else decay

    def state_of(self, N: int, H: int, D: int | None, Dv: int) -> tuple[Tensor | None, Tensor | None]:
        """The state's tensors, for D features; None where their number is not known."""
        kv, z = self.tensors[6:]
        if kv is not None:
            D = z.shape[-1] if D is None and z.dim() > 0 else D
            for name, tensor, shape in (("kv", kv, (N, H, D, Dv)), ("z", z, (N, H, D))):
                if tensor.shape != shape:
                    raise RuntimeError(f"the state's {name} must be {shape}, got {tuple(tensor.shape)}")
        return kv, z

    def request(self, feature_map, **options) -> Request:
        query, _, value = self.tensors[:3]
        named = isinstance(feature_map, str)
        options["feature_map"] = None if named else feature_map
        head_dim = max(query.shape[-1] if named else 0, value.shape[-1])
        used = tuple(name for name, given in options.items() if given is not None and given is not False)
        return Request(query.device.type, query.dtype, used, "fastattn::linear_attention_forward", head_dim)


def _autocast(*tensors):
    dtype = autocast_dtype(tensors[0])
    if dtype is None:
        return tensors
    kept = torch.float64
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != kept else t
        for t in tensors
    )


def _check_options(feature_map, eps, scale, **flags) -> tuple[float, float]:
    if isinstance(feature_map, str):
        if feature_map not in FEATURE_MAPS:
            names = ", ".join(map(repr, FEATURE_MAPS))
            raise ValueError(f"feature_map must be one of {names} or a callable, got {feature_map!r}")
    elif not callable(feature_map):
        raise TypeError(f"feature_map must be a name or a callable, got {feature_map!r}")
    check_flags(**flags)
    eps, scale = number("eps", eps), 1.0 if scale is None else number("scale", scale)
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"eps must be finite and not negative, got {eps}")
    return eps, scale


def _features(feature_map: Callable, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    results = feature_map(query), feature_map(key)
    for given, features in zip((query, key), results, strict=True):
        if not isinstance(features, Tensor) or features.shape[:-1] != given.shape[:-1]:
            found = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise RuntimeError(
                f"feature_map must turn the last dimension of {tuple(given.shape)} into features, got {found}"
            )
        if not features.is_floating_point():
            raise RuntimeError(f"feature_map must give floating point features, got {features.dtype}")
    numbers = [features.shape[-1] for features in results]
    if numbers[0] != numbers[1]:
        raise RuntimeError(f"feature_map must give query and key equally many features, got {numbers}")
    return results[0].to(query.dtype), results[1].to(key.dtype)


def prepare(
    query, key, value, feature_map="elu", is_causal=False, normalize=True, eps=1e-6, scale=None, decay=None,
    key_padding_mask=None, cu_seqlens=None, initial_state=None, return_state=False, map_features=True,
) -> Prepared:  # fmt: skip
    """A call of ``linear_attention``; without ``map_features`` a callable map is not called."""
    given = _Given(query, key, value, decay, key_padding_mask, cu_seqlens, "initial_state", initial_state)
    query, key, value = given.tensors[:3]
    flags = {"is_causal": is_causal, "normalize": normalize, "return_state": return_state}
    eps, scale = _check_options(feature_map, eps, scale, **flags)
    packed = cu_seqlens is not None
    if packed:
        if key_padding_mask is not None:
            raise ValueError(
                "key_padding_mask has no meaning with cu_seqlens: packed sequences have no padding"
            )
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise RuntimeError(f"cu_seqlens must be (sequences + 1,), got {given.shapes()}")
        given.check_shapes(3, "(total, heads, head dim) with cu_seqlens", None, 1)
        (L, H, D), S, B, N = query.shape, key.shape[0], 1, cu_seqlens.shape[0] - 1
    else:
        given.check_shapes(4, "(batch, heads, length, head dim) without cu_seqlens", 0, 1)
        (B, H, L, D), S = query.shape, key.shape[2]
        N = B
    if value.shape[0 if packed else 2] != S:
        raise RuntimeError(f"key and value must have the same length: {given.shapes()}")
    if L != S and (packed or is_causal):
        needs = "cu_seqlens" if packed else "is_causal"
        raise RuntimeError(f"{needs} needs query and key of one length: {given.shapes()}")
    if key_padding_mask is not None and key_padding_mask.shape != (B, S):
        raise RuntimeError(f"key_padding_mask must be {(B, S)}, got {given.shapes()}")
    if decay is not None and not is_causal:
        raise ValueError("decay needs is_causal=True: without an order of tokens there is nothing to decay")
    decay = given.decay_of((H,), (L, H) if packed else (B, H, L))
    request = given.request(
        feature_map, is_causal=bool(is_causal), decay=decay, cu_seqlens=cu_seqlens,
        key_padding_mask=key_padding_mask, initial_state=initial_state, return_state=bool(return_state),
    )  # fmt: skip
    if not isinstance(feature_map, str):
        D = None
        if map_features:
            if key_padding_mask is not None:
                key = torch.where(key_padding_mask[:, None, :, None], key, 0.0)
            query, key = _features(feature_map, query, key)
            D = query.shape[-1]
            request = request._replace(head_dim=max(D, request.head_dim))
        feature_map = "identity"
    kv, z = given.state_of(N, H, D, value.shape[-1])
    if packed:
        query, key, value = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
        cu_seqlens = cu_seqlens.contiguous()
        if decay is not None and decay.dim() == 2:
            decay = decay.t().unsqueeze(0)
    tensors = (query, key, value, decay, key_padding_mask, cu_seqlens, kv, z)
    options = (feature_map, bool(is_causal), bool(normalize), eps, scale, bool(return_state))
    return Prepared(tensors, options, request)


def prepare_step(
    query, key, value, state, feature_map="elu", normalize=True, eps=1e-6, scale=None, decay=None,
    inplace=False, map_features=True,
) -> Prepared:  # fmt: skip
    """A call of ``linear_attention_step``; without ``map_features`` a callable map is not called."""
    if state is None:
        raise TypeError("state must be a LinearAttentionState: LinearAttentionState.zeros begins a sequence")
    given = _Given(query, key, value, decay, None, None, "state", state)
    query, key, value = given.tensors[:3]
    eps, scale = _check_options(feature_map, eps, scale, normalize=normalize, inplace=inplace)
    given.check_shapes(3, "(batch, heads, head dim) in a step", 0, 1)
    B, H, D = query.shape
    decay = given.decay_of((H,), (B, H))
    request = given.request(feature_map, decay=decay, inplace=bool(inplace))
    if not isinstance(feature_map, str):
        D = None
        if map_features:
            query, key = _features(feature_map, query, key)
            D = query.shape[-1]
            request = request._replace(head_dim=max(D, request.head_dim))
        feature_map = "identity"
    kv, z = given.state_of(B, H, D, value.shape[2])
    return Prepared((query, key, value, kv, z, decay), (feature_map, bool(normalize), eps, scale), request)
