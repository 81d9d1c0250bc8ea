"""Random features whose products estimate the softmax kernel."""

import math

import torch
from torch import Tensor, nn

from fastattn.ops._common import integer
from fastattn.reference._common import without_autocast

# The largest exponent of a feature. A sum over a million tokens of products of two features stays finite in
# the float32 (float64) state, and one feature in float16; inputs of ordinary size stay far below.
_LARGEST_EXPONENT = {torch.float64: 340.0, torch.float16: 10.0}
_LARGEST_EXPONENT_ELSE = 35.0


class FavorFeatures(nn.Module):
    r"""FAVOR+: positive orthogonal random features, with which linear attention estimates softmax attention.

    ``phi(x)_i = exp(w_i . x / D^(1/4) - |x|^2 / (2 sqrt(D))) / sqrt(M)`` for i = 1, ..., M, so that
    ``E[phi(q) . phi(k)] = exp(q . k / sqrt(D))``, the softmax kernel with its usual scale. The rows ``w_i``
    are standard normal and, within each block of D, orthogonal to one another, which lowers the variance.

    Pass it as ``feature_map`` to ``fastattn.linear_attention``, its step, or
    ``fastattn.nn.LinearMultiheadAttention``; all heads share it. The relative error of the kernel falls like
    ``1 / sqrt(M)`` and grows exponentially with ``|q| |k| / sqrt(D)``: large scores are estimated badly.

    The projection ``w`` is a buffer in the ``state_dict``. It is drawn once, from torch's CPU generator, and
    stays: training, evaluation, the whole sequence and its single steps see the same features. ``redraw()``
    draws another one when asked.

    Stability: each token's features depend on that token alone. No maximum over the sequence is subtracted,
    which in causal attention would let the past depend on the future and in steps cannot exist. The exponent
    is at most ``|w_i|^2 / 2`` by itself and is cut at 35 (float16: 10, float64: 340), so that features and
    sums of their products are finite. A feature whose exponent is cut has no gradient. Features of a long
    vector, with ``|x| / D^(1/4)`` above about 12, underflow; choose a small ``eps`` beside them, it is added
    to a denominator which may then be small.

    Args:
        head_dim: D, the last dimension of the input.
        num_features: M; 4 D if not given.
        generator: a CPU generator to draw the projection from.
        device: where the projection is.
        dtype: of the projection, torch's default dtype if not given.

    Shapes: input ``(..., D)``, output ``(..., M)`` in the dtype of the input.

    Precision: exponents are computed in float32 (float64 for float64), also under autocast, and the features
    are rounded once.

    Raises:
        ValueError: ``head_dim`` or ``num_features`` is not positive; an input does not end in ``head_dim``.
        TypeError: ``head_dim`` or ``num_features`` is not an integer; ``dtype`` or an input is not floating
            point.

    Source: Choromanski et al., Rethinking Attention with Performers, https://arxiv.org/abs/2009.14794.

    Example:
        >>> import torch, fastattn
        >>> favor = fastattn.nn.FavorFeatures(head_dim=16, num_features=4096)
        >>> q, k, v = (0.5 * torch.randn(1, 2, 10, 16) for _ in range(3))
        >>> estimate = fastattn.linear_attention(q, k, v, feature_map=favor, is_causal=True)
        >>> exact = fastattn.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> bool((estimate - exact).norm() < 0.1 * exact.norm())
        True
    """

    projection: Tensor

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        *,
        generator: torch.Generator | None = None,
        device=None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        head_dim = integer("head_dim", head_dim, 1)
        num_features = 4 * head_dim if num_features is None else integer("num_features", num_features, 1)
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating point dtype, got {dtype}")
        self.head_dim = head_dim
        self.num_features = num_features
        self.register_buffer("projection", torch.empty(num_features, head_dim, device=device, dtype=dtype))
        self.redraw(generator)

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw another projection. States that were accumulated with the old one are void."""
        self.projection.copy_(_orthogonal_normal(self.num_features, self.head_dim, generator))

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            found = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"FavorFeatures expects floating point tensors, got {found}")
        if x.shape[-1:] != (self.head_dim,):
            raise ValueError(f"FavorFeatures expects inputs (..., {self.head_dim}), got {tuple(x.shape)}")
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        # Under autocast the product would be of half precision, and an error in an exponent is relative.
        with without_autocast(x):
            scaled = x.to(wide) * self.head_dim**-0.25
            exponent = scaled @ self.projection.to(wide).T - scaled.square().sum(-1, keepdim=True) / 2
            exponent = exponent.clamp(max=_LARGEST_EXPONENT.get(x.dtype, _LARGEST_EXPONENT_ELSE))
            return (exponent - math.log(self.num_features) / 2).exp().to(x.dtype)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, num_features={self.num_features}"


def _orthogonal_normal(rows: int, columns: int, generator: torch.Generator | None) -> Tensor:
    """Rows that are each standard normal, and orthogonal to one another within blocks of ``columns``."""
    blocks = -(-rows // columns)
    normal = torch.randn(2, blocks, columns, columns, dtype=torch.float64, generator=generator)
    q, r = torch.linalg.qr(normal[0])
    # QR is unique up to signs; with those of r's diagonal the directions are uniform on the sphere.
    directions = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    lengths = normal[1].norm(dim=-1, keepdim=True)
    return (directions.transpose(-2, -1) * lengths).reshape(-1, columns)[:rows]
