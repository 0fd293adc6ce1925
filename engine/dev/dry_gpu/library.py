"""Compile and load the library that registers the fake CUDA device."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
TORCH = "2.13"  # the stubs replace private functions, which differ between releases


def reason_to_skip() -> str | None:
    """Return why this machine cannot execute dry runs, or None."""
    if not version("torch").startswith(f"{TORCH}."):
        return f"the stubs are for torch {TORCH}, and this is {version('torch')}"
    if (_torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return "this build of torch has a CUDA of its own; install the one for CPUs"
    if not shutil.which("g++"):
        return "there is no g++ to compile the fake device"
    return None


def load_library() -> None:
    """Load the library, and compile it first if it is not in the cache. Call it before torch is imported."""
    ctypes.CDLL(str(_compiled()), mode=ctypes.RTLD_GLOBAL)


def _compiled() -> Path:
    """Return the compiled library: one file per source and installed torch, in the user's cache folder."""
    torch = _torch_folder()  # the library is linked with this folder, which another clone's environment may outlive
    key = hashlib.sha256(SOURCE.read_bytes() + f"{torch} {version('torch')}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dry_gpu"
    library = cache / f"fake_cuda_{key}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        part = library.with_suffix(f".{os.getpid()}.part")
        options = ["-shared", "-fPIC", "-std=c++20", "-I", f"{torch}/include", "-L", f"{torch}/lib"]
        linked = [f"-Wl,-rpath,{torch}/lib", "-lc10", "-ltorch_cpu"]
        subprocess.run(["g++", *options, str(SOURCE), "-o", str(part), *linked], check=True)
        part.replace(library)
    return library


def _torch_folder() -> Path:
    """Return torch's folder without an import of torch."""
    spec = find_spec("torch")
    assert spec
    assert spec.origin
    return Path(spec.origin).parent
