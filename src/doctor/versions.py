"""Versions of Python and of the packages, against the requirements in pyproject.toml."""

import platform
import re
from importlib import metadata
from pathlib import Path

from omegaconf import DictConfig
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from src.utils.errors import UserError

_PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
_SHOWN = ("torch", "lightning", "torchmetrics", "hydra-core", "wandb")
# github.com/Lightning-AI/pytorch-lightning/issues/21691
_COMPROMISED = {"lightning": ("2.6.2", "2.6.3")}


def check_python(cfg: DictConfig) -> str:
    """Check the version of Python."""
    specifier, reason = re.findall(r'^requires-python = "(.+?)"(?: # (.*))?', _PYPROJECT.read_text(), re.MULTILINE)[0]
    version = platform.python_version()
    if not SpecifierSet(specifier).contains(version, prereleases=True):
        raise UserError(f"Python {version} is not {specifier} ({reason}): make .venv again with another Python")
    return version


def check_packages(cfg: DictConfig) -> str:
    """Check the installed packages: each has a version that pyproject.toml allows, and none is known as malicious.

    The versions are read without an import, which would execute the package.
    """
    for name, versions in _COMPROMISED.items():
        if _installed(name) in versions:
            raise UserError(
                f"{name} {_installed(name)} contains malware that steals passwords: uninstall it, run `make install`, "
                "and change all passwords and keys of this machine"
            )
    if unmet := [message for requirement, reason in _requirements() if (message := _unmet(requirement, reason))]:
        raise UserError(f"{'; '.join(unmet)}: run `make install`")
    return ", ".join(f"{name} {_installed(name)}" for name in _SHOWN)


def _requirements() -> list[tuple[Requirement, str]]:
    """Return the dependencies of the project, each with its comment."""
    block = re.findall(r"^dependencies = \[\n(.*?)^\]", _PYPROJECT.read_text(), re.MULTILINE | re.DOTALL)[0]
    return [(Requirement(words), reason) for words, reason in re.findall(r'"(.+?)",(?: # (.*))?', block)]


def _unmet(requirement: Requirement, reason: str) -> str | None:
    """Return a message if the package is missing or has another version."""
    version = _installed(requirement.name)
    if version is None:
        return f"{requirement.name} is not installed"
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return f"{requirement.name} {version} is not {requirement.specifier}" + (f" ({reason})" if reason else "")


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
