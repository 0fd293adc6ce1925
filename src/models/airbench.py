"""A network for fast training on CIFAR: frozen whitening filters, then three stages that start near the identity.

The architecture is that of Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU" (2024). The widths are those of
its successor for Muon (github.com/KellerJordan/cifar10-airbench, airbench94_muon). Both build on Page, "How to train
your ResNet" (2018), and tysam-code/hlb-CIFAR10. The network has 1,972,792 parameters for ten classes.

`callbacks.whitening` computes the whitening filters from training images; without it they stay random.
"""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from onecurve import UserError
from src.models.options import check_sizes
from src.models.whitening import Whitening


def airbench(num_classes: int, widths: Sequence[int] = (64, 256, 256), channels: int = 3) -> nn.Sequential:
    """Return the network as a sequence of blocks; it maps (n, channels, 32, 32) images to (n, num_classes) logits.

    Args:
        num_classes: number of classes.
        widths: channels of the three stages.
        channels: channels of the images.
    """
    if len(widths) != 3:
        raise UserError(f"model.widths={list(widths)}: give the channels of three stages")
    check_sizes(widths=widths)
    first, second, third = widths
    whitening = Whitening(channels, 2)
    stage = _Stage(whitening.out_channels, first)
    return nn.Sequential(
        OrderedDict(
            layer1=nn.Sequential(OrderedDict(whitening=whitening, activation=nn.GELU(), stage=stage)),
            layer2=_Stage(first, second),
            layer3=_Stage(second, third),
            head=nn.Sequential(nn.MaxPool2d(3), nn.Flatten(), _Head(third, num_classes)),
        )
    )


class _Stage(nn.Sequential):
    """Two convolutions; a max pooling after the first halves height and width."""

    def __init__(self, inputs: int, outputs: int) -> None:
        first, second = (_Convolution(inputs, outputs), nn.MaxPool2d(2)), (_Convolution(outputs, outputs),)
        super().__init__(*first, _norm(outputs), nn.GELU(), *second, _norm(outputs), nn.GELU())


class _Convolution(nn.Conv2d):
    """A 3 x 3 convolution with Dirac initialization (Zagoruyko and Komodakis, "DiracNets", 2017).

    Each of the first `inputs` filters starts as the identity on one channel.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, padding=1, bias=False)
        nn.init.dirac_(self.weight.data[:inputs])


class _Head(nn.Linear):
    """A linear layer with initial weights of standard deviation one, whose logits are divided by the input width."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.weight.data /= self.weight.data.std()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.in_features


def _norm(channels: int) -> nn.BatchNorm2d:
    """Return a batch normalization of which only the bias is trained.

    Its momentum is high, because a short training has few steps for the running statistics.
    """
    norm = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    norm.weight.requires_grad_(False)
    return norm
