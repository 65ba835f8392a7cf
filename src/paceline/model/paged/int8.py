"""Keys and values in 8 bits. An entry of a cache, one KV head at one position, is

    | code 0 | code 1 | ... | code width - 1 | scale: float32, 4 bytes |    int8 [width + 4]

with ``number = code * scale`` and ``scale = max(|number|) / 127``, so an entry depends on nothing
else in the batch. Entries are moved, copied and gathered as in any other cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import ConfigError

INT8 = torch.int8  # the dtype of such a cache
_SCALE = 4  # bytes of a scale
KINDS = ("auto", "int8")


def cache_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a cache of this kind for a model in ``dtype``. Raises ConfigError."""
    if kind not in KINDS:
        raise ConfigError(f"kv_cache_dtype is {kind!r}; use one of {', '.join(KINDS)}")
    return INT8 if kind == "int8" else dtype


def stored_width(width: int, dtype: torch.dtype) -> int:
    """Elements of an entry of ``width`` numbers in a cache of this dtype."""
    return width + _SCALE if dtype == INT8 else width


def encode(numbers: Tensor) -> Tensor:
    """int8 ``[..., width + 4]`` of ``[..., width]``. What is not finite makes the scale NaN."""
    exact = numbers.float()
    scale = exact.abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    values = (exact / scale).nan_to_num_(0.0).round_()  # 0 / 0: a head of zeros
    return torch.cat((values.to(INT8), _contiguous(scale).view(INT8)), -1)


def decode(entries: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers ``[..., width]`` of int8 ``[..., width + 4]``."""
    values, scale = entries[..., :-_SCALE], _contiguous(entries[..., -_SCALE:])
    return (values.float() * scale.view(torch.float32)).to(dtype)


def _contiguous(scales: Tensor) -> Tensor:
    """A copy that can be viewed in another dtype: ``contiguous`` leaves odd strides of one row."""
    return scales.clone(memory_format=torch.contiguous_format)
