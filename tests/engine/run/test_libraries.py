"""Networks of transformers, timm and monai train the same on any hardware. `make test-libraries` installs them."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.engine.data.test_any_loader import NOTHING, PLACES, WAYS, check_equal
from tests.support.pool import Pool
from tests.support.runs import compose, fit, fit_ranks

pytestmark = pytest.mark.slow


class _Torchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for torchvision, of which no build fits the CPU build of torch; timm imports names of it, for images."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        is_asked = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_asked else None

    def exec_module(self, module: Any) -> None:
        module.__getattr__ = self._stand_in

    @staticmethod
    def _stand_in(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock()


if importlib.util.find_spec("torchvision") is None:
    sys.meta_path.append(_Torchvision())


def gpt2() -> nn.Module:
    """Two layers, whose first and last weights are one."""
    import transformers

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 12}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def resnet() -> nn.Module:
    import timm

    return timm.create_model("resnet10t", num_classes=3)


def unet() -> nn.Module:
    from monai.networks.nets import UNet

    return UNet(2, 3, 3, channels=(4, 8, 16), strides=(2, 2), num_res_units=1, norm="batch", dropout=0.1)


class Networks(L.LightningModule):
    def __init__(self, library: str) -> None:
        super().__init__()
        self.library, self.net = library, {"transformers": gpt2, "timm": resnet, "monai": unet}[library]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, target = batch
        if self.library == "transformers":
            logits = self.net(input_ids=target).logits[:, :-1]  # its own loss is in float32, also of a float64 network
            loss = F.cross_entropy(logits.transpose(1, 2), target[:, 1:])
        else:
            loss = F.cross_entropy(self.net(inputs), target[:, 0] % 3 if self.library == "timm" else inputs.argmax(1))
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.003)


class Random(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        images, tokens = (
            torch.randn(48, 3, 32, 32, generator=generator),
            torch.randint(32, (48, 12), generator=generator),
        )
        return DataLoader(TensorDataset(images, tokens), 8, shuffle=True)


@pytest.mark.parametrize("place", ["ddp x2", "fsdp x2"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("library", ["transformers", "timm", "monai"])
def test_trains_the_same(library: str, way: str, place: str, pool: Pool, folder: Path) -> None:
    pytest.importorskip(library)
    words = [*NOTHING, "~data", f"+data._target_={__name__}.Random", f"+module._target_={__name__}.Networks"]
    words += [*WAYS[way], f"+module.library={library}"]
    if library == "timm" and way == "together":
        words.append("virtual_ranks=1")  # rounding decides the sign of two pixels' difference
    check_equal(
        way, fit_ranks(compose(folder / "two", *words, *PLACES[place]), pool), fit(compose(folder / "one", *words))
    )
