"""The fingerprint of an experiment: what changes it, where it is recorded, and what a continued run may change."""

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from omegaconf import DictConfig

from onecurve.data.ordered_data import OrderedData
from onecurve.errors import UserError
from onecurve.identity import fingerprint as module
from onecurve.identity.fingerprint import Experiment, code_version, continue_experiment, describe_experiment
from onecurve.records.events import read_events
from onecurve.targets import build
from tests.support.experiments import SHORT
from tests.support.pool import Pool
from tests.support.runs import compose, fit, fit_ranks

TASK = ["experiment=parity", *SHORT]
# tests/engine/parity/test_hardware.py has the hardware options that it varies.
HARDWARE: dict[str, list[str]] = {
    "spawned": ["strategy=ddp_spawn", "trainer.devices=2", "module.compile=true"],
    "files": ["logger=tensorboard", "callbacks=[default,evaluation]", "trainer.log_every_n_steps=7", "tags=[a]"],
    "default": ["+trainer.min_epochs=null", "~model.norm", "+trainer.gradient_clip_algorithm=null"],
}
EXPERIMENTS: dict[str, list[str]] = {
    "seed": ["seed=1"],
    "batch": ["data.batch_size=8"],
    "per device": ["data.batch_size=null", "data.batch_size_per_device=8"],
    "model": ["model.norm=group"],
    "optimizer": ["+optimizer.dampening=0.1"],
    "precision": ["trainer.precision=32-true"],
    "batch normalization": ["trainer.sync_batchnorm=false"],
    "hook": ["strategy=ddp", "strategy.comm_hook=fp16"],
    "local": ["strategy=ddp", "strategy.comm_hook=post_local_sgd"],
    "types": ["strategy=fsdp", "strategy.reduce_dtype=float16"],
    "DataParallel": ["strategy=dp"],
    "limit": ["trainer.limit_train_batches=1"],
    "average": ["callbacks=[default,ema]"],
    "training set": ["data.train_samples=64"],
    "own callback": ["+callbacks.mine._target_=onecurve.observe.gradients.GradientNorms"],
}


def set_up(cfg: DictConfig) -> OrderedData:
    """Return the data of one process, set up for training."""
    data = OrderedData(build(cfg.data), cfg.seed, {"train": None, "val": None, "test": None})
    data.trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    data.prepare_data()
    data.setup("fit")
    return data


def experiment(small: list[str], folder: Path, *overrides: str) -> Experiment:
    """Return the experiment of a configuration, with the data of one process."""
    cfg = compose(folder, *small, *TASK, *overrides)
    return describe_experiment(cfg, set_up(cfg))


def saved(kept: Experiment) -> dict[str, Any]:
    """Return a checkpoint with an experiment, after three steps."""
    return {"experiment": asdict(kept), "position": {"steps": 3}}


def test_hardware_does_not_change_it(small: list[str], folder: Path) -> None:
    one = experiment(small, folder)
    for name, words in HARDWARE.items():
        other = experiment(small, folder, *words)
        assert other.options == one.options, name
        assert other.fingerprint == one.fingerprint


def test_every_experiment_has_its_own(small: list[str], folder: Path) -> None:
    """Ranks count where each computes something of its own."""
    experiments = {name: experiment(small, folder, *words) for name, words in EXPERIMENTS.items()}
    experiments["unchanged"] = experiment(small, folder)
    found = {name: kept.fingerprint for name, kept in experiments.items()}
    assert found.pop("per device") == found["batch"], "the global batch counts"
    assert len(set(found.values())) == len(found)
    assert all(len(fingerprint) == 6 for fingerprint in found.values())
    local = {name: kept.options.get("ranks x micro-batches") for name, kept in experiments.items()}
    expected = ["batch normalization", "local", "DataParallel"]
    assert {name: ranks for name, ranks in local.items() if ranks} == dict.fromkeys(expected, "1 x 1")


def test_labels_change_it(small: list[str], folder: Path) -> None:
    cfg = compose(folder, *small, *TASK)
    data = set_up(cfg)
    before = describe_experiment(cfg, data)
    data.splits["train"].dataset.labels = data.splits["train"].dataset.labels.flip(0)
    after = describe_experiment(cfg, data)
    with pytest.raises(UserError, match=r"had training data=90 samples, SHA-256 .* that is another experiment"):
        continue_experiment(saved(before), after, cfg)


def test_only_edited_code_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments, docstrings and layout do not count; an imported file of the same folder does."""
    package = tmp_path / "edited"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helper.py").write_text("def width():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    net = '"""Docs."""\nimport torch\nfrom edited.helper import width\n\n\ndef net():\n    return width()\n'

    def version(**files: str) -> str:
        module._imports_and_code.cache_clear()
        for name, text in files.items():
            (package / f"{name}.py").write_text(text)
        return code_version(["edited.net.net", "torch.optim.SGD"])

    before = version(net=net)
    commented = net.replace("Docs", "Other docs").replace("    return", '    """More."""\n    # why\n    return')
    assert version(net=commented) == before
    assert version(net=net.replace("return width", "return 2 * width")) != before
    assert version(net=net, helper="def width():\n    return 2\n") != before
    assert version(helper="def width():\n    return 1\n") == before


@pytest.mark.parametrize("place", ["a folder", "beside"])
def test_modules_and_constants_that_the_code_imports_count(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a file without a package, and of a module that a function imports when it is called."""
    prefix, dots = ("followed.", ".") if place == "a folder" else ("", "")
    folder = tmp_path / prefix.strip(".")
    folder.mkdir(exist_ok=True)
    if prefix:
        (folder / "__init__.py").touch()
    lines = {
        "followed_net": f"from {dots or 'followed_layers'} import {'followed_layers' if dots else 'depth'}\n"
        f"from {dots}followed_sizes import WIDTH\n\n\ndef net():\n    return WIDTH\n",
        "followed_layers": "def depth():\n    return 1\n",
        "followed_sizes": "WIDTH = 3\n",
        "followed_later": "SCALE = 3\n",
    }
    if prefix:
        lines["followed_net"] += "\n\ndef scaled():\n    from .followed_later import SCALE\n\n    return SCALE\n"
    monkeypatch.syspath_prepend(str(tmp_path))

    def version(**files: str) -> str:
        module._imports_and_code.cache_clear()
        for name, text in {**lines, **files}.items():
            (folder / f"{name}.py").write_text(text)
        return code_version([f"{prefix}followed_net.net"])

    before = version()
    assert version(followed_layers="def depth():\n    return 2\n") != before
    assert version(followed_sizes="WIDTH = 4\n") != before
    assert (version(followed_later="SCALE = 4\n") != before) == bool(prefix)
    assert version() == before


def test_code_of_the_engine_counts_where_it_computes_the_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    names, read = list[str](), module._imports_and_code

    def record(name: str, file: str) -> tuple[set[str], str]:
        names.append(name)
        return read(name, file)

    monkeypatch.setattr(module, "_imports_and_code", record)
    code_version(["src.models.classifier.ImageClassifier", "onecurve.data.ordered_data.OrderedData"])
    assert {"onecurve.run.module", "onecurve.data.rank_batches", "src.models.classifier"} <= {*names}
    assert all(name.startswith(("src.models.", "src.data.", *module._ENGINE)) for name in names)


def test_it_is_recorded(pool: Pool, small: list[str], folder: Path) -> None:
    """In every place, and equal on one process and under FSDP on two."""
    found = set()
    for words in ([], ["strategy=fsdp", "trainer.devices=2", "trainer.max_steps=8"]):
        run = folder / str(len(words))
        fit_ranks(compose(run, *small, *TASK, "model.norm=group", *words), pool)
        kept = Experiment(**torch.load(run / "checkpoints" / "last.ckpt")["experiment"])
        config = yaml.safe_load((run / "config.yaml").read_text())
        found |= {kept.fingerprint, config["experiment"], read_events(run)[0]["experiment"]}
    assert len(found) == 1


def test_a_continued_run_may_change_hyper_parameters(
    small: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onecurve.identity.fingerprint")
    task = [*TASK, "model=mlp", "~model.width", "model.hidden=[16]"]
    fit(compose(folder, *small, *task, "trainer.max_steps=5"))
    before = Experiment(**torch.load(folder / "checkpoints" / "last.ckpt")["experiment"]).fingerprint
    fit(compose(folder, *small, *task, "optimizer.lr=0.05", f"ckpt_path={folder}/checkpoints/last.ckpt"))
    after = Experiment(**torch.load(folder / "checkpoints" / "last.ckpt")["experiment"]).fingerprint
    assert before != after
    change = "optimizer.lr=0.1 (now 0.05), trainer.max_steps=5 (now 8)"
    logged = [message for name, _, message in caplog.record_tuples if name == "onecurve.identity.fingerprint"]
    assert logged == [f"the run goes on as experiment {after}, before {before}: {change}"]


def test_edited_code_is_a_warning(small: list[str], folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    now, cfg = experiment(small, folder), compose(folder, *small, *TASK)
    caplog.clear()
    assert continue_experiment(saved(now), now, cfg) == now
    assert not caplog.messages
    continue_experiment(saved(replace(now, code="other")), now, cfg)
    assert [message.partition(":")[2] for message in caplog.messages] == [" the code of its classes was edited"]


def test_a_checkpoint_of_plain_lightning_is_refused(small: list[str], folder: Path) -> None:
    now, cfg = experiment(small, folder), compose(folder, *small, *TASK, "ckpt_path=plain.ckpt")
    with pytest.raises(UserError, match=r"ckpt_path=plain.ckpt has no position .* init_from=plain.ckpt starts a new"):
        continue_experiment({"global_step": 3, "state_dict": {}}, now, cfg)


def test_a_changed_run_is_not_the_experiment_of_a_new_one(small: list[str], folder: Path) -> None:
    """The first steps of an extended run followed the schedule of the shorter one."""
    cfg = compose(folder, *small, *TASK)
    new = experiment(small, folder)
    shorter = replace(new, options=new.options | {"trainer.max_steps": 4})
    extended = continue_experiment(saved(shorter), new, cfg)
    assert extended.options["continued from"] == f"{shorter.fingerprint}, step 3"
    assert extended.fingerprint not in (shorter.fingerprint, new.fingerprint)
    assert continue_experiment(saved(extended), new, cfg) == extended, "it stays the same when it is resumed"


def test_initial_weights_stay_those_of_the_run(small: list[str], folder: Path) -> None:
    """`init_from` is the path of a checkpoint in the first start, and as typed in the next."""
    cfg = compose(folder, *small, *TASK)
    now = experiment(small, folder)
    begun = replace(now, options=now.options | {"init_from": "/runs/other/last.ckpt"})
    typed = replace(now, options=now.options | {"init_from": "runs/other"})
    assert continue_experiment(saved(begun), typed, cfg) == begun
