"""How a script ends that catches no `UserError`."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from onecurve.errors import UserError, in_python
from onecurve.process import log
from tests.support.commands import ROOT

SCRIPT = """
import sys

import onecurve
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader


class Module(BoringModel):
    def on_train_start(self):
        if self.global_rank in map(int, sys.argv[2:]):
            try:
                raise KeyError("lr")
            except KeyError as error:
                raise onecurve.UserError("set trainer.lr=null") from error


def show(kind, error, trace, shown=sys.excepthook):
    print("hook of the script", file=sys.stderr)
    shown(kind, error, trace)


if __name__ == "__main__":
    sys.excepthook = show
    trainer = onecurve.Trainer(strategy=sys.argv[1], devices=2, accelerator="cpu", max_steps=1, default_root_dir="run")
    trainer.fit(Module(), DataLoader(RandomDataset(32, 64), batch_size=8))
"""


def test_messages_of_a_script_are_in_python() -> None:
    stopped = "stopped by SIGINT; ckpt_path=runs/a goes on; set data.batch_size=8, bit_exact=true or launch.timeout=9"
    assert in_python(stopped) == (
        "stopped by SIGINT; fit(ckpt_path='last') goes on; set the loader's batch_size=8, bit_exact=True or timeout=9"
    )


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mock]:
    """Return a hook for uncaught errors, as a script installs it before it makes its trainer."""
    installed = Mock()
    monkeypatch.setattr(sys, "excepthook", installed)
    log._replace_excepthook.cache_clear()
    yield installed
    log._replace_excepthook.cache_clear()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_hook_of_a_script_gets_the_message_alone(rank: int, hook: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the ranks of the trainer are ended; another rank waits for that."""
    trainer, sleep = Mock(), Mock()
    monkeypatch.setattr("onecurve.process.log.time.sleep", sleep)
    log.shorten_user_errors(trainer, rank)
    with pytest.raises(UserError) as caught:
        raise UserError("set trainer.lr=null") from KeyError("lr")
    sys.excepthook(UserError, caught.value, caught.tb)
    kind, shown, trace = hook.call_args.args
    assert (kind, str(shown), shown.__cause__, shown.__traceback__, trace) == (
        UserError,
        "set lr=None",
        None,
        None,
        None,
    )
    assert (sleep.call_args.args[0] > 0) == (rank > 0)
    trainer.strategy.launcher.kill.assert_called_once_with(signal.SIGKILL)


def test_the_hook_of_a_script_gets_other_errors_as_they_are(hook: Mock) -> None:
    trainer, error = Mock(), ValueError("mine")
    log.shorten_user_errors(trainer, 0)
    sys.excepthook(ValueError, error, None)
    hook.assert_called_once_with(ValueError, error, None)
    trainer.strategy.launcher.kill.assert_not_called()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_an_uncaught_user_error_is_one_line(ranks: tuple[int, ...], tmp_path: Path) -> None:
    """Rank zero shows it, or the only rank that has it, by the hook that the script has installed."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", "ddp", *map(str, ranks)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "engine"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stderr.splitlines() if line.startswith(f"[rank{ranks[0]}]")]
    assert lines == [
        f"[rank{ranks[0]}]: {text}" for text in ("hook of the script", "onecurve.errors.UserError: set lr=None")
    ]
    assert done.stderr.count("set lr=None") == 1
    assert done.returncode == 1
