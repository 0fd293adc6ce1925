"""What this project relies on in other libraries without their promise: a test that says what broke."""

import inspect

import lightning as L
import torch
from hydra.core.plugins import Plugins
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch import nn
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.pipelining._utils import InferenceMode, _StageMeta, extract_tensor_metas
from torch.multiprocessing.spawn import ProcessContext

from src.sweeps.optuna_sweeper import OptunaSweeper, register_sweeper


def test_loop_counters_that_a_resumption_rewrites_exist() -> None:
    """src/data/position.py writes these into a checkpoint."""
    loops = L.Trainer(logger=False, enable_progress_bar=False, accelerator="cpu").fit_loop.state_dict()
    for name in ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"):
        assert set(loops[name]["total"]) == {"ready", "started", "processed", "completed"}
        assert set(loops[name]["current"]) == set(loops[name]["total"])
    assert "_batches_that_stepped" in loops["epoch_loop.state_dict"]


def test_lightning_applies_the_layer_sync_in_setup() -> None:
    """src/strategies/sync_batchnorm.py is applied there, before DDP wraps the module."""
    assert "_layer_sync.apply" in inspect.getsource(DDPStrategy.setup)


def test_torch_still_refuses_sync_batchnorm_on_a_cpu() -> None:
    """If it no longer does, src/strategies/sync_batchnorm.py can go."""
    source = inspect.getsource(nn.SyncBatchNorm.forward)
    assert "SyncBatchNorm expected input tensor to be on" in source


def test_lightning_still_saves_last_only_with_the_top_k() -> None:
    """If it no longer does, conf/callbacks/checkpoint.yaml and best.yaml can be one."""
    assert "Only save last checkpoint if a checkpoint was actually saved" in inspect.getsource(
        ModelCheckpoint.on_train_epoch_end
    )


def test_elastic_reports_failures_as_we_read_them() -> None:
    """src/launch/workers.py reads a failed rank's message and traceback from there."""
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=-9, error_file="/nonexistent")
    assert failure.error_file_data["message"]
    assert "SIGKILL" in failure.message


def test_lightning_clears_gradients_between_the_training_step_and_the_backward_pass() -> None:
    """Which is why src/strategies/pipeline.py holds those of its schedule until `backward`."""
    source = inspect.getsource(Closure.closure)
    assert source.index("_step_fn()") < source.index("_zero_grad_fn()") < source.index("_backward_fn(")


def test_lightning_lets_a_strategy_take_the_model_apart() -> None:
    """src/strategies/portable.py calls Strategy.setup, which calls `_setup_model` before it makes the optimisers."""
    source = inspect.getsource(Strategy.setup)
    assert source.index("model_to_device()") < source.index("_setup_model(") < source.index("setup_optimizers(")


def test_autocast_keeps_no_cast_weights() -> None:
    """Micro-batches of a schedule have a graph each; a cached cast would be in the first one's alone."""
    assert "cache_enabled=False" in inspect.getsource(MixedPrecision.autocast_context_manager)


def test_a_stage_whose_shapes_are_told_finds_none_out() -> None:
    """Finding them out would run batch normalisation once more (src/strategies/pipeline.py)."""
    shapes = torch.empty(2, 3, device="meta")
    meta = _StageMeta(inputs=extract_tensor_metas((shapes,)), outputs=extract_tensor_metas((shapes,)))
    assert not InferenceMode.needs_dynamic(meta, stage_has_backward=True)


def test_lightning_counts_the_steps_of_its_own_optimisers_only() -> None:
    """src/models/gan.py steps the second one unwrapped, so that a batch counts as one step."""
    assert "trainer.strategy._lightning_optimizers" in inspect.getsource(_ManualOptimization.on_run_start)


def test_lightning_installs_its_signal_handlers_where_we_stop_it() -> None:
    """src/experiment.py puts nothing in their place: they run collectives."""
    assert "self._signal_connector.register_signal_handlers()" in inspect.getsource(L.Trainer._run)
    assert "broadcast" in inspect.getsource(_SignalConnector._sigterm_notifier_fn)


def test_what_the_checkpoint_callback_overrides_exists() -> None:
    """src/callbacks/checkpoint.py decides when; Lightning's class saves, and does so at the end of each epoch."""
    source = inspect.getsource(ModelCheckpoint._save_none_monitor_checkpoint)
    assert "self._save_checkpoint(" in source
    assert "_last_global_step_saved == trainer.global_step" in inspect.getsource(
        ModelCheckpoint._should_skip_saving_checkpoint
    )


def test_torch_writes_check_sums() -> None:
    """src/checkpoint.py tells a damaged checkpoint by them."""
    assert torch.serialization.get_crc32_options()


def test_elastic_leaves_the_signals_that_we_take() -> None:
    """src/launch/workers.py keeps SIGTERM from it."""
    assert "TORCHELASTIC_SIGNALS_TO_HANDLE" in inspect.getsource(PContext.start)


def test_elastic_stops_at_the_first_failure_it_sees() -> None:
    """Which is why a rank that lost another waits: src/launch/workers.py."""
    assert "error_index = index" in inspect.getsource(ProcessContext.join)


def test_hydra_finds_a_plugin_by_its_entry() -> None:
    """src/sweeps/optuna_sweeper.py makes one, since the class does not live in the package that Hydra searches."""
    register_sweeper()
    assert "class_name_to_class[classname]" in inspect.getsource(Plugins._instantiate)
    assert Plugins.instance().class_name_to_class["hydra_plugins.optuna.OptunaSweeper"] is OptunaSweeper


def test_lightning_skips_what_cannot_be_called() -> None:
    """src/lean.py puts None where a callback has nothing to do at a step, and a context that does nothing."""
    for caller in (call._call_callback_hooks, call._call_lightning_module_hook):
        source = inspect.getsource(caller)
        assert source.index("callable(fn)") < source.index("trainer.profiler.profile(")


def test_lightning_still_does_at_every_step_what_we_take_out() -> None:
    """If it no longer does, src/lean.py can be shorter."""
    source = inspect.getsource(_TrainingEpochLoop.advance)
    assert "self._broadcast_sigterm_tensor()" in source
    assert "self._build_kwargs(OrderedDict(), batch, batch_idx)" in source
    assert "is_param_in_hook_signature" in inspect.getsource(_TrainingEpochLoop._build_kwargs)
    assert "pl_module._current_fx_name = hook_name" in inspect.getsource(call._call_strategy_hook)
    assert "skip_batch and skip_time" in inspect.getsource(ModelCheckpoint.on_train_batch_end)
    assert "self[key].to(value.device)" in inspect.getsource(_ResultCollection.log)
    assert "dict(self.__dict__)" in inspect.getsource(_ResultMetric.to)
    assert "metrics = self.metrics" in inspect.getsource(_LoggerConnector.on_batch_end)


def test_torch_still_notes_a_stack_trace_to_seed_a_device_that_is_not_in_use() -> None:
    """If it no longer does, src/callbacks/seed.py can call torch.manual_seed."""
    assert "traceback" in inspect.getsource(torch.cuda._lazy_call)
