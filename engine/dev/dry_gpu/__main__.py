"""Execute the CUDA code path of `trainer.fit` without a GPU, and compare it with docs/benchmarks/dry-gpu.md.

The exit code is 1 if a run fails, has an unknown host-device synchronization between log points, or launches another
number of operations than the page says. `--write` then writes the new numbers.
"""

import argparse
import sys

from engine.dev.dry_gpu.cases import CASES
from engine.dev.dry_gpu.library import load_library, reason_to_skip


def main() -> int:
    """Run the cases; print the table and the problems. Exit if `--only` matches none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only runs whose name contains this")
    parser.add_argument("--write", action="store_true", help="write the table to the page, instead of a comparison")
    parser.add_argument("--operations", action="store_true", help="print operations, collectives and waits by name")
    options = parser.parse_args()
    if reason := reason_to_skip():
        print(f"skipped: {reason}")
        return 0
    chosen = [case for case in CASES if options.only in case.title]
    if not chosen:
        sys.exit(f"error: --only {options.only} matches no run; there are: {'; '.join(case.title for case in CASES)}")
    load_library()
    from engine.dev.dry_gpu import report
    from engine.dev.dry_gpu.run import run_cases

    kept, failures = report.read_rows(), 0
    print("\n".join(report.HEADER), flush=True)
    for case, result in run_cases(chosen):
        print(report.row(case, result), flush=True)
        if options.operations:
            print("\n".join(f"  {phase}: {names}" for phase, names in result.operations.items()))
            print("\n".join(f"  {count} x {collective}" for collective, count in result.collectives.items()))
            print("\n".join(f"  at a log point: {count} x {wait}" for wait, count in result.at_log_point.items()))
        if options.write and not result.error:
            kept[case.title] = report.row(case, result)
        if found := report.problems(case, result, kept):
            failures += 1
            print("\n".join(f"  {problem}" for problem in found), flush=True)
    if options.write:
        report.write_rows([kept[case.title] for case in CASES if case.title in kept])
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
