"""An example of a project of one's own: a text classifier in plain PyTorch, and its plain LightningModule."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Encoder(nn.Module):
    """Embeds token ids, (n, length), and their positions, as (n, length, width)."""

    def __init__(self, tokens: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, width), nn.Parameter(0.1 * torch.randn(length, width))

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions


class Head(nn.Module):
    """Maps the mean over the positions to the logit of a balanced line, (n,)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x.mean(1))).squeeze(1)


class BracketClassifier(L.LightningModule):
    """Tells balanced lines from others.

    Nothing in it knows of ranks. `net` and `loss` are what `strategy=pipeline` needs, the others need neither.
    """

    def __init__(
        self, length: int = 16, width: int = 32, depth: int = 2, dropout: float = 0.1, lr: float = 3e-3
    ) -> None:
        super().__init__()
        self.lr = lr
        options: Any = {"dropout": dropout, "activation": "gelu", "batch_first": True, "norm_first": True}
        layers = [nn.TransformerEncoderLayer(width, 4, 2 * width, **options) for _ in range(depth)]
        self.net = nn.Sequential(Encoder(4, length, width), *layers, Head(width))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, batch[1].to(outputs.dtype))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.net(batch[0]), batch)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.lr, int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _evaluate(self, batch: Any, stage: str) -> None:
        outputs = self.net(batch[0])
        accuracy = ((outputs > 0) == batch[1]).float().mean()
        metrics = {f"{stage}/loss": self.loss(outputs, batch), f"{stage}/acc": accuracy}
        self.log_dict(metrics, batch_size=len(outputs), sync_dist=True, prog_bar=True)
