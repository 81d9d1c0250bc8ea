"""Linear attention under pytest-benchmark: `pytest benchmarks -k step --benchmark-group-by=group`."""

from .linear_attention import CASES
from .suite import run, timed


@timed(CASES)
def test_linear_attention(benchmark, case, contestant):
    run(benchmark, case, contestant)
