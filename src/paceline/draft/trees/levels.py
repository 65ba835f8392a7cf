"""The bases of drafters that run a model or head: all trees of a step grow together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from paceline.core.batch import Batch, Commit, ModelOutput, Plan, Slice, Span
from paceline.core.draws import draws_unseeded
from paceline.core.params import SamplingParams
from paceline.core.sequence import PerSequence, SequenceView
from paceline.core.tree import TokenTree, chain_parents
from paceline.draft.trees.calibration import Calibrations
from paceline.draft.trees.grow import GrowingTree, Logits, ReducedLogits, grow
from paceline.draft.trees.policy import Policy
from paceline.model.backends.base import EarlyStop, GrownTree, TreeGrower, TreeRequest
from paceline.model.paged.blocks import OutOfBlocksError
from paceline.model.paged.cache import PagedCache

_MAX_LEVELS = 64
_BLOCKS = 4  # blocks of context when warming up, about as when the target is measured


class GrowthSettings(NamedTuple):
    """How a drafter's trees grow. ``min_level_prob``: a tree ends with a level that is accepted
    with less than this chance: another pass would cost more than it gains. ``min_node_prob``: a
    dynamic tree leaves out nodes that are accepted with less than this chance: verifying them would
    cost more than they gain. 0 switches either off. ``prior`` as in ``DrafterTraits``."""

    name: str
    cache: PagedCache
    policy: Policy
    generator: torch.Generator | None
    min_level_prob: float = 0.0
    min_node_prob: float = 0.0
    prior: tuple[float, ...] = ()


class LevelDrafter(ABC):
    """Runs a draft model over ``cache``: first over the tokens that it has not seen, then over the
    frontiers of all trees, one forward per level. Or ``tree_grower`` grows whole trees in one call.
    Subclasses say what to run first (``_context_span``), and run it (``_run_model``)."""

    features: tuple[int, ...] = ()
    reads_logits = False
    runs_adapters = False  # whether the draft model runs with the request's LoRA adapter
    _follows_grammar = True  # whether chains obey a request's grammar and contain forced tokens

    def __init__(self, settings: GrowthSettings, max_positions: int) -> None:
        """``max_positions``: longest context of the draft model."""
        self.name, self.cache, self._policy, self._generator = settings[:4]
        self.min_level_prob, self._min_node_prob, self.prior = settings[4:]
        self._calibrations = Calibrations()
        self._max_positions = max_positions
        self._empty = TokenTree.empty(self.cache.device)

    def max_nodes(self, length: int) -> int:
        return self._policy.max_nodes(length)

    def passes(self, length: int) -> int:
        return self._policy.depth(length)

    def propose(self, plan: Plan) -> list[TokenTree]:
        spans = [self._context_span(item) for item in plan.slices]
        if not any(spans):  # return before the first call of torch
            return [self._empty] * len(spans)
        return self._propose(plan, spans)

    @torch.inference_mode()
    def _propose(self, plan: Plan, context_spans: Sequence[Span | None]) -> list[TokenTree]:
        """Run the slices' spans, and grow a tree for each slice whose span wants logits."""
        trees, spans = list[GrowingTree](), list[Span]()
        sequences = sum(item.decodes for item in plan.slices)
        for item, span in zip(plan.slices, context_spans, strict=True):
            if span is not None and span.wants_logits:
                base = span.context + span.pending
                follow_grammar = item.seq.constraint is not None and self.max_forced_tokens > 0
                how = self._early_stop(item.seq), follow_grammar, sequences
                trees.append(self._policy.new_tree(item, self.cache.device, base, *how))
                span = trees[-1].first_span(span)
            if span is not None:
                spans.append(span)
        proposals: dict[int, TokenTree] = {}
        for tree, grown in zip(trees, self._grow_trees(trees, spans), strict=True):
            seq = tree.item.seq
            self._calibrations.proposed(seq.seq_id, seq.params, grown)
            proposals[seq.seq_id] = self._to_proposal(tree.item, grown)
        return [proposals.get(item.seq.seq_id, self._empty) for item in plan.slices]

    def _grow_trees(self, trees: Sequence[GrowingTree], spans: Sequence[Span]) -> list[GrownTree]:
        """Run the spans, and grow the trees from the logits."""
        logits = self._run_spans(spans, trees)
        grown = self._grow_in_one_call(trees, logits)
        return grown or grow(trees, logits, self._run_frontiers, self._generator)

    def _grow_in_one_call(
        self, trees: Sequence[GrowingTree], logits: Logits, first: Batch | None = None
    ) -> list[GrownTree] | None:
        """The trees, if all of them can grow in one call; ``first`` as in ``TreeGrower``."""
        grow_trees = self.tree_grower
        sizes = [size for tree in trees if grow_trees and (size := tree.growth_size())]
        if grow_trees is None or not trees or len(sizes) < len(trees):
            return None
        wanted = []
        for tree, size in zip(trees, sizes, strict=True):
            seq, seed = tree.item.seq, None
            if tree.samples and draws_unseeded(seq.params):
                seed = int(torch.randint(1 << 62, (), generator=self._generator))
            table = self.cache.blocks_of(seq.seq_id)
            wanted.append(
                TreeRequest(
                    *(*size, tree.base, table, seq.params, len(seq.tokens)),
                    early_stop=self._early_stop(seq),
                    adapter=seq.adapter if self.runs_adapters else None,
                    draw_seed=seed,
                )
            )
        ids = logits.ids if isinstance(logits, ReducedLogits) else None
        logits = logits.logits if isinstance(logits, ReducedLogits) else logits
        outputs = [tree.outputs for tree in trees if tree.outputs is not None]
        joined = torch.cat(outputs) if outputs else None
        return grow_trees(self.cache, wanted, logits, ids, joined, first)

    def _early_stop(self, seq: SequenceView) -> EarlyStop:
        """Where the sequence's tree ends early, given what was accepted so far."""
        calibration = self._calibrations.of(seq.params)
        level = self.min_level_prob if self.stops_early else 0.0
        return EarlyStop(calibration.power, level, calibration.path_prob(self._min_node_prob))

    @property
    def stops_early(self) -> bool:
        """Whether trees end where acceptance is unlikely (by levels it would wait for a device)."""
        return self.tree_grower is not None and self.min_level_prob > 0

    def _rows_for_nodes(self, length: int) -> int:
        """The most cache rows that the nodes of a tree take while it grows."""
        return self._policy.max_expanded(length)

    @property
    def tree_grower(self) -> TreeGrower | None:
        """Grows whole trees in one call; None: trees grow level by level."""
        return None

    @property
    def shares_nodes(self) -> bool:
        """Whether the sequences that decode together share one budget of nodes."""
        return self._policy.shared

    @property
    def max_forced_tokens(self) -> int:
        """The most tokens forced by a grammar that can be part of a chain."""
        # States of recurrent layers are kept for pending tokens and nodes only.
        usable = self._follows_grammar and self._policy.chain and self.cache.states is None
        return self._policy.depth(_MAX_LEVELS) - 1 if usable else 0

    @property
    def prefers_seeds(self) -> bool:
        """Whether drafts for seeded requests are cheaper. Dynamic trees grow in one call if nothing
        is sampled. Sampled trees grow level by level over the target's whole vocabulary, which
        takes several times as long, and so does verifying them. (EAGLE-3 on SmolLM2, bf16,
        temperature 1: 1.11x of plain decoding with seeds, 1.06x without.)"""
        return self._policy.nodes > 0 and self.tree_grower is not None

    @abstractmethod
    def _context_span(self, item: Slice) -> Span | None:
        """The tokens to run before the first level; None if there is nothing to run."""

    def _run_model(self, spans: Sequence[Span], trees: Sequence[GrowingTree]) -> torch.Tensor:
        """Run the draft model over the spans: its logits ``[R, columns]`` after the rows that want
        them, the trees'."""
        raise NotImplementedError

    def _run_spans(self, spans: Sequence[Span], trees: Sequence[GrowingTree]) -> Logits:
        return self._as_target_logits(self._run_model(spans, trees))

    def _run_frontiers(self, trees: list[GrowingTree]) -> Logits:
        """Run the frontiers of some trees: logits after each node."""
        adapters = [tree.item.seq.adapter if self.runs_adapters else None for tree in trees]
        pairs = zip(trees, adapters, strict=True)
        return self._run_spans([tree.frontier_span(adapter=a) for tree, a in pairs], trees)

    def _as_target_logits(self, logits: torch.Tensor) -> Logits:
        """Logits ``[R, columns]`` of the draft model as logits of the target's tokens."""
        return logits

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """Learn how far the drafts were right."""
        self._calibrations.observe(commits)

    def forget(self, seq_id: int) -> None:
        """Drop all state of a sequence."""
        self._calibrations.forget(seq_id)

    @abstractmethod
    def _warm_up_logits(self, trees: Sequence[GrowingTree]) -> Logits:
        """Logits for the made-up trees of ``warm_up``; sets what else of a tree growth reads."""

    def _to_proposal(self, item: Slice, grown: GrownTree) -> TokenTree:
        """The tree to propose."""
        return grown.tree

    @torch.inference_mode()
    def warm_up(self, batch_size: int) -> None:
        """Grow one level of made-up trees, as many as the cache has room for."""
        policy, cache = self._policy, self.cache
        nodes = policy.width if policy.nodes else policy.max_expanded(2)
        if policy.depth(2) < 2 or nodes > min(cache.block_size, self._max_positions // 2):
            policy, nodes = Policy(), 1
        with self._warm_up_trees(batch_size, nodes, policy) as trees:
            if self._grow_in_one_call(trees, self._warm_up_logits(trees)) is None:
                made_up = torch.zeros(1, trees[0].width, device=cache.device)
                for tree in trees:
                    tree.extend(made_up.long(), made_up)
                grow(trees, self._run_frontiers(trees), self._run_frontiers, self._generator)

    @contextmanager
    def _warm_up_trees(
        self, batch_size: int, nodes: int, policy: Policy
    ) -> Iterator[list[GrowingTree]]:
        """Trees of made-up sequences whose cache has room for ``nodes`` nodes after the context."""
        cache, size = self.cache, self.cache.block_size
        blocks = max(-(-(1 + nodes) // size), min(_BLOCKS, self._max_positions // size))
        blocks = max(1, min(blocks, cache.num_blocks))
        count = max(1, min(batch_size, cache.num_blocks // blocks))
        context = max(1, min(blocks * size, self._max_positions) - nodes)
        seqs = [SequenceView(seq_id, [0], 1, SamplingParams()) for seq_id in range(-count, 0)]
        try:
            for seq in seqs:
                cache.admit(seq.seq_id, seq.tokens)
                cache.reserve(seq.seq_id, context + nodes)
            yield [policy.new_tree(Slice(seq, 1, 2), cache.device, context) for seq in seqs]
        finally:
            for seq in seqs:
                cache.free(seq.seq_id)


@dataclass
class CachedRows:
    """The rows of a sequence in a drafter's own KV cache. ``keys``: what identifies each row when
    prefixes are shared; the first ``cached`` have rows. ``uncommitted``: rows were added in the
    step in progress."""

    keys: list[int] = field(default_factory=list)
    cached: int = 0
    uncommitted: bool = False


_Rows = TypeVar("_Rows", bound=CachedRows)


class CachingDrafter(LevelDrafter, Generic[_Rows]):
    """Drafts over a KV cache of its own, which follows the text of every sequence."""

    needs_prefill = True  # it must run over the text before it can draft

    def __init__(self, settings: GrowthSettings, max_positions: int) -> None:
        super().__init__(settings, max_positions)
        self._rows: PerSequence[_Rows] = PerSequence()

    def _next_rows(
        self, seq_id: int, tokens: Sequence[int], nodes: int, wants_logits: bool
    ) -> Span | None:
        """The sequence's next rows, for ``tokens``, with room for ``nodes`` drafted nodes behind
        them. If the cache has no room, all its rows are freed and there are none."""
        rows = self._rows[seq_id]
        first, end = rows.cached, rows.cached + len(tokens)
        try:
            self.cache.reserve(seq_id, end + nodes)
        except OutOfBlocksError:
            self.cache.free(seq_id)
            rows.cached = 0
            return None
        rows.cached, rows.uncommitted = end, True
        return Span.of(seq_id, first, tokens, wants_logits=wants_logits)

    def _commit_rows(self, seq_id: int) -> None:
        """Keep the sequence's rows, and free those of drafted nodes behind them."""
        rows = self._rows[seq_id]
        if rows.uncommitted:
            self.cache.commit(seq_id, rows.keys, rows.cached)
            rows.uncommitted = False

    def forget(self, seq_id: int) -> None:
        super().forget(seq_id)
        self._rows.pop(seq_id, None)
        self.cache.free(seq_id)


class OnePassDrafter(LevelDrafter):
    """Drafts all its tokens in one pass (PARD, arXiv 2504.18583; P-EAGLE, arXiv 2602.01469).

    Mask tokens follow the text. The logits after the text's last token and after each mask are
    those of the drafted tokens. The next step's text overwrites the rows of the masks. A mixin:
    list it before a level-by-level drafter, whose passes it replaces::

        rows      x_n-1    x_n      mask     mask
        drafts             x_n+1    x_n+2    x_n+3
    """

    tree_grower = None
    _follows_grammar = False

    def __init__(self, mask: int, *args: Any) -> None:
        """``mask``: the mask token. The other arguments are the level-by-level drafter's."""
        super().__init__(*args)
        self._mask = mask
        self._pass_outputs: dict[int, Any] = {}  # of this step's pass, by ``seq_id``

    def passes(self, length: int) -> int:
        return min(1, length)

    def _rows_for_nodes(self, length: int) -> int:
        return max(0, self._policy.depth(length) - 1)

    def _run_spans(self, spans: Sequence[Span], trees: Sequence[GrowingTree]) -> Logits:
        """Run the text with masks after it: logits of the first drafted token."""
        counts = {t.item.seq.seq_id: self._rows_for_nodes(t.item.draft_length) for t in trees}
        masked = [self._with_masks(span, counts.get(span.seq_id, 0)) for span in spans]
        return self._run_pass(masked, trees)

    def _with_masks(self, span: Span, count: int) -> Span:
        return replace(span, parents=chain_parents(count), nodes=[self._mask] * count)

    def _run_pass(self, spans: Sequence[Span], trees: Sequence[GrowingTree]) -> Logits:
        logits = self._run_model(spans, ())
        if not trees:
            return logits
        drafting = [span for span in spans if span.wants_logits]
        counts = [(span.pending > 0) + len(span.nodes) for span in drafting]
        parts = torch.split(logits, counts)
        ids = [tree.item.seq.seq_id for tree in trees]
        self._pass_outputs = dict(zip(ids, parts, strict=True))
        return self._run_frontiers(list(trees))

    def _run_frontiers(self, trees: list[GrowingTree]) -> Logits:
        """Logits at the depths of the trees' frontiers, counted from the pass's last row."""
        parts = []
        for tree in trees:
            depth = tree.depth - 1 - self._rows_for_nodes(tree.item.draft_length)
            parts.append(self._pass_outputs[tree.item.seq.seq_id][depth].expand(tree.rows, -1))
        return self._as_target_logits(torch.cat(parts))

    def forget(self, seq_id: int) -> None:
        self._pass_outputs.pop(seq_id, None)
        super().forget(seq_id)

    def _warm_up_logits(self, trees: Sequence[GrowingTree]) -> Logits:
        """Run masks after the rows of made-up sequences."""
        rows = 1 + self._rows_for_nodes(2)
        spans = [self._with_masks(Span.of(t.item.seq.seq_id, t.base, ()), rows) for t in trees]
        return self._run_pass(spans, trees)

    @torch.inference_mode()
    def warm_up(self, batch_size: int) -> None:
        """Run a pass over some made-up sequences, and grow their trees."""
        rows = 1 + self._rows_for_nodes(2)
        if self.cache.num_blocks * self.cache.block_size > rows:  # a smaller cache never drafts
            with self._warm_up_trees(batch_size, rows, self._policy) as trees:
                grow(trees, self._warm_up_logits(trees), self._run_frontiers, self._generator)
