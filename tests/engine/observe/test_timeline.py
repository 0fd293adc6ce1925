"""The timeline of each rank: its files, the recorded step, and the rank that slows the others down."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from onecurve.observe.step_times import (
    COMMUNICATION,
    StepRecording,
    current_recording,
    pipeline_pass,
    set_recording,
    timed_communication,
)
from onecurve.observe.throughput import slowest_rank
from onecurve.observe.timeline import Timeline
from onecurve.records.files import read_json_lines
from onecurve.run.experiment import assemble
from tests.support.comparison import read_rows
from tests.support.pool import Pool
from tests.support.runs import compose, fit

MLP = ["model=mlp", "model.hidden=[16]", "data.batch_size=32", "trainer.log_every_n_steps=4"]
ONE_EPOCH = [*MLP, "trainer.max_epochs=1", "callbacks.best=null", "callbacks.checkpoint=null"]
DELAY = 0.1  # seconds of the test's own clock


def lines(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return list(read_json_lines(folder / "timeline" / f"rank{rank}.jsonl"))


def of_kind(folder: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    return [line for line in lines(folder, rank) if line["kind"] == kind]


class Slow(L.Callback):
    """Spend time in the batches of a rank: in the forward pass, the loss, or another place."""

    def __init__(self, place: str, rank: int = 0, sleep: Any = time.sleep) -> None:
        self.place, self.rank, self.sleep = place, rank, sleep

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if trainer.global_rank != self.rank:
            return
        data: Any = trainer.datamodule
        if self.place == "forward":
            pl_module.net.forward = self._slowed(pl_module.net.forward)
        elif self.place == "loss":
            pl_module.loss = self._slowed(pl_module.loss)
        elif self.place == "data":
            data.on_after_batch_transfer = self._slowed(data.on_after_batch_transfer)

    def _slowed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any) -> Any:
            self.sleep(DELAY)
            return function(*args)

        return slow

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self.place == "optimizer":
            trainer.optimizers[0].register_step_post_hook(lambda *_: self.sleep(DELAY))

    def on_validation_batch_start(self, *_: Any) -> None:
        if self.place == "validation":
            self.sleep(DELAY)

    def on_save_checkpoint(self, *_: Any) -> None:
        if self.place == "save":
            self.sleep(DELAY)


class Clock:
    """A clock that only the test advances, in place of the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    perf_counter = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("onecurve.observe.step_times", "onecurve.observe.timeline"):
        monkeypatch.setattr(f"{module}.time", clock)
    return clock


PLACES = {"forward": "forward_backward", **{name: name for name in ("data", "optimizer", "validation", "save")}}


@pytest.mark.parametrize("place", PLACES)
def test_time_belongs_to_its_activity(place: str, clock: Clock, small: list[str], folder: Path) -> None:
    """Only the delay takes time; an optimizer step has two micro-batches."""
    options = ["trainer.accumulate_grad_batches=2", "data.val_fraction=0.1"]
    fit(compose(folder, *small, *MLP, "trainer.max_epochs=1", *options), Slow(place, sleep=clock.sleep))
    intervals = of_kind(folder, "interval")
    assert [(line["step"], line["steps"]) for line in intervals] == [(1, 1), (4, 3), (8, 4), (11, 3), (11, 0)]
    for line in intervals:
        assert sum(line["spans"].values()) == pytest.approx(line["seconds"])
    nonzero = [{name: value for name, value in line["spans"].items() if value} for line in intervals]
    if place in ("validation", "save"):
        spans = of_kind(folder, "span")
        assert {line["name"] for line in spans} == {"validation", "save"}
        assert all((line["seconds"] > 0) == (line["name"] == place) for line in spans)
        assert nonzero[-1] == {place: pytest.approx(sum(line["seconds"] for line in spans))}
        assert nonzero[:-1] == [{}] * 4
    else:
        passes = 2 if place == "forward" else 1
        delays = [
            {name: pytest.approx(steps * passes * DELAY)}
            for name, steps in zip(["other", *[PLACES[place]] * 3], (1, 3, 4, 3), strict=True)
        ]
        if place in ("forward", "data"):  # validation has them as well
            assert nonzero.pop().keys() == {"validation"}
        assert nonzero == delays + [{}] * (len(nonzero) - 4)


def test_save_at_the_start_of_the_recorded_step(clock: Clock, small: list[str], folder: Path) -> None:
    """The computation after the save belongs to its own activity."""
    saves = "callbacks.checkpoint.every_n_train_steps=2"  # after step 2, when the recorded step 3 has begun
    fit(compose(folder, *small, *MLP, "trainer.max_steps=4", saves), Slow("forward", sleep=clock.sleep))
    spans = of_kind(folder, "interval")[1]["spans"]
    assert {name: value for name, value in spans.items() if value} == {"forward_backward": pytest.approx(3 * DELAY)}


def test_resumed_run_appends_and_drops_a_cut_line(small: list[str], folder: Path) -> None:
    fit(compose(folder, *small, *MLP, "trainer.max_epochs=1"))
    before = lines(folder)
    with (folder / "timeline" / "rank0.jsonl").open("a") as file:
        file.write('{"kind": "inter')
    checkpoint = f"ckpt_path={folder}/checkpoints/last.ckpt"
    fit(compose(folder, *small, *MLP, "trainer.max_epochs=2", checkpoint))
    after = lines(folder)
    assert after[: len(before)] == before
    processes = [line for line in after if line["kind"] == "process"]
    assert len(processes) == 2
    assert processes[1]["start"] > before[-1]["start"]
    assert [line["step"] for line in after[len(before) :] if line["kind"] == "interval"] == [12, 16, 20, 22, 22]


def test_names_no_rank_if_all_are_about_equally_slow() -> None:
    def measured(*busy: float) -> list[torch.Tensor]:
        return 10 * [torch.tensor([[seconds, 0.2] for seconds in busy])]

    assert slowest_rank(measured(0.195, 0.19, 0.19)) is None
    assert str(slowest_rank(measured(0.1, 0.2, 0.1))).startswith("  rank 1 is the slowest: it works 200.0 ms per step")


def test_records_the_step_before_each_log_point(small: list[str], folder: Path) -> None:
    recorded: list[int] = []

    class Watch(L.Callback):
        def on_before_zero_grad(self, trainer: L.Trainer, *_: Any) -> None:
            if current_recording():
                recorded.append(trainer.global_step + 1)

    fit(compose(folder, *small, *ONE_EPOCH), Watch())
    assert recorded == [3, 7, 10, 11]
    assert current_recording() is None


def test_training_continues_on_a_full_disk(small: list[str], folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    class FullDisk(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 5:
                (timeline,) = [callback for callback in trainer.callbacks if isinstance(callback, Timeline)]
                timeline._file = Path("/dev/full")

    with caplog.at_level(logging.WARNING, "onecurve"):
        record = fit(compose(folder, *small, *ONE_EPOCH), FullDisk())
    assert "callbacks.timeline stops, and training continues: " in caplog.text
    assert len(record.losses) == 2


@pytest.fixture
def recording(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[StepRecording]:
    """Return a recording whose marks are one second apart."""

    def read() -> float:
        clock.sleep(1.0)
        return clock.now

    monkeypatch.setattr(clock, "perf_counter", read)
    set_recording(recording := StepRecording(torch.device("cpu"), "data"))
    yield recording
    set_recording(None)


def test_nested_activities_count_once(recording: StepRecording) -> None:
    recording.switch("forward_backward")  # data: 1 s until here
    with timed_communication():  # 1 s
        with pipeline_pass(0, 2, "F"):  # 1 s
            with timed_communication():  # 1 s
                pass
            assert current_recording()  # 1 s
        with pipeline_pass(1, 0, "W"):  # 1 s
            pass  # 1 s
    recording.switch("data")  # 1 s
    step = recording.resolve()
    assert step.spans == {"data": 1, "communication": 4, "forward_backward": 5}
    assert step.busy_seconds == 6
    assert step.passes == [(0, 2, "F", 3, 6), (1, 0, "W", 7, 8)]


def test_compiled_code_is_not_recorded(recording: StepRecording) -> None:
    """Recording a step then compiles nothing again."""
    graphs = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=keep, fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        with timed_communication():
            return x + 1

    compiled(torch.zeros(2))
    set_recording(None)
    compiled(torch.zeros(2))
    assert len(graphs) == 1
    recording.switch("data")
    assert list(recording.resolve().spans) == ["data"]


class RankClock(Clock):
    """The clock of a rank: only its delays take time, or if it is one that waits for another, its communication."""

    is_waiting = False

    def perf_counter(self) -> float:
        now, recording = self.now, current_recording()
        if self.is_waiting and recording and recording.activity == COMMUNICATION:
            self.sleep(DELAY / 1000)
        return now


def fit_slow(cfg: Any, place: str, rank: int) -> list[str]:
    """Train with a delay on one rank; return the messages of this rank about the slowest one."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("onecurve.observe.throughput")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    clock = RankClock()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("onecurve.observe.step_times", "onecurve.observe.timeline"):
                patch.setattr(f"{name}.time", clock)
            trainer, module, data = assemble(cfg)
            clock.is_waiting = trainer.global_rank != rank
            trainer.callbacks.insert(0, Slow(place, rank, clock.sleep))
            trainer.fit(module, datamodule=data)
    finally:
        logger.removeHandler(handler)
    return [message for message in messages if "slowest" in message]


CONVOLUTIONS = ["model=resnet9", "model.width=2"]  # they wait in batch normalization
SLOW_CASES = [
    ("ddp", "data", CONVOLUTIONS),
    ("fsdp", "forward", []),
    ("pipeline", "loss", []),
]


@pytest.mark.parametrize(
    ("strategy", "place", "model"),
    [SLOW_CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES[1:])],
)
def test_names_the_slow_rank(
    strategy: str, place: str, model: list[str], pool: Pool, small: list[str], folder: Path
) -> None:
    """Only the last rank works; what the first one does under each strategy is waiting."""
    words = [word for word in ONE_EPOCH if not (model and word.startswith("model"))]
    chosen = [f"strategy={strategy}", "trainer.devices=2", "trainer.log_every_n_steps=2"]
    cfg = compose(folder, *small, *words, *model, *chosen)
    first, *others = pool.run(2, fit_slow, cfg, place, 1)
    assert len(first) == 1
    assert first[0].strip().startswith("rank 1 is the slowest: it works ")
    assert others == [[]]
    rows = [row for row in read_rows(folder) if row.get("ranks/slowest")]
    assert len(rows) >= 3
    calls = 5 if strategy == "pipeline" else 1  # of each micro-batch, and for the log
    for row in rows:
        measured = {name: float(value) for name, value in row.items() if name.startswith("ranks/")}
        assert measured["ranks/slowest"] == 1
        assert measured["ranks/busy_ms_max"] == pytest.approx(calls * 1000 * DELAY)
        assert measured["ranks/busy_ms_median"] == 0
        assert measured["ranks/gain"] == pytest.approx(1)
        assert 50 < measured["ranks/memory_mib_min"] <= measured["ranks/memory_mib_max"]
    assert (waiting_fraction(folder, 0), waiting_fraction(folder, 1)) == (1, 0)


def waiting_fraction(folder: Path, rank: int) -> float:
    """Return the fraction of the recorded steps in which a rank waits."""
    spans = [line["spans"] for line in of_kind(folder, "interval", rank) if "data" in line["spans"]]
    return sum(span["communication"] for span in spans) / sum(sum(span.values()) for span in spans)
