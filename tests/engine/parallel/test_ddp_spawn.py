"""Compilation in the processes that Lightning spawns, their metrics, and their shutdown."""

import pickle
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torchmetrics import SumMetric

from onecurve.parallel.ddp_spawn import DDPSpawn
from onecurve.process import signals
from onecurve.process.signals import Stopped
from onecurve.run.experiment import assemble
from tests.support.runs import compose


class Logger:
    def __init__(self) -> None:
        self.messages: list[str] = []

    def finalize(self, status: str) -> None:
        self.messages.append(status)


def launch_here(function: Callable[[], None], monkeypatch: pytest.MonkeyPatch, **of_trainer: Any) -> None:
    """Call a function as in a spawned process."""
    monkeypatch.setattr(signals, "prepare_started_process", lambda: None)
    monkeypatch.setattr("onecurve.parallel.ddp_spawn.log_to_folder", lambda run_dir, rank: None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(_MultiProcessingLauncher, "launch", lambda self, function, *args, trainer: function(*args))
    DDPSpawn().launcher.launch(function, trainer=SimpleNamespace(default_root_dir="", **of_trainer))


@pytest.mark.parametrize(
    ("error", "raised"),
    [(RuntimeError("out of memory"), RuntimeError), (Stopped(15), Stopped), (KeyboardInterrupt(), Stopped)],
)
def test_loggers_of_a_failed_run_are_marked_failed(
    error: BaseException, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning itself finalizes only the loggers of the parent process, which have no run.

    That process would wait for the result of a rank that ended by a KeyboardInterrupt, which torch takes for no error.
    """

    def fail(*_: Any) -> None:
        raise error

    logger = Logger()
    with pytest.raises(raised):
        launch_here(fail, monkeypatch, loggers=[logger], lightning_module=torch.nn.Module())
    assert logger.messages == ["failed"]


def test_ranks_do_not_add_to_the_metrics_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    metric, alike = SumMetric(), SumMetric()
    alike.sum_value = metric.sum_value  # as in a compute group of a MetricCollection
    shared = metric.sum_value  # by the processes that have got it
    launch_here(lambda: metric.update(1.0), monkeypatch, lightning_module=torch.nn.ModuleList([metric, alike]))
    assert (shared, metric.sum_value) == (0, 1)
    assert alike.sum_value is metric.sum_value


def test_compiles_in_the_spawned_process(small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module loses its compiled functions when it is pickled, so `setup` compiles it."""
    graphs: list[Any] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    options = ["model=mlp", "strategy=ddp_spawn", "trainer.devices=2", "module.compile=true"]
    _, module, _ = assemble(compose(folder, *small, *options))
    spawned = pickle.loads(ForkingPickler.dumps(module))
    spawned.setup("fit")
    spawned(torch.rand(2, 3, 32, 32))
    assert graphs
