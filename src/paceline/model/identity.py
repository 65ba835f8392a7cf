"""Whether two models are the same, whatever their paths and their weights' layout in memory."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.model.target import CausalModel

_ROWS = 16  # tokens of the probe
_ALIKE = 0.1  # relative difference of logits by another dtype or kernel
_SIZES = {"architecture": "architecture", "layers": "number of layers"}
_SIZES |= {"hidden_size": "hidden size", "vocab_size": "vocabulary size"}
_IGNORED = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


@dataclass(frozen=True)
class ModelIdentity:
    """Sizes, the configuration's digest, and logits of a probe."""

    name: str
    architecture: str
    layers: int
    hidden_size: int
    vocab_size: int
    parameters: int
    config: str
    logits: tuple[float, ...]

    @classmethod
    def of(cls, target: CausalModel) -> ModelIdentity:
        config = target.hf.config.to_dict()
        kept = {key: value for key, value in config.items() if key not in _IGNORED}
        digest = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode())
        return cls(
            name=target.name,
            architecture=str(target.hf.config.model_type),
            layers=target.num_layers,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            parameters=count_parameters(target),
            config=digest.hexdigest()[:16],
            logits=_probe(target),
        )

    def difference(self, other: ModelIdentity) -> str | None:
        """How the ``other`` model differs; None: not. Weights are compared by their logits."""
        for key, what in _SIZES.items():
            if getattr(self, key) != getattr(other, key):
                return f"its {what} is {getattr(other, key)}, not {getattr(self, key)}"
        if self.config != other.config:
            return "its configuration is another one"
        pairs = list(zip(self.logits, other.logits, strict=False))
        distance = sum((a - b) ** 2 for a, b in pairs)
        size = sum(a**2 for a, _ in pairs)
        if len(self.logits) != len(other.logits) or distance > _ALIKE**2 * size:
            return "its weights are others"
        return None


def count_parameters(target: CausalModel) -> int:
    """Of a model of this configuration, as packed weights cannot be counted."""
    import torch

    with torch.device("meta"):
        skeleton = type(target.hf)(target.hf.config)
    return sum(parameter.numel() for parameter in skeleton.parameters())


def _probe(target: CausalModel) -> tuple[float, ...]:
    """Logits from all over the vocabulary after a few fixed tokens, to four digits."""
    import torch

    from paceline.core.batch import Batch, Span

    rows = range(_ROWS)
    ids = [(row * 7919 + 1) % target.vocab_size for row in rows]
    cache = target.new_cache(1, _ROWS)
    with torch.inference_mode():
        batch = Batch(ids, rows, rows, (Span(0, 0, 0, _ROWS),), ((0,),))
        last = target(batch, cache).logits[-1].float()
    picked = last[:: max(1, target.vocab_size // _ROWS)][:_ROWS]
    return tuple(float(f"{value:.4g}") for value in picked.tolist())
