"""`make gpu`, or `python -m tests.gpu [--stage NAME]... [--list] [--again]`: tests and benchmarks on a GPU.

The work is cut into stages of at most `LIMIT` seconds, each a process of its own with a log in `FOLDER`. A
call runs the stages that have not passed with the sources as they are, those never tried first, so that the
next call carries on one that was cut off. Needs torch, Triton and pytest, and installs nothing.
"""

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "gpu"
LIMIT = 8 * 60
SOURCES = ("setup.py", "csrc/*/*", "fastattn/**/*.py", "kernels/*.py", "tests/*.py", "benchmarks/*.py")


@dataclass(frozen=True)
class Stage:
    command: tuple[str, ...]
    optional: bool = False  # what comes after it can do without
    expects: str = ""  # a pattern that the log of a stage that passed holds


def tests(*arguments: str) -> Stage:
    # Not in parallel processes: pytest-xdist may be missing, and memory is measured.
    command = (sys.executable, "-m", "pytest", "-rs", "--durations=5", "-p", "no:cacheprovider", *arguments)
    return Stage(command, expects=r"\b[1-9]\d* passed")  # pytest is content with skipping everything


def benchmark(operator: str) -> Stage:
    return Stage((sys.executable, "-m", "benchmarks", operator, "--device", "cuda", "--save"))


# Compiling the kernels takes most of the time of tests. Triton keeps them, also where a stage is cut off.
STAGES = {
    "build": Stage((sys.executable, "setup.py", "build_ext", "--inplace"), optional=True),
    "device": tests("tests/test_gpu.py"),
    "attention float32": tests("tests/test_attention.py", "-k", "triton and options and float32"),
    "attention bfloat16": tests("tests/test_attention.py", "-k", "triton and options and bfloat16"),
    "attention": tests(
        "tests/test_attention.py", "tests/test_attention_rules.py", "tests/test_attention_weights.py",
        "-k", "triton and not test_options",
    ),
    "varlen attention": tests(
        "tests/test_varlen_attention.py", "tests/test_varlen_attention_torch.py", "-k", "triton"
    ),
    "KV cache": tests("tests/test_kv_cache.py", "-k", "triton"),
    "linear attention": tests("tests/test_linear_attention.py", "-k", "triton"),
    "linear attention, rules": tests(
        "tests/test_linear_attention_rules.py", "tests/test_linear_attention_arguments.py",
        "tests/test_linear_attention_state.py", "-k", "triton",
    ),
    "aggregation": tests("tests/test_aggregation.py", "tests/test_aggregation_rules.py", "-k", "triton"),
    "graph attention": tests(
        "tests/test_graph_attention.py", "tests/test_graph_attention_rules.py", "-k", "triton"
    ),
    "graphs": tests("tests/test_triton_graphs.py"),
    "benchmark attention": benchmark("attention"),
    "benchmark linear attention": benchmark("linear_attention"),
    "benchmark aggregation": benchmark("aggregation"),
    "benchmark graph attention": benchmark("graph_attention"),
}  # fmt: skip


def digest(root: Path = ROOT) -> str:
    """Of the sources: a commit says nothing about uncommitted changes, and a copy may come without any."""
    found = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in root.glob(pattern) if path.is_file()):
        found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def commit(root: Path = ROOT) -> str:
    command = ("git", "describe", "--always", "--dirty", "--abbrev=12")
    try:
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def read(folder: Path) -> dict[str, dict]:
    try:
        return json.loads((folder / "stages.json").read_text())
    except FileNotFoundError:
        return {}


def write(folder: Path, records: Mapping[str, dict]) -> None:
    new = folder / "stages.json.new"
    new.write_text(json.dumps(records, indent=1) + "\n")
    new.replace(folder / "stages.json")  # all of it or nothing: a call may be cut off here, too


def execute(command: Sequence[str], log: Path, limit: float) -> str:
    """passed, failed or timed out; whatever the command has started is ended with it."""
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # also where this process is interrupted
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has ended, and left none behind
                pass
            process.wait()
    return "timed out" if code is None else "failed" if code else "passed"


def run(
    stages: Mapping[str, Stage],
    folder: Path = FOLDER,
    *,
    chosen: Sequence[str] = (),
    again: bool = False,
    sources: str | None = None,
    limit: float = LIMIT,
) -> bool:
    """Run the chosen stages (or all) that have not passed yet; whether all of them now have."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = digest() if sources is None else sources
    records = read(folder)
    current = {name: r for name, r in records.items() if r["sources"] == sources and not again}
    names = list(chosen or stages)
    finished = {n for n, r in current.items() if r["result"] == "passed" or stages[n].optional}
    todo = sorted((name for name in names if name not in finished), key=current.__contains__)
    for name in todo:
        log = folder / f"{name.replace(' ', '_').replace(',', '')}.log"
        print(f"{name}: {' '.join(stages[name].command)}", flush=True)
        start = time.monotonic()
        result = execute(stages[name].command, log, limit)
        if result == "passed" and not re.search(stages[name].expects, log.read_text(errors="replace")):
            result = "failed"
        current[name] = records[name] = {
            "result": result, "seconds": round(time.monotonic() - start, 1), "commit": commit(),
            "sources": sources, "log": str(log),
        }  # fmt: skip
        write(folder, records)
        lines = log.read_text(errors="replace").splitlines()
        for line in lines[-1:] if result == "passed" else lines[-40:]:
            print(f"  {line}")
        print(f"{name}: {result} after {current[name]['seconds']} s", flush=True)
    print()
    print("\n".join(table({name: stages[name] for name in names}, current)))
    return all(current[name]["result"] == "passed" or stages[name].optional for name in names)


def table(stages: Mapping[str, Stage], records: Mapping[str, dict]) -> list[str]:
    lines = []
    for name in stages:
        record = records.get(name)
        text = (
            "not run" if record is None else "{result} in {seconds} s at {commit}, {log}".format_map(record)
        )
        lines.append(f"{name:<28} {text}")
    return lines


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Tests and benchmarks on a GPU.")
    parser.add_argument("--stage", action="append", default=[], choices=STAGES, help="only this one")
    parser.add_argument("--list", action="store_true", help="say how far it got, run nothing")
    parser.add_argument("--again", action="store_true", help="also what has passed")
    options = parser.parse_args(arguments)
    if options.list:
        sources = digest()
        records = {name: r for name, r in read(FOLDER).items() if r["sources"] == sources}
        print("\n".join(table(STAGES, records)))
        return 0
    import torch

    if not torch.cuda.is_available():
        print(f"no GPU here that torch {torch.__version__} can use", file=sys.stderr)
        return 2
    return 0 if run(STAGES, chosen=options.stage, again=options.again) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
