"""Neighbour aggregation in float64 numpy, one edge at a time; shares nothing with the package.

Edges stay in the caller's order and are never sorted. Gradients are written out by hand. Beside each result
stands its magnitude: the same sum with absolute values of its terms, which rounding errors are proportional
to.
"""

import numpy as np


def degrees(src, dst, num_src, num_dst):
    entering, leaving = [0] * num_dst, [0] * num_src
    for m, n in zip(src, dst, strict=True):
        leaving[m] += 1
        entering[n] += 1
    return entering, leaving


def coefficients(src, dst, num_src, num_dst, reduce, weight):
    """(E, H): what each message is multiplied by, apart from its weight; and the degrees of "sym", (N, H)."""
    E, H = weight.shape
    entering, leaving = degrees(src, dst, num_src, num_dst)
    factor = np.ones((E, H))
    degree = np.zeros((num_dst, H))
    if reduce == "sym":
        for e in range(E):
            degree[dst[e]] += weight[e]
    for e in range(E):
        m, n = src[e], dst[e]
        if reduce == "mean":
            factor[e] = 1 / entering[n]
        elif reduce == "both":
            factor[e] = (entering[n] * leaving[m]) ** -0.5
        elif reduce == "sym":
            for h in range(H):
                d = degree[n, h], degree[m, h]
                factor[e, h] = (d[0] * d[1]) ** -0.5 if min(d) > 0 else 0.0
    return factor, degree


class Sums(dict):
    """Zeros that terms are added to, and beside them the same of their absolute values."""

    def __init__(self, **shapes):
        super().__init__({name: np.zeros(shape) for name, shape in shapes.items()})
        self.size = {name: np.zeros(shape) for name, shape in shapes.items()}

    def add(self, name, place, term):
        self[name][place] += term
        self.size[name][place] += np.abs(term)


def weighted_sum(x, src, dst, num_dst, reduce, weight, grad_out, differentiate_degrees):
    """x (B, N, H, F), weight (E, H), grad_out (B, num_dst, H, F)."""
    factor, degree = coefficients(src, dst, x.shape[1], num_dst, reduce, weight)
    sums = Sums(out=grad_out.shape, grad_x=x.shape, grad_edge_weight=weight.shape, grad_degree=degree.shape)
    for e, (m, n) in enumerate(zip(src, dst, strict=True)):
        c = (factor[e] * weight[e])[:, None]
        sums.add("out", (slice(None), n), c * x[:, m])
        sums.add("grad_x", (slice(None), m), c * grad_out[:, n])
        products = grad_out[:, n] * x[:, m]
        product, magnitude = products.sum((0, 2)), np.abs(products).sum((0, 2))
        sums["grad_edge_weight"][e] += factor[e] * product
        sums.size["grad_edge_weight"][e] += factor[e] * magnitude
        if reduce == "sym" and differentiate_degrees:
            for end in (m, n):
                live = degree[end] > 0
                term = -0.5 * factor[e] * weight[e] / np.where(live, degree[end], 1.0) * live
                sums["grad_degree"][end] += term * product
                sums.size["grad_degree"][end] += np.abs(term) * magnitude
    if reduce == "sym" and differentiate_degrees:
        for found in (sums, sums.size):
            for e, n in enumerate(dst):
                found["grad_edge_weight"][e] += found["grad_degree"][n]
    return sums, sums.size


def extreme(x, src, dst, num_dst, reduce, weight, grad_out):
    """The same for "max" and "min"; also arg (B, num_dst, H, F), the edge of each result, -1 for none."""
    out, arg = np.zeros(grad_out.shape), np.full(grad_out.shape, -1)
    for e, (m, n) in enumerate(zip(src, dst, strict=True)):
        best, new = out[:, n], weight[e][:, None] * x[:, m]
        better = new < best if reduce == "min" else new > best
        wins = (arg[:, n] < 0) | (~np.isnan(best) & (better | np.isnan(new)))
        out[:, n], arg[:, n] = np.where(wins, new, best), np.where(wins, e, arg[:, n])
    sums = Sums(grad_x=x.shape, grad_edge_weight=weight.shape)
    for e, (m, n) in enumerate(zip(src, dst, strict=True)):
        grad = np.where(arg[:, n] == e, grad_out[:, n], 0.0)
        sums.add("grad_x", (slice(None), m), weight[e][:, None] * grad)
        products = np.where(arg[:, n] == e, x[:, m] * grad, 0.0)
        sums["grad_edge_weight"][e] += products.sum((0, 2))
        sums.size["grad_edge_weight"][e] += np.abs(products).sum((0, 2))
    return sums | {"out": out, "arg": arg}, sums.size | {"out": np.abs(out)}


def aggregate(x, src, dst, num_dst, reduce, weight, grad_out):
    """Results and magnitudes; ``weight`` is None, (E, 1) or (E, H), and so is its gradient."""
    given = np.ones((len(src), 1)) if weight is None else weight
    spread = np.broadcast_to(given, (len(src), x.shape[2]))
    src, dst = [int(n) for n in src], [int(n) for n in dst]
    if reduce in ("max", "min"):
        both = extreme(x, src, dst, num_dst, reduce, spread, grad_out)
    else:
        both = weighted_sum(x, src, dst, num_dst, reduce, spread, grad_out, weight is not None)
    for found in both:
        if given.shape[1] == 1:
            found["grad_edge_weight"] = found["grad_edge_weight"].sum(1, keepdims=True)
    return both
