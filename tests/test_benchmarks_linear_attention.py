"""The tables of linear attention: cases and bars against the promised ones, and the peers against the
formula."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastattn
from benchmarks import generation, linear_attention
from benchmarks import plain_linear_attention as plain
from benchmarks.__main__ import main, measure_time
from benchmarks.figures import Spread
from benchmarks.runner import CaseResult
from fastattn import _native

ROOT = Path(__file__).resolve().parent.parent
CASES = linear_attention.CASES
# Where the operator has no C++ kernel, that contestant is absent, and its absence a failure of the run.
KERNEL = fastattn.explain(fastattn.linear_attention, *[torch.zeros(1, 1, 1, 1)] * 3).impl == "cpu"


def family(name):
    return [case for case in CASES if case.family == name]


def test_names_are_unique_and_contestants_are_those_named():
    for table in (CASES, generation.CASES):
        names = [case.name for case in table]
        assert len(names) == len(set(names))
    for case in (*family("step"), linear_attention.LinearAttentionCase("causal", 1, 1, 128, 8, "fp32")):
        assert tuple(case.contestants()) == case.names
        assert set(case.baselines) | set(case.same_as) | set(case.same_as.values()) <= set(case.names)


def test_grid_is_complete():
    shapes = {(1, 8, 1024, 64), (2, 8, 4096, 64), (1, 16, 2048, 128), (8, 8, 512, 32)}
    shape = {case: (case.batch, case.heads, case.length, case.head_dim) for case in CASES if case.family in
             ("causal", "product", "full")}  # fmt: skip
    causal = {(shape[c], c.dtype, c.backward) for c in family("causal") if c.tags}
    assert causal == set(itertools.product(shapes, ("fp32", "bf16"), (False, True)))
    product = {(shape[c], c.dtype, c.backward) for c in family("product")}
    assert product == set(itertools.product(shapes, ["fp32"], (False, True)))
    assert {(shape[c], c.dtype) for c in family("full")} == {
        ((2, 8, 4096, 64), dtype) for dtype in ("fp32", "bf16")
    }
    assert any(c.heads == c.batch == 1 for c in family("causal")), "one head alone"
    assert {(c.batch, c.heads, c.head_dim, c.dtype) for c in family("step")} == set(
        itertools.product([1, 16], [8], [64], ["fp32", "bf16"])
    )
    assert {(c.heads, c.length, c.head_dim, c.dtype) for c in family("memory")} == set(
        itertools.product([8], [65536], [64], ["fp32", "bf16"])
    )


def test_every_bar_has_cases_and_the_promised_height():
    chunks, count = ("chunk64", "chunk128"), {}
    for bar in linear_attention.BARS:
        count[bar.what] = sum(bar.tag in case.tags for case in CASES)
        assert bar.measure != "ratio" or all(
            name in {"idiap", *case.names} for case in CASES if bar.tag in case.tags for name in bar.baselines
        )
    assert min(count.values()) > 0 and len(count) == len(linear_attention.BARS)
    assert count["softmax attention, forward"] == 8 and count["softmax attention, forward, L=4096"] == 2
    heights = {bar.what: (bar.geomean, bar.each, bar.baselines) for bar in linear_attention.BARS}
    torch_only = ("torch",)
    assert heights == {
        "causal fp32 forward": (2.2, 1.5, chunks),
        "causal fp32 forward+backward": (2.2, 1.5, chunks),
        "causal bf16 forward": (1.8, None, chunks),
        "causal bf16 forward+backward": (1.8, None, chunks),
        "causal product, forward": (2.5, None, ("idiap",)),
        "causal product, forward+backward": (2.5, None, ("idiap",)),
        "softmax attention, forward": (None, 4.0, ("sdpa",)),
        "softmax attention, forward, L=4096": (None, 8.0, ("sdpa",)),
        "step": (None, 3.0, ("plain",)),
        "step beside 4096 cached tokens": (None, 15.0, ("sdpa",)),
        "not causal, fp32 forward": (None, 1.3, ("plain",)),
        "FMA peak, causal fp32 forward, D=64 and 128": (None, 0.55, torch_only),
        "memory, forward+backward, L=65536": (None, 1.5, torch_only),
    }


@pytest.mark.parametrize("length, chunk", [(256, 64), (64, 64), (40, 40)])
def test_flops_are_those_of_the_products_of_the_chunk_form(length, chunk):
    D, triangle, chunks = 8, chunk * (chunk + 1) // 2, length // chunk
    # Per chunk: two products over the triangle; between chunks one into the state and one out of it.
    forward = 2 * (2 * chunks * triangle * D + 2 * (chunks - 1) * chunk * D * D)
    assert linear_attention.causal_flops(3, 2, length, D, False) == 6 * forward
    gradients = 2 * (5 * chunks * triangle * D + 5 * (chunks - 1) * chunk * D * D)
    assert linear_attention.causal_flops(3, 2, length, D, True) == 6 * (forward + gradients)
    (full,) = [case for case in family("full") if case.dtype == "fp32"]
    assert full.work == full.flops == 4 * 16 * 4096 * 64 * 64
    assert family("step")[0].work == 2 * 4 * 8 * 64 * 64


# The peers


def dense(q, k, v, causal, bare=False):
    if not bare:
        q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    weights = q @ k.mT
    weights = weights.tril() if causal else weights
    return weights @ v if bare else weights @ v / (weights.sum(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.bfloat16, 1e-2)])
def test_plain_forms_are_the_formula(dtype, bound):
    inputs = [torch.randn(2, 3, 128, 16, dtype=dtype) for _ in range(3)]
    exact = [x.double() for x in inputs]

    def error(out, expected):
        return ((out.double() - expected).norm() / expected.norm()).item()

    for bare in (False, True):
        for chunk in (32, 64, 128):
            out = plain.chunked(*inputs, chunk, bare)
            assert out.dtype == dtype and error(out, dense(*exact, True, bare)) < bound
    assert error(plain.full(*inputs), dense(*exact, False)) < bound
    kv, z = torch.zeros(2, 3, 16, 16), torch.zeros(2, 3, 16)
    if dtype == torch.float64:
        return  # the state of the plain step is float32
    for t in range(128):
        out = plain.step(*(x[:, :, t] for x in inputs), kv, z)
    assert error(out, dense(*exact, True)[:, :, -1]) < bound


def test_idiap_as_a_peer_is_the_formula():
    pytest.importorskip("fast_transformers.causal_product")
    inputs = [torch.randn(2, 3, 50, 8) for _ in range(3)]
    for bare in (False, True):
        torch.testing.assert_close(
            plain.idiap(*inputs, bare), dense(*inputs, True, bare), atol=1e-4, rtol=1e-4
        )


def test_bare_product_and_step_give_the_peers_numbers_and_are_timed():
    product = linear_attention.LinearAttentionCase("product", 1, 2, 128, 8, "fp32", backward=True)
    step = family("step")[0]
    absent = set() if KERNEL else {"cpu"}
    for case in (product, step):
        result = measure_time(case, 1, {}, absent)
        assert not result.failures
        assert set(result.ratio) == set(case.baselines)
        for ratios in result.ratio.values():
            assert set(ratios) == {"cpu", "auto"} - absent


def test_memory_of_both_contestants():
    case = linear_attention.MemoryCase(1, 2, 1024, 32, "fp32", True)
    request = [sys.executable, "-m", "benchmarks.memory"]
    for contestant in case.names:
        argument = {"operator": "linear_attention", "contestant": contestant, "threads": 1}
        argument["case"] = {"batch": 1, "heads": 2, "length": 1024, "head_dim": 32, "dtype": "fp32"}
        argument["case"]["causal"] = True
        done = subprocess.run([*request, json.dumps(argument)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["tensor_bytes"] == 8 * 2 * 1024 * 32 * 4


def test_run_prints_and_writes(tmp_path, capsys):
    threads = torch.get_num_threads()
    arguments = ["linear_attention", "--filter", "^step/1x8x64/fp32", "--pairs", "1", "--threads", "1"]
    try:
        code = main(
            [*arguments, "--json", str(tmp_path / "run.json"), "--markdown", str(tmp_path / "run.md")]
        )
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert code == (0 if KERNEL or _native.missing() is not None else 1), printed
    assert "plain/auto" in printed and "sdpa/auto" in printed and "peer pytorch-fast-transformers" in printed
    (case,) = json.loads((tmp_path / "run.json").read_text())["cases"]
    assert set(case["ratio"]) == {"plain", "sdpa"}
    text = (tmp_path / "run.md").read_text()
    assert "| chunk64 or chunk128 |" in text and "| step/1x8x64/fp32 |" in text


# Generation


@pytest.fixture
def small_decoder(monkeypatch):
    for name, value in {"LAYERS": 2, "HEADS": 2, "D_MODEL": 16, "FEED_FORWARD": 32, "LENGTH": 12}.items():
        monkeypatch.setattr(generation, name, value)
    generation.decoder.cache_clear()
    yield generation.decoder
    generation.decoder.cache_clear()


@pytest.mark.parametrize("attention", [generation.SoftmaxAttention, generation.LinearAttention])
def test_steps_of_the_decoder_are_its_whole_prefix(small_decoder, attention):
    model = small_decoder(attention)
    pixels = torch.randint(generation.LEVELS, (3, 12))
    states = model.initial_states(3)
    for position in range(12):
        stepped = model.step(pixels[:, position], position, states)
        torch.testing.assert_close(stepped, model(pixels[:, : position + 1]), atol=1e-5, rtol=1e-5)


def test_generation_cases_are_the_papers_and_their_contestants_run(small_decoder):
    case = generation.GenerationCase(2, 5)
    contestants = case.contestants()
    assert tuple(contestants) == case.names
    assert all(call()[0].shape == (2, generation.LEVELS) for call in contestants.values())
    torch.testing.assert_close(contestants["kv_cache"](), contestants["recompute"]())


def test_generation_is_the_experiment_of_the_paper():
    sizes = (generation.LAYERS, generation.HEADS, generation.D_MODEL, generation.FEED_FORWARD)
    assert sizes == (8, 8, 256, 1024) and generation.LENGTH == 784
    assert min(generation.BATCHES) == 1 < max(generation.BATCHES)
    assert generation.POSITIONS[0] == 0 and generation.POSITIONS[-1] == 783


def test_seconds_of_an_image_add_up_over_the_positions_between_the_measured_ones():
    def seconds(position):
        values = {"recompute": 2.0 * position, "kv_cache": 1.0 + position, "linear": 3.0}
        return {name: Spread(value, value, value) for name, value in values.items()}

    results = [
        CaseResult(case.name, (), seconds=seconds(case.position))
        for case in generation.CASES
        if case.batch == 1
    ]
    total = generation.image_seconds(results, 1)
    assert total["linear"] == pytest.approx(3.0 * 784)
    assert total["kv_cache"] == pytest.approx(784 + 783 * 784 / 2)
    assert total["recompute"] == pytest.approx(783 * 784)
    (line,) = generation.summary(results)
    assert f"linear is {total['kv_cache'] / total['linear']:.2f}x as fast as a KV cache" in line
    assert generation.image_seconds(results[1:], 1) == {}
    assert issubclass(generation.LinearAttention, fastattn.nn.LinearMultiheadAttention)
