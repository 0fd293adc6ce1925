"""A small dataset of Hugging Face, and a stand-in for their library where it is not installed.

The stand-in has the part of the interface that `src/data/sources/huggingface.py` uses. The source was tried with
`datasets` 5.2.
"""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

CLASSES = [f"class {label}" for label in range(10)]


class Split:
    """Stand-in for `datasets.Dataset`, with the columns `img` and `label`."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns, self.column_names = columns, list(columns)
        self.features = {"label": SimpleNamespace(names=CLASSES)}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: str | list[int]) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        return {name: [column[row] for row in key] for name, column in self.columns.items()}

    def select_columns(self, names: list[str]) -> "Split":
        return Split({name: self.columns[name] for name in names})


def load_from_disk(folder: str) -> dict[str, Split]:
    if not (Path(folder) / "arrays.npz").exists():
        raise FileNotFoundError(f"Directory {folder} is neither a `Dataset` directory nor a `DatasetDict` directory.")
    with np.load(Path(folder) / "arrays.npz") as arrays:
        images = {split: [Image.fromarray(image) for image in arrays[f"x_{split}"]] for split in ("train", "test")}
        return {
            split: Split({"img": images[split], "label": arrays[f"y_{split}"].tolist()}) for split in ("train", "test")
        }


def save_to_disk(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write the images, (n, height, width, 3), and labels of `train` and `test` as a dataset of Hugging Face."""
    folder.mkdir()
    if not importlib.util.find_spec("datasets"):
        np.savez(folder / "arrays.npz", **arrays)  # type: ignore[arg-type]
        return
    import datasets

    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)})
    columns = {
        split: {"img": [Image.fromarray(image) for image in arrays[f"x_{split}"]], "label": arrays[f"y_{split}"]}
        for split in ("train", "test")
    }
    splits = {split: datasets.Dataset.from_dict(columns[split], features=features) for split in columns}
    datasets.DatasetDict(splits).save_to_disk(folder)


def use_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `import datasets` import the stand-in if the library is not installed."""
    if not importlib.util.find_spec("datasets"):
        monkeypatch.setitem(sys.modules, "datasets", sys.modules[__name__])
