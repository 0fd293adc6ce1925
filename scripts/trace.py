"""Write the timeline of a run as a trace for https://ui.perfetto.dev or chrome://tracing.

The trace has a track per rank, with the intervals between log points, validations, saves and, in a pipeline, the passes
of the recorded steps: F0 is the forward pass of micro-batch 0, B the backward pass, I and W those for the inputs and
the weights. Counters show the milliseconds of each activity per step. The events of the run are vertical lines.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onecurve.records.events import read_events
from onecurve.records.files import read_json_lines

Event = dict[str, Any]  # of https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
_PROCESS = 0  # the run; its threads are the ranks


def trace_events(run: Path) -> list[Event]:
    """Return the events of a run folder, with times in microseconds since the start of its first process.

    Raises:
        SystemExit: if the folder has no timeline.
    """
    files = sorted((run / "timeline").glob("rank*.jsonl"), key=lambda file: int(file.stem.removeprefix("rank")))
    lines_of = {int(file.stem.removeprefix("rank")): list(read_json_lines(file)) for file in files}
    starts = [line["start"] for lines in lines_of.values() for line in lines]
    if not starts:
        sys.exit(f"error: {run} has no timeline: give the folder of a run with callbacks.timeline")
    events: list[Event] = [{"ph": "M", "name": "process_name", "pid": _PROCESS, "args": {"name": run.resolve().name}}]
    for rank, lines in lines_of.items():
        for line in lines:
            events += [{"pid": _PROCESS, "tid": rank} | event for event in _EVENTS_OF[line["kind"]](line)]
            if line.get("steps"):
                events.append(_counter(line, rank))
    events += map(_run_event, read_events(run))
    for event in events:
        if "ts" in event:
            event["ts"] = round(1e6 * (event["ts"] - min(starts)), 3)
    return events


def _process_events(line: dict[str, Any]) -> Iterator[Event]:
    yield {"ph": "M", "name": "thread_name", "args": {"name": f"rank {line['rank']} ({line['host']})"}}
    yield {"ph": "M", "name": "thread_sort_index", "args": {"sort_index": line["rank"]}}


def _interval_events(line: dict[str, Any]) -> Iterator[Event]:
    first = line["step"] - line["steps"] + 1
    name = f"steps {first} to {line['step']}" if line["steps"] else f"after step {line['step']}"
    details = {f"{activity}_s": seconds for activity, seconds in line["spans"].items()}
    yield _slice(name, line["start"], line["seconds"], details | {"peak_memory_mib": line["peak_memory_mib"]})


def _counter(line: dict[str, Any], rank: int) -> Event:
    """Return the milliseconds of each activity per step of an interval; validation and saving are no part of a step."""
    spans = {name: seconds for name, seconds in line["spans"].items() if name not in ("validation", "save")}
    values = {name: round(1000 * seconds / line["steps"], 3) for name, seconds in spans.items()}
    return {"ph": "C", "name": f"rank {rank}: ms per step", "ts": line["start"], "pid": _PROCESS, "args": values}


def _span_events(line: dict[str, Any]) -> Iterator[Event]:
    yield _slice(line["name"], line["start"], line["seconds"], {})


def _pass_events(line: dict[str, Any]) -> Iterator[Event]:
    for stage, microbatch, kind, start, end in line["passes"]:
        details = {"stage": stage, "microbatch": microbatch, "step": line["step"]}
        yield _slice(f"{kind}{microbatch}", line["start"] + start, end - start, details)


_EVENTS_OF = {
    "process": _process_events,
    "interval": _interval_events,
    "span": _span_events,
    "passes": _pass_events,
}


def _slice(name: str, start: float, seconds: float, details: dict[str, Any]) -> Event:
    """Return a complete event, whose start is still a UNIX time."""
    return {"ph": "X", "name": name, "ts": start, "dur": round(1e6 * seconds, 3), "args": details}


def _run_event(line: dict[str, Any]) -> Event:
    """Return an instant event across all tracks."""
    details = {name: value for name, value in line.items() if name not in ("time", "event")}
    return {"ph": "i", "s": "g", "name": line["event"], "ts": line["time"], "pid": _PROCESS, "tid": 0, "args": details}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a run folder")
    parser.add_argument("--output", type=Path, help="the file to write (default: RUN_DIR/trace.json)")
    options = parser.parse_args()
    output = options.output or options.run / "trace.json"
    events = trace_events(options.run)
    try:
        output.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    except OSError as error:
        sys.exit(f"error: --output={output} cannot be written: {error.strerror}")
    print(f"{output}: open it in https://ui.perfetto.dev")


if __name__ == "__main__":
    main()
