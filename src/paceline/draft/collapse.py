"""Acceptance that collapses without an error is seen: a running comparison by drafter and adapter.

Two figures say how often the first drafted token should be right: the card beside a head's weights
has the one, the drafter's drafts so far the other. Against each a cumulative sum (Page 1954,
Biometrika 41) weighs whether drafts are rather right as often as it says, or as after a collapse.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from math import log

from paceline.core.batch import Commit
from paceline.core.sequence import SequenceState

_log = logging.getLogger("paceline")

_HISTORY, _LATELY = 1000, 50  # drafts over which its own acceptance is averaged
_KNOWN = 200  # drafts after which it has a history
_WARMEST = 1.0  # temperature above which drafts fail whatever the drafter
_REST = 8192  # tokens of the engine after which a collapsed drafter is tried again
# Between healthy and collapsed, as shares of what is expected, lies 0.22: healthy heads have 0.2 to
# 0.4 of their usual rate on translations.
_HEALTHY, _COLLAPSED = 0.4, 0.1
# The logarithm of the odds for a collapse at which it is said. No request adds more than a third:
# one odd text proves nothing.
_EVIDENCE = 15.0
_GIVEN_UP = 500  # tokens after which each is examined
_EXAMINED, _TEXT = 8, 48  # texts at most, and tokens between looks at one
_RECENT = 3  # texts in which a cause is looked for
_UNKNOWN = "its weights may be damaged or for another model: measure both with paceline bench"

# What an examination found: whether the first drafted token is right, at many positions of a text,
# and what is certainly wrong; "" if nothing is.
Examination = tuple[Sequence[bool], str]
# The tokens of a sequence, which grow, and how many of them are its prompt.
PromptedText = tuple[Sequence[int], int]
# A drafter's name, an adapter's, and the number of what is loaded under that name.
WatchedKey = tuple[Hashable, str | None, int]


@dataclass(frozen=True)
class Watched:
    """What is known of a drafter: the acceptance that its card states; how to examine it on a
    sequence's text; and why it may have collapsed on such texts ("": not known)."""

    stated: float | None = None
    examine: Callable[[SequenceState], Examination] = lambda seq: ((), "")
    cause: Callable[[Sequence[PromptedText]], str] = lambda texts: ""


@dataclass
class _Compared:
    """A drafter with an adapter. ``evidence`` for a collapse by what acceptance is compared with;
    ``added``: to that by each running sequence; ``texts``: sequences on which it was examined."""

    drafts: int = 0
    usual: float = 0.0  # share of first tokens that are right, over ``_HISTORY`` drafts
    lately: float = 0.0
    texts: set[int] = field(default_factory=set)
    wrong: str = ""  # what is certainly wrong, and stays so
    evidence: dict[str, float] = field(default_factory=dict)
    added: dict[int, dict[str, float]] = field(default_factory=dict)
    recent: deque[PromptedText] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def see(self, seq: SequenceState, right: bool, stated: float | None, counts: bool) -> None:
        """A draft's outcome; ``counts``: it becomes part of the history."""
        if seq.seq_id not in self.added:
            self.recent.append((seq.tokens, seq.prompt_length))
        added = self.added.setdefault(seq.seq_id, {})
        history = self.usual if self.drafts >= _KNOWN else None
        for against, rate in (("its card says", stated), ("before it was", history)):
            if rate:
                healthy, collapsed = _HEALTHY * rate, _COLLAPSED * rate
                odds = log(collapsed / healthy if right else (1 - collapsed) / (1 - healthy))
                odds = min(odds, _EVIDENCE / 3 - added.get(against, 0.0))
                added[against] = added.get(against, 0.0) + odds
                self.evidence[against] = max(0.0, self.evidence.get(against, 0.0) + odds)
        self.drafts += 1
        self.lately += (right - self.lately) / min(self.drafts, _LATELY)
        if counts:
            self.usual += (right - self.usual) / min(self.drafts, _HISTORY)

    def is_doubtful(self, stated: float | None, tokens: int) -> bool:
        """Whether it is right less often than its card states, or not always without a card; in the
        end of each, as one that hardly drafts shows nothing, or only texts that suit it."""
        known = self.drafts >= _LATELY
        return tokens >= _GIVEN_UP or (known and self.lately < (stated or 1.0))


class CollapseWatch:
    """Compares the drafters that it is told of, and warns once of each that collapses."""

    def __init__(self) -> None:
        self.drafters: dict[Hashable, Watched] = {}
        self.default: Hashable = None  # who drafts for requests that name no drafter
        self.tokens = 0
        self.collapsed: dict[WatchedKey, int] = {}  # the token from which each is tried again
        self.warned: set[WatchedKey] = set()
        self._compared: dict[WatchedKey, _Compared] = {}

    def rests(self, name: Hashable, seq: SequenceState) -> bool:
        """Whether a drafter has collapsed and is not to be tried again yet."""
        return self.tokens < self.collapsed.get(self._key(name, seq), 0)

    @staticmethod
    def _key(name: Hashable, seq: SequenceState) -> WatchedKey:
        return name, seq.params.lora, seq.adapter_number

    def _compare(self, key: WatchedKey) -> _Compared:
        """What is known under a key; adapters loaded before under its name are forgotten."""
        if key not in self._compared:
            for old in [k for k in self._compared if k[:2] == key[:2] and k[2] < key[2]]:
                del self._compared[old]
                self.collapsed.pop(old, None)
                self.warned.discard(old)
            self._compared[key] = _Compared()
        return self._compared[key]

    def record(self, name: Hashable, seq: SequenceState, commit: Commit) -> None:
        """What a step showed of the drafter ``name`` (None: the one that the request names)."""
        self.tokens += len(commit.tokens)
        params = seq.params
        # Drafts of a request's own, and distributions that no drafter knows, show nothing.
        brought = seq.constraint or params.prediction or params.logits_processors
        if brought or params.temperature > _WARMEST:
            return
        if seq.generated // _TEXT > (seq.generated - len(commit.tokens)) // _TEXT:
            for watched in self.drafters:
                self._examine(self._key(watched, seq), seq)
        key = self._key(name or params.drafter or self.default, seq)
        if commit.reached and key[0] in self.drafters:
            # The first node is the likeliest token, in trees as in chains.
            self._see(key, seq, [commit.path[:1] == (0,)])

    def _see(
        self, key: WatchedKey, seq: SequenceState, outcomes: Sequence[bool], wrong: str = ""
    ) -> None:
        stated, compared = self.drafters[key[0]].stated, self._compare(key)
        for right in outcomes:
            compared.see(seq, right, stated, key not in self.collapsed)
        compared.wrong = compared.wrong or wrong
        sure = [against for against, odds in compared.evidence.items() if odds >= _EVIDENCE]
        if sure or wrong:
            self._collapse(key, [*sure, "its card says" if stated else "before it was"][0])
        elif key in self.collapsed and not any(compared.evidence.values()) and not compared.wrong:
            del self.collapsed[key]

    def _examine(self, key: WatchedKey, seq: SequenceState) -> None:
        watched, compared = self.drafters[key[0]], self._compare(key)
        seen = seq.seq_id in compared.texts or len(compared.texts) >= _EXAMINED
        if seen or key in self.warned or not compared.is_doubtful(watched.stated, self.tokens):
            return
        compared.texts.add(seq.seq_id)
        try:
            outcomes, wrong = watched.examine(seq)
        except Exception as error:  # decoding goes on whatever happens to it
            _log.warning("draft %s could not be examined: %s", key[0], error)
            return
        self._see(key, seq, outcomes, wrong)

    def _collapse(self, key: WatchedKey, against: str) -> None:
        watched, compared = self.drafters[key[0]], self._compared[key]
        # Half of the evidence stays: one that is tried again has to prove itself.
        compared.evidence = dict.fromkeys(compared.evidence, _EVIDENCE / 2)
        compared.added.clear()
        self.collapsed[key] = self.tokens + _REST
        if key not in self.warned:
            self.warned.add(key)
            expected = compared.usual if against.startswith("before") else watched.stated or 0.0
            _log.warning(
                "draft %s%s: acceptance %s: %.0f%% of first tokens, %s %.0f%%; %s",
                key[0],
                "" if key[1] is None else f" (adapter {key[1]})",
                "could be higher" if compared.wrong else "has collapsed",
                100 * compared.lately,
                against,
                100 * expected,
                compared.wrong or watched.cause(compared.recent) or _UNKNOWN,
            )

    def forget(self, seq_id: int) -> None:
        """A sequence has ended, or starts over."""
        for compared in self._compared.values():
            compared.added.pop(seq_id, None)
