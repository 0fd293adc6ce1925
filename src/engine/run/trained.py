"""A trained network with the configuration of its run, for use in a notebook or in another program."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from src.engine.state.run_files import CHECKPOINTS
from src.engine.state.weights import load_network
from src.engine.utils.errors import UserError

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
    net, config, classes = load_network(str(file), "run", trust)
    numbers = [str(number) for number in range(OmegaConf.select(config, "data.num_classes", default=0))]
    return Run(net.eval(), config, classes or numbers)
