"""What the tables of cases have in common: dtypes, roofs, bars, and when two results agree.

An operator's table is a module with `CASES`, `BARS` and `PEERS`, and if it has one its own
`summary(results)`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from .runner import BASELINE

Tensors = tuple[torch.Tensor, ...]
Contestant = Callable[[], Tensors]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The roofs (roof.py) beside which a case is put where the machine has them; bars are about the first one.
ROOFS = {"fp32": ("fp32", "fp32_tile", "matmul"), "bf16": ("bf16", "bf16_tile")}

# The relative RMS difference to the peer's own result above which a contestant is not timed at all. The tests
# hold the exact bounds; this one only refuses speed figures of wrong results.
AGREEMENT = {"fp32": 1e-4, "bf16": 3e-2}


class TimedCase:
    """A case whose contestants are timed. What a table of cases gives beside its own fields:

    `name`, `tags`, `quick` (part of the quick subset), `dtype`, `roofs`, `flops`, `work` (what the first roof
    is a rate of), `names` (the contestants on this machine) and `contestants()` (their calls).
    """

    names: tuple[str, ...]
    is_there = True  # whether this machine has what the case needs
    # Ratios are this contestant's time over those of the others.
    baselines: tuple[str, ...] = (BASELINE,)
    # Peers that may be unable to compute the case: no failure of the run.
    may_fail: tuple[str, ...] = ()

    @property
    def same_as(self) -> Mapping[str, str]:
        """The contestant whose result each one has to give; those left out compute another function."""
        return {name: BASELINE for name in self.names if name != BASELINE}


class ApartCase:
    """A case whose contestants have a process each, for their peak memory (memory.py). A table of cases has
    at most one such class, called `MemoryCase`, with `name`, `tags`, `quick`, `names` and `step`."""

    names: tuple[str, ...] = (BASELINE, "auto")
    is_there = True
    may_fail: tuple[str, ...] = ()

    def prepare(self) -> None:
        """Whatever shall not count, before the count starts."""

    def step(self, contestant: str, whole: bool) -> int:
        """One forward+backward, or, to start with, a small one; the bytes of the tensors nobody can avoid."""
        raise NotImplementedError


@dataclass(frozen=True)
class MemoryCase(ApartCase):
    """Peak memory of one forward+backward of an attention."""

    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: str
    causal: bool
    tags: tuple[str, ...] = ()
    quick: bool = False
    family: str = "memory"

    @property
    def name(self) -> str:
        pattern = "causal" if self.causal else "full"
        shape = f"{self.batch}x{self.heads}x{self.length}x{self.head_dim}"
        return f"memory/{shape}/{pattern}/{self.dtype}/forward+backward"

    def output(
        self, contestant: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        raise NotImplementedError

    def step(self, contestant: str, whole: bool) -> int:
        shape = (self.batch, self.heads, self.length if whole else 64, self.head_dim)
        dtype = DTYPES[self.dtype]
        query, key, value = (torch.randn(shape, dtype=dtype).requires_grad_() for _ in range(3))
        grad = torch.randn(shape, dtype=dtype)
        out = self.output(contestant, query, key, value)
        grads = torch.autograd.grad(out, (query, key, value), grad)
        return sum(tensor.nbytes for tensor in (query, key, value, grad, out, *grads))


@dataclass(frozen=True)
class Bar:
    """A floor for the cases of one tag: `geomean` for their geometric mean, `each` for every one of them.

    `measure` is "ratio" (the time of the fastest of `baselines` over ours), "roof" (fraction of the case's
    first roof), "memory" (peak growth over inputs + outputs + gradients, where less is better) or "workspace"
    (the growth of the leanest of `baselines` beyond those tensors over ours).
    """

    what: str
    tag: str
    geomean: float | None = None
    each: float | None = None
    contestant: str = "cpu"
    measure: str = "ratio"
    baselines: tuple[str, ...] = (BASELINE,)


def differentiate(outputs: Tensors, inputs: Tensors, grad: torch.Tensor) -> Tensors:
    return (outputs[0], *torch.autograd.grad(outputs[0], inputs, grad))


def disagreement(ours: Tensors, theirs: Tensors) -> float:
    """Largest relative RMS difference over the tensors; infinite if shapes differ or a value is NaN."""
    worst = 0.0
    if len(ours) != len(theirs):
        return float("inf")
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape:
            return float("inf")
        a, b = a.detach().double(), b.detach().double()
        scale = max(b.norm().item(), prod(b.shape) ** 0.5 * 1e-30)
        difference = (a - b).norm().item() / scale
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst
