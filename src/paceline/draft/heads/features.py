"""Heads that read the target's features, layer by layer: their options, and drafters for which
what a step puts out waits until the head runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch

from paceline.core.batch import Commit, ModelOutput, Slice, Span
from paceline.core.sequence import SequenceView
from paceline.core.transfer import to_device
from paceline.draft.base import Drafter, States
from paceline.draft.heads.checkpoint import FILES
from paceline.draft.heads.network import HeadShape
from paceline.draft.spec import (
    DraftContext,
    Examined,
    Note,
    Prepared,
    Target,
    TreeSpec,
    option,
    reduced,
)
from paceline.draft.trees.grow import Logits, Narrow
from paceline.draft.trees.levels import LevelDrafter, Levels
from paceline.model.paged.blocks import OutOfBlocksError
from paceline.model.paged.cache import LayerShape, PagedCache, bytes_per_token
from paceline.model.target import CausalModel

# Most features kept of a sequence that does not draft, and most rows of whole forwards kept for all
# of them. Beyond it the oldest features are dropped (a little less acceptance) and the others
# copied. The cache is sized so that these and the last step's rows fit (build.py).
MOST_WAITING = 512


def on_features(
    target: CausalModel,
    shapes: list[LayerShape],
    layers: int,
    make: Callable[[DraftContext, PagedCache], Drafter],
    rope_switch: int | None = None,
) -> Prepared:
    """A drafter with a cache of these ``shapes``, which reads so many layers of the target."""

    def build(context: DraftContext) -> Drafter:
        return make(context, context.new_cache(shapes, target.dtype, rope_switch=rope_switch))

    kept = layers * target.hidden_size * target.dtype.itemsize
    return Prepared(build, bytes_per_token(shapes, target.dtype), feature_bytes=kept)


@dataclass(frozen=True)
class HeadSpec(TreeSpec):
    """A head by folder, built-in or hub name; chains. ``feature_layers``: layers of the target
    whose inputs it reads, in place of its config's."""

    holds = "head"
    weight_files = FILES

    path: str = option(needs="a head")
    _: KW_ONLY
    feature_layers: tuple[int, ...] | None = option(None, like="2x16x29 (layers of the target)")

    def examined(
        self, text: str, config: HeadShape, size: int, target: Target, more: Sequence[Note] = ()
    ) -> Examined:
        """Doctor's notes on a head of ``size`` weights."""
        notes = [("head-fits", text, None), *more, *reduced(config.columns, target)]
        features = len(config.feature_layers) * target.hidden_size
        cached = 2 * config.layers * config.kv_heads * config.head_dim
        return Examined(tuple(notes), size, cached, features)

    def shifted(self, ids: tuple[int, ...], usual: tuple[int, ...]) -> list[Note]:
        """A note if the config's layers are one off from the usual ones."""
        if self.feature_layers is not None or ids not in [
            tuple(n + s for n in usual) for s in (-1, 1)
        ]:
            return []
        text = f"layers {list(ids)}, one off from the usual {list(usual)}"
        cure = f"Try --draft {replace(self, feature_layers=usual)} and compare with paceline bench."
        return [("head-layers-shifted", text, cure)]


class FeatureRows(NamedTuple):
    """Some rows of a forward's features, of each layer ``[T, hidden]``."""

    layers: tuple[torch.Tensor, ...]
    rows: list[int]


def _joined_features(parts: Sequence[FeatureRows]) -> list[torch.Tensor]:
    """The features of some parts joined: of each layer ``[n, hidden]``."""
    picked: list[list[torch.Tensor]] = []
    for _, group in groupby(parts, key=lambda part: id(part.layers)):
        same = list(group)
        layers, rows = same[0].layers, [row for part in same for row in part.rows]
        if rows == list(range(rows[0], rows[-1] + 1)):
            picked.append([layer[rows[0] : rows[-1] + 1] for layer in layers])
        else:
            index = to_device(rows, layers[0].device)
            picked.append([layer.index_select(0, index) for layer in layers])
    columns = [list(column) for column in zip(*picked, strict=True)]
    return [torch.cat(column) if len(column) > 1 else column[0] for column in columns]


@dataclass
class _State:
    """The head's state of one sequence.

    Its cache has ``rows`` (the token of each). Features of the ``count`` positions from ``start``
    on are ``waiting`` to become rows. Earlier positions without a row (a shared prefix) are missing
    from the head's context. ``ran``: rows or nodes were added that the cache is to be told of.
    """

    start: int
    rows: list[int] = field(default_factory=list)
    waiting: list[FeatureRows] = field(default_factory=list)
    count: int = 0
    ran: bool = False

    @property
    def end(self) -> int:
        """The first position whose feature is not known."""
        return self.start + self.count

    def add(self, position: int, layers: tuple[torch.Tensor, ...], rows: list[int]) -> None:
        """Features of consecutive positions from ``position`` on; known ones are ignored."""
        if position > self.end:  # unseen positions lie between
            self.waiting, self.start, self.count = [], position, 0
        elif position < self.end:
            rows = rows[self.end - position :]
        if rows:
            self.waiting.append(FeatureRows(layers, rows))
            self.count += len(rows)

    def drop(self, excess: int) -> None:
        """Drop the oldest features."""
        self.start += excess
        self.count = max(0, self.count - excess)
        while excess and self.waiting:
            oldest = self.waiting.pop(0)
            if len(oldest.rows) > excess:
                self.waiting.insert(0, oldest._replace(rows=oldest.rows[excess:]))
            excess = max(0, excess - len(oldest.rows))

    def take(self) -> list[FeatureRows]:
        """All waiting features, which are about to become rows."""
        parts = self.waiting
        self.start, self.count, self.waiting = self.end, 0, []
        return parts


class FeatureDrafter(LevelDrafter):
    """Drafts with a head that has a cache row for each position of the text whose feature is known.
    A step's features are stored as they came and joined when the head runs: a step in which it does
    not draft costs no operator."""

    reads = True  # features that came while it did not draft
    follows = True  # prompts, chunk by chunk
    _ahead = 0  # a row's token is so many positions behind that of its feature
    _along = False

    def __init__(self, step: Any, levels: Levels) -> None:
        """``step`` runs the head: an EagleStep or a BlockStep."""
        config = step.head.config
        super().__init__(levels, config.max_positions)
        self.head, self._step, self.features = step.head, step, config.feature_layers
        self._states: States[_State] = States()
        self._whole = 0  # most rows of forwards that waiting features keep alive

    # -- proposing ---------------------------------------------------------------------------

    def _span(self, item: Slice) -> Span | None:
        """The rows whose features have arrived; None if there is nothing to do."""
        seq = item.seq
        if not seq.params.may_draft:
            return None
        state = self._states.of(seq, lambda seq: _State(seq.cached))
        if seq.seq_id not in self.cache:
            self._admit(seq, state)
        known = state.end == len(seq.tokens) - 1  # all but the last token's
        drafts = item.decodes and item.draft_length > 0 and known
        # Prompt chunks are read along with the target's; plain steps are read later.
        if not state.count or not (drafts or not item.decodes):
            return None
        context = len(state.rows)
        try:
            nodes = self._room(item.draft_length) if drafts else 0
            self.cache.reserve(seq.seq_id, context + state.count + nodes)
        except OutOfBlocksError:
            self._drop(seq.seq_id)
            return None
        tokens = seq.tokens[state.start + self._ahead : state.end + self._ahead]
        state.rows += _row_keys(seq.tokens, state.start, tokens)
        state.ran = True
        return Span.of(seq.seq_id, context, tokens, wants_logits=drafts)

    def _admit(self, seq: SequenceView, state: _State) -> None:
        """Start the cache of a sequence, with rows shared with an earlier one."""
        tokens = seq.tokens[self._ahead : len(seq.tokens) - 1 + self._ahead]
        keys = _row_keys(seq.tokens, 0, tokens)
        shared = self.cache.admit(seq.seq_id, keys, adapter=seq.adapter_number)
        state.rows = keys[:shared]
        state.drop(max(0, shared - state.start))

    def _taken(self, spans: Sequence[Span]) -> torch.Tensor:
        """The features ``[T, layers * hidden]`` that become rows in these spans."""
        parts = [part for span in spans for part in self._parts(span)]
        return torch.cat(_joined_features(parts), -1)

    def _parts(self, span: Span) -> list[FeatureRows]:
        """The features of the rows of a span."""
        return self._states[span.seq_id].take()

    def _narrow(self, logits: torch.Tensor) -> Logits:
        config = self.head.config
        return Narrow(logits, self.head.draft_ids, config.vocab_size) if config.reduced else logits

    # -- observing ---------------------------------------------------------------------------

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """Store the features of what was committed; free drafted rows. Sequences for which it was
        never asked to draft are ignored."""
        super().observe(commits, out)
        known = [commit for commit in commits if commit.seq_id in self._states]
        if not known:
            return
        if self._whole > MOST_WAITING:
            self._copy_waiting()
        layers = tuple(out.features[layer] for layer in self.features)
        self._whole += len(layers[0])
        for commit in known:
            state = self._states[commit.seq_id]
            if state.count > MOST_WAITING:
                state.drop(state.count - MOST_WAITING)
            nodes = commit.row + commit.scheduled
            rows = [*range(commit.row, nodes), *[nodes + node for node in commit.path]]
            state.add(commit.position, layers, rows)
            if state.ran:
                self.cache.commit(commit.seq_id, state.rows, len(state.rows))
                state.ran = False

    @torch.inference_mode()
    def _copy_waiting(self) -> None:
        """Copy waiting features: a stored row keeps its whole forward's tensor alive."""
        for state in self._states.values():
            if state.waiting:
                copies = tuple(layer.clone() for layer in _joined_features(state.waiting))
                state.waiting = [FeatureRows(copies, list(range(state.count)))]
        self._whole = 0

    def forget(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)
        super().forget(seq_id)

    def _drop(self, seq_id: int) -> None:
        """Out of blocks: drop this sequence's context; it goes on with later features."""
        state = self._states[seq_id]
        self.cache.free(seq_id)
        self.cache.admit(seq_id, ())
        self._states[seq_id] = _State(state.end)


def _row_keys(tokens: Sequence[int], start: int, of_rows: Sequence[int]) -> list[int]:
    """Keys of rows for prefix sharing: each row's token, the first row's also with x0."""
    keys = list(of_rows)
    if start == 0 and keys:
        keys[0] = (keys[0] * 1_000_003 + tokens[0] + 1) & 0x7FFFFFFF
    return keys
