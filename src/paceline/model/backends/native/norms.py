"""RMS norms, and recognising modules that compute one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in float32."""

    weight: torch.Tensor  # [width]
    eps: float

    @property
    def width(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` to the same shape."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def as_rms_norm(module: nn.Module) -> RMSNorm | None:
    """The RMS norm that a module computes, found by comparing results, or None.

    Both ``weight * norm(x)`` and ``(1 + weight) * norm(x)``, with the sum in float32, are known.
    """
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if next(module.children(), None) is not None or getattr(module, "bias", None) is not None:
        return None
    weight = weight.detach()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, weight.shape[0], generator=generator)
    # The scales tell a wrong epsilon, the offset a LayerNorm, from the true thing.
    x = x * torch.tensor([[1e-3], [0.05], [1.0], [30.0]]) + torch.tensor([[0.0], [0.0], [2.0], [0]])
    x = x.to(weight)
    with torch.inference_mode():
        try:
            wanted = module(x)
        except (RuntimeError, TypeError):  # takes other inputs: not a norm over one tensor
            return None
        if not isinstance(wanted, torch.Tensor) or wanted.shape != x.shape:
            return None
        if wanted.dtype != x.dtype:
            return None
        # Two roundings of the module against one of ours.
        rtol = 3 * torch.finfo(x.dtype).eps
        for norm in (RMSNorm(weight, eps), RMSNorm(1 + weight.float(), eps)):
            if torch.allclose(norm(x).float(), wanted.float(), rtol=rtol, atol=1e-6):
                return norm
    return None
