"""The choices of conf/, and which of them are the user's own: the suite checks these, and trains the project's."""

from pathlib import Path

from omegaconf import OmegaConf

from onecurve.targets import target_nodes
from tests.support.commands import ROOT
from tests.support.runs import CONF

Choice = tuple[str, str]  # group and name
IMAGES = ("cifar10", "cifar100", "folder", "huggingface", "npz", "shapes")
LOCAL_DATA = (*IMAGES, "brackets")  # the keys of the fixture `local_data`


def names_own_code(file: Path) -> bool:
    """Return whether a YAML names a class in a folder of the project other than src, such as my/."""
    nodes = target_nodes(OmegaConf.to_container(OmegaConf.load(file)))
    packages = {node["_target_"].partition(".")[0] for _, node in nodes}
    return any((ROOT / package).is_dir() for package in packages - {"src"})


def is_own(choice: Choice) -> bool:
    """Return whether a choice is the user's own: it names code outside of src/, or data that the tests do not have."""
    group, name = choice
    return names_own_code(CONF / group / f"{name}.yaml") or (group == "data" and name not in LOCAL_DATA)


MODELS = [file.stem for file in sorted((CONF / "model").glob("*.yaml")) if not is_own(("model", file.stem))]
