"""The batch on which a backend is compared with the reference before it is used."""

from __future__ import annotations

import torch

from paceline.core.batch import Batch, Span
from paceline.model.backends.base import Adapted, Backend
from paceline.model.paged.cache import PagedCache

_ROWS = 8  # of each sequence, a block
# Positions of the trial, as rows read all keys before them.
_LONGEST = 4096


def trial_logits(model: Adapted, backend: Backend | None = None) -> tuple[torch.Tensor, ...]:
    """Logits ``[8, vocab]`` of ``backend`` (or the model's) for three sequences at the beginning,
    middle and end of the context, of at most 4,096 positions, over the same keys."""
    blocks = max(1, min(model.max_positions, _LONGEST) // _ROWS)
    before = [0, (blocks - 1) // 2, blocks - 1]  # blocks of each sequence
    rows = range(3 * _ROWS)
    batch = Batch(
        [(row * 7919 + 1) % model.vocab_size for row in rows],
        [before[row // _ROWS] * _ROWS + row % _ROWS for row in rows],
        rows,
        tuple(Span(n, n * _ROWS, count * _ROWS, _ROWS) for n, count in enumerate(before)),
        tuple((*[0] * count, n) for n, count in enumerate(before)),
    )
    cache = PagedCache(model.cache_shapes, 3, _ROWS, model.dtype, model.device)
    return torch.split((backend or model)(batch, cache).logits, _ROWS)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``wanted``, whose rows are centred first."""
    got, wanted = got.float(), wanted.float()
    spread = (wanted - wanted.mean(-1, keepdim=True)).norm()
    return float((got - wanted).norm() / spread.clamp_min(1e-12))
