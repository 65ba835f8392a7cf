"""DSpark (arXiv 2607.05147): a block whose tokens depend on each other, and which knows where it
becomes unsure.

Each token's logits get a bias that follows from the token drafted before it (``BlockHead.bias``).
The confidence head says, before a token is drawn, how likely it is accepted if all before it were:
chains end where the product falls below ``STOP_BELOW``, and the controller learns from each how
long it was. Where a chain ends depends on no token that is drawn there, so it stays lossless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

import torch

from paceline.core.batch import Span
from paceline.core.tree import is_chain
from paceline.draft.heads.block import BlockDrafter, BlockSpec
from paceline.draft.spec import option
from paceline.draft.trees.grow import Growing
from paceline.draft.trees.levels import Levels
from paceline.model.backends.base import BlockStep, GrownTree

STOP_BELOW = 0.3


@dataclass(frozen=True)
class DSpark(BlockSpec):
    """A DSpark head. ``stop``: chains end where fewer than this share of their paths would be
    accepted, by the confidence head; 0: never."""

    kind = "dspark"
    weights = "dspark"
    examples: ClassVar[tuple[str, ...]] = ("dspark:{dspark}", "dspark:{dspark},nodes=12")

    _: KW_ONLY
    stop: float = option(STOP_BELOW, least=0)

    def drafter(self, step: BlockStep, levels: Levels) -> BlockDrafter:
        return DSparkDrafter(step, levels, self.stop)


class DSparkDrafter(BlockDrafter):
    """Drafts with a head that may end chains early."""

    def __init__(self, step: BlockStep, levels: Levels, stop: float = STOP_BELOW) -> None:
        super().__init__(step, levels)
        self._stop = stop

    @property
    def ends_early(self) -> bool:
        """Chains end where fewer than ``stop`` of their paths would be accepted."""
        chains = not self._policy.nodes and is_chain(self._policy.shape.parents)
        return chains and self._stop > 0 and self.head.confidence_head is not None

    def _grow(self, trees: Sequence[Growing], spans: Sequence[Span]) -> list[GrownTree]:
        finished = super()._grow(trees, spans)
        if not (trees and self.ends_early):
            return finished
        sure = []
        for tree, done in zip(trees, finished, strict=True):
            block, tokens = self._blocks[tree.item.seq.seq_id], done.tree.tokens
            before = torch.cat((block.last, tokens[:-1]))
            chances = self.head.confidence(block.outputs[: len(tokens)], before).float().sigmoid()
            sure.append((chances.cumprod(0) >= self._stop).sum())
        lengths = torch.stack(sure).tolist()  # a second wait for the device, which knows the shapes
        return [_cut(done, max(1, length)) for done, length in zip(finished, lengths, strict=True)]


def _cut(done: GrownTree, length: int) -> GrownTree:
    """The first tokens of a chain."""
    tree = done.tree
    q = None if tree.q is None else tree.q[:length]
    cut = replace(tree, tokens=tree.tokens[:length], parents=tree.parents[:length], q=q)
    return GrownTree(cut, done.slots[:length])
