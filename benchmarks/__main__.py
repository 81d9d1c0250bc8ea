"""`python -m benchmarks OPERATOR [--device cuda] [--quick] [--filter REGEX] [--pairs N] [--json FILE] ...`"""

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from fastattn import _native

from . import gpu, graphs, machine, memory, report
from .cases import AGREEMENT, ApartCase, TimedCase, disagreement
from .figures import Spread
from .roof import Roof, roofs
from .runner import CaseResult, Timer, paired, roof_name, summarize, time_calls

# Modules of this package with a table of cases each (cases.py says what is in one).
TABLES = (
    "attention", "varlen_attention", "kv_cache", "linear_attention", "generation", "aggregation",
    "graph_attention", "transformers",
)  # fmt: skip

PAIRS, QUICK_PAIRS = 15, 5
ROOF_TRIALS = 15
RESULTS = Path(__file__).parent / "results"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Paired benchmark against PyTorch and other peers."
    )
    parser.add_argument("operator", choices=TABLES)
    parser.add_argument("--device", default="cpu", metavar="cpu|cuda", help="cuda: an NVIDIA or AMD GPU")
    parser.add_argument("--quick", action="store_true", help=f"a subset of the cases, {QUICK_PAIRS} rounds")
    parser.add_argument("--filter", default="", metavar="REGEX", help="only cases whose name matches")
    parser.add_argument("--pairs", type=int, metavar="N", help=f"rounds per case (default {PAIRS})")
    parser.add_argument("--threads", type=int, metavar="N", default=torch.get_num_threads())
    parser.add_argument("--graphs", type=Path, metavar="FOLDER", help="real graphs as NAME.npz (graphs.py)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--update", action="store_true", help="keep what --json FILE has of the cases that do not run now"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument(
        "--save", action="store_true", help="JSON and Markdown in results/, by the GPU's name"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="needs matplotlib")
    options = parser.parse_args(arguments)
    if options.pairs is None:
        options.pairs = QUICK_PAIRS if options.quick else PAIRS
    if options.pairs < 1 or options.threads < 1:
        parser.error("--pairs and --threads must be at least 1")
    if options.update and not options.json:
        parser.error("--update is for the file that --json names")
    if options.device == "cpu":
        if options.save:
            parser.error("--save is for a GPU: name the files of the CPU by --json and --markdown")
    elif torch.device(options.device).type != "cuda" or not torch.cuda.is_available():
        parser.error(f"--device {options.device}: no GPU here that torch {torch.__version__} can use")
    elif options.operator not in gpu.tables():
        parser.error(f"--device {options.device}: cases for GPUs are those of {', '.join(gpu.tables())}")
    elif options.save:
        name = re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name(options.device).lower())
        options.json = RESULTS / f"{options.operator}-{name}.json"
        options.markdown = options.json.with_suffix(".md")
    return options


def table_of(options: argparse.Namespace) -> ModuleType | gpu.Table:
    if options.device != "cpu":
        return gpu.tables()[options.operator]
    return importlib.import_module(f"{__package__}.{options.operator}")


def select(options: argparse.Namespace) -> list[TimedCase | ApartCase]:
    pattern = re.compile(options.filter)
    return [
        case
        for case in table_of(options).CASES
        if pattern.search(case.name) and (case.quick or not options.quick or options.filter)
    ]


# Of a run these have to be the same where another one's results are kept beside it.
SAME = ("operator", "threads", "pairs", "hardware", "versions", "environment", "fastattn_isa", "peers")


def earlier(path: Path, header: dict) -> tuple[dict, dict[str, CaseResult]]:
    """The document of an earlier run under the same conditions, and its results by case."""
    content, results = report.read_json(path)
    for name in SAME:
        if content[name] != header[name]:
            raise ValueError(f"{path} has other {name}: {content[name]}, not {header[name]}")
    return content, {result.name: result for result in results}


def measure_memory(case: ApartCase, threads: int) -> CaseResult:
    result = CaseResult(case.name, case.tags)
    for contestant in case.names:
        try:
            result.memory[contestant] = memory.measure_apart(contestant, case, threads)
        except RuntimeError as error:
            result.failures[contestant] = str(error)
    return result


def measure_time(
    case: TimedCase, pairs: int, available: dict[str, Roof], absent: set[str], timer: Timer = time_calls
) -> CaseResult:
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
        except Exception as error:  # compilers have errors of their own; all of them are reported
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
    return summarize(result, paired(contestants, pairs, timer=timer), roof_work, case.baselines)


def write(
    options: argparse.Namespace,
    table: ModuleType | gpu.Table,
    header: dict,
    rates: dict,
    measured: dict[str, CaseResult],
) -> tuple[list[CaseResult], list[report.BarResult], list[str]]:
    """The files that were asked for; returns the results in the table's order, its bars and its summary."""
    results = [measured[case.name] for case in table.CASES if case.name in measured]
    bars = [report.judge(bar, results) for bar in table.BARS]
    summary = table.summary(results) if hasattr(table, "summary") else []
    content = report.document(results, bars, header, rates, summary)
    if options.json:
        report.write_json(options.json, content)
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(report.markdown(content, results, bars))
    return results, bars, summary


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    table = table_of(options)
    torch.set_num_threads(options.threads)
    graphs.folder = options.graphs
    on_gpu = options.device != "cpu"
    if on_gpu:
        gpu.device = torch.device("cuda", torch.device(options.device).index or 0)
        torch.cuda.set_device(gpu.device)
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
        "hardware": machine.hardware() | (gpu.hardware() if on_gpu else {}),
        "versions": machine.versions() | (gpu.versions() if on_gpu else {}),
        "environment": machine.environment(),
        "fastattn_isa": _native.isa(),
        "build": _native.build_info(),
        "peers": machine.peers(table.PEERS),
    }
    kept: dict[str, CaseResult] = {}
    if options.update and options.json.exists():
        before, kept = earlier(options.json, header)
        header["command"] = before["command"] + " && " + header["command"]
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
    if missing is not None and not on_gpu:
        print(f"contestant cpu: absent, {missing}")
    absent = set() if missing is None else {"cpu"}

    available = gpu.roofs() if on_gpu else roofs()
    timer = gpu.time_calls if on_gpu else time_calls
    rates = {}
    for kind, roof in available.items():
        (seconds,) = paired({kind: roof.call}, ROOF_TRIALS, timer=timer).values()
        rate = Spread.of([roof.work / second / 1e9 for second in seconds])
        rates[kind] = {"rate": rate.median, "q80": rate.q80, "unit": roof.unit, "source": roof.source}
        print(f"roof {kind}: {rate.median:.0f} {roof.unit} (80% quantile {rate.q80:.0f}), {roof.source}")

    failed = []
    for case in cases:
        if isinstance(case, ApartCase):
            result = measure_memory(case, options.threads)
        else:
            result = measure_time(case, options.pairs, available, absent, timer)
        kept[result.name] = result
        failed += set(result.failures) - set(case.may_fail)
        print(report.line(result), flush=True)
        # After each case, so that a run that is cut short keeps what it has measured.
        results, bars, summary = write(options, table, header, rates, kept)

    print()
    for bar in bars:
        if bar.verdict != "not measured":
            print(bar)
    for text in summary:
        print(text)
    if options.plot:
        report.plot(options.plot, results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
