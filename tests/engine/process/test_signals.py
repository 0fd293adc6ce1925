"""The handlers of signals, which Python allows in the main thread only."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from onecurve.process import signals


def test_a_run_in_another_thread_installs_no_handler() -> None:
    """As in a server, or in a widget of a notebook."""
    before: dict[int, Any] = {number: signal.getsignal(number) for number in signals.SIGNALS}
    found: list[dict[int, object]] = []

    def run() -> None:
        found.append(signals.install_handlers(signals.on_signal))
        signals.restore_handlers(before)
        found.append({})

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [{}, {}]
    assert {number: signal.getsignal(number) for number in signals.SIGNALS} == before


def test_a_copy_of_a_signal_may_interrupt_its_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of `timeout`, which signals its command and then the group."""
    monkeypatch.setattr(signals, "_received", [])
    rename, handlers = Path.rename, {number: signal.getsignal(number) for number in signals.SIGNALS}

    def interrupted(file: Path, target: Path) -> Path:
        if len(signals._received) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return rename(file, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    try:
        with signals.forward_to_workers():
            os.kill(os.getpid(), signal.SIGTERM)
            assert Path(os.environ[signals.FLAG_FILE]).read_text() == str(int(signal.SIGTERM))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_output_whose_reader_has_ended_is_dropped() -> None:
    """The Ctrl-C that stops a run ends the `tee` behind it too; stderr has its reader."""
    program = "from onecurve.process import signals as s; s.drop_lost_readers(); print(1); s.os.write(2, b'here')"
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"here")
