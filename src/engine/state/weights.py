"""Load the network of another run, or initialize a module with its weights."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.utils._pytree import tree_leaves

from src.engine.state.io import read_run_checkpoint, read_weights
from src.engine.state.run_files import checkpoint_file
from src.engine.utils.errors import UserError
from src.engine.utils.targets import target_nodes
from src.engine.utils.tensors import with_versions

_log = logging.getLogger(__name__)


def load_network(path: str, option: str, trust: Sequence[str] = ()) -> tuple[nn.Module, DictConfig, list[str]]:
    """Return the network of a checkpoint, with its weights; the configuration of its run; the names of its classes.

    The names are empty if the checkpoint has none.

    Args:
        path: a checkpoint, or a run folder with its latest one.
        option: where the user gave the path, for error messages.
        trust: packages besides `src.models` whose functions and classes the checkpoint may call.
    """
    checkpoint = read_run_checkpoint(checkpoint_file(Path(path)), option)
    config: Any = OmegaConf.create(checkpoint.get("config", ""))
    if any("${" in str(value) for value in tree_leaves(OmegaConf.to_container(config))):
        raise UserError(f"refused: the configuration in {option}={path} has interpolations, which a run never saves")
    try:
        net = _build_trusted(config.module.net, ("src.models", *trust), f"{option}={path}")
        consume_prefix_in_state_dict_if_present(checkpoint["state_dict"], "net.")
        net.load_state_dict(checkpoint["state_dict"])
    except (HydraException, OmegaConfBaseException, ImportError, RuntimeError) as error:
        cause = str(error).splitlines()[0]
        raise UserError(f"{option}={path} is not a checkpoint of a classifier: {cause}") from error
    return net, config, checkpoint.get("OrderedData", {}).get("classes", [])


def _build_trusted(node: DictConfig, packages: Sequence[str], origin: str) -> Any:
    """Build the object that a checkpoint's configuration describes, only with code of the packages."""
    inner = target_nodes(OmegaConf.to_container(node))
    for target in [node._target_, *(str(part["_target_"]) for _, part in inner)]:
        if not _is_in(target, packages):
            package = target.partition(".")[0]
            raise UserError(
                f"refused: {origin} would run {target}, which is not in {' or '.join(packages)}. If that is your code, "
                f"load_run(RUN_DIR, trust=['{package}']) and scripts.export --trust {package} run it"
            )
    return instantiate(node, _convert_="all")


def _is_in(target: str, packages: Sequence[str]) -> bool:
    """Return whether the packages define a target, and do not only import it."""
    prefixes = tuple(f"{package}." for package in packages)
    if not target.startswith(prefixes):
        return False
    return f"{getattr(get_object(target), '__module__', '')}.".startswith(prefixes)


def load_initial_weights(module: nn.Module, path: str) -> None:
    """Load the weights of another run, or of a file with the `state_dict` of the network alone, into the module.

    If the last linear layer has another number of outputs, it keeps its initialization, and a log line reports it.
    """
    saved, own = read_weights(path, "init_from"), module.state_dict()
    if not saved.keys() & own.keys():
        saved = {f"net.{name}": tensor for name, tensor in saved.items()}
    linear_layers = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    head = linear_layers[-1] if linear_layers else None
    resized = [name for name in own if name in saved and saved[name].shape != own[name].shape]
    mismatched = sorted(saved.keys() ^ own.keys())
    for name in resized:
        if name.rpartition(".")[0] != head or saved[name].shape[1:] != own[name].shape[1:]:
            mismatched.append(name)
    if mismatched:
        raise UserError(
            f"init_from={path} contains another network than this run's `model`: they differ in {mismatched[0]}"
        )
    fitting = {name: saved[name] for name in own if name not in resized}
    module.load_state_dict(with_versions(fitting, saved), strict=False)
    if resized:
        there, here = len(saved[resized[0]]), len(own[resized[0]])
        _log.info("init_from: %s classes there, %s here: %s start afresh", there, here, " and ".join(resized))
