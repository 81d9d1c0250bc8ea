"""`python -m benchmarks OPERATOR [--quick] [--filter REGEX] [--pairs N] [--threads N] [--json FILE] ...`"""

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from fastattn import _native

from . import graphs, machine, memory, report
from .cases import AGREEMENT, ApartCase, TimedCase, disagreement
from .figures import Spread
from .roof import Roof, roofs
from .runner import CaseResult, paired, roof_name, summarize

# Modules of this package with a table of cases each (cases.py says what is in one).
TABLES = (
    "attention", "varlen_attention", "kv_cache", "linear_attention", "generation", "aggregation",
    "graph_attention", "transformers",
)  # fmt: skip

PAIRS, QUICK_PAIRS = 15, 5
ROOF_TRIALS = 15


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Paired benchmark against PyTorch and other peers."
    )
    parser.add_argument("operator", choices=TABLES)
    parser.add_argument("--quick", action="store_true", help=f"a subset of the cases, {QUICK_PAIRS} rounds")
    parser.add_argument("--filter", default="", metavar="REGEX", help="only cases whose name matches")
    parser.add_argument("--pairs", type=int, metavar="N", help=f"rounds per case (default {PAIRS})")
    parser.add_argument("--threads", type=int, metavar="N", default=torch.get_num_threads())
    parser.add_argument("--graphs", type=Path, metavar="FOLDER", help="real graphs as NAME.npz (graphs.py)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="needs matplotlib")
    options = parser.parse_args(arguments)
    if options.pairs is None:
        options.pairs = QUICK_PAIRS if options.quick else PAIRS
    if options.pairs < 1 or options.threads < 1:
        parser.error("--pairs and --threads must be at least 1")
    return options


def table_of(options: argparse.Namespace) -> ModuleType:
    return importlib.import_module(f"{__package__}.{options.operator}")


def select(options: argparse.Namespace) -> list[TimedCase | ApartCase]:
    pattern = re.compile(options.filter)
    return [
        case
        for case in table_of(options).CASES
        if pattern.search(case.name) and (case.quick or not options.quick or options.filter)
    ]


def measure_memory(case: ApartCase, threads: int) -> CaseResult:
    result = CaseResult(case.name, case.tags)
    for contestant in case.names:
        try:
            result.memory[contestant] = memory.measure_apart(contestant, case, threads)
        except RuntimeError as error:
            result.failures[contestant] = str(error)
    return result


def measure_time(case: TimedCase, pairs: int, available: dict[str, Roof], absent: set[str]) -> CaseResult:
    """Time the contestants that give the result they have to; the others are failures, with reasons."""
    result = CaseResult(case.name, case.tags, case.roofs[0], case.flops, case.work)
    contestants = {name: call for name, call in case.contestants().items() if name not in absent}
    expected = {}
    for name, peer in case.same_as.items():
        if name not in contestants:
            continue
        if peer not in expected:
            expected[peer] = contestants[peer]()
        try:
            difference = disagreement(contestants[name](), expected[peer])
        except (NotImplementedError, RuntimeError) as error:
            reason = str(error).strip().splitlines()
            result.failures[name] = reason[0] if reason else type(error).__name__
        else:
            if not difference <= AGREEMENT[case.dtype]:
                result.failures[name] = f"differs from {peer} by {difference:.1e} (relative RMS)"
        if name in result.failures:
            del contestants[name]
    del expected
    beside = {kind: available[kind] for kind in case.roofs if kind in available}
    contestants |= {roof_name(kind): roof.call for kind, roof in beside.items()}
    roof_work = {kind: roof.work for kind, roof in beside.items()}
    return summarize(result, paired(contestants, pairs), roof_work, case.baselines)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    table = table_of(options)
    torch.set_num_threads(options.threads)
    graphs.folder = options.graphs
    selected = select(options)
    cases = [case for case in selected if case.is_there]
    if not cases:
        print(f"no case matches {options.filter!r}", file=sys.stderr)
        return 2

    header = {
        "operator": options.operator,
        "command": " ".join(["python -m benchmarks", *arguments]),
        "threads": options.threads,
        "pairs": options.pairs,
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "environment": machine.environment(),
        "fastattn_isa": _native.isa(),
        "build": _native.build_info(),
        "peers": machine.peers(table.PEERS),
    }
    hardware = header["hardware"]
    print(
        f"{hardware['cpu']}, {hardware['cores']} cores, {options.threads} threads, torch {torch.__version__}"
    )
    print(f"ISA: torch {hardware['torch_isa']}, fastattn {header['fastattn_isa'] or 'no native library'}")
    print("environment:", header["environment"] or "default")
    if header["environment"].get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        print("note: OpenMP threads spin while they wait; beside other work set OMP_WAIT_POLICY=PASSIVE")
    for peer in header["peers"]:
        print(f"peer {peer['peer']} {peer['version'] or ''}: {peer['status']}")

    if len(cases) < len(selected):
        print(f"{len(selected) - len(cases)} cases absent: this machine lacks their graph or torch_geometric")

    missing = _native.missing()
    if missing is not None:
        print(f"contestant cpu: absent, {missing}")
    absent = set() if missing is None else {"cpu"}

    available = roofs()
    rates = {}
    for kind, roof in available.items():
        (seconds,) = paired({kind: roof.call}, ROOF_TRIALS).values()
        rate = Spread.of([roof.work / second / 1e9 for second in seconds])
        rates[kind] = {"rate": rate.median, "q80": rate.q80, "unit": roof.unit, "source": roof.source}
        print(f"roof {kind}: {rate.median:.0f} {roof.unit} (80% quantile {rate.q80:.0f}), {roof.source}")

    results = []
    for case in cases:
        if isinstance(case, ApartCase):
            result = measure_memory(case, options.threads)
        else:
            result = measure_time(case, options.pairs, available, absent)
        results.append(result)
        print(report.line(result), flush=True)

    bars = [report.judge(bar, results) for bar in table.BARS]
    print()
    for bar in bars:
        if bar.verdict != "not measured":
            print(bar)
    summary = table.summary(results) if hasattr(table, "summary") else []
    for text in summary:
        print(text)

    content = report.document(results, bars, header, rates, summary)
    if options.json:
        report.write_json(options.json, content)
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(report.markdown(content, results, bars))
    if options.plot:
        report.plot(options.plot, results)
    return 1 if any(result.failures for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
