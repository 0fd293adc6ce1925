"""What makes the fingerprint of an experiment, with hashes of texts that were written by hand."""

import hashlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from onecurve.errors import UserError
from onecurve.identity import fingerprint as module
from onecurve.identity.fingerprint import Experiment, code_version, continue_experiment, describe_experiment
from onecurve.identity.option_kinds import is_experiment
from onecurve.parallel.fsdp import FSDP

LOGGER = "onecurve.identity.fingerprint"


def sha256(*parts: str | bytes) -> str:
    return hashlib.sha256(b"".join(part if isinstance(part, bytes) else part.encode() for part in parts)).hexdigest()


def config(**changes: Any) -> DictConfig:
    """Return a small resolved configuration, with other values for some dotted names."""
    cfg = OmegaConf.create(
        {
            "seed": 3,
            "tags": ["a"],
            "ckpt_path": "runs/a",
            "bit_exact": False,
            "trainer": {"sync_batchnorm": True, "devices": 4},
            "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0},
            "layers": [{"_target_": "torch.nn.ReLU"}],
            "strategy": {"_target_": "torch.nn.Tanh", "comm_hook": None},
        }
    )
    for name, value in changes.items():
        OmegaConf.update(cfg, name.replace("__", "."), value, force_add=True)
    return cfg


class Data:
    """Data of two ranks with two accumulated batches of three micro-batches."""

    global_batch_size, accumulate = 32, 2
    parallel = SimpleNamespace(dp_size=2, num_microbatches=3)

    def __init__(self, *samples: Any) -> None:
        self.training_samples = samples


def labeled(*labels: int, name: str = "labels") -> Any:
    return SimpleNamespace(**{name: list(labels)})


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the classes whose code counts; their hash is `code`."""
    found: list[str] = []

    def code_version(names: list[str]) -> str:
        found.extend(names)
        return "code"

    monkeypatch.setattr(module, "code_version", code_version)
    return found


def test_the_fingerprint_is_a_hash_of_options_and_code() -> None:
    expected = sha256('{"code": "abc", "options": {"lr": 0.1, "seed": 1}}')[:6]
    assert Experiment({"seed": 1, "lr": 0.1}, "abc").fingerprint == expected
    assert Experiment({"lr": 0.1, "seed": 1}, "abc").fingerprint == expected
    assert Experiment({"path": Path("a")}, "").fingerprint == sha256('{"code": "", "options": {"path": "a"}}')[:6]


def test_an_experiment_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Experiment({}, "").code = "other"  # type: ignore[misc]


def test_options_of_an_experiment(targets: list[str]) -> None:
    found = describe_experiment(config(), Data((labeled(1, 2), 2, None)))
    assert found.code == "code"
    assert found.options == {
        "seed": 3,
        "bit_exact": False,
        "trainer.sync_batchnorm": True,
        "optimizer._target_": "torch.optim.SGD",
        "optimizer.lr": 0.1,
        "layers": [{"_target_": "torch.nn.ReLU"}],
        "data.batch_size": 32,
        "training data": f"2 samples, SHA-256 {sha256(np.array([1, 2]).tobytes())[:12]}",
    }
    assert sorted(targets) == sorted([f"{__name__}.Data", "torch.optim.SGD", "torch.nn.ReLU"])


class Offloaded(FSDP):
    """A user's strategy with an option of its own that changes no curve."""

    hardware_options = ("offload",)


def test_a_class_adds_to_the_hardware_options_of_its_base_classes() -> None:
    cfg = OmegaConf.create({"strategy": {"_target_": f"{__name__}.Offloaded"}})
    options = ["offload", "replicas", "shares", "devices", "param_dtype"]
    assert [is_experiment(cfg, f"strategy.{name}", 2) for name in options] == [False] * 4 + [True]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"trainer__sync_batchnorm": False}, "2 x 6"),
        ({"trainer__sync_batchnorm": False, "bit_exact": True}, None),
        ({"bit_exact": True}, None),
        ({"strategy__comm_hook": "post_local_sgd"}, "2 x 6"),
        ({"strategy__comm_hook": "post_local_sgd", "bit_exact": True}, "2 x 6"),
        ({"strategy__comm_hook": "fp16"}, None),
        ({"strategy___target_": "onecurve.parallel.dp.DP"}, "2 x 6"),
    ],
)
def test_ranks_count_where_each_computes_its_own(
    changes: dict[str, Any], expected: str | None, targets: list[str]
) -> None:
    options = describe_experiment(config(**changes), Data()).options
    assert options.get("ranks x micro-batches") == expected


@pytest.mark.parametrize(
    ("samples", "counts", "content"),
    [
        ([], "", []),
        ([(labeled(1, 2), 2, None)], "2", [np.array([1, 2])]),
        ([(labeled(1, 2, name="targets"), 2, None)], "2", [np.array([1, 2])]),
        ([(SimpleNamespace(labels=[1], targets=[2]), 1, None)], "1", [np.array([1])]),
        ([(object(), 7, None)], "7", []),
        ([(TensorDataset(torch.ones(2, 3), torch.tensor([3, 4])), 2, None)], "2", [np.array([3, 4])]),
        ([(TensorDataset(torch.ones(2, 3, dtype=torch.bfloat16)), 2, None)], "2", []),
        ([(TensorDataset(torch.eye(2, dtype=torch.int64).to_sparse()), 2, None)], "2", []),
        ([(ConcatDataset([TensorDataset(torch.tensor([n])) for n in (1, 2)]), 2, None)], "2", [np.array([1, 2])]),
        ([(object(), None, "abc")], "a stream of", ["abc"]),
        ([(object(), 0, "abc")], "0", ["abc"]),
        ([(labeled(1), 1, None), (labeled(2), 5, "x")], "1 + 5", [np.array([1]), "x", np.array([2])]),
        ([(Subset(labeled(1, 2), [1, 0]), 2, None)], "2", [np.array([1, 0]), np.array([1, 2])]),
        (
            [(Subset(Subset(labeled(1, 2), [1, 0]), [0]), 1, None)],
            "1",
            [np.array([0]), np.array([1, 0]), np.array([1, 2])],
        ),
        ([(SimpleNamespace(indices=[4], labels=[1]), 1, None)], "1", [np.array([1])]),
        ([(SimpleNamespace(dataset=labeled(2), labels=[1]), 1, None)], "1", [np.array([1])]),
    ],
)
def test_facts_of_the_training_data(samples: list[Any], counts: str, content: list[Any]) -> None:
    parts = [part if isinstance(part, str) else part.tobytes() for part in content]
    expected = f", SHA-256 {sha256(*parts)[:12]}" if parts else ""
    assert module._training_facts(samples) == f"{counts} samples{expected}"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2], np.array([1, 2]).tobytes()),
        (np.array([1.5]), np.array([1.5]).tobytes()),
        (torch.tensor([1, 2], dtype=torch.int32), np.array([1, 2], dtype=np.int32).tobytes()),
        (["ab", "c"], np.array(["ab", "c"]).tobytes()),
        ([[1], [2, 3]], b"[[1], [2, 3]]"),
        ([{"a": 1}, None], b"[{'a': 1}, None]"),
    ],
)
def test_bytes_of_labels(values: Any, expected: bytes) -> None:
    assert module._bytes_of(values) == expected


def checkpoint(**options: Any) -> dict[str, Any]:
    """Return a checkpoint of step 7, of a run with other options."""
    before = {"seed": 3, "optimizer.lr": 0.1, "training data": "2 samples"} | options
    kept = {name: value for name, value in before.items() if value is not ...}
    return {"experiment": {"options": kept, "code": "code"}, "position": {"steps": 7}}


def current(code: str = "code", **options: Any) -> Experiment:
    return Experiment({"seed": 3, "optimizer.lr": 0.1, "training data": "2 samples"} | options, code)


def fingerprint_before(**options: Any) -> str:
    return Experiment(**checkpoint(**options)["experiment"]).fingerprint


@pytest.mark.parametrize("without", [{}, {"experiment": None}])
def test_a_checkpoint_without_an_experiment_is_refused(without: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        continue_experiment(without, current(), config())
    assert str(caught.value) == (
        "ckpt_path=runs/a has no position in the data, as files of plain Lightning, or of weights: init_from=runs/a "
        "starts a new run with its weights"
    )


def test_an_unchanged_run_is_the_same_experiment(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    assert continue_experiment(checkpoint(), current(), config()) == current()
    before, now = ({"module.clip": float(text)} for text in ("nan", "NaN"))  # of which none is equal to itself
    continue_experiment(checkpoint(**before), current("code", **now), config())
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ({"seed": 1}, {}, "seed=1 (now 3)"),
        ({"seed": 1, "optimizer.lr": 0.2}, {}, "seed=1 (now 3)"),
        ({"b": 1, "a": None}, {"b": 2, "a": True}, "a=null (now true), b=1 (now 2)"),
        ({"module._target_": "a.Net"}, {"module._target_": "a.Other"}, "module._target_=a.Net (now a.Other)"),
        ({"module._target_": "a.Other"}, {"module._target_": "a.Net"}, "module._target_=a.Other (now a.Net)"),
        ({"training data": "9 samples"}, {}, "training data=9 samples (now 2 samples)"),
        ({"training data": "9 samples", "seed": 1}, {}, "seed=1 (now 3)"),
        ({"training data": "9 samples", "virtual_ranks": 2}, {"virtual_ranks": 4}, "virtual_ranks=2 (now 4)"),
        ({"trainer.sync_batchnorm": ...}, {"trainer.sync_batchnorm": True}, "trainer.sync_batchnorm=null (now true)"),
    ],
)
def test_a_continued_run_cannot_change_the_experiment(before: dict[str, Any], now: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        continue_experiment(checkpoint(**before), current(**now), config())
    assert str(caught.value) == (
        f"the run in ckpt_path had {named}: that is another experiment; set it back, or start a new run"
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["data.cache"], "or name data.cache in"),
        (["data.cache", "module.log"], "or name data.cache, module.log in"),
        (["data.batch_size", "module.log"], "or name module.log in"),
        (["data.batch_size"], ""),
        (["data.a", "data.z"], "or name data.a, data.z in"),
    ],
)
def test_options_of_a_class_may_be_hardware(changes: list[str], named: str) -> None:
    before: dict[str, Any] = dict.fromkeys(changes, 1)
    now: dict[str, Any] = dict.fromkeys(changes, 2)
    with pytest.raises(UserError) as caught:
        continue_experiment(checkpoint(**before), current(**now), config())
    assert ("hardware_options" in str(caught.value)) is bool(named)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("before", "now", "code", "reason", "level"),
    [
        ({"optimizer.lr": 0.2}, {}, "code", "optimizer.lr=0.2 (now 0.1)", logging.INFO),
        ({}, {"optimizer.momentum": 0.9}, "code", "optimizer.momentum=0 (now 0.9)", logging.INFO),
        ({"optimizer.momentum": 0.9}, {}, "code", "optimizer.momentum=0.9 (now 0)", logging.INFO),
        (
            {"module._target_": "__main__.Net"},
            {"module._target_": "nets.Net"},
            "code",
            "module._target_=__main__.Net (now nets.Net)",
            logging.INFO,
        ),
        (
            {"optimizer.lr": 0.2, "trainer.max_steps": 5},
            {"trainer.max_steps": 8},
            "code",
            "optimizer.lr=0.2 (now 0.1), trainer.max_steps=5 (now 8)",
            logging.INFO,
        ),
        ({}, {}, "edited", "the code of its classes was edited", logging.WARNING),
        ({}, {}, "changed", "the code of its classes was edited", logging.WARNING),
        (
            {"optimizer.lr": 0.2},
            {},
            "edited",
            "optimizer.lr=0.2 (now 0.1), the code of its classes was edited",
            logging.WARNING,
        ),
        (
            {"module._target_": "__main__.Net"},
            {"module._target_": "nets.Net"},
            "moved",
            "module._target_=__main__.Net (now nets.Net)",
            logging.INFO,
        ),
    ],
)
def test_a_continued_run_becomes_another_experiment(
    before: dict[str, Any], now: dict[str, Any], code: str, reason: str, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    found = continue_experiment(checkpoint(**before), current(code, **now), config())
    origin = fingerprint_before(**before)
    assert found == current(code, **now, **{"continued from": f"{origin}, step 7"})
    message = f"the run goes on as experiment {found.fingerprint}, before {origin}: {reason}"
    assert caplog.record_tuples == [(LOGGER, level, message)]


def test_initial_weights_and_origin_are_those_of_the_run() -> None:
    kept = {"init_from": "/a/last.ckpt", "continued from": "abc, step 3"}
    assert continue_experiment(checkpoint(**kept), current(init_from="a"), config()) == current(**kept)
    assert continue_experiment(checkpoint(), current(init_from="a"), config()) == current()


@pytest.fixture
def source_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder from which Python imports; its modules are forgotten afterwards."""
    before = {*sys.modules}
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in {*sys.modules} - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    module._imports_and_code.cache_clear()


def write(folder: Path, **files: str) -> None:
    """Write modules, in which `__` stands for a folder."""
    for name, text in files.items():
        file = folder / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.parent != folder:
            (file.parent / "__init__.py").touch()
        file.write_text(text)


def test_code_is_the_source_without_comments_and_docstrings(source_folder: Path) -> None:
    write(
        source_folder,
        fp_solo='"""Docs."""\nimport json  # why\n\n\ndef net( ):\n    "Docs."\n    return  1\n\n\n'
        'class Empty:\n    """Docs."""\n\n    async def f(self):\n        """Docs."""\n\n\nx = "no docs"\n',
    )
    code = (
        "import json\n\ndef net():\n    return 1\n\nclass Empty:\n\n    async def f(self):\n        pass\nx = 'no docs'"
    )
    assert code_version(["fp_solo.net"]) == sha256(f"fp_solo\n{code}\n")
    assert code_version(["fp_solo.net", "fp_solo.Empty", "torch.optim.SGD"]) == sha256(f"fp_solo\n{code}\n")
    assert code_version(["torch.optim.SGD"]) == code_version([]) == sha256("")


def test_modules_are_hashed_in_the_order_of_their_names(source_folder: Path) -> None:
    write(source_folder, fp_b="def f():\n    pass\n", fp_a="def f():\n    pass\n")
    code = "def f():\n    pass\n"
    assert code_version(["fp_b.f", "fp_a.f"]) == sha256(f"fp_a\n{code}fp_b\n{code}")


def test_a_file_counts_with_those_of_its_folder_that_it_imports(source_folder: Path) -> None:
    write(
        source_folder,
        fp_p__net="import json\nimport fp_q\nfrom . import sizes\nfrom .sub.layers import f\n"
        "import onecurve.observe.steps\nimport onecurve.data.module_data\n\n\n"
        "def net():\n    import fp_p.later\n",
        fp_p__sizes="",
        fp_p__later="",
        fp_p__unused="",
        fp_p__sub__layers="from ..deep import g\n\n\ndef f():\n    pass\n",
        fp_p__deep="def g():\n    pass\n",
        fp_q="",
    )
    found = module._module_and_its_imports("fp_p.net")
    own = {name for name in found if name.startswith("fp_")}
    assert own == {"fp_p.net", "fp_p.sizes", "fp_p.later", "fp_p.sub", "fp_p.sub.layers", "fp_p.deep"}
    assert "onecurve.data.module_data" in found
    assert "onecurve.observe.steps" not in found


def test_code_of_a_class_in_a_folder(source_folder: Path) -> None:
    """It counts also if a function imports it later."""
    net = "from .sizes import WIDTH\n\ndef net():\n    from . import later\n    return WIDTH"
    write(source_folder, fp_s__net=net, fp_s__sizes="WIDTH = 3\n", fp_s__later="DEPTH = 2")
    expected = sha256(f"fp_s.later\nDEPTH = 2\nfp_s.net\n{net}\nfp_s.sizes\nWIDTH = 3\n")
    assert code_version(["fp_s.net.net"]) == expected


def test_a_file_without_a_folder_counts_with_loaded_files_beside_it(source_folder: Path) -> None:
    write(source_folder, fp_net="import fp_helper\nimport fp_other\nfrom onecurve.errors import UserError\n")
    write(source_folder, fp_helper="", fp_other="")
    __import__("fp_net")
    del sys.modules["fp_other"]
    assert {name for name in module._module_and_its_imports("fp_net") if "determinism" not in name} == {
        "fp_net",
        "fp_helper",
    }


def test_the_origin_of_a_name_counts(source_folder: Path) -> None:
    """A function that another module hands on, without an import statement."""
    hub = "import importlib\n\nf = importlib.import_module('fp_r.origin').f\n"
    write(source_folder, fp_r__net="from .hub import f\n", fp_r__hub=hub)
    write(source_folder, fp_r__origin="def f():\n    pass\n")
    __import__("fp_r.net")
    assert module._module_and_its_imports("fp_r.net") == {"fp_r.net", "fp_r.hub", "fp_r.origin"}


def test_modules_that_were_found_are_not_followed_again(source_folder: Path) -> None:
    write(source_folder, fp_loop="import fp_loop\n")
    assert module._module_and_its_imports("fp_loop") == {"fp_loop"}
    assert module._module_and_its_imports("json") == set()
    assert module._module_and_its_imports("no.such.module") == set()


def test_names_that_a_file_imports(source_folder: Path) -> None:
    text = "import a.b, c\nfrom d import e as f\nfrom . import g\nfrom .h import i\nfrom .. import j\n"
    text += "\n\ndef k():\n    import l\n"
    write(source_folder, fp_file=text)
    file = str(source_folder / "fp_file.py")
    expected = {"a.b", "c", "d", "d.e", "p.q", "p.q.g", "p.q.h", "p.q.h.i", "p", "p.j", "l"}
    assert module._imports_and_code("p.q.fp_file", file)[0] == expected
    write(source_folder, package__sub="")
    (source_folder / "package" / "__init__.py").write_text("from . import sub\n")
    found, _ = module._imports_and_code("package", str(source_folder / "package" / "__init__.py"))
    assert found == {"package", "package.sub"}


@pytest.mark.parametrize(("name", "expected"), [("sys", ""), ("no.such.module", ""), ("", ""), ("fp_none", "")])
def test_some_names_have_no_file(name: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fp_none", ModuleType("fp_none"))
    assert module._file(name) == expected


def test_files_of_modules(source_folder: Path) -> None:
    write(source_folder, fp_later="")
    assert module._file("fp_later") == str(source_folder / "fp_later.py"), "it is not imported"
    assert module._file(__name__) == __file__
