"""The fingerprint of an experiment: two runs with one fingerprint have one curve, on any hardware."""

import ast
import hashlib
import inspect
import json
import logging
import sys
import sysconfig
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.utils.data import ConcatDataset, TensorDataset

from onecurve.errors import CheckpointUserError, as_typed
from onecurve.identity.option_kinds import CONTINUABLE, default_value, experiment_options, matches
from onecurve.targets import locate, target_nodes

_log = logging.getLogger(__name__)
_CONTINUED, _DATA = "continued from", "training data"
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)  # nodes that can have a docstring
_ENGINE = ("onecurve.data.", "onecurve.random.", "onecurve.run.module")  # what of the engine computes the experiment
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


@dataclass(frozen=True)
class Experiment:
    """What a run computes, as plain values that a checkpoint keeps.

    Attributes:
        options: the options of the experiment by name; `data.batch_size` is the global batch, and `training data` has
            the number of samples and a hash of their indices and labels. `continued from` names the experiment that the
            run was before its options or its code changed: no other run has its curve.
        code: a hash of the source code of the classes that the options name.
    """

    options: dict[str, Any]
    code: str

    @property
    def fingerprint(self) -> str:
        """Six hexadecimal digits. Versions of libraries have no part in it, so that a change of their numbers shows."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True, default=str).encode()).hexdigest()[:6]


def describe_experiment(config: DictConfig, data: Any) -> Experiment:
    """Return the experiment of a resolved configuration and its data, set up for training; equal on all ranks."""
    options = experiment_options(config)
    targets = [f"{type(data).__module__}.{type(data).__name__}"]
    targets += [value for name, value in options.items() if name.endswith("_target_")]
    targets += [node["_target_"] for _, node in target_nodes(list(options.values()))]
    code = code_version(targets)
    options |= {"data.batch_size": data.global_batch_size, _DATA: _training_facts(data.training_samples)}
    # Each rank computes something of its own with these: statistics, weights between two averages, or a part of the
    # batch under `strategy=dp`, the only class of a strategy that belongs to the experiment (`EXPERIMENT_VALUES`).
    is_local = options.get("strategy.comm_hook") == "post_local_sgd" or "strategy._target_" in options
    if is_local or not (config.trainer.sync_batchnorm or config.bit_exact):
        options["ranks x micro-batches"] = (
            f"{data.parallel.dp_size} x {data.accumulate * data.parallel.num_microbatches}"
        )
    return Experiment(options, code)


def _training_facts(samples: Iterable[tuple[Any, int | None, str | None]]) -> str:
    """Return what identifies the `training_samples` of `OrderedData`: their number, and a hash of what they show."""
    content, counts = b"", []
    for dataset, count, digest in samples:
        content += (digest or "").encode() + _content_of(dataset)
        counts.append("a stream of" if count is None else str(count))
    shown = f", SHA-256 {hashlib.sha256(content).hexdigest()[:12]}" if content else ""
    return f"{' + '.join(counts)} samples{shown}"


def _content_of(dataset: Any) -> bytes:
    """Return bytes that identify the indices and the labels of a dataset; none if it shows none."""
    if isinstance(dataset, ConcatDataset):
        return b"".join(_content_of(part) for part in dataset.datasets)
    if hasattr(dataset, "indices") and hasattr(dataset, "dataset"):  # a Subset, perhaps of another one
        return _bytes_of(dataset.indices) + _content_of(dataset.dataset)
    if isinstance(dataset, TensorDataset):  # its labels; numbers computed by some threads may have other bits elsewhere
        last = dataset.tensors[-1]
        are_labels = not (last.is_floating_point() or last.is_complex()) and last.layout == torch.strided
        return _bytes_of(last) if are_labels else b""
    return _bytes_of(getattr(dataset, "labels", getattr(dataset, "targets", [])))


def _bytes_of(values: Any) -> bytes:
    """Return bytes that identify indices or labels: numbers in an array, a tensor or a list, or anything else."""
    try:
        array = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except ValueError:  # lists of different lengths
        return repr(values).encode()
    return repr(values).encode() if array.dtype == object else array.tobytes()


def continue_experiment(checkpoint: dict[str, Any], current: Experiment, config: DictConfig) -> Experiment:
    """Return the experiment of a run that continues the one of a checkpoint; log if it is another one.

    Raises:
        CheckpointUserError: if an option differs that a continued run cannot change, or the training data; or if plain
            Lightning wrote the checkpoint.
    """
    if not checkpoint.get("experiment"):
        raise CheckpointUserError(
            f"ckpt_path={config.ckpt_path} has no position in the data, as files of plain Lightning, or of weights: "
            f"init_from={config.ckpt_path} starts a new run with its weights"
        )
    before = Experiment(**checkpoint["experiment"])
    # The weights come from the checkpoint, and so the initial weights stay those of the earlier run.
    kept = {name: value for name, value in current.options.items() if name != "init_from"}
    inherited = {name: before.options[name] for name in ("init_from", _CONTINUED) if name in before.options}
    now = replace(current, options=kept | inherited)
    changes = _changes(before.options, now.options, config)
    if fixed := [name for name in changes if not (matches(name, CONTINUABLE) or _is_moved(name, before, now))]:
        named = [changes[name] for name in fixed if name != _DATA] or [changes[_DATA]]  # an option may explain the data
        of_classes = [name for name in fixed if name.startswith(("data.", "module.")) and "._" not in name]
        of_classes = [name for name in of_classes if name != "data.batch_size"]  # it is never hardware
        way_out = f", or name {', '.join(of_classes)} in `hardware_options` of its class, if it changes no result"
        raise CheckpointUserError(
            f"the run in ckpt_path had {', '.join(named)}: that is another experiment; set it back, or start a new run"
            + way_out * bool(of_classes)
        )
    if before.fingerprint != now.fingerprint:
        origin = f"{before.fingerprint}, step {checkpoint['position']['steps']}"
        now = replace(now, options=now.options | {_CONTINUED: origin})
        reasons, has_other_classes = [*changes.values()], any(name.endswith("_target_") for name in changes)
        is_edited = before.code != now.code and not has_other_classes
        reasons += ["the code of its classes was edited"] * is_edited
        level = logging.WARNING if is_edited else logging.INFO
        message = "the run goes on as experiment %s, before %s: %s"
        _log.log(level, message, now.fingerprint, before.fingerprint, ", ".join(reasons))
    return now


def _is_moved(name: str, before: Experiment, now: Experiment) -> bool:
    """Return whether a class only has another module, such as one that a script has now in a file of its own."""
    classes = [str(part.options.get(name)).rpartition(".")[2] for part in (before, now)]
    return name.endswith("_target_") and classes[0] == classes[1]


def _changes(before: dict[str, Any], now: dict[str, Any], config: DictConfig) -> dict[str, str]:
    """Return each option that differs by name, with both values; an absent option has its default."""
    pairs = {name: (before.get(name), now.get(name)) for name in before.keys() | now.keys()}
    names = sorted(name for name, (old, new) in pairs.items() if old != new and repr(old) != repr(new))  # NaN is NaN
    values = {name: [part.get(name, default_value(config, name)) for part in (before, now)] for name in names}
    return {name: f"{name}={as_typed(old)} (now {as_typed(new)})" for name, (old, new) in values.items()}


def code_version(targets: Iterable[str]) -> str:
    """Return a hash of the source files of classes and functions, without comments and docstrings.

    A file counts with the files of its folder, of the folders in it, and of the parts of the engine that compute the
    experiment, from which it imports anything. Installed libraries do not count. In a script only the source of the
    named classes counts, because the rest may set hardware.
    """
    names, codes = set[str](), dict[str, str]()
    for target in targets:
        found = locate("_target_", target)
        if found.__module__ in ("__main__", "__mp_main__"):  # the second in a process that was spawned
            with suppress(OSError, TypeError):  # a prompt keeps no source
                codes[target] = _without_comments(ast.parse(textwrap.dedent(inspect.getsource(found))))
        else:
            names |= _module_and_its_imports(found.__module__)
    codes |= {name: _imports_and_code(name, _file(name))[1] for name in names}
    return hashlib.sha256("".join(f"{name}\n{codes[name]}\n" for name in sorted(codes)).encode()).hexdigest()


def _module_and_its_imports(module: str) -> set[str]:
    """Return a module and those from which it imports, directly or not: of its package, of the engine, or beside it."""
    package, found, waiting = module.rpartition(".")[0], set[str](), [module]
    while waiting:
        name = waiting.pop()
        file = _file(name)
        is_library = file.startswith(_LIBRARIES) and not name.startswith("onecurve.")  # which may be installed, or not
        if name in found or is_library or not file.endswith(".py"):
            continue
        found.add(name)
        values = vars(sys.modules[name]).values() if name in sys.modules else ()
        origins = {str(getattr(value, "__module__", None)) for value in values} | _imports_and_code(name, file)[0]
        for origin in {*origins, name.rpartition(".")[0]}:  # an import runs the `__init__.py` of its folder
            is_beside = not package and origin in sys.modules and not origin.startswith(("src.", "onecurve."))
            if is_beside or origin.startswith((f"{package}.", *_ENGINE)):
                waiting.append(origin)
    return found


def _file(name: str) -> str:
    """Return the path of a module's source, also of one that a function imports later; "" if it is no module."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__file__", None) or ""
    with suppress(ImportError, ValueError):
        return getattr(find_spec(name), "origin", None) or ""
    return ""


@cache
def _imports_and_code(name: str, file: str) -> tuple[set[str], str]:
    """Return the names that the import statements of a file give, of which some are modules, and its code."""
    package = name if file.endswith("__init__.py") else name.rpartition(".")[0]
    tree, found = ast.parse(Path(file).read_text()), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), package)
            found |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
    return found, _without_comments(tree)


def _without_comments(tree: ast.Module) -> str:
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
