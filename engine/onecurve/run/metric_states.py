"""The states of metrics: of each virtual rank while these are computed one by one, over all ranks, in checkpoints."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric, MetricTracker
from torchmetrics.utilities.data import dim_zero_mean

from onecurve.errors import UserError
from onecurve.network.precision import is_double
from onecurve.patches.lightning_loops import ResultMetric, current_results, results_of
from onecurve.patches.torch import tree_map_only
from onecurve.patches.torchmetrics import (
    COUNT,
    COUNTS,
    add_states,
    counts,
    default_states,
    forget_value,
    has_value,
    reductions,
    replace_methods,
    replace_sync,
    set_states,
    states_of,
)
from onecurve.process.gather import gather_objects, group_of_samples

_log = logging.getLogger(__name__)
_State = dict[str, Any]  # tensors, and lists of them, by the names of a metric's states


class VirtualMetrics(L.Callback):
    """Gives each virtual rank states of its own of all metrics, which `compute` reduces in the order of these ranks.

    So a metric has the value that it would have on as many processes, to the last bit. The metrics are those of the
    module and of callbacks, and Lightning's means of values that are logged in evaluation. Outside of the passes of
    virtual ranks, hooks see the states of virtual rank 0; in a process that does not compute virtual rank 0, what they
    change in a metric is lost.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}  # by name
        self._states: dict[str, dict[int, _State]] = {}  # of each metric, by virtual rank, but of the current one
        self._current, self.is_in_pass = 0, False  # a virtual rank, and whether it is in its pass

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._trainer = trainer
        for name in _trackers(trainer, pl_module):
            raise UserError(
                f"bit_exact=true: {name} is a MetricTracker, whose copies of a metric have no state for each virtual "
                "rank: log the metric itself, and keep the best epoch by ModelCheckpoint"
            )

    def _begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Change how the metrics synchronize and reset their states."""
        self.metrics = metrics_of(trainer, pl_module)
        for name, metric in self.metrics.items():
            replace_methods(metric, sync_context=partial(self._reduced, name), reset=partial(self._reset, name))

    on_sanity_check_start = on_train_start = _begin

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin new means; an evaluation outside of a fit has its own metrics, too."""
        if trainer.state.fn != "fit":
            self._begin(trainer, pl_module)
        for name, result in self._means().items():
            self._states.pop(name, None)
            set_states(result, _initial_state(result))

    on_test_start = on_validation_start

    def _means(self) -> dict[str, Any]:
        """Return Lightning's means of values logged in this evaluation; each loop has its own."""
        values = current_results(self._trainer)
        return {f"mean.{name}": value for name, value in values.items() if value.is_tensor}

    def add_mean(self, name: str, result: Any) -> None:
        """Let a mean that Lightning makes of a value logged in evaluation be that of all virtual ranks."""
        vars(result)["compute"] = partial(self._compute_mean, f"mean.{name}", result, result.compute)

    def enter(self, number: int) -> None:
        """Give all metrics the states of a virtual rank, whose pass begins."""
        self._switch(number)
        self.is_in_pass = True

    def leave(self) -> None:
        """Give all metrics the states of virtual rank 0, for the hooks after the passes."""
        self._switch(0)
        self.is_in_pass = False

    def _switch(self, number: int) -> None:
        for name, metric in (self.metrics if self._trainer.training else self.metrics | self._means()).items():
            states = self._states.setdefault(name, {})
            states[self._current] = states_of(metric)
            # A process without virtual rank 0 takes the count of another for it: at zero, `compute` would warn.
            count = max(state[COUNT] for state in states.values()) if number == 0 else 0
            set_states(metric, states.get(number) or _initial_state(metric) | {COUNT: count})
            forget_value(metric)  # that of another virtual rank
        self._current = number

    def states(self, name: str, metric: Any) -> dict[int, _State]:
        """Return the states of a metric on the virtual ranks of this process."""
        states = self._states.get(name, {}) | {self._current: states_of(metric)}
        own = self._trainer.datamodule.division.own_virtual_ranks
        return {number: states.get(number) or _initial_state(metric) for number in own}

    def restore(self, name: str, metric: Any, states: list[_State]) -> None:
        """Set the states of a metric on all virtual ranks."""
        self._states[name] = dict(enumerate(states))
        set_states(metric, states[self._current])

    def on_test_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any, **__: Any) -> None:
        own = trainer.datamodule.division.own_virtual_ranks
        self.enter(own[batch_idx % len(own)])

    on_validation_batch_start = on_test_batch_start

    def teardown(self, *_: Any, **__: Any) -> None:
        for metric in self.metrics.values():
            replace_methods(metric, sync_context=None, reset=None)
        self.metrics, self._states, self._current, self.is_in_pass = {}, {}, 0, False

    @contextmanager
    def _reduced(self, name: str, metric: Any, *_: Any, should_sync: bool = True, **__: Any) -> Iterator[None]:
        """Let a metric have the state of all virtual ranks, as in `Metric.sync_context`. Every process must call it.

        Within the pass of a virtual rank it has the state of that one, since others have not come so far.
        """
        if not should_sync or self.is_in_pass:
            yield
            return
        if self.metrics.get(name) is not metric:
            raise UserError(f"bit_exact=true: {name} is copied, but copies lack virtual ranks: keep its value")
        own = states_of(metric)
        set_states(metric, self._combined(name, metric))
        try:
            yield
        finally:
            set_states(metric, own)

    def _compute_mean(self, name: str, result: Any, compute: Callable[[], Any]) -> Any:
        """Compute a mean over all virtual ranks, in every process. The evaluation has ended."""
        if not has_value(result):
            set_states(result, self._combined(name, result))
            self._states.pop(name, None)
        return compute()

    def _combined(self, name: str, metric: Any) -> _State:
        return _combine(metric, _gather(self._trainer, {name: self.states(name, metric)})[name])

    def _reset(self, name: str, metric: Any) -> None:
        """Reset a metric: on all virtual ranks, unless the pass of one of them does so, as `Metric.forward`."""
        if not self.is_in_pass and self.metrics.get(name) is metric:
            self._states.pop(name, None)
        type(metric).reset(metric)


class MetricStates(L.Callback):
    """Saves the states of all metrics, and restores them.

    The mean of an epoch thus covers the whole epoch after a resumption within it, also on other ranks. A checkpoint
    between two epochs omits the metrics that the module logs, because Lightning resets these. The states are reduced
    over the data-parallel ranks, and the first rank gets the sums. A state without a sum over ranks, such as that of a
    correlation, is the first rank's. Those of each virtual rank are saved and restored as they are.
    """

    def __init__(self) -> None:
        self._saved: dict[str, Any] = {}  # of a checkpoint, until they are restored
        self._epoch_has_steps = False  # in the checkpoint; it may have begun without one

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Convert metrics as the module; torchmetrics ignores its conversion, and forgets another on a new device."""
        if is_double(trainer.precision):
            for metric in metrics_of(trainer, pl_module).values():
                if metric.dtype != torch.float64:  # `set_dtype` would also convert labels that it has collected
                    metric.set_dtype(torch.float64)

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        metrics = _metrics_to_save(trainer, pl_module, epoch_has_steps=checkpoint["position"]["epoch_steps"] > 0)
        virtual = cast(Any, trainer).virtual_metrics
        of_virtual = virtual.metrics if virtual else {}
        rank = trainer.datamodule.parallel.dp_rank
        own = {name: {rank: states_of(metric)} for name, metric in metrics.items() if name not in of_virtual}
        own |= {name: virtual.states(name, metrics[name]) for name in metrics.keys() & of_virtual.keys()}
        gathered, of_module = _gather(trainer, _on_cpu(own)), _metrics(pl_module)
        # Copies of the module in callbacks, such as WeightAveraging, have metrics that nothing updates.
        used = [name for name, ranks in gathered.items() if name in of_module or any(rank[COUNT] for rank in ranks)]
        states: dict[str, Any] = {name: gathered[name] for name in used}
        states |= {name: _reduce(metrics[name], states[name]) for name in states.keys() - of_virtual.keys()}
        checkpoint["metric_states"] = states | self._saved

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.training:
            self._saved = checkpoint.get("metric_states", {})
            self._epoch_has_steps = checkpoint["position"]["epoch_steps"] > 0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore before the module resets metrics for a new epoch."""
        if not self._epoch_has_steps:
            self._restore(trainer, pl_module)

    def _restore_means(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """Restore a value that Lightning accumulates after its first `self.log`, which begins it."""
        results = results_of(trainer.fit_loop.epoch_loop)
        for name in self._saved.keys() & results.keys():
            result, state = results[name], self._saved.pop(name)
            is_again = result.meta.fx in ("on_train_start", "on_train_epoch_start")  # logs anew what was saved
            is_shared = trainer.datamodule.bit_exact or (is_again and not result.meta.sync.should)  # by all processes
            own = state if is_shared or trainer.datamodule.parallel.dp_rank == 0 else default_states(result)
            # The type is that of the value on all ranks, as the collective of Lightning's mean needs it.
            own = {key: own[key].to(result.value, non_blocking=True, copy=True) for key in default_states(result)}
            (set_states if is_again else add_states)(result, own)
            forget_value(result)

    on_train_batch_end = _restore_means

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._restore_means(trainer)  # what the module's hook has logged after the last step, the first of this run
        if self._saved:
            _log.warning("metrics of the checkpoint that this run does not have begin anew: %s", ", ".join(self._saved))
        self._saved = {}

    def _restore(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any) -> None:
        """Set each state on the first rank, and the default on the others; all of them get a mean, and the count."""
        if not self._saved:
            return
        _fill_trackers(trainer, pl_module, self._saved)
        metrics, virtual = metrics_of(trainer, pl_module), cast(Any, trainer).virtual_metrics
        for name in metrics.keys() & self._saved.keys():
            metric = metrics[name]
            Metric.reset(metric)  # the `reset` of a wrapper would reset other metrics
            # The host need not wait for the device; a callback may leave its metric on the CPU.
            move = partial(Tensor.to, device=metric.device, non_blocking=True)
            saved = tree_map_only(Tensor, move, self._saved.pop(name))
            if isinstance(saved, list):
                virtual.restore(name, metric, saved)
                continue
            for key, value in saved.items():
                is_mean = reductions(metric).get(key, dim_zero_mean) is dim_zero_mean
                if is_mean or trainer.datamodule.parallel.dp_rank == 0:
                    setattr(metric, key, value)

    on_train_batch_start = _restore  # after the module's reset at the start of training, or of the epoch that goes on
    on_fit_end = _restore  # for a test, if the run had ended before


class MetricSync(L.Callback):
    """Lets all ranks compute metrics together, and count each sample once, although all ranks of a pipeline hold it.

    torchmetrics gathers the elements of a list one by one, if nothing reduces it, such as the images of a
    `MeanAveragePrecision`. Ranks that have evaluated different numbers of them would wait for each other, or take one
    state for another; so all states are gathered at once, through CPU memory.

    A metric that has a `process_group` or `dist_sync_fn` of its own keeps it. So do those of virtual ranks, which
    `VirtualMetrics` reduces. Metrics may be made by hooks, so they are looked for at the end of an epoch, too.
    """

    def _begin(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if not dist.is_initialized() or trainer.datamodule.bit_exact:
            return
        group = group_of_samples(trainer)

        def synchronize(metric: Metric, *_: Any, **__: Any) -> None:
            ranks = gather_objects(_on_cpu(states_of(metric)), group)
            set_states(metric, _combine(metric, ranks) | counts(metric))

        for metric in metrics_of(trainer, pl_module).values():
            if metric.process_group is None and metric.dist_sync_fn is None:
                replace_sync(metric, synchronize)

    on_fit_start = on_validation_start = on_test_start = on_predict_start = _begin
    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = _begin

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let all ranks compute the metrics, which communicate, before rank zero's progress bar does."""
        self._begin(trainer, pl_module)
        _ = trainer.callback_metrics

    on_validation_end = on_train_epoch_end

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for metric in metrics_of(trainer, pl_module).values():
            replace_sync(metric, None)


def metrics_of(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Metric]:
    """Return the metrics of the module and of callbacks by name, each of them once."""
    metrics: dict[str, Metric] = {}
    for prefix, part in _modules(trainer, module).items():
        known = set(map(id, metrics.values()))
        metrics |= {name: metric for name, metric in _metrics(part, prefix).items() if id(metric) not in known}
    return metrics


def _modules(trainer: L.Trainer, module: L.LightningModule) -> dict[str, nn.Module]:
    """Return the module, and the modules that are attributes of callbacks, by the prefix of the names in them."""
    modules: dict[str, nn.Module] = {"": module}
    callbacks = cast(Any, trainer).callbacks
    keys = [callback.state_key for callback in callbacks]
    for number, (callback, key) in enumerate(zip(callbacks, keys, strict=True)):
        path = f"callback {key} {keys[:number].count(key)}"  # also in a run that goes on with other ones around it
        modules |= {f"{path}.{name}": one for name, one in vars(callback).items() if isinstance(one, nn.Module)}
    return modules


def _metrics(module: nn.Module, prefix: str = "") -> dict[str, Metric]:
    """Return the metrics by their first names. `named_modules` would take two of torchmetrics' ROUGEScore for one."""
    names: dict[int, str] = {}
    parts = module.named_modules(prefix=prefix, remove_duplicate=False)
    metrics = {name: part for name, part in parts if isinstance(part, Metric)}
    return {name: one for name, one in metrics.items() if names.setdefault(id(one), name) == name}


def _trackers(trainer: L.Trainer, module: L.LightningModule) -> dict[str, MetricTracker]:
    """Return the trackers of the module and of callbacks by name."""
    named = (pair for prefix, one in _modules(trainer, module).items() for pair in one.named_modules(prefix=prefix))
    return {name: part for name, part in named if isinstance(part, MetricTracker)}


def _fill_trackers(trainer: L.Trainer, module: L.LightningModule, saved: dict[str, _State]) -> None:
    """Let each MetricTracker have as many metrics as in the checkpoint; it adds one in each epoch, perhaps unused."""
    for name, tracker in _trackers(trainer, module).items():
        while any(key.startswith(f"{name}.{tracker.n_steps + 1}") and saved[key][COUNT] for key in saved):
            tracker.increment()


def _metrics_to_save(trainer: L.Trainer, module: L.LightningModule, epoch_has_steps: bool) -> dict[str, Metric]:
    """Return the metrics by name, without those that Lightning resets before a resumed run would use them."""
    loop: Any = trainer.fit_loop.epoch_loop
    results = results_of(loop)
    trained, validated = ({id(one.value) for one in each.values()} for each in (results, results_of(loop.val_loop)))
    # Training has gone on with a metric that a validation logs as well.
    reset = validated - trained if epoch_has_steps else validated | trained
    accumulated: dict[str, Any] = {}
    if epoch_has_steps:
        means = {name: item for name, item in results.items() if item.is_tensor and item.meta.on_epoch}
        ended = "on_train_epoch_end"  # what it logged is that of the epoch before
        accumulated = {name: item for name, item in means.items() if item.meta.fx != ended}
    metrics = metrics_of(trainer, module)
    return accumulated | {name: metric for name, metric in metrics.items() if id(metric) not in reset}


def _initial_state(metric: Any) -> _State:
    defaults: _State = {
        name: default.to(_device(metric), copy=True) if isinstance(default, Tensor) else []
        for name, default in default_states(metric).items()
    }
    return dict.fromkeys(counts(metric), 0) | defaults


def _device(metric: Any) -> torch.device:
    return metric.value.device if isinstance(metric, ResultMetric) else metric.device


def _on_cpu(states: Any) -> Any:
    """Return copies of the tensors in CPU memory."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), states)


def _gather(trainer: Any, own: dict[str, dict[int, _State]]) -> dict[str, list[_State]]:
    """Return the states of each metric in the order of their (virtual) ranks. Every data-parallel rank must call it."""
    is_shared = trainer.datamodule.parallel.dp_size > 1
    ranks = gather_objects(_on_cpu(own), trainer.distributed_sampler_kwargs.get("group")) if is_shared else [own]
    numbered = {name: {n: state for rank in ranks for n, state in rank.get(name, {}).items()} for name in own}
    return {name: [states[number] for number in sorted(states)] for name, states in numbered.items()}


def _reduce(metric: Any, states: list[_State]) -> _State:
    """Return the state of all ranks from that of each; that of the first if the run logs its value, or has no sum."""
    is_synchronized = metric.meta.sync.should if isinstance(metric, ResultMetric) else metric.sync_on_compute
    has_sum = all(reduce or isinstance(states[0][name], list) for name, reduce in reductions(metric).items())
    return _combine(metric, states) if is_synchronized and has_sum else states[0]


def _combine(metric: Any, states: list[_State]) -> _State:
    """Return the state of several ranks as torchmetrics synchronizes it: a state without a sum is that of each rank."""
    combined = {name: max(state[name] for state in states) for name in COUNTS if name in states[0]}
    for name, reduction in reductions(metric).items():
        values = [state[name] for state in states]
        if isinstance(values[0], list):
            items = [item for part in values for item in part]  # also strings, or tuples of tensors
            combined[name] = tree_map_only(Tensor, lambda item: item.to(_device(metric)), items)
        else:
            stacked = torch.stack(values).to(_device(metric))
            combined[name] = reduction(stacked) if reduction else stacked
    return combined
