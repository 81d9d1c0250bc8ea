"""Attention on graphs as a loop over edges in float64, with its gradients written out by hand.

Nothing here is shared with the package: edges are visited one by one in the caller's order.
"""

import numpy as np

TENSORS = {
    "gat_attention": ("x", "alpha_src", "alpha_dst", "alpha_edge"),
    "graph_attention": ("query", "key", "value", "edge_bias"),
    "gatv2_attention": ("x_src", "x_dst", "att", "edge"),
}
VALUE = {"gat_attention": "x", "graph_attention": "value", "gatv2_attention": "x_src"}


class Sums(dict):
    """Gradients by name, and beside each the sum of the magnitudes of its terms."""

    def __init__(self, tensors):
        super().__init__({name: np.zeros_like(t) for name, t in tensors.items()})
        self.size = {name: np.zeros_like(t) for name, t in tensors.items()}

    def add(self, name, at, term):
        if name in self:
            self[name][at] += term
            self.size[name][at] += np.abs(term)


def leaky(x, slope):
    return np.where(x > 0, x, slope * x), np.where(x > 0, 1.0, slope)


def score_of(form, t, m, n, e, h, scale, slope):
    """The score of edge e from m to n, and the pairs (name, index, derivative) of its inputs."""
    if form == "gat_attention":
        parts = [("alpha_src", (m, h)), ("alpha_dst", (n, h)), ("alpha_edge", (e, h))]
        parts = [(name, at) for name, at in parts if name in t]
        if any(t[name][at] == -np.inf for name, at in parts):
            return -np.inf, []
        value, slope_here = leaky(sum(t[name][at] for name, at in parts), slope)
        return value, [(name, at, slope_here) for name, at in parts]
    if form == "graph_attention":
        query, key = t["query"][n, h], t["key"][m, h]
        inputs = [("query", (n, h), scale * key), ("key", (m, h), scale * query)]
        if "edge_bias" not in t:
            return scale * query @ key, inputs
        if t["edge_bias"][e, h] == -np.inf:
            return -np.inf, []
        return scale * query @ key + t["edge_bias"][e, h], [*inputs, ("edge_bias", (e, h), 1.0)]
    total = t["x_src"][m, h] + t["x_dst"][n, h] + (t["edge"][e, h] if "edge" in t else 0.0)
    value, slope_here = leaky(total, slope)
    through = t["att"][h] * slope_here
    inputs = [("x_src", (m, h), through), ("x_dst", (n, h), through), ("edge", (e, h), through)]
    return value @ t["att"][h], [*inputs, ("att", (h,), value)]


def attend(form, tensors, src, dst, num_dst, grad_out, grad_attention, keep, scale, slope):
    """(out, attention, gradients): ``keep`` (E, H) is what dropout multiplies weights with.

    Returns a dict of arrays and one of the same keys with the magnitude of the terms that they are sums of.
    """
    t = tensors
    value = t[VALUE[form]]
    H, C = value.shape[1:]
    out, attention = np.zeros((num_dst, H, C)), np.zeros((len(src), H))
    out_size, grads = np.zeros_like(out), Sums(tensors)
    for n in range(num_dst):
        edges = [e for e in range(len(dst)) if dst[e] == n]
        for h in range(H):
            scored = [(e, *score_of(form, t, src[e], n, e, h, scale, slope)) for e in edges]
            scored = [(e, s, inputs) for e, s, inputs in scored if s != -np.inf]
            if not scored:
                continue
            exponentials = np.exp(np.array([s for _, s, _ in scored]) - max(s for _, s, _ in scored))
            weights = exponentials / exponentials.sum()
            for (e, _, _), p in zip(scored, weights, strict=True):
                attention[e, h] = p * keep[e, h]
                out[n, h] += attention[e, h] * value[src[e], h]
                out_size[n, h] += np.abs(attention[e, h] * value[src[e], h])
            numbers = [e for e, _, _ in scored]
            values, kept, of_weights = value[src[numbers], h], keep[numbers, h], grad_attention[numbers, h]
            incoming = kept * (values @ grad_out[n, h] + of_weights)
            terms = kept * (np.abs(values) @ np.abs(grad_out[n, h]) + np.abs(of_weights))
            mean = weights @ incoming
            spread = weights @ terms + terms
            for (e, _, inputs), p, g, size in zip(scored, weights, incoming, spread, strict=True):
                grads.add(VALUE[form], (src[e], h), attention[e, h] * grad_out[n, h])
                for name, at, derivative in inputs:
                    if name in grads:
                        grads[name][at] += p * (g - mean) * derivative
                        grads.size[name][at] += p * size * np.abs(derivative)
    exact = {"out": out, "attention": attention} | {f"grad_{n}": g for n, g in grads.items()}
    sizes = {"out": out_size, "attention": attention} | {f"grad_{n}": g for n, g in grads.size.items()}
    return exact, sizes


def softmax(score, dst, num_dst):
    """(E, H) softmax over the edges into each target; a score of -inf gives 0."""
    result = np.zeros_like(score)
    for n in range(num_dst):
        for h in range(score.shape[1]):
            edges = [e for e in range(len(dst)) if dst[e] == n and score[e, h] != -np.inf]
            if edges:
                exponentials = np.exp(score[edges, h] - score[edges, h].max())
                result[edges, h] = exponentials / exponentials.sum()
    return result
