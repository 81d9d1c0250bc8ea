"""The timed cases under pytest-benchmark: `pytest benchmarks -k grid --benchmark-group-by=group`.

Times of different contestants are taken one after the other here; for ratios use the paired runner, which
alternates them.
"""

import pytest

from fastattn import _native

from .attention import CASES, MemoryCase

TIMED = [case for case in CASES if not isinstance(case, MemoryCase)]


def _contestants(case):
    if case.family == "module" or _native.missing() is not None:
        return ("torch", "auto")
    return ("torch", "cpu", "auto")


@pytest.mark.parametrize(
    "case, contestant",
    [pytest.param(case, name, id=f"{case.name}/{name}") for case in TIMED for name in _contestants(case)],
)
def test_attention(benchmark, case, contestant):
    benchmark.group = case.name
    benchmark.extra_info |= {"flops": case.flops, "work": case.work, "roof": case.roofs[0]}
    benchmark(case.contestants()[contestant])
