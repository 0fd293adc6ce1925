"""What a process that makes hundreds of trainers repeats at the start of each: it is computed once, or in C."""

import functools

import omegaconf._utils
import omegaconf.omegaconf
import yaml
from lightning.fabric.utilities import registry


class _Dumper(yaml.CDumper):
    """OmegaConf's dumper with the emitter of libyaml."""


def use_caches() -> None:
    """Read the entry points of installed packages once, and write YAML in C."""
    registry.entry_points = functools.cache(registry.entry_points)
    _Dumper.add_representer(str, omegaconf._utils.OmegaConfDumper.str_representer)
    omegaconf.omegaconf.get_omega_conf_dumper = lambda: _Dumper
    yaml.SafeDumper = yaml.CSafeDumper
