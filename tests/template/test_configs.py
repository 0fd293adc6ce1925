"""Every YAML in conf/ is composed, built and trained; all are found by globbing.

The user's own choices are not trained: they are built, or only checked if they may need the user's data.
Each experiment is one run. The choices that no experiment makes are combined into runs of the smallest network. `make
test-all` trains each choice separately.
"""

import contextlib
from itertools import combinations, zip_longest
from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError

from onecurve.errors import UserError
from onecurve.run.experiment import assemble
from onecurve.targets import build, check_options
from tests.support.choices import Choice, is_own
from tests.support.pool import Pool
from tests.support.runs import CONF, NEED_GPUS, compose, fit_ranks

GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")
# These need GPUs, or a package that is not installed (`tests/engine/observe/test_guard.py` checks the options).
NOT_BUILT: set[Choice] = {("logger", "mlflow"), *(("strategy", name) for name in NEED_GPUS)}
FOUND: list[Choice] = [
    (group, file.stem)
    for group in GROUPS
    for file in sorted((CONF / group).glob("[!_]*.yaml"))
    if (group, file.stem) not in NOT_BUILT
]
FILES = {("data", "folder"), ("data", "huggingface"), ("data", "npz")}  # they read the user's own files
EXAMPLE = {("data", "brackets"), ("module", "brackets")}  # the parts of an own project, which need each other
# Strategies are no part of the rows below: tests/engine/parity makes a run with each, found by globbing as well.
# As small as a run can be, on local data.
TINY = [
    "data.batch_size=8",
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=2",
    "trainer.limit_val_batches=1",
    "trainer.log_every_n_steps=1",
]
SMALLEST = ["model=mlp", "model.hidden=[16]"]
SHRUNK = {
    ("experiment", "wide_resnet"): ["model.width=1"],  # a checkpoint of 36 million weights takes seconds
    ("preset", "gpu"): ["module.compile=false"],  # as does compilation on a CPU
}


def chosen_by(experiment: str) -> set[Choice]:
    """Return the choices that an experiment makes, the defaults included."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra.compose("train", [f"experiment={experiment}"], return_hydra_config=True)
    choices = {(group, name) for group, name in cfg.hydra.runtime.choices.items() if group in GROUPS and name}
    choices |= {("callbacks", name) for name in ("default", *cfg.callbacks)}  # Hydra does not record lists of choices
    return choices - {("logger", cfg.hydra.runtime.choices.logger)}  # each run chooses its own


def is_own_recipe(choice: Choice) -> bool:
    """Return whether a choice is an experiment that makes one of the user's own choices, or reads the user's files."""
    group, name = choice
    return group == "experiment" and not chosen_by(name).isdisjoint({*OWN, *FILES})


# The recipe of resnet18 with larger networks, which tests/template/models trains as well.
SAME_RECIPE = ("resnet34", "resnet50")
OWN = [choice for choice in FOUND if is_own(choice)]
OWN += [choice for choice in FOUND if choice not in OWN and is_own_recipe(choice)]
ALL = [choice for choice in FOUND if choice not in OWN]
EXPERIMENTS = [name for group, name in ALL if group == "experiment"]
CHOSEN_BY = {name: chosen_by(name) for name in EXPERIMENTS}
REST = [choice for choice in ALL if choice[0] != "strategy" and choice not in set().union(*CHOSEN_BY.values())]


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


def data_words(choices: tuple[Choice, ...], local_data: dict[str, list[str]]) -> list[str]:
    """Return the overrides for local data: small shapes, unless the row or its experiment chooses a dataset."""
    by_experiment = set().union(*(CHOSEN_BY[name] for group, name in choices if group == "experiment"))
    chosen = [*choices, *(by_experiment - {("data", "cifar10")})]
    return local_data[next((name for group, name in chosen if group == "data"), "shapes")]


def row_for_choice(choice: Choice) -> tuple[Choice, ...]:
    """Return the row of a run with one choice: its experiment, if the choice needs one that makes it."""
    if choice in EXAMPLE or (choice[0] in ("module", "callbacks") and choice not in CHOSEN_BY["quickstart"]):
        for experiment, choices in CHOSEN_BY.items():
            if choice in choices:
                return (("experiment", experiment),)
    return (choice,)


def check_trains(overrides: list[str], pool: Pool, folder: Path) -> None:
    cfg = compose(folder, *overrides, quiet=False)
    records = fit_ranks(cfg, pool)
    assert (folder / "metrics.csv").read_text().count("\n") >= 2
    assert (folder / "config.yaml").is_file()
    expected = {cfg.callbacks.best.monitor, cfg.optimized_metric} if cfg.callbacks.best else {"train/loss"}
    assert all(len(record.indices) > 0 for record in records)
    assert all(expected <= record.metrics.keys() for record in records)


def check_without_data(choice: Choice, folder: Path) -> None:
    """Check the options of an own dataset or experiment, and build the module of an experiment."""
    group, name = choice
    if group == "experiment":
        cfg = compose(folder, f"experiment={name}", quiet=False)
        check_options(cfg)
        build(cfg.module)
        return
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        node = hydra.compose("train", [f"data={name}"]).data  # it need not suit the default network
    check_options(OmegaConf.create({"data": OmegaConf.to_container(node, resolve=True)}))


def row_id(choices: tuple[Choice, ...]) -> str:
    return " ".join(f"{group}={name}" for group, name in choices)


# The project's choices are built where they are trained; one of them keeps the list from being empty.
@pytest.mark.parametrize(
    "choice",
    [("model", "mlp"), *(("experiment", name) for name in SAME_RECIPE), *OWN],
    ids=lambda choice: "=".join(choice),
)
def test_builds(choice: Choice, local_data: dict[str, list[str]], folder: Path) -> None:
    """Misspelled options, wrong types and unused options fail here."""
    if choice in OWN and choice[0] in ("data", "experiment"):
        check_without_data(choice, folder)
        return
    row = row_for_choice(choice)
    test = ["test=false"] if choice in OWN else []  # a module need not have a test_step
    trainer, module, data = assemble(compose(folder, *data_words(row, local_data), *words(*row), *test, quiet=False))
    assert trainer.callbacks
    assert list(module.parameters())
    assert data.description


@pytest.mark.parametrize(
    "experiment",
    [pytest.param(name, marks=pytest.mark.slow if name in SAME_RECIPE else []) for name in EXPERIMENTS],
)
def test_experiments_train(experiment: str, local_data: dict[str, list[str]], pool: Pool, folder: Path) -> None:
    row = (("experiment", experiment),)
    check_trains([*data_words(row, local_data), *words(*row)], pool, folder)


@pytest.mark.parametrize("choices", shared_rows(), ids=row_id)
def test_other_choices_train(
    choices: tuple[Choice, ...], local_data: dict[str, list[str]], pool: Pool, folder: Path
) -> None:
    check_trains([*data_words(choices, local_data), *words(*choices)], pool, folder)


def test_every_choice_is_trained() -> None:
    trained = set().union(*CHOSEN_BY.values(), *shared_rows())
    assert {choice for choice in ALL if choice not in trained and choice[0] != "strategy"} == set()


@pytest.mark.slow
@pytest.mark.parametrize("choice", ALL, ids=lambda choice: "=".join(choice))
def test_each_choice_trains(choice: Choice, local_data: dict[str, list[str]], pool: Pool, folder: Path) -> None:
    row = row_for_choice(choice)
    check_trains([*data_words(row, local_data), *words(*row)], pool, folder)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_two_choices_fit_together_or_are_refused(group: str, folder: Path) -> None:
    """No pair of choices ends in a traceback."""
    for first, second in combinations([choice for choice in ALL if choice not in EXAMPLE], 2):
        if first[0] == group != second[0]:
            overrides = [f"{choice[0]}={choice[1]}" for choice in (first, second)]
            try:
                with contextlib.suppress(
                    UserError, InterpolationKeyError
                ):  # one line in `resolve_config`, as the other
                    settings = [*overrides, "trainer.accelerator=cpu", "trainer.devices=1"]
                    assemble(compose(folder, *settings, quiet=False))
            except Exception as error:
                pytest.fail(f"{overrides}: {error}")
