"""Compare the speed of programs that do the same work, run in turn on this machine for several rounds.

Ratios are taken within a round, so that a slow minute of the machine affects both programs. A step is the wall-clock
time between log points after the first. A start lasts from the command to the end of the first step, compilation
included. machine.txt has the hardware and the versions. Leave the machine idle.
"""

import argparse
import re
from pathlib import Path

from rich.console import Console
from torch.utils.collect_env import get_pretty_env_info

from engine.dev.benchmarks.cases import BENCHMARKS, make_images
from engine.dev.benchmarks.programs import run_in_turn, table


def main() -> None:
    each = "\n".join(f"  {name:<15}{(cases_of.__doc__ or '').splitlines()[0]}" for name, cases_of in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"measurements:\n{each}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measurements", nargs="*", metavar="|".join(BENCHMARKS), help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="only cases whose name matches this regular expression")
    parser.add_argument("--programs", default="", help="likewise for programs; the first of a case always runs")
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10's files (default: noise of the same size)")
    parser.add_argument("--out", type=Path, default=Path("bench"))
    options = parser.parse_args()
    if unknown := set(options.measurements) - set(BENCHMARKS):
        parser.error(f"no such measurement: {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    out, console = options.out.resolve(), Console()
    images = options.data.resolve() if options.data else make_images(out / "images")
    out.mkdir(parents=True, exist_ok=True)
    (out / "machine.txt").write_text(get_pretty_env_info())
    for name in options.measurements or BENCHMARKS:
        for case in BENCHMARKS[name](images):
            if re.search(options.only, case.name):
                case.keep(options.programs)
                console.print(table(case, run_in_turn(case, options.rounds, out / "scratch")))


if __name__ == "__main__":
    main()
