"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) in their official Python form: found or downloaded, and checked.

The batches are pickles, and a pickle can run any code. The unpickler therefore accepts only the parts of a NumPy array.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from onecurve import UserError, file_lock
from src.data.sources.download import Archive, extract, fetch

_RECONSTRUCT = np.empty(0).__reduce__()[0]  # a function whose module depends on NumPy's version


class CIFAR10:
    """60,000 images of 10 classes; the official test set is the split `test`.

    Args:
        urls: URLs of folders that contain the archive, tried in this order.
    """

    archive = Archive("cifar-10-python.tar.gz", md5="c58f30108f718f92721af3b95e74349a", folder="cifar-10-batches-py")
    members: ClassVar = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
    label_key = b"labels"
    hardware_options = ("urls",)  # they change no curve
    description = "CIFAR-10"
    classes: Sequence[str] = "airplane automobile bird cat deer dog frog horse ship truck".split()

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls

    def prepare(self, root: Path) -> None:
        """Make sure that the extracted folder exists: extract the archive and, if necessary, download it."""
        if not self._folder(root):
            with file_lock(root / self.archive.name):
                if not self._folder(root):  # another process may have extracted it during the wait
                    extract(self.archive, fetch(self.archive, root, self.urls), root)

    def load(self, root: Path, split: str) -> tuple[Tensor, Tensor]:
        """Return the split's images, (n, 3, 32, 32) uint8, and labels, (n,) int64."""
        folder = self._folder(root) or root / self.archive.folder
        batches = [self._read(folder / name) for name in self.members[split]]
        images = np.concatenate([rows for rows, _ in batches]).reshape(-1, 3, 32, 32)
        return torch.from_numpy(images), torch.from_numpy(np.concatenate([labels for _, labels in batches]))

    def _folder(self, root: Path) -> Path | None:
        """Return the extracted folder, which may be `root` itself, or None if no folder has all files."""
        required = [name for names in self.members.values() for name in names]
        for folder in (root / self.archive.folder, root):
            if all((folder / name).is_file() for name in required):
                return folder
        return None

    def _read(self, file: Path) -> tuple[np.ndarray, np.ndarray]:
        try:
            batch = _ArrayUnpickler(io.BytesIO(file.read_bytes()), encoding="bytes").load()
            rows, labels = np.asarray(batch[b"data"]), np.asarray(batch[self.label_key], dtype=np.int64)
        except UserError:
            raise
        except Exception as error:  # a corrupt pickle can raise any exception
            raise UserError(f"{file} is missing or corrupt ({error}): delete its folder, or set data.root") from None
        if rows.dtype != np.uint8 or rows.shape != (len(labels), 3072) or (labels < 0).any():
            raise UserError(f"{file} is no CIFAR batch (rows {rows.shape}, {len(labels)} labels): set data.root")
        return rows, labels


class CIFAR100(CIFAR10):
    """60,000 images of 100 classes (the fine labels)."""

    archive = Archive("cifar-100-python.tar.gz", md5="eb9058c3a382ffc7106e4002c42a8d85", folder="cifar-100-python")
    members: ClassVar = {"train": ["train"], "test": ["test"]}
    label_key = b"fine_labels"
    description = "CIFAR-100"
    classes = """
        apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
        castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
        elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
        lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
        pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark
        shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
        television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
        """.split()


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler that loads plain containers and NumPy arrays of numbers, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        allowed: dict[tuple[str, str], Any] = {
            ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
            ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
        }
        if (module, name) not in allowed:
            raise UserError(f"a file under data.root would run {module}.{name}, which no file of CIFAR does: delete it")
        return allowed[module, name]
