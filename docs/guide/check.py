"""Check the exercises of a chapter: `python -m docs.guide.check 3`, after you have edited its exercises.py."""

import argparse
import importlib
from pathlib import Path
from types import ModuleType

from torch.multiprocessing.spawn import ProcessException

CHAPTERS = {int(path.name[:2]): path for path in sorted(Path(__file__).parent.glob("[0-9][0-9]_*"))}


def check(chapter: Path, solutions: bool = False) -> list[str]:
    """Return the names of the exercises that are not solved yet, and print a line for each."""
    exercises = load(chapter, "exercises")
    answers = load(chapter, "solutions") if solutions else exercises
    unsolved = []
    for name in [name for name in vars(exercises) if name.startswith("check_")]:
        function = name.removeprefix("check_")
        try:
            getattr(exercises, name)(getattr(answers, function))
        except (NotImplementedError, AssertionError, ProcessException) as error:
            unsolved.append(function)
            print(f"{function}: not solved yet. {str(error).strip().splitlines()[-1]}")
        else:
            print(f"{function}: solved")
    return unsolved


def load(chapter: Path, name: str) -> ModuleType:
    """Import a file of a chapter, whose folder's name begins with a digit."""
    return importlib.import_module(f"docs.guide.{chapter.name}.{name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chapter", type=int, choices=CHAPTERS, metavar="CHAPTER", help="its number")
    parser.add_argument("--solutions", action="store_true", help="check solutions.py instead")
    options = parser.parse_args()
    if check(CHAPTERS[options.chapter], options.solutions):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
