"""EAGLE drafters: a one-layer head continues the target's features.

EAGLE (Li et al. 2024, arXiv 2401.15077), EAGLE-2 (2406.16858: dynamic trees over the same weights)
and EAGLE-3 (2503.01840: three fused layers, its own vocabulary) differ in head and policy only. The
head has its own paged cache, whose row for position t holds the target's feature there and the
token after it::

    position            0    1    2   ...  n-2   n-1
    committed token     x0   x1   x2        .    x_last      its feature is not known yet
    row                (f0,x1) (f1,x2) ... (f_n-2, x_last) -> logits of the first drafted token
    drafted rows       (h, y1) (h', y2) ...   h: the head's own output instead of a feature

Drafted rows are not kept: an accepted token's true feature replaces them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

import torch

from paceline.core.batch import Commit, ModelOutput, Slice, Span
from paceline.core.sequence import SequenceView
from paceline.core.transfer import to_device
from paceline.draft.base import Drafter, States
from paceline.draft.heads.eagle_format import FILES, load_eagle, stated_layers
from paceline.draft.heads.eagle_head import default_feature_layers
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
from paceline.draft.trees.grow import Growing, Logits, Narrow, level_span
from paceline.draft.trees.levels import LevelDrafter, Levels
from paceline.model.backends.base import EagleStep, Growth
from paceline.model.paged.blocks import OutOfBlocksError
from paceline.model.paged.cache import bytes_per_token
from paceline.model.quantised.convert import Scheme, quantise_module

# Most features kept of a sequence that does not draft, and most rows of whole forwards kept for all
# of them. Beyond it the oldest features are dropped (a little less acceptance) and the others
# copied. The cache is sized so that these and the last step's rows fit (build.py).
MOST_WAITING = 512


@dataclass(frozen=True)
class Eagle(TreeSpec):
    """An EAGLE head by folder, built-in or hub name; chains. ``layers``: layers of the target whose
    inputs it reads, in place of its config's. ``int8``: round its weights to 8 bits where
    the kernels run it in bfloat16."""

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
    int8: bool = True

    def prepare(self, loading: Loading) -> Prepared:
        target = loading.target
        head = load_eagle(self.path, target, self.version, self.layers, target.embedding("output"))
        head = head.to(target.device, target.dtype).eval().requires_grad_(False)
        if self.int8 and target.dtype == torch.bfloat16 and not target.backend.runs_torch:
            quantise_module(head, Scheme("int8", finer=True))
        step = target.backend.eagle(head, target)

        def build(context: DraftContext) -> Drafter:
            nodes = context.tree_nodes() if self.dynamic else 0
            cache = context.new_cache([head.cache_shape], target.dtype)
            return EagleDrafter(step, self.levels(context, cache, nodes))

        kept = len(head.config.feature_layers) * target.hidden_size * target.dtype.itemsize
        cached = bytes_per_token([head.cache_shape], target.dtype)
        return Prepared(build, cached, feature_bytes=kept)

    def shape(self) -> str | None:
        return super().shape() or ("tree" if self.kind == "eagle2" else None)

    def examine(self, target: Target, read: Any = None) -> Examined:
        head = load_eagle(read, target, self.version, self.layers)
        config, size = head.config, sum(weight.numel() for weight in head.parameters())
        ids, usual = config.feature_layers, default_feature_layers(3, target.num_layers)
        reads = f"inputs of layers {list(ids)}" if self.version == 3 else "the last output"
        text = f"EAGLE-{self.version} head of {size / 1e6:.1f}M parameters, reads {reads}"
        notes: list[Note] = [("head-fits", text, None)]
        if self.layers is None and self.version == 3:
            shifted = [tuple(layer + shift for layer in usual) for shift in (-1, 1)]
            if not stated_layers(read.config):
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


class _Rows(NamedTuple):
    """Some rows of a forward's features, of each layer ``[T, hidden]``."""

    layers: tuple[torch.Tensor, ...]
    rows: list[int]


def _joined_features(parts: Sequence[_Rows]) -> list[torch.Tensor]:
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
    waiting: list[_Rows] = field(default_factory=list)
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
            self.waiting.append(_Rows(layers, rows))
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

    def take(self) -> list[_Rows]:
        """All waiting features, which are about to become rows."""
        parts = self.waiting
        self.start, self.count, self.waiting = self.end, 0, []
        return parts


class EagleDrafter(LevelDrafter):
    """Drafts with an EAGLE head. A step's features are stored as they came and joined when the head
    runs: a step in which it does not draft costs no operator."""

    reads = True  # features that came while it did not draft
    follows = True  # prompts, chunk by chunk

    def __init__(self, step: EagleStep, levels: Levels) -> None:
        self.head = step.head
        super().__init__(levels, self.head.config.max_positions)
        self.features = self.head.config.feature_layers
        self._step = step
        self._states: States[_State] = States()
        self._whole = 0  # most rows of forwards that waiting features keep alive

    @property
    def growth(self) -> Growth | None:
        return self._step.growth

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
            levels = self._policy.max_expanded(item.draft_length) if drafts else 0
            self.cache.reserve(seq.seq_id, context + state.count + levels)
        except OutOfBlocksError:
            self._drop(seq.seq_id)
            return None
        tokens = seq.tokens[state.start + 1 : state.end + 1]
        state.rows += _row_keys(seq.tokens, state.start, tokens)
        state.ran = True
        return Span.of(seq.seq_id, context, tokens, wants_logits=drafts)

    def _admit(self, seq: SequenceView, state: _State) -> None:
        """Start the cache of a sequence, with rows shared with an earlier one."""
        keys = _row_keys(seq.tokens, 0, seq.tokens[1:])
        shared = self.cache.admit(seq.seq_id, keys)
        state.rows = keys[:shared]
        state.drop(max(0, shared - state.start))

    def _first(self, spans: Sequence[Span], trees: Sequence[Growing]) -> Logits:
        """Run the rows whose features have arrived."""
        parts = [part for span in spans for part in self._states[span.seq_id].take()]
        return self._run(spans, trees, torch.cat(_joined_features(parts), -1), fused=False)

    def _level(self, trees: list[Growing]) -> Logits:
        """Run the newest nodes of some trees, each with its parent's output as its feature."""
        inputs = []
        for tree in trees:
            assert tree.outputs is not None
            above = tree.above
            inputs.append(tree.outputs if above is None else tree.outputs.index_select(0, above))
        joined = torch.cat(inputs) if len(inputs) > 1 else inputs[0]
        return self._run([level_span(tree) for tree in trees], trees, joined, fused=True)

    def _run(
        self, spans: Sequence[Span], trees: Sequence[Growing], inputs: torch.Tensor, fused: bool
    ) -> Logits:
        """One pass of the head: logits at the trees' rows; the trees get its outputs ``[R, H]``
        there."""
        outputs, logits = self._step(self.cache.batch_of(spans), self.cache, inputs, fused)
        if not trees:
            return logits
        counts = [len(tree.fresh) or 1 for tree in trees]
        for tree, part in zip(trees, torch.split(outputs, counts), strict=True):
            tree.outputs = part
        return self._narrow(logits)

    def _narrow(self, logits: torch.Tensor) -> Logits:
        config = self.head.config
        if config.draft_vocab_size == config.vocab_size:
            return logits
        return Narrow(logits, self.head.draft_ids, config.vocab_size)

    def _made_up(self, trees: Sequence[Growing]) -> Logits:
        config, like = self.head.config, self.cache.kv(0)[0]
        for tree in trees:
            tree.outputs = like.new_zeros(1, config.hidden_size)
        return self._narrow(like.new_zeros(len(trees), config.draft_vocab_size))

    # -- observing ---------------------------------------------------------------------------

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """Store the features of what was committed; free drafted rows. Sequences for which it was
        never asked to draft are ignored."""
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
                state.waiting = [_Rows(copies, list(range(state.count)))]
        self._whole = 0

    def forget(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)
        self.cache.free(seq_id)

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
