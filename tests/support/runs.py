"""Training runs inside the test process or the ranks of the pool, with a record of each."""

import copy
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import hydra
import lightning as L
import torch
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.distributed.tensor import DTensor

from onecurve.config.folder import register_resolvers
from onecurve.config.resolve import runs_in_single_process
from onecurve.parallel.batch_norm import average_statistics
from onecurve.run.experiment import assemble
from onecurve.targets import drop_replaced_options
from tests.support.pool import Pool

CONF = Path(__file__).parents[2] / "conf"
NEED_GPUS = ("dp",)
STRATEGIES = sorted(file.stem for file in (CONF / "strategy").glob("*.yaml") if file.stem not in NEED_GPUS)
QUIET = ["logger=none", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false"]


def compose(folder: Path, *overrides: str, quiet: bool = True) -> DictConfig:
    """Return the resolved configuration of a run in `folder`, as the launcher passes it to the ranks."""
    cfg = copy.deepcopy(compose_words(*(QUIET if quiet else []), *overrides))
    cfg.run_dir, cfg.runtime.run_id = str(folder), folder.name
    if cfg.trainer.devices == "auto":
        cfg.trainer.devices = 1
    drop_replaced_options(cfg, overrides)
    OmegaConf.resolve(cfg)
    return cfg


@lru_cache(16)  # more objects would slow garbage collection down
def compose_words(*overrides: str) -> DictConfig:
    """Return what Hydra composes, which takes 80 ms, as long as many a short run: values are set afterwards."""
    values = [word for word in overrides if _is_value(word)]
    cfg = copy.deepcopy(_composed_groups(*(word for word in overrides if word not in values)))
    ConfigLoaderImpl._apply_overrides_to_config([_parsed(word) for word in values], cfg)
    return cfg


@lru_cache(32)
def _composed_groups(*overrides: str) -> DictConfig:
    register_resolvers()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("train", list(overrides))


@lru_cache(512)
def _parsed(override: str) -> Any:
    return OverridesParser.create().parse_override(override)


def _is_value(override: str) -> bool:
    """Return whether an override sets or deletes a value, which changes nothing about the files that Hydra reads."""
    key = override.lstrip("+~").partition("=")[0]
    return not (key.startswith("hydra") or "/" in key or "@" in key or (CONF / key).is_dir())


@dataclass
class Record(L.Callback):
    """Record of a run on one rank. It is also written to a file, the only way out of a spawned process."""

    file: Path
    losses: list[float] = field(default_factory=list)
    indices: list[list[int]] = field(default_factory=list)
    initial: dict[str, Tensor] = field(default_factory=dict)
    final: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return {part.name: getattr(self, part.name) for part in fields(self)}  # without attributes that Lightning adds

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.initial = _copy(pl_module.state_dict())

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.indices.append(trainer.datamodule.sample_index.tolist())
        logged = trainer.global_step % trainer.log_every_n_steps == 0
        if (
            logged
            and (batch_idx + 1) % trainer.accumulate_grad_batches == 0
            and "train/loss" in trainer.callback_metrics
        ):
            self.losses.append(float(trainer.callback_metrics["train/loss"]))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        average_statistics(pl_module)  # a strategy does so before it evaluates or saves
        self.final = _copy(pl_module.state_dict())
        self.optimizer = moments(trainer.strategy.optimizer_state(trainer.optimizers[0]))
        self.file.parent.mkdir(exist_ok=True)
        torch.save(self.__getstate__(), self.file.with_suffix(f".{trainer.global_rank}"))


def fit(cfg: DictConfig, *extra: L.Callback, test: bool = False) -> Record:
    """Fit as configured, and test if asked; return the record."""
    trainer, module, data = assemble(cfg)
    record = Record(Path(cfg.run_dir) / "record")
    trainer.callbacks[:0] = [record, *extra]
    trainer.fit(module, datamodule=data, ckpt_path=cfg.ckpt_path, weights_only=True)
    record.metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}
    if test:
        trainer.test(module, datamodule=data, verbose=False)
        record.metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}
    return record


def fit_and_test(cfg: DictConfig) -> Record:
    """Fit and test as configured; return the record."""
    return fit(cfg, test=True)


def fit_ranks(cfg: DictConfig, pool: Pool, test: bool = False) -> list[Record]:
    """Fit as configured on all ranks, and test if asked; return a record of each."""
    job = fit_and_test if test else fit
    if cfg.trainer.devices == 1:
        return [job(cfg)]
    if not runs_in_single_process(cfg):
        return pool.run(cfg.trainer.devices, job, cfg)
    metrics = job(cfg).metrics  # all that Lightning returns from spawned processes
    records = [Record(Path(cfg.run_dir) / "record") for _ in range(cfg.trainer.devices)]
    for rank, record in enumerate(records):
        kept = torch.load(record.file.with_suffix(f".{rank}"), weights_only=False)
        vars(record).update(kept | {"metrics": metrics})
    return records


def moments(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return an optimizer's tensors as `parameter/moment`; empty on ranks that did not get the state."""
    names = [name for group in state.get("param_groups", []) for name in group["param_names"]]
    return {
        f"{names[number]}/{key}": value.detach().clone()
        for number, tensors in state.get("state", {}).items()
        for key, value in to_full_tensors(tensors).items()
        if isinstance(value, Tensor)
    }


def _copy(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in to_full_tensors(state).items()}


def to_full_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Gather sharded tensors; all ranks must call this with the same names."""
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
