"""The mutants of a source file: copies with one change, such as another operator. Cosmic Ray makes them."""

import ast
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import MutationVisitor, mutate_code
from cosmic_ray.plugins import get_operator, operator_names

# Cosmic Ray replaces an operator by each other one. A few of them find the same gaps in a third of the time.
_BINARY = "Add_Sub Add_Mul Sub_Add Sub_Mul Mul_Add Mul_Div Div_Mul Div_FloorDiv FloorDiv_Div FloorDiv_Mul Mod_FloorDiv"
_BINARY += " Mod_Mul Pow_Mul RShift_LShift LShift_RShift BitOr_BitAnd BitAnd_BitOr BitXor_BitOr"
_LEFT_OUT = r"Variable(Replacer|Inserter)$|.*ComparisonOperator_\w+_Is(Not)?$|ReplaceUnary.*_Invert$"


@dataclass
class Mutant:
    """The source code of a file with one change.

    Attributes:
        code: the whole file.
        line: number of the changed line in the original file.
        text: the changed line, with single spaces.
    """

    code: str
    line: int
    text: str


def make_mutants(source: str) -> Iterator[Mutant]:
    """Yield the mutants of a source text, each once, without those that change nothing but annotations."""
    seen = {_without_annotations(source)}
    for name in filter(_is_used, operator_names()):
        operator = get_operator(name)()
        visitor = MutationVisitor(-1, operator)  # it changes nothing, and counts the places for the operator
        visitor.walk(get_ast(source))
        for occurrence in range(visitor._count):
            code = _mutate(source, operator, occurrence)
            if (content := _without_annotations(code)) not in seen:
                seen.add(content)
                yield Mutant(code, *_changed_line(source, code))


def _is_used(operator: str) -> bool:
    name = operator.removeprefix("core/")
    if name.startswith("ReplaceBinaryOperator_"):
        return name.removeprefix("ReplaceBinaryOperator_") in _BINARY.split()
    return not re.match(_LEFT_OUT, name)


def _mutate(source: str, operator: Any, occurrence: int) -> str:
    try:
        return str(mutate_code(source, operator, occurrence))
    except AttributeError:  # Cosmic Ray 8.7 replaces no exception that has a dot in its name
        return source


def _without_annotations(source: str) -> str:
    """Return the syntax tree of a source text as a string, or the text itself if it is no Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    for node in ast.walk(tree):
        for name in {"annotation", "returns"} & {*node._fields}:
            setattr(node, name, None)
    return ast.dump(tree)


def _changed_line(source: str, code: str) -> tuple[int, str]:
    """Return the number of the changed line and its new text; a removed line is named with the one after it."""
    before, after = source.splitlines(), code.splitlines()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    _, first, last, start, end = next(block for block in matcher.get_opcodes() if block[0] != "equal")
    changed = " ".join(" ".join(after[start:end]).split())
    return first + 1, changed or f"{' '.join(after[start].split())} without {' '.join(before[first:last]).strip()}"
