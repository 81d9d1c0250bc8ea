"""Multi-head attention: torch.nn.MultiheadAttention with fastattn's attention inside."""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn._native import has_kernel
from fastattn.ops._attention_autograd import causality_op
from fastattn.ops._common import call_op
from fastattn.ops._jagged import pack
from fastattn.ops.attention import attention_with_weights, scaled_dot_product_attention
from fastattn.ops.varlen_attention import varlen_attention

_HOOK = "fastattn.forward"


class MultiheadAttention(nn.MultiheadAttention):
    r"""``torch.nn.MultiheadAttention`` with the same constructor, parameters and numbers, but faster.

    ``concat(head_1, ..., head_H) W_o + b_o`` with
    ``head_h = softmax(q_h k_h^T / sqrt(D) + mask_h) v_h``, where ``q_h, k_h, v_h`` are the head's slices of
    ``query W_q + b_q``, ``key W_k + b_k``, ``value W_v + b_v`` and ``D = embed_dim / num_heads``.

    Being a subclass, it passes every ``isinstance`` check and may stand wherever torch's module stands. Its
    ``forward`` is then really what runs, also in ``nn.TransformerEncoderLayer`` in evaluation without
    gradients, where torch would otherwise compute the whole layer in one fused call and skip the module.

    Shapes: see :meth:`forward`. Masks have the meaning of torch's module: ``True`` hides.

    Precision: products accumulate in fp32 (fp64 for fp64) and are rounded once to the input's dtype.
    Training, evaluation, ``no_grad`` and ``need_weights`` give the same result up to rounding.

    Empty rows: a query that sees no key has attention weights 0 and attention output 0, so that the module
    returns the bias of ``out_proj`` there, where torch returns NaN. Its gradients are 0.

    Raises:
        ValueError: ``embed_dim`` or ``num_heads`` is not positive.
        AssertionError: ``num_heads`` does not divide ``embed_dim``.

    Source: Vaswani et al., Attention Is All You Need, https://arxiv.org/abs/1706.03762; Dao et al.,
    FlashAttention, https://arxiv.org/abs/2205.14135.

    Example:
        >>> import torch, fastattn
        >>> attention = fastattn.nn.MultiheadAttention(16, 4, batch_first=True)
        >>> x = torch.randn(2, 5, 16)
        >>> out, weights = attention(x, x, x)
        >>> out.shape, weights.shape
        (torch.Size([2, 5, 16]), torch.Size([2, 5, 5]))
        >>> reference = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        >>> reference.load_state_dict(attention.state_dict())
        <All keys matched successfully>
        >>> torch.allclose(out, reference(x, x, x)[0], atol=1e-6)
        True
    """

    def __init__(
        self,
        embed_dim,
        num_heads,
        dropout=0.0,
        bias=True,
        add_bias_kv=False,
        add_zero_attn=False,
        kdim=None,
        vdim=None,
        batch_first=False,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            dropout=dropout,
            bias=bias,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        keep_own_forward(self)

    def __setstate__(self, state):
        super().__setstate__(state)
        keep_own_forward(self)

    def __prepare_scriptable__(self):
        raise NotImplementedError(
            "fastattn.nn.MultiheadAttention cannot be compiled by torch.jit.script; "
            "use torch.compile, torch.export or torch.jit.trace"
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        r"""Attend from ``query`` to ``key`` and ``value``.

        Shapes, with N the batch size, L the query length, S the key length, E ``embed_dim``, H ``num_heads``:

        ====================  ====================  ===================  ===================
        argument              sequence first        ``batch_first``      unbatched
        ====================  ====================  ===================  ===================
        ``query``             (L, N, E)             (N, L, E)            (L, E)
        ``key``               (S, N, kdim)          (N, S, kdim)         (S, kdim)
        ``value``             (S, N, vdim)          (N, S, vdim)         (S, vdim)
        ``key_padding_mask``  (N, S)                (N, S)               (S,)
        ``attn_mask``         (L, S), (N*H, L, S)   (L, S), (N*H, L, S)  (L, S), (H, L, S)
        ====================  ====================  ===================  ===================

        Entry n*H + h of a three-dimensional mask is that of batch n and head h.

        Args:
            key_padding_mask: boolean, ``True`` hides the key from every query; or floating point, added to
                the scores, -inf hides.
            need_weights: also return the attention weights. Averaged over heads they are summed as they are
                formed; an (N, H, L, S) tensor exists only where a gradient flows back into them.
            attn_mask: boolean, ``True`` hides; or floating point, added to the scaled scores, -inf hides.
                Its dtype is that of the projected query or float32.
            average_attn_weights: return the mean of the weights over heads rather than the weights per head.
            is_causal: a hint that ``attn_mask``, which must be given, is causal. The mask decides: a hint
                that contradicts it changes nothing. On the CPU a true hint saves the hidden half of the work.

        Keys appended by ``add_bias_kv`` and ``add_zero_attn`` come last, in that order, and are never hidden.

        In strided nested tensors, as ``nn.TransformerEncoder`` makes of padded batches in evaluation, only
        self-attention without masks exists, as in torch. Nested tensors (N, ragged, E) of
        ``layout=torch.jagged`` are attended to without padding, forward and backward, with ``batch_first``;
        ``is_causal`` then needs no mask, and hides later positions of the same sequence.

        Returns:
            The output, shaped like ``query``, contiguous; and the weights after dropout, in the dtype of the
            projected query: (N, L, S), or (N, H, L, S) per head, without N if unbatched, or ``None`` if
            ``need_weights`` is false. S counts appended keys.

        Raises:
            AssertionError: a tensor has the wrong number of dimensions; ``query`` does not end in
                ``embed_dim``; ``key`` and ``value`` disagree; a mask is neither boolean nor floating point;
                ``key_padding_mask`` has the wrong shape; nested tensors beyond the case above.
            RuntimeError: ``attn_mask`` has the wrong shape or a floating dtype that does not fit; the batch
                sizes of ``query`` and ``key`` differ; ``is_causal`` without ``attn_mask``; whatever
                ``F.linear`` raises on inputs that do not fit the weights.

        Example:
            >>> import torch, fastattn
            >>> attention = fastattn.nn.MultiheadAttention(8, 2)
            >>> x = torch.randn(3, 1, 8)
            >>> future = torch.ones(3, 3, dtype=torch.bool).triu(1)
            >>> out, weights = attention(x, x, x, attn_mask=future, is_causal=True)
            >>> weights[0, 0]
            tensor([1., 0., 0.], grad_fn=<SelectBackward0>)
        """
        _check_mask_dtypes(key_padding_mask, attn_mask)
        if query.is_nested or key.is_nested or value.is_nested:
            if attn_mask is not None or key_padding_mask is not None:
                raise AssertionError("MultiheadAttention takes no masks beside nested tensors")
            if query.layout == torch.jagged:
                return self._jagged_attention(
                    query, key, value, need_weights, average_attn_weights, is_causal
                )
            if is_causal:
                raise AssertionError(
                    "is_causal is supported only beside nested tensors of layout=torch.jagged"
                )
            return self._nested_self_attention(query, key, value, need_weights, average_attn_weights)
        return self._attend(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )

    def _attend(
        self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
    ):
        batched = query.dim() == 3
        batch_major = self.batch_first or not batched
        self._check_ranks(query, key, value, key_padding_mask, attn_mask)
        if attn_mask is None and is_causal:
            raise RuntimeError(
                "is_causal=True is a hint about attn_mask, and needs attn_mask; "
                "nn.Transformer.generate_square_subsequent_mask makes a causal one"
            )
        if not batched:
            # The `is` relations decide how many matrix products the projection takes: keep them.
            same_key, same_value = key is query, value is key
            query = query.unsqueeze(0)
            key = query if same_key else key.unsqueeze(0)
            value = key if same_value else value.unsqueeze(0)
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.unsqueeze(0)
        N, L, S = self._check_sizes(query, key, value, key_padding_mask, attn_mask, batch_major)

        q, k, v = self._project(query, key, value)
        k, v = self._append_keys(k, v, batch_major)
        if attn_mask is not None or key_padding_mask is not None:
            attn_mask, key_padding_mask, is_causal = self._attend_masks(
                attn_mask, key_padding_mask, is_causal, (N, L, S), q.dtype
            )
        # To (N, H, L, D). Spelled out, because small calls consist of such lines.
        if batch_major:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        else:
            q, k, v = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)
        dropout_p = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            out, weights = attention_with_weights(
                q,
                k,
                v,
                attn_mask,
                key_padding_mask=key_padding_mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
                average_weights=average_attn_weights,
            )
        else:
            out = scaled_dot_product_attention(
                q, k, v, attn_mask, dropout_p, is_causal, key_padding_mask=key_padding_mask
            )
        # Their memory is wanted for the last projection.
        del q, k, v
        # The kernel writes (N, L, H, D): with the batch first the heads already lie side by side.
        out = (out.transpose(1, 2) if batch_major else out.permute(2, 0, 1, 3)).flatten(-2)
        if not batched:
            out = out.squeeze(0)
            weights = None if weights is None else weights.squeeze(0)
        return self.out_proj(out), weights

    def _check_ranks(self, query, key, value, key_padding_mask, attn_mask):
        if query.dim() not in (2, 3):
            raise AssertionError(
                f"query should be unbatched 2D or batched 3D tensor but received {query.dim()}-D query tensor"
            )
        rank = query.dim()
        given = f"For {'batched' if rank == 3 else 'unbatched'} ({rank}-D) `query`, expected"
        if key.dim() != rank or value.dim() != rank:
            raise AssertionError(
                f"{given} `key` and `value` to be {rank}-D but found {key.dim()}-D and "
                f"{value.dim()}-D tensors respectively"
            )
        if key_padding_mask is not None and key_padding_mask.dim() != rank - 1:
            raise AssertionError(
                f"{given} `key_padding_mask` to be `None` or {rank - 1}-D but found "
                f"{key_padding_mask.dim()}-D tensor instead"
            )
        if attn_mask is not None and attn_mask.dim() not in (2, 3):
            raise AssertionError(
                f"{given} `attn_mask` to be `None`, 2-D or 3-D but found {attn_mask.dim()}-D tensor instead"
            )
        if rank == 2 and attn_mask is not None and attn_mask.dim() == 3:
            expected = (self.num_heads, query.shape[0], key.shape[0])
            if attn_mask.shape != expected:
                raise AssertionError(
                    f"Expected `attn_mask` shape to be {expected} but got {tuple(attn_mask.shape)}"
                )

    def _check_sizes(self, query, key, value, key_padding_mask, attn_mask, batch_major):
        """Return (N, L, S), S without appended keys."""
        N, L = query.shape[:2] if batch_major else (query.shape[1], query.shape[0])
        key_batch, S = key.shape[:2] if batch_major else (key.shape[1], key.shape[0])
        if query.shape[-1] != self.embed_dim:
            raise AssertionError(
                f"was expecting embedding dimension of {self.embed_dim}, but got {query.shape[-1]}"
            )
        if self._qkv_same_embed_dim and key.shape != value.shape:
            raise AssertionError(
                f"key shape {tuple(key.shape)} does not match value shape {tuple(value.shape)}"
            )
        if key.shape[:2] != value.shape[:2]:
            raise AssertionError(
                f"key's sequence and batch dims {tuple(key.shape[:2])} do not match value's "
                f"{tuple(value.shape[:2])}"
            )
        if not self._qkv_same_embed_dim and (key.shape[-1], value.shape[-1]) != (self.kdim, self.vdim):
            raise AssertionError(
                f"expected key and value to end in kdim={self.kdim} and vdim={self.vdim}, but got "
                f"{key.shape[-1]} and {value.shape[-1]}"
            )
        if attn_mask is not None:
            expected = (L, S) if attn_mask.dim() == 2 else (N * self.num_heads, L, S)
            if attn_mask.shape != expected:
                raise RuntimeError(
                    f"The shape of the {attn_mask.dim()}D attn_mask is {tuple(attn_mask.shape)}, "
                    f"but should be {expected}."
                )
        if key_batch != N:
            raise RuntimeError(f"key and value have batch size {key_batch}, but query has {N}")
        if key_padding_mask is not None and key_padding_mask.shape != (N, S):
            raise AssertionError(
                f"Expected key_padding_mask shape to be {(N, S)}, but got {tuple(key_padding_mask.shape)}"
            )
        return N, L, S

    def _project(self, query, key, value):
        """Project to heads, (..., H, D) each: one matrix product per distinct input, views, no copies."""
        heads = (self.num_heads, self.head_dim)
        E, bias = self.embed_dim, self.in_proj_bias
        if not self._qkv_same_embed_dim:
            inputs = (query, key, value)
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            biases = (None, None, None) if bias is None else bias.chunk(3)
            projected = (F.linear(*args) for args in zip(inputs, weights, biases, strict=True))
            return tuple(x.unflatten(-1, heads) for x in projected)
        weight = self.in_proj_weight
        if query is key and key is value:
            return F.linear(query, weight, bias).unflatten(-1, (3, *heads)).unbind(-3)
        sizes = (E, 2 * E) if key is value else (E, E, E)
        weights = weight.split(sizes)
        biases = (None,) * len(sizes) if bias is None else bias.split(sizes)
        q = F.linear(query, weights[0], biases[0]).unflatten(-1, heads)
        if key is value:
            return q, *F.linear(key, weights[1], biases[1]).unflatten(-1, (2, *heads)).unbind(-3)
        k = F.linear(key, weights[1], biases[1]).unflatten(-1, heads)
        v = F.linear(value, weights[2], biases[2]).unflatten(-1, heads)
        return q, k, v

    @property
    def _appended_keys(self):
        return (self.bias_k is not None) + bool(self.add_zero_attn)

    def _append_keys(self, k, v, batch_major):
        if (self.bias_k is None) != (self.bias_v is None):
            raise AssertionError("bias_k and bias_v must both be set or both be None")
        if not self._appended_keys:
            return k, v
        sequence, batch = (1, 0) if batch_major else (0, 1)
        one_key = list(k.shape)
        one_key[sequence] = 1

        def append(x, bias):
            parts = [x]
            if bias is not None:
                # Under autocast the projections are of the lower precision, the parameter is not.
                parts.append(bias.to(x.dtype).view(1, 1, *x.shape[2:]).expand(one_key))
            if self.add_zero_attn:
                parts.append(x.new_zeros(one_key))
            return torch.cat(parts, dim=sequence)

        return append(k, self.bias_k), append(v, self.bias_v)

    def _attend_masks(self, attn_mask, key_padding_mask, is_causal, sizes, dtype):
        """Turn the masks into those of scaled_dot_product_attention, where True attends.

        A padding mask stays a row per sequence whenever it can: merged into attn_mask it would be N times
        as large as that.
        """
        N, L, S = sizes
        merged = _merged_dtype(attn_mask, key_padding_mask, dtype)
        # An appended key must stay visible to the first queries: there the causal mask has to be spelled out.
        # The hint is looked at last, because inside a compiled nn.TransformerEncoder it is not a known value.
        readable = attn_mask is not None and not self._appended_keys and _may_read(attn_mask)
        if readable and is_causal:
            attn_mask, is_causal = _split_causal(attn_mask)
        else:
            is_causal = False
        if attn_mask is not None:
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.unflatten(0, (N, self.num_heads))
            attn_mask = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask.to(merged)
        if key_padding_mask is not None:
            if key_padding_mask.dtype == torch.bool:
                key_padding_mask = ~key_padding_mask
            elif _hides_or_keeps(key_padding_mask):
                key_padding_mask = key_padding_mask == 0
            else:
                bias = key_padding_mask.view(N, 1, 1, S).to(merged)
                if attn_mask is None:
                    attn_mask = bias
                elif attn_mask.dtype == torch.bool:
                    attn_mask = torch.where(attn_mask, bias, float("-inf"))
                else:
                    attn_mask = attn_mask + bias
                key_padding_mask = None
        if self._appended_keys:
            attn_mask, key_padding_mask = (
                None if m is None else F.pad(m, (0, self._appended_keys), value=float(m.dtype == torch.bool))
                for m in (attn_mask, key_padding_mask)
            )
        return attn_mask, key_padding_mask, is_causal

    def _jagged_attention(self, query, key, value, need_weights, average_attn_weights, is_causal):
        sizes = (self.embed_dim, self.kdim, self.vdim)
        for name, x, size in zip(("query", "key", "value"), (query, key, value), sizes, strict=True):
            if not (x.is_nested and x.layout == torch.jagged and x.dim() == 3 and self.batch_first):
                raise AssertionError(
                    f"{name} must be nested (N, ragged, features) of layout=torch.jagged, as query is, with "
                    "batch_first=True"
                )
            if x.shape[0] != query.shape[0] or x.shape[2] != size:
                raise AssertionError(
                    f"{name} must be nested ({query.shape[0]}, ragged, {size}), got {tuple(x.shape)}"
                )
        if need_weights or self._appended_keys:
            raise AssertionError(
                "nested tensors of layout=torch.jagged need need_weights=False, and no add_bias_kv or "
                "add_zero_attn"
            )
        # The same tensor stays the same: one projection for all.
        packed = {id(x): pack(x) for x in (query, key, value)}
        queries, keys, values = (packed[id(x)] for x in (query, key, value))
        if keys is not values and not torch.equal(keys.bounds, values.bounds):
            raise AssertionError("key and value must have the same lengths")
        q, k, v = self._project(queries.tokens, keys.tokens, values.tokens)
        dropout_p = self.dropout if self.training else 0.0
        out = varlen_attention(
            q,
            k,
            v,
            queries.bounds,
            keys.bounds,
            dropout_p=dropout_p,
            is_causal=is_causal,
            causal_alignment="upper_left",
        )
        out = self.out_proj(out.flatten(-2))
        return queries.restore(out), None

    def _nested_self_attention(self, query, key, value, need_weights, average_attn_weights):
        supported = query is key and key is value and query.layout == torch.strided and self.batch_first
        if not (supported and query.dim() == 3):
            raise AssertionError(
                "MultiheadAttention supports nested tensors only as strided ones of (length, embed_dim) "
                "sequences, in self-attention (query is key is value) with batch_first=True"
            )
        lengths = query._nested_tensor_size()[:, 0].to(query.device)
        x = query.to_padded_tensor(0.0)
        real = torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)
        out, weights = self._attend(x, x, x, ~real, need_weights, None, average_attn_weights, False)
        if weights is not None:
            rows = real.unsqueeze(-1) if average_attn_weights else real[:, None, :, None]
            weights = weights.masked_fill(~rows, 0.0)
        return torch._nested_tensor_from_mask(out, real), weights


def keep_own_forward(module: nn.MultiheadAttention) -> None:
    """Make code that would bypass ``module.forward`` call it.

    In evaluation without gradients nn.TransformerEncoderLayer hands its parameters to one fused function
    instead of calling its children, unless one of them has a forward hook: a hook asks for the call. So a
    hook that does nothing keeps the call, for this module alone. The key is a name, because the numbers torch
    gives to hooks start again in every process and may collide with those of an unpickled module.
    """
    module._forward_pre_hooks[_HOOK] = _call_forward


def _call_forward(module, args):
    return None


def _check_mask_dtypes(key_padding_mask, attn_mask):
    for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
        if mask is not None and not torch.is_floating_point(mask) and mask.dtype != torch.bool:
            raise AssertionError(f"only bool and floating types of {name} are supported, not {mask.dtype}")
    if key_padding_mask is None or attn_mask is None or torch.compiler.is_compiling():
        return
    if key_padding_mask.dtype != attn_mask.dtype:
        warnings.warn(
            "Support for mismatched key_padding_mask and attn_mask is deprecated. "
            "Use same type for both instead.",
            stacklevel=3,
        )


def _merged_dtype(attn_mask, key_padding_mask, dtype):
    """The dtype of the one mask that both would make, where a boolean one counts as `dtype`, the query's.

    As in torch, it and nothing else decides which dtypes go together: not what the masks hold.
    """
    masks = (m for m in (attn_mask, key_padding_mask) if m is not None)
    dtypes = [dtype if m.dtype == torch.bool else m.dtype for m in masks] or [dtype]
    merged = torch.promote_types(dtypes[0], dtypes[-1])
    if merged in (dtype, torch.float32):
        return merged
    mask = key_padding_mask if attn_mask is None else attn_mask
    if not mask.is_meta and torch.is_autocast_enabled(mask.device.type):
        return dtype
    raise RuntimeError(
        f"attn_mask and key_padding_mask must be boolean, {dtype} like the projected query, "
        f"or torch.float32, but merge to {merged}"
    )


def _may_read(mask):
    """Whether Python may branch on the values of the mask.

    Not where the answer would be frozen into a graph, does not exist (fake, vmapped) or stalls a GPU.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return (
        mask.device.type == "cpu"
        and type(mask) in (Tensor, nn.Parameter)
        and not torch._C._functorch.is_functorch_wrapped_tensor(mask)
        and torch._C._len_torch_dispatch_stack() == 0
    )


def _split_causal(mask):
    """Split a mask that is claimed to be causal into (what remains to be applied, whether it is causal).

    Comparing costs one pass over the mask; believing a wrong claim would give another result than the same
    call with need_weights or in another mode.
    """
    if has_kernel("fastattn::attention_causality"):
        causality = call_op(causality_op, mask)
        return None if causality == 2 and not mask.requires_grad else mask, causality > 0
    hidden = True if mask.dtype == torch.bool else float("-inf")
    if not mask.requires_grad and torch.equal(mask, torch.full_like(mask, hidden).triu_(1)):
        return None, True
    visible_future = (mask != hidden).triu(1).any()
    return mask, not bool(visible_future)


def _hides_or_keeps(mask):
    """Whether a floating-point padding mask is a boolean one in disguise: 0 and -inf only."""
    return _may_read(mask) and not mask.requires_grad and bool(((mask == 0) | (mask == float("-inf"))).all())
