"""Benchmarks on a GPU, as far as they can be shown without one: Triton's interpreter on small cases."""

import json

import pytest
import torch
from operator_checks import running

from benchmarks import gpu, graphs, report
from benchmarks.__main__ import measure_time, parse
from benchmarks.runner import CaseResult, paired

OPERATORS = tuple(gpu.tables())


@pytest.fixture
def tiny(monkeypatch):
    """The CPU in the place of the GPU, a small graph, nothing compiled."""
    edges = graphs.power_law(20, 60)
    monkeypatch.setattr(graphs, "load", lambda name: edges)
    monkeypatch.setattr(gpu, "device", torch.device("cpu"))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


SMALL = {
    "attention": gpu.AttentionCase("grid", 1, 2, 2, 16, 16, 16, "bf16", causal=True),
    "attention, backward": gpu.AttentionCase("grid", 1, 2, 2, 16, 16, 16, "bf16", backward=True),
    "decode": gpu.AttentionCase("decode", 2, 4, 2, 1, 16, 16, "bf16"),
    "linear attention": gpu.LinearAttentionCase("causal", 1, 1, 128, 16, "bf16"),
    "linear attention, backward": gpu.LinearAttentionCase("causal", 1, 1, 128, 16, "bf16", True),
    "sum": gpu.AggregationCase(graphs.SYNTHETIC, "sum", 8, backward=True),
    "sym": gpu.AggregationCase(graphs.SYNTHETIC, "sym", 8, backward=True),
    "max": gpu.AggregationCase(graphs.SYNTHETIC, "max", 8),
    "weighted": gpu.AggregationCase(graphs.SYNTHETIC, "sum", 8, backward=True, weighted=True),
    "gat": gpu.GraphAttentionCase("gat", graphs.SYNTHETIC, backward=True),
    "dot": gpu.GraphAttentionCase("dot", graphs.SYNTHETIC),
}


def once(function, calls):
    function()
    return 1.0


@pytest.mark.parametrize("name", SMALL)
def test_contestants_compute_the_same(tiny, name):
    case = SMALL[name]
    with running("triton"):
        result = measure_time(case, 1, gpu.roofs(8, 64), set(), once)
    ours = set(case.names) - set(case.peers())
    assert ours and ours <= result.seconds.keys() and set(result.failures) <= set(case.may_fail), (
        result.failures
    )
    assert {case.names[0]} < result.seconds.keys() and case.roofs[0] in result.roof_fraction
    assert set(result.ratio[case.names[0]]) == ours
    if name == "attention":
        assert "flex" in result.seconds and "cudnn" in result.failures  # which needs a GPU


def test_a_contestant_that_fails_is_reported_whatever_it_raises():
    class Case(gpu.OnGPU):
        name, tags, roofs, dtype, flops, work = "case", (), ("copy",), "fp32", 1, 1

        def peers(self):
            return ("right", "broken", "wrong")

        def contestants(self):
            def broken():
                raise KeyError("no such kernel")

            good, bad = torch.ones(3), torch.zeros(3)
            calls = {"right": lambda: (good,), "broken": broken, "wrong": lambda: (bad,)}
            return calls | {"triton": lambda: (good,)}

    result = measure_time(Case(), 1, {}, set(), once)
    assert set(result.seconds) == {"right", "triton"}
    assert "no such kernel" in result.failures["broken"] and "differs from right" in result.failures["wrong"]
    assert set(result.failures) <= set(Case().may_fail)


@pytest.mark.parametrize("operator", OPERATORS)
def test_tables(operator):
    table = gpu.tables()[operator]
    names, tags = [c.name for c in table.CASES], {tag for c in table.CASES for tag in c.tags}
    assert len(set(names)) == len(names) >= 8 and any(c.quick for c in table.CASES)
    contestants = {name for c in table.CASES for name in (*c.names, "fla")}
    for bar in table.BARS:
        assert bar.tag in tags and bar.contestant in contestants
        assert bar.measure == "roof" or contestants & set(bar.baselines)
        assert report.judge(bar, []).verdict == "not measured"


def test_samples_are_taken_by_the_given_timer():
    counts = {"a": 0}

    def timer(function, calls):
        counts["a"] += 1
        return 0.5 * calls

    assert paired({"a": lambda: None}, 3, timer=timer) == {"a": [0.5] * 3}
    assert counts["a"] == 4  # with the one that found that a call suffices


def test_the_document_names_the_gpu(tmp_path):
    hardware = {"gpu": "Some GPU", "gpu_capability": "9.0", "gpu_multiprocessors": 132}
    hardware |= {"gpu_memory_bytes": 141 << 30, "cpu": "c", "cores": 2, "caches": {}, "torch_isa": "x"}
    header = {
        "operator": "attention", "command": "x", "threads": 1, "pairs": 1, "hardware": hardware,
        "versions": {"triton": "3.6.0"}, "environment": {}, "fastattn_isa": None, "peers": [],
    }  # fmt: skip
    result = CaseResult("case", (), seconds={})
    content = report.document([result], [], header, {})
    text = report.markdown(content, [result], [])
    assert "* Some GPU, 132 multiprocessors, 141 GiB, capability 9.0" in text and "triton 3.6.0" in text
    report.write_json(tmp_path / "a.json", content)
    assert json.loads((tmp_path / "a.json").read_text())["hardware"]["gpu"] == "Some GPU"


@pytest.mark.parametrize("arguments, available, message", (
    (["attention", "--device", "cuda"], False, "--device cuda: no GPU here"),
    (["attention", "--device", "meta"], True, "--device meta: no GPU here"),
    (["generation", "--device", "cuda"], True, "cases for GPUs are those of attention, linear_attention"),
    (["attention", "--save"], True, "--save is for a GPU"),
))  # fmt: skip
def test_arguments(arguments, available, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    with pytest.raises(SystemExit) as caught:
        parse(arguments)
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_results_are_named_after_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    options = parse(["attention", "--device", "cuda", "--save"])
    assert options.json.name == "attention-nvidia_h200.json" and options.json.parent.name == "results"
    assert options.markdown.name == "attention-nvidia_h200.md"
