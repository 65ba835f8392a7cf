"""The target drafts for itself, with a part of its layers: early exit and layer skipping.

Draft & Verify (Zhang et al. 2023, arXiv 2309.08168) skips a fixed set of layers, SWIFT (Xia et al.
2024, arXiv 2410.06916) finds the set while it generates, and early exit runs the first n layers
only. There are no further weights and there is no further cache: the view reads the target's keys
and values of the committed tokens, and leaves those of its drafts where the verifying forward of
the same step writes the target's own::

    target's cache   | committed, never written | pending | nodes run by the view ... |
    same step, later |                          | pending | nodes of the tree |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.sequence import SequenceView
from paceline.core.tree import TokenTree
from paceline.draft.swift import Layers, SkipSearch
from paceline.draft.trees.grow import Growing, grow, level_feed
from paceline.draft.trees.policy import Policy
from paceline.draft.trees.rehearsal import rehearse_level
from paceline.errors import ConfigError
from paceline.model.paged.blocks import OutOfBlocksError
from paceline.model.paged.cache import Feed, PagedCache
from paceline.model.view import LayerView

# More pending tokens are the end of a prompt: the view would have to read it, too, for one draft.
_MOST_PENDING = 16
_TRIAL = -1  # sequence id of a trial; ids of requests are not negative


class SelfDrafter:
    """Drafts with a view of the target, in the target's own ``cache``."""

    features: tuple[int, ...] = ()

    def __init__(
        self,
        view: LayerView,
        cache: PagedCache,
        policy: Policy,
        generator: torch.Generator | None,
        name: str = "early_exit",
    ) -> None:
        self.name = name
        self.view = view
        self._cache = cache
        self._policy = policy
        self._generator = generator
        self._empty = TokenTree.empty(cache.device)

    def max_nodes(self, length: int) -> int:
        return self._policy.max_nodes(length)

    def passes(self, length: int) -> int:
        return self._policy.depth(length)

    def propose(self, plan: Plan) -> list[TokenTree]:
        growing: dict[int, Growing] = {}
        feeds: list[Feed] = []
        for item in plan.slices:
            if self._fits(item):
                seq = item.seq
                feeds.append(Feed(seq.seq_id, seq.cached, seq.pending))
                growing[seq.seq_id] = self._policy.start(item, self._cache.device)
        if not feeds:
            return [self._empty] * len(plan.slices)
        grow(list(growing.values()), self._logits(feeds), self._level, self._generator)
        trees = []
        for item in plan.slices:
            tree = growing.get(item.seq.seq_id)
            trees.append(self._empty if tree is None else tree.finish()[0])
        return trees

    def _fits(self, item: Slice) -> bool:
        """Whether a sequence drafts in this step; then the cache has room for what is run.

        The scheduler reserved indices for a tree. A best-first tree feeds nodes that are not in
        it in the end, and the commit of this step gives back what lies beyond the tree.
        """
        if not item.draft_length or not item.decodes or item.scheduled > _MOST_PENDING:
            return False
        if self._policy.depth(item.draft_length) < 1:
            return False
        seq, nodes = item.seq, self._policy.max_expanded(item.draft_length)
        try:
            self._cache.reserve(seq.seq_id, len(seq.tokens) + nodes)
        except OutOfBlocksError:
            return False
        return True

    def _logits(self, feeds: Sequence[Feed]) -> torch.Tensor:
        return self.view(self._cache.batch_of(feeds), self._cache).logits

    def _level(self, trees: list[Growing]) -> torch.Tensor:
        """Feed the newest nodes of some trees."""
        return self._logits([level_feed(tree, len(tree.item.seq.tokens)) for tree in trees])

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """Nothing to do: what is committed is in the target's cache."""

    def rehearse(self, batch_size: int) -> None:
        """One level of each sequence's tree, by a forward of the view."""
        most = self.view.model.max_positions
        rehearse_level(self._logits, self._cache, batch_size, most, self._generator, self._policy)

    def forget(self, seq_id: int) -> None:
        """There is no state of its own."""


@dataclass
class _Window:
    """Generated tokens that sets of layers are compared on: the choices after cached tokens.

    A forward starts at ``start``, a block boundary; scored are the choices after the tokens
    ``first .. end - 1``. ``waiting`` sets are still to be scored.
    """

    seq: SequenceView
    start: int
    first: int
    end: int
    waiting: list[Layers]
    scores: list[tuple[Layers, float]] = field(default_factory=list)


class SwiftDrafter(SelfDrafter):
    """Skips a set of layers that it improves while it generates: a trial every few steps.

    A trial is one forward of a view over ``window`` tokens, in every ``interval``-th step; steps
    without drafts, which are cheaper, count a quarter. One set serves all sequences. Only the
    speed depends on it.
    """

    def __init__(
        self,
        view: LayerView,
        cache: PagedCache,
        policy: Policy,
        generator: torch.Generator | None,
        search: SkipSearch,
        window: int = 32,
        interval: int = 32,
        name: str = "layer_skip",
    ) -> None:
        super().__init__(_without(view, search.best), cache, policy, generator, name)
        self._search = search
        self._size = window
        self._interval = interval
        self._due = 0.0  # reaches the interval when a trial is due
        self._seqs: dict[int, SequenceView] = {}
        self._window: _Window | None = None

    @property
    def skipped(self) -> Layers:
        """The layers that are left out now."""
        return self._search.best

    def propose(self, plan: Plan) -> list[TokenTree]:
        self._seqs.update((item.seq.seq_id, item.seq) for item in plan.slices)
        return super().propose(plan)

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """Now and then, score a set."""
        if self._search.over:
            return
        self._due += 1.0 if any(commit.drafted for commit in commits) else 0.25
        if self._due < self._interval:
            return
        self._due = 0.0
        if self._window is None:
            self._window = self._choose_window(commits)
        if self._window is not None:
            self._try(self._window)

    def _try(self, window: _Window) -> None:
        layers = window.waiting.pop(0)
        share = self._score(_without(self.view, layers), window)
        if share is None:
            self._window = None
            return
        window.scores.append((layers, share))
        if not window.waiting:
            self._window = None
            self._search.hear(window.scores)
            self.view = _without(self.view, self._search.best)

    def _choose_window(self, commits: Sequence[Commit]) -> _Window | None:
        """The newest tokens of the sequence that has generated most; None if that is too few."""
        # In a hybrid, other drafters' sequences are committed as well.
        ids = [c.seq_id for c in commits if c.tokens and c.finish_reason is None]
        going = [self._seqs[seq_id] for seq_id in ids if seq_id in self._seqs]
        seq = max(going, key=lambda seq: seq.generated, default=None)
        if seq is None or seq.generated < self._size:
            return None
        first = seq.cached - self._size
        start = first - first % self._cache.block_size
        sets = self._search.sets()
        return _Window(seq, start, first, seq.cached, sets) if sets else None

    def _score(self, view: LayerView, window: _Window) -> float | None:
        """Share of the window's tokens that a view predicts; None if there is no room to try.

        Its keys and values go to blocks of their own: those of the target stay as they are.
        """
        cache, tokens = self._cache, window.seq.tokens
        cache.borrow(_TRIAL, window.seq.seq_id, window.start)
        try:
            cache.reserve(_TRIAL, window.end)
            feed = Feed(_TRIAL, window.start, tokens[window.start : window.end])
            batch = replace(cache.batch_of([feed]), logit_rows=None)
            choices: list[int] = view(batch, cache).logits.argmax(-1).tolist()
        except OutOfBlocksError:
            return None
        finally:
            cache.free(_TRIAL)
        wanted = tokens[window.first + 1 : window.end + 1]
        pairs = zip(choices[window.first - window.start :], wanted, strict=True)
        return sum(choice == token for choice, token in pairs) / self._size

    def forget(self, seq_id: int) -> None:
        self._seqs.pop(seq_id, None)
        if self._window is not None and self._window.seq.seq_id == seq_id:
            self._window = None


def _without(view: LayerView, skipped: Sequence[int]) -> LayerView:
    return view.of([n for n in range(view.model.num_layers) if n not in skipped])


def parse_layers(text: str, num_layers: int) -> Layers:
    """``2-5x8``: layers 2, 3, 4, 5 and 8. Raises ConfigError."""
    layers: set[int] = set()
    for part in text.split("x"):
        ends = part.split("-")
        if len(ends) > 2 or not all(end.isdecimal() for end in ends):
            raise ConfigError(f"skip={text!r} is not like 2-5x8 (layers 2 to 5, and 8)")
        first, last = int(ends[0]), int(ends[-1])
        if not first <= last < num_layers:
            raise ConfigError(
                f"skip={text!r} asks for layers {part}; the target has 0 to {num_layers - 1}"
            )
        layers.update(range(first, last + 1))
    if len(layers) == num_layers:
        raise ConfigError(f"skip={text!r} leaves no layer to draft with; skip fewer")
    return tuple(sorted(layers))
