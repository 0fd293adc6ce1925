"""Find, download, verify and extract dataset archives; an interrupted step leaves no incomplete result in place."""

import hashlib
import shutil
import tarfile
import tempfile
import urllib.request
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError

from rich.progress import Progress

from src.utils.errors import UserError
from src.utils.files import check_can_store

_TIMEOUT = 20.0  # seconds without a byte before the next URL is tried
_CHECK_TIMEOUT = 5.0  # seconds for a URL to answer a request without a download
_BLOCK = 1 << 20
_SPACE = 500_000_000  # bytes for an archive and its content


@dataclass(frozen=True)
class Archive:
    """A published `.tar.gz`: its name, its MD5 and the folder that it extracts to."""

    name: str
    md5: str
    folder: str


def fetch(archive: Archive, root: Path, urls: list[str]) -> Path:
    """Return the archive under `root`; if it is missing, download it from the first of `urls` that has it.

    Raises:
        UserError: if no URL provides the archive, or the checksum of the found or downloaded file is wrong.
    """
    file = root / archive.name
    if file.exists():
        _check(file, archive)
        return file
    partial, reasons = root / f"{archive.name}.part", []
    if partial.exists() and _md5(partial) == archive.md5:  # complete, but its process died before it renamed the file
        return partial.replace(file)
    for url in urls:
        try:
            _download(f"{url.rstrip('/')}/{archive.name}", partial)
        except OSError as error:  # includes URLError
            reasons.append(f"{url}: {getattr(error, 'reason', error)}")
            continue
        try:
            _check(partial, archive)
        except UserError:
            partial.unlink()  # otherwise the next start would ask the server to continue a complete file
            raise
        return partial.replace(file)
    raise _unavailable(archive, root, reasons)


def check_archive(archive: Archive, root: Path, urls: list[str]) -> str:
    """Return what `fetch` and `extract` will do; nothing is downloaded.

    Raises:
        UserError: if no URL answers, the existing file is corrupt, or `root` cannot hold the data.
    """
    file, reasons = root / archive.name, []
    space = check_can_store(root, "data.root", _SPACE)
    if file.exists():
        _check(file, archive)
        return f"{file} is complete, and will be extracted; {space}"
    for url in urls:
        request = urllib.request.Request(f"{url.rstrip('/')}/{archive.name}", method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=_CHECK_TIMEOUT) as response:
                size = int(response.headers.get("Content-Length", 0))
        except OSError as error:
            reasons.append(f"{url}: {getattr(error, 'reason', error)}")
            continue
        return f"{request.full_url} ({size / 1e6:.0f} MB) will be downloaded to {root}; {space}"
    raise _unavailable(archive, root, reasons)


def _unavailable(archive: Archive, root: Path, reasons: list[str]) -> UserError:
    return UserError(
        f"{archive.name} is not in {root} and cannot be downloaded ({'; '.join(reasons)}):\n"
        f"  put the archive at {(root / archive.name).resolve()},\n"
        f"  or set data.root=/path/to/it (or $CIFAR_ROOT) to a folder that has it,\n"
        f"  or train on synthetic images, which need no download: data=shapes"
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


def _download(url: str, partial: Path) -> None:
    """Download to `partial`; continue an existing file if the server supports ranges, otherwise replace it.

    Raises:
        OSError: if the URL cannot be read, or the connection ends early.
    """
    try:
        _continue_download(url, partial)
    except HTTPError as error:
        if error.code != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        partial.unlink()  # it has the size of the archive, but is corrupt
        _continue_download(url, partial)


def _continue_download(url: str, partial: Path) -> None:
    downloaded = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={downloaded}-"} if downloaded else {})
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as response, Progress(transient=True) as progress:
        resumed = response.status == 206
        size = int(response.headers.get("Content-Length", 0)) + (downloaded if resumed else 0)
        task = progress.add_task(f"downloading {url}", total=size or None, completed=downloaded if resumed else 0)
        with partial.open("ab" if resumed else "wb") as stream:
            while block := response.read(_BLOCK):
                stream.write(block)
                progress.advance(task, len(block))
        if size and partial.stat().st_size < size:
            raise OSError(f"the connection ended after {partial.stat().st_size} of {size} bytes; start again to resume")


def _check(file: Path, archive: Archive) -> None:
    if (found := _md5(file)) != archive.md5:
        raise UserError(f"{file} is corrupt (MD5 {found} instead of {archive.md5}): delete it, or set data.root")


def _md5(file: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
