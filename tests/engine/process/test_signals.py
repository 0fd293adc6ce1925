"""The handlers of signals, which Python allows in the main thread only."""

import signal
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
