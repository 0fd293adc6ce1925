"""The page of a sweep that Optuna ran has Optuna's own plots."""

from pathlib import Path

import optuna
import pytest
import yaml

from src.engine.report.write import write_page_of
from src.engine.state.jobs import Job


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Return the folder of a sweep of four jobs over one option, whose study is in Optuna's database."""
    folder = tmp_path / "sweep"
    folder.mkdir()
    sweeper = {"_target_": "hydra_plugins.optuna_sweeper.OptunaSweeper", "direction": "minimize", "storage": None}
    (folder / "multirun.yaml").write_text(yaml.safe_dump({"hydra": {"sweeper": sweeper | {"study_name": None}}}))
    study = optuna.create_study(study_name="sweep", storage=f"sqlite:///{folder}/optuna.db")
    distribution = optuna.distributions.FloatDistribution(0, 1)
    for number in range(4):
        rate, loss = number / 10, 1.0 - number / 10
        study.add_trial(optuna.create_trial(value=loss, params={"lr": rate}, distributions={"lr": distribution}))
        (folder / str(number)).mkdir()
        Job([f"lr={rate}"], "finished", "val/loss", loss).write(folder / str(number))
    return folder


def test_plots_of_optuna(sweep: Path) -> None:
    page = write_page_of(sweep).read_text()
    assert "By PED-ANOVA." in page
    assert "History" in page
    assert "The best is job 3" in page


def test_a_study_that_cannot_be_read_is_said(sweep: Path) -> None:
    (sweep / "optuna.db").write_bytes(b"no database" * 100)
    page = write_page_of(sweep).read_text()
    assert "The study cannot be read" in page
    assert "The best is job 3" in page
