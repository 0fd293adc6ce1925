"""`doctor=true`: check this host and the configuration, reduce a tensor over all ranks, and print the findings.

The first process of each host checks it. Under torchrun or srun rank zero prints all, and other ranks their problems.
"""

import logging
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

from onecurve.config.folder import remove_if_unused
from onecurve.config.resolve import runs_in_single_process
from onecurve.errors import RankFailedError, UserError
from onecurve.extras.doctor.all_reduce import measure_all_reduce
from onecurve.launch.start import launch
from onecurve.process.devices import resolve_devices
from onecurve.process.started_by import check_tasks_are_started, detect_cluster_environment, started_by
from onecurve.targets import build, locate, target_nodes

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_SHARED_MEMORY = Path("/dev/shm")
_MIN_SHARED_MEMORY = 512 << 20  # bytes; Docker's default is 64 MiB
_MIN_FREE_BYTES = 2_000_000_000  # bytes that should be free
_WANDB_TIMEOUT = 8  # seconds for an answer of the server

Check = Callable[[DictConfig], str]  # returns what is fine; a UserError says what to do


def examine(cfg: DictConfig) -> None:
    """Run all checks and print their findings; exit with code 1 if there is an error."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise UserError("doctor=true checks a single run: leave out -m")
    env = detect_cluster_environment()
    rank, local_rank = (env.global_rank(), env.local_rank()) if env else (0, 0)
    has_failed = False
    for name, check in (CHECKS | own_checks(cfg)).items():
        if local_rank == 0 or check is check_all_reduce:
            status, text = run_check(check, cfg.copy())  # an object that one builds resolves interpolations
            has_failed |= status == "error"
            if rank == 0 or status != "ok":
                _print(name, status, f"rank {rank} on {socket.gethostname()}: {text}" if rank else text)
    remove_if_unused(Path(HydraConfig.get().runtime.output_dir))
    if has_failed:
        raise SystemExit(1)


def own_checks(cfg: DictConfig) -> dict[str, Check]:
    """Return the checks that the classes of the configuration offer, by the name of the node."""
    nodes = dict(target_nodes(OmegaConf.to_container(cfg, resolve=True)))
    classes = {name: locate(f"{name}._target_", node["_target_"]) for name, node in nodes.items()}
    return {name: kind.examine for name, kind in classes.items() if hasattr(kind, "examine")}


def run_check(check: Check, cfg: DictConfig) -> tuple[str, str]:
    """Return the status and the text of a check. After an exception the remaining checks still run."""
    try:
        return "ok", check(cfg)
    except UserError as error:
        return "error", str(error)
    except Exception as error:
        return "error", f"the check failed: {type(error).__name__}: {error}"


def _print(name: str, status: str, text: str) -> None:
    table = Table.grid(padding=(0, 2))  # one for each check: the all-reduce may take a minute
    color = "green" if status == "ok" else "bold red"
    table.add_row(Text(f"{status:<7}", color), f"{name:<10}", Text(" ".join(text.split())))
    Console().print(table)


def check_versions(cfg: DictConfig) -> str:
    """Check Python and the packages that onecurve needs, without an import, which would execute them."""
    python = metadata.metadata("onecurve")["Requires-Python"]
    for requirement in map(Requirement, [f"Python{python}", *(metadata.requires("onecurve") or [])]):
        if requirement.marker:  # of an extra
            continue
        version = _installed(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            raise UserError(
                f"{requirement.name} {version or 'is missing'}, but {requirement} is required: remove .venv and run "
                "`make install` (PYTHON=python3.12 chooses another Python)"
            )
    return ", ".join(f"{name} {_installed(name)}" for name in ("Python", "torch", "lightning", "hydra-core", "wandb"))


def _installed(name: str) -> str | None:
    if name == "Python":
        return platform.python_version()
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_devices(cfg: DictConfig) -> str:
    """Check that torch can use the GPUs of this host, and that there are as many as configured."""
    if cfg.trainer.accelerator != "cpu" and _NVIDIA_DRIVER.exists() and not torch.cuda.is_available():
        raise UserError(
            f"this host has an NVIDIA driver, but torch {torch.__version__} cannot use it: check `nvidia-smi` and "
            "CUDA_VISIBLE_DEVICES, then install the torch for the driver (https://pytorch.org/get-started/locally)"
        )
    accelerator, count = _accelerator_and_count(cfg)
    if accelerator != "cuda":
        return f"{accelerator}, {count} process(es)"
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    models = sorted({f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus})
    return f"{count} of {len(gpus)} x {' and '.join(models)}; torch for CUDA {torch.version.cuda}"


def _accelerator_and_count(cfg: DictConfig) -> tuple[str, int]:
    """Return the accelerator without `auto`, and the number of devices per host."""
    accelerator, devices = resolve_devices(cfg.trainer.accelerator, cfg.trainer.devices)
    return accelerator, devices if isinstance(devices, int) else len(devices)


def check_slurm(cfg: DictConfig) -> str:
    """Check nodes and tasks of the SLURM job; the text names the option of sbatch to change."""
    if "SLURM_JOB_ID" not in os.environ:
        return "not in a SLURM job"
    _, devices = _accelerator_and_count(cfg)
    nodes, tasks = cfg.trainer.num_nodes, int(os.environ.get("SLURM_NTASKS", 1))
    is_task_a_rank = tasks > 1 and started_by() != "torchrun"  # otherwise it starts all ranks of its host
    needed_tasks = devices if is_task_a_rank and not runs_in_single_process(cfg) else 1
    job_nodes = int(os.environ.get("SLURM_NNODES", nodes))
    if job_nodes != nodes or (is_task_a_rank and tasks != nodes * needed_tasks):
        raise UserError(
            f"the job has {tasks} task(s) on {job_nodes} node(s), but trainer.devices={devices} and "
            f"trainer.num_nodes={nodes}: set --nodes={nodes} --ntasks-per-node={needed_tasks}"
        )
    return f"job {os.environ['SLURM_JOB_ID']}, {tasks} task(s)"


def check_disk(cfg: DictConfig) -> str:
    """Check the space for the run, and in /dev/shm, through which NCCL and the workers of a DataLoader pass data."""
    is_used = cfg.data.get("num_workers", 0) or torch.cuda.device_count() > 1
    if is_used and _SHARED_MEMORY.exists() and shutil.disk_usage(_SHARED_MEMORY).free < _MIN_SHARED_MEMORY:
        raise UserError(
            f"{_SHARED_MEMORY} has less than {_MIN_SHARED_MEMORY >> 20} MiB free, too little for NCCL and for "
            "data.num_workers: start the container with --ipc=host or --shm-size=1g"
        )
    folder = Path(HydraConfig.get().runtime.output_dir)
    free = shutil.disk_usage(folder).free
    if free < _MIN_FREE_BYTES:
        raise UserError(
            f"{folder} has {free / 1e9:.1f} GB free, which is less than {_MIN_FREE_BYTES / 1e9:.1f} GB: delete "
            "something, or set run_dir to a folder on another disk"
        )
    return f"{free / 1e9:.0f} GB free in {folder}"


def check_saving(cfg: DictConfig) -> str:
    """Measure the save of a checkpoint of AdamW's size.

    With saves of s and failures each m seconds, the interval √(2sm) loses the least time (Young, 1974; Daly, 2006).
    """
    from onecurve.checkpoint.io import AtomicCheckpointIO  # late, since it imports Lightning

    weights = list(build(cfg.module).parameters())
    tensors = [weight.detach().clone() for weight in 3 * weights]  # and two moments of each
    with tempfile.TemporaryDirectory(dir=HydraConfig.get().runtime.output_dir) as folder:
        megabytes, begun = sum(tensor.nbytes for tensor in tensors) / 1e6, time.perf_counter()
        AtomicCheckpointIO().save_checkpoint({"state_dict": tensors}, Path(folder, "saved.ckpt"))
        seconds = time.perf_counter() - begun
    hourly, daily = (round((2 * seconds * apart) ** 0.5) for apart in (3600, 86400))
    return (
        f"a checkpoint of {megabytes:.1f} MB takes {seconds:.2f} s: to save by time, set "
        f"callbacks.checkpoint.train_time_interval to {hourly} s with a failure an hour, or {daily} s with one a day"
    )


def check_data(cfg: DictConfig) -> str:
    """Prepare the images as a run does, by download or generation, and read the test set."""
    if "source" not in cfg.data:
        return f"{cfg.data._target_} prepares its data when a run starts"
    source, root = build(cfg.data.source), Path(cfg.data.root).expanduser()
    source.prepare(root)
    _, labels = source.load(root, "test")
    return f"{source.description}: {len(labels)} test images"


def check_loss(cfg: DictConfig) -> str:
    """Train one step on a CPU, and check whether the module would learn the same on several devices."""
    if cfg.bit_exact or not cfg.fit or detect_cluster_environment():
        return "not checked: with bit_exact=true, without training, or under torchrun or srun"
    from onecurve.checks.loss import LossCheck  # late, since they import Lightning
    from onecurve.extras.one_process import on_one_process
    from onecurve.run.experiment import assemble

    with tempfile.TemporaryDirectory() as folder:
        one = on_one_process(cfg, folder, accelerator="cpu", precision="32-true", max_steps=1, limit_val_batches=0)
        one.init_from = None
        logging.disable(logging.WARNING)  # the lines of a run
        try:
            trainer, module, data = assemble(one)
            (check,) = [callback for callback in trainer.callbacks if isinstance(callback, LossCheck)]
            check.is_always_due = True
            if module.automatic_optimization and not getattr(module, "takes_batch", False):  # a step may take long
                trainer.fit(module, datamodule=data)
        finally:
            logging.disable(logging.NOTSET)
    return check.result


def check_wandb(cfg: DictConfig) -> str:
    """Check the W&B key and the connection, unless the run is offline."""
    if "wandb" not in cfg.logger:
        return "not used: there is no logger.wandb"
    import wandb

    from onecurve.observe.wandb import online_or_offline

    build(cfg.logger.wandb)  # checks its options and WANDB_MODE
    try:
        mode = online_or_offline()
        account = f" as {wandb.Api(timeout=_WANDB_TIMEOUT).viewer.username}" if mode == "online" else ""
    except Exception as error:  # of wandb, requests or its service: a run would go offline as well
        raise UserError(
            f"no login ({error}): check the key (`wandb login --relogin`) and the network (HTTPS_PROXY, or "
            "WANDB_BASE_URL for your own server), or set WANDB_MODE=offline"
        ) from None
    finally:
        wandb.teardown()
    if mode == "offline" and os.environ.get("WANDB_MODE") != "offline":
        return "offline, because no API key is configured: run `wandb login`, or set WANDB_API_KEY"
    return f"{mode}{account}"


def check_all_reduce(cfg: DictConfig) -> str:
    """Start the ranks, or join those that torchrun or srun started, and measure the bandwidth between them.

    The options that would resume or restart a run are off, because one may be in progress in the run folder.
    """
    check_tasks_are_started()
    cfg.fit, cfg.resume, cfg.launch.max_restarts, cfg.launch.elastic = False, None, 0, False
    if cfg.trainer.num_nodes == 1 and not detect_cluster_environment():
        with open_dict(cfg.strategy):  # a process per device, also for a strategy that starts its own processes
            cfg.strategy.pop("single_process", None)
    try:
        measured = launch(cfg, job=measure_all_reduce).metrics
    except RankFailedError as error:  # the ranks have written to the terminal, and not to a log
        raise UserError(str(error).splitlines()[0].partition("; its log is")[0]) from None
    processes, hosts, size, seconds = (measured[name] for name in ("processes", "hosts", "bytes", "seconds"))
    bandwidth = 2 * (processes - 1) / processes * size / seconds  # of a process in a ring, `busbw` of nccl-tests
    place = f"{processes} process(es) on {hosts} host(s)"
    return f"{place}, {size / 2**20:.0f} MiB in {1e3 * seconds:.1f} ms, {bandwidth / 1e9:.2f} GB/s"


CHECKS: dict[str, Check] = {  # in the order in which their findings are printed
    "versions": check_versions,
    "devices": check_devices,
    "slurm": check_slurm,
    "disk": check_disk,
    "saving": check_saving,
    "data": check_data,
    "loss": check_loss,
    "wandb": check_wandb,
    "all-reduce": check_all_reduce,
}
