"""The LightningModule of generative adversarial networks: two networks and two optimizers, manually optimized."""

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from onecurve import (
    Batch,
    Module,
    UserError,
    build_optimizer,
    check_fits,
    hash_ints,
    normal,
    override_hyperparameters,
)

_NOISE = 1  # separates these random numbers from those of augmentation
_EVALUATION_EPOCH = -1  # in place of the current epoch: constant noise makes samples comparable


class GAN(Module):
    """Trains a generator and a discriminator, with the non-saturating generator loss.

    Goodfellow et al., "Generative adversarial nets" (2014). Both networks step at the same time, on losses computed
    from the same weights. One backward pass gives every weight its gradient, as DistributedDataParallel expects. The
    noise of a generated image is a hash of the index of the real sample at the same position in the batch. It is
    therefore the same for any number of processes.

    Args:
        generator: maps (n, latent) noise to (n, channels, height, width) images, normalized like the data.
        discriminator: maps images to (n,) logits, greater for real images.
        optimizer: builds the optimizer of each network from parameter groups. The learning rate is not scaled with
            the batch size.
        latent: noise values per image.
    """

    def __init__(
        self, generator: nn.Module, discriminator: nn.Module, optimizer: partial[Optimizer], latent: int = 100
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = generator, discriminator
        self.optimizer, self.latent = optimizer, latent

    def forward(self, noise: Tensor) -> Tensor:
        """Map (n, latent) noise to (n, channels, height, width) images."""
        return self.generator(noise)

    def sample(self, count: int) -> Tensor:
        """Return `count` generated images, (count, channels, height, width), always from the same noise."""
        return self(self._noise(torch.arange(count, device=self.device), _EVALUATION_EPOCH))

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        generator_loss, discriminator_loss = self._losses(batch)
        # Lightning increments global_step for each wrapped optimizer; one wrapper makes it one step per batch.
        wrapped, _ = cast(list[Any], self.optimizers())
        _, unwrapped = cast(list[Any], self.optimizers(use_pl_optimizer=False))
        wrapped.zero_grad()
        unwrapped.zero_grad()
        loss = generator_loss + discriminator_loss
        self.manual_backward(loss)
        unwrapped.step()
        wrapped.step()
        if self.is_log_point:
            metrics = {"train/loss_generator": generator_loss, "train/loss_discriminator": discriminator_loss}
            self.log_step({"train/loss": loss, **metrics})

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Compute nothing, since a GAN has no score.

        `callbacks.samples` draws after validation, where the network is in evaluation mode and the batch statistics are
        those of all ranks.
        """

    def configure_optimizers(self) -> list[Optimizer]:
        if self.trainer.precision == "16-mixed":
            raise UserError("trainer.precision=16-mixed scales one loss, and a GAN has two: use bf16-mixed or 32-true")
        networks = {"generator.": self.generator, "discriminator.": self.discriminator}
        fused = self.allows_fused_optimizer
        return [build_optimizer(net, self.optimizer, 1.0, prefix, fused) for prefix, net in networks.items()]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another network; when training resumes, use the configured hyper-parameters."""
        check_fits(checkpoint["state_dict"], self.state_dict())
        if self.trainer.training:
            for saved, optimizer in zip(checkpoint["optimizer_states"], self.configure_optimizers(), strict=True):
                override_hyperparameters(saved, optimizer, lambda group: 1.0)

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the losses of the generator and the discriminator, each a weighted sum over the samples."""
        fake = self(self._noise(batch.sample_index, self.current_epoch))
        # The generator's loss must not give the discriminator gradients.
        frozen = {name: parameter.detach() for name, parameter in self.discriminator.named_parameters()}
        on_fake_frozen = functional_call(self.discriminator, frozen, fake)
        # The rounding depends on the memory format, which differs between images on the host and on the device.
        real = batch.image.contiguous()
        on_real, on_fake = self.discriminator(real), self.discriminator(fake.detach())
        generator_loss = (F.softplus(-on_fake_frozen) * batch.weight).sum()
        return generator_loss, ((F.softplus(-on_real) + F.softplus(on_fake)) * batch.weight).sum()

    def _noise(self, index: Tensor, epoch: int) -> Tensor:
        """Return (n, latent) standard normal noise, a hash of the seed, the epoch and the (n,) sample indices."""
        keys = hash_ints(self.trainer.datamodule.run_seed, epoch, _NOISE, index, device=self.device)
        return normal(keys, self.latent).to(cast(torch.dtype, self.dtype))
