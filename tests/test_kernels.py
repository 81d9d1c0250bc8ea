"""Triton kernels compiled for GPUs that are not there: `python -m fastattn.kernels` and what it finds."""

import pytest

from fastattn import _triton

pytestmark = pytest.mark.skipif(_triton._missing is not None, reason=str(_triton._missing))


def test_the_main_configuration_compiles_for_hopper(run_python):
    """Within shared memory, on its matrix instruction, without spills and with loads of 128 bits."""
    done = run_python("-m", "fastattn.kernels", "--main", "--target", "cuda:90", TRITON_INTERPRET="0")
    header, _, *lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()]
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    assert [row["kernel"] for row in rows] == ["forward", "grad_query", "grad_key_value"]
    for row in rows:
        assert int(row["shared bytes"]) <= 227 << 10 and int(row["spilled bytes"]) == 0, row
        assert row["matrix"] == "wgmma" and row["128-bit loads"] == "yes", row


def test_nothing_is_compiled_in_the_interpreter(run_python):
    done = run_python("-m", "fastattn.kernels", check=False, TRITON_INTERPRET="1")
    assert done.returncode == 1 and "TRITON_INTERPRET" in done.stderr
