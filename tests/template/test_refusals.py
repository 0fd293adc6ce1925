"""Mistakes with models, data and their callbacks end in one line with the option and the remedy.

tests/engine/config/test_refusals.py has those with the engine's options.
"""

import shlex
from pathlib import Path

import pytest

from onecurve.errors import UserError
from onecurve.run.experiment import run_experiment
from tests.support.commands import error_line, run_here
from tests.support.runs import STRATEGIES, compose

DATA_PARALLEL = ("auto", "ddp", "ddp_spawn")
MODELS = [
    ("model=resnet18 model.norm=bach", "model.norm=bach: did you mean batch"),
    ("model=wide_resnet model.depth=27", "model.depth=27.*28"),
    ("model=vit model.patch=5", "model.patch=5 .* 32 x 32"),
    ("model=vit model.heads=7", "model.heads=7 .* model.width=192"),
    ("module.tta=miror", "mirror"),
    ("module.label_smoothing=2", "module.label_smoothing=2: give a fraction"),
    ("module.lr_scaling=liner", "module.lr_scaling=liner: did you mean linear"),
    ("callbacks=[default,whitening]", "no whitening layer"),
    ("callbacks=[default,samples] model=mlp", "callbacks.samples is for modules that generate images"),
    ("experiment=gan callbacks.samples.count=50", "callbacks.samples.count=50"),
    ("experiment=gan trainer.gradient_clip_val=1.0", "gradient_clip_val"),
    *[
        (f"experiment=gan strategy={name}", "set strategy=ddp")
        for name in STRATEGIES
        if name not in (*DATA_PARALLEL, "best")
    ],
]
SIZES = {
    "mlp": ["hidden=[-4]", "hidden=[64,0]"],
    "vit": ["patch=0", "patch=-4", "width=0", "depth=-1", "heads=-3", "mlp_ratio=0"],
    "resnet9": ["width=0", "width=-3"],
    "wide_resnet": ["width=0"],
    "airbench": ["widths=[64,256,0]"],
}
PROBABILITIES = {"mlp": "dropout=2", "vgg16": "dropout=-1", "vit": "drop_path=2", "wide_resnet": "dropout=9"}
NUMBERS = [
    *[(f"model={name} model.{one}", "give numbers above zero") for name, options in SIZES.items() for one in options],
    *[(f"model={name} model.{one}", f"model.{one}: give a fraction") for name, one in PROBABILITIES.items()],
    ("model=airbench model.widths=[64,256]", "model.widths=.* three stages"),
]
DATA = [
    ("data.num_classes=5", "data.num_classes=5, but `train` has labels from 0 to 9"),
    ("data.num_classes=12", "data.num_classes=12, but .* has 10 classes"),
    ("data.image_shape=[3,64,64]", r"are torch.uint8 of shape \[3, 32, 32\], not .* data.image_shape=\[3, 64, 64\]"),
    ("data.mean=[0.5]", r"data.mean=\[0.5\]: give one value for each of the 3 channels"),
    ("data.std=[0.5,0.5]", r"data.std=\[0.5, 0.5\]: give one value for each of the 3 channels"),
    ("data.train_samples=361", "data.train_samples=361 exceeds the 360 images to train on"),
    ("data.train_samples=-100", "data.train_samples=-100"),
    ("data.val_fraction=1.5", "data.val_fraction=1.5"),
    ("data.val_fraction=0.9999", "data.val_fraction=0.9999 leaves no image to train on"),
    ("data.augment=null", "data.augment=null: set data.augment.crop_padding=0 data.augment.flip=false"),
    ("data.num_workers=-1", "data.num_workers=-1: give a number of processes"),
    ("data.source.train_size=0", "data.source.train_size=0: give a number of images"),
    ("data=cifar10 data.root=/proc/data", "/proc/data .*data.root"),
    (
        "data=folder data.root={images} data.source.in_memory=false data.device_resident=true",
        "images are not in memory",
    ),
]
TRANSFORMS = "data.augment.transforms=[{_target_: tests.template.data.test_transforms.Noise}]"
AUGMENTATION = [
    ("'{transforms}' data.device_resident=true", "data.device_resident=True: .* excludes .* data.augment.transforms"),
    *[
        (f"data.augment.{option}", f"data.augment.{option}")
        for option in "mixup=-1 cutmix=-0.5 cutout=-8 crop_padding=40 mix_probability=5 flip=sometimes".split()
    ],
]


@pytest.mark.parametrize(("words", "message"), [*MODELS, *NUMBERS, *DATA, *AUGMENTATION])
def test_refused(words: str, message: str, small: list[str], images: Path, folder: Path) -> None:
    given = shlex.split(words.format(images=images, transforms=TRANSFORMS))
    data = ["model=mlp"] if words.startswith("data=") else small
    with pytest.raises(UserError, match=message) as caught:
        run_experiment(compose(folder, *data, "data.batch_size=16", "trainer.max_epochs=1", *given))
    assert "\n" not in str(caught.value)


def test_an_evaluation_of_another_network_of_an_own_module(tmp_path: Path) -> None:
    task = ["experiment=brackets", "data.train_size=90", "trainer.max_steps=1", "test=false", "logger=none"]
    run_here(*task, "report=false", f"run_dir={tmp_path}/run")
    evaluation = ["fit=false", "test=true", f"ckpt_path={tmp_path}/run", f"hydra.run.dir={tmp_path}/evaluation"]
    _, err = run_here(*evaluation, "module.width=8", code=1)
    assert "another network than this run's" in error_line(err)
    assert "size mismatch for net." in error_line(err)
