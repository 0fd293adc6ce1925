"""Sums over the samples of an evaluation: confusion matrix, calibration and the most confident mistakes."""

from typing import NamedTuple

import torch
from torch import Tensor

from src.engine.utils.tensors import upcast_half

NUM_BINS = 15  # of Guo et al., "On calibration of modern neural networks" (2017)
MAX_MISTAKES = 64


class Mistakes(NamedTuple):
    """Wrong predictions in a fixed number of rows, so that all ranks can gather them.

    Attributes:
        probability: (n,) probabilities of the predicted classes; -1 for a row without a mistake.
        ids: (n, 3) int64: sample index, label and predicted class.
    """

    probability: Tensor
    ids: Tensor


class EvaluationSums:
    """Sums over the samples that this rank evaluates, on its device. No update waits for the device.

    torchmetrics' ConfusionMatrix and CalibrationError exclude padding by a boolean mask, which does wait.

    Attributes:
        confusion: (classes, classes) int64 numbers of samples; row: label, column: predicted class.
        bins: (15, 3): number of samples, sum of their probabilities, and number of correct predictions. A sample
            belongs to a bin by the probability of its predicted class; the bins have equal widths.
        mistakes: the most confident mistakes, in descending order.
    """

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.long, device=device)
        self.bins = torch.zeros(NUM_BINS, 3, device=device)
        no_ids = torch.full((MAX_MISTAKES, 3), -1, device=device)
        self.mistakes = Mistakes(torch.full((MAX_MISTAKES,), -1.0, device=device), no_ids)
        self._bin_edges = torch.linspace(0, 1, NUM_BINS + 1, device=device)[1:-1]

    def update(self, logits: Tensor, label: Tensor, weight: Tensor, sample_index: Tensor) -> None:
        """Add a batch.

        Args:
            logits: (n, classes).
            label: (n,) int64.
            weight: (n,), 1 for a sample and 0 for padding.
            sample_index: (n,) int64, which decides between mistakes of equal probability.
        """
        confidence, predicted = upcast_half(logits).softmax(1).max(1)
        self.confusion.view(-1).index_add_(0, label * len(self.confusion) + predicted, weight.long())
        weight = weight.to(confidence.dtype)
        is_correct = (predicted == label).to(confidence.dtype)
        rows = torch.stack([weight, weight * confidence, weight * is_correct], dim=1)
        number = torch.bucketize(confidence, self._bin_edges.to(confidence.dtype))
        self.bins = self.bins.to(confidence.dtype).index_add_(0, number, rows)
        probability = torch.where((weight > 0) & (predicted != label), confidence, -1)
        in_batch = _most_confident(Mistakes(probability, torch.stack([sample_index, label, predicted], dim=1)))
        both = zip(self.mistakes, in_batch, strict=True)
        self.mistakes = _most_confident(Mistakes(*(torch.cat(fields) for fields in both)))


def _most_confident(mistakes: Mistakes) -> Mistakes:
    """Return the first rows by descending probability and, where that is equal, ascending sample index."""
    order = mistakes.ids[:, 0].argsort(stable=True)
    order = order[mistakes.probability[order].argsort(descending=True, stable=True)][:MAX_MISTAKES]
    return Mistakes(*(field[order] for field in mistakes))
