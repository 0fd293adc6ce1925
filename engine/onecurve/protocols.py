"""What your classes may offer to the library: every attribute that it looks for, and none is required unless said.

No class needs to inherit from these protocols. A type checker can compare a class with one, and
`tests/engine/test_protocols.py` compares this file with what the library asks for.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from onecurve.data.batch import Batch


class AnyClass(Protocol):
    """A class that a file of conf/ names.

    Attributes:
        hardware_options: names of its options that change no curve, besides those of its base classes; all others
            belong to the experiment.
    """

    hardware_options: ClassVar[Sequence[str]]

    @staticmethod
    def examine(cfg: DictConfig) -> str:
        """Check the host, for `doctor=true`: return what is fine, or raise a UserError that says what to do."""
        ...


class Module(Protocol):
    """A LightningModule. `onecurve.Module` is a base class with `takes_batch`.

    Attributes:
        net: the network. Pipelines, `dp` and plans need it; its blocks, an `nn.Sequential` or a list, are where a
            pipeline cuts and FSDP gathers.
        takes_batch: whether the steps take a `onecurve.Batch`, with a weight for each sample, instead of what the
            loader yields.
        lr_scaling: the rule by which the learning rate follows the batch size, for the banner.
        recompute: `none`, or `blocks` if activations of blocks are computed again in the backward pass.
        should_compile: whether the network is compiled.
    """

    net: nn.Module
    takes_batch: bool
    lr_scaling: str
    recompute: str
    should_compile: bool

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """Return the mean loss of a batch, without side effects: a pipeline calls it for each micro-batch."""
        ...


class DataModule(Protocol):
    """A LightningDataModule. Its loaders are those of one process, with the batch of an optimizer step.

    Attributes:
        batch_size: samples of an optimizer step; if it is None, it is set from the next one.
        batch_size_per_device: samples per process and micro-batch.
        has_pairs: whether a sample needs its partner, half a global batch further on, on the same rank.
        classes: names of the classes in the order of the labels, for evaluation and `load_run`.
        description: some words for the banner.
    """

    batch_size: int | None
    batch_size_per_device: int | None
    has_pairs: bool
    classes: Sequence[str]
    description: str


class Dataset(Protocol):
    """A dataset of samples.

    Attributes:
        labels, targets: the labels, whose hash is part of the experiment's fingerprint.
        indices, dataset: the samples of a subset, and what it is a part of, as those of torch's Subset.
    """

    labels: Any
    targets: Any
    indices: Any
    dataset: Any

    def batches(self, indices: Tensor) -> Iterator[Batch]:
        """Yield the batch of each row of (batches, n) indices, where -1 is padding; needs `move_to` too."""
        ...

    def move_to(self, device: torch.device) -> bool:
        """Move the samples to a device if they fit there; return whether batches are on it."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: of a stream, or of a sampler."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position of a stream, from which `load_state_dict` goes on."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position; a stream without it is read past the samples that are trained."""
        ...


class Strategy(Protocol):
    """A `lightning.pytorch.strategies.Strategy`.

    Attributes:
        distributed_sampler_kwargs: the division of a batch: `num_replicas`, `rank`, and if they apply
            `num_microbatches`, `shares`, `in_turn`, `group` (of the replicas), `model_group` (that hold one network),
            `has_own_weights` (ranks between two averages of them).
        shares: relative numbers of samples of the ranks, or None.
        module_needs: attributes that a module must have, each with what it is and, after a colon, the way out.
        data_parallel: `fsdp` if it shards weights beside another division.
        shard_optimizer: whether it divides the state of the optimizer.
        virtual_rank_passes: the class that computes virtual ranks one by one.
        plan: name of the class that plans a step for `plan=true`, such as `onecurve.extras.plan.strategies.Replicas`.
    """

    distributed_sampler_kwargs: dict[str, Any]
    shares: Sequence[int] | None
    module_needs: ClassVar[dict[str, str]]
    data_parallel: str
    shard_optimizer: bool
    virtual_rank_passes: ClassVar[type]
    plan: ClassVar[str]

    def check_world_size(self, world_size: int) -> None:
        """Raise a UserError for a number of processes that it cannot use; an elastic launcher asks for each."""
        ...

    def check_virtual_ranks(self, count: int, world_size: int) -> None:
        """Raise a UserError if it cannot compute so many virtual ranks; without it, `bit_exact=true` is refused."""
        ...


class Logger(Protocol):
    """A `lightning.pytorch.loggers.Logger`."""

    def log_evaluation(self, stage: str, evaluation: dict[str, Any]) -> None:
        """Log what `callbacks=evaluation` has measured in `val` or `test`, such as the confusion matrix."""
        ...


class Callback(Protocol):
    """A `lightning.Callback`.

    Attributes:
        averages_weights: whether it averages the weights; a strategy that does so itself refuses it.
        monitor: the metric that it watches; a run checks before training that validation logs it.
    """

    averages_weights: bool
    monitor: str | None
