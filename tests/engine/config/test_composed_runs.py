"""Tests compose runs faster than Hydra does, with the same result."""

import hydra
import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from tests.support.experiments import EXPERIMENTS, SHORT_RUN
from tests.support.runs import CONF, compose_words


@pytest.mark.parametrize(
    "words",
    [
        [*SHORT_RUN, *EXPERIMENTS["muon"], "strategy=pipeline", "seed=3", "tags=[a,b]"],
        ["~data", "+data._target_=A", "callbacks=[default,ema]", "~callbacks.ema.decay", "++model={width: 2}"],
        ["model=mlp", "model.hidden=[16]", "+optimizer@module.second=adamw", "ckpt_path='a b'", "callbacks.best=null"],
    ],
)
def test_values_that_are_set_later_are_those_that_hydra_sets(words: list[str]) -> None:
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        expected = hydra.compose("train", words)
    assert OmegaConf.to_yaml(compose_words(*words)) == OmegaConf.to_yaml(expected)


def test_a_misspelled_option_is_an_error() -> None:
    with pytest.raises(HydraException, match=r"Could not override 'model\.widht'"):
        compose_words("model.widht=3")
