"""The examples, cut down to seconds."""

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


def run(*arguments, cwd):
    # The package under test, also where it is not installed but only on the path.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(DEMO), *TINY, "--threads", "1", *arguments],
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


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_language_model", DEMO)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
