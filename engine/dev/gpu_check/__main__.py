"""Run on NVIDIA GPUs what the test suite cannot show on CPUs, and write a table of verdicts.

Each case is a process of its own with a time limit, so that no case stops the others. All cases take some fifteen
minutes on one GPU, or six with `--jobs 4`. A complete run writes docs/benchmarks/gpu.md, ready to commit. The exit code
is 1 if a case failed.
`--accelerator cpu` exercises on a CPU everything that can run without a GPU, on tiny networks.
"""

import argparse
import json
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from functools import partial
from itertools import groupby
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.collect_env import get_pretty_env_info

from engine.dev.gpu_check.case import Case, Session
from engine.dev.gpu_check.cases import cases
from engine.dev.shared.process import ROOT, TIMED_OUT, Command, exit_on_sigterm, last_line, python, run_together

PAGE = ROOT / "docs" / "benchmarks" / "gpu.md"
_PAGE = """\
# GPU check

Written by `python -m engine.dev.gpu_check {arguments}` on {date}. [Cases](gpu-check.md) explains the cases.

| case | verdict | seconds | figure |
| --- | --- | --- | --- |
{rows}

```
{machine}
```
"""
_LONGEST = 240  # characters of a cell


class Outcome(NamedTuple):
    """The outcome of a case: its verdict is `ok`, `FAILED` or `not here`."""

    name: str
    verdict: str
    seconds: float
    figure: str

    def row(self) -> str:
        """Return the line of the table; FAILED stands out in it."""
        verdict = f"**{self.verdict}**" if self.verdict == "FAILED" else self.verdict
        figure = " ".join(self.figure.split()).replace("|", "\\|")[:_LONGEST]
        return f"| {self.name} | {verdict} | {self.seconds:.0f} | {figure} |"


def main() -> int:
    """Run the chosen cases, and print each outcome at once."""
    options = _parse()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as temporary:
        session = Session(options.accelerator, _usable(options.devices), Path(temporary))
        known, outcomes = cases(session), list[Outcome]()
        chosen = [case for case in known if re.search(options.only, case.name)]
        if not chosen:
            sys.exit(
                f"error: --only {options.only} matches no case; there are {', '.join(case.name for case in known)}"
            )
        output = options.output or (PAGE if session.on_gpu and chosen == known else None)
        machine = get_pretty_env_info() if output else ""
        for outcome in run_cases(chosen, session, options.jobs):
            print(outcome.row(), flush=True)
            outcomes.append(outcome)
            if output:  # after each case, since the time of a machine may end
                output.write_text(_page(chosen, outcomes, machine))
    return int(any(outcome.verdict == "FAILED" for outcome in outcomes))


def run_cases(chosen: list[Case], session: Session, jobs: int) -> Iterator[Outcome]:
    """Run the cases in order, at most so many at a time, and those of speed alone; yield each outcome at once."""
    for timed, group in groupby(chosen, lambda case: case.timed):
        with ThreadPool(1 if timed else jobs) as pool:
            yield from pool.imap_unordered(partial(run_case, session=session), group)


def _page(chosen: list[Case], outcomes: list[Outcome], machine: str) -> str:
    by_name = {outcome.name: outcome.row() for outcome in outcomes}
    rows = [by_name.get(case.name, f"| {case.name} | not yet | | |") for case in chosen]
    return _PAGE.format(arguments=shlex.join(sys.argv[1:]), date=date.today(), rows="\n".join(rows), machine=machine)


def run_case(case: Case, session: Session) -> Outcome:
    """Run a case in its own process; without a result, its exit code or the last line of its log is the figure."""
    folder = session.folder / case.name
    folder.mkdir()
    result, log = folder / "result.json", folder / "log"
    place = [session.accelerator, session.devices, folder]
    child = python("-m", "engine.dev.gpu_check.cases", case.name, result, *place)
    own_cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}  # a compiler that is killed leaves broken files
    start = time.monotonic()
    (code,) = run_together([Command(child, log, own_cache)], case.limit)
    seconds = time.monotonic() - start
    if code is TIMED_OUT:
        return Outcome(case.name, "FAILED", seconds, f"not finished within {case.limit} s: {last_line(log)}")
    if not result.exists():
        return Outcome(case.name, "FAILED", seconds, f"ended with {code}: {last_line(log)}")
    verdict, figure = json.loads(result.read_text())
    if verdict == "FAILED":
        print(log.read_text(errors="replace")[-8000:], file=sys.stderr)
    return Outcome(case.name, verdict, seconds, figure)


def _usable(devices: int) -> int:
    """Return the largest power of two, at most 8: parity runs divide batches of 16 images by 4 micro-batches too."""
    return min(8, 1 << (devices.bit_length() - 1))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="only cases whose name matches; not for the page")
    parser.add_argument("--output", type=Path, help=f"Markdown file (default: {PAGE.relative_to(ROOT)})")
    parser.add_argument("--accelerator", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--devices", type=int, help="GPUs (default: all; 1, 2, 4 or 8 are used), or processes (2)")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time, without those of speed (default: 1)")
    options = parser.parse_args()
    if options.accelerator == "gpu" and not torch.cuda.is_available():
        sys.exit("error: torch finds no NVIDIA GPU here; --accelerator cpu runs the cases that need none")
    options.devices = options.devices or (torch.cuda.device_count() if options.accelerator == "gpu" else 2)
    return options


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
