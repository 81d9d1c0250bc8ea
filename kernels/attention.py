"""Softmax attention in Triton: the registered ops of fastattn/ops/_attention_autograd.py."""

import math

import torch
from fastattn.kernels import _attention_kernels as kernels
from fastattn.kernels._common import (
    INTERPRETED,
    Config,
    block_of,
    check,
    describe,
    dropout_threshold,
    launch,
    mask_numbers,
    needs_wide_offsets,
    precision,
)
from fastattn.kernels._launch_tables import FORWARD, GRAD_KEY_VALUE, GRAD_QUERY, Table, choose_config
from torch import Tensor

from fastattn._choose import TRITON_HEAD_DIM

__all__ = [
    "attention_backward", "attention_forward", "attention_forward_with_weights", "attention_weights",
]  # fmt: skip

# What inner loops read, the rows of a block and its channels.
KEYS = (("key", "BLOCK_K", "BLOCK_D"), ("value", "BLOCK_K", "BLOCK_DV"))
QUERIES = (("query", "BLOCK_Q", "BLOCK_D"), ("grad_out", "BLOCK_Q", "BLOCK_DV"))

# Masks' gradients are added in this many chunks where the mask has few tiles of its own: enough for any GPU,
# and independent of it, so that the order of summation is too.
CHUNKS = 512


class _Call:
    """The arguments that all kernels share, checked."""

    def __init__(
        self, query, key, value, attn_mask, key_padding_mask, alibi_slopes, sinks, dropout_seed, scale,
        softcap=0.0, window_left=-1, window_right=-1, lower_right=False, dropout_p=0.0, packed=(),
    ):  # fmt: skip
        self.B, self.H, self.L, D = check("query", query, (None,) * 4)
        _, Hkv, self.S, _ = check("key", key, (self.B, None, None, D), query.dtype)
        DV = 0 if value is None else check("value", value, (self.B, Hkv, self.S, None), query.dtype)[3]
        B, H, L, S = self.B, self.H, self.L, self.S
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        if (H % Hkv if Hkv else H) != 0:
            raise RuntimeError(f"query heads must be a multiple of key heads, got {H} and {Hkv}")
        if max(D, DV) > TRITON_HEAD_DIM:
            raise NotImplementedError(f"head dims up to {TRITON_HEAD_DIM}, got {max(D, DV)}")
        if max(L, S) >= 2**29:
            raise NotImplementedError(f"lengths below 2**29, got {L} queries and {S} keys")
        bounds = _check_bounds(*packed[:2]) if any(p is not None for p in packed) else None
        if bounds is not None:
            if B != 1 or attn_mask is not None or key_padding_mask is not None:
                raise RuntimeError(f"packed sequences must be a batch of 1 without masks, got a batch of {B}")
            if bounds[0].numel() == 1 and max(L, S) > 0:
                raise RuntimeError(f"cu_seqlens name no sequence, got {L} queries and {S} keys")
        self.bounds, self.N = bounds, B if bounds is None else bounds[0].numel() - 1
        if attn_mask is not None:
            shape = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
            if len(shape) != 4 or any(n not in (1, m) for n, m in zip(shape, (B, H, L, S), strict=False)):
                raise RuntimeError(
                    f"attn_mask must broadcast to {(B, H, L, S)}, got {tuple(attn_mask.shape)}"
                )
            check("attn_mask", attn_mask, None, torch.bool, query.dtype, torch.float32)
            self.mask_shape = shape
            attn_mask = attn_mask.expand(B, H, L, S)
        if key_padding_mask is not None:
            check("key_padding_mask", key_padding_mask, (B, S), torch.bool)
        if alibi_slopes is not None:
            shape = (self.N, H) if alibi_slopes.dim() > 1 else (H,)
            check("alibi_slopes", alibi_slopes, shape, wide)
            alibi_slopes = alibi_slopes.expand(self.N, H)
        if sinks is not None:
            check("sinks", sinks, (H,), query.dtype, torch.float32)
        if dropout_p > 0:
            check("dropout_seed", dropout_seed, (1,), torch.int64)
        if not (softcap >= 0 and 0 <= dropout_p <= 1 and window_left >= -1 and window_right >= -1):
            raise RuntimeError(
                f"softcap {softcap}, dropout_p {dropout_p} or window {window_left}, {window_right} is wrong"
            )
        self.float_mask = attn_mask is not None and attn_mask.dtype != torch.bool
        self.width = block_of(max(D, DV))
        if attn_mask is not None:  # whose offsets and elements take the registers of as many channels again
            self.width = min(2 * self.width, TRITON_HEAD_DIM)
        self.dtype, self.wide, self.device = query.dtype, wide, query.device
        strided = {
            "query": query, "key": key, "value": value, "mask": attn_mask, "padding": key_padding_mask,
            "alibi": alibi_slopes, "sinks": sinks,
        }  # fmt: skip
        self.arguments = {
            "seed": dropout_seed if dropout_p > 0 else None,
            "bounds_q": bounds and bounds[0], "bounds_k": bounds and bounds[1], "N": self.N, "H": H,
            "group": H // max(Hkv, 1), "L": L, "S": S, "lower_right": int(lower_right),
            # Beyond all keys; positions added to it then stay within 32 bits.
            "left": None if window_left < 0 else min(window_left, L + S),
            "right": None if window_right < 0 else min(window_right, L + S),
            "threshold": dropout_threshold(dropout_p),
            "keep_scale": 1 / (1 - dropout_p) if dropout_p < 1 else 0.0,
            "scale": float(scale), "softcap": float(softcap), "SOFTCAP": softcap > 0,
            "D": D, "DV": DV, "BLOCK_D": block_of(D), "BLOCK_DV": block_of(DV),
            "PRECISION": precision(query.dtype, query.device), "WIDE": False,
            "UPCAST": INTERPRETED and query.dtype == torch.bfloat16,
        }  # fmt: skip
        for name, tensor in strided.items():
            self.add(name, tensor)

    def add(self, name: str, tensor: Tensor | None) -> None:
        if tensor is not None and tensor.dtype == torch.bool:
            tensor = mask_numbers(tensor, self.dtype)
        self.arguments[name] = tensor
        self.arguments[f"{name}_stride"] = None if tensor is None else tensor.stride()
        self.arguments["WIDE"] |= needs_wide_offsets(tensor)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.wide, device=self.device)

    def launch(self, kernel, table: Table, programs, streamed=(), **more) -> None:
        """``programs`` is their number, given the tile. A kernel gets those of the arguments that it has.

        ``streamed`` are the tensors that its inner loop reads block after block.
        """
        config = choose_config(table, self.device, self.dtype, self.width)
        given = {**self.arguments, "BLOCK_Q": config.rows, "BLOCK_K": config.columns, **more}
        for name, rows, width in streamed:
            descriptor = describe(given[name], given[rows], given[width])
            if descriptor is not None:
                given[name], given[f"{name}_stride"] = descriptor, None
        launch(kernel, programs(config), config, **{n: given[n] for n in kernel.arg_names})

    def tiles(self, config: Config) -> tuple[int, int]:
        return -(-self.L // config.rows), -(-self.S // config.columns)

    def places(self, config: Config) -> tuple[int, int]:
        """How many programs have a tile of queries, and of keys, for each head: see ``first_tile``.

        Where sequences are packed these are bounds that need no length but the total, which is known here:
        nothing is read from the device, and a longest length would tell no more.
        """
        if self.bounds is None:
            return tuple(self.B * n for n in self.tiles(config))
        more = self.N + 2 if self.N > 0 else 0
        return self.L // config.rows + more, self.S // config.columns + more

    def level(self, lse: Tensor) -> tuple[Tensor, Tensor | None]:
        """lse and log_sum for the kernels that compute weights again.

        A mask may add such large numbers (a row that is finfo.min everywhere has equal weights) that lse
        cannot hold the logarithm of how many keys share a weight.
        """
        check("lse", lse, (self.B, self.H, self.L), self.wide)
        if not self.float_mask:
            return lse.contiguous(), None
        level, log_sum = lse.clone(memory_format=torch.contiguous_format), self.empty(self.B, self.H, self.L)
        self.launch(
            kernels.forward_kernel, FORWARD, lambda config: self.H * self.places(config)[0],
            value=None, value_stride=None, seed=None, lse=level, log_sum=log_sum, out=None, out_stride=None,
        )  # fmt: skip
        return level, log_sum


def _check_bounds(cu_seqlens_q, cu_seqlens_k) -> tuple[Tensor, Tensor]:
    """What can be known without reading them; kernels stay inside of the tensors whatever bounds hold."""
    integers = (torch.int32, torch.int64)
    (count,) = check("cu_seqlens_q", cu_seqlens_q, (None,), *integers)
    check("cu_seqlens_k", cu_seqlens_k, (count,), *integers)
    if count == 0:
        raise RuntimeError("cu_seqlens must have at least one element")
    return cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()


def attention_forward(query: Tensor, key: Tensor, value: Tensor, *args) -> tuple[Tensor, Tensor]:
    call = _Call(query, key, value, *args[:11], packed=args[11:])
    # Heads beside channels in memory: joining them afterwards is then a view.
    out = query.new_empty((call.B, call.L, call.H, value.shape[3])).transpose(1, 2)
    lse = call.empty(call.B, call.H, call.L)
    call.add("out", out)
    call.launch(
        kernels.forward_kernel, FORWARD, lambda config: call.H * call.places(config)[0], KEYS, lse=lse,
        log_sum=None,
    )  # fmt: skip
    return out, lse


def attention_backward(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
    lse: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, alibi_slopes: Tensor | None,
    sinks: Tensor | None, dropout_seed: Tensor | None, scale: float, softcap: float, window_left: int,
    window_right: int, lower_right: bool, dropout_p: float, mask_grad: bool, alibi_grad: bool,
    sinks_grad: bool, *packed,
) -> tuple[Tensor, ...]:  # fmt: skip
    # Key heads that no query head reads have no program of their own.
    allocate = torch.empty_like if query.shape[1] > 0 else torch.zeros_like
    grads = [allocate(t) for t in (query, key, value)]
    call = _Call(
        query, key, value, attn_mask, key_padding_mask, alibi_slopes, sinks, dropout_seed, scale, softcap,
        window_left, window_right, lower_right, dropout_p, packed,
    )  # fmt: skip
    B, H, L = call.B, call.H, call.L
    for name, tensor in (("grad_out", grad_out), ("out", out)):
        check(name, tensor, (B, H, L, value.shape[3]), query.dtype)
    if grad_lse is not None:
        check("grad_lse", grad_lse, (B, H, L), call.wide)
    for name, tensor, wanted in (
        ("attn_mask", attn_mask, mask_grad), ("alibi_slopes", alibi_slopes, alibi_grad),
        ("sinks", sinks, sinks_grad),
    ):  # fmt: skip
        if wanted and (tensor is None or not tensor.is_floating_point()):
            raise RuntimeError(f"{name} must be floating point to have a gradient, got {tensor}")
    strided = {"grad_out": grad_out, "out": out, "grad_lse": grad_lse}
    strided |= zip(("grad_query", "grad_key", "grad_value"), grads, strict=True)
    for name, tensor in strided.items():
        call.add(name, tensor)
    level, log_sum = call.level(lse)
    delta, levels = call.empty(B, H, L), call.empty(B, H, L)
    # Windows alone decide by themselves which rows see nothing.
    masked = attn_mask is not None or key_padding_mask is not None
    seen_rows = mask_numbers(call.empty(B, H, L).bool(), call.dtype) if masked else None
    saved = {"lse": level, "log_sum": log_sum, "delta": delta, "levels": levels, "seen_rows": seen_rows}

    config = choose_config(GRAD_QUERY, call.device, call.dtype, call.width)
    places = call.places(config)[0]
    alibi_sum = call.empty(H, places) if alibi_grad else None
    sinks_sum = call.empty(H, places) if sinks_grad else None
    call.launch(
        kernels.grad_query_kernel, GRAD_QUERY, lambda config: H * places, KEYS, alibi_sum=alibi_sum,
        sinks_sum=sinks_sum, **saved,
    )  # fmt: skip
    call.launch(
        kernels.grad_key_value_kernel, GRAD_KEY_VALUE,
        lambda config: (key.shape[1] if H > 0 else 0) * call.places(config)[1], QUERIES, **saved,
    )  # fmt: skip
    grad_mask, grad_alibi, grad_sinks = query.new_empty(0), query.new_empty(0), query.new_empty(0)
    if mask_grad:
        grad_mask = _sum_mask_grad(call, attn_mask, saved)
    if alibi_grad:
        grad_alibi = _sum_tiles(call, config, alibi_sum)
        grad_alibi = (grad_alibi if alibi_slopes.dim() > 1 else grad_alibi.sum(0)).to(alibi_slopes.dtype)
    if sinks_grad:
        grad_sinks = _sum_tiles(call, config, sinks_sum).sum(0).to(sinks.dtype)
    return *grads, grad_mask, grad_alibi, grad_sinks


def _sum_tiles(call: _Call, config: Config, partial: Tensor) -> Tensor:
    """(N, H) sums over what the programs of the queries left."""
    if call.bounds is None:
        return partial.view(call.B, call.H, call.tiles(config)[0]).sum(-1)
    total = call.empty(call.H, call.N)
    launch(
        kernels.sum_tiles_kernel, total.numel(), Config(config.rows, 1, 1, 1), partial=partial,
        total=total, bounds=call.bounds[0], N=call.N, length=call.L, BLOCK=config.rows,
    )  # fmt: skip
    return total.T


def _sum_mask_grad(call: _Call, attn_mask: Tensor, saved: dict[str, Tensor]) -> Tensor:
    config = choose_config(GRAD_QUERY, call.device, call.dtype, call.width)
    whole = (call.B, call.H, *call.tiles(config))
    # A dimension of size 1 is one tile, added up over everything; where there is one of everything, too.
    split = [n != 1 for n in call.mask_shape]
    sizes = tuple(n if own else 1 for n, own in zip(whole, split, strict=True))
    shared = tuple(1 if own else n for n, own in zip(whole, split, strict=True))
    tiles, items = math.prod(sizes), math.prod(shared)
    chunks = min(max(CHUNKS // max(tiles, 1), 1), max(items, 1))
    partial = call.empty(chunks, *call.mask_shape)
    call.launch(
        kernels.grad_mask_kernel, GRAD_QUERY, lambda config: tiles * chunks, grad_mask=partial,
        grad_mask_stride=partial.stride(), sizes=sizes, shared=shared, chunks=chunks,
        per_chunk=-(-items // chunks), ROWS_SHARED=not split[2],
        KEYS_SHARED=not split[3], **saved,
    )  # fmt: skip
    total = partial.sum(0) if chunks > 1 else partial[0]
    return total.to(attn_mask.dtype).reshape(attn_mask.shape)


def attention_weights(
    query: Tensor, key: Tensor, lse: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None,
    alibi_slopes: Tensor | None, sinks: Tensor | None, dropout_seed: Tensor | None, *args,
) -> Tensor:  # fmt: skip
    *options, average_heads = args
    call = _Call(query, key, None, attn_mask, key_padding_mask, alibi_slopes, sinks, dropout_seed, *options)
    level, log_sum = call.level(lse)
    shape = (call.B, call.L, call.S) if average_heads else (call.B, call.H, call.L, call.S)
    weights = query.new_empty(shape)
    call.launch(
        kernels.weights_kernel, FORWARD, lambda config: math.prod((*shape[:-2], *call.tiles(config))),
        weights=weights, lse=level, log_sum=log_sum, AVERAGE=average_heads,
    )  # fmt: skip
    return weights


def attention_forward_with_weights(
    query: Tensor, key: Tensor, value: Tensor, *args
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse = attention_forward(query, key, value, *args[:-1])
    return out, lse, attention_weights(query, key, lse, *args)
