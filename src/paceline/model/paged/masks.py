"""Which cached keys a row may see: full, sliding-window and chunked layers, chains and trees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from paceline.core.batch import Span
from paceline.core.tree import ancestor_mask, depths_of

_KEPT_ROWS, _KEPT_COLUMNS = 64, 4096  # masks are kept up to this size, 256 KB each


@dataclass(frozen=True)
class Pattern:
    """What a layer sees of the past, in positions: everything, a window, or its own chunk.
    ``window`` W: keys with ``q_pos - k_pos < W``. ``chunk`` C: keys with ``k_pos // C == q_pos //
    C`` (Llama 4). At most one of them is set."""

    window: int | None = None
    chunk: int | None = None

    def first_key(self, span: Span) -> int:
        """The smallest cache index that a row of the span sees."""
        base = span.context + span.pending
        if span.pending:
            lowest = span.context
        else:
            lowest = base - 1 + min(depths_of(span.parents)[span.first_new :])
        if self.window is not None:
            # Node indices are not positions, but every index below base is.
            return min(max(0, lowest - self.window + 1), base)
        if self.chunk is not None:
            return min(lowest // self.chunk * self.chunk, base)
        return 0

    def phase(self, span: Span) -> int:
        """The span's position in its chunk, on which a mask depends beside the span's shape."""
        return (span.context + span.pending) % self.chunk if self.chunk is not None else 0


FULL = Pattern()
# Of a span: pending, parents, first_new; its pattern and phase, and whether ancestors are known.
MaskShape = tuple[int, tuple[int, ...], int, Pattern, int, bool]


def visible(span: Span, pattern: Pattern, columns: int, ancestors: bool = True) -> torch.Tensor:
    """bool ``[rows, columns]`` on the host: which of its last ``columns`` keys each row sees.
    Without ``ancestors`` a node sees all that the pattern allows; the caller masks the rest.
    Columns are right-aligned: the last is the last tree node (or pending token). But for chunks the
    result does not depend on the span's context, so masks are cached in a few widths."""
    shape = span.pending, span.parents, span.first_new, pattern, pattern.phase(span), ancestors
    if span.rows > _KEPT_ROWS or columns > _KEPT_COLUMNS:
        return _visible(shape, columns)
    width = max(256, 1 << (columns - 1).bit_length())
    return _kept(shape, width)[:, width - columns :]


def _visible(shape: MaskShape, columns: int) -> torch.Tensor:
    pending, parents, first_new, pattern, phase, ancestors = shape
    # Positions are counted from the first index after the pending tokens ("base").
    nodes = len(parents)
    depths = torch.tensor(depths_of(parents), dtype=torch.int64)
    key_index = torch.arange(nodes - columns, nodes)
    key_pos = key_index.clone()
    if nodes:
        key_pos[max(0, columns - nodes) :] = (depths - 1)[max(0, nodes - columns) :]
    row_pos = torch.cat([torch.arange(-pending, 0), depths[first_new:] - 1])
    # Committed and pending keys: everything up to the row itself.
    mask = (key_index < 0) & (key_index <= row_pos[:, None])
    if nodes:
        shown = ancestor_mask(parents)[first_new:, max(0, nodes - columns) :]
        mask[pending:, max(0, columns - nodes) :] = shown if ancestors else True
    if pattern.window is not None:
        mask &= row_pos[:, None] - key_pos < pattern.window
    if pattern.chunk is not None:
        same = torch.div(row_pos + phase, pattern.chunk, rounding_mode="floor")[:, None]
        mask &= same == torch.div(key_pos + phase, pattern.chunk, rounding_mode="floor")
    return mask


_kept = lru_cache(maxsize=128)(_visible)


def additive(mask: torch.Tensor, dtype: torch.dtype, repeats: int) -> torch.Tensor:
    """0 where the masks ``[n, rows, keys]`` are true, minus infinity elsewhere, ``[n, 1, repeats *
    rows, keys]``."""
    folded = mask.repeat(1, repeats, 1)[:, None]
    zeros = torch.zeros(folded.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill_(~folded, float("-inf"))
