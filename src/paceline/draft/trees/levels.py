"""The base of drafters that run a model: all trees grow by one forward a level."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from paceline.core.batch import Batch, Commit, ModelOutput, Plan, Slice, Span
from paceline.core.draws import draws_unseeded
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceView
from paceline.core.tree import TokenTree
from paceline.draft.trees.confidence import Confidences
from paceline.draft.trees.grow import Growing, Logits, Narrow, grow
from paceline.draft.trees.policy import Policy
from paceline.model.backends.base import Ending, GrownTree, Growth, WantedTree
from paceline.model.paged.cache import PagedCache

_DEEPEST = 64
_BLOCKS = 4  # of context when warming up, about as when the target is measured


class Levels(NamedTuple):
    """How a drafter's trees grow: its name, cache, policy and randomness.

    ``stop``: no further level is drafted where the newest is reached with less than this chance: a
    pass then no longer pays. ``least``: a dynamic tree leaves out nodes that are accepted with less
    than this chance: verifying them does not pay. 0: never.
    """

    name: str
    cache: PagedCache
    policy: Policy
    generator: torch.Generator | None
    stop: float = 0.0
    least: float = 0.0


class LevelDrafter(ABC):
    """Runs a model over ``cache``: over tokens that it has not seen, then level by level."""

    features: tuple[int, ...] = ()
    reads_logits = False
    adapts = False  # its model runs with a request's adapter
    _along = True  # its chains follow a grammar, and take in what that forces

    def __init__(self, levels: Levels, max_positions: int) -> None:
        """``max_positions``: longest context of the model."""
        self.name, self.cache, self._policy, self._generator, self.stop, self._least = levels
        self._confidences = Confidences()
        self._max_positions = max_positions
        self._empty = TokenTree.empty(self.cache.device)

    def max_nodes(self, length: int) -> int:
        return self._policy.max_nodes(length)

    def passes(self, length: int) -> int:
        return self._policy.depth(length)

    def propose(self, plan: Plan) -> list[TokenTree]:
        spans = [self._span(item) for item in plan.slices]
        if not any(spans):  # then nothing of torch is touched
            return [self._empty] * len(spans)
        return self._proposed(plan, spans)

    @torch.inference_mode()
    def _proposed(self, plan: Plan, known: Sequence[Span | None]) -> list[TokenTree]:
        """Run what each slice's span says, and grow the trees of those that draft."""
        trees, spans = list[Growing](), list[Span]()
        sequences = sum(item.decodes for item in plan.slices)
        for item, span in zip(plan.slices, known, strict=True):
            if span is not None and span.wants_logits:
                base = span.context + span.pending
                along = item.seq.constraint is not None and self.takes_forced > 0
                given = self._ending(item.seq), along, sequences
                trees.append(self._policy.start(item, self.cache.device, base, *given))
                span = trees[-1].first(span)
            if span is not None:
                spans.append(span)
        grown: dict[int, TokenTree] = {}
        for tree, done in zip(trees, self._grow(trees, spans), strict=True):
            seq = tree.item.seq
            self._confidences.proposed(seq.seq_id, seq.params, done)
            grown[seq.seq_id] = self._finish(tree.item, done)
        return [grown.get(item.seq.seq_id, self._empty) for item in plan.slices]

    def _grow(self, trees: Sequence[Growing], spans: Sequence[Span]) -> list[GrownTree]:
        """Run the spans, and grow the trees of those that want logits."""
        logits = self._first(spans, trees)
        return self._at_once(trees, logits) or grow(trees, logits, self._level, self._generator)

    def _at_once(
        self, trees: Sequence[Growing], logits: Logits, first: Batch | None = None
    ) -> list[GrownTree] | None:
        """The finished trees, if ``growth`` grows all in one call; ``first`` as in ``Growth``."""
        growth = self.growth
        sizes = [size for tree in trees if growth and (size := tree.plain_size())]
        if growth is None or not trees or len(sizes) < len(trees):
            return None
        wanted = []
        for tree, size in zip(trees, sizes, strict=True):
            seq, drawn = tree.item.seq, None
            if tree.samples and draws_unseeded(seq.params):
                drawn = int(torch.randint(1 << 62, (), generator=self._generator))
            table = self.cache.blocks_of(seq.seq_id)
            wanted.append(
                WantedTree(
                    *(*size, tree.base, table, seq.params, len(seq.tokens)),
                    ending=self._ending(seq),
                    adapter=seq.adapter if self.adapts else None,
                    drawn=drawn,
                )
            )
        ids = logits.ids if isinstance(logits, Narrow) else None
        logits = logits.logits if isinstance(logits, Narrow) else logits
        outputs = [tree.outputs for tree in trees if tree.outputs is not None]
        joined = torch.cat(outputs) if outputs else None
        return growth(self.cache, wanted, logits, ids, joined, first)

    def _ending(self, seq: SequenceView) -> Ending:
        """Where its tree ends, by what was accepted so far."""
        confidence = self._confidences.of(seq.params)
        stop = self.stop if self.ends_early else 0.0
        return Ending(confidence.power, stop, confidence.least(self._least))

    @property
    def ends_early(self) -> bool:
        """Whether drafts end where it is unsure; level by level it would wait for the device."""
        return self.growth is not None and self.stop > 0

    def _room(self, length: int) -> int:
        """Most cache rows that the nodes of a tree take while it grows."""
        return self._policy.max_expanded(length)

    @property
    def growth(self) -> Growth | None:
        """What grows whole trees in one call; None: they grow level by level."""
        return None

    @property
    def shares(self) -> bool:
        """Whether sequences that decode together share out the nodes of a tree."""
        return self._policy.shared

    @property
    def takes_forced(self) -> int:
        """So many tokens that a grammar forces become part of its chains."""
        # States of recurrent layers are kept for pending tokens and nodes alone.
        along = self._along and self._policy.chain and self.cache.states is None
        return self._policy.depth(_DEEPEST) - 1 if along else 0

    @property
    def prefers_seeds(self) -> bool:
        """Dynamic trees grow in one call where nothing is drawn; drawn ones grow level by level
        over the target's whole vocabulary, which takes several times as long, and so does verifying
        them. (EAGLE-3 on SmolLM2, bf16, temperature 1: 1.11x of plain decoding with seeds, 1.06x
        without.)"""
        return self._policy.nodes > 0 and self.growth is not None

    @abstractmethod
    def _span(self, item: Slice) -> Span | None:
        """What to run before the first level; None leaves the sequence alone."""

    @abstractmethod
    def _first(self, spans: Sequence[Span], trees: Sequence[Growing]) -> Logits:
        """Run the spans of ``_span``: logits after those that want them, the trees', in order."""

    def _level(self, trees: list[Growing]) -> Logits:
        """Run the newest nodes of some trees: logits after each."""
        spans = [
            tree.newest(adapter=tree.item.seq.adapter if self.adapts else None) for tree in trees
        ]
        return self._first(spans, trees)

    def _narrow(self, logits: torch.Tensor) -> Logits:
        """Logits ``[R, columns]`` of the model as those of the target's tokens."""
        return logits

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """Learn how far drafts were right."""
        self._confidences.observe(commits)

    def forget(self, seq_id: int) -> None:
        """Drop all state of a sequence."""
        self._confidences.forget(seq_id)
        self.cache.free(seq_id)

    @abstractmethod
    def _made_up(self, trees: Sequence[Growing]) -> Logits:
        """Logits for made-up trees, which also get whatever else growing reads."""

    def _finish(self, item: Slice, done: GrownTree) -> TokenTree:
        """The tree to propose."""
        return done.tree

    @torch.inference_mode()
    def warm_up(self, batch_size: int) -> None:
        """One level of made-up trees (as many as the cache has room for): forward and growth."""
        policy, cache = self._policy, self.cache
        nodes = policy.width if policy.nodes else policy.max_expanded(2)
        if policy.depth(2) < 2 or nodes > min(cache.block_size, self._max_positions // 2):
            policy, nodes = Policy(), 1
        with self._made_up_trees(batch_size, nodes, policy) as trees:
            if self._at_once(trees, self._made_up(trees)) is None:
                made_up = torch.zeros(1, trees[0].width, device=cache.device)
                for tree in trees:
                    tree.extend(made_up.long(), made_up)
                grow(trees, self._level(trees), self._level, self._generator)

    @contextmanager
    def _made_up_trees(
        self, batch_size: int, nodes: int, policy: Policy
    ) -> Iterator[list[Growing]]:
        """Trees of made-up sequences, whose cache has room for ``nodes`` behind the context."""
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
            yield [policy.start(Slice(seq, 1, 2), cache.device, context) for seq in seqs]
        finally:
            for seq in seqs:
                cache.free(seq.seq_id)
