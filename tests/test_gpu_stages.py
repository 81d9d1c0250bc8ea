"""`make gpu` without a GPU: which stages a call runs, and what becomes of those that fail or hang."""

import sys
import time
from pathlib import Path

import gpu
import pytest
from gpu import Stage


def append(folder: Path, text: str, then: str = "") -> Stage:
    code = f"open({str(folder / 'ran')!r}, 'a').write({text!r}); {then}"
    return Stage((sys.executable, "-c", code))


def ran(folder: Path) -> str:
    found = (folder / "ran").read_text()
    (folder / "ran").write_text("")
    return found


def test_a_call_carries_on_where_the_last_one_ended(tmp_path):
    stages = {"one": append(tmp_path, "1"), "two": append(tmp_path, "2"), "three": append(tmp_path, "3")}
    assert gpu.run(stages, tmp_path, chosen=["two"], sources="a") and ran(tmp_path) == "2"
    assert gpu.run(stages, tmp_path, sources="a") and ran(tmp_path) == "13"
    assert gpu.run(stages, tmp_path, sources="a") and ran(tmp_path) == ""
    assert gpu.run(stages, tmp_path, sources="a", chosen=["one"], again=True) and ran(tmp_path) == "1"
    assert gpu.run(stages, tmp_path, sources="b") and ran(tmp_path) == "123"
    record = gpu.read(tmp_path)["two"]
    assert record["result"] == "passed" and record["sources"] == "b" and record["commit"] == gpu.commit()


def test_a_failure_stops_nothing_and_is_tried_again_after_the_rest(tmp_path, capsys):
    stages = {
        "bad": append(tmp_path, "b", "print('why'); raise SystemExit(3)"), "good": append(tmp_path, "g"),
        "new": append(tmp_path, "n"),
    }  # fmt: skip
    assert not gpu.run({n: stages[n] for n in ("bad", "good")}, tmp_path, sources="a")
    assert ran(tmp_path) == "bg" and "  why\n" in capsys.readouterr().out
    assert not gpu.run(stages, tmp_path, sources="a") and ran(tmp_path) == "nb"
    stages["bad"] = append(tmp_path, "b")
    assert gpu.run(stages, tmp_path, sources="a") and ran(tmp_path) == "b"


def test_a_stage_that_skips_everything_has_not_passed(tmp_path):
    bodies = {"skips": "__import__('pytest').skip('no')", "passes": "assert True"}
    for name, body in bodies.items():
        (tmp_path / f"test_{name}.py").write_text(f"def test_one():\n    {body}\n")
    stages = {name: gpu.tests(str(tmp_path / f"test_{name}.py")) for name in bodies}
    assert not gpu.run(stages, tmp_path, sources="a")
    assert {n: r["result"] for n, r in gpu.read(tmp_path).items()} == {"skips": "failed", "passes": "passed"}


def test_an_optional_stage_may_fail(tmp_path):
    stages = {"build": Stage((sys.executable, "-c", "raise SystemExit(1)"), optional=True)}
    for _ in range(2):
        assert gpu.run(stages, tmp_path, sources="a")
    assert gpu.read(tmp_path)["build"]["result"] == "failed"


def test_what_hangs_is_ended_with_the_processes_it_started(tmp_path):
    code = (
        "import pathlib, subprocess, sys; child = subprocess.Popen(['sleep', '600']);"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid)); child.wait()"
    )
    stages = {"hangs": Stage((sys.executable, "-c", code)), "next": append(tmp_path, "n")}
    start = time.monotonic()
    assert not gpu.run(stages, tmp_path, sources="a", limit=5)
    assert time.monotonic() - start < 60 and ran(tmp_path) == "n"
    assert gpu.read(tmp_path)["hangs"]["result"] == "timed out"
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if (
            not state.exists() or state.read_text().split()[2] == "Z"
        ):  # who inherits it may not have looked yet
            return
        time.sleep(0.05)
    pytest.fail(f"{pid} still runs")


def test_the_digest_follows_sources_and_nothing_else(tmp_path):
    (tmp_path / "kernels").mkdir()
    kernel = tmp_path / "kernels" / "a.py"
    kernel.write_text("1")
    first = gpu.digest(tmp_path)
    (tmp_path / "README.md").write_text("1")
    assert gpu.digest(tmp_path) == first
    kernel.write_text("2")
    assert gpu.digest(tmp_path) != first
    assert gpu.commit(tmp_path / "nowhere") == "unknown"


def test_stages_name_files_that_are_there():
    for stage in gpu.STAGES.values():
        for word in stage.command:
            assert not word.startswith("tests/") or (gpu.ROOT / word).exists()
        assert stage.command[0] == sys.executable


def test_command_line(run_python, capsys):
    done = run_python("-m", "tests.gpu", check=False, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "no GPU here" in done.stderr
    done = run_python("-m", "tests.gpu", "--list")
    assert [line[:28].strip() for line in done.stdout.splitlines()] == list(gpu.STAGES)
    with pytest.raises(SystemExit):
        gpu.main(["--stage", "nonsense"])
    assert "invalid choice: 'nonsense'" in capsys.readouterr().err
