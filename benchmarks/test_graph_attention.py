"""Graph attention under pytest-benchmark, on the synthetic graph: `pytest benchmarks -k gat`."""

from .graph_attention import CASES
from .suite import run, timed


@timed(CASES)
def test_graph_attention(benchmark, case, contestant):
    run(benchmark, case, contestant)
