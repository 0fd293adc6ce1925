"""Write a batch script for SLURM from the configuration, and submit it.

Nodes and tasks are those of trainer.num_nodes and trainer.devices. The job has its own run folder and resume=auto.
Before its time limit, or when it is preempted, it saves a checkpoint, stops, is queued again and resumes.

    python -m scripts.submit --time 4:00:00 strategy=fsdp trainer.num_nodes=2 trainer.devices=4
"""

import argparse
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from onecurve.config.command_line import complete_overrides, errors_explained
from onecurve.config.folder import register_resolvers, unique_name
from onecurve.config.resolve import runs_in_single_process
from onecurve.errors import UserError
from onecurve.records.files import atomic_write

ROOT = Path(__file__).parents[1]
_SCRIPT = """\
#!/bin/bash
{options}

touch "{folder}/job.start"
srun --cpus-per-task={cpus} --ntasks=$((SLURM_NNODES * {tasks})) --ntasks-per-node={tasks} --wait=300 {command}
code=$?
if {condition}; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""


def script(cfg: DictConfig, overrides: list[str], folder: Path, arguments: argparse.Namespace) -> str:
    """Return the batch script of a run in `folder`."""
    devices = cfg.trainer.devices if isinstance(cfg.trainer.devices, int) else len(cfg.trainer.devices or [])
    if cfg.trainer.devices == "auto" or devices < 1:
        raise UserError(f"trainer.devices={cfg.trainer.devices}: a job asks for a number of devices per node; give one")
    tasks = 1 if runs_in_single_process(cfg) else devices
    uses_gpus, is_elastic = cfg.trainer.accelerator != "cpu", cfg.launch.elastic
    cpus = (arguments.cpus_per_device or (4 if uses_gpus else 1)) * devices // tasks
    options = {
        "job-name": arguments.name,
        "nodes": cfg.trainer.num_nodes,
        **({} if is_elastic else {"ntasks-per-node": tasks}),  # with it SLURM gives the minimum of --nodes=1-4
        **({"gpus-per-node": devices} if uses_gpus else {}),
        "cpus-per-task": cpus * tasks if is_elastic else cpus,
        "time": arguments.time,
        "signal": f"USR1@{arguments.save_before}",
        "output": folder / "slurm.out",
        "chdir": ROOT,
        "open-mode": "append",
    }
    lines = ["--requeue", *(f"--{name}={value}" for name, value in options.items()), *arguments.option]
    words = [word for word in overrides if not word.startswith("run_dir=")]
    command = [sys.executable, str(ROOT / "train.py"), *words, f"run_dir={folder}", "resume=auto"]
    condition = f'[ "$code" -eq {128 + signal.SIGUSR1} ]'
    if is_elastic:  # a rank has raised or was killed, after the job has saved
        condition += f' || [[ "$code" == @(1|13[4-9]) && "{folder}/checkpoints/last.ckpt" -nt "{folder}/job.start" ]]'
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH {line}" for line in lines),
        cpus=cpus,
        tasks=tasks,
        command=shlex.join(command),
        folder=folder,
        condition=condition,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="arguments of train.py")
    parser.add_argument("--name", default="train", help="job name (default: %(default)s)")
    parser.add_argument("--time", default="1:00:00", help="time limit of the job (default: %(default)s)")
    parser.add_argument(
        "--save-before", type=int, default=120, help="seconds before the limit to stop (default: %(default)s)"
    )
    parser.add_argument(
        "--cpus-per-device", type=int, help="CPU cores for each GPU (default: 4), or each process on CPUs (default: 1)"
    )
    parser.add_argument("--option", action="append", default=[], help="passed on to sbatch: --option=--partition=gpu")
    parser.add_argument("--dry-run", action="store_true", help="only print the script")
    arguments = parser.parse_args()
    register_resolvers()
    try:
        with errors_explained(arguments.overrides), hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            cfg = hydra.compose("train", complete_overrides(arguments.overrides))
        if cfg.fit and cfg.ckpt_path:  # which a job that is queued again would take anew
            raise UserError(
                f"ckpt_path={cfg.ckpt_path}: give run_dir=RUN_DIR and the options of that run, which goes on"
            )
        folder = Path(cfg.run_dir).expanduser().absolute() if cfg.run_dir else ROOT / "runs" / unique_name()
        text = script(cfg, arguments.overrides, folder, arguments)
    except UserError as error:
        sys.exit(f"error: {error}")
    if arguments.dry_run:
        print(text, end="")
        return
    if not shutil.which("sbatch"):
        sys.exit("error: this host has no sbatch: submit from a login node of SLURM; --dry-run prints the script")
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / "job.sh") as file:
        file.write_text(text)
    print(folder)
    sys.exit(subprocess.run(["sbatch", str(folder / "job.sh")]).returncode)


if __name__ == "__main__":
    main()
