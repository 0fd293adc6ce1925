"""Download, verify and extract dataset archives; an interrupted step leaves no incomplete result in place."""

import shutil
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from onecurve import UserError

_TIMEOUT = 20  # seconds without a byte before the next URL is tried


@dataclass(frozen=True)
class Archive:
    """A published `.tar.gz`: its name, its MD5 and the folder that it extracts to."""

    name: str
    md5: str
    folder: str


def fetch(archive: Archive, root: Path, urls: list[str]) -> Path:
    """Return the archive under `root`; if it is missing or corrupt, download it from the first of `urls` that has it.

    pooch downloads to a temporary file, and renames it when its checksum is correct.
    """
    import pooch  # late: it takes a tenth of a second, and most runs find their data

    reasons = []
    for url in urls:
        address = f"{url.rstrip('/')}/{archive.name}"
        downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=_TIMEOUT)
        try:
            return Path(pooch.retrieve(address, f"md5:{archive.md5}", archive.name, root, downloader=downloader))
        except (OSError, ValueError) as error:  # no connection, an answer such as 404, or a wrong checksum
            reasons.append(f"{url}: {' '.join(str(error).split())}")
    file = (root / archive.name).resolve()
    state = "is corrupt" if file.exists() else "does not exist"
    raise UserError(
        f"{file} {state} and cannot be downloaded ({'; '.join(reasons)}): "
        "put the archive there, set data.root=FOLDER (or $CIFAR_ROOT) to a folder that has it, or train on synthetic "
        "images with data=shapes"
    )


def extract(archive: Archive, file: Path, root: Path) -> None:
    """Extract into a temporary folder, which no member may leave, and rename the result into place."""
    with tempfile.TemporaryDirectory(dir=root, prefix=".unpacking-") as temporary:
        try:
            with tarfile.open(file) as tar:
                tar.extractall(temporary, filter="data")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise UserError(f"{file} cannot be unpacked ({error}): delete it, or set data.root") from None
        shutil.rmtree(root / archive.folder, ignore_errors=True)  # an existing folder is incomplete
        (Path(temporary) / archive.folder).replace(root / archive.folder)
