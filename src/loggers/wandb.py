"""Weights & Biases logger: online if a key is configured, otherwise offline, with a hint how to view and upload it."""

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from src.loggers.call_queue import CallQueue
from src.loggers.wandb_media import evaluation_media
from src.utils.errors import UserError, suggest

_log = logging.getLogger(__name__)
_MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")
_CONNECT_TIMEOUT = 20.0  # seconds


class AsyncWandbLogger(WandbLogger):
    """Lightning's WandbLogger, which starts wandb and sends metrics in a background thread.

    wandb takes a second to import and to start, and longer if it waits for its server. Training does not wait for it:
    it starts at the first log point, or after ten seconds. Only a use of `experiment` waits, also for all earlier
    metrics. A training run stays one W&B run however often it is resumed.

    Args:
        run_id: id of the W&B run.
        folder: the run folder, for wandb's files.
        name: the displayed name of the run.
        log_model: whether to upload the final checkpoints as artifacts; "all" uploads each one when it is saved.
        every_rank: whether every rank adds its system metrics to the run, under the label `rankN`.
        options: other arguments of Lightning's WandbLogger and of `wandb.init`.

    Raises:
        UserError: if `log_model` or the environment variable WANDB_MODE has no valid value, `mode` or an API key is
            given, or `every_rank` is true although the run is offline.
    """

    def __init__(
        self,
        project: str,
        run_id: str,
        folder: str,
        name: str,
        log_model: bool | Literal["all"] = False,
        every_rank: bool = False,
        **options: Any,
    ) -> None:
        if log_model not in (False, True, "all"):
            raise UserError(f"logger.wandb.log_model={log_model}: give false, true or all")
        if "mode" in options:
            raise UserError("logger.wandb.mode has no effect: set logger.wandb.offline=true or WANDB_MODE")
        if "api_key" in (options.get("settings") or {}):  # config.yaml, checkpoints and W&B would have it
            raise UserError("logger.wandb.settings.api_key: leave it out; run `wandb login`, or set WANDB_API_KEY")
        mode = os.environ.get("WANDB_MODE")
        if mode and mode not in _MODES:
            raise UserError(f"WANDB_MODE={mode}: {suggest(mode, _MODES)}")
        if every_rank and (options.get("offline") or mode in ("offline", "dryrun", "disabled")):
            raise UserError("logger.wandb.every_rank=true needs a connection: leave it out, or let the run be online")
        super().__init__(name, folder, run_id, project=project, log_model=log_model, **options)
        del self._wandb_init["anonymous"]  # wandb warns of it
        self._every_rank = every_rank
        self._calls = CallQueue()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a spawned rank, which opens the W&B run by its id."""
        return vars(self) | {"_experiment": None}

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The W&B run, after all earlier calls have been executed."""
        return self._calls.run(self._start)

    def log_hyperparams(self, params: Any) -> None:
        """Log the configuration; with `every_rank`, the other ranks join the run."""
        if rank_zero_only.rank == 0:
            self._calls.put(self._configure, params, urgent=False)
        elif self._every_rank:
            self._calls.put(self._join, rank_zero_only.rank, urgent=False)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self._calls.put(super().log_metrics, metrics, step)

    @rank_zero_only
    def log_evaluation(self, stage: str, evaluation: dict[str, Any]) -> None:
        """Log what `src/callbacks/evaluation.py` records of a stage, val or test, as charts, a table and images."""
        self._calls.put(self._log_evaluation, stage, evaluation)

    def _log_evaluation(self, stage: str, evaluation: dict[str, Any]) -> None:
        super().log_metrics(evaluation_media(stage, evaluation), evaluation["step"])

    def finalize(self, status: str) -> None:
        """Wait for all earlier calls; rank zero then uploads the checkpoints."""
        try:
            # The error of a failed run should not wait long for its logger.
            self._calls.wait(timeout=None if status == "success" else 10.0)
        finally:  # a metric that failed must not cost the checkpoints' artifacts
            super().finalize(status)

    def _scan_and_log_checkpoints(self, checkpoint_callback: ModelCheckpoint) -> None:
        # Lightning gives all callbacks one name, so the alias "best" would move from best.ckpt to last.ckpt.
        self._checkpoint_name = f"model-{self.version}" + ("" if checkpoint_callback.monitor else "-last")
        super()._scan_and_log_checkpoints(checkpoint_callback)

    def _start(self) -> Any:
        """Return the W&B run. The first call starts it, offline if its server does not answer."""
        if self._experiment is not None:
            return self._experiment
        import wandb

        Path(str(self.save_dir)).mkdir(parents=True, exist_ok=True)
        settings = _settings(self._wandb_init.get("settings") or {})
        self._wandb_init["settings"] = settings
        try:
            self._wandb_init["mode"] = "offline" if self._offline else online_or_offline()
            if self._wandb_init["mode"] == "online":
                if self._every_rank:
                    self._wandb_init["mode"], settings.x_label = "shared", "rank0"
                run: Any = super().experiment
                _log.info("wandb: %s", run.url)
                return run
        except Exception as error:
            _log.warning("wandb cannot start online: %s", _reason(error))
            self._wandb_init["mode"] = "offline"
            with contextlib.suppress(SystemExit):
                wandb.teardown()  # its service still holds the run's id
        if self._wandb_init["mode"] == "offline":
            # A terminal breaks a long line inside a path, which then cannot be copied.
            _log.info("wandb is offline; to view or upload the run:")
            _log.info("wandb leet %s/wandb", self.save_dir)
            _log.info("wandb sync %s/wandb/offline-*", self.save_dir)
        if self._every_rank:
            _log.warning("logger.wandb.every_rank=true has no effect: the run is offline")
        return super().experiment

    def _configure(self, params: Any) -> None:
        super().log_hyperparams(params)
        run = self.experiment
        if fingerprint := params.get("experiment"):
            run.tags = tuple(dict.fromkeys([*(run.tags or ()), f"experiment {fingerprint}"]))
        _define_metrics(run)

    def _join(self, rank: int) -> None:
        """Add the system metrics of this rank to the run of rank zero, if that is online."""
        if self._experiment is not None or online_or_offline() != "online":
            return
        import wandb

        settings = _settings(self._wandb_init.get("settings") or {})
        settings.update_from_dict({"x_primary": False, "x_update_finish_state": False, "x_label": f"rank{rank}"})
        names = ("project", "entity", "dir", "id")
        arguments = {name: self._wandb_init.get(name) for name in names}
        self._experiment = wandb.init(mode="shared", settings=settings, **arguments)


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


def _settings(given: Any) -> Any:
    """Return the template's settings of wandb, updated by those that the user gave, a mapping or wandb.Settings."""
    import wandb

    # By default wandb writes its file every 15 seconds, so a run killed before that would have none.
    settings = wandb.Settings(silent=True, console="off", x_transaction_log_flush_interval=1.0)
    if "WANDB_INIT_TIMEOUT" not in os.environ:
        settings.init_timeout = _CONNECT_TIMEOUT
    if isinstance(given, wandb.Settings):
        settings.update_from_settings(given)
    else:
        settings.update_from_dict(dict(given))
    return settings


def online_or_offline() -> str:
    """Return `WANDB_MODE`, or whether credentials are configured; this neither prompts nor connects.

    Raises:
        wandb.Error: if the key is invalid.
    """
    import wandb

    # Only this variable keeps `login` from printing the account, for which it would wait for the server.
    os.environ.setdefault("WANDB_SILENT", "true")
    mode = os.environ.get("WANDB_MODE")
    if mode in (None, "", "online") and not wandb.login(prompt=False, verify=False):
        if mode:
            _log.warning("WANDB_MODE=online, but no API key is configured: run `wandb login`; this run goes offline")
        return "offline"
    return mode or "online"


def _reason(error: Exception) -> str:
    """Return the first line of wandb's error, or what a timeout of its service means."""
    reason = str(error).strip().split("\n")[0]
    is_timeout = "deadline exceeded" in reason or "timed out" in reason
    return f"no answer from the server ({reason})" if is_timeout else reason
