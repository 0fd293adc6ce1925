"""Detection of host-device synchronizations on a machine without a GPU, by the operations that are called.

A tensor counts as a host tensor if `.cpu()`, `torch.tensor` without a device, or an operation on host tensors made it.

Detected are operations whose result the host needs, by torch's dispatcher (also within Lightning, torchmetrics and the
backward pass) or by name, and blocking copies to the device. Synchronizations in C++ without an operation, as in
DistributedDataParallel's reducer, are not detected; the test on CUDA covers them.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from src.data.sampler import TrainingBatches

_ASK = (
    "_local_scalar_dense nonzero masked_select _unique2 unique_dim unique_consecutive bincount equal is_nonzero".split()
)
_READ = "item tolist numpy cpu __bool__ __int__ __float__ __index__ __array__".split()
_SEND = (torch.tensor, torch.as_tensor)


class _Operations(TorchDispatchMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        counts = name == "repeat_interleave" and len(args) == 1  # its sum is the number of elements
        if not _on_host(args) and (name in _ASK or counts or _masks(name, args)):
            self.note(f"aten::{name}")
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, sent = getattr(func, "__name__", ""), (kwargs or {}).get("device") is not None
        result = func(*args, **(kwargs or {}))
        if func in _SEND and sent:
            self.note(f"torch.{name} to a device")
        if _on_host(args):
            is_host_tensor = True
        elif name in _READ:
            self.note(f"Tensor.{name}")
            is_host_tensor = name == "cpu"
            if is_host_tensor:  # on a CPU, `cpu` returns the tensor itself
                result = result.clone()
        else:
            is_host_tensor = func in _SEND and not sent
        if is_host_tensor and isinstance(result, Tensor):
            result.on_host = True
        return result


def _on_host(args: Any) -> bool:
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    return bool(tensors) and all(getattr(tensor, "on_host", False) for tensor in tensors)


def _masks(name: str, args: Any) -> bool:
    """Return whether a mask determines the number of elements."""
    if name not in ("index", "index_put", "index_put_"):
        return False
    masked = any(part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1])
    return masked and (name == "index" or args[2].numel() > 1)


class SynchronizationWatcher:
    """Records each synchronization while it is `on`, with its lines of code. Enter it around the complete run."""

    def __init__(self) -> None:
        self.waits: list[str] = []
        self._on = False
        self._modes = ExitStack()

    def _note(self, what: str) -> None:
        if self._on:
            lines = [frame for frame in traceback.extract_stack()[:-2] if "/torch/" not in frame.filename]
            self.waits.append(f"{what} in " + " < ".join(f"{f.filename}:{f.lineno}" for f in reversed(lines[-4:])))

    def __enter__(self) -> "SynchronizationWatcher":
        self._modes.enter_context(_Calls(self._note))
        self._modes.enter_context(_Operations(self._note))
        self._modes.enter_context(patch.object(TrainingBatches, "table", self._unseen(TrainingBatches.table)))
        return self

    def __exit__(self, *error: Any) -> None:
        self._modes.close()

    @contextmanager
    def on(self, on: bool = True) -> Iterator[None]:
        before, self._on = self._on, on
        try:
            yield
        finally:
            self._on = before

    def _unseen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Exclude a function that works on host tensors on purpose."""

        def unseen(*args: Any) -> Any:
            with self.on(False):
                return function(*args)

        return unseen


class BetweenLogPoints(L.Callback):
    """Run the loop's steps inside `context`, except log points, the steps up to the first one, and epoch ends."""

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self.context, self.steps = context, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loop = trainer.fit_loop.epoch_loop

        def watched(part: Callable[[Any], None], ahead: int, fetcher: Any) -> None:
            step = loop.global_step + ahead
            between = step > trainer.log_every_n_steps and step % trainer.log_every_n_steps
            last = loop.batch_progress.current.ready + 1 >= trainer.num_training_batches
            if between and not last:
                self.steps += 1
                with self.context():
                    part(fetcher)
            else:
                part(fetcher)

        for name, part in (("advance", loop.advance), ("on_advance_end", loop.on_advance_end)):
            setattr(loop, name, partial(watched, part, 1 if name == "advance" else 0))
