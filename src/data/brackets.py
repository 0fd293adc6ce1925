"""An example of a project of one's own: lines of brackets as token ids, a plain dataset and LightningDataModule."""

import random

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, random_split

TOKENS = "()[]"


class Brackets(Dataset[tuple[Tensor, int]]):
    """Lines of brackets, half of them balanced; an item is (length,) token ids, and 1 if the line is balanced.

    Training lines are changed at random: round brackets may become square ones, and square ones round.
    """

    def __init__(self, count: int, length: int, augment: bool = False, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.lines = [balanced(length, rng) if number % 2 else shuffled(length, rng) for number in range(count)]
        self.augment = augment

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        line = self.lines[index]
        label = int(is_balanced(line))
        if self.augment and random.random() < 0.5:
            line = line.translate(str.maketrans("()[]", "[]()"))
        return torch.tensor([TOKENS.index(token) for token in line]), label


def balanced(length: int, rng: random.Random) -> str:
    """Return a random balanced line of an even length."""
    if not length:
        return ""
    inside = 2 * rng.randrange(length // 2)
    pair = rng.choice(["()", "[]"])
    return pair[0] + balanced(inside, rng) + pair[1] + balanced(length - 2 - inside, rng)


def shuffled(length: int, rng: random.Random) -> str:
    """Return a balanced line in another order, which is seldom balanced."""
    return "".join(rng.sample(balanced(length, rng), length))


def is_balanced(line: str) -> bool:
    """Return whether every bracket is closed by its own kind."""
    while (shorter := line.replace("()", "").replace("[]", "")) != line:
        line = shorter
    return not line


class BracketData(L.LightningDataModule):
    """Splits of lines of brackets. The batch size is that of an optimizer step, over all processes."""

    def __init__(self, batch_size: int = 64, length: int = 16, train_size: int = 5000, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size, self.length, self.train_size, self.num_workers = batch_size, length, train_size, num_workers

    def setup(self, stage: str) -> None:
        self.train = Brackets(self.train_size, self.length, augment=True)
        self.val, self.test = random_split(Brackets(2000, self.length, seed=1), [0.5, 0.5])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size, num_workers=self.num_workers)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, self.batch_size, num_workers=self.num_workers)
