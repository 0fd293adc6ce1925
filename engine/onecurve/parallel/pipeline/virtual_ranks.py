"""The virtual ranks of a pipeline, which are its micro-batches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from onecurve.data.batch import StepPart
from onecurve.network.net import network_of
from onecurve.observe.step_times import timed_communication
from onecurve.parallel.pipeline.rehearsal import input_of_network
from onecurve.parallel.pipeline.stage import check_shape
from onecurve.parallel.virtual_ranks import VirtualRanks
from onecurve.random.random_functions import sample_random


class StageRanks(VirtualRanks):
    """Computes the passes of all virtual ranks by a schedule; then `training_step` gets the outputs of each of them.

    `training_step` runs twice: up to its call of the network, for the inputs of the schedule, and as a whole.
    """

    def __init__(self, trainer: Any, step: int) -> None:
        super().__init__(trainer, step)
        self._outputs = self._run_schedule()

    def networks(self) -> Sequence[Sequence[nn.Module]]:
        """Return the modules of each own stage, and those outside of the network."""
        module = self.trainer.lightning_module
        of_network = set(network_of(module).modules())
        outside = [part for part in module.modules() if part not in of_network]
        return [*(list(stage.modules()) for stage in self.trainer.strategy.own_stages.values()), outside]

    def _run_schedule(self) -> Sequence[Tensor]:
        """Compute the passes of the network; return the outputs of each own virtual rank."""
        strategy, parts = self.trainer.strategy, self.trainer.datamodule.parts
        inputs, keys = list[Tensor](), list[Tensor]()
        with strategy.precision_plugin.train_step_context():
            for place, part in enumerate(parts):
                self.begin_pass(place, part)
                inputs.append(input_of_network(self.trainer.lightning_module, part.batch, self.step))
                check_shape(inputs[-1], strategy.sent[0][0], is_trained=True)
                keys.append(sample_random.keys)
            for stage, sums in zip(strategy.own_stages.values(), self.sums[:-1], strict=True):
                stage.pass_sums = sums
            # A stage does not know what those before it draw from torch's generators, so nothing may draw from them.
            torch.default_generator.manual_seed(sample_random.call_seed)
            sample_random.begin(lambda: keys[0], keys[0].device, is_divided=True)
            with timed_communication():  # between the passes a rank waits
                batches = [part.batch for part in parts]
                outputs = strategy.run_schedule(torch.cat(inputs), batches, self.count, torch.stack(keys))
            sample_random.check()
        return outputs.chunk(len(self.own))

    @contextmanager
    def one_pass(self, place: int, part: StepPart) -> Iterator[None]:
        strategy = self.trainer.strategy
        forward = partial(strategy.return_scheduled, self._outputs[place])
        # Of the modules outside of `net`. An error ends it, too: a script may catch that, and evaluate.
        with mock.patch.object(strategy, "training_forward", forward), super().one_pass(place, part):
            yield

    def finish(self, rows: Tensor) -> Tensor:
        self.trainer.strategy.compare_loss(rows[:, 0].sum() / self.count)
        return super().finish(rows)
