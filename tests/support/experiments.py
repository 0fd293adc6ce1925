"""The runs by which tests compare strategies: the shipped experiment `parity`, shorter, with variations.

Shorter is as strong in float64: 5 steps an epoch and 8 in all cross an epoch's end, drop a remainder, validate, and
move each weight by more than 1 %. `make test-all` also makes the 20 steps that the experiment ships with.
"""

SIZES = {"train_size": 400, "test_size": 90}  # of the fixture `small`: 360 to train on, no multiple of 32
SHORT = [  # 90 samples to train on and 10 to validate
    "data.source.train_size=100",
    "data.source.test_size=25",
    "data.batch_size=16",
    "trainer.max_steps=8",
]
SHORT_STEPS, SHORT_EPOCH = 8, 5
EXPERIMENTS: dict[str, list[str]] = {
    "sgd": [],
    "adamw": ["optimizer=adamw", "optimizer.lr=0.01"],
    "accumulate": ["trainer.accumulate_grad_batches=2"],
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
