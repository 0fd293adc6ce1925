"""Solutions of the exercises of chapter 11."""

import os
from collections.abc import Iterable
from pathlib import Path


def finish_time(work: float, interval: float, save: float, kills: list[float]) -> float:
    time, saved = 0.0, 0.0
    while True:
        is_last = saved + interval >= work
        end = time + (work - saved if is_last else interval + save)
        kill = next((kill for kill in kills if time < kill < end), None)
        if kill is not None:
            time = kill
        elif is_last:
            return end
        else:
            time, saved = end, saved + interval


def save_atomically(path: Path, parts: Iterable[bytes]) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
