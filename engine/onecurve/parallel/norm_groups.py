"""Normalize over groups of the global batch while a run trains."""

from typing import Any, cast

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import Strategy

from onecurve.data.layout import BatchLayout
from onecurve.errors import UserError
from onecurve.network.module_state import with_own_hook
from onecurve.observe.steps import is_checked_step
from onecurve.parallel.batch_norm import (
    GroupedBatchNorm,
    apply_norm_groups,
    average_statistics,
    grouped_norms,
    rank_groups,
    revert_norm_groups,
)
from onecurve.patches.torch import AnyBatchNorm
from onecurve.process.gather import gather_objects


class NormGroups(L.Callback):
    """Lets the batch normalization layers of any network normalize each virtual rank's samples of the global batch."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Change the layers before a strategy wraps, shards or splits the network.

        It is called again when the module has made its last layers, which may be compiled already.
        """
        norms = [part for part in pl_module.modules() if isinstance(part, AnyBatchNorm)]
        if stage != "fit" or all(isinstance(part, GroupedBatchNorm) for part in norms):
            return
        data: Any = trainer.datamodule
        layout = data.layout
        check_groups(layout)
        if not data.has_one_size:
            raise UserError(
                "batch normalization takes groups of a global batch, but a batch_sampler or several loaders give "
                "batches of different sizes: set bit_exact=true, with which each virtual rank normalizes its own"
            )
        kwargs = trainer.distributed_sampler_kwargs or {}
        ranks = kwargs.get("group", dist.group.WORLD) if layout.parallel.dp_size > 1 else None
        apply_norm_groups(pl_module, rank_groups(layout, ranks))
        _average_before_saving(trainer.strategy, pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._steps, self._norms = 0, list(grouped_norms(pl_module))
        averages = any(isinstance(one, WeightAveraging) for one in cast(Any, trainer).callbacks)
        are_read = averages or bool(with_own_hook(trainer, "on_train_batch_end"))
        self._are_read = any(gather_objects(are_read))  # a callback may be on one rank alone
        for norm in self._norms:
            norm.begin_step()  # the rehearsal of a pipeline was one
            norm.is_in_step = False

    def on_train_batch_start(self, *_: Any) -> None:
        if any(norm.lengths and norm.groups.micro_batches > 1 for norm in self._norms):
            raise UserError(
                "trainer.accumulate_grad_batches or strategy.microbatches: a hook has run batch normalization in "
                "training mode between two steps, on rows that are no micro-batch: set it to 1, or call eval() before"
            )
        for norm in self._norms:
            norm.begin_step()

    def on_train_batch_end(self, *_: Any) -> None:
        self._steps += 1
        if self._norms and is_checked_step(self._steps):
            _compare_lengths(self._norms)
        for norm in self._norms:
            norm.begin_step()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        """Average the statistics before hooks read them, such as for an average of weights: a rank has its own."""
        if self._are_read or trainer.is_last_batch:
            average_statistics(pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        average_statistics(pl_module)

    on_train_end = on_validation_start  # also of an average of the weights, before they leave the GPU, as NCCL asks

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any) -> None:
        revert_norm_groups(pl_module)

    on_exception = teardown  # another trainer may fit the module with other groups


def _compare_lengths(norms: list[GroupedBatchNorm]) -> None:
    """Check that all ranks and micro-batches of a step have padded their samples alike. Every rank must call it."""
    groups = norms[0].groups
    own = [[_lengths_in(part, norm) for norm in norms] for part in range(groups.micro_batches)]
    ranks = [own] if groups.data_parallel is None else gather_objects(own, groups.data_parallel)
    if any(part != own[0] for rank in ranks for part in rank):
        raise UserError(
            "batch normalization counts the padding of samples, and the ranks or micro-batches of a step have padded "
            "theirs to different lengths: pad all samples to one length, or set bit_exact=true"
        )


def _lengths_in(micro_batch: int, norm: GroupedBatchNorm) -> list[int]:
    passes = len(norm.lengths) // norm.groups.micro_batches  # of each micro-batch
    return norm.lengths[micro_batch * passes : (micro_batch + 1) * passes]


def check_groups(layout: BatchLayout) -> None:
    """Raise a UserError if the micro-batches of the layout cannot hold whole normalization groups."""
    if layout.virtual_ranks > layout.batch_size:
        raise UserError(
            f"virtual_ranks={layout.virtual_ranks} exceeds data.batch_size={layout.batch_size}: set fewer virtual ranks"
        )
    if not layout.has_whole_groups:
        raise UserError(
            f"virtual_ranks={layout.virtual_ranks} does not divide over the {layout.micro_batches} micro-batches "
            "of a step (trainer.accumulate_grad_batches, strategy.microbatches), so batch normalization would be "
            f"another experiment: use fewer, set virtual_ranks={layout.micro_batches}, which is another "
            "experiment too, or take a model without batch normalization, such as vit"
        )


def _average_before_saving(strategy: Strategy, module: L.LightningModule) -> None:
    """Average before the strategy collects a checkpoint's weights, for which Lightning has no hook."""
    collect = strategy.lightning_module_state_dict

    def average_and_collect() -> dict[str, Any]:
        average_statistics(module)
        return collect()

    strategy.lightning_module_state_dict = average_and_collect  # type: ignore[method-assign]
