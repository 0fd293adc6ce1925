"""Every YAML in conf/ is composed and built, and every choice of every group is trained; all are found by globbing.

Each experiment is one run. The choices that no experiment makes are combined into runs of the smallest network. `make
test-all` trains each choice separately.
"""

import contextlib
from itertools import combinations, zip_longest
from pathlib import Path

import hydra
import pytest

from src.engine.run.experiment import assemble
from src.engine.utils.errors import UserError
from tests.support.pool import Pool
from tests.support.runs import CONF, NEED_GPUS, compose, fit_ranks

GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")
Choice = tuple[str, str]  # group and name
# These need GPUs, or a package that is not installed (`tests/engine/observe/test_guard.py` checks the options).
NOT_BUILT: set[Choice] = {("logger", "mlflow"), *(("strategy", name) for name in NEED_GPUS)}
ALL: list[Choice] = [
    (group, file.stem)
    for group in GROUPS
    for file in sorted((CONF / group).glob("[!_]*.yaml"))
    if (group, file.stem) not in NOT_BUILT
]
EXPERIMENTS = [name for group, name in ALL if group == "experiment"]
# As small as a run can be, on local data.
TINY = [
    "data.batch_size=8",
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=2",
    "trainer.limit_val_batches=1",
    "trainer.log_every_n_steps=1",
]
SMALLEST = ["model=mlp", "model.hidden=[16]"]
SHRUNK = {("experiment", "wide_resnet"): ["model.width=1"]}  # a checkpoint of 36 million weights takes seconds


def chosen_by(experiment: str) -> set[Choice]:
    """Return the choices that an experiment makes, the defaults included."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra.compose("train", [f"experiment={experiment}"], return_hydra_config=True)
    choices = {(group, name) for group, name in cfg.hydra.runtime.choices.items() if group in GROUPS and name}
    choices |= {("callbacks", name) for name in ("default", *cfg.callbacks)}  # Hydra does not record lists of choices
    return choices - {("logger", cfg.hydra.runtime.choices.logger)}  # each run chooses its own


CHOSEN_BY = {name: chosen_by(name) for name in EXPERIMENTS}
REST = [choice for choice in ALL if choice not in set().union(*CHOSEN_BY.values())]


def shared_rows() -> list[tuple[Choice, ...]]:
    """Return rows that contain each remaining choice once, at most one of each group per row.

    Choices of `debug` and `preset` change so much that each has its own row. So has the dataset of Hugging Face, whose
    library has a stand-in in this process only.
    """
    apart = [choice for choice in REST if choice[0] in ("debug", "preset") or choice == ("data", "huggingface")]
    groups = [[choice for choice in REST if choice[0] == group and choice not in apart] for group in GROUPS]
    shared = [tuple(choice for choice in row if choice) for row in zip_longest(*groups)]
    return [(choice,) for choice in apart] + shared


def words(*choices: Choice) -> list[str]:
    """Return the overrides for these choices, on the smallest network unless they choose one."""
    groups = {group for group, _ in choices}
    overrides = [f"{group}={name}" for group, name in choices if group != "callbacks"]
    if callbacks := [name for group, name in choices if group == "callbacks"]:
        overrides.append(f"callbacks=[{','.join(dict.fromkeys(['default', *callbacks]))}]")
    model = [] if groups & {"model", "experiment"} else SMALLEST
    logger = [] if "logger" in groups else ["logger=none"]
    devices = 2 if "strategy" in groups and ("strategy", "auto") not in choices else 1
    shrunk = [word for choice in choices for word in SHRUNK.get(choice, [])]
    return [*model, *logger, *overrides, *shrunk, "trainer.accelerator=cpu", f"trainer.devices={devices}", *TINY]


def data_words(choices: set[Choice], local_data: dict[str, list[str]]) -> list[str]:
    """Return the overrides for local data: small shapes, unless the row chooses a dataset."""
    return local_data[next((name for group, name in choices if group == "data"), "shapes")]


def words_for_choice(group: str, name: str) -> list[str]:
    """Return the overrides of a run with one choice, and with its experiment if one makes that choice."""
    if group in ("module", "callbacks") and name != "default":
        for experiment, choices in CHOSEN_BY.items():
            if (group, name) in choices and (group, name) not in CHOSEN_BY["quickstart"]:
                return words(("experiment", experiment))
    return words((group, name))


def check_trains(overrides: list[str], pool: Pool, folder: Path) -> None:
    cfg = compose(folder, *overrides, quiet=False)
    records = fit_ranks(cfg, pool)
    assert (folder / "metrics.csv").read_text().count("\n") >= 2
    assert (folder / "config.yaml").is_file()
    monitored = cfg.callbacks.best.monitor if cfg.callbacks.best else "train/loss"
    assert all(len(record.indices) > 0 for record in records)
    assert all(monitored in record.metrics for record in records)


def row_id(choices: tuple[Choice, ...]) -> str:
    return " ".join(f"{group}={name}" for group, name in choices)


@pytest.mark.parametrize(
    "choice", [choice for choice in ALL if choice[0] != "experiment"], ids=lambda choice: "=".join(choice)
)
def test_builds(choice: Choice, local_data: dict[str, list[str]], folder: Path) -> None:
    """Misspelled options, wrong types and unused options fail here. Experiments are trained instead."""
    trainer, module, data = assemble(
        compose(folder, *data_words({choice}, local_data), *words_for_choice(*choice), quiet=False)
    )
    assert trainer.callbacks
    assert list(module.parameters())
    assert data.source


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiments_train(experiment: str, local_data: dict[str, list[str]], pool: Pool, folder: Path) -> None:
    data = local_data["cifar100" if experiment == "cifar100" else "shapes"]
    check_trains([*data, *words(("experiment", experiment))], pool, folder)


@pytest.mark.parametrize("choices", shared_rows(), ids=row_id)
def test_other_choices_train(
    choices: tuple[Choice, ...], local_data: dict[str, list[str]], pool: Pool, folder: Path
) -> None:
    check_trains([*data_words(set(choices), local_data), *words(*choices)], pool, folder)


def test_every_choice_is_trained() -> None:
    assert set(ALL) <= set().union(*CHOSEN_BY.values(), *shared_rows())


@pytest.mark.slow
@pytest.mark.parametrize("choice", ALL, ids=lambda choice: "=".join(choice))
def test_each_choice_trains(choice: Choice, local_data: dict[str, list[str]], pool: Pool, folder: Path) -> None:
    check_trains([*data_words({choice}, local_data), *words_for_choice(*choice)], pool, folder)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_two_choices_fit_together_or_are_refused(group: str, folder: Path) -> None:
    """No pair of choices ends in a traceback."""
    for first, second in combinations(ALL, 2):
        if first[0] == group != second[0]:
            overrides = [f"{choice[0]}={choice[1]}" for choice in (first, second)]
            cfg = compose(folder, *overrides, "trainer.accelerator=cpu", "trainer.devices=1", quiet=False)
            try:
                with contextlib.suppress(UserError):
                    assemble(cfg)
            except Exception as error:
                pytest.fail(f"{overrides}: {error}")
