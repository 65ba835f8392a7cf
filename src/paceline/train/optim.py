"""Muon for matrices and AdamW for the rest, on float32 masters of low-precision weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

_MAX_NORM = 1.0  # of all gradients together


class MasterOptimizer:
    """Keeps float32 master copies, steps them, and writes them back rounded: bf16 weights lose
    updates smaller than 1/256 of a weight.

    Hidden matrices take Muon (Jordan et al. 2024: momentum orthogonalised by Newton-Schulz), the
    rest AdamW, with matrices whose name contains one of ``outer``.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        adam_lr: float,
        weight_decay: float,
        outer: Sequence[str] = ("embed", "lm_head", "mask_hidden"),
    ) -> None:
        hidden: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, parameter in model.named_parameters():
            master = nn.Parameter(parameter.detach().float().clone())
            self._pairs.append((parameter, master))
            is_hidden = parameter.ndim == 2 and not any(part in name for part in outer)
            (hidden if is_hidden else rest).append(master)
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = []
        if hidden:
            muon = torch.optim.Muon(
                hidden, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            )
            self._optimizers.append((muon, lr))
        if rest:
            adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
            self._optimizers.append((adam, adam_lr))

    def step(self, scale: float) -> None:
        """Apply the gradients at ``scale`` times the peak rates."""
        for parameter, master in self._pairs:
            # None: it is frozen.
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_([master for _, master in self._pairs], _MAX_NORM)
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
