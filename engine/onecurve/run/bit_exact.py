"""Equal bits on any hardware beside the passes of `parallel/virtual_ranks.py`: threads, clipping and evaluation."""

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import lightning as L
import torch

from onecurve.network.tensors import to_local
from onecurve.parallel.gradients import clip_by_norm_over
from onecurve.parallel.virtual_ranks import without_collectives

_VARIABLE = "OMP_NUM_THREADS"
_GIVEN_THREADS = os.environ.get(_VARIABLE, "1")  # before a fit of this process, which may have set it


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


class BitExactness(L.Callback):
    """Numbers the batches of evaluations by virtual rank, clips by a norm that no sharding changes, sets the threads.

    Make it before the module, whose initial weights may depend on the number of threads.
    """

    _has_fast_path = True  # torch's default
    _before: tuple[int, str | None] | None = None  # the threads of this process, and the variable

    def __init__(self) -> None:
        self._set_threads()

    def _set_threads(self) -> None:
        """Set the number of threads, which changes the order of sums on a CPU, here and in processes that this starts.

        Without the variable, Lightning's launchers would set both by the number of processes
        (`_set_num_threads_if_needed` in lightning/fabric/utilities/distributed.py).
        """
        self._before = self._before or (torch.get_num_threads(), os.environ.get(_VARIABLE))
        torch.set_num_threads(num_threads())
        os.environ[_VARIABLE] = _GIVEN_THREADS

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._set_threads()
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
        threads, variable = self._before or (num_threads(), _GIVEN_THREADS)
        torch.set_num_threads(threads)  # for what this process does later
        os.environ.pop(_VARIABLE, None)
        os.environ |= {} if variable is None else {_VARIABLE: variable}
        self._before = None

    on_exception = teardown

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let Lightning clip with equal bits, also where a strategy has set its own function."""
        plugin, ranks = cast(Any, trainer.precision_plugin), trainer.distributed_sampler_kwargs or {}
        plugin.clip_grad_by_norm = partial(clip_by_norm_over, ranks.get("model_group"), is_bit_exact=True)


def _evaluate(strategy: Any, step: Callable[..., Any], batch: Any, batch_idx: int | None = None, *loader: int) -> Any:
    """Call `validation_step` or `test_step` with the number of a virtual rank's batch, and without collectives."""
    indices = loader
    if batch_idx is not None:
        indices = (batch_idx // len(strategy.lightning_module.trainer.datamodule.division.own_virtual_ranks), *loader)
    with without_collectives(strategy):
        return step(strategy, batch, *indices)
