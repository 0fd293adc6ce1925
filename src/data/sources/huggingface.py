"""Image datasets of Hugging Face, from their hub or a local folder."""

import functools
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecurve import UserError
from src.data.image_files import to_tensor
from src.data.sources.source import Images, read_all


class HuggingFaceDataset:
    """A dataset of the library `datasets`, which keeps it in its own cache (HF_HOME), not in `data.root`.

    Args:
        name: name on the hub, or a folder that `save_to_disk` wrote.
        image_shape: (channels, height, width), to which the images are cropped and resized.
        config: name of the dataset's configuration, if it has several.
        splits: names of its splits for `train`, `test` and, if it has validation images to be used, `val`.
        image_column, label_column: names of its columns.
        in_memory: whether to read all images at the start, or those of a batch when it is fetched.
    """

    hardware_options = ("in_memory",)  # they change no curve

    def __init__(
        self,
        name: str,
        image_shape: Sequence[int],
        splits: dict[str, str],
        image_column: str = "image",
        label_column: str = "label",
        config: str | None = None,
        in_memory: bool = True,
    ) -> None:
        self.name, self.config, self.splits, self.in_memory = name, config, splits, in_memory
        self.image_shape, self.image_column, self.label_column = image_shape, image_column, label_column
        self.description = f"{name} of Hugging Face"
        self.classes: list[str] = []

    def prepare(self, root: Path) -> None:
        """Download the dataset, unless it is in the cache, and check the names of its splits and columns."""
        dataset = self._dataset
        for option, names, known in (
            ("splits", self.splits.values(), list(dataset)),
            ("image_column", [self.image_column], dataset[next(iter(dataset))].column_names),
            ("label_column", [self.label_column], dataset[next(iter(dataset))].column_names),
        ):
            for name in names:
                if name not in known:
                    raise UserError(f"data.source.{option}: {self.name} has no {name}, but {', '.join(known)}")

    def has_val(self, root: Path) -> bool:
        return "val" in self.splits

    def load(self, root: Path, split: str) -> tuple[Images, Tensor]:
        """Return the split's images, (n, channels, height, width) uint8, and labels, (n,) int64."""
        dataset = self._dataset[self.splits[split]]
        self.classes = getattr(dataset.features[self.label_column], "names", None) or []
        images = _DecodedImages(dataset.select_columns([self.image_column]), self.image_column, self.image_shape)
        labels = torch.tensor(dataset[self.label_column][:])
        return read_all(images) if self.in_memory else images, labels

    @functools.cached_property
    def _dataset(self) -> Any:
        try:
            library = importlib.import_module("datasets")
        except ImportError:
            raise UserError(
                f"data.source.name={self.name} needs the package `datasets`: pip install datasets"
            ) from None
        try:
            if Path(self.name).is_dir():
                return library.load_from_disk(self.name)
            return library.load_dataset(self.name, self.config)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"data.source.name={self.name} cannot be loaded ({reason})") from None


class _DecodedImages:
    """The images of a column, decoded when they are fetched."""

    def __init__(self, dataset: Any, column: str, image_shape: Sequence[int]) -> None:
        self.dataset, self.column, self.image_shape = dataset, column, image_shape

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Tensor) -> Tensor:
        images = self.dataset[index.tolist()][self.column]
        return torch.stack([to_tensor(image, self.image_shape) for image in images])
