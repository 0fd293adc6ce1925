"""Resolve the composed configuration in one process: every rank then gets the same values, without interpolations."""

import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError

from onecurve.checkpoint.newest import checkpoint_file, newest_checkpoint
from onecurve.config.folder import CONF, PROJECT, RECIPES, REQUIRED_GROUPS, folder_of, saved_config, typed_overrides
from onecurve.errors import UserError, as_typed, nearest_options
from onecurve.identity.option_kinds import flatten_config
from onecurve.network.net import NET
from onecurve.process.devices import check_num_nodes, device_count, resolve_devices
from onecurve.records.files import CONFIG
from onecurve.targets import check_value, drop_replaced_options

_GIT_TIMEOUT = 5.0  # seconds
# A continued run does not inherit these options.
_NOT_INHERITED = ["ckpt_path", "resume", "fit", "predict", "run_dir"]
_KINDS = {"fit": bool, "doctor": bool, "report": bool, "seed": int}
_KINDS |= {"launch.max_restarts": int, "launch.elastic": bool, "launch.min_devices": int}


def resolve_config(cfg: DictConfig, plans: bool = True) -> DictConfig:
    """Turn the composed configuration into that of this start, in place, and return it.

    The steps, of which each needs those before: check folder and options; find the checkpoint; find the devices; choose
    the strategy of `strategy=best`, unless `plans` is false; draw the seed; name the run; resolve all interpolations.

    Raises:
        UserError: if an option is unknown, a checkpoint is missing, the run folder is not writable, or there are fewer
            devices than configured.
    """
    hydra_cfg = HydraConfig.get()
    folder, overrides, choices = Path(hydra_cfg.runtime.output_dir), typed_overrides(), hydra_cfg.runtime.choices
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"cannot write to the run folder {folder} ({error.strerror}): set run_dir to another") from None
    _check_types(cfg)
    check_num_nodes(cfg.trainer.get("num_nodes"))
    drop_replaced_options(cfg, overrides)
    _warn_of_unused_options(cfg, overrides)
    refuse_unknown_options(cfg, choices)
    _resolve_checkpoints(cfg, folder)
    _check_test_and_predict(cfg)
    cfg.trainer.accelerator, cfg.trainer.devices = resolve_devices(cfg.trainer.accelerator, cfg.trainer.devices)
    if plans and choices.get("strategy") == "best":
        from onecurve.extras.plan.plan import choose_strategy  # late: other runs need no plan, nor Lightning yet

        choose_strategy(cfg)
    _check_launch(cfg)
    cfg.run_dir = str(folder)
    earlier = folder_of(Path(cfg.ckpt_path)) if cfg.ckpt_path else folder  # of the run that goes on or is evaluated
    saved = saved_config(earlier) if earlier and (earlier / CONFIG).is_file() else None
    _set_seed_and_overrides(cfg, saved)
    _set_runtime(cfg)
    _set_names_in_wandb(cfg, saved)
    _resolve_interpolations(cfg)
    return cfg


def _check_types(cfg: DictConfig) -> None:
    """Check flags and numbers that no class declares, and that each group of an object names its class."""
    for name, kind in _KINDS.items():
        check_value(name, OmegaConf.select(cfg, name), kind)
    for group in REQUIRED_GROUPS:
        if not OmegaConf.select(cfg, f"{group}._target_"):
            raise UserError(f"{group} has no `_target_`: let its file in conf/{group} name a class or function")


def _warn_of_unused_options(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Warn of options of the optimizer, schedule or network on the command line that nothing reads.

    A module of the user's may make its own.
    """
    for group in ("optimizer", "scheduler", "model"):
        given = [word for word in overrides if re.match(rf"\+*{group}[.=]", word) and word != f"{group}=null"]
        others = OmegaConf.masked_copy(cfg, [str(name) for name in cfg if name != group])
        if given and f"${{{group}" not in OmegaConf.to_yaml(others):
            print(f"warning: {' '.join(given)}: no effect, {cfg.module._target_} takes no `{group}`", file=sys.stderr)


def refuse_unknown_options(cfg: DictConfig, choices: Any) -> None:
    """Check the names at the root and in `launch`; other options belong to a class, which refuses unknown ones.

    A name that a value interpolates, such as `${base_lr}`, is a variable of the user. `choices` has the chosen file of
    each group.
    """
    groups = {file.name for file in CONF.iterdir() if file.is_dir()} | {*choices}
    root = yaml.safe_load((CONF / "train.yaml").read_text())
    known = {*root, *groups.difference(RECIPES)}
    tree: Any = OmegaConf.to_container(cfg)
    missing = [
        *root.keys() - tree.keys(),
        *(f"launch.{name}" for name in root["launch"].keys() - tree.get("launch", ())),
    ]
    if missing := sorted(set(missing) - {"defaults", "hydra"}):
        raise UserError(f"{missing[0]} is left out, which each run needs: give it a value, without ~")
    del tree["runtime"]
    unknown_of_launch = [f"launch.{name}" for name in tree["launch"].keys() - root["launch"].keys()]
    for name in sorted([*tree.keys() - known, *unknown_of_launch]):
        if name in RECIPES:
            raise UserError(f"begin each file of conf/{name} with the line `# @package _global_`")
        if not re.search(rf"\$\{{[^}}]*\b{re.escape(name)}\b", str(tree)):
            others = (known | flatten_config(tree).keys()) - {name}
            raise UserError(f"{name} is no option here; {nearest_options(name, others)}")


def _check_test_and_predict(cfg: DictConfig) -> None:
    """Check both now, because training may take hours; make the path of a folder of images absolute."""
    if cfg.test not in (True, False, "best"):
        raise UserError(f"test={cfg.test}: give true, false or best")
    if cfg.predict in (None, False):
        return
    takes_folder = "predict_dir" in cfg.data
    if cfg.predict is True and takes_folder:
        raise UserError("predict=true takes the predict_dataloader of your own `data`: set predict=FOLDER for images")
    if cfg.predict is True:
        return
    if not takes_folder:
        raise UserError(
            f"predict={cfg.predict}: {cfg.data._target_} has no option predict_dir; set predict=true to predict the "
            "samples of its predict_dataloader"
        )
    folder = Path(cfg.predict).expanduser().absolute()
    if not folder.is_dir():
        raise UserError(f"predict={cfg.predict}: there is no such folder, or no image in it")
    cfg.predict = str(folder)


def _check_launch(cfg: DictConfig) -> None:
    """Check the options of restarts, and set those that depend on others; the devices are resolved."""
    launch, size = cfg.launch, device_count(cfg.trainer) * cfg.trainer.num_nodes
    if launch.max_restarts is None:
        launch.max_restarts = 3 if launch.elastic else 0
    if size < launch.min_devices:
        raise UserError(f"launch.min_devices={launch.min_devices}, but this run has {size}: lower it")
    for name in ("data.batch_size_per_device", "strategy.shares"):
        if launch.elastic and OmegaConf.select(cfg, name):
            raise UserError(f"launch.elastic=true changes the number of processes, for which {name} is made: unset one")
    if launch.elastic and cfg.strategy.get("stages", size) is None:
        cfg.strategy.stages = size  # a pipeline loses replicas


def _resolve_checkpoints(cfg: DictConfig, folder: Path) -> None:
    """Set `ckpt_path`, or else `init_from`, to a file; with resume=auto, to the newest checkpoint of the run folder."""
    if cfg.resume not in (None, "auto"):
        raise UserError(f"resume={cfg.resume}: give auto, or null")
    if cfg.resume and not cfg.ckpt_path:
        is_job = "SLURM_JOB_ID" in os.environ or HydraConfig.get().mode == RunMode.MULTIRUN  # they find their folder
        if not (cfg.run_dir or is_job):
            raise UserError("resume=auto needs run_dir=FOLDER, so that the next start finds its checkpoints")
        newest = newest_checkpoint(folder)
        if newest and (folder / CONFIG).is_file():
            _check_has_same_classes(cfg, folder)
        cfg.ckpt_path = str(newest) if newest else None
    elif not cfg.ckpt_path and cfg.run_dir and cfg.fit and (folder / CONFIG).exists():
        raise UserError(f"run_dir={cfg.run_dir} holds a run: add resume=auto to continue it, or give another folder")
    if cfg.ckpt_path:
        cfg.ckpt_path = str(_find_checkpoint("ckpt_path", cfg.ckpt_path))
    elif cfg.init_from:  # a continued run has its weights in `ckpt_path`
        cfg.init_from = str(_find_checkpoint("init_from", cfg.init_from))
    elif not cfg.fit and not cfg.doctor:
        print("warning: fit=false without ckpt_path or init_from: the weights are random", file=sys.stderr)


def _check_has_same_classes(cfg: DictConfig, folder: Path) -> None:
    """Raise a UserError, before data is prepared, if the run in the folder has other data or another network."""
    saved = saved_config(folder)
    for part in ("data", "data.source", "module", "model"):
        nodes = [OmegaConf.select(each, part) for each in (saved, cfg)]
        before, now = (str(node._target_).rpartition(".")[2] if OmegaConf.is_dict(node) else None for node in nodes)
        if before != now:  # a class may have moved to another file
            raise UserError(
                f"run_dir={folder} holds a run of {' '.join(saved.runtime.overrides) or 'the defaults'}: give these "
                f"options again, or ckpt_path={folder}, which restores them"
            )


def _find_checkpoint(option: str, value: str) -> Path:
    """Return the checkpoint that `ckpt_path` or `init_from` names; in a run folder, the newest complete one."""
    path = Path(value).expanduser().absolute()
    if newest := newest_checkpoint(path):
        return newest
    checkpoint = checkpoint_file(path)
    if not checkpoint.is_file():
        missing = f"checkpoint in that folder ({checkpoint})" if path.is_dir() else "such file or run folder"
        raise UserError(f"{option}={value}: there is no {missing}")
    from onecurve.checkpoint.io import read_run_checkpoint, read_weights  # late, because it imports Lightning

    if option == "init_from":
        read_weights(checkpoint, option, map_location="meta")
    else:
        read_run_checkpoint(checkpoint, option, map_location="meta", mmap=True)
    return checkpoint


def runs_in_single_process(cfg: DictConfig) -> bool:
    """Return whether the strategy runs in one process per node, which uses all its devices."""
    return bool(cfg.strategy.get("single_process", False))


def _set_seed_and_overrides(cfg: DictConfig, saved: DictConfig | None) -> None:
    """Draw the seed, or take that of the earlier run, if none is given; set the overrides that restore this run."""
    left_out = _NOT_INHERITED if cfg.seed is not None else [*_NOT_INHERITED, "seed"]
    overrides = [word for word in typed_overrides() if word.partition("=")[0] not in left_out]
    if cfg.seed is None:
        cfg.seed = saved.seed if saved else secrets.randbits(31)
        overrides.append(f"seed={cfg.seed}")
    cfg.runtime.overrides, cfg.runtime.changes = overrides, _changed_options(overrides)


def _set_runtime(cfg: DictConfig) -> None:
    """Set the ids of the run, its command and commit, and the names of its network and strategy."""
    runtime, hydra_cfg = cfg.runtime, HydraConfig.get()
    runtime.run_id, runtime.sweep_id = run_and_sweep_id(Path(cfg.run_dir), hydra_cfg.mode == RunMode.MULTIRUN)
    runtime.command = ["python", "train.py", *typed_overrides()]
    runtime.revision, runtime.modified = source_revision()
    runtime.world_size = device_count(cfg.trainer) * cfg.trainer.num_nodes
    choices = hydra_cfg.runtime.choices
    model = choices.get("model" if NET in cfg.module else "module")  # a GAN has networks of its own
    runtime.model = model or str(cfg.module._target_).rpartition(".")[2]
    is_auto = choices.strategy == "auto"
    runtime.strategy = ("ddp" if runtime.world_size > 1 else "single") if is_auto else choices.strategy


def _set_names_in_wandb(cfg: DictConfig, saved: DictConfig | None) -> None:
    """Set the group, the job type and the tags of the run in W&B."""
    runtime = cfg.runtime
    grouped = saved.runtime if saved and not cfg.fit else runtime  # an evaluation joins the group of its run
    runtime.group = str(grouped.sweep_id or grouped.run_id)
    runtime.job_type = "train" if cfg.fit else "predict" if cfg.predict else "eval"
    cfg.tags = [str(tag) for tag in ([cfg.tags] if isinstance(cfg.tags, str | int) else cfg.tags or [])]
    runtime.tags = list(dict.fromkeys([*cfg.tags, runtime.strategy, f"x{runtime.world_size}", runtime.model]))


def _resolve_interpolations(cfg: DictConfig) -> None:
    """Replace each `${NAME}` by its value; name the option that is taken from one which does not exist."""
    try:
        OmegaConf.resolve(cfg)
    except InterpolationKeyError as error:  # such as model.num_classes, if a data set of one's own has no classes
        missing = str(error).split("'")[1]
        values = flatten_config(cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=False)))
        option = next(name for name, value in values.items() if f"{{{missing}}}" in str(value))
        group = option.partition(".")[0]
        raise UserError(
            f"{option} is that of {missing}, which this configuration lacks: set {option}=..., or, if your `data` and "
            f"`module` need none, leave it out with ~{option if group in REQUIRED_GROUPS else group}"
        ) from error


def _changed_options(overrides: list[str]) -> list[str]:
    """Return what differs from the defaults as NAME=VALUE: the overrides, then what the files of recipes set."""
    words = [word.partition("=") for word in overrides]
    names = {name.lstrip("+~") for name, _, _ in words}
    recipes = [_recipe_options(CONF / name / f"{choice}.yaml") for name, _, choice in words if name in RECIPES]
    changes = {name: value for recipe in recipes for name, value in recipe.items() if name not in names}
    return [*overrides, *(f"{name}={value}" for name, value in changes.items())]


def _recipe_options(file: Path) -> dict[str, str]:
    """Return the choices and options that a file of `experiment`, `preset` or `debug` sets, with those of its base."""
    if not file.is_file():  # of another search path, or `_self_` among the bases
        return {}
    tree: dict[str, Any] = yaml.safe_load(file.read_text()) or {}
    options: dict[str, str] = {}
    for entry in tree.pop("defaults", []):
        if isinstance(entry, str):
            options |= _recipe_options(file.with_name(f"{entry}.yaml"))
        else:
            options |= {name.removeprefix("override /"): as_typed(choice) for name, choice in entry.items()}
    return options | {name: as_typed(value) for name, value in flatten_config(tree).items()}


def run_and_sweep_id(folder: Path, is_sweep: bool) -> tuple[str, str | None]:
    """Return the W&B run id and the sweep id.

    A continued run keeps its saved ids, and a W&B agent sets them in the environment. Otherwise the run id is the name
    of the run folder, in a sweep preceded by the name of the sweep folder, and a random number. Two folders may have
    the same name. The sweep id is the name of the sweep folder.
    """
    if (folder / CONFIG).is_file():
        saved = saved_config(folder).runtime
        return saved.run_id, saved.sweep_id
    if "WANDB_SWEEP_ID" in os.environ:  # wandb's agent started this process, and gave the run its id
        return os.environ["WANDB_RUN_ID"], os.environ["WANDB_SWEEP_ID"]
    sweep_id = folder.parent.name if is_sweep else None
    name = f"{sweep_id}-{folder.name}" if is_sweep else folder.name
    return f"{name}-{secrets.token_hex(3)}", sweep_id


def source_revision() -> tuple[str | None, bool]:
    """Return the commit of the source, None if there is none, and whether files differ from it; False outside of git.

    Git would refresh its index, whose lock could fail a command of the user.
    """
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch"]
    try:
        status = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=_GIT_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):
        return None, False
    head, *lines = status.stdout.splitlines()  # "# branch.oid COMMIT", then "# branch..." and changed files
    commit = head.rpartition(" ")[2]
    return None if commit == "(initial)" else commit, any(not line.startswith("#") for line in lines)
