"""Multi-head attention with linear attention inside, and its recurrent form."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.nn.multihead_attention import (
    MultiheadAttention,
    _check_mask_dtypes,
    _hides_or_keeps,
    _may_read,
    _split_causal,
)
from fastattn.ops._common import check_flags, integer, number, wide_dtype
from fastattn.ops.linear_attention import LinearAttentionState, linear_attention, linear_attention_step

FeatureMap = str | Callable[[Tensor], Tensor]


class LinearMultiheadAttention(MultiheadAttention):
    r"""Multi-head attention whose heads compute linear attention: time and memory linear in the length.

    ``concat(head_1, ..., head_H) W_o + b_o`` as in ``nn.MultiheadAttention``, with

    ``head_h[i] = sum_j (phi(q_i) . phi(k_j)) v_j / (sum_j phi(q_i) . phi(k_j) + eps)``,

    where j runs over the visible keys, all of them or with ``is_causal`` those up to i. What a causal layer
    has seen fits a state of fixed size: :meth:`step` continues by one token, in time and memory that do not
    depend on how many went before.

    Parameters, their names and their initial values for a seed are those of ``torch.nn.MultiheadAttention``,
    so that a ``state_dict`` can be carried over in both directions. The function is another one than softmax
    attention, unless the feature map makes it an estimate of it (:class:`FavorFeatures`): models are trained
    with it or fine-tuned after the exchange. The module may stand in ``nn.TransformerEncoderLayer``.

    Args:
        embed_dim, num_heads, bias, kdim, vdim, batch_first, device, dtype: as in ``nn.MultiheadAttention``.
        dropout: must be 0. Linear attention forms no attention weights that could be dropped.
        add_bias_kv, add_zero_attn: must be false.
        num_kv_heads: heads of key and value, ``num_heads`` if not given; must divide ``num_heads``. Each
            serves ``num_heads / num_kv_heads`` consecutive query heads. ``in_proj_weight`` then has
            ``embed_dim + 2 * num_kv_heads * head_dim`` rows.
        feature_map: phi, applied to each head's queries and keys: ``"elu"`` (elu(x) + 1), ``"relu"``,
            ``"exp"``, ``"identity"``, a callable of ``(..., head_dim)`` tensors, or a module, which becomes a
            submodule.
        decay: log-decay per head, ``num_heads`` numbers: before each token the state is multiplied by
            ``exp(decay)``, so usually it is negative. An ``nn.Parameter`` is learnt, anything else is a
            buffer. Causal attention only.
        normalize: divide by the sum of the weights.
        eps: added to that sum.

    Empty rows: a query that sees no key has attention output 0, so that the module returns the bias of
    ``out_proj`` there. Its gradients are 0.

    Precision: products accumulate in fp32 (fp64 for fp64), states and denominators stay in it.

    Raises:
        ValueError, TypeError: an argument of the constructor is out of its range, or is something else.
        NotImplementedError: ``dropout``, ``add_bias_kv`` or ``add_zero_attn`` is given.

    Source: Katharopoulos et al., Transformers are RNNs, https://arxiv.org/abs/2006.16236.

    Example:
        A stack of layers reads a prompt at once and goes on token by token. Its states are a list.

        >>> import torch, fastattn
        >>> layers = [fastattn.nn.LinearMultiheadAttention(16, 4, batch_first=True) for _ in range(3)]
        >>> x, states = torch.randn(2, 5, 16), []
        >>> for layer in layers:
        ...     x, state = layer(x, x, x, is_causal=True, return_state=True)
        ...     states.append(state)
        >>> token = torch.randn(2, 16)
        >>> for i, layer in enumerate(layers):
        ...     token, states[i] = layer.step(token, states[i])
        >>> token.shape
        torch.Size([2, 16])

        Beam search picks the sequences that survive in every layer's state.

        >>> states = [state.index_select(torch.tensor([1, 1])) for state in states]
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device=None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        feature_map: FeatureMap = "elu",
        decay: Tensor | Sequence[float] | None = None,
        normalize: bool = True,
        eps: float = 1e-6,
    ) -> None:
        if dropout:
            raise NotImplementedError(
                f"dropout={dropout}: linear attention has no weights to drop; apply nn.Dropout to the output"
            )
        for name, given in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if given:
                raise NotImplementedError(f"{name}={given} has no counterpart in linear attention")
        factory = {"device": device, "dtype": dtype}
        super().__init__(
            embed_dim, num_heads, bias=bias, kdim=kdim, vdim=vdim, batch_first=batch_first, **factory
        )
        self.num_kv_heads = (
            num_heads if num_kv_heads is None else integer("num_kv_heads", num_kv_heads, -math.inf)
        )
        if self.num_kv_heads <= 0 or num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads={num_heads}, got {num_kv_heads}")
        if self.num_kv_heads != num_heads:
            self._shrink_key_and_value(**factory)
        if not callable(feature_map) and feature_map not in ("elu", "relu", "exp", "identity"):
            raise ValueError(
                f"feature_map must be 'elu', 'relu', 'exp', 'identity' or a callable, got {feature_map!r}"
            )
        self.feature_map = feature_map
        if decay is not None and not isinstance(decay, nn.Parameter):
            like = self.out_proj.weight
            decay = torch.as_tensor(decay, dtype=wide_dtype(like.dtype), device=like.device).detach().clone()
        if decay is not None and decay.shape != (num_heads,):
            raise ValueError(f"decay must hold num_heads={num_heads} numbers, got shape {tuple(decay.shape)}")
        if decay is None or isinstance(decay, nn.Parameter):
            self.register_parameter("decay", decay)
        else:
            self.register_buffer("decay", decay)
        check_flags(normalize=normalize)
        self.normalize = normalize
        self.eps = number("eps", eps)
        if not 0.0 <= self.eps < math.inf:
            raise ValueError(f"eps must be finite and not negative, got {eps}")

    def _shrink_key_and_value(self, **factory) -> None:
        kv_dim = self.num_kv_heads * self.head_dim
        rows = self.embed_dim + 2 * kv_dim
        if self._qkv_same_embed_dim:
            self.in_proj_weight = nn.Parameter(torch.empty(rows, self.embed_dim, **factory))
        else:
            self.k_proj_weight = nn.Parameter(torch.empty(kv_dim, self.kdim, **factory))
            self.v_proj_weight = nn.Parameter(torch.empty(kv_dim, self.vdim, **factory))
        if self.in_proj_bias is not None:
            self.in_proj_bias = nn.Parameter(torch.empty(rows, **factory))
        self._reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        initial_state: LinearAttentionState | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, LinearAttentionState | None]:
        r"""Attend from ``query`` to ``key`` and ``value``.

        Shapes are those of ``nn.MultiheadAttention``: ``query`` (L, N, E), or (N, L, E) with ``batch_first``,
        or (L, E) unbatched; ``key`` and ``value`` likewise with S, ``kdim`` and ``vdim``.

        Args:
            key_padding_mask: (N, S), or (S,) unbatched. Boolean, ``True`` marks padding; or floating point
                with only 0 and -inf, where -inf marks padding. What a padded key holds has no influence, and
                it neither enters nor decays the state.
            need_weights: must be false: linear attention forms no attention weights.
            attn_mask: the causal mask, (L, S) or (N*H, L, S), boolean or floating point, as other modules of
                torch pass it along, or ``None``. No other mask is possible, since no pair of query and key is
                looked at. On the CPU its values are checked. Where they cannot be read (under
                ``torch.compile`` or on a GPU) it is believed if ``is_causal`` says so, and refused otherwise.
            average_attn_weights: without meaning, for the signature.
            is_causal: token i sees the keys 0 to i. Needs no ``attn_mask``; leave it out to save the check.
            initial_state: what earlier tokens left, N sequences; see :meth:`initial_state`.
            return_state: also return the state behind the last key.

        Strided nested tensors, as ``nn.TransformerEncoder`` makes of padded batches in evaluation, are
        supported in self-attention without masks and states.

        Returns:
            The output, shaped like ``query``, and where ``nn.MultiheadAttention`` returns weights ``None``,
            or with ``return_state`` the :class:`fastattn.LinearAttentionState` behind the last key.

        Raises:
            NotImplementedError: ``need_weights`` is true; ``attn_mask`` is not the causal mask.
            ValueError: ``key_padding_mask`` is floating point and holds other values than 0 and -inf.
            AssertionError, RuntimeError: shapes and dtypes do not fit, as in ``nn.MultiheadAttention``.
        """
        if need_weights:
            raise NotImplementedError(
                "need_weights=True: linear attention forms no attention weights; pass need_weights=False"
            )
        _check_mask_dtypes(key_padding_mask, attn_mask)
        if query.is_nested or key.is_nested or value.is_nested:
            given = (attn_mask, key_padding_mask, initial_state)
            if is_causal or return_state or any(x is not None for x in given):
                raise AssertionError(
                    "LinearMultiheadAttention takes no masks and states beside nested tensors"
                )
            return self._nested_self_attention(query, key, value, False, average_attn_weights)
        return self._attend(
            query,
            key,
            value,
            key_padding_mask,
            False,
            attn_mask,
            average_attn_weights,
            is_causal,
            initial_state,
            return_state,
        )

    def initial_state(
        self, batch_size: int, *, device=None, dtype: torch.dtype | None = None
    ) -> LinearAttentionState:
        """The state of ``batch_size`` sequences that have seen nothing; zero, float32 (float64 for float64).

        ``device`` and ``dtype`` are those of the projected inputs, the module's if not given. A feature map
        that is a function is called on zeros, without gradients: how many features it makes is not known
        otherwise.
        """
        like = self.out_proj.weight
        dtype = like.dtype if dtype is None else dtype
        device = like.device if device is None else device
        features = self.head_dim
        if callable(self.feature_map):
            with torch.no_grad():
                features = self.feature_map(like.new_zeros(1, 1, 1, self.head_dim)).shape[-1]
        return LinearAttentionState.zeros(
            batch_size, self.num_heads, features, self.head_dim, device=device, dtype=dtype
        )

    def step(
        self, x: Tensor, state: LinearAttentionState | None = None, *, inplace: bool = False
    ) -> tuple[Tensor, LinearAttentionState]:
        """One more token of causal self-attention: what ``forward(..., is_causal=True)`` gives for it.

        Args:
            x: the token of each sequence, (N, E), or (E,) unbatched.
            state: what the tokens before left behind; ``None`` is the beginning.
            inplace: overwrite ``state`` instead of allocating another one; not with gradients.

        Returns:
            The output, shaped like ``x``, and the state behind this token. The given state is unchanged
            unless ``inplace``: keep it to go on from there once more.

        Raises:
            ValueError: ``kdim`` or ``vdim`` differs from ``embed_dim``; ``x`` does not end in ``embed_dim``.
        """
        if not self._qkv_same_embed_dim:
            raise ValueError(
                f"step is self-attention and needs kdim and vdim to be embed_dim={self.embed_dim}, "
                f"got {self.kdim} and {self.vdim}"
            )
        if x.dim() not in (1, 2) or x.shape[-1] != self.embed_dim:
            raise ValueError(
                f"x must be (batch, {self.embed_dim}) or ({self.embed_dim},), got {tuple(x.shape)}"
            )
        token = x if x.dim() == 2 else x.unsqueeze(0)
        if self.num_kv_heads == self.num_heads:
            # What _project does for inputs of any rank, without the Python of Tensor.unflatten.
            projected = F.linear(token, self.in_proj_weight, self.in_proj_bias)
            q, k, v = projected.view(token.shape[0], 3, self.num_heads, self.head_dim).unbind(1)
        else:
            q, k, v = self._project(token, token, token)
        if state is None:
            state = self.initial_state(token.shape[0], device=q.device, dtype=q.dtype)
        out, state = linear_attention_step(
            q,
            k,
            v,
            state,
            feature_map=self.feature_map,
            normalize=self.normalize,
            eps=self.eps,
            decay=self.decay,
            inplace=inplace,
        )
        return self.out_proj(out.reshape(x.shape)), state

    def _attend(
        self,
        query,
        key,
        value,
        key_padding_mask,
        need_weights,
        attn_mask,
        average_attn_weights,
        is_causal,
        initial_state=None,
        return_state=False,
    ):
        batched = query.dim() == 3
        batch_major = self.batch_first or not batched
        self._check_ranks(query, key, value, key_padding_mask, attn_mask)
        if not batched:
            # The `is` relations decide how many matrix products the projection takes: keep them.
            batches = {id(x): x.unsqueeze(0) for x in (query, key, value)}
            query, key, value = (batches[id(x)] for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        self._check_sizes(query, key, value, key_padding_mask, attn_mask, batch_major)
        # (N, L, H, D) or (L, N, H, D) -> (N, H, L, D)
        order = (0, 2, 1, 3) if batch_major else (1, 2, 0, 3)
        q, k, v = (x.permute(order) for x in self._project(query, key, value))
        out = linear_attention(
            q,
            k,
            v,
            feature_map=self.feature_map,
            is_causal=_is_causal(attn_mask, is_causal),
            normalize=self.normalize,
            eps=self.eps,
            decay=self.decay,
            key_padding_mask=_attended(key_padding_mask),
            initial_state=initial_state,
            return_state=return_state,
        )
        out, state = out if return_state else (out, None)
        # The kernel writes (N, L, H, D): with the batch first the heads already lie side by side.
        out = out.permute((0, 2, 1, 3) if batch_major else (2, 0, 1, 3)).flatten(-2)
        return self.out_proj(out if batched else out.squeeze(0)), state

    def _project(self, query, key, value):
        if self.num_kv_heads == self.num_heads:
            return super()._project(query, key, value)
        kv_dim = self.num_kv_heads * self.head_dim
        sizes = (self.embed_dim, kv_dim, kv_dim)
        if query is key and key is value and self._qkv_same_embed_dim:
            projected = F.linear(query, self.in_proj_weight, self.in_proj_bias).split(sizes, -1)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if self._qkv_same_embed_dim:
                weights = self.in_proj_weight.split(sizes)
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.split(sizes)
            projected = map(F.linear, (query, key, value), weights, biases)
        return tuple(x.unflatten(-1, (-1, self.head_dim)) for x in projected)

    def extra_repr(self) -> str:
        name = "module" if isinstance(self.feature_map, nn.Module) else repr(self.feature_map)
        return f"{self.embed_dim}, num_heads={self.num_heads}, feature_map={name}"


def _is_causal(attn_mask: Tensor | None, is_causal: bool) -> bool:
    """Whether attention is causal; an ``attn_mask`` that says anything else is refused."""
    if attn_mask is None:
        return is_causal
    if _may_read(attn_mask):
        rest, _ = _split_causal(attn_mask)
        if rest is None:
            return True
        found = "another mask"
    elif is_causal:
        return True
    else:
        found = "a mask whose values cannot be read here and is_causal=False"
    raise NotImplementedError(
        f"attn_mask must be the causal mask, the only one that linear attention can have, got {found}; "
        "fastattn.nn.MultiheadAttention takes any mask"
    )


def _attended(key_padding_mask: Tensor | None) -> Tensor | None:
    """The mask in the operator's sense, where True attends."""
    if key_padding_mask is None:
        return None
    if key_padding_mask.dtype == torch.bool:
        return ~key_padding_mask
    message = "key_padding_mask must be boolean or hold only 0 and -inf: linear attention takes no other bias"
    if _may_read(key_padding_mask):
        if not _hides_or_keeps(key_padding_mask):
            raise ValueError(message)
    else:
        torch._assert_async(((key_padding_mask == 0) | (key_padding_mask == float("-inf"))).all(), message)
    return key_padding_mask == 0
