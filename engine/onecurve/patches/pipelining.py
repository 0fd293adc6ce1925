"""Private names of torch.distributed.pipelining in torch 2.13.

The rehearsal of a pipeline computes the backward pass of a stage as a schedule does, of which only whole schedules are
public. (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/pipelining/_backward.py)
"""

from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight

__all__ = ["stage_backward", "stage_backward_input", "stage_backward_weight"]
