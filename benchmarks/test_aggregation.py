"""Neighbour aggregation under pytest-benchmark, on the synthetic graph: `pytest benchmarks -k sum`."""

from .aggregation import CASES
from .suite import run, timed


@timed(CASES)
def test_aggregation(benchmark, case, contestant):
    run(benchmark, case, contestant)
