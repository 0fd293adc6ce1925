"""Log the norm of the gradients."""

import lightning as L
from torch.optim import Optimizer

from onecurve.errors import UserError
from onecurve.network.norm import order_free_norm
from onecurve.observe.steps import is_log_point, trained_steps


class GradientNorms(L.Callback):
    """Logs `optim/grad_norm` at log points: the norm of all gradients before clipping, for any number of processes.

    Ranks may hold copies, shards or different parameters, and the norm counts each element once. Where ranks differ
    between two averages (`strategy.comm_hook=post_local_sgd`), it is the mean of their norms.
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if (count := len(trainer.optimizers)) > 1:
            raise UserError(
                f"callbacks.gradients is for modules with one optimizer, but {type(pl_module).__name__} has {count}: "
                "set callbacks.gradients=null"
            )

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if not is_log_point(trainer, trained_steps(trainer) + 1):
            return
        gradients = [weight.grad for weight in pl_module.parameters() if weight.grad is not None]
        group = (trainer.distributed_sampler_kwargs or {}).get("model_group")
        norm = order_free_norm(gradients, pl_module.device, group) / _gradient_scale(trainer, optimizer)
        pl_module.log("optim/grad_norm", norm, sync_dist=True)


def _gradient_scale(trainer: L.Trainer, optimizer: Optimizer) -> float:
    """Return the factor on the gradients: a fused optimizer divides by the loss scale of `16-mixed` in its own step."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    is_scaled = scaler is not None and any(group.get("fused") for group in optimizer.param_groups)
    return scaler.get_scale() if is_scaled else 1.0
