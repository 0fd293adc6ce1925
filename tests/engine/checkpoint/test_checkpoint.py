"""Weights of another run as a start, and the tensors in a checkpoint file."""

import errno
import logging
import os
import zipfile
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer
from torch import nn

from onecurve.checkpoint.io import AtomicCheckpointIO, load_initial_weights, read_weights
from onecurve.errors import UserError
from onecurve.run.experiment import assemble
from onecurve.run.trained import load_run
from tests.support.runs import compose, fit

GAN = ["experiment=gan", "module.generator.width=4", "module.discriminator.width=4", "data.batch_size=32"]
MLP = ["model=mlp", "model.hidden=[16]", "data.batch_size=32"]


@pytest.fixture(scope="module")
def trained(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    fit(compose(folder, *small, *MLP, "trainer.max_epochs=1"))
    return folder / "checkpoints" / "last.ckpt"


def test_starts_from_weights_only(trained: Path, small: list[str], folder: Path) -> None:
    record = fit(compose(folder, *small, *MLP, f"init_from={trained}", "trainer.max_epochs=2"))
    saved = torch.load(trained)["state_dict"]
    assert all(torch.equal(record.initial[name], tensor) for name, tensor in saved.items())
    assert len(record.indices) == 2 * 11


def test_another_number_of_classes_gets_a_new_head_and_a_message(
    trained: Path, small: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "onecurve"):
        _, module, _ = assemble(compose(folder, *small, *MLP, f"init_from={trained}", "data.num_classes=20"))
    saved, own = torch.load(trained)["state_dict"], module.state_dict()
    assert torch.equal(own["net.layer1.0.weight"], saved["net.layer1.0.weight"])
    assert own["net.head.weight"].shape == (20, 16)
    assert "10 classes there, 20 here: net.head.weight and net.head.bias start afresh" in caplog.text


def test_starts_from_a_file_of_weights(trained: Path, small: list[str], folder: Path, tmp_path: Path) -> None:
    """The names in the file are those of the network, without the module's prefix."""
    saved = {name.removeprefix("net."): tensor for name, tensor in torch.load(trained)["state_dict"].items()}
    torch.save(saved, tmp_path / "weights.pt")
    _, module, _ = assemble(compose(folder, *small, *MLP, f"init_from={tmp_path}/weights.pt"))
    assert all(torch.equal(module.state_dict()[f"net.{name}"], tensor) for name, tensor in saved.items())


def test_a_replaced_sharded_checkpoint_leaves_no_folder(tmp_path: Path) -> None:
    """A run may continue under a strategy that writes no shards."""
    checkpoints = AtomicCheckpointIO()
    for number in (1, 2):
        (tmp_path / f"best.0000000{number}.shards").mkdir()
        checkpoints.save_checkpoint({"shards": f"best.0000000{number}.shards"}, tmp_path / "best.ckpt")
    assert [folder.name for folder in tmp_path.glob("*.shards")] == ["best.00000002.shards"]
    checkpoints.save_checkpoint({}, tmp_path / "best.ckpt")
    assert not list(tmp_path.glob("*.shards"))


@pytest.mark.parametrize("content", [{"epoch": 3}, [torch.zeros(2)], {}], ids=["no weights", "a list", "nothing"])
def test_refuses_a_file_without_weights(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(UserError, match="contains no weights: give a run, or a file"):
        read_weights(tmp_path / "weights.pt", "init_from")


@pytest.mark.parametrize(
    "model", [["model=mlp", "model.hidden=[32]"], ["model=mlp", "model.hidden=[16,16]"], ["model=resnet9"]]
)
def test_refuses_another_network(model: list[str], trained: Path, small: list[str], folder: Path) -> None:
    with pytest.raises(UserError, match=r"init_from=.* another network than this run's `model`"):
        assemble(compose(folder, *small, *model, f"init_from={trained}"))


def test_refuses_inner_layers_of_another_width(small: list[str], folder: Path) -> None:
    fit(compose(folder, *small, *GAN, "trainer.max_epochs=1"))
    with pytest.raises(UserError, match=r"another network .* generator.start.1.weight"):
        assemble(compose(folder, *small, *GAN, "module.latent=5", f"init_from={folder}/checkpoints/last.ckpt"))


@pytest.mark.parametrize(
    "target", ["torch.hub.load", "pathlib.Path.touch", "src.models.vit.torch.load", "src.models.mlp.OrderedDict"]
)
def test_checkpoint_builds_nothing_but_models(target: str, trained: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(trained)
    checkpoint["config"] = f"module: {{net: {{_target_: {target}, self: {tmp_path}/made}}}}"
    torch.save(checkpoint, tmp_path / "malicious.ckpt")
    with pytest.raises(UserError, match=f"would run {target}"):
        load_run(tmp_path / "malicious.ckpt")
    torch.save(torch.zeros(1), tmp_path / "bare.ckpt")
    with pytest.raises(UserError, match="is not a checkpoint of a training run"):
        load_run(tmp_path / "bare.ckpt")
    assert not (tmp_path / "made").exists()


def test_checkpoint_calls_no_resolver(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook may have registered `eval`."""
    calls: list[str] = []
    monkeypatch.setattr(BaseContainer, "_resolvers", {})
    OmegaConf.register_new_resolver("call", calls.append)
    checkpoint = torch.load(trained)
    checkpoint["config"] = checkpoint["config"].replace("num_classes: 10", 'num_classes: "\\x24{call:1}"')
    torch.save(checkpoint, tmp_path / "malicious.ckpt")
    with pytest.raises(UserError, match=r"the configuration in run=.*malicious.ckpt has interpolations"):
        load_run(tmp_path / "malicious.ckpt")
    assert not calls


def test_resumed_run_ignores_init_from(trained: Path, small: list[str], folder: Path) -> None:
    task = [*small, *MLP, f"init_from={trained}"]
    first = fit(compose(folder, *task, "trainer.max_epochs=1"))
    second = fit(compose(folder, *task, f"ckpt_path={folder}/checkpoints/last.ckpt", "trainer.max_epochs=2"))
    assert all(torch.equal(second.initial[name], tensor) for name, tensor in first.final.items())


class Versioned(nn.Linear):
    """A layer that refuses weights of another version than its own."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        assert local_metadata.get("version") == self._version
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def versioned(num_classes: int = 10) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 16), Versioned(16, num_classes))


@pytest.mark.parametrize(
    "options", [[], ["strategy=fsdp"], ["strategy=fsdp", "strategy.sharded_checkpoints=true"], ["callbacks=ema"]]
)
def test_present_weights_are_not_migrated(options: list[str], small: list[str], folder: Path) -> None:
    """A checkpoint keeps the version of each module, by which the module migrates old weights."""
    task = [*small, "data.batch_size=32", *options, f"model._target_={__name__}.versioned"]
    fit(compose(folder, *task, "trainer.max_steps=1"))
    file = f"{folder}/checkpoints/last.ckpt"
    load_run(file, trust=["tests"])
    fit(compose(folder / "started", *task, f"init_from={file}", "trainer.max_steps=1"))
    fit(compose(folder / "resumed", *task, f"ckpt_path={file}", "trainer.max_steps=2"))


def test_a_full_disk_leaves_the_newest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noticed when the complete file is synced."""
    file, io = tmp_path / "last.ckpt", AtomicCheckpointIO()
    io.save_checkpoint({"global_step": 1}, file)

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match="the existing checkpoints are complete"):
        io.save_checkpoint({"global_step": 2}, file)
    assert torch.load(file)["global_step"] == 1


def test_a_save_removes_what_killed_processes_have_left(tmp_path: Path) -> None:
    """In a container the next process may have the number of the one that was killed while it named a file."""
    file, io = tmp_path / "last.ckpt", AtomicCheckpointIO()
    io.save_checkpoint({"global_step": 1}, file)
    os.link(file, tmp_path / f".previous.ckpt.{os.getpid()}.part")
    for name in ("last", "previous"):
        (tmp_path / f".{name}.ckpt.7.part").write_text("half a file")
    (tmp_path / ".other.ckpt.7.part").write_text("that another process writes")
    io.save_checkpoint({"global_step": 2}, file)
    assert {one.name for one in tmp_path.iterdir()} == {"last.ckpt", "previous.ckpt", ".other.ckpt.7.part"}
    assert [torch.load(tmp_path / f"{name}.ckpt")["global_step"] for name in ("previous", "last")] == [1, 2]


def test_no_folder_is_removed_that_a_file_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that does not answer for a moment, or another process that reads the folder, ends no run."""
    io, open_zip = AtomicCheckpointIO(), zipfile.ZipFile
    (tmp_path / "last.00000001.shards").mkdir()
    io.save_checkpoint({"shards": "last.00000001.shards"}, tmp_path / "last.ckpt")

    def fail(file: Any, *args: Any, **options: Any) -> Any:
        if Path(file).name == "previous.ckpt":
            raise OSError(errno.EIO, "input/output error")
        return open_zip(file, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(zipfile, "ZipFile", fail)
        io.save_checkpoint({}, tmp_path / "last.ckpt")
    assert list(tmp_path.glob("*.shards"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", lambda *_, **__: fail("previous.ckpt"))
        io.save_checkpoint({}, tmp_path / "last.ckpt")
    io.save_checkpoint({}, tmp_path / "last.ckpt")
    assert not list(tmp_path.glob("*.shards"))


def test_a_checkpoint_with_an_object_keeps_its_folder(tmp_path: Path) -> None:
    """The user may read the object with weights_only=False."""
    (tmp_path / "last.00000001.shards").mkdir()
    AtomicCheckpointIO().save_checkpoint({"shards": "last.00000001.shards", "path": tmp_path}, tmp_path / "last.ckpt")
    assert list(tmp_path.glob("*.shards"))


@pytest.mark.parametrize("value", [[1, 2], {"lr": 0.1}])
def test_a_key_of_the_user_is_no_key_of_lightning(value: Any, tmp_path: Path) -> None:
    own = {"my_hyper_parameters": value, "my_hparams_type": "small"}
    AtomicCheckpointIO().save_checkpoint(own, tmp_path / "last.ckpt")
    assert torch.load(tmp_path / "last.ckpt") == own


def test_initial_weights_of_a_checkpoint_of_plain_lightning(tmp_path: Path) -> None:
    """`ckpt_path` refuses it, and names `init_from`."""
    module = L.LightningModule()
    module.net = torch.nn.Linear(2, 2)
    saved = {name: torch.full_like(value, 3.0) for name, value in module.state_dict().items()}
    content = {"state_dict": saved, "epoch": 1, "global_step": 3, "pytorch-lightning_version": "2.6.0"}
    torch.save(
        content | {"optimizer_states": [], "loops": {}, "hyper_parameters": {"lr": 0.1}}, tmp_path / "plain.ckpt"
    )
    load_initial_weights(module, str(tmp_path / "plain.ckpt"))
    assert float(module.net.weight[0, 0].detach()) == 3.0
