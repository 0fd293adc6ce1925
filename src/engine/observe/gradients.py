"""Log the norm of the gradients, and the size of the updates relative to the weights."""

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from src.engine.utils.errors import UserError
from src.engine.utils.steps import is_log_point
from src.engine.utils.tensors import to_local


class GradientNorms(L.Callback):
    """Logs two norms over all trainable parameters at log points, the same for any number of processes.

    `optim/grad_norm` is the norm of the gradients of a step, before clipping. `optim/update_ratio` is the norm of the
    change of the weights in that step, divided by the norm of the weights before it. At these steps a rank keeps a
    second copy of the weights that it holds.

    Ranks may hold copies, shards or different parameters, and a norm counts each element once. Where ranks differ
    between two averages (`strategy.comm_hook=post_local_sgd`), it is their root mean square.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}  # the number of elements of each parameter of the full network
        self._copies: dict[str, float] = {}  # the number of ranks that hold an element of a parameter
        self._before: dict[str, Tensor] = {}  # the weights before the step of a log point
        self._squared_grad_norm: Tensor | None = None  # of this rank's part

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
        weights = {name: weight for name, weight in pl_module.named_parameters() if weight.requires_grad}
        gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        scale = _gradient_scale(trainer, optimizer)
        self._squared_grad_norm = self._squared_norm(gradients, pl_module.device) / scale**2
        self._before = {name: to_local(weight).detach().clone() for name, weight in weights.items()}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if self._squared_grad_norm is None:
            return
        before, self._before = self._before, {}
        after = {name: to_local(weight).detach() for name, weight in pl_module.named_parameters() if name in before}
        updates = {name: after[name] - before[name] for name in before}
        squares = [self._squared_grad_norm, *(self._squared_norm(part, pl_module.device) for part in (updates, before))]
        self._squared_grad_norm = None
        norms = trainer.strategy.reduce(torch.stack(squares), reduce_op="sum").sqrt().cpu()
        pl_module.log_dict({"optim/grad_norm": norms[0], "optim/update_ratio": norms[1] / norms[2]})

    def _squared_norm(self, tensors: dict[str, Tensor], device: torch.device) -> Tensor:
        """Return this rank's part of the squared norm of tensors by parameter; the sum over the ranks is all of it."""
        total = torch.zeros((), device=device)
        for name, tensor in tensors.items():
            local = to_local(tensor)
            dtype = torch.promote_types(local.dtype, torch.float32)
            total = total + torch.linalg.vector_norm(local, dtype=dtype) ** 2 / self._copies[name]
        return total


def _gradient_scale(trainer: L.Trainer, optimizer: Optimizer) -> float:
    """Return the factor on the gradients: a fused optimizer divides by the loss scale of `16-mixed` in its own step."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    is_scaled = scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)
    return scaler.get_scale() if is_scaled else 1.0
