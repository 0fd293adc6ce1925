"""Weights & Biases logger: online if a key is configured, otherwise offline, with a hint how to view and upload it."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from signal import SIGINT
from typing import Any

import torch
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from onecurve.errors import UserError, check_choice
from onecurve.patches import lightning_loggers
from onecurve.process.signals import RESIZE, Stopped

_log = logging.getLogger(__name__)
_INIT_TIMEOUT = 20.0  # seconds


class WandbLogger(lightning_loggers.WandbLogger):
    """Lightning's WandbLogger, which goes offline if the server does not answer.

    A training run stays one W&B run however often it is resumed. `log_metrics` is Lightning's.

    Args:
        folder: the run folder, for wandb's files.
        options: other arguments of Lightning's WandbLogger and of `wandb.init`. `log_model` is whether to upload the
            final checkpoints as artifacts; "all" uploads each one when it is saved.
    """

    def __init__(self, project: str, run_id: str, folder: str, name: str, **options: Any) -> None:
        given = options.pop("settings", None) or {}
        if "api_key" in given:  # config.yaml, checkpoints and W&B would have it
            raise UserError("logger.wandb.settings.api_key: leave it out; run `wandb login`, or set WANDB_API_KEY")
        settings = {
            "silent": True,
            "console": "off",
            # By default wandb writes its file every 15 seconds, so a run killed before that would have none.
            "x_transaction_log_flush_interval": 1.0,
            "init_timeout": float(os.environ.get("WANDB_INIT_TIMEOUT", _INIT_TIMEOUT)),
        }
        super().__init__(name, folder, run_id, project=project, settings=settings | given, **options)
        del self.init_options["anonymous"]  # wandb warns of it
        self.is_offline = bool(options.get("offline"))

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The W&B run. The first use starts it, offline if its server does not answer."""
        if self.started is not None:
            return self.started
        import wandb

        Path(str(self.save_dir)).mkdir(parents=True, exist_ok=True)
        try:
            mode = "offline" if self.is_offline else self.init_options.get("mode") or online_or_offline()
            self.init_options["mode"] = mode
            if mode == "online":
                run = super().experiment
                _log.info("wandb: %s", run.url)
                return run
        except UserError:  # of WANDB_MODE, which wandb would refuse offline, too
            raise
        except Exception as error:
            _log.warning("wandb cannot start online: %s", str(error).strip().split("\n")[0])
            mode = self.init_options["mode"] = "offline"
            with contextlib.suppress(SystemExit):
                wandb.teardown()  # its service still holds the run's id
        if mode == "offline":
            # A terminal breaks a long line inside a path, which then cannot be copied.
            _log.info("wandb is offline; to view or upload the run:")
            _log.info("wandb leet %s/wandb", self.save_dir)
            _log.info("wandb sync %s/wandb/offline-*", self.save_dir)
        return super().experiment

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Log the configuration, with the fingerprint of the experiment as a tag."""
        super().log_hyperparams(params)
        run = self.experiment
        if fingerprint := params.get("experiment"):
            run.tags = tuple(dict.fromkeys([*(run.tags or ()), f"experiment {fingerprint}"]))
        _define_metrics(run)

    @rank_zero_only
    def log_evaluation(self, stage: str, evaluation: dict[str, Any]) -> None:
        """Log the confusion matrix of `callbacks.evaluation` as a chart of a stage, val or test."""
        import wandb

        counts = torch.tensor(evaluation["confusion"])
        # wandb's chart takes the label and the prediction of each sample.
        labels, predictions = counts.nonzero().repeat_interleave(counts[counts > 0], dim=0).T.tolist()
        chart: Any = wandb.plot.confusion_matrix(
            y_true=labels, preds=predictions, class_names=evaluation["classes"], title=f"Confusion matrix, {stage}"
        )
        self.log_metrics({f"images/{stage}_confusion_matrix": chart}, evaluation["step"])


def _define_metrics(run: Any) -> None:
    """Keep the best validation in the summary as `val/acc.max` and `val/loss.min`, and draw no chart of the counters.

    The automatic dashboard has a section per prefix of the names. Other metrics have their last value in the summary.
    The controller of a W&B sweep reads `val/acc` there, so in such a sweep it stays the last value.
    """
    step = "trainer/global_step"  # Lightning's name
    for name in (step, "epoch"):
        run.define_metric(name, hidden=True)
    if "WANDB_SWEEP_ID" not in os.environ:
        run.define_metric("val/acc", step_metric=step, summary="max")
        run.define_metric("val/loss", step_metric=step, summary="min")


def online_or_offline() -> str:
    """Return `WANDB_MODE`, or whether credentials are configured; this neither prompts nor connects.

    Raises:
        wandb.Error: if the key is invalid.
    """
    import wandb

    # Only this variable keeps `login` from printing the account, for which it would wait for the server.
    os.environ.setdefault("WANDB_SILENT", "true")
    if mode := os.environ.get("WANDB_MODE"):
        check_choice("WANDB_MODE", mode, ("online", "offline", "disabled", "shared", "dryrun", "run"))
    if mode in (None, "", "online") and not wandb.login(prompt=False, verify=False):
        if mode:
            _log.warning("WANDB_MODE=online, but no API key is configured: run `wandb login`; this run goes offline")
        return "offline"
    return mode or "online"


@contextlib.contextmanager
def wandb_ends() -> Iterator[None]:
    """End this process's W&B run, if it has one, with the code in this context: as finished, failed or preempted.

    The agent of a W&B sweep starts a preempted run again; SIGINT is the user's own end, and RESIZE the launcher's.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Stopped) and error.number not in (SIGINT, RESIZE):
            _call_wandb("mark_preempting")
        _call_wandb("finish", exit_code=1)
        raise
    _call_wandb("finish", exit_code=0)


def _call_wandb(function: str, **options: Any) -> None:
    """Call a function of wandb if the process has a W&B run. Its failure must not change how the process ends."""
    wandb = sys.modules.get("wandb")  # without its import, which takes a second
    if getattr(wandb, "run", None) is None:
        return
    try:
        getattr(wandb, function)(**options)
    except Exception as error:
        _log.warning("wandb failed at the end of the run: %s: %s", type(error).__name__, error)
