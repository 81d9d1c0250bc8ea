"""From results to what people read: rows, the bar table, JSON, Markdown, a plot."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .cases import Bar
from .figures import Spread, geometric_mean
from .runner import CaseResult

SCHEMA = 2
# Nothing is faster than the machine: a greater fraction of its fastest unit says that the roof was disturbed.
LARGEST_FRACTION = 1.1


@dataclass(frozen=True)
class BarResult:
    """A bar beside what was measured. `verdict` is "met", "within noise" (some case's median misses the bar
    and its better quantile does not), "missed", or "not measured" (also where the roof was not)."""

    bar: Bar
    geomean: float | None
    worst: float | None
    worst_case: str | None
    cases: int
    failed: int
    verdict: str

    def __str__(self) -> str:
        wanted = [f"geomean {self.bar.geomean:.2f}"] if self.bar.geomean is not None else []
        if self.bar.each is not None:
            wanted.append(f"each {'<=' if self.bar.measure == 'memory' else '>='} {self.bar.each:.2f}")
        text = f"{self.bar.what} ({self.bar.contestant}), bar {', '.join(wanted)}: "
        if self.worst is not None:
            text += f"geomean {self.geomean:.2f}, worst {self.worst:.2f} ({self.worst_case}), "
            text += f"{self.cases} cases: "
        return text + self.verdict + (f" ({self.failed} failed)" if self.failed else "")


def judge(bar: Bar, results: Iterable[CaseResult]) -> BarResult:
    """A case of the tag that failed counts as missed: a result that is wrong or absent has no speed."""
    tagged = [result for result in results if bar.tag in result.tags]
    figures = {result.name: result.measure(bar.measure, bar.contestant, bar.baselines) for result in tagged}
    measured = {name: figure for name, figure in figures.items() if figure is not None}
    failed = sum(bar.contestant in result.failures for result in tagged)
    if not measured:
        return BarResult(bar, None, None, None, 0, failed, "missed" if failed else "not measured")
    less_is_better = bar.measure == "memory"

    def misses(value: float, wanted: float | None) -> bool:
        return wanted is not None and (value > wanted if less_is_better else value < wanted)

    worst_case = (max if less_is_better else min)(measured, key=lambda name: measured[name].median)
    mean = geometric_mean([figure.median for figure in measured.values()])
    missed = [figure for figure in measured.values() if misses(figure.median, bar.each)]
    better = [figure.q20 if less_is_better else figure.q80 for figure in missed]
    disturbed = bar.measure == "roof" and any(
        result.roof_fraction and _of_fastest_unit(result, bar.contestant) > LARGEST_FRACTION
        for result in tagged
    )
    if disturbed and not failed:
        verdict = "not measured"
    elif failed or misses(mean, bar.geomean) or any(misses(value, bar.each) for value in better):
        verdict = "missed"
    else:
        verdict = "within noise" if missed else "met"
    return BarResult(bar, mean, measured[worst_case].median, worst_case, len(measured), failed, verdict)


def _of_fastest_unit(result: CaseResult, contestant: str) -> float:
    """Bars hold to what vectors can do, which matrix tiles leave far behind."""
    every = result.roof_fraction.values()
    return min((roof[contestant].median for roof in every if contestant in roof), default=0.0)


def row(result: CaseResult) -> dict[str, str]:
    """The cells of one case, by column title."""
    cells = {"case": result.name}
    if result.memory:
        for name, memory in result.memory.items():
            cells[f"{name}"] = f"{memory['growth_ratio']:.2f}x tensors"
            cells[f"{name} workspace"] = f"{memory['workspace_bytes'] / 2**20:.0f} MiB"
    for name, seconds in result.seconds.items():
        cells[f"{name} ms"] = f"{seconds.median * 1e3:.3g}"
    for baseline, of in result.ratio.items():
        cells |= {f"{baseline}/{name}": str(ratio) for name, ratio in of.items()}
    unit = "GB/s" if result.roof == "copy" else "GFLOP/s"
    for name in result.seconds:
        cells[f"{name} {unit}"] = f"{result.rate(name):.1f}"
        fractions = [f"{of[name].median:.0%} {kind}" for kind, of in result.roof_fraction.items()]
        if fractions:
            cells[f"{name} {unit}"] += f" ({', '.join(fractions)})"
    for name, failure in result.failures.items():
        cells[f"{name}"] = f"FAILED: {failure}"
    return cells


def line(result: CaseResult) -> str:
    cells = row(result)
    return f"{cells.pop('case'):<52} " + " | ".join(f"{title} {cell}" for title, cell in cells.items())


def document(
    results: Sequence[CaseResult],
    bars: Sequence[BarResult],
    header: dict,
    roofs: dict[str, dict],
    summary: Sequence[str] = (),
) -> dict:
    """The JSON document: header (command, hardware, versions, ...), roofs, one entry per case, the bars, and
    what the table of cases says about them in words."""
    return {
        "schema": SCHEMA,
        **header,
        "roofs": roofs,
        "cases": [_case(result) for result in results],
        "bars": [asdict(bar) for bar in bars],
        "summary": list(summary),
    }


def _case(result: CaseResult) -> dict:
    case = asdict(result)
    case["giga_per_second"] = {name: result.rate(name) for name in result.seconds}
    case["roof_unit"] = None if result.roof is None else "GB/s" if result.roof == "copy" else "GFLOP/s"
    return case


def read_json(path: Path) -> tuple[dict, list[CaseResult]]:
    """An earlier document, and the results in it."""
    content = json.loads(path.read_text())
    if content["schema"] != SCHEMA:
        raise ValueError(f"{path} has schema {content['schema']}, not {SCHEMA}")
    return content, [_result(case) for case in content["cases"]]


def _result(case: dict) -> CaseResult:
    def spreads(of: dict[str, dict]) -> dict[str, Spread]:
        return {name: Spread(**figures) for name, figures in of.items()}

    given = {field.name: case[field.name] for field in fields(CaseResult)}
    given["tags"] = tuple(case["tags"])
    given["seconds"] = spreads(case["seconds"])
    for name in ("ratio", "roof_fraction"):
        given[name] = {key: spreads(of) for key, of in case[name].items()}
    return CaseResult(**given)


def write_json(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")  # a run that is cut short while it writes keeps the file
    fresh.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    fresh.replace(path)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows]


def _bar_row(result: BarResult) -> tuple[str, ...]:
    bar = result.bar
    heights = (("geomean", bar.geomean), ("each", bar.each))
    return (
        bar.what,
        bar.contestant,
        " or ".join(bar.baselines) if bar.measure == "ratio" else bar.measure,
        ", ".join(f"{kind} {value:.2f}" for kind, value in heights if value is not None),
        "" if result.geomean is None else f"{result.geomean:.2f}",
        "" if result.worst is None else f"{result.worst:.2f}",
        result.worst_case or "",
        str(result.cases),
        result.verdict,
    )


def markdown(content: dict, results: Sequence[CaseResult], bars: Sequence[BarResult]) -> str:
    hardware, versions = content["hardware"], content["versions"]
    caches = ", ".join(f"{level} {size}" for level, size in hardware["caches"].items())
    lines = [
        f"# {content['operator']}: paired benchmark",
        "",
        f"`{content['command']}`, {content['threads']} threads, {content['pairs']} rounds; "
        f"median [20%-80% quantiles] of ratios within rounds.",
        "",
        f"* {hardware['cpu']}, {hardware['cores']} cores, {caches}; torch ISA {hardware['torch_isa']}, "
        f"fastattn ISA {content['fastattn_isa']}",
        "* " + ", ".join(f"{name} {version}" for name, version in versions.items()),
        "* environment: " + (", ".join(f"{k}={v}" for k, v in content["environment"].items()) or "default"),
    ]
    if "gpu" in hardware:
        lines.append(
            f"* {hardware['gpu']}, {hardware['gpu_multiprocessors']} multiprocessors, "
            f"{hardware['gpu_memory_bytes'] / 2**30:.0f} GiB, capability {hardware['gpu_capability']}"
        )
    for kind, roof in content["roofs"].items():
        lines.append(f"* roof {kind}: {roof['rate']:.0f} {roof['unit']} ({roof['source']})")
    if bars:
        lines += ["", "## Bars", ""]
        titles = (
            "what",
            "contestant",
            "against",
            "bar",
            "geomean",
            "worst",
            "worst case",
            "cases",
            "verdict",
        )
        lines += _table(titles, map(_bar_row, bars))
    # One table per set of columns, so that no table is mostly empty.
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for result in results:
        cells = row(result)
        groups.setdefault(tuple(cells), []).append(cells)
    for titles, cells in groups.items():
        lines += ["", "## Cases" if titles == next(iter(groups)) else "", ""]
        lines += _table(titles, [list(entry.values()) for entry in cells])
    if content["summary"]:
        lines += ["", "## Summary", "", *(f"* {text}" for text in content["summary"])]
    lines += ["", "## Peers", ""]
    lines += _table(
        ("peer", "version", "status"),
        [(peer["peer"], peer["version"] or "", peer["status"]) for peer in content["peers"]],
    )
    return "\n".join(lines) + "\n"


def plot(path: Path, results: Sequence[CaseResult]) -> None:
    """Ratio per case with its quantiles on a logarithmic axis; left of 1 is slower than the baseline."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [result for result in results if result.ratio]
    ratios = [
        {
            f"{name} against {baseline}": ratio
            for baseline, of in result.ratio.items()
            for name, ratio in of.items()
        }
        for result in timed
    ]
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.18 * len(timed)), layout="constrained")
    for index, name in enumerate(sorted({name for of in ratios for name in of})):
        rows = [(y, of[name]) for y, of in enumerate(ratios) if name in of]
        medians = [ratio.median for _, ratio in rows]
        whiskers = [
            [ratio.median - ratio.q20 for _, ratio in rows],
            [ratio.q80 - ratio.median for _, ratio in rows],
        ]
        heights = [y + 0.3 * index for y, _ in rows]
        axes.errorbar(medians, heights, xerr=whiskers, fmt="o", markersize=3, linewidth=1, label=name)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="baseline's time / ours (higher is better)")
    axes.set_yticks(range(len(timed)), [result.name for result in timed], fontsize=6)
    axes.invert_yaxis()
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
