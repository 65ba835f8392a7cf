"""Block drafters: one pass of a few layers drafts all tokens (block_head.py).

Their cache holds keys and values of the target's fused features for all tokens but the last, and
then those of the current block, which the next block overwrites. Chains and trees grow from the
block's logits without further passes.

In DSpark each token's logits get a bias that depends on the token drafted before it
(``BlockHead.bias``). Its confidence head predicts, before a token is sampled, how likely the token
is accepted if all before it are. Verdicts correct the product of these chances (calibration.py),
for greedy and for sampled requests. A chain ends where it falls below ``min_level_prob``, by
default the cost of verifying one more token; the controller learns the length of each chain. As the
end does not depend on the tokens sampled there, the draft is lossless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from itertools import islice
from math import log
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from paceline.core.batch import Span
from paceline.core.transfer import to_device
from paceline.core.tree import is_chain
from paceline.draft.base import Drafter
from paceline.draft.heads.block_head import load_block
from paceline.draft.heads.features import FeatureDrafter, HeadSpec, feature_drafter, ready_head
from paceline.draft.spec import DraftContext, DraftInfo, LoadContext, PreparedDraft, Target, option
from paceline.draft.trees.grow import GrowingTree, Logits
from paceline.draft.trees.levels import GrowthSettings, OnePassDrafter
from paceline.model.backends.base import BlockStep, GrownTree
from paceline.model.paged.cache import PagedCache


@dataclass(frozen=True)
class BlockSpec(HeadSpec):
    """A block drafter."""

    page = "block.md"

    def prepare(self, loading: LoadContext, stop: float | None = 0.0) -> PreparedDraft:
        target = loading.target
        head = load_block(self.path, target, self.kind, self.feature_layers)
        head = ready_head(head, target, self.quantize)
        step, config = target.backend.block(head, target), head.config

        def make(context: DraftContext, cache: PagedCache) -> Drafter:
            least = context.min_acceptance() if stop is None else stop
            settings = self.growth_settings(context, cache, least)
            policy = replace(settings.policy, levels=config.drafts)
            return BlockDrafter(step, settings._replace(policy=policy))

        return feature_drafter(target, config.cache_shapes, len(config.feature_layers), make)

    def examine(self, target: Target, read: Any = None) -> DraftInfo:
        head = load_block(read, target, self.kind, self.feature_layers)
        config, size = head.config, sum(weight.numel() for weight in head.parameters())
        text = (
            f"{self.kind} of {size / 1e6:.1f}M parameters in {config.layers} layers, drafts "
            f"{config.drafts} tokens, reads inputs of layers {list(config.feature_layers)}"
        )
        return self.examination(text, config, size, target)


@dataclass(frozen=True)
class DFlash(BlockSpec):
    """A DFlash head (arXiv 2602.06036): drafts a block of tokens by one step of diffusion."""

    kind = "dflash"
    weights = "dflash"
    examples: ClassVar[tuple[str, ...]] = ("dflash:{dflash}", "dflash:{dflash},nodes=12")


@dataclass(frozen=True)
class DSpark(BlockSpec):
    """A DSpark head (arXiv 2607.05147). ``stop``: a chain ends where its path has a lower chance of
    acceptance than this, by the confidence head and what was accepted so far; None: the chance from
    which verifying one more token pays; 0: chains have the full length."""

    kind = "dspark"
    weights = "dspark"
    examples: ClassVar[tuple[str, ...]] = ("dspark:{dspark}", "dspark:{dspark},nodes=12")

    _: KW_ONLY
    stop: float | None = option(None, least=0)

    def prepare(self, loading: LoadContext, stop: float | None = None) -> PreparedDraft:
        return super().prepare(loading, self.stop)


class _Block(NamedTuple):
    """The result of a pass for one sequence: ``outputs [drafts, H]``, ``logits [drafts, columns]``.
    ``last``: int64 ``[1]``, the last committed token."""

    outputs: torch.Tensor
    logits: torch.Tensor
    last: torch.Tensor


class BlockDrafter(OnePassDrafter, FeatureDrafter):
    """Drafts with the head of ``step``. The block begins with the last committed token. A head with
    a confidence head may end chains early."""

    _pass_outputs: dict[int, _Block]

    def __init__(self, step: BlockStep, settings: GrowthSettings) -> None:
        super().__init__(step.head.config.mask_token, step, settings)

    def _rows_for_nodes(self, length: int) -> int:
        return int(self.head.config.block_size)

    @property
    def stops_early(self) -> bool:
        """Whether chains end where the chance of acceptance falls below ``min_level_prob``."""
        chains = not self._policy.nodes and is_chain(self._policy.shape.parents)
        return chains and self.min_level_prob > 0 and self.head.confidence_head is not None

    # -- one pass ------------------------------------------------------------------------------

    def _run_spans(self, spans: Sequence[Span], trees: Sequence[GrowingTree]) -> Logits:
        """Store keys and values of the pending features, then run the blocks."""
        self._step.write_context(self.cache.batch_of(spans), self.cache, self._pop_features(spans))
        return self._run_pass((), trees)

    def _run_pass(self, spans: Sequence[Span], trees: Sequence[GrowingTree]) -> Logits:
        """Run a block after the rows of each tree's sequence: logits of its first drafted token."""
        config, device = self.head.config, self.cache.device
        if not trees:
            return torch.empty(0, config.columns, device=device)
        parents, mask = _block_mask(config.block_size, config.causal, device)
        masks = [self._mask] * (config.block_size - 1)
        blocks = [
            Span.of(tree.item.seq.seq_id, tree.base, (), parents, [last, *masks], ancestors=mask)
            for tree in trees
            for last in tree.item.seq.tokens[-1:]
        ]
        outputs = self._step(self.cache.batch_of(blocks), self.cache)
        outputs = outputs.view(len(trees), config.block_size, -1)[:, -config.drafts :]
        count = max(self._policy.depth(tree.item.draft_length) for tree in trees)
        outputs = outputs[:, :count]
        logits = self._step.logits(outputs)
        lasts = to_device([tree.item.seq.tokens[-1] for tree in trees], device)
        self._pass_outputs = {
            tree.item.seq.seq_id: _Block(*block)
            for tree, *block in zip(trees, outputs, logits, lasts[:, None], strict=True)
        }
        return self._run_frontiers(list(trees))

    def _run_frontiers(self, trees: list[GrowingTree]) -> Logits:
        """Logits after the frontiers."""
        parts = []
        for tree in trees:
            block, depth = self._pass_outputs[tree.item.seq.seq_id], tree.depth
            before = tree.frontier if len(tree.frontier) else block.last
            bias = self.head.bias(block.outputs[depth].expand(len(before), -1), before)
            logits = block.logits[depth]
            parts.append(logits.expand(len(before), -1) if bias is None else logits + bias)
        return self._as_target_logits(torch.cat(parts))

    def _grow_trees(self, trees: Sequence[GrowingTree], spans: Sequence[Span]) -> list[GrownTree]:
        all_grown = super()._grow_trees(trees, spans)
        if not (trees and self.stops_early):
            return all_grown
        on_device = []
        for tree, grown in zip(trees, all_grown, strict=True):
            block, tokens = self._pass_outputs[tree.item.seq.seq_id], grown.tree.tokens
            before = torch.cat((block.last, tokens[:-1]))
            confidence = self.head.confidence(block.outputs[: len(tokens)], before)
            on_device.append(F.logsigmoid(confidence.float()).cumsum(0))
        scores = iter(torch.cat(on_device).tolist())  # a second wait for the device
        cut = []
        for tree, grown in zip(trees, all_grown, strict=True):
            least = log(self.min_level_prob) / self._calibrations.of(tree.item.seq.params).power
            cut.append(_cut(grown, tuple(islice(scores, len(grown.tree))), least))
        return cut


@lru_cache(maxsize=16)
def _block_mask(
    size: int, causal: bool, device: torch.device
) -> tuple[tuple[int, ...], torch.Tensor | None]:
    """The rows of a block as tree nodes: parents, and the attention mask (None: causal)."""
    with torch.inference_mode(False):
        mask = None if causal else torch.ones(size, size, dtype=torch.bool, device=device)
    return tuple(range(-1, size - 1)), mask


def _cut(grown: GrownTree, scores: tuple[float, ...], least: float) -> GrownTree:
    """The first tokens of a chain whose paths have scores of ``least`` or more; at least one."""
    tree, length = grown.tree, max(1, sum(score >= least for score in scores))
    tokens, parents = tree.tokens[:length], tree.parents[:length]
    q = None if tree.q is None else tree.q[:length]
    host_copy = None if tree.host_copy is None else tree.host_copy[:length]
    cut = replace(tree, tokens=tokens, parents=parents, q=q, host_copy=host_copy)
    return GrownTree(cut, grown.slots[:length], scores[:length])
