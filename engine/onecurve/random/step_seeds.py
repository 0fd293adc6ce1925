"""Seeds of the generators and keys of the samples in each step and evaluation: equal on any hardware, and repeated."""

import functools
from typing import Any, cast

import lightning as L
from torch import Tensor

from onecurve.random.dropout import SampleDropout, begin_step, dropouts, forget_keys, salt_by_name, set_keys
from onecurve.random.hashing import hash_ints
from onecurve.random.random_functions import intercept, release, sample_random
from onecurve.random.seeding import EPOCH_END, EPOCH_START, drawing_epoch, seed_generators, seed_torch


class RandomNumbers(L.Callback):
    """Lets each step draw the same numbers on any hardware, and in a resumed run.

    Before each batch, torch, NumPy and Python are seeded with a hash of (seed, epoch, step), and the samples get their
    keys.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._dropouts: list[SampleDropout] = []
        self._step_or_loader = 0  # the step of the epoch; in an evaluation the number of the loader

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Seed the weights that the module makes in `setup` and `configure_model`."""
        intercept()
        seed_generators(self._seed(), trainer.strategy.root_device.type)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        forget_keys(self._dropouts)
        self._dropouts = dropouts(pl_module)
        salt_by_name(pl_module)  # also copies that a hook has made, such as a teacher

    on_validation_start = on_test_start = on_train_start

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Seed what hooks of the start of an epoch draw, which a resumed run calls again."""
        seed_generators(self._seed(EPOCH_START, trainer.current_epoch), pl_module.device.type)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Seed what hooks of the end of an epoch draw: validation has left the generators as in any other epoch."""
        forget_keys(self._dropouts)
        seed_generators(self._seed(EPOCH_END, trainer.current_epoch), pl_module.device.type)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, _: Any, batch_idx: int) -> None:
        self._step_or_loader = batch_idx
        self._begin(trainer, self._seed(drawing_epoch(trainer), batch_idx))
        begin_step(self._dropouts)

    def begin_micro_batch(self, trainer: L.Trainer) -> None:
        """Draw for the samples of a micro-batch."""
        data: Any = trainer.datamodule
        sample_random.keys = self._keys(trainer, data.sample_index)
        self._set_keys()

    def begin_virtual_rank(self, trainer: L.Trainer, step: int, number: int) -> None:
        """Draw for the samples of a virtual rank, which has generators of its own.

        The functions that draw for each sample have the numbers that they have without virtual ranks.
        """
        epoch = drawing_epoch(trainer)
        of_step, seed = self._seed(epoch, step), self._seed(epoch, step, number)
        self._begin(trainer, seed, shift=of_step - seed)
        begin_step(self._dropouts)

    def end_virtual_ranks(self, trainer: L.Trainer, step: int) -> None:
        """Draw for the hooks after the passes, as one more virtual rank; layers go on to count their calls."""
        count = cast(Any, trainer.datamodule).virtual_ranks
        self._begin(trainer, self._seed(drawing_epoch(trainer), step, count))

    def _set_keys(self) -> None:
        if self._dropouts:
            set_keys(self._dropouts, sample_random.keys)

    def on_after_backward(self, *_: Any, **__: Any) -> None:
        sample_random.check()

    on_before_optimizer_step = on_after_backward  # a module that optimizes manually may call `backward` of the loss

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Let functions draw as in torch. Layers keep the keys of the batch for the module's hook of this name."""
        data: Any = trainer.datamodule
        if len(data.parts) > 1 and not data.bit_exact:  # the keys are those of the last part
            self.begin_micro_batch(trainer)
        sample_random.end()

    def on_train_end(self, *_: Any) -> None:
        forget_keys(self._dropouts)

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        # The number of a batch depends on the accumulation, the keys do not.
        self._step_or_loader = dataloader_idx
        shared = self._seed(drawing_epoch(trainer), dataloader_idx)
        self._begin(trainer, shared)
        begin_step(self._dropouts)
        if not sample_random.is_divided:  # where torch's other functions may draw, batches are the same on any hardware
            data: Any = trainer.datamodule
            own = data.division.own_virtual_ranks if data.bit_exact else (0,)
            number, place = divmod(batch_idx, len(own))
            seed = self._seed(drawing_epoch(trainer), dataloader_idx, number, own[place])
            seed_torch(seed, pl_module.device.type)
            sample_random.first_seed, sample_random.shift = seed, shared - seed

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        sample_random.check()
        sample_random.end()

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Seed what hooks of its end draw: the number and the seeds of the batches depend on the hardware."""
        forget_keys(self._dropouts)
        seed_generators(self._seed(drawing_epoch(trainer), EPOCH_END, 0), pl_module.device.type)

    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    def teardown(self, *_: Any, **__: Any) -> None:
        release()

    on_exception = teardown

    def _seed(self, *parts: int) -> int:
        return int(hash_ints(self.seed, *parts)) % 2**62  # its successors are seeds as well

    def _begin(self, trainer: L.Trainer, seed: int, shift: int = 0) -> None:
        data, device = cast(Any, trainer.datamodule), trainer.lightning_module.device
        samples = data.sample_index
        # Also between the micro-batches of a pipeline, each of which its schedule gives to the network by itself.
        parts = data.division.sharing * data.parallel.num_microbatches
        is_divided = not data.bit_exact and parts > 1
        seed_generators(seed, device.type)
        sample_random.begin(functools.partial(self._keys, trainer, samples), device, is_divided, shift)
        self._set_keys()

    def _keys(self, trainer: L.Trainer, samples: Tensor) -> Tensor:
        """Return the keys of (n,) samples in the present step, (n,): a sample may come again in other steps."""
        return hash_ints(self.seed, drawing_epoch(trainer), self._step_or_loader, samples)
