"""``python -m fastattn.kernels``: compiles the kernels for GPUs that are not there, and says what came out.

Every configuration that a launch table can choose, for every target, with what the compiler found: registers,
spills, shared memory, the matrix instruction, and how many programs an SM holds.
"""

import argparse
import sys
from pathlib import Path

from fastattn.kernels._cases import CALLS, EVERYTHING, MAIN, Case
from fastattn.kernels._common import INTERPRETED
from fastattn.kernels._offline import (
    HEADER,
    TARGETS,
    compile_all,
    configurations,
    fingerprint,
    line_of,
    read_record,
)


def update(record: Path, targets: list[str], cases: list[Case], jobs: int) -> None:
    """Compiles what has no entry, if it is of these targets and cases; entries of nothing go."""
    wanted, found = configurations(TARGETS, EVERYTHING), read_record(record)
    new = [c for f, c in wanted.items() if f not in found and c.target in targets and c.case in cases]
    print(f"{len(wanted)} configurations, {len(new)} of them are compiled now", file=sys.stderr)

    def write() -> None:
        lines = [line_of(c, found[f]) for f, c in wanted.items() if f in found]
        record.write_text("\n".join(["\t".join(HEADER), *lines, ""]))

    write()
    for configuration, result in compile_all(new, jobs):
        found[fingerprint(configuration)] = result
        with record.open("a") as file:  # in its place at the end
            print(line_of(configuration, result), file=file)
    write()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fastattn.kernels", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--family", action="append", choices=CALLS, help="default: all")
    parser.add_argument("--main", action="store_true", help="only what tests compile each time")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="brings a record of all configurations up to date: only "
        "what has no entry for its present code is compiled; may be interrupted and goes on"
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2, help="processes, default 2")
    options = parser.parse_args()
    if INTERPRETED:
        print(
            "python -m fastattn.kernels: TRITON_INTERPRET must not be set, nothing is compiled then",
            file=sys.stderr,
        )
        return 1
    targets = options.target or [*TARGETS]
    cases = [c for c in (MAIN if options.main else EVERYTHING) if c.family in (options.family or CALLS)]
    if options.record is not None:
        update(options.record, targets, cases, options.jobs)
    else:
        print(*HEADER, sep="\t")
        for configuration, result in compile_all(configurations(targets, cases).values(), options.jobs):
            print(line_of(configuration, result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
