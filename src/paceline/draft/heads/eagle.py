"""EAGLE drafters: a one-layer head continues the target's own features.

EAGLE (Li et al. 2024, arXiv 2401.15077), EAGLE-2 (2406.16858: dynamic trees over the same
weights) and EAGLE-3 (2503.01840: three fused layers, its own vocabulary). The differences are in
the head and in the policy; this loop serves all. The head has a paged cache of its own, whose row
for position t holds the target's feature there and the token after it::

    position            0    1    2   ...  n-2   n-1
    committed token     x0   x1   x2        .    x_last      its feature is not known yet
    row                (f0,x1) (f1,x2) ... (f_n-2, x_last) -> logits of the first drafted token
    drafted rows       (h, y1) (h', y2) ...   h: the head's own output in the place of a feature

Drafted rows are never kept: once a token is accepted its true feature takes their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice, Span
from paceline.core.sequence import SequenceView
from paceline.core.transfer import to_device
from paceline.core.tree import TokenTree
from paceline.draft.base import Drafter
from paceline.draft.heads.eagle_format import FILES, build_eagle, load_eagle, said_layers
from paceline.draft.heads.eagle_head import default_feature_layers
from paceline.draft.heads.eagle_state import HeadState, alone
from paceline.draft.spec import (
    DraftContext,
    Examined,
    Loading,
    Note,
    Prepared,
    Target,
    TreeSpec,
    option,
    reduced,
)
from paceline.draft.trees.grow import Growing, level_span
from paceline.draft.trees.levels import LevelDrafter
from paceline.draft.trees.narrow import Logits, Narrow
from paceline.draft.trees.policy import Policy
from paceline.model.backends.growing import Growth
from paceline.model.backends.heads import EagleStep
from paceline.model.paged.blocks import OutOfBlocksError
from paceline.model.paged.cache import PagedCache, bytes_per_token


@dataclass
class _Draft:
    """A tree that grows, and the head's outputs at the newest rows computed for it, ``[rows,
    H]``."""

    base: int
    outputs: torch.Tensor | None = None


@dataclass(frozen=True)
class Eagle(TreeSpec):
    """An EAGLE head in a folder, of a built-in or a hub name; chains.

    ``layers``: layers of the target whose inputs it reads, in the place of its config's.
    """

    kind = "eagle"
    page = "eagle.md"
    holds = "head"
    weights = "eagle"
    weight_files = FILES
    examples: ClassVar[tuple[str, ...]] = ("eagle:{eagle},branching=4x2",)
    version: ClassVar[int] = 1
    dynamic: ClassVar[bool] = False

    path: str = option(needs="a head")
    _: KW_ONLY
    layers: tuple[int, ...] | None = option(None, like="2x16x29 (layers of the target)")

    def prepare(self, loading: Loading) -> Prepared:
        target = loading.target
        head = load_eagle(self.path, target, self.version, self.layers, target.embedding("output"))
        head = head.to(target.device, target.dtype).eval().requires_grad_(False)
        step = target.backend.eagle(head, target)

        def build(context: DraftContext) -> Drafter:
            policy = self.policy(context.tree_nodes() if self.dynamic else 0)
            cache = context.new_cache([head.cache_shape], target.dtype)
            return EagleDrafter(step, cache, policy, context.generator, self.kind)

        kept = len(head.config.feature_layers) * target.hidden_size * target.dtype.itemsize
        cached = bytes_per_token([head.cache_shape], target.dtype)
        return Prepared(build, cached, feature_bytes=kept)

    def shape(self) -> str | None:
        return super().shape() or ("tree" if self.kind == "eagle2" else None)

    def examine(self, target: Target, read: Any = None) -> Examined:
        head, _ = build_eagle(read, target, self.version, self.layers)
        config, size = head.config, sum(weight.numel() for weight in head.parameters())
        ids, usual = config.feature_layers, default_feature_layers(3, target.num_layers)
        reads = f"inputs of layers {list(ids)}" if self.version == 3 else "the last output"
        text = f"EAGLE-{self.version} head of {size / 1e6:.1f}M parameters, reads {reads}"
        notes: list[Note] = [("head-fits", text, None)]
        if self.layers is None and self.version == 3:
            shifted = [tuple(layer + shift for layer in usual) for shift in (-1, 1)]
            if not said_layers(read.config):
                notes.append(("head-layers-assumed", f"layers {list(usual)} are taken", None))
            elif ids in shifted:
                right = replace(self, layers=usual)
                text = f"layers {list(ids)}, one off from the usual {list(usual)}"
                cure = f"Try --draft {right} and compare with --run."
                notes.append(("head-layers-shifted", text, cure))
        notes += reduced(config.draft_vocab_size, target)
        if config.max_positions < target.max_positions:
            text = f"the head has {config.max_positions:,} positions, the target "
            notes.append(("head-context-short", f"{text}{target.max_positions:,}", None))
        features = len(ids) * target.hidden_size
        return Examined(tuple(notes), size, 2 * config.kv_heads * config.head_dim, features)


@dataclass(frozen=True)
class Eagle2(Eagle):
    """The same head with dynamic trees."""

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


class EagleDrafter(LevelDrafter):
    """Drafts with an EAGLE head."""

    reads = True  # what came in while it did not draft
    follows = True  # prompts, chunk by chunk

    def __init__(
        self,
        step: EagleStep,
        cache: PagedCache,
        policy: Policy,
        generator: torch.Generator | None,
        name: str = "eagle3",
    ) -> None:
        self.head = step.head
        super().__init__(name, cache, policy, generator, self.head.config.max_positions)
        self.features = self.head.config.feature_layers
        self._step = step
        self._reduced = self.head.config.draft_vocab_size < self.head.config.vocab_size
        # A static level takes so many candidates, whatever the head knows.
        self._fits = 1 + max(policy.shape.ranks) <= self.head.config.draft_vocab_size
        self._states: dict[int, HeadState] = {}
        self._drafts: dict[int, _Draft] = {}

    # -- proposing ---------------------------------------------------------------------------

    def propose(self, plan: Plan) -> list[TokenTree]:
        trees = super().propose(plan)
        for state in self._states.values():
            state.settle()
        self._drafts.clear()
        return trees

    def _first(self, spans: Sequence[Span]) -> Logits:
        """Run the rows whose features have come in."""
        inputs = [self._states[span.seq_id].take() for span in spans]
        joined = torch.cat(inputs) if len(inputs) > 1 else inputs[0]
        outputs, logits = self._run(spans, joined, fused=False)
        drafting = [span for span in spans if span.wants_logits]
        for span in drafting:
            self._drafts[span.seq_id] = _Draft(span.context + span.pending)
        if drafting:
            self._hand_out([span.seq_id for span in drafting], outputs, [1] * len(drafting))
        return logits

    def _span(self, item: Slice) -> Span | None:
        """The rows whose features have come in; None if there is nothing to do."""
        seq = item.seq
        if not seq.params.may_draft:
            return None
        state = self._states.get(seq.seq_id)
        if state is None:
            state = self._states[seq.seq_id] = HeadState(seq.cached)
        if seq.seq_id not in self.cache:
            self._admit(seq, state)
        known = state.end == len(seq.tokens) - 1  # all but the last token's
        drafts = item.decodes and item.draft_length > 0 and known
        # A prompt is followed chunk by chunk; a plain step is caught up on later.
        if not state.count or not (drafts or not item.decodes):
            return None
        context = len(state.rows)
        end = context + state.count
        try:
            levels = self._policy.max_expanded(item.draft_length) if drafts else 0
            self.cache.reserve(seq.seq_id, end + levels)
        except OutOfBlocksError:
            self._drop(seq.seq_id)
            return None
        tokens = seq.tokens[state.start + 1 : state.end + 1]
        state.rows += _row_keys(seq.tokens, state.start, tokens)
        return Span.of(seq.seq_id, context, tokens, wants_logits=drafts)

    def _admit(self, seq: SequenceView, state: HeadState) -> None:
        """Start the cache of a sequence, from rows of an earlier one that began alike."""
        keys = _row_keys(seq.tokens, 0, seq.tokens[1:])
        shared = self.cache.admit(seq.seq_id, keys)
        state.rows = keys[:shared]
        if shared > state.start:
            known, position = state.waiting, state.start
            state.start, state.waiting, state.count = shared, [], 0
            for features in known:
                state.add(max(position, shared), features[max(0, shared - position) :])
                position += len(features)

    def _run(
        self, spans: Sequence[Span], inputs: torch.Tensor, fused: bool
    ) -> tuple[torch.Tensor, Logits]:
        """One pass of the head; its outputs ``[R, H]`` and logits at the rows whose logits are
        wanted."""
        outputs, logits = self._step(self.cache.batch_of(spans), self.cache, inputs, fused)
        if not len(outputs) or not self._reduced:
            return outputs, logits
        return outputs, self._narrow(logits) if self._fits else self.head.expand(logits)

    def _narrow(self, logits: torch.Tensor) -> Narrow:
        return Narrow(logits, self.head.draft_ids, self.head.config.vocab_size)

    def _logits(self, spans: Sequence[Span]) -> Logits:
        """One pass over made-up features, as start-up times it."""
        rows = sum(len(span.parents) - span.first_new or 1 for span in spans)
        size, like = self.head.config.hidden_size, self.cache.kv(0)[0]
        return self._run(spans, like.new_zeros(rows, size), fused=True)[1]

    @property
    def growth(self) -> Growth | None:
        return self._step.growth if self._fits or not self._reduced else None

    def _made_up(self, seqs: Sequence[SequenceView]) -> Logits | None:
        config, like = self.head.config, self.cache.kv(0)[0]
        if self._step.growth is None:
            return None
        for seq in seqs:
            self._drafts[seq.seq_id] = _Draft(0, like.new_zeros(1, config.hidden_size))
        logits = like.new_zeros(len(seqs), config.draft_vocab_size)
        return self._narrow(logits) if self._reduced else logits

    def _outputs(self, ids: Sequence[int]) -> torch.Tensor:
        outputs = [self._drafts[seq_id].outputs for seq_id in ids]
        return torch.cat([output for output in outputs if output is not None])

    def _base(self, item: Slice) -> int:
        return self._drafts[item.seq.seq_id].base

    def _hand_out(self, ids: Sequence[int], outputs: torch.Tensor, counts: Sequence[int]) -> None:
        for seq_id, part in zip(ids, torch.split(outputs, list(counts)), strict=True):
            self._drafts[seq_id].outputs = part

    def _level(self, trees: list[Growing]) -> Logits:
        """Run the newest nodes of some trees, each with its parent's output for a feature."""
        spans, inputs, ids, counts = [], [], [], []
        for tree in trees:
            seq_id = tree.item.seq.seq_id
            state = self._drafts[seq_id]
            assert state.outputs is not None
            span = level_span(tree, state.base)
            above = tree.above
            inputs.append(state.outputs if above is None else state.outputs.index_select(0, above))
            spans.append(span)
            ids.append(seq_id)
            counts.append(len(tree.fresh))
        joined = torch.cat(inputs) if len(inputs) > 1 else inputs[0]
        outputs, logits = self._run(spans, joined, fused=True)
        self._hand_out(ids, outputs, counts)
        return logits

    # -- observing ---------------------------------------------------------------------------

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """Note the features of what was committed; drafted rows are given back.

        Of sequences for which it was never asked to draft (those of other drafters) none are kept.
        """
        known = [commit for commit in commits if commit.seq_id in self._states]
        if not known:
            return
        rows = [_rows(commit) for commit in known]
        kept = self._joined(out.features, [row for commit_rows in rows for row in commit_rows])
        parts = torch.split(kept, [len(commit_rows) for commit_rows in rows])
        for commit, features in zip(known, parts, strict=True):
            state = self._states[commit.seq_id]
            state.add(commit.position, features)
            if commit.seq_id in self.cache:
                self.cache.commit(commit.seq_id, state.rows, len(state.rows))

    def _joined(self, features: Mapping[int, torch.Tensor], rows: list[int]) -> torch.Tensor:
        """Some rows ``[n, k * hidden]`` of a step's features, in memory of their own."""
        wanted = [features[layer] for layer in self.features]
        first, after = rows[0], rows[-1] + 1
        if rows == list(range(first, after)):
            wanted = [layer[first:after] for layer in wanted]
        else:
            index = to_device(rows, wanted[0].device)
            wanted = [layer.index_select(0, index) for layer in wanted]
        return torch.cat(wanted, -1) if len(wanted) > 1 else alone(wanted[0])

    def held_bytes(self) -> int:
        """Memory of all features that wait to be computed."""
        storages = [t.untyped_storage() for s in self._states.values() for t in s.waiting]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def forget(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)
        self.cache.free(seq_id)

    def _drop(self, seq_id: int) -> None:
        """Out of blocks: give up this sequence's context; it goes on with what comes in later."""
        state = self._states[seq_id]
        self.cache.free(seq_id)
        self.cache.admit(seq_id, ())
        self._states[seq_id] = HeadState(state.end)


def _row_keys(tokens: Sequence[int], start: int, of_rows: Sequence[int]) -> list[int]:
    """What tells rows apart when prefixes are shared: each row's token, the first also by x0."""
    keys = list(of_rows)
    if start == 0 and keys:
        keys[0] = (keys[0] * 1_000_003 + tokens[0] + 1) & 0x7FFFFFFF
    return keys


def _rows(commit: Commit) -> list[int]:
    """Rows of a step's features that belong to the tokens scheduled and to the accepted nodes."""
    nodes = commit.row + commit.scheduled
    return [*range(commit.row, nodes), *(nodes + node for node in commit.path)]
