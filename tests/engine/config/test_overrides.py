"""The overrides that Hydra gets for a typed command line, and its errors in one line, without a run."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException

from onecurve import application as program
from onecurve.config import command_line
from onecurve.config.command_line import complete_overrides, errors_explained, quote
from onecurve.errors import UserError

FULL_ERROR = "HYDRA_FULL_ERROR"
FILES = {
    "train.yaml": "defaults: [_self_, model: mlp, optimizer: sgd]\nruntime: {run_id: 1}\nruntimes: 1\n",
    "model/mlp.yaml": "_target_: Mlp\nhidden: 4\nlayers: {depth: 2, _private: 1}\n",
    "model/vit.yaml": "_target_: ViT\npatches: 4\n",
    "model/_base.yaml": "{}\n",
    "optimizer/sgd.yaml": "_target_: SGD\nlr: 0.1\n",
    "optimizer/mlp2.yaml": "_target_: SGD\n",
}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a project with a small conf/, and without a run."""
    for name, text in FILES.items():
        (tmp_path / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / name).write_text(text)
    monkeypatch.setattr(command_line, "CONF", tmp_path / "conf")
    monkeypatch.setattr(command_line, "PROJECT", tmp_path)
    monkeypatch.setattr(command_line, "started_rank", lambda: 0)
    return tmp_path


def make_run(folder: Path, *overrides: str, seconds: int = 0, checkpoints: bool = True) -> Path:
    """Make a run folder with these saved overrides, that was started at some time."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"runtime": {"overrides": [*overrides]}}))
    os.utime(folder / "config.yaml", (seconds, seconds))
    if checkpoints:
        (folder / "checkpoints" / "last.ckpt").touch()
    return folder


def message(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        complete_overrides(words)
    return str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["-m", "seed=1", "model=vit", "+x.y=[a,b]", "~model.hidden", "optimizer.lr=null", "seed=null"],
        ["ckpt_path=no/such/run", "init_from=weights.ckpt"],
        ["+ckpt_path", "ckpt_path", "model"],
        ["train.yaml=null"],
    ],
)
def test_other_words_stay_as_they_are(words: list[str]) -> None:
    assert complete_overrides(words) == words


def test_the_flag_of_a_sweep_comes_first() -> None:
    assert message("seed=1,2", "run_dir=a", "-m") == (
        "run_dir=a: the jobs of a sweep have folders of their own; set hydra.sweep.dir for all of them"
    )
    assert complete_overrides(["model=vit", "--multirun", "seed=1,2"]) == ["--multirun", "model=vit", "seed=1,2"]


def test_no_choice_of_a_group(project: Path) -> None:
    for word in ("model=null", "+model=null", "model=1e3", "model=inf"):
        assert message("seed=1", word) == f"{word}: give one of mlp, vit, or ~model to leave it out"


@pytest.mark.parametrize("word", ["ckpt_path=", "init_from=''", 'run_dir=""', "predict=", "sweep=", "data.root="])
def test_an_empty_path(word: str) -> None:
    assert message(word) == f"{word} is empty: give a path, or leave the option out"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("init_from=a=b", "init_from='a=b'"),
        ("+run_dir=a=b", "+run_dir='a=b'"),
        ("run_dir=it's=b", r"run_dir='it\'s=b'"),
        ("run_dir='a=b'", "run_dir='a=b'"),
        ('run_dir="a=b"', 'run_dir="a=b"'),
        ("run_dir=a", "run_dir=a"),
        ("run_dir=a é", "run_dir='a é'"),
        ("data.root=~/a", f"data.root={Path.home()}/a"),
        ('init_from="~/a"', f'init_from="{Path.home()}/a"'),
        ("data.root=~/a,~/b", f"data.root={Path.home()}/a,{Path.home()}/b"),
        ("init_from=a,'b c'", "init_from=a,'b c'"),
        ("init_from=choice('a','b')", "init_from=choice('a','b')"),
        ("hydra.sweep.dir=it's", r"hydra.sweep.dir='it\'s'"),
        (r"run_dir=${a:b}/c d-e.f,g\h", r"run_dir=${a:b}/c d-e.f,g\h"),
        ("tags=a=b", "tags=a=b"),
    ],
)
def test_paths_with_an_equals_sign_are_quoted(word: str, expected: str) -> None:
    assert complete_overrides([word]) == [expected]


@pytest.mark.parametrize(("value", "expected"), [("a b", "'a b'"), (1, "'1'"), ("it's", r"'it\'s'"), ("", "''")])
def test_quoted_values(value: Any, expected: str) -> None:
    assert quote(value) == expected


def test_a_run_folder_restores_its_overrides(tmp_path: Path) -> None:
    folder, own = make_run(tmp_path / "a run", "model=vit", "optimizer.lr=0.5"), "it's x=1"
    word = f"ckpt_path='{folder}'"
    assert complete_overrides(["seed=1", word, "fit=false"]) == [
        "seed=1",
        "model=vit",
        "optimizer.lr=0.5",
        word,
        "fit=false",
    ]
    assert complete_overrides([f'ckpt_path="{folder}"'])[:2] == ["model=vit", "optimizer.lr=0.5"]
    assert complete_overrides([f"ckpt_path={make_run(tmp_path / own, 'seed=3')}"])[0] == "seed=3"
    assert complete_overrides([f"init_from={folder}"]) == [f"init_from={folder}"], "a new run has its own"


def test_a_damaged_configuration_of_a_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for text in ("", "runtime: ["):
        (folder / "config.yaml").write_text(text)
        assert (
            message(f"ckpt_path={folder}") == f"{folder}/config.yaml is damaged, or not that of a run of this version"
        )


def test_a_run_goes_on_in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    word = f"ckpt_path={make_run(tmp_path / 'run', 'seed=1', 'run_dir=where/it/was/before')}"
    assert message("run_dir=other", word) == (
        f"run_dir=other: ckpt_path continues a run in its own folder, {tmp_path}/run: "
        "leave run_dir out, or start a new run from its weights with init_from"
    )
    assert message("run_dir=run/inside", word).startswith("run_dir=run/inside: ckpt_path continues a run in its own")
    assert complete_overrides([word, "run_dir=run"])[0] == "seed=1"
    assert complete_overrides([word, "run_dir=other", "fit=False"])[0] == "seed=1", (
        "an evaluation has a folder of its own"
    )
    assert complete_overrides([word])[0] == "seed=1", "a run may have moved"


@pytest.mark.parametrize(
    ("saved", "words", "kept"),
    [
        (["seed=1"], ["seed=2"], []),
        (["seed=1"], ["+seed=2"], []),
        (["+seed=1"], ["~seed"], []),
        (["~seed"], ["seed=1"], []),
        (["optimizer.lr=1"], ["optimizer.momentum=2"], ["optimizer.lr=1"]),
        (["optimizer.lr=1", "optimizer=adam", "model=vit"], ["optimizer=sgd"], ["model=vit"]),
        (["optimizer=adam"], ["optimizer.lr=2"], ["optimizer=adam"]),
        (["hydra/launcher=joblib"], ["hydra.launcher=basic"], []),
        (["optimizers.lr=1"], ["optimizer=sgd"], ["optimizers.lr=1"]),
        (["a.b.c=1", "a.bc=2"], ["a.b=2"], ["a.bc=2"]),
    ],
)
def test_words_replace_saved_overrides(saved: list[str], words: list[str], kept: list[str], tmp_path: Path) -> None:
    word = f"ckpt_path={make_run(tmp_path / 'run', *saved)}"
    assert complete_overrides([word, *words]) == [*kept, word, *words]


@pytest.mark.parametrize("flags", [[], ["-m"], ["--multirun"]])
def test_a_sweep_restores_its_overrides(flags: list[str], tmp_path: Path) -> None:
    overrides = {
        "hydra": ["hydra.sweep.dir=old", "hydra.mode=MULTIRUN", "hydra.launcher.n_jobs=2"],
        "task": ["seed=1,2", "model=vit"],
    }
    (tmp_path / "multirun.yaml").write_text(yaml.safe_dump({"hydra": {"overrides": overrides}}))
    expected = ["hydra.launcher.n_jobs=2", "seed=1,2", f"hydra.sweep.dir='{tmp_path}'"]
    found = complete_overrides([*flags, "fit=true", f"sweep={tmp_path}", "model=mlp"])
    assert found == [*(flags or ["-m"]), "fit=true", *expected, "model=mlp"]


def test_a_sweep_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "multirun.yaml").write_text("hydra: {overrides: {hydra: [], task: []}}")
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    expected = ["-m", f"hydra.sweep.dir='{tmp_path}'"]
    assert complete_overrides([f"sweep=~/{tmp_path.name}"]) == expected
    monkeypatch.chdir(tmp_path.parent)
    assert complete_overrides([f"sweep={tmp_path.name}"]) == expected


def test_a_folder_without_a_sweep(tmp_path: Path) -> None:
    file = tmp_path / "multirun.yaml"
    assert message(f"sweep={tmp_path}") == (
        f"sweep={tmp_path}: there is no sweep in that folder ({file}): give that of a sweep"
    )


@pytest.mark.parametrize("option", ["ckpt_path", "init_from"])
def test_the_best_checkpoint_of_a_run(option: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    assert complete_overrides([f"{option}={folder}/best"]) == [f"{option}='{folder}/checkpoints/best.ckpt'"]
    assert complete_overrides([f"{option}='{folder}/last'"]) == [f"{option}='{folder}'"]
    assert complete_overrides([f"{option}={tmp_path}/no run/best"]) == [f"{option}={tmp_path}/no run/best"]
    assert complete_overrides([f"{option}={folder}/latest"]) == [f"{option}={folder}/latest"]


def test_the_best_checkpoint_of_a_run_in_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert complete_overrides(["init_from=run/best"]) == ["init_from='run/checkpoints/best.ckpt'"]


def test_only_checkpoints_are_looked_for(tmp_path: Path) -> None:
    assert complete_overrides(["run_dir=best", "x=last"]) == ["run_dir=best", "x=last"]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_newest_run(
    rank: int, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only rank zero tells it. A job of a sweep is a run as well, and one without a checkpoint is none."""
    monkeypatch.setattr(command_line, "started_rank", lambda: rank)
    runs = project / "runs"
    make_run(runs / "z old", seconds=100)
    make_run(runs / "newest", seconds=300, checkpoints=False)
    job = make_run(runs / "sweep" / "0", seconds=200)
    make_run(runs / "too" / "deep" / "0", seconds=400)
    assert complete_overrides(["init_from=last"]) == [f"init_from='{job}'"]
    assert complete_overrides(["init_from=best"]) == [f"init_from='{job}/checkpoints/best.ckpt'"]
    told = "".join(f"init_from={name}: the newest run is {job}\n" for name in ("last", "best"))
    assert capsys.readouterr().err == (told if rank == 0 else "")
    alone = make_run(runs / "a", seconds=250)
    assert complete_overrides(["init_from=last"]) == [f"init_from='{alone}'"]


def test_there_is_no_run_yet(project: Path) -> None:
    assert message("ckpt_path=last") == (
        f"ckpt_path=last: there is no run with a checkpoint in {project}/runs: give the folder of a run"
    )


@pytest.fixture
def application(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Return what an application calls before it starts."""
    calls: list[Any] = []
    monkeypatch.setattr(sys, "argv", ["train.py", "run_dir=a=b"])
    monkeypatch.setattr(program, "PROJECT", tmp_path)
    monkeypatch.setattr(program, "load_dotenv", calls.append)
    monkeypatch.setattr(program, "forget_other_ranks", lambda: calls.append("forget"))
    monkeypatch.setattr(program, "TRACEBACK_WANTED", False)
    return calls


def run_application(main: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the program with another function in the place of Hydra's."""
    monkeypatch.setattr("hydra.main", lambda **_: lambda job: main)
    return program.main()


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (None, 0, ""),
        (UserError("seed=x: give a number"), 1, "error: seed=x: give a number\n"),
        (KeyboardInterrupt(), 130, "stopped by SIGINT\n"),
        (ConfigCompositionException("a\n  b"), 1, "error: a b\n"),
    ],
)
def test_exit_codes(
    error: BaseException | None,
    code: int,
    printed: str,
    application: list[Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    project: Path,
) -> None:
    monkeypatch.setenv(FULL_ERROR, "before")

    def main() -> None:
        application.append((list(sys.argv), os.environ[FULL_ERROR]))
        if error:
            raise error

    assert run_application(main, monkeypatch) == code
    assert capsys.readouterr().err == printed
    assert os.environ[FULL_ERROR] == "before"
    assert application == [project / ".env", "forget", (["train.py", "run_dir='a=b'"], "1")]


def test_an_error_is_explained_with_the_typed_choices(
    application: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        raise ConfigCompositionException("Could not override 'model.patchs'")

    monkeypatch.setattr(sys, "argv", ["train.py", "model=vit"])
    assert run_application(main, monkeypatch) == 1
    assert "did you mean model.patches?" in capsys.readouterr().err


def test_errors_that_are_shown_in_full(application: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FULL_ERROR, raising=False)

    def main() -> None:
        raise application[0]

    application.insert(0, ZeroDivisionError("of the program"))
    with pytest.raises(ZeroDivisionError):
        run_application(main, monkeypatch)
    assert os.environ[FULL_ERROR] == ""
    monkeypatch.setattr(program, "TRACEBACK_WANTED", True)
    application[0] = UserError("with its traceback")
    with pytest.raises(UserError, match="with its traceback"):
        run_application(main, monkeypatch)


def test_a_traceback_is_wanted_if_hydra_is_asked_for_it() -> None:
    assert (os.environ.get(FULL_ERROR) == "1") is program.TRACEBACK_WANTED


def explained(error: Exception, *words: str) -> str:
    with pytest.raises(UserError) as caught, errors_explained(words):
        raise error
    assert caught.value.__cause__ is error
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("model/mlq", None, "model=mlq: did you mean mlp?"),
        ("model/xyz", None, "model=xyz: known: mlp, vit"),
        ("model/xyz", ["a", "_b"], "model=xyz: known: a"),
        ("optimizer/vit", None, "optimizer=vit: known: mlp2, sgd; there is model=vit"),
        ("callbacks/mlp2", ["ema"], "callbacks=mlp2: known: ema; there is optimizer=mlp2"),
        ("a/b/sgd", ["c"], "a/b=sgd: known: c; there is optimizer=sgd"),
        ("experiment/model/mlp", None, "experiment: write `- override /model: mlp` among the `defaults` of its file"),
        ("experiment/a/mlp", ["c"], "experiment/a=mlp: known: c; there is model=mlp"),
    ],
)
def test_an_unknown_choice_of_a_group(name: str, options: list[str] | None, expected: str, project: Path) -> None:
    word = f"{name.rpartition('/')[0]}=x"
    assert explained(MissingConfigException("missing", name, options), word) == expected


def test_a_default_choice_without_a_file(project: Path) -> None:
    (project / "conf" / "train.yaml").write_text("defaults: [{model: gone}]")
    found = explained(MissingConfigException("missing", "model/gone", None), "optimizer=sgd")
    assert (
        found
        == "conf/train.yaml has model: gone among its `defaults`, and conf/model/ lacks that file: known: mlp, vit"
    )


def test_a_choice_that_is_in_two_groups(project: Path) -> None:
    (project / "conf" / "optimizer" / "vit.yaml").write_text("{}")
    found = explained(MissingConfigException("missing", "data/vit", ["shapes"]), "data=vit")
    assert found == "data=vit: known: shapes; there is model=vit and optimizer=vit"


def test_a_missing_file_without_a_group() -> None:
    assert explained(MissingConfigException("no such\nfile", "train")) == "no such file"


@pytest.mark.parametrize(
    ("name", "words", "hint"),
    [
        ("hidden", (), "did you mean model.hidden?"),
        ("model.hiden", (), "did you mean model.hidden?"),
        ("depth", (), "did you mean model.layers.depth?"),
        ("model.patchs", ("model=vit",), "did you mean model.patches?"),
        ("model.patchs", (), "python train.py --cfg job lists all"),
        ("modle", (), "did you mean model?"),
        ("run_id", (), "python train.py --cfg job lists all"),
        ("private", (), "python train.py --cfg job lists all"),
    ],
)
def test_an_unknown_option(name: str, words: tuple[str, ...], hint: str) -> None:
    for start in ("override", "delete from config."):
        error = ConfigCompositionException(f"Could not {start} '{name}'.\nMore lines")
        assert (
            explained(error, *words) == f"{name} is no option here; {hint} (+{name}=... adds it to the configuration)"
        )


def test_names_of_options(project: Path) -> None:
    """Those that the program sets, and those of Hydra itself, are none."""
    names = {"model", "optimizer", "runtimes", "model.hidden", "model.layers.depth", "optimizer.lr"}
    assert command_line._names_of_options([]) == names
    with_vit = names - {"model.hidden", "model.layers.depth"} | {"model.patches"}
    assert command_line._names_of_options(["model=vit", "seed=1", "optimizer"]) == with_vit


def test_a_recipe_without_its_first_line() -> None:
    found = explained(ConfigCompositionException("In 'experiment/mine': Could not override 'model@experiment.model'."))
    assert found == "begin conf/experiment/mine.yaml with the line `# @package _global_`"


def test_other_errors_are_one_line() -> None:
    assert explained(ConfigCompositionException("Some\n\n  lines")) == "Some lines"
    assert explained(OverrideParseException("a=[", "no\nend")) == "a=[: no end"
    assert explained(yaml.MarkedYAMLError("while\nparsing")) == "while parsing"


def test_an_error_of_a_resolver_is_shown_itself() -> None:
    for name in ("__cause__", "__context__"):
        outer, middle = ConfigCompositionException("outer"), ValueError("middle")
        setattr(middle, name, UserError("run_dir: no folder"))
        setattr(outer, name, middle)
        assert str(command_line._explain(outer, [])) == "run_dir: no folder"


def test_errors_of_the_program_stay() -> None:
    with pytest.raises(ZeroDivisionError), errors_explained([]):
        raise ZeroDivisionError
    with errors_explained([]):
        pass
