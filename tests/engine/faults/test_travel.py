"""A run continued under another strategy, at another world size, equals the uninterrupted run."""

import functools
import resource
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onecurve.checkpoint.io import AtomicCheckpointIO
from onecurve.checkpoint.newest import newest_checkpoint
from onecurve.config.resolve import runs_in_single_process
from onecurve.errors import UserError
from tests.support.commands import run_here
from tests.support.comparison import check_resumed, relative
from tests.support.experiments import EXPERIMENTS, SHORT_RUN, SHORT_STEPS
from tests.support.interruption import SaveAndDie, die, run_on_ranks
from tests.support.pool import Pool, RankFailed
from tests.support.runs import Record, compose, fit, moments

TASK = ["scheduler=cosine", "optimizer=adamw", "optimizer.lr=0.01", "callbacks=[default,ema]"]
SAVED_AT = 3  # steps, in the middle of the first epoch of five
PLACES = {
    "single": ("auto", 1, []),
    "ddp x4": ("ddp", 4, []),
    "zero-1 x2": ("ddp", 2, ["strategy.shard_optimizer=true"]),
    "fsdp x2": ("fsdp", 2, []),
    "hsdp x4": ("hsdp", 4, []),
    "pipeline x4": ("pipeline", 4, []),
    "hybrid x4": ("hybrid", 4, ["strategy.data_parallel=fsdp"]),
    "fsdp x2, sharded": ("fsdp", 2, ["strategy.sharded_checkpoints=true"]),
    "pipeline x2, sharded": ("pipeline", 2, ["strategy.sharded_checkpoints=true"]),
    "hybrid x4, sharded": ("hybrid", 4, ["strategy.sharded_checkpoints=true", "strategy.data_parallel=fsdp"]),
}
SHARDED = [
    "fsdp x2, sharded",
    *(pytest.param(place, marks=pytest.mark.slow) for place in ("pipeline x2, sharded", "hybrid x4, sharded")),
]
# DDP holds what one process does, HSDP holds shards as FSDP, and "hybrid x4, sharded" as the two places before it.
QUICK = [place for place in PLACES if place not in ("ddp x4", "hsdp x4", "hybrid x4, sharded")]
QUICK_PAIRS = {
    ("single", "zero-1 x2"),
    ("zero-1 x2", "fsdp x2"),
    ("pipeline x4", "hybrid x4"),
    ("fsdp x2, sharded", "pipeline x2, sharded"),
    ("pipeline x2, sharded", "single"),
}
PAIRS = [
    pytest.param(here, there, marks=[] if (here, there) in QUICK_PAIRS else pytest.mark.slow)
    for here in PLACES
    for there in PLACES
]


def compose_at(place: str, folder: Path, small: list[str], *overrides: str) -> Any:
    strategy, devices, options = PLACES[place]
    chosen = [f"strategy={strategy}", f"trainer.devices={devices}", *options, *overrides]
    return compose(folder, *small, *SHORT_RUN, *TASK, *chosen)


@pytest.fixture(scope="module")
def saved(pool: Pool, small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the checkpoint of a run that was interrupted in the place of that name."""

    @functools.cache
    def run(place: str) -> Path:
        folder = tmp_path_factory.mktemp("interrupted")
        cfg = compose_at(place, folder, small)
        run_on_ranks(pool, cfg.trainer.devices, die, cfg, "on_train_batch_end", SAVED_AT)
        return folder / "died.ckpt"

    return run


def content(file: Path) -> dict[str, Tensor]:
    """Return every tensor of weights, average and optimizer by name."""
    checkpoint = AtomicCheckpointIO().load_checkpoint(file)
    weights = {
        f"{part}/{name}": value
        for part in ("state_dict", "training_state_dict")
        for name, value in checkpoint[part].items()
    }
    return weights | moments(checkpoint["optimizer_states"][0])


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=[] if place in QUICK else pytest.mark.slow) for place in PLACES]
)
def test_checkpoint_equals_that_of_a_single_process(place: str, saved: Callable[[str], Path]) -> None:
    expected, found = content(saved("single")), content(saved(place))
    assert list(found) == list(expected)
    assert max(relative(found[name], tensor) for name, tensor in expected.items()) < 1e-9


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_resumes_under_another_strategy(
    here: str,
    there: str,
    saved: Callable[[str], Path],
    alone: Callable[..., Record],
    pool: Pool,
    small: list[str],
    folder: Path,
) -> None:
    reference = alone(*TASK)
    cfg = compose_at(there, folder, small, f"ckpt_path={saved(here)}")
    for record in run_on_ranks(pool, cfg.trainer.devices, fit, cfg):
        assert record.losses == pytest.approx(reference.losses[SAVED_AT:], rel=1e-9)
    last = reference.file.parent / "checkpoints" / "last.ckpt"
    expected, found = content(last), content(folder / "checkpoints" / "last.ckpt")
    assert list(found) == list(expected)
    assert max(relative(found[name], tensor) for name, tensor in expected.items()) < 1e-8


@pytest.mark.slow
def test_spawned_processes_resume(
    saved: Callable[[str], Path], alone: Callable[..., Record], small: list[str], folder: Path
) -> None:
    cfg = compose(
        folder, *small, *SHORT_RUN, *TASK, "strategy=ddp_spawn", "trainer.devices=2", f"ckpt_path={saved('single')}"
    )
    assert runs_in_single_process(cfg)
    with pytest.raises(Exception, match="Died"):
        fit(cfg, SaveAndDie("on_train_batch_end", 6))
    back = fit(compose_at("single", folder, small, f"ckpt_path={folder}/died.ckpt"))
    check_resumed([back], alone(*TASK), done=6)


@pytest.mark.parametrize(
    "place", ["fsdp x2", *(pytest.param(place, marks=pytest.mark.slow) for place in ("zero-1 x2", "hybrid x4"))]
)
def test_muon_and_a_frozen_bias_resume_under_another_strategy_and_back(
    place: str, alone: Callable[..., Record], pool: Pool, small: list[str], folder: Path
) -> None:
    """The bias of the whitening layer is frozen during the run; back in one process, steps accumulate."""
    strategy, devices, options = PLACES[place]
    task = [*small, *SHORT_RUN, *EXPERIMENTS["muon"]]
    died = f"ckpt_path={folder}/died.ckpt"
    die(compose(folder, *task), "on_train_batch_end", SAVED_AT)
    there = compose(folder, *task, f"strategy={strategy}", f"trainer.devices={devices}", *options, died)
    pool.run(devices, die, there, "on_train_batch_end", 6)
    back = fit(compose(folder, *task, "trainer.accumulate_grad_batches=2", died))
    check_resumed([back], alone(*EXPERIMENTS["muon"]), done=6)


@pytest.mark.parametrize("place", SHARDED)
def test_sharded_checkpoint_has_one_folder_per_file(place: str, pool: Pool, small: list[str], folder: Path) -> None:
    cfg = compose_at(place, folder, small, "trainer.max_steps=10")  # two epochs, so that both files are replaced
    pool.run(cfg.trainer.devices, fit, cfg)
    names = sorted(path.name.split(".")[0] for path in (folder / "checkpoints").iterdir())
    # The shards of `previous` stay in a folder with the name of `last`.
    assert names == ["best"] * 2 + ["last"] * 3 + ["previous"]
    file = folder / "checkpoints" / "last.ckpt"
    skeleton = torch.load(file, weights_only=True)
    assert all(tensor.is_meta for tensor in skeleton["state_dict"].values())
    assert file.stat().st_size < 200_000
    part = next((file.parent / skeleton["shards"]).glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-1000])
    assert newest_checkpoint(folder) == file.with_name("previous.ckpt")
    shutil.rmtree(file.parent / skeleton["shards"])
    with pytest.raises(UserError, match=r"its folder last.* does not exist"):
        AtomicCheckpointIO().load_checkpoint(file)
    with pytest.raises(RankFailed, match="is not a complete checkpoint"):
        pool.run(cfg.trainer.devices, fit, compose_at(place, folder, small, f"ckpt_path={file}"))


def test_corrupt_shard_or_full_disk_is_a_one_line_error(
    saved: Callable[[str], Path], pool: Pool, small: list[str], folder: Path
) -> None:
    """torch raises exceptions here that do not derive from Exception."""
    there = "fsdp x2, sharded"
    file = shutil.copytree(saved(there).parent, folder) / "died.ckpt"
    for part in (folder / torch.load(file)["shards"]).glob("*.distcp"):
        part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(UserError, match="is not a complete checkpoint"):
        AtomicCheckpointIO().load_checkpoint(file)
    with pytest.raises(RankFailed, match=r"UserError: ckpt_path=.* is not a complete checkpoint"):
        pool.run(2, fit, compose_at(there, folder, small, f"ckpt_path={file}"))
    with pytest.raises(RankFailed, match="UserError: cannot write the checkpoint"):
        pool.run(2, fit_with_small_files, compose_at(there, folder / "full", small))


def fit_with_small_files(cfg: Any) -> None:
    """Fit while no file may grow beyond 20 kB, which stands for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        fit(cfg)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_loads_a_checkpoint_written_on_a_gpu(
    saved: Callable[[str], Path], pool: Pool, small: list[str], folder: Path
) -> None:
    """A checkpoint with CUDA tensors resumes on a machine without a GPU."""
    folder.mkdir()
    with zipfile.ZipFile(saved("single")) as source, zipfile.ZipFile(folder / "gpu.ckpt", "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("/data.pkl"):
                content = content.replace(b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:0")
            target.writestr(name, content)
    cfg = compose_at("fsdp x2", folder, small, f"ckpt_path={folder}/gpu.ckpt")
    assert all(len(record.losses) == SHORT_STEPS - SAVED_AT for record in pool.run(2, fit, cfg))


CONVERT = "scripts.convert_checkpoint"


def test_conversion_keeps_the_folder_of_another_checkpoint(saved: Callable[[str], Path], folder: Path) -> None:
    folder.mkdir()
    for name in ("last.sharded.ckpt", "last.ckpt"):
        run_here(str(saved("single")), str(folder / name), "--sharded", program=CONVERT)
    assert content(folder / "last.sharded.ckpt").keys() == content(folder / "last.ckpt").keys()


def test_conversion_round_trip(saved: Callable[[str], Path], folder: Path) -> None:
    folder.mkdir()
    run_here(str(saved("single")), str(folder / "sharded.ckpt"), "--sharded", program=CONVERT)
    assert all(tensor.is_meta for tensor in torch.load(folder / "sharded.ckpt")["state_dict"].values())
    run_here(str(folder / "sharded.ckpt"), str(folder / "single_file.ckpt"), program=CONVERT)
    for file in ("sharded.ckpt", "single_file.ckpt"):
        expected, found = content(saved("single")), content(folder / file)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert torch.load(folder / "single_file.ckpt")["loops"] == torch.load(saved("single"))["loops"]
    _, err = run_here(str(folder), str(folder / "x.ckpt"), program=CONVERT, code=1)
    assert err.count("\n") == 1
