"""Runs with `bit_exact=true` whose logged text, weights, buffers and moments must be equal to the last bit."""

import csv
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from engine.dev.gpu_check.case import Session, expect
from engine.dev.gpu_check.runs import SHORT_PARITY, checkpoint, run
from engine.dev.gpu_check.two_hosts import run_on_two_hosts
from onecurve.run.result import Result

PRECISIONS = ["32-true", "bf16-mixed"]
_MIDDLE = 3  # steps before the end; the epoch has more
_STOP = f"+callbacks.stop={{_target_: engine.dev.gpu_check.bits.SaveAndDie, step: {_MIDDLE}}}"
_OF_THIS_RUN = ("throughput/", "ranks/")  # columns of speed and memory
_CONTIGUOUS = "module.channels_last=false"  # FSDP keeps filters so


class Died(Exception):
    """Ends a run before its last step."""


class SaveAndDie(L.Callback):
    """Save `died.ckpt` in the run folder after some steps, then raise."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "died.ckpt")
            raise Died


def bits(precision: str) -> Callable[[Session], str]:
    """Return the check that a run has equal bits when it is repeated, and when it ends and is continued."""

    def check(session: Session) -> str:
        options = _options(session, precision)
        first, second = (run(session, name, *options) for name in ("first", "second"))
        count = expect_equal_bits(second, first, "the repeated run")
        with suppress(Died):
            run(session, "stopped", *options, _STOP)
        continued = run(session, "stopped", *options, f"ckpt_path={session.folder / 'stopped' / 'died.ckpt'}")
        expect_equal_bits(continued, first, "the continued run")
        return f"{count} values equal in a repeated run, and in one that ends in its middle and is continued"

    return check


def bits_compiled(session: Session) -> str:
    """Check that two compiled runs have equal bits."""
    options = [*_options(session, "32-true"), "module.compile=true"]
    first, second = (run(session, name, *options) for name in ("first", "second"))
    return f"{expect_equal_bits(second, first, 'the repeated run')} values equal in a repeated run"


def bits_on_two_hosts(strategy: str) -> Callable[[Session], str]:
    """Return the check that two ranks on one device have the bits of one process."""
    return _against_one(lambda session, *options: run_on_two_hosts(session, *options), strategy)


def bits_on_devices(strategy: str, devices: int) -> Callable[[Session], str]:
    """Return the check that ranks on several devices have the bits of one process."""
    return _against_one(lambda session, *options: run(session, *options, devices=devices), strategy)


def _against_one(train: Callable[..., Result], strategy: str) -> Callable[[Session], str]:
    def check(session: Session) -> str:
        counts = []
        for precision in PRECISIONS:
            options = [*_options(session, precision), _CONTIGUOUS, "trainer.max_steps=8"]
            alone = run(session, f"{precision}-alone", *options)
            ranks = train(session, f"{precision}-ranks", *options, f"strategy={strategy}")
            counts.append(f"{expect_equal_bits(ranks, alone, precision)} values of {precision}")
        return f"{' and '.join(counts)} equal to those of one process"

    return check


def _options(session: Session, precision: str) -> list[str]:
    """Return the options of 20 steps of the default model, or of eight steps of a tiny one on a CPU."""
    size = ["experiment=parity", "model.width=16"] if session.on_gpu else SHORT_PARITY
    return [*size, f"trainer.precision={precision}", "bit_exact=true", "virtual_ranks=4", "test=false"]


def expect_equal_bits(one: Result, other: Result, name: str) -> int:
    """Check that two runs have logged and learned the same to the last bit; return the number of compared values."""
    found, expected = _rows(one), _rows(other)
    expect(len(found) == len(expected) > 0, f"{name}: metrics.csv has {len(found)} rows, {len(expected)} expected")
    for row, reference in zip(found, expected, strict=True):
        differing = sorted(key for key in row.keys() | reference.keys() if row.get(key) != reference.get(key))
        values = [f"{key} is {row.get(key)}, {reference.get(key)} expected" for key in differing]
        expect(not values, f"{name}: step {reference.get('step')}: {'; '.join(values)}")
    tensors, references = dict(_tensors(one)), dict(_tensors(other))
    expect(tensors.keys() == references.keys(), f"{name}: the checkpoints have different tensors")
    wrong = [key for key, tensor in tensors.items() if not _have_equal_bits(tensor, references[key])]
    expect(not wrong, f"{name}: {len(wrong)} of {len(tensors)} tensors differ, such as {', '.join(wrong[:2])}")
    return sum(map(len, expected)) + sum(tensor.numel() for tensor in references.values())


def _rows(result: Result) -> list[dict[str, str]]:
    """Return the text of metrics.csv, by row and column, without what depends on the machine."""
    with (result.folder / "metrics.csv").open(newline="") as stream:
        return [
            {name: cell for name, cell in row.items() if cell and not name.startswith(_OF_THIS_RUN)}
            for row in csv.DictReader(stream)
        ]


def _tensors(result: Result) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights and buffers, and the optimizer's moments as `parameter/moment`."""
    content = checkpoint(result)
    yield from content["state_dict"].items()
    for optimizer in content["optimizer_states"]:
        names = [name for group in optimizer["param_groups"] for name in group["param_names"]]
        for number, moments in optimizer["state"].items():
            for key, value in moments.items():
                if isinstance(value, Tensor):
                    yield f"{names[number]}/{key}", value


def _have_equal_bits(ours: Tensor, theirs: Tensor) -> bool:
    is_alike = ours.dtype == theirs.dtype and ours.shape == theirs.shape
    return is_alike and ours.flatten().view(torch.uint8).equal(theirs.flatten().view(torch.uint8))
