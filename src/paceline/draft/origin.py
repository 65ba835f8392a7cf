"""What a drafter was made of, and what that says when its drafts fail: the acceptance that the card
of its weights states, and the causes that can be told, of which the layers are measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
from paceline.draft.spec import DraftContext, DraftSpec, Loading, Prepared
from paceline.errors import ModelLoadError
from paceline.model.names import model_path
from paceline.model.precision import usual_bits
from paceline.model.tokenizer import template_digest

# Of a card's table of acceptance (train/card.py): the first position, over all tasks.
_STATED = re.compile(r"^\| all \| [\d.]+ \| ([\d.]+)", re.M)
_FORM = re.compile(r"^Chat template: ([0-9a-f]{12}|none)$", re.M)
_TEXT, _READ = 128, 24  # last tokens of a text on which layers are compared, and those only read
_APART = 4  # positions from one that is drafted from to the next, where each has its own rows
_BLOCK = 16
_SURE, _FEWEST = 3.5, 48  # standard errors from which layers are wrong, and positions
# The same, from which those that it reads are right: others would show by then.
_UNLIKELY, _FEW = 1.0, 64
# Share of first tokens that are right, by what the card states, from which nothing else is looked
# for. Collapsed ones have a tenth of that (collapse.py); of sampled text fewer are right.
_SOUND, _RATHER = 0.25, 1.5  # and standard errors from which that is not chance
_FOREIGN = 0.25  # share of tokens, or of letters, from which a text is of another kind


@dataclass(frozen=True)
class Origin:
    """``prepared`` builds the drafter again, over another cache. ``gains``: by how much more likely
    the examined texts' tokens are to it with features of other layers than with its layers'; of 0,
    which first tokens were right."""

    spec: DraftSpec
    loading: Loading
    prepared: Prepared
    gains: dict[int, list[float]] = field(default_factory=dict)

    @cached_property
    def card(self) -> str:
        """What stands beside its weights; "" without a card."""
        if self.spec.holds == "nothing":
            return ""
        try:
            return Path(model_path(self.spec.argument() or ""), "README.md").read_text("utf-8")
        except (OSError, ValueError, ModelLoadError):
            return ""

    @property
    def stated(self) -> float | None:
        """How often the first drafted token is right by its card; None if that does not say it."""
        row = _STATED.search(self.card)
        return None if row is None else float(row[1])

    def cause(self, texts: Sequence[tuple[Sequence[int], int]]) -> str:
        """Why its drafts may fail on texts, of each the tokens and how many of them are the
        prompt; "" if that cannot be told."""
        cause = (
            self._language([token for text, prompt in texts for token in text[prompt:]])
            or self._template({token for text, prompt in texts for token in text[:prompt]})
            or self._bits()
        )
        return cause and f"perhaps {cause}"

    # -- measuring on a text ---------------------------------------------------------------------

    def examine(self, seq: SequenceState) -> tuple[list[bool], str]:
        """Whether the first drafted token is right at the last positions of an answer, and what is
        certainly wrong: it drafts better with features from the layers before or behind those that
        it reads (ids are counted in two ways). Takes one forward of the target. With an adapter,
        recurrent layers, or a target that several processes hold, nothing is measured;
        nor once it has shown that nothing is wrong."""
        target, tokens = self.loading.target, list(seq.tokens[-_TEXT:])
        given = tuple(self._rebuilt().features)
        elsewhere = target.ranks is not None or seq.params.lora is not None
        if not given or len(tokens) <= _READ or elsewhere or target.state_bytes:
            return [], ""
        others = (-1, 1) if len(given) > 1 else ()
        shifts = (0, *(shift for shift in others if self._errors(shift, _FEW) > -_UNLIKELY))
        if len(shifts) == 1 and self._is_healthy():
            return [], ""
        choices = {shift: tuple(layer + shift for layer in given) for shift in shifts}
        layers = {s: n for s, n in choices.items() if min(n) >= 0 and max(n) <= target.num_layers}
        out = self._forward(tokens, sorted({layer for ids in layers.values() for layer in ids}))
        drafts = {shift: self._first_tokens(ids, tokens, out) for shift, ids in layers.items()}
        # A prompt is not the target's own text, of which the card speaks.
        outcomes = [right for right, _ in drafts[0]][-seq.generated :]
        self.gains.setdefault(0, []).extend(outcomes)
        for shift in layers.keys() - {0}:
            gains = self.gains.setdefault(shift, [])
            pairs = zip(drafts[shift], drafts[0], strict=True)
            gains += [chance - usual for (_, chance), (_, usual) in pairs]
            if self._errors(shift, _FEWEST) > _SURE:
                right = replace(self.spec, feature_layers=layers[shift])  # type: ignore[call-arg]
                return outcomes, (
                    f"it reads the inputs of layers {list(given)}, but sampled drafts would be "
                    f"right {fmean(gains):.1%} more often from {list(layers[shift])}: its layer "
                    f"numbers are one off; use --draft {right}"
                )
        return outcomes, ""

    def _is_healthy(self) -> bool:
        """Whether rather surely enough first tokens were right in the examined texts."""
        right = self.gains.get(0, (0,))
        share = fmean(right)
        error = (share * (1 - share) / len(right)) ** 0.5
        return bool(share - _RATHER * error > _SOUND * (self.stated or 1.0))

    def _errors(self, shift: int, fewest: int) -> float:
        """By how many standard errors the texts' tokens are likelier with other layers; 0 with no
        more positions than ``fewest``."""
        gains = self.gains.get(shift, ())
        if len(gains) <= fewest:
            return 0.0
        return float(fmean(gains) / max(stdev(gains) / len(gains) ** 0.5, 1e-9))

    def _rebuilt(self, blocks: int = -(-_TEXT // _BLOCK)) -> Drafter:
        """Over a cache that by default has room for one text."""
        target = self.loading.target
        cache = target.new_cache(blocks, _BLOCK, False)
        return self.prepared.build(DraftContext(target, cache, torch.Generator(target.device)))

    def _forward(self, tokens: list[int], features: Sequence[int]) -> ModelOutput:
        """The target over the whole text: the features of all rows."""
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
        """At each position behind the first ``_READ``, with these features: whether the likeliest
        token is right, and the probability of the one that is, which tells more by far."""
        drafter: Any = self._rebuilt()
        drafter.features = layers
        if hasattr(drafter, "first_logits"):
            return _judged(drafter.first_logits(tokens, out)[_READ - 2 :], tokens[_READ:])
        # Else it drafts behind some positions at once, each as a sequence of its own.
        ends = range(_READ, len(tokens), _APART)
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
        for tree, token in zip(trees, tokens[_READ::_APART], strict=True):
            if tree.q is None:  # the likeliest, whatever the temperature
                right = tree.tokens[:1].tolist() == [token]
                first.append((right, float(right)))
            else:
                first += _judged(tree.q[:1].log(), [token])
        return first

    # -- what else can be told -------------------------------------------------------------------

    def _template(self, prompts: set[int]) -> str:
        """Whether it was trained on chats of another form, by its card, or prompts lack the marks
        that the target's chat template writes."""
        tokenizer = self.loading.tokenizer
        if tokenizer.chat_template is None:
            return ""
        stated, ours = _FORM.search(self.card), template_digest(tokenizer)
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
        """Whether these are tokens that the head cannot draft, or letters that are not Latin."""
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
        bits = usual_bits(self.loading.target.hf)
        if self.spec.holds != "head" or not 0 < bits <= 8:
            return ""
        return (
            f"the target's weights have {bits} bits, and a head reads other features then: compare "
            "with --quantize none"
        )


def _judged(logits: torch.Tensor, tokens: Sequence[int]) -> list[tuple[bool, float]]:
    """For each row of logits ``[n, vocab]``: whether the likeliest token is that of ``tokens``, and
    the probability of that."""
    chances, rows = logits.float().softmax(-1), range(len(tokens))
    likeliest = chances.argmax(-1).tolist()
    given = chances[list(rows), list(tokens)].tolist()
    return [(likeliest[row] == tokens[row], given[row]) for row in rows]


def prepare(spec: DraftSpec, loading: Loading) -> Prepared:
    """``spec.prepare``; the drafter's ``origin`` is known then."""
    prepared = spec.prepare(loading)

    def build(context: DraftContext) -> Drafter:
        drafter: Any = prepared.build(context)
        with suppress(AttributeError):  # another package's may have slots
            drafter.origin = Origin(spec, loading, prepared)
        return drafter  # type: ignore[no-any-return]

    return replace(prepared, build=build)
