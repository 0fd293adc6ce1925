"""The communication hooks of DistributedDataParallel by name, which reduce the gradients of a bucket."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook


def _powersgd_in_order(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Run the PowerSGD hook, and wait for it on a CPU.

    gloo continues a hook on its own threads. On some ranks its later reductions could then overtake those of other
    buckets.
    """
    future = powerSGD_hook(state, bucket)
    if not bucket.buffer().is_cuda:
        future.wait()
    return future


HOOKS: dict[str, Any] = {
    "fp16": fp16_compress_hook,
    "bf16": bf16_compress_hook,
    "powersgd": _powersgd_in_order,
    "post_local_sgd": post_localSGD_hook,
}
