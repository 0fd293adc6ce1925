"""Images in folders, in a NumPy file and of Hugging Face: the same images, the same run, and errors in one line."""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from onecurve.errors import UserError
from onecurve.run.experiment import run_experiment
from onecurve.targets import build
from src.data.sources.array_file import ArrayFile
from src.data.sources.class_folders import ClassFolders
from src.data.sources.huggingface import HuggingFaceDataset
from tests.support.comparison import check_resumed
from tests.support.huggingface import CLASSES
from tests.support.interruption import die
from tests.support.runs import Record, compose, fit

SHAPE = (3, 32, 32)
TASK = [  # two epochs of five steps in float64
    *("data=folder", "data.batch_size=16", "model=mlp", "model.hidden=[16]"),
    *("trainer.precision=64-true", "trainer.max_epochs=2", "trainer.log_every_n_steps=1"),
]
FROM_FILES = ["data.source.in_memory=false"]


def pixels(images: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    with np.load(images / "arrays.npz") as arrays:
        image = torch.from_numpy(arrays[f"x_{split}"]).permute(0, 3, 1, 2)
        return image, torch.from_numpy(arrays[f"y_{split}"])


def source(kind: str, images: Path, in_memory: bool = True) -> Any:
    return {
        "folder": lambda: ClassFolders(SHAPE, in_memory),
        "npz": lambda: ArrayFile(f"{images}/arrays.npz", SHAPE, CLASSES),
        "huggingface": lambda: HuggingFaceDataset(
            f"{images}/hub", SHAPE, {"train": "train", "test": "test"}, "img", in_memory=in_memory
        ),
    }[kind]()


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    ("kind", "in_memory"),
    [("folder", True), ("folder", False), ("npz", True), ("huggingface", True), ("huggingface", False)],
)
def test_sources_read_the_images(kind: str, in_memory: bool, split: str, images: Path, hub: str) -> None:
    subject = source(kind, images, in_memory)
    subject.prepare(images)
    found, labels = subject.load(images, split)
    expected, expected_labels = pixels(images, split)
    index = torch.tensor([3, 40, 3])
    assert isinstance(found, torch.Tensor) == in_memory
    assert len(found) == len(expected)
    assert torch.equal(found[index], expected[index])
    assert torch.equal(labels, expected_labels)
    assert list(subject.classes) == CLASSES
    assert not subject.has_val(images)


def test_images_are_cropped_and_resized(tmp_path: Path) -> None:
    """A wide image keeps its center; one channel is gray."""
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 20:40] = 255
    for split in ("train", "test"):
        (tmp_path / split / "cat" / "below").mkdir(parents=True)
        Image.fromarray(wide).save(tmp_path / split / "cat" / "below" / "wide.png")
    for shape in ((3, 10, 10), (1, 10, 10)):
        found, _ = ClassFolders(shape).load(tmp_path, "train")
        assert found[torch.tensor([0])].shape == (1, *shape)
        assert found[torch.tensor([0])].float().mean() > 250
    with pytest.raises(UserError, match=r"data.image_shape=\[2, 10, 10\]: images have 1 channel"):
        ClassFolders((2, 10, 10)).load(tmp_path, "train")


@pytest.mark.parametrize("layout", ["channels last", "channels first", "gray", "labels in a column"])
def test_layouts_of_arrays(layout: str, tmp_path: Path) -> None:
    image = np.arange(2 * 6 * 8, dtype=np.uint8).reshape(2, 1, 6, 8)
    labels = np.arange(2, dtype=np.uint8)
    stored = {"channels last": image.transpose(0, 2, 3, 1), "gray": image[:, 0]}.get(layout, image)
    labels = labels[:, None] if layout == "labels in a column" else labels
    np.savez(tmp_path / "a.npz", x_train=stored, y_train=labels, x_test=stored, y_test=labels)
    subject = ArrayFile(f"{tmp_path}/a.npz", (1, 6, 8))
    subject.prepare(tmp_path)
    found, found_labels = subject.load(tmp_path, "train")
    assert torch.equal(found[torch.arange(2)], torch.from_numpy(image))
    assert found_labels.tolist() == [0, 1]


@pytest.fixture
def copy(images: Path, tmp_path: Path) -> Path:
    """Return a copy of the folders, which a test may change."""
    for split in ("train", "test"):
        shutil.copytree(images / split, tmp_path / "copy" / split)
    return tmp_path / "copy"


def load(folder: Path, *overrides: str) -> Any:
    """Return the data module after setup, without a Trainer."""
    data = build(compose(folder, *overrides).data)
    data.prepare_data()
    data.setup("fit")
    return data


def test_own_validation_images_are_used(copy: Path, folder: Path) -> None:
    shutil.copytree(copy / "test", copy / "val")
    task = [*TASK, f"data.root={copy}"]
    data = load(folder, *task)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 100, "val": 50, "test": 50}
    assert torch.equal(
        data.splits["val"].fetch(torch.arange(50)).image, data.splits["test"].fetch(torch.arange(50)).image
    )
    data = load(folder, *task, "data.train_samples=40", "data.val_fraction=0.0")
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 40, "val": 50, "test": 50}
    with pytest.raises(UserError, match=r"data.val_fraction=0.2, but the dataset has its own validation images"):
        load(folder, *task, "data.val_fraction=0.2")
    shutil.rmtree(copy / "val")
    data = load(folder, *task)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 90, "val": 10, "test": 50}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: shutil.rmtree(root / "test"), "there is no folder `test`"),
        (lambda root: (root / "test" / "class 3").rename(root / "test" / "dog"), "has the class dog, which is not"),
        (lambda root: shutil.rmtree(root / "train" / "class 9"), "`test` has the class class 9, which is not in `tra"),
        (
            lambda root: (root / "train" / "dog").mkdir(),
            "data.num_classes=10, .* has 11 classes .images in folders",
        ),
        (lambda root: [file.unlink() for file in root.glob("test/*/*")], "no image in the folders of `test`"),
        (lambda root: (root / "train/class 0/000.png").write_text("text"), "train/class 0/000.png cannot be read"),
    ],
)
def test_wrong_folders_are_refused(change: Any, message: str, copy: Path, folder: Path) -> None:
    change(copy)
    with pytest.raises(UserError, match=message):
        load(folder, *TASK, f"data.root={copy}")


GOOD = {
    f"{kind}_{split}": np.zeros((20, 8, 8, 3) if kind == "x" else 20, np.uint8)
    for kind in "xy"
    for split in ("train", "test")
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_test": None}, "has no array x_test"),
        ({"x_train": np.zeros((20, 8, 8, 3))}, r"`train` are torch.float64 of shape \[3, 8, 8\], not torch.uint8"),
        (
            {"x_train": np.zeros((20, 8, 9, 3), np.uint8)},
            r"are torch.uint8 of shape \[8, 9, 3\], not .* data.image_shape=",
        ),
        ({"x_train": np.zeros((19, 8, 8, 3), np.uint8)}, "`train` has 19 images and 20 labels"),
        ({"x_train": np.full((20, 8, 8, 3), None)}, "an array of `train` has no numbers .*: store integers"),
        ({"y_train": np.zeros(20)}, r"the labels of `train` are torch.float64 of shape \[20\]"),
        ({"y_train": np.zeros((20, 8, 8), int)}, r"the labels of `train` are torch.int64 of shape \[20, 8, 8\]"),
        ({"y_test": np.full(20, -1)}, "`test` has labels from -1 to -1"),
        (None, "is no .npz file that can be read"),
        ({}, "is no .npz file that can be read"),
    ],
)
def test_wrong_arrays_are_refused(changes: dict[str, Any] | None, message: str, tmp_path: Path, folder: Path) -> None:
    if changes is not None:
        arrays = {name: array for name, array in (GOOD | changes).items() if array is not None}
        np.savez(tmp_path / "arrays.npz", **arrays)
    if changes == {}:  # a copy that was interrupted
        (tmp_path / "arrays.npz").write_bytes(b"")
    task = ["data=npz", f"data.root={tmp_path}", "data.image_shape=[3,8,8]", "data.batch_size=4"]
    with pytest.raises(UserError, match=message):
        load(folder, *task)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["data.source.image_column=image"], "data.source.image_column: .* has no image, but img, label"),
        (["data.source.splits.test=validation"], "data.source.splits: .* has no validation, but train, test"),
        (["data.source.name=tests"], "data.source.name=tests cannot be loaded"),
    ],
)
def test_wrong_options_of_hugging_face_are_refused(options: list[str], message: str, hub: str, folder: Path) -> None:
    with pytest.raises(UserError, match=message):
        load(folder, "data=huggingface", f"data.source.name={hub}", *options)


def test_hugging_face_needs_its_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(UserError, match=r"data.source.name=uoft-cs/cifar10 needs .* pip install datasets"):
        load(folder, "data=huggingface")


@pytest.fixture(scope="module")
def in_memory(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Record:
    return fit(compose(tmp_path_factory.mktemp("in_memory"), *TASK, f"data.root={images}"), test=True)


def test_images_from_files_resume_within_an_epoch(in_memory: Record, images: Path, folder: Path) -> None:
    """The third step of the second epoch is next: workers must not prefetch another epoch."""
    task = [*TASK, *FROM_FILES, f"data.root={images}", "data.num_workers=2"]
    die(compose(folder, *task), "on_train_batch_end", 7)
    resumed = fit(compose(folder, *task, f"ckpt_path={folder}/died.ckpt"))
    check_resumed([resumed], in_memory, 7)
    assert resumed.indices == in_memory.indices[7:]


def test_a_worker_reports_a_corrupt_file_in_one_line(copy: Path, folder: Path) -> None:
    for file in copy.glob("train/class 4/*"):
        file.write_text("text")
    with pytest.raises(UserError, match=r"^data.root=.*png cannot be read \(.*\): repair it or move it away$"):
        fit(compose(folder, *TASK, *FROM_FILES, f"data.root={copy}", "data.num_workers=1"))


def test_a_checkpoint_names_the_classes_of_predictions(in_memory: Record, images: Path, folder: Path) -> None:
    """The training data is not needed."""
    predict = [f"predict={images}/test/class 0", "fit=false", "test=false", "data.root=nowhere"]
    run_experiment(compose(folder, *TASK, *predict, f"ckpt_path={in_memory.file.parent}/checkpoints/last.ckpt"))
    rows = (folder / "predictions.csv").read_text().splitlines()[1:]
    assert len(rows) == 5
    assert {row.split(",")[1] for row in rows} <= set(CLASSES)
