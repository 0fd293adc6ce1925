"""What a process that makes hundreds of trainers repeats at the start of each: it is computed once, or in C."""

import functools
from typing import Any

import omegaconf._utils
import omegaconf.omegaconf
import yaml
from lightning.fabric.utilities import registry

_registry: Any = registry
_yaml: Any = yaml
_omegaconf: Any = omegaconf.omegaconf


class _Dumper(_yaml.CDumper):
    """OmegaConf's dumper with the emitter of libyaml, whose text is the same."""


def use_caches() -> None:
    """Read the entry points of installed packages once, and write YAML in C, if libyaml is there."""
    _registry.entry_points = functools.cache(_registry.entry_points)
    _Dumper.add_representer(str, omegaconf._utils.OmegaConfDumper.str_representer)
    _omegaconf.get_omega_conf_dumper = lambda: _Dumper
    _yaml.SafeDumper = _yaml.CSafeDumper
