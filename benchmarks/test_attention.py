"""Softmax attention under pytest-benchmark: `pytest benchmarks -k grid --benchmark-group-by=group`."""

from .attention import CASES
from .suite import run, timed


@timed(CASES)
def test_attention(benchmark, case, contestant):
    run(benchmark, case, contestant)
