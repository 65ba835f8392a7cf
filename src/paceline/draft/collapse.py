"""Detection of drafters whose acceptance collapses, per drafter and LoRA adapter.

A collapse raises no error: nothing but the acceptance rate shows it.

There are two expected rates for the first drafted token: the one stated by the card beside a head's
weights, and the drafter's rate so far. For each, a cumulative sum (Page 1954, Biometrika 41) of log
odds weighs whether the outcomes fit that rate or a collapsed one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from math import log

from paceline.core.batch import Commit
from paceline.core.sequence import SequenceState
from paceline.draft.origin import Origin

_log = logging.getLogger("paceline")

_LONG_TERM, _SHORT_TERM = 1000, 50  # drafts over which the drafter's own rates are averaged
_MIN_HISTORY = 200  # drafts after which the long-term rate counts as an expected rate
_MAX_TEMPERATURE = 1.0  # above it the drafts of any drafter fail
_PAUSE = 8192  # tokens of the engine after which a collapsed drafter is tried again
# Rates of a healthy and of a collapsed drafter, as shares of the expected rate. Between them lies
# 0.22: healthy heads have 0.2 to 0.4 of their usual rate on translations.
_HEALTHY, _COLLAPSED = 0.4, 0.1
# The log odds for a collapse at which it is reported. No request adds more than a third: a single
# odd text proves nothing.
_EVIDENCE = 15.0
_ALWAYS_EXAMINED_AFTER = 500  # tokens after which every drafter is examined
_MAX_EXAMINED, _EXAMINATION_INTERVAL = 8, 48  # texts, and tokens of a text between examinations
_KEPT_TEXTS = 3  # latest texts in which a cause is looked for
_UNKNOWN = "its weights may be damaged or for another model: measure both with paceline bench"

# The result of an examination: for many positions of a text, whether the first drafted token is
# right; and what is certainly wrong with the drafter ("": nothing).
Examination = tuple[Sequence[bool], str]
# The tokens of a sequence, a list that grows, and the number of its prompt's tokens.
PromptedText = tuple[Sequence[int], int]
# Drafter name, adapter name, and the number of the adapter loaded under that name.
WatchedKey = tuple[Hashable, str | None, int]


@dataclass(frozen=True)
class WatchedDrafter:
    """A drafter of unknown origin. ``stated``: the acceptance that its card states. ``examine``:
    measures it on a sequence's text. ``cause``: why it may have collapsed on such texts ("":
    unknown)."""

    stated: float | None = None
    examine: Callable[[SequenceState], Examination] = lambda seq: ((), "")
    cause: Callable[[Sequence[PromptedText]], str] = lambda texts: ""


@dataclass
class _DrafterHistory:
    """What is known of a drafter with one adapter. ``evidence``: log odds for a collapse, by the
    expected rate they refer to; ``evidence_by_seq``: what each running sequence added to them.
    ``examined``: ids of the sequences on which the drafter was examined."""

    drafts: int = 0
    long_term_rate: float = 0.0  # share of first drafted tokens that were right
    short_term_rate: float = 0.0
    examined: set[int] = field(default_factory=set)
    wrong: str = ""  # what is certainly wrong
    evidence: dict[str, float] = field(default_factory=dict)
    evidence_by_seq: dict[int, dict[str, float]] = field(default_factory=dict)
    recent: deque[PromptedText] = field(default_factory=lambda: deque(maxlen=_KEPT_TEXTS))

    def add(self, seq: SequenceState, right: bool, stated: float | None, healthy: bool) -> None:
        """Add the outcome of a draft, to the long-term rate only if the drafter is ``healthy``."""
        if seq.seq_id not in self.evidence_by_seq:
            self.recent.append((seq.tokens, seq.prompt_length))
        of_seq = self.evidence_by_seq.setdefault(seq.seq_id, {})
        history = self.long_term_rate if self.drafts >= _MIN_HISTORY else None
        for source, expected in (("its card says", stated), ("before it was", history)):
            if expected:
                high, low = _HEALTHY * expected, _COLLAPSED * expected
                odds = log(low / high if right else (1 - low) / (1 - high))
                odds = min(odds, _EVIDENCE / 3 - of_seq.get(source, 0.0))
                of_seq[source] = of_seq.get(source, 0.0) + odds
                self.evidence[source] = max(0.0, self.evidence.get(source, 0.0) + odds)
        self.drafts += 1
        self.short_term_rate += (right - self.short_term_rate) / min(self.drafts, _SHORT_TERM)
        if healthy:
            self.long_term_rate += (right - self.long_term_rate) / min(self.drafts, _LONG_TERM)

    def is_suspect(self, stated: float | None, tokens: int) -> bool:
        """Whether the rate is below what the card states, or below 1 without a card. After enough
        tokens always: a drafter that hardly drafts, or only where it is good, shows nothing."""
        known = self.drafts >= _SHORT_TERM
        below = known and self.short_term_rate < (stated or 1.0)
        return below or tokens >= _ALWAYS_EXAMINED_AFTER


class CollapseWatch:
    """Watches the drafters in ``drafters``, and warns once of each that collapses."""

    def __init__(self) -> None:
        self.drafters: dict[Hashable, WatchedDrafter | Origin] = {}
        self.default: Hashable = None  # the drafter of requests that name none
        self.tokens = 0  # committed by the engine so far
        self.collapsed: dict[WatchedKey, int] = {}  # value: at how many tokens it is tried again
        self.warned: set[WatchedKey] = set()
        self._histories: dict[WatchedKey, _DrafterHistory] = {}

    def is_paused(self, name: Hashable, seq: SequenceState) -> bool:
        """Whether a drafter has collapsed and is not tried again yet."""
        return self.tokens < self.collapsed.get(self._key(name, seq), 0)

    @staticmethod
    def _key(name: Hashable, seq: SequenceState) -> WatchedKey:
        return name, seq.params.lora, seq.adapter_number

    def _history(self, key: WatchedKey) -> _DrafterHistory:
        """The history of a key. A new one replaces that of an earlier adapter of the same name."""
        if key not in self._histories:
            for old in [k for k in self._histories if k[:2] == key[:2] and k[2] < key[2]]:
                del self._histories[old]
                self.collapsed.pop(old, None)
                self.warned.discard(old)
            self._histories[key] = _DrafterHistory()
        return self._histories[key]

    def record(self, name: Hashable, seq: SequenceState, commit: Commit) -> None:
        """Learn from a step in which ``name`` drafted (None: the one that the request names)."""
        self.tokens += len(commit.tokens)
        params = seq.params
        # Neither a request's own drafts nor logits processors say anything of the drafter.
        unrelated = seq.constraint or params.prediction or params.logits_processors
        if unrelated or params.temperature > _MAX_TEMPERATURE:
            return
        before = seq.generated - len(commit.tokens)
        if seq.generated // _EXAMINATION_INTERVAL > before // _EXAMINATION_INTERVAL:
            for watched in self.drafters:
                self._examine(self._key(watched, seq), seq)
        key = self._key(name or params.drafter or self.default, seq)
        if commit.reached and key[0] in self.drafters:
            # The first node is the likeliest token, in trees as in chains.
            self._add_outcomes(key, seq, [commit.path[:1] == (0,)])

    def _add_outcomes(
        self, key: WatchedKey, seq: SequenceState, outcomes: Sequence[bool], wrong: str = ""
    ) -> None:
        stated, history = self.drafters[key[0]].stated, self._history(key)
        for right in outcomes:
            history.add(seq, right, stated, key not in self.collapsed)
        history.wrong = history.wrong or wrong
        certain = [source for source, odds in history.evidence.items() if odds >= _EVIDENCE]
        if certain or wrong:
            self._collapse(key, [*certain, "its card says" if stated else "before it was"][0])
        elif key in self.collapsed and not any(history.evidence.values()) and not history.wrong:
            del self.collapsed[key]

    def _examine(self, key: WatchedKey, seq: SequenceState) -> None:
        watched, history = self.drafters[key[0]], self._history(key)
        done = seq.seq_id in history.examined or len(history.examined) >= _MAX_EXAMINED
        if done or key in self.warned or not history.is_suspect(watched.stated, self.tokens):
            return
        history.examined.add(seq.seq_id)
        try:
            outcomes, wrong = watched.examine(seq)
        except Exception as error:  # a failed examination must not stop decoding
            _log.warning("draft %s could not be examined: %s", key[0], error)
            return
        self._add_outcomes(key, seq, outcomes, wrong)

    def _collapse(self, key: WatchedKey, source: str) -> None:
        watched, history = self.drafters[key[0]], self._histories[key]
        # Half of the evidence stays: a drafter that is tried again has to prove itself.
        history.evidence = dict.fromkeys(history.evidence, _EVIDENCE / 2)
        history.evidence_by_seq.clear()
        self.collapsed[key] = self.tokens + _PAUSE
        if key not in self.warned:
            self.warned.add(key)
            usual = history.long_term_rate
            expected = usual if source.startswith("before") else watched.stated or 0.0
            _log.warning(
                "draft %s%s: acceptance %s: %.0f%% of first tokens, %s %.0f%%; %s",
                key[0],
                "" if key[1] is None else f" (adapter {key[1]})",
                "could be higher" if history.wrong else "has collapsed",
                100 * history.short_term_rate,
                source,
                100 * expected,
                history.wrong or watched.cause(history.recent) or _UNKNOWN,
            )

    def forget(self, seq_id: int) -> None:
        """A sequence has ended or starts over: later evidence of this id counts anew."""
        for history in self._histories.values():
            history.evidence_by_seq.pop(seq_id, None)
