"""Compilation in the processes that Lightning spawns, and their shutdown."""

import pickle
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

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


@pytest.mark.parametrize(
    ("error", "raised"),
    [(RuntimeError("out of memory"), RuntimeError), (Stopped(15), Stopped), (KeyboardInterrupt(), Stopped)],
)
def test_loggers_of_a_failed_run_are_marked_failed(
    error: BaseException, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Lightning itself finalizes only the loggers of the parent process, which have no run.

    That process would wait for the result of a rank that ended by a KeyboardInterrupt, which torch takes for no error.
    """

    def fail(*_: Any) -> None:
        raise error

    strategy, logger = DDPSpawn(), Logger()
    monkeypatch.setattr(signals, "prepare_started_process", lambda: None)
    monkeypatch.setattr("onecurve.parallel.ddp_spawn.log_to_folder", lambda run_dir, rank: None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(_MultiProcessingLauncher, "launch", lambda self, function, *args, trainer: function(*args))
    with pytest.raises(raised):
        strategy.launcher.launch(fail, trainer=SimpleNamespace(loggers=[logger], default_root_dir=tmp_path))
    assert logger.messages == ["failed"]


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
