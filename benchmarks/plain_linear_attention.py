"""Linear attention as a user of PyTorch would write it for speed: the peers of the operator.

All of them apply elu(x) + 1 and divide by the sum of the weights plus EPS, unless `bare`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6


def features(x: Tensor) -> Tensor:
    return F.elu(x).add_(1)


def chunked(query: Tensor, key: Tensor, value: Tensor, chunk: int, bare: bool = False) -> Tensor:
    """Causal, as matrix products over chunks, all chunks at once; `chunk` has to divide the length."""
    B, H, L, _ = query.shape
    q, k, v = (x.reshape(B * H, L // chunk, chunk, -1) for x in (query, key, value))
    if not bare:
        q, k = features(q), features(k)
        # The sum of the weights is the output for a value of 1: faster than sums beside the products.
        v = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], -1)
    # Summed in float32 at least: bfloat16 loses the later addends of long sums.
    wide = torch.promote_types(v.dtype, torch.float32)
    states = F.pad((k.mT @ v)[:, :-1].cumsum(1, dtype=wide).to(v.dtype), (0, 0, 0, 0, 1, 0))
    within = (q @ k.mT).tril_() @ v
    out = torch.baddbmm(within.flatten(0, 1), q.flatten(0, 1), states.flatten(0, 1)).view_as(v)
    if not bare:
        out = out[..., :-1] / (out[..., -1:] + EPS)
    return out.view(B, H, L, -1)


def full(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Every query sees every key: two matrix products."""
    q, k = features(query), features(key)
    return (q @ (k.mT @ value)) / (q @ k.sum(2).unsqueeze(-1) + EPS)


def idiap(query: Tensor, key: Tensor, value: Tensor, bare: bool = False) -> Tensor:
    """Causal, by the kernel of pytorch-fast-transformers; around it what its CausalLinearAttention does."""
    from fast_transformers.causal_product import causal_dot_product

    if bare:
        return causal_dot_product(query, key, value)
    q, k = features(query), features(key)
    normalizer = 1 / (torch.einsum("nhli,nhli->nhl", q, k.cumsum(2)) + EPS)
    return causal_dot_product(q, k, value) * normalizer.unsqueeze(-1)


def step(query: Tensor, key: Tensor, value: Tensor, kv: Tensor, z: Tensor) -> Tensor:
    """One token, (B, H, D) each; the float32 state is updated in place."""
    q, k = features(query).float(), features(key).float()
    kv.addcmul_(k.unsqueeze(-1), value.unsqueeze(-2))
    z.add_(k)
    out = (q.unsqueeze(-2) @ kv).squeeze(-2) / ((q * z).sum(-1, keepdim=True) + EPS)
    return out.to(query.dtype)
