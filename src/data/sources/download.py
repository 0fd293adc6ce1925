"""Archives of data: looked for, downloaded, checked and unpacked, each step whole or not at all."""

import hashlib
import shutil
import tarfile
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from src.utils.errors import UserError

_TIMEOUT = 20.0  # seconds without a byte before the next address is tried
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Archive:
    """A published `.tar.gz`: its name, its MD5 and the folder it unpacks to."""

    name: str
    md5: str
    folder: str


def fetch(archive: Archive, root: Path, urls: list[str]) -> Path:
    """The archive under `root`, downloaded from the first of `urls` that has it, unless it is there.

    Raises:
        UserError: if no address answers, or what is there or arrives has another checksum.
    """
    file = root / archive.name
    if file.exists():
        _check(file, archive)
        return file
    partial, reasons = root / f"{archive.name}.part", []
    if partial.exists() and _md5(partial) == archive.md5:  # complete, but its process died before the renaming
        return partial.replace(file)
    for url in urls:
        try:
            _download(f"{url.rstrip('/')}/{archive.name}", partial)
        except OSError as error:  # URLError is one
            reasons.append(f"{url}: {getattr(error, 'reason', error)}")
            continue
        _check(partial, archive)
        return partial.replace(file)
    raise UserError(
        f"{archive.name} is not in {root} and cannot be downloaded ({'; '.join(reasons)}):\n"
        f"  put the archive at {file.resolve()},\n"
        f"  or point at a folder that has it: data.root=/path/to/it (or $CIFAR_ROOT),\n"
        f"  or train on synthetic images, which need no download: data=shapes"
    )


def extract(archive: Archive, file: Path, root: Path) -> None:
    """Unpack into a temporary folder, no member leaving it, and rename the result into place.

    Raises:
        UserError: if the archive is cut short or names a path outside its folder.
    """
    with tempfile.TemporaryDirectory(dir=root, prefix=".unpacking-") as temporary:
        try:
            with tarfile.open(file) as tar:
                tar.extractall(temporary, filter="data")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise UserError(f"{file} cannot be unpacked ({error}): delete it, or set data.root") from None
        shutil.rmtree(root / archive.folder, ignore_errors=True)  # what is there was found incomplete
        (Path(temporary) / archive.folder).replace(root / archive.folder)


def _download(url: str, partial: Path) -> None:
    """Append to `partial` what it still lacks."""
    have = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer, Progress(transient=True) as progress:
        resumed = answer.status == 206
        size = int(answer.headers.get("Content-Length", 0)) + (have if resumed else 0)
        task = progress.add_task(f"downloading {url}", total=size or None, completed=have if resumed else 0)
        with partial.open("ab" if resumed else "wb") as stream:
            while block := answer.read(_BLOCK):
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
