"""Linear attention in Triton: the registered ops of fastattn/ops/_linear_attention_autograd.py.

Output and gradients are walks over chunks of tokens. The state lives in registers, a tile of its columns per
program. Where sequences and heads are too few to occupy a GPU, or order does not matter, sequences are cut
into segments: a walk without results finds what each adds to the state, these are added up, and the walks
with results start from there. A few tokens, or one alone, need no products of matrices: a recurrence reads
the state once and writes it once. Every number has one writer and one order of summation: no atomics,
repeatable bit by bit.

Katharopoulos et al., arXiv:2006.16236.
"""

import functools

import torch
import triton
import triton.language as tl
from fastattn.kernels._common import (
    INTERPRETED,
    Config,
    architecture,
    block_of,
    check,
    launch,
    mask_numbers,
    precision,
)
from fastattn.kernels._launch_tables import WALK, WALK_TF32, choose_config
from fastattn.kernels._linear_attention_kernels import add_up, grad_den, recurrence, walk
from torch import Tensor

from fastattn._choose import KERNEL_DTYPES, TRITON_HEAD_DIM

__all__ = [
    "linear_attention_backward", "linear_attention_forward", "linear_attention_step",
    "linear_attention_step_",
]  # fmt: skip


# Causal calls of at most so many tokens go token by token. That is a quarter of the chunks, whose products
# take the same time however many tokens are there; no GPU has measured where the two meet.
SHORT = 16
# Sequences are cut into segments, of at least LEAST tokens and whole chunks, until there are this many
# programs: enough for any GPU, and independent of it, so that the order of summation is too.
PROGRAMS, LEAST = (8, 16) if INTERPRETED else (256, 256)
BLOCK = 1024  # elements of a state that a program of the scan adds up
STATE_ELEMENTS = 1024 if INTERPRETED else 4096  # and of one that a recurrence holds: 32 per thread


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _operand(dtype: torch.dtype, device: torch.device) -> tuple[tl.dtype, int, str]:
    """What products are formed from, the last bits of it that they do not read, and their precision.

    Sums over long sequences leave the range of float16, and gradients of quotients by them do on the other
    side: TF32 has its precision and the range of float32. The interpreter cannot compute with bfloat16; its
    float32 has the same bits there.
    """
    if dtype == torch.bfloat16:
        return (tl.float32, 16, "ieee") if INTERPRETED else (tl.bfloat16, 0, "ieee")
    form = precision(dtype, device)
    if dtype == torch.float16 and architecture(device) != "hip":
        form = "tf32"
    return tl.float64 if dtype == torch.float64 else tl.float32, 13 if form == "tf32" else 0, form


def _check_heads(H: int, Hkv: int, D: int) -> None:
    if (H % Hkv if Hkv else H) != 0:
        raise RuntimeError(f"query heads must be a multiple of key heads, got {H} and {Hkv}")
    if D > TRITON_HEAD_DIM:
        raise NotImplementedError(f"head dims up to {TRITON_HEAD_DIM}, got {D}")


class _Call:
    """The arguments that all walks share, checked."""

    def __init__(
        self, query, key, value, decay, key_padding_mask, cu_seqlens, initial_kv, initial_z, feature_map,
        causal, normalize, eps, scale,
    ):  # fmt: skip
        self.B, self.H, self.L, self.D = check("query", query, (None,) * 4, *KERNEL_DTYPES)
        B, H, L, D = self.B, self.H, self.L, self.D
        _, self.Hkv, self.S, _ = check("key", key, (B, None, None, D), query.dtype)
        S, self.DV = self.S, check("value", value, (B, self.Hkv, self.S, None), query.dtype)[3]
        self.dtype, self.wide, self.device = query.dtype, _wide(query.dtype), query.device
        _check_heads(H, self.Hkv, max(D, self.DV))
        if max(L, S) >= 2**30:
            raise NotImplementedError(f"lengths below 2**30, got {L} queries and {S} keys")
        if (causal or cu_seqlens is not None) and L != S:
            raise RuntimeError(f"causal and packed calls need as many queries as keys, got {L} and {S}")
        if decay is not None:
            if not causal:
                raise RuntimeError("decay needs causal")
            check("decay", decay, (H,) if decay.dim() == 1 else (B, H, L), query.dtype, self.wide)
            decay = (decay if decay.dim() > 1 else decay.unsqueeze(1)).expand(B, H, L)
        if key_padding_mask is not None:
            check("key_padding_mask", key_padding_mask, (B, S), torch.bool)
        self.key_padding_mask, self.N = key_padding_mask, B
        if cu_seqlens is not None:
            self.N = check("cu_seqlens", cu_seqlens, (None,), torch.int32, torch.int64)[0] - 1
            if B != 1 or self.N < min(L, 1) or key_padding_mask is not None:
                raise RuntimeError(
                    "cu_seqlens needs a batch of 1, a sequence and no padding, got "
                    f"{tuple(cu_seqlens.shape)} and query {tuple(query.shape)}"
                )
            cu_seqlens = cu_seqlens.contiguous()
        if (initial_kv is None) != (initial_z is None):
            raise RuntimeError("initial_kv and initial_z go together")
        if initial_kv is not None:
            self.check_state("initial", initial_kv, initial_z)
        self.initial, self.causal, self.normalize = (initial_kv, initial_z), causal, normalize
        self.operand = _operand(query.dtype, self.device)
        table = WALK_TF32 if self.operand[2] == "tf32" else WALK
        width = block_of(max(D, self.DV))
        if decay is not None:  # whose sums and factors of every token take the registers of as many channels
            width = min(2 * width, TRITON_HEAD_DIM)
        read = query.dtype if query.dtype == torch.bfloat16 else self.wide  # by products
        self.tile = choose_config(table, self.device, read, width)
        self.segments = self.cut(self.L)
        self.strided = {"query": query, "key": key, "value": value, "decay": decay}
        padding = None if key_padding_mask is None else mask_numbers(key_padding_mask, query.dtype)
        self.arguments = {
            "padding": padding, "padding_stride": None if padding is None else padding.stride(),
            "cu_seqlens": cu_seqlens, "den": None, "delta": None, "B": B, "H": H,
            "group": H // max(self.Hkv, 1), "L": L, "eps": float(eps), "scale": float(scale),
            "CAUSAL": causal, "MAP": feature_map, "D": D, "DV": self.DV, "LEAST": LEAST,
            "OPERAND": self.operand[0], "DROPPED": self.operand[1], "PRECISION": self.operand[2],
        }  # fmt: skip

    def check_state(self, name: str, kv: Tensor | None, z: Tensor | None) -> None:
        if kv is not None:
            check(f"{name}_kv", kv, (self.N, self.H, self.D, self.DV), self.wide)
        if z is not None:
            check(f"{name}_z", z, (self.N, self.H, self.D), self.wide)

    @functools.cached_property
    def seen_from(self) -> Tensor | None:
        """For each batch entry the first query that sees a key; those before hold what nobody may read."""
        if self.initial[0] is not None:
            return None
        if self.S == 0:
            return torch.full((self.B,), self.L, dtype=torch.int32, device=self.device)
        if self.key_padding_mask is None:
            return None
        first = self.key_padding_mask.to(torch.uint8).argmax(1)
        if not self.causal:
            first = first * 0
        return torch.where(self.key_padding_mask.any(1), first, self.L).to(torch.int32)

    def cut(self, length: int) -> int:
        """The number of segments of sequences of this length."""
        programs = self.N * self.H * max(-(-min(self.D, self.DV) // self.tile.columns), 1)
        return max(min(PROGRAMS // max(programs, 1), length // LEAST), 1)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.wide, device=self.device)

    def final(self, wanted: bool) -> tuple[Tensor | None, Tensor | None]:
        if not wanted:
            return None, None
        return self.empty(self.N, self.H, self.D, self.DV), self.empty(self.N, self.H, self.D)

    def walk(
        self, role: str, tokens: int, segments: int, start=(None, None), end=(None, None), end_decay=None,
        result=None, states=None, grad_decay=None,
    ) -> None:  # fmt: skip
        on_features = role in ("out", "grad_value")
        X, U = (self.D, self.DV) if on_features else (self.DV, self.D)
        kv, z = start
        if kv is not None and not on_features:
            kv = kv.transpose(2, 3)
        tensors = self.strided | {
            "start_kv": kv, "start_z": z, "end_kv": end[0], "end_z": end[1], "result": result,
        }  # fmt: skip
        tensors.setdefault("grad_out", None)
        programs = self.N * self.H * segments * max(-(-U // self.tile.columns), 1)
        launch(
            walk, programs, self.tile, **self.arguments, **tensors,
            **{f"{n}_stride": None if t is None else t.stride() for n, t in tensors.items()},
            seen_from=self.seen_from, end_decay=end_decay, states=states, grad_decay=grad_decay, T=tokens,
            segments=segments, ROLE=role, CHUNK=self.tile.rows, COLUMNS=self.tile.columns,
            BLOCK_X=block_of(X),
        )  # fmt: skip

    def starts(self, role: str, tokens: int, start, end) -> tuple[Tensor | None, Tensor | None]:
        """Where walks with results start from. Unless that is ``start``, the state after ``tokens`` is known
        now, too, and goes to ``end``."""
        if self.causal and self.segments == 1:
            return start
        segments = self.segments if self.causal else self.cut(tokens)
        D, DV = self.D, self.DV
        local = self.empty(self.N * segments, self.H, D * DV + D)
        kv, z = local[:, :, : D * DV].unflatten(2, (D, DV)), local[:, :, D * DV :]
        decays = None
        if self.strided["decay"] is not None:
            decays = self.empty(self.N * segments, self.H)
        self.walk(role, tokens, segments, end=(kv, z), end_decay=decays)
        launch(
            add_up, self.N * self.H * max(-(-local.shape[2] // BLOCK), 1), Config(0, 0, 4, 1), local=local,
            decays=decays, start_kv=start[0], start_z=start[1], end_kv=end[0], end_z=end[1],
            start_kv_stride=None if start[0] is None else start[0].stride(),
            start_z_stride=None if start[1] is None else start[1].stride(), H=self.H, segments=segments,
            CAUSAL=self.causal, REVERSE=role == "grad_value", D=D, DV=DV, BLOCK=BLOCK,
        )  # fmt: skip
        step = 1 if self.causal else segments
        return kv[::step], z[::step]


def linear_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None, key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None, initial_kv: Tensor | None, initial_z: Tensor | None, feature_map: str,
    causal: bool, normalize: bool, eps: float, scale: float, return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    call = _Call(
        query, key, value, decay, key_padding_mask, cu_seqlens, initial_kv, initial_z, feature_map, causal,
        normalize, eps, scale,
    )  # fmt: skip
    # Heads beside channels in memory: joining them afterwards is then a view.
    out = query.new_empty((call.B, call.L, call.H, call.DV)).transpose(1, 2)
    den = call.empty(*((call.B, call.H, call.L) if normalize else (0,)))
    final = call.final(return_state)
    if causal and call.L <= SHORT:
        _recur(
            query, key, value, call.strided["decay"], key_padding_mask, call.arguments["cu_seqlens"],
            call.initial, final, out, den if normalize else None, feature_map, normalize, eps, scale,
        )  # fmt: skip
        return out, den, *(final if return_state else (call.empty(0), call.empty(0)))
    start = call.starts("out", call.S, call.initial, final)
    if normalize:
        call.arguments["den"] = den
    whole = causal and call.segments == 1
    call.walk("out", call.L, call.cut(call.L), start, final if whole else (None, None), result=out)
    return out, den, *(final if return_state else (call.empty(0), call.empty(0)))


def linear_attention_backward(
    grad_out: Tensor | None, grad_kv: Tensor | None, grad_z: Tensor | None, query: Tensor, key: Tensor,
    value: Tensor, out: Tensor, den: Tensor, decay: Tensor | None, key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None, initial_kv: Tensor | None, initial_z: Tensor | None, feature_map: str,
    causal: bool, normalize: bool, eps: float, scale: float, decay_grad: bool, state_grad: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    call = _Call(
        query, key, value, decay, key_padding_mask, cu_seqlens, initial_kv, initial_z, feature_map, causal,
        normalize, eps, scale,
    )  # fmt: skip
    B, H, L, D, DV, tile = call.B, call.H, call.L, call.D, call.DV, call.tile
    if grad_out is None:
        grad_out = query.new_zeros(()).expand(B, H, L, DV)
    check("grad_out", grad_out, (B, H, L, DV), query.dtype)
    call.check_state("grad", grad_kv, grad_z)
    if (decay_grad and decay is None) or (state_grad and initial_kv is None):
        raise RuntimeError("gradients are wanted of a decay or an initial state that is not there")
    call.strided["grad_out"] = grad_out
    if normalize:
        check("out", out, (B, H, L, DV), query.dtype)
        check("den", den, (B, H, L), call.wide)
        delta = call.empty(B, H, L)
        call.arguments |= {"den": den.contiguous(), "delta": delta}
        launch(
            grad_den, B * H * -(-L // tile.rows), Config(tile.rows, 0, 4, 1), grad_out=grad_out, out=out,
            den=call.arguments["den"], delta=delta, grad_out_stride=grad_out.stride(),
            out_stride=out.stride(), H=H, L=L, eps=float(eps), DV=DV, CHUNK=tile.rows,
            BLOCK_DV=min(block_of(DV), 64),
        )  # fmt: skip

    whole = causal and call.segments == 1
    states = partial = None
    if decay_grad:
        # A state before each chunk of each sequence, wherever its tokens are: see `spot` in the kernel.
        spots = (L if cu_seqlens is not None else B * L) // tile.rows + call.N + 1
        states = call.empty(spots, H, DV + 1, D)
        partial = call.empty(max(-(-D // tile.columns), 1), B, H, L)
    flows = {"states": states, "grad_decay": partial}

    grad_query, grad_key, grad_value = (torch.empty_like(t) for t in (query, key, value))
    start = call.starts("out", call.S, call.initial, (None, None))
    call.walk("grad_query", L, call.cut(L), start, result=grad_query, **flows)
    initial = call.final(state_grad)
    start = call.starts("grad_value", L, (grad_kv, grad_z), initial)
    # Query heads that share a key have a gradient of it each, added up afterwards.
    grads = {"grad_value": grad_value, "grad_key": grad_key}
    for role, grad in grads.items():
        shared = H != call.Hkv
        each = call.empty(B, H, *grad.shape[2:]) if shared else grad
        end = initial if whole and role == "grad_value" else (None, None)
        call.walk(
            role, call.S, call.cut(call.S), start, end, result=each, **(flows if role == "grad_key" else {})
        )
        if shared:
            grad.copy_(each.unflatten(1, (call.Hkv, -1)).sum(2))
    grad_decay = call.empty(0)
    if decay_grad:
        total = partial.sum(0)
        grad_decay = (total if decay.dim() > 1 else total.sum((0, 2))).to(decay.dtype)
    return grad_query, grad_key, grad_value, grad_decay, *(initial if state_grad else (call.empty(0),) * 2)


def _recur(
    query, key, value, decay, key_padding_mask, cu_seqlens, start, end, out, den, feature_map, normalize,
    eps, scale, in_place=False,
) -> None:  # fmt: skip
    """``out``, ``den`` if it is wanted and ``end``, token by token from ``start``; checked by the callers."""
    H, L, D, DV = *query.shape[1:], value.shape[3]
    N = query.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    BLOCK_D = triton.next_power_of_2(max(D, 1))
    COLUMNS = min(triton.next_power_of_2(max(DV, 1)), max(STATE_ELEMENTS // BLOCK_D, 1))
    tiles = max(-(-DV // COLUMNS), 1)
    # Every program of a head reads z: in place there must be one.
    each = tiles if in_place else 1
    padding = None if key_padding_mask is None else mask_numbers(key_padding_mask, query.dtype)
    tensors = {
        "query": query, "key": key, "value": value, "decay": decay, "padding": padding, "start_kv": start[0],
        "start_z": start[1], "out": out, "end_kv": end[0], "end_z": end[1],
    }  # fmt: skip
    launch(
        recurrence, N * H * (tiles // each), Config(1, COLUMNS, 4, 2), **tensors,
        **{f"{n}_stride": None if t is None else t.stride() for n, t in tensors.items()},
        cu_seqlens=cu_seqlens, den=den, H=H, group=H // max(key.shape[1], 1), L=L, eps=float(eps),
        scale=float(scale), NORMALIZE=normalize, MAP=feature_map, D=D, DV=DV, BLOCK_D=BLOCK_D,
        COLUMNS=COLUMNS, TILES=each, IN_PLACE=in_place,
    )  # fmt: skip


def _step_of(
    query, key, value, kv, z, decay, feature_map, normalize, eps, scale, new_kv, new_z, in_place
) -> Tensor:
    B, H, D = check("query", query, (None,) * 3, *KERNEL_DTYPES)
    Hkv = check("key", key, (B, None, D), query.dtype)[1]
    DV = check("value", value, (B, Hkv, None), query.dtype)[2]
    wide = _wide(query.dtype)
    _check_heads(H, Hkv, D)
    check("kv", kv, (B, H, D, DV), wide)
    check("z", z, (B, H, D), wide)
    if decay is not None:
        decay = decay.expand(B, H) if check("decay", decay, None, query.dtype, wide) == (H,) else decay
        check("decay", decay, (B, H))
        decay = decay.unsqueeze(2)
    out = query.new_empty(B, H, DV)
    _recur(
        *(t.unsqueeze(2) for t in (query, key, value)), decay, None, None, (kv, z), (new_kv, new_z),
        out.unsqueeze(2), None, feature_map, normalize, eps, scale, in_place,
    )  # fmt: skip
    return out


def linear_attention_step(
    query: Tensor, key: Tensor, value: Tensor, kv: Tensor, z: Tensor, *options
) -> tuple[Tensor, Tensor, Tensor]:
    new_kv, new_z = kv.new_empty(kv.shape), z.new_empty(z.shape)
    out = _step_of(query, key, value, kv, z, *options, new_kv, new_z, False)
    return out, new_kv, new_z


def linear_attention_step_(
    query: Tensor, key: Tensor, value: Tensor, kv: Tensor, z: Tensor, *options
) -> Tensor:
    return _step_of(query, key, value, kv, z, *options, kv, z, True)
