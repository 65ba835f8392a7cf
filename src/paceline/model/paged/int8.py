"""Keys and values quantised to 8 bits. A cache entry, one KV head at one position, is

    | value 0 | value 1 | ... | value width - 1 | scale: float32, 4 bytes |    int8 [width + 4]

with ``number = value * scale`` and ``scale = max(|number|) / 127``. So an entry does not depend on
other rows of the batch, and it is moved, copied and gathered as in any other cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

INT8 = torch.int8  # the dtype of a quantised cache
_SCALE_BYTES = 4


def cache_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    """The cache's dtype for the setting ``kind`` ("auto" or "int8") and a model in ``dtype``."""
    return INT8 if kind == "int8" else dtype


def stored_width(width: int, dtype: torch.dtype) -> int:
    """Elements that an entry of ``width`` numbers takes in a cache in ``dtype``."""
    return width + _SCALE_BYTES if dtype == INT8 else width


def encode(numbers: Tensor) -> Tensor:
    """Quantise ``[..., width]`` to int8 ``[..., width + 4]``; numbers not finite: a NaN scale."""
    exact = numbers.float()
    scale = exact.abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    values = (exact / scale).nan_to_num_(0.0).round_()  # a head of zeros gives 0 / 0
    return torch.cat((values.to(INT8), _contiguous(scale).view(INT8)), -1)


def decode(entries: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise int8 ``[..., width + 4]`` to ``[..., width]`` in ``dtype``."""
    values, scale = entries[..., :-_SCALE_BYTES], _contiguous(entries[..., -_SCALE_BYTES:])
    return (values.float() * scale.view(torch.float32)).to(dtype)


def _contiguous(scales: Tensor) -> Tensor:
    """A copy that can be viewed in another dtype: ``contiguous()`` keeps odd strides of one row."""
    return scales.clone(memory_format=torch.contiguous_format)
