"""Resolve the composed configuration in one process: every rank then gets the same values, without interpolations."""

import os
import secrets
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from src.checkpoint.run_files import checkpoint_file
from src.run.devices import device_count, resolve_devices
from src.run.folder import CONFIG, folder_of, run_and_sweep_id, saved_config
from src.run.option_checks import (
    check_root_options,
    refuse_unknown_additions,
    refuse_unknown_keys,
    refuse_unused_groups,
)
from src.run.origin import describe_setup, source_revision, typed_command
from src.run.replaced_targets import drop_replaced_options
from src.run.resume import newest_checkpoint, remove_partial_checkpoints
from src.utils.errors import UserError

# A continued run does not inherit these options.
_NOT_INHERITED = ["ckpt_path", "resume", "fit", "predict", "run_dir"]


def resolve_config(cfg: DictConfig) -> DictConfig:
    """Set what each start decides (checkpoint, devices, run folder, run id), and resolve all interpolations.

    Raises:
        UserError: if a recipe sets an unknown option, a checkpoint or the images are missing, there are fewer devices
            than configured, or the run folder cannot be used.
    """
    hydra_cfg = HydraConfig.get()
    check_root_options(cfg)
    for message in drop_replaced_options(cfg, hydra_cfg.overrides.task):
        print(message, file=sys.stderr)
    refuse_unknown_keys(cfg, hydra_cfg)
    refuse_unused_groups(cfg, hydra_cfg.overrides.task)
    refuse_unknown_additions(cfg, hydra_cfg)
    folder = Path(hydra_cfg.runtime.output_dir)
    _check_writable(folder)
    _resolve_resume(cfg, folder)
    if cfg.ckpt_path:
        cfg.ckpt_path = str(_find_checkpoint("ckpt_path", cfg.ckpt_path))
    elif cfg.init_from:  # a continued run has its weights in `ckpt_path`
        cfg.init_from = str(_find_checkpoint("init_from", cfg.init_from))
    elif not cfg.fit and not cfg.doctor:
        print("warning: fit=false without ckpt_path or init_from: the weights are random", file=sys.stderr)
    if cfg.predict:
        cfg.predict = str(_find_images(cfg.predict))
    cfg.trainer.accelerator, cfg.trainer.devices = resolve_devices(cfg.trainer.accelerator, cfg.trainer.devices)
    cfg.run_dir = str(folder)
    runtime, is_sweep = cfg.runtime, hydra_cfg.mode == RunMode.MULTIRUN
    runtime.run_id, runtime.sweep_id = run_and_sweep_id(folder, is_sweep)
    runtime.overrides = _without(_NOT_INHERITED, hydra_cfg.overrides.task)
    if cfg.seed is None:
        cfg.seed = _saved_or_drawn_seed(cfg.ckpt_path, folder)
        runtime.overrides = [*_without(["seed"], runtime.overrides), f"seed={cfg.seed}"]
    cfg.tags = as_tags(cfg.tags)
    runtime.group = _wandb_group(cfg)
    runtime.job_type = "train" if cfg.fit else "predict" if cfg.predict else "eval"
    runtime.command = typed_command(runtime.overrides)
    runtime.revision, runtime.modified = source_revision()
    world_size = device_count(cfg.trainer) * cfg.trainer.num_nodes
    runtime.update(describe_setup(cfg, hydra_cfg.runtime.choices, world_size))
    OmegaConf.resolve(cfg)
    return cfg


def _without(names: list[str], overrides: Iterable[str]) -> list[str]:
    return [override for override in overrides if override.partition("=")[0] not in names]


def as_tags(tags: Any) -> list[str]:
    """Return the list of tags from one tag, a list or null."""
    return [str(tag) for tag in ([tags] if isinstance(tags, str | int) else tags or [])]


def _saved_or_drawn_seed(ckpt_path: str | None, folder: Path) -> int:
    """Return the seed of the run that is continued or evaluated, or a random one."""
    run = folder_of(Path(ckpt_path)) if ckpt_path else folder
    return saved_config(run).seed if run and (run / CONFIG).is_file() else secrets.randbits(31)


def _wandb_group(cfg: DictConfig) -> str:
    """Return the W&B group of a run: its sweep, or else the run alone; an evaluation joins the group of its run."""
    evaluated = folder_of(Path(cfg.ckpt_path)) if cfg.ckpt_path and not cfg.fit else None
    runtime = saved_config(evaluated).runtime if evaluated else cfg.runtime
    return str(runtime.sweep_id or runtime.run_id)


def _check_writable(folder: Path) -> None:
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"cannot write to the run folder {folder} ({error.strerror}): set run_dir to another") from None


def _resolve_resume(cfg: DictConfig, folder: Path) -> None:
    """Set `ckpt_path` to the newest checkpoint of the run folder if resume=auto.

    Raises:
        UserError: if `resume` is invalid or needs `run_dir`, or the folder contains a run that should not be resumed.
    """
    if cfg.resume not in (None, "auto"):
        raise UserError(f"resume={cfg.resume}: give auto, or null")
    if cfg.ckpt_path:
        return
    if cfg.resume:
        if not _has_fixed_folder(cfg):
            raise UserError("resume=auto needs run_dir=FOLDER, so that the next start finds its checkpoints")
        remove_partial_checkpoints(folder)
        newest = newest_checkpoint(folder)
        cfg.ckpt_path = str(newest) if newest else None
    elif cfg.run_dir and cfg.fit and (folder / CONFIG).exists():
        raise UserError(f"run_dir={cfg.run_dir} holds a run: add resume=auto to continue it, or give another folder")


def _has_fixed_folder(cfg: DictConfig) -> bool:
    """Return whether the same command uses the same run folder each time it starts."""
    hydra_cfg = HydraConfig.get()
    if cfg.run_dir or "SLURM_JOB_ID" in os.environ or hydra_cfg.mode == RunMode.MULTIRUN:
        return True
    return any(override.startswith("hydra.run.dir=") for override in hydra_cfg.overrides.hydra)


def _find_checkpoint(option: str, value: str) -> Path:
    """Return the checkpoint that `ckpt_path` or `init_from` names; in a run folder, the newest complete one.

    Raises:
        UserError: if there is none, or the file is not a checkpoint of this project.
    """
    path = Path(value).expanduser().absolute()
    if newest := newest_checkpoint(path):
        return newest
    checkpoint = checkpoint_file(path)
    if not checkpoint.is_file():
        missing = f"checkpoint in that folder ({checkpoint})" if path.is_dir() else "such file or run folder"
        raise UserError(f"{option}={value}: there is no {missing}")
    from src.checkpoint.integrity import read_run_checkpoint, read_weights  # late, because it imports Lightning

    if option == "init_from":
        read_weights(checkpoint, option, map_location="meta")
    else:
        read_run_checkpoint(checkpoint, option, map_location="meta", mmap=True)
    return checkpoint


def _find_images(predict: str) -> Path:
    """Return the folder that `predict` names. It is checked before training, which may take hours.

    Raises:
        UserError: if there is no such folder, or no image in it.
    """
    folder = Path(predict).expanduser().absolute()
    if not folder.is_dir():
        raise UserError(f"predict={predict}: there is no such folder")
    from src.utils.image_files import ImageFiles  # late, because most runs do not need it

    ImageFiles.in_folder(folder, image_shape=(3, 1, 1), option=f"predict={folder}")  # any shape will do for the check
    return folder
