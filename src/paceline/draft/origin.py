"""What a drafter was built from, and why its drafts fail: the acceptance stated on the card of its
weights, a measurement with other feature layers, and causes that texts and configs suggest."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice, Span
from paceline.core.params import SamplingParams
from paceline.core.sequence import SEQUENCE_IDS, SequenceState
from paceline.draft.base import Drafter
from paceline.draft.spec import DraftContext, DraftSpec, LoadContext, PreparedDraft
from paceline.errors import ModelLoadError
from paceline.model.names import model_path
from paceline.model.precision import usual_bits
from paceline.model.tokenizer import template_digest

# In the card's table of acceptance (train/trainer.py): the first position, over all tasks.
_STATED = re.compile(r"^\| all \| [\d.]+ \| ([\d.]+)", re.M)
_TEMPLATE = re.compile(r"^Chat template: ([0-9a-f]{12}|none)$", re.M)
_TEXT, _CONTEXT = 128, 24  # last tokens of a text that are examined; the first of these only read
_STRIDE = 4  # draft from every so many positions, where each position needs rows of its own
_BLOCK = 16
# Other layers are better from so many standard errors on, with more than so many positions.
_BETTER, _MIN_POSITIONS = 3.5, 48
# With so many positions, other layers below so many standard errors are not tried any more.
_NOT_BETTER, _ENOUGH_POSITIONS = 1.0, 64
# A drafter is healthy if its share of right first tokens is above ``_HEALTHY`` of what the card
# states, by ``_MARGIN`` standard errors: then it is not examined any more. Collapsed drafters have
# a tenth of the stated share (collapse.py); for sampled text it is lower.
_HEALTHY, _MARGIN = 0.25, 1.5
_FOREIGN = 0.25  # a text with a larger share of unknown tokens, or letters, is of another kind


@dataclass(frozen=True)
class Origin:
    """``prepared`` builds the drafter again, over another cache. ``gains[shift]``: at the examined
    positions, by how much the probability of the right token rises if the drafter gets the features
    of layers ``shift`` further on. ``gains[0]``: whether its first token was right."""

    spec: DraftSpec
    loading: LoadContext
    prepared: PreparedDraft
    gains: dict[int, list[float]] = field(default_factory=dict)

    @cached_property
    def card(self) -> str:
        """The README.md beside its weights; "" without one."""
        if self.spec.argument_kind == "nothing":
            return ""
        try:
            return Path(model_path(self.spec.argument() or ""), "README.md").read_text("utf-8")
        except (OSError, ValueError, ModelLoadError):
            return ""

    @property
    def stated(self) -> float | None:
        """How often the first drafted token is right, by the card; None if it does not say."""
        row = _STATED.search(self.card)
        return None if row is None else float(row[1])

    def cause(self, texts: Sequence[tuple[Sequence[int], int]]) -> str:
        """Why drafts may fail on ``texts`` (tokens, number of prompt tokens); "" if unknown."""
        cause = (
            self._language([token for text, prompt in texts for token in text[prompt:]])
            or self._template({token for text, prompt in texts for token in text[:prompt]})
            or self._bits()
        )
        return cause and f"perhaps {cause}"

    # -- measuring on a text ---------------------------------------------------------------------

    def examine(self, seq: SequenceState) -> tuple[list[bool], str]:
        """Measure the drafter on the last positions of a text, by one forward of the target.

        Returns whether the first drafted token is right at each position of the answer, and what is
        certainly wrong, if anything: that it drafts better with features of the layers one before
        or one after those it reads (two conventions number layers). Nothing is measured with a LoRA
        adapter, with recurrent layers, for a target in several processes, or once the drafter has
        turned out to be healthy.
        """
        if seq.params.lora is not None or len(seq.tokens) <= _CONTEXT:
            return [], ""
        choices = self.layer_choices
        shifts = [s for s in choices if not s or self.errors(s, _ENOUGH_POSITIONS) > -_NOT_BETTER]
        if not shifts or (len(shifts) == 1 and self._is_healthy()):
            return [], ""
        measured = {shift: choices[shift] for shift in shifts}
        outcomes = self.measure(seq.tokens, seq.generated, measured)
        better = self.better_layers()
        if better is None:
            return outcomes, ""
        spec, gain = better
        return outcomes, (
            f"it reads the inputs of layers {list(choices[0])}, but sampled drafts would be right "
            f"{gain:.1%} more often from {list(spec.feature_layers)}: its layer numbers are one "
            f"off; use --draft {spec}"
        )

    @cached_property
    def layer_choices(self) -> dict[int, tuple[int, ...]]:
        """The feature layers by shift: the drafter's own (0) and, if there are several, those one
        before (-1) and one after (1), where they exist. Empty if nothing can be measured."""
        target, usual = self.loading.target, tuple(self._rebuilt().features)
        if not usual or target.ranks is not None or target.state_bytes:
            return {}
        shifts = (0, -1, 1) if len(usual) > 1 else (0,)
        choices = {shift: tuple(layer + shift for layer in usual) for shift in shifts}
        return {s: n for s, n in choices.items() if min(n) >= 0 and max(n) <= target.num_layers}

    def measure(
        self, tokens: Sequence[int], generated: int, layers: Mapping[int, tuple[int, ...]]
    ) -> list[bool]:
        """Add to ``gains`` what the last positions of a text show with the features of ``layers``,
        by shift, 0 among them. Returns whether the first drafted token is right at each position of
        the ``generated`` tokens: the card speaks of the target's own text, not of prompts."""
        tokens = list(tokens[-_TEXT:])
        out = self._forward(tokens, sorted({layer for ids in layers.values() for layer in ids}))
        drafts = {shift: self._first_tokens(ids, tokens, out) for shift, ids in layers.items()}
        outcomes = [right for right, _ in drafts[0]][-generated:]
        self.gains.setdefault(0, []).extend(outcomes)
        for shift in layers.keys() - {0}:
            pairs = zip(drafts[shift], drafts[0], strict=True)
            gains = [shifted - unshifted for (_, shifted), (_, unshifted) in pairs]
            self.gains.setdefault(shift, []).extend(gains)
        return outcomes

    def better_layers(self) -> tuple[Any, float] | None:
        """The spec with the layers one before or one after, if it drafts better with these beyond
        doubt, and by how much the probability of the right token rises."""
        choices = self.layer_choices
        for shift in self.gains.keys() & choices.keys() - {0}:
            if self.errors(shift, _MIN_POSITIONS) > _BETTER:
                spec: Any = self.spec
                return replace(spec, feature_layers=choices[shift]), fmean(self.gains[shift])
        return None

    def _is_healthy(self) -> bool:
        """Whether so many first tokens were right in the examined texts that it is not chance."""
        right = self.gains.get(0, (0,))
        share = fmean(right)
        error = (share * (1 - share) / len(right)) ** 0.5
        return bool(share - _MARGIN * error > _HEALTHY * (self.stated or 1.0))

    def errors(self, shift: int, positions: int = _MIN_POSITIONS) -> float:
        """The mean gain of shifted layers in standard errors; 0 with up to so many positions."""
        gains = self.gains.get(shift, ())
        if len(gains) <= positions:
            return 0.0
        return float(fmean(gains) / max(stdev(gains) / len(gains) ** 0.5, 1e-9))

    def _rebuilt(self, blocks: int = -(-_TEXT // _BLOCK)) -> Drafter:
        """The drafter over a new cache of ``blocks`` blocks, by default enough for one text."""
        target = self.loading.target
        cache = target.new_cache(blocks, _BLOCK, False)
        return self.prepared.build(DraftContext(target, cache, torch.Generator(target.device)))

    def _forward(self, tokens: list[int], features: Sequence[int]) -> ModelOutput:
        """Run the target over the text: features of all rows."""
        target, seq_id = self.loading.target, next(SEQUENCE_IDS)
        cache = target.new_cache(-(-len(tokens) // _BLOCK), _BLOCK, False)
        cache.admit(seq_id, (), False)
        cache.reserve(seq_id, len(tokens))
        span = Span.of(seq_id, 0, tokens)
        with torch.inference_mode():
            return target(cache.batch_of([span], features), cache)

    def _first_tokens(
        self, layers: tuple[int, ...], tokens: list[int], out: ModelOutput
    ) -> list[tuple[bool, float]]:
        """At each position after the first ``_CONTEXT``, with the features of ``layers``: whether
        the likeliest token is right, and the probability of the right one, which tells far more."""
        drafter: Any = self._rebuilt()
        drafter.features = layers
        if hasattr(drafter, "first_logits"):
            return _outcomes(drafter.first_logits(tokens, out)[_CONTEXT - 2 :], tokens[_CONTEXT:])
        # Otherwise it drafts from every ``_STRIDE``-th position, each as a sequence of its own.
        ends = range(_CONTEXT, len(tokens), _STRIDE)
        drafter = self._rebuilt(sum(-(-end // _BLOCK) + 2 for end in ends))
        drafter.features = layers
        params = SamplingParams(temperature=1.0, max_tokens=_TEXT)
        seqs = [SequenceState(next(SEQUENCE_IDS), tokens[:end], 1, params) for end in ends]
        drafter.propose(Plan(tuple(Slice(seq.view(), len(seq.tokens) - 1) for seq in seqs)))
        read = [Commit(seq.seq_id, (), scheduled=len(seq.tokens) - 1, position=0) for seq in seqs]
        drafter.observe(read, out)
        for seq in seqs:
            seq.cached = len(seq.tokens) - 1
        first: list[tuple[bool, float]] = []
        trees = drafter.propose(Plan(tuple(Slice(seq.view(), 1, 1) for seq in seqs)))
        for tree, token in zip(trees, tokens[_CONTEXT::_STRIDE], strict=True):
            if tree.q is None:  # it drafts the likeliest token at any temperature
                right = tree.tokens[:1].tolist() == [token]
                first.append((right, float(right)))
            else:
                first += _outcomes(tree.q[:1].log(), [token])
        return first

    # -- other causes ----------------------------------------------------------------------------

    def _template(self, prompts: set[int]) -> str:
        """A cause if, by its card, it was trained with another chat template, or if the prompts'
        tokens lack the special tokens that the target's template writes; else ""."""
        tokenizer = self.loading.tokenizer
        if tokenizer.chat_template is None:
            return ""
        stated, ours = _TEMPLATE.search(self.card), template_digest(tokenizer)
        if stated and stated[1] != ours:
            return (
                f"its card names the chat template {stated[1]}, and the target's is {ours}: give "
                "the target the template that it was trained on, or train the draft on this one"
            )
        chat = [{"role": "user", "content": "?"}]
        try:
            text = str(tokenizer.apply_chat_template(chat, tokenize=False))
        except Exception:  # of any kind: the template's own, or jinja's
            return ""
        special = set(tokenizer.added_tokens_decoder) - {tokenizer.bos_token_id}
        marks = special & set(tokenizer.encode(text, add_special_tokens=False))
        if not marks or marks & prompts:
            return ""
        shown = tokenizer.decode([min(marks)])
        return (
            f"prompts are not in the form of the target's chat template, which writes {shown}: "
            "send them as chats, or train the draft on this form"
        )

    def _language(self, tokens: list[int]) -> str:
        """A cause if the head cannot draft many of these tokens, or the letters are not Latin."""
        drafter = self._rebuilt()
        known = getattr(getattr(drafter, "head", None), "draft_ids", None)
        if known is not None and tokens:
            drafted = set(known.tolist())
            share = sum(token not in drafted for token in tokens) / len(tokens)
            if share > _FOREIGN:
                return (
                    f"{share:.0%} of these texts are none of the {len(drafted):,} tokens that the "
                    "head drafts: it was trained on another language or another kind of text"
                )
        letters = [c for c in self.loading.tokenizer.decode(tokens) if c.isalpha()]
        if letters and sum(c > "\u024f" for c in letters) > _FOREIGN * len(letters):
            return "the texts are not in Latin letters: the draft may not know its language"
        return ""

    def _bits(self) -> str:
        """A cause if it is a head and the target's weights are quantised."""
        bits = usual_bits(self.loading.target.hf)
        if self.spec.argument_kind != "head" or not 0 < bits <= 8:
            return ""
        return (
            f"the target's weights have {bits} bits, and a head reads other features then: compare "
            "with --quantize none"
        )


def _outcomes(logits: torch.Tensor, tokens: Sequence[int]) -> list[tuple[bool, float]]:
    """For each row of logits ``[n, vocab]``: whether ``tokens`` has the likeliest token, and the
    probability of its token."""
    probs = logits.float().softmax(-1)
    likeliest = probs.argmax(-1).tolist()
    chances = probs[list(range(len(tokens))), list(tokens)].tolist()
    rows = zip(likeliest, tokens, chances, strict=True)
    return [(best == token, chance) for best, token, chance in rows]


def prepare(spec: DraftSpec, loading: LoadContext) -> PreparedDraft:
    """``spec.prepare`` whose drafter has an attribute ``origin``."""
    prepared = spec.prepare(loading)

    def build(context: DraftContext) -> Drafter:
        drafter: Any = prepared.build(context)
        with suppress(AttributeError):  # another package's may have slots
            drafter.origin = Origin(spec, loading, prepared)
        return drafter  # type: ignore[no-any-return]

    return replace(prepared, build=build)
