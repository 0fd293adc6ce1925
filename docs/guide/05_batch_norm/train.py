"""Chapter 5: batch normalization over the global batch, by hand, in training and in evaluation."""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import docs.guide.experiment as guide


def average(tensor: Tensor) -> Tensor:
    """Return the mean of a tensor over the ranks. Autograd does not know this function."""
    mean = tensor / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


class Average(torch.autograd.Function):
    """The same mean, with a gradient: the losses of all ranks depend on the tensor of each rank."""

    forward = staticmethod(lambda ctx, tensor: average(tensor))
    backward = staticmethod(lambda ctx, gradient: average(gradient))


class GlobalBatchNorm(nn.BatchNorm2d):
    """Batch normalization by the images of all ranks, which have equally many."""

    bug = ""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        over_ranks: Any = average if self.bug == "gradient" else Average.apply
        mean = over_ranks(input.mean((0, 2, 3), keepdim=True))
        var = over_ranks((input - mean).square().mean((0, 2, 3), keepdim=True))
        if self.bug == "buffers":
            self.update_running(*reversed(torch.var_mean(input.detach(), (0, 2, 3))))
        else:
            count = input.numel() // self.num_features * dist.get_world_size()  # values of a channel on all ranks
            self.update_running(mean.detach().flatten(), var.detach().flatten() * count / (count - 1))
        normalized = (input - mean) / (var + self.eps).sqrt()
        return normalized * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)

    def update_running(self, mean: Tensor, unbiased_var: Tensor) -> None:
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(unbiased_var, self.momentum)


def train(bug: str) -> tuple[list[float], float]:
    """Return the loss of each step, averaged over the ranks, and the test loss with this rank's running statistics."""
    rank, ranks, losses = dist.get_rank(), dist.get_world_size(), []
    net = guide.network(normalize=True)
    for norm in [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]:
        if ranks > 1 and bug != "local":
            norm.__class__, norm.bug = GlobalBatchNorm, bug  # the layer keeps its weights and buffers
    optimizer = guide.sgd(net)
    for epoch in range(guide.EPOCHS):
        for x, y in guide.batches(epoch):
            loss = F.cross_entropy(net(x[rank::ranks]), y[rank::ranks])
            optimizer.zero_grad()
            loss.backward()
            for weight in net.parameters():
                weight.grad = average(weight.grad)
            optimizer.step()
            losses.append(average(loss.detach()).item())
    x, y = guide.images(guide.TEST_IMAGES, seed=2).tensors
    return losses, F.cross_entropy(net.eval()(x), y).item()


if __name__ == "__main__":
    losses, test_loss = guide.run_ranks(train, 2, guide.chosen_bug("local", "gradient", "buffers"))[0]
    guide.check_parity(losses, guide.train_alone(normalize=True))
    _, expected = guide.run_ranks(train, 1, "")[0]
    print(f"test loss: {expected:.9f} on one process, {test_loss:.9f} in this run")
    assert math.isclose(test_loss, expected, rel_tol=guide.TOLERANCE), "the test loss is that of another experiment"
    print("same experiment: the test loss agrees as well")
