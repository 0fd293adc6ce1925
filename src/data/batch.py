"""What travels from the data to the network: a batch that knows which samples it holds."""

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """One process's part of a (micro-)batch of n samples.

    Attributes:
        image: (n, channels, height, width), uint8 until it reaches the device, then normalised floats; laid out in
            memory channels first or last, as they were fetched.
        target: (n,) class numbers or, where images are mixed, (n, classes) shares of the classes.
        sample_index: (n,) the samples' places in their split, which is their identity; -1 for padding.
        weight: (n,) what each sample counts for in the loss, which is a weighted sum: on the device 1/n in training,
            so that the sum is the mean; 1 in evaluation, and 0 for padding.
    """

    image: Tensor
    target: Tensor
    sample_index: Tensor
    weight: Tensor
