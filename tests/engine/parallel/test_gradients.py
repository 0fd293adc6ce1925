"""Clipping by a norm that no order of the elements changes."""

import pytest
import torch

from onecurve.parallel.gradients import clip_by_norm_over


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_clips_weights_of_any_type(dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    weight.grad = torch.full_like(weight, 2)
    clip_by_norm_over(None, torch.optim.SGD([weight]), 1.0, is_bit_exact=True)
    assert torch.allclose(weight.grad, torch.full_like(weight, 0.5), rtol=1e-2)
