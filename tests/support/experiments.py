"""Overrides of the runs by which tests compare strategies: a shorter experiment `parity` and its variations.

The short run is as strong a test in float64: its 8 steps, 5 per epoch, cross an epoch boundary, drop a remainder,
validate, and move each weight by more than 1 %. `make test-all` also runs the 20 steps of the shipped experiment.
"""

SIZES = {"train_size": 400, "test_size": 90}  # of the fixture `small`; 360 training images, not a multiple of 32
SHORT = [  # 90 training and 10 validation samples
    "data.source.train_size=100",
    "data.source.test_size=25",
    "data.batch_size=16",
    "trainer.max_steps=8",
]
SHORT_STEPS, SHORT_EPOCH = 8, 5
SHORT_RUN = ["experiment=parity", *SHORT, "callbacks.throughput=null"]
SMALL_MLP = ["model=mlp", "~model.width", "model.hidden=[16]"]  # for runs whose network does not matter
VIT = ["model=vit", "model.width=8", "model.depth=4", "model.heads=2", "model.patch=8"]
EXPERIMENTS: dict[str, list[str]] = {
    "sgd": [],
    "adamw": ["optimizer=adamw", "optimizer.lr=0.01"],
    "mixed": ["data.augment.mixup=0.8", "data.augment.cutmix=1.0"],
    "one group": ["virtual_ranks=1"],
    "muon": [
        "model=airbench",
        "~model.width",
        "model.widths=[8,16,16]",
        "optimizer=muon",
        "module.lr_scaling=none",
        "optimizer.unit_filters=true",
        "optimizer.whitening_fraction=0.5",
        "callbacks=[default,whitening]",
        "data.augment.flip=alternating",
    ],
    "deep": [  # blocks for eight stages
        "model=wide_resnet",
        "model.width=1",
        "model.depth=16",
        "data.batch_size=16",
        "data.source.train_size=190",
    ],
}


def _torch_class(name: str, **arguments: object) -> list[str]:
    """Return the overrides that choose a scheduler of torch."""
    listed = [f"+scheduler.scheduler.{key}={value}" for key, value in arguments.items()]
    return ["scheduler=torch", f"scheduler.scheduler._target_=torch.optim.lr_scheduler.{name}", *listed]


TORCH_SCHEDULES = {
    "epoch": _torch_class("StepLR", step_size=1, gamma=0.5),
    "two steps": [*_torch_class("ExponentialLR", gamma=0.5), "scheduler.interval=step", "scheduler.frequency=2"],
    "plateau": _torch_class("ReduceLROnPlateau", patience=0, threshold=10.0, factor=0.5),
}
