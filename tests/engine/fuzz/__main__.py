"""Search for a configuration, and stops and strategies on its way, whose result differs from an uninterrupted run.

python -m tests.engine.fuzz --draws 500 --seed 7                                # draw; shrink and print a failure
python -m tests.engine.fuzz --options '…' --way '…'           # repeat a case
"""

import argparse
import logging
import tempfile
import warnings
from pathlib import Path

import torch
from hypothesis import given, note, seed, settings

from tests.engine.fuzz.cases import SETTINGS, Case, cases, parse
from tests.engine.fuzz.check import Checker
from tests.support.pool import Pool


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.fuzz", description=__doc__)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--options")
    parser.add_argument("--way", default="auto x1")
    given_by_user = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    pool = Pool(4)
    with tempfile.TemporaryDirectory() as folder:
        small = ["data=shapes", f"data.root={folder}/data"]
        checker = Checker(pool, small, Path(folder))
        try:
            if given_by_user.options is not None:
                checker.check(parse(given_by_user.options, given_by_user.way))
            else:
                search(checker, given_by_user.draws, given_by_user.seed)
        finally:
            pool.stop()


def search(checker: Checker, draws: int, first: int) -> None:
    """Check `draws` random cases."""
    done = 0

    @seed(first)
    @settings(SETTINGS, max_examples=draws)
    @given(cases())
    def check(case: Case) -> None:
        nonlocal done
        done += 1
        note(case.command)
        print(f"{done}: {case.command}", flush=True)
        checker.check(case)

    check()


if __name__ == "__main__":
    main()
