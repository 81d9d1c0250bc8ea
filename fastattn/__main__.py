"""``python -m fastattn``: versions, devices, the instruction set, and which implementations run here."""

import platform
import sys
from pathlib import Path

import torch

import fastattn
from fastattn import _native
from fastattn._choose import availability


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def report() -> list[tuple[str, str]]:
    rows = [
        ("fastattn", fastattn.__version__),
        ("torch", torch.__version__),
        ("python", f"{platform.python_version()}, {platform.platform()}"),
        ("cpu", f"{_processor()}, {torch.get_num_threads()} threads"),
    ]
    rows += [
        (f"gpu {index}", torch.cuda.get_device_name(index)) for index in range(torch.cuda.device_count())
    ] or [("gpu", "none")]

    compiled = [
        name if supported else f"{name} (not on this machine)" for name, supported in _native.isas().items()
    ]
    rows.append(("instruction set", f"{_native.isa() or 'none'}; compiled: {', '.join(compiled) or 'none'}"))
    build = _native.build_info()
    if build:
        rows.append(
            (
                "built with",
                f"{build['compiler']}, torch {build['torch']}, for torch >= {build['oldest_torch']}",
            )
        )
    rows += [
        (f"implementation {name}", "available" if reason is None else f"not available: {reason}")
        for name, reason in availability().items()
    ]
    return rows


def main() -> int:
    try:
        rows = report()
    except ValueError as error:  # FASTATTN_CPU_ISA names no instruction set
        print(f"python -m fastattn: {error}", file=sys.stderr)
        return 1
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:{width}}  {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
