"""Self-speculation: the target drafts for itself, with fewer layers or in fewer bits.

Draft & Verify (Zhang et al. 2023, arXiv 2309.08168) skips a fixed set of layers; early exit runs
the first n. A pass in 4 bits costs about a quarter of one in 16 bits, because reading weights
limits small batches (QuantSpec, Tiwari et al. 2025, arXiv 2502.10424; ML-SpecQD, Georganas et al.
2025, arXiv 2503.13565).

The draft is a view of the target that shares its embeddings, norms and KV cache. It attends to the
target's keys and values of committed tokens. It writes its own keys and values to slots that the
verification forward of the same step overwrites::

    target's cache   | committed, never written | pending | nodes that the view runs ... |
    same step, later |                          | pending | nodes of the tree |
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.core.batch import Commit, ModelOutput, Slice, Span
from paceline.core.sequence import PerSequence, SequenceView
from paceline.draft.spec import (
    DraftInfo,
    DraftSpec,
    LoadContext,
    PreparedDraft,
    Target,
    TreeSpec,
    option,
)
from paceline.draft.trees.grow import GrowingTree
from paceline.draft.trees.levels import GrowthSettings, LevelDrafter
from paceline.errors import ConfigError
from paceline.model.backends.base import GrownTree, TreeGrower
from paceline.model.copies import layer_view, quantised_copy
from paceline.model.paged.blocks import OutOfBlocksError
from paceline.model.precision import usual_bits
from paceline.model.quantised.weights import BITS
from paceline.model.target import CausalModel

# A chain ends where its path is accepted with less than this chance: another pass, which costs a
# quarter of a step, then no longer pays (docs/contributing/decisions.md).
MIN_LEVEL_PROB = 0.5
# The same limit if the target's layers are offloaded and the view's are not.
MIN_LEVEL_PROB_OFFLOADED = 0.2
# With more pending tokens (the end of a prompt) the view would run them all for a single draft.
_MAX_PENDING = 16
_LARGE_LOGIT = 100.0  # of the made-up token; all other logits are 0
_PARTS = 4  # parts of the vocabulary whose tokens are counted separately
_COUNTED = 256  # last tokens of a prompt that are counted
_MIN_COLUMNS = 8192  # a smaller head costs little compared with the layers
_MISS_COST = 3.0  # cost, in passes, of a token that the draft cannot propose


@dataclass(frozen=True, kw_only=True)
class OwnLayers(TreeSpec):
    """The target drafts with some of its layers."""

    @abstractmethod
    def kept(self, target: Target) -> Sequence[int]:
        """The layers that draft. Raises ConfigError."""

    def prepare(self, loading: LoadContext) -> PreparedDraft:
        return prepared_view(self, layer_view(loading.target, self.kept(loading.target)))

    def examine(self, target: Target, read: Any = None) -> DraftInfo:
        count, total = len(self.kept(target)), target.num_layers
        text = f"{self.kind} drafts with {count} of the target's {total} layers"
        return self.report("draft-own-layers", text)


@dataclass(frozen=True, kw_only=True)
class EarlyExit(OwnLayers):
    """The target's first ``layers`` layers (by default a third), its final norm and its head."""

    kind = "early_exit"
    examples = ("early_exit:branching=3x2,layers=1",)

    layers: int | None = None

    def kept(self, target: Target) -> Sequence[int]:
        total = target.num_layers
        layers = max(1, round(total / 3)) if self.layers is None else self.layers
        if not 0 < layers < total:
            problem = f"layers={layers}, but the target has {total}"
            raise self.refuse(f"{problem}; use at least 1 and fewer than all")
        return range(layers)


@dataclass(frozen=True, kw_only=True)
class LayerSkip(OwnLayers):
    """The target without the layers ``skip``, else without the share ``ratio``, evenly spread."""

    kind = "layer_skip"
    tune_tries = "real"
    examples = ("layer_skip:skip=0", "layer_skip:nodes=9,ratio=0.3")

    skip: tuple[int, ...] | None = option(None, like="2x3x8 (layers of the target)")
    ratio: float = option(0.45, above=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.skip is not None and "ratio" in self.changed_options():
            raise self.refuse("skip fixes the set; leave out ratio")

    def kept(self, target: Target) -> Sequence[int]:
        skipped = self._skipped(target.num_layers)
        return [layer for layer in range(target.num_layers) if layer not in skipped]

    def _skipped(self, total: int) -> tuple[int, ...]:
        if self.skip is not None:
            if not set(self.skip) < set(range(total)):
                raise self.refuse(
                    f"skip names some of the target's layers 0 to {total - 1}, not all"
                )
            return self.skip
        candidates = skippable(total)
        if not candidates:
            raise self.refuse("the target has one layer, which it needs")
        return spread(candidates, min(len(candidates), max(1, round(self.ratio * total))))


def spread(candidates: Sequence[int], count: int) -> tuple[int, ...]:
    """``count`` of the candidates, evenly spread."""
    step = len(candidates) / count
    return tuple(candidates[int((i + 0.5) * step)] for i in range(count))


def skippable(num_layers: int) -> tuple[int, ...]:
    """Layers that may be skipped: not the first and the last, if there are others."""
    return tuple(range(1, num_layers - 1)) or tuple(range(1, num_layers))


def prepared_view(spec: TreeSpec, view: CausalModel, stop: float = MIN_LEVEL_PROB) -> PreparedDraft:
    return PreparedDraft(lambda c: SelfDrafter(view, spec.growth_settings(c, c.cache, stop)))


class FrequentTokens:
    """Decides how many of the head's first columns a draft computes. Without the columns of rare
    tokens a pass costs less.

    FR-Spec (Zhao et al. 2025, arXiv 2502.14856) ranks the vocabulary by frequency. Byte-pair ids
    are roughly in that order already, the order of merges (1.3 % of SmolLM2's output has ids in the
    upper half). The tokens of each sequence are counted.
    """

    def __init__(self, vocab: int, share: float) -> None:
        """``share``: the head's share of the bytes that a pass reads."""
        self._vocab, self._share = vocab, share
        self._size = -(-vocab // _PARTS // 32) * 32
        self._counts: PerSequence[list[int]] = PerSequence()

    def columns(self, seqs: Sequence[SequenceView]) -> int:
        """The cheapest number of columns for a draft of all these sequences."""
        if self._size < _MIN_COLUMNS / 2:
            return self._vocab
        known = [self._counts.get_or_make(seq, self._begin) for seq in seqs]
        counts = [sum(parts) for parts in zip(*known, strict=True)]
        total = sum(counts)
        costs = {
            parts: self._share * parts / _PARTS + _MISS_COST * sum(counts[parts:]) / total
            for parts in range(1, _PARTS + 1)
        }
        return min(self._vocab, self._size * min(costs, key=lambda parts: costs[parts]))

    def learn(self, seq_id: int, tokens: Iterable[int]) -> None:
        """Count a sequence's new tokens."""
        if seq_id in self._counts:
            self._add(self._counts[seq_id], tokens)

    def forget(self, seq_id: int) -> None:
        self._counts.pop(seq_id, None)

    def _begin(self, seq: SequenceView) -> list[int]:
        return self._add([0] * _PARTS, seq.tokens[-_COUNTED:])

    def _add(self, counts: list[int], tokens: Iterable[int]) -> list[int]:
        for token in tokens:
            counts[min(token // self._size, _PARTS - 1)] += 1
        return counts


class SelfDrafter(LevelDrafter):
    """Drafts with a view of the target, in the target's ``cache``."""

    runs_adapters = True

    def __init__(self, view: CausalModel, settings: GrowthSettings) -> None:
        super().__init__(settings, view.max_positions)
        self.view = view
        self._frequent = FrequentTokens(view.vocab_size, view.backend.head_share)

    @property
    def runs_torch(self) -> bool:
        return self.view.backend.runs_torch

    @property
    def tree_grower(self) -> TreeGrower | None:
        return self.view.backend.tree_grower

    def _context_span(self, item: Slice) -> Span | None:
        """The pending tokens, if the cache has room for all expanded nodes. The step's commit frees
        the slots of nodes that are not in the tree."""
        seq, length = item.seq, item.draft_length
        if not item.decodes or item.scheduled > _MAX_PENDING or not self._policy.depth(length):
            return None
        try:
            nodes = self._policy.max_expanded(length)
            self.cache.reserve(seq.seq_id, len(seq.tokens) + nodes, nodes)
        except OutOfBlocksError:
            return None
        return Span.of(seq.seq_id, seq.cached, seq.pending, adapter=seq.adapter)

    def _run_model(self, spans: Sequence[Span], trees: Sequence[GrowingTree]) -> torch.Tensor:
        return self.view(self.cache.batch_of(spans), self.cache).logits

    def _grow_trees(self, trees: Sequence[GrowingTree], spans: Sequence[Span]) -> list[GrownTree]:
        """Run the spans and grow the trees in the same call if all trees allow it."""
        if self.tree_grower is not None and all(tree.growth_size() for tree in trees):
            first = self.cache.batch_of(spans)
            done = self._grow_in_one_call(trees, self._warm_up_logits(trees), first)
            if done is not None:
                return done
        return super()._grow_trees(trees, spans)

    def _warm_up_logits(self, trees: Sequence[GrowingTree]) -> torch.Tensor:
        columns = self._frequent.columns([tree.item.seq for tree in trees])
        view = self.view
        logits = torch.zeros(len(trees), columns, dtype=view.dtype, device=view.device)
        logits[:, 0] = _LARGE_LOGIT
        return logits

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        super().observe(commits, out)
        for commit in commits:
            self._frequent.learn(commit.seq_id, commit.tokens)

    def forget(self, seq_id: int) -> None:
        super().forget(seq_id)
        self._frequent.forget(seq_id)


@dataclass(frozen=True)
class QuantizedDraft(TreeSpec):
    """The target's weights rounded to ``quantize`` "int4" or "int8" when it is loaded."""

    kind = "quantized"
    tune_tries = "real"
    max_useful_length = 16
    acceptance = (0.88, 0.9)  # of a model in 16 bits; 0.98 if it was trained or released in 4 bits
    examples = ("quantized:int4", "quantized:int8,nodes=6,width=3")
    default_draft_length = 12  # chains end earlier by themselves

    quantize: str = option("int4", choices=tuple(BITS))

    def precisions(self) -> dict[str, DraftSpec]:
        return {"int8": replace(self, quantize="int8")} if self.quantize == "int4" else {}

    def prepare(self, loading: LoadContext) -> PreparedDraft:
        target = loading.target
        if target.ranks is not None:
            raise ConfigError(
                f"draft '{self}' is made of all the target's weights, and these are not all here "
                f"({target.backend_refusal}); use another drafter"
            )
        bits = usual_bits(target.hf)
        if 0 < bits <= BITS[self.quantize]:
            raise ConfigError(
                f"draft '{self}': most of {target.name} is held in {bits} bits already, so this "
                "draft would cost what the target costs; leave it out, or use another drafter"
            )
        view = quantised_copy(target, self.quantize)
        stop = MIN_LEVEL_PROB if target.offload is None else MIN_LEVEL_PROB_OFFLOADED
        return prepared_view(self, view, stop)

    def examine(self, target: Target, read: Any = None) -> DraftInfo:
        text = f"drafts with the target itself in {self.quantize}, in the target's cache"
        return replace(self.report("draft-own-weights", text), copy_precision=self.quantize)
