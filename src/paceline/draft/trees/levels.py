"""What drafters that run a model have in common: trees grow by a forward a level, for everybody."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from paceline.core.batch import Batch, Plan, Slice, Span
from paceline.core.draws import draft
from paceline.core.params import SamplingParams
from paceline.core.sampling import Rows
from paceline.core.sequence import SequenceView
from paceline.core.tree import TokenTree
from paceline.draft.trees.grow import Growing, candidates, grow, level_span
from paceline.draft.trees.narrow import Logits, Narrow
from paceline.draft.trees.policy import Policy
from paceline.model.backends.growing import GrownTree, Growth, WantedTree
from paceline.model.paged.cache import PagedCache

Finished = tuple[TokenTree, tuple[int, ...]]  # see Growing.finish

_BLOCKS = 4  # of context when warming up: about what the target's own costs are measured with


class LevelDrafter(ABC):
    """Runs something over ``cache``, over tokens that it has not seen, then level by level."""

    features: tuple[int, ...] = ()
    reads_logits = False

    def __init__(
        self,
        name: str,
        cache: PagedCache,
        policy: Policy,
        generator: torch.Generator | None,
        max_positions: int,
    ) -> None:
        """``max_positions`` is the longest context of what is run."""
        self.name = name
        self.cache = cache
        self._policy = policy
        self._generator = generator
        self._max_positions = max_positions
        self.deliver_to = cache.device  # where trees are wanted: the target's device

    @property
    def deliver_to(self) -> torch.device:
        return self._empty.tokens.device

    @deliver_to.setter
    def deliver_to(self, device: torch.device) -> None:
        self._empty = TokenTree.empty(device)

    def max_nodes(self, length: int) -> int:
        return self._policy.max_nodes(length)

    def passes(self, length: int) -> int:
        return self._policy.depth(length)

    @torch.inference_mode()
    def propose(self, plan: Plan) -> list[TokenTree]:
        pairs = [(item, span) for item in plan.slices if (span := self._span(item)) is not None]
        growing = {
            span.seq_id: self._policy.start(item, self.cache.device)
            for item, span in pairs
            if span.wants_logits
        }
        grown: dict[int, TokenTree] = {}
        if pairs:
            spans, trees = [span for _, span in pairs], list(growing.values())
            finished = self._in_one_call(trees, spans)
            if finished is None:
                logits = self._first(spans)
                bases = [self._base(tree.item) for tree in trees]
                finished = self._at_once(trees, bases, logits)
            if finished is None:
                grow(trees, logits, self._level, self._generator)
                finished = [tree.finish() for tree in trees]
            grown = {
                seq_id: self._finish(seq_id, *done)
                for seq_id, done in zip(growing, finished, strict=True)
            }
        return [grown.get(item.seq.seq_id, self._empty) for item in plan.slices]

    def _in_one_call(
        self, trees: Sequence[Growing], spans: Sequence[Span]
    ) -> list[Finished] | None:
        """The finished trees, if all of them can be grown in the call that runs ``spans``."""
        return None

    def _at_once(
        self,
        trees: Sequence[Growing],
        bases: Sequence[int],
        logits: Logits,
        first: Batch | None = None,
    ) -> list[Finished] | None:
        """The finished trees, if all of them can be grown in one call; ``first``: as growth's."""
        growth = self.growth
        sizes = [size for tree in trees if growth and (size := tree.plain_size())]
        if growth is None or not trees or len(sizes) < len(trees):
            return None
        wanted = [
            WantedTree(
                *(*size, base, self.cache.blocks_of(seq.seq_id), seq.params, len(seq.tokens)),
                least=self._least(seq),
            )
            for seq, base, size in zip((t.item.seq for t in trees), bases, sizes, strict=True)
        ]
        ids = logits.ids if isinstance(logits, Narrow) else None
        logits = logits.logits if isinstance(logits, Narrow) else logits
        outputs = self._outputs([tree.item.seq.seq_id for tree in trees])
        grown = growth(self.cache, wanted, logits, ids, outputs, first)
        seen = self._seen([tree.item.seq for tree in trees], grown)
        return [(TokenTree(tree.tokens, tree.parents), tree.slots) for tree in seen]

    def _least(self, seq: SequenceView) -> float:
        """The probability of a path behind which a chain ends; 0: it goes on."""
        return 0.0

    def _seen(
        self, seqs: Sequence[SequenceView], grown: Sequence[GrownTree]
    ) -> Sequence[GrownTree]:
        """What was grown in one call, for those who learn from it."""
        return grown

    @property
    def growth(self) -> Growth | None:
        """What grows whole trees; None: they grow level by level."""
        return None

    @property
    def prefers_seeds(self) -> bool:
        """Dynamic trees grow in one call where nothing is drawn; drawn ones, level by level over
        the target's whole vocabulary, take several times as long, and are verified likewise.
        (EAGLE-3 on SmolLM2, bf16, temperature 1: 1.11x of plain decoding with, 1.06x without.)"""
        return self._policy.nodes > 0 and self.growth is not None

    def _outputs(self, ids: Sequence[int]) -> torch.Tensor | None:
        """What is run reads beside tokens, ``[trees, H]``; None: nothing."""
        return None

    @abstractmethod
    def _span(self, item: Slice) -> Span | None:
        """What has to be run before the first level; None leaves the sequence alone."""

    @abstractmethod
    def _logits(self, spans: Sequence[Span]) -> Logits:
        """One forward: logits after the rows that want them."""

    @abstractmethod
    def _base(self, item: Slice) -> int:
        """Rows of committed tokens in the cache, in front of the nodes."""

    def _first(self, spans: Sequence[Span]) -> Logits:
        return self._logits(spans)

    def _level(self, trees: list[Growing]) -> Logits:
        """Run the newest nodes of some trees."""
        return self._logits([level_span(t, self._base(t.item)) for t in trees])

    def _finish(self, seq_id: int, tree: TokenTree, slots: tuple[int, ...]) -> TokenTree:
        """A tree to propose; ``slots``: each node's number among the expanded, -1 if it is not."""
        return tree

    @torch.inference_mode()
    def warm_up(self, batch_size: int) -> None:
        """One level of each sequence's tree: the forward over its nodes, the choice, the growth."""
        cache, most = self.cache, self._max_positions
        width = min(self._policy.max_expanded(2), most // 2, cache.block_size)
        with _stand_ins(cache, batch_size, most, max(width, 1)) as (seqs, context):
            trees = [self._policy.start(Slice(seq, 1, 2), cache.device) for seq in seqs]
            deepest = [size for tree in trees if (size := tree.plain_size()) and size[0] > 1]
            if deepest and deepest[0][1] <= width:  # of two levels: the newest nodes have room
                logits = self._made_up(seqs)
                if logits is not None and self._at_once(trees, [context] * len(seqs), logits):
                    return
            made_up = torch.zeros(1, trees[0].width, device=cache.device)
            if not all([tree.extend(made_up.long(), made_up) for tree in trees]):
                # Trees of one level: their only pass is over the committed token.
                out = self._logits([Span.of(seq.seq_id, context, (0,)) for seq in seqs])
                logits = out.logits if isinstance(out, Narrow) else out
                draft(logits, Rows(tuple(seqs), (0,) * len(seqs)), 1, self._generator)
                return
            out = self._logits([level_span(tree, context) for tree in trees])
            counts = [len(tree.fresh) for tree in trees]
            grown = candidates(trees, counts, out, self._generator)
            for tree, part in zip(trees, grown, strict=True):
                tree.extend(*part)
                tree.finish()

    def _made_up(self, seqs: Sequence[SequenceView]) -> Logits | None:
        """Logits after the committed tokens, to grow trees from in one call; None: levels."""
        return None


@contextmanager
def _stand_ins(
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
