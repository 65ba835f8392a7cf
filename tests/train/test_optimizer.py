"""The optimizer: Muon in float32 takes torch's steps, up to the rounding of torch's bf16."""

from __future__ import annotations

import pytest
import torch

from paceline.train.optimizer import Float32Muon


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)])
def test_muon_in_float32_takes_the_steps_of_torch(shape: tuple[int, int]) -> None:
    random = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=random)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    options = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = [Float32Muon([ours], **options), torch.optim.Muon([theirs], **options)]
    for _ in range(5):
        gradient = torch.randn(shape, generator=random)
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.02 * moved
    state, other = (next(iter(optimizer.state.values())) for optimizer in optimizers)
    assert torch.equal(state["momentum_buffer"], other["momentum_buffer"])
