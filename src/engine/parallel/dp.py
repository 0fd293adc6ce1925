"""torch.nn.DataParallel: one process with one thread per GPU, for comparison; `strategy=ddp` is faster and exact.

Each step copies the network to every GPU and gathers the outputs on the first one. All threads share one Python
interpreter. Batch normalization sees the part of the batch on its GPU, and keeps the statistics of the first GPU.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn

from src.engine.determinism.dropout import dropouts, set_keys
from src.engine.parallel.batch_norm import revert_norm_groups
from src.engine.utils.errors import UserError


class _Replica(nn.Module):
    """The network on one GPU, for its part of the batch.

    DataParallel scatters the (n, ...) images and their (n,) dropout keys together. Its threads are new, and the type of
    autocast belongs to a thread, so the main thread hands over its type; without it they would compute in float16.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input: Tensor, keys: Tensor | None, autocast_type: torch.dtype | None) -> Tensor:
        if keys is not None:
            set_keys(dropouts(self), keys)
        with torch.autocast(input.device.type, autocast_type, enabled=autocast_type is not None):
            return type(self.net).forward(self.net, input)  # the instance's `forward` is that of all GPUs


class DP(ParallelStrategy):
    """Puts the batch on the first GPU; the forward pass of the network scatters it over all GPUs.

    Raises:
        UserError: if there are fewer than two GPUs. On a CPU DataParallel would silently do nothing.
    """

    module_needs: ClassVar = {"net": "the network to copy to each GPU"}

    @property
    def root_device(self) -> torch.device:
        return (self.parallel_devices or [torch.device("cpu")])[0]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    def setup_environment(self) -> None:
        gpus = [device for device in self.parallel_devices or [] if device.type != "cpu"]
        if len(gpus) < 2:
            raise UserError(
                f"strategy=dp divides a batch among GPUs, of which this run has {len(gpus)}: set trainer.devices to "
                "two GPUs or more, or take strategy=ddp, which also runs on CPUs"
            )
        super().setup_environment()

    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        net: Any = self.lightning_module.net
        if getattr(self.lightning_module, "should_compile", False):
            raise UserError("module.compile=true compiles the full network, which strategy=dp copies in every step")
        if getattr(self.lightning_module, "recompute", "none") != "none":
            raise UserError("module.recompute=blocks changes each block, which strategy=dp copies: take strategy=ddp")
        revert_norm_groups(net)  # DataParallel divides the batch otherwise
        # Assigning the module instead would register its parameters a second time.
        net.forward = _forward_on_all(net, self.parallel_devices)

    def model_to_device(self) -> None:
        self.lightning_module.to(self.root_device)

    def reduce(self, tensor: Tensor | Any, *args: Any, **kwargs: Any) -> Tensor | Any:
        return tensor

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor

    def barrier(self, name: str | None = None) -> None:
        """Do nothing: there is no other process."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj


def _forward_on_all(net: nn.Module, devices: list[torch.device] | None) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the output of the network for a batch on all devices."""
    replicas = nn.DataParallel(_Replica(net), devices)
    layers = dropouts(net)

    def forward(image: Tensor) -> Tensor:
        kind = image.device.type
        autocast_type = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return replicas(image, layers[0].keys if layers and net.training else None, autocast_type)

    return forward
