"""What else has the same bits on any hardware, while virtual ranks are computed one by one: threads, clipping."""

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import lightning as L
import torch

from onecurve.network.tensors import to_local
from onecurve.parallel.gradients import clip_by_norm_over
from onecurve.run.step import without_collectives

_GIVEN_THREADS = os.environ.get("OMP_NUM_THREADS", "1")  # before a fit of this process, which may have set it


def numerics(module: L.LightningModule) -> dict[str, Any]:
    """Return what changes the last bits of a run's numbers on one kind of device, but no experiment."""
    has_channels_last = any(not to_local(weight).is_contiguous() for weight in module.parameters())
    found = {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "filters": "channels last" if has_channels_last else "contiguous",
        "compiled": bool(getattr(module, "should_compile", False)),
    }
    return found | ({"threads": torch.get_num_threads()} if module.device.type == "cpu" else {})


def num_threads() -> int:
    """Return the number of threads of each process: one, unless the user has set OMP_NUM_THREADS."""
    return int(_GIVEN_THREADS)


def set_num_threads() -> None:
    """Set the number of threads, which changes the order of sums on a CPU, in this process and those that it starts.

    Without the variable, Lightning's launchers would set both by the number of processes
    (`_set_num_threads_if_needed` in lightning/fabric/utilities/distributed.py).
    """
    torch.set_num_threads(num_threads())
    os.environ["OMP_NUM_THREADS"] = _GIVEN_THREADS


class BitExactness(L.Callback):
    """Evaluates virtual ranks one by one, and clips by a norm that any division of tensors has."""

    _has_fast_path = True  # torch's default

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # Lightning's advice to set sync_dist=True; values are those of all virtual ranks already.
        warnings.filterwarnings("ignore", "It is recommended to use `self.log")
        for name in ("validation_step", "test_step"):
            step = getattr(type(trainer.strategy), name)
            setattr(trainer.strategy, name, partial(_evaluate, trainer.strategy, step))
        # On torch's fast path transformers have other last bits for some lengths; FSDP's hooks keep them off it.
        self._has_fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)

    def teardown(self, *_: Any, **__: Any) -> None:
        torch.backends.mha.set_fastpath_enabled(self._has_fast_path)

    on_exception = teardown

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        plugin, ranks = cast(Any, trainer.precision_plugin), trainer.distributed_sampler_kwargs or {}
        plugin.clip_grad_by_norm = partial(clip_by_norm_over, ranks.get("model_group"), is_bit_exact=True)


def _evaluate(strategy: Any, step: Callable[..., Any], batch: Any, batch_idx: int | None = None, *loader: int) -> Any:
    """Call `validation_step` or `test_step` with the number of a virtual rank's batch, and without collectives."""
    indices = loader
    if batch_idx is not None:
        indices = (batch_idx // len(strategy.lightning_module.trainer.datamodule.division.own_virtual_ranks), *loader)
    with without_collectives(strategy):
        return step(strategy, batch, *indices)
