"""Rules of the source code that every contribution keeps."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

import onecurve
from tests.support.commands import TINY
from tests.support.commands import run as run_command

ROOT = Path(__file__).parents[1]
ENGINE = ROOT / "engine" / "onecurve"
SOURCES = sorted([*ENGINE.rglob("*.py"), *(ROOT / "src").rglob("*.py")])
YOURS = ("src.models", "src.data")  # what a user of the template edits
FACE = "onecurve"  # what those files import of the engine
# Parts that a user may delete, each with the files of conf/ that name it; CONTRIBUTING.md says so.
OPTIONAL = """
    scripts onecurve.extras.doctor onecurve.notebook onecurve.extras.report onecurve.optim.muon
    onecurve.observe.confusion onecurve.observe.gradients onecurve.run.ema
    onecurve.extras.plan.plan onecurve.extras.plan.pipelines onecurve.extras.plan.profile onecurve.extras.plan.step
    onecurve.extras.plan.strategies onecurve.parallel.ddp_spawn onecurve.parallel.dp onecurve.parallel.fsdp
    onecurve.parallel.pipeline
    src.models.airbench src.models.dcgan src.models.gan src.models.gan_samples
    src.models.preact_resnet src.models.resnet src.models.resnet9 src.models.vgg src.models.vit src.models.whitening
    src.models.wide_resnet src.data.sources.array_file src.data.sources.cifar src.data.sources.class_folders
    src.data.sources.download src.data.sources.huggingface
""".split()
_TRAIN_WITHOUT = """
import runpy, sys
sys.modules.update(dict.fromkeys({}))  # Python finds none of them
runpy.run_path("train.py", run_name="__main__")
"""

LAYERS = [  # of engine/onecurve, from the top down: each imports from those below it, and from itself
    "application",  # what train.py does with a command line
    "notebook",  # training from Python
    "protocols",  # what classes of users may offer
    "extras",  # what a run can do without: doctor, sweeps, plans, reports
    "launch",  # starts the ranks
    "run",  # one run on one rank
    "checks",  # what a run refuses or warns of while it trains
    "config",  # from the command line to one resolved configuration
    "parallel",  # strategies
    "observe",  # loggers, and callbacks that measure
    "optim",
    "data",  # the order of the samples, and their division among the ranks
    "random",  # random numbers by seed, epoch and sample
    "identity",  # whether two runs are one experiment
    "checkpoint",  # what is saved, and how a run goes on from it
    "network",  # networks and tensors, whatever the strategy
    "records",  # files, and the events of a run
    "process",  # the process of a rank: who started it, signals, devices
    "targets",  # the classes that a configuration names
    "patches",  # private names of other libraries
    "errors",
]
EXTRAS = ["doctor", "sweeps", "plan", "report", "jobs", "one_process"]  # of the folder `extras`, likewise


def _module(file: Path) -> str:
    root = ENGINE.parent if file.is_relative_to(ENGINE.parent) else ROOT
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _imports(file: Path, inside_functions: bool = True) -> set[str]:
    """Return the modules of the project that a file imports; `onecurve` for names of its face."""
    names: set[str] = set()
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree) if inside_functions else tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = f"{node.module}"
            path = module.replace(".", "/")
            is_package = module != FACE and any((root / path).is_dir() for root in (ROOT, ENGINE.parent))
            names |= {f"{module}.{alias.name}" for alias in node.names} if is_package else {module}
    return {name for name in names if f"{name}.".startswith(("src.", "onecurve."))}


def _layer(module: str) -> int:
    return LAYERS.index(module.split(".")[1])


def test_every_folder_of_the_engine_has_a_layer() -> None:
    folders = {path.stem for path in ENGINE.iterdir() if (path / "__init__.py").exists() or path.suffix == ".py"}
    assert folders - {"__init__"} == set(LAYERS)


@pytest.mark.parametrize("file", sorted(ENGINE.rglob("*.py")), ids=_module)
def test_the_engine_imports_only_from_layers_below(file: Path) -> None:
    imported = _imports(file)
    assert not {name for name in imported if name.startswith(YOURS)}
    if file != ENGINE / "__init__.py":
        assert FACE not in imported
        late = {name for name in imported if name.startswith("onecurve.extras.")} - _imports(
            file, inside_functions=False
        )
        assert not {name for name in imported - late if _layer(name) < _layer(_module(file))}


def test_few_places_load_what_a_run_can_do_without() -> None:
    """Each does so inside a function, if an option asks for it."""
    core = [file for file in ENGINE.rglob("*.py") if "extras" not in file.parts]
    loading = {_module(file) for file in core if any(name.startswith("onecurve.extras.") for name in _imports(file))}
    names = ("application", "config.resolve", "launch.outcome", "launch.restarts")
    assert loading == {f"onecurve.{name}" for name in names}


def test_extras_import_only_from_those_below() -> None:
    for file in (ENGINE / "extras").rglob("*.py"):
        own = EXTRAS.index(file.relative_to(ENGINE / "extras").parts[0]) if file.parent.name != "extras" else 0
        others = {name.split(".")[2] for name in _imports(file) if name.startswith("onecurve.extras.")}
        assert not [name for name in others if EXTRAS.index(name) < own], file


@pytest.mark.parametrize("file", [file for file in SOURCES if _module(file).startswith(YOURS)], ids=_module)
def test_your_files_import_the_face_of_the_engine(file: Path) -> None:
    assert {name for name in _imports(file) if not name.startswith(YOURS)} <= {FACE}


def test_every_name_of_the_face_exists() -> None:
    """A type checker reads the list; Python looks a name up when it is first used."""
    assert onecurve.__all__
    assert [name for name in onecurve.__all__ if not hasattr(onecurve, name)] == []


def test_plugins_import_only_sweeps_and_below() -> None:
    for file in (ROOT / "engine" / "hydra_plugins").glob("*.py"):
        assert min(map(_layer, _imports(file))) >= LAYERS.index("extras")


SWEEPS, NO_SWEEPS = ["onecurve.extras.sweeps"], ["~hydra.callbacks.sweep"]


@pytest.mark.parametrize(
    ("parts", "options"),
    [
        pytest.param([*OPTIONAL, *SWEEPS], ["report=true", *NO_SWEEPS], id="all"),
        pytest.param(OPTIONAL, ["report=true"], id="parts", marks=pytest.mark.slow),
        pytest.param(SWEEPS, ["report=false", *NO_SWEEPS], id="sweeps", marks=pytest.mark.slow),
    ],
)
def test_a_run_needs_only_the_parts_that_it_chooses(
    parts: list[str], options: list[str], small: list[str], tmp_path: Path
) -> None:
    assert [part for part in parts if not find_spec(part)] == []
    run = [*small, *TINY, "trainer.max_steps=2", "logger=none", f"run_dir={tmp_path}/run", *options]
    _, err = run_command(*run, program=("-c", _TRAIN_WITHOUT.format(parts)))
    assert ("no report.html" in err) == ("report=true" in options)
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_file()


def test_scripts_are_modules() -> None:
    """They run from the repository root, so none edits the search path."""
    assert not [file for file in (ROOT / "scripts").rglob("*.py") if "sys.path" in file.read_text()]


def test_imports_form_no_cycle() -> None:
    graph = {_module(file): _imports(file) for file in SOURCES}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_only_strategies_know_strategies(file: Path) -> None:
    if "parallel" not in file.parts:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.If | ast.IfExp):
                assert not re.search(r"strategy\w* (==|in)|isinstance\([^)]*Strategy", ast.unparse(node.test))


def test_files_are_short() -> None:
    assert len((ROOT / "train.py").read_text().splitlines()) < 80
    assert {file.name: lines for file in SOURCES if (lines := file.read_text().count("\n")) > 400} == {}


def test_every_object_configuration_has_a_target() -> None:
    groups = ("data", "model", "module", "optimizer", "scheduler", "strategy", "trainer", "logger")
    for group in groups:
        for file in (ROOT / "conf" / group).glob("*.yaml"):
            text = file.read_text()
            assert "_target_:" in text or "defaults:" in text or file.stem == "none", file
