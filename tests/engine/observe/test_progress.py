"""The progress bar is one line, also in a terminal of 80 columns, and log lines stand above it."""

import io
import itertools
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import rich

from onecurve.observe.progress import ProgressBar
from onecurve.process.log import log_to_folder
from onecurve.run.experiment import assemble
from tests.support.commands import restored
from tests.support.runs import compose

METRICS = {"train/loss": 1.404, "val/loss": 1.27, "val/acc": 0.512}
SHOWN = "loss: 1.404 val/loss: 1.270 val/acc: 0.512"


@pytest.fixture
def screen() -> Iterator[io.StringIO]:
    """What a terminal gets from rich's console, which is one per process."""
    yield io.StringIO()
    rich.reconfigure()


def render(screen: io.StringIO, width: int, metrics: dict[str, float]) -> str:
    """Return the line of a bar in the middle of a long epoch."""
    bar = ProgressBar(4)
    bar._console_kwargs = {"file": screen, "width": width}
    state = SimpleNamespace(fn="fit")
    trainer: Any = SimpleNamespace(progress_bar_callback=bar, state=state, sanity_checking=False, training=True)
    trainer.progress_bar_metrics, trainer.loggers = metrics, [SimpleNamespace(version="run-1a2b")]
    bar._init_progress(trainer)
    assert bar.progress is not None
    assert bar._console is not None
    bar.progress.get_time = itertools.count(0.0, step=9.0).__next__  # seconds
    bar.train_progress_bar_id = bar._add_task(1563, "Epoch 18/19")
    for batches in (1, 1351):
        bar.progress.update(bar.train_progress_bar_id, completed=batches)
    bar._update_metrics(trainer, None)  # type: ignore[arg-type]
    with bar._console.capture() as captured:
        bar._console.print(bar.progress.get_renderable())
    bar._stop_progress()
    return captured.get().removesuffix("\n")


@pytest.mark.parametrize("width", [80, 120])
def test_bar_and_metrics_fit_on_one_line(width: int, screen: io.StringIO) -> None:
    line = render(screen, width, METRICS)
    assert "\n" not in line
    assert len(line) <= width
    assert line.startswith("Epoch 18/19 ━━━")
    assert line.rstrip().endswith(SHOWN)
    assert "1351/1563" in line
    assert "v_num" not in line


def test_only_the_last_metrics_are_cut(screen: io.StringIO) -> None:
    line = render(screen, 80, METRICS | {"val/f1": 0.4, "val/recall": 0.3})
    assert len(line) <= 80
    assert "1351/1563" in line
    assert SHOWN[:-3] in line
    assert line.endswith("…")


class Speaks(L.Callback):
    """Logs while the bar is shown."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            logging.getLogger("src.test").info("a log line")


def test_log_lines_stand_above_the_bar(
    small: list[str], folder: Path, screen: io.StringIO, capfd: pytest.CaptureFixture[str]
) -> None:
    """Text that reaches the terminal past rich's console would break the line of the bar."""
    options = ["logger=none", "trainer.accelerator=cpu", "model=mlp", "model.hidden=[16]", "data.batch_size=32"]
    trainer, module, data = assemble(compose(folder, *small, *options, "trainer.max_steps=5", quiet=False))
    bar: Any = trainer.progress_bar_callback
    bar._console_kwargs = {"file": screen, "width": 80, "force_terminal": True}
    trainer.callbacks.append(Speaks())
    with restored():
        log_to_folder(folder, rank=0)
        trainer.fit(module, datamodule=data)
    printed = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue())
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", printed)]
    assert "a log line" in lines
    assert "a log line" not in capfd.readouterr().out
    assert lines[lines.index("a log line") + 1].startswith("Epoch 0/19")
    assert " 5/11 " in [line for line in lines if line.startswith("Epoch")][-1], "the last step is shown"
