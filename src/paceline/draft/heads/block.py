"""Block drafters: all tokens of a draft by one pass of a few layers (block_head.py).

Their cache has the keys and values of the target's fused features for all tokens but the last,
and behind them those of the block under way, which the next block overwrites. Chains and trees
grow from the block's logits without further passes.

DSpark's tokens depend on each other: each one's logits get a bias that follows from the token
drafted before it (``BlockHead.bias``). Its confidence head says, before a token is drawn, how
likely it is accepted if all before it were: chains end where the product falls below
``STOP_BELOW``, and the controller learns from each how long it was. Where a chain ends depends on
no token that is drawn there, so it stays lossless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch

from paceline.core.batch import Span
from paceline.core.transfer import to_device
from paceline.core.tree import is_chain
from paceline.draft.base import Drafter
from paceline.draft.heads.block_head import load_block, usual_layers
from paceline.draft.heads.features import FeatureDrafter, HeadSpec, on_features
from paceline.draft.spec import DraftContext, Examined, Loading, Prepared, Target, option
from paceline.draft.trees.grow import Growing, Logits
from paceline.draft.trees.levels import Levels
from paceline.draft.trees.one_pass import OnePassDrafter
from paceline.model.backends.base import BlockStep, GrownTree
from paceline.model.paged.cache import PagedCache


@dataclass(frozen=True)
class BlockSpec(HeadSpec):
    """A block drafter."""

    page = "block.md"

    def drafter(self, step: BlockStep, levels: Levels) -> BlockDrafter:
        return BlockDrafter(step, levels)

    def prepare(self, loading: Loading) -> Prepared:
        target = loading.target
        head = load_block(self.path, target, self.kind, self.feature_layers)
        head = head.to(target.device, target.dtype).eval().requires_grad_(False)
        step, config = target.backend.block(head, target), head.config

        def make(context: DraftContext, cache: PagedCache) -> Drafter:
            levels = self.levels(context, cache)
            most = replace(levels.policy, levels=config.drafts)
            return self.drafter(step, levels._replace(policy=most))

        return on_features(target, config.cache_shapes, len(config.feature_layers), make)

    def examine(self, target: Target, read: Any = None) -> Examined:
        head = load_block(read, target, self.kind, self.feature_layers)
        config, size = head.config, sum(weight.numel() for weight in head.parameters())
        text = (
            f"{self.kind} of {size / 1e6:.1f}M parameters in {config.layers} layers, drafts "
            f"{config.drafts} tokens, reads inputs of layers {list(config.feature_layers)}"
        )
        usual = usual_layers(target.num_layers, len(config.feature_layers))
        notes = self.shifted(config.feature_layers, usual)
        return self.examined(text, config, size, target, notes)


@dataclass(frozen=True)
class DFlash(BlockSpec):
    """A DFlash head (arXiv 2602.06036): a block's tokens side by side, as a step of diffusion."""

    kind = "dflash"
    weights = "dflash"
    examples: ClassVar[tuple[str, ...]] = ("dflash:{dflash}", "dflash:{dflash},nodes=12")


class _Block(NamedTuple):
    """What a pass says about one sequence: ``outputs [drafts, H]``, ``logits [drafts, columns]``;
    ``last``: int64 ``[1]``, the token before the tree."""

    outputs: torch.Tensor
    logits: torch.Tensor
    last: torch.Tensor


class BlockDrafter(OnePassDrafter, FeatureDrafter):
    """Drafts with the head of ``step``. The last token stands in the pass, not in the text."""

    _after: dict[int, _Block]

    def __init__(self, step: BlockStep, levels: Levels) -> None:
        super().__init__(step.head.config.mask_token, step, levels)

    def _room(self, length: int) -> int:
        return int(self.head.config.block_size)

    # -- one pass ------------------------------------------------------------------------------

    def _first(self, spans: Sequence[Span], trees: Sequence[Growing]) -> Logits:
        """Store the features that have arrived, then run the blocks."""
        self._step.read(self.cache.batch_of(spans), self.cache, self._taken(spans))
        return self._drafted((), trees)

    def _drafted(self, spans: Sequence[Span], trees: Sequence[Growing]) -> Logits:
        """Run a block behind the rows of each tree's sequence: logits of its first draft."""
        config, device = self.head.config, self.cache.device
        if not trees:
            return torch.empty(0, config.columns, device=device)
        parents, seen = _within(config.block_size, config.causal, device)
        masks = [self._mask] * (config.block_size - 1)
        blocks = [
            Span.of(tree.item.seq.seq_id, tree.base, (), parents, [last, *masks], ancestors=seen)
            for tree in trees
            for last in tree.item.seq.tokens[-1:]
        ]
        outputs = self._step(self.cache.batch_of(blocks), self.cache)
        outputs = outputs.view(len(trees), config.block_size, -1)[:, -config.drafts :]
        count = max(self._policy.depth(tree.item.draft_length) for tree in trees)
        outputs = outputs[:, :count]
        logits = self._step.logits(outputs)
        lasts = to_device([tree.item.seq.tokens[-1] for tree in trees], device)
        self._after = {
            tree.item.seq.seq_id: _Block(*block)
            for tree, *block in zip(trees, outputs, logits, lasts[:, None], strict=True)
        }
        return self._level(list(trees))

    def _level(self, trees: list[Growing]) -> Logits:
        """Logits after the newest nodes."""
        parts = []
        for tree in trees:
            block, depth = self._after[tree.item.seq.seq_id], tree.depth
            before = tree.fresh if len(tree.fresh) else block.last
            bias = self.head.bias(block.outputs[depth].expand(len(before), -1), before)
            logits = block.logits[depth]
            parts.append(logits.expand(len(before), -1) if bias is None else logits + bias)
        return self._narrow(torch.cat(parts))


@lru_cache(maxsize=16)
def _within(
    size: int, causal: bool, device: torch.device
) -> tuple[tuple[int, ...], torch.Tensor | None]:
    """The rows of a block as nodes: their parents, and which see which (None: a chain's)."""
    with torch.inference_mode(False):
        seen = None if causal else torch.ones(size, size, dtype=torch.bool, device=device)
    return tuple(range(-1, size - 1)), seen


STOP_BELOW = 0.3


@dataclass(frozen=True)
class DSpark(BlockSpec):
    """A DSpark head (arXiv 2607.05147). ``stop``: chains end where fewer than this share of their
    paths would be accepted, by the confidence head; 0: never."""

    kind = "dspark"
    weights = "dspark"
    examples: ClassVar[tuple[str, ...]] = ("dspark:{dspark}", "dspark:{dspark},nodes=12")

    _: KW_ONLY
    stop: float = option(STOP_BELOW, least=0)

    def drafter(self, step: BlockStep, levels: Levels) -> BlockDrafter:
        return DSparkDrafter(step, levels._replace(stop=self.stop))


class DSparkDrafter(BlockDrafter):
    """Drafts with a head that may end chains early."""

    @property
    def ends_early(self) -> bool:
        """Chains end where fewer than ``stop`` of their paths would be accepted."""
        chains = not self._policy.nodes and is_chain(self._policy.shape.parents)
        return chains and self.stop > 0 and self.head.confidence_head is not None

    def _grow(self, trees: Sequence[Growing], spans: Sequence[Span]) -> list[GrownTree]:
        finished = super()._grow(trees, spans)
        if not (trees and self.ends_early):
            return finished
        sure = []
        for tree, done in zip(trees, finished, strict=True):
            block, tokens = self._after[tree.item.seq.seq_id], done.tree.tokens
            before = torch.cat((block.last, tokens[:-1]))
            chances = self.head.confidence(block.outputs[: len(tokens)], before).float().sigmoid()
            sure.append((chances.cumprod(0) >= self.stop).sum())
        lengths = torch.stack(sure).tolist()  # a second wait for the device, which knows the shapes
        return [_cut(done, max(1, length)) for done, length in zip(finished, lengths, strict=True)]


def _cut(done: GrownTree, length: int) -> GrownTree:
    """The first tokens of a chain."""
    tree = done.tree
    tokens, parents = tree.tokens[:length], tree.parents[:length]
    q = None if tree.q is None else tree.q[:length]
    known = None if tree.known is None else tree.known[:length]
    cut = replace(tree, tokens=tokens, parents=parents, q=q, known=known)
    return GrownTree(cut, done.slots[:length])
