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
from dataclasses import dataclass, replace
from operator import eq
from typing import Any

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice, Span
from paceline.core.sequence import SequenceView
from paceline.core.tree import TokenTree, is_chain
from paceline.draft.base import Drafter
from paceline.draft.spec import (
    DraftContext,
    Examined,
    Loading,
    Prepared,
    Target,
    TreeSpec,
)
from paceline.draft.swift import Layers, SkipSearch, skippable
from paceline.draft.trees.confidence import Confidence
from paceline.draft.trees.grow import Growing
from paceline.draft.trees.levels import Finished, LevelDrafter
from paceline.draft.trees.policy import Policy
from paceline.draft.vocabulary.frequent import FrequentTokens
from paceline.errors import ConfigError
from paceline.model.backends.growing import GrownTree, Growth
from paceline.model.paged.blocks import OutOfBlocksError
from paceline.model.paged.cache import PagedCache
from paceline.model.view import LayerView

# A chain ends where fewer than so many of its paths are accepted: there a pass of a quarter of a
# step no longer pays (docs/decisions.md).
STOP_BELOW = 0.5
# The same where the target's layers are moved in every step, and the view's are at hand.
STOP_BELOW_OFFLOADED = 0.2
# More pending tokens are the end of a prompt: the view would have to read it, too, for one draft.
_MOST_PENDING = 16
_SURE = 100.0  # a logit: what else has 0 is not likely
_TRIAL = -1  # sequence id of a trial; ids of requests are not negative


@dataclass(frozen=True, kw_only=True)
class EarlyExit(TreeSpec):
    """The target's first ``layers`` layers, its final norm and its head; by default a third."""

    kind = "early_exit"
    page = "early_exit.md"
    examples = ("early_exit:branching=3x2,layers=1",)

    layers: int | None = None

    def prepare(self, loading: Loading) -> Prepared:
        return _of_view(self, LayerView(loading.target, range(self._run(loading.target))))

    def examine(self, target: Target, read: Any = None) -> Examined:
        return _own_layers(self, self._run(target), target)

    def _run(self, target: Target) -> int:
        total = target.num_layers
        layers = max(1, round(total / 3)) if self.layers is None else self.layers
        if not 0 < layers < total:
            raise ConfigError(
                f"draft 'early_exit': layers={layers}, but the target has {total}; "
                "use at least 1 and fewer than all"
            )
        return layers


@dataclass(frozen=True, kw_only=True)
class LayerSkip(TreeSpec):
    """The target without some of its layers: those of ``skip`` ("2-5x8"), else a set that is
    searched for while it generates (SWIFT).

    ``ratio``: share of the layers to leave out. Sets are compared on ``window`` tokens, once in
    ``interval`` steps, ``tries`` times.
    """

    kind = "layer_skip"
    page = "layer_skip.md"
    tried = "real"
    examples = ("layer_skip:skip=0", "layer_skip:nodes=9,window=8,interval=1")

    skip: str | None = None
    ratio: float = 0.45
    window: int = 32
    interval: int = 32
    tries: int = 160

    def __post_init__(self) -> None:
        super().__post_init__()
        searching = {"ratio", "window", "interval", "tries"} & set(self.given())
        if self.skip is not None and searching:
            what = min(searching)
            raise ConfigError(f"draft 'layer_skip': skip fixes the set; leave out {what}")
        if not 0 < self.ratio < 1 or self.tries < 0 or min(self.window, self.interval) < 1:
            raise ConfigError(
                "draft 'layer_skip': use a ratio between 0 and 1, tries >= 0, window and "
                "interval >= 1"
            )

    def prepare(self, loading: Loading) -> Prepared:
        target = loading.target
        whole = LayerView(target, range(target.num_layers))
        if self.skip is not None:
            return _of_view(self, _without(whole, parse_layers(self.skip, target.num_layers)))
        choice = skippable(target.num_layers)
        if not choice:
            raise ConfigError("draft 'layer_skip': the target has one layer, which it needs")
        count = min(len(choice), max(1, round(self.ratio * target.num_layers)))

        def build(context: DraftContext) -> Drafter:
            search = SkipSearch(choice, count, self.tries)
            return SwiftDrafter(whole, context.cache, context.generator, search, self)

        return Prepared(build)

    def examine(self, target: Target, read: Any = None) -> Examined:
        total = target.num_layers
        if self.skip is not None:
            return _own_layers(self, total - len(parse_layers(self.skip, total)), target)
        return _own_layers(self, max(1, round(total * (1 - self.ratio))), target)


def _of_view(spec: TreeSpec, view: LayerView) -> Prepared:
    return Prepared(lambda c: SelfDrafter(view, c.cache, spec.policy(), c.generator, spec.kind))


def _own_layers(spec: TreeSpec, run: int, target: Target) -> Examined:
    text = f"{spec.kind} drafts with {run} of the target's {target.num_layers} layers"
    return spec.noted("draft-own-layers", text)


class SelfDrafter(LevelDrafter):
    """Drafts with a view of the target, in the target's own ``cache``."""

    def __init__(
        self,
        view: LayerView,
        cache: PagedCache,
        policy: Policy,
        generator: torch.Generator | None,
        name: str = "early_exit",
        stop_below: float = STOP_BELOW,
    ) -> None:
        super().__init__(name, cache, policy, generator, view.model.max_positions)
        self.view = view
        self.stop_below = stop_below
        self._frequent = FrequentTokens(view.model.vocab_size, view.model.backend.head_share)
        # Of greedy requests, and of sampled ones.
        self._confidence = {True: Confidence(), False: Confidence()}
        # Of drafts that wait for a verdict, log-probabilities of their paths.
        self._waiting: dict[int, tuple[Confidence, tuple[float, ...]]] = {}

    @property
    def growth(self) -> Growth | None:
        return self.view.backend.growth

    @property
    def ends_early(self) -> bool:
        """Chains end where fewer than ``stop_below`` of their paths are accepted."""
        return self.growth is not None and self.stop_below > 0

    def _span(self, item: Slice) -> Span | None:
        """The pending tokens, if there is room for what is run.

        The scheduler reserved indices for a tree. A dynamic tree runs nodes that are not in
        it in the end, and the commit of this step gives back what lies beyond the tree.
        """
        seq, length = item.seq, item.draft_length
        if not item.decodes or item.scheduled > _MOST_PENDING or not self._policy.depth(length):
            return None
        try:
            self.cache.reserve(seq.seq_id, len(seq.tokens) + self._policy.max_expanded(length))
        except OutOfBlocksError:
            return None
        return Span.of(seq.seq_id, seq.cached, seq.pending)

    def _logits(self, spans: Sequence[Span]) -> torch.Tensor:
        return self.view(self.cache.batch_of(spans), self.cache).logits

    def _base(self, item: Slice) -> int:
        return len(item.seq.tokens)

    def _in_one_call(
        self, trees: Sequence[Growing], spans: Sequence[Span]
    ) -> list[Finished] | None:
        if self.growth is None or not all(tree.plain_size() for tree in trees):
            return None
        logits = self._made_up([tree.item.seq for tree in trees])
        bases = [self._base(tree.item) for tree in trees]
        return self._at_once(trees, bases, logits, self.cache.batch_of(spans))

    def _made_up(self, seqs: Sequence[SequenceView]) -> torch.Tensor:
        columns = self._frequent.columns(seqs)
        logits = torch.zeros(len(seqs), columns, dtype=self.view.model.dtype)
        logits[:, 0] = _SURE
        return logits

    def _least(self, seq: SequenceView) -> float:
        return self._confidence[seq.params.greedy].least(self.stop_below)

    def _seen(
        self, seqs: Sequence[SequenceView], grown: Sequence[GrownTree]
    ) -> Sequence[GrownTree]:
        self._waiting |= {
            seq.seq_id: (self._confidence[seq.params.greedy], tree.scores)
            for seq, tree in zip(seqs, grown, strict=True)
            if tree.parents and is_chain(tree.parents)
        }
        return grown

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """How far chains were right; all else that is committed is in the target's cache."""
        for commit in commits:
            self._frequent.learn(commit.seq_id, commit.tokens)
            confidence, scores = self._waiting.pop(commit.seq_id, (None, ()))
            if confidence and 0 < commit.reached <= len(scores) == commit.drafted:
                refused = commit.reached > len(commit.path)
                confidence.learn(scores[: commit.reached], refused)

    def forget(self, seq_id: int) -> None:
        self._waiting.pop(seq_id, None)
        self._frequent.forget(seq_id)


class SwiftDrafter(SelfDrafter):
    """Skips a set of layers that it improves while it generates.

    Sets are compared on the last ``window`` tokens of one sequence, by a forward each; one forward
    goes with ``interval`` steps, of which those without drafts, which are cheaper, count a quarter.
    One set serves all sequences. Only the speed depends on it.
    """

    def __init__(
        self,
        whole: LayerView,
        cache: PagedCache,
        generator: torch.Generator | None,
        search: SkipSearch,
        spec: LayerSkip,
    ) -> None:
        view = _without(whole, search.best)
        super().__init__(view, cache, spec.policy(), generator, spec.kind)
        self._search = search
        self._size, self._interval = spec.window, spec.interval
        self._due = 0.0  # reaches the interval when sets are to be compared
        self._seqs: dict[int, SequenceView] = {}

    @property
    def skipped(self) -> Layers:
        """The layers that are left out now."""
        return self._search.best

    def propose(self, plan: Plan) -> list[TokenTree]:
        self._seqs.update((item.seq.seq_id, item.seq) for item in plan.slices)
        return super().propose(plan)

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """Now and then, compare sets on the sequence that has generated most."""
        super().observe(commits, out)
        if self._search.over:
            return
        self._due += 1.0 if any(commit.drafted for commit in commits) else 0.25
        if self._due < self._interval:
            return
        self._due = 0.0
        # In a hybrid, other drafters' sequences are committed as well.
        ids = [c.seq_id for c in commits if c.tokens and c.finish_reason is None]
        going = [self._seqs[seq_id] for seq_id in ids if seq_id in self._seqs]
        seq = max(going, key=lambda seq: seq.generated, default=None)
        if seq is None or seq.cached - seq.prompt_length < self._size:
            return
        sets = self._search.sets()
        self._due -= self._interval * max(0, len(sets) - 1)
        scores = self._scores(sets, seq) if sets else []
        if scores:
            self._search.hear(list(zip(sets, scores, strict=True)))
            self.view = _without(self.view, self._search.best)

    def _scores(self, sets: Sequence[Layers], seq: SequenceView) -> list[float]:
        """Shares of the last cached tokens that are predicted without each set of layers; none if
        there is no room to try. Waits for the device, once.

        Keys and values go to blocks of their own: those of the target stay as they are.
        """
        cache, end = self.cache, seq.cached
        first = end - self._size
        start = first - first % cache.block_size
        cache.borrow(_TRIAL, seq.seq_id, start)
        try:
            cache.reserve(_TRIAL, end)
            batch = cache.batch_of([Span.of(_TRIAL, start, seq.tokens[start:end])])
            batch = replace(batch, logit_rows=None)
            outs = (_without(self.view, layers)(batch, cache) for layers in sets)
            choices = torch.stack([out.logits.argmax(-1) for out in outs])[:, first - start :]
        except OutOfBlocksError:
            return []
        finally:
            cache.free(_TRIAL)
        tokens = seq.tokens[first + 1 : end + 1]
        return [sum(map(eq, row, tokens)) / self._size for row in choices.tolist()]

    def forget(self, seq_id: int) -> None:
        super().forget(seq_id)
        self._seqs.pop(seq_id, None)


def _without(view: LayerView, skipped: Sequence[int]) -> LayerView:
    return LayerView(view.model, [n for n in range(view.model.num_layers) if n not in skipped])


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
