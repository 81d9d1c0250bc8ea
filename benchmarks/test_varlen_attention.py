"""Packed sequences under pytest-benchmark: `pytest benchmarks -k varlen --benchmark-group-by=group`."""

from .suite import run, timed
from .varlen_attention import CASES


@timed(CASES)
def test_varlen_attention(benchmark, case, contestant):
    run(benchmark, case, contestant)
