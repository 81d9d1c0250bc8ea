"""Paired measurement: the contestants of a case alternate in one process and are compared round by round.

Clocks of shared machines are coarse and their speed drifts, so a single time says little. A sample repeats a
contestant until it lasts `SAMPLE_SECONDS`; a round takes one sample of every contestant, and of the roofs, in
shuffled order; figures are medians of the ratios within rounds. Nothing is discarded.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .figures import Spread, ratios

SAMPLE_SECONDS = 0.02
BASELINE = "torch"
Timer = Callable[[Callable[[], object], int], float]  # seconds that so many calls take together


def time_calls(function: Callable[[], object], calls: int) -> float:
    """Seconds that `calls` calls take together."""
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return time.perf_counter() - start


def calibrate(
    function: Callable[[], object], seconds: float = SAMPLE_SECONDS, timer: Timer = time_calls
) -> int:
    """Calls that fill a sample. The trials also warm the caches, the allocator and the threads."""
    function()
    calls = 1
    while (taken := timer(function, calls)) < seconds:
        # A step of a coarse clock may read 0; never trust it for more than a tenfold step.
        calls = max(calls + 1, int(calls * min(10.0, 1.2 * seconds / max(taken, 1e-9))))
    return calls


def paired(
    contestants: Mapping[str, Callable[[], object]],
    pairs: int,
    seconds: float = SAMPLE_SECONDS,
    seed: int = 0,
    timer: Timer = time_calls,
) -> dict[str, list[float]]:
    """Seconds per call of each contestant, one entry per round."""
    calls = {name: calibrate(function, seconds, timer) for name, function in contestants.items()}
    order = list(contestants)
    shuffle = random.Random(seed).shuffle
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(pairs):
        shuffle(order)
        for name in order:
            samples[name].append(timer(contestants[name], calls[name]) / calls[name])
    return samples


@dataclass
class CaseResult:
    """Figures of one case by contestant; `ratio` is a baseline's time over the contestant's."""

    name: str
    tags: tuple[str, ...]
    roof: str | None = None  # the one that `work` is counted for and bars are about
    flops: int = 0
    work: int = 0
    seconds: dict[str, Spread] = field(default_factory=dict)
    ratio: dict[str, dict[str, Spread]] = field(default_factory=dict)  # by baseline, by contestant
    roof_fraction: dict[str, dict[str, Spread]] = field(default_factory=dict)  # by roof, by contestant
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def rate(self, contestant: str) -> float:
        """Giga-units of work per second: GFLOP/s, or GB/s where the roof is a bandwidth."""
        return self.work / self.seconds[contestant].median / 1e9

    def measure(self, kind: str, contestant: str, baselines: Sequence[str] = (BASELINE,)) -> Spread | None:
        """The figure that a bar of this kind looks at, for ratios that to the fastest of the baselines; None
        where the contestant did not finish."""
        if kind == "memory":
            found = self.memory.get(contestant)
            return None if found is None else Spread.of([found["growth_ratio"]])
        if kind == "workspace":
            # An allocator's granularity is no merit: differences below a MiB do not count.
            found = {
                name: max(of["workspace_bytes"], 2**20)
                for name, of in self.memory.items()
                if name in (contestant, *baselines)
            }
            ours = found.pop(contestant, None)
            return None if ours is None or not found else Spread.of([min(found.values()) / ours])
        if kind == "roof":
            return self.roof_fraction.get(self.roof, {}).get(contestant)
        found = [self.ratio[name][contestant] for name in baselines if contestant in self.ratio.get(name, {})]
        return min(found, key=lambda ratio: ratio.median, default=None)


def roof_name(kind: str) -> str:
    """What a roof is called among the contestants."""
    return f"roof {kind}"


def summarize(
    result: CaseResult,
    samples: dict[str, list[float]],
    roof_work: dict[str, float],
    baselines: Sequence[str] = (BASELINE,),
) -> CaseResult:
    """Fill in the figures from the samples of contestants and roofs, given each roof's work per call."""
    result.samples = samples
    timed = {name: seconds for name, seconds in samples.items() if name not in map(roof_name, roof_work)}
    result.seconds = {name: Spread.of(seconds) for name, seconds in timed.items()}
    for baseline in (name for name in baselines if name in timed):
        result.ratio[baseline] = {
            name: Spread.of(ratios(timed[baseline], seconds))
            for name, seconds in timed.items()
            if name not in baselines
        }
    for kind, work in roof_work.items():
        # (work / t) / (roof's work / roof's t), both times of the same round
        result.roof_fraction[kind] = {
            name: Spread.of([result.work / work * r for r in ratios(samples[roof_name(kind)], seconds)])
            for name, seconds in timed.items()
        }
    return result
