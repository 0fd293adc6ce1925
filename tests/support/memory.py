"""Processes that run many tests: they release memory after each, unlike one that trains, and sync no files."""

import ctypes
import gc
import os
import sys

from torch.distributed.tensor import _collective_utils, _redistribute, debug

import onecurve.run.trainer


def prepare_for_many_tests() -> None:
    """Disable malloc tuning, which is permanent: one large model would keep its memory in all later tests.

    A sync to the disk takes as long as several steps, and no test looks at files after the machine has failed.
    """
    onecurve.run.trainer.tune_malloc = lambda: False
    os.fsync = lambda fd: None
    gc.freeze()


def release_memory() -> None:
    """Return free memory to the kernel.

    What is left is excluded from later collections. It is mostly code: by the end of a session there is so much that a
    collection would take a quarter of a second. torch's caches hold the process groups of each mesh, with threads that
    wait for work all the time.
    """
    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    for _ in range(2):  # the first one frees what holds a mesh, whose groups are freed by the second one
        gc.collect()
    gc.freeze()
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).malloc_trim(0)
