"""Exported networks compute what the run's network computes, for any number of images."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from onecurve import compose, load_run, train
from onecurve.run.trained import Predictor
from scripts.export import _check_output, export
from tests.support.commands import TINY, error_line, run_here

QUIET = ["trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "logger=none", "trainer.max_epochs=1"]
HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))


@pytest.fixture(scope="module")
def folder(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(compose(*small, *TINY, *QUIET, f"run_dir={tmp_path_factory.mktemp('export')}/run")).folder


def test_exports_to_torch(folder: Path) -> None:
    file = folder / "network.pt2"
    out, _ = run_here(str(folder), program="scripts.export")
    assert f"{file}: uint8 images (n, 3, 32, 32)" in out
    for count in (1, 300):
        images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8)
        torch.testing.assert_close(torch.export.load(file).module()(images), load_run(folder).predict(images))


@pytest.mark.skipif(not HAS_ONNX, reason="ONNX is not installed")
def test_exports_to_onnx(folder: Path, tmp_path: Path) -> None:
    import onnxruntime

    run_here(
        str(folder), "--format=onnx", f"--output={tmp_path}/net.onnx", "--checkpoint=best", program="scripts.export"
    )
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    outputs = onnxruntime.InferenceSession(tmp_path / "net.onnx").run(["probabilities"], {"images": images.numpy()})
    torch.testing.assert_close(torch.from_numpy(outputs[0]), load_run(folder, "best").predict(images))


def test_errors_are_one_line(folder: Path) -> None:
    _, err = run_here(str(folder), "--checkpoint=bset", program="scripts.export", code=1)
    assert "checkpoints/bset.ckpt" in error_line(err)


@pytest.fixture
def predictor() -> Predictor:
    return Predictor(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), (0.5,) * 3, (0.2,) * 3)


class CountsImages(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.cat([images.flatten(1), torch.ones(1, 1).expand(len(images), -1)], 1)


def test_network_may_ask_for_the_number_of_images() -> None:
    export(Predictor(CountsImages(), (0.5,) * 3, (0.2,) * 3), [3, 2, 2], "torch")


def test_detects_another_output(predictor: Predictor) -> None:
    with pytest.raises(RuntimeError, match="differs from the network"):
        _check_output(lambda images: predictor(images).roll(1, 1), predictor, [3, 2, 2])
