"""A folder of images is classified like the test set, on any number of processes."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import OmegaConf
from PIL import Image
from torch.utils.data import DataLoader

import onecurve
from onecurve.config.resolve import runs_in_single_process
from onecurve.errors import UserError
from onecurve.run.experiment import run_experiment
from onecurve.run.predictions import PredictionWriter, _in_order
from onecurve.targets import build
from src.data.sources.shapes import CLASSES
from tests.support.commands import run_here
from tests.support.pool import Pool
from tests.support.runs import STRATEGIES, compose, fit

TASK = ["model=mlp", "model.hidden=[64]", "data.batch_size=16", "trainer.max_epochs=2"]
PREDICT = ["fit=false", "test=false"]


@pytest.fixture(scope="module")
def trained(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    fit(compose(folder, *small, *TASK))
    return folder / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="module")
def accuracy(trained: Path, small: list[str], tmp_path_factory: pytest.TempPathFactory) -> float:
    cfg = compose(tmp_path_factory.mktemp("test"), *small, *TASK, "fit=false", f"ckpt_path={trained}")
    return run_experiment(cfg).metrics["test/acc"]


@pytest.fixture(scope="module")
def images(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the test set as files, some in a subfolder, and a file that is no image."""
    folder = tmp_path_factory.mktemp("images")
    data = build(compose(folder, *small).data)
    (folder / "below").mkdir()
    (folder / "notes.txt").write_text("no image")
    for number, image in enumerate(data.source.load(data.root, "test")[0]):
        place = folder / "below" if number % 3 == 0 else folder
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(place / f"{number:03d}.png")
    return folder


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=[] if name in ("ddp", "pipeline") else pytest.mark.slow) for name in STRATEGIES],
)
def test_predictions_match_the_accuracy(
    strategy: str, trained: Path, images: Path, accuracy: float, pool: Pool, small: list[str], folder: Path
) -> None:
    world = [f"strategy={strategy}", "trainer.devices=2"]
    cfg = compose(folder, *small, *TASK, *world, "fit=false", f"ckpt_path={trained}", f"predict={images}")
    run_experiment(cfg) if runs_in_single_process(cfg) else pool.run(2, run_experiment, cfg)  # tests, then predicts
    rows = list(csv.DictReader((folder / "predictions.csv").open()))
    assert len({row["file"] for row in rows}) == 90
    labels = build(cfg.data).source.load(build(cfg.data).root, "test")[1].tolist()
    correct = [row["class"] == CLASSES[labels[int(Path(row["file"]).stem)]] for row in rows]
    assert sum(correct) / len(correct) == pytest.approx(accuracy, abs=1e-6)
    assert all(0.1 <= float(row["probability"]) <= 1 for row in rows)


def test_larger_images_are_cropped_and_scaled(trained: Path, small: list[str], tmp_path: Path, folder: Path) -> None:
    wide = torch.zeros(64, 200, 3, dtype=torch.uint8)
    wide[:, 68:132] = 255
    (tmp_path / "wide").mkdir()
    Image.fromarray(wide.numpy()).save(tmp_path / "wide" / "white.jpg")
    Image.new("L", (32, 32), 255).save(tmp_path / "wide" / "gray.png")
    (tmp_path / "nothing").mkdir()
    no_data = [f"data.root={tmp_path}/nothing"]
    run_experiment(
        compose(folder, *small, *no_data, *TASK, *PREDICT, f"ckpt_path={trained}", f"predict={tmp_path}/wide")
    )
    assert not list((tmp_path / "nothing").iterdir()), "training data is not needed"
    gray, white = csv.DictReader((folder / "predictions.csv").open())
    assert len(list(csv.DictReader((folder / "predictions.csv").open()))) == 2
    assert (gray["file"], white["file"]) == ("gray.png", "white.jpg")
    assert gray["class"] == white["class"]


def test_shows_in_wandb_as_a_prediction(trained: Path, images: Path, small: list[str], folder: Path) -> None:
    task = [*small, *TASK, *PREDICT, "logger=none", "trainer.accelerator=cpu"]
    out, err = run_here(*task, f"ckpt_path={trained}", f"predict={images}", f"run_dir={folder}")
    assert "the predictions of 90 samples are in" in out
    assert ".py:" not in out + err, "no warning"
    runtime = OmegaConf.load(folder / "config.yaml").runtime
    assert (runtime.job_type, runtime.group) == ("predict", trained.parents[1].name)


def test_refuses_files_that_are_no_images(trained: Path, small: list[str], tmp_path: Path, folder: Path) -> None:
    cfg = compose(folder, *small, *TASK, *PREDICT, f"ckpt_path={trained}", f"predict={tmp_path}")
    with pytest.raises(UserError, match="there is no such folder, or no image in it"):
        run_experiment(cfg)
    with pytest.raises(UserError, match="GAN has no predict_step: add it"):
        run_experiment(compose(folder, *small, "experiment=gan", "data.batch_size=16", *PREDICT, f"predict={tmp_path}"))
    (tmp_path / "broken.png").write_bytes(b"\x89PNG and no more")
    with pytest.raises(UserError, match=r"broken.png cannot be read"):
        run_experiment(cfg)


def test_outputs_of_different_sizes_have_the_order_of_the_dataset() -> None:
    """Two ranks, which have padded their batches to different lengths; the second begins with padding of its own."""
    batches: list[Any] = []
    for positions, length in (([0, 2], 3), ([4], 2), ([-1, 3], 5), ([1, 3], 4)):
        index = torch.tensor(positions)
        outputs = {
            "tags": index[:, None].expand(-1, length),
            "names": [f"{one}" for one in positions],
            "loss": index[0],
        }
        batches.append((index, (outputs, index, [index, -index])))
    found = _in_order(batches)
    outputs, index, heads = found["predictions"]
    assert torch.equal(heads[0], index)
    assert torch.equal(heads[1], -index)
    assert found["sample_index"].tolist() == index.tolist() == [*range(5)]
    assert outputs["names"] == ["0", "1", "2", "3", "4"]
    assert [(int(row[0]), len(row)) for row in outputs["tags"]] == [(0, 3), (1, 4), (2, 3), (3, 5), (4, 2)]


def test_a_second_prediction_replaces_the_first(folder: Path) -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "default_root_dir": folder}
    trainer, module = onecurve.Trainer(callbacks=[PredictionWriter(folder, of_images=False)], **options), BoringModel()
    for bias in (1.0, 2.0):
        torch.nn.init.constant_(module.layer.bias, bias)
        trainer.predict(module, DataLoader(torch.zeros(4, 32), 2))  # type: ignore[arg-type]
        (predicted,) = torch.load(folder / "predictions.pt")
        assert predicted["predictions"].unique().tolist() == [bias]
