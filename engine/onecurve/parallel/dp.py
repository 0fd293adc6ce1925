"""torch.nn.DataParallel: one process with one thread per GPU, for comparison; `strategy=ddp` is faster and exact.

Each step copies the network to every GPU and gathers the outputs on the first one. All threads share one Python
interpreter. Batch normalization sees the part of the batch on its GPU, and keeps the statistics of the first GPU.
"""

from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn

from onecurve.errors import UserError
from onecurve.network.net import NET, network_of
from onecurve.parallel.batch_norm import revert_norm_groups
from onecurve.random.dropout import begin_step, dropouts, set_keys


class _Replica(nn.Module):
    """The network on one GPU, for its part of the (n, ...) images and of their (n,) dropout keys."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input: Tensor, keys: Tensor | None) -> Tensor:
        if keys is not None:
            layers = dropouts(self)
            begin_step(layers)
            set_keys(layers, keys)
        return type(self.net).forward(self.net, input)  # the instance's `forward` is that of all GPUs


class DP(ParallelStrategy):
    """Puts the batch on the first GPU; the forward pass of the network scatters it over all GPUs."""

    module_needs: ClassVar = {NET: "the network to copy to each GPU: rename its attribute"}
    # There is no other process.
    model_to_device = SingleDeviceStrategy.model_to_device
    reduce = SingleDeviceStrategy.reduce
    all_gather = SingleDeviceStrategy.all_gather
    barrier = SingleDeviceStrategy.barrier
    broadcast = SingleDeviceStrategy.broadcast

    @property
    def root_device(self) -> torch.device:
        return (self.parallel_devices or [torch.device("cpu")])[0]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    def setup_environment(self) -> None:
        gpus = [device for device in self.parallel_devices or [] if device.type != "cpu"]
        if len(gpus) < 2:  # on a CPU DataParallel would silently do nothing
            raise UserError(
                f"strategy=dp divides a batch among GPUs, of which this run has {len(gpus)}: set trainer.devices to "
                "two GPUs or more, or take strategy=ddp, which also runs on CPUs"
            )
        super().setup_environment()

    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        module: Any = self.lightning_module
        if getattr(module, "should_compile", False) or getattr(module, "recompute", "none") != "none":
            raise UserError("strategy=dp copies the network, without module.compile and module.recompute: unset them")
        if self.precision_plugin.precision == "bf16-mixed":  # a thread has its own type of autocast
            raise UserError("strategy=dp computes trainer.precision=bf16-mixed in float16: take strategy=ddp")
        net, layers = network_of(module), dropouts(network_of(module))
        revert_norm_groups(net)  # DataParallel divides the batch otherwise
        replicas = nn.DataParallel(_Replica(net), self.parallel_devices)

        def forward(image: Tensor) -> Tensor:
            draws = bool(layers) and net.training
            if draws and layers[0].begin_call() > 0:
                raise UserError("strategy=dp: a step calls `net` again, with the dropout of the first time: use ddp")
            return replicas(image, layers[0].keys if draws else None)

        net.forward = forward  # assigning the module instead would register its parameters a second time
