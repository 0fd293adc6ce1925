"""A case of the fuzzer: a valid configuration, the places of a run, and its stops between them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

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


@dataclass(frozen=True)
class Place:
    """A strategy with its number of processes."""

    devices: int
    options: tuple[str, ...]
    data_parallel: int
    least_micro_batches: int = 1  # minimum of its schedule
    pipelined: bool = False


def _pipeline(devices: int, least: int, *options: str) -> Place:
    return Place(devices, ("strategy=pipeline", *options), 1, least, pipelined=True)


PLACES = {
    "auto x1": Place(1, ("strategy=auto",), 1),
    "ddp x2": Place(2, ("strategy=ddp",), 2),
    "fsdp x2": Place(2, ("strategy=fsdp",), 2),
    "pipeline x2": _pipeline(2, 2),
    "zero-1 x2": Place(2, ("strategy=ddp", "strategy.shard_optimizer=true"), 2),
    "sharded fsdp x2": Place(2, ("strategy=fsdp", "strategy.sharded_checkpoints=true"), 2),
    "sharded pipeline x2": _pipeline(2, 2, "strategy.sharded_checkpoints=true"),
    "gpipe x2": _pipeline(2, 1, "strategy.schedule=gpipe"),
    "zero bubble x2": _pipeline(2, 4, "strategy.schedule=zbv_zero_bubble"),
    "ddp x3": Place(3, ("strategy=ddp",), 3),
    "ddp x4": Place(4, ("strategy=ddp",), 4),
    "fsdp x4": Place(4, ("strategy=fsdp",), 4),
    "hsdp x4": Place(4, ("strategy=hsdp",), 4),
    "hybrid x4": Place(4, ("strategy=hybrid",), 2, 2, pipelined=True),
    "hybrid x4 of fsdp": Place(4, ("strategy=hybrid", "strategy.data_parallel=fsdp"), 2, 2, pipelined=True),
}
STOPS = ("on_train_batch_end", "on_train_batch_start", "on_validation_end", "on_train_epoch_end", "signal")


@dataclass(frozen=True)
class Case:
    """One draw.

    Attributes:
        options: overrides of the run, whatever the place.
        micro_batches: of a step, over all ways to have several: accumulated, or in a pipeline.
        places: where the run begins, and where it goes on after each stop.
        stops: a hook, or a signal, and the step from which on it ends the run; one less than places.
    """

    options: tuple[str, ...]
    micro_batches: int
    places: tuple[str, ...]
    stops: tuple[tuple[str, int], ...]

    def overrides(self, place: str) -> list[str]:
        """Return the overrides of a run in that place."""
        chosen = PLACES[place]
        name = "strategy.microbatches" if chosen.pipelined else "trainer.accumulate_grad_batches"
        return [*self.options, *chosen.options, f"trainer.devices={chosen.devices}", f"{name}={self.micro_batches}"]

    @property
    def way(self) -> str:
        """Return the places and the stops between them as one text, which `parse` reads."""
        stops = [f"{hook} {step}" for hook, step in self.stops]
        return ", ".join(word for pair in zip(self.places, [*stops, ""], strict=True) for word in pair if word)

    @property
    def command(self) -> str:
        """Return the command that repeats the case."""
        options = shlex.quote(" ".join(self.options))
        return f"python -m tests.fuzz --options {options} --micro-batches {self.micro_batches} --way '{self.way}'"


def parse(options: str, micro_batches: int, way: str) -> Case:
    """Return the case that a command describes."""
    words = way.split(", ")
    stops = tuple((hook, int(step)) for hook, step in (word.split(" ") for word in words[1::2]))
    return Case(tuple(options.split()), micro_batches, tuple(words[::2]), stops)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a valid case."""
    batch, micro_batches = draw(st.sampled_from([16, 24])), draw(st.sampled_from([1, 2, 4]))
    options = [f"data.batch_size={batch}", *MODELS[draw(st.sampled_from(list(MODELS)))]]
    options += [word for choices in CHOICES for word in draw(st.sampled_from(choices))]
    callbacks = draw(st.lists(st.sampled_from(list(CALLBACKS)), unique=True, max_size=3))
    options += [
        f"callbacks=[{','.join(['default', *callbacks])}]",
        *(word for name in callbacks for word in CALLBACKS[name]),
    ]
    mixed = any("mixup" in word or "cutmix" in word for word in options)
    fitting = [name for name, place in PLACES.items() if _fits(place, batch, micro_batches, mixed)]
    places = draw(st.lists(st.sampled_from(fitting), min_size=1, max_size=3))
    stops = [(draw(st.sampled_from(STOPS)), draw(st.integers(1, 12))) for _ in places[1:]]
    return Case(tuple(options), micro_batches, tuple(places), tuple(stops))


def _fits(place: Place, batch: int, micro_batches: int, mixed: bool) -> bool:
    """Whether the global batch divides evenly in that place, into pairs if images are mixed."""
    parts: Any = place.data_parallel * micro_batches * (2 if mixed else 1)
    return batch % parts == 0 and micro_batches >= place.least_micro_batches
