"""onecurve/protocols.py lists what the library looks for in the classes of users."""

import ast
import inspect

import pytest

from onecurve import protocols
from tests.support.commands import ROOT

CLASSES = inspect.getmembers(protocols, inspect.isclass)
PROTOCOLS = [kind for _, kind in CLASSES if kind.__module__ == protocols.__name__]
FILES = [file for file in (ROOT / "engine" / "onecurve").rglob("*.py") if file.name != "protocols.py"]
# What getattr and hasattr ask of objects that are no user's: of torch, Lightning, Python and this library.
OTHERS = """
    CSafeLoader __dict__ __file__ __module__ __mro__ __name__ _torchdynamo_orig_callable add_note
    all_gather_single best_model_path block_backward_sync config_filename experiment func generator last_step mallopt
    num_replicas origin ps1 run sampler save_weights_only scaler set_timeout shape shutdown_timeout strategy
""".split()


def offered(kind: type) -> set[str]:
    methods = {name for name in vars(kind) if inspect.isfunction(getattr(kind, name)) and not name.startswith("_")}
    return {*inspect.get_annotations(kind), *methods}


def asked() -> set[str]:
    """Return the names that the library asks for by getattr and hasattr."""
    names: set[str] = set()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            is_question = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr")
            if is_question and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                names.add(str(node.args[1].value))
    return names


def test_every_question_is_listed() -> None:
    assert asked() - {name for kind in PROTOCOLS for name in offered(kind)} == set(OTHERS)


@pytest.mark.parametrize("kind", PROTOCOLS)
def test_every_attribute_is_explained_and_used(kind: type) -> None:
    source = "".join(
        file.read_text() for file in (ROOT / "engine" / "onecurve").rglob("*.py") if file.name != "protocols.py"
    )
    for name in offered(kind):
        method = vars(kind).get(name)
        assert name in (kind.__doc__ or "") or (method and method.__doc__), name
        assert name in source, name
