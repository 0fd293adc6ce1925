"""What the throughput callback logs, without a run: each expected value was worked out by hand."""

import logging
import math
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onecurve.data.batch import StepPart
from onecurve.observe import throughput as module
from onecurve.observe.step_times import RecordedStep
from onecurve.observe.throughput import Throughput, flops_per_sample, peak_flops, slowest_rank
from onecurve.observe.timeline import Timeline

LOGGER = "onecurve.observe.throughput"


class Network(nn.Module):
    """A convolution, and a normalization that needs two samples: 2 x 27 x 4 x 64 operations per sample and pass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.conv(images).mean((2, 3)))


class Reading(nn.Linear):
    """A network whose forward pass reads a value."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * float(inputs.sum())


class Module(nn.Module):
    """A module that keeps what it logs."""

    takes_batch, device, loss = True, torch.device("cpu"), None

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net, self.logged = net or nn.Linear(3, 2, bias=False), {}  # type: ignore[var-annotated]

    def log_dict(self, values: dict[str, Tensor]) -> None:
        assert all(value.device.type == "cpu" for value in values.values())
        self.logged |= {name: float(value) for name, value in values.items()}


def trainer_of(*others: tuple[float, float, float], **options: Any) -> Any:
    """Return the trainer of rank zero beside other ranks, each with its busy time, its step time and its memory."""
    gather = {"all_gather": lambda own: torch.stack([own, *map(torch.tensor, others)])}
    defaults = {
        "callbacks": [],
        "datamodule": SimpleNamespace(
            global_batch_size=10, example_batch=lambda count: [StepPart(torch.arange(count), torch.ones(count, 3))]
        ),
        "is_global_zero": True,
        "log_every_n_steps": 4,
        "num_devices": 1,
        "num_nodes": 1,
        "precision": "32-true",
        "strategy": SimpleNamespace(root_device=torch.device("cpu"), **gather),
        "world_size": 1 + len(others),
    }
    return SimpleNamespace(**defaults | options)


def timeline(seconds: float | None, **spans: float) -> Timeline:
    """Return a timeline with seconds per step, and a recorded step of these activities."""
    made = Timeline("")
    made.step_seconds, made.recorded = seconds, RecordedStep(0.0, spans, []) if spans else None
    return made


def report(throughput: Throughput, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return the logged values of a log point at which this process has 100 MiB."""
    monkeypatch.setattr(module, "peak_memory_mib", lambda device: 100.0)
    logging_module: Any = Module()
    throughput._report(trainer, logging_module)
    return {name.removeprefix("throughput/"): round(value, 5) for name, value in logging_module.logged.items()}


def test_only_memory_is_logged_without_a_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    throughput = Throughput()
    assert report(throughput, trainer_of(), monkeypatch) == {"peak_memory_mib": 100}
    assert report(throughput, trainer_of(callbacks=[timeline(None)]), monkeypatch) == {"peak_memory_mib": 100}
    assert throughput._reports == [{"peak_memory_mib": 100}] * 2


def test_speed_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    throughput = Throughput(planned_step_ms=400)
    callbacks = [object(), timeline(0.3, data=0.1, forward_backward=0.3), timeline(9.0)]
    assert report(throughput, trainer_of(callbacks=callbacks), monkeypatch) == {
        "peak_memory_mib": 100,
        "samples_per_sec": 33.33333,
        "step_ms": 300,
        "planned_step_ms": 400,
        "data_fraction": 0.25,
    }


def test_a_recording_that_was_interrupted_has_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    logged = report(Throughput(), trainer_of(callbacks=[timeline(0.5, forward_backward=0.3)]), monkeypatch)
    assert logged == {"peak_memory_mib": 100, "samples_per_sec": 20, "step_ms": 500}


@pytest.mark.parametrize(
    ("peak", "flops", "expected"), [(100.0, 80.3, 0.20075), (None, 80.0, None), (100.0, None, None)]
)
def test_utilization_counts_the_devices_of_all_nodes(
    peak: float | None, flops: float | None, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    throughput = Throughput()
    throughput._peak_flops, throughput._step_flops = peak, flops
    trainer = trainer_of(callbacks=[timeline(0.5)], num_devices=2, num_nodes=4)
    assert report(throughput, trainer, monkeypatch).get("mfu") == expected


def test_ranks_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank zero works for 0.3 of 0.5 seconds; the ranks' step is that of the slowest one."""
    throughput = Throughput()
    trainer = trainer_of((0.4, 0.8, 70.0), (0.1, 0.6, 300.0), callbacks=[timeline(0.5, data=0.3, communication=0.2)])
    logged = report(throughput, trainer, monkeypatch)
    ranks = {name.removeprefix("ranks/"): value for name, value in logged.items() if name.startswith("ranks/")}
    assert ranks == {
        "memory_mib_max": 300,
        "memory_mib_min": 70,
        "busy_ms_max": 400,
        "busy_ms_median": 300,
        "slowest": 1,
        "gain": 0.125,
    }
    assert logged["peak_memory_mib"] == 300
    (kept,) = throughput._busy
    assert kept.flatten().tolist() == pytest.approx([0.3, 0.5, 0.4, 0.8, 0.1, 0.6])


def test_two_ranks_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of((0.4, 0.8, 70.0), callbacks=[timeline(0.5, data=0.3)])
    logged = report(Throughput(), trainer, monkeypatch)
    assert (logged["ranks/busy_ms_max"], logged["ranks/busy_ms_median"], logged["ranks/slowest"]) == (400, 300, 1)


def test_ranks_without_a_recording_compare_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    throughput = Throughput()
    both = {"peak_memory_mib": 100, "ranks/memory_mib_max": 100, "ranks/memory_mib_min": 70}
    assert report(throughput, trainer_of((0.4, 0.8, 70.0)), monkeypatch) == both
    own = [timeline(None, data=0.3)]
    one_lacks = trainer_of((math.nan, math.nan, 70.0), callbacks=own)
    assert set(report(throughput, one_lacks, monkeypatch)) == {*both, "data_fraction"}
    assert not throughput._busy
    report(throughput, trainer_of(callbacks=own), monkeypatch)
    assert not throughput._busy, "one rank has none to compare with"


@pytest.mark.parametrize(
    ("interval", "expected"), [(4, [4, 8, 10]), (1, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]), (20, [10]), (2, [2, 4, 6, 8, 10])]
)
def test_log_points_leave_the_warm_up_out(interval: int, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step counts only if each step is logged."""
    throughput, reported = Throughput(), []
    trainer = trainer_of(log_every_n_steps=interval, last_step=10)
    for step in range(1, 11):
        monkeypatch.setattr(module, "trained_steps", lambda trainer, step=step: step)
        monkeypatch.setattr(throughput, "_report", lambda *_, step=step: reported.append(step))
        throughput.on_train_batch_end(trainer, None, None, None, 0)  # type: ignore[arg-type]
    assert reported == expected


@pytest.mark.parametrize(
    ("peak", "options", "net", "expected"),
    [
        (2.0, {}, None, (2e12, 10 * 2 * 2 * 6)),
        (None, {}, None, (7.0, 10 * 2 * 2 * 6)),
        (0.0, {}, None, (7.0, 10 * 2 * 2 * 6)),
        (2.0, {"is_global_zero": False}, None, (None, None)),
        (2.0, {}, Reading(3, 2), (2e12, None)),
    ],
)
def test_operations_of_a_step(
    peak: float | None, options: dict[str, Any], net: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer of three inputs and two outputs multiplies and adds six times, in the forward and backward pass."""
    monkeypatch.setattr(module, "peak_flops", lambda trainer, module: 7.0)
    throughput, counted_module = Throughput(peak), Module(net)
    throughput.setup(trainer_of(**options), counted_module, "fit")  # type: ignore[arg-type]
    assert (throughput._peak_flops, throughput._step_flops) == expected


def test_an_evaluation_counts_nothing() -> None:
    throughput = Throughput(1.0)
    throughput.setup(trainer_of(), Module(), "test")  # type: ignore[arg-type]
    assert (throughput._peak_flops, throughput._step_flops) == (None, None)


@pytest.mark.parametrize("attribute", ["takes_batch", "loss"])
def test_some_modules_have_no_operations_of_a_step(attribute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GAN has no loss, and a plain module takes no batch of ours."""
    monkeypatch.delattr(Module, attribute)
    throughput = Throughput(1.0)
    throughput.setup(trainer_of(), Module(), "fit")  # type: ignore[arg-type]
    assert (throughput._peak_flops, throughput._step_flops) == (1e12, None)


def test_operations_of_a_sample() -> None:
    """A convolution is counted twice: forward, and for the gradient of its weights."""
    net = Network()
    assert flops_per_sample(net, (3, 8, 8)) == 2 * (2 * 27 * 4 * 64)
    assert net.norm.num_batches_tracked == 0
    assert net.conv.weight.grad is None
    assert flops_per_sample(net.double(), (3, 8, 8)) == 2 * (2 * 27 * 4 * 64)
    net.conv.weight.requires_grad_(False)
    assert flops_per_sample(net, (3, 8, 8)) == 2 * 27 * 4 * 64, "a frozen weight has no gradient"


def test_the_first_weight_has_the_type_of_the_input() -> None:
    class Typed(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            if inputs.dtype != torch.float64:
                raise RuntimeError("expected float64")
            return super().forward(inputs)

    net = Typed(3, 2, bias=False).double()
    net.unused = nn.Linear(1, 1)
    assert flops_per_sample(net, (3,)) == 2 * (2 * 6)


class Outputs(nn.Linear):
    def forward(self, inputs: Tensor) -> Any:
        logits = super().forward(inputs)
        return {"logits": logits, "more": (logits.argmax(1), None)}


def test_outputs_that_are_no_tensor() -> None:
    assert flops_per_sample(Outputs(3, 2), (3,)) == flops_per_sample(nn.Linear(3, 2), (3,))


@pytest.mark.parametrize("error", [RuntimeError, TypeError, AssertionError])
def test_a_network_that_fails_on_meta_tensors(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: nn.Module, inputs: Tensor) -> Tensor:
        raise error("no values")

    monkeypatch.setattr(nn.Linear, "forward", fail)
    assert flops_per_sample(nn.Linear(3, 2), (3,)) is None


@pytest.mark.parametrize(
    ("precision", "net", "tf32", "asked"),
    [
        ("32-true", "linear", True, [torch.float32]),
        ("32-true", "convolution", True, ["tfloat32", torch.float32]),
        ("32-true", "convolution", False, [torch.float32]),
        ("bf16-mixed", "convolution", True, [torch.bfloat16]),
        ("bf16-true", "linear", True, [torch.bfloat16]),
        ("16-mixed", "linear", True, [torch.float16]),
        ("64-true", "convolution", True, [torch.float64]),
        (32, "linear", True, [torch.float32]),
    ],
)
def test_precision_of_the_peak(
    precision: Any, net: str, tf32: bool, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning lists none of these for the device, and so the last one is asked for as well."""
    found: list[Any] = []
    monkeypatch.setattr(module, "get_available_flops", lambda device, dtype: found.append(dtype))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    asking: Any = Module(Network() if net == "convolution" else None)
    assert peak_flops(trainer_of(precision=precision), asking) is None
    assert found == asked
    monkeypatch.setattr(module, "get_available_flops", lambda device, dtype: 5.0)
    assert peak_flops(trainer_of(precision=precision), asking) == 5.0
    assert peak_flops(trainer_of(precision="transformer-engine"), asking) is None


@pytest.mark.filterwarnings("error")
def test_a_device_that_is_not_listed_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "get_available_flops", lambda device, dtype: warnings.warn("not listed", stacklevel=1))
    assert peak_flops(trainer_of(), Module()) is None  # type: ignore[arg-type]


BALANCED, SKEWED = [[0.3, 0.5], [0.3, 0.5]], [[0.3, 0.5], [0.4, 0.5], [0.2, 0.5]]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([SKEWED] * 2, None),
        ([], None),
        ([BALANCED] * 3, None),
        ([[[0.3, 0.5], [0.3249, 0.5]]] * 3, None),
        ([[[0.3, 0.5], [0.3251, 0.5]]] * 3, (1, 325.1, 300.0, 5)),
        ([SKEWED] * 3, (1, 400.0, 300.0, 20)),
        ([SKEWED] * 2 + [[[9.0, 9.0]] * 3], (1, 400.0, 300.0, 20)),
        ([[[0.4, 1.0], [0.2, 0.8]]] * 4, (0, 400.0, 200.0, 20)),
    ],
)
def test_the_slowest_rank_by_the_medians(steps: list[Any], expected: tuple[int, float, float, int] | None) -> None:
    message = slowest_rank(map(torch.tensor, steps))
    if expected is None:
        assert message is None
    else:
        rank, longest, typical, percent = expected
        assert message == (
            f"  rank {rank} is the slowest: it works {longest} ms per step, the median rank {typical} ms;\n"
            f"  if it were as fast as the median, a step would be {percent}% shorter"
        )


def test_exactly_a_twentieth_of_a_step_is_a_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MIN_GAIN", 0.25)
    assert slowest_rank([torch.tensor([[0.25, 1.0], [0.5, 1.0]])] * 3) is not None


def test_summary_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    throughput = Throughput()
    throughput._reports = [{"step_ms": 100.0}, {"step_ms": 300.0, "mfu": 0.5}, {"step_ms": 200.0}]
    throughput._step_flops = 2.5e9
    throughput._busy.extend([torch.tensor(BALANCED)] * 3)
    throughput.on_train_end(trainer_of(is_global_zero=False), Module())  # type: ignore[arg-type]
    assert not caplog.messages
    throughput.on_train_end(trainer_of(), Module())  # type: ignore[arg-type]
    rows = {"step_ms": "200", "mfu": "0.5", "gflop_per_step": "2.5"}
    lines = [f"    {name:<16}  {value}" for name, value in rows.items()]
    assert caplog.messages == ["\n".join(["  throughput, the median of 3 log points", *lines])]
    throughput._busy.clear()
    throughput._busy.extend([torch.tensor(SKEWED)] * 3)
    throughput._step_flops = None
    throughput.on_train_end(trainer_of(), Module())  # type: ignore[arg-type]
    assert "gflop_per_step" not in caplog.messages[1]
    assert caplog.messages[2].startswith("  rank 1 is the slowest")


def test_a_new_training_forgets_the_earlier_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    throughput = Throughput()
    throughput._reports.append({"step_ms": 100.0})
    throughput._busy.append(torch.tensor(SKEWED))
    throughput.on_train_start(trainer_of(), Module())  # type: ignore[arg-type]
    assert (throughput._reports, len(throughput._busy)) == ([], 0)
    throughput.on_train_end(trainer_of(), Module())  # type: ignore[arg-type]
    assert not caplog.messages, "a training without a log point has no summary"


def test_only_the_newest_log_points_are_kept() -> None:
    assert Throughput()._busy.maxlen == 1000
