"""How long to draft: fixed, or the length that maximises expected tokens per second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from paceline.core.batch import Commit
from paceline.core.sequence import SequenceState
from paceline.pace.ledger import Ledger
from paceline.pace.prices import DraftProspect, Prices
from paceline.pace.risk import HOLD, HOLD_PLAIN, Party, Risk, Ruling
from paceline.pace.steptime import StepTime
from paceline.pace.worth import AcceptanceTracker, Profile, levels_tried


class Controller(Protocol):
    def lengths(self, seqs: Sequence[SequenceState]) -> list[int]:
        """Draft length (tree levels) decided on for each sequence; 0 is plain decoding."""
        ...

    def observe(
        self, commits: Sequence[Commit], seconds: float, drafting: float | None = None
    ) -> None:
        """See a step's outcome, its wall time, and the part of it that drafting took (if known)."""
        ...

    def forget(self, seq_id: int) -> None: ...


class FixedLength:
    """The same draft length for all sequences, always."""

    def __init__(self, length: int) -> None:
        self._length = length

    def lengths(self, seqs: Sequence[SequenceState]) -> list[int]:
        return [self._length] * len(seqs)

    def observe(
        self, commits: Sequence[Commit], seconds: float, drafting: float | None = None
    ) -> None:
        pass

    def forget(self, seq_id: int) -> None:
        pass


@dataclass(frozen=True)
class Decision:
    """What the controller decided for a step, and what it expects of it.

    ``lengths`` by sequence id. ``seconds`` and ``tokens`` of the step, all sequences together;
    ``plain_seconds`` of a step without drafts, which yields a token a sequence. ``reason`` is
    "drafting pays", "plain pays" or "probe" (drafting although it does not seem to pay, to see).
    """

    lengths: dict[int, int]
    seconds: float
    tokens: float
    plain_seconds: float
    reason: str

    def __str__(self) -> str:
        batch = len(self.lengths)
        mean = sum(self.lengths.values()) / max(1, batch)
        return (
            f"{self.reason}: {batch} sequences, draft length {mean:.1f}, "
            f"{self.tokens / self.seconds:.0f} tokens/s expected, "
            f"{batch / self.plain_seconds:.0f} without drafts"
        )


@dataclass
class _Settled:
    """A decision that holds for some steps, as long as the batch stays the same."""

    ids: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    draft_lengths: list[int] = field(default_factory=list)
    until: int = 0  # the step from which it is made anew
    hold: int = 1  # steps from when it was made
    drafts: bool = False
    drafting: list[tuple[str, float]] = field(default_factory=list)  # by drafter, as measured
    probe: bool = False
    candidates: list[DraftProspect] = field(default_factory=list)
    given: bool = False  # some requests have a length of their own: such steps are no measure


class _Seen(NamedTuple):
    """What a step that drafted came to."""

    held: _Settled
    commits: Sequence[Commit]
    seconds: float
    drafting: float | None


class AdaptiveLength:
    """Per sequence and drafter, from observed acceptance and the costs of steps on this machine.

    Predictions choose the lengths: most expected tokens a second, for a batch the least mean time
    of a token among the lengths by which no request is slowed down (prices.py). The length depends
    on the past only, never on the tokens being drafted, so it cannot bias the output. Costs are
    start-up's, corrected by every step (``StepTime``).

    The ledger decides whether a draft may be made: what it risks must have been won by earlier
    drafts, measured against plain steps, or be covered by the share of time that goes into trying
    (ledger.py). What a sequence showed long ago fades until it is tried again.

    ``profiles`` by the names that requests use; those that name none have the ``default``.
    Drafters in ``bounds`` decide for themselves and get the longest length that they may risk. A
    request's own ``draft_length`` stands.
    """

    FADE = 0.95  # weight kept of what a sequence showed, with every decision not to draft
    HORIZON = 256  # tokens at most over which reading a prompt is written off

    def __init__(
        self,
        steps: StepTime,
        profiles: Mapping[str, Profile],
        bounds: Mapping[str, Profile] | None = None,
        default: str = "",
    ) -> None:
        self._steps = steps
        self._bounds = dict(bounds or {})
        self._profiles = dict(profiles)
        self._prices = Prices(steps, {**self._bounds, **self._profiles})
        self._default = default or next(iter(profiles))
        depth = max((profile.longest for profile in self._profiles.values()), default=0)
        self._acceptance = AcceptanceTracker(depth)
        self._ledger = Ledger()
        self._risk = Risk(self._prices, self._ledger, self._profiles)
        self._step = 0
        self._settled = _Settled()
        self._seen: list[_Seen] = []

    # -- deciding ----------------------------------------------------------------------------

    def lengths(self, seqs: Sequence[SequenceState]) -> list[int]:
        self._step += 1
        self._prices.tick()
        ids = [seq.seq_id for seq in seqs]
        held = self._settled
        if self._step >= held.until or ids != held.ids:
            self._learn_all()
            held = self._settled = self._settle(ids, seqs)
        return held.draft_lengths

    def _settle(self, ids: list[int], seqs: Sequence[SequenceState]) -> _Settled:
        batch = len(seqs)
        names = [seq.params.drafter or self._default for seq in seqs]
        given = [seq.params.draft_length for seq in seqs]
        bounds = {name: self._bound(name, names, batch) for name in set(names) & set(self._bounds)}
        draft_lengths = [
            bounds.get(name, 0) if length is None else length
            for name, length in zip(names, given, strict=True)
        ]
        own = [
            place
            for place, name in enumerate(names)
            if name in self._profiles and given[place] is None
        ]
        # A new batch, or new drafts, are looked at again soon: 1, 2, 4 steps later.
        before = self._settled
        same = before.drafts and ids == before.ids
        hold = min(2 * before.hold, HOLD) if same else 1
        if bounds and not any(draft_lengths) and not self._steps.wants_plain(batch):
            hold = HOLD_PLAIN
        found = _Settled(ids, names, draft_lengths, self._step + hold, hold, any(draft_lengths))
        found.given = any(length is not None for length in given)
        if own:
            self._choose(found, [seqs[place] for place in own], own)
        return found

    def _bound(self, name: str, names: Sequence[str], batch: int) -> int:
        """The longest length of a drafter that decides for itself."""
        if self._steps.wants_plain(batch):
            return 0
        return self._risk.bound(name, names.count(name), batch, self._bounds[name].longest)

    def _choose(
        self, found: _Settled, seqs: Sequence[SequenceState], places: Sequence[int]
    ) -> None:
        """Decide on the sequences at these places."""
        batch, names = len(found.ids), [found.names[place] for place in places]
        found.candidates = [self._candidate(s, name) for s, name in zip(seqs, names, strict=True)]
        if self._steps.wants_plain(batch):
            ruling = Ruling([0] * len(places), 1)
        else:
            plain = self._steps.rest(batch, 0)
            ruling = self._risk.rule(Party(batch, plain, seqs, found.candidates))
        if ruling.hopeless:
            for seq, name in zip(seqs, names, strict=True):
                self._acceptance.of(seq.seq_id, name).fade(self.FADE)
        found.probe = ruling.probe
        found.hold = min(found.hold, ruling.hold) if any(ruling.lengths) else ruling.hold
        found.until = self._step + found.hold
        for place, length in zip(places, ruling.lengths, strict=True):
            found.draft_lengths[place] = length
        for name in dict.fromkeys(names) if any(ruling.lengths) else ():
            lengths = [n for own, n in zip(names, ruling.lengths, strict=True) if own == name]
            if any(lengths):
                found.drafting.append((name, self._prices.passes(name, lengths)))
        found.drafts = any(found.draft_lengths)

    def _candidate(self, seq: SequenceState, name: str) -> DraftProspect:
        own = self._acceptance.of(seq.seq_id, name)
        lost = self._ledger.lost(seq.seq_id)
        gains = own.own_tokens() if lost else own.expected_tokens()
        safe = own.cautious_tokens()
        if seq.remaining < len(gains):  # what comes after the last token is no gain
            most = max(seq.remaining, 1)
            gains, safe = [min(g, most) for g in gains], [min(g, most) for g in safe]
        self._risk.meet(seq, name)
        unread = self._risk.unread(seq.seq_id, len(seq.tokens))
        if unread <= 8 or not self._profiles[name].reads:
            return DraftProspect(name, gains, safe=safe)
        remaining = min(max(seq.remaining, 1), self.HORIZON)
        return DraftProspect(name, gains, unread * self._prices.reading(name) / remaining, safe)

    # -- learning ----------------------------------------------------------------------------

    def observe(
        self, commits: Sequence[Commit], seconds: float, drafting: float | None = None
    ) -> None:
        held = self._settled
        if not held.drafts:
            self._observe_plain(commits, seconds)
            return
        self._seen.append(_Seen(held, commits, seconds, drafting))
        if len(held.candidates) < len(held.ids):  # who decides by itself learns with every step
            self._learn_all()

    def _learn_all(self) -> None:
        """Learn from the steps since the last decision, all at once.

        Between two forwards this code is not in the processor's caches any more: 48 microseconds
        a step measured one by one, 9 where the step before was looked at just before.
        """
        seen, self._seen = self._seen, []
        for step in seen:
            self._learn_step(step)

    def _learn_step(self, step: _Seen) -> None:
        held, commits = step.held, step.commits
        decided = dict(zip(held.ids, zip(held.names, held.draft_lengths, strict=True), strict=True))
        nodes = unread = 0
        measure, even = not held.given, True  # a step that prefills is no measure, either
        for commit in commits:
            measure = measure and commit.scheduled == 1 and bool(commit.tokens)
            even = even and commit.drafted == commits[0].drafted
            if not commit.drafted:
                continue  # no proposal: nothing was tried, and nothing was paid
            nodes += commit.drafted
            name, length = decided[commit.seq_id]
            if name in self._profiles:
                unread += self._learn(commit, name, length)
        if unread > 4 * len(commits):
            measure = False
            self._learn_reading(step, unread, nodes / len(commits))
        self._book(step, nodes, unread, measure, even)
        for name, passes in held.drafting:
            self._steps.begin(name, passes)
        seconds = step.seconds if measure else None
        self._steps.end(len(commits), nodes, seconds, step.drafting, even)

    def _book(self, step: _Seen, nodes: int, unread: int, measure: bool, even: bool) -> None:
        """Enter a step that drafted, or was to, into the ledger."""
        held, commits = step.held, step.commits
        batch = len(commits)
        plain = self._steps.rest(batch, 0)
        self._ledger.pass_by(step.seconds, plain)
        names = dict(zip(held.ids, held.names, strict=True))
        drafts = Counter(names[commit.seq_id] for commit in commits if commit.drafted)
        for name in drafts:
            self._risk.tried(name, batch)
        if held.given or any(commit.scheduled != 1 or not commit.tokens for commit in commits):
            return
        if not drafts:
            asked = {
                own for own, length in zip(held.names, held.draft_lengths, strict=True) if length
            }
            for name in asked:  # looked for something in vain
                self._ledger.charge(name, batch, (step.drafting or 0.0) / len(asked), plain)
            return
        each = nodes / batch
        foreseen = self._steps.rest(batch, each, even)
        for name, passes in held.drafting:
            foreseen += self._steps.drafting(batch, each, passes, name, even)
        reading = 0.0
        if not measure and len(held.drafting) == 1:
            ((name, passes),) = held.drafting
            reading = min(unread * self._prices.reading(name), step.seconds)
            if step.drafting is not None:  # all that it took beyond its passes
                drafting = self._steps.drafting(batch, each, passes, name, even)
                reading = max(step.drafting - drafting, 0.0)
            self._ledger.lend(name, reading)
        tokens = {commit.seq_id: len(commit.tokens) for commit in commits}
        seconds = step.seconds - reading
        self._ledger.settle(drafts, tokens, seconds, plain, foreseen, held.probe)

    def _observe_plain(self, commits: Sequence[Commit], seconds: float) -> None:
        """Nothing was to be drafted. Such steps must cost next to nothing, as plain ones do."""
        self._ledger.pass_by(seconds, self._steps.rest(len(commits), 0))
        due = self._step % 4 == 0 or self._steps.wants_plain(len(commits))
        if due and all(commit.scheduled == 1 for commit in commits):
            self._steps.end(len(commits), 0, seconds)

    def _learn(self, commit: Commit, name: str, length: int) -> int:
        """What a draft showed. Returns the tokens that the drafter had to read for it."""
        profile = self._profiles[name]
        length = min(length, profile.longest)
        self._prices.fill[name].record(commit.drafted, profile.nodes[length])
        reached = levels_tried(commit, length)
        self._acceptance.record(commit.seq_id, name, reached, len(commit.path))
        end = commit.position + commit.scheduled
        unread = self._risk.unread(commit.seq_id, end)
        self._risk.has_read(commit.seq_id, end + len(commit.path))
        return unread if profile.reads else 0

    def _learn_reading(self, step: _Seen, rows: int, nodes: float) -> None:
        """A drafter has read ``rows`` tokens besides drafting."""
        if step.drafting is not None and len(step.held.drafting) == 1:
            ((name, passes),) = step.held.drafting
            passes = self._steps.drafting(len(step.held.ids), nodes, passes, name)
            self._prices.learn_reading(name, step.drafting - passes, rows)

    def forget(self, seq_id: int) -> None:
        self._learn_all()
        self._acceptance.forget(seq_id)
        self._ledger.forget(seq_id)
        self._risk.forget(seq_id)

    # -- explaining --------------------------------------------------------------------------

    def snapshot(self) -> Decision | None:
        """The last decision and why; None before the first, or if drafters decide themselves."""
        held = self._settled
        if not held.candidates or len(held.candidates) < len(held.ids):
            return None
        batch = len(held.ids)
        pairs = zip(held.candidates, held.draft_lengths, strict=True)
        pays = "drafting pays" if held.drafts else "plain pays"
        return Decision(
            lengths=dict(zip(held.ids, held.draft_lengths, strict=True)),
            seconds=self._prices.seconds(batch, held.names, held.draft_lengths),
            tokens=sum(own.gains[length] for own, length in pairs),
            plain_seconds=self._steps.rest(batch, 0),
            reason="probe" if held.probe else pays,
        )
