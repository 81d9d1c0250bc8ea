"""The causal product of idiap's fast-transformers (pytorch-fast-transformers on PyPI)."""

from torch import Tensor

from fastattn.ops.linear_attention import linear_attention

__all__ = ["causal_dot_product"]


def causal_dot_product(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    r"""``out_i = sum_{j <= i} (Q_i . K_j) V_j``: no feature map, no normalizer, no scale.

    Takes the place of ``fast_transformers.causal_product.causal_dot_product``. Code that uses it around its
    own feature map and normalizer goes on to work; :func:`fastattn.linear_attention` does all three at once.

    Shapes, with N sequences, H heads, L tokens: ``Q`` and ``K`` (N, H, L, E), ``V`` (N, H, L, M).

    Precision: products accumulate in fp32 (fp64 for fp64). Any floating point dtype, where fast-transformers
    takes float32 only.

    Returns:
        (N, H, L, M) in the dtype of ``Q``, in memory (N, L, H, M): joining the heads is a view.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; the message calls Q, K, V query, key, value.

    Source: Katharopoulos et al., Transformers are RNNs, https://arxiv.org/abs/2006.16236.

    Example:
        >>> import torch
        >>> from fastattn.integrations.fast_transformers import causal_dot_product
        >>> Q, K, V = torch.rand(2, 4, 10, 8), torch.rand(2, 4, 10, 8), torch.rand(2, 4, 10, 16)
        >>> expected = (Q @ K.transpose(-2, -1)).tril() @ V
        >>> torch.allclose(causal_dot_product(Q, K, V), expected, atol=1e-5)
        True
    """
    return linear_attention(Q, K, V, feature_map="identity", is_causal=True, normalize=False)
