"""LightningModules written for plain Lightning, as users bring them."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MetricTracker, PearsonCorrCoef
from torchmetrics.classification import MulticlassAccuracy


class Plain(L.LightningModule):
    """A network in the module's own attributes, its own optimizer and schedule, and `self.log`."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.layers = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.dropout, self.head = nn.Dropout(0.3), nn.Linear(width, 10)
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        for layer in self.layers:
            x = F.relu(x + layer(x))
        return self.head(self.dropout(x.mean((2, 3))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("val/acc", self.accuracy, on_epoch=True)
        self.log("val/loss", F.cross_entropy(logits, y), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        metrics = {"loss": F.cross_entropy(logits, y), "acc": (logits.argmax(1) == y).to(logits.dtype).mean()}
        self.log_dict({f"test/{name}": value for name, value in metrics.items()}, batch_size=len(x), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).softmax(1)

    def configure_optimizers(self) -> Any:
        groups: list[dict[str, Any]] = [
            {"params": self.head.parameters(), "lr": 0.02},
            {"params": [*self.layers.parameters()]},
        ]
        groups.append({"params": self.encoder.parameters()})
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}


class TemplateStyle(L.LightningModule):
    """A module in the style of lightning-hydra-template: partials as hyper-parameters, metrics as attributes."""

    def __init__(self, net: nn.Module, optimizer: Any, scheduler: Any, compile: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net, self.criterion = net, nn.CrossEntropyLoss()
        self.train_loss, self.val_acc = MeanMetric(), MulticlassAccuracy(10)
        self.val_acc_best = MaxMetric()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def on_train_start(self) -> None:
        self.val_acc_best.reset()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.criterion(self(x), y)
        self.train_loss(loss)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.val_acc(self(x), y)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = self.hparams["optimizer"](params=self.trainer.model.parameters())
        scheduler = self.hparams["scheduler"](optimizer=optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/acc"}}


class Accumulates(Plain):
    """Values over an epoch and over the run, in each way in which torchmetrics and Lightning accumulate them."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_label, self.labels, self.correlation = MeanMetric(), CatMetric(), PearsonCorrCoef()
        self.best, self.own_mean = MaxMetric(), MeanMetric()

    def on_train_start(self) -> None:
        self.best.reset()  # lightning-hydra-template does so after the sanity check

    def on_train_epoch_start(self) -> None:
        self.own_mean.reset()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        label = batch[1].double()
        self.mean_label.update(label)
        self.own_mean.update(label)
        self.labels.update(label)
        self.correlation.update(label, label.sqrt())
        self.log("train/mean_label", self.mean_label, on_step=False, on_epoch=True)
        self.log("train/label", label.mean(), on_step=True, on_epoch=True, sync_dist=True, batch_size=len(label))
        self.log(
            "train/largest", label.max() - batch_idx, on_epoch=True, on_step=False, reduce_fx="max", sync_dist=True
        )
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log_dict({"train/own_mean": self.own_mean.compute(), "train/labels": self.labels.compute().sum()})
        self.labels.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.best.update(10 / (1 + self.trainer.global_step))
        self.log("train/best", self.best.compute())


class Tracks(Plain):
    """A history of metrics, to which each epoch adds one."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = MetricTracker(MeanMetric(), maximize=True)

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.tracker.update(batch[1].double())
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        history = self.tracker.compute_all().tolist()
        self.log_dict({f"train/label_{epoch}": mean for epoch, mean in enumerate(history)})


class Scaled(nn.Module):
    """A convolution and a list of parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))])

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.scales[0].sum() * self.scales[1].sum()


class ListedParameters(Plain):
    """A network whose parameters are in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential()
        self.scaled = Scaled(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.scaled(x))


class OwnParameter(Plain):
    """A parameter of the module itself, outside of its networks."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))


class WithLoss(TemplateStyle):
    """A module with a `loss`, whose steps take pairs."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1])


class UnsyncedPlateau(Plain):
    """ReduceLROnPlateau on a metric that each rank computes for itself."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/acc", -float(self.current_epoch * self.global_rank))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/acc"}}


class Branching(Plain):
    """Calls a layer for some samples only."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        for number, layer in enumerate(self.layers):
            if number == 0 or x[0].sum() > x[1].sum():
                x = F.relu(x + layer(x))
        return self.head(self.dropout(x.mean((2, 3))))


class TwoOptimizers(Plain):
    """Two optimizers that the module steps itself, by which Lightning's `global_step` counts each step twice."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        head = [*self.head.parameters()]
        others = [weight for weight in self.parameters() if all(weight is not other for other in head)]
        return [torch.optim.SGD(head, lr=0.02), torch.optim.SGD(others, lr=0.05)]


class LearningRate(Plain):
    """A learning rate as an attribute, which Lightning's LearningRateFinder sets."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.lr = lr

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class LogsToExperiment(Plain):
    """Calls a logger's own methods, as code for TensorBoard does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.logger.experiment.add_image("first", batch[0][0], self.global_step)
        return super().training_step(batch, batch_idx)


class Unshardable(Plain):
    """A weight that FSDP2 does not take as it is: a scalar, one with sparse gradients, a transposed one.

    Args:
        kind: which of them.
    """

    def __init__(self, kind: str = "transposed") -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 10))
        if kind == "scalar":
            self.net.register_parameter("logit_scale", nn.Parameter(torch.ones(())))
        if kind == "sparse":
            self.net.append(nn.Embedding(4, 10, sparse=True))
        if kind == "transposed":
            self.net[0].weight = nn.Parameter(torch.rand(10, 10).T)
