"""The tables of graph cases: complete, with the promised bars, and every contestant computes the same."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch

from benchmarks import aggregation, cases, graph_attention, graphs, memory, report
from benchmarks.__main__ import main, measure_time
from benchmarks.runner import CaseResult
from fastattn._choose import Request, candidates

GRAPHS = {"power-law", "email-Enron", "cond-mat-2005", "pgp-strong-2009"}
REQUEST = Request("cpu", torch.float32, (), "fastattn::aggregate_sum")
ABSENT = {"cpu"} if candidates(REQUEST)["cpu"] is not None else set()


@pytest.fixture
def tiny(monkeypatch):
    """Every graph of the tables is a small one."""
    edges = graphs.power_law(50, 400)
    monkeypatch.setattr(graphs, "load", lambda name: edges)
    return edges


def test_aggregation_cases_are_complete():
    names = [case.name for case in aggregation.CASES]
    assert len(names) == len(set(names))
    found = {
        (c.graph, c.reduce, c.width, c.backward)
        for c in aggregation.CASES
        if isinstance(c, aggregation.AggregationCase)
        and (c.family, c.dtype, c.weighted) == ("", "fp32", False)
    }
    widths, ways = (32, 64, 128, 256), (False, True)
    assert found == set(itertools.product(GRAPHS, ("sum", "mean", "sym", "max"), widths, ways))
    for tag in ("bf16 sum", "weighted"):
        tagged = {(c.graph, c.width) for c in aggregation.CASES if tag in c.tags}
        assert tagged == set(itertools.product(GRAPHS, widths))
    (bandwidth,) = [c for c in aggregation.CASES if "bandwidth" in c.tags]
    assert bandwidth.name == "sum/power-law/128/fp32/forward"
    assert (graphs.NODES, graphs.EDGES) == (100_000, 2_000_000)


def test_graph_attention_cases_are_complete():
    names = [case.name for case in graph_attention.CASES]
    assert len(names) == len(set(names))
    found = {
        (c.family, c.graph, c.backward)
        for c in graph_attention.CASES
        if isinstance(c, graph_attention.GraphAttentionCase) and c.dtype == "fp32"
    }
    assert found == set(itertools.product(("gat", "dot"), GRAPHS, (False, True)))
    assert {c.graph for c in graph_attention.CASES if "training" in c.tags} == GRAPHS
    assert (graph_attention.HEADS, graph_attention.CHANNELS) == (4, 32)


@pytest.mark.parametrize(
    "table, expected",
    [
        (
            aggregation,
            {
                "fp32 forward": (1.6, 1.0),
                "synthetic forward": (2.0, 1.0),
                "fp32 forward+backward": (2.5, 1.2),
                "bf16 sum": (None, 2.0),
                "weighted": (None, 3.0),
                "bandwidth": (None, 0.6),
                "random forward": (None, 1.0),
                "random forward+backward": (None, 1.0),
                "build": (None, 1.0),
            },
        ),
        (
            graph_attention,
            {
                "gat forward": (None, 8.0),
                "gat forward+backward": (None, 8.0),
                "dot forward": (None, 8.0),
                "dot forward+backward": (None, 8.0),
                "memory": (None, 8.0),
                "training": (None, 3.0),
            },
        ),
    ],
)
def test_every_bar_has_cases_a_peer_and_the_promised_height(table, expected):
    assert {bar.tag: (bar.geomean, bar.each) for bar in table.BARS} == expected
    for bar in table.BARS:
        tagged = [case for case in table.CASES if bar.tag in case.tags]
        assert tagged
        if bar.measure == "ratio" and tagged[0].is_there:
            assert all(bar.contestant in case.names for case in tagged)
            assert all(set(case.baselines) <= set(bar.baselines) for case in tagged)


def test_the_synthetic_graph_has_hubs_and_is_the_same_every_time():
    edges = graphs.power_law(2000, 40_000)
    assert edges.count == 40_000 and edges.num_nodes == 2000
    degrees = edges.rowptr.diff()
    assert degrees.max() > 20 * degrees.double().mean()
    key = edges.dst * edges.num_nodes + edges.src
    assert (key.diff() >= 0).all()
    assert torch.equal(graphs.power_law(2000, 40_000).edge_index, edges.edge_index)
    assert torch.equal(torch.repeat_interleave(torch.arange(2000), degrees), edges.dst)


def test_real_graphs_come_from_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "folder", None)
    assert not graphs.is_there("email-Enron") and graphs.is_there("power-law")
    with pytest.raises(FileNotFoundError, match="--graphs FOLDER"):
        graphs.load("email-Enron")
    ends = {"src": np.array([2, 0, 1], np.int32), "dst": np.array([1, 2, 1], np.int32)}
    np.savez(tmp_path / "email-Enron.npz", num_nodes=4, **ends)
    monkeypatch.setattr(graphs, "folder", tmp_path)
    assert graphs.is_there("email-Enron") and not graphs.is_there("cond-mat-2005")
    edges = graphs.load("email-Enron")
    graphs.load.cache_clear()
    assert edges.edge_index.tolist() == [[1, 2, 0], [1, 1, 2]] and edges.rowptr.tolist() == [0, 0, 2, 3, 3]


def test_slow_peers_are_left_out(monkeypatch):
    seconds = {"a": 1.0, "b": 2.4, "c": 2.6}
    monkeypatch.setattr(graphs, "time_calls", lambda call, count: seconds[call()])
    calls = {name: lambda name=name: name for name in (*seconds, "ours")}
    assert list(graphs.hopeful(calls, ("a", "b", "c"))) == ["a", "b", "ours"]


@pytest.mark.parametrize("reduce", aggregation.REDUCES)
@pytest.mark.parametrize("dtype, backward", [("fp32", False), ("fp32", True), ("bf16", False)])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_every_contestant_aggregates_the_same(tiny, monkeypatch, reduce, dtype, backward):
    monkeypatch.setattr(graphs, "HOPELESS", float("inf"))
    case = aggregation.AggregationCase("power-law", reduce, 8, dtype, backward)
    check_contestants(case)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_every_contestant_gives_weights_the_same_gradient(tiny, monkeypatch):
    monkeypatch.setattr(graphs, "HOPELESS", float("inf"))
    check_contestants(aggregation.AggregationCase("power-law", "sum", 8, backward=True, weighted=True))


@pytest.mark.parametrize("family", graph_attention.FUNCTIONS)
@pytest.mark.parametrize("dtype, backward", [("fp32", False), ("fp32", True), ("bf16", False)])
def test_every_contestant_attends_the_same(tiny, family, dtype, backward):
    check_contestants(graph_attention.GraphAttentionCase(family, "power-law", dtype, backward))


def check_contestants(case):
    calls = case.contestants()
    assert set(calls) == set(case.names)
    expected = {name: calls[name]() for name in calls if name not in ABSENT}
    for name, peer in case.same_as.items():
        if name not in ABSENT:
            assert cases.disagreement(expected[name], expected[peer]) <= cases.AGREEMENT[case.dtype], name
    assert case.work > 0 and case.flops > 0


def test_a_training_step_is_timed_before_and_after_the_conversion(tiny):
    case = next(case for case in graph_attention.CASES if "training" in case.tags)
    if not graph_attention.PYG:
        assert not case.is_there
        return
    result = measure_time(case, 1, {}, ABSENT)
    assert not result.failures and set(result.ratio["model"]) == {"converted"}


def test_a_built_graph_is_timed_beside_a_sort(tiny):
    result = measure_time(aggregation.BuildCase("power-law"), 1, {}, ABSENT)
    assert set(result.ratio["argsort"]) == {"auto"} and not result.failures


def test_memory_counts_what_goes_beyond_the_tensors(tiny):
    case = graph_attention.MemoryCase("gat", "power-law")
    threads = torch.get_num_threads()
    for contestant in case.names:
        found = memory.measure("graph_attention", contestant, dataclasses.asdict(case), threads)
        N, H, C = tiny.num_nodes, 4, 32
        assert found["tensor_bytes"] == 4 * (4 * N * H * C + 4 * N * H)
        assert json.dumps(found)


def test_workspace_bar_compares_with_the_leanest_peer():
    bar = cases.Bar(
        "what", "tag", each=8.0, contestant="auto", measure="workspace", baselines=("lean", "fat")
    )
    MiB = 2**20
    result = CaseResult("case", ("tag",))
    result.memory = {
        name: {"workspace_bytes": size * MiB} for name, size in (("lean", 90), ("fat", 400), ("auto", 10))
    }
    judged = report.judge(bar, [result])
    assert (judged.verdict, judged.worst) == ("met", 9.0)
    result.memory["auto"]["workspace_bytes"] = -5 * MiB  # what was freed before; not a merit without end
    assert report.judge(bar, [result]).worst == 90.0
    result.memory["auto"]["workspace_bytes"] = 20 * MiB
    assert report.judge(bar, [result]).verdict == "missed"


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_run_of_a_graph_table(tiny, capsys, monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(graphs, "folder", None)
    try:
        status = main(
            ["aggregation", "--filter", "^sum/.*/32/fp32/forward$", "--pairs", "1", "--threads", "1"]
        )
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert status == 0 or ABSENT
    assert "3 cases absent" in printed and "sum/power-law/32/fp32/forward" in printed
    assert "edges of the busiest worker" in printed or ABSENT
