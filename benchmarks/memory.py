"""Peak memory of one forward+backward, in a process of its own: `python -m benchmarks.memory '{...}'`.

The growth is the peak of the resident set from before the inputs exist to after the gradients exist, so it
holds inputs, output and gradients (which nobody can avoid) and whatever the contestant needs besides.
"""

import importlib
import json
import resource
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from . import graphs
from .cases import ApartCase

ROOT = Path(__file__).resolve().parent.parent


def resident_bytes() -> int:
    """Resident set now; where /proc is missing the peak so far, which is no less."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_bytes()
    return pages * resource.getpagesize()


def reset_peak() -> None:
    """Forget the peak of start-up (Linux); elsewhere a large enough case exceeds it anyway."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def peak_bytes() -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure(
    operator: str, contestant: str, case: dict, threads: int, graphs_folder: str | None = None
) -> dict[str, float]:
    torch.set_num_threads(threads)
    graphs.folder = None if graphs_folder is None else Path(graphs_folder)
    case = importlib.import_module(f"{__package__}.{operator}").MemoryCase(**case)
    case.prepare()
    case.step(contestant, whole=False)  # libraries, threads and their buffers exist before the count starts
    before = resident_bytes()
    reset_peak()
    tensors = case.step(contestant, whole=True)
    growth = peak_bytes() - before
    return {
        "growth_bytes": growth,
        "tensor_bytes": tensors,
        "growth_ratio": growth / tensors,
        "workspace_bytes": growth - tensors,
    }


def measure_apart(contestant: str, case: ApartCase, threads: int) -> dict[str, float]:
    """`measure` in a fresh process."""
    operator = type(case).__module__.rpartition(".")[2]
    request = {"operator": operator, "contestant": contestant, "case": asdict(case), "threads": threads}
    request = json.dumps(request | {"graphs_folder": None if graphs.folder is None else str(graphs.folder)})
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", request], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout)


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
