"""The checks of a composed configuration that need no device and no checkpoint: each error names its option."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from onecurve.config.folder import CONF, RECIPES
from onecurve.errors import UserError, nearest_options
from onecurve.identity.option_kinds import flatten_config
from onecurve.process.devices import device_count
from onecurve.targets import check_value

BEST = "best"  # the choice of `strategy` that a plan replaces
_KINDS = {"fit": bool, "doctor": bool, "report": bool, "seed": int}
_KINDS |= {"launch.max_restarts": int, "launch.elastic": bool, "launch.min_devices": int}


def check_types(cfg: DictConfig) -> None:
    """Check flags and numbers that no class declares, and that each group of an object names its class."""
    for name, kind in _KINDS.items():
        check_value(name, OmegaConf.select(cfg, name), kind)
    for group in ("data", "module", "strategy", "trainer"):
        if not OmegaConf.select(cfg, f"{group}._target_"):
            raise UserError(f"{group} has no `_target_`: let its file in conf/{group} name a class or function")


def warn_of_unused_options(cfg: DictConfig, overrides: Sequence[str]) -> None:
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
    del tree["runtime"]
    unknown_of_launch = [f"launch.{name}" for name in tree["launch"].keys() - root["launch"].keys()]
    for name in sorted([*tree.keys() - known, *unknown_of_launch]):
        if name in RECIPES:
            raise UserError(f"begin each file of conf/{name} with the line `# @package _global_`")
        if not re.search(rf"\$\{{[^}}]*\b{re.escape(name)}\b", str(tree)):
            others = (known | flatten_config(tree).keys()) - {name}
            raise UserError(f"{name} is no option here; {nearest_options(name, others)}")


def check_test_and_predict(cfg: DictConfig) -> None:
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


def check_launch(cfg: DictConfig) -> None:
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
