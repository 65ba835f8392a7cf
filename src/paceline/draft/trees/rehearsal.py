"""What start-up times of a drafter that runs a model over a paged cache: one level of its trees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from paceline.core.batch import Slice
from paceline.core.draws import draft
from paceline.core.params import SamplingParams
from paceline.core.sampling import Rows
from paceline.core.sequence import SequenceView
from paceline.draft.trees.grow import candidates, level_feed
from paceline.draft.trees.policy import Policy
from paceline.model.paged.cache import Feed, PagedCache

_BLOCKS = 4  # of context: about what the target's own costs are measured with


@contextmanager
def stand_ins(
    cache: PagedCache, batch_size: int, max_positions: int, nodes: int
) -> Iterator[tuple[list[SequenceView], int]]:
    """``batch_size`` made-up sequences with room for ``nodes``, and how many tokens they have.

    As many as the cache has room for. It is as before afterwards.
    """
    size = cache.block_size
    blocks = max(1, min(_BLOCKS, cache.num_blocks, max_positions // size))
    count = max(1, min(batch_size, cache.num_blocks // blocks))
    context = max(1, min(blocks * size, max_positions) - nodes)
    seqs = [SequenceView(seq_id, [0], 1, SamplingParams()) for seq_id in range(-count, 0)]
    for seq in seqs:
        cache.admit(seq.seq_id, seq.tokens)
        cache.reserve(seq.seq_id, context + nodes)
    try:
        yield seqs, context
    finally:
        for seq in seqs:
            cache.free(seq.seq_id)


@torch.inference_mode()
def rehearse_level(
    forward: Callable[[Sequence[Feed]], torch.Tensor],
    cache: PagedCache,
    batch_size: int,
    max_positions: int,
    generator: torch.Generator | None,
    policy: Policy,
) -> None:
    """One level of each sequence's tree: the forward over its nodes, the choice, the growth."""
    width = min(policy.max_expanded(2), max_positions // 2, cache.block_size)
    with stand_ins(cache, batch_size, max_positions, max(width, 1)) as (seqs, context):
        trees = [policy.start(Slice(seq, 1, 2), cache.device) for seq in seqs]
        made_up = torch.zeros(1, trees[0].width, device=cache.device)
        if not all([tree.extend(made_up.long(), made_up) for tree in trees]):
            # Trees of one level: their only pass is over the committed token.
            logits = forward([Feed(seq.seq_id, context, (0,)) for seq in seqs])
            draft(logits, Rows(tuple(seqs), (0,) * len(seqs)), 1, generator)
            return
        logits = forward([level_feed(tree, context) for tree in trees])
        found = candidates(trees, [len(tree.fresh) for tree in trees], logits, generator)
        for tree, part in zip(trees, found, strict=True):
            tree.extend(*part)
            tree.finish()
