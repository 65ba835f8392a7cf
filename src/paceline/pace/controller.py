"""How long to draft: fixed, or the length that maximises expected tokens per second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.batch import Commit
from paceline.core.sequence import SequenceState
from paceline.pace.acceptance import levels_tried
from paceline.pace.cost import Draft
from paceline.pace.ledger import SHARE
from paceline.pace.risk import HOLD, HOLD_PLAIN, Prospect, Risk


class Controller:
    """Decides how long to draft; one that does not adapt need not look at steps."""

    def lengths(self, seqs: Sequence[SequenceState]) -> list[int]:
        """Draft length (tree levels) decided on for each sequence; 0 is plain decoding."""
        raise NotImplementedError

    def observe(
        self, commits: Sequence[Commit], seconds: float, drafting: float | None = None
    ) -> None:
        """See a step's outcome, its wall time, and the part of it that drafting took (if known)."""

    def forget(self, seq_id: int) -> None:
        """A sequence is done, or begins anew."""


class FixedLength(Controller):
    """The same draft length for all sequences, always."""

    def __init__(self, length: int) -> None:
        self._length = length

    def lengths(self, seqs: Sequence[SequenceState]) -> list[int]:
        return [self._length] * len(seqs)


@dataclass
class _Settled:
    """A decision that holds for some steps, as long as the batch stays the same."""

    ids: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    draft_lengths: list[int] = field(default_factory=list)
    until: int = 0  # the step from which it is made anew
    hold: int = 1  # steps from when it was made
    made: dict[int, Draft] = field(default_factory=dict)  # what is drafted, but for teams
    probe: bool = False
    looks: list[str] = field(default_factory=list)  # teams that may look for drafts
    given: bool = False  # some requests have a length of their own: such steps are no measure

    @property
    def drafts(self) -> bool:
        return any(self.draft_lengths)


class _Seen(NamedTuple):
    """What a step that drafted, or was to, came to."""

    held: _Settled
    made: Mapping[int, Draft]
    commits: Sequence[Commit]
    seconds: float
    drafting: float | None
    looked: float = 0.0
    probe: bool = False


class AdaptiveLength(Controller):
    """Per sequence and drafter, from observed acceptance and the costs of steps on this machine.

    Predictions choose the lengths (choice.py) and the ledger decides whether a draft may be made
    (risk.py). The length depends on the past only, never on the tokens being drafted, so it cannot
    bias the output. What a sequence showed long ago fades until it is tried again.

    Requests name a drafter that the cost model knows, or one of the ``teams``: the names of its
    members. Teams (hybrid.py) ask for leave themselves once they have looked; here it is decided
    whether they look. Requests that name none have the ``default``; a request's own
    ``draft_length`` stands.
    """

    FADE = 0.95  # weight kept of what a sequence showed, with every decision not to draft

    def __init__(
        self,
        risk: Risk,
        teams: Mapping[str, Sequence[Hashable]] | None = None,
        default: str | None = None,
    ) -> None:
        self._risk, self.cost = risk, risk.cost
        self._teams = dict(teams or {})
        self._default = default or str(next(iter(self._teams or self.cost.drafters)))
        # Members that are known by what they proposed, whoever drafted.
        everyone = (name for team in self._teams.values() for name in team)
        self._followed = {name for name in everyone if self.cost.drafters[name].costless}
        self._step = 0
        self._settled = _Settled()
        self._seen: list[_Seen] = []

    # -- deciding ----------------------------------------------------------------------------------

    def lengths(self, seqs: Sequence[SequenceState]) -> list[int]:
        self._step += 1
        self._risk.begin()
        ids = [seq.seq_id for seq in seqs]
        held = self._settled
        if self._step >= held.until or ids != held.ids:
            self._learn_all()
            held = self._settled = self._settle(ids, seqs)
        return held.draft_lengths

    def _settle(self, ids: list[int], seqs: Sequence[SequenceState]) -> _Settled:
        batch, names = len(seqs), [seq.params.drafter or self._default for seq in seqs]
        given = [seq.params.draft_length for seq in seqs]
        before = self._settled
        # A new batch, or new drafts, are looked at again soon: 1, 2, 4 steps later.
        hold = min(2 * before.hold, HOLD) if before.drafts and ids == before.ids else 1
        found = _Settled(ids, names, [length or 0 for length in given], hold=hold)
        found.given = any(length is not None for length in given)
        plain = self.cost.wants_plain(batch)
        own: list[int] = []
        for place, name in enumerate(names):
            if given[place] is None and name in self._teams and not plain:
                found.draft_lengths[place] = self._bound(name, batch)
                found.looks.append(name)
            elif given[place] is None and name in self.cost.drafters:
                own.append(place)
        if found.looks and not found.drafts:
            found.hold = HOLD_PLAIN
        if own and plain:
            found.hold = 1
        elif own:
            self._choose(found, own, [seqs[place] for place in own])
        found.until = self._step + found.hold
        return found

    def _bound(self, team: str, batch: int) -> int:
        """The longest draft that a team may look for: none where no member may draft."""
        plain, members = self.cost.rest(batch), self._teams[team]
        ledger = self._risk.ledger
        if max(ledger.allowance(member, batch, plain) for member in members) <= 0:
            return 0
        return max(self.cost.drafters[member].longest for member in members)

    def _choose(
        self, found: _Settled, places: Sequence[int], seqs: Sequence[SequenceState]
    ) -> None:
        """Decide on the sequences at these places."""
        batch, none = len(found.ids), self.cost.none(len(found.ids))
        prospects: list[Prospect] = [
            (seq, [none, *self._risk.drafts(seq, found.names[place], batch)])
            for place, seq in zip(places, seqs, strict=True)
        ]
        ruling = self._risk.rule(batch, prospects)
        if ruling.hopeless:
            for place, seq in zip(places, seqs, strict=True):
                self.cost.acceptance.of(seq.seq_id, found.names[place]).fade(self.FADE)
        found.probe = ruling.probe
        drafts = any(draft.length for draft in ruling.drafts)
        hold = self._risk.hold(batch, prospects, ruling)
        found.hold = min(found.hold, hold) if drafts else hold
        for place, draft in zip(places, ruling.drafts, strict=True):
            found.draft_lengths[place] = draft.length
            if draft.length:
                found.made[found.ids[place]] = draft

    # -- learning ----------------------------------------------------------------------------------

    def observe(
        self, commits: Sequence[Commit], seconds: float, drafting: float | None = None
    ) -> None:
        held, risk = self._settled, self._risk
        if not held.drafts:
            self._observe_plain(commits, seconds)
            return
        made, probe = {**held.made, **risk.made}, held.probe or risk.probed
        self._seen.append(_Seen(held, made, commits, seconds, drafting, risk.looked, probe))
        if held.looks:  # who decides by itself learns with every step
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
        held, commits, cost = step.held, step.commits, self.cost
        batch, nodes = len(commits), sum(commit.drafted for commit in commits)
        drafted = {c.seq_id: step.made[c.seq_id] for c in commits if c.seq_id in step.made}
        passes = {
            name: cost.passes(name, [d.length for d in drafted.values() if d.name == name])
            for name in dict.fromkeys(draft.name for draft in drafted.values())
            if not held.given
        }
        tried = [commit for commit in commits if commit.drafted and commit.seq_id in drafted]
        unread = sum(self._learn(commit, drafted[commit.seq_id]) for commit in tried)
        steady = all(commit.scheduled == 1 and commit.tokens for commit in commits)
        plain = cost.rest(batch)
        self._risk.ledger.pass_by(step.seconds, plain, batch)
        names = Counter(drafted[commit.seq_id].name for commit in tried)
        for name in names:
            self._risk.tried(name, batch)
        if held.given or not steady:  # a step that prefills is no measure, either
            return
        if not names:
            self._charge_for_looking(step, passes, plain)
        even = len({commit.drafted for commit in commits}) == 1
        reads = unread > 4 * batch
        if names:
            self._book(step, names, passes, nodes / batch, even, unread if reads else 0)
        drafting = None if step.drafting is None else max(step.drafting - step.looked, 0.0)
        if not reads:
            cost.learn(batch, nodes, step.seconds - step.looked, drafting, even, passes)

    def _learn(self, commit: Commit, draft: Draft) -> int:
        """What a draft showed. Returns the tokens that the drafter had to read for it."""
        name, profile = draft.name, self.cost.drafters[draft.name]
        length = min(draft.length, profile.longest)
        self.cost.record_fill(name, commit.drafted, length)
        if name not in self._followed:
            reached = levels_tried(commit, length)
            self.cost.acceptance.record(commit.seq_id, name, reached, len(commit.path))
        end = commit.position + commit.scheduled
        unread = self._risk.unread(commit.seq_id, name, end)
        self._risk.has_read(commit.seq_id, name, end + len(commit.path))
        return unread

    def _charge_for_looking(
        self, step: _Seen, asked: Mapping[Hashable, float], plain: float
    ) -> None:
        """Something was looked for in vain.

        It is paid for by what was won before; then it may take a share of the time, and no more.
        """
        spent, batch, ledger = step.drafting or step.looked, len(step.commits), self._risk.ledger
        names = [*asked, *(n for team in set(step.held.looks) for n in self._teams[team])]
        for name in names:
            ledger.charge(name, batch, spent / len(names), plain)
        wait = int(min(spent / (SHARE * plain), HOLD_PLAIN))
        if wait > 1 and not any(ledger.won(name, batch, plain) > 0 for name in names):
            own = zip(step.held.names, step.held.draft_lengths, strict=True)
            step.held.draft_lengths = [0 if name in self._teams else n for name, n in own]
            step.held.until = max(step.held.until, self._step + wait)

    def _book(
        self,
        step: _Seen,
        names: Mapping[Hashable, int],
        passes: Mapping[Hashable, float],
        each: float,
        even: bool,
        unread: int,
    ) -> None:
        """Enter a step that drafted into the ledger; drafters read ``unread`` tokens for it."""
        batch, cost, ledger = len(step.commits), self.cost, self._risk.ledger
        took = {n: cost.drafting(n, batch, each, own, even) for n, own in passes.items()}
        foreseen, reading = cost.rest(batch, each, even) + sum(took.values()), 0.0
        if unread and len(passes) == 1:
            (name,) = passes
            reading = min(unread * cost.reading(name), step.seconds)
            if step.drafting is not None:  # all that it took beyond its passes
                reading = max(step.drafting - step.looked - took[name], 0.0)
                cost.learn_reading(name, reading, unread)
            ledger.lend(name, reading)
        tokens = {commit.seq_id: len(commit.tokens) for commit in step.commits}
        seconds = step.seconds - reading
        ledger.settle(names, tokens, seconds, cost.rest(batch), foreseen, step.probe)

    def _observe_plain(self, commits: Sequence[Commit], seconds: float) -> None:
        """Nothing was to be drafted. Such steps must cost next to nothing, as plain ones do."""
        batch = len(commits)
        self._risk.ledger.pass_by(seconds, self.cost.rest(batch), batch)
        due = self._step % 4 == 0 or self.cost.wants_plain(batch)
        if due and all(commit.scheduled == 1 for commit in commits):
            self.cost.learn(batch, 0, seconds)

    def forget(self, seq_id: int) -> None:
        self._learn_all()
        self._risk.forget(seq_id)
