"""RMS normalisation in few operations, and recognising modules that compute it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

    On CPU the row ``[x, -x]`` goes through LayerNorm: its mean is zero and its variance the mean
    square of x, so the first half of the result is exactly the RMS norm. That is one fused kernel
    in float32, where ``F.rms_norm`` is eight operations on CPU (7 to 24 microseconds a call).
    """

    weight: torch.Tensor  # [width]; in the dtype of x, or float32
    double: torch.Tensor  # [2 * width]: the weight for both halves
    eps: float

    @property
    def width(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` to the same shape."""
        if x.device.type != "cpu":
            if self.weight.dtype == x.dtype:
                return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
            return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)
        both = torch.cat((x, -x), -1)
        return torch.layer_norm(both, self.double.shape, self.double, None, self.eps)[
            ..., : self.width
        ]


def _candidate(weight: torch.Tensor, eps: float) -> RMSNorm:
    return RMSNorm(weight, torch.cat((weight, weight)), eps)


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
    options = [_candidate(weight, eps), _candidate(1 + weight.float(), eps)]
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
        for option in options:
            got = option(x)
            if torch.allclose(got.float(), wanted.float(), rtol=rtol, atol=1e-6):
                return option
    return None


def optimise_norms(root: nn.Module) -> int:
    """Give every module that computes an RMS norm the short forward; returns how many."""
    count = 0
    for module in root.modules():
        if "norm" in type(module).__name__.lower() and "forward" not in vars(module):
            norm = as_rms_norm(module)
            if norm is not None:
                module.forward = partial(RMSNorm.__call__, norm)
                count += 1
    return count


def slow_norm(module: nn.Module) -> None:
    """Give a module that ``optimise_norms`` changed its own forward back."""
    forward = vars(module).get("forward")
    if isinstance(forward, partial) and forward.func is RMSNorm.__call__:
        del module.forward
