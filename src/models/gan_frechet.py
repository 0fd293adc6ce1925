"""The Frechet distance between real and generated images, by the features of a classifier."""

import logging
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance

from src.engine import Batch, UserError, load_network

_log = logging.getLogger(__name__)


class FrechetDistance(L.Callback):
    """Logs the Frechet distance between real and generated images as `val/frechet` and `test/frechet`.

    Heusel et al., "GANs trained by a two time-scale update rule" (2017). It compares as many generated images as real
    ones; a smaller distance is better. It is no FID, because the features are not those of Inception: they are the
    inputs of the last linear layer of a classifier of this template. Only distances by the same features are
    comparable.

    Args:
        random_net: builds a classifier. Its random weights are always the same; their distance is less informative than
            that of trained ones (Naeem et al., "Reliable fidelity and diversity metrics for generative models", 2020).
        feature_checkpoint: run folder or checkpoint of a classifier, to be used instead.
    """

    def __init__(self, random_net: Callable[[], nn.Module], feature_checkpoint: str | None = None) -> None:
        self.random_net, self.feature_checkpoint = random_net, feature_checkpoint
        self._distance: FrechetInceptionDistance | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Build the metric in this process, because a spawned process would share its parent's tensors."""
        if not hasattr(pl_module, "sample"):
            raise UserError("callbacks.frechet is for modules that generate images: omit it, or use experiment=gan")
        self._distance = FrechetInceptionDistance(feature=self._features())

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        random_net = "a network with random weights (callbacks.frechet.feature_checkpoint=RUN_DIR takes a trained one)"
        _log.info("  frechet is by the features of %s", self.feature_checkpoint or random_net)

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self._update(trainer, outputs, batch)

    def on_test_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self._update(trainer, outputs, batch)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._log_distance(pl_module, "val/frechet")

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._log_distance(pl_module, "test/frechet")

    def _features(self) -> "_Features":
        if self.feature_checkpoint:
            net, config, _ = load_network(self.feature_checkpoint, "callbacks.frechet.feature_checkpoint")
            return _Features(net, list(config.data.mean), list(config.data.std))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return _Features(self.random_net(), mean=[0.5] * 3, std=[0.25] * 3)

    def _update(self, trainer: L.Trainer, fake: Tensor, batch: Batch | tuple[Tensor, Tensor]) -> None:
        """Add the real and the generated images of a batch, without its padding.

        A rank must update the metric even if its batch is all padding: a metric without any update has no `orig_dtype`,
        which its `compute` needs on every rank.
        """
        assert self._distance is not None
        distance, to_pixels = self._distance.to(fake.device), trainer.datamodule.to_pixels
        real = batch[0]
        if isinstance(batch, Batch):  # a pair has no padding
            real, fake = real[batch.weight > 0], fake[batch.weight > 0]
        distance.update(to_pixels(real.float()), real=True)
        distance.update(to_pixels(fake.float()), real=False)

    def _log_distance(self, module: L.LightningModule, name: str) -> None:
        """Log the distance over the images of all ranks."""
        assert self._distance is not None
        module.log(name, self._distance.compute().float(), prog_bar=True)
        self._distance.reset()


class _Features(nn.Module):
    """Maps (n, channels, height, width) images in [0, 1] to the inputs of the last linear layer of a network."""

    def __init__(self, net: nn.Module, mean: list[float], std: list[float]) -> None:
        super().__init__()
        linear_layers = [(name, part) for name, part in net.named_modules() if isinstance(part, nn.Linear)]
        last_name, last = linear_layers[-1]
        net.set_submodule(last_name, nn.Identity())
        self.net, self.num_features = net.eval().requires_grad_(False), last.in_features
        self.mean, self.std = (nn.Buffer(torch.tensor(values)[:, None, None]) for values in (mean, std))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.net((pixels - self.mean) / self.std)
