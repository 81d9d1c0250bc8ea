"""What a figure depends on besides the code: hardware, versions, environment, and which peers are there."""

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

# Read by the thread pools or by fastattn itself; each changes what is measured.
ENVIRONMENT = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "OMP_PROC_BIND",
    "GOMP_SPINCOUNT",
    "KMP_BLOCKTIME",
    "MKL_NUM_THREADS",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "FASTATTN_CPU_ISA",
)


@dataclass(frozen=True)
class Peer:
    distribution: str
    note: str = ""  # why it is no contestant on the CPU even where it is installed


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def peers(candidates: tuple[Peer, ...]) -> list[dict]:
    rows = []
    for peer in candidates:
        version = version_of(peer.distribution)
        status = "absent" if version is None else peer.note or "timed"
        rows.append({"peer": peer.distribution, "version": version, "status": status})
    return rows


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "cpu model")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _caches() -> dict[str, str]:
    """Size per level as the kernel reports it for the first core, for example {"L1d": "48K"}."""
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        caches[f"L{level}" + {"Data": "d", "Instruction": "i"}.get(kind, "")] = size
    return caches


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def hardware() -> dict:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_model(),
        "machine": platform.machine(),
        "cores": usable,
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "caches": _caches(),
        "memory_bytes": _memory_bytes(),
    }


def _commit() -> str | None:
    root = Path(__file__).resolve().parent.parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def versions() -> dict:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fastattn": version_of("fastattn"),
        "commit": _commit(),
        "system": platform.system(),
    }


def environment() -> dict[str, str]:
    return {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
