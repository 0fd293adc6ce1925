"""A case of the fuzzer: a valid configuration, the places of a run, and its stops between them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

SETTINGS = settings(  # of tests that take seconds per case
    deadline=None, database=None, print_blob=False, suppress_health_check=list(HealthCheck), report_multiple_bugs=False
)
MODELS = {
    "mlp": ["model=mlp", "~model.width", "model.hidden=[16,16,16]"],
    "mlp, dropout": ["model=mlp", "~model.width", "model.hidden=[16,16,16]", "model.dropout=0.2"],
    "resnet9, group norm": ["model.norm=group"],
    "resnet9": [],
    "vit": ["model=vit", "model.width=8", "model.depth=2", "model.heads=2", "model.patch=8", "model.drop_path=0.3"],
}
CHOICES: list[list[list[str]]] = [  # one of each list; the first is the simplest
    [[], ["optimizer=adamw", "optimizer.lr=0.01"], ["optimizer=muon", "module.lr_scaling=none"]],
    [[], ["scheduler=cosine"], ["scheduler=one_cycle"], ["scheduler=multi_step"]],
    [[], ["trainer.gradient_clip_val=0.5"]],
    [[], ["module.label_smoothing=0.1"]],
    [[], ["data.norm_groups=8"], ["data.norm_groups=12"]],
    [[], ["data.augment.crop_padding=0", "data.augment.flip=false"], ["data.augment.trivial=true"]],
    [[], ["data.augment.mixup=0.4"], ["data.augment.cutmix=1.0", "data.augment.mix_probability=0.5"]],
    [["trainer.max_epochs=2"], ["trainer.max_epochs=1"], ["trainer.max_epochs=4"], ["trainer.max_steps=7"]],
    [[], ["trainer.limit_train_batches=3"], ["trainer.limit_train_batches=0.7"]],
    [[], ["+trainer.min_epochs=3"]],
    [[], ["trainer.limit_val_batches=0.5"], ["trainer.limit_test_batches=1"]],
    [
        [],
        ["+trainer.val_check_interval=2"],
        ["+trainer.val_check_interval=0.4"],
        ["trainer.check_val_every_n_epoch=2"],
        ["trainer.check_val_every_n_epoch=3"],
    ],
    [["trainer.log_every_n_steps=1"], ["trainer.log_every_n_steps=2"], ["trainer.log_every_n_steps=5"]],
    [[], *([f"callbacks.checkpoint.every_n_train_steps={steps}"] for steps in (1, 2, 3, 5))],
]
CALLBACKS = {"ema": [], "early_stopping": ["callbacks.early_stopping.patience=1"], "top_k": []}


PLACES = {  # processes and options; several have micro-batches, which are hardware too
    "auto x1": (1, "strategy=auto"),
    "auto x1 in halves": (1, "strategy=auto trainer.accumulate_grad_batches=2"),
    "ddp x2": (2, "strategy=ddp"),
    "fsdp x2": (2, "strategy=fsdp"),
    "fsdp x2 in quarters": (2, "strategy=fsdp trainer.accumulate_grad_batches=4"),
    "pipeline x2": (2, "strategy=pipeline"),
    "zero-1 x2": (2, "strategy=ddp strategy.shard_optimizer=true"),
    "ddp x2 by 3:1": (2, "strategy=ddp strategy.shares=[3,1]"),
    "sharded fsdp x2": (2, "strategy=fsdp strategy.sharded_checkpoints=true"),
    "sharded pipeline x2": (2, "strategy=pipeline strategy.sharded_checkpoints=true"),
    "gpipe x2": (2, "strategy=pipeline strategy.schedule=gpipe strategy.microbatches=1"),
    "pipeline x2 in halves": (2, "strategy=pipeline strategy.microbatches=2 trainer.accumulate_grad_batches=2"),
    "zero bubble x2": (2, "strategy=pipeline strategy.schedule=zbv_zero_bubble"),
    "ddp x3": (3, "strategy=ddp"),
    "ddp x4": (4, "strategy=ddp"),
    "fsdp x4": (4, "strategy=fsdp"),
    "hsdp x4": (4, "strategy=hsdp"),
    "hybrid x4": (4, "strategy=hybrid"),
    "hybrid x4 of fsdp": (4, "strategy=hybrid strategy.data_parallel=fsdp strategy.microbatches=2"),
}
STOPS = ("on_train_batch_end", "on_train_batch_start", "on_validation_end", "on_train_epoch_end", "signal")


@dataclass(frozen=True)
class Case:
    """One draw.

    Attributes:
        options: overrides of the run, whatever the place.
        places: where the run begins, and where it goes on after each stop.
        stops: a hook, or a signal, and the step from which on it ends the run; one less than places.
    """

    options: tuple[str, ...]
    places: tuple[str, ...]
    stops: tuple[tuple[str, int], ...]

    def overrides(self, place: str) -> list[str]:
        """Return the overrides of a run in that place."""
        devices, options = PLACES[place]
        return [*self.options, *options.split(), f"trainer.devices={devices}"]

    @property
    def way(self) -> str:
        """Return the places and the stops between them as one text, which `parse` reads."""
        stops = [f"{hook} {step}" for hook, step in self.stops]
        return ", ".join(word for pair in zip(self.places, [*stops, ""], strict=True) for word in pair if word)

    @property
    def command(self) -> str:
        """Return the command that repeats the case."""
        options = shlex.quote(" ".join(self.options))
        return f"python -m tests.engine.fuzz --options {options} --way '{self.way}'"


def parse(options: str, way: str) -> Case:
    """Return the case that a command describes."""
    words = way.split(", ")
    stops = tuple((hook, int(step)) for hook, step in (word.split(" ") for word in words[1::2]))
    return Case(tuple(options.split()), tuple(words[::2]), stops)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a valid case."""
    options = [f"data.batch_size={draw(st.sampled_from([16, 24]))}", *MODELS[draw(st.sampled_from(list(MODELS)))]]
    options += [word for choices in CHOICES for word in draw(st.sampled_from(choices))]
    callbacks = draw(st.lists(st.sampled_from(list(CALLBACKS)), unique=True, max_size=3))
    options += [
        f"callbacks=[{','.join(['default', *callbacks])}]",
        *(word for name in callbacks for word in CALLBACKS[name]),
    ]
    places = draw(st.lists(st.sampled_from(list(PLACES)), min_size=1, max_size=3))
    stops = [(draw(st.sampled_from(STOPS)), draw(st.integers(1, 12))) for _ in places[1:]]
    return Case(tuple(options), tuple(places), tuple(stops))
