"""No network trains as another one in silence: on any hardware it trains as on one process, or is refused in one line.

A name is a network or a module of `tests/support/zoo.py`; `NETWORK:LAYER` is a network with a layer of
`tests/support/layers.py`. `make test` trains the ordinary networks that a place could change, each at one of them, and
`make test-all` all networks at all places.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from onecurve.errors import UserError
from tests.support import zoo
from tests.support.comparison import TOLERANCE, check_replicas, distances
from tests.support.pool import Pool, RankFailed
from tests.support.runs import Record, compose, fit

TASK = [  # 8 steps, 4 per epoch; 7 samples to validate, after each epoch
    "experiment=parity",
    "data.source.train_size=79",
    "data.source.test_size=25",
    "data.batch_size=16",
    "trainer.max_steps=8",
    "callbacks=none",
]
PLACES = {
    "accumulate 4": ["trainer.accumulate_grad_batches=4"],
    "ddp x2": ["strategy=ddp", "trainer.devices=2"],
    "fsdp x2": ["strategy=fsdp", "trainer.devices=2"],
    "pipeline x2": ["strategy=pipeline", "trainer.devices=2"],
    "pipeline x2, interleaved": ["strategy=pipeline", "trainer.devices=2", "strategy.schedule=interleaved_zero_bubble"],
    "pipeline x2, zbv": ["strategy=pipeline", "trainer.devices=2", "strategy.schedule=zbv_zero_bubble"],
    "pipeline x4, gpipe": ["strategy=pipeline", "trainer.devices=4", "strategy.schedule=gpipe"],
    "hybrid x4": ["strategy=hybrid", "trainer.devices=4", "strategy.microbatches=2"],
    "hybrid x4 of fsdp": [
        "strategy=hybrid",
        "trainer.devices=4",
        "strategy.microbatches=2",
        "strategy.data_parallel=fsdp",
    ],
}
Refusals = dict[str, str]  # the message by the beginning of the place's name; at other places the run is equal
ANY = ""  # equal or refused, with any message


def _on(*places: str, message: str = ANY) -> Refusals:
    return dict.fromkeys(places, message)


PIPELINES = _on("pipeline", "hybrid")
FOUR_STAGES = _on("pipeline x2,", "pipeline x4", message="blocks with parameters to train")
RANDOM = _on("", message="draws numbers that would depend")
MICRO_BATCHES = _on("accumulate", "pipeline", "hybrid")
ORDINARY: dict[str, Refusals] = {
    "UNet": {},
    "DenseNet": {},
    "residuals:squeeze_excitation": {},
    "ClassToken:attention": {},
    "shared_in_block": {},
    "frozen_layers": FOUR_STAGES,
    "frozen_block": FOUR_STAGES,
    "LoopedList": {},
    "inplace_relu": {},
    "residuals:instance_norm": {},
    "residuals:group_norm": {},
    "tuples": _on("pipeline x2,", "pipeline x4", message="no cut into 4 stages"),
    "residuals:timm": {},
    "tied": PIPELINES,
    "Unused": _on("ddp", message="find_unused_parameters"),
    "Skips": {},
    "Tied": PIPELINES,
}
UNUSUAL: dict[str, Refusals] = {
    "NoGrad": PIPELINES,
    "GradientReversal": PIPELINES,
    "RowsOfParameter": PIPELINES,
    "Annealed+Anneals": PIPELINES,
    "hooked": _on("fsdp", "hybrid x4 of fsdp"),
    # Modules
    "L1Penalty": _on("fsdp") | PIPELINES,
    "Temperature": _on("fsdp", "hybrid x4 of fsdp", message="cannot shard the scalar temperature")
    | _on("pipeline", "hybrid", message="temperature is not one of them"),
    "HalvesImages": {},
    "OwnBackward": PIPELINES,
    "OwnClipping": PIPELINES,
    # Layers with a state
    "SharedNorm": MICRO_BATCHES,
    "residuals:checkpointed_norm": MICRO_BATCHES,
    "residuals:checkpointed_norm_reentrant": MICRO_BATCHES,
    "residuals:counts_passes": MICRO_BATCHES,
    "residuals:spectral_norm": MICRO_BATCHES,
    "MovingAverage": _on(""),
    "residuals:centered": _on(""),
    "residuals:instance_norm_tracking": _on(""),
    # Random numbers
    "residuals:checkpointed_dropout": {},
    "residuals:checkpointed_dropout_reentrant": PIPELINES,
    "residuals:functional_dropout": {},
    "residuals:alpha_dropout": RANDOM,
    "residuals:dropout2d": {},
    "residuals:rrelu": RANDOM,
    "residuals:noise": {},
    "residuals:random_scale": RANDOM,
    "residuals:python_random": PIPELINES,
    "residuals:numpy_random": PIPELINES,
    "Reparameterized": PIPELINES,
    "ClassToken:encoder": {},
    "ClassToken:encoder_tokens_first": _on(""),
    "ClassToken:attention_dropout": {},
    "ClassToken:attention_dropout_tokens_first": _on(""),
}
NETWORKS = ORDINARY | UNUSUAL
QUICK = {
    ("UNet", "accumulate 4"),
    ("ClassToken:attention", "pipeline x2"),
    ("shared_in_block", "pipeline x2, interleaved"),
    ("frozen_layers", "pipeline x2, zbv"),
    ("frozen_block", "pipeline x4, gpipe"),
    ("inplace_relu", "pipeline x2"),
    ("tuples", "fsdp x2"),
    ("tied", "pipeline x2, interleaved"),
    ("Unused", "ddp x2"),
    ("Unused", "pipeline x2, zbv"),
    ("Skips", "pipeline x4, gpipe"),
    *(("Tied", place) for place in ("fsdp x2", "pipeline x2")),
}
ROWS = [
    pytest.param(name, place, id=f"{name}, {place}", marks=[] if (name, place) in QUICK else pytest.mark.slow)
    for name in NETWORKS
    for place in PLACES
]


def _overrides(name: str) -> list[str]:
    """Return the overrides that choose a network, `NETWORK:LAYER`, a module, or `NETWORK+MODULE`."""
    chosen = []
    for part in name.split("+"):
        target, _, layer = part.partition(":")
        found: Any = getattr(zoo, target)
        is_module = isinstance(found, type) and issubclass(found, L.LightningModule)
        chosen.append(f"{'module' if is_module else 'model'}._target_=tests.support.zoo.{target}")
        if layer:
            chosen.append(f"+model.layer={layer}")
    return chosen


class RefusedInTime(L.Callback):
    """Checks that a run is refused before its first optimizer step, or before it goes on with another network."""

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, UserError) and "has changed" not in str(exception):
            assert trainer.global_step == 0, f"refused after {trainer.global_step} steps: {exception}"


@pytest.fixture(scope="session")
def single_process(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Record]:
    """Return a function that trains a network on a single process."""

    @functools.cache
    def run(name: str) -> Record:
        return fit(compose(tmp_path_factory.mktemp("single"), *small, *TASK, *_overrides(name)))

    return run


@pytest.mark.parametrize(("name", "place"), ROWS)
def test_trains_alike_or_is_refused(
    name: str,
    place: str,
    single_process: Callable[[str], Record],
    pool: Pool,
    small: list[str],
    folder: Path,
    record_property: Callable[[str, object], None],
) -> None:
    cfg = compose(folder, *small, *TASK, *_overrides(name), *PLACES[place])
    refusal = next((text for start, text in NETWORKS[name].items() if place.startswith(start)), None)
    try:
        devices = cfg.trainer.devices
        records = [fit(cfg, RefusedInTime())] if devices == 1 else pool.run(devices, fit, cfg, RefusedInTime())
    except (UserError, RankFailed) as error:
        message = str(error) if isinstance(error, UserError) else _user_error(error)
        assert refusal is not None, message
        assert re.search(refusal, message)
        record_property("refused", message)
        return
    assert not refusal, "it trains"
    reference = single_process(name)
    assert {tensor for record in records for tensor in record.final} == set(reference.final)
    record_property("distances", [distances(record, reference) for record in records])
    for record in records:
        assert max(distances(record, reference)) < TOLERANCE
        for metric in ("val/loss", "val/acc"):
            assert record.metrics[metric] == pytest.approx(reference.metrics[metric], rel=TOLERANCE), metric
    check_replicas(records)


def _user_error(error: RankFailed) -> str:
    """Return the message of the UserError of a rank, which is the last line of its traceback; or raise the error."""
    found = re.findall(r"^onecurve\.errors\.UserError: (.*)$", str(error), re.MULTILINE)
    if not found or "AssertionError" in str(error):
        raise error
    return found[0]
