"""What a rank writes to the terminal."""

import io
import logging
import sys

import pytest
import rich
from lightning.pytorch.callbacks import model_summary
from rich.file_proxy import FileProxy

from src.engine.config import main
from src.engine.utils.rank_log import TerminalHandler

COMMAND = f"wandb sync /{'a-long-folder/' * 8}host:100:key:/"  # ":100:" is also the name of an emoji


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
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.redirects")
    assert main.__name__ == "src.engine.config.main", "it sets the level when each process imports train.py"
    assert not logger.isEnabledFor(logging.WARNING)
