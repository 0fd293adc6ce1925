"""A trained network with the configuration of its run, for use in a notebook or in another program."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from hydra.errors import HydraException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from onecurve.checkpoint.io import read_run_checkpoint
from onecurve.errors import UserError
from onecurve.network.net import NET
from onecurve.patches.torch import tree_leaves
from onecurve.records.files import CHECKPOINTS
from onecurve.targets import target_nodes

_IMAGES_AT_ONCE = 256


class Predictor(nn.Module):
    """Maps (n, channels, height, width) uint8 images to (n, classes) probabilities.

    Args:
        net: maps normalized images to logits.
        mean, std: mean and standard deviation of each channel, of pixels in [0, 1].
    """

    def __init__(self, net: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.net = net
        self.mean, self.std = (nn.Buffer(torch.tensor(values)[:, None, None] * 255) for values in (mean, std))

    def forward(self, images: Tensor) -> Tensor:
        return self.net((images.to(self.mean.dtype) - self.mean) / self.std).softmax(1)


@dataclass(frozen=True)
class Run:
    """A trained network and the configuration of its run.

    Attributes:
        net: the network in evaluation mode; it maps normalized images to logits.
        config: the resolved configuration, as in config.yaml.
        classes: the names of the classes, in the order of the probabilities.
    """

    net: nn.Module
    config: DictConfig
    classes: list[str]

    @cached_property
    def predictor(self) -> Predictor:
        """The network with its normalization, from uint8 images to probabilities."""
        data = self.config.data
        if not {"mean", "std", "image_shape"} <= data.keys():
            raise UserError(f"{data._target_} has no mean, std and image_shape of images: use the run's `net`")
        return Predictor(self.net, data.mean, data.std).eval()

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Return the (n, classes) probabilities of (n, channels, height, width) uint8 images."""
        device = self.predictor.mean.device
        return torch.cat([self.predictor(part.to(device)) for part in images.split(_IMAGES_AT_ONCE)])


def load_run(run: str | Path, checkpoint: str = "last", trust: Sequence[str] = ()) -> Run:
    """Return the trained network of a run.

    Args:
        run: the run folder, or a checkpoint file of any run.
        checkpoint: name of the checkpoint in the run folder, such as `last` or `best`.
        trust: packages besides `src.models` that a network may come from, such as ["my"]. A checkpoint names the code
            that builds its network, so trust only checkpoints of your own.
    """
    path = Path(run).expanduser()
    file = path / CHECKPOINTS / f"{checkpoint}.ckpt" if path.is_dir() else path
    saved = read_run_checkpoint(file, "run")
    config: Any = OmegaConf.create(saved.get("config", ""))
    if any("${" in str(value) for value in tree_leaves(OmegaConf.to_container(config))):
        raise UserError(f"refused: the configuration in run={file} has interpolations, which a run never saves")
    if (module := OmegaConf.select(config, "module._target_")) and not OmegaConf.select(config, f"module.{NET}"):
        name = module.rpartition(".")[2]
        raise UserError(f"run={file}: {name} makes its own network: load it with {name}.load_from_checkpoint")
    try:
        net = _build_trusted(config.module[NET], ("src.models", *trust), f"run={file}")
        weights: dict[str, Tensor] = saved["state_dict"]
        of_network = [name for name in weights if name.startswith(f"{NET}.")]
        for name in weights.keys() - of_network if of_network else ():  # buffers of the module itself
            del weights[name]
        consume_prefix_in_state_dict_if_present(weights, f"{NET}.")
        net.load_state_dict(weights)
    except (HydraException, OmegaConfBaseException, ImportError, RuntimeError) as error:
        cause = " ".join(str(error).split())
        raise UserError(f"run={file} is not a checkpoint of a classifier: {cause}") from error
    numbers = [str(number) for number in range(OmegaConf.select(config, "data.num_classes", default=0))]
    return Run(net.eval(), config, saved.get("OrderedData", {}).get("classes") or numbers)


def _build_trusted(node: DictConfig, packages: Sequence[str], origin: str) -> Any:
    """Build the object that a checkpoint's configuration describes, only with code of the packages."""
    inner = target_nodes(OmegaConf.to_container(node))
    for target in [node._target_, *(str(part["_target_"]) for _, part in inner)]:
        prefixes = tuple(f"{package}." for package in packages)
        is_trusted = target.startswith(prefixes)
        if is_trusted:  # only then may its code be imported; the packages must define it, and not only import it
            is_trusted = f"{getattr(get_object(target), '__module__', '')}.".startswith(prefixes)
        if not is_trusted:
            package = target.partition(".")[0]
            raise UserError(
                f"refused: {origin} would run {target}, which is not in {' or '.join(packages)}. If that is your code, "
                f"load_run(RUN_DIR, trust=['{package}']) and scripts.export --trust {package} run it"
            )
    return instantiate(node, _convert_="all")
