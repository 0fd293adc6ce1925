"""Change small files in one place at a time, and list the changes that no unit test notices.

`files.yaml` names the files, their unit tests, and the reason for each mutant that no test can tell from the code.
Cosmic Ray would start a process for each mutant, which imports torch. Here a process that has imported torch forks.
mutmut 3.8 refused the layout of this project.

A run replaces the sections of its files in docs/benchmarks/mutations.md. The exit code is 1 if a mutant survives
without a reason.
"""

import argparse
import contextlib
import gc
import importlib
import importlib.machinery
import io
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:
    from engine.dev.mutations.mutants import Mutant

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "benchmarks" / "mutations.md"
FILES = Path(__file__).with_name("files.yaml")
_CPU_TIMEOUT, _TIMEOUT = 20, 200  # seconds; a mutant may never end
_MEMORY = 4 << 30  # bytes of a process that runs a mutant
_OPTIONS = "-x -q --tb=no --assert=plain --noconftest -o addopts= -p no:cacheprovider -p no:unraisableexception".split()
_HEADER = f"""# Mutations

`make mutations` changes small files of pure logic in one place at a time: another operator, another number, a negated
condition, a decorator less. Then it runs the unit tests of the file. A mutant is killed if a test fails.

The tables list the mutants that survive, each with the reason why no test can tell it from the code. A survivor without
a reason is a gap in the tests. The reasons are in `{FILES.relative_to(ROOT)}`.
"""


def load_libraries() -> None:
    """Import the libraries that the children need, but no module of this project, so that each imports its mutant."""
    for name in ("hydra", "lightning.pytorch", "torchmetrics", "dotenv", "filelock"):
        importlib.import_module(name)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([*_OPTIONS, __file__])  # finds no test, but imports the plugins of pytest
    gc.freeze()  # the children share the memory of these modules


def tests_pass(file: Path, code: str, tests: list[str]) -> bool:
    """Return whether the tests pass in a new process that imports this code in the place of the file."""
    with tempfile.TemporaryDirectory() as folder:
        if (pid := os.fork()) == 0:
            status = 1
            try:
                _limit_child()
                _import_instead(file, code)
                status = pytest.main([*_OPTIONS, f"--rootdir={ROOT}", f"--basetemp={folder}/tests", *tests])
            finally:
                os._exit(status)
        _, waited = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(waited) == 0


def _limit_child() -> None:
    """Print nothing, and end a process that takes too much time or memory."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    signal.alarm(_TIMEOUT)
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_TIMEOUT, _CPU_TIMEOUT))
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))


def _import_instead(file: Path, code: str) -> None:
    loader: Any = importlib.machinery.SourceFileLoader
    load = loader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, fullname: str) -> CodeType | None:
        is_mutated = Path(self.get_filename(fullname)) == file
        return compile(code, str(file), "exec") if is_mutated else load(self, fullname)

    loader.get_code = get_code


def examine(name: str, tests: list[str], reasons: dict[str, str]) -> tuple[str, int]:
    """Return the section of a file, and the number of mutants that survive without a reason."""
    from engine.dev.mutations.mutants import make_mutants  # late: --help does without Cosmic Ray

    file, start = ROOT / name, time.monotonic()
    source = file.read_text()
    if not tests_pass(file, source, tests):
        raise SystemExit(f"{name}: its tests fail without a mutation: {' '.join(tests)}")
    seconds = time.monotonic() - start
    mutants, survivors = list(make_mutants(source)), []
    for mutant in mutants:
        if tests_pass(file, mutant.code, tests):
            survivors.append(mutant)
            if mutant.text not in reasons:
                print(f"{name}:{mutant.line}: {mutant.text}", flush=True)
    for text in reasons.keys() - {mutant.text for mutant in survivors}:
        print(f"{name}: a mutant with a reason does not survive: {text}")
    killed = len(mutants) - len(survivors)
    counts = f"{len(mutants)} mutants, {killed} killed, {len(survivors)} survive; the tests take {seconds:.1f} s."
    section = "\n".join([f"## {name}", "", counts, *_table(survivors, reasons), ""])
    return section, sum(mutant.text not in reasons for mutant in survivors)


def _table(survivors: "list[Mutant]", reasons: dict[str, str]) -> list[str]:
    lines = ["", "| line | mutant | why no test can tell |", "| --- | --- | --- |"] if survivors else []
    for mutant in sorted(survivors, key=lambda mutant: mutant.line):
        escaped = mutant.text.replace("|", "\\|")
        lines.append(f"| {mutant.line} | `{escaped}` | {reasons.get(mutant.text, '')} |")
    return lines


def update_page(section: str) -> None:
    """Replace or add the section of a file in the page, in the order of their names."""
    _, *kept = PAGE.read_text().split("\n## ") if PAGE.exists() else [""]
    sections = {text.partition("\n")[0]: text.strip() for text in [*kept, section.removeprefix("## ")]}
    PAGE.write_text("\n".join([_HEADER, *(f"## {sections[name]}\n" for name in sorted(sections))]))


def main() -> int:
    """Examine the files, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="files of files.yaml; all of them by default")
    configuration: dict[str, Any] = yaml.safe_load(FILES.read_text())
    names = parser.parse_args().files or list(configuration)
    load_libraries()
    num_unknown = 0
    for name in names:
        equivalent = configuration[name].get("equivalent", [])
        reasons = {text: group["why"] for group in equivalent for text in group["mutants"]}
        section, unknown = examine(name, configuration[name]["tests"], reasons)
        print(section.partition("\n|")[0], flush=True)
        update_page(section)
        num_unknown += unknown
    return int(num_unknown > 0)


if __name__ == "__main__":
    sys.exit(main())
