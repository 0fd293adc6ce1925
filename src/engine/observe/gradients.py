"""Log the norm of the gradients."""

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from src.engine.utils.errors import UserError
from src.engine.utils.steps import is_log_point
from src.engine.utils.tensors import to_local


class GradientNorms(L.Callback):
    """Logs `optim/grad_norm` at log points: the norm of all gradients before clipping, for any number of processes.

    Ranks may hold copies, shards or different parameters, and the norm counts each element once. Where ranks differ
    between two averages (`strategy.comm_hook=post_local_sgd`), it is their root mean square.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}  # the number of elements of each parameter of the full network
        self._copies: dict[str, float] = {}  # the number of ranks that hold an element of a parameter

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not self._sizes:  # a later setup may find the network sharded or split
            self._sizes = {name: weight.numel() for name, weight in pl_module.named_parameters()}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count the ranks that hold a copy of each parameter. Every rank must call it."""
        if (count := len(trainer.optimizers)) > 1:
            raise UserError(
                f"callbacks.gradients is for modules with one optimizer, but {type(pl_module).__name__} has {count}: "
                "set callbacks.gradients=null"
            )
        own = {name: to_local(weight).numel() for name, weight in pl_module.named_parameters()}
        elements = torch.tensor([own.get(name, 0) for name in self._sizes], device=pl_module.device)
        elements = trainer.strategy.reduce(elements, reduce_op="sum")
        self._copies = {
            name: held / max(1, size) for (name, size), held in zip(self._sizes.items(), elements.tolist(), strict=True)
        }

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if not is_log_point(trainer, trainer.global_step + 1):
            return
        squared = self._squared_norm(pl_module) / _gradient_scale(trainer, optimizer) ** 2
        pl_module.log("optim/grad_norm", trainer.strategy.reduce(squared, reduce_op="sum").sqrt().cpu())

    def _squared_norm(self, module: L.LightningModule) -> Tensor:
        """Return this rank's part of the squared norm of the gradients; the sum over the ranks is all of it."""
        total = torch.zeros((), device=module.device)
        for name, weight in module.named_parameters():
            if weight.grad is not None:
                local = to_local(weight.grad)
                dtype = torch.promote_types(local.dtype, torch.float32)
                total = total + torch.linalg.vector_norm(local, dtype=dtype) ** 2 / self._copies[name]
        return total


def _gradient_scale(trainer: L.Trainer, optimizer: Optimizer) -> float:
    """Return the factor on the gradients: a fused optimizer divides by the loss scale of `16-mixed` in its own step."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    is_scaled = scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)
    return scaler.get_scale() if is_scaled else 1.0
