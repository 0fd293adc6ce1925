"""The synthetic dataset: 10 classes of shapes in CIFAR's format, generated in seconds, without a download.

Each image shows one object of random color, position, size and rotation on a shaded background, with clutter and
noise. Colors do not depend on the class, and contrast may be low. A linear model stays near chance; a small
convolutional network exceeds 90 %.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from onecurve import UserError, atomic_write, file_lock

_SIZE = 32
_CHUNK = 2_000  # images generated at a time, which limits the memory


def _dumbbell(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    discs = 0.4 - np.hypot(np.abs(u) - 0.6, v)
    rod = np.minimum(0.6 - np.abs(u), 0.15 - np.abs(v))
    return np.maximum(discs, rod)


# Each function of the coordinates (u, v) is positive inside the shape and falls by about 1 over its radius.
_SHAPES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "disc": lambda u, v: 0.9 - np.hypot(u, v),
    "ring": lambda u, v: 0.25 - np.abs(np.hypot(u, v) - 0.75),
    "square": lambda u, v: 0.8 - np.maximum(np.abs(u), np.abs(v)),
    "frame": lambda u, v: 0.22 - np.abs(np.maximum(np.abs(u), np.abs(v)) - 0.65),
    "triangle": lambda u, v: 0.5 - np.maximum(v, np.sqrt(0.75, dtype=np.float32) * np.abs(u) - v / 2),
    "plus": lambda u, v: np.minimum(1 - np.maximum(np.abs(u), np.abs(v)), 0.3 - np.minimum(np.abs(u), np.abs(v))),
    "star": lambda u, v: 0.65 + 0.35 * np.cos(5 * np.arctan2(v, u)) - np.hypot(u, v),
    "bar": lambda u, v: np.minimum(1 - np.abs(u), 0.3 - np.abs(v)),
    "half disc": lambda u, v: np.minimum(1 - np.hypot(u, v), v + 0.3),
    "dumbbell": _dumbbell,
}
CLASSES = list(_SHAPES)  # in the order of the labels


class Shapes:
    """Synthetic images, generated from a fixed seed and then stored in the data folder."""

    description = "synthetic shapes, a stand-in for photographs"
    classes = CLASSES

    def __init__(self, train_size: int = 50_000, test_size: int = 10_000) -> None:
        self.sizes = {"train": train_size, "test": test_size}
        for split, size in self.sizes.items():
            if size < 1:
                raise UserError(f"data.source.{split}_size={size}: give a number of images, at least one")

    def prepare(self, root: Path) -> None:
        """Generate both splits, unless they exist."""
        for split in self.sizes:
            with file_lock(self._file(root, split)) as file:
                if not file.exists():
                    images, labels = generate_images(self.sizes[split], seed=["train", "test"].index(split))
                    with atomic_write(file) as temporary, temporary.open("wb") as stream:
                        np.savez(stream, images=images, labels=labels)

    def load(self, root: Path, split: str) -> tuple[Tensor, Tensor]:
        """Return the split's images, (n, 3, 32, 32) uint8, and labels, (n,) int64."""
        with np.load(self._file(root, split)) as arrays:
            return torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])

    def _file(self, root: Path, split: str) -> Path:
        return root / "shapes" / f"{split}-{self.sizes[split]}.npz"


def generate_images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Generate (count, 3, 32, 32) uint8 images, with equally many of each class, and their (count,) labels."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % len(CLASSES))
    chunks = [_generate_chunk(rng, labels[first : first + _CHUNK]) for first in range(0, count, _CHUNK)]
    return np.concatenate(chunks), labels


def _generate_chunk(rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    """Generate (n, 3, 32, 32) uint8 images for (n,) labels: background, clutter, object, noise."""
    canvas = _background(rng, len(labels))
    for _ in range(3):
        canvas = _paint_clutter(rng, canvas)
    canvas = _paint_objects(rng, canvas, labels)
    return np.clip(canvas + _noise(rng, canvas.shape), 0, 255).astype(np.uint8)


def _background(rng: np.random.Generator, count: int) -> np.ndarray:
    ramp = np.linspace(-1, 1, _SIZE, dtype=np.float32)
    slope = rng.normal(0, 25, (2, count, 3, 1, 1)).astype(np.float32)
    return _colors(rng, count) + slope[0] * ramp[:, None] + slope[1] * ramp


def _paint_clutter(rng: np.random.Generator, canvas: np.ndarray) -> np.ndarray:
    """Paint a small soft disc or streak on each image."""
    count = len(canvas)
    u, v = _random_coordinates(rng, count, low=1.0, high=4.0, spread=15.0)
    stretch = rng.uniform(0.3, 3.0, (count, 1, 1)).astype(np.float32)
    return _paint(canvas, 2 * (1 - np.hypot(u * stretch, v)), _colors(rng, count))


def _paint_objects(rng: np.random.Generator, canvas: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Paint the object of its class on each image."""
    count = len(canvas)
    u, v = _random_coordinates(rng, count, low=6.0, high=12.0, spread=6.0)
    inside = np.empty((count, _SIZE, _SIZE), np.float32)
    for label, shape in enumerate(_SHAPES.values()):
        chosen = labels == label
        inside[chosen] = shape(u[chosen], v[chosen])
    return _paint(canvas, 6 * inside, _colors(rng, count))


def _noise(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return Gaussian noise, with a random standard deviation for each image."""
    values = rng.normal(0, 1, shape).astype(np.float32)
    return values * rng.uniform(4, 30, (shape[0], 1, 1, 1)).astype(np.float32)


def _colors(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.uniform(0, 255, (count, 3, 1, 1)).astype(np.float32)


def _random_coordinates(
    rng: np.random.Generator, count: int, low: float, high: float, spread: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the coordinates of all pixels relative to a random object in each image, two (count, 32, 32) arrays.

    The object has its center at 0, radius 1 and a random rotation. `low` and `high` limit its radius in pixels, and
    `spread` the distance of its center from the image's center along each axis.
    """
    center = _SIZE / 2 - 0.5 + rng.uniform(-spread, spread, (2, count, 1, 1))
    radius, angle = rng.uniform(low, high, (count, 1, 1)), rng.uniform(0, 2 * np.pi, (count, 1, 1))
    y = (np.arange(_SIZE)[:, None] - center[0]) / radius
    x = (np.arange(_SIZE)[None, :] - center[1]) / radius
    u, v = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    return u.astype(np.float32), v.astype(np.float32)


def _paint(canvas: np.ndarray, inside: np.ndarray, color: np.ndarray) -> np.ndarray:
    """Paint (count, 3, 1, 1) colors on the (count, 3, 32, 32) canvas where (count, 32, 32) `inside` is positive."""
    opacity = np.clip(inside + 0.5, 0, 1)[:, None]
    return canvas + opacity * (color - canvas)
