"""Attention over a cache under pytest-benchmark: `pytest benchmarks -k paged --benchmark-group-by=group`."""

from .kv_cache import CASES
from .suite import run, timed


@timed(CASES)
def test_kv_cache(benchmark, case, contestant):
    run(benchmark, case, contestant)
