"""Compute an optimizer step in parts, each with a forward and a backward pass of its own.

A batch of Lightning is an optimizer step, on any hardware: hooks, `batch_idx`, counts and logs come once per step.
The loader yields the parts of a step (`RankLoader` of `onecurve/data/rank_loader.py`), and the closure that Lightning
gives to the optimizer computes them one after the other; `onecurve.Trainer` puts `StepInParts` into Lightning's loops.
The parts are micro-batches, whose gradients add up in place; or the virtual ranks of this process
(`onecurve/parallel/virtual_ranks.py`). The mean loss of a rank with more or fewer samples than the
mean of the ranks is weighted by them, so that the mean over the ranks is that of the samples.

Lightning then clips the gradients, with `bit_exact` by what `onecurve/run/bit_exact.py` sets, and takes the step.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import LBFGS

from onecurve.checks.hidden_state import HiddenStateCheck
from onecurve.data.batch import StepPart, join
from onecurve.errors import UserError
from onecurve.network.module_state import with_own_hook
from onecurve.observe.step_times import timed_computation
from onecurve.observe.steps import is_checked_step, is_log_point, trained_steps
from onecurve.parallel.batch_norm import grouped_norms
from onecurve.parallel.virtual_ranks import VirtualRanks
from onecurve.patches.lightning_loops import Closure, ClosureResult, Optimization, results_of
from onecurve.random.random_functions import sample_random
from onecurve.run.logged_values import PassLog, have_equal_names


class StepInParts(Optimization):
    """Runs `training_step` and the backward pass for each part; Lightning goes on with clipping and the optimizer.

    It has no constructor: Lightning has made the object (`replace_parts` of `onecurve/patches/lightning_loops.py`).
    """

    checked_module: Any = None  # whose first steps were checked
    checked_steps = 0
    named: set[str]  # the attributes that these checks have named

    def make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Closure:
        data = self.trainer.datamodule
        weight = self._begin_step()
        shares_loss = isinstance(optimizer, LBFGS) and data.parallel.dp_size > 1
        if len(data.parts) == 1 and not data.bit_exact and weight == 1 and not shares_loss:
            return super().make_closure(kwargs, optimizer, batch_idx)
        return Closure(lambda: self._compute(kwargs, optimizer, batch_idx, weight))

    def _begin_step(self) -> float:
        """Let checks and logs know the step; return the weight of this rank's losses in the mean over the ranks."""
        trainer, data = self.trainer, self.trainer.datamodule
        if not data.bit_exact:
            trainer.buffer_check.begin_step(trainer)
        takes_batch = getattr(trainer.lightning_module, "takes_batch", False)
        # Equal for all parts of a rank in a step. `OrderedData` gives it to the samples of a module that takes batches.
        weight = 1.0 if takes_batch else data.parts[0].weight
        results = results_of(trainer.fit_loop.epoch_loop)
        results.rank_weight = weight
        results.num_samples = sum(len(part.sample_index) for part in data.parts)
        return weight

    def _compute(self, kwargs: Any, optimizer: Any, step: int, weight: float) -> ClosureResult:
        """Compute the parts; return the mean loss, and what `training_step` returned besides."""
        trainer, data = self.trainer, self.trainer.datamodule
        log, outputs = PassLog(trainer.strategy.root_device), list[Any]()
        results, backward = results_of(trainer.fit_loop.epoch_loop), self.backward_pass(optimizer)
        divisor = data.virtual_ranks if data.bit_exact else data.accumulate  # parts of a batch that add up to its mean
        hidden, kept = self._begin_check(step), _gradients_for_hooks(trainer)
        virtual_ranks = getattr(trainer.strategy, "virtual_rank_passes", VirtualRanks)
        passes: Any = virtual_ranks(trainer, step) if data.bit_exact else _MicroBatchPasses(trainer)
        # `post_backward` calls `on_after_backward`, which waits for the complete gradient.
        with mock.patch.object(trainer.precision_plugin, "post_backward", lambda loss, module: loss.detach()):
            for index, part in enumerate(data.parts):
                with passes.one_pass(index, part), timed_computation():
                    with results.divert(log):  # not what the reset logs, which only the first part has
                        output = self.forward_pass(kwargs | {"batch": part.batch})
                    if hidden is not None:
                        hidden.end_forward(index)
                    if index == 0:
                        if backward:
                            self.reset_gradients(step, optimizer)
                        if data.bit_exact:
                            passes.keep_gradients()
                    if backward and output.closure_loss is not None:
                        with results.divert(log):
                            backward(output.closure_loss * weight / divisor)
                log.end_pass(output.loss)
                outputs.append(output.extra)
        data.use_samples_of_hooks()
        table = log.rows()
        if data.bit_exact:
            table = passes.finish(table)
            self._check_names(table)
        if backward:  # not within the first pass: the others would see what the hook changes, such as an average
            with _gradients_replaced(kept):
                self.call_on_before_zero_grad(optimizer)
        loss = self._end_step(log, table, optimizer, weight)
        return ClosureResult(loss, extra=outputs[0] if data.bit_exact else join(outputs, data.parts))

    def _end_step(self, log: PassLog, table: Tensor, optimizer: Any, weight: float) -> Tensor | None:
        """Log once what the passes have logged, and call `on_after_backward`; return the mean loss."""
        trainer, plugin, bit_exact = self.trainer, self.trainer.precision_plugin, self.trainer.datamodule.bit_exact
        with plugin.forward_context():  # a metric that Lightning moves to the device takes the default type
            log.log(results_of(trainer.fit_loop.epoch_loop), table, is_complete=bit_exact)
        loss = log.mean_loss(table)
        if loss is not None:
            plugin.post_backward(loss, trainer.lightning_module)
            if isinstance(optimizer, LBFGS) and not bit_exact:  # it decides by the loss, on all ranks alike
                loss = trainer.strategy.reduce(loss * weight)
        return loss

    def _check_names(self, table: Tensor) -> None:
        # At other steps a GPU's host need not wait.
        should_check = table.is_cpu or is_log_point(self.trainer, trained_steps(self.trainer) + 1)
        if should_check and not have_equal_names(table):
            raise UserError(
                "bit_exact=true: training_step logs other names, or returns None, for some virtual ranks only: let it "
                "log the same names and return a loss for each of them"
            )

    def _begin_check(self, step: int) -> HiddenStateCheck | None:
        """Return a check for what a pass changes unseen, in the first two steps of an epoch and some others.

        What the first one makes, as an average of weights that begins as a copy of them, changes in the second. Weights
        that are frozen for some epochs, and normalized in each step, change when they train.
        """
        module = self.trainer.lightning_module
        if self.checked_module is not module:
            self.checked_module, self.checked_steps, self.named = module, 0, set[str]()
        self.checked_steps += 1
        is_due = step < 2 or is_checked_step(self.checked_steps)
        return HiddenStateCheck(module, self.trainer.datamodule.bit_exact, self.named) if is_due else None


def _gradients_for_hooks(trainer: Any) -> dict[nn.Parameter, Tensor | None]:
    """Return copies of the gradients of the last step, which `on_before_zero_grad` sees, if a hook of the user may."""
    if not with_own_hook(trainer, "on_before_zero_grad"):
        return {}
    weights = trainer.lightning_module.parameters()
    return {weight: None if weight.grad is None else weight.grad.clone() for weight in weights}


@contextmanager
def _gradients_replaced(others: dict[nn.Parameter, Tensor | None]) -> Iterator[None]:
    """Return a context in which weights have other gradients."""
    own = {weight: weight.grad for weight in others}
    for weight, gradient in others.items():
        weight.grad = gradient
    yield
    for weight, gradient in own.items():
        weight.grad = gradient


class _MicroBatchPasses:
    """Adds the gradients of micro-batches in place, also to those that the module has not reset.

    DDP averages them over the ranks in the last pass, FSDP and pipelines in each.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        for norm in grouped_norms(trainer.lightning_module):
            norm.begin_step()  # an optimizer such as LBFGS computes a step several times

    @contextmanager
    def one_pass(self, index: int, part: StepPart) -> Iterator[None]:
        """Compute a micro-batch: each begins with the same generators, and draws the numbers of its samples.

        The last one leaves the generators as a step of one part does.
        """
        is_last = index == len(self.trainer.datamodule.parts) - 1
        with ExitStack() as stack:
            if not is_last:
                stack.enter_context(isolate_rng(include_cuda=False))
                # Strategies of one process have nothing to synchronize.
                stack.enter_context(getattr(self.trainer.strategy, "block_backward_sync", nullcontext)())
            self.trainer.datamodule.use_samples_of(part)
            self.trainer.random_numbers.begin_micro_batch(self.trainer)
            yield
            sample_random.check()
