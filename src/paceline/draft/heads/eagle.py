"""EAGLE drafters: a head of one layer, rarely more, extrapolates the target's features.

EAGLE (Li et al. 2024, arXiv 2401.15077), EAGLE-2 (2406.16858: dynamic trees over the same weights)
and EAGLE-3 (2503.01840: three fused layers, a vocabulary of its own) differ only in head and tree.
The head has its own paged cache. Its row t is computed from the target's feature at position t and
the token at position t + 1::

    position            0    1    2   ...  n-2   n-1
    committed token     x0   x1   x2        .    x_last      its feature is not known yet
    row                (f0,x1) (f1,x2) ... (f_n-2, x_last) -> logits of the first drafted token
    drafted rows       (h, y1) (h', y2) ...   h: the head's own output instead of a feature

Drafted rows are not kept: rows with the true features of accepted tokens replace them. A P-EAGLE
head (arXiv 2602.01469) drafts in one pass: its drafted rows have a mask token and a learnt feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from paceline.core.batch import ModelOutput, Span
from paceline.core.sequence import SEQUENCE_IDS
from paceline.draft.base import Drafter
from paceline.draft.heads.eagle_head import default_feature_layers, load_eagle, stated_layers
from paceline.draft.heads.features import (
    FeatureDrafter,
    FeatureRow,
    HeadSpec,
    feature_drafter,
    ready_head,
)
from paceline.draft.spec import (
    NODES,
    DraftContext,
    DraftInfo,
    LoadContext,
    Note,
    PreparedDraft,
    Target,
)
from paceline.draft.trees.grow import GrowingTree, Logits, ReducedLogits
from paceline.draft.trees.levels import OnePassDrafter
from paceline.model.backends.base import EagleStep, TreeGrower
from paceline.model.paged.cache import PagedCache

# A tree ends with a level that is accepted with less than this chance. SmolLM2 in bf16 with its
# EAGLE-3 head, greedy: 1.80x at 0.1, 1.83x at 0.25; sampled: 1.32x at 0.15, 1.37x at 0.25.
MIN_LEVEL_PROB = 0.25
_GPU_NODES = 32  # of dynamic trees, by default


@dataclass(frozen=True)
class Eagle(HeadSpec):
    """An EAGLE head."""

    kind = "eagle"
    page = "eagle.md"
    weights = "eagle"
    examples: ClassVar[tuple[str, ...]] = ("eagle:{eagle},branching=4x2",)
    version: ClassVar[int] = 1
    dynamic: ClassVar[bool] = False

    def prepare(self, loading: LoadContext) -> PreparedDraft:
        target = loading.target
        head = load_eagle(
            self.path, target, self.version, self.feature_layers, target.embedding("output")
        )
        head = ready_head(head, target, self.quantize)
        step = target.backend.eagle(head, target)

        def make(context: DraftContext, cache: PagedCache) -> Drafter:
            nodes = _GPU_NODES if cache.device.type == "cuda" else NODES
            nodes = nodes if self.dynamic else 0
            given = step, self.growth_settings(context, cache, MIN_LEVEL_PROB, nodes)
            mask = head.config.mask_token
            return EagleDrafter(*given) if mask is None else ParallelEagleDrafter(mask, *given)

        config = head.config
        return feature_drafter(target, config.cache_shapes, len(config.feature_layers), make)

    def is_shaped(self) -> bool:
        return super().is_shaped() or self.kind == "eagle2"

    def examine(self, target: Target, read: Any = None) -> DraftInfo:
        head = load_eagle(read, target, self.version, self.feature_layers)
        config, size = head.config, sum(weight.numel() for weight in head.parameters())
        ids, usual = config.feature_layers, default_feature_layers(3, target.num_layers)
        reads = f"inputs of layers {list(ids)}" if self.version == 3 else "the last output"
        text = f"EAGLE-{self.version} head of {size / 1e6:.1f}M parameters, reads {reads}"
        text += "" if config.mask_token is None else ", drafts all tokens in one pass"
        notes: list[Note] = []
        if self.feature_layers is None and self.version == 3 and not stated_layers(read.config):
            notes.append(("head-layers-assumed", f"layers {list(usual)} are taken", None))
        return self.examination(text, config, size, target, notes)


@dataclass(frozen=True)
class Eagle2(Eagle):
    """An EAGLE head with dynamic trees."""

    kind = "eagle2"
    examples: ClassVar[tuple[str, ...]] = ("eagle2:{eagle},nodes=16",)
    dynamic = True


@dataclass(frozen=True)
class Eagle3(Eagle):
    """An EAGLE-3 head, which reads three layers of the target; dynamic trees."""

    kind = "eagle3"
    weights = "eagle3"
    examples: ClassVar[tuple[str, ...]] = ("eagle3:{eagle3},nodes=20,width=6",)
    version = 3
    dynamic = True


class EagleDrafter(FeatureDrafter):
    """Drafts with an EAGLE head."""

    _token_offset = 1
    _step: EagleStep

    @property
    def tree_grower(self) -> TreeGrower | None:
        return self._step.tree_grower

    def _run_model(self, spans: Sequence[Span], trees: Sequence[GrowingTree]) -> torch.Tensor:
        """Run the head over the rows of pending features."""
        return self._run(spans, trees, self._pop_features(spans), fused=False)

    def _run_frontiers(self, trees: list[GrowingTree]) -> Logits:
        """Run the frontiers of some trees. A node's feature is the head's output at its parent."""
        spans, inputs = [tree.frontier_span() for tree in trees], []
        for tree in trees:
            outputs, parent_rows = tree.outputs, tree.parent_rows
            assert outputs is not None
            inputs.append(outputs if parent_rows is None else outputs.index_select(0, parent_rows))
        return self._as_target_logits(self._run(spans, trees, torch.cat(inputs), fused=True))

    def _run(
        self, spans: Sequence[Span], trees: Sequence[GrowingTree], inputs: torch.Tensor, fused: bool
    ) -> torch.Tensor:
        """One pass of the head: logits at the trees' rows. Sets the trees' ``outputs [R, H]``."""
        outputs, logits = self._step(self.cache.batch_of(spans), self.cache, inputs, fused)
        counts = [len(tree.frontier) or 1 for tree in trees]
        for tree, part in zip(trees, torch.split(outputs, counts) if trees else (), strict=True):
            tree.outputs = part
        return logits

    @torch.inference_mode()
    def first_logits(self, tokens: Sequence[int], out: ModelOutput) -> torch.Tensor:
        """Logits ``[n - 2, vocab]`` of the first drafted token after each of a text's n tokens but
        the first and the last, from the target's features of the text; in one pass."""
        seq_id, count = next(SEQUENCE_IDS), len(tokens) - 2
        span = replace(Span.of(seq_id, 0, tokens[1:-1]), scored=count - 1)
        self.cache.admit(seq_id, (), False)
        self.cache.reserve(seq_id, count)
        inputs = torch.cat([out.features[layer][:count] for layer in self.features], -1)
        _, logits = self._step(self.cache.batch_of([span]), self.cache, inputs, fused=False)
        self.cache.free(seq_id)
        target_logits = self._as_target_logits(logits)
        return target_logits.full() if isinstance(target_logits, ReducedLogits) else target_logits

    def _warm_up_logits(self, trees: Sequence[GrowingTree]) -> Logits:
        config, like = self.head.config, self.cache.kv(0)[0]
        for tree in trees:
            tree.outputs = like.new_zeros(1, config.hidden_size)
        return self._as_target_logits(like.new_zeros(len(trees), config.columns))


class ParallelEagleDrafter(OnePassDrafter, EagleDrafter):
    """Drafts all tokens in one pass (P-EAGLE). The rows of masks have the head's learnt feature."""

    def _feature_rows(self, span: Span) -> list[FeatureRow]:
        rows, count = super()._feature_rows(span) if span.pending else [], len(span.nodes)
        learnt = self.head.mask_hidden.expand(count, -1).chunk(len(self.features), 1)
        return [*rows, *(FeatureRow(learnt, row) for row in range(count))]
