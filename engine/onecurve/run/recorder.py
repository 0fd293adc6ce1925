"""Start the loggers, log the configuration and the start, print the banner, and let a resumed run replace rows."""

import logging
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf
from torch.nn.parameter import is_lazy

from onecurve.checkpoint.format import VERSION, VERSION_KEY
from onecurve.errors import UserError, as_typed
from onecurve.identity.fingerprint import Experiment, continue_experiment, describe_experiment
from onecurve.observe.csv import CSVLogger
from onecurve.observe.guard import start_loggers
from onecurve.observe.steps import trained_steps
from onecurve.patches.torch import AnyBatchNorm
from onecurve.process.gather import gather_objects
from onecurve.records.events import append_event
from onecurve.records.files import CONFIG, atomic_write
from onecurve.run.bit_exact import numerics

_log = logging.getLogger(__name__)
_COLUMNS, _CHANGES_LINES = 80, 3  # of the banner
_PATHS = ("run folder", "goes on from")


class RunRecorder(L.Callback):
    """Logs the resolved configuration, keeps it in every checkpoint as YAML, and prints the banner.

    Every checkpoint also keeps the metrics, and a resumed run has them until it measures its own. Its first row
    replaces those of the steps that it repeats.

    Args:
        config: the resolved configuration; None if the trainer sets it later.
        loggers: the configured loggers. Callbacks find W&B as `trainer.logger`, the first one. They start in
            `on_fit_start`, after the checks of the constructor, of `setup` and of the checkpoint's experiment; the
            Trainer itself would start them before.
    """

    def __init__(self, config: DictConfig | None, loggers: Iterable[Logger] = ()) -> None:
        self.config: Any = config
        self._loggers = list(loggers)
        self._begin()

    def _begin(self) -> None:
        """Forget the experiment of an earlier fit of the same trainer."""
        self._resumed_at = 0  # optimizer step
        self._restored_metrics: dict[str, float] = {}
        self._numerics: dict[str, Any] = {}  # of the checkpoint that the run continues
        self._num_parameters = 0
        self._experiment: Experiment | None = None  # None without training data
        self._config_text = ""  # of every checkpoint: to write it as YAML takes as long as a save of a small network
        self._config_before: str | None = None  # the text of config.yaml, if a fit continues a run

    @contextmanager
    def waiting_loggers_hidden(self, trainer: L.Trainer) -> Iterator[None]:
        """During a stage, hide from Lightning the loggers that have not started: `_start` adds them when they do.

        Lightning would start them in its setup, before the checks that may refuse the run. Outside of a stage a script
        finds all loggers in `trainer.loggers`, and may have removed one there.
        """
        self._loggers = [one for one in trainer.loggers if one in self._loggers]
        trainer.loggers = [one for one in trainer.loggers if one not in self._loggers]
        try:
            yield
        finally:
            trainer.loggers = [*self._loggers, *trainer.loggers]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._begin()
        if not self._num_parameters:  # a later setup may find the network sharded or split
            # Lazy layers get their weights in the module's own `setup`.
            self._num_parameters = sum(weight.numel() for weight in pl_module.parameters() if not is_lazy(weight))
        data: Any = trainer.datamodule
        if stage == "fit" and self.config.test and not is_overridden("test_dataloader", data.plain):
            raise UserError(  # now, because training may take hours
                f"test={as_typed(self.config.test)}: {type(data.plain).__name__} has no test_dataloader: add it, "
                "or set test=false"
            )
        if not self._experiment and data.has_training_data:
            self._experiment = describe_experiment(self.config, data)
            facts = gather_objects(self._experiment.options["training data"])
            if any(other != facts[0] for other in facts):
                raise UserError(
                    "the ranks have different training data: split or shuffle it after the trainer is built, which "
                    "seeds the generators, or with a generator of its own, as torch.Generator().manual_seed(0)"
                )
            if self.config.launch.elastic and "ranks x micro-batches" in self._experiment.options:
                raise UserError(
                    "launch.elastic=true changes the number of ranks, on which the curve of this run depends: set "
                    "trainer.sync_batchnorm=true, and no strategy=dp or strategy.comm_hook=post_local_sgd"
                )

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[VERSION_KEY] = VERSION
        checkpoint["config"] = self._config_text or OmegaConf.to_yaml(self.config)  # none if the fit did not begin
        checkpoint["experiment"] = asdict(self._experiment) if self._experiment else None
        checkpoint["numerics"] = numerics(pl_module)
        checkpoint["metrics"] = numbers_in(trainer.callback_metrics)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.training and self._experiment:
            self._experiment = continue_experiment(checkpoint, self._experiment, self.config)
            self._resumed_at, self._restored_metrics = checkpoint["position"]["steps"], checkpoint.get("metrics", {})
            self._numerics = checkpoint.get("numerics", {})

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, value in self._restored_metrics.items():
            trainer.callback_metrics[name] = torch.tensor(value, dtype=torch.float64)
        if trainer.is_global_zero:  # before the loggers, which print lines of their own
            _log.info(self._banner(trainer, pl_module))
        file = Path(self.config.run_dir) / CONFIG
        self._config_before = file.read_text() if file.is_file() and trainer.is_global_zero else None
        self._start(trainer, pl_module)
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                logger.cut(self._resumed_at)
        if self.config.bit_exact:
            now = numerics(pl_module)
            changes = [f"{key}={now[key]} (before {old})" for key, old in self._numerics.items() if now.get(key) != old]
            if changes:
                _log.warning("the run goes on with other bits than without the interruption: %s", ", ".join(changes))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._resumed_at and trained_steps(trainer) == self._resumed_at and not trainer.should_stop:
            _log.info(
                "the run had all its %d steps already: raise trainer.max_epochs or max_steps to go on", self._resumed_at
            )

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Put the configuration of a run back whose continuation is refused before its first step."""
        is_refused = isinstance(exception, UserError) and trained_steps(trainer) <= self._resumed_at
        if is_refused and self._config_before is not None and trainer.is_global_zero:
            with atomic_write(Path(self.config.run_dir) / CONFIG) as temporary:
                temporary.write_text(self._config_before)

    def _start_evaluation(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != "fit":  # the validation of a fit is a part of it
            self._start(trainer, pl_module)

    on_validation_start = on_test_start = on_predict_start = _start_evaluation

    def _start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Start the loggers in this process, log the configuration, and record the start of the run."""
        data, stage = cast(Any, trainer.datamodule), trainer.state.fn
        trainer.loggers = [*start_loggers(self._loggers), *trainer.loggers]
        self._loggers = []
        self._config_text = OmegaConf.to_yaml(self.config)
        settings = cast(dict[str, Any], OmegaConf.to_container(self.config))
        settings |= {"data_source": data.description, "global_batch_size": data.global_batch_size}
        settings |= {VERSION_KEY: VERSION, "experiment": self._fingerprint, "numerics": numerics(module)}
        for logger in trainer.loggers:
            # An evaluation by a script leaves the configuration of the run in whose folder it is.
            if stage == "fit" or not isinstance(logger, CSVLogger) or not logger.has_config:
                logger.log_hyperparams(settings)
        # A script may evaluate in the folder of a run that another process trains, whose events these are.
        is_of_run = self.config.fit or "run_id" in self.config.runtime
        follows = stage != "fit" and (self.config.fit or (stage == "predict" and self.config.test))
        if is_of_run and not follows and trainer.is_global_zero:
            self._record_start(trainer, module, settings)

    def _record_start(self, trainer: L.Trainer, module: L.LightningModule, settings: dict[str, Any]) -> None:
        config, runtime = self.config, settings["runtime"]
        overrides = [word.partition("=") for word in runtime["overrides"]]
        append_event(
            config.run_dir,
            "resume" if config.fit and config.ckpt_path else "start",
            self._resumed_at if config.fit else None,
            **{name: runtime[name] for name in ("command", "revision", "modified")},
            changes={name.lstrip("+~"): value or None for name, _, value in overrides},
            strategy=_strategy_name(config),
            world_size=trainer.world_size,
            hosts=trainer.num_nodes,
            experiment=self._fingerprint,
            onecurve=VERSION,
            numerics=settings["numerics"],
            normalizes=any(isinstance(part, AnyBatchNorm) for part in module.modules()),
            device=torch.cuda.get_device_name(module.device) if module.device.type == "cuda" else module.device.type,
        )

    def _banner(self, trainer: L.Trainer, module: L.LightningModule) -> str:
        """Return the lines of the banner: what the run computes, on which hardware, and where its folder is."""
        config, data = self.config, cast(Any, trainer.datamodule)
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        group = groups[0] if groups else {"lr": 0.0}  # `configure_optimizers` may return None
        scaling = " after scaling" if getattr(module, "lr_scaling", "none") != "none" else ""
        steps = "steps to the end of a stream" if data.last_step is None else f"{data.last_step} steps"
        processes = f"{trainer.world_size} process{'es' * (trainer.world_size > 1)} on {module.device.type}"
        layout = f" ({data.parallel.dp_size} data-parallel)" * (data.parallel.dp_size != trainer.world_size)
        network = config.runtime.get("model") or type(module).__name__
        facts = {
            "changes": " ".join(config.runtime.changes),
            "experiment": str(self._fingerprint),
            "virtual ranks": f"{data.virtual_ranks}, computed {'one by one' if data.bit_exact else 'together'}",
            "strategy": f"{_strategy_name(config)}, {processes}{layout}, {trainer.precision}",
            "batch": _batch_size(data),
            "data": data.description,
            "learning rate": f"{group.get('initial_lr', group['lr']):g}{scaling}, {steps}{_left_out(data)}",
            "network": f"{network}, {self._num_parameters:,} parameters",
            "run folder": config.run_dir,
        }
        if config.ckpt_path:
            facts["goes on from"] = f"{config.ckpt_path}, step {self._resumed_at}"
        return _in_columns(facts)

    @property
    def _fingerprint(self) -> str | None:
        return self._experiment.fingerprint if self._experiment else None


def _in_columns(facts: dict[str, str]) -> str:
    """Return a line for each fact, of 80 columns; the changes take up to three, and a path is not broken."""
    width, rows = max(map(len, facts)), []
    for name, value in facts.items():
        count = _CHANGES_LINES if name == "changes" else 1
        options: dict[str, Any] = {"max_lines": count, "placeholder": " ...", "break_on_hyphens": False}
        lines = [value] if name in _PATHS else textwrap.wrap(value, _COLUMNS - width - 4, **options)
        rows += [f"  {label:<{width}}  {line}" for label, line in zip([name, "", ""], lines, strict=False)]
    return "\n".join(rows)


def _strategy_name(config: Any) -> str:
    """Return the name of the configured strategy, or that of its class."""
    return config.runtime.strategy or str(config.strategy._target_).rpartition(".")[2]


def _batch_size(data: Any) -> str:
    batch, dp_size = data.global_batch_size, data.parallel.dp_size
    if data.bit_exact:
        ranks = f"{dp_size} data-parallel rank{'s' * (dp_size > 1)}"
        return f"{batch} = {data.virtual_ranks} x {batch // data.virtual_ranks} per virtual rank, on {ranks}"
    micro_batches = data.layout.micro_batches
    mean_size = batch / micro_batches / dp_size  # uneven shares are larger and smaller
    return f"{batch} = {dp_size} x {micro_batches} micro-batches x {round(mean_size, 2):g} per device"


def numbers_in(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are a number, and no confusion matrix."""
    return {name: float(value) for name, value in metrics.items() if torch.as_tensor(value).numel() == 1}


def _left_out(data: Any) -> str:
    """Return how many samples of an epoch are not trained, because they are no whole batch."""
    _, count, _ = data.training_samples[0]
    rest = count % data.global_batch_size if count and data.has_one_size else 0
    return f"; each epoch leaves out {rest} samples" if rest else ""
