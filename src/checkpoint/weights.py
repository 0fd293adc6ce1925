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
    """Return the network of a checkpoint, with its weights, and the configuration of its run.

    Raises:
        UserError: if there is no checkpoint, or this code cannot build its network; the message names `option`.
    """
    checkpoint = read_run_checkpoint(checkpoint_file(Path(path)), option)
    config: Any = OmegaConf.create(checkpoint.get("config", ""))
    try:
        net_config = config.module.net
        target = str(net_config._target_)
        # A checkpoint must not run other code. A path longer than src.models.FILE.NAME would reach the file's imports.
        is_model = re.fullmatch(r"src\.models\.\w+\.\w+", target)
        if not is_model or OmegaConf.to_yaml(net_config).count("_target_") > 1:
            raise UserError(f"refused: {option}={path} would run {target}, which is not a model of this project")
        net = instantiate(net_config, _convert_="all")
        net.load_state_dict({name.removeprefix("net."): tensor for name, tensor in checkpoint["state_dict"].items()})
    except (HydraException, OmegaConfBaseException, RuntimeError) as error:
        cause = str(error).splitlines()[0]
        raise UserError(f"{option}={path} is not a checkpoint of a classifier: {cause}") from error
    return net, config


def load_initial_weights(module: nn.Module, path: str) -> None:
    """Load the weights of another run, which may have another number of classes, into the module.

    If the last linear layer has another number of outputs, it keeps its initialization, and a log line reports it.

    Raises:
        UserError: if that run has another network.
    """
    saved, own = read_run_checkpoint(path, "init_from")["state_dict"], module.state_dict()
    linear_layers = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    head = linear_layers[-1] if linear_layers else None
    in_one_only = sorted(saved.keys() ^ own.keys())
    resized = [name for name in own if name in saved and saved[name].shape != own[name].shape]
    resized_before_head = [name for name in resized if name.rpartition(".")[0] != head]
    resized_inputs = [name for name in resized if saved[name].shape[1:] != own[name].shape[1:]]
    if mismatched := in_one_only or resized_before_head or resized_inputs:
        raise UserError(
            f"init_from={path} contains another network than this run's `model`: they differ in {mismatched[0]}"
        )
    module.load_state_dict({name: saved[name] for name in own if name not in resized}, strict=False)
    if resized:
        there, here = len(saved[resized[0]]), len(own[resized[0]])
        _log.info("init_from: %s classes there, %s here: %s start afresh", there, here, " and ".join(resized))
