"""The handlers of signals, which Python allows in the main thread only."""

import os
import signal
import subprocess
import sys
import threading
from typing import Any

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
