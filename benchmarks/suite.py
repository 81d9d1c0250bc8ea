"""The timed cases of a table under pytest-benchmark.

Times of different contestants are taken one after the other here; for ratios use the paired runner, which
alternates them.
"""

from collections.abc import Iterable

import pytest

from fastattn import _native

from .cases import ApartCase, TimedCase


def timed(cases: Iterable[TimedCase | ApartCase]) -> pytest.MarkDecorator:
    """One run of a test `(benchmark, case, contestant)` per contestant that this machine has."""
    absent = {"cpu"} if _native.missing() is not None else set()
    return pytest.mark.parametrize(
        "case, contestant",
        [
            pytest.param(case, name, id=f"{case.name}/{name}")
            for case in cases
            if not isinstance(case, ApartCase) and case.is_there
            for name in case.names
            if name not in absent
        ],
    )


def run(benchmark, case: TimedCase, contestant: str) -> None:
    benchmark.group = case.name
    benchmark.extra_info |= {"flops": case.flops, "work": case.work, "roof": case.roofs[0]}
    call = case.contestants().get(contestant)
    if call is None:
        assert contestant not in ("cpu", "auto"), "a case measures fastattn"
        pytest.skip("the case left it out, as far behind another peer")
    benchmark(call)
