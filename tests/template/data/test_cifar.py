"""CIFAR is downloaded, checked and read; code in a data file is never run."""

import hashlib
import io
import os
import pickle
import shutil
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from onecurve.errors import UserError
from src.data.sources.cifar import CIFAR10
from src.data.sources.download import Archive

PER_FILE = 100  # images, of the fixture `cifar`


@pytest.fixture
def root(cifar: Path, tmp_path: Path) -> Path:
    """Return a folder with a copy of CIFAR-10, which a test may change."""
    shutil.copytree(cifar / CIFAR10.archive.folder, tmp_path / CIFAR10.archive.folder)
    return tmp_path


def change(file: Path, **changes: object) -> None:
    """Replace values of a batch file, whose keys are bytes."""
    content = pickle.loads(file.read_bytes()) | {name.encode(): value for name, value in changes.items()}
    file.write_bytes(pickle.dumps(content, protocol=4))


def pack(folder: Path, extra: dict[str, bytes] | None = None) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        tar.add(folder, folder.name)
        for name, content in (extra or {}).items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def source(content: bytes, urls: list[str]) -> CIFAR10:
    """Return the dataset with `content` as its published archive."""
    cifar = CIFAR10(urls)
    official = CIFAR10.archive
    cifar.archive = Archive(official.name, hashlib.md5(content).hexdigest(), official.folder)
    return cifar


class Site:
    """A web server on this machine with one file; it keeps the paths that it was asked for."""

    def __init__(self, folder: Path, name: str, content: bytes) -> None:
        (folder / name).write_bytes(content)
        self.log: list[str] = []
        log = self.log

        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                log.append(self.path)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=[0.01], daemon=True).start()


@pytest.fixture(scope="module")
def archive(cifar: Path) -> bytes:
    return pack(cifar / CIFAR10.archive.folder)


@pytest.fixture
def site(archive: bytes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site"), CIFAR10.archive.name, archive)
    yield site
    site.server.shutdown()


def test_reads_an_extracted_folder_in_order(cifar: Path) -> None:
    CIFAR10([]).prepare(cifar)
    images, labels = CIFAR10([]).load(cifar, "train")
    assert images.shape == (5 * PER_FILE, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert labels.tolist() == [i % 10 for i in range(PER_FILE)] * 5
    folder = cifar / CIFAR10.archive.folder
    second = pickle.loads((folder / "data_batch_2").read_bytes())[b"data"]
    assert torch.equal(images[PER_FILE : 2 * PER_FILE].flatten(1), torch.from_numpy(second))
    assert len(CIFAR10([]).load(folder, "test")[0]) == PER_FILE, "the extracted folder may be the root"


def test_downloads_from_the_first_address_that_answers(tmp_path: Path, archive: bytes, site: Site) -> None:
    cifar = source(archive, ["http://127.0.0.1:9", site.url])
    cifar.prepare(tmp_path / "new")
    cifar.prepare(tmp_path / "new")
    assert site.log == [f"/{CIFAR10.archive.name}"]


def test_one_of_several_processes_downloads(tmp_path: Path, archive: bytes, site: Site) -> None:
    """Threads stand for the jobs of a sweep: the lock of a file does not distinguish them."""
    jobs = [threading.Thread(target=source(archive, [site.url]).prepare, args=[tmp_path]) for _ in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert len(site.log) == 1
    assert len(source(archive, []).load(tmp_path, "test")[1]) == PER_FILE


def test_unpacks_an_archive_and_replaces_a_corrupt_one(tmp_path: Path, archive: bytes, site: Site) -> None:
    file = tmp_path / CIFAR10.archive.name
    file.write_bytes(archive[:-1000])
    with pytest.raises(UserError, match="is corrupt"):
        source(archive, ["http://127.0.0.1:9"]).prepare(tmp_path)
    assert not (tmp_path / CIFAR10.archive.folder).exists()
    source(archive, [site.url]).prepare(tmp_path)
    shutil.rmtree(tmp_path / CIFAR10.archive.folder)
    file.write_bytes(archive)
    cifar = source(archive, ["http://127.0.0.1:9"])
    cifar.prepare(tmp_path)
    assert len(cifar.load(tmp_path, "test")[1]) == PER_FILE


def test_refuses_archive_members_outside_the_folder(root: Path, tmp_path: Path) -> None:
    content = pack(root / CIFAR10.archive.folder, extra={"../escaped": b"out"})
    new = tmp_path / "new"
    new.mkdir()
    (new / CIFAR10.archive.name).write_bytes(content)
    with pytest.raises(UserError, match="cannot be unpacked"):
        source(content, ["http://127.0.0.1:9"]).prepare(new)
    assert not (tmp_path / "escaped").exists()


def test_error_without_a_network_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        CIFAR10(["http://127.0.0.1:9"]).prepare(tmp_path)
    message = str(caught.value)
    assert all(hint in message for hint in (str(tmp_path / CIFAR10.archive.name), "data.root=", "data=shapes"))
    assert len(message.splitlines()) == 1


class Exploit:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch exploited",)


def test_refuses_a_malicious_pickle_without_running_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    change(root / CIFAR10.archive.folder / "data_batch_3", evil=Exploit())
    with pytest.raises(UserError, match=r"would run posix\.system"):
        CIFAR10([]).load(root, "train")
    assert not (root / "exploited").exists()


@pytest.mark.parametrize("damage", [lambda content: content[:-100], lambda content: b"", lambda content: b"\x80junk"])
def test_error_names_a_corrupt_batch(root: Path, damage: object) -> None:
    file = root / CIFAR10.archive.folder / "data_batch_2"
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    with pytest.raises(UserError, match="data_batch_2 is missing or corrupt"):
        CIFAR10([]).load(root, "train")


def test_refuses_a_batch_of_another_shape(root: Path) -> None:
    change(root / CIFAR10.archive.folder / "test_batch", labels=[1, 2])
    with pytest.raises(UserError, match="no CIFAR batch"):
        CIFAR10([]).load(root, "test")


def test_reads_the_real_images() -> None:
    """Read them from CIFAR_ROOT or the folder `data`; some copies have fewer than the published 50,000."""
    root = Path(os.environ.get("CIFAR_ROOT", "data"))
    if not (root / CIFAR10.archive.folder).is_dir():
        pytest.skip("CIFAR-10 is not there")
    images, labels = CIFAR10([]).load(root, "train")
    assert len(images) >= 40_000
    counts = torch.bincount(labels)
    assert counts.min() > 0.95 * len(labels) / 10
    means = images.float().mean((0, 2, 3)) / 255
    assert torch.allclose(means, torch.tensor([0.4914, 0.4822, 0.4465]), atol=0.01)
