"""Private behavior of other libraries that this project relies on; a failure names what broke."""

import inspect
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining._utils import InferenceMode, _StageMeta, extract_tensor_metas

REHEARSAL = "engine/onecurve/parallel/pipeline/rehearsal.py"
SIGNATURES: list[tuple[Callable[..., Any], list[str], str]] = [
    (_TrainingEpochLoop._broadcast_sigterm_tensor, ["self"], "engine/onecurve/run/loop_changes.py"),
    (FSDPParamGroup.pre_forward, ["self", "module", "args", "kwargs"], "engine/onecurve/parallel/sharded_state.py"),
    (FSDPParamGroup.pre_backward, ["self", "default_prefetch", "unused"], "engine/onecurve/parallel/sharded_state.py"),
    (FSDPParamGroup.post_backward, ["self", "unused"], "engine/onecurve/parallel/sharded_state.py"),
    (stage_backward_input, ["stage_outputs_or_loss", "output_grads", "input_values", "weights"], REHEARSAL),
    (stage_backward_weight, ["weights", "param_groups", "retain_graph"], REHEARSAL),
]


def train(*callbacks: L.Callback, module: L.LightningModule | None = None, **options: Any) -> None:
    """Train Lightning's own demonstration module for one step with an unpatched Trainer."""
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    counts: dict[str, Any] = {"limit_train_batches": 1, "limit_val_batches": 1, "max_epochs": 1}
    others: dict[str, Any] = {"accelerator": "cpu", "callbacks": list(callbacks), "enable_checkpointing": False}
    L.Trainer(**(others | quiet | counts | options)).fit(module or BoringModel())


@pytest.mark.parametrize(
    ("function", "parameters", "user"), SIGNATURES, ids=[function.__qualname__ for function, *_ in SIGNATURES]
)
def test_private_functions_accept_our_arguments(function: Callable[..., Any], parameters: list[str], user: str) -> None:
    assert list(inspect.signature(function).parameters) == parameters, user


def test_loop_counters_that_a_resumption_rewrites_exist() -> None:
    """engine/onecurve/checkpoint/resumption.py writes these into a checkpoint."""
    loops = L.Trainer(logger=False, enable_progress_bar=False, accelerator="cpu").fit_loop.state_dict()
    for name in ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"):
        assert set(loops[name]["total"]) == {"ready", "started", "processed", "completed"}
        assert set(loops[name]["current"]) == set(loops[name]["total"])
    assert "_batches_that_stepped" in loops["epoch_loop.state_dict"]


def test_elastic_reports_failures_as_we_read_them() -> None:
    """engine/onecurve/launch/outcome.py reads a failed rank's message and traceback from there."""
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=-9, error_file="/nonexistent")
    assert failure.error_file_data["message"]
    assert "SIGKILL" in failure.message


class Order(BoringModel):
    """Record the order of the parts of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append("training_step")
        return super().training_step(batch, batch_idx)

    def optimizer_zero_grad(self, *args: Any) -> None:
        self.calls.append("zero_grad")
        super().optimizer_zero_grad(*args)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("backward")
        super().backward(*args, **kwargs)


def test_lightning_clears_gradients_between_the_training_step_and_the_backward_pass() -> None:
    """Therefore engine/onecurve/parallel/pipeline/pipeline.py keeps the gradients of its schedule until `backward`."""
    module = Order()
    train(module=module)
    assert module.calls == ["training_step", "zero_grad", "backward"]


class SetUp(SingleDeviceStrategy):
    """Record the order of the parts of a strategy's set-up."""

    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.calls: list[str] = []

    def model_to_device(self) -> None:
        self.calls.append("model_to_device")
        super().model_to_device()

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        self.calls.append("setup_optimizers")
        super().setup_optimizers(trainer)


def test_lightning_lets_a_strategy_split_the_model() -> None:
    """ShardedStateStrategy does so in `model_to_device`, which Strategy.setup calls before it builds the optimizers."""
    strategy = SetUp()
    train(strategy=strategy)
    order = [strategy.calls.index(name) for name in ("model_to_device", "setup_optimizers")]
    assert order == sorted(order)


def test_autocast_caches_no_weights() -> None:
    """Each micro-batch of a schedule has its own graph; a cached cast would be only in the first one's."""
    assert torch.is_autocast_cache_enabled()
    with MixedPrecision("bf16-mixed", "cpu").autocast_context_manager():
        assert not torch.is_autocast_cache_enabled()


def test_stage_with_given_shapes_infers_none() -> None:
    """Inference would run batch normalization once more (engine/onecurve/parallel/pipeline/pipeline.py)."""
    shapes = torch.empty(2, 3, device="meta")
    meta = _StageMeta(inputs=extract_tensor_metas((shapes,)), outputs=extract_tensor_metas((shapes,)))
    assert not InferenceMode.needs_dynamic(meta, stage_has_backward=True)


def test_lightning_installs_signal_handlers_unless_disabled() -> None:
    """If not, engine/onecurve/run/loop_changes.py need not disable them. Lightning's handler runs a collective."""
    handlers = []

    class Look(L.Callback):
        def on_train_start(self, *_: Any) -> None:
            handlers.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    train(Look())
    assert handlers != [before]


def test_torch_writes_checksums() -> None:
    """engine/onecurve/checkpoint/io.py detects a corrupt checkpoint by them."""
    assert torch.serialization.get_crc32_options()


@pytest.mark.parametrize("listed", ["", "SIGTERM"])
def test_elastic_handles_only_listed_signals(listed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """engine/onecurve/launch/start.py lists none."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", listed)
    context: Any = SimpleNamespace(_start=lambda: None, _tail_logs=[])
    try:
        PContext.start(context)
        assert (signal.getsignal(signal.SIGTERM) is before[signal.SIGTERM]) == ("SIGTERM" not in listed)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_lightning_still_counts_samples_as_integers() -> None:
    """If not, engine/onecurve/run/loop_changes.py need not make them floats, of which a mean over ranks is exact."""
    results = _ResultCollection(training=False)
    results.log("validation_step", "loss", torch.ones(()), on_step=False, on_epoch=True, batch_size=3)
    assert results["validation_step.loss"].cumulated_batch_size.dtype == torch.int64


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_torch_still_records_a_stack_trace_to_seed_an_unused_device() -> None:
    """If not, engine/onecurve/checkpoint/resumption.py can call torch.manual_seed."""
    torch.cuda.manual_seed_all(0)
    _, trace = torch.cuda._lazy_seed_tracker.manual_seed_all_cb
    assert "test_canaries.py" in "".join(trace)
