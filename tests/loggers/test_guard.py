"""No failure of a logger ends a training run: a logger that keeps failing is dropped."""

import inspect
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyExperiment
from lightning.pytorch.utilities import rank_zero_only
from lightning_utilities.core.imports import RequirementCache

from src.loggers.guard import GuardedLogger
from src.run.experiment import run
from src.utils.errors import UserError
from tests.support.runs import compose


class Fragile(Logger):
    """A logger of one's own. It fails in each method whose name is in `fails`."""

    def __init__(self, fails: list[str] | None = None) -> None:
        super().__init__()
        self.fails, self.starts = fails or [], 0
        self.rows: list[Any] = []

    def _check(self, method: str) -> None:
        if method in self.fails:
            raise OSError(f"no space left for {method}")

    @property
    def name(self) -> str:
        return "fragile"

    @property
    def version(self) -> str:
        self._check("version")
        return "1"

    @property
    def experiment(self) -> Any:
        self._check("experiment")
        self.starts += 1
        return SimpleNamespace(log=self.log_metrics, config={"width": 1}, rows=self.rows)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self._check("log_metrics")
        self.rows.append(metrics)

    def log_hyperparams(self, params: Any) -> None:
        self._check("log_hyperparams")

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self._check("after_save_checkpoint")

    def save(self) -> None:
        self._check("save")

    def finalize(self, status: str) -> None:
        self._check("finalize")


def use(logger: Any) -> None:
    """Use a logger as Lightning and callbacks do."""
    experiment = logger.experiment
    logger.log_hyperparams({"width": 1})
    logger.log_metrics({"loss": 1.0}, 1)
    experiment.log({"loss": 2.0})
    experiment.config.update({"width": 2})
    experiment.note = "text"
    experiment.rows[:1]
    assert logger.name in ("fragile", "")
    assert logger.version in ("1", "")
    logger.after_save_checkpoint(None)
    logger.save()
    logger.finalize("success")


OUTCOMES = ("training continues", "training continues without it")
METHODS = ("experiment", "log_hyperparams", "log_metrics", "version", "after_save_checkpoint", "save", "finalize")


@pytest.mark.parametrize("method", METHODS)
def test_logger_that_keeps_failing_is_dropped(method: str, caplog: pytest.LogCaptureFixture) -> None:
    logger = GuardedLogger(original := Fragile([method]), "logger.fragile")
    for _ in range(3):
        use(logger)
    assert caplog.messages == [
        f"logger.fragile failed, and {outcome}: OSError: no space left for {method}" for outcome in OUTCOMES
    ]
    original.fails = []
    logger.log_metrics({"loss": 3.0}, 3)
    assert {"loss": 3.0} not in original.rows


def test_single_failures_cost_only_their_call(caplog: pytest.LogCaptureFixture) -> None:
    logger: Any = GuardedLogger(original := Fragile(), "logger.fragile")
    for step in range(12):
        original.fails = [] if step % 3 == 2 else ["log_metrics"]
        logger.log_metrics({"loss": step}, step)
        logger.save()
    assert original.rows == [{"loss": step} for step in (2, 5, 8, 11)]
    assert len(caplog.messages) == 1


def test_slow_failure_drops_a_logger(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """MLflow retries a server that is down for minutes."""
    monkeypatch.setattr("src.loggers.guard.MAX_SECONDS", 0.0)
    logger: Any = GuardedLogger(original := Fragile(["log_hyperparams"]), "logger.fragile")
    logger.log_hyperparams({})
    logger.log_metrics({"loss": 1.0}, 1)
    assert not original.rows
    assert len(caplog.messages) == 1


def test_logger_is_the_original_one_to_callbacks() -> None:
    original = Fragile()
    logger: Any = GuardedLogger(original, "logger.fragile")
    use(logger)
    assert original.rows == [{"loss": 1.0}, {"loss": 2.0}]
    assert isinstance(logger, Fragile)
    assert isinstance(logger.experiment, SimpleNamespace)
    assert not hasattr(logger, "log_image")
    assert not hasattr(logger.experiment, "log_artifact")
    assert isinstance(pickle.loads(pickle.dumps(logger)), Fragile), "spawned ranks get it"


def test_experiment_starts_at_its_first_use() -> None:
    """Lightning asks for it when a run starts."""
    logger: Any = GuardedLogger(original := Fragile(), "logger.fragile")
    experiment = logger.experiment
    assert original.starts == 0
    experiment.log({"loss": 1.0})
    assert original.starts == 1


def test_experiment_is_a_dummy_above_rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger: Any = GuardedLogger(original := Fragile(), "logger.fragile")
    experiment: Any = logger.experiment
    experiment.config.update({"width": 2})
    experiment["images"][0].upload("file")
    assert isinstance(experiment, DummyExperiment)
    assert original.starts == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_iteration_over_an_experiment_ends(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", rank)
    logger: Any = GuardedLogger(Fragile(["experiment"]), "logger.fragile")
    experiment = logger.experiment
    for part in (experiment, experiment.rows):
        assert next(iter(part), None) is None
    assert dict(experiment.config) == {}
    assert len(experiment.rows) == 0
    assert "loss" not in experiment.summary


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
    assert "test/acc" in run(compose(folder, *small, *options))
    assert [record.getMessage() for record in caplog.records if "failed" in record.getMessage()] == [
        f"logger.tensorboard failed, and {outcome}: OSError: No space left on device" for outcome in OUTCOMES
    ]
    assert "train/loss" in (folder / "metrics.csv").read_text()


def test_missing_package_is_one_line(small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = RequirementCache("a_missing_package>=1.0")
    monkeypatch.setattr("lightning.pytorch.loggers.mlflow._MLFLOW_AVAILABLE", missing)
    cfg = compose(folder, *small, "logger=mlflow")
    with pytest.raises(UserError, match=r"MLFlowLogger: .*pip install.*a_missing_package"):
        run(cfg)
    options = {name: value for name, value in cfg.logger.mlflow.items() if name != "_target_"}
    inspect.signature(MLFlowLogger).bind(**options)
