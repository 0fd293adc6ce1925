"""No failure of a logger ends a training run: a method that keeps failing is not called again."""

import inspect
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger
from lightning_utilities.core.imports import RequirementCache

from onecurve.errors import UserError
from onecurve.observe.guard import start_loggers
from onecurve.run.experiment import run_experiment
from tests.support.runs import compose


class Fragile(Logger):
    """A logger of one's own. It fails in each method whose name is in `fails`."""

    name, version = "fragile", "1"

    def __init__(self, fails: Iterable[str] = ()) -> None:
        super().__init__()
        self.fails = fails
        self.calls: Counter[str] = Counter()
        self.rows: list[Any] = []

    def _call(self, method: str) -> None:
        self.calls[method] += 1
        if method in self.fails:
            raise OSError(f"no space left for {method}")

    @property
    def experiment(self) -> Any:
        self._call("experiment")
        return SimpleNamespace(config={"width": 1})

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self._call("log_metrics")
        self.rows.append(metrics)

    def log_hyperparams(self, params: Any) -> None:
        self._call("log_hyperparams")

    def log_evaluation(self, stage: str) -> None:
        self._call("log_evaluation")

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self._call("after_save_checkpoint")

    def finalize(self, status: str) -> None:
        self._call("finalize")


ERROR = "OSError: no space left for"


def test_logger_that_cannot_start_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    kept = Fragile()
    assert start_loggers([Fragile(["experiment"]), kept]) == [kept]
    assert caplog.messages == [f"Fragile cannot start, and training continues without it: {ERROR} experiment"]


METHODS = {
    "log_hyperparams": {"width": 1},
    "log_metrics": {"loss": 1.0},
    "log_evaluation": "val",
    "after_save_checkpoint": None,
    "finalize": "success",
}


@pytest.mark.parametrize("method", ["log_metrics", "after_save_checkpoint"])
def test_method_that_keeps_failing_is_not_called_again(method: str, caplog: pytest.LogCaptureFixture) -> None:
    logger = Fragile([method])
    start_loggers([logger])
    for _ in range(4):
        for name, argument in METHODS.items():
            getattr(logger, name)(argument)
    assert logger.calls[method] == 3
    assert all(logger.calls[name] == 4 for name in METHODS if name != method)
    assert caplog.messages == [
        f"Fragile.{method} {outcome}, and training continues: {ERROR} {method}"
        for outcome in ("failed", "failed", "is not called again")
    ]


def test_single_failures_cost_only_their_call(caplog: pytest.LogCaptureFixture) -> None:
    logger = Fragile()
    start_loggers([logger])
    assert type(logger) is Fragile, "callbacks find a logger by its class"
    assert not hasattr(logger, "log_image")
    for step in range(12):
        logger.fails = [] if step % 3 == 2 else ["log_metrics"]
        logger.log_metrics({"loss": step}, step)
    assert logger.rows == [{"loss": step} for step in (2, 5, 8, 11)]
    assert not [message for message in caplog.messages if "not called again" in message]


def test_run_continues_without_a_failed_logger(
    small: list[str], folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full for TensorBoard's event file. `metrics.csv` is complete."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(TensorBoardLogger, "log_metrics", fail)
    options = [
        "logger=tensorboard",
        "model=mlp",
        "model.hidden=[16]",
        "trainer.max_epochs=1",
        "trainer.log_every_n_steps=1",
    ]
    assert "test/acc" in run_experiment(compose(folder, *small, *options)).metrics
    outcome = "TensorBoardLogger.log_metrics is not called again, and training continues"
    assert f"{outcome}: OSError: No space left on device" in caplog.messages
    assert "train/loss" in (folder / "metrics.csv").read_text()


def test_missing_package_is_one_line(small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = RequirementCache("a_missing_package>=1.0")
    monkeypatch.setattr("lightning.pytorch.loggers.mlflow._MLFLOW_AVAILABLE", missing)
    cfg = compose(folder, *small, "logger=mlflow")
    with pytest.raises(UserError, match=r"MLFlowLogger: .*pip install.*a_missing_package"):
        run_experiment(cfg)
    options = {name: value for name, value in cfg.logger.mlflow.items() if name != "_target_"}
    inspect.signature(MLFlowLogger).bind(**options)
