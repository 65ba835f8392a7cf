"""Linear layers of some architectures in the form that the kernels take.

Phi-3 and GLM compute several projections in one layer. GLM, Ernie and Helium rotate neighbouring
numbers of a head, and some models rotate only its first numbers; the kernels rotate number i with
number i + width / 2. Queries and keys are only multiplied with each other, so their numbers may
have any order that is the same for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.model.quantised.weights import QuantisedLinear, plain_linear

NO_ROPE = "none"  # the layer type of layers that do not rotate queries and keys (SmolLM3)
# Classes that rotate numbers 2i and 2i + 1 of a head, and those that may rotate the first only.
_INTERLEAVED = {f"{name}ForCausalLM" for name in ("Glm", "Glm4", "Ernie4_5", "Helium")}
PARTIAL = _INTERLEAVED | {"Phi3ForCausalLM"}


class SplitLinear(nn.Module):
    """Replaces a linear layer by layers with these ``rows`` (outputs) of it."""

    def __init__(self, linear: Any, rows: Mapping[str, slice | torch.Tensor]) -> None:
        super().__init__()
        self.rows = rows
        self.in_features, self.out_features = linear.in_features, linear.out_features
        outputs = torch.arange(linear.out_features)
        order = torch.cat([outputs[part] for part in rows.values()])
        self._inverse = None if torch.equal(order, outputs) else order.argsort()
        for name, part in rows.items():
            bias = None if linear.bias is None else linear.bias.detach()[part]
            if isinstance(linear, QuantisedLinear):
                self.add_module(name, QuantisedLinear(linear.quantised.rows(part), bias))
            else:
                self.add_module(name, plain_linear(linear.weight.detach()[part], bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.cat([child(x) for child in self.children()], -1)
        return out if self._inverse is None else out[..., self._inverse]


def owner(parent: nn.Module, name: str) -> nn.Module:
    """The module whose attribute is the projection ``name`` of an attention or MLP module."""
    for child in parent.children():
        if isinstance(child, SplitLinear) and hasattr(child, name):
            return child
    return parent


def linear_of(parent: nn.Module, name: str) -> Any:
    """The projection ``name`` of an attention or MLP module; None if there is none."""
    return getattr(owner(parent, name), name, None)


def split_layers(hf: Any, head_dim: int) -> None:
    """Split the linear layers of a decoder where the kernels need it, in place."""
    order = _order_of_head(hf, head_dim)
    for layer in hf.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        if hasattr(mlp, "gate_up_proj"):
            half = mlp.gate_up_proj.out_features // 2
            rows = {"gate_proj": slice(0, half), "up_proj": slice(half, 2 * half)}
            mlp.gate_up_proj = SplitLinear(mlp.gate_up_proj, rows)
        if hasattr(attention, "qkv_proj"):
            keys = hf.config.num_key_value_heads * head_dim
            outputs = attention.qkv_proj.out_features
            first, second = outputs - 2 * keys, outputs - keys
            parts = {
                "q_proj": _ordered(0, first, order),
                "k_proj": _ordered(first, second, order),
                "v_proj": slice(second, outputs),
            }
            attention.qkv_proj = SplitLinear(attention.qkv_proj, parts)
        elif order is not None:
            for name in ("q_proj", "k_proj"):
                linear = getattr(attention, name)
                part = _ordered(0, linear.out_features, order)
                setattr(attention, name, SplitLinear(linear, {name: part}))


def _ordered(first: int, end: int, order: torch.Tensor | None) -> slice | torch.Tensor:
    """The outputs from ``first`` to ``end``, those of each head in ``order``."""
    if order is None:
        return slice(first, end)
    return torch.arange(first, end).view(-1, len(order))[:, order].flatten()


def _order_of_head(hf: Any, head_dim: int) -> torch.Tensor | None:
    """In which order a head's numbers are rotated as the kernels do; None: in their own."""
    kind = type(hf).__name__
    if kind not in PARTIAL:
        return None
    rotated = len(hf.model.rotary_emb.inv_freq) * 2
    pairs = torch.arange(rotated).view(-1, 2).T
    if kind not in _INTERLEAVED:
        pairs = torch.arange(rotated).view(2, -1)
    order = torch.cat((pairs, torch.arange(rotated, head_dim).view(2, -1)), 1).flatten()
    return None if torch.equal(order, torch.arange(head_dim)) else order
