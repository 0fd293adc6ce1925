"""Quotation of values for Hydra's command line."""

import re
from typing import Any


def quote(value: Any) -> str:
    """Return the value as a quoted string in Hydra's override grammar.

    A backslash is doubled only before a quotation mark (https://hydra.cc/docs/advanced/override_grammar/basic/).
    """
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", str(value))
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}{escaped[len(escaped) - trailing :]}'"
