"""Synthetic shapes are deterministic, balanced, in CIFAR's format, and too hard for a linear model."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from src.data.sources.shapes import CLASSES, Shapes, generate_images


def test_generates_the_same_images_each_time() -> None:
    images, labels = generate_images(50, seed=3)
    again, _ = generate_images(50, seed=3)
    assert (images == again).all()
    assert not (images == generate_images(50, seed=4)[0]).all()
    assert images.shape == (50, 3, 32, 32)
    assert images.dtype.name == "uint8"
    assert sorted(labels.tolist()) == sorted(list(range(len(CLASSES))) * 5)


def test_generated_images_are_cached(tmp_path: Path) -> None:
    source = Shapes(train_size=30, test_size=20)
    source.prepare(tmp_path)
    made = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.npz")}
    source.prepare(tmp_path)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.npz")} == made
    assert len(source.load(tmp_path, "train")[1]) == 30
    assert len(source.load(tmp_path, "test")[1]) == 20


@pytest.mark.slow
def test_linear_model_stays_under_45_percent() -> None:
    train, test = generate_images(6_000, seed=0), generate_images(2_000, seed=1)
    x, x_test = (torch.from_numpy(images).flatten(1).float() / 255 - 0.5 for images, _ in (train, test))
    y, y_test = (torch.from_numpy(labels) for _, labels in (train, test))
    weight = torch.zeros(10, 3072, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=1e-3, weight_decay=1e-4)
    for step in range(300):
        part = torch.arange(step * 256, (step + 1) * 256) % len(x)
        loss = F.cross_entropy(x[part] @ weight.T, y[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = float((x_test @ weight.T).argmax(1).eq(y_test).float().mean())
    assert 0.1 < accuracy < 0.45
