"""Run on NVIDIA GPUs what the test suite cannot show on CPUs, and write a table of verdicts.

Each case is a process of its own with a time limit, so that no case stops the others. All cases take some ten minutes
on one GPU. A complete run writes docs/benchmarks/gpu.md, ready to commit. The exit code is 1 if a case failed.
`--accelerator cpu` exercises on a CPU everything that can run without a GPU, on tiny networks.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path

import torch

from scripts.dev.gpu_check.case import Case, Session
from scripts.dev.gpu_check.cases import cases
from scripts.dev.gpu_check.report import Outcome, markdown, write
from scripts.dev.shared.machine import describe_machine
from scripts.dev.shared.process import ROOT, TIMED_OUT, exit_on_sigterm, last_line, python, run_limited

PAGE = ROOT / "docs" / "benchmarks" / "gpu.md"


def main() -> int:
    """Run the chosen cases in order, and print each outcome at once."""
    options = _parse()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as temporary:
        session = Session(options.accelerator, _usable(options.devices), Path(temporary))
        output = options.output or (PAGE if session.on_gpu and not options.only else None)
        outcomes: list[Outcome] = []
        hardware = describe_machine()
        for case in _choose(session, options.only):
            outcome = run_case(case, session)
            outcomes.append(outcome)
            print(f"{outcome.verdict:<9}{outcome.name:<20}{outcome.seconds:5.0f} s  {outcome.figure}", flush=True)
            if output:
                write(markdown(outcomes, hardware), output)
        print(f"written to {output}" if output else "\n" + markdown(outcomes, hardware))
    return int(any(outcome.verdict == "FAILED" for outcome in outcomes))


def _choose(session: Session, only: str) -> list[Case]:
    """Return the cases whose name matches the regular expression."""
    known = cases(session)
    if chosen := [case for case in known if re.search(only, case.name)]:
        return chosen
    sys.exit(f"error: --only {only} matches no case; there are {', '.join(case.name for case in known)}")


def run_case(case: Case, session: Session) -> Outcome:
    """Run a case in its own process; without a result, its exit code or the last line of its log is the figure."""
    folder = session.folder / case.name
    folder.mkdir()
    result, log = folder / "result.json", folder / "log"
    place = [session.accelerator, session.devices, folder]
    child = python("-m", "scripts.dev.gpu_check.child", case.name, result, *place)
    start = time.monotonic()
    code = run_limited(child, log, case.limit)
    seconds = time.monotonic() - start
    if code is TIMED_OUT:
        return Outcome(case.name, "FAILED", seconds, f"not finished within {case.limit} s: {last_line(log)}")
    if not result.exists():
        return Outcome(case.name, "FAILED", seconds, f"ended with {code}: {last_line(log)}")
    verdict, figure = json.loads(result.read_text())
    if verdict == "FAILED":
        print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
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
    options = parser.parse_args()
    if options.accelerator == "gpu" and not torch.cuda.is_available():
        sys.exit("error: torch finds no NVIDIA GPU here; --accelerator cpu runs the cases that need none")
    available = torch.cuda.device_count() if options.accelerator == "gpu" else 2
    options.devices = available if options.devices is None else options.devices
    if options.devices < 1 or (options.accelerator == "gpu" and options.devices > available):
        sys.exit(f"error: --devices {options.devices}: give a number from 1 to {available}")
    return options


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
