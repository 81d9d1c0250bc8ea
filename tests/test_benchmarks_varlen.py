"""The table of packed sequences: the promised case and bars, and every contestant computes the same."""

import dataclasses

import pytest
import torch

from benchmarks import varlen_attention
from benchmarks.__main__ import measure_time
from fastattn import _native

PLAIN = varlen_attention.VarlenCase(64, 16, 1024, 8, 64, "fp32")


def test_bars():
    for direction, backward in (("forward", False), ("forward+backward", True)):
        tagged = [case for case in varlen_attention.CASES if f"bar {direction}" in case.tags]
        assert [dataclasses.replace(case, tags=(), quick=False) for case in tagged] == [
            dataclasses.replace(PLAIN, backward=backward)
        ]
        bars = {bar.baselines: bar.each for bar in varlen_attention.BARS if bar.tag == f"bar {direction}"}
        assert bars == {("torch",): 3.0, ("torch_loop",): 1.5}


def test_lengths_and_flops():
    lengths = torch.tensor(PLAIN.lengths).double()
    assert len(lengths) == 64 and lengths.min() >= 16 and lengths.max() <= 1024
    # Uniform in the logarithm: a quarter in each part of two octaves down to 16, more or less.
    assert 2**6.5 < lengths.log().mean().exp() < 2**7.5
    case = dataclasses.replace(PLAIN, sequences=2, shortest=3, longest=3)
    assert case.lengths == [3, 3]
    assert case.flops == 2 * 4 * 8 * 64 * 9
    assert dataclasses.replace(case, causal=True).flops == 2 * 4 * 8 * 64 * 6


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
@pytest.mark.parametrize("backward", (False, True))
@pytest.mark.parametrize("causal", (False, True))
def test_contestants_agree(dtype, backward, causal):
    case = varlen_attention.VarlenCase(5, 3, 40, 2, 16, dtype, causal, backward)
    absent = {"cpu"} if _native.missing() is not None else set()
    result = measure_time(case, 1, {}, absent)
    assert not result.failures and set(result.seconds) == set(case.names) - absent
