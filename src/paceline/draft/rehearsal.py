"""What start-up times of a drafter that runs a model over a paged cache: one level, one token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from paceline.core.draws import draft
from paceline.core.params import SamplingParams
from paceline.core.sampling import Rows
from paceline.core.sequence import Sequence as Request
from paceline.model.cache import Feed, PagedCache

_BLOCKS = 4  # of context: about what the target's own costs are measured with


@contextmanager
def stand_ins(
    cache: PagedCache, batch_size: int, max_positions: int
) -> Iterator[tuple[list[Feed], Rows]]:
    """Feeds of one token each for ``batch_size`` made-up sequences, and whose laws come out.

    As many as the cache has room for. It is as before afterwards.
    """
    size = cache.block_size
    blocks = max(1, min(_BLOCKS, cache.num_blocks, max_positions // size))
    count = max(1, min(batch_size, cache.num_blocks // blocks))
    context = min(blocks * size, max_positions) - 1
    seqs = tuple(Request(seq_id, [0], 1, SamplingParams()) for seq_id in range(-count, 0))
    for seq in seqs:
        cache.admit(seq.seq_id, seq.tokens)
        cache.reserve(seq.seq_id, context + 1)
    try:
        yield [Feed(seq.seq_id, context, (0,)) for seq in seqs], Rows(seqs, (0,) * count)
    finally:
        for seq in seqs:
            cache.free(seq.seq_id)


def rehearse_level(
    forward: Callable[[Sequence[Feed]], torch.Tensor],
    cache: PagedCache,
    batch_size: int,
    max_positions: int,
    generator: torch.Generator | None,
) -> None:
    """One forward over a token of each sequence, ``[batch, vocab]``, and the choice from it."""
    with stand_ins(cache, batch_size, max_positions) as (feeds, rows):
        draft(forward(feeds), rows, 1, generator)
