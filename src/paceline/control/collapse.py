"""Acceptance that collapses without an error is seen: a running comparison by drafter and adapter.

Two figures say how often the first drafted token should be right: the card beside a head's weights
has the one, the drafter's drafts so far the other. Against each a cumulative sum (Page 1954,
Biometrika 41) weighs whether drafts are rather right as often as it says, or as after a collapse.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from math import log
from typing import NamedTuple

from paceline.core.batch import Commit
from paceline.core.sequence import SequenceState

_log = logging.getLogger("paceline")

_HISTORY, _LATELY = 1000, 50  # drafts over which its own acceptance is averaged
_KNOWN = 200  # drafts after which it has a history
_WARMEST = 1.0  # temperature above which drafts fail whatever the drafter
_REST = 8192  # tokens of the engine after which a collapsed drafter is tried again
_EXAMINED = 8  # texts at most, and the tokens that one must have
_LEAST_TOKENS = 48
_UNKNOWN = "measure this model and draft with paceline doctor --run"


class _Test(NamedTuple):
    """Whether acceptance is rather ``collapsed`` than ``healthy``, both as shares of what is
    expected. It is if the odds reach exp(``evidence``), to which no request adds more than a third:
    one odd text proves nothing."""

    healthy: float
    collapsed: float
    evidence: float

    def odds(self, expected: float, right: bool) -> float:
        """The logarithm by which a draft moves them."""
        healthy, collapsed = self.healthy * expected, self.collapsed * expected
        return log(collapsed / healthy if right else (1 - collapsed) / (1 - healthy))


# Between the two lies 0.22: healthy heads have 0.2 to 0.4 of their usual rate on translations.
_COLLAPSE = _Test(0.4, 0.1, 15.0)
_DOUBT = _Test(0.97, 0.8, 3.0)  # is examined; alone it says nothing

# What an examination found: whether the first drafted token is right, at many positions of a text,
# and what is certainly wrong; "" if nothing is.
Examination = tuple[Sequence[bool], str]
_Key = tuple[Hashable, str | None]  # a drafter's name, and an adapter's


@dataclass(frozen=True)
class Watched:
    """What is known of a drafter: the acceptance that its card states; how to examine it on a
    sequence's text; and why it may have collapsed with such a sequence ("": not known)."""

    stated: float | None = None
    examine: Callable[[SequenceState], Examination] = lambda seq: ((), "")
    cause: Callable[[SequenceState], str] = lambda seq: ""


@dataclass
class _Compared:
    """A drafter with an adapter. ``evidence`` by test and what it compares with; ``added``: to that
    by each running sequence; ``texts``: sequences on which it was examined."""

    drafts: int = 0
    usual: float = 0.0  # share of first tokens that are right, over ``_HISTORY`` drafts
    lately: float = 0.0
    texts: set[int] = field(default_factory=set)
    wrong: str = ""  # what is certainly wrong, and stays so
    evidence: dict[tuple[_Test, str], float] = field(default_factory=dict)
    added: dict[int, dict[tuple[_Test, str], float]] = field(default_factory=dict)

    def see(self, seq: SequenceState, right: bool, stated: float | None, counts: bool) -> None:
        """A draft's outcome; ``counts``: it becomes part of the history."""
        for test, what, rate in self._expected(stated, not seq.params.temperature):
            key, added = (test, what), self.added.setdefault(seq.seq_id, {})
            odds = min(test.odds(rate, right), test.evidence / 3 - added.get(key, 0.0))
            added[key] = added.get(key, 0.0) + odds
            self.evidence[key] = max(0.0, self.evidence.get(key, 0.0) + odds)
        self.drafts += 1
        self.lately += (right - self.lately) / min(self.drafts, _LATELY)
        if counts:
            self.usual += (right - self.usual) / min(self.drafts, _HISTORY)

    def _expected(self, stated: float | None, greedy: bool) -> Iterator[tuple[_Test, str, float]]:
        if stated:
            yield _COLLAPSE, "its card says", stated
        if stated and greedy:  # as drafts were for the card
            yield _DOUBT, "its card says", stated
        if self.drafts >= _KNOWN and self.usual:
            yield _COLLAPSE, "before it was", self.usual

    def shown_by(self, test: _Test) -> str:
        """Against what the test has succeeded; "" if it has not."""
        sure = (w for (t, w), odds in self.evidence.items() if t is test and odds >= test.evidence)
        return next(sure, "")

    def is_clear(self, of: _Test) -> bool:
        """Whether nothing speaks for it any more."""
        return not any(odds for (test, _), odds in self.evidence.items() if test is of)


class CollapseWatch:
    """Compares the drafters that it is told of, and warns once of each that collapses."""

    def __init__(self) -> None:
        self.drafters: dict[Hashable, Watched] = {}
        self.default: Hashable = None  # who drafts for requests that name no drafter
        self.tokens = 0
        self.collapsed: dict[_Key, int] = {}  # the token from which each is tried again
        self.warned: set[_Key] = set()
        self._compared: dict[_Key, _Compared] = {}
        self._doubted: set[_Key] = set()
        self._newest: dict[str, int] = {}  # numbers of adapters, by name

    def rests(self, name: Hashable, seq: SequenceState) -> bool:
        """Whether a drafter has collapsed and is not to be tried again yet."""
        self._renew(seq)
        return self.tokens < self.collapsed.get((name, seq.params.lora), 0)

    def _renew(self, seq: SequenceState) -> bool:
        """Forget what was seen with another adapter of this name, loaded before; False for a
        sequence that still has that one."""
        adapter = seq.adapter
        if adapter is None:
            return True
        newest = self._newest.setdefault(adapter.name, adapter.number)
        if adapter.number > newest:
            self._newest[adapter.name] = adapter.number
            for key in [key for key in self._compared if key[1] == adapter.name]:
                del self._compared[key]
                self.collapsed.pop(key, None)
                self.warned.discard(key)
                self._doubted.discard(key)
        return adapter.number >= newest

    def record(self, name: Hashable, seq: SequenceState, commit: Commit) -> None:
        """What a step showed of the drafter ``name`` (None: the one that the request names)."""
        self.tokens += len(commit.tokens)
        params = seq.params
        # Drafts of a request's own, and distributions that no drafter knows, show nothing.
        brought = seq.constraint or params.prediction or params.logits_processors
        if brought or params.temperature > _WARMEST or not self._renew(seq):
            return
        for key in tuple(self._doubted):
            if key[1] == seq.params.lora and seq.generated >= _LEAST_TOKENS:
                self._examine(key, seq)
        key = name or params.drafter or self.default, seq.params.lora
        if commit.reached and key[0] in self.drafters:
            # The first node is the likeliest token, in trees as in chains.
            self._see(key, seq, [commit.path[:1] == (0,)])

    def _see(
        self, key: _Key, seq: SequenceState, outcomes: Sequence[bool], wrong: str = ""
    ) -> None:
        watched, compared = self.drafters[key[0]], self._compared.setdefault(key, _Compared())
        for right in outcomes:
            compared.see(seq, right, watched.stated, key not in self.collapsed)
        against = compared.shown_by(_COLLAPSE) or ("its card says" if wrong else "")
        if against:
            compared.wrong = compared.wrong or wrong
            self._collapse(key, seq, against)
        elif key in self.collapsed and compared.is_clear(_COLLAPSE) and not compared.wrong:
            del self.collapsed[key]
        if against or len(compared.texts) >= _EXAMINED or compared.is_clear(_DOUBT):
            self._doubted.discard(key)
        elif compared.shown_by(_DOUBT):
            self._doubted.add(key)

    def _examine(self, key: _Key, seq: SequenceState) -> None:
        texts = self._compared[key].texts
        if seq.seq_id not in texts:
            texts.add(seq.seq_id)
            try:
                outcomes, wrong = self.drafters[key[0]].examine(seq)
            except Exception as error:  # decoding goes on whatever happens to it
                _log.warning("draft %s could not be examined: %s", key[0], error)
                outcomes, wrong = (), ""
            self._see(key, seq, outcomes, wrong)

    def _collapse(self, key: _Key, seq: SequenceState, against: str) -> None:
        watched, compared = self.drafters[key[0]], self._compared[key]
        # Half of the evidence stays: one that is tried again has to prove itself.
        compared.evidence = {k: k[0].evidence / 2 for k in compared.evidence if k[0] is _COLLAPSE}
        compared.added.clear()
        self.collapsed[key] = self.tokens + _REST
        if key not in self.warned:
            self.warned.add(key)
            expected = compared.usual if against.startswith("before") else watched.stated or 0.0
            _log.warning(
                "draft %s%s: acceptance has collapsed: %.0f%% of first tokens, %s %.0f%%; %s",
                key[0],
                "" if key[1] is None else f" (adapter {key[1]})",
                100 * compared.lately,
                against,
                100 * expected,
                compared.wrong or watched.cause(seq) or _UNKNOWN,
            )

    def forget(self, seq_id: int) -> None:
        """A sequence has ended, or starts over."""
        for compared in self._compared.values():
            compared.added.pop(seq_id, None)
