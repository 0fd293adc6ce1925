"""Load the network of another run, or initialize a module with its weights."""

import logging
import re
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from src.checkpoint.integrity import read_run_checkpoint
from src.checkpoint.run_files import checkpoint_file
from src.utils.errors import UserError

_log = logging.getLogger(__name__)


def load_network(path: str, option: str) -> tuple[nn.Module, DictConfig]:
    """The network that a checkpoint holds, with its weights, and the configuration of its run.

    Raises:
        UserError: if it holds none, or one that this code cannot build; `option` is named.
    """
    checkpoint = read_run_checkpoint(checkpoint_file(Path(path)), option)
    config: Any = OmegaConf.create(checkpoint.get("config", ""))
    try:
        described = config.module.net
        target = str(described._target_)  # exactly src.models.FILE.NAME: a longer path leads to what the file imports
        if not re.fullmatch(r"src\.models\.\w+\.\w+", target) or OmegaConf.to_yaml(described).count("_target_") > 1:
            raise UserError(f"refused: {option}={path} would run {target}, which is no model of this project")
        net = instantiate(described, _convert_="all")
        net.load_state_dict({name.removeprefix("net."): tensor for name, tensor in checkpoint["state_dict"].items()})
    except (HydraException, OmegaConfBaseException, RuntimeError) as error:
        raise UserError(f"{option}={path} is no checkpoint of a classifier: {str(error).splitlines()[0]}") from error
    return net, config


def load_initial_weights(module: nn.Module, path: str) -> None:
    """Give the module the weights of another run, which may have had another number of classes.

    The last linear layer may differ in its number of outputs: then it stays as initialized, and that is said.

    Raises:
        UserError: if that run had another network.
    """
    saved, own = read_run_checkpoint(path, "init_from")["state_dict"], module.state_dict()
    head = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)][-1:]
    fresh = [name for name in own if name in saved and saved[name].shape != own[name].shape]
    inputs = [name for name in fresh if saved[name].shape[1:] != own[name].shape[1:]]
    inner = [name for name in fresh if name.rpartition(".")[0] not in head]
    if mismatched := sorted(saved.keys() ^ own.keys()) or inner or inputs:
        raise UserError(
            f"init_from={path} holds another network than this run's `model`: they differ in {mismatched[0]}"
        )
    module.load_state_dict({name: saved[name] for name in own if name not in fresh}, strict=False)
    if fresh:
        there, here = len(saved[fresh[0]]), len(own[fresh[0]])
        _log.info("init_from: %s classes there, %s here: %s start afresh", there, here, " and ".join(fresh))
