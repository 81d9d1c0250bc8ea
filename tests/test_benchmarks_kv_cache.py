"""The table of attention over a cache: cases, contestants and bars against the promised ones."""

import json

import pytest
import torch

from benchmarks import kv_cache
from benchmarks import roof as roof_module
from benchmarks.__main__ import main
from benchmarks.cases import AGREEMENT, disagreement

CASES = kv_cache.CASES


def test_names_are_unique_and_every_bar_has_its_cases():
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
    for bar in kv_cache.BARS:
        tagged = [case for case in CASES if bar.tag in case.tags]
        assert {case.dtype for case in tagged} == {"fp32", "bf16"}
        for case in tagged:
            assert (case.batch, case.heads, case.kv_heads, case.longest) == (8, 32, 8, 4096)
            assert (case.tokens, case.head_dim) == (1, 128)
            assert bar.contestant in case.names and set(bar.baselines) <= set(case.baselines)


def test_work_is_counted_from_the_lengths():
    case = kv_cache.KVCacheCase("decode", 2, 4, 2, 1, 10, 8, "bf16")
    assert case.lengths == [5, 10] and case.work == 2 * 15 * 2 * 8 * 2
    assert case.flops == 4 * 4 * 15 * 8
    chunk = kv_cache.KVCacheCase("chunk", 1, 1, 1, 3, 5, 8, "fp32")
    assert chunk.work == chunk.flops == 4 * (3 + 4 + 5) * 8


@pytest.mark.parametrize("tokens", (1, 5))
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_contestants_agree_and_write_the_new_tokens(tokens, dtype):
    case = kv_cache.KVCacheCase("test", 3, 4, 2, tokens, 41, 8, dtype)
    contestants = case.contestants()
    assert tuple(contestants) == case.names == ("torch", *case.same_as)
    expected = contestants["torch"]()
    for name in case.same_as:
        assert disagreement(contestants[name](), expected) <= AGREEMENT[dtype], name
        assert disagreement(contestants[name](), [expected[0] * 1.1]) > AGREEMENT[dtype]


def test_the_read_roof_counts_what_it_reads():
    roof = roof_module.roofs(("read",))["read"]
    assert roof.unit == "GB/s" and roof.work == roof_module.COPY_BYTES
    assert roof.call() == torch.tensor(roof.work // 4, dtype=torch.float32)


def test_the_small_case_runs(tmp_path, capsys):
    file = tmp_path / "report.json"
    assert main(["kv_cache", "--filter", "^small", "--pairs", "1", "--json", str(file)]) == 0
    (case,) = json.loads(file.read_text())["cases"]
    assert set(case["ratio"]["torch"]) == {"loop", "cpu", "paged"}
