"""The examples, cut down to seconds."""

import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "examples" / "train_language_model.py"
TINY = ["--steps", "3", "--length", "32", "--batch", "2", "--d-model", "16", "--heads", "2", "--layers", "2"]
DIGITS = ROOT / "examples" / "generate_digits.py"
TINY_DIGITS = ["--steps", "4", "--d-model", "16", "--heads", "2", "--layers", "2", "--rows", "1"]
TINY_DIGITS += ["--timed-pixels", "192", "--timed-batch", "1"]


def run(*arguments, cwd, demo=DEMO, settings=TINY):
    # The package under test, also where it is not installed but only on the path.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(demo), *settings, "--threads", "1", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    done = run("--generate", "5", "--held-out-windows", "2", "--out", "written", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, folder / "written"


def test_demo_writes_curves_sample_and_report(demo):
    done, folder = demo
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "sample.txt").read_text().startswith("The statement ")
    report = json.loads((folder / "report.json").read_text())
    assert report["steps"] == 3 and set(report["loss"]) == {"torch", "fastattn"}
    assert "training both" in done.stderr  # the progress bar
    for line in (
        "tokens/s",
        "bytes/s",
        "held-out loss",
        "largest difference of the loss curves",
        "peak memory",
    ):
        assert line in done.stdout


def test_demo_curves_agree_and_fall(demo):
    report = json.loads((demo[1] / "report.json").read_text())
    assert report["max_loss_difference"] < 1e-4
    assert report["speed_ratio"] > 0
    assert all(memory > 0 for memory in report["peak_memory_bytes"].values())
    assert report["loss"]["fastattn"][-1] < report["loss"]["fastattn"][0]
    held_out = report["held_out_loss"]
    assert held_out["torch"] == pytest.approx(held_out["fastattn"], abs=1e-4)


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script():
    return load(DEMO)


def test_demo_stops_at_the_time_limit(script, capsys):
    options = script.parse([*TINY, "--time-limit", "0", "--steps", "50"])
    trainers = {variant: script.Trainer(variant, options) for variant in script.VARIANTS}
    tokens, _ = script.corpus()
    losses, seconds = script.train(trainers, tokens, options)
    assert {len(values) for values in [*losses.values(), *seconds.values()]} == {1}
    assert "time limit" in capsys.readouterr().out


def test_demo_uses_the_same_batches_and_initial_parameters(script):
    options = script.parse(TINY)
    models = [script.build(variant, options) for variant in script.VARIANTS]
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours, theirs)


def test_demo_notices_a_bypassed_swap(script):
    options = script.parse(TINY)
    script.check_swap(script.build("fastattn", options), options)
    with pytest.raises(AssertionError, match="0 use the swapped module"):
        script.check_swap(script.build("torch", options), options)


# Drawing digits


def test_digits_are_drawn_and_everything_is_written(tmp_path):
    done = run("--out", "written", cwd=tmp_path, demo=DIGITS, settings=TINY_DIGITS)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("digits.png", "digits_time.png"):
        assert (tmp_path / "written" / name).read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "written" / "digits.json").read_text())
    assert report["steps"] == len(report["training_bits"]) == 4
    assert report["largest_logit_difference"] < 1e-4 and report["same_images"] == 1.0
    assert report["bits_per_pixel"]["all levels alike"] == pytest.approx(4.087, abs=1e-3)
    assert all(value > 0 for value in report["bits_per_pixel"].values())
    assert {name: len(values) for name, values in report["seconds_per_pixel"].items()} == {
        "linear, recurrent": 3,
        "softmax, KV cache": 3,
    }
    # Two layers, two heads of 8: kv and z in float32; keys and values of 192 pixels.
    assert report["state_bytes"] == {
        "linear, recurrent": 2 * 4 * 2 * (8 * 8 + 8),
        "softmax, KV cache": 2 * 4 * 2 * 192 * 16,
    }
    for line in (
        "bits per pixel after 4 steps",
        "held out, pixels alone",
        "images drawn",
        "kept per sequence",
    ):
        assert line in done.stdout


@pytest.fixture(scope="module")
def painter():
    script = load(DIGITS)
    options = script.parse(TINY_DIGITS)
    torch.manual_seed(0)
    return script, options, script.Painter(script.LinearAttention, options).eval()


@pytest.mark.parametrize("attention", ["LinearAttention", "SoftmaxAttention"])
def test_steps_of_both_painters_have_the_past_in_their_states(painter, attention):
    script, options, _ = painter
    model = script.Painter(getattr(script, attention), options).eval()
    digits, pixels = torch.arange(3), torch.randint(17, (3, 64))
    assert script.largest_difference(model, digits, pixels) < 1e-4


def test_drawing_is_repeatable_and_that_of_the_whole_prefix(painter):
    script, _, model = painter
    digits = torch.arange(10)
    drawn = script.draw(model, digits, seed=1)
    assert drawn.shape == (10, 64) and 0 <= drawn.min() and drawn.max() <= 16
    assert torch.equal(drawn, script.draw(model, digits, seed=1))
    assert torch.equal(drawn, script.draw_by_prefix(model, digits, seed=1))
    assert not torch.equal(drawn, script.draw(model, digits, seed=2))


def test_a_painter_that_sees_the_future_or_forgets_the_past_is_noticed(painter):
    script, options, model = painter
    wrong = copy.deepcopy(model)
    wrong.layers[0].attention.step = lambda x, state, position: type(model.layers[0].attention).step(
        wrong.layers[0].attention, x, state if position % 2 else wrong.initial_states(3)[0], position
    )
    assert script.largest_difference(wrong, torch.arange(3), torch.randint(17, (3, 64))) > script.AGREEMENT


def test_held_out_images_are_not_trained_on_and_the_histogram_is_a_distribution(painter):
    script = painter[0]
    (digits, pixels), held_out = script.images(seed=0)
    assert len(digits) + len(held_out[0]) == 1797 and len(held_out[0]) == script.HELD_OUT
    again = script.images(seed=0)[1]
    assert torch.equal(held_out[1], again[1])
    bits = script.histogram_bits((digits, pixels), held_out)
    assert 1.0 < bits < script.math.log2(17)


# Classifying digits

GRAPH = ROOT / "examples" / "classify_digits.py"
TINY_GRAPH = ["--epochs", "4", "--images", "300", "--hidden", "8", "--heads", "2", "--neighbours", "4"]


def test_digits_are_classified_before_and_after_the_conversion(tmp_path):
    pytest.importorskip("torch_geometric")
    done = run("--out", "written", cwd=tmp_path, demo=GRAPH, settings=TINY_GRAPH)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "written" / "digits_graph.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "written" / "classify_digits.json").read_text())
    assert set(report["models"]) == {"GCN", "SAGE", "GAT"}
    for found in report["models"].values():
        assert found["epochs"] == len(found["loss"]["fastattn"]) == 4
        assert found["max_loss_difference"] < 1e-4
        assert found["accuracy_after_conversion"] == found["accuracy"]["torch_geometric"]
        assert found["predictions_changed"] == 0
        assert found["speed_ratio"] > 0
    for line in ("2 layers converted", "accuracy on unknown labels", "time per epoch", "as fast"):
        assert line in done.stdout


def test_digits_are_classified_without_torch_geometric(tmp_path):
    hidden = "import runpy, sys; sys.modules['torch_geometric'] = None; sys.argv = sys.argv[1:]; "
    hidden += "runpy.run_path(sys.argv[0], run_name='__main__')"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    options = [*TINY_GRAPH, "--threads", "1", "--kinds", "GAT", "--out", "written", "--images", "90"]
    done = subprocess.run(
        [sys.executable, "-c", hidden, str(GRAPH), *options],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch_geometric is not installed: the models are made of fastattn.nn's layers" in done.stdout
    report = json.loads((tmp_path / "written" / "classify_digits.json").read_text())
    (found,) = report["models"].values()
    assert set(found["accuracy"]) == {"fastattn"} and found["loss"]["fastattn"][-1] < 3


@pytest.mark.parametrize(
    "wrong",
    (
        "--epochs 0",
        "--images 4",
        "--hidden 7",
        "--heads 0",
        "--labels 0",
        "--threads 0",
        "--dropout 2",
        "--seed -1",
    ),
)
def test_digits_refuse_settings_before_they_train(wrong, capsys):
    with pytest.raises(SystemExit):
        load(GRAPH).parse([*TINY_GRAPH, *wrong.split()])
    assert f"{wrong.split()[0]} must be" in capsys.readouterr().err


def test_digits_need_images_without_a_label():
    script = load(GRAPH)
    with pytest.raises(SystemExit, match="--labels 1000 makes every image known"):
        script.Digits(script.parse([*TINY_GRAPH, "--labels", "1000"]))


def test_digits_stop_at_the_time_limit():
    script = load(GRAPH)
    options = script.parse([*TINY_GRAPH, "--time-limit", "0", "--kinds", "GCN"])
    report, _ = script.run("GCN", script.Digits(options), options, 0.0)
    assert report["epochs"] == 1


# Serving

SERVE = ROOT / "examples" / "serve_gpt.py"
TINY_SERVE = ["--steps", "3", "--length", "96", "--batch", "2", "--d-model", "16", "--heads", "2"]
TINY_SERVE += [
    "--layers",
    "2",
    "--generate",
    "20",
    "--beams",
    "3",
    "--rounds",
    "1",
    "--held-out-windows",
    "2",
]


def test_both_caches_serve_the_same_bytes_in_every_way(tmp_path):
    done = run("--out", "written", cwd=tmp_path, demo=SERVE, settings=TINY_SERVE)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "written" / "serve_gpt.json").read_text())
    assert set(report["ways"]) == {"greedy", "temperature 0.7", "top-k 10", "top-p 0.9", "3 beams"}
    for found in report["ways"].values():
        assert found["same_tokens"] == 1 and found["speed_ratio"] > 0
        assert set(found["tokens_per_second"]) == {"torch", "fastattn"}
    text = (tmp_path / "written" / "served.txt").read_text()
    assert text.count("--- greedy") == 8 and "The statement |" in text
    assert "tokens per second" in done.stdout


@pytest.fixture
def server(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    script = load(SERVE)
    options = script.parse(TINY_SERVE)
    torch.manual_seed(0)
    model = script.LanguageModel(options.length, 16, 2, 2).eval()
    return script, model, [b"The ", b"A class ", b"x"]


@torch.no_grad()
def by_prefix(model, prompt, count):
    """Greedy, the whole prefix again for every byte."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(model(torch.tensor([tokens]))[0, -1].argmax().item())
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", ("torch", "fastattn"))
def test_served_bytes_are_those_of_the_whole_prefix(server, kind):
    script, model, prompts = server
    chosen = script.generate(model, prompts, 12, script.Sampler(), kind)
    assert chosen.tolist() == [by_prefix(model, prompt, 12) for prompt in prompts]
    assert torch.equal(chosen, script.beam_search(model, prompts, 12, 1, kind))


@torch.no_grad()
def test_beams_are_likelier_than_greedy_bytes(server):
    script, model, prompts = server

    def likelihood(prompt, continuation):
        tokens = torch.tensor([list(prompt) + continuation])
        gain = model(tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None])
        return gain[0, len(prompt) - 1 :].sum().item()

    beams = script.beam_search(model, prompts, 6, 8, "fastattn").tolist()
    for prompt, beam in zip(prompts, beams, strict=True):
        assert likelihood(prompt, beam) >= likelihood(prompt, by_prefix(model, prompt, 6)) - 1e-4


def test_samplers_keep_what_they_say(server):
    script = server[0]
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    softmax = logits.softmax(-1)
    torch.testing.assert_close(script.Sampler(1.0).probabilities(logits), softmax)
    assert script.Sampler()(logits).tolist() == [1]
    assert (script.Sampler(1.0, top_k=2).probabilities(logits) > 0).tolist() == [[False, True, True, False]]
    # The likeliest has 0.64, the first two 0.88.
    for top_p, kept in ((0.1, 1), (0.6, 1), (0.7, 2), (0.87, 2), (0.9, 3), (1.0, 4)):
        assert (script.Sampler(1.0, top_p=top_p).probabilities(logits) > 0).sum() == kept
    draws = [script.Sampler(1.0, seed=1)(logits.expand(50, 4)).tolist() for _ in range(2)]
    assert draws[0] == draws[1] and len(set(draws[0])) > 1


@pytest.mark.parametrize("wrong", ("--generate 90", "--beams 0", "--rounds 0", "--steps 0"))
def test_serving_refuses_settings_before_it_trains(server, wrong, capsys):
    with pytest.raises(SystemExit):
        server[0].parse([*TINY_SERVE, *wrong.split()])
    assert "must be at least" in capsys.readouterr().err
