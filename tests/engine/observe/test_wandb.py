"""W&B runs online if a key is configured and offline otherwise, without a prompt."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import loggers

from onecurve.errors import UserError
from onecurve.observe.guard import start_loggers
from onecurve.observe.wandb import WandbLogger, online_or_offline, wandb_ends
from onecurve.run.experiment import run_experiment
from tests.support.commands import TINY, TWO
from tests.support.commands import run as run_command
from tests.support.experiments import SHORT
from tests.support.runs import compose
from tests.support.wandb_files import read_records, read_runs
from tests.support.wandb_server import KEY, stand_in

# Each case runs in a fork, which need not import wandb again. It exits at once, since wandb's shutdown waits for its
# service, and once did so forever.
SCRIPT = """
import json, os, sys
from onecurve.observe.wandb import WandbLogger, online_or_offline
WandbLogger("project", "id", "folder", "name", log_model=False)
assert "wandb" not in sys.modules, "its import takes a second, on each rank"
import wandb
for variables in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.environ.update(variables)
        print(online_or_offline(), flush=True)
        os._exit(0)
    os.wait()
"""
Cases = list[tuple[dict[str, str], str]]
QUICK: Cases = [
    ({}, "offline"),
    ({"WANDB_MODE": "online"}, "offline"),
    ({"WANDB_API_KEY": KEY, "WANDB_MODE": "disabled"}, "disabled"),
]
WITH_KEY: Cases = [({"WANDB_API_KEY": KEY}, "online")]  # wandb takes seconds to notice that there is no network


@pytest.mark.parametrize("cases", [QUICK, pytest.param(WITH_KEY, marks=pytest.mark.slow)], ids=["without", "with key"])
def test_mode_follows_the_credentials(cases: Cases, tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "PATH": "", "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", SCRIPT, json.dumps([variables for variables, _ in cases])]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert result.stdout.split() == [expected for _, expected in cases], result.stderr
    without_key = [variables for variables, _ in cases if variables == {"WANDB_MODE": "online"}]
    assert result.stderr.count("no API key is configured: run `wandb login`") == len(without_key)


def test_refuses_a_key_among_the_options() -> None:
    """It would be in config.yaml, events.jsonl, report.html, every checkpoint and W&B's own copy."""
    with pytest.raises(UserError, match=r"logger.wandb.settings.api_key: leave it out; .* WANDB_API_KEY"):
        WandbLogger("project", "id", "folder", "name", settings={"api_key": 40 * "a"})


def test_settings_of_the_user_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(loggers.WandbLogger, "experiment", property(lambda logger: logger.init_options["settings"]))
    given = {"x_disable_stats": True, "init_timeout": 5}
    used = WandbLogger("project", "id", str(tmp_path), "name", settings=given).experiment
    assert (used["x_disable_stats"], used["init_timeout"], used["console"]) == (True, 5, "off")


def test_wandb_does_not_change_how_a_run_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(exit_code: int) -> None:
        raise ConnectionResetError("its service died")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=object(), finish=fail))
    with wandb_ends():
        pass
    assert caplog.messages == ["wandb failed at the end of the run: ConnectionResetError: its service died"]


def test_goes_offline_if_it_cannot_log_in(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def login(**_: Any) -> bool:
        assert os.environ["WANDB_SILENT"] == "true", "wandb would ask the server for the account, to print it"
        raise ValueError("no status: context deadline exceeded\n  details")

    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setattr("wandb.login", login)
    monkeypatch.setattr("wandb.teardown", lambda: None)
    monkeypatch.setattr(loggers.WandbLogger, "experiment", property(lambda logger: logger.init_options["mode"]))
    with caplog.at_level("INFO"):
        assert WandbLogger("project", "id", str(tmp_path), "name", log_model=False).experiment == "offline"
    assert caplog.messages[0] == "wandb cannot start online: no status: context deadline exceeded"
    assert caplog.messages[-1] == f"wandb sync {tmp_path}/wandb/offline-*"


class Published(L.Callback):
    """Uses W&B as the callbacks of other projects do, on all ranks and at once when training starts."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        logger: Any = trainer.logger
        assert isinstance(logger, loggers.WandbLogger)
        logger.watch(pl_module, log_freq=1)
        logger.log_table("table", columns=["width"], data=[[3]])
        logger.log_image("image", [torch.zeros(3, 8, 8)])
        logger.experiment.config.update({"author": "me"})
        logger.experiment.log({"direct": 1.5})
        logger.experiment.summary["best"] = 7


def test_published_callbacks_find_wandb_beside_tensorboard(
    small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_DATA_DIR", str(folder))
    settings = ["entity=me", "job_type=debug", "notes='a, b'", "name=shown", "log_model=true", "+save_code=false"]
    overrides = [f"{'' if '+' not in setting else '+'}logger.wandb.{setting.lstrip('+')}" for setting in settings]
    chosen = ["logger=[wandb,tensorboard]", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false"]
    folder /= "two_loggers"  # the run's id must be unique in this process
    published = "+callbacks.published={_target_: tests.engine.observe.test_wandb.Published}"
    options = [*small, *SHORT, "model=mlp", "model.hidden=[16]", "trainer.log_every_n_steps=4", published]
    evaluation = ["callbacks=[default,evaluation]"]
    run_experiment(compose(folder, *options, *evaluation, *chosen, *overrides, quiet=False))
    assert "failed" not in caplog.text
    assert list(folder.glob("tensorboard/events.*"))

    records = read_records(folder)
    (shown,) = read_runs(folder)
    written = {name: shown[name] for name in ("run_id", "display_name", "job_type", "notes", "entity")}
    expected = {"display_name": "shown", "job_type": "debug", "notes": "a, b", "entity": "me"}
    assert written == expected | {"run_id": "two_loggers"}
    history = [name for record in records if "history" in record for name in record["history"]["item"]]
    assert {"train/loss", "table._type", "image._type", "direct"} <= set(history)
    assert {f"images/{stage}_confusion_matrix_table._type" for stage in ("val", "test")} <= set(history)
    assert [name for name in history if name.startswith("gradients/")]
    assert history.index("table._type") < history.index("direct") < history.index("train/loss"), "in order"
    configs = [record["config"]["update"] for record in records if "config" in record]
    assert {"author": "me"} in configs
    (fingerprint,) = {config["experiment"] for config in configs if "optimizer" in config}  # of the run
    tags = [record["run"].get("tags", []) for record in records if "run" in record]
    assert f"experiment {fingerprint}" in tags[-1]
    defined = {record["metric"].get("name"): record["metric"] for record in records if "metric" in record}
    assert defined["val/acc"]["summary"] == {"max": True}
    assert defined["val/loss"]["summary"] == {"min": True}
    assert defined["val/acc"]["step_metric"] == "trainer/global_step"
    assert defined["epoch"]["options"]["hidden"]
    summaries = [record["summary"]["update"] for record in records if "summary" in record]
    accuracies = [summary["val/acc"]["max"] for summary in summaries if "val/acc" in summary]
    assert accuracies[-1] == max(accuracies)
    assert isinstance([summary["test/acc"] for summary in summaries if "test/acc" in summary][-1], float)
    assert {"best": 7} in [record["summary"]["update"] for record in records if "summary" in record]
    models = [record["artifact"] for record in records if record.get("artifact", {}).get("type") == "model"]
    assert {(model["name"], *sorted(model["aliases"])) for model in models} == {
        ("model-two_loggers", "best", "latest"),
        ("model-two_loggers-last", "best", "latest"),
    }


@pytest.mark.slow
def test_an_online_run_sends_its_metrics(small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is a stand-in."""
    task = [*small, *TINY, *TWO, f"run_dir={tmp_path / 'run'}"]
    with stand_in("cifar") as server:
        for name, value in server.variables().items():
            monkeypatch.setenv(name, value)
        out, _ = run_command(*task)
    assert f"wandb: {server.address}/me/cifar/runs/run-" in out
    assert "train/loss" in "".join(server.streams)


def test_an_unknown_mode_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offlin")
    with pytest.raises(UserError, match=r"WANDB_MODE=offlin: did you mean offline\?"):
        online_or_offline()


def test_a_logger_with_an_unknown_mode_does_not_say_that_it_is_offline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offlin")
    with caplog.at_level(logging.INFO):
        assert start_loggers([WandbLogger("project", "run-1", str(tmp_path), "name")]) == []
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "UserError: WANDB_MODE=offlin: did you mean offline?"
    ]
