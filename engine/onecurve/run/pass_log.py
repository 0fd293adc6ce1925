"""What the passes of an optimizer step in several parts log: one value per step, whatever their number.

A step of one part, of which Lightning computes the pass, logs to `LoggedValues` itself (`onecurve/run/step.py`).
"""

import math
import zlib
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from onecurve.errors import UserError
from onecurve.patches.lightning_loops import NO_SYNC
from onecurve.patches.torchmetrics import set_step_value, step_value

_FIRST_COLUMNS = 2  # of the table: the loss of a pass, and a hash of the names that it logs


class PassLog:
    """Gathers what `training_step` logs in each pass, and logs the mean, sum, maximum or minimum of the passes.

    A metric object is logged once; its value of the step is the mean over the passes. The values are in a table on
    `device` with a row for each pass, which processes can exchange.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.dtype = device, torch.float32 if device.type == "mps" else torch.float64
        self._logged: dict[tuple[str, str, int], _Logged] = {}
        self._calls = Counter[tuple[str, str]]()  # of the current pass
        self._hashes: list[int] = []
        self._losses: list[Tensor | None] = []

    def add(self, fx: str, name: str, value: Any, options: dict[str, Any]) -> None:
        """Keep a value that the hook `fx` logs in this pass; `options` are the other arguments of Lightning's log."""
        key = (fx, name, self._calls[fx, name])
        self._calls[fx, name] += 1
        self._logged.setdefault(key, _Logged()).add(len(self._losses), value, options)

    def end_pass(self, loss: Tensor | None) -> None:
        content = repr((sorted(self._calls.items()), loss is None))
        self._hashes.append(zlib.crc32(content.encode()) & 0xFFFFFF)  # float32 represents it
        self._losses.append(loss)
        self._calls.clear()

    def rows(self) -> Tensor:
        """Return the rows of these passes: the loss, the hash, and the value and the weight of each name."""
        rows = []
        for number, (names, loss) in enumerate(zip(self._hashes, self._losses, strict=True)):
            cells = [0.0 if loss is None else loss, names]
            for _, logged in sorted(self._logged.items()):  # by unique names: in one order on all processes
                cells += logged.cells(number)
            rows.append(torch.stack([self._to_cell(value) for value in cells]))
        return torch.stack(rows)

    def _to_cell(self, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().to(self.device, self.dtype).view(())
        return torch.full((), value, dtype=self.dtype, device=self.device)  # without a transfer

    def log(self, results: Any, table: Tensor, is_complete: bool) -> None:
        """Log the values of a table, of which `rows` are a part.

        Args:
            results: Lightning's collection of logged values.
            table: a row for each pass, with at least the columns of `rows`.
            is_complete: whether the table has the passes of all processes.
        """
        columns = table[:, _FIRST_COLUMNS:].T
        for number, ((fx, name, _), logged) in enumerate(sorted(self._logged.items())):
            values, weights = columns[2 * number : 2 * number + 2]
            results.log(fx, name, logged.of_step(values, weights), **logged.arguments(weights, is_complete))

    def mean_loss(self, table: Tensor) -> Tensor | None:
        """Return the mean loss of the passes, or None if `training_step` returned None."""
        losses = [loss for loss in self._losses if loss is not None]
        if not losses:
            return None
        if len(losses) < len(self._losses):
            raise UserError(
                "training_step returns None for some micro-batches of a step, which cannot be skipped in part: return "
                "None for none of them, or set trainer.accumulate_grad_batches=1"
            )
        return table[:, 0].mean().to(losses[0].dtype)


def have_equal_names(table: Tensor) -> Tensor:
    """Return whether all passes have logged the same names, and all or none of them a loss: a bool on the device."""
    return (table[:, 1] == table[0, 1]).all()


class _Logged:
    """What the passes log under one name."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.value: Any = None  # of the last pass
        self.is_scalar = False
        self.of_passes: dict[int, tuple[Any, int | None]] = {}  # the value and the number of samples

    def add(self, number: int, value: Any, options: dict[str, Any]) -> None:
        self.options, self.value = options, value
        of_pass: Any = step_value(value) if isinstance(value, Metric) else value
        self.is_scalar = isinstance(of_pass, Tensor) and of_pass.numel() == 1
        # The next replay of a CUDA graph overwrites its output.
        self.of_passes[number] = (of_pass.clone() if self.is_scalar else 0.0, options["batch_size"])

    def cells(self, number: int) -> list[Any]:
        """Return the value of a pass and its weight, which is 0 if the pass did not log."""
        value, size = self.of_passes.get(number, (0.0, 0))
        return [value, 1 if size is None else size]

    def of_step(self, values: Tensor, weights: Tensor) -> Any:
        """Return what the step logs, from the (passes,) values and their weights."""
        reduced = self._reduce(values, weights)
        if isinstance(self.value, Metric):
            if self.is_scalar:
                set_step_value(self.value, reduced.to(step_value(self.value).dtype))
            return self.value
        dtype = self.value.dtype if self.value.is_floating_point() else torch.get_default_dtype()
        return reduced.to(self.value.device, dtype)

    def _reduce(self, values: Tensor, weights: Tensor) -> Tensor:
        function = self.options["reduce_fx"]  # of torch, or its name
        name = getattr(function, "__name__", function).lower()
        if name == "sum":
            return values.sum()
        if name == "max":
            return values.where(weights > 0, -math.inf).max()
        if name == "min":
            return values.where(weights > 0, math.inf).min()
        return (values * weights).sum() / weights.sum()

    def arguments(self, weights: Tensor, is_complete: bool) -> dict[str, Any]:
        """Return the arguments of Lightning's log for the value of the step."""
        has_sizes = self.options["batch_size"] is not None
        if is_complete:  # so that no process need ask others
            size = weights.sum() if has_sizes else 1
            return self.options | {"batch_size": size, "sync_dist": False, "sync_dist_fn": NO_SYNC}
        return self.options | {
            "batch_size": sum(size or 0 for _, size in self.of_passes.values()) if has_sizes else None
        }
