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
