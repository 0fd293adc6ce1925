"""Speed: the default model, the speedrun, FLOPs of ResNet-18; and synchronizations."""

from collections.abc import Callable
from statistics import median

from lightning.pytorch.callbacks import Timer

from engine.dev.gpu_check.case import NotHere, Session, expect
from engine.dev.gpu_check.runs import TINY, column, middle, run
from engine.dev.shared.process import last_line, python, run_limited
from onecurve.observe.throughput import flops_per_sample
from onecurve.run.result import Result

_STEPS_PER_EPOCH = 25  # of the speedrun: 50,000 images in batches of 2,000
_RESNET_BATCH = 512
_TIMER = "+callbacks.timer._target_=lightning.pytorch.callbacks.Timer"
_TINY_SPEEDRUN = [*TINY, "model.widths=[8,16,16]", "trainer.max_epochs=2"]


def short_run(devices: int) -> Callable[[Session], str]:
    """Return the check that trains the default model for two epochs; on 20,000 images on GPUs."""

    def check(session: Session) -> str:
        large, tiny = ["data.source.train_size=20000", "data.source.test_size=2000"], ["model.width=4", *TINY]
        size = large if session.on_gpu else tiny
        result = run(session, "run", *size, "trainer.max_epochs=2", devices=devices)
        speed, memory = (middle(result, f"throughput/{name}") for name in ("samples_per_sec", "peak_memory_mib"))
        accuracy = result.metrics["test/acc"]
        expect(accuracy > 0.7 or not session.on_gpu, f"accuracy {accuracy:.3f} after two epochs; a CPU has 0.80")
        return f"{speed:,.0f} images/s, {memory:.0f} MiB, accuracy {accuracy:.3f}"

    return check


def waits(session: Session) -> str:
    """Run tests/engine/test_synchronizations.py, in which torch itself raises at each synchronization."""
    if not session.on_gpu:
        raise NotHere("make dry-gpu finds synchronizations without a GPU")
    log = session.folder / "tests.log"
    code = run_limited(python("-m", "pytest", "tests/engine/test_synchronizations.py"), log, 150)
    expect(code == 0 and " passed" in last_line(log), f"pytest ended with {code}: {last_line(log)}")
    return last_line(log).partition(" in ")[0]


def speedrun(compile: bool) -> Callable[[Session], str]:
    """Return the check that times experiment=speedrun on shapes of CIFAR's size, and its second run in one process."""

    def check(session: Session) -> str:
        size = [] if session.on_gpu else _TINY_SPEEDRUN
        options = ["experiment=speedrun", "callbacks.checkpoint=null", f"module.compile={str(compile).lower()}", _TIMER]
        run(session, "first", *options, *size)  # compiles, and tunes the kernels of cuDNN
        second = run(session, "second", *options, *size)
        step = middle(second, "throughput/step_ms")
        epoch = f", {_STEPS_PER_EPOCH * step / 1000:.3f} s per epoch of 50,000 images" if session.on_gpu else ""
        return f"{step:.1f} ms per step{epoch}; second run in the process: {_seconds(second):.2f} s"

    return check


def speed_of_bits(session: Session) -> str:
    """Return the step of the default model, and the ratios of computing virtual ranks one by one, and of one group."""
    gpu = ["data.source.train_size=20000", "trainer.max_epochs=2", "trainer.log_every_n_steps=20"]
    size = gpu if session.on_gpu else ["model.width=4", *TINY, "trainer.max_steps=6"]
    ways: dict[str, list[str]] = {
        "together": [],
        "one by one": ["bit_exact=true"],
        "virtual_ranks=1": ["virtual_ranks=1"],
    }
    figures = []
    for precision in ("32-true", "bf16-mixed"):
        options = [*size, "test=false", f"trainer.precision={precision}"]
        together, *others = (
            middle(run(session, f"{precision} {name}", *options, *own), "throughput/step_ms")
            for name, own in ways.items()
        )
        ratios = ", ".join(f"{name} {step / together:.2f}" for name, step in zip([*ways][1:], others, strict=True))
        figures.append(f"{precision}: {together:.2f} ms together; times that: {ratios}")
    return "; ".join(figures)


def _seconds(result: Result) -> float:
    """Return the seconds of training and of the test, which is with test-time augmentation."""
    assert result.trainer
    (timer,) = [callback for callback in result.trainer.callbacks if isinstance(callback, Timer)]
    return timer.time_elapsed("train") + timer.time_elapsed("test")


def resnet18_flops(session: Session) -> str:
    """Return FLOP/s of ResNet-18 in bfloat16, and their share of the peak if Lightning lists the device."""
    gpu = ["data.source.train_size=20000", "data.source.test_size=500", f"data.batch_size={_RESNET_BATCH}"]
    cpu = [*TINY, "data.batch_size=8", "trainer.max_steps=4", "test=false"]
    length = ["trainer.max_epochs=3", "trainer.log_every_n_steps=10", "test=false"] if session.on_gpu else []
    options = ["experiment=resnet18", "preset=gpu", "module.compile=false", *(gpu if session.on_gpu else cpu), *length]
    result = run(session, "run", *options)
    per_second = middle(result, "throughput/samples_per_sec")
    trainer = result.trainer
    assert trainer
    tera = per_second * (flops_per_sample(trainer.lightning_module.net, trainer.datamodule.image_shape) or 0.0) / 1e12
    shares = column(result, "throughput/mfu")
    return f"{per_second:,.0f} images/s, {tera:.4g} TFLOP/s, MFU {f'{median(shares):.1%}' if shares else 'unknown'}"
