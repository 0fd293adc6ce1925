"""Training from Python: `from src import compose, train, load_run`."""

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf.errors import ReadonlyConfigError

from onecurve import compose, load_run, train
from onecurve.errors import UserError
from onecurve.process import signals
from onecurve.process.signals import Stopped
from onecurve.run.result import Result
from src.models.classifier import ImageClassifier
from tests.support import runs
from tests.support.commands import TINY, TWO, run_here, steps
from tests.support.comparison import check_last_checkpoints, check_same_rows

QUIET = ["trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "logger=none"]
OWN_NETWORK = """
import torch.hub
from torch import nn

class Tiny(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(3072, 10))
"""


@pytest.fixture(scope="module")
def tiny(small: list[str]) -> list[str]:
    return [*small, *TINY, *QUIET]


@pytest.fixture(scope="module")
def result(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(compose(*tiny, f"run_dir={tmp_path_factory.mktemp('notebook')}/run"))


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randint(0, 256, (300, 3, 32, 32), dtype=torch.uint8)


def test_trains_as_the_command_does(result: Result, tiny: list[str], folder: Path) -> None:
    run_here(*tiny, f"run_dir={folder}")
    check_last_checkpoints(result.folder, folder)
    check_same_rows(result.folder, folder)
    files = [{path.relative_to(place) for path in place.rglob("*")} for place in (result.folder, folder)]
    assert files[0] == files[1]


def test_result_has_what_the_run_folder_has(result: Result) -> None:
    assert [row["step"] for row in result.history] == steps(result.folder)
    assert result.history[-1]["test/acc"] == result.metrics["test/acc"]
    saved = torch.load(result.folder / "checkpoints" / "last.ckpt")["state_dict"]
    trainer: Any = result.trainer
    assert all(torch.equal(tensor, saved[name]) for name, tensor in trainer.lightning_module.state_dict().items())
    assert len(trainer.datamodule.splits["train"]) == 360


def test_a_second_run_is_the_same_and_nothing_of_the_first_is_left(result: Result, tiny: list[str]) -> None:
    loggers, handlers = logging.getLogger().handlers[:], [signal.getsignal(number) for number in range(1, 16)]
    cfg = compose(*tiny, f"run_dir={result.folder}-2")
    check_same_rows(train(cfg).folder, result.folder)
    assert logging.getLogger().handlers == loggers
    assert [signal.getsignal(number) for number in range(1, 16)] == handlers


def test_continues_a_run_in_its_folder(tiny: list[str], folder: Path) -> None:
    train(compose(*tiny, f"run_dir={folder}", "trainer.max_epochs=1"))
    continued = train(compose(f"ckpt_path={folder}", "trainer.max_epochs=3"))
    assert continued.folder == folder
    assert [row["step"] for row in continued.history if "train/loss" in row] == list(range(33))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model=resnet8", "model=resnet8: did you mean"),
        ("+model.depth=2", "has no option `depth`"),
    ],
)
def test_errors_are_one_line(word: str, message: str, tiny: list[str], folder: Path) -> None:
    with pytest.raises(UserError, match=message) as caught:
        train(compose(*tiny, f"run_dir={folder}", word))
    assert "\n" not in str(caught.value)
    assert caught.value._render_traceback_() == [f"UserError: {caught.value}"]
    assert not folder.exists()


def test_changes_belong_to_the_overrides(tiny: list[str]) -> None:
    with pytest.raises(ReadonlyConfigError):
        compose(*tiny).seed = 1


def test_interrupted_run_goes_on_in_the_same_process(
    tiny: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = ImageClassifier.training_step

    def interrupted_step(self: ImageClassifier, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, batch, batch_idx)

    monkeypatch.setattr(ImageClassifier, "training_step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        train(compose(*tiny, f"run_dir={folder}", "trainer.max_epochs=4"))
    assert len(steps(folder)) < 40
    monkeypatch.undo()
    assert steps(train(compose(f"ckpt_path={folder}")).folder) == list(range(45))


def test_late_interrupt_stops_no_later_run(tiny: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose last batch has been tested ends as usual."""

    def interrupt(self: ImageClassifier) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(ImageClassifier, "on_test_epoch_end", interrupt)
    result = train(compose(*tiny, f"run_dir={folder}", "trainer.max_epochs=1"))
    assert "test/loss" in result.metrics
    assert not signals.requested()
    assert signal.getsignal(signal.SIGINT) == handler


@pytest.mark.parametrize("option", ["doctor=true", "plan=true"])
def test_what_only_the_command_line_has_trains_nothing(option: str, tiny: list[str], folder: Path) -> None:
    with pytest.raises(UserError, match="doctor=true and plan=true are for the command line"):
        train(compose(*tiny, option, f"run_dir={folder / 'run'}"))
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("place", "raised", "options"),
    [
        ("src.models.classifier.ImageClassifier.training_step", KeyboardInterrupt(), []),
        ("onecurve.launch.start.launch_workers", Stopped(signal.SIGINT), TWO),
    ],
)
def test_interrupt_stays_an_interrupt(
    place: str,
    raised: BaseException,
    options: list[str],
    tiny: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lightning and the launcher turn it into the end of the process, and Lightning ignores all later ones."""

    def interrupt(*_: Any) -> None:
        raise raised

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(place, interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(compose(*tiny, *options, f"run_dir={folder}"))
    assert signal.getsignal(signal.SIGINT) == handler


@pytest.mark.slow
def test_two_ranks_train_the_same(result: Result, tiny: list[str], folder: Path) -> None:
    both = train(compose(*tiny, *TWO, f"run_dir={folder}"))
    assert both.metrics["test/loss"] == pytest.approx(result.metrics["test/loss"], rel=1e-5)
    assert [row["step"] for row in both.history] == [row["step"] for row in result.history]


@pytest.mark.parametrize("checkpoint", ["last", "best"])
def test_loaded_network_predicts_as_the_module_does(checkpoint: str, result: Result, images: torch.Tensor) -> None:
    run = load_run(result.folder, checkpoint)
    saved = torch.load(result.folder / "checkpoints" / f"{checkpoint}.ckpt")["state_dict"]
    assert all(torch.equal(tensor, saved[f"net.{name}"]) for name, tensor in run.net.state_dict().items())
    module: Any = result.trainer and result.trainer.lightning_module
    mean, std = run.config.data.mean[0], run.config.data.std[0]
    module.load_state_dict(saved)
    expected = module.eval()((images / 255 - mean) / std).softmax(1)
    assert not run.net.training
    torch.testing.assert_close(run.predict(images), expected)


def test_class_names_are_those_of_the_checkpoint(result: Result, tmp_path: Path) -> None:
    """The source of the data is not built: it may not know the names before it reads the data, or be any code."""
    checkpoint = torch.load(result.folder / "checkpoints" / "last.ckpt")
    assert load_run(result.folder).classes == checkpoint["OrderedData"]["classes"]
    checkpoint["config"] = checkpoint["config"].replace("src.data.sources", "os.system")
    checkpoint["OrderedData"]["classes"] = list("abcdefghij")
    torch.save(checkpoint, tmp_path / "other.ckpt")
    assert load_run(tmp_path / "other.ckpt").classes == list("abcdefghij")
    del checkpoint["OrderedData"]
    torch.save(checkpoint, tmp_path / "other.ckpt")
    assert load_run(tmp_path / "other.ckpt").classes == list("0123456789")
    checkpoint["state_dict"]["class_weights"] = torch.ones(10)  # a buffer of a module of one's own
    torch.save(checkpoint, tmp_path / "other.ckpt")
    assert load_run(tmp_path / "other.ckpt").classes == list("0123456789")


def test_loads_sharded_checkpoints(tiny: list[str], folder: Path) -> None:
    sharded = train(compose(*tiny, "strategy=fsdp", "strategy.sharded_checkpoints=true", f"run_dir={folder}"))
    assert list((folder / "checkpoints").glob("last.*.shards"))
    assert sharded.trainer is not None
    trained = runs.to_full_tensors(sharded.trainer.lightning_module.state_dict())
    loaded = load_run(sharded.folder).net.state_dict()
    assert all(torch.equal(tensor, trained[f"net.{name}"]) for name, tensor in loaded.items())


def test_own_network_needs_trust(
    tiny: list[str], folder: Path, images: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "nets.py").write_text(OWN_NETWORK)
    monkeypatch.syspath_prepend(tmp_path)
    options = [f"~model.{name}" for name in ("num_classes", "image_shape", "hidden", "dropout")]
    other = [word for word in tiny if not word.startswith("model.")]
    train(compose(*other, *options, "model._target_=ours.nets.Tiny", f"run_dir={folder}"))
    with pytest.raises(
        UserError, match=r"would run ours\.nets\.Tiny, .* trust=\['ours'\]\) and scripts\.export --trust ours"
    ):
        load_run(folder)
    assert load_run(folder, trust=["ours"]).predict(images).shape == (300, 10)
    file = folder / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(file)
    checkpoint["config"] = "module: {net: {_target_: ours.nets.torch.hub.load}}"
    torch.save(checkpoint, file)
    with pytest.raises(UserError, match=r"would run ours\.nets\.torch\.hub\.load"):
        load_run(folder, trust=["ours"])
    checkpoint["config"] = "module: {net: {_target_: ours.nets.Tiny, inner: [{_target_: os.system}]}}"
    torch.save(checkpoint, file)
    with pytest.raises(UserError, match=r"would run os\.system"):
        load_run(folder, trust=["ours"])
    checkpoint["config"] = "module: {_target_: ours.modules.Own}"
    torch.save(checkpoint, file)
    with pytest.raises(UserError, match=r"makes its own network: load it with Own\.load_from_checkpoint"):
        load_run(folder)


def test_missing_checkpoint_is_a_one_line_error(result: Result, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run=.*bset.ckpt: there is no such file"):
        load_run(result.folder, "bset")
    with pytest.raises(UserError, match=r"run=.*nowhere: there is no such file"):
        load_run(tmp_path / "nowhere")
