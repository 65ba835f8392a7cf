"""Drafters whose head reads the target's features (hidden states), which wait until it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch

from paceline.core.batch import Commit, ModelOutput, Slice, Span
from paceline.core.sequence import SequenceView
from paceline.core.transfer import to_device
from paceline.draft.base import Drafter
from paceline.draft.heads.checkpoint import FILES
from paceline.draft.heads.network import HeadShape
from paceline.draft.spec import (
    DraftContext,
    DraftInfo,
    Note,
    PreparedDraft,
    Target,
    TreeSpec,
    option,
    reduced,
)
from paceline.draft.trees.grow import Logits, ReducedLogits
from paceline.draft.trees.levels import CachedRows, CachingDrafter, GrowthSettings
from paceline.model.paged.cache import LayerShape, PagedCache, bytes_per_token
from paceline.model.quantised.convert import Scheme, quantise_module
from paceline.model.target import CausalModel

# The most features kept for a sequence that does not draft: the oldest are dropped, which costs a
# little acceptance. Also the most rows of whole forwards that these features may keep in memory:
# beyond it they are copied. build.py leaves memory for both and for the last step's rows.
MAX_PENDING_FEATURES = 512


def feature_drafter(
    target: CausalModel,
    shapes: list[LayerShape],
    layers: int,
    make: Callable[[DraftContext, PagedCache], Drafter],
    rope_switch: int | None = None,
) -> PreparedDraft:
    """A drafter with a cache of these ``shapes`` that reads ``layers`` layers of the target."""

    def build(context: DraftContext) -> Drafter:
        return make(context, context.new_cache(shapes, target.dtype, rope_switch=rope_switch))

    kept = layers * target.hidden_size * target.dtype.itemsize
    return PreparedDraft(build, bytes_per_token(shapes, target.dtype), feature_bytes=kept)


QUANTIZE = ("int8", "none")


def ready_head(head: Any, target: CausalModel, quantize: str) -> Any:
    """``head`` on the target's device, in its dtype. ``quantize`` "int8": its linear layers are
    rounded to 8 bits if the kernels run it in bf16."""
    head = head.to(target.device, target.dtype).eval().requires_grad_(False)
    rounds = quantize == "int8" and not target.backend.runs_torch
    if rounds and target.dtype == torch.bfloat16:
        quantise_module(head, Scheme("int8", finer=True))
    return head


@dataclass(frozen=True)
class HeadSpec(TreeSpec):
    """A head by folder, built-in or hub name; chains. ``feature_layers``: layers of the target
    whose inputs it reads, in place of its config's. ``quantize``: "int8" or "none"."""

    argument_kind = "head"
    weight_files = FILES

    path: str = option(needs="a head")
    _: KW_ONLY
    feature_layers: tuple[int, ...] | None = option(None, like="2x16x29 (layers of the target)")
    quantize: str = option("int8", choices=QUANTIZE)

    def examination(
        self, text: str, config: HeadShape, size: int, target: Target, more: Sequence[Note] = ()
    ) -> DraftInfo:
        """What doctor says of a head with ``size`` weights that fits the target."""
        notes = [("head-fits", text, None), *more, *reduced(config.columns, target)]
        features = len(config.feature_layers) * target.hidden_size
        cached = 2 * config.layers * config.kv_heads * config.head_dim
        return DraftInfo(tuple(notes), size, cached, features)


class FeatureRow(NamedTuple):
    """A row of a forward's features. ``layers``: the features of each layer, ``[T, hidden]``."""

    layers: tuple[torch.Tensor, ...]
    row: int


def join_features(features: Sequence[FeatureRow]) -> list[torch.Tensor]:
    """These rows, in order: one tensor ``[n, hidden]`` per layer."""
    picked: list[list[torch.Tensor]] = []
    for _, group in groupby(features, key=lambda feature: id(feature.layers)):
        same = list(group)
        layers, rows = same[0].layers, [feature.row for feature in same]
        if rows == list(range(rows[0], rows[-1] + 1)):
            picked.append([layer[rows[0] : rows[-1] + 1] for layer in layers])
        else:
            index = to_device(rows, layers[0].device)
            picked.append([layer.index_select(0, index) for layer in layers])
    columns = [list(column) for column in zip(*picked, strict=True)]
    return [torch.cat(column) if len(column) > 1 else column[0] for column in columns]


@dataclass
class FeatureRows(CachedRows):
    """A head's rows of a sequence. ``keys``: their tokens. ``pending``: features of the positions
    from ``start`` on, over which the head has not run. Earlier positions without a row (a shared
    prefix) are missing from the head's context."""

    start: int = 0
    pending: list[FeatureRow] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The first position whose feature is not known."""
        return self.start + len(self.pending)

    def add(self, position: int, layers: tuple[torch.Tensor, ...], rows: list[int]) -> None:
        """Add features of consecutive positions from ``position`` on; known ones are ignored."""
        if position > self.end:  # some positions between were not seen
            self.pending, self.start = [], position
        self.pending += [FeatureRow(layers, row) for row in rows[self.end - position :]]

    def drop(self, excess: int) -> None:
        """Drop the ``excess`` oldest pending features."""
        self.start += excess
        del self.pending[:excess]

    def pop_all(self) -> list[FeatureRow]:
        """Remove and return all pending features, for the head to run over."""
        self.start, features, self.pending = self.end, self.pending, []
        return features


class FeatureDrafter(CachingDrafter[FeatureRows]):
    """Drafts with a head that has a cache row for each position of the text with a known feature.
    Features are joined only when the head runs: a step without drafts runs no tensor operation."""

    sees_prompts = True  # it runs over prompts chunk by chunk, during prefill
    _token_offset = 0  # position of a row's token minus the position of its feature
    _follows_grammar = False

    def __init__(self, step: Any, settings: GrowthSettings) -> None:
        """``step`` runs the head: an EagleStep or a BlockStep."""
        config = step.head.config
        super().__init__(settings, config.max_positions)
        self.head, self._step, self.features = step.head, step, config.feature_layers
        self._retained_rows = 0  # at most so many rows of forwards are kept for pending features

    # -- proposing ---------------------------------------------------------------------------

    def _context_span(self, item: Slice) -> Span | None:
        """Rows for the pending features; None if there is nothing to run."""
        seq = item.seq
        if not seq.params.may_draft:
            return None
        rows = self._rows.get_or_make(seq, lambda seq: FeatureRows(start=seq.cached))
        if seq.seq_id not in self.cache:
            self._admit(seq, rows)
        complete = rows.end == len(seq.tokens) - 1  # the last token has no feature yet
        drafts = item.decodes and item.draft_length > 0 and complete
        # Prompt chunks run at once; the features of steps without a draft wait for the next draft.
        if not rows.pending or not (drafts or not item.decodes):
            return None
        tokens = seq.tokens[rows.start + self._token_offset : rows.end + self._token_offset]
        nodes = self._rows_for_nodes(item.draft_length) if drafts else 0
        span = self._next_rows(seq.seq_id, tokens, nodes, drafts)
        if span is not None:
            rows.keys += _row_keys(seq.tokens, rows.start, tokens)
        else:  # without its context the head continues with later features
            self.cache.admit(seq.seq_id, ())
            self._rows[seq.seq_id] = FeatureRows(start=rows.end)
        return span

    def _admit(self, seq: SequenceView, rows: FeatureRows) -> None:
        """Start the cache of a sequence, which shares rows of a common prefix with earlier ones."""
        tokens = seq.tokens[self._token_offset : len(seq.tokens) - 1 + self._token_offset]
        keys = _row_keys(seq.tokens, 0, tokens)
        rows.cached = self.cache.admit(seq.seq_id, keys, adapter=seq.adapter_number)
        rows.keys = keys[: rows.cached]
        rows.drop(max(0, rows.cached - rows.start))

    def _pop_features(self, spans: Sequence[Span]) -> torch.Tensor:
        """The pending features of these spans' rows, ``[T, layers * hidden]``."""
        rows = [row for span in spans for row in self._feature_rows(span)]
        return torch.cat(join_features(rows), -1)

    def _feature_rows(self, span: Span) -> list[FeatureRow]:
        """The features of the rows of a span."""
        return self._rows[span.seq_id].pop_all()

    def _as_target_logits(self, logits: torch.Tensor) -> Logits:
        config = self.head.config
        if not config.reduced:
            return logits
        return ReducedLogits(logits, self.head.draft_ids, config.vocab_size)

    # -- observing ---------------------------------------------------------------------------

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """Store the features of the committed tokens, and free the rows of drafted nodes. Sequences
        without drafts so far are ignored."""
        super().observe(commits, out)
        known = [commit for commit in commits if commit.seq_id in self._rows]
        if not known:
            return
        if self._retained_rows > MAX_PENDING_FEATURES:
            self._copy_pending()
        layers = tuple(out.features[layer] for layer in self.features)
        self._retained_rows += len(layers[0])
        for commit in known:
            rows = self._rows[commit.seq_id]
            rows.drop(max(0, len(rows.pending) - MAX_PENDING_FEATURES))
            nodes = commit.row + commit.scheduled
            new = [*range(commit.row, nodes), *[nodes + node for node in commit.path]]
            rows.add(commit.position, layers, new)
            self._commit_rows(commit.seq_id)

    @torch.inference_mode()
    def _copy_pending(self) -> None:
        """Copy all pending features: a stored row keeps the tensor of its whole forward alive."""
        for rows in self._rows.values():
            if rows.pending:
                copies = tuple(layer.clone() for layer in join_features(rows.pending))
                rows.pending = [FeatureRow(copies, n) for n in range(len(rows.pending))]
        self._retained_rows = 0


def _row_keys(tokens: Sequence[int], start: int, row_tokens: Sequence[int]) -> list[int]:
    """Keys of rows for prefix sharing: each row's token; the first one includes the token x0."""
    keys = list(row_tokens)
    if start == 0 and keys:
        keys[0] = (keys[0] * 1_000_003 + tokens[0] + 1) & 0x7FFFFFFF
    return keys
