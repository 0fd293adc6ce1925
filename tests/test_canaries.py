"""What this project relies on in other libraries without their promise: a test that says what broke."""

import inspect

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


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
