"""The benchmark runner: its arithmetic, its table of cases against the promised one, and small runs."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import attention, cases, linear_attention, machine, memory, report, runner
from benchmarks import roof as roof_module
from benchmarks import test_attention as attention_suite
from benchmarks import test_linear_attention as linear_attention_suite
from benchmarks.__main__ import main, measure_time, parse, select
from benchmarks.figures import Spread, geometric_mean, quantile, ratios
from benchmarks.runner import CaseResult, calibrate, paired, summarize, time_calls
from fastattn import _native

ROOT = Path(__file__).resolve().parent.parent
NATIVE = _native.missing() is None
SMALL = "small/1x1x8x16/full/fp32/forward"


# Arithmetic


def test_quantile_interpolates_between_order_statistics():
    values = [4.0, 1.0, 3.0, 2.0]
    assert quantile(values, 0.0) == 1.0
    assert quantile(values, 0.5) == 2.5
    assert quantile(values, 0.2) == pytest.approx(1.6)
    assert quantile(values, 1.0) == 4.0
    assert quantile([7.0], 0.8) == 7.0
    generator = torch.Generator().manual_seed(0)
    many = torch.rand(37, dtype=torch.float64, generator=generator)
    for q in (0.0, 0.2, 0.33, 0.8, 1.0):
        assert quantile(many.tolist(), q) == pytest.approx(torch.quantile(many, q).item())


def test_quantile_and_geometric_mean_of_nothing_are_refused():
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)
    with pytest.raises(ValueError, match="no values"):
        geometric_mean([])


def test_geometric_mean():
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([1.7]) == pytest.approx(1.7)
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)


def test_ratios_are_taken_within_rounds():
    # The machine runs at half speed in the second and third round; within rounds the ratio is 2 everywhere.
    torch_seconds, our_seconds = [2.0, 4.0, 4.0], [1.0, 2.0, 2.0]
    assert ratios(torch_seconds, our_seconds) == [2.0, 2.0, 2.0]
    with pytest.raises(ValueError):
        ratios([1.0], [1.0, 2.0])


def test_summary_has_ratio_rate_and_fraction_of_the_roof():
    result = CaseResult("case", (), roof="fp32", flops=8 * 10**9, work=8 * 10**9)
    samples = {"torch": [2.0, 4.0, 8.0], "cpu": [1.0, 2.0, 4.0], "roof fp32": [0.5, 1.0, 2.0]}
    summarize(result, samples, roof_work={"fp32": 8e9})
    assert result.ratio == {"torch": {"cpu": Spread(2.0, 2.0, 2.0)}}
    assert result.seconds["cpu"].median == 2.0
    assert result.rate("cpu") == pytest.approx(4.0)
    assert result.roof_fraction["fp32"]["cpu"] == Spread(0.5, 0.5, 0.5)
    assert result.roof_fraction["fp32"]["torch"].median == pytest.approx(0.25)
    assert result.measure("roof", "cpu") == result.roof_fraction["fp32"]["cpu"]
    assert set(result.seconds) == {"torch", "cpu"}


def test_ratios_to_several_baselines_are_to_the_fastest_where_a_bar_says_so():
    result = CaseResult("case", ())
    samples = {"slow": [8.0, 8.0], "fast": [4.0, 6.0], "cpu": [2.0, 2.0]}
    summarize(result, samples, {}, baselines=("slow", "fast", "absent"))
    assert result.ratio == {
        "slow": {"cpu": Spread(4.0, 4.0, 4.0)},
        "fast": {"cpu": Spread(2.5, pytest.approx(2.2), pytest.approx(2.8))},
    }
    assert result.measure("ratio", "cpu", ("slow", "fast")) == result.ratio["fast"]["cpu"]
    assert result.measure("ratio", "cpu", ("slow",)).median == 4.0
    assert result.measure("ratio", "cpu", ("absent",)) is None
    assert result.measure("ratio", "auto", ("slow", "fast")) is None


def test_every_sample_is_kept_and_the_order_is_shuffled():
    calls = []
    contestants = {name: lambda name=name: calls.append(name) for name in "abc"}
    samples = paired(contestants, pairs=20, seconds=0.0)
    assert {name: len(values) for name, values in samples.items()} == dict.fromkeys("abc", 20)
    rounds = [tuple(calls[-60:][i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds)) > 2


def test_calibration_fills_a_sample_also_under_a_coarse_clock(monkeypatch):
    now, steps = [0.0], 4e-3  # a call takes 0.1 ms, the clock advances in steps of 4 ms

    def work():
        now[0] += 1e-4

    monkeypatch.setattr(runner.time, "perf_counter", lambda: math.floor(now[0] / steps) * steps)
    calls = calibrate(work, seconds=0.02)
    assert calls >= 160
    assert time_calls(work, calls) >= 0.016


# The table of cases


def named(*parts):
    return [case for case in attention.CASES if all(part in case.name.split("/") for part in parts)]


def test_names_are_unique():
    names = [case.name for case in attention.CASES]
    assert len(names) == len(set(names))


def test_grid_is_complete():
    shapes = {
        (4, 12, 128, 64),
        (2, 8, 512, 64),
        (1, 8, 1024, 128),
        (1, 8, 2048, 64),
        (1, 4, 4096, 64),
        (8, 8, 197, 64),
        (16, 8, 64, 32),
    }
    found = {
        ((case.batch, case.heads, case.queries, case.head_dim), case.causal, case.dtype, case.backward)
        for case in named("grid")
    }
    assert found == set(itertools.product(shapes, (False, True), ("fp32", "bf16"), (False, True)))
    assert all(case.queries == case.keys and case.heads == case.kv_heads for case in named("grid"))


def test_cases_beside_the_grid_are_complete():
    decode = {(c.heads, c.kv_heads, c.queries, c.keys, c.head_dim, c.dtype) for c in named("decode")}
    assert decode == set(itertools.product([32], [8], [1], [2048, 4096], [128], ["fp32", "bf16"]))
    assert all(case.window == 256 and case.queries == case.keys == 4096 for case in named("window"))
    assert {case.dtype for case in named("window")} == {"fp32", "bf16"}
    assert named("bias") and all(case.bias and case.backward for case in named("bias"))
    modules = {
        (c.batch, c.length, c.embed_dim, c.need_weights, c.backward)
        for c in attention.CASES
        if c.family == "module"
    }
    assert modules == set(itertools.product([4], [512], [512], [True, False], [True, False]))
    assert {(c.batch, c.length) for c in named("layer")} == {(32, 16), (8, 64), (4, 128), (4, 512), (1, 2048)}
    (small,) = named("small")
    assert (small.batch, small.heads, small.queries, small.head_dim) == (1, 1, 8, 16)
    drawn = named("random")
    assert len(drawn) == 48 and {case.head_dim % 16 for case in drawn} > {0}
    assert min(case.queries for case in drawn) == 1 and any(case.kv_heads < case.heads for case in drawn)
    memory_cases = [case for case in attention.CASES if case.family == "memory"]
    assert memory_cases
    assert all((c.length, c.heads, c.head_dim) == (16384, 8, 64) for c in memory_cases)


def test_every_bar_has_cases_and_the_promised_height():
    bars = {bar.what: bar for bar in attention.BARS}
    assert len(bars) == len(attention.BARS)
    count = {what: sum(bar.tag in case.tags for case in attention.CASES) for what, bar in bars.items()}
    assert min(count.values()) > 0
    assert count["auto never slower, whole grid"] == 56
    assert [
        count[f"{dtype} {way}"] for dtype in ("fp32", "bf16") for way in ("forward", "forward+backward")
    ] == [14] * 4
    assert count["causal, L <= 1024, fp32 forward"] == 5
    heights = {what: (bar.geomean, bar.each) for what, bar in bars.items()}
    assert heights == {
        "fp32 forward": (1.5, 1.0),
        "fp32 forward+backward": (1.5, 1.0),
        "bf16 forward": (2.0, 1.2),
        "bf16 forward+backward": (2.0, 1.2),
        "causal, L <= 1024, fp32 forward": (None, 2.0),
        "decode, L=1, 32/8 heads": (None, 10.0),
        "window 256 at L=4096": (None, 8.0),
        "learnable bias, forward+backward": (None, 2.0),
        "MultiheadAttention, need_weights=True": (None, 1.3),
        "MultiheadAttention, need_weights=False": (None, 1.15),
        "TransformerEncoderLayer in evaluation": (None, 1.0),
        "FMA peak, fp32 forward, L=2048": (None, 0.7),
        "FMA peak, bf16 forward, L=2048": (None, 0.5),
        "memory, forward+backward, L=16384": (None, 1.5),
        "small call (at most 1.5x torch's time)": (None, pytest.approx(1 / 1.5)),
        "auto never slower, whole grid": (None, 1.0),
        "auto never slower, random shapes, forward": (None, 1.0),
        "auto never slower, random shapes, forward+backward": (None, 1.0),
    }


@pytest.mark.parametrize(
    "queries, keys, causal, window",
    [
        (5, 5, False, None),
        (5, 5, True, None),
        (7, 4, True, None),
        (3, 9, True, None),
        (9, 9, False, 3),
        (9, 4, False, 2),
    ],
)
def test_visible_pairs_count_the_mask(queries, keys, causal, window):
    distance = torch.arange(queries)[:, None] - torch.arange(keys)
    mask = torch.ones(queries, keys, dtype=torch.bool)
    if causal or window is not None:
        mask &= distance >= 0
    if window is not None:
        mask &= distance <= window
    assert attention.visible_pairs(queries, keys, causal, window) == mask.sum()


def test_flops_formula():
    assert attention.attention_flops(1, 8, 2048 * 2048, 64, backward=False) == 4 * 8 * 2048**2 * 64
    assert attention.attention_flops(1, 8, 2048 * 2048, 64, backward=True) == 14 * 8 * 2048**2 * 64
    (full,) = named("grid", "1x8x2048x64", "full", "fp32", "forward")
    (causal,) = named("grid", "1x8x2048x64", "causal", "fp32", "forward")
    assert causal.flops / full.flops == pytest.approx(0.5, rel=1e-3)
    assert full.work == full.flops
    (decode,) = named("decode", "8x32/8x1/2048x128".split("/")[0], "2048x128", "bf16")
    assert decode.work == 2 * 8 * 8 * 2048 * 128 * 2


# Correctness before speed


def test_disagreement_sees_wrong_shapes_values_and_nan():
    a = torch.randn(3, 4)
    assert cases.disagreement((a,), (a,)) == 0
    assert cases.disagreement((a * 1.01,), (a,)) == pytest.approx(0.01, rel=1e-3)
    assert cases.disagreement((a[:2],), (a,)) == math.inf
    assert cases.disagreement((a, a), (a,)) == math.inf
    assert cases.disagreement((torch.full_like(a, math.nan),), (a,)) == math.inf


class FakeCase(cases.TimedCase):
    name, tags, roofs, flops, work, dtype = "fake", ("tag",), ("fp32",), 1, 1, "fp32"
    names = ("torch", "right", "wrong", "unsupported", "other function", "left out")

    @property
    def same_as(self):
        return {name: peer for name, peer in super().same_as.items() if name != "other function"}

    def contestants(self):
        def unsupported():
            raise NotImplementedError("no such kernel\nsecond line")

        return {
            "torch": lambda: (torch.ones(2),),
            "right": lambda: (torch.ones(2),),
            "wrong": lambda: (torch.ones(2) * 1.1,),
            "unsupported": unsupported,
            "other function": lambda: (torch.zeros(3),),
            "left out": unsupported,
        }


def test_wrong_and_unsupported_contestants_are_not_timed():
    result = measure_time(FakeCase(), 1, {}, {"left out"})
    assert set(result.seconds) == {"torch", "right", "other function"}
    assert set(result.failures) == {"wrong", "unsupported"}
    assert "differs from torch by 1.0e-01" in result.failures["wrong"]
    assert result.failures["unsupported"] == "no such kernel"
    assert "FAILED" in report.line(result)


# Bars


def judged(bar, figures, failures=()):
    results = [
        CaseResult(f"case{i}", ("tag",), ratio={"torch": {"cpu": figure}}) for i, figure in enumerate(figures)
    ]
    results += [CaseResult("failed", ("tag",), failures={"cpu": "wrong"}) for _ in failures]
    return report.judge(
        bar,
        [*results, CaseResult("other", ("elsewhere",), ratio={"torch": {"cpu": Spread(0.1, 0.1, 0.1)}})],
    )


def test_bar_verdicts():
    bar = cases.Bar("what", "tag", geomean=1.5, each=1.0)
    met = judged(bar, [Spread(3.0, 2.9, 3.1), Spread(1.0, 0.9, 1.1)])
    assert (met.verdict, met.worst_case, met.cases) == ("met", "case1", 2)
    assert met.geomean == pytest.approx(3.0**0.5)
    assert judged(bar, [Spread(3.0, 2.9, 3.1), Spread(0.97, 0.9, 1.02)]).verdict == "within noise"
    assert judged(bar, [Spread(3.0, 2.9, 3.1), Spread(0.9, 0.8, 0.99)]).verdict == "missed"
    assert judged(bar, [Spread(1.4, 1.3, 1.7)]).verdict == "missed"
    assert judged(bar, []).verdict == "not measured"
    failed = judged(bar, [Spread(3.0, 2.9, 3.1)], failures=[1])
    assert (failed.verdict, failed.failed) == ("missed", 1)
    assert judged(bar, [], failures=[1]).verdict == "missed"
    assert "bar geomean 1.50, each >= 1.00" in str(met)


def test_memory_bar_wants_less():
    bar = cases.Bar("what", "tag", each=1.5, contestant="auto", measure="memory")
    results = [CaseResult(f"m{x}", ("tag",), memory={"auto": {"growth_ratio": x}}) for x in (1.2, 1.4)]
    assert report.judge(bar, results).verdict == "met"
    assert report.judge(bar, results).worst == 1.4
    results.append(CaseResult("m2", ("tag",), memory={"auto": {"growth_ratio": 2.0}}))
    assert report.judge(bar, results).verdict == "missed"


# Peers, roofs, memory


def test_absent_peers_are_listed_as_absent():
    rows = machine.peers((machine.Peer("torch"), machine.Peer("a-peer-that-does-not-exist", "why")))
    assert [row["status"] for row in rows] == ["timed", "absent"]
    assert rows[0]["version"] == torch.__version__
    assert {peer.distribution for peer in attention.PEERS} >= {"torch", "flash-attn", "xformers"}


def test_roofs_are_positive_and_say_how_they_were_measured():
    found = roof_module.roofs(("fp32", "matmul", "copy"))
    assert set(found) == {"fp32", "matmul", "copy"}
    for roof in found.values():
        assert roof.work > 0
        assert time_calls(roof.call, 1) >= 0
    assert found["fp32"].source.startswith("register" if NATIVE else "torch.matmul")
    assert found["matmul"].source == "torch.matmul 1024 fp32"
    assert [roof.unit for roof in found.values()] == ["GFLOP/s", "GFLOP/s", "GB/s"]


def test_the_roof_of_bf16_without_an_instruction_is_that_of_fp32(monkeypatch):
    loop = roof_module._register_loop
    monkeypatch.setattr(
        roof_module, "_register_loop", lambda kind, name: loop(kind, name) if name == "fp32" else None
    )
    found = roof_module.roofs(("fp32", "fp32_tile", "bf16", "bf16_tile"))
    assert set(found) == {"fp32", "bf16"}
    assert found["bf16"].kind == "bf16"
    assert "fp32" in found["bf16"].source
    assert found["bf16"].unit == "GFLOP/s"


def test_the_roof_of_fp32_on_tiles_is_a_sixth_of_that_of_bf16(monkeypatch):
    monkeypatch.setattr(
        roof_module, "_register_loop", lambda kind, name: roof_module.Roof(kind, name, 600.0, list)
    )
    found = roof_module.roofs(("fp32_tile", "bf16_tile"))
    assert {kind: (roof.source, roof.work) for kind, roof in found.items()} == {
        "fp32_tile": ("bf16_tile", 100.0),
        "bf16_tile": ("bf16_tile", 600.0),
    }


def test_a_roof_call_is_long_beside_the_start_of_threads():
    if _native.missing() is None:
        roof = roof_module.roofs(("fp32",))["fp32"]
        threads = torch.get_num_threads()
        assert roof.work > 1e9 * roof_module.CALL_SECONDS, "less than 1 GFLOP/s: only the start was timed"
        assert torch.get_num_threads() == threads


def test_no_bar_is_met_by_a_disturbed_roof():
    bar = cases.Bar("peak", "tag", each=0.5, measure="roof")
    result = CaseResult("case", ("tag",), roof="fp32")
    for fraction, verdict in ((0.4, "missed"), (0.9, "met"), (30.0, "not measured")):
        result.roof_fraction = {"fp32": {bar.contestant: Spread(fraction, fraction, fraction)}}
        assert report.judge(bar, [result]).verdict == verdict
    # Six times the peak of one unit is no disturbance where another unit did the work.
    for dtype, (tiles, verdict) in itertools.product(("fp32", "bf16"), ((0.2, "met"), (3.0, "not measured"))):
        result = CaseResult("case", ("tag",), roof=dtype)
        fractions = {dtype: 6.0, f"{dtype}_tile": tiles}
        result.roof_fraction = {k: {bar.contestant: Spread(f, f, f)} for k, f in fractions.items()}
        assert report.judge(bar, [result]).verdict == verdict


def test_roof_counts_the_operations_of_all_threads_and_refuses_nonsense():
    if not NATIVE:
        assert not hasattr(torch.ops.fastattn, "roof")
        return
    roof = torch.ops.fastattn.roof
    per_thread = roof("fp32", 1) / torch.get_num_threads()
    assert per_thread > 0
    assert roof("fp32", 1000) == 1000 * per_thread * torch.get_num_threads()
    assert roof("bf16", 0) == roof("bf16_tile", 0) == 0
    with pytest.raises(RuntimeError, match="kind must be fp32, bf16 or bf16_tile, got fp8"):
        roof("fp8", 1)
    with pytest.raises(RuntimeError, match="iterations must be at least 0, got -1"):
        roof("fp32", -1)


def test_roof_follows_the_cap_on_the_instruction_set():
    # Weakest first: neither the dot product of bf16 pairs nor matrix tiles there, so no operations are done.
    weakest = next(iter(_native.isas()), None)
    if weakest is None:
        assert roof_module.roofs(("bf16_tile",)) == {}
        return
    program = "import torch, fastattn; roof = torch.ops.fastattn.roof; "
    program += "print(roof('fp32', 9) > 0, roof('bf16', 9), roof('bf16_tile', 9))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"FASTATTN_CPU_ISA": weakest},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True", "0.0", "0.0"]


def test_memory_counts_inputs_output_and_gradients_and_sees_a_score_matrix():
    case = {"batch": 1, "heads": 2, "length": 1024, "head_dim": 64, "dtype": "fp32", "causal": True}
    request = [sys.executable, "-m", "benchmarks.memory"]
    figures = {}
    for contestant in ("torch", "reference"):
        argument = {"operator": "attention", "contestant": contestant, "case": case, "threads": 1}
        argument = json.dumps(argument)
        done = subprocess.run([*request, argument], cwd=ROOT, capture_output=True, text=True, check=True)
        figures[contestant] = json.loads(done.stdout)
    tensors = 8 * 2 * 1024 * 64 * 4
    assert all(figure["tensor_bytes"] == tensors for figure in figures.values())
    score_matrix = 2 * 1024 * 1024 * 4
    assert figures["reference"]["workspace_bytes"] > score_matrix
    assert figures["torch"]["workspace_bytes"] < figures["reference"]["workspace_bytes"]


def test_memory_of_a_failing_contestant_is_an_error():
    case = attention.MemoryCase(1, 1, 16, 8, "fp32", True)
    with pytest.raises(RuntimeError, match="ValueError"):
        memory.measure_apart("no such implementation", case, 1)


# Whole runs


def test_quick_is_a_subset_and_the_filter_picks_by_name():
    quick = select(parse(["attention", "--quick"]))
    everything = select(parse(["attention"]))
    assert len(everything) == len(attention.CASES)
    assert 0 < len(quick) < len(everything)
    assert [case.name for case in select(parse(["attention", "--filter", "^small"]))] == [SMALL]
    assert parse(["attention", "--quick"]).pairs < parse(["attention"]).pairs


def test_run_prints_and_writes_everything(tmp_path, capsys):
    threads = torch.get_num_threads()
    paths = {name: tmp_path / "new" / name for name in ("run.json", "run.md", "run.png")}
    arguments = ["attention", "--filter", "^small", "--pairs", "2", "--threads", "1"]
    arguments += ["--json", str(paths["run.json"]), "--markdown", str(paths["run.md"])]
    try:
        assert main([*arguments, "--plot", str(paths["run.png"])]) == 0
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert SMALL in printed and "flash-attn" in printed and "roof fp32" in printed
    assert "small call (at most 1.5x torch's time) (auto), bar each >= 0.67: geomean" in printed

    content = json.loads(paths["run.json"].read_text())
    assert set(content) == {
        *("schema", "operator", "command", "threads", "pairs", "hardware", "versions", "environment"),
        *("fastattn_isa", "build", "peers", "roofs", "cases", "bars", "summary"),
    }
    assert (content["schema"], content["threads"], content["pairs"]) == (2, 1, 2)
    assert set(content["hardware"]) == {"cpu", "machine", "cores", "torch_isa", "caches", "memory_bytes"}
    assert content["versions"]["torch"] == torch.__version__
    assert content["roofs"]["fp32"]["rate"] > 0
    (case,) = content["cases"]
    contestants = {"torch", "cpu", "auto"} if NATIVE else {"torch", "auto"}
    assert case["name"] == SMALL and set(case["seconds"]) == contestants
    assert set(case["ratio"]) == {"torch"}
    assert set(case["ratio"]["torch"]) == set(case["giga_per_second"]) - {"torch"} == contestants - {"torch"}
    assert set(case["ratio"]["torch"]["auto"]) == {"median", "q20", "q80"}
    assert set(case["roof_fraction"]["fp32"]) == contestants
    assert all(len(values) == 2 for values in case["samples"].values())
    assert len(content["bars"]) == len(attention.BARS)
    bar = next(bar for bar in content["bars"] if bar["bar"]["tag"] == "small")
    assert bar["worst_case"] == SMALL and bar["verdict"] != "not measured"

    text = paths["run.md"].read_text()
    assert f"| {SMALL} |" in text and "## Bars" in text and "| flash-attn |" in text
    assert paths["run.png"].read_bytes().startswith(b"\x89PNG")


def test_a_run_may_keep_the_other_cases_of_its_file(tmp_path, capsys):
    """Where it was made under the same conditions; bars are then judged over both."""
    path, threads = tmp_path / "run.json", torch.get_num_threads()
    run = ["attention", "--filter", "^small", "--pairs", "1", "--threads", "1", "--json", str(path)]
    try:
        assert main(run) == 0
        content = json.loads(path.read_text())
        other = next(case for case in attention.CASES if "decode" in case.tags)
        content["cases"].append(content["cases"][0] | {"name": other.name, "tags": other.tags})
        path.write_text(json.dumps(content))
        assert main([*run, "--update"]) == 0
        updated = json.loads(path.read_text())
        found = {case["name"]: case for case in updated["cases"]}
        assert set(found) == {SMALL, other.name}
        assert found[other.name] == content["cases"][1] | {"tags": list(other.tags)}
        assert found[SMALL]["samples"] != content["cases"][0]["samples"]
        judged = {bar["bar"]["tag"]: bar["cases"] for bar in updated["bars"]}
        assert judged["small"] == judged["decode"] == 1
        assert updated["command"].count("--json") == 2
        with pytest.raises(ValueError, match="run.json has other pairs: 1, not 2"):
            main([*run, "--update", "--pairs", "2"])
    finally:
        torch.set_num_threads(threads)
    capsys.readouterr()


def test_a_run_that_is_cut_short_leaves_what_it_has_measured(tmp_path, monkeypatch):
    names = [SMALL, "grid/16x8x64x32/full/fp32/forward"]
    measured = []

    def measure(case, *rest):
        if measured:
            raise KeyboardInterrupt
        measured.append(case.name)
        return measure_time(case, *rest)

    monkeypatch.setattr("benchmarks.__main__.measure_time", measure)
    path = tmp_path / "run.json"
    with pytest.raises(KeyboardInterrupt):
        main(["attention", "--filter", "|".join(names), "--pairs", "1", "--json", str(path)])
    assert [case["name"] for case in json.loads(path.read_text())["cases"]] == measured


def test_run_refuses_an_empty_selection(capsys):
    assert main(["attention", "--filter", "no such case"]) == 2
    assert "no case matches" in capsys.readouterr().err


def test_pytest_benchmark_suite_covers_every_timed_case_and_runs():
    suites = (attention_suite.test_attention, linear_attention_suite.test_linear_attention)
    found = {case.id for suite in suites for mark in suite.pytestmark for case in mark.args[1]}
    timed = [case for case in attention.CASES + linear_attention.CASES if case.family != "memory"]
    assert found >= {f"{case.name}/auto" for case in timed}
    some = "small or 16x8x64x32 or step/1x8x64/fp32"
    command = ("-m", "pytest", "benchmarks", "--benchmark-disable", "--override-ini=addopts=-q", "-k", some)
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
