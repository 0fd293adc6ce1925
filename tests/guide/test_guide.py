"""Each chapter of docs/guide: its script trains the experiment, each mistake is seen, exercises and commands work.

A chapter needs no test of its own. `make test` runs the first mistake of each chapter, unless its ranks wait for each
other for seconds; `make test-all` runs everything.
"""

import faulthandler
import multiprocessing as mp
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from docs.guide import experiment
from docs.guide.check import CHAPTERS, check
from docs.guide.experiment import TOLERANCE, train_alone
from tests.support.commands import ROOT, run, start
from tests.support.comparison import read_rows

GUIDE = ROOT / "docs" / "guide"
SECTIONS = ["The arithmetic", "The script", "One word here", "Mistakes", "Exercises"]
SECTIONS_ZH = ["算一算", "脚本", "在本模板中只需一个词", "常见错误", "练习"]
PAGES = {chapter.name: (chapter / "README.md").read_text() for chapter in CHAPTERS.values()}
# The rows of the table of mistakes: a script if it is not train.py, an option, and what the page says is seen.
MISTAKE = r"^\| `(?:(\w+) )?--bug=(\w+)` \|.*\| `([^`]+)`"
MISTAKES = [
    (name, script or "train", bug, seen)
    for name, page in PAGES.items()
    for script, bug, seen in re.findall(MISTAKE + r"[^|]* \|$", page, re.M)
]
WAITS = ("01_processes", "12_hosts")  # chapters whose first mistake is ranks that wait
FIRST = {name: (script, bug) for name, script, bug, _ in reversed(MISTAKES)}
WORDS = {"05_batch_norm": 1000, "07_sharding": 720}  # a page has 700; chapter 5 has two subjects


def code_blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)


def commands(page: str) -> list[str]:
    return "".join(code_blocks(page, "bash")).replace("\\\n", " ").splitlines()


TEMPLATE = "python train.py experiment=guide"
# The lines that no test below runs otherwise. The benchmark takes many minutes, and has tests of its own.
OTHERS = [
    line
    for page in (*PAGES.values(), (GUIDE / "which_strategy.md").read_text())
    for line in commands(page)
    if not re.match(rf"{TEMPLATE}|python -m (docs.guide.\w+.train|engine.dev.bench)\b", line)
]


def run_script(name: str, script: str = "train", *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", f"docs.guide.{name}.{script}", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def _start_forks(start_processes: Any, *arguments: Any, start_method: str) -> None:
    start_processes(*arguments, start_method="fork")


def run_forked(output: Path, name: str, script: str, *options: str) -> None:
    """Run a script in this process, a fork of that of the tests, and its ranks in further forks."""
    with output.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    faulthandler.disable()  # it would write where pytest does
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1) for descriptor in (1, 2))
    sys.argv = [script, *options]
    module: Any = experiment.mp
    module.start_processes = partial(_start_forks, module.start_processes)
    runpy.run_module(f"docs.guide.{name}.{script}", run_name="__main__", alter_sys=True)


@pytest.mark.parametrize("name", PAGES)
def test_chapter_has_its_form(name: str) -> None:
    page, chapter = PAGES[name], GUIDE / name
    assert re.findall(r"^## (.*)$", page, re.M) == SECTIONS
    _, links_to_other_pages, text = page.split("\n\n", 2)
    assert links_to_other_pages.endswith("[all chapters](../README.md)")
    prose = re.sub(r"```.*?```|\$\$.*?\$\$", "", text, flags=re.S)
    assert len(prose.split()) <= WORDS.get(name, 700)
    for script in chapter.glob("*.py"):
        assert script.stem in ("exercises", "solutions") or script.read_text().count("\n") <= 80, script
    assert name in FIRST
    assert set(re.findall(r"check_(\w+)\(", (chapter / "exercises.py").read_text())) <= set(
        re.findall(r"`(\w+)`", page)
    )


@pytest.mark.parametrize("name", PAGES)
def test_chinese_page_is_in_step(name: str) -> None:
    english, chinese = PAGES[name], (GUIDE / name / "README.zh.md").read_text()
    assert re.findall(r"^## (.*)$", chinese, re.M) == SECTIONS_ZH
    assert code_blocks(english, r"\w*") == code_blocks(chinese, r"\w*")
    assert re.findall(MISTAKE, english, re.M) == re.findall(MISTAKE, chinese, re.M)
    links = r"\]\(([^)]+)\)"
    of_chinese, of_english = (
        {link.replace(".zh.md", ".md") for link in re.findall(links, page)} for page in (chinese, english)
    )
    assert of_chinese == of_english


@pytest.mark.parametrize("page", sorted(GUIDE.rglob("*.md")), ids=lambda page: str(page.relative_to(GUIDE)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_script_trains_the_experiment(name: str) -> None:
    done = run_script(name)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "same experiment" in done.stdout


@pytest.mark.parametrize(
    ("name", "script", "bug", "seen"),
    [
        pytest.param(
            *row,
            marks=[] if row[1:3] == FIRST[row[0]] and row[0] not in WAITS else [pytest.mark.slow],
            id=" ".join(row[:3]),
        )
        for row in MISTAKES
    ],
)
def test_mistake_is_seen(name: str, script: str, bug: str, seen: str, tmp_path: Path) -> None:
    """It needs no new process, which would take seconds to import torch, as would the ranks that it starts."""
    output = tmp_path / "output"
    process = mp.get_context("fork").Process(target=run_forked, args=[output, name, script, f"--bug={bug}"])
    process.start()
    process.join(300)
    assert process.exitcode == 1, output.read_text()
    assert seen in output.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_exercises_have_solutions(name: str) -> None:
    assert not check(GUIDE / name, solutions=True)
    assert check(GUIDE / name)  # what a reader finds is not solved yet


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line"),
    [(name, line) for name, page in PAGES.items() for line in commands(page) if line.startswith(TEMPLATE)],
    ids=lambda value: value,
)
def test_command_trains_what_the_script_trains(name: str, line: str, tmp_path: Path) -> None:
    words = shlex.split(line, comments=True)[2:]
    losses = losses_of(words, tmp_path / "run")
    if "bit_exact=true" in words:
        one_process = [word.replace("trainer.devices=2", "trainer.devices=1") for word in words]
        assert losses == losses_of(one_process, tmp_path / "one")
    else:
        assert losses == pytest.approx(train_alone("model.normalize=true" in words), rel=TOLERANCE)


def losses_of(words: list[str], folder: Path) -> list[float]:
    run(*words, "trainer.accelerator=cpu", "report=false", f"run_dir={folder}")
    return [float(row["train/loss"]) for row in read_rows(folder) if row["train/loss"]]


@pytest.mark.slow
@pytest.mark.parametrize("line", OTHERS)
def test_other_command_runs(line: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    words = shlex.split(line.replace("HOST:29500", address).replace("torchrun", "python -m torch.distributed.run"))
    if line.startswith("torchrun --nproc"):
        words.insert(3, "--standalone")  # a free port
    if "train.py" in words:
        words += ["trainer.accelerator=cpu", "report=false", f"run_dir={tmp_path}/run"]
        words += [] if re.search("experiment=| data=", line) else ["data=shapes"]  # CIFAR-10 would be downloaded
        words += [] if re.search("experiment=|debug=|doctor=", line) else ["debug=one_step"]
    hosts = [start(*words[1:], program=()) for _ in range(2 if "--nnodes=2" in words else 1)]
    for host in hosts:
        out, err = host.communicate(timeout=300)
        assert host.returncode == 0, out + err[-3000:]


def test_chinese_readme_is_in_step() -> None:
    """Both have the same headings, commands, rows of tables and links; words and comments are translated."""
    english, chinese = (ROOT / "README.md").read_text(), (ROOT / "README.zh.md").read_text()
    assert len(re.findall(r"^#+ ", chinese, re.M)) == len(re.findall(r"^#+ ", english, re.M))
    for language in ("bash", "python"):
        ours, theirs = ("".join(code_blocks(page, language)) for page in (chinese, english))
        assert [line.partition(" # ")[0].rstrip() for line in ours.splitlines()] == [
            line.partition(" # ")[0].rstrip() for line in theirs.splitlines()
        ]
    first_cell = r"^\| (`[^`]+`|\[[^]]+\]\([^)]+\)) \|"
    assert re.findall(first_cell, chinese, re.M) == re.findall(first_cell, english, re.M)
    for target in re.findall(r"\]\((?!http)([^)#]+)", chinese):
        assert (ROOT / target).exists(), target
