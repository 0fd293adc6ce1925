"""The restarts that a run has left, and on which devices: an elastic run also loses and regains devices.

A run restarts from its newest checkpoint, so any strategy can change its number of ranks.
"""

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from onecurve.checkpoint.newest import checkpoint_file, newest_checkpoint
from onecurve.errors import RankFailedError, UserError
from onecurve.launch.outcome import fold_frames
from onecurve.process import signals
from onecurve.records.events import STARTS, append_restart, last_of, read_events
from onecurve.targets import build

_PROBE_TIMEOUT = 90.0  # seconds; a probe may import torch from a slow disk
_POLL = 0.05  # seconds between two looks at a probe
_PAUSE = float(os.environ.get("ELASTIC_PAUSE", 60.0))  # seconds before lost devices are tried; each loss doubles it


class DevicePolicy:
    """Decides on which of the devices that the user asked for, given as indices, a run restarts; it does no I/O.

    A first death restarts on the same devices. A rank that dies twice without a newer checkpoint in between, or a
    device whose probe fails, is left out.
    """

    def __init__(self, devices: list[int], cfg: DictConfig) -> None:
        self.devices, self.cfg, self.launch = devices, cfg, cfg.launch
        self.used = devices  # those of the ranks, in their order
        self.restarts_left = self.launch.max_restarts  # without a newer checkpoint; negative after one too many
        self.pause = _PAUSE  # seconds before lost devices may come back
        self._lost: set[int] = set()
        self._died: set[int] = set()  # devices whose rank has died since the newest checkpoint
        self._saved_at = 0

    def after_failure(self, dead_rank: int | None, saved_at: int, unusable: Collection[int]) -> str:
        """Choose the devices of the next start; return why they are others, "" if they are not.

        Args:
            dead_rank: the rank that died first; None if it raised an error, which any rank may do.
            saved_at: time of the newest checkpoint.
            unusable: devices whose probe fails.
        """
        if saved_at > self._saved_at:
            self._saved_at, self._died, self.restarts_left = saved_at, set(), self.launch.max_restarts
        reasons = {device: f"device {device} is unusable" for device in unusable if device not in self._lost}
        if dead_rank is not None:
            device = self.used[dead_rank]
            if device in self._died:
                reasons.setdefault(device, f"rank {dead_rank} died twice without a new checkpoint (device {device})")
            self._died.add(device)
        before, reason = self.used, ", ".join(reasons.values())
        self._lost |= reasons.keys()
        self._died -= self._lost
        self.used = self.choose(self._lost, reason)
        if self.used == before:
            self.restarts_left -= 1
            return ""
        self.restarts_left, self.pause = self.launch.max_restarts, 2 * self.pause
        return reason

    def after_probe(self, unusable: set[int]) -> str:
        """Take all devices but the unusable ones; return the reason of the change, "" if there is none."""
        changes = {"unusable": unusable - self._lost, "usable again": self._lost - unusable}
        reason = ", ".join(f"device {device} is {state}" for state in changes for device in sorted(changes[state]))
        self._lost = unusable
        self.used = self.choose(unusable, reason)
        return reason

    def choose(self, lost: set[int], reason: str = "") -> list[int]:
        """Return as many of the other devices as the strategy accepts; raise a UserError if there are too few."""
        left = [device for device in self.devices if device not in lost]
        for size in range(len(left), max(1, self.launch.min_devices) - 1, -1):
            if size == len(self.devices) or self.accepts(size):
                return left[:size]
        raise UserError(
            f"{reason}: {len(left)} of {len(self.devices)} devices are left, too few for launch.min_devices="
            f"{self.launch.min_devices} and for the strategy"
        )

    def accepts(self, size: int) -> bool:
        """Return whether the strategy can arrange so many ranks, by the check that it makes when a run starts."""
        if self.cfg.runtime.chooses_strategy:  # another strategy is chosen
            return True
        strategy = build(self.cfg.strategy)
        from onecurve.parallel.compatibility import check_can_be_bit_exact  # late, because it imports Lightning

        try:
            getattr(strategy, "check_world_size", lambda _: None)(size)
            if self.cfg.bit_exact and size > 1:
                check_can_be_bit_exact(strategy, self.cfg.virtual_ranks, size)
        except UserError:
            return False
        return True


def next_start(cfg: DictConfig, policy: DevicePolicy, end: RankFailedError | signals.Stopped) -> DictConfig:
    """Return the configuration of the next start, from the newest checkpoint; raise the error if there is none."""
    if isinstance(end, signals.Stopped):
        if end.number != signals.RESIZE:
            raise end
        reason = policy.after_probe(unusable_devices(cfg, policy.devices))
    else:
        if cfg.launch.max_restarts <= 0:
            raise end
        unusable = unusable_devices(cfg, policy.devices) if cfg.launch.elastic else set()
        dead_rank = end.dead_rank if cfg.launch.elastic else None
        reason = policy.after_failure(dead_rank, time_of_last_save(cfg.run_dir), unusable)
        if policy.restarts_left < 0:
            raise end
        print(fold_frames(str(end)), file=sys.stderr)
    append_restart(cfg.run_dir, end, reason)
    if reason:
        cfg = with_devices_of(policy, cfg, reason)
    else:
        before, change = cfg.trainer.accumulate_grad_batches, ""
        if cfg.launch.elastic and "OutOfMemoryError" in str(end).partition("\n")[0]:
            started = last_of(read_events(cfg.run_dir), *STARTS)
            cfg = with_smaller_micro_batches(cfg, started.get("normalizes", True))
        if cfg.trainer.accumulate_grad_batches != before:
            change = f" with trainer.accumulate_grad_batches={cfg.trainer.accumulate_grad_batches}"
        print(f"restarting{change}; {policy.restarts_left} restarts left after this one", file=sys.stderr)
    if cfg.fit and (newest := newest_checkpoint(Path(cfg.run_dir))):
        cfg.ckpt_path = str(newest)
    return cfg


def with_devices_of(policy: DevicePolicy, cfg: DictConfig, reason: str) -> DictConfig:
    """Return the configuration for the devices that the policy has chosen, and say why it has."""
    print(f"{reason}; going on with {len(policy.used)} of {len(policy.devices)} devices", file=sys.stderr)
    cfg = with_devices(cfg, policy.used)
    if cfg.runtime.chooses_strategy:
        from onecurve.extras.plan.plan import choose_again  # late, because it imports Lightning

        choose_again(cfg)
    return cfg


def with_devices(cfg: DictConfig, devices: list[int]) -> DictConfig:
    """Return the resolved configuration for these devices of this node, given as indices."""
    cfg = cfg.copy()
    cfg.trainer.devices = len(devices) if cfg.trainer.accelerator == "cpu" else devices
    if "devices" in cfg.strategy:  # which was interpolated
        cfg.strategy.devices = cfg.trainer.devices
    cfg.runtime.world_size = len(devices)
    return cfg


def with_smaller_micro_batches(cfg: DictConfig, normalizes: bool) -> DictConfig:
    """Return the configuration with micro-batches of half the size, if they can hold whole groups and samples.

    With fewer ranks each has more samples of a batch, for which its memory may be too small. The groups of a network
    that `normalizes`, by batch normalization, must not be divided.
    """
    cfg = cfg.copy()
    accumulate = 2 * cfg.trainer.accumulate_grad_batches
    parts, batch = accumulate * cfg.strategy.get("microbatches", 1), cfg.data.get("batch_size") or 0
    is_possible = batch % parts == 0 and batch // parts >= cfg.runtime.world_size
    if not cfg.bit_exact and (cfg.virtual_ranks % parts == 0 or (is_possible and not normalizes)):
        cfg.trainer.accumulate_grad_batches = accumulate
    return cfg


def unusable_devices(
    cfg: DictConfig, devices: Collection[int], is_over: Callable[[], bool] = lambda: False
) -> set[int]:
    """Return the devices whose probe fails: `launch.probe`, or on a GPU a new process that puts a tensor on it.

    A probe that has not ended in time, or when `is_over` is true, is killed, and has failed.
    """
    put_tensor = f'exec {shlex.quote(sys.executable)} -c "import torch; torch.ones(1, device=$DEVICE).item()"'
    command = cfg.launch.probe or ("true" if cfg.trainer.accelerator == "cpu" else put_tensor)
    errors = None if cfg.launch.probe else subprocess.DEVNULL  # those of a command of the user are shown
    options: Any = {"shell": True, "stdout": subprocess.DEVNULL, "stderr": errors}
    probes = [subprocess.Popen(command, env=os.environ | {"DEVICE": str(device)}, **options) for device in devices]
    deadline = time.monotonic() + _PROBE_TIMEOUT
    return {device for device, probe in zip(devices, probes, strict=True) if not _succeeds(probe, deadline, is_over)}


def _succeeds(probe: "subprocess.Popen[bytes]", deadline: float, is_over: Callable[[], bool]) -> bool:
    while probe.poll() is None and time.monotonic() < deadline and not is_over():
        time.sleep(_POLL)
    if probe.returncode is None:
        probe.kill()  # without a wait, because it may be stuck in the driver
    return probe.returncode == 0


def time_of_last_save(run_dir: str) -> int:
    """Return the time of the newest checkpoint; 0 if there is none."""
    file = checkpoint_file(Path(run_dir))
    return file.stat().st_mtime_ns if file.exists() else 0


@contextmanager
def watch_for_devices(cfg: DictConfig, policy: DevicePolicy) -> Iterator[None]:
    """While the ranks run, ask them to save and end once lost devices are usable and there is a newer checkpoint."""
    before, has_ended = time_of_last_save(cfg.run_dir), threading.Event()

    def watch() -> None:
        while len(policy.used) < len(policy.devices) and not has_ended.wait(policy.pause):
            if time_of_last_save(cfg.run_dir) > before:
                idle = [device for device in policy.devices if device not in policy.used]
                usable = policy.choose(unusable_devices(cfg, idle, has_ended.is_set))
                if len(usable) > len(policy.used) and not has_ended.is_set():
                    signals.resize_file().parent.mkdir(parents=True, exist_ok=True)
                    signals.resize_file().touch()
                    return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        signals.resize_file().unlink(missing_ok=True)
