"""What a rank writes to the terminal, and how its process reuses memory."""

import ctypes
import io
import logging
import os
import subprocess
import sys

import pytest
import rich
from lightning.pytorch.callbacks import model_summary
from rich.file_proxy import FileProxy

from onecurve.config import command_line
from onecurve.extras.sweeps.devices import _reserve_cores
from onecurve.process.devices import cores_per_rank
from onecurve.process.log import TerminalHandler, log_script
from onecurve.process.signals import die_with_parent

COMMAND = f"wandb sync /{'a-long-folder/' * 8}host:100:key:/"  # ":100:" is also the name of an emoji
PROGRAM = """
import resource, sys, torch
from onecurve.process.devices import map_large_blocks, tune_malloc

kept = tune_malloc() if sys.argv[1] != "leave" else None
if sys.argv[1] == "map again":
    kept = map_large_blocks()
net = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(3)])
inputs = torch.ones(300_000, 32)  # 37 MB between layers
for step in range(6):
    if step == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    net(inputs).sum().backward()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_progress_bar_does_not_change_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a bar of rich is shown, it replaces stdout."""
    console = rich.get_console()
    monkeypatch.setattr(console, "file", Terminal())
    monkeypatch.setattr(console, "_width", 60)
    monkeypatch.setattr(sys, "stdout", FileProxy(console, Terminal()))
    TerminalHandler().handle(logging.makeLogRecord({"name": "src.test", "msg": COMMAND}))
    assert console.file.getvalue() == f"{COMMAND}\n"


def test_shows_the_table_of_a_model_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning logs it, and the other messages of Lightning are in the file only."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    for logger in (model_summary.log, logging.getLogger("lightning.pytorch.trainer")):
        monkeypatch.setattr(logger, "handlers", [TerminalHandler()])
    logging.getLogger("lightning.pytorch.trainer").info("another message")
    model_summary.ModelSummary.summarize([("Name", ["net"])], 7, 7, 1.0, {"train": 1, "eval": 0}, 0)
    assert "Total params" in sys.stdout.getvalue()
    assert "another message" not in sys.stdout.getvalue()


def test_torch_does_not_warn_of_redirects() -> None:
    """It does on macOS only, in each process that imports train.py."""
    assert command_line.__name__ == "onecurve.config.command_line"  # it sets the level
    assert not logging.getLogger("torch.distributed.elastic.multiprocessing.redirects").isEnabledFor(logging.WARNING)


def test_macos_has_no_calls_of_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes start there, and jobs of a sweep share the cores."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", None)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    die_with_parent(os.getppid())
    with _reserve_cores(1):
        assert cores_per_rank(1) == os.cpu_count()


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc's malloc is tuned")
def test_freed_blocks_are_reused() -> None:
    """A process reuses large freed blocks instead of asking the kernel for new ones; not so under FSDP."""

    def faults(how: str) -> tuple[str, int]:
        output = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True).stdout
        return output.split()[0], int(output.split()[1])

    kept, few = faults("keep")
    assert kept == "True"
    again, many = faults("map again")
    assert again == "True"
    assert few * 3 < min(many, faults("leave")[1])


@pytest.mark.parametrize(("rank", "shown"), [(0, ["careful", "wrong"]), (1, ["wrong"])])
def test_a_script_that_configures_logging_shows_a_warning_once(
    rank: int, shown: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handlers of the script, such as Hydra's, are in each rank."""
    logger = logging.getLogger("onecurve")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    level = logger.level
    try:
        log_script(rank)
        logging.getLogger("onecurve.checks").warning("careful")
        logging.getLogger("onecurve.checks").error("wrong")
    finally:
        logger.setLevel(level)
    assert caplog.messages == shown
