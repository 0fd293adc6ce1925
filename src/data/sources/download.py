"""Find, download, verify and extract dataset archives; an interrupted step leaves no incomplete result in place."""

import shutil
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from src.engine import UserError, check_can_store

_TIMEOUT = 20  # seconds without a byte before the next URL is tried
_CHECK_TIMEOUT = 5  # seconds for a URL to answer a request without a download
_SPACE = 500_000_000  # bytes for an archive and its content


@dataclass(frozen=True)
class Archive:
    """A published `.tar.gz`: its name, its MD5 and the folder that it extracts to."""

    name: str
    md5: str
    folder: str


def fetch(archive: Archive, root: Path, urls: list[str]) -> Path:
    """Return the archive under `root`; if it is missing or corrupt, download it from the first of `urls` that has it.

    pooch downloads to a temporary file, and renames it when its checksum is correct.

    Raises:
        UserError: if no URL provides an archive with the checksum.
    """
    import pooch  # late: it takes a tenth of a second, and most runs find their data

    file, reasons = root / archive.name, []
    if _is_complete(file, archive):
        return file
    for url in urls:
        downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=_TIMEOUT)
        try:
            pooch.retrieve(_address(url, archive), f"md5:{archive.md5}", file.name, root, downloader=downloader)
        except (OSError, ValueError) as error:  # no connection, an answer such as 404, or a wrong checksum
            reasons.append(f"{url}: {' '.join(str(error).split())}")
        else:
            return file
    raise _unavailable(archive, root, reasons)


def check_archive(archive: Archive, root: Path, urls: list[str]) -> str:
    """Return what `fetch` and `extract` will do; nothing is downloaded.

    Raises:
        UserError: if no URL has the archive, or `root` cannot hold the data.
    """
    import pooch

    space, reasons = check_can_store(root, "data.root", _SPACE), []
    if _is_complete(root / archive.name, archive):
        return f"{root / archive.name} is complete, and will be extracted; {space}"
    downloader = pooch.HTTPDownloader(timeout=_CHECK_TIMEOUT)
    for url in urls:
        address = _address(url, archive)
        try:
            if downloader(address, None, None, check_only=True):
                return f"{address} will be downloaded to {root}; {space}"
            reasons.append(f"{url}: it has no {archive.name}")
        except OSError as error:
            reasons.append(f"{url}: {error}")
    raise _unavailable(archive, root, reasons)


def _address(url: str, archive: Archive) -> str:
    return f"{url.rstrip('/')}/{archive.name}"


def _is_complete(file: Path, archive: Archive) -> bool:
    import pooch

    return file.exists() and pooch.file_hash(str(file), alg="md5") == archive.md5


def _unavailable(archive: Archive, root: Path, reasons: list[str]) -> UserError:
    file = (root / archive.name).resolve()
    state = "is corrupt" if file.exists() else "does not exist"
    return UserError(
        f"{file} {state} and cannot be downloaded ({'; '.join(reasons)}): put the archive there, set data.root=FOLDER "
        "(or $CIFAR_ROOT) to a folder that has it, or train on synthetic images with data=shapes"
    )


def extract(archive: Archive, file: Path, root: Path) -> None:
    """Extract into a temporary folder, which no member may leave, and rename the result into place.

    Raises:
        UserError: if the archive is truncated, or a member has a path outside its folder.
    """
    with tempfile.TemporaryDirectory(dir=root, prefix=".unpacking-") as temporary:
        try:
            with tarfile.open(file) as tar:
                tar.extractall(temporary, filter="data")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise UserError(f"{file} cannot be unpacked ({error}): delete it, or set data.root") from None
        shutil.rmtree(root / archive.folder, ignore_errors=True)  # an existing folder is incomplete
        (Path(temporary) / archive.folder).replace(root / archive.folder)
