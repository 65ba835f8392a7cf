"""The optimizer of all trainings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.train.configs import TrainConfig

_MAX_GRADIENT_NORM = 1.0  # of all gradients together


class Float32Muon(torch.optim.Muon):
    """torch's Muon with ``adjust_lr_fn`` "match_rms_adamw", but with products in float32. Torch
    computes them in bf16, which took 71 % of a training step on a CPU without bf16 instructions
    (EAGLE-3 for SmolLM2, 2,048 tokens)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                buffer = state["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
                update = weight.grad.lerp(buffer, momentum)
                update = _orthogonalised(update, group["ns_coefficients"], group["ns_steps"])
                weight.mul_(1 - lr * group["weight_decay"])
                weight.add_(update, alpha=-0.2 * max(weight.shape) ** 0.5 * lr)


def _orthogonalised(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int
) -> torch.Tensor:
    """The nearest matrix with singular values of about 1, by Newton-Schulz iterations (Jordan et
    al. 2024)."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class MasterOptimizer:
    """Updates float32 master copies of the weights and writes them back rounded, since bf16 weights
    would lose updates smaller than 1/256 of a weight. Matrices are optimised by Muon (Jordan et al.
    2024: momentum orthogonalised by Newton-Schulz iterations). All else is optimised by AdamW,
    including matrices whose name contains one of ``adamw_names``."""

    def __init__(self, model: nn.Module, config: TrainConfig, adamw_names: Sequence[str]) -> None:
        muon_parameters: list[nn.Parameter] = []
        adamw_parameters: list[nn.Parameter] = []
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, parameter in model.named_parameters():
            master = nn.Parameter(parameter.detach().float().clone())
            self._pairs.append((parameter, master))
            use_muon = parameter.ndim == 2 and not any(part in name for part in adamw_names)
            (muon_parameters if use_muon else adamw_parameters).append(master)
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = []  # with peak rates
        if muon_parameters:
            options: Any = {"weight_decay": config.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
            in_float32 = next(model.parameters()).dtype == torch.float32
            muon_type = Float32Muon if in_float32 else torch.optim.Muon
            muon = muon_type(muon_parameters, lr=config.lr, **options)
            self._optimizers.append((muon, config.lr))
        if adamw_parameters:
            options = {"betas": (0.9, 0.95), "weight_decay": 0.0}
            adamw = torch.optim.AdamW(adamw_parameters, lr=config.adam_lr, **options)
            self._optimizers.append((adamw, config.adam_lr))

    def step(self, scale: float) -> None:
        """Apply the gradients with ``scale`` times the peak learning rates."""
        for parameter, master in self._pairs:
            # Frozen parameters have no gradient.
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_([master for _, master in self._pairs], _MAX_GRADIENT_NORM)
        for optimizer, peak in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * scale
            optimizer.step()
        with torch.no_grad():
            for parameter, master in self._pairs:
                parameter.copy_(master)
                master.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "masters": [master.detach() for _, master in self._pairs],
            "optimizers": [optimizer.state_dict() for optimizer, _ in self._optimizers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for (parameter, master), saved in zip(self._pairs, state["masters"], strict=True):
                master.copy_(saved)
                parameter.copy_(master)
        for (optimizer, _), saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
