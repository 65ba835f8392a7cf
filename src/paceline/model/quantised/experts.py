"""Layers of experts as linear modules, one by one, so that each matrix can be rounded or packed.

transformers holds a layer's experts in two tensors; checkpoints name every matrix by itself.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from paceline.model.quantised.weights import plain_linear

# Modules of transformers that compute what Experts does, and whose checkpoints have its names.
_NAMED = {"Qwen3MoeExperts"}


class Expert(nn.Module):
    """``down(activation(gate(x)) * up(x))``."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, act_fn: Any) -> None:
        """``gate_up [2 width, hidden]`` and ``down [hidden, width]`` are shared, not copied."""
        super().__init__()
        self.gate_proj, self.up_proj = map(plain_linear, gate_up.chunk(2))
        self.down_proj, self.act_fn = plain_linear(down), act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down


class Experts(nn.ModuleList):
    """The experts of a layer, from a module with ``gate_up_proj [experts, 2 width, hidden]`` and
    ``down_proj [experts, hidden, width]``, which is emptied."""

    _emptied: Any

    def __init__(self, whole: Any) -> None:
        pairs = zip(whole.gate_up_proj.detach(), whole.down_proj.detach(), strict=True)
        super().__init__(Expert(*pair, whole.act_fn) for pair in pairs)
        self.__dict__["_emptied"] = whole  # not a submodule: it has no weights
        whole.gate_up_proj = whole.down_proj = None

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Of ``hidden [T, hidden]``; ``chosen [T, n]`` are indexes of experts."""
        total = torch.zeros_like(hidden)
        for index in sorted(set(chosen.flatten().tolist())):
            rows, places = torch.where(chosen == index)
            part = self[index](hidden[rows]) * weights[rows, places, None]
            total.index_add_(0, rows, part.to(total.dtype))
        return total

    def whole(self) -> Any:
        """The module it was made from, with its weights; itself if they are quantised."""
        matrices: list[list[Any]] = [[e.gate_proj, e.up_proj, e.down_proj] for e in self]
        if any(type(linear) is not nn.Linear for expert in matrices for linear in expert):
            return self
        weights = [[linear.weight for linear in expert] for expert in matrices]
        module = copy.copy(self._emptied)
        tensors = {
            "gate_up_proj": torch.stack([torch.cat((gate, up)) for gate, up, _ in weights]),
            "down_proj": torch.stack([down for _, _, down in weights]),
        }
        module._parameters = {
            name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()
        }
        return module


def split_experts(hf: Any) -> Any:
    """``hf`` itself, with the experts that are known by name as linear modules."""
    for parent in list(hf.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in _NAMED:
                setattr(parent, name, Experts(child))
    return hf
