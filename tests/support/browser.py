"""Open pages in a real Chromium, all in frames of one page, because each start takes seconds."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = "--headless=new --no-sandbox --disable-gpu --no-first-run --allow-file-access-from-files"
_FLAGS += " --disable-background-networking --disable-component-update --disable-sync --proxy-server=127.0.0.1:9"
_FLAGS += " --enable-logging=stderr"
# Addresses that Chromium itself asks for; the proxy does not exist, so nothing leaves this machine.
_OWN_HOSTS = ("android.clients.google.com", "update.googleapis.com", "clients2.google.com", "accounts.google.com")
_FRAMES = """<!doctype html><body>{frames}<pre id="state"></pre><script>
const frames = [...document.querySelectorAll("iframe")];
const state = ({{ contentDocument: {{ documentElement: root }} }}) =>
  ({{ charts: Number(root.dataset.charts ?? -1), overflow: root.scrollWidth - root.clientWidth }});
const isDrawn = ({{ contentDocument: page }}) =>
  page.querySelector("figure.chart") === null || page.documentElement.dataset.charts !== undefined;
const report = () => {{
  if (frames.every(isDrawn)) document.getElementById("state").textContent = JSON.stringify(frames.map(state));
  else setTimeout(report, 50);
}};
addEventListener("load", report); // all frames are loaded then
</script></body>"""


@dataclass
class Opened:
    """What became of one page: the charts it has drawn, and the pixels by which it is wider than its frame."""

    charts: int
    overflow: int


@dataclass
class Session:
    """The opened pages, the lines of the console, and the addresses that they asked for in the network."""

    pages: list[Opened]
    console: list[str]
    requests: set[str]


def open_pages(folder: Path, pages: list[tuple[Path, int]], *flags: str) -> Session:
    """Open each page in a frame.

    Args:
        folder: an empty folder for Chromium.
        pages: file and width of each, in pixels.
        flags: further options of Chromium.

    Raises:
        AssertionError: if a page has not drawn its charts.
    """
    frames = "".join(f'<iframe src="{file.as_uri()}" width="{width}" height="2000"></iframe>' for file, width in pages)
    page, net_log = folder / "frames.html", folder / "net.json"
    page.write_text(_FRAMES.format(frames=frames))
    own = [f"--user-data-dir={folder / 'profile'}", f"--log-net-log={net_log}", "--virtual-time-budget=20000"]
    command = [str(CHROMIUM), *_FLAGS.split(), *own, *flags, "--dump-dom", page.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in result.stderr.splitlines() if ":CONSOLE:" in line]
    found = re.search(r'id="state">(\[.*?\])<', result.stdout)
    assert found, (console, result.stdout[-500:])
    urls = set(re.findall(r'"url":"(https?://[^"]*)"', net_log.read_text()))
    requests = {url for url in urls if urlsplit(url).hostname not in _OWN_HOSTS}
    return Session([Opened(**state) for state in json.loads(found[1])], console, requests)
