"""From the composed configuration to the one that every rank gets: checked, resolved, plain."""

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf

from src.checkpoint.run_files import checkpoint_file
from src.run.folder import CONFIG, folder_of, run_and_sweep_id, saved_config
from src.run.resume import newest_checkpoint, remove_partial_checkpoints
from src.run.unused import refuse_unused_groups
from src.utils.errors import UserError
from src.utils.flatten import flatten_config

_log = logging.getLogger(__name__)
# A continued run does not inherit these options.
_NOT_INHERITED = ["ckpt_path", "resume", "fit", "predict", "run_dir"]
# The resolved configuration of every run differs from the files under conf/ in these nodes.
_NOT_COMPARED = [*_NOT_INHERITED, "init_from", "runtime", "trainer.devices", "trainer.accelerator"]


def prepare(cfg: DictConfig) -> DictConfig:
    """Settle what one start decides: the checkpoint, the devices, the folder and the id.

    Raises:
        UserError: if a checkpoint or the images are missing, or there are fewer devices than asked for.
    """
    hydra_cfg = HydraConfig.get()
    refuse_unused_groups(cfg, hydra_cfg.overrides.task)
    folder = Path(hydra_cfg.runtime.output_dir)
    _settle_start(cfg, folder)
    if cfg.ckpt_path:
        cfg.ckpt_path = str(_checkpoint("ckpt_path", cfg.ckpt_path))
        _warn_of_changes(cfg.ckpt_path)
    elif cfg.init_from:  # a run that goes on has its weights already
        cfg.init_from = str(_checkpoint("init_from", cfg.init_from))
    if cfg.predict:
        cfg.predict = str(_image_folder(cfg.predict))
    cfg.trainer.accelerator, cfg.trainer.devices = _resolve_devices(cfg.trainer.accelerator, cfg.trainer.devices)
    cfg.run_dir = str(folder)
    runtime = cfg.runtime
    runtime.run_id, runtime.sweep_id = run_and_sweep_id(folder, sweep=hydra_cfg.mode == RunMode.MULTIRUN)
    overrides = hydra_cfg.overrides.task
    runtime.overrides = [override for override in overrides if override.partition("=")[0] not in _NOT_INHERITED]
    OmegaConf.resolve(cfg)
    return cfg


def device_count(trainer: DictConfig) -> int:
    """Devices per node of a trainer configuration, once resolved."""
    return trainer.devices if isinstance(trainer.devices, int) else len(trainer.devices)


def runs_in_single_process(cfg: DictConfig) -> bool:
    """Whether the strategy wants one process per node, and drives all its devices from there."""
    return bool(cfg.strategy.get("single_process", False))


def _settle_start(cfg: DictConfig, folder: Path) -> None:
    """Check that the run folder can be written to; find the checkpoint from which `resume=auto` goes on.

    Raises:
        UserError: if not, or if it is not clear whether the run in that folder is meant.
    """
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"cannot write to the run folder {folder} ({error.strerror}): set run_dir to another") from None
    if cfg.resume not in (None, "auto"):
        raise UserError(f"resume={cfg.resume}: give auto, or null")
    if cfg.resume and not cfg.ckpt_path:
        hydra_cfg = HydraConfig.get()
        has_fixed_folder = cfg.run_dir or "SLURM_JOB_ID" in os.environ or hydra_cfg.mode == RunMode.MULTIRUN
        if not has_fixed_folder and not any(word.startswith("hydra.run.dir=") for word in hydra_cfg.overrides.hydra):
            raise UserError("resume=auto needs run_dir=FOLDER, so that the next start finds what this one has saved")
        remove_partial_checkpoints(folder)
        newest = newest_checkpoint(folder)
        cfg.ckpt_path = str(newest) if newest else None
    elif cfg.run_dir and cfg.fit and not cfg.ckpt_path and (folder / CONFIG).exists():
        raise UserError(f"run_dir={cfg.run_dir} holds a run: add resume=auto to go on with it, or give another folder")


def _checkpoint(option: str, value: str) -> Path:
    """The file that `ckpt_path` or `init_from` means: of a run folder, the newest that is whole."""
    if newest := newest_checkpoint(Path(value).expanduser().absolute()):
        return newest
    checkpoint = checkpoint_file(Path(value))
    if not checkpoint.is_file():
        missing = f"checkpoint in that folder ({checkpoint})" if Path(value).is_dir() else "such file or run folder"
        raise UserError(f"{option}={value}: there is no {missing}")
    from src.checkpoint.integrity import check_is_checkpoint  # late, since it imports Lightning

    check_is_checkpoint(option, checkpoint)
    return checkpoint


def _image_folder(predict: str) -> Path:
    """The folder that `predict` means, looked for now rather than after hours of training."""
    folder = Path(predict).expanduser().absolute()
    if not folder.is_dir():
        raise UserError(f"predict={predict}: there is no such folder")
    from src.data.image_folder import ImageFolder  # late, since it need not be imported otherwise

    ImageFolder(folder, (3, 1, 1))
    return folder


def _warn_of_changes(ckpt_path: str) -> None:
    """Say where the files under conf/ have changed since the run was made."""
    folder = folder_of(Path(ckpt_path))
    if folder is None:
        return
    saved = saved_config(folder)
    composed = hydra.compose("train", list(saved.runtime.overrides))
    for name in _NOT_COMPARED:
        OmegaConf.update(composed, name, OmegaConf.select(saved, name))
    OmegaConf.resolve(composed)
    before, now = flatten_config(OmegaConf.to_container(saved)), flatten_config(OmegaConf.to_container(composed))
    for name in sorted((before.keys() | now.keys()) - {"data_source"}):
        if before.get(name) != now.get(name):
            _log.warning("conf/ has changed since that run: %s was %s, is %s", name, before.get(name), now.get(name))


def _resolve_devices(accelerator: str, devices: Any) -> tuple[str, Any]:
    """The accelerator by name and the devices by number, or by index where they were listed."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator == "auto":
        accelerator = found.type if found else "cpu"
    elif accelerator != "cpu" and found is None:
        raise UserError(f"trainer.accelerator={accelerator}, but this machine has none: leave it at auto, or set cpu")
    available = torch.accelerator.device_count() if accelerator != "cpu" else None
    if devices in ("auto", -1):
        return accelerator, int(os.environ.get("LOCAL_WORLD_SIZE", available or 1))  # torchrun has decided already
    listed = list(devices) if isinstance(devices, ListConfig) else []
    wanted = devices if isinstance(devices, int) else len(listed)
    if wanted < 1:
        raise UserError(f"trainer.devices={devices} is no number of devices: give a number, a list of GPUs, or auto")
    if available is not None and max(wanted, *(index + 1 for index in listed), 0) > available:
        raise UserError(
            f"trainer.devices={devices}, but this machine has {available} GPU{'s' * (available > 1)}: "
            f"set trainer.devices={available}, or trainer.accelerator=cpu to run processes on the CPU"
        )
    return accelerator, wanted if accelerator == "cpu" else listed or wanted
