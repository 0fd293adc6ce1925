"""Files with a JSON object per line, to which a process appends while it runs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file in order, without lines that a kill has cut; a missing file has none."""
    if not file.is_file():
        return
    with file.open(errors="replace") as stream:
        for line in stream:
            try:
                content = json.loads(line)
            except ValueError:
                continue
            if isinstance(content, dict):
                yield content


def append_json_line(file: Path, content: dict[str, Any]) -> None:
    """Append an object to a file, on a line of its own even if a kill has cut the last one."""
    with file.open("ab+") as stream:
        stream.seek(max(0, stream.tell() - 1))
        is_cut = stream.read(1) not in (b"", b"\n")
        stream.write(b"\n" * is_cut + json.dumps(content).encode() + b"\n")
