"""Layer skipping: the target without some layers, which are searched for while it generates.

Draft & Verify (Zhang et al. 2023, arXiv 2309.08168) skips a fixed set, SWIFT (Xia et al. 2024,
arXiv 2410.06916) searches. A set's score is the share of generated tokens that the model predicts
without these layers, in one parallel forward. Texts differ in difficulty, so sets are compared on
the same window only; all comparisons feed one linear model of what each layer is worth. This
replaces the paper's random search with a Bayesian optimiser (docs/drafters/layer_skip.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import eq
from typing import Any

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Span
from paceline.core.sequence import SequenceView
from paceline.core.tree import TokenTree
from paceline.draft.base import Drafter
from paceline.draft.selfspec import STOP_BELOW, SelfDrafter, noted_layers, prepared_view
from paceline.draft.spec import DraftContext, Examined, Loading, Prepared, Target, TreeSpec
from paceline.draft.trees.levels import Levels
from paceline.errors import ConfigError
from paceline.model.copies import LayerView
from paceline.model.paged.blocks import OutOfBlocksError

Layers = tuple[int, ...]

_TRIAL = -1  # sequence id of a trial; ids of requests are not negative
# Standard deviations, as shares of a window: of a layer's worth, and of one window's score (32
# tokens: sqrt(0.2 / 32), and differences between windows).
_WORTH = 0.1
_NOISE = 0.15
# What a step without drafts counts towards the next comparison: at a quarter they took 2 to 3 % of
# the time where drafts never paid (SmolLM2).
_IDLE = 1 / 16


@dataclass(frozen=True, kw_only=True)
class LayerSkip(TreeSpec):
    """The target without the layers of ``skip`` ("2-5x8"), else without a set found by search.
    ``ratio``: share of layers to leave out. Sets are compared on ``window`` tokens, once in
    ``interval`` steps, ``tries`` times."""

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
        searching = {"ratio", "window", "interval", "tries"} & set(self.changed_options())
        if self.skip is not None and searching:
            raise self.refuse(f"skip fixes the set; leave out {min(searching)}")
        if not 0 < self.ratio < 1 or self.tries < 0 or min(self.window, self.interval) < 1:
            raise self.refuse("use a ratio between 0 and 1, tries >= 0, window and interval >= 1")

    def prepare(self, loading: Loading) -> Prepared:
        target = loading.target
        whole = LayerView(target, range(target.num_layers))
        if self.skip is not None:
            return prepared_view(self, _without(whole, parse_layers(self.skip, target.num_layers)))
        choice = skippable(target.num_layers)
        if not choice:
            raise self.refuse("the target has one layer, which it needs")
        _without(whole, choice)  # raises where one of them cannot be left out
        count = min(len(choice), max(1, round(self.ratio * target.num_layers)))

        def build(context: DraftContext) -> Drafter:
            search = SkipSearch(choice, count, self.tries)
            return SwiftDrafter(
                whole, self.levels(context, context.cache, STOP_BELOW), search, self
            )

        return Prepared(build)

    def examine(self, target: Target, read: Any = None) -> Examined:
        total = target.num_layers
        if self.skip is not None:
            return noted_layers(self, total - len(parse_layers(self.skip, total)), target)
        return noted_layers(self, max(1, round(total * (1 - self.ratio))), target)


def spread(candidates: Sequence[int], count: int) -> Layers:
    """``count`` of the candidates, evenly spread."""
    step = len(candidates) / count
    return tuple(candidates[int((i + 0.5) * step)] for i in range(count))


def skippable(num_layers: int) -> Layers:
    """Layers that may be skipped: not the first and the last, if there are others."""
    return tuple(range(1, num_layers - 1)) or tuple(range(1, num_layers))


class SkipSearch:
    """Proposes sets of layers to skip and learns from their scores; ``best`` is the one to use.

    All sets have ``count`` layers and cost the same. Layers' worths have a normal posterior;
    challengers are the best sets for worths drawn from it (Thompson sampling). It ends after
    ``tries`` scores, when ``best`` predicts ``enough`` of four windows in a row, or when there is
    nothing new to try. Deterministic for the same scores.
    """

    def __init__(
        self, candidates: Sequence[int], count: int, tries: int = 160, enough: float = 0.95
    ) -> None:
        assert 0 < count <= len(candidates)
        self.best = spread(candidates, count)
        self.over = tries < 1
        self._candidates = tuple(candidates)
        self._tries = tries
        self._enough = enough
        self._high = 0  # windows in a row of which the best set predicted enough
        self._generator = torch.Generator().manual_seed(0)
        size = len(candidates)
        self._precision = torch.eye(size, dtype=torch.float64) / _WORTH**2
        self._evidence = torch.zeros(size, dtype=torch.float64)

    def sets(self, challengers: int = 3) -> list[Layers]:
        """Sets to score on one window, the best first; [] when the search is over."""
        covariance, mean = self._posterior()
        root = torch.linalg.cholesky(covariance)
        tried = [self.best]
        for _ in range(8 * challengers):
            noise = torch.randn(len(mean), dtype=torch.float64, generator=self._generator)
            drawn = self._top(mean + root @ noise)
            if drawn not in tried:
                tried.append(drawn)
            if len(tried) > challengers:
                break
        self.over = self.over or len(tried) == 1
        return [] if self.over else tried

    def learn_scores(self, scores: Sequence[tuple[Layers, float]]) -> None:
        """Learn the shares of one window that sets predicted, the best set's first."""
        rows = torch.stack([self._row(layers) for layers, _ in scores])
        shares = torch.tensor([share for _, share in scores], dtype=torch.float64)
        # Differences within the window: its difficulty says nothing about layers.
        rows, shares = rows - rows.mean(0), shares - shares.mean()
        self._precision += rows.T @ rows / _NOISE**2
        self._evidence += rows.T @ shares / _NOISE**2
        self._high = self._high + 1 if scores[0][1] >= self._enough else 0
        self._tries -= len(scores)
        self.over = self._tries < 1 or self._high >= 4
        covariance, mean = self._posterior()
        promising = self._top(mean)
        gain = self._row(promising) - self._row(self.best)
        if float(gain @ mean) > float(gain @ covariance @ gain) ** 0.5:
            self.best = promising

    def _posterior(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Covariance ``[n, n]`` and mean ``[n]`` of what skipping each candidate gains."""
        covariance = torch.linalg.inv(self._precision)
        return covariance, covariance @ self._evidence

    def _top(self, worth: torch.Tensor) -> Layers:
        indices = worth.topk(len(self.best)).indices.sort().values.tolist()
        return tuple(self._candidates[layer] for layer in indices)

    def _row(self, layers: Layers) -> torch.Tensor:
        """float64 [n]: 1 where a candidate is skipped."""
        return torch.tensor([float(n in layers) for n in self._candidates], dtype=torch.float64)


class SwiftDrafter(SelfDrafter):
    """Skips a set of layers and improves it while generating. Sets are compared on the last
    ``window`` tokens of one sequence, one forward each, and one forward in ``interval`` steps
    (steps without drafts count a sixteenth). One set serves all sequences."""

    def __init__(
        self, whole: LayerView, levels: Levels, search: SkipSearch, spec: LayerSkip
    ) -> None:
        super().__init__(_without(whole, search.best), levels)
        self._search = search
        self._size, self._interval = spec.window, spec.interval
        self._due = 0.0  # sets are compared when it reaches the interval
        self._seqs: dict[int, SequenceView] = {}

    @property
    def skipped(self) -> Layers:
        """The layers skipped now."""
        return self._search.best

    def propose(self, plan: Plan) -> list[TokenTree]:
        self._seqs.update((item.seq.seq_id, item.seq) for item in plan.slices)
        return super().propose(plan)

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """When due, compare sets on the sequence that has generated most."""
        super().observe(commits, out)
        if self._search.over:
            return
        self._due += 1.0 if any(commit.drafted for commit in commits) else _IDLE
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
            self._search.learn_scores(list(zip(sets, scores, strict=True)))
            self.view = _without(self.view, self._search.best)

    def _scores(self, sets: Sequence[Layers], seq: SequenceView) -> list[float]:
        """Shares of the last cached tokens predicted without each set; [] without cache room. Keys
        and values go to separate blocks. Waits for the device once."""
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
